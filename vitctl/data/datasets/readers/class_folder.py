"""Images in one folder per class: a user's tree or tar file, and known sets with fixed classes."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from vitctl.data.datasets.readers.original_files import (
    LINKED_FOLDER,
    class_list,
    file_items,
    file_size,
    image_names,
    need,
    read_archive,
    read_bytes,
    read_part,
)
from vitctl.data.images.image_types import HEAD_BYTES, SYSTEM_FILE, exclusion_reason, is_system_file
from vitctl.data.source.locate import above
from vitctl.data.source.splits import ROLES, TABLES, TRAIN
from vitctl.data.writer.intake import Doubt, Item, LeftOut, Originals, keep_doubt
from vitctl.errors import DataError
from vitctl.system.text import same_name

_WORDS = "|".join(ROLES)
_SPLIT_AND_NAME = re.compile(rf"({_WORDS})(?:[\W_]+(.+))?|(.+)[\W_]+({_WORDS})")


def read_class_folder(folder: Path) -> dict[str, Originals]:
    """Read the splits and classes of `FOLDER/<class>/**` or `FOLDER/{train,val,test}/<class>/**`.

    Every file that may be an image by its name or its content becomes an item; all others are listed with a
    reason. Links to files are followed; links to folders are listed instead.

    Returns:
        split name to its images, `train` alone without split folders; classes sorted by code point.

    Raises:
        DataError: no images, or an image outside any class folder; a folder cannot be read.
    """
    names, left_out, folders = sort_files(folder)
    items = [Item(name, -1, partial(read_bytes, folder / name), file_size(folder / name)) for name in names]
    return arrange(items, str(folder), left_out, folders)


def read_class_tar(path: Path) -> dict[str, Originals]:
    """Read the layout of `read_class_folder` in a plain tar, which stays packed; a class may be a tar."""
    packed = read_archive(path)
    items, left_out = list[Item](), [*packed.left_out]
    for name, offset, size in packed.files:
        head = bytes if offset < 0 else partial(read_part, path, offset, min(size, HEAD_BYTES))
        if reason := exclusion_reason(name, head):
            left_out.append(LeftOut(name, reason))
        else:
            items.append(packed.item(name, offset, size))
    folders = {one.name.rpartition("/")[0] for one in left_out} | {*packed.folders}
    folders = {one for one in folders if not is_system_file(one)}
    return arrange(items, str(path), left_out, sorted(folders))


def _top(names: Sequence[str]) -> str:
    """Return the single folder, with its slash, that holds all class folders; "" if there is none."""
    tops = {name.partition("/")[0] for name in names}
    deep = min((name.count("/") for name in names), default=0) > 1
    return f"{min(tops)}/" if len(tops) == 1 and deep and not tops & {*ROLES} else ""


def tables_in(names: Iterable[str]) -> list[str]:
    """Return the tables at the top of an archive, or in a folder there, given the names of its files."""
    return [name for name in names if name.lower().endswith(TABLES) and name.count("/") < 2]


def is_class_tar(path: Path) -> bool:
    """Return whether a tar holds images in folders, or a table of images, but no label files like shards."""
    with suppress(DataError):
        names = [name for name, *_ in read_archive(path).files]
        others = {os.path.splitext(name)[0] for name in names if exclusion_reason(name, bytes)}
        images = [name for name in names if not exclusion_reason(name, bytes)]
        in_folders = any("/" in name for name in images) or bool(images and tables_in(names))
        return in_folders and not any(os.path.splitext(name)[0] in others for name in images)
    return False


def sort_files(folder: Path) -> tuple[list[str], list[LeftOut], list[str]]:
    """Return the sorted paths below a folder: possible images, other files with reasons, folders."""
    if not folder.is_dir():
        raise DataError(folder, "no such folder")

    def refuse(error: OSError) -> None:
        raise DataError(
            error.filename, f"cannot be read ({error.strerror})", "make it readable, or move it away"
        ) from None

    names, left_out, folders = list[str](), list[LeftOut](), list[str]()
    for parent, inner, files in os.walk(folder, onerror=refuse):
        base = Path(parent).relative_to(folder)
        for name in sorted(inner):
            path = (base / name).as_posix()
            if is_system_file(name):
                left_out.append(LeftOut(path, SYSTEM_FILE))
                continue
            folders.append(path)
            if (folder / path).is_symlink():
                left_out.append(LeftOut(path, LINKED_FOLDER))
        inner[:] = sorted(name for name in inner if not is_system_file(name))
        for name in sorted(files):
            path = (base / name).as_posix()
            is_special = (
                (folder / path).exists() and not (folder / path).is_file() and not is_system_file(path)
            )
            reason = exclusion_reason(path, partial(_head, folder / path))
            if is_special or reason:
                left_out.append(LeftOut(path, "a FIFO, a socket or a device" if is_special else reason))
            else:
                names.append(path)
    return names, left_out, folders


def _head(path: Path) -> bytes:
    """Return the first bytes of a file; nothing if it is not a regular file or cannot be read."""
    try:
        if not path.is_file():
            return b""
        with path.open("rb") as file:
            return file.read(HEAD_BYTES)
    except OSError:
        return b""


def arrange(
    items: Sequence[Item], source: str, left_out: Sequence[LeftOut] = (), folders: Sequence[str] = ()
) -> dict[str, Originals]:
    """Sort images by the folders in their names into splits and classes.

    Args:
        items: their keys are relative paths, with `/`; the path within its split becomes the key. Labels are
            ignored.
        folders: folder paths; those at class level without an image are reported.
    """
    top = _top([item.key for item in items])
    left_out = [replace(one, name=one.name.removeprefix(top)) for one in left_out]
    folders = [one.removeprefix(top) for one in folders if one != top.rstrip("/")]
    places, doubts = _layout([item.key for item in items], source, left_out)
    members: dict[str, list[Item]] = {}
    prefixes: dict[str, str] = {}
    for item, (prefix, split, key) in zip(items, places, strict=True):
        members.setdefault(split, []).append(replace(item, key=key))
        prefixes.setdefault(split, prefix)
    every = [item.key for found in members.values() for item in found]
    in_splits = any(prefix != top for prefix in prefixes.values())
    class_names = tuple(sorted({_class_of(key) for key in every}))
    labels = {name: label for label, name in enumerate(class_names)}
    outside = {split: list[LeftOut]() for split in members}
    for one in left_out:
        split = ROLES.get(one.name.partition("/")[0].lower(), "")
        outside[split if split in members else next(iter(members))].append(one)
    candidates = {same_name(_class_place(name, in_splits=in_splits)) for name in folders}
    empty = tuple(sorted(candidates - {*class_names, ""}))
    return {
        split: Originals(
            [
                replace(item, label=labels[_class_of(item.key)])
                for item in sorted(found, key=lambda item: item.key)
            ],
            class_names,
            source,
            is_user_data=True,
            left_out=tuple(outside[split]),
            empty_classes=empty,
            prefix=prefixes[split],
            doubts=doubts,
        )
        for split, found in members.items()
    }


def _layout(
    names: Sequence[str], source: str, left_out: Sequence[LeftOut]
) -> tuple[list[tuple[str, str, str]], tuple[Doubt, ...]]:
    """Return the place of each image by its path, and doubts about the layout. Raises as `arrange`.

    A place is the folder of its split, with a slash, or ""; the split; the path within.
    """
    if not names:
        raise DataError(source, "no images found, should hold <class>/<image> or train/<class>/<image>")
    top = _top(names)
    names = [name.removeprefix(top) for name in names]
    tops = sorted({name.partition("/")[0] for name in names})
    splits = [top for top in tops if top.lower() in ROLES]
    others = [top for top in tops if top not in splits]
    named_so, splits = (splits, []) if others else ([], splits)
    places = [(top, TRAIN, name) for name in names]
    if splits:
        parts = [name.partition("/") for name in names]
        places = [(f"{top}{split}{slash}", ROLES[split.lower()], key) for split, slash, key in parts]
    keys = [key for *_, key in places]
    if outside := next((key for key in keys if "/" not in key), ""):
        fix = "" if any("/" in key for key in keys) else above(Path(source))
        raise DataError(source, f"{outside} is not in a class folder, should be <class>/{outside}", fix)
    doubts = _named_like_splits(named_so, others) or _splits_inside(keys)
    doubts = doubts or _nested(keys, source, in_splits=bool(splits))
    spelled = {(split, key.partition("/")[0]) for _, split, key in places}
    for (_, name), count in Counter((split, same_name(folder)) for split, folder in spelled).items():
        if count > 1:
            text = f"class {name!r} is two folders, whose accents are stored differently (NFC and NFD):"
            doubts += (keep_doubt(name, f"{text} rename one if they are two classes; if they are one,"),)
    classes = {os.path.splitext(name)[0]: _class_of(key) for name, key in zip(names, keys, strict=True)}
    stems = [os.path.splitext(one.name)[0] for one in left_out if one.name.endswith(".cls")]
    for stem in [stem for stem in stems if stem in classes][:1]:
        text = f"class {classes[stem]!r} is the folder of images with own labels, such as {stem}.cls:"
        text += " if the labels count, give the images as WebDataset shards to --data; if the folders do,"
        doubts += (keep_doubt(classes[stem], text),)
    return places, doubts


def class_of_each(names: Sequence[str], source: str, left_out: Sequence[LeftOut]) -> list[str] | list[None]:
    """Return the class that `arrange` assigns to each path; "" if in doubt, None without class folders."""
    try:
        places, doubts = _layout(names, source, left_out)
    except DataError:
        return [None] * len(names)
    return ["" if doubts else _class_of(key) for *_, key in places]


def _class_of(key: str) -> str:
    return same_name(key.partition("/")[0])


def _named_like_splits(splits: Sequence[str], others: Sequence[str]) -> tuple[Doubt, ...]:
    """Return a doubt if some classes are named like splits, and others are not."""
    return tuple(
        keep_doubt(
            same_name(name),
            f"class {name!r} is named like a split, and {others[0]!r} beside it is not: if it is a split, "
            f"move the others into split folders or away; if it is a class,",
        )
        for name in splits[:1]
    )


def _splits_inside(keys: Sequence[str]) -> tuple[Doubt, ...]:
    """Return a doubt if splits seem to be part of the class names, or folders below the classes."""
    folders = sorted({key.rpartition("/")[0] for key in keys})
    alike, inner = dict[str, dict[str, str]](), dict[str, set[str]]()
    for folder in folders:
        name, *below = map(same_name, folder.split("/"))
        rest, split = _with_split(name)
        alike.setdefault(rest, {})[name] = split
        inner.setdefault(name, set()).update(filter(None, (_with_split(one)[1] for one in below)))
    for names in alike.values():
        if len(names) > 1 and any(names.values()):
            first, second, *_ = names
            text = f"classes {first!r} and {second!r} differ in the name of a split alone: if they are"
            text += " splits, make them train/CLASS and test/CLASS; if they are classes,"
            return (keep_doubt(first, text),)
    roles = sorted(set().union(*inner.values()))
    if len(roles) < 2:
        return ()
    first = next(name for name, own in inner.items() if own)
    text = f"class {first!r} holds folders named like splits ({', '.join(roles)} in the classes): if they are"
    fix = f"put them on top, as train/{first}" if len(inner) > 1 else f"give the folder {first} itself"
    return (keep_doubt(first, f"{text} splits, {fix}; if not,"),)


def _with_split(folder: str) -> tuple[str, str]:
    """Return a folder's name without a split name at its beginning or end, and that split, or ""."""
    name = folder.lower()
    found = _SPLIT_AND_NAME.fullmatch(name)
    return (found[2] or found[3] or "", ROLES[found[1] or found[4]]) if found else (name, "")


