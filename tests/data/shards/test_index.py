import hashlib
import json
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import webdataset

from tests.data.conftest import store
from vitctl.data.shards.index import Index, find_splits, read_index
from vitctl.data.shards.indexing import index_shards
from vitctl.data.source.stores import ShardSource
from vitctl.data.writer.intake import Item
from vitctl.errors import DataError

MakeSplit = Callable[..., Index]


def test_read_index__gives_what_was_written(make_split: MakeSplit) -> None:
    index = make_split(20)
    again = read_index(index.folder)
    assert again == index
    assert [shard.num_samples for shard in again.shards] == [7, 7, 6]
    assert again.class_names == ("a", "b", "c")
    assert again.num_samples == len(again.rows) == 20
    assert again.source == "noise"
    shards = [[shard.num_samples, shard.num_bytes, shard.sha256] for shard in again.shards]
    tables = [hashlib.sha256((index.folder / "samples.npy").read_bytes()).hexdigest()]
    held = {
        "classes": ["a", "b", "c"],
        "members": {"image": "", "label": ""},
        "shards": shards,
        "tables": tables,
    }
    assert again.digest == hashlib.sha256(json.dumps(held).encode()).hexdigest()
    assert isinstance(again.rows, np.memmap)
    for shard in again.shards:
        data = (index.folder / shard.name).read_bytes()
        assert (shard.num_bytes, shard.sha256) == (len(data), hashlib.sha256(data).hexdigest())


def test_digest__is_of_the_samples_and_not_of_where_they_came_from(make_split: MakeSplit) -> None:
    index = make_split(20)
    digest = index.digest
    change(index.folder, source="elsewhere")
    assert read_index(index.folder).digest == digest
    change(index.folder, class_names=["b", "a", "c"])
    assert read_index(index.folder).digest != digest


def change(folder: Path, **changes: object) -> None:
    fields = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({**fields, **changes}))


def test_read_index__covers_its_tables(tmp_path: Path, tiny_png: Callable[[int], bytes]) -> None:
    items = [Item(f"k{n}", (n % 3, (n + 1) % 3), partial(tiny_png, n)) for n in range(6)]
    folder = store(items, tmp_path / "train", tuple("abc")).folder
    noted = json.loads((folder / "index.json").read_text())["tables"]
    for name in ("samples.npy", "labels.npy"):
        content = (folder / name).read_bytes()
        assert noted[name] == {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        (folder / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(DataError, match=f"{name} changed since its index was written"):
            read_index(folder)
        (folder / name).write_bytes(content)
    assert {name: one.model_dump() for name, one in read_index(folder).tables.items()} == noted


def test_read_index__reports_every_problem_at_once(make_split: MakeSplit) -> None:
    folder = make_split(20).folder
    (folder / "shard-000000.tar").unlink()
    with (folder / "shard-000002.tar").open("ab") as file:
        file.write(b"x")
    (folder / "samples.npy").unlink()
    with pytest.raises(DataError) as caught:
        read_index(folder)
    message = str(caught.value)
    assert "shard-000000.tar is missing" in message
    assert "shard-000002.tar has 20481 bytes, should have 20480" in message
    assert "samples.npy is missing" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "vitctl-index/9"}, "format is 'vitctl-index/9', should be 'vitctl-index/1'"),
        ({"class_names": []}, "class_names should be a list of names"),
        ({"num_samples": "20"}, "num_samples should be a whole number above 0"),
        ({"num_samples": 21}, "num_samples is 21, the shards sum to 20"),
        ({"source": None}, "source should be a string"),
        ({"shards": []}, "shards should be a list"),
        ({"tables": {}}, "tables should hold num_bytes and sha256 of names.bin and samples.npy"),
        ({"tables": {"samples.npy": {"num_bytes": 1, "sha256": "x"}}}, "tables should hold num_bytes"),
        ({"tables": {"samples.npy": {"num_bytes": -1, "sha256": "0" * 64}}}, "tables should hold num_bytes"),
        (
            {"shards": [{"name": "../x.tar", "num_samples": 20, "num_bytes": 1, "sha256": ""}]},
            "shards should be a list",
        ),
        (
            {"shards": [{"name": "x.tar", "num_samples": -1, "num_bytes": 1, "sha256": ""}]},
            "shards should be a list",
        ),
    ],
)
def test_read_index__refuses_bad_fields(
    make_split: MakeSplit, changes: dict[str, object], message: str
) -> None:
    folder = make_split(20).folder
    change(folder, **changes)
    with pytest.raises(DataError, match=message):
        read_index(folder)


