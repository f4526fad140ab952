"""The body of every process: read RUN/recipe.toml, do the job, leave RUN/result.json.

`accelerate launch` runs `python -m vitctl.launch.worker RUN`. A single process, and processes that srun or
torchrun started with a vitctl command, call it directly.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vitctl.engine.journal import (
    LOG,
    RECIPE,
    RESULT,
    Journal,
    Record,
    Report,
    never_raising,
    read_run_json,
    records_agreed,
    silent,
)
from vitctl.engine.preemption import (
    ECHO_SECONDS,
    RESUMABLE,
    StopFlag,
    Stopped,
    say,
    stop_on_signals,
)
from vitctl.engine.store import Store
from vitctl.errors import LaunchError, VitctlError, explained
from vitctl.launch.cluster import (
    LOCKED,
    LaunchConfig,
    find_member,
    has_agent,
    restarts_left,
    started_by_vitctl,
    without_settings,
)
from vitctl.launch.peers import (
    first_error,
    forget_errors,
    is_final,
    log_of,
    note_error,
    raise_first_error,
    resume_text,
    roll_call,
    write_failed_result,
)
from vitctl.launch.run_folder import FLIGHT, LOGS, NOW, keeping_result, locked_for_run, read_status
from vitctl.recipe.load import load_recipe
from vitctl.recipe.schema import Recipe
from vitctl.system.files import atomic_write, no_links
from vitctl.system.process import end_with_parent, is_main_process, mark_start
from vitctl.system.remote import is_remote, patient
from vitctl.system.screen import ignore_output_errors
from vitctl.system.text import PlainStream, one_line, typed

if TYPE_CHECKING:
    from vitctl.jobs.inputs.data import Inputs

# Modules of the functions of jobs, which take the checked recipe, the run folder, `report`, called with each
# log record of the main process, and `stop`, set by signals; all but export also `inputs`, the opened images.
JOBS = {
    "pretrain": "vitctl.jobs.pretrain",
    "finetune": "vitctl.jobs.finetune",
    "fewshot": "vitctl.jobs.fewshot",
    "probe": "vitctl.jobs.probe",
    "vtab": "vitctl.jobs.vtab_suite",
    "evaluate": "vitctl.jobs.evaluate",
    "export": "vitctl.export.export",
}
NOTES_SECONDS = 1.0  # until the notes of processes on other nodes are visible here


class Prepared(NamedTuple):
    """The recipe that RUN/recipe.toml was written from, and the images that were opened to check it.

    Args:
        recipe: equal to the recipe in the file.
        taken: lines that name the run whose weights it uses, if the recipe says "newest", and the batch and
            the rate for it, if they are not those of the recipe.
        inputs: None in a process that did not prepare the run.
    """

    recipe: Recipe
    taken: str = ""
    inputs: "Inputs | None" = None


def work(
    run_dir: Path,
    report: Report = silent,
    prepared: Prepared | None = None,
    *,
    locked: bool = False,
    stopped_code: int = RESUMABLE,
) -> dict[str, Any]:
    """Do the job of RUN/recipe.toml in this process, one of as many as the recipe says.

    Args:
        run_dir: prepared.
        report: called with every log record.
        prepared: the result of `prepare_run` in this process; None: the recipe is read from the folder.
        locked: whether the launcher holds the lock of the folder.
        stopped_code: exit code if the run should stop and ends without a process that does not answer.

    Returns:
        the result, also written to RUN/result.json by the main process; its status is "stopped" after a
        signal.

    Raises:
        LaunchError: another run is active in this folder.
        VitctlError: the user can fix it. RUN/result.json says "failed" and why.
    """
    for name in set(os.environ) - set(without_settings(os.environ)):
        del os.environ[name]
    echo = ECHO_SECONDS if "RANK" in os.environ else 0.0
    with (
        stop_on_signals(echo, ignore_afterwards=has_agent()) as stop,
        locked_for_run(run_dir, starts_again=restarts_left() > 0)
        if is_main_process() and not locked
        else nullcontext(),
    ):
        report = never_raising(report, run_dir / LOG if is_main_process() else None)
        return _work(run_dir, prepared, report, stop, stopped_code)


def _work(
    run_dir: Path, prepared: Prepared | None, report: Report, stop: StopFlag, stopped_code: int
) -> dict[str, Any]:
    from vitctl.engine.runtime import gather_texts
    from vitctl.jobs.record.result import RunResult, with_recipe, write_result

    recipe = prepared.recipe if prepared else load_recipe(str(run_dir / RECIPE)).recipe
    given = {"inputs": prepared.inputs} if prepared and prepared.inputs and recipe.job != "export" else {}
    try:
        report({"kind": "now", "text": "starting", "time": time.time()})
        _join_processes(run_dir, recipe, report)
        # The import takes seconds, so it comes after the signal handlers.
        job = getattr(import_module(JOBS[recipe.job]), recipe.job)
        report({"kind": "now", "text": "reading weights and data", "time": time.time()})

        def end(text: str) -> None:
            again = restarts_left() > 0 and stop.signal is None  # the agent starts all processes again
            if text and again:
                print(text, file=sys.stderr, flush=True)
            elif text:
                write_result(run_dir, RunResult(recipe.job, "stopped", error=text))
                say(f"{text}; resume with: vitctl resume {typed(run_dir)}")
            os._exit(RESUMABLE if again else stopped_code)

        with (
            roll_call(run_dir, Journal(run_dir / LOG, report), stop, end, recipe.machine.group_timeout),
            patient(patience(recipe)),
        ):
            result = job(recipe, run_dir, report, stop, **given)
        if not (run_dir / RECIPE).is_file():
            raise LaunchError(
                run_dir,
                "was removed while its run went on; it is not complete",
                "remove what is left, and run it again",
            )
        records_agreed(run_dir)  # for trainings that had all finished earlier
    except Stopped:
        outage = next(filter(None, gather_texts(stop.outage)), "")  # on any process
        if outage and restarts_left() > 0:
            leave_group()
            print(outage, file=sys.stderr)
            raise SystemExit(RESUMABLE) from None  # the agent starts all processes again
        late = outage or (f"it {stop.reason}" if stop.reason else "")
        result = RunResult(
            recipe.job, "stopped", error=late and f"stopped; {late}; {resume_text(run_dir, recipe.job)}"
        )
    except Exception as error:
        fixable = explained(error, run_dir, f"resume with: vitctl resume {typed(run_dir)}")
        if is_main_process():
            write_failed_result(run_dir, recipe.job, str(fixable or f"{type(error).__name__}: {error}"))
        if fixable is not None and fixable is not error:
            raise fixable from error
        raise
    result = with_recipe(result, recipe)
    if is_main_process():
        result = write_result(run_dir, result)
    if store := store_of(recipe):
        _send_rest(Store(store, run_dir), report)
    return vars(result)


def _send_rest(store: Store, report: Report) -> None:
    """Send what the store lacks of a run that has ended; the other processes wait for it.

    Raises:
        LaunchError: it could not be sent; the run is complete in its folder.
    """
    from vitctl.engine.runtime import gather_texts

    problem = ""
    if is_main_process():
        report({"kind": "now", "text": f"copying the run to {store.address}", "time": time.time()})
        try:
            store.send_missing()
        except VitctlError as error:
            problem = f"{error.passes:d}{error}"
    if problem := gather_texts(problem)[0]:
        fix = f"the run is complete in {store.folder}; send it with: vitctl resume {typed(store.folder)}"
        raise LaunchError(problem[1:], fix=fix).passing(problem[0] == "1")


def work_as_member(
    run_dir: Path,
    report: Report = silent,
    prepared: Prepared | None = None,
    *,
    locked: bool = False,
    stopped_code: int = RESUMABLE,
) -> dict[str, Any]:
    """Do `work` in one of several processes. All raise the error that came first, on any node."""
    try:
        result = work(run_dir, report, prepared, locked=locked, stopped_code=stopped_code)
    except Exception as error:
        note_error(run_dir, error)
        time.sleep(NOTES_SECONDS)
        raise_first_error(run_dir, int(os.environ.get("WORLD_SIZE", "1")))
        raise
    leave_group()
    return result


def launch(
    run_dir: Path,
    report: Report = silent,
    config: LaunchConfig = LaunchConfig(),
    prepared: Prepared | None = None,
) -> dict[str, Any]:
    """Run the recipe of a prepared folder to its end, in this process or in new ones.

    This process does the job if it is the only one or one of several. Returns the content of RUN/result.json.

    Args:
        report: called with every log record.
        prepared: the result of `prepare_run` in this process; None: the recipe is read from the folder.

    Raises:
        VitctlError: as the job raises; with several processes, the error of the first that failed or was
            killed.
        RuntimeError: a process failed with a bug.
    """
    if find_member() is not None:
        return work_as_member(run_dir, report, prepared)
    recipe = prepared.recipe if prepared else load_recipe(str(run_dir / RECIPE)).recipe
    if not config.starts(recipe):
        work(run_dir, report, prepared)
    else:
        from vitctl.launch.launcher import launch_processes

        # With several machines the process of rank 0 locks the folder, on whichever machine it runs.
        with locked_for_run(run_dir) if config.nodes == 1 else keeping_result(run_dir):
            launch_processes(run_dir, recipe, report, config)
    if (store := store_of(recipe)) and not (run_dir / RESULT).is_file():  # written on another machine
        Store(store, run_dir).get(RESULT)
    return dict(read_run_json(run_dir / RESULT))


def _join_processes(run_dir: Path, recipe: Recipe, report: Report) -> None:
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if restarts and is_main_process():
        (run_dir / RESULT).unlink(missing_ok=True)  # written by the start that failed
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if not (several or restarts):
        return
    journal = Journal(run_dir / LOG if is_main_process() else None, report)
    if several:
        from vitctl.engine.runtime import (
            check_all_reduce,
            check_gpus,
            check_same,
            gather_texts,
            node_lines,
        )

        cpu = join_group(run_dir, recipe)
        if is_main_process():
            forget_errors(run_dir)  # of an earlier start; all processes of this one wait in check_all_reduce
        if not cpu:
            check_gpus()
        check_all_reduce(cpu=cpu)
        # Only the node that lost a process counts the restart.
        restarts = max(map(int, gather_texts(str(restarts))))
    if restarts:
        journal.write(
            "warning",
            step=0,
            text=f"a process was lost or had no images, all processes were restarted (restart {restarts})",
        )
    if not several:
        return
    check_same(
        {"recipe": recipe.model_dump_json()},
        f"{run_dir / RECIPE} is not the same file on all nodes; make sure that they share {run_dir}, then "
        f"start again",
    )
    for line in node_lines(cpu=cpu):
        journal.write("node", step=0, text=line)


def join_group(run_dir: Path, recipe: Recipe) -> bool:
    """Join the process group; return whether it computes on the CPU. Raises LaunchError if some are late."""
    from vitctl.engine.runtime import join

    cpu, m = on_cpu(recipe), recipe.machine
    join(
        cpu=cpu,
        seconds=m.start_timeout,
        group_seconds=m.group_timeout + server_patience(recipe),
        recording=run_dir.absolute() / LOGS / FLIGHT,
    )
    return cpu


def patience(recipe: Recipe) -> float:
    """Return how many seconds a process may wait for a server, and the others for it."""
    return float(getattr(getattr(recipe, "data", None), "patience", 0.0))


def store_of(recipe: Recipe) -> str:
    """Return where else the run is kept; "" nowhere."""
    return str(getattr(getattr(recipe, "checkpoint", None), "store", ""))


def server_patience(recipe: Recipe) -> float:
    """Return how long the others wait for a process that waits for a server, beyond machine.group_timeout."""
    data: Any = getattr(recipe, "data", None)
    places = (
        store_of(recipe),
        getattr(data, "path", ""),
        *(part.path for part in getattr(data, "mixture", ())),
    )
    return patience(recipe) if any(map(is_remote, places)) else 0.0


def on_cpu(recipe: Recipe) -> bool:
    import torch

    return recipe.machine.device == "cpu" or not torch.cuda.is_available()


def redirect_output(run_dir: Path, streams: Sequence[int] = (1, 2)) -> None:
    """Redirect this process's output to its log, or only its errors, stream 2."""
    log = log_of(run_dir, int(os.environ.get("RANK", "0")))
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a", encoding="utf-8", opener=no_links) as file:
        for stream in streams:
            os.dup2(file.fileno(), stream)
    for stream in streams:
        name = "stdout" if stream == 1 else "stderr"
        setattr(sys, name, PlainStream(getattr(sys, name)))


