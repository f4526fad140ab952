"""A checked recipe and a machine: the run folder, the launch line, and the processes."""

import fcntl
import importlib.metadata
import json
import os
import platform
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from vitctl.engine.journal import LOG, Report, parse_lines, write_json
from vitctl.errors import LaunchError, RecipeError, VitctlError
from vitctl.recipe.load import Loaded, load_recipe
from vitctl.recipe.schema import Recipe
from vitctl.recipe.write import differences, to_toml, toml_value

FREE_TO_CHANGE = (
    "machine.processes",
    "machine.micro_batch",
    "machine.workers",
    "machine.device",
    "log.",
    "checkpoint.",
    "note",
)
PACKAGES = (
    "vitctl",
    "torch",
    "torchvision",
    "accelerate",
    "numpy",
    "pillow",
    "safetensors",
    "webdataset",
    "onnx",
    "onnxruntime",
)
POLL_SECONDS = 0.3


def new_run_dir(name: str, runs: Path = Path("runs")) -> Path:
    """A folder for a run of this recipe that does not exist yet: runs/NAME_DATE-TIME."""
    stem = f"{Path(name).stem}_{time.strftime('%Y%m%d-%H%M%S')}"
    tries = (runs / (stem if n == 0 else f"{stem}_{n}") for n in range(1000))
    return next(path for path in tries if not path.exists())


