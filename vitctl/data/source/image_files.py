"""Image files and addresses of images as a source: what is not in shards, and has no labels."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vitctl.data.images.decode import BadSample
from vitctl.data.shards.remote import is_remote, read_file
from vitctl.data.source.read import Source
from vitctl.errors import DataError
from vitctl.system.address import without_queries
from vitctl.system.bounds import IMAGE_FILE
from vitctl.system.files import read_bytes


class ImageFiles:
    """Files that are read when they are needed; see `Source`.

    Args:
        names: paths, and addresses of single images (https, hf, s3, gs).
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(without_queries(*names, error=DataError, over=False))

    def __len__(self) -> int:
        return len(self.names)

    @property
    def class_names(self) -> tuple[str, ...]:
        return ()

    @property
    def parts(self) -> tuple[Source, ...]:
        return ()

    @property
    def digest(self) -> str:
        """Of the names, not of the content."""
        names = "\0".join(self.names).encode("utf-8", "surrogateescape")
        return hashlib.sha256(b"files " + names).hexdigest()

    def labels(self, samples: np.ndarray | None = None) -> np.ndarray:
        """-1 for each: there are none."""
        return np.full(len(self) if samples is None else len(samples), -1, np.int64)

    def key(self, sample: int) -> str:
        """The path or address, as it was given."""
        return self.names[sample]

    def location(self, sample: int) -> str:
        """The same."""
        return self.names[sample]

    def read(self, sample: int) -> bytes:
        """The encoded image. Raises `BadSample` with the reason in words where it cannot be read."""
        name = self.names[sample]
        try:
            if is_remote(name):
                content = read_file(name, IMAGE_FILE.limit)
            else:
                content = read_bytes(Path(name), IMAGE_FILE.limit, error=DataError)
        except DataError as error:
            raise BadSample(str(error).removeprefix(f"{name}: ")) from None
        if not content:
            raise BadSample("empty file")
        return content