def _nested(keys: Sequence[str], source: str, *, in_splits: bool) -> tuple[Doubt, ...]:
    """Return a doubt if classes hold no images directly, and their folders look like the classes."""
    inner = dict[str, set[str]]()
    for key in keys:
        inner.setdefault(_class_of(key), set()).add(
            same_name(key.split("/")[1]) if key.count("/") > 1 else ""
        )
    outer = {name: found for name, found in inner.items() if "" not in found}
    counts = Counter(name for found in outer.values() for name in found)
    if len(counts) < 2:  # a single folder in each class, such as images/, is not a level of classes
        return ()
    first, *others = [name for name, found in outer.items() if any(counts[one] > 1 for one in found)] or outer
    shown = ", ".join(sorted(outer[first])[:3]) + (" ..." if len(outer[first]) > 3 else "")
    if len(inner) == 1:
        place = "move them one level up" if in_splits else f"give {source}/{first}"
        place = place if in_splits or Path(source).is_dir() else f"unpack it and give its folder {first}"
        text = f"class {first!r} is the only one, and holds folders ({shown}): if these are the classes or "
        return (keep_doubt(first, f"{text}splits, {place}; if not,"),)
    if max(counts.values()) < 2:
        return ()
    text = (
        f"classes {first!r} and {others[0]!r} hold the same folders ({shown}) and no images of their own: if "
        f"they are splits, name them train, validation and test; if they are classes,"
    )
    return (keep_doubt(first, text),)


