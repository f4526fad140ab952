"""Known sets, the reader of any source, and the inventory.

DTD in its full size, verified, copied and read back.
"""

import shutil
from pathlib import Path

import pytest

from tests.data.datasets.conftest import BY_NAME, SPLITS, TASK, keys_of, plant, write
from tests.matrix import each
from vitctl.data.datasets.catalog import (
    find_data_set,
    open_originals,
    open_split,
    read_originals,
    write_data_set,
)
from vitctl.data.datasets.inventory import ABSENT, check_task, list_inventory
from vitctl.data.datasets.known_sets import DATA_SETS
from vitctl.data.datasets.readers.original_files import class_list
from vitctl.data.datasets.vtab import TRAIN800_DIGESTS, VAL200_AND_TEST_DIGESTS, VTAB, in_vtab1k, names_digest
from vitctl.errors import DataError


@pytest.fixture
def eurosat(tmp_path: Path) -> Path:
    for number, name in enumerate(class_list("eurosat")):
        plant(tmp_path / f"2750/{name}/{name}_1.jpg", number)
    return tmp_path


def test_read_originals__asks_for_every_image_unless_told_otherwise(eurosat: Path) -> None:
    with pytest.raises(DataError, match=r"eurosat is incomplete: train has 10 images, should have 27,000$"):
        read_originals("eurosat", eurosat)
    assert len(read_originals("EuroSAT", eurosat, allow_partial=True)["train"].items) == 10


@pytest.mark.parametrize(
    ("name", "message"), [("digits", "digits: has no original files"), ("eurosta", "did you mean eurosat")]
)
def test_read_originals__refuses(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        read_originals(name, tmp_path)


@pytest.mark.slow
def test_make_set__goes_on_where_it_was_killed_between_two_splits(tmp_path: Path) -> None:
    """The one split that is there is no whole set."""
    write_data_set(DATA_SETS["digits"], tmp_path / "digits")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "digits" / "train").iterdir()}
    shutil.rmtree(tmp_path / "digits" / "test")
    assert len(open_split("test", dataset="digits", root=str(tmp_path / "none"), scratch=tmp_path)) == 360
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "digits" / "train").iterdir()} == before


def test_open_originals__refuses(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none: no such file or folder"):
        open_originals(str(tmp_path / "none"))
    (tmp_path / "a.rar").touch()
    with pytest.raises(DataError, match=r"a.rar: should be class folders, an archive of them"):
        open_originals(str(tmp_path / "a.rar"))


PROVEN = "match (train800)"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("root"), {split: keys_of(split) for split in SPLITS})


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """As if the names of this data set were those that the benchmark's authors gave."""
    source = open_split(TASK.train800, dataset="dtd", root=str(root))
    digest = names_digest(source.key(number) for number in range(800))
    monkeypatch.setitem(TRAIN800_DIGESTS, "dtd", digest)


@pytest.mark.slow
@pytest.mark.usefixtures("published")
def test_check_task__proves_the_images_by_their_names(root: Path) -> None:
    found = check_task(TASK, root)
    assert found.sizes == (800, 200, 1_880)
    assert found.digests[0] == TRAIN800_DIGESTS["dtd"]
    assert (found.verdict, found.is_wrong) == (PROVEN, False)


def test_check_task__absent_or_other_names(root: Path, tmp_path: Path) -> None:
    assert check_task(TASK, tmp_path).verdict == ABSENT
    found = check_task(TASK, root)
    assert (found.verdict, found.is_wrong) == ("NO MATCH: train800", True)


@pytest.mark.usefixtures("published")
def test_check_task__holds_the_other_splits_too(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = check_task(TASK, root).digests
    monkeypatch.setitem(VAL200_AND_TEST_DIGESTS, "dtd", (digests[1], digests[2]))
    assert check_task(TASK, root).verdict == "match (train800, val200, test)"
    monkeypatch.setitem(VAL200_AND_TEST_DIGESTS, "dtd", (digests[1], "0" * 16))
    assert check_task(TASK, root).verdict == "NO MATCH: test"


def test_check_task__a_split_that_lacks_images(tmp_path: Path) -> None:
    write(tmp_path, {split: keys_of(split)[:100] for split in SPLITS})
    found = check_task(TASK, tmp_path)
    assert found.is_wrong
    assert "more than its 100 samples" in found.verdict


def test_list_holdings__says_what_is_here(root: Path) -> None:
    held = {holding.name: holding for holding in list_inventory(root)}
    assert len(held) > 35
    assert (held["dtd"].state, held["dtd"].ready) == ("shards", True)
    assert held["dtd"].uses == ("VTAB natural", "few-shot")
    assert (held["digits"].state, held["pets"].state, held["pets"].ready) == ("built in", ABSENT, False)
    assert held["pets"].uses == ("VTAB natural", "transfer", "few-shot")


@each("task", VTAB)
def test_in_vtab1k__knows_every_tasks_splits(task: object) -> None:
    row = BY_NAME[task.name]  # type: ignore[attr-defined]
    assert in_vtab1k(row.train, row.data_set) == "train800+val200"
    assert in_vtab1k(row.test, row.data_set) == in_vtab1k("test", row.data_set) == "test"
    with pytest.raises(DataError, match="has the splits train800, val200 and test; 'train' needs the"):
        in_vtab1k("train", row.data_set)
    assert find_data_set(row.data_set).name == row.data_set
