"""The table of data sets against what the sets' authors and the benchmark say."""

import hashlib
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torchvision.datasets

from tests.data.datasets.conftest import labels, plant
from vitctl.data.datasets.catalog import find_data_set, originals_of
from vitctl.data.datasets.known_sets import DATA_SETS, DataSet
from vitctl.data.datasets.readers.list_file import read_lists
from vitctl.data.datasets.readers.original_files import ASSETS, class_list
from vitctl.data.datasets.vtab import VTAB
from vitctl.data.source.splits import md5_order
from vitctl.errors import DataError

KNOWN = [row for row in DATA_SETS.values() if row.read is not None]
TEST_ONLY = {"imagenet_v2", "objectnet"}


def test_known__every_set_once_and_every_alias_leads_to_one() -> None:
    aliases = [alias for row in KNOWN for alias in (row.name, *row.aliases)]
    assert len(aliases) == len(set(aliases)) > 45
    assert all(alias == alias.lower() for alias in aliases)
    assert all(find_data_set(alias) is row for row in KNOWN for alias in (row.name, *row.aliases))


def test_known__every_row_says_all_there_is_to_say() -> None:
    for row in KNOWN:
        assert row.archive and row.native and row.sizes, row.name
        assert set(row.sizes) <= {"train", "validation", "test"}
        assert "train" in row.sizes or row.name in TEST_ONLY
        assert (
            row.obtain.startswith(("Make them from ", "Make them: `vitctl data shards "))
            and "\n" not in row.obtain
        )


@pytest.mark.parametrize(
    ("name", "num_images"),
    [
        ("caltech101", 8_677 + 467),
        ("dtd", 47 * 120),
        ("flowers102", 8_189),
        ("pets", 7_349),
        ("sun397", 108_753),
        ("resisc45", 45 * 700),
        ("kitti-dist", 7_481),
        ("dsprites-ori", math.prod((3, 6, 40, 32, 32))),
        ("smallnorb-azim", 2 * 5 * 5 * 9 * 18 * 6),
        ("uc_merced", 21 * 100),
        ("colorectal", 8 * 625),
        ("patch_camelyon", 2**18 + 2**16),
    ],
)
def test_known__sizes_add_up(name: str, num_images: int) -> None:
    assert sum(find_data_set(name).sizes.values()) == num_images


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


COUNTS = {
    "caltech101": 102,
    "dtd": 47,
    "eurosat": 10,
    "flowers102": 102,
    "pets": 37,
    "resisc45": 45,
    "uc_merced": 21,
}


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_class_list__is_whole_and_has_its_digest_in_the_readme(name: str, count: int) -> None:
    names = class_list(name)
    assert len(names) == len(set(names)) == count
    assert all(text == text.strip() != "" for text in names)
    digest = hashlib.sha256((ASSETS / f"{name}_classes.txt").read_bytes()).hexdigest()[:16]
    assert f"| {digest} |" in (ASSETS / "README.md").read_text()


@pytest.mark.parametrize("name", ["caltech101", "dtd", "eurosat", "resisc45", "uc_merced"])
def test_class_list__sorted_where_labels_are_places(name: str) -> None:
    assert list(class_list(name)) == sorted(class_list(name))


def test_class_list__pets_are_sorted_without_regard_to_capitals() -> None:
    assert list(class_list("pets")) == sorted(class_list("pets"), key=str.lower)
    assert class_list("pets")[:6:5] == ("Abyssinian", "Bengal")


def test_class_list__flowers_are_those_of_torchvision() -> None:
    assert list(class_list("flowers102")) == torchvision.datasets.Flowers102.classes


def test_class_list__caltech_has_the_background_among_the_letters() -> None:
    places = {name: label for label, name in enumerate(class_list("caltech101"))}
    known = {
        "accordion": 0,
        "background_google": 4,
        "barrel": 5,
        "faces": 37,
        "faces_easy": 38,
        "leopards": 57,
    }
    assert {name: places[name] for name in known} == known
    assert (places["motorbikes"], places["yin_yang"]) == (66, 101)


def test_assets__every_one_has_the_digest_of_its_readme() -> None:
    rows = re.findall(
        r"^\| (\S+\.\w+) \|.*\| ([0-9a-f]{16}) \|$", (ASSETS / "README.md").read_text(), re.MULTILINE
    )
    assert {name for name, _ in rows} == {path.name for path in ASSETS.iterdir()} - {"README.md"}
    for name, digest in rows:
        assert hashlib.sha256((ASSETS / name).read_bytes()).hexdigest().startswith(digest), name


def test_eurosat__first_of_the_benchmark_as_published() -> None:
    """The order needs no pixels: names and the counts of the classes give it."""
    thousands = dict(zip(class_list("eurosat"), (3, 3, 3, 2.5, 2.5, 2, 2.5, 3, 2.5, 3), strict=True))
    keys = [
        f"{name}_{name}_{n}.jpg" for name, count in thousands.items() for n in range(1, int(1000 * count) + 1)
    ]
    assert len(keys) == 27_000
    order = md5_order(keys, "train")
    assert [keys[n].partition("_")[2] for n in order[:3]] == [
        "Forest_687.jpg",
        "Residential_188.jpg",
        "HerbaceousVegetation_1056.jpg",
    ]
    assert [keys[n].partition("_")[2] for n in order[16_200:16_203]] == [
        "SeaLake_804.jpg",
        "Forest_1554.jpg",
        "River_2237.jpg",
    ]


def test_a_new_set_of_text_lists_is_one_row(tmp_path: Path) -> None:
    """Food-101, as its authors pack it."""
    lists = {"train": "food-101/meta/train.txt", "test": "food-101/meta/test.txt"}
    read = partial(read_lists, images="food-101/images", lists=lists, source="Food-101", suffix=".jpg")
    row = DataSet(
        "food101", 2, {"train": 2, "test": 1}, "at most 512", read, "food-101.tar.gz from its authors"
    )
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
