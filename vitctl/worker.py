"""The body of every process: read RUN/recipe.toml, do the job, leave RUN/result.json."""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from vitctl.cluster import ELASTIC_RUN, check_environment
from vitctl.engine.journal import LOG, Journal, Record, Report, silent, spared, write_json
from vitctl.engine.preemption import ECHO_SECONDS, Stopped, die_with, leave_on_signals, stop_on_signals
from vitctl.errors import LaunchError, VitctlError, explained, is_lost_peer
from vitctl.ranks import LAUNCHER, environment_kept
from vitctl.system.files import no_links, read_json, replacing
from vitctl.system.screen import outlive_screen
from vitctl.system.text import PlainStream, printable, typed

LOGS, NOW = "logs", "now.json"
_MOST_NOTE_BYTES = 16 * 2**20
_NOTE = {"rank": int, "time": float, "mendable": bool}  # what every note of a failed process holds


def work(run_dir: Path, report: Report = silent) -> dict[str, Any]:
    """Do the job of RUN/recipe.toml in this process, one of as many as the recipe says.

    Returns:
        the result, also written to RUN/result.json by the main process; its status is "stopped" after a signal.

    Raises:
        VitctlError: the user can mend it. RUN/result.json says "failed" and why.
    """
    from vitctl.jobs.result import RunResult, with_recipe, write_result
    from vitctl.recipe.load import load_recipe

    recipe = load_recipe(str(run_dir / "recipe.toml")).recipe
    for name in set(os.environ) - set(environment_kept(os.environ)):
        del os.environ[name]
    is_main = int(os.environ.get("RANK", "0")) == 0
    report = spared(report, run_dir / LOG if is_main else None)
    try:
        echo = ECHO_SECONDS if "RANK" in os.environ else 0.0
        with stop_on_signals(echo, deaf_afterwards=ELASTIC_RUN in os.environ) as stop:
            try:
                report({"kind": "now", "text": "starting", "time": time.time()})
                _meet(run_dir, recipe, report)
                job = _job(recipe.job)
                report({"kind": "now", "text": "reading weights and data", "time": time.time()})
                result = job(recipe, run_dir, report, stop)
            except Stopped:
                result = RunResult(recipe.job, "stopped")
    except Exception as error:
        mendable = explained(error, run_dir, f"go on with: vitctl resume {typed(run_dir)}")
        if is_main:
            write_failure(run_dir, recipe.job, str(mendable or f"{type(error).__name__}: {error}"))
        if mendable is not None and mendable is not error:
            raise mendable from error
        raise
    result = with_recipe(result, recipe)
    return vars(write_result(run_dir, result) if is_main else result)


def _job(name: str) -> Callable[..., Any]:
    """Imported here, because that takes seconds in which a signal must already be heard."""
    from vitctl.jobs.evaluate import evaluate
    from vitctl.jobs.export import export
    from vitctl.jobs.fewshot import fewshot
    from vitctl.jobs.finetune import finetune
    from vitctl.jobs.pretrain import pretrain
    from vitctl.jobs.vtab import vtab

    jobs: dict[str, Callable[..., Any]] = {
        "pretrain": pretrain,
        "finetune": finetune,
        "fewshot": fewshot,
        "vtab": vtab,
        "evaluate": evaluate,
        "export": export,
    }
    return jobs[name]


def _meet(run_dir: Path, recipe: Any, report: Report) -> None:
    """Find the other processes, and write a line for each node."""
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    journal = Journal(run_dir / LOG if os.environ.get("RANK", "0") == "0" else None, report)
    if restarts:
        journal.write("warning", step=0, text=f"a process was lost, all were started again (restart {restarts})")
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return
    from vitctl.engine.together import check_same, check_sum, join, node_lines

    cpu = on_cpu(recipe)
    join(cpu=cpu)
    check_sum(cpu=cpu)
    check_same(
        {"recipe": recipe.model_dump_json()},
        f"{run_dir / 'recipe.toml'} is not the same file on all nodes; see that they share {run_dir}, then start again",
    )
    lines = node_lines(cpu=cpu)
    for line in lines:
        journal.write("node", step=0, text=line)


def on_cpu(recipe: Any) -> bool:
    """Whether a recipe's job computes on the CPU here."""
    import torch

    return recipe.machine.device == "cpu" or not torch.cuda.is_available()


