"""A signal at any moment of any command: code 3, one line, and what was begun resumes as if nothing had
happened.

Signals come from within, right before the n-th call of a function, so that they hit the same moment every
time. tests/launch/test_launcher.py sends them from outside, to one process or to several.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from tests import warm
from tests.conftest import TINY, checkpoint, paced, step_images, train_records
from tests.faults.conftest import ENVIRONMENT, assert_same, command, resume
from tests.matrix import few, slow
from tests.trained import pretrained  # noqa: F401
from vitctl.cli.app import main
from vitctl.data.datasets.readers import shapes
from vitctl.data.inspect import check_shards, duplicates
from vitctl.data.source import splits
from vitctl.data.writer import shard_writer
from vitctl.engine import agreement, assemble, evaluation, log, state, trainer, update
from vitctl.engine import checkpoint as checkpoints
from vitctl.engine.preemption import stop_on_signals
from vitctl.export import export as exporting
from vitctl.jobs import fewshot, pretrain, training
from vitctl.system.process import SIGNALS

CPU = ("--set", "machine.device=cpu", "--set", "machine.workers=0", "--set", "machine.precision=float64")
FEW = ("--set", "schedule.warmup_steps=1", "--set", "schedule.batch_size=8")
TERM, USR1, INT = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT

Vitctl = Callable[..., tuple[int, str]]
Hit = Callable[[ModuleType | type, str, int, signal.Signals], None]
Moment = tuple[ModuleType | type, str, int]


@pytest.fixture
def vitctl(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Vitctl]:
    """vitctl("pretrain", ...) in this process: its exit code, and what it said on standard error."""
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def run(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["vitctl", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        assert isinstance(caught.value.code, int)
        return caught.value.code, capfd.readouterr().err

    yield run
    assert {number: signal.getsignal(number) for number in SIGNALS} == before


@pytest.fixture
def hit() -> Iterator[Hit]:
    """hit(module, "function", 2, SIGTERM): the signal comes right before the second call from now on, and
    only then.
    """
    armed: list[str] = []
    with pytest.MonkeyPatch.context() as patch:

        def arm(owner: ModuleType | type, name: str, call: int, number: signal.Signals) -> None:
            real, calls = getattr(owner, name), count(1)
            armed.append(name)

            def called(*given: Any, **named: Any) -> Any:
                if next(calls) == call:
                    armed.remove(name)
                    os.kill(os.getpid(), number)
                return real(*given, **named)

            patch.setattr(owner, name, called)

        yield arm
    assert not armed, "the moment never came"


def announced(number: signal.Signals) -> str:
    return (
        f"vitctl: {number.name}: stopping as soon as the work so far is safe; a second signal stops at once\n"
    )


def status(folder: Path) -> str:
    return str(json.loads((folder / "result.json").read_text())["status"])


def numbers_of(folder: Path) -> dict[str, list[tuple[Any, ...]]]:
    """The numbers of each step in the log, the scores and the few-shot accuracies."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {
        "train": [(r["step"], r["loss"], r["lr"], r["grad_norm"]) for r in train_records(folder)],
        "evaluate": [(r["step"], r["correct"], r["total"]) for r in lines if r["kind"] == "evaluate"],
        "fewshot": [(r["step"], r["shots"], *r["seeds"]) for r in lines if r["kind"] == "fewshot"],
    }


