"""ImageNet-21k: the authors' 21,843 numbers, whatever is on disk."""

from pathlib import Path

import pytest

from tests.data.datasets.conftest import labels, plant, sizes, tar_of
from vitctl.data.datasets.readers.files import class_list
from vitctl.data.datasets.readers.imagenet21k import NUM_CLASSES, read
from vitctl.errors import DataError

WNIDS = class_list("imagenet21k")
FIRST, THIRD, LAST = WNIDS[0], WNIDS[2], WNIDS[-1]
EXPECTED = {f"{FIRST}_4.JPEG": 0, f"{THIRD}_9.JPEG": 2, f"{LAST}_1.JPEG": 21_842}


def name(wnid: str) -> str:
    return next(key for key in EXPECTED if key.startswith(wnid))


def test_class_list__is_the_authors() -> None:
    imagenet = set(class_list("imagenet"))
    assert len(WNIDS) == len(set(WNIDS)) == NUM_CLASSES
    assert list(WNIDS) == sorted(WNIDS)
    assert {"n03931044", "n09859684"} <= set(WNIDS)  # those that have no image in the release of fall 2011
    assert imagenet - set(WNIDS) == {"n04399382"}


@pytest.mark.parametrize("inside", ["", "fall11/"])
def test_read__one_archive_of_archives(tmp_path: Path, inside: str) -> None:
    picture = plant(tmp_path / "any.jpg", 7)
    synsets = {f"{inside}{wnid}.tar": tar_of({name(wnid): picture}) for wnid in (LAST, FIRST, THIRD)}
    (tmp_path / "fall11_whole.tar").write_bytes(tar_of(synsets))
    splits = read(tmp_path)
    assert labels(splits["train"]) == EXPECTED
    assert splits["train"].class_names == WNIDS
    assert {item.read() for item in splits["train"].items} == {picture}


def test_read__folders_and_archives_side_by_side(tmp_path: Path) -> None:
    pictures = {
        name(FIRST): plant(tmp_path / FIRST / name(FIRST), 1),
        name(LAST): plant(tmp_path / LAST / name(LAST), 2),
    }
    pictures[name(THIRD)] = picture = plant(tmp_path / "elsewhere" / "any.jpg", 3)
    (tmp_path / "elsewhere" / "any.jpg").unlink()
    (tmp_path / "elsewhere").rmdir()
    (tmp_path / f"{THIRD}.tar").write_bytes(tar_of({name(THIRD): picture}))
    (tmp_path / FIRST / "notes.txt").write_text("no image")
    splits = read(tmp_path)
    assert sizes(splits) == {"train": 3}
    assert labels(splits["train"]) == EXPECTED
    assert {item.key: item.read() for item in splits["train"].items} == pictures


def test_read__a_class_that_is_none(tmp_path: Path) -> None:
    plant(tmp_path / "n00000000" / "n00000000_1.JPEG")
    plant(tmp_path / FIRST / name(FIRST))
    with pytest.raises(DataError, match=r"n00000000: none of the 21,843 classes, such as n00004475$"):
        read(tmp_path)


def test_read__a_cut_archive(tmp_path: Path) -> None:
    whole = tar_of({f"{FIRST}.tar": tar_of({name(FIRST): plant(tmp_path / "any.jpg")})})
    (tmp_path / "fall11_whole.tar").write_bytes(whole[:1500])
    with pytest.raises(DataError, match=r"fall11_whole\.tar: not a whole, uncompressed tar file"):
        read(tmp_path)
