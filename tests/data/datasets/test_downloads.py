"""The table of downloads, and archives that are unpacked or refused."""

import gzip
import hashlib
import io
import re
import tarfile
import zipfile
from pathlib import Path

import pytest

from vitctl.data.datasets.catalog import find_data_set
from vitctl.data.datasets.downloads import DOWNLOADS, Archive, originals_folder
from vitctl.data.datasets.unpack import is_unpacked, unpack
from vitctl.data.datasets.vtab import VTAB
from vitctl.errors import DataError

UNPUBLISHED = {"dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz"}
BY_HAND = {"sun397", "resisc45", "retinopathy"}


def test_downloads__https_with_a_digest_and_a_size() -> None:
    archives = [archive for of_set in DOWNLOADS.values() for archive in of_set]
    assert len(archives) > 30
    for archive in archives:
        assert archive.url.startswith("https://")
        assert archive.name and "/" not in archive.name and "?" not in archive.name
        if archive.name not in UNPUBLISHED:
            assert re.fullmatch(r"sha256:[0-9a-f]{64}|md5:[0-9a-f]{32}", archive.digest), archive.url
            assert archive.num_bytes > 0


def test_downloads__are_of_known_sets_and_cover_vtab_but_for_three() -> None:
    assert {find_data_set(name).name for name in DOWNLOADS} == set(DOWNLOADS)
    assert {task.data_set for task in VTAB} - set(DOWNLOADS) == BY_HAND


def test_originals_folder__is_shared_by_questions_about_the_same_images() -> None:
    assert originals_folder("clevr-count") == originals_folder("clevr-dist") == "clevr"
    assert originals_folder("kitti-dist") == "kitti-dist"


def packed_tar() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        member = tarfile.TarInfo("set/a.txt")
        member.size = 5
        tar.addfile(member, io.BytesIO(b"hello"))
    return file.getvalue()


def packed_zip(name: str = "set/a.txt", data: bytes = b"hello") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as packed:
        packed.writestr(name, data)
    return file.getvalue()


def fetched(tmp_path: Path, name: str, data: bytes) -> tuple[Archive, Path]:
    path = tmp_path / "fetched"
    path.write_bytes(data)
    return Archive(f"https://there.org/{name}?download=1", f"sha256:{hashlib.sha256(data).hexdigest()}"), path


@pytest.mark.parametrize(
    ("name", "data", "found"),
    [
        ("set.tgz", packed_tar(), "set/a.txt"),
        ("set.zip", packed_zip(), "set/a.txt"),
        ("x.h5.gz", gzip.compress(b"hello", mtime=0), "x.h5"),
    ],
)
def test_unpack__by_the_archives_name(tmp_path: Path, name: str, data: bytes, found: str) -> None:
    archive, path = fetched(tmp_path, name, data)
    folder = tmp_path / "originals"
    assert not is_unpacked(archive, folder)
    unpack(archive, path, folder)
    assert (folder / found).read_bytes() == b"hello"
    assert is_unpacked(archive, folder)
    assert not path.exists()


def test_unpack__an_archive_in_an_archive(tmp_path: Path) -> None:
    outer, path = fetched(tmp_path, "set.zip", packed_zip("in/inner.tar.gz", packed_tar()))
    unpack(Archive(outer.url, outer.digest, inner=("in/inner.tar.gz",)), path, tmp_path / "originals")
    assert (tmp_path / "originals/in/set/a.txt").read_bytes() == b"hello"


def test_unpack__a_file_that_is_read_as_it_is_in_a_folder_of_its_own(tmp_path: Path) -> None:
    archive, path = fetched(tmp_path, "x.mat.gz", b"as it is")
    unpack(Archive(archive.url, archive.digest, into="sub", packed=True), path, tmp_path / "originals")
    assert (tmp_path / "originals/sub/x.mat.gz").read_bytes() == b"as it is"


def test_unpack__another_digest_is_refused_and_the_file_removed(tmp_path: Path) -> None:
    archive, path = fetched(tmp_path, "set.zip", packed_zip())
    path.write_bytes(b"other")
    with pytest.raises(
        DataError, match=r"set.zip\?download=1: its sha256 is [0-9a-f]{16}\.\.\., should be .* run again"
    ):
        unpack(archive, path, tmp_path / "originals")
    assert not path.exists()
    assert not is_unpacked(archive, tmp_path / "originals")


@pytest.mark.parametrize("name", ["set.zip", "set.tar.gz", "x.gz"])
def test_unpack__damaged(tmp_path: Path, name: str) -> None:
    archive, path = fetched(tmp_path, name, b"no archive")
    with pytest.raises(DataError, match=r"fetched: cannot be unpacked \(") as caught:
        unpack(archive, path, tmp_path / "originals")
    assert "\n" not in str(caught.value)
    assert not is_unpacked(archive, tmp_path / "originals")


def test_unpack__nothing_leaves_the_folder(tmp_path: Path) -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("../out.txt"), io.BytesIO())
    archive, path = fetched(tmp_path, "set.tar", file.getvalue())
    with pytest.raises(DataError, match="leads out of its folder"):
        unpack(archive, path, tmp_path / "originals")
    assert not (tmp_path / "out.txt").exists()
