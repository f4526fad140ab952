"""The images that a person names on the command line: files, folders, patterns, addresses, lists, shards."""

import glob
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitctl.data.datasets.catalog import is_photographs, original_splits, read_listed
from vitctl.data.datasets.readers.class_folder import class_of_each, sort_files
from vitctl.data.images.decode import BadSample
from vitctl.data.images.image_types import IMAGE_EXTENSIONS, SYSTEM_FILE
from vitctl.data.images.transforms import EvalTransform, open_for
from vitctl.data.inspect.overview import choose
from vitctl.data.shards.index import find_splits
from vitctl.data.source.locate import PACKED, WITH_SPLIT, locate_all_splits, locate_splits, no_index, tars
from vitctl.data.source.stores import ImageFiles
from vitctl.data.source.views import Source, sample_key
from vitctl.data.writer.intake import LeftOut
from vitctl.errors import DataError
from vitctl.jobs.inputs.checks import columns_of
from vitctl.jobs.inputs.data import open_recipe_split
from vitctl.recipe.images import Place
from vitctl.recipe.schema import Evaluate
from vitctl.system import limits
from vitctl.system.address import without_queries
from vitctl.system.remote import check_address, is_remote
from vitctl.system.text import count_text, nearest

STDIN = "-"
_NAMED = 3  # files that a message names

Note = Callable[[str], None]


class _File(NamedTuple):
    name: str
    of_class: str | None = None


def place_of(recipe: Evaluate, inputs: Sequence[str]) -> Place:
    """Return how images are read: as the run of the weights read them, if it was trained on the first."""
    first = Path(inputs[0] if inputs else "")
    first = first if first.exists() else Path(str(first).rpartition(":")[0])
    is_data = first != Path() and (first.is_dir() or first.suffix == ".tar")
    if recipe.data.columns or not is_data:
        return recipe.data
    return recipe.data.model_copy(update={"columns": columns_of(recipe.weights.source, str(first))})


def find_images(
    inputs: Sequence[str],
    place: Place,
    *,
    split: str = "",
    stdin: IO[bytes],
    note: Note,
    missing: list[str] | None = None,
) -> list[Source]:
    """Find the images of each input, in order; neighbouring files form one source. Nothing is decoded.

    Args:
        inputs: images, folders (searched in depth), patterns with `*`, `?` or `[`, addresses of images, what
            `--data` takes, with `:SPLIT` behind where it is not all, and `-`: a list of paths and addresses.
        place: how shards are read.
        split: of inputs that have splits and are given without one.
        stdin: the list: one name per line, or ended by NUL as `find -print0` does.
        note: told what was left out of folders.
        missing: gets a line for each input without images, if others have some; None: such an input is an
            error.

    Raises:
        DataError: an input names nothing, or shards have several splits and none was chosen; with `missing`,
            only if this holds for every input.
    """
    found: list[Source | _File] = []
    errors: list[DataError] = []
    for text in without_queries(*inputs, error=DataError):
        try:
            found += _names_in(stdin, note) if text == STDIN else _one(text, place, split, note)
        except DataError as error:
            errors.append(error)
    if errors and (missing is None or not found):
        raise errors[0]
    if missing is not None:
        missing += map(str, errors)
    sources: list[Source] = []
    for _, group in groupby(found, lambda one: isinstance(one, _File)):
        same = list(group)
        if files := [one for one in same if isinstance(one, _File)]:
            sources.append(ImageFiles([one.name for one in files], [one.of_class for one in files]))
        sources += [source for source in same if not isinstance(source, _File)]
    if not sources:
        raise DataError(", ".join(inputs) or "an empty list", "no images there")
    return sources


def some_names(sources: Sequence[Source], count: int) -> list[str]:
    """Return the names of each source's first images, at most `count`; of shards only one, which is read."""
    return [
        name
        for source in sources
        for name in (
            source.names[:count]
            if isinstance(source, ImageFiles)
            else [sample_key(source, 0)] * bool(len(source))
        )
    ]


def _one(text: str, place: Place, split: str, note: Note) -> Sequence[Source | _File]:
    """Return the images of one command-line input, which must exist."""
    if not text:
        raise DataError("''", "is empty", "name an image or a folder (. is the current one)")
    path = Path(text)
    if os.path.lexists(path):
        is_image = path.suffix.lower().removeprefix(".") in IMAGE_EXTENSIONS
        if not is_image and is_photographs(text) and (split or path.is_file()):
            if split:
                return [_shards(text, split, place, note)]
            return [*original_splits(text, place.columns).values()]
        if path.is_dir():
            return _in_folder(text, place, split, note)
        if path.suffix.lower() in PACKED:
            raise no_index(text)
        return [_shards(text, split, place, note)] if text.endswith(".tar") else [_File(text)]
    where, own = _parted(text)
    if own or _is_pattern_of_shards(where) or (is_remote(text) and split):
        return [_shards(where, own or split, place, note)]
    if is_remote(text):
        check_address(text)
        return [_File(text)]
    if glob.has_magic(text):
        if not (names := sorted(glob.glob(text, recursive=True))):
            raise DataError(text, "no file matches this pattern")
        return [one for name in names for one in _one(name, place, split, note)]
    near = nearest(path.name, [one.name for one in path.parent.glob("*")], 1)
    raise DataError(
        text, f"no such file or folder{f'; did you mean {path.parent / near[0]}?' if near else ''}"
    )


