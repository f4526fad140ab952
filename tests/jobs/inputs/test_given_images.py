"""Which images an input of the command line names."""

import io
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitctl.data.images.transforms import EvalTransform
from vitctl.data.shards.index import read_index
from vitctl.data.source.stores import ShardSource
from vitctl.errors import DataError
from vitctl.jobs.inputs.given_images import ChosenImages, choose_images, find_images
from vitctl.recipe.images import Place


def found(*inputs: str, split: str = "", stdin: bytes = b"") -> tuple[list[str], list[str]]:
    """Names of the images, and what was noted."""
    notes: list[str] = []
    sources = find_images(inputs, Place(), split=split, stdin=io.BytesIO(stdin), note=notes.append)
    return [source.key(number) for source in sources for number in range(len(source))], notes


@pytest.mark.parametrize("name", ["ok:x.jpg", "a:b:c.PNG", "train:1.webp"])
def test_address__of_an_image_with_a_colon_is_no_split(name: str) -> None:
    assert found(f"https://example.com/photos/{name}")[0] == [f"https://example.com/photos/{name}"]


def test_shards__of_one_split_are_all_taken_and_that_is_said(tiny_data: Path, tmp_path: Path) -> None:
    """`evaluate --data` scores the part that training leaves out: the two are not the same images."""
    shutil.copytree(tiny_data / "train", tmp_path / "data" / "train")
    names, notes = found(str(tmp_path / "data"))
    assert len(names) == 70
    assert notes == [
        f"{tmp_path}/data: all images of its only split, train; --split chooses others, such as those that "
        f"evaluate scores"
    ]
    nine, silent = found(str(tmp_path / "data"), split="train[:9]")
    assert (len(nine), set(nine) <= set(names), silent) == (9, True, [])
    assert found(f"{tmp_path}/data:train[:9]") == (nine, [])


def test_shards__of_several_splits_have_to_be_chosen(tiny_data: Path) -> None:
    with pytest.raises(DataError, match=r"has the splits .*; choose one"):
        found(str(tiny_data))


def test_list__a_line_that_no_name_can_be_is_a_bad_image(tmp_path: Path) -> None:
    """It ended the whole list."""
    (tmp_path / "a.jpg").write_bytes(b"x")
    names, _ = found("-", stdin=f"{tmp_path}/a.jpg\n{'a' * 5000}\n".encode())
    assert names == [f"{tmp_path}/a.jpg", "a" * 5000]


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
