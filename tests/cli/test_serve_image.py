"""The Dockerfile of `vitctl serve`: built and run where docker or podman works, else step by step in an
environment of its own."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import httpx
import pytest
from packaging.requirements import Requirement

from tests.cli.conftest import Vitctl
from tests.cli.test_serve import png

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "docs" / "serve.Dockerfile"
SITE = Path(distribution("torch").locate_file("")).resolve()
PORT = 8000
pytestmark = pytest.mark.slow


def works(program: str) -> bool:
    found = shutil.which(program)
    return found is not None and subprocess.run([found, "info"], capture_output=True).returncode == 0


ENGINE = next(filter(works, ("docker", "podman")), "")


def instructions(text: str) -> list[tuple[str, str]]:
    """Name and value of each line of a Dockerfile; lines that end with a backslash go on."""
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    pairs = [line.partition(" ") for line in lines if line and not line.startswith("#")]
    return [(name, value) for name, _, value in pairs]


def needed_by(*names: str) -> set[str]:
    """The packages, and what they need."""
    found, left = set[str](), [(name, "") for name in names]
    while left:
        name, extra = left.pop()
        if f"{name}[{extra}]" not in found:
            found |= {name, f"{name}[{extra}]"}
            for one in map(Requirement, distribution(name).requires or []):
                if not one.marker or one.marker.evaluate({"extra": extra}):
                    left += [(one.name, more) for more in ("", *one.extras)]
    return {name for name in found if "[" not in name}


class Steps:
    """The steps of the Dockerfile in a folder instead of /, with torch linked from this environment."""

    def __init__(self, root: Path, context: Path) -> None:
        self.root, self.context, self.uid = root, context, 0
        self.entry: list[str] = []
        self.health = ""
        subprocess.run([sys.executable, "-m", "venv", root / "venv"], check=True)
        [site] = (root / "venv" / "lib").glob("python*/site-packages")
        for name in needed_by("torch", "torchvision"):
            for top in {file.parts[0] for file in distribution(name).files or []} - {"..", "__pycache__"}:
                if not (site / top).exists():
                    (site / top).symlink_to(SITE / top)
        path = f"{root / 'venv' / 'bin'}:/usr/local/bin:/usr/bin:/bin"
        kept = {
            name: value for name, value in os.environ.items() if name.lower().startswith(("pip_", "http"))
        }
        self.env = {**kept, "PATH": path, "HOME": "/"}
        for name, value in instructions(DOCKERFILE.read_text()):
            getattr(self, name.lower())(value)

    def here(self, text: str) -> str:
        return re.sub(r"(?<![\w.:/])/(?=src|model)", f"{self.root}/", text)

    def run(self, line: str) -> None:
        done = subprocess.run(
            ["/bin/sh", "-c", self.here(line)], env=self.env, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"

    def arg(self, value: str) -> None:
        name, _, default = value.partition("=")
        self.env[name] = default

    def copy(self, value: str) -> None:
        *sources, to = value.split()
        for source in (self.context / one for one in sources):
            if source.is_dir():
                shutil.copytree(source, self.here(to), dirs_exist_ok=True)
            else:
                assert to.endswith("/")
                Path(self.here(to)).mkdir(exist_ok=True)
                shutil.copy(source, self.here(to))

    def __getattr__(self, name: str) -> Any:
        def other(value: str) -> None:
            if name == "from":
                assert re.fullmatch(r"python:3\.1[1-9]-slim", value)
            elif name == "user":
                self.uid = int(value)  # a number: Kubernetes can tell that it is not root
            elif name == "expose":
                assert value == str(PORT)
            elif name == "healthcheck":
                self.health = value.partition("CMD ")[2]
            elif name == "entrypoint":
                self.entry = [self.here(word) for word in json.loads(value)]
            else:
                raise AssertionError(f"{name} is not in the table of this test")

        return other


def may_run(steps: Steps) -> bool:
    """Whether the user of the image may read the Python that runs this test."""
    try:
        line = [steps.root / "venv" / "bin" / "python", "-c", "import torch"]
        return subprocess.run(line, user=steps.uid, group=steps.uid, env=steps.env).returncode == 0
    except PermissionError:
        return False


@contextmanager
def running(context: Path, root: Path) -> Iterator[tuple[str, Any, Any]]:
    """The image's server: its address, a function that asks for its health, and one that stops it."""
    if ENGINE:
        build = [ENGINE, "build", "-f", str(DOCKERFILE), "-t", "vitctl-serve-test", str(context)]
        subprocess.run(build, check=True)
        limits = ["--read-only", "--memory", "4g", "--cap-drop", "ALL", "-p", f"127.0.0.1:{PORT}:{PORT}"]
        line = [ENGINE, "run", "-d", *limits, "vitctl-serve-test"]
        name = subprocess.run(line, check=True, capture_output=True, text=True).stdout.strip()
        health = dict(instructions(DOCKERFILE.read_text()))["HEALTHCHECK"].partition("CMD ")[2]

        def stop() -> int:
            subprocess.run([ENGINE, "stop", name], check=True)
            shown = [ENGINE, "inspect", "-f", "{{.State.ExitCode}}", name]
            return int(subprocess.run(shown, check=True, capture_output=True).stdout)

        try:
            ask = [ENGINE, "exec", name, "/bin/sh", "-c", health]
            yield f"http://127.0.0.1:{PORT}", lambda: subprocess.run(ask).returncode, stop
        finally:
            subprocess.run([ENGINE, "rm", "-f", name])
        return
    steps = Steps(root, context)
    user = {"user": steps.uid, "group": steps.uid} if may_run(steps) else {}
    process = subprocess.Popen(steps.entry, env=steps.env, cwd="/", stderr=subprocess.PIPE, text=True, **user)

    def stop_process() -> int:
        process.send_signal(signal.SIGTERM)
        return int(process.wait(40))

    try:
        line = ["/bin/sh", "-c", steps.health]
        yield (
            f"http://127.0.0.1:{PORT}",
            lambda: subprocess.run(line, env=steps.env, stderr=subprocess.DEVNULL).returncode,
            stop_process,
        )
    finally:
        process.kill()
        print(process.communicate()[1])


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that another user may enter, unlike those of pytest."""
    folder = Path("/tmp") / f"vitctl-image-{os.getpid()}"
    folder.mkdir(mode=0o755)
    yield folder
    shutil.rmtree(folder)


def test_image__serves_and_stops(vitctl: Vitctl, pretrained: Path, open_folder: Path) -> None:
    context = open_folder / "context"
    assert vitctl("export", "--from", pretrained, "--to", "onnx", "-o", context / "model").code == 0
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, context / name)
    for name in ("vitctl", "recipes"):
        shutil.copytree(ROOT / name, context / name)
    with running(context, open_folder / "root") as (address, health, stop):
        until = time.monotonic() + 120
        while health():
            assert time.monotonic() < until
            time.sleep(1)
        names = httpx.get(f"{address}/health").json()["classes"]
        found = httpx.post(f"{address}/predict", content=png(64, 64))
        classes = found.json()["predictions"][0]["classes"]
        assert found.status_code == 200 and {one["class"] for one in classes} <= set(names)
        assert stop() == 0
        assert health() != 0
