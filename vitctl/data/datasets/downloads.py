"""Downloads of original files: their addresses and digests, and unpacking them safely."""

import gzip
import hashlib
import lzma
import os
import stat
import tarfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from vitctl.data.shards.tar import BoundedTar
from vitctl.errors import DataError
from vitctl.system.files import UNPACKED, atomic_write, leads_out
from vitctl.system.text import has_control, one_line

_TARS = (".tar", ".tar.gz", ".tgz")
# What an archive may grow to: text shrinks to a twentieth, a bomb to a thousandth.
_MAX_RATIO = 100


@dataclass(frozen=True)
class Archive:
    """A file on the web.

    Args:
        url: its https address.
        digest: `sha256:...` or `md5:...` of the whole file; empty if none is published.
        num_bytes: its size; 0 if unknown.
        into: folder below the originals that it is unpacked into.
        inner: archives within it that are unpacked too.
        packed: it is kept as it is.
    """

    url: str
    digest: str = ""
    num_bytes: int = 0
    into: str = ""
    inner: tuple[str, ...] = ()
    packed: bool = False

    @property
    def name(self) -> str:
        """Return the file's name."""
        return self.url.partition("?")[0].rpartition("/")[2]


def is_unpacked(archive: Archive, folder: Path) -> bool:
    """Return whether `unpack` finished."""
    return _marker(archive, folder).exists()


def unpack(archive: Archive, path: Path, folder: Path) -> None:
    """Check a downloaded file, unpack it below `folder`, and remove it.

    Args:
        archive: what the file should be.
        path: the file.
        folder: of the data set's original files.

    Raises:
        DataError: its digest differs (the file is removed), or it is damaged.
    """
    _check_digest(archive, path)
    into = folder / archive.into
    into.mkdir(parents=True, exist_ok=True)
    if archive.packed:
        os.replace(path, into / archive.name)
    else:
        _extract(path, archive.name, into)
        for inner in archive.inner:
            _extract(into / inner, inner, (into / inner).parent)
        path.unlink()
    _marker(archive, folder).touch()


def _marker(archive: Archive, folder: Path) -> Path:
    return folder / f".{archive.name}.unpacked"


def _check_digest(archive: Archive, path: Path) -> None:
    algorithm, _, wanted = archive.digest.partition(":")
    if not wanted:
        return
    with path.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()
    if found != wanted:
        path.unlink()
        raise DataError(
            f"{archive.url}: its {algorithm} is {found[:16]}..., should be {wanted[:16]}...; removed; run "
            f"again to download it"
        )


def _extract(path: Path, name: str, into: Path) -> None:
    most = path.stat().st_size * _MAX_RATIO + UNPACKED.limit
    try:
        if name.endswith(_TARS):
            with BoundedTar.open(path) as tar:
                for member in tar:
                    most = _check_member(
                        path, member.name, member.size, most, is_plain=member.isfile() or member.isdir()
                    )
                    tar.extract(member, into, filter="data")
        elif name.endswith(".zip"):
            with zipfile.ZipFile(path) as packed:
                for entry in packed.infolist():
                    most = _check_member(
                        path, entry.filename, entry.file_size, most, is_plain=not _is_link(entry)
                    )
                packed.extractall(into)
        else:
            _gunzip(path, into / name.removesuffix(".gz"), most)
    except (
        tarfile.TarError,
        zipfile.BadZipFile,
        RuntimeError,
        zlib.error,
        lzma.LZMAError,
        EOFError,
        OSError,
    ) as error:
        raise DataError(f"{path}: cannot be unpacked ({' '.join(str(error).split())})") from None


def _check_member(path: Path, name: str, num_bytes: int, most: int, *, is_plain: bool) -> int:
    """Check a member and return how many bytes the members after it may have.

    Links have escaped from Python's filter (CVE-2025-4517): no link is unpacked at all, and no name climbs.

    Raises:
        DataError: the member is not a file or folder, its name leaves the folder, or the archive claims too
            much.
    """
    if not is_plain:
        raise DataError(
            f"{path}: {one_line(name)} is a link or a device; image archives may hold only files and folders"
        )
    if leads_out(name) or has_control(name):
        raise DataError(
            f"{path}: {one_line(name)} points outside the archive, or is not a plain name; not unpacked"
        )
    if not 0 <= num_bytes <= most:
        raise DataError(f"{path}: claims to hold more than {_MAX_RATIO} times its size; not unpacked")
    return most - num_bytes


def _is_link(entry: zipfile.ZipInfo) -> bool:
    return stat.S_ISLNK(entry.external_attr >> 16)


def _gunzip(path: Path, target: Path, most: int) -> None:
    with atomic_write(target) as aside, gzip.open(path) as source, aside.open("wb") as file:
        while piece := source.read(2**20):
            most -= len(piece)
            if most < 0:
                raise DataError(f"{path}: holds more than {_MAX_RATIO} times its size; not unpacked")
            file.write(piece)
