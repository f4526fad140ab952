"""The records of run folders, sweeps and folders of runs, read from disk without changing anything."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitctl.engine.journal import ENVIRONMENT, LAUNCH, LOG, RECIPE, Record, read_run_json
from vitctl.errors import CheckpointError, VitctlError
from vitctl.jobs.record.result import RunResult, read_own_records, read_result
from vitctl.recipe.load import Loaded, load_recipe
from vitctl.recipe.write import written_name
from vitctl.report.sweep_table import TABLE
from vitctl.system import limits
from vitctl.system.files import inside, read_bytes

_MAX_LAUNCH_BYTES = 2**16


@dataclass(frozen=True)
class RunRecords:
    """The records of a run folder.

    Args:
        name: in the page.
        recipe_name: of the original recipe; "" if the file does not say.
        recipe: None if recipe.toml is not valid here; then `problems` says why.
        result: None before the run has one.
        environment, launch: env.json and launch.txt; empty if missing.
        problems: what could not be read, one line each.
    """

    folder: Path
    name: str
    recipe_name: str
    recipe: Loaded | None
    recipe_text: str
    result: RunResult | None
    environment: Mapping[str, Any]
    launch: str
    records: Sequence[Record]
    problems: Sequence[str]

    @property
    def job(self) -> str:
        """Return pretrain, finetune, ...; "" if neither the result nor the recipe is readable."""
        if self.result is not None:
            return self.result.job
        return self.recipe.recipe.job if self.recipe else ""

    @property
    def status(self) -> str:
        return self.result.status if self.result else "not finished"

    @property
    def metrics(self) -> Mapping[str, Any]:
        return self.result.metrics if self.result else {}

    @property
    def provenance(self) -> Mapping[str, Any]:
        return self.result.provenance if self.result else {}


@dataclass(frozen=True)
class SweepRecords:
    """A folder of `vitctl sweep`: the rows of its sweep.json, and its runs."""

    folder: Path
    rows: Sequence[Mapping[str, Any]]
    runs: Sequence[RunRecords]


def run_folders(root: Path) -> Iterator[Path]:
    """Yield the run folders in a folder and in its direct subfolders, such as sweeps."""
    for path in root.iterdir() if root.is_dir() else ():
        if _is_run(path):
            yield path
        elif path.is_dir() and not path.is_symlink():
            yield from (inner.parent for inner in path.glob(f"*/{RECIPE}"))


def read_folders(folders: Sequence[Path]) -> tuple[list[RunRecords], list[SweepRecords]]:
    """Read runs, sweeps, and folders of both. Raises CheckpointError if a folder is none of them."""
    runs: dict[Path, RunRecords] = {}
    sweeps: dict[Path, SweepRecords] = {}
    names = Counter(folder.resolve().name for folder in folders)
    for folder in folders:
        if not folder.is_dir():
            raise CheckpointError(folder, "no such folder", f"give run folders, such as {Path('runs')}/NAME")
        is_itself = _is_run(folder) or _is_sweep(folder)
        found = {path.resolve(): path for path in ([folder] if is_itself else sorted(folder.iterdir()))}
        new = [
            read_run(path, str(path) if names[place.name] > 1 else place.name)
            for place, path in found.items()
            if _is_run(path)
        ]
        sweeps |= {p: _read_sweep(path) for p, path in found.items() if _is_sweep(path) and not _is_run(path)}
        if not new and not sweeps.keys() & found.keys():
            raise CheckpointError(
                folder, "holds no run", "give run folders, a sweep's folder, or a folder of runs"
            )
        runs |= {run.folder.resolve(): run for run in sorted(new, key=_began)}
    return list(runs.values()), list(sweeps.values())


def read_run(folder: Path, name: str) -> RunRecords:
    """Read a run folder. What cannot be read is recorded as a problem, not raised."""
    problems: list[str] = []

    def attempt(read: Callable[[], Any], default: Any) -> Any:
        try:
            return read()
        except (VitctlError, OSError, ValueError) as error:
            problems.append(str(error))
            return default

    def text(file: Path, limit: int) -> str:
        return read_bytes(file, limit, error=CheckpointError).decode(errors="replace")

    recipe, environment, launch = folder / RECIPE, folder / ENVIRONMENT, folder / LAUNCH
    recipe_text = attempt(lambda: text(recipe, limits.RECIPE), "")
    env = attempt(lambda: read_run_json(environment), {}) if environment.exists() else {}
    return RunRecords(
        folder,
        name,
        Path(attempt(lambda: written_name(recipe), "")).name,
        attempt(lambda: load_recipe(str(recipe)), None),
        recipe_text,
        attempt(lambda: read_result(folder), None),
        env if isinstance(env, dict) else {},
        attempt(lambda: text(launch, _MAX_LAUNCH_BYTES).strip(), "") if launch.exists() else "",
        attempt(lambda: read_own_records(folder), []),
        problems,
    )


def inner_trainings(folder: Path) -> dict[str, list[Record]]:
    """Return the logs of the trainings inside a run - tasks of VTAB, rates, seeds - by their folder."""
    logs = sorted(path for path in folder.glob(f"**/{LOG}") if path.parent != folder)
    return {str(path.parent.relative_to(folder)): read_own_records(path.parent) for path in logs}


def _is_run(folder: Path) -> bool:
    return (folder / RECIPE).is_file()


def _is_sweep(folder: Path) -> bool:
    return (folder / f"{TABLE}.json").is_file()


def _read_sweep(folder: Path) -> SweepRecords:
    try:
        rows = read_run_json(folder / f"{TABLE}.json")["runs"]
        kept = [row for row in rows if isinstance(row["run"], str) and isinstance(row["varied"], dict)]
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(
            f"{folder / TABLE}.json",
            "not the table of a sweep",
            f"run `vitctl sweep` again with --out {folder}",
        ) from None
    cells = [inside(folder, Path(row["run"]).name, error=CheckpointError) for row in kept]
    return SweepRecords(folder, kept, [read_run(cell, cell.name) for cell in cells if _is_run(cell)])


def _began(run: RunRecords) -> tuple[float, str]:
    """Return a sort key: the time of the first record. Runs without records come last."""
    return min((record["time"] for record in run.records if "time" in record), default=math.inf), run.name
