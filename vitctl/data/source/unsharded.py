"""Images that are not in shards: image files and addresses, and generated noise. See `views.Source`."""

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from vitctl.data.images.decode import BadSample
from vitctl.data.shards.remote import is_remote, read_file
from vitctl.errors import DataError
from vitctl.system.address import without_queries
from vitctl.system.files import IMAGE_FILE, read_bytes


class ImageFiles:
    """Image files without labels, read when they are needed.

    Args:
        names: paths, and addresses of single images (https, hf, s3, gs).
    """

    class_names: tuple[str, ...] = ()

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(without_queries(*names, error=DataError, over=False))

    def __len__(self) -> int:
        return len(self.names)

    @property
    def digest(self) -> str:
        """Hex digest of the names, not of the content."""
        names = "\0".join(self.names).encode("utf-8", "surrogateescape")
        return hashlib.sha256(b"files " + names).hexdigest()

    def labels(self, samples: np.ndarray | None = None) -> np.ndarray:
        """Return -1 for each sample."""
        return np.full(len(self) if samples is None else len(samples), -1, np.int64)

    def key(self, sample: int) -> str:
        """Return the path or address as it was given."""
        return self.names[sample]

    def location(self, sample: int) -> str:
        """Return the path or address as it was given."""
        return self.names[sample]

    def read(self, sample: int) -> bytes:
        """Return the encoded image. Raises `BadSample` with the reason if it cannot be read."""
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


@dataclass(frozen=True)
class SyntheticSource:
    """Generated images of coloured noise, for smoke tests and benchmarks.

    The tint of an image depends on its class, so that a model can learn it. Labels cycle through the classes.

    Args:
        num_samples: samples in the set.
        num_classes: classes in the set.
        image_size: height and width of each JPEG, in pixels.
    """

    num_samples: int
    num_classes: int
    image_size: int

    def __len__(self) -> int:
        return self.num_samples

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(str(label) for label in range(self.num_classes))

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()

    def labels(self, samples: np.ndarray | None = None) -> np.ndarray:
        """Return the labels of the given samples, or of all: int64."""
        return np.asarray(np.arange(len(self)) if samples is None else samples, np.int64) % self.num_classes

    def key(self, sample: int) -> str:
        """Return the number of the sample, as text."""
        return str(sample)

    def location(self, sample: int) -> str:
        """Return a description of the sample, for messages."""
        return f"synthetic sample {sample}"

    def read(self, sample: int) -> bytes:
        """Return a JPEG, computed from the sample number."""
        tint = np.random.default_rng((0, sample % self.num_classes)).uniform(64, 192, 3)
        noise = np.random.default_rng((1, sample)).normal(0, 40, (16, 16, 3))
        pixels = np.clip(tint + noise, 0, 255).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).resize((self.image_size, self.image_size)).save(file, "JPEG", quality=90)
        return file.getvalue()
