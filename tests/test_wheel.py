"""The wheel as a user gets it: built, installed beside nothing of the checkout, and run in another folder."""

import os
import subprocess
import sys
import tarfile
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.conftest import ROOT


def said(*words: object, at: Path) -> str:
    """The output of a command that does not find the checkout, and sees no GPU."""
    own = os.environ | {"PYTHONPATH": "", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([str(word) for word in words], cwd=at, env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def files(folder: Path) -> set[str]:
    """What git would keep of a folder: no caches."""
    found = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)) for path in found}


@pytest.mark.slow
def test_wheel__holds_the_package_and_runs_outside_of_the_checkout(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    build = (sys.executable, "-m", "hatchling", "build", "-d", tmp_path / "dist", "-t")
    for target in ("wheel", "sdist"):
        subprocess.run([*map(str, build), target], cwd=ROOT, check=True, capture_output=True)
    [wheel], [sdist] = (tmp_path / "dist").glob("*.whl"), (tmp_path / "dist").glob("*.tar.gz")

    names = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    recipes = {f"vitctl/recipes/{name}" for name in files(ROOT / "recipes")}
    assert names == {f"vitctl/{name}" for name in files(ROOT / "vitctl")} | recipes
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in ZipFile(wheel).namelist())
    with tarfile.open(sdist) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"tests/{name}" for name in files(ROOT / "tests")} <= sources
    assert not [name for name in sources if "cache" in name.rpartition("/")[0] or name.endswith(".pyc")]

    away, environment = tmp_path / "away", tmp_path / "venv"
    away.mkdir()
    venv.create(environment)
    python, vitctl = environment / "bin" / "python", environment / "bin" / "vitctl"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index")
    said(*pip, wheel, at=away)
    [packages] = environment.glob("lib/python*/site-packages")
    others = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "others.pth").write_text("\n".join(others) + "\n")

    assert said(python, "-c", "import vitctl; print(vitctl.__file__)", at=away).startswith(str(packages))
    assert "jft_h14" in said(vitctl, "pretrain", "--recipe", "jft_h14", "--dry-run", at=away)
    assert " kernels " in said(vitctl, "doctor", at=away)
