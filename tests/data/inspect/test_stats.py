import io
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitctl.data.datasets.readers.arrays import encode_png
from vitctl.data.inspect.overview import measure
from vitctl.data.source.stores import ShardSource
from vitctl.data.writer.intake import Item
from vitctl.data.writer.write import write_split

SIZES = [(10, 20), (10, 10), (30, 10), (12, 12)]
PICTURES = [
    np.random.default_rng(n).integers(0, 256, (*size, 3), dtype=np.uint8) for n, size in enumerate(SIZES)
]


def source(folder: Path, labels: list[int] | list[tuple[int, ...]]) -> ShardSource:
    items = [Item(str(n), label, partial(encode_png, PICTURES[n % 4])) for n, label in enumerate(labels)]
    return ShardSource(write_split(items, folder / "train", ("a", "b", "c"), seed=0, source_text=""))


@pytest.mark.parametrize("workers", [0, 2])
def test_measure__equals_numpy_on_the_pictures(tmp_path: Path, workers: int) -> None:
    counted: list[int] = []
    found = measure(source(tmp_path, [0, 1, 1, -1]), workers=workers, done=counted.append)
    assert (found.num_images, found.num_classes, found.num_unlabelled, found.images_per_class) == (
        4,
        3,
        1,
        (1, 2, 0),
    )
    assert (found.num_sampled, found.num_unreadable, found.formats) == (4, 0, {"png": 4})
    assert found.widths == (10, 10, 11, 14, 20) and found.heights[0] == 10 and found.heights[-1] == 30
    assert found.aspects[0] == pytest.approx(1 / 3) and found.aspects[-1] == 2
    scaled = [picture.reshape(-1, 3) / 255 for picture in PICTURES]
    mean = np.mean([pixels.mean(axis=0) for pixels in scaled], axis=0)
    std = np.sqrt(np.mean([((pixels - mean) ** 2).mean(axis=0) for pixels in scaled], axis=0))
    assert found.mean == pytest.approx(mean.tolist(), abs=1e-6)
    assert found.std == pytest.approx(std.tolist(), abs=1e-6)
    assert found.mean_bytes == np.mean([len(encode_png(picture)) for picture in PICTURES])
    assert sum(counted) in (0, 4)


def test_measure__several_labels_count_in_each_class(tmp_path: Path) -> None:
    found = measure(source(tmp_path, [(0, 2), (1,), (), (2,)]), num_images=2)
    assert (found.images_per_class, found.num_unlabelled, found.num_sampled) == ((1, 1, 2), 1, 2)


def test_measure__bad_images_are_counted(tmp_path: Path) -> None:
    items = [
        Item("cut", 0, lambda: encode_png(PICTURES[0])[:60]),
        Item("whole", 0, lambda: encode_png(PICTURES[1])),
    ]
    found = measure(ShardSource(write_split(items, tmp_path / "train", ("a",), seed=0, source_text="")))
    assert (found.num_sampled, found.num_unreadable, found.formats) == (2, 1, {"png": 2})
    assert found.widths == (10,) * 5
    only = measure(ShardSource(write_split(items[:1], tmp_path / "bad", ("a",), seed=0, source_text="")))
    assert (only.num_unreadable, only.widths, only.mean) == (1, (), (0, 0, 0))


def test_measure__counts_photographs_that_exif_turns_and_measures_them_upright(tmp_path: Path) -> None:
    def photo(orientation: int) -> bytes:
        exif, file = Image.Exif(), io.BytesIO()
        exif[0x0112] = orientation
        Image.new("RGB", (20, 10)).save(file, "JPEG", exif=exif)
        return file.getvalue()

    items = [Item(str(n), 0, partial(photo, n)) for n in (1, 3, 6)]
    found = measure(ShardSource(write_split(items, tmp_path / "train", ("a",), seed=0, source_text="")))
    assert found.num_turned == 2
    assert (found.widths, found.heights) == ((10, 15, 20, 20, 20), (10, 10, 10, 15, 20))
