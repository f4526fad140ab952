"""`vitctl bench` as typed: what is printed and written, and errors of one line."""

import errno
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from tests.cli.conftest import Vitctl, words
from tests.conftest import TINY
from tests.matrix import each
from vitctl.cli.show import measurements as show
from vitctl.cli.show.measurements import BenchOptions, chosen_recipe
from vitctl.errors import RecipeError

QUICK = ("--seconds", 1)


@pytest.mark.slow
def test_model__prints_the_split_and_writes_the_numbers(vitctl: Vitctl, tiny_data: Path) -> None:
    said = vitctl("bench", "model", "--recipe", TINY, "--data", tiny_data, *QUICK, "--json", "out/bench.json")
    assert said.code == 0
    assert max(map(len, said.out.partition("note:")[0].splitlines()[1:20])) <= 120
    numbers = json.loads(Path("out/bench.json").read_text())
    assert (numbers["recipe"], numbers["seconds_asked"], numbers["set"]) == (str(TINY), 1.0, [])
    for part in ("data", "forward", "backward", "optimizer", "log"):
        assert any(line.startswith(part) for line in said.out.splitlines()), part
    assert not Path("runs").exists()


@pytest.mark.slow
def test_model__of_a_finetuning_takes_its_weights_and_its_classes(
    vitctl: Vitctl, tiny_data: Path, one_process: Path
) -> None:
    weights = load_file(one_process / "checkpoints" / "step_00000020" / "model.safetensors")
    kept = sum(tensor.numel() for name, tensor in weights.items() if not name.startswith("pre_logits"))
    line = tuple(
        f"--recipe finetune --data {tiny_data} --set weights.source={one_process} "
        "--batch-size 16 --res 16".split()
    )
    said = vitctl("bench", "model", *line, *QUICK, "--json", "f.json")
    assert (said.code, "finetune" in said.out) == (0, True), said.err
    numbers = json.loads(Path("f.json").read_text())
    assert (numbers["batch_size"], numbers["parameters"]) == (16, kept)


@pytest.mark.slow
def test_data__prints_the_loader(vitctl: Vitctl, tiny_data: Path) -> None:
    said = vitctl(
        *f"bench data --recipe {TINY} --data {tiny_data}".split(),
        *QUICK,
        *words("--workers 0 --json d.json"),
    )
    assert (said.code, said.err) == (0, "")
    numbers = json.loads(Path("d.json").read_text())
    assert numbers["workers"] == 0 and "images/s with 0 workers" in said.out


@pytest.mark.slow
def test_resolutions__draws_and_writes_both_files(vitctl: Vitctl) -> None:
    said = vitctl("bench", "model", "Ti/32", "--resolutions", "32,64", *QUICK, "--plot", "pictures/fig12.png")
    assert said.code == 0
    assert Path("pictures/fig12.png").read_bytes().startswith(b"\x89PNG")
    cells = json.loads(Path("pictures/fig12.json").read_text())["cells"]
    assert [(cell["model"], cell["image_size"]) for cell in cells] == [("Ti/32", 32), ("Ti/32", 64)]
    assert "plot: pictures/fig12.png" in said.out


@each(
    ("line", "message"),
    [
        ("model X/16", "unknown model 'X/16'"),
        ("model B/16 B/32", "for several, give --resolutions"),
        ("model --resolutions 512..64", "--resolutions 512..64: should be a range of sizes"),
        ("model --plot a.png", "needs --resolutions"),
        ("model --resolutions 64 --recipe smoke", "--recipe: --resolutions takes model names"),
        ("model --resolutions 64 --res 32", "--res: --resolutions takes model names"),
        ("model --resolutions 64 --plot a.jpg", "should be the name of a .png or .svg file"),
        ("model --resolutions 64 --plot /dev/null/a.png", "cannot write into the folder /dev/null"),
        ("model --resolutions 64 --plot .png/a.png --json .", "should be the name of a .json file"),
        ("model --recipe evaluate", "bench needs a recipe of pretrain or finetune"),
        ("model S/16 --json a.txt", "should be the name of a .json file"),
        ("model S/16 --json /dev/null/a.json", "cannot write into the folder /dev/null"),
        ("model S/16 --json /proc/a.json", "cannot write into the folder /proc"),
        ("model --recipe smoke S/16", "S/16: a name alone is a plain network; leave out --recipe"),
        ("model S/16 --batch-size 1000000000000", "--batch-size 1000000000000: "),
        ("model S/16 --set model.fnord=1", "--set model.fnord"),
        ("model --recipe smoke --data nowhere", "nowhere"),
        ("data --recipe smoke --synthetic", "no such option"),
        ("data", "imagenet: expected shards"),
    ],
)
def test_errors__are_one_line(vitctl: Vitctl, line: str, message: str) -> None:
    said = vitctl("bench", *line.split(), *QUICK)
    assert said.code == 2
    assert message in said.err
    assert "Traceback" not in said.err


