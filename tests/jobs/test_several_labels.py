"""Images with several labels each, from shards to a score."""

import io
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import TINY
from tests.trained import CPU, do
from vitctl import load_recipe, open_split
from vitctl.data.writer.intake import Item
from vitctl.data.writer.shard_writer import write_split
from vitctl.errors import DataError, RecipeError
from vitctl.jobs.predict import predict


def tinted(labels: tuple[int, ...], seed: int) -> bytes:
    """A picture whose red, green and blue tell its labels."""
    pixels = np.random.default_rng(seed).integers(0, 60, (16, 16, 3))
    pixels[:, :, list(labels)] += 150
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    sets = [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)]
    for split, size in (("train", 56), ("test", 21)):
        items = [
            Item(f"{split}{n}", sets[n % 7], partial(tinted, sets[n % 7], 1000 * size + n))
            for n in range(size)
        ]
        write_split(items, tmp_path / "rgb" / split, ("r", "g", "b"), seed=0, source_text="tinted noise")
    return tmp_path / "rgb"


@pytest.mark.slow
def test_several_labels__are_learned_and_scored(shards: Path, tmp_path: Path) -> None:
    values = {
        "data.path": str(shards),
        "data.crop": "none",
        "schedule.total_steps": 60,
        "loss.name": "sigmoid",
        **CPU,
    }
    result = do(TINY, tmp_path / "run", **values)
    assert (result["metrics"]["total"], result["metrics"]["correct"]) == (21, 21)  # by chance 12 of 21
    scored = do(
        "evaluate", tmp_path / "score", **{"weights.source": str(tmp_path / "run"), "data.path": str(shards)}
    )
    assert scored["metrics"]["correct"] == 21
    assert scored["metrics"]["map"] > 0.95  # by chance the share of images that have a class, 4 of 7
    thresholds = scored["files"]["thresholds"]
    fitted = {"weights.source": str(tmp_path / "run"), "data.path": str(shards)}
    fitted |= {"evaluation.thresholds": thresholds}
    with pytest.raises(DataError, match="its thresholds were chosen by 21 of these 21 images"):
        do("evaluate", tmp_path / "seen", **fitted)
    with pytest.raises(DataError, match="its thresholds were chosen by 10 of these 10 images"):
        do("evaluate", tmp_path / "part", **fitted, **{"data.eval_split": "test[:50%]"})
    copied = shutil.copy(thresholds, tmp_path / "copied.csv")
    do("evaluate", tmp_path / "copy", **fitted | {"evaluation.thresholds": copied})
    assert "it is unknown which images chose its thresholds" in (tmp_path / "copy/log.jsonl").read_text()
    fitted |= {"data.eval_split": "train"}
    again = do("evaluate", tmp_path / "fitted", **fitted)["metrics"]
    assert again["f1"] > 0.9
    assert "chose its thresholds" not in (tmp_path / "fitted" / "log.jsonl").read_text()
    assert again["subset_accuracy"] > 0.8
    source = open_split("test", path=shards)
    recipe = load_recipe(
        "evaluate", [("weights.source", str(tmp_path / "run")), ("machine.device", "cpu")]
    ).recipe
    [told] = predict(recipe, [source], threshold=0.5)
    found = [{"rgb".index(name) for name, _ in one.classes} for one in told]
    assert sum(own == {*row} - {-1} for own, row in zip(found, source.labels().tolist(), strict=True)) >= 12
    assert max(sum(p for _, p in one.classes) for one in told) > 1  # each class has a probability of its own
    with pytest.raises(
        RecipeError, match=r"'softmax' needs one label per image, .* type --set loss.name=sigmoid"
    ):
        do(TINY, tmp_path / "softmax", **{**values, "loss.name": "softmax"})
