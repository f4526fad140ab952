"""ImageNet's own archives: a tar of one tar per class to train on, and a flat tar with a list of labels to validate on."""

import re
import tarfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO

from vitctl.data.datasets.class_folder import read_part
from vitctl.data.scan import check_end
from vitctl.data.shards import Item, Originals
from vitctl.errors import DataError

TRAIN, VALIDATION = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
LABELS = "imagenet_2012_validation_synset_labels.txt"
_WNID = re.compile(r"n\d{8}")
_Part = tuple[str, int, int]  # file name, first byte in the archive, bytes


def read_imagenet(folder: Path) -> dict[str, Originals]:
    """Read the archives that lie in a folder, which stay packed; either may be missing.

    Classes are the WordNet ids in sorted order, keys the file names. The labels of the validation images are a list of one
    WordNet id per line, in the order of the file names.

    Args:
        folder: with `ILSVRC2012_img_train.tar`, or `ILSVRC2012_img_val.tar` and
            `imagenet_2012_validation_synset_labels.txt`.

    Raises:
        DataError: an archive is damaged, or labels are missing, too few, or not WordNet ids.
    """
    splits: dict[str, list[tuple[str, _Part]]] = {}
    if (folder / TRAIN).is_file():
        splits["train"] = _train(folder / TRAIN)
    if (folder / VALIDATION).is_file():
        splits["validation"] = _validation(folder / VALIDATION, folder / LABELS)
    class_names = tuple(sorted({wnid for rows in splits.values() for wnid, _ in rows}))
    labels = {wnid: label for label, wnid in enumerate(class_names)}
    archives = {"train": folder / TRAIN, "validation": folder / VALIDATION}
    return {
        split: Originals([_item(archives[split], labels[wnid], part) for wnid, part in rows], class_names, str(folder))
        for split, rows in splits.items()
    }


def is_imagenet(folder: Path) -> bool:
    """Whether one of ImageNet's archives lies in the folder."""
    return (folder / TRAIN).is_file() or (folder / VALIDATION).is_file()


def _item(archive: Path, label: int, part: _Part) -> Item:
    name, offset, size = part
    return Item(name, label, partial(read_part, archive, offset, size))


def _train(path: Path) -> list[tuple[str, _Part]]:
    rows = []
    with path.open("rb") as file:
        for name, offset, _ in list(_parts(path, file)):
            wnid = name.removesuffix(".tar")
            if not _WNID.fullmatch(wnid):
                raise DataError(f"{path}: holds {name!r}, should hold one tar per class, such as n01440764.tar")
            file.seek(offset)
            rows += [(wnid, part) for part in _parts(path, file)]
    return rows


def _validation(path: Path, labels: Path) -> list[tuple[str, _Part]]:
    try:
        wnids = labels.read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{labels}: cannot be read ({error}); should list a WordNet id per validation image") from None
    wrong = next((wnid for wnid in wnids if not _WNID.fullmatch(wnid)), None)
    if wrong is not None:
        raise DataError(f"{labels}: holds {wrong!r}, should hold WordNet ids such as n01751748, never numbers")
    with path.open("rb") as file:
        parts = sorted(_parts(path, file))
    if len(parts) != len(wnids):
        raise DataError(f"{labels}: lists {len(wnids)} labels, {path.name} holds {len(parts)} images")
    return list(zip(wnids, parts, strict=True))


def _parts(path: Path, file: IO[bytes]) -> Iterator[_Part]:
    """The plain files of the tar that begins where the file stands."""
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                if member.isreg() and not member.issparse():
                    yield member.name.rpartition("/")[2], member.offset_data, member.size
            check_end(path, tar)
    except tarfile.TarError as error:
        raise DataError(f"{path}: not a whole, uncompressed tar file ({error})") from None