def write_failure(run_dir: Path, job: str, text: str) -> None:
    """RUN/result.json of a run that failed; where even that cannot be written, the error alone is to be heard."""
    from vitctl.jobs.result import RunResult, write_result

    try:
        write_result(run_dir, RunResult(job, "failed", error=text))
    except OSError:
        return


def main() -> None:
    """One of several processes: quiet, its output and its error go to RUN/logs."""
    leave_on_signals(while_waiting=True)
    check_environment()
    if LAUNCHER in os.environ:
        die_with(int(os.environ[LAUNCHER]))
    run_dir = Path(sys.argv[1])
    be_quiet(run_dir)
    outlive_screen()  # which is a file on a disk that may be full
    is_main = int(os.environ.get("RANK", "0")) == 0
    try:
        work(run_dir, partial(_pass_on, run_dir / LOGS / NOW) if is_main else silent)
    except Exception as error:
        note_error(run_dir, error)
        sys.stderr.flush()
        os._exit(1)
    leave_group()


def _pass_on(path: Path, record: Record) -> None:
    """For the process that has the screen: what is under way, which is in no log; a full disk is no reason to stop."""
    if record["kind"] == "now":
        with suppress(OSError), replacing(path, flushed=False) as aside:
            aside.write_text(json.dumps(record), encoding="utf-8")


def be_quiet(run_dir: Path, streams: Sequence[int] = (1, 2)) -> None:
    """From here on all that this process prints goes to its log; or only its errors, stream 2."""
    log = _log(run_dir)
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a", encoding="utf-8", opener=no_links) as file:
        for stream in streams:
            os.dup2(file.fileno(), stream)
    for stream in streams:
        name = "stdout" if stream == 1 else "stderr"
        setattr(sys, name, PlainStream(getattr(sys, name)))


def _log(run_dir: Path) -> Path:
    return log_of(run_dir, int(os.environ.get("RANK", "0")))


def log_of(run_dir: Path, rank: int) -> Path:
    """Where the output of a process goes."""
    return run_dir / LOGS / f"rank_{rank:02d}.txt"


def note_error(run_dir: Path, error: Exception) -> None:
    """Write down what ended this process, so that the one that failed first can be told; where it was is for its log alone."""
    log = _log(run_dir)
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a", encoding="utf-8", errors="backslashreplace", opener=no_links) as file:
        file.write(printable("".join(traceback.format_exception(error))))
    rank, mendable = int(os.environ.get("RANK", "0")), isinstance(error, VitctlError)
    text = str(error) if mendable else f"{type(error).__name__}: {error}"
    note = {"rank": rank, "time": time.time(), "mendable": mendable, "text": text, "log": str(log)}
    own_fault = mendable and not isinstance(error, LaunchError)
    lost_peer = not own_fault and is_lost_peer(text)
    write_json(run_dir / LOGS / f"error_{rank:02d}.json", note | {"lost_peer": lost_peer})


def note_lost(run_dir: Path, rank: int, signal_name: str) -> None:
    """Write down for a process that was killed what it could not write itself."""
    note = {"rank": rank, "time": time.time(), "mendable": True, "killed": signal_name, "lost_peer": False}
    write_json(run_dir / LOGS / f"error_{rank:02d}.json", note)


def forget_errors(run_dir: Path) -> None:
    """Remove the notes of processes that failed in an earlier launch."""
    for old in (run_dir / LOGS).glob("error_*.json"):
        old.unlink(missing_ok=True)


def leave_group() -> None:
    """Part from the other processes, when there are any."""
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def first_error(run_dir: Path) -> dict[str, Any] | None:
    """The note of the process that failed first in the last launch; None when none did.

    A process that only lost its connection to another is not the first, whatever the clocks of the nodes say.
    """
    notes = []
    for path in (run_dir / LOGS).glob("error_*.json"):
        with suppress(LaunchError):  # a new launch may be forgetting them
            note = read_json(path, _MOST_NOTE_BYTES, error=LaunchError)
            if isinstance(note, dict) and _NOTE.items() <= {name: type(note.get(name)) for name in note}.items():
                notes.append(note)
    return min(notes, key=lambda note: (note.get("lost_peer", False), note["time"]), default=None)


if __name__ == "__main__":
    main()