def test_model__a_name_alone_is_a_plain_network_of_the_default_recipe() -> None:
    options = BenchOptions(("R50x1",), None, 1.0, None, ("model.version=v2", "optimizer.name=sgd"))
    recipe: Any = chosen_recipe(options, {})[0]
    assert (recipe.model.name, recipe.model.version, recipe.model.dropout) == ("R50x1", "v2", None)
    assert (recipe.optimizer.name, recipe.schedule.batch_size) == ("sgd", 4096)
    with pytest.raises(RecipeError):
        chosen_recipe(BenchOptions(("S/16",), None, 1.0, None, ("model.fnord=1",)), {})


def test_target__a_folder_is_refused_before_anything_is_measured(vitctl: Vitctl) -> None:
    Path("a.png").mkdir()
    Path("b.json").mkdir()
    for line in (
        "model Ti/32 --resolutions 32 --plot a.png",
        "model Ti/32 --resolutions 32 --plot b.png",
        "data --json b.json",
    ):
        said = vitctl("bench", *line.split(), *QUICK)
        assert (said.code, said.err.partition(": ")[2].partition(", ")[2]) == (2, "should be a file\n")


@pytest.mark.slow
def test_files__are_written_though_nothing_can_be_printed(
    vitctl: Vitctl, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that closes the pipe, as `| head -1` does, ends the command at its first line."""

    def closed(*_: Any, **__: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(show, "show_table", closed)
    step = ("--recipe", TINY, "--data", tiny_data, *QUICK)
    vitctl("bench", "model", *step, "--json", "m.json")
    vitctl("bench", "data", *step, "--json", "d.json")
    vitctl("bench", "model", "Ti/32", "--resolutions", 32, *QUICK, "--plot", "p.png")
    assert all(Path(name).stat().st_size for name in ("m.json", "d.json", "p.json", "p.png"))


@pytest.mark.slow
def test_files__that_cannot_be_written_lose_no_measurement(
    vitctl: Vitctl, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(show, "write_json", full)
    step = ("--recipe", TINY, "--data", tiny_data, *QUICK)
    for line in (
        ("model", *step, "--json", "m.json"),
        ("data", *step, "--json", "d.json"),
        ("model", "Ti/32", "--resolutions", 32, *QUICK, "--plot", "p.png"),
    ):
        said = vitctl("bench", *line)
        assert said.code == 2 and "no space left on device" in said.err
        assert "images/s" in said.out


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_processes__end_with_a_signal_to_the_command(
    tiny_data: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """To the command alone, as `kill` and `timeout` send it: the processes stop, keep what they have, and
    none is left.
    """
    line = (
        f"--recipe {TINY} --data {tiny_data} --seconds 300 --processes 2 --json {tmp_path / 'a.json'}".split()
    )
    command = [sys.executable, "-m", "vitctl", "bench", "model", *map(str, line)]
    log = tmp_path / "log"
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file, cwd=tmp_path) as started:
        for _ in range(1200):
            if "measuring:" in log.read_text():
                break
            time.sleep(0.1)
        own = psutil.Process(started.pid).children(recursive=True)
        assert len(own) >= 3  # accelerate's agent and two processes
        started.send_signal(number)
        code = started.wait(timeout=120)
    assert code == (-number if number == signal.SIGKILL else 3), log.read_text()
    assert not psutil.wait_procs(own, timeout=20)[1]
    if number != signal.SIGKILL:
        assert json.loads((tmp_path / "a.json").read_text())["stopped"] is True
        assert "Traceback" not in log.read_text()


@pytest.mark.slow
def test_ctrl_c__keeps_what_was_measured(tiny_data: Path, tmp_path: Path) -> None:
    """The signal comes while steps are measured; the numbers so far are printed and written, and the exit
    code is 3.
    """
    code = (
        "import os, signal, sys, vitctl.bench.timed_steps as t\n"
        "real = t._is_over\n"
        "def is_over(prepared, budget):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    t._is_over = real\n"
        "    return False\n"
        "t._is_over = is_over\n"
        "from vitctl.cli.app import main\n"
        "main()\n"
    )
    line = (
        f"bench model --recipe {TINY} --data {tiny_data} --seconds 1e6 --json {tmp_path / 'a.json'}".split()
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, line)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
    )
    assert done.returncode == 3, done.stderr
    assert "stopped early: what was measured until then is above" in done.stdout
    numbers = json.loads((tmp_path / "a.json").read_text())
    assert numbers["stopped"] is True
    assert numbers["images_per_second"] > 0


@pytest.mark.slow
def test_processes__exchange_is_a_part_of_the_step(tiny_data: Path, tmp_path: Path) -> None:
    """Two processes: the parts, with what the exchange of gradients costs, still add up to the step."""
    line = (
        f"bench model --recipe {TINY} --data {tiny_data} --seconds 2 --processes 2 --json "
        f"{tmp_path / 'a.json'}"
    ).split()
    command = [sys.executable, "-m", "vitctl", *map(str, line)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    numbers = json.loads((tmp_path / "a.json").read_text())
    assert (numbers["processes"], numbers["micro_batch"]) == (2, 8)
    assert numbers["split"]["exchange"] >= 0
    assert sum(numbers["split"].values()) == pytest.approx(numbers["seconds"])
    assert numbers["largest_micro_batch"] is None
