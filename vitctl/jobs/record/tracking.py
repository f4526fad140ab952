"""Experiment trackers: a tracker run for each training, with its whole recipe, closed however the training ends."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from vitctl.engine.distributed.runtime import Runtime
from vitctl.engine.journal import LOG, never_raising
from vitctl.recipe.schema import TrainRecipe
from vitctl.recipe.write import toml_value

PROJECT = "tracking"


@contextmanager
def tracking(runtime: Runtime, recipe: TrainRecipe, folder: Path) -> Iterator[None]:
    """Within the block, what is logged goes to log.trackers; a tracker that writes files does so in FOLDER/tracking.

    Args:
        runtime: started with these trackers.
        recipe: of this training: of a sweep's rates and of VTAB's tasks each has its own.
        folder: of this training.
    """
    if not recipe.log.trackers:
        yield
        return
    accelerator = runtime.accelerator
    accelerator.project_configuration.logging_dir = str(folder)
    accelerator.init_trackers(PROJECT, config={"folder": str(folder), **tracker_config(recipe.model_dump())})
    for tracker in accelerator.trackers:
        log = folder / LOG if runtime.is_main else None
        tracker.log = never_raising(tracker.log, log, f"{tracker.name} takes no more numbers")
    try:
        yield
    finally:
        for tracker in accelerator.trackers:
            with suppress(Exception):  # what it could not send ends nothing, and hides no error
                tracker.finish()
        accelerator.trackers.clear()


def tracker_config(values: Mapping[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    """All values of a recipe under their dotted keys; lists as TOML writes them, what is unset as ""."""
    found: dict[str, bool | int | float | str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= tracker_config(value, f"{prefix}{key}.")
        elif isinstance(value, bool | int | float | str):
            found[f"{prefix}{key}"] = value
        else:
            found[f"{prefix}{key}"] = toml_value(value)
    return found
