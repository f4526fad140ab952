"""Original files are found and read within bounds; archives are unpacked, or refused for what they hold."""

import gzip
import hashlib
import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.datasets.conftest import tar_of
from vitctl.data.datasets.readers.original_files import (
    Archive,
    MissingOriginalsError,
    file_items,
    is_unpacked,
    library,
    load_mat,
    need,
    read_bytes,
    read_fields,
    read_lines,
    read_part,
    unpack,
)
from vitctl.errors import DataError


def test_need__takes_the_first_place_and_names_the_archive(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    assert need(tmp_path, "a", "b", archive="x.zip from y") == tmp_path / "b"
    with pytest.raises(MissingOriginalsError, match=r"a or c is missing$"):
        need(tmp_path, "a", "c")
    with pytest.raises(DataError, match=r"a or c is missing; unpack here: x.zip from y$"):
        need(tmp_path, "a", "c", archive="x.zip from y")


def test_file_items__are_lazy_and_name_the_first_that_is_missing(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"1")
    (item,) = file_items(tmp_path, ["one"], [3], ["key"])
    assert (item.key, item.label, item.read()) == ("key", 3, b"1")
    (tmp_path / "one").unlink()
    with pytest.raises(DataError, match=r"one: cannot be read \(No such file"):
        item.read()
    with pytest.raises(DataError, match="2 of 2 listed images are missing, the first is one"):
        file_items(tmp_path, ["one", "two"], [0, 0])
    for name in ("../one", "/one", "a/../../one"):
        with pytest.raises(DataError, match="is outside this folder"):
            file_items(tmp_path, [name], [0])


def test_read_part__refuses_to_run_over_the_end(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abcdef")
    assert read_part(tmp_path / "x", 2, 3) == b"cde"
    with pytest.raises(DataError, match="truncated within the 9 bytes at offset 2"):
        read_part(tmp_path / "x", 2, 9)


def test_lines_and_fields__say_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_bytes(b"\xef\xbb\xbfa 1\r\n\r\nb 2 \r\n")
    assert read_lines(path) == ["a 1", "b 2"]
    assert read_fields(path, 2) == [["a", "1"], ["b", "2"]]
    with pytest.raises(DataError, match="line 'a 1' should have at least 3 columns"):
        read_fields(path, 3)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="should be a text file"):
        read_lines(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_bytes(tmp_path / "none")


def test_library__says_how_to_install() -> None:
    with pytest.raises(DataError, match=r"is read with surely_absent: pip install 'vitctl\[data\]'"):
        library("surely_absent.io")


def test_load_mat__a_web_page_is_no_matlab_file(tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    (tmp_path / "setid.mat").write_text("<!DOCTYPE HTML><title>301 Moved Permanently</title>" * 9)
    with pytest.raises(DataError, match=r"setid.mat: not a MATLAB file, download it again") as caught:
        load_mat(tmp_path / "setid.mat", "trnid")
    assert "\n" not in str(caught.value)


PACKED_TAR = gzip.compress(tar_of({"set/a.txt": b"hello"}), mtime=0)


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
        ("set.tgz", PACKED_TAR, "set/a.txt"),
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
    outer, path = fetched(tmp_path, "set.zip", packed_zip("in/inner.tar.gz", PACKED_TAR))
    unpack(Archive(outer.url, outer.digest, inner=("in/inner.tar.gz",)), path, tmp_path / "originals")
    assert (tmp_path / "originals/in/set/a.txt").read_bytes() == b"hello"


def test_unpack__a_file_that_is_read_as_it_is_in_a_folder_of_its_own(tmp_path: Path) -> None:
    archive, path = fetched(tmp_path, "x.mat.gz", b"as it is")
    unpack(Archive(archive.url, archive.digest, into="sub", packed=True), path, tmp_path / "originals")
    assert (tmp_path / "originals/sub/x.mat.gz").read_bytes() == b"as it is"


def test_unpack__another_digest_is_refused_and_the_file_removed(tmp_path: Path) -> None:
    archive, path = fetched(tmp_path, "set.zip", packed_zip())
    path.write_bytes(b"other")
    with pytest.raises(DataError, match=r"set.zip\?download=1: its sha256 is [0-9a-f]{16}\.\.\., should"):
        unpack(archive, path, tmp_path / "originals")
    assert not path.exists()
    assert not is_unpacked(archive, tmp_path / "originals")


def _tar(path: Path, *members: tarfile.TarInfo) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(b"x" * member.size))


def _member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 3) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.size = kind, link, size if kind == tarfile.REGTYPE else 0
    return member


def _unpack(folder: Path, name: str) -> Path:
    into = folder / "originals" / "set"
    unpack(Archive(f"https://example.org/{name}"), folder / name, into)
    return into


_HOSTILE: dict[str, tuple[tarfile.TarInfo, ...]] = {
    "climbs": (_member("../../owned"),),
    "absolute": (_member("/tmp/owned_by_a_tar"),),
    "link": (_member("a", tarfile.SYMTYPE, "/etc"), _member("a/owned")),
    "hard link": (_member("a", tarfile.LNKTYPE, "../../secret"),),
    # CVE-2025-4517: so long a chain that resolving its end fails, and the filter of Python lets it pass
    "long chain": (
        _member("d" * 240, tarfile.DIRTYPE),
        _member("l", tarfile.SYMTYPE, "d" * 240),
        _member("l/../../owned"),
    ),
    "device": (_member("zero", tarfile.CHRTYPE),),
    "fifo": (_member("fifo", tarfile.FIFOTYPE),),
    "control": (_member("a\x1b[2Jb"),),
}


@pytest.mark.parametrize("kind", _HOSTILE)
def test_a_hostile_tar_leaves_nothing_outside(tmp_path: Path, kind: str) -> None:
    (tmp_path / "secret").write_text("kept")
    _tar(tmp_path / "a.tar.gz", *_HOSTILE[kind])
    before = set(tmp_path.rglob("*"))
    with pytest.raises(DataError, match=r"is a link or a device|points outside the archive") as caught:
        _unpack(tmp_path, "a.tar.gz")
    assert "\n" not in str(caught.value) and "\x1b" not in str(caught.value)
    new = set(tmp_path.rglob("*")) - before
    assert all(path.is_relative_to(tmp_path / "originals") for path in new)
    assert (tmp_path / "secret").read_text() == "kept" and not Path("/tmp/owned_by_a_tar").exists()
    assert not is_unpacked(Archive("https://example.org/a.tar.gz"), tmp_path / "originals" / "set")


def _zip_bomb(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("zeros", b"\0" * 50_000_000)


def _tar_bomb(path: Path) -> None:
    with tarfile.open(path, "w:gz") as tar:
        tar.addfile(_member("zeros", size=50_000_000), io.BytesIO(b"\0" * 50_000_000))


def _gzip_bomb(path: Path) -> None:
    with gzip.open(path, "wb") as file:
        file.write(b"\0" * 50_000_000)


@pytest.mark.parametrize(
    ("name", "make"), [("a.zip", _zip_bomb), ("a.tgz", _tar_bomb), ("a.mat.gz", _gzip_bomb)]
)
def test_an_archive_that_claims_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, make: Callable[[Path], None]
) -> None:
    monkeypatch.setattr("vitctl.system.limits.UNPACKED", 2**20)
    make(tmp_path / name)
    with pytest.raises(DataError, match=r"(more than|over) 100 times its packed size"):
        _unpack(tmp_path, name)
    assert sum(path.stat().st_size for path in (tmp_path / "originals").rglob("*") if path.is_file()) == 0


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04nonsense", b"\x1f\x8b\x08\0broken", b"x" * 600])
@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tgz", "a.gz"])
def test_a_damaged_archive_is_one_line(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    if name == "a.gz" and not content:
        return  # gzip takes nothing for nothing
    with pytest.raises(DataError, match="cannot be unpacked") as caught:
        _unpack(tmp_path, name)
    assert "\n" not in str(caught.value)
