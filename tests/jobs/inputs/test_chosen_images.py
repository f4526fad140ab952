"""Images to look at: of files, of folders, of a split."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitctl.data.images.transforms import EvalTransform
from vitctl.data.shards.index import read_index
from vitctl.data.source.stores import ShardSource
from vitctl.errors import DataError
from vitctl.jobs.inputs.chosen_images import ChosenImages, choose_images
from vitctl.jobs.inputs.images import find_images
from vitctl.recipe.images import Place


def of_files(paths: list[Path], num_images: int, seed: int) -> ChosenImages:
    """As `vitctl inspect PATHS` chooses them."""
    sources = find_images([str(path) for path in paths], Place(), stdin=io.BytesIO(), note=lambda _: None)
    return choose_images(sources, num_images, seed, "files")


def jpeg(value: int) -> bytes:
    held = io.BytesIO()
    Image.fromarray(np.full((20, 30, 3), value, np.uint8)).save(held, "JPEG")
    return held.getvalue()


def test_files__are_chosen_by_content_and_name(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "__MACOSX").mkdir()
    for name in ("b.jpg", "in/a", "__MACOSX/c.jpg"):
        (tmp_path / name).write_bytes(jpeg(200))
    (tmp_path / "text").write_text("no image")
    found = of_files([tmp_path], 10, 0)
    assert found.names == (str(tmp_path / "b.jpg"), str(tmp_path / "in" / "a"))
    assert (found.labels, found.class_names, len(found)) == ((-1, -1), (), 2)
    done: list[tuple[int, int]] = []
    pixels = found.pixels(EvalTransform(8), lambda *numbers: done.append(numbers))
    assert pixels.shape == (2, 3, 8, 8)
    assert pixels.unique().tolist() == [200]
    assert done == [(1, 2), (2, 2)]


def test_files__more_than_wanted_are_drawn_by_the_seed(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number:02d}.jpg").write_bytes(jpeg(number))
    first = of_files([tmp_path], 5, 0).names
    assert len(set(first)) == 5 and list(first) == sorted(first)
    assert of_files([tmp_path], 5, 0).names == first != of_files([tmp_path], 5, 1).names


def test_files__that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "cut.jpg").write_bytes(jpeg(5)[:200])
    with pytest.raises(DataError, match=r"cut\.jpg: cannot be used \(.*\); fix it, or leave it out"):
        of_files([tmp_path], 5, 0).pixels(EvalTransform(8))


def test_split__has_labels_and_keys(tiny_data: Path) -> None:
    source = ShardSource(read_index(tiny_data / "test"))
    found = choose_images([source], 7, 0, "tiny test")
    assert len(found) == 7 and found.text == "tiny test"
    assert found.class_names == tuple(source.class_names)
    keys = [source.key(sample) for sample in range(len(source))]
    labels = source.labels()
    assert [labels[keys.index(name)] for name in found.names] == list(found.labels)
    assert found.pixels(EvalTransform(16)).shape == (7, 3, 16, 16)
