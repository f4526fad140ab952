"""Completeness of a folder of shards: missing splits and images, and files that are not used."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from vitctl.data.datasets.catalog import find_data_set
from vitctl.data.shards.index import INDEX_FILE, LABELS, SAMPLES, Index, find_splits, read_index
from vitctl.data.source.exclusion import FILE as EXCLUDED
from vitctl.data.source.exclusion import changed_images
from vitctl.data.writer.intake import REPORT as INTAKE
from vitctl.errors import DataError
from vitctl.system.text import one_line

_OWN = (INDEX_FILE, SAMPLES, EXCLUDED)
_SHOWN = 3


def unused_files(folder: Path) -> tuple[list[str], list[str]]:
    """Files in the folder of a data set, or of one split, that belong to no split.

    Args:
        folder: of splits, or of one.

    Returns:
        problems, among them shards without an index and writing that was not finished; and notes on other
        files. One line each.
    """
    splits = find_splits(folder)
    problems, notes = [], []
    for place in splits.values():
        own_problems, own_notes = _of_split(place)
        problems += own_problems
        notes += own_notes
    if folder in splits.values():
        return problems, notes
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path in splits.values():
            continue
        shards = sorted(path.glob("*.tar")) if path.is_dir() else []
        if path.is_dir() and path.name.startswith(".") and path.name.endswith(".partial"):
            split = path.name[1:].removesuffix(".partial")
            problems.append(
                f"{path}: writing of '{split}' was not finished; type the same `vitctl data shards` "
                f"line again"
            )
        elif shards or (path / SAMPLES).exists():
            problems.append(
                f"{path}: {len(shards)} shard(s) and no index.json; write it with `vitctl data index {path}`"
            )
        elif path.name != INTAKE:
            notes.append(f"{path}: left over, of no split")
    problems += _names_differ(splits)
    if splits and not any(name.startswith("train") for name in splits):
        notes.append(f"{folder}: has no split 'train'; found: {', '.join(splits)}")
    return problems, notes


def _names_differ(splits: Mapping[str, Path]) -> list[str]:
    """Splits of one set have one list of classes; training on such a set is refused."""
    names = {}
    for split, place in splits.items():
        with suppress(DataError):  # reported when the index is checked
            names[split] = read_index(place).class_names
    first = next(iter(names), "")
    return [
        f"{splits[split].parent}: '{split}' has other class names, or in another order, than '{first}'; make "
        f"both with one class list"
        for split, own in names.items()
        if own != names[first]
    ]


def _of_split(folder: Path) -> tuple[list[str], list[str]]:
    try:
        index = read_index(folder)
        changed = changed_images(index)
    except DataError as error:
        return [str(error)] if str(error).startswith(
            str(folder / EXCLUDED)
        ) else [], []  # reported when the index is checked
    own = {*_OWN, *(shard.name for shard in index.shards), *((LABELS,) if index.labels is not None else ())}
    others = sorted(path for path in folder.iterdir() if path.name not in own)
    shards = [path.name for path in others if path.suffix == ".tar"]
    problems = []
    if changed:
        problems.append(
            f"{folder / EXCLUDED}: {len(changed):,} image(s) have other bytes than when they were left out, "
            f"first {one_line(changed[0])}; "
            "make the list again with `vitctl data dedup ... --apply`"
        )
    if shards:
        more = f" and {len(shards) - _SHOWN} more" if len(shards) > _SHOWN else ""
        names = ", ".join(shards[:_SHOWN]) + more
        problems.append(
            f"{folder}: {names}: not in the index, so they are not read; `vitctl data index {folder}` "
            f"takes all"
        )
    return problems, [f"{path}: left over, of no split" for path in others if path.suffix != ".tar"]


def missing_images(name: str, indexes: Mapping[str, Index]) -> tuple[list[str], list[str]]:
    """Missing splits and images of a known data set, by the sizes in the catalog.

    Args:
        name: of the set.
        indexes: of the splits that were found.

    Returns:
        problems, and notes on splits whose index says itself that they are a part. One line each.
    """
    row = find_data_set(name)
    sizes = row.sizes if "train800" not in indexes else {"train800": 800, "val200": 200}
    problems = [f"{row.name}: split '{split}' is missing" for split in sizes if split not in indexes]
    notes: list[str] = []
    for split, index in indexes.items():
        found = (index.num_samples, len(index.class_names))
        if (wanted := (sizes.get(split, found[0]), row.num_classes)) != found:
            text = f"{row.name}: '{split}' has {found[0]:,} images of {found[1]:,} classes, should have {wanted[0]:,} of {wanted[1]:,}"
            (notes if "partial" in index.source else problems).append(text)
    return problems, notes