def pretraining(data: Path) -> tuple[object, ...]:
    """A pre-training with a warm-up, evaluations, a few-shot probe and averages."""
    sets = {
        "machine.compile": "true",
        "schedule.total_steps": 9,
        "evaluation.every_steps": 4,
        "checkpoint.every_steps": 3,
        "fewshot_probe.path": data,
        "fewshot_probe.every_steps": 5,
        "fewshot_probe.shots": "[1,2]",
        "fewshot_probe.seeds": "[0,1]",
    }
    given = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    return ("pretrain", "--recipe", TINY, "--data", data, *given)


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What machine.compile does around the compiler stays; the compiler itself is slow, see test_kills.py."""
    monkeypatch.setattr(assemble, "compile_blocks", lambda *_, **__: 0)
    monkeypatch.setattr(assemble, "compile_loss", lambda _, loss, **__: loss)


@pytest.fixture(scope="module")
def without_signal(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same pre-training without a signal."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "compile_blocks", lambda *_, **__: 0)
        patch.setattr(assemble, "compile_loss", lambda _, loss, **__: loss)
        patch.setattr(sys, "argv", ["vitctl", *map(str, pretraining(tiny_data)), "--out", str(folder)])
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 0
    return folder


MOMENTS: dict[str, tuple[Moment, signal.Signals]] = {
    "start-up, data": ((pretrain, "training_notes", 1), TERM),
    "start-up, model": ((pretrain, "build", 1), INT),
    "start-up, folder": ((agreement, "newest_checkpoint", 1), USR1),
    "compile": ((update.TrainStep, "warm_up", 1), USR1),
    "compiled": ((trainer.Trainer, "run_steps", 1), TERM),
    "training": ((update.TrainStep, "_apply", 5), signal.SIGHUP),
    "the last step": ((update.TrainStep, "_apply", 9), INT),
    "log": ((log.RunLog, "_log_step", 2), TERM),
    "evaluation": ((evaluation, "count_hits", 1), TERM),
    "the last evaluation": ((evaluation, "count_hits", 2), USR1),
    "few-shot features": ((training, "representations", 2), INT),
    "few-shot solve": ((pretrain, "score_draw", 2), TERM),
    "the last few-shot": ((pretrain, "score_draw", 6), USR1),
    "saving, copy": ((state, "parts", 2), INT),
    "saving, weights": ((checkpoints, "save_tensors", 4), TERM),
    "saving, state": ((checkpoints, "write_run_json", 2), INT),
    "saving, deleting old ones": ((checkpoints, "remove_folders", 5), TERM),
}


@pytest.mark.parametrize(("moment", "number"), few(MOMENTS, "training", "saving, weights"))
def test_pretrain__resumes_bit_for_bit(
    vitctl: Vitctl,
    hit: Hit,
    without_signal: Path,
    tiny_data: Path,
    tmp_path: Path,
    moment: Moment,
    number: signal.Signals,
) -> None:
    folder = tmp_path / "a"
    hit(*moment, number)
    code, said = vitctl(*pretraining(tiny_data), "--out", folder)
    assert (code, said) == (
        3,
        f"{announced(number)}stopped and saved in {folder}; resume with: vitctl resume {folder}\n",
    )
    assert status(folder) == "stopped"
    saved, problems = checkpoints.newest_checkpoint(folder / "checkpoints")
    assert saved is not None and problems == []
    steps = [step for step, *_ in numbers_of(folder)["train"]]
    assert steps == list(range(1, saved.step + 1))  # no finished step is lost

    if number == signal.SIGHUP:
        hit(state, "load_optimizer_tensors", 1, TERM)  # and once more while it starts again
        assert vitctl("resume", folder)[0] == 3
    assert vitctl("resume", folder)[0] == 0
    assert numbers_of(folder) == numbers_of(without_signal)
    assert step_images(folder) == step_images(without_signal)
    assert checkpoint(folder, 9) == checkpoint(without_signal, 9)
    assert set(checkpoint(folder, 9)) == {"model.safetensors", "ema.safetensors", "optimizer.safetensors"}


# A table of VTAB that is stopped in its trainings: tests/jobs/test_vtab_resume.py.
JOBS: dict[str, tuple[tuple[str, ...], Moment, signal.Signals]] = {
    "evaluate": (("evaluate", "--set", "evaluation.batch_size=5"), (evaluation, "stop_together", 3), INT),
    "fewshot, features": (("fewshot", "--shots", "1,2"), (training, "representations", 2), TERM),
    "fewshot, solve": (("fewshot", "--shots", "1,2"), (fewshot, "score_draw", 2), USR1),
    "finetune": (("finetune", "--steps", "4", *FEW), (update.TrainStep, "_apply", 3), INT),
}


@pytest.mark.parametrize(("job", "moment", "number"), few(JOBS, "fewshot, features", "finetune"))
def test_job__resumes_to_the_same_result(
    vitctl: Vitctl,
    hit: Hit,
    pretrained: Path,  # noqa: F811
    tiny_data: Path,
    tmp_path: Path,
    job: tuple[str, ...],
    moment: Moment,
    number: signal.Signals,
) -> None:
    data = () if job[0] == "vtab" else ("--data", tiny_data)
    line = (*job, *CPU, "--from", pretrained, *data)
    straight, folder = (
        tmp_path / "straight",
        tmp_path / "there" / "a",
    )  # cached features are not shared
    assert vitctl(*line, "--out", straight)[0] == 0
    hit(*moment, number)
    code, said = vitctl(*line, "--out", folder)
    kept = {
        "fewshot": "; features of finished passes over the data are kept if the cache holds them",
        "evaluate": "; scoring starts again",
    }
    how = kept.get(job[0], f" and saved in {folder}")
    assert (code, said) == (3, f"{announced(number)}stopped{how}; resume with: vitctl resume {folder}\n")
    assert status(folder) == "stopped"
    assert vitctl("resume", folder)[0] == 0
    metrics = [json.loads((path / "result.json").read_text())["metrics"] for path in (folder, straight)]
    assert metrics[0] == metrics[1]


def test_export__keeps_what_is_verified(
    vitctl: Vitctl,
    hit: Hit,
    pretrained: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    folder = tmp_path / "a"
    hit(exporting, "agree", 1, TERM)
    code, said = vitctl(
        "export", "--from", pretrained, "--to", "onnx", "--to", "safetensors", "--out", folder
    )
    assert (code, said[: len(announced(TERM))]) == (3, announced(TERM))
    weights = folder / "model.onnx", folder / "model.safetensors"
    assert [path.exists() for path in weights] == [True, False]
    assert vitctl("resume", folder)[0] == 0
    assert [path.exists() for path in weights] == [True, True]
    assert not [path for path in folder.iterdir() if "partial" in path.name]


SHARDS: tuple[tuple[str, ...], Moment] = (
    ("shards", "photos", "out", "--workers", "0"),
    (shard_writer, "escape_key", 30),
)
DEDUP = ("dedup", "own", "--against", "other", "--apply", "--workers", "0")
DATA: dict[str, tuple[tuple[str, ...], Moment, signal.Signals]] = {
    "shards": (*SHARDS, TERM),
    "check": (("check", "own", "--workers", "0"), (check_shards, "image_digest", 3), TERM),
    "dedup": (DEDUP, (duplicates, "find_matches", 1), USR1),
    "dedup, pictures": (DEDUP, (duplicates, "_pair", 2), INT),
    "dedup, list": (DEDUP, (splits.json, "dumps", 1), TERM),
}


@pytest.mark.parametrize(("line", "moment", "number"), few(DATA, "shards"))
def test_data__ends_at_once_and_leaves_nothing_half_written(
    vitctl: Vitctl,
    hit: Hit,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    line: tuple[str, ...],
    moment: Moment,
    number: signal.Signals,
) -> None:
    straight, folder = pictures(tmp_path / "straight"), pictures(tmp_path / "a")
    monkeypatch.chdir(straight)
    assert vitctl("data", *line)[0] == 0
    monkeypatch.chdir(folder)
    before = visible(folder)
    hit(*moment, number)
    assert vitctl("data", *line) == (3, "vitctl: stopped\n")
    assert before.items() <= visible(folder).items() <= visible(straight).items()
    assert not list(folder.rglob(splits.FILE))
    assert vitctl("data", *line) == (0, "")
    again = {path: data for path, data in visible(folder).items() if "train-dedup-2" not in path.parts}
    assert again == visible(straight)  # a complete report stays


def pictures(root: Path) -> Path:
    """Forty pictures in class folders, and shards of twenty, five of which are in a test set, too."""
    items = shapes.items("shape", "train", 40, seed=0, image_size=16)
    for item in items:
        path = root / "photos" / "train" / shapes.SHAPES[item.label] / f"{item.key}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(item.read())
    for name, chosen in (("own/train", items[:20]), ("other/test", items[15:30])):
        shard_writer.write_split(chosen, root / name, shapes.SHAPES, seed=0, source_text="test")
    return root


def visible(root: Path) -> dict[Path, bytes]:
    """The files that a person sees, by name."""
    paths = {path: path.relative_to(root) for path in root.rglob("*") if path.is_file()}
    return {
        name: path.read_bytes()
        for path, name in paths.items()
        if not any(p.startswith(".") for p in name.parts)
    }


def import_then(owner: str, name: str) -> str:
    """The code of a command that says so, and waits, when it reaches a function or the import of a module."""
    if not name:
        return (
            "import sys, time\nfrom vitctl.__main__ import main\n"
            "class Slow:\n    def find_spec(self, name, *_):\n"
            f"        if name == '{owner}':\n            print('reached', flush=True)\n"
            "            time.sleep(600)\n"
            "sys.meta_path.insert(0, Slow())\nmain()\n"
        )
    return (
        f"import time, {owner} as owner\n"
        "def reached(*_):\n    print('reached', flush=True)\n    time.sleep(600)\n"
        f"start = owner.{name}\n"
        f"owner.{name} = lambda *given: (start(*given), reached())\n"
        "from vitctl.cli.app import main\nmain()\n"
    )


@pytest.mark.parametrize("number", [TERM, *slow(INT, signal.SIGHUP, signal.SIGXCPU)])
@pytest.mark.parametrize(
    ("owner", "name"), [("vitctl.cli.app", ""), ("vitctl.cli.run_job", "start_command")], ids=["app", "job"]
)
def test_command__while_it_is_still_being_imported(
    tiny_data: Path, tmp_path: Path, owner: str, name: str, number: signal.Signals
) -> None:
    line = [sys.executable, "-c", import_then(owner, name), *command(tmp_path / "a", tiny_data)[3:]]
    start = warm.Popen if name else subprocess.Popen  # the first has imported the module already
    with start(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "reached\n"
        process.send_signal(number)
        _, text = process.communicate(timeout=60)
    assert (process.returncode, text) == (3, "vitctl: stopped\n")


NEW = (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2, signal.SIGXCPU, signal.SIGALRM, signal.SIGVTALRM)


@pytest.fixture(autouse=True)
def signals_have_effect() -> Iterator[None]:
    """A signal that was ignored by what started the tests would be ignored here."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in NEW}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_signal__each_sets_the_flag(number: signal.Signals) -> None:
    with stop_on_signals() as flag:
        os.kill(os.getpid(), number)
        assert (flag.raised, flag.signal) == (True, number)