def leave_group() -> None:
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def main() -> None:
    """Run `python -m vitctl.launch.worker RUN`; output and errors go to RUN/logs.

    If a person started it, rank 0 also prints one line about the outcome. The exit code tells the agent
    whether to restart all processes: 0 if the job is done or stopped, or only the user can fix the error;
    else 1.
    """
    if has_agent():
        end_with_parent(os.getppid())
    mark_start()
    try:
        find_member()
    except LaunchError as error:
        sys.exit(f"vitctl: {error}")
    run_dir = Path(sys.argv[1])
    if not (run_dir / RECIPE).is_file():
        sys.exit(
            f"vitctl: {run_dir}: not a prepared run folder; type the vitctl command of the run, without "
            f"--dry-run"
        )
    screen = None if not is_main_process() or started_by_vitctl() else os.dup(2)
    _say(screen, f"{run_dir}: progress is in {LOG}, the output of each process in {LOGS}/")
    redirect_output(run_dir)
    ignore_output_errors()  # standard output is now a file, whose disk may be full
    report = partial(_write_now, run_dir / LOGS / NOW) if is_main_process() else silent
    try:
        result = work_as_member(run_dir, report, locked=LOCKED in sys.argv, stopped_code=0)
        resume = f"; resume with: vitctl resume {typed(run_dir)}" if result["status"] == "stopped" else ""
        _say(screen, f"{result['status']}: {run_dir / RESULT}{resume}")
    except Exception as error:
        _say(
            screen,
            f"vitctl: {one_line(str(explained(error, run_dir) or f'{type(error).__name__}: {error}'))}",
        )
        sys.stderr.flush()
        would_fail_again = restarts_left() > 0 and is_final(first_error(run_dir))
        is_over = would_fail_again or read_status(run_dir) == "stopped"  # another process ended the run
        os._exit(0 if is_over else 1)  # gloo's threads may abort a process that exits normally


def _say(screen: int | None, text: str) -> None:
    """Print a line on the screen of the person who started this process, if one did."""
    if screen is not None:
        with suppress(OSError):
            os.write(screen, f"{text}\n".encode(errors="backslashreplace"))


def _write_now(path: Path, record: Record) -> None:
    """Write the current state for the process that shows progress; a full disk does not stop the run."""
    if record["kind"] == "now":
        with suppress(OSError), atomic_write(path, flushed=False) as aside:
            aside.write_text(json.dumps(record), encoding="utf-8")


if __name__ == "__main__":
    main()
