"""One folder per class, where the data set says which classes there are."""

from collections.abc import Callable, Sequence
from pathlib import Path

from vitctl.data.datasets.readers.files import file_items
from vitctl.data.writer.items import Item
from vitctl.errors import DataError


def class_items(
    folder: Path,
    folders: Sequence[str],
    key: Callable[[str, str], str],
    *,
    suffixes: tuple[str, ...] = (".jpg",),
) -> list[Item]:
    """The images of every class, classes in label order and names by code point.

    Args:
        folder: holds the class folders.
        folders: their names in label order.
        key: folder and file name to the key.
        suffixes: of the images, in lower case; other files are left out.

    Raises:
        DataError: class folders are missing, or there are others.
    """
    check_classes(folder, folders)
    names = [f"{name}/{file}" for name in folders for file in image_names(folder / name, suffixes)]
    parts = [name.split("/") for name in names]
    labels = {name: label for label, name in enumerate(folders)}
    return file_items(
        folder, names, [labels[name] for name, _ in parts], [key(name, file) for name, file in parts]
    )


def check_classes(folder: Path, folders: Sequence[str]) -> None:
    """Raises DataError unless exactly these class folders are there, hidden ones aside."""
    found = {path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")}
    missing, others = sorted(set(folders) - found), sorted(found - set(folders))
    if missing or others:
        problems = [
            f"{len(names)} {what}: {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
            for names, what in ((missing, "missing"), (others, "unknown"))
            if names
        ]
        raise DataError(f"{folder}: should hold {len(folders)} class folders; {'; '.join(problems)}")


def image_names(folder: Path, suffixes: tuple[str, ...] = (".jpg",)) -> list[str]:
    """File names with one of the suffixes, sorted by code point."""
    return sorted(path.name for path in folder.iterdir() if path.suffix.lower() in suffixes)


def doubled(folder: str, name: str) -> str:
    """`AnnualCrop_AnnualCrop_1.jpg`: keys of sets whose file names carry the label already."""
    return f"{folder}_{name}"


def nested(folder: str, name: str) -> str:
    """`banded/banded_0002.jpg`."""
    return f"{folder}/{name}"


def plain(_: str, name: str) -> str:
    """The file name alone."""
    return name
