"""ImageNet-21k: a folder or a tar file per WordNet synset, under the 21,843 classes that the authors' heads
have.
"""

from dataclasses import replace
from pathlib import Path

from vitctl.data.datasets.readers.archives import archive_items
from vitctl.data.datasets.readers.files import class_list, file_items
from vitctl.data.datasets.readers.fixed_classes import image_names
from vitctl.data.images.image_types import IMAGE_SUFFIXES
from vitctl.data.writer.items import Item, Originals
from vitctl.errors import DataError

ARCHIVE = "fall11_whole.tar of https://image-net.org, packed, or unpacked to a .tar or a folder per synset"
NUM_CLASSES = 21_843
_WHOLE = ("fall11_whole.tar", "winter21_whole.tar")


def read(root: Path) -> dict[str, Originals]:
    """All images as `train`; a class is the place of its wnid in the authors' list, whatever is on disk.

    Of the 21,843 classes two have no image in the release of fall 2011, and 2,676 or more in that of winter
    2021. Keys are file names, as `n01440764_10026.JPEG`.

    Args:
        root: holds `fall11_whole.tar`, `winter21_whole.tar`, or `<wnid>.tar` and `<wnid>/` side by side.

    Raises:
        DataError: no images are there, or some lie under a name that is none of the classes.
    """
    items = _packed(root) or _unpacked(root)
    if not items:
        raise DataError(
            f"{root}: {', '.join(_WHOLE)}, <wnid>.tar or <wnid>/: none is here; put here: {ARCHIVE}"
        )
    class_names = class_list("imagenet21k")
    labels = {wnid: label for label, wnid in enumerate(class_names)}
    parts = [item.key.split("/") for item in items]
    unknown = sorted({place[0] for place in parts if place[0] not in labels})
    if unknown:
        raise DataError(
            f"{root}: {', '.join(unknown[:5])}: none of the {NUM_CLASSES:,} classes, such as {class_names[0]}"
        )
    found = [
        replace(item, key=place[-1], label=labels[place[0]]) for item, place in zip(items, parts, strict=True)
    ]
    return {"train": Originals(found, class_names, "ImageNet-21k")}


def _packed(root: Path) -> list[Item]:
    """Keyed by `<wnid>/<file>`, from the one archive that holds everything."""
    whole = next((root / name for name in _WHOLE if (root / name).is_file()), None)
    items = archive_items(whole) if whole else []
    synsets = [item.key.split("/")[-2:] for item in items]  # a folder around the synsets does not matter
    return [replace(item, key="/".join(place)) for item, place in zip(items, synsets, strict=True)]


def _unpacked(root: Path) -> list[Item]:
    items: list[Item] = []
    for place in sorted(root.glob("*")):
        if place.is_dir() and not place.name.startswith("."):
            names = [f"{place.name}/{name}" for name in image_names(place, IMAGE_SUFFIXES)]
            items += file_items(root, names, [-1] * len(names))
        elif place.suffix == ".tar":
            items += [replace(item, key=f"{place.stem}/{item.key}") for item in archive_items(place)]
    return items
