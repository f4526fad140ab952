"""Tar files of others, read by Python's tarfile within bounds: it believes sizes that lead backwards, and reads names of gigabytes.

Source: IEEE Std 1003.1-2017, pax; CVE-2025-8194 (negative sizes), which the tarfile of older Pythons still has
"""

import re
import tarfile
from collections.abc import Iterator
from typing import IO, Any

from vitctl.system.bounds import MEMBER_HEADER, TAR_COMMENT

_LONG_NAMES = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_OF_A_MEMBER = (*_LONG_NAMES, tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_SPARSE = tarfile.GNUTYPE_SPARSE
# tarfile looks for a number before a blank in steps that grow with the square of a run of digits (CVE-2024-6232).
_LONG_NUMBER = re.compile(rb"\d{100}")
_LENGTH = re.compile(rb"(\d{1,10}) ")


class _Header(tarfile.TarInfo):
    """A header block, refused before what it announces is read."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_Header":
        """One block. Raises tarfile.HeaderError for what tarfile would follow, whatever it costs."""
        header = super().frombuf(buf, encoding, errors)
        if header.size < 0:
            raise tarfile.SubsequentHeaderError("a member of negative size")  # type: ignore[attr-defined]
        if header.type in _OF_A_MEMBER and header.size > MEMBER_HEADER.limit:
            raise _refused(f"a name or a header of {header.size:,} bytes", MEMBER_HEADER.limit)
        if header.type == tarfile.XGLTYPE and header.size > TAR_COMMENT.limit:
            raise _refused(f"a comment of {header.size:,} bytes", TAR_COMMENT.limit)
        if header.type == _SPARSE:
            raise tarfile.SubsequentHeaderError("a sparse member")  # type: ignore[attr-defined]
        return header

    def _proc_pax(self, tarfile: "BoundedTar") -> tarfile.TarInfo:
        """Pax records, once they are found to be such: tarfile's own search is quadratic in what is none."""
        begin = tarfile.fileobj.tell()
        _check_records(tarfile.fileobj.read(self.size))
        tarfile.fileobj.seek(begin)
        return super()._proc_pax(tarfile)  # type: ignore[misc]


class BoundedTar(tarfile.TarFile):
    """A plain tar file, member by member; it remembers none but the last, so that memory does not grow with their number."""

    tarinfo = _Header
    firstmember: tarfile.TarInfo | None  # of the base class, where the stubs lack them
    members: list[Any]

    def next(self) -> tarfile.TarInfo | None:
        """The next member, None at the end.

        Raises:
            tarfile.ReadError: a header is damaged, out of bounds, or leads backwards.
        """
        if self.firstmember is not None:
            return super().next()
        before = self.offset
        try:
            member = super().next()
        except (RecursionError, ValueError, OverflowError, MemoryError) as error:
            raise tarfile.ReadError(f"a header at byte {before} that cannot be read ({type(error).__name__})") from None
        if member is not None and (member.size < 0 or self.offset <= before):
            raise tarfile.ReadError(f"the member at byte {before} has a size that leads backwards")
        if sum(len(key) + len(value) for key, value in self.pax_headers.items()) > TAR_COMMENT.limit:
            raise tarfile.ReadError(f"comments of more than {TAR_COMMENT} bytes together")
        del self.members[:-1]
        return member

    def __iter__(self) -> Iterator[tarfile.TarInfo]:
        """Every member once."""
        while (member := self.next()) is not None:
            yield member


def open_tar(file: IO[bytes]) -> BoundedTar:
    """A plain tar file that begins where `file` stands.

    Raises:
        tarfile.TarError: it is none, or out of bounds.
    """
    return BoundedTar.open(fileobj=file, mode="r:")


def _check_records(data: bytes) -> None:
    """Each `<length> <key>=<value>`, its length counting all of it, and a newline at its end."""
    if _LONG_NUMBER.search(data) or b"GNU.sparse" in data:
        raise tarfile.SubsequentHeaderError("a sparse member, or a number of a hundred digits in its header")  # type: ignore[attr-defined]
    at = 0
    while (length := _LENGTH.match(data, at)) is not None:
        end = at + int(length[1])
        if end > len(data) or data[end - 1 : end] != b"\n" or data.find(b"=", length.end(), end) < 0:
            break
        at = end
    if data[at:].strip(b"\0"):
        raise tarfile.SubsequentHeaderError("a damaged extended header")  # type: ignore[attr-defined]


def _refused(what: str, most: int) -> tarfile.HeaderError:
    return tarfile.SubsequentHeaderError(f"{what}, should be at most {most:,}")  # type: ignore[attr-defined]
