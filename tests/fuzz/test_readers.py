"""Whatever stands where the original files of a data set are expected: one clean line, or images with labels
in range.
"""

import bz2
import gzip
import io
import lzma
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.fuzz.mutate import fuzz, mutated
from vitctl.data.datasets.catalog import open_originals
from vitctl.data.datasets.readers import arrays, list_file
from vitctl.data.datasets.readers.arrays import parse_example, records, unpickle
from vitctl.data.datasets.readers.imagenet import read_real
from vitctl.data.datasets.readers.original_files import load_mat
from vitctl.data.writer.intake import read_item
from vitctl.errors import DataError
from vitctl.system.files import parsing

EXAMPLES = [10, pytest.param(1000, marks=pytest.mark.slow)]


def _png(number: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 4), (number, 0, 0)).save(file, "PNG")
    return file.getvalue()


def _zipped(content: bytes, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr("imgs.npy", content)
    return file.getvalue()


def _array(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _encrypted(data: bytes) -> bytes:
    """The same zip with its members said to be encrypted."""
    data = bytearray(data)
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        place = data.index(signature)
        data[place + offset] |= 1
    return bytes(data)


def _parquet() -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    file = io.BytesIO()
    images = [{"bytes": _png(number), "path": f"{number}.png"} for number in range(4)]
    parquet.write_table(pyarrow.table({"image": images, "label": [0, 1, 0, 1]}), file)
    return file.getvalue()


def _mat() -> bytes:
    io_of_scipy = pytest.importorskip("scipy.io")
    file = io.BytesIO()
    io_of_scipy.savemat(file, {"X": np.arange(6), "y": np.arange(3)}, do_compression=True)
    return file.getvalue()


def _h5(tmp: Path) -> bytes:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp, "w") as file:
        file["x"] = np.zeros((3, 4), np.uint8)
    return tmp.read_bytes()


def _tar() -> bytes:
    import tarfile

    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for number in range(4):
            header = tarfile.TarInfo(f"{'ab'[number % 2]}/{number}.png")
            header.size = len(_png(number))
            tar.addfile(header, io.BytesIO(_png(number)))
    return file.getvalue()


def _opened(path: Path) -> None:
    for originals in open_originals(str(path)).values():
        for item in originals.items:
            labels = item.label if isinstance(item.label, tuple) else (item.label,)
            assert all(-1 <= label < len(originals.class_names) for label in labels)
            assert isinstance(read_item(item), bytes)


def _recorded(path: Path) -> None:
    for _, data in records(path):
        parse_example(data)


def _norb() -> bytes:
    return np.array([0x1E3D4C55, 3, 2, 3, 4], "<i4").tobytes() + bytes(24)


def _scenes(path: Path) -> None:
    list_file.read_clevr(path.parents[2], "count")


SCENES = b'{"scenes": [{"image_filename": "a.png", "objects": [{"pixel_coords": [1, 2, 9.5]}, {}, {}]}]}'
TABLE = b"path,label,split\n0.png,cat,train\n1.png,dog,test\n"
FILES: dict[str, tuple[str, Callable[[Path], bytes], Callable[[Path], object]]] = {
    "parquet": ("a.parquet", lambda _: _parquet(), _opened),
    "tar": ("a.tar", lambda _: _tar(), _opened),
    "table": ("a.csv", lambda _: TABLE, _opened),
    "mat": ("a.mat", lambda _: _mat(), lambda path: load_mat(path, "X", "y")),
    "npz": ("a.npz", lambda _: _zipped(_array(np.zeros((3, 64, 64), np.uint8))), arrays.read_sprites),
    "npz, lzma": (
        "a.npz",
        lambda _: _zipped(_array(np.zeros((3, 64, 64), np.uint8)), 14),
        arrays.read_sprites,
    ),
    "npz, bzip2": (
        "a.npz",
        lambda _: _zipped(_array(np.zeros((3, 64, 64), np.uint8)), 12),
        arrays.read_sprites,
    ),
    "norb": ("a.mat", lambda _: _norb(), arrays.read_norb),
    "norb.gz": ("a.mat.gz", lambda _: gzip.compress(_norb()), arrays.read_norb),
    "pickle": (
        "data_batch",
        lambda _: b"\x80\x02}q\x00(U\x04dataq\x01K\x01U\x06labelsq\x02]q\x03K\x01au.",
        unpickle,
    ),
    "clevr": ("CLEVR_v1.0/scenes/CLEVR_train_scenes.json", lambda _: SCENES, _scenes),
    "real": ("real.json", lambda _: b"[[1], [2, 3]]", read_real),
    "hdf5": ("x.h5", lambda folder: _h5(folder / "made.h5"), lambda path: _hdf5(path)),
}


def _hdf5(path: Path) -> None:
    arrays.open_hdf5.cache_clear()
    try:
        with parsing(path, DataError):
            arrays.open_hdf5(path, "x", 0)[:]
    finally:
        arrays.open_hdf5.cache_clear()


@pytest.mark.parametrize("num_examples", EXAMPLES)
@pytest.mark.parametrize("kind", FILES)
def test_readers(tmp_path: Path, kind: str, num_examples: int) -> None:
    name, make, read = FILES[kind]
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    for number in range(2):
        (tmp_path / f"{number}.png").write_bytes(_png(number))

    def check(data: bytes) -> str:
        path.write_bytes(data)
        said = ""
        try:
            read(path)
        except DataError as error:
            said = str(error)
        assert "\n" not in said, repr(said)
        return "refused" if said else "read"

    good = make(tmp_path)
    others = (b"", b"\0" * 600, b"PK\x05\x06" + bytes(18), b"{" * 3000, b"[" * 100_000, b"9" * 6000, b"1e999",
              b"NaN",
              bz2.compress(b"x"), lzma.compress(b"x"), gzip.compress(b"x")[:-3], _zipped(b"\xff" * 40),
              _encrypted(_zipped(b"x" * 100)), good[: len(good) // 2])  # fmt: skip
    for other in others:
        check(other)
    fuzz(check, mutated((good,)), num_examples)
