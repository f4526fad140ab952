"""What a page is about: runs, sweeps and folders of runs, read from disk without changing anything."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitctl.engine.journal import LOG, Record, read_records, read_run_json
from vitctl.engine.run_files import RECIPE
from vitctl.errors import CheckpointError, VitctlError
from vitctl.jobs.record.result import RunResult, read_result
from vitctl.recipe.load import Loaded, load_recipe
from vitctl.recipe.write import written_name
from vitctl.report.sweep_table import TABLE
from vitctl.system.bounds import RECIPE as RECIPE_SIZE
from vitctl.system.files import inside, read_bytes

ENVIRONMENT, LAUNCH = "env.json", "launch.txt"
_MOST_LAUNCH = 2**16


@dataclass(frozen=True)
class FoundRun:
    """A run folder.

    Args:
        folder: as given.
        name: in the page.
        recipe_name: that it was made from, without its folder; "" where the file does not say.
        recipe: None where recipe.toml is not valid here; then `problems` says why.
        recipe_text: recipe.toml as it is.
        result: None while there is none.
        environment, launch: env.json and launch.txt; empty where missing.
        records: of log.jsonl.
        problems: what could not be read, a line each.
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
    problems: tuple[str, ...] = ()

    @property
    def job(self) -> str:
        """pretrain, finetune, ...; "" where neither result nor recipe says."""
        if self.result is not None:
            return self.result.job
        return self.recipe.recipe.job if self.recipe else ""

    @property
    def status(self) -> str:
        """Of the result; "not finished" without one."""
        return self.result.status if self.result else "not finished"

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Of the result; empty without one."""
        return self.result.metrics if self.result else {}

    @property
    def provenance(self) -> Mapping[str, Any]:
        """Of the result; empty without one."""
        return self.result.provenance if self.result else {}


@dataclass(frozen=True)
class FoundSweep:
    """A folder of `vitctl sweep`: the rows of its sweep.json, and its runs."""

    folder: Path
    rows: Sequence[Mapping[str, Any]] = field(default_factory=list)
    runs: Sequence[FoundRun] = ()


@dataclass(frozen=True)
class Found:
    """Everything that a page shows."""

    runs: Sequence[FoundRun]
    sweeps: Sequence[FoundSweep] = ()


def find_all(folders: Sequence[Path]) -> Found:
    """The runs and sweeps of some folders: each is a run, a sweep, or a folder of runs, as `runs` or
    `quickstart`.

    Raises:
        CheckpointError: a folder is none of them.
    """
    runs: dict[Path, FoundRun] = {}
    sweeps: dict[Path, FoundSweep] = {}
    names = Counter(folder.resolve().name for folder in folders)
    for folder in folders:
        if (folder / RECIPE).is_file():
            name = folder.resolve().name
            runs[folder.resolve()] = read_run(folder, name if names[name] == 1 else str(folder))
        elif (folder / f"{TABLE}.json").is_file():
            sweeps[folder.resolve()] = _read_sweep(folder)
        elif folder.is_dir():
            inner = [path for path in sorted(folder.iterdir()) if path.is_dir()]
            sweeps |= {
                path.resolve(): _read_sweep(path) for path in inner if (path / f"{TABLE}.json").is_file()
            }
            own = [read_run(path, path.name) for path in inner if (path / RECIPE).is_file()]
            runs |= {run.folder.resolve(): run for run in sorted(own, key=_began)}
            if not own and not any(path.resolve() in sweeps for path in inner):
                raise CheckpointError(
                    f"{folder}: holds no run; give run folders, a sweep's folder, or a folder of runs"
                )
        else:
            raise CheckpointError(f"{folder}: no such folder; give run folders, such as {Path('runs')}/NAME")
    return Found(list(runs.values()), list(sweeps.values()))


def read_run(folder: Path, name: str) -> FoundRun:
    """A run folder; what cannot be read of it is a problem to show, not an error."""
    problems: list[str] = []

    def attempt(read: Any, otherwise: Any) -> Any:
        try:
            return read()
        except (VitctlError, OSError, ValueError) as error:
            problems.append(str(error))
            return otherwise

    file = folder / RECIPE
    text = attempt(
        lambda: read_bytes(file, RECIPE_SIZE.limit, error=CheckpointError).decode(errors="replace"), ""
    )
    environment = (
        attempt(lambda: read_run_json(folder / ENVIRONMENT), {}) if (folder / ENVIRONMENT).exists() else {}
    )
    launch = folder / LAUNCH
    return FoundRun(
        folder,
        name,
        Path(attempt(lambda: written_name(file), "")).name,
        attempt(lambda: load_recipe(str(file)), None),
        text,
        attempt(lambda: read_result(folder), None),
        environment if isinstance(environment, dict) else {},
        attempt(lambda: read_bytes(launch, _MOST_LAUNCH, error=CheckpointError).decode(errors="replace").strip(), "")
        if launch.exists() else "",
        attempt(lambda: read_records(folder / LOG), []),
        tuple(problems),
    )  # fmt: skip


def inner_trainings(folder: Path) -> dict[str, list[Record]]:
    """The logs of the trainings inside a run - tasks of VTAB, rates of a sweep, seeds - by their folder."""
    logs = sorted(path for path in folder.glob(f"**/{LOG}") if path.parent != folder)
    return {str(path.parent.relative_to(folder)): read_records(path) for path in logs}


def _read_sweep(folder: Path) -> FoundSweep:
    try:
        rows = read_run_json(folder / f"{TABLE}.json")["runs"]
        kept = [row for row in rows if isinstance(row["run"], str) and isinstance(row["varied"], dict)]
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(
            f"{folder / TABLE}.json: not the table of a sweep; run `vitctl sweep` again with --out {folder}"
        ) from None
    cells = [inside(folder, Path(row["run"]).name, error=CheckpointError) for row in kept]
    runs = [read_run(cell, cell.name) for cell in cells if (cell / RECIPE).is_file()]
    return FoundSweep(folder, kept, runs)


def _began(run: FoundRun) -> tuple[float, str]:
    """Runs in the order in which they were made; a run without any record comes last."""
    times = [record["time"] for record in run.records if "time" in record]
    return (min(times) if times else float("inf"), run.name)
