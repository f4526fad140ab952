"""`bench data`: its numbers agree with each other."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.bench.conftest import tiny_recipe
from vitctl.bench import loader as module
from vitctl.bench.budget import Budget
from vitctl.bench.loader import LoaderRate, bench_data, image_parts, measure_images, scaled_gain
from vitctl.data.images.transforms import EvalTransform, TrainTransform, augmentation_rng
from vitctl.data.shards.index import read_index
from vitctl.data.source.shard_source import ShardSource
from vitctl.data.source.unsharded import SyntheticSource
from vitctl.data.writer.items import Item
from vitctl.data.writer.write import write_split
from vitctl.errors import DataError
from vitctl.jobs.training import Images


def test_data__numbers_agree(tiny_data: Path) -> None:
    recipe = tiny_recipe(**{"data.path": str(tiny_data), "machine.workers": 1})
    found = bench_data(recipe, Budget(1.0), step_rate=1e-3)
    assert found["images_per_second"] == found["images"] / found["seconds"] == found["images_per_worker"]
    assert found["images_per_cpu_second"] == pytest.approx(found["images"] / found["cpu_seconds"])
    assert set(found["split"]) == {"read", "decode", "augment"}
    assert (found["step_images_per_second"], found["step_source"]) == (1e-3, "as given")
    assert found["verdict"].startswith("The loader is not the bottleneck")
    assert found["image_bytes"] > 0
    assert found["num_images"] == 70


def test_data__the_step_is_measured_where_none_is_given(tiny_data: Path) -> None:
    found = bench_data(tiny_recipe(**{"data.path": str(tiny_data), "machine.workers": 0}), Budget(2.0))
    assert found["step_images_per_second"] > 0
    assert found["step_source"].startswith("measured here, ")


def test_parts__add_up_to_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that ticks a second at each look: read 1, opened 1, decoded 1, all of it 6 ticks."""
    now = iter(range(100))
    monkeypatch.setattr(module.time, "perf_counter", lambda: float(next(now)))
    source, transform = SyntheticSource(10, 2, 64), TrainTransform(32)
    parts, num_bytes = image_parts(source, 3, transform, seed=0, epoch=0)
    assert parts == {
        "read": 1.0,
        "decode": 2.0,
        "augment": 2.0,
    }  # looks at 0, 1, 2, then 3 and 4 around the decoder, 5
    assert num_bytes == len(source.read(3))


def test_parts__the_image_is_that_of_the_loader() -> None:
    """The clock around the decoder changes no pixel."""
    seen: list[Any] = []

    class Spy(TrainTransform):
        def apply(self, picture: Any, drawn: Any) -> Any:
            seen.append(super().apply(picture, drawn))
            return seen[-1]

    source = SyntheticSource(10, 2, 64)
    image_parts(source, 3, Spy(32), seed=5, epoch=1)
    from vitctl.data.images.decode import open_picture

    plain = TrainTransform(32)(open_picture(source.read(3)), augmentation_rng(5, 1, 3))
    assert (seen[0] == plain).all()


def test_scaled__is_worth_it_for_large_photographs(tmp_path: Path) -> None:
    file, line = io.BytesIO(), np.linspace(0, 255, 2048).astype(np.uint8)
    Image.fromarray(np.stack([np.broadcast_to(line, (2048, 2048))] * 3, axis=-1)).save(file, "JPEG")
    data = file.getvalue()
    items = [Item(f"{n}", 0, lambda: data, len(data)) for n in range(4)]
    write_split(items, tmp_path / "s", ("a",), seed=0, source_text="")
    images = Images(
        ShardSource(read_index(tmp_path / "s")), TrainTransform(32, crop="none"), None, EvalTransform(32)
    )
    split, _ = measure_images(images, 0, Budget(2.0))
    assert scaled_gain(images, split, 0, Budget(2.0)) > 0.5
    assert (
        scaled_gain(images, {**split, "augment": 9.0}, 0, Budget(0.0)) == 0
    )  # decoding is not what takes the time
    scaled = replace(images, augmentation=replace(images.augmentation, decode="scaled"))
    assert scaled_gain(scaled, split, 0, Budget(0.0)) == 0


def test_rate__of_little_or_of_broken_images_has_a_note() -> None:
    assert LoaderRate(1, 2000, 2.0, 1.5).notes == []
    early = LoaderRate(2, 64, 0.005, 0.0)
    assert (early.images_per_cpu_second, len(early.notes)) == (0.0, 1)
    assert "for 0.005 s on 64 images, some made before: its rate says little" in early.notes[0]
    (note,) = LoaderRate(1, 2000, 2.0, 1.5, bad=27).notes
    assert note.startswith("27 of the 2,000 images could not be used")


def test_data__noise_is_refused() -> None:
    with pytest.raises(DataError, match="measures a loader on its own images"):
        bench_data(tiny_recipe(**{"data.synthetic": 10, "data.path": ""}), Budget(1.0))
