"""Archives that were fetched: held against their digests, and unpacked beside each other."""

import gzip
import hashlib
import os
import shutil
import tarfile
import zipfile
import zlib
from pathlib import Path

from vitctl.data.downloads import Archive
from vitctl.errors import DataError

_TARS = (".tar", ".tar.gz", ".tgz")


def is_unpacked(archive: Archive, folder: Path) -> bool:
    """Whether `unpack` came to its end."""
    return _marker(archive, folder).exists()


def unpack(archive: Archive, path: Path, folder: Path) -> None:
    """Check a fetched file and unpack it below `folder`; the file itself goes away.

    Args:
        archive: what it should be.
        path: the file.
        folder: of the data set's original files.

    Raises:
        DataError: its digest is another one, or it is damaged; it is removed then.
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
            f"{archive.url}: its {algorithm} is {found[:16]}..., should be {wanted[:16]}...; removed, run again to fetch it anew"
        )


def _extract(path: Path, name: str, into: Path) -> None:
    try:
        if name.endswith(_TARS):
            with tarfile.open(path) as tar:
                tar.extractall(into, filter="data")
        elif name.endswith(".zip"):
            with zipfile.ZipFile(path) as packed:
                packed.extractall(into)
        else:
            aside = into / f".{name}.partial"
            with gzip.open(path) as source, aside.open("wb") as file:
                shutil.copyfileobj(source, file, 2**20)
            os.replace(aside, into / name.removesuffix(".gz"))
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
        raise DataError(f"{path}: cannot be unpacked ({' '.join(str(error).split())})") from None
