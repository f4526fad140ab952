"""The body of every process: read RUN/recipe.toml, do the job, leave RUN/result.json."""

import json
import os
import sys
import time
import traceback
from pathlib import Path

from vitctl.engine.journal import Report, silent, write_json
from vitctl.engine.preemption import Stopped, stop_on_signals
from vitctl.errors import VitctlError
from vitctl.jobs.evaluate import evaluate
from vitctl.jobs.export import export
from vitctl.jobs.fewshot import fewshot
from vitctl.jobs.finetune import finetune
from vitctl.jobs.pretrain import pretrain
from vitctl.jobs.result import RunResult, write_result
from vitctl.jobs.vtab import vtab
from vitctl.recipe.load import load_recipe

JOBS = {
    "pretrain": pretrain,
    "finetune": finetune,
    "fewshot": fewshot,
    "vtab": vtab,
    "evaluate": evaluate,
    "export": export,
}
LOGS = "logs"


def work(run_dir: Path, report: Report = silent) -> RunResult:
    """Do the job of RUN/recipe.toml in this process, one of as many as the recipe says.

    Returns:
        the result, also written to RUN/result.json by the main process; status "stopped" after a signal.

    Raises:
        VitctlError: the user can mend it.
    """
    recipe = load_recipe(str(run_dir / "recipe.toml")).recipe
    with stop_on_signals() as stop:
        try:
            result = JOBS[recipe.job](recipe, run_dir, report, stop)  # type: ignore[operator]
        except Stopped:
            result = RunResult(recipe.job, "stopped")
    if int(os.environ.get("RANK", "0")) == 0:
        write_result(run_dir, result)
    return result


def main() -> None:
    """One of several processes started by accelerate: quiet, its output and its error go to RUN/logs."""
    run_dir, rank = Path(sys.argv[1]), int(os.environ.get("RANK", "0"))
    log = run_dir / LOGS / f"rank_{rank:02d}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        work(run_dir)
    except Exception as error:
        traceback.print_exc()
        sys.stderr.flush()
        mendable = isinstance(error, VitctlError)
        text = str(error) if mendable else f"{type(error).__name__}: {error}"
        note = {"rank": rank, "time": time.time(), "mendable": mendable, "text": text, "log": str(log)}
        write_json(run_dir / LOGS / f"error_{rank:02d}.json", note)
        os._exit(1)
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def first_error(run_dir: Path) -> dict[str, object] | None:
    """The note of the process that failed first in the last launch; None when none did."""
    notes = [json.loads(path.read_text(encoding="utf-8")) for path in (run_dir / LOGS).glob("error_*.json")]
    return min(notes, key=lambda note: note["time"], default=None)


if __name__ == "__main__":
    main()