def test_read_index__refuses_other_tables(make_split: MakeSplit) -> None:
    folder = make_split(20).folder
    np.save(folder / "samples.npy", np.zeros(20))
    with pytest.raises(DataError, match=r"samples.npy holds \(20,\) rows"):
        read_index(folder)
    np.save(folder / "samples.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(DataError, match=r"samples.npy cannot be read"):
        read_index(folder)


@pytest.mark.parametrize("text", ["{", "[]", "null", "[" * 100_000])
def test_read_index__refuses_what_is_no_index(tmp_path: Path, text: str) -> None:
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(DataError, match=r"index.json: (not JSON|format is None)"):
        read_index(tmp_path)


def test_read_index__missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be read .*; should be an index of shards"):
        read_index(tmp_path)


def write_foreign(folder: Path, labels: list[int]) -> list[Path]:
    with webdataset.ShardWriter(f"{folder}/theirs-%03d.tar", maxcount=4, verbose=0) as writer:
        for number, label in enumerate(labels):
            image = np.full((8, 8, 3), number, np.uint8)
            writer.write({"__key__": f"sample{number:03d}", "png": image, "cls": label, "txt": "words"})
    return sorted(folder.glob("*.tar"))


def test_index_shards__refuses(tmp_path: Path, make_split: MakeSplit) -> None:
    paths = write_foreign(tmp_path, [0, 3])
    with pytest.raises(DataError, match="label 3 has no name, 2 class names were given"):
        index_shards(paths, class_names=["a", "b"])
    with pytest.raises(DataError, match="class name 'a' occurs twice"):
        index_shards(paths, class_names=["a", "b", "a", "c"])
    with pytest.raises(DataError, match="0 shards in 0 folders, should be in one"):
        index_shards([])
    with pytest.raises(DataError, match="2 shards in 2 folders, should be in one"):
        index_shards([*paths, make_split(3).folder / "shard-000000.tar"])
    assert not (tmp_path / "index.json").exists()


def test_find_splits__usual_order_and_a_split_itself(make_split: MakeSplit) -> None:
    for name in ("test", "aside", "validation", "train"):
        folder = make_split(3, name).folder
    assert list(find_splits(folder.parent)) == ["train", "validation", "test", "aside"]
    assert find_splits(folder) == {"train": folder}
    assert find_splits(folder / "none") == {}


def test_index_shards__reads_several_labels_of_other_programs(tmp_path: Path) -> None:
    """`cls` with several numbers, json lists, and one number; what is no list of numbers is no label."""
    samples = [
        {"cls": b"3 1"},
        {"json": b'{"labels": [2, 0, 1]}'},
        {"json": b'{"label": 1, "labels": ["text"]}'},
        {"cls": b"2", "json": b'{"labels": [0, 1]}'},
    ]
    path = tmp_path / "a.tar"
    with path.open("wb") as file, webdataset.TarWriter(file, encoder=False) as tar:
        for number, fields in enumerate(samples):
            tar.write({"__key__": str(number), "jpg": b"x", **fields})
    source = ShardSource(index_shards([path]))
    assert source.labels().tolist() == [[3, 1, -1], [2, 0, 1], [1, -1, -1], [2, -1, -1]]
    assert source.class_names == ("0", "1", "2", "3")
    (tmp_path / "labels.npy").unlink()
    with pytest.raises(DataError, match=r"labels.npy is missing"):
        read_index(tmp_path)
    np.save(tmp_path / "labels.npy", np.zeros((4, 2), np.int32))
    with pytest.raises(DataError, match=r"labels.npy holds \(4, 2\) rows of int32, should hold \(4, 3\)"):
        read_index(tmp_path)


def test_read_index__names_in_another_form_are_in_nfc_and_keep_the_digest(make_split: MakeSplit) -> None:
    index = make_split(6)
    path = index.folder / "index.json"
    names = [unicodedata.normalize("NFD", name) for name in ("é", "ü", "z")]
    path.write_text(json.dumps({**json.loads(path.read_text()), "class_names": names}))
    found = read_index(index.folder)
    assert found.class_names == ("é", "ü", "z") and found.names_as_stored == tuple(names)
    assert found.digest == replace(found, class_names=tuple(names), names_as_stored=()).digest
    path.write_text(json.dumps({**json.loads(path.read_text()), "class_names": [names[0], "é", "z"]}))
    assert read_index(index.folder).class_names == (names[0], "é", "z")  # two classes stay two
