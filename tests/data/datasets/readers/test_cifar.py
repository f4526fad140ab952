"""The fixtures are pickles of protocol 2 with the texts of Python 2, opcode by opcode, as the release has
them.
"""

import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vitctl.data.datasets.known_sets import DATA_SETS
from vitctl.data.datasets.readers.arrays import unpickle
from vitctl.data.images.decode import decode
from vitctl.errors import DataError

PIXELS = np.random.default_rng(0).integers(0, 256, (4, 3072), dtype=np.uint8)


def old_pickle(value: Any) -> bytes:
    return b"\x80\x02" + _opcodes(value) + b"."


def _opcodes(value: Any) -> bytes:
    if isinstance(value, str):
        return b"T" + struct.pack("<i", len(value)) + value.encode("latin1")
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        return b"J" + struct.pack("<i", value)
    if value is None:
        return b"N"
    if isinstance(value, list):
        return b"](" + b"".join(map(_opcodes, value)) + b"e"
    if isinstance(value, tuple):
        return b"(" + b"".join(map(_opcodes, value)) + b"t"
    if isinstance(value, dict):
        return b"}(" + b"".join(_opcodes(k) + _opcodes(v) for k, v in value.items()) + b"u"
    dtype = (
        b"cnumpy\ndtype\n"
        + _opcodes((value.dtype.str[1:], 0, 1))
        + b"R"
        + _opcodes((3, "|", None, None, None, -1, -1, 0))
        + b"b"
    )
    made = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n" + _opcodes((0,)) + _opcodes("b") + b"tR"
    )
    data = _opcodes(value.tobytes().decode("latin1"))
    return made + b"(" + _opcodes(1) + _opcodes(value.shape) + dtype + b"\x89" + data + b"tb"


# Folder, file and entry of the class names, entry of the labels, number of classes, and batches in order.
RELEASES = {
    "cifar10": (
        "cifar-10-batches-py",
        "batches.meta",
        "label_names",
        "labels",
        10,
        (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"),
    ),
    "cifar100": ("cifar-100-python", "meta", "fine_label_names", "fine_labels", 100, ("train", "test")),
}


def plant_release(root: Path, name: str, **changes: Any) -> Path:
    folder, meta, names, labels, num_classes, batches = RELEASES[name]
    (root / folder).mkdir()
    class_names = [f"class {number}" for number in range(num_classes)]
    (root / folder / meta).write_bytes(old_pickle({names: class_names}))
    for number, batch in enumerate(batches):
        entries = {
            "data": PIXELS + np.uint8(number),
            labels: [3, 1, 0, 9],
            "filenames": ["a.png"] * 4,
        } | changes
        given = {key: value for key, value in entries.items() if value is not None}
        (root / folder / batch).write_bytes(old_pickle(given))
    return root / folder


@pytest.mark.parametrize("name", RELEASES)
def test_read__planes_become_pictures_numbered_through_the_files(name: str, tmp_path: Path) -> None:
    plant_release(tmp_path, name)
    train = DATA_SETS[name].open(tmp_path)["train"]
    num_files = len(train.items) // 4
    wanted = (PIXELS[1] + np.uint8(num_files - 1)).reshape(3, 32, 32).transpose(1, 2, 0)
    np.testing.assert_array_equal(decode(train.items[-3].read()), wanted)
    assert train.class_names[9] == "class 9"


def test_unpickle__the_fixture_is_what_python_reads(tmp_path: Path) -> None:
    """The independent reading: the standard library, which trusts the file."""
    value = {"labels": [1, 2], "ok": True, "pair": (0, None)}
    assert pickle.loads(old_pickle(value), encoding="latin1") == value
    (tmp_path / "x").write_bytes(old_pickle(value | {"text": "é"}))
    assert unpickle(tmp_path / "x") == value | {"text": "é".encode("latin1")}


def test_unpickle__pickles_of_python_three_are_read_too(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(pickle.dumps({"data": PIXELS}, protocol=4))
    np.testing.assert_array_equal(unpickle(tmp_path / "x")["data"].array, PIXELS)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("run"),))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (pickle.dumps({"data": Evil()}), "it asks for "),
        (b"cos\nsystem\n(S'touch run'\ntR.", "it asks for os.system"),
        (b"\x80\x02cbuiltins\neval\n.", "it asks for builtins.eval"),
        (old_pickle({"data": np.zeros((2, 2), np.int64)}), "an array of type i8, should be u1"),
        (pickle.dumps({"data": np.asfortranarray(PIXELS)}, protocol=4), "an array stored by columns"),
        (old_pickle({"data": PIXELS})[:900], "not a pickle of plain data"),
        (old_pickle([1]), "not a pickle of plain data"),
        (b"", "not a pickle of plain data"),
        (b"<html>", "not a pickle of plain data"),
    ],
)
def test_unpickle__runs_nothing(
    data: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad").write_bytes(data)
    with pytest.raises(DataError, match=message) as caught:
        unpickle(tmp_path / "bad")
    assert str(caught.value).startswith(f"{tmp_path / 'bad'}: ") and "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": [3, 1, 0, 10]}, "1 labels are out of range, the first is 10 of 10 classes"),
        ({"labels": [3, 1]}, "should be an array of 2 rows of 3072 bytes"),
        ({"data": PIXELS[:, :100]}, "should be an array of 4 rows of 3072 bytes"),
        ({"data": [1, 2]}, "should be an array of 4 rows"),
        ({"labels": None}, "has no 'labels', should be a file of the Python release"),
    ],
)
def test_read__refuses(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    plant_release(tmp_path, "cifar10", **changes)
    with pytest.raises(DataError, match=message):
        DATA_SETS["cifar10"].open(tmp_path)
