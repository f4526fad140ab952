"""The main process of a run in several processes only starts them: 512 of them share a file server."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import TINY

MOST = 10_000
PREPARED = """
import sys
from pathlib import Path
import vitctl.launch.launcher
from vitctl.launch.prepare_run import prepare_run
from vitctl.launch.run_folder import locked_for_run
from vitctl.recipe.load import Override, load_recipe
values = {"data.path": sys.argv[2], "machine.processes": 2}
prepare_run(load_recipe(sys.argv[1], [Override(*one) for one in values.items()]), Path("run"))
with locked_for_run(Path("run")):
    print([name for name in ("torch", "accelerate", "torchvision") if name in sys.modules])
"""


def test_main_process__imports_no_torch_to_prepare_a_run(tiny_data: Path, tmp_path: Path) -> None:
    line = [sys.executable, "-c", PREPARED, str(TINY), str(tiny_data)]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("strace"), reason="needs strace")
def test_main_process__makes_few_path_calls(tiny_data: Path, tmp_path: Path) -> None:
    """Before it starts the others, all calls; to the end of the run, those that name a path on a disk."""
    words = ["pretrain", "--recipe", str(TINY), "--data", str(tiny_data), "--out", "run", "--processes", "2"]
    traced = ["strace", "-f", "-e", "trace=%file", "-o", "calls.txt", sys.executable, "-m", "vitctl", *words]
    subprocess.run(traced, cwd=tmp_path, check=True, capture_output=True, timeout=300)
    text = (tmp_path / "calls.txt").read_text(errors="replace")
    before, started, _ = text.partition("accelerate.commands.launch")
    main, calls = (
        re.compile(rf"^{text.split()[0]} +\w+\((.*)", re.MULTILINE),
        re.compile(r'[^"]*"(?!/proc/)[^"]'),
    )
    assert started and len(main.findall(before)) < MOST
    assert sum(bool(calls.match(given)) for given in main.findall(text)) < MOST