def prepare(loaded: Loaded, run_dir: Path) -> None:
    """Check all that can be checked before the first process, then write recipe.toml, launch.txt and env.json.

    Raises:
        VitctlError: as `check` raises; nothing was written.
        RecipeError: the folder holds a run of another recipe; the changed keys are named.
        LaunchError: the folder cannot be written.
    """
    from vitctl.jobs.plan import check

    file = run_dir / "recipe.toml"
    before = load_recipe(str(file)).recipe if file.exists() else None
    loaded = _pinned(loaded, before)
    if before is not None:
        _same_recipe(before, loaded.recipe, run_dir)
    try:
        check(loaded.recipe, run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        if before != loaded.recipe:
            aside = run_dir / f".recipe.{os.getpid()}.toml"
            aside.write_text(to_toml(loaded), encoding="utf-8")
            aside.replace(file)
        (run_dir / "launch.txt").write_text(launch_line(run_dir, loaded.recipe) + "\n", encoding="utf-8")
        write_json(run_dir / "env.json", environment())
    except OSError as error:
        raise LaunchError(
            f"{run_dir}: cannot be written ({error.strerror}); choose another folder with --out"
        ) from None


def _pinned(loaded: Loaded, before: Recipe | None) -> Loaded:
    """Weights that were "newest" when a run began are its weights for good: a resumed run must not take others."""
    weights = getattr(loaded.recipe, "weights", None)
    if weights is None or weights.source != "newest":
        return loaded
    from vitctl.jobs.inputs import RUNS, newest_pretraining

    earlier = getattr(before, "weights", None)
    source = earlier.source if earlier else str(newest_pretraining(RUNS))
    recipe = loaded.recipe.model_copy(update={"weights": weights.model_copy(update={"source": source})})
    return replace(loaded, recipe=recipe, origins={**loaded.origins, "weights.source": "newest when the run began"})


def _same_recipe(before: Recipe, now: Recipe, run_dir: Path) -> None:
    changed = [d for d in differences(before, now) if not d[0].startswith(FREE_TO_CHANGE)]
    if changed:
        shown = "; ".join(
            f"{key} was {toml_value(a) or 'unset'}, now {toml_value(b) or 'unset'}" for key, a, b in changed[:4]
        )
        more = f"; and {len(changed) - 4} more" if len(changed) > 4 else ""
        raise RecipeError(f"{run_dir}: holds a run of another recipe: {shown}{more}; choose another folder with --out")


def launch(run_dir: Path, report: Report) -> dict[str, Any]:
    """Run the recipe of a prepared folder to its end, in this process or in several.

    Args:
        run_dir: prepared.
        report: called with every log record.

    Returns:
        the content of RUN/result.json.

    Raises:
        VitctlError: as the job raises; of several processes, the one that failed first.
        RuntimeError: a process failed with a bug.
    """
    recipe = load_recipe(str(run_dir / "recipe.toml")).recipe
    with _locked(run_dir):
        (run_dir / "result.json").unlink(missing_ok=True)
        if recipe.machine.processes == 1 or "RANK" in os.environ:
            from vitctl.worker import work

            work(run_dir, report)
        else:
            _launch_processes(run_dir, recipe, report)
    return dict(json.loads((run_dir / "result.json").read_text(encoding="utf-8")))


def launch_command(run_dir: Path, recipe: Recipe) -> list[str]:
    """The command that starts the processes of a run: every flag relied on is given, no user's default fills a gap."""
    worker = ["vitctl.worker", str(run_dir)]
    if recipe.machine.processes == 1:
        return [sys.executable, "-m", *worker]
    n = recipe.machine.processes
    return [
        *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1"),
        *(
            "--gpu_ids",
            "all",
            "--num_processes",
            str(n),
            "--mixed_precision",
            "no",
            "--dynamo_backend",
            "no",
            "--main_process_port",
            "0",
        ),
        *("--num_cpu_threads_per_process", str(max(1, (os.cpu_count() or 1) // n)), "--module", *worker),
    ]


def launch_line(run_dir: Path, recipe: Recipe) -> str:
    """The same as one line for a shell."""
    return shlex.join(launch_command(run_dir, recipe))


def environment() -> dict[str, Any]:
    """Versions, machine and git commit, for RUN/env.json."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    git = ["git", "-C", str(Path(__file__).resolve().parents[1]), "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, timeout=5, check=False).stdout.strip()
    except OSError:
        commit = ""
    return {
        "versions": versions,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpus": os.cpu_count(),
        "git_commit": commit or None,
    }


@contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    """One run per folder. The lock is the kernel's, ends with this process however that ends, and is not inherited by workers."""
    if "RANK" in os.environ:
        yield
        return
    with (run_dir / ".lock").open("w") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise LaunchError(
                f"{run_dir}: another vitctl is running in this folder; wait for it, or choose another --out"
            ) from None
        yield


def _launch_processes(run_dir: Path, recipe: Recipe, report: Report) -> None:
    from vitctl.engine.preemption import SIGNALS
    from vitctl.worker import LOGS, first_error

    logs = run_dir / LOGS
    logs.mkdir(exist_ok=True)
    for old in logs.glob("error_*.json"):
        old.unlink()
    env = os.environ | {"ACCELERATE_USE_CPU": "true"} if _on_cpu(recipe) else dict(os.environ)
    stopped: list[int] = []
    with (logs / "launcher.txt").open("w") as out:
        command = launch_command(run_dir, recipe)
        launcher = subprocess.Popen(
            command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=env, start_new_session=True
        )

    def forward(number: int, _frame: FrameType | None) -> None:
        stopped.append(number)
        _signal_workers(launcher.pid, hard=len(stopped) > 1)

    before = {number: signal.signal(number, forward) for number in SIGNALS}
    follower = _Follower(run_dir / LOG, report)
    try:
        while launcher.poll() is None:
            follower.poll()
            time.sleep(POLL_SECONDS)
        follower.poll()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if (run_dir / "result.json").exists():
        return
    error = first_error(run_dir)
    if stopped and error is None:
        write_json(run_dir / "result.json", {"job": recipe.job, "status": "stopped"})
    elif error is not None and error["mendable"]:
        raise VitctlError(f"{error['text']} (process {error['rank']}; {error['log']})")
    elif error is not None:
        raise RuntimeError(f"process {error['rank']} failed: {error['text']}; {error['log']} has the traceback")
    else:
        raise RuntimeError(f"the processes ended with code {launcher.returncode} and no word; {logs} has their output")


def _on_cpu(recipe: Recipe) -> bool:
    import torch

    return recipe.machine.device == "cpu" or not torch.cuda.is_available()


def _signal_workers(launcher: int, *, hard: bool) -> None:
    """The first signal asks all workers to save and leave; the next one ends them and their launcher at once."""
    import psutil

    try:
        parent = psutil.Process(launcher)
        for child in parent.children(recursive=hard):
            child.send_signal(signal.SIGKILL if hard else signal.SIGUSR1)
        if hard:
            parent.kill()
    except psutil.NoSuchProcess:
        pass


class _Follower:
    """Hands the records that other processes append to a log to `report`, each once."""

    def __init__(self, path: Path, report: Report) -> None:
        self.path, self.report = path, report
        self.seen = time.time()
        self.partial_from = 0
        self.inode = -1

    def poll(self) -> None:
        """Report what has come since the last poll."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self.inode or status.st_size < self.partial_from:
                    self.inode, self.partial_from = status.st_ino, 0
                file.seek(self.partial_from)
                lines = file.read()
        except FileNotFoundError:
            return
        whole = lines[: lines.rfind(b"\n") + 1]
        self.partial_from += len(whole)
        for record in parse_lines(whole.decode(errors="replace")):
            if record.get("time", 0) >= self.seen:
                self.report(record)