def _in_folder(text: str, place: Place, split: str, note: Note) -> Sequence[Source | _File]:
    """Return a split if the folder holds shards, else its images at any depth."""
    folder = Path(text)
    if find_splits(folder):
        return [_shards(text, split, place, note)]
    names, left_out, _ = sort_files(folder)
    if not names and next(tars(folder), None):
        return [_shards(text, split, place, note)]
    if others := [one.name for one in left_out if one.reason != SYSTEM_FILE]:
        shown = ", ".join(others[:_NAMED]) + (", ..." if len(others) > _NAMED else "")
        note(f"{text}: skipped {count_text(len(others), 'file')} that are not images: {shown}")
    if not names:
        raise DataError(text, "holds no images")
    return _files(text, names, left_out, place.columns)


def _files(folder: str, names: Sequence[str], left_out: Sequence[LeftOut], columns: str = "") -> list[_File]:
    """Return images with their classes by the table of their folder, or by the tree; "" where that is in
    doubt.
    """
    try:
        listed = [
            (item.key, originals.class_names[item.label] if isinstance(item.label, int) else "")
            for originals in read_listed(Path(folder), columns).values()
            for item in originals.items
        ]
        classes = dict(listed)
        known = (
            [classes.get(name, "") for name in names] if listed else class_of_each(names, folder, left_out)
        )
    except DataError:
        known = [""] * len(names)
    return [_File(os.path.join(folder, name), of) for name, of in zip(names, known, strict=True)]


def _parted(text: str) -> tuple[str, str]:
    """Return PLACE and SPLIT of PLACE:SPLIT if PLACE exists; else the text and ""."""
    found = WITH_SPLIT.fullmatch(text)
    if is_remote(text) and text.lower().endswith(tuple(f".{one}" for one in IMAGE_EXTENSIONS)):
        return text, ""  # an image, whose name may contain a colon
    if found is None or not (is_remote(text) or _is_pattern_of_shards(found[1]) or Path(found[1]).exists()):
        return text, ""
    return found[1], found[2]


def _is_pattern_of_shards(text: str) -> bool:
    return text.startswith("@") or text.endswith(".tar")


def _shards(text: str, split: str, place: Place, note: Note) -> Source:
    chosen = split or _only_split(text, place.columns)
    if not split:
        note(
            f"{text}: all images of its only split, {chosen}; --split chooses others, such as those that "
            f"evaluate scores"
        )
    return open_recipe_split(place.model_copy(update={"path": text, "dataset": ""}), chosen, scratch=None)


def _only_split(text: str, columns: str) -> str:
    found = locate_all_splits(text) if is_remote(text) else locate_splits(text, "", columns=columns)
    if not found:
        raise no_index(text)
    if len(found) > 1:
        last = [*found][-1]
        raise DataError(
            text, f"has the splits {', '.join(found)}", f"choose one: {text}:{last}, or --split {last}"
        )
    return next(iter(found))


def _names_in(stdin: IO[bytes], note: Note) -> Iterator[_File]:
    """Yield the names in a list; a missing file is a bad image, as a program may have written the list."""
    content = stdin.read(limits.SHARD_LIST + 1)
    if len(content) > limits.SHARD_LIST:
        raise DataError(
            "standard input", f"a list of more bytes than {limits.SHARD_LIST:,}", "give it in parts"
        )
    for line in content.split(b"\0") if b"\0" in content else content.splitlines():
        name = os.fsdecode(line)
        if name and not is_remote(name) and os.path.isdir(name):
            names, left_out, _ = sort_files(Path(name))
            if left_out:
                note(f"{name}: skipped {count_text(len(left_out), 'file')} that are not images")
            yield from _files(name, names, left_out)
        elif name:
            yield _File(name)


@dataclass(frozen=True)
class ChosenImages:
    """Images to look at.

    Args:
        names: of files, or keys in their split.
        labels: -1 for none.
        class_names: in label order; empty for files.
        text: their origin in words.
    """

    names: tuple[str, ...]
    labels: tuple[int, ...]
    class_names: tuple[str, ...]
    read: tuple[Callable[[], bytes], ...]
    text: str

    def __len__(self) -> int:
        return len(self.names)

    def pixels(
        self, transform: EvalTransform, done: Callable[[int, int], None] = lambda _done, _total: None
    ) -> Tensor:
        """Return the pre-processed images, uint8 `[N, 3, S, S]`. Raises DataError on an unusable image.

        `done` is called with the number of images read, and the total.
        """
        found = []
        for name, read in zip(self.names, self.read, strict=True):
            try:
                found.append(transform(open_for(transform, read())))
            except BadSample as error:
                raise DataError(name, f"cannot be used ({error})", "fix it, or leave it out") from None
            done(len(found), len(self))
        return torch.stack(found)


def choose_images(sources: Sequence[Source], num_images: int, seed: int, text: str) -> ChosenImages:
    """Return images of some sources, a random choice if there are more than `num_images`.

    An image with several labels keeps the first. Labels are kept only if all sources have the same classes.
    """
    firsts = np.cumsum([0, *map(len, sources)])
    chosen = np.array(choose(int(firsts[-1]), num_images, seed), np.int64)
    owners = np.searchsorted(firsts, chosen, side="right") - 1
    places = [
        (sources[owner], number)
        for owner, number in zip(owners, (chosen - firsts[owners]).tolist(), strict=True)
    ]
    (class_names, *others) = dict.fromkeys(tuple(source.class_names) for source in sources)
    labels = [
        -1 if others else int(source.labels(np.array([number])).reshape(-1)[0]) for source, number in places
    ]
    return ChosenImages(
        tuple(source.key(number) for source, number in places),
        tuple(labels),
        () if others else class_names,
        tuple(partial(source.read, number) for source, number in places),
        text,
    )
