"""Untrusted tar files, read with Python's tarfile within limits: tarfile alone accepts negative sizes and
names of gigabytes.

Source: IEEE Std 1003.1-2017, pax; CVE-2025-8194 (negative sizes), which the tarfile of older Pythons still
has
"""

import re
import tarfile
from collections.abc import Iterator
from typing import IO, Any

from vitctl.system.bounds import MEMBER_HEADER, TAR_COMMENT

_LONG_NAMES = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_MEMBER_HEADERS = (*_LONG_NAMES, tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_SPARSE = tarfile.GNUTYPE_SPARSE
# What tarfile raises itself behind a first header; typeshed lacks the name.
_HeaderError: type[tarfile.HeaderError] = tarfile.SubsequentHeaderError  # type: ignore[attr-defined]
# tarfile's search for a number before a space takes time quadratic in the length of a run of digits
# (CVE-2024-6232).
_LONG_NUMBER = re.compile(rb"\d{100}")
_LENGTH = re.compile(rb"(\d{1,10}) ")


class _Header(tarfile.TarInfo):
    """A header block; it is refused before the data that it declares is read."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_Header":
        """Parse one block. Raises tarfile.HeaderError where the declared sizes exceed the limits."""
        header = super().frombuf(buf, encoding, errors)
        if header.size < 0:
            raise _HeaderError("a member of negative size")
        if header.type in _MEMBER_HEADERS and header.size > MEMBER_HEADER.limit:
            raise _too_large(f"a name or a header of {header.size:,} bytes", MEMBER_HEADER.limit)
        if header.type == tarfile.XGLTYPE and header.size > TAR_COMMENT.limit:
            raise _too_large(f"a comment of {header.size:,} bytes", TAR_COMMENT.limit)
        if header.type == _SPARSE:
            raise _HeaderError("a sparse member")
        return header

    def _proc_pax(self, archive: "BoundedTar") -> tarfile.TarInfo:
        """Check the syntax of pax records before tarfile parses them: its search takes quadratic time on
        malformed ones.
        """
        begin = archive.fileobj.tell()
        _check_records(archive.fileobj.read(self.size))
        archive.fileobj.seek(begin)
        member: tarfile.TarInfo = super()._proc_pax(archive)  # type: ignore[misc]
        return member


class BoundedTar(tarfile.TarFile):
    """An uncompressed tar file, member by member; only the last header is kept, so that memory does not grow
    with their number.
    """

    tarinfo = _Header
    firstmember: tarfile.TarInfo | None  # attributes of the base class that its type stubs lack
    members: list[Any]

    def next(self) -> tarfile.TarInfo | None:
        """The next member, None at the end.

        Raises:
            tarfile.ReadError: a header is damaged, exceeds a limit, or points back to an earlier byte.
        """
        if self.firstmember is not None:
            return super().next()
        before = self.offset
        try:
            member = super().next()
        except (RecursionError, ValueError, OverflowError, MemoryError) as error:
            raise tarfile.ReadError(
                f"the header at byte {before} cannot be read ({type(error).__name__})"
            ) from None
        if member is not None and (member.size < 0 or self.offset <= before):
            raise tarfile.ReadError(f"the size of the member at byte {before} points back to an earlier byte")
        if sum(len(key) + len(value) for key, value in self.pax_headers.items()) > TAR_COMMENT.limit:
            raise tarfile.ReadError(f"comments of more than {TAR_COMMENT} bytes in total")
        del self.members[:-1]
        return member

    def __iter__(self) -> Iterator[tarfile.TarInfo]:
        """Iterate over the members."""
        while (member := self.next()) is not None:
            yield member


def open_tar(file: IO[bytes]) -> BoundedTar:
    """Open an uncompressed tar file that starts at the current position of `file`.

    Raises:
        tarfile.TarError: it is not a tar file, or exceeds a limit.
    """
    return BoundedTar.open(fileobj=file, mode="r:")


def _check_records(data: bytes) -> None:
    """Check that each record is `<length> <key>=<value>` and a newline, where the length counts the whole
    record.
    """
    if _LONG_NUMBER.search(data) or b"GNU.sparse" in data:
        raise _HeaderError("a sparse member, or a number of 100 digits in its header")
    at = 0
    while (length := _LENGTH.match(data, at)) is not None:
        end = at + int(length[1])
        if end > len(data) or data[end - 1 : end] != b"\n" or data.find(b"=", length.end(), end) < 0:
            break
        at = end
    if data[at:].strip(b"\0"):
        raise _HeaderError("a damaged extended header")


def _too_large(what: str, limit: int) -> tarfile.HeaderError:
    return _HeaderError(f"{what}, should be at most {limit:,}")
