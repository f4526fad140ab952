"""A checked recipe and a machine: the run folder, the launch line, and the processes."""

import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitctl.cluster import ELASTIC_LINE, ELASTIC_RUN, Member, find_member
from vitctl.engine.journal import LOG, Journal, Record, Report, parse_lines, read_json, spared, write_json
from vitctl.errors import LaunchError, RecipeError, VitctlError
from vitctl.ranks import run_ranks
from vitctl.recipe.load import Loaded, load_recipe
from vitctl.recipe.neutral import FREE_TO_CHANGE
from vitctl.recipe.schema import Recipe, TrainRecipe
from vitctl.recipe.write import differences, to_toml, toml_value
from vitctl.run_folder import clear, failed_at_once, keeping_result, locked, not_foreign, owning, read_status
from vitctl.system.files import write_text
from vitctl.system.text import has_control, one_line, printable

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
NOTES_SECONDS = 1.0  # for the notes of processes on other nodes to be seen here


def new_run_dir(name: str, runs: Path = Path("runs")) -> Path:
    """A folder for a run of this recipe that does not exist yet: runs/NAME_DATE-TIME."""
    stem = f"{Path(name).stem}_{time.strftime('%Y%m%d-%H%M%S')}"
    tries = (runs / (stem if n == 0 else f"{stem}_{n}") for n in range(1000))
    return next(path for path in tries if not path.exists())


def prepare(loaded: Loaded, run_dir: Path, allow: Sequence[str] = ()) -> str:
    """Check all that can be checked before the first process, then write recipe.toml, launch.txt and env.json.

    Of several processes that something else started, the first does it and the others wait for it.

    Args:
        loaded: the recipe.
        run_dir: new, or of a run that goes on.
        allow: dotted keys, or tables, that may differ from those of the run in the folder.

    Returns:
        a line that says which run's weights are taken where the recipe says "newest"; else "".

    Raises:
        VitctlError: as `check` raises; nothing was written.
        RecipeError: the folder holds a run of another recipe; the changed keys are named.
        LaunchError: the folder cannot be written, or the first process said what is wrong.
    """
    member = find_member()
    if member is None:
        return _prepare(loaded, run_dir, allow)
    from vitctl.worker import note_error

    try:
        return _prepare_together(loaded, run_dir, allow, member)
    except VitctlError as error:
        if ELASTIC_RUN in os.environ:  # the one who shows it is another process
            note_error(run_dir, error)
        raise


def _prepare_together(loaded: Loaded, run_dir: Path, allow: Sequence[str], member: Member) -> str:
    from vitctl.engine.together import first_text, join
    from vitctl.worker import forget_errors, on_cpu

    if member.num_processes > 1:
        join(cpu=on_cpu(loaded.recipe))
    said = taken = ""
    if member.rank == 0:
        try:
            taken = _prepare(loaded, run_dir, allow)
            forget_errors(run_dir)
        except VitctlError as error:
            said = str(error)
    if member.num_processes > 1:
        said = first_text(said)
    if said:
        raise LaunchError(said)
    return taken


def _prepare(loaded: Loaded, run_dir: Path, allow: Sequence[str]) -> str:
    from vitctl.jobs.identity import allow as note_allowed
    from vitctl.jobs.plan import check, fit_to_data

    if has_control(str(run_dir)):
        raise RecipeError(f"--out {one_line(str(run_dir))}: has a control character in its name; choose another")
    file = run_dir / "recipe.toml"
    not_foreign(run_dir)
    with owning(run_dir):
        before = load_recipe(str(file)).recipe if file.exists() and not failed_at_once(run_dir) else None
        loaded, taken = _pinned(loaded, before)
        loaded = fit_to_data(loaded, run_dir)
        changed = _changes(before, loaded.recipe, run_dir, allow) if before is not None else ""
        _not_shorter(loaded.recipe, run_dir)
        check(loaded.recipe, run_dir)
        if before is None:
            clear(run_dir)
        if before != loaded.recipe:
            write_text(file, to_toml(loaded))
        if allow:
            note_allowed(run_dir, allow)
        if changed:
            Journal(run_dir / LOG).write("warning", step=0, text=f"the recipe was changed on purpose: {changed}")
        line = os.environ.get(ELASTIC_LINE) or launch_line(run_dir, loaded.recipe)
        write_text(run_dir / "launch.txt", printable(line) + "\n")
        write_json(run_dir / "env.json", environment())
    return taken


