"""Experiment trackers: one tracker run for each training, with its whole recipe, closed however the training ends."""

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
        recipe: of this training; each learning rate of a sweep and each task of VTAB has its own.
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
        tracker.log = never_raising(tracker.log, log, f"{tracker.name} cannot be written any more")
    try:
        yield
    finally:
        for tracker in accelerator.trackers:
            with suppress(Exception):  # a tracker that fails must neither end the run nor hide its error
                tracker.finish()
        accelerator.trackers.clear()


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
