"""Each message on docs/troubleshooting.md is produced here: the situation of its heading is made, and what
vitctl says is compared.

On the page `[...]` stands for words that are left out, and `/home/me` for the folder that the commands are
typed in.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests import warm
from tests.cli.conftest import Vitctl
from tests.conftest import TINY, command, free_port
from tests.docs.conftest import PAGES, photo
from tests.matrix import few
from vitctl.engine.log import RunLog
from vitctl.errors import VitctlError
from vitctl.launch.peers import note_error, note_killed, raise_first_error
from vitctl.launch.run_folder import LOCK, LOGS
from vitctl.models.vit import VisionTransformer

PAGE = PAGES["docs/troubleshooting.md"]
ENTRIES = dict(re.findall(r"^### (.+?)\n\n```text\n(.*?)```\n", PAGE, re.M | re.S))
Situation = Callable[[Path, Vitctl, pytest.MonkeyPatch], str]
SITUATIONS: dict[str, Situation] = {}
SHORT = ("--data", "data/mine", "--steps", "4", "--set", "checkpoint.every_steps=2")


def situation(heading: str) -> Callable[[Situation], Situation]:
    """Register the function that makes the situation of a heading, and returns what vitctl printed."""

    def register(function: Situation) -> Situation:
        assert heading not in SITUATIONS
        SITUATIONS[heading] = function
        return function

    return register


def typed(heading: str, line: str) -> None:
    """Register a situation that a single command is enough for."""

    @situation(heading)
    def run(_home: Path, vitctl: Vitctl, _monkeypatch: pytest.MonkeyPatch) -> str:
        said = vitctl(*line.split())
        return said.out + said.err


typed("No such folder", "finetune --from RUN --data data/nine")
typed("Images lie in no class folder", "data shards PHOTOS/cat data/cats")
typed("A known data set is not here", "finetune --from RUN --dataset pets")
typed("A split is missing", "evaluate --from RUN --data data/mine --split val")
typed("The head has other classes", "evaluate --from RUN --dataset digits --out runs/digits")
typed("The format cannot hold the model", "export --from RUN --to timm --out runs/timm")
typed("No such recipe", "pretrain --recipe jft_b61")
typed("An unknown key", "pretrain --recipe smoke --set optimizer.learning_rate=0.001")
typed("An unknown option", "finetune --blr 1e-3")
typed("The warm-up is as long as the run", "pretrain --recipe smoke --set schedule.total_steps=20")
typed("The folder holds another run", "pretrain --recipe smoke --data data/mine --out RUN")


@situation("An image cannot be decoded")
def _(home: Path, vitctl: Vitctl, _monkeypatch: pytest.MonkeyPatch) -> str:
    (home / "PHOTOS" / "cat" / "broken.jpg").write_bytes(photo("cat", 0)[:300])
    said = vitctl("data", "shards", "PHOTOS", "data/photos")
    return said.out + said.err


@situation("A class has no image")
def _(home: Path, vitctl: Vitctl, _monkeypatch: pytest.MonkeyPatch) -> str:
    (home / "PHOTOS" / "bat").mkdir()
    said = vitctl("data", "shards", "PHOTOS", "data/photos")
    return said.out + said.err


def flip_a_bit(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@situation("A shard changed since it was written")
def _(home: Path, vitctl: Vitctl, _monkeypatch: pytest.MonkeyPatch) -> str:
    flip_a_bit(home / "data/mine/test/shard-000000.tar", 700)
    said = vitctl("evaluate", "--from", "RUN", "--data", "data/mine", "--out", "runs/score")
    return said.err


@situation("A shard is missing")
def _(home: Path, vitctl: Vitctl, _monkeypatch: pytest.MonkeyPatch) -> str:
    (home / "data/mine/train/shard-000000.tar").unlink()
    return vitctl("finetune", "--from", "RUN", "--data", "data/mine").err


@situation("Too many damaged images")
def _(home: Path, vitctl: Vitctl, _monkeypatch: pytest.MonkeyPatch) -> str:
    for number in range(16):
        (home / "PHOTOS" / "cat" / f"IMG_{number:04d}.jpg").write_bytes(photo("cat", number)[:300])
    assert vitctl("data", "shards", "PHOTOS", "data/photos", "--bad", "keep", "--workers", "0").code == 0
    return vitctl("finetune", "--from", "RUN", "--data", "data/photos", "--out", "runs/photos").err


@situation("No run to take weights from")
def _(home: Path, vitctl: Vitctl, _monkeypatch: pytest.MonkeyPatch) -> str:
    shutil.rmtree(home / "runs")
    return vitctl("evaluate", "--data", "data/mine").err


@situation("The weights have an unknown format")
def _(home: Path, vitctl: Vitctl, _monkeypatch: pytest.MonkeyPatch) -> str:
    save_file({"a": torch.zeros(3)}, home / "odd.safetensors")
    return vitctl("evaluate", "--from", "odd.safetensors", "--data", "data/mine").err


@situation("A checkpoint is damaged")
def _(home: Path, vitctl: Vitctl, _monkeypatch: pytest.MonkeyPatch) -> str:
    flip_a_bit(home / "RUN/checkpoints/step_00000020/ema.safetensors", -10)
    return vitctl("evaluate", "--from", "RUN", "--data", "data/mine").err


@situation("Another process runs in this folder")
def _(home: Path, vitctl: Vitctl, _monkeypatch: pytest.MonkeyPatch) -> str:
    hold = (
        f"import fcntl, sys; f = open({str(home / 'RUN' / LOCK)!r}, 'a'); fcntl.lockf(f, fcntl.LOCK_EX); "
        "print(); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        try:
            return vitctl("resume", "RUN").err
        finally:
            other.communicate()


@situation("Stopped and saved")
def _(_home: Path, vitctl: Vitctl, monkeypatch: pytest.MonkeyPatch) -> str:
    """Ctrl-C, right after the second step."""
    log = RunLog.add

    def log_and_press(self: RunLog, step: int, *rest: object, **named: object) -> None:
        log(self, step, *rest, **named)  # type: ignore[arg-type]
        if step == 2:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(RunLog, "add", log_and_press)
    return vitctl("finetune", "--from", "RUN", *SHORT, "--out", "runs/stopped").err


@situation("Updates are not finite")
def _(_home: Path, vitctl: Vitctl, _monkeypatch: pytest.MonkeyPatch) -> str:
    extreme = ("--set", "optimizer.lr=1e30", "--out", "runs/nan")
    return vitctl("pretrain", "--recipe", TINY, "--data", "data/mine", *extreme).err


@situation("Not enough memory")
def _(_home: Path, vitctl: Vitctl, monkeypatch: pytest.MonkeyPatch) -> str:
    """What torch raises on a GPU, in the first forward pass."""

    def full(_self: object, _images: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(VisionTransformer, "forward", full)
    return vitctl("finetune", "--from", "RUN", *SHORT, "--out", "runs/large").err


typed(
    "The server of the images is away",
    "finetune --from RUN --data http://127.0.0.1:9/set --set data.patience=0",  # where nobody listens
)


@situation("Not all processes have joined")
def _(home: Path, _vitctl: Vitctl, _monkeypatch: pytest.MonkeyPatch) -> str:
    """The first of two; the other never comes."""
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    env = {**os.environ, **place, "MASTER_PORT": str(free_port())}
    line = command(home / "runs" / "two", home / "data/mine", **{"machine.start_timeout": 1.0})
    return warm.run(line, env=env, capture_output=True, text=True, timeout=240).stderr


def noted(home: Path, name: str, note: Callable[[Path], None]) -> str:
    """What the process says that reports to the user, of a note that another one left."""
    (home / "runs" / name / LOGS).mkdir(parents=True)
    note(Path("runs") / name)
    with pytest.raises(VitctlError) as caught:
        raise_first_error(Path("runs") / name, 8)
    return f"vitctl: {caught.value}\n"


@situation("A process was killed")
def _(home: Path, _vitctl: Vitctl, _monkeypatch: pytest.MonkeyPatch) -> str:
    return noted(home, "killed", lambda folder: note_killed(folder, 3, "SIGKILL"))


@situation("A process waited too long for another")
def _(home: Path, _vitctl: Vitctl, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("RANK", "1")
    late = RuntimeError("Timed out waiting 600000ms for recv operation")
    return noted(home, "waited", lambda folder: note_error(folder, late)).replace("/rank_01.txt", "")


@situation("The disk is full")
def _(home: Path, _vitctl: Vitctl, _monkeypatch: pytest.MonkeyPatch) -> str:
    """The device that is always full."""
    line = f"{sys.executable} -m vitctl recipes show smoke > /dev/full"
    return subprocess.run(line, shell=True, cwd=home, capture_output=True, text=True, check=False).stderr


@situation("No better than always predicting the majority class")
def _(_home: Path, vitctl: Vitctl, monkeypatch: pytest.MonkeyPatch) -> str:
    """A network that always predicts the first class: what a short training reaches varies by processor."""

    def first_class(_self: object, images: torch.Tensor) -> torch.Tensor:
        return -torch.arange(6.0).repeat(len(images), 1)

    monkeypatch.setattr(VisionTransformer, "forward", first_class)
    said = vitctl("evaluate", "--from", "RUN", "--data", "data/mine", "--out", "runs/score")
    return said.out + said.err


@situation("Two results must not be compared")
def _(_home: Path, vitctl: Vitctl, _monkeypatch: pytest.MonkeyPatch) -> str:
    assert (
        vitctl("evaluate", "--from", "RUN", "--data", "data/mine", "--split", "train", "--out", "runs/c").code
        == 0
    )
    said = vitctl("compare", "runs/a", "runs/c")
    return said.out + said.err


typed("Verify: not checked", "verify RUN --data data/gone")


@situation("Verify: something differs")
def _(home: Path, vitctl: Vitctl, _monkeypatch: pytest.MonkeyPatch) -> str:
    edits = (("log.jsonl", '"time": 1', '"time": 2'), ("recipe.toml", "seed = 0", "seed = 7"))
    for name, old, new in (*edits, ("result.json", '"total": 2', '"total": 3')):
        path = home / "RUN" / name
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new, 1))
    return vitctl("verify", "RUN").out


@situation("A checkpoint or a result of another run")
def _(home: Path, vitctl: Vitctl, _monkeypatch: pytest.MonkeyPatch) -> str:
    *_, last = sorted((home / "RUN" / "checkpoints").iterdir())
    renamed = last.rename(last.with_name("step_best"))
    said = vitctl("predict", "PHOTOS", "--from", "RUN").err
    renamed.rename(last)
    shutil.copyfile(home / "runs" / "a" / "result.json", home / "RUN" / "result.json")
    return said + vitctl("predict", "PHOTOS", "--from", "RUN").err


def pattern(quoted: str) -> str:
    """A regular expression for what a page quotes, whatever the line breaks."""
    parts = [re.escape(" ".join(part.split())) for part in quoted.split("[...]")]
    return r".*?".join(parts)


COSTLY = {  # each trains, or starts a process
    "Not all processes have joined",
    "The head has other classes",
    "Updates are not finite",
    "Too many damaged images",
    "Two results must not be compared",
    "The disk is full",
    "Stopped and saved",
    "Not enough memory",
}


def test_headings__are_the_situations() -> None:
    headings = re.findall(r"^### (.+)$", PAGE, re.M)
    assert headings == [*ENTRIES]
    assert {*headings} == {*SITUATIONS}


@pytest.mark.parametrize("heading", few([*SITUATIONS], *({*SITUATIONS} - COSTLY)))
def test_message__is_what_vitctl_says(
    heading: str, home: Path, vitctl: Vitctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = SITUATIONS[heading](home, vitctl, monkeypatch).replace(str(home), "/home/me")
    for quoted in re.split(r"\n\n", ENTRIES[heading]):
        assert re.search(pattern(quoted), " ".join(said.split())), said


def test_pattern__a_wrong_word_does_not_match() -> None:
    assert re.search(pattern("a b\n  [...] d"), "a b c d")
    assert not re.search(pattern("a b [...] e"), "a b c d")
    assert not re.search(pattern("a.b"), "a b")
