"""DTD in its full size, proven, copied without loss, and taken back in."""

import hashlib
import json
from pathlib import Path

import pytest

from tests.data.datasets.conftest import BY_NAME, SPLITS, TASK, keys_of, write
from vitctl.data.datasets.catalog import find_data_set, open_split
from vitctl.data.datasets.inventory import ABSENT, check_task, list_inventory
from vitctl.data.datasets.vtab import TRAIN800_DIGESTS, VAL200_AND_TEST_DIGESTS, VTAB, in_vtab1k, names_digest
from vitctl.data.datasets.vtab_images import export_shards, export_task, read_community
from vitctl.data.source.views import Source, source_texts
from vitctl.errors import DataError

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


def by_key(source: Source) -> dict[str, tuple[int, bytes]]:
    labels = source.labels()
    found = {source.key(n): (int(labels[n]), source.read(n)) for n in range(len(source))}
    assert len(found) == len(source)
    return found


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


def test_export_task__is_lossless_and_comes_back_the_same(root: Path, tmp_path: Path) -> None:
    folder = export_task(TASK, root, tmp_path)
    assert folder == tmp_path / "dtd"
    lines = (folder / "train800val200.txt").read_text().splitlines()
    assert len(lines) == 1000
    assert lines[0].startswith("images/train800/000000.")
    assert {path.suffix for path in (folder / "images/test").iterdir()} == {".jpg", ".png"}
    splits = read_community(TASK, tmp_path)
    for split, expression in (("train800", TASK.train800), ("val200", TASK.val200), ("test", TASK.test)):
        original = by_key(open_split(expression, dataset="dtd", root=str(root)))
        assert {item.key: (item.label, item.read()) for item in splits[split].items} == original
        assert splits[split].source == "DTD"
    note = json.loads((folder / "vitctl.json").read_text())
    assert note["lists_sha256"]["test"] == hashlib.sha256((folder / "test.txt").read_bytes()).hexdigest()
    before = (folder / "test.txt").stat().st_mtime_ns
    export_task(TASK, root, tmp_path)
    assert (folder / "test.txt").stat().st_mtime_ns == before


def test_read_community__a_note_or_names_that_do_not_fit(root: Path, tmp_path: Path) -> None:
    folder = export_task(TASK, root, tmp_path)
    (folder / "keys/val200.txt").write_text("one\n")
    with pytest.raises(DataError, match=r"keys/val200.txt: 1 names for 200 images"):
        read_community(TASK, tmp_path)
    (folder / "vitctl.json").write_text("{}")
    with pytest.raises(DataError, match=r"vitctl.json: should be a note of the format vitctl-vtab1k/1$"):
        read_community(TASK, tmp_path)


@pytest.mark.usefixtures("published")
def test_export_shards__stand_in_for_the_whole_set(root: Path, tmp_path: Path) -> None:
    export_shards(TASK, root, tmp_path)
    for expression in (TASK.train, TASK.train800, TASK.val200, TASK.test):
        copied = open_split(expression, dataset="dtd", root=str(tmp_path))
        assert by_key(copied) == by_key(open_split(expression, dataset="dtd", root=str(root)))
        assert source_texts(copied) == ("DTD",)
    assert check_task(TASK, tmp_path).verdict == PROVEN
    with pytest.raises(
        DataError, match=r"has the splits train800, val200 and test; 'train' needs the complete data set$"
    ):
        open_split("train", dataset="dtd", root=str(tmp_path))


@pytest.mark.parametrize("task", VTAB, ids=lambda task: task.name)
def test_in_vtab1k__knows_every_tasks_splits(task: object) -> None:
    row = BY_NAME[task.name]  # type: ignore[attr-defined]
    assert in_vtab1k(row.train, row.data_set) == "train800+val200"
    assert in_vtab1k(row.test, row.data_set) == in_vtab1k("test", row.data_set) == "test"
    assert find_data_set(row.data_set).name == row.data_set