def output_of(code: str, **given: Any) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, **given)
    return done.returncode, done.stdout


def test_signals__of_the_system_repeat_and_never_cut_a_save_short() -> None:
    """A shell sends SIGHUP a second time, the kernel SIGXCPU every second; a SIGTERM among them is the first
    request to stop.
    """
    code = (
        "import os, signal, time\nfrom vitctl.engine.preemption import stop_on_signals\n"
        "with stop_on_signals() as flag:\n"
        "    for number in (1, 1, 24, 24, 14, 15, 1):\n        os.kill(os.getpid(), number)\n        "
        "time.sleep(0.05)\n"
        "    print(flag.signal.name, flush=True)\n"
        "    os.kill(os.getpid(), 15)\n    time.sleep(60)\n"
    )
    assert output_of(code) == (3, "SIGHUP\n")


def test_nohup__what_was_ignored_stays_ignored() -> None:
    code = (
        "import os, signal\nfrom vitctl.engine.preemption import interrupt_on_signals, exit_on_signals, "
        "stop_on_signals\n"
        "exit_on_signals()\nos.kill(os.getpid(), 1)\n"
        "with interrupt_on_signals():\n    os.kill(os.getpid(), 1)\n"
        "with stop_on_signals() as flag:\n    os.kill(os.getpid(), 1)\n    print(flag.raised)\n"
    )

    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    assert output_of(code, preexec_fn=ignore) == (0, "False\n")


@pytest.mark.slow
def test_signal__to_the_whole_group_does_not_kill_loader_workers(
    tiny_data: Path, straight: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    line = paced(command(folder, tiny_data, **{"machine.workers": 2}))
    with warm.Popen(
        line, stdout=subprocess.PIPE, text=True, start_new_session=True, env=ENVIRONMENT
    ) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("step 2/"):
            assert process.poll() is None
        family = psutil.Process(process.pid).children(recursive=True)
        for number in (signal.SIGQUIT, signal.SIGHUP):
            os.killpg(process.pid, number)
        process.communicate(timeout=60)
    assert process.returncode == 3
    assert psutil.wait_procs(family, timeout=60)[1] == []
    resume(folder)
    assert_same(folder, straight)
