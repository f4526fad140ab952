"""Writes shards with webdataset, and records their digest, their byte offsets and the class names embedded in
them.
"""

import hashlib
import json
import tarfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import IO

_NAMES = "class_names"


class ShardWriter:
    """Writes one shard with `webdataset.TarWriter`, and returns the offsets of its members.

    A context manager: at its end the archive is finished, also after an error, when the file is discarded.

    Args:
        file: empty, open for writing; it stays open.
        class_names: in label order; embedded before the first sample, where `stored_names` reads them. Empty:
            not embedded.
    """

    def __init__(self, file: IO[bytes], class_names: Sequence[str] = ()) -> None:
        from webdataset import (
            TarWriter,  # imported here because it imports torch, which reading shards does not need
        )

        self._stream = _Hashing(file)
        self._writer = TarWriter(
            self._stream, user="vitctl", group="vitctl", mtime=0, encoder=False, format="PAX_FORMAT"
        )
        self._tar: tarfile.TarFile = self._writer.tarstream
        if class_names:
            self._stream.write(names_header(class_names))
            self._tar.offset = self._stream.num_bytes

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # An archive left open would write its end when it is garbage-collected, into a file that is closed by
        # then.
        with suppress(OSError) if kind else nullcontext():
            self._writer.close()

    def write(self, key: str, members: Mapping[str, bytes]) -> dict[str, tuple[int, int]]:
        """Add one sample.

        Args:
            key: name of its members without their extensions.
            members: extension to content; stored in the order of the extensions.

        Returns:
            extension to the byte offsets of header and content of the member.
        """
        offsets = {}
        for extension in sorted(
            members
        ):  # one at a time: the offset after each gives the length of its header
            header, size = self._tar.offset, len(members[extension])
            self._writer.write({"__key__": key, extension: members[extension]})
            offsets[extension] = header, self._tar.offset - size - -size % tarfile.BLOCKSIZE
        self._tar.members.clear()  # type: ignore[attr-defined] # otherwise it keeps every header in memory
        return offsets

    @property
    def num_bytes(self) -> int:
        """Size of the file; final when the context has ended."""
        return self._stream.num_bytes

    @property
    def sha256(self) -> str:
        """SHA-256 of the file, in hex; valid when the context has ended."""
        return self._stream.digest.hexdigest()


class _Hashing:
    """A stream that counts and hashes the bytes written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.digest, self.num_bytes = file, hashlib.sha256(), 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.digest.update(data)
        self.num_bytes += len(data)


def names_header(class_names: Sequence[str]) -> bytes:
    """Class names as a comment of the archive, in a global header of POSIX tar, which no program reads as a
    sample.

    Source: IEEE Std 1003.1-2017, pax, "pax Extended Header"
    """
    return tarfile.TarInfo.create_pax_global_header({"comment": json.dumps({_NAMES: list(class_names)})})


def stored_names(tar: tarfile.TarFile) -> tuple[str, ...]:
    """The class names in the comment of an archive whose first member was read; empty where there are none."""
    try:
        fields = json.loads(tar.pax_headers.get("comment", ""))
    except (ValueError, RecursionError):
        return ()
    names = fields.get(_NAMES) if isinstance(fields, dict) else None
    return tuple(names) if isinstance(names, list) and all(isinstance(name, str) for name in names) else ()
