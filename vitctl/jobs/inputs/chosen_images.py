"""Some images to look at: of files and folders, or of a split."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitctl.data.images.decode import BadSample, open_picture
from vitctl.data.images.formats import HEAD_BYTES, exclusion_reason, is_system_file
from vitctl.data.images.transforms import EvalTransform
from vitctl.data.inspect.contact_sheet import choose
from vitctl.data.source.read import Source
from vitctl.errors import DataError
from vitctl.system import files
from vitctl.system.bounds import IMAGE_FILE


@dataclass(frozen=True)
class ChosenImages:
    """Images to look at.

    Args:
        names: of files, or keys in their split.
        labels: -1 for none.
        class_names: in label order; empty for files.
        read: give the encoded images.
        text: where they are from, in words.
    """

    names: tuple[str, ...]
    labels: tuple[int, ...]
    class_names: tuple[str, ...]
    read: tuple[Callable[[], bytes], ...]
    text: str

    def __len__(self) -> int:
        return len(self.names)

    def pixels(self, transform: EvalTransform, done: Callable[[int, int], None] = lambda _done, _total: None) -> Tensor:
        """The images as a network gets them before the value range.

        Args:
            transform: of the network.
            done: called with images read and their number.

        Returns:
            uint8 `[N, 3, S, S]`.

        Raises:
            DataError: an image cannot be used; it is named.
        """
        found = []
        for name, read in zip(self.names, self.read, strict=True):
            try:
                picture = open_picture(
                    read(), exif_orientation=transform.exif_orientation, truncated=transform.truncated
                )
                found.append(transform(picture))
            except BadSample as error:
                raise DataError(f"{name}: cannot be used ({error}); mend it, or leave it out") from None
            done(len(found), len(self))
        return torch.stack(found)


def of_files(paths: Sequence[Path], num_images: int, seed: int) -> ChosenImages:
    """Image files, and those in folders, also in folders within.

    Args:
        paths: files and folders.
        num_images: at most so many, chosen at random where there are more.
        seed: of the choice.

    Raises:
        DataError: a path does not exist or cannot be read, or there is no image.
    """
    found = list(dict.fromkeys(file for path in paths for file in (_below(path) if path.is_dir() else [path])))
    missing = [path for path in found if not path.exists()]
    if missing:
        raise DataError(f"{missing[0]}: no such file or folder")
    if not found:
        raise DataError(f"{paths[0]}: there is no image in it")
    chosen = [found[number] for number in choose(len(found), num_images, seed)]
    one = (paths[0].name or str(paths[0])) + " and others" * (len(paths) > 1)
    read = tuple(partial(files.read_bytes, path, IMAGE_FILE.limit, error=DataError) for path in chosen)
    return ChosenImages(tuple(map(str, chosen)), (-1,) * len(chosen), (), read, one)


def of_split(source: Source, num_images: int, seed: int, text: str) -> ChosenImages:
    """Images of a split, chosen at random where there are more; of several labels the first counts.

    Args:
        source: an opened split.
        num_images: at most so many.
        seed: of the choice.
        text: what it is, in words.
    """
    chosen = choose(len(source), num_images, seed)
    labels = source.labels(np.array(chosen, np.int64)).reshape(len(chosen), -1)[:, 0]
    read = tuple(partial(source.read, sample) for sample in chosen)
    return ChosenImages(tuple(map(source.key, chosen)), tuple(map(int, labels)), tuple(source.class_names), read, text)


def _below(folder: Path) -> list[Path]:
    """The images in a folder and in the folders within, in order."""
    found = []
    for parent, folders, names in os.walk(folder, onerror=_refuse):
        folders[:] = sorted(name for name in folders if not is_system_file(name))
        paths = (Path(parent) / name for name in sorted(names))
        found += [path for path in paths if path.is_file() and not exclusion_reason(path.name, partial(_head, path))]
    return found


def _refuse(error: OSError) -> None:
    raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from None


def _head(path: Path) -> bytes:
    with files.open_regular(path, error=DataError) as file:
        return file.read(HEAD_BYTES)
