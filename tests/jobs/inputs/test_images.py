"""Which images an input of the command line names."""

import io
import shutil
from pathlib import Path

import pytest

from vitctl.errors import DataError
from vitctl.jobs.inputs.images import find_images
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