def _pinned(loaded: Loaded, before: Recipe | None) -> tuple[Loaded, str]:
    """Weights that were "newest" when a run began are its weights for good: a resumed run must not take others.

    Returns:
        the recipe with them, and a line that says which they are; "" where the recipe names its weights.
    """
    weights = getattr(loaded.recipe, "weights", None)
    if weights is None or weights.source != "newest":
        return loaded, ""
    from vitctl.jobs.runs import newest_run

    earlier = getattr(before, "weights", None)
    if earlier is not None:
        source, taken = (
            earlier.source,
            f"no --from: going on with the weights that this run began with, {earlier.source}",
        )
    else:
        newest = newest_run(loaded.recipe.job)
        source, taken = str(newest.folder), newest.text
    recipe = loaded.recipe.model_copy(update={"weights": weights.model_copy(update={"source": source})})
    pinned = replace(loaded, recipe=recipe, origins={**loaded.origins, "weights.source": "newest when the run began"})
    return pinned, taken


def _changes(before: Recipe, now: Recipe, run_dir: Path, allow: Sequence[str]) -> str:
    """The differences that are allowed, in words; "" when there are none. Raises RecipeError at the others."""
    if before.job != now.job:
        raise RecipeError(
            f"{run_dir}: holds a run of {before.job}, this is {now.job}; choose another folder with --out"
        )
    changed = [d for d in differences(before, now) if not d[0].startswith(FREE_TO_CHANGE)]
    refused = [d for d in changed if not any(d[0] == key or d[0].startswith(f"{key}.") for key in allow)]
    if refused:
        more = f"; and {len(refused) - 4} more" if len(refused) > 4 else ""
        keys = " ".join(f"--allow {key}" for key, _, _ in refused[:4])
        raise RecipeError(
            f"{run_dir}: holds a run of another recipe: {_in_words(refused[:4])}{more}; choose another folder with --out, "
            f"or go on all the same with: vitctl resume {run_dir} --set KEY=VALUE {keys}"
        )
    return _in_words(changed)


def _not_shorter(recipe: Recipe, run_dir: Path) -> None:
    """Refuse a training that would end before the checkpoint that it goes on from."""
    steps = recipe.schedule.total_steps if isinstance(recipe, TrainRecipe) else 0
    saved = [path.parent.name[5:] for path in run_dir.glob("checkpoints/step_*/state.json")]
    done = max((int(step) for step in saved if step.isdigit()), default=0)
    if 0 < steps < done:
        raise RecipeError(
            f"{run_dir}: has a checkpoint of step {done}, and schedule.total_steps = {steps} would end before it; set it to {done} "
            "or more, or choose another folder with --out"
        )


def _in_words(changes: Sequence[tuple[str, Any, Any]]) -> str:
    return "; ".join(f"{key} was {toml_value(a) or 'unset'}, now {toml_value(b) or 'unset'}" for key, a, b in changes)


def launch(run_dir: Path, report: Report) -> dict[str, Any]:
    """Run the recipe of a prepared folder to its end, in this process or in several.

    Args:
        run_dir: prepared.
        report: called with every log record.

    Returns:
        the content of RUN/result.json.

    Raises:
        VitctlError: as the job raises; of several processes, the one that failed first, or one that was killed.
        RuntimeError: a process failed with a bug.
    """
    member = find_member()
    is_first = member is None or member.rank == 0
    with _own(run_dir) if is_first else nullcontext():
        recipe = load_recipe(str(run_dir / "recipe.toml")).recipe
        if member is not None:
            return _work_as_member(run_dir, recipe, report)
        if recipe.machine.processes == 1:
            from vitctl.worker import work

            work(run_dir, report)
        else:
            _launch_processes(run_dir, recipe, report)
    return dict(read_json(run_dir / "result.json"))


@contextmanager
def _own(run_dir: Path) -> Iterator[None]:
    """The folder is this run's; what it was allowed to go on with counts for this launch, whoever prepared it."""
    from vitctl.jobs.identity import allow

    with locked(run_dir), keeping_result(run_dir):
        try:
            yield
        finally:
            allow(run_dir, ())


def _work_as_member(run_dir: Path, recipe: Recipe, report: Report) -> dict[str, Any]:
    """The body of a process that srun or torchrun started; what failed first, on whatever node, is what is raised."""
    from vitctl.worker import leave_group, note_error, work

    try:
        result = work(run_dir, report)
    except Exception as error:
        note_error(run_dir, error)
        time.sleep(NOTES_SECONDS)
        raise_first_error(run_dir, recipe)
        raise
    leave_group()
    return result


def launch_command(run_dir: Path, recipe: Recipe) -> list[str]:
    """The command that runs a prepared folder without this one: for several processes by torchrun, which needs no config."""
    worker = ["-m", "vitctl.worker", str(run_dir)]
    if recipe.machine.processes == 1:
        return [sys.executable, *worker]
    here = ("--standalone", "--nproc-per-node", str(recipe.machine.processes))
    return [sys.executable, "-m", "torch.distributed.run", *here, *worker]


