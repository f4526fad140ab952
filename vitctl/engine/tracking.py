"""Experiment trackers: one tracker run for each training, with its whole recipe, closed however the training
ends.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from vitctl.engine.agreement import run_of
from vitctl.engine.journal import LOG, never_raising
from vitctl.engine.runtime import Runtime
from vitctl.recipe.schema import TrainRecipe
from vitctl.recipe.write import toml_value

PROJECT, FILES = (
    "vitctl",
    "tracking",
)  # the name of the project; where trackers of files write, in the run folder


@contextmanager
def tracking(runtime: Runtime, recipe: TrainRecipe, folder: Path) -> Iterator[None]:
    """Within the block, what is logged goes to log.trackers: a run of the project vitctl, named by run folder
    and training.

    A tracker that writes files does so in FOLDER/tracking.

    Args:
        runtime: started with these trackers.
        recipe: of this training; each learning rate of a sweep and each task of VTAB has its own.
        folder: of this training.
    """
    if not recipe.log.trackers:
        yield
        return
    accelerator = runtime.accelerator
    files, name = folder / FILES, training_name(folder)
    accelerator.project_configuration.logging_dir = str(files)
    if runtime.is_main:
        files.mkdir(parents=True, exist_ok=True)
    accelerator.init_trackers(
        PROJECT,
        config={"folder": str(folder), **tracker_config(recipe.model_dump())},
        init_kwargs={
            "wandb": {"name": name, "dir": str(files)},
            "mlflow": {"run_name": name},
            "trackio": {"name": name},
        },
    )
    for tracker in accelerator.trackers:
        log = folder / LOG if runtime.is_main else None
        tracker.log = never_raising(tracker.log, log, f"{tracker.name} cannot be written any more")
    try:
        yield
    finally:
        for tracker in accelerator.trackers:
            with suppress(Exception):  # a tracker that fails must neither end the run nor hide its error
                tracker.finish()
        accelerator.trackers.clear()


def training_name(folder: Path) -> str:
    """The name of a training in a tracker: its run folder, and where it lies inside, such as
    NAME/sweep/lr_0.01.
    """
    place = folder.resolve()
    return str(place.relative_to(run_of(place).parent))


def tracker_config(values: Mapping[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    """All values of a recipe under their dotted keys; lists as TOML text, unset values as ""."""
    found: dict[str, bool | int | float | str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= tracker_config(value, f"{prefix}{key}.")
        elif isinstance(value, bool | int | float | str):
            found[f"{prefix}{key}"] = value
        else:
            found[f"{prefix}{key}"] = toml_value(value)
    return found