def _class_place(folder: str, *, in_splits: bool) -> str:
    """Return the class that a folder is or belongs to, by its path; "" for a split folder."""
    top, _, rest = folder.partition("/")
    if not in_splits:
        return top
    if top.lower() in ROLES:
        return rest.partition("/")[0]
    return "" if rest else top


def read_fixed_classes(
    root: Path,
    *,
    places: tuple[str, ...],
    classes: str | tuple[str, ...],
    source: str,
    key: str = "{folder}/{file}",
    folders: tuple[str, ...] = (),
    suffixes: tuple[str, ...] = (".jpg",),
    split: str = "train",
) -> dict[str, Originals]:
    """Read a known set of class folders as one split: classes in label order, names by code point.

    Args:
        places: paths of the folder of class folders, the usual one first.
        classes: class names in label order, or the name of a list in `assets/`.
        key: format of the keys, with `folder`, `file` and `name` (of the class).
        suffixes: of the images, in lower case; other files are ignored.
    """
    folder = need(root, *places)
    class_names = class_list(classes) if isinstance(classes, str) else classes
    check_class_folders(folder, folders or class_names)
    rows = [
        (label, place, file)
        for label, place in enumerate(folders or class_names)
        for file in image_names(folder / place, suffixes)
    ]
    names, labels = [f"{place}/{file}" for _, place, file in rows], [label for label, *_ in rows]
    keys = [key.format(folder=place, file=file, name=class_names[label]) for label, place, file in rows]
    return {split: Originals(file_items(folder, names, labels, keys), class_names, source)}