def launch_line(run_dir: Path, recipe: Recipe) -> str:
    """The same as one line for a shell."""
    return shlex.join(launch_command(run_dir, recipe))


def environment() -> dict[str, Any]:
    """Versions, machine and git commit, for RUN/env.json."""
    from vitctl.jobs.result import installed

    git = ["git", "-C", str(Path(__file__).resolve().parents[1]), "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, timeout=5, check=False).stdout.strip()
    except OSError:
        commit = ""
    return {
        "versions": installed(PACKAGES),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpus": os.cpu_count(),
        "git_commit": commit or None,
    }


def _launch_processes(run_dir: Path, recipe: Recipe, report: Report) -> None:
    from vitctl.worker import LOGS, NOW, first_error, forget_errors, note_lost, write_failure

    logs = run_dir / LOGS
    logs.mkdir(exist_ok=True)
    forget_errors(run_dir)
    (logs / NOW).unlink(missing_ok=True)
    follower = _Follower(run_dir / LOG, spared(report, run_dir / LOG), logs / NOW)
    command = [sys.executable, "-m", "vitctl.worker", str(run_dir)]
    ended = run_ranks(command, recipe.machine.processes, logs / "launcher.txt", follower.poll)
    if read_status(run_dir) in ("done", "stopped"):
        return
    error = first_error(run_dir)
    if ended.stopped and ended.lost is None and (error is None or error["lost_peer"]):
        write_json(run_dir / "result.json", {"job": recipe.job, "status": "stopped"})
        return
    if ended.lost is not None and (error is None or error["lost_peer"]):
        note_lost(run_dir, *ended.lost)
    try:
        raise_first_error(run_dir, recipe)
        raise RuntimeError(
            f"the processes ended with codes {ended.codes} and no word; {run_dir / LOGS} has their output"
        )
    except Exception as error:
        write_failure(run_dir, recipe.job, str(error))
        raise


def raise_first_error(run_dir: Path, recipe: Recipe) -> None:
    """Raise what the process that failed first in the last launch says, or what became of it; nothing when none failed.

    Raises:
        VitctlError: the user can mend it, or a process was killed or went away.
        RuntimeError: a bug.
    """
    from vitctl.worker import first_error, log_of

    error = first_error(run_dir)
    if error is None:
        return
    rank, resume = error["rank"], f"go on with: vitctl resume {run_dir}"
    log = log_of(run_dir, rank)
    if not log.exists():  # it had no time to begin one
        log = log.parent
    if "killed" in error:
        raise LaunchError(
            f"process {rank} of {recipe.machine.processes} was killed ({error['killed']}), most often for want of memory; "
            f"{log} has its output; {resume}"
        )
    if error["mendable"]:
        raise VitctlError(f"{error['text']} (process {rank}; {log})")
    if error["lost_peer"]:
        raise LaunchError(
            f"process {rank} lost the connection to another, which left no word ({error['text'].splitlines()[0]}); {log} "
            f"has more; {resume}"
        )
    raise RuntimeError(f"process {rank} failed: {error['text']}; {log} has the traceback")


class _Follower:
    """Hands the records that other processes append to a log to `report`, each once, and what is under way."""

    def __init__(self, path: Path, report: Report, now: Path | None = None) -> None:
        self.path, self.report, self.now = path, report, now
        self.told: Record = {}
        self.partial_from = 0
        self.inode = -1
        self.known = set[
            int
        ]()  # lines that were there before, or are reported; clocks are set back, so times do not tell
        with suppress(OSError):
            self._new_lines()

    def poll(self) -> None:
        """Report what has come since the last poll; what cannot be read now, or is no record, does not end the run."""
        with suppress(OSError, AttributeError):
            self._follow_log()
        if self.now is None:
            return
        with suppress(OSError, ValueError, RecursionError, VitctlError):
            record = read_json(self.now)
            if isinstance(record, dict) and record != self.told and record.get("kind") == "now":
                self.told = record
                self.report(record)

    def _follow_log(self) -> None:
        for record in parse_lines("\n".join(line.decode(errors="replace") for line in self._new_lines())):
            self.report(record)

    def _new_lines(self) -> list[bytes]:
        """Whole lines that were not there at the last look. A log that was cut back is a new file of old lines."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self.inode or status.st_size < self.partial_from:
                    self.inode, self.partial_from = status.st_ino, 0
                file.seek(self.partial_from)
                lines = file.read()
        except FileNotFoundError:
            return []
        whole = lines[: lines.rfind(b"\n") + 1]
        self.partial_from += len(whole)
        new = [line for line in whole.split(b"\n") if line and hash(line) not in self.known]
        self.known.update(map(hash, new))
        return new
