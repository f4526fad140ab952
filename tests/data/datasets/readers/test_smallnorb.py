import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from tests.data.datasets.conftest import labels
from vitctl.data.datasets.readers.smallnorb import STEMS, read, read_norb
from vitctl.data.images.decode import decode
from vitctl.errors import DataError

PIXELS = np.random.default_rng(0).integers(0, 256, (3, 2, 96, 96), dtype=np.uint8)
INFO = np.array([[4, 0, 0, 5], [6, 8, 34, 0], [7, 3, 12, 1]], "<i4")  # instance, elevation, azimuth, lighting


def norb(array: np.ndarray) -> bytes:
    """As the authors describe their files; short shapes are padded to three lengths."""
    magic = {1: 0x1E3D4C55, 4: 0x1E3D4C54}[array.itemsize]
    lengths = [*array.shape, 1, 1][: max(3, array.ndim)]
    return struct.pack(f"<ii{len(lengths)}i", magic, array.ndim, *lengths) + array.tobytes()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The training files packed, the test files not."""
    (tmp_path / f"{STEMS['train']}-dat.mat.gz").write_bytes(gzip.compress(norb(PIXELS), mtime=0))
    (tmp_path / f"{STEMS['train']}-info.mat.gz").write_bytes(gzip.compress(norb(INFO), mtime=0))
    (tmp_path / f"{STEMS['test']}-dat.mat").write_bytes(norb(PIXELS[:1]))
    (tmp_path / f"{STEMS['test']}-info.mat").write_bytes(norb(INFO[:1]))
    return tmp_path


def test_read__left_camera_and_both_labels(root: Path) -> None:
    azimuth, elevation = read(root, "azimuth"), read(root, "elevation")
    assert labels(azimuth["train"]) == {"0": 0, "1": 17, "2": 6}
    assert labels(elevation["train"]) == {"0": 0, "1": 8, "2": 3}
    assert labels(azimuth["test"]) == {"0": 0}
    assert (len(azimuth["train"].class_names), len(elevation["train"].class_names)) == (18, 9)
    assert azimuth["train"].class_names[17] == "azimuth 340 degrees"
    np.testing.assert_array_equal(decode(azimuth["train"].items[1].read())[:, :, 2], PIXELS[1, 0])


def test_read_norb__one_axis_still_has_three_lengths(tmp_path: Path) -> None:
    (tmp_path / "cat.mat").write_bytes(norb(np.array([3, 1, 4], "<i4")))
    assert read_norb(tmp_path / "cat.mat").tolist() == [3, 1, 4]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("x.mat", norb(INFO)[:-1]),
        ("x.mat", b"MATLAB 5.0 MAT-file, Platform: PCWIN" + bytes(100)),
        ("x.mat", b""),
        ("x.mat.gz", gzip.compress(norb(INFO), mtime=0)[:-12]),
        ("x.mat.gz", norb(INFO)),
        ("x.mat", struct.pack("<ii", 0x1E3D4C55, 2**30)),
    ],
)
def test_read_norb__refuses_other_formats(name: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match="not a whole NORB file"):
        read_norb(tmp_path / name)


def test_read__refuses_parts_that_do_not_fit(root: Path) -> None:
    (root / f"{STEMS['test']}-info.mat").write_bytes(norb(INFO))
    with pytest.raises(DataError, match=r"images are \(1, 2, 96, 96\) and info \(3, 4\), should be"):
        read(root, "azimuth")
    (root / f"{STEMS['test']}-info.mat").unlink()
    with pytest.raises(
        DataError, match=r"testing-info.mat or .*testing-info.mat.gz is missing; unpack here: the six"
    ):
        read(root, "azimuth")