def check_class_folders(folder: Path, folders: Sequence[str]) -> None:
    """Raise DataError unless exactly these class folders are there; hidden folders are ignored."""
    found = {path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")}
    missing, others = sorted(set(folders) - found), sorted(found - set(folders))
    if missing or others:
        problems = [
            f"{len(names)} {what}: {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
            for names, what in ((missing, "missing"), (others, "unknown"))
            if names
        ]
        raise DataError(folder, f"should hold {len(folders)} class folders; {'; '.join(problems)}")


CALTECH101_SPLIT = "caltech101(vitctl-v1)"
_CALTECH101_TRAIN_PER_CLASS = 30
_CALTECH101_SEED = 1234
_CALTECH101_CAPITALS = ("BACKGROUND_Google", "Faces", "Faces_easy", "Leopards", "Motorbikes")


def read_caltech101(root: Path) -> dict[str, Originals]:
    """Read Caltech101: 30 images of each class are `train`, the others `test`.

    The benchmark's split was drawn from directory listings in the order of one machine's disk, and cannot be
    drawn again. This one draws with the same seed from sorted listings, is named `caltech101(vitctl-v1)`, and
    its scores are close to published ones, but not comparable bit for bit.
    """
    folder = need(root, "101_ObjectCategories", "caltech-101/101_ObjectCategories")
    class_names = class_list("caltech101")
    capitals = {name.lower(): name for name in _CALTECH101_CAPITALS}
    labels = {capitals.get(name, name): label for label, name in enumerate(class_names)}
    check_class_folders(folder, list(labels))
    generator = np.random.RandomState(_CALTECH101_SEED)
    names: dict[str, list[str]] = {"train": [], "test": []}
    for name in sorted(labels):
        files = image_names(folder / name)
        if len(files) <= _CALTECH101_TRAIN_PER_CLASS:
            raise DataError(
                folder / name, f"{len(files)} images, should be more than {_CALTECH101_TRAIN_PER_CLASS}"
            )
        train = set(generator.choice(files, _CALTECH101_TRAIN_PER_CLASS, replace=False).tolist())
        for file in files:
            names["train" if file in train else "test"].append(f"{name}/{file}")
    return {
        split: Originals(
            file_items(folder, found, [labels[name.partition("/")[0]] for name in found]),
            class_names,
            f"Caltech101, split {CALTECH101_SPLIT}",
        )
        for split, found in names.items()
    }
