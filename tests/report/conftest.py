"""Helpers of these tests."""

from pathlib import Path
from typing import Any

from vitctl.jobs.record.result import RunResult, write_result
from vitctl.recipe.load import Override, load_recipe
from vitctl.recipe.write import to_toml

SIZES = {
    "imagenet": (1_281_167, 50_000),
    "pets": (3_680, 3_669),
    "cifar10": (50_000, 10_000),
    "jft300m": (303_000_000, 49_511),
}


def finished(
    runs: Path,
    name: str,
    recipe: str,
    metrics: dict[str, Any],
    values: dict[str, Any] | None = None,
    **used: Any,
) -> Path:
    """A folder as a finished run of a shipped recipe leaves it, on all images of its data set where `used`
    does not say else.
    """
    folder = runs / name
    folder.mkdir(parents=True)
    loaded = load_recipe(recipe, [Override(key, value) for key, value in (values or {}).items()])
    (folder / "recipe.toml").write_text(to_toml(loaded))
    data = getattr(loaded.recipe, "data", None)
    sizes = SIZES.get(getattr(data, "dataset", ""), (0, 0))
    whole = {
        "num_train": sizes[0],
        "num_images": sizes[1],
        "data_source": "the original files",
        "data_verified": "whole",
    }
    files = {"model": f"{folder}/checkpoints/step_00000500/model.safetensors"}
    write_result(folder, RunResult(loaded.recipe.job, "done", metrics, whole | used, files))
    return folder
