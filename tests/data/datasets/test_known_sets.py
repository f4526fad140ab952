"""The table of data sets against what the sets' authors and the benchmark say."""

import hashlib
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.data.datasets.conftest import labels, plant
from vitctl.data.datasets.catalog import find_data_set, known_size, originals_of
from vitctl.data.datasets.known_sets import DATA_SETS, DataSet
from vitctl.data.datasets.readers.list_file import read_lists
from vitctl.data.datasets.readers.original_files import ASSETS, class_list
from vitctl.data.datasets.vtab import VTAB
from vitctl.errors import DataError

KNOWN = [row for row in DATA_SETS.values() if row.read is not None]
TEST_ONLY = {"imagenet_v2", "imagenet_a", "imagenet_r", "imagenet_sketch", "imagenet_c", "objectnet"}


def test_known__every_set_once_and_every_alias_leads_to_one() -> None:
    aliases = [alias for row in KNOWN for alias in (row.name, *row.aliases)]
    assert len(aliases) == len(set(aliases)) > 45
    assert all(alias == alias.lower() for alias in aliases)
    assert all(find_data_set(alias) is row for row in KNOWN for alias in (row.name, *row.aliases))


def test_known__every_row_says_all_there_is_to_say() -> None:
    for row in KNOWN:
        assert row.archive and row.sizes, row.name
        assert row.scored or set(row.sizes) <= {"train", "validation", "test"}
        assert "train" in row.sizes or row.name in TEST_ONLY
        assert (
            row.obtain.startswith(("Make them from ", "Make them: `vitctl data shards "))
            and "\n" not in row.obtain
        )


UNPUBLISHED = {"dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz"}
BY_HAND = {"sun397", "resisc45", "retinopathy"}


def test_downloads__https_with_a_digest_and_a_size() -> None:
    archives = [archive for row in DATA_SETS.values() for archive in row.downloads]
    assert len(archives) > 30
    for archive in archives:
        assert archive.url.startswith("https://")
        assert archive.name and "/" not in archive.name and "?" not in archive.name
        if archive.name not in UNPUBLISHED:
            assert re.fullmatch(r"sha256:[0-9a-f]{64}|md5:[0-9a-f]{32}", archive.digest), archive.url
            assert archive.num_bytes > 0


def test_downloads__cover_vtab_but_for_three() -> None:
    with_downloads = {name for name, row in DATA_SETS.items() if row.downloads}
    assert {task.data_set for task in VTAB} - with_downloads == BY_HAND


def test_originals__are_shared_by_questions_about_the_same_images(tmp_path: Path) -> None:
    folders = {
        name: originals_of(find_data_set(name), tmp_path).name for name in ("clevr-count", "clevr-dist")
    }
    assert set(folders.values()) == {"clevr"}
    assert originals_of(find_data_set("kitti"), tmp_path) == tmp_path / "originals/kitti-dist"


def test_imagenet_a_and_r__their_classes_are_those_that_timm_lists() -> None:
    info = Path(pytest.importorskip("timm.data").__file__).parent / "_info"
    for letter in "ar":
        listed = (info / f"imagenet_{letter}_synsets.txt").read_text().split()
        assert list(class_list(f"imagenet_{letter}")) == listed


def test_imagenet_c__fifteen_corruptions_are_scored_of_nineteen() -> None:
    row = DATA_SETS["imagenet_c"]
    assert (len(row.sizes), sum(row.sizes.values())) == (19, 19 * 5 * 50_000)
    extra = {"speckle_noise", "gaussian_blur", "spatter", "saturate"}
    assert set(row.scored.split("+")) == set(row.sizes) - extra
    assert known_size("imagenet-c", row.scored) == (15 * 250_000, 1000)


def test_assets__every_one_has_the_digest_of_its_readme() -> None:
    rows = re.findall(
        r"^\| (\S+\.\w+) \|.*\| ([0-9a-f]{16}) \|$", (ASSETS / "README.md").read_text(), re.MULTILINE
    )
    assert {name for name, _ in rows} == {path.name for path in ASSETS.iterdir()} - {"README.md"}
    for name, digest in rows:
        assert hashlib.sha256((ASSETS / name).read_bytes()).hexdigest().startswith(digest), name


def test_a_new_set_of_text_lists_is_one_row(tmp_path: Path) -> None:
    """Food-101, as its authors pack it."""
    lists = {"train": "food-101/meta/train.txt", "test": "food-101/meta/test.txt"}
    read = partial(read_lists, images="food-101/images", lists=lists, source="Food-101", suffix=".jpg")
    row = DataSet("food101", 2, {"train": 2, "test": 1}, read, "food-101.tar.gz from its authors")
    (tmp_path / "food-101/meta").mkdir(parents=True)
    (tmp_path / lists["train"]).write_text("waffles/7\napple_pie/3\n")
    (tmp_path / lists["test"]).write_text("apple_pie/4\n")
    for name in ("waffles/7", "apple_pie/3", "apple_pie/4"):
        plant(tmp_path / f"food-101/images/{name}.jpg")
    splits = row.open(tmp_path)
    assert labels(splits["train"]) == {"waffles/7.jpg": 1, "apple_pie/3.jpg": 0}
    assert labels(splits["test"]) == {"apple_pie/4.jpg": 0}
    assert splits["test"].class_names == ("apple_pie", "waffles")
    with pytest.raises(DataError, match="2 classes, food101 has 101"):
        replace(row, num_classes=101).open(tmp_path)
