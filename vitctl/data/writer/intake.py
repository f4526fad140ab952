"""Images and labels on their way into shards: checked, counted, converted."""

import hashlib
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from vitctl.data.images.decode import CONVERSION, BadSample, open_picture, without_heic
from vitctl.data.images.image_types import HEAD_BYTES, is_heic
from vitctl.data.images.pixel_digest import pixel_digest, pixel_notes
from vitctl.data.shards.tar import NO_LABEL, pad_labels
from vitctl.data.source.views import no_class
from vitctl.errors import DataError, refuse
from vitctl.system import limits
from vitctl.system.files import parsing, write_csv
from vitctl.system.pool import Done, run_each
from vitctl.system.text import breaks_line, count_text, near_twins, same_name


@dataclass(frozen=True, slots=True)
class Item:
    """One original image.

    Args:
        key: name, unique in the split; any text.
        label: class number, -1 for none; or several class numbers, in a split whose images may have several.
        read: returns the encoded image, which is stored unchanged.
        size: of the encoded image in bytes; None if only `read` can tell.
    """

    key: str
    label: int | tuple[int, ...]
    read: Callable[[], bytes]
    size: int | None = None

    @property
    def labels(self) -> tuple[int, ...]:
        return self.label if isinstance(self.label, tuple) else (self.label,)


def read_item(item: Item) -> bytes:
    """Return the encoded image of an item. Raises DataError if its original is damaged, in any format."""
    with parsing(item.key, DataError, "cannot be read"):
        return item.read()


@dataclass(frozen=True)
class LeftOut:
    """A file of the source that is not in the split, and the reason."""

    name: str
    reason: str


class Doubt(NamedTuple):
    """A line about classes with a fix, and the options of `data shards` that settle it right away."""

    text: str
    options: tuple[str, ...]


def keep_doubt(name: str, text: str) -> Doubt:
    """Return a doubt that --keep-class NAME settles."""
    options = ("--keep-class", name)
    return Doubt(f"{text} type {shlex.join(options)}", options)


@dataclass(frozen=True)
class Originals:
    """One split before it is written.

    Args:
        is_user_data: files and classes are as a user arranged them, and are checked before they are written;
            see `check_originals`.
        prefix: precedes the item keys in the names of the source, such as `val/`.
        doubts: of its reader, about the classes; keeping or dropping the class settles one.
    """

    items: Sequence[Item]
    class_names: tuple[str, ...]
    source: str
    is_user_data: bool = False
    left_out: tuple[LeftOut, ...] = ()
    empty_classes: tuple[str, ...] = ()
    prefix: str = ""
    doubts: tuple[Doubt, ...] = ()


class OriginalImages:
    """The images of a split where they are, in the order of their reader; a `Source`."""

    parts = ()

    def __init__(self, split: str, originals: Originals) -> None:
        self.items, self.class_names = originals.items, originals.class_names
        labels = pad_labels([item.labels for item in self.items]).astype(np.int64)
        self._labels = labels if any(isinstance(item.label, tuple) for item in self.items) else labels[:, 0]
        names = repr((split, [item.key for item in self.items]))  # the order of a part depends on them
        self.digest = hashlib.sha256(names.encode(errors="surrogateescape")).hexdigest()

    def __len__(self) -> int:
        return len(self.items)

    def labels(self, samples: np.ndarray | None = None) -> np.ndarray:
        """Return the labels of the given samples, or of all: int64 `[n]`, or `[n, L]` padded with -1."""
        return self._labels if samples is None else self._labels[samples]

    def key(self, sample: int) -> str:
        """Return the name of the sample."""
        return self.items[sample].key

    location = key

    def read(self, sample: int) -> bytes:
        """Return the encoded image. Raises `BadSample` with the reason if it cannot be read."""
        try:
            return read_item(self.items[sample])
        except DataError as error:
            raise BadSample(str(error)) from None


Bad = Literal["stop", "skip", "keep"]
REPORT = "intake.csv"
_IMAGES_PER_TASK = 64
_FEW_CLASSES = 10  # listed one by one in a command
_HEIC = "heic"
_HEIC_NAMES = (".heic", ".heif", ".hif")


@dataclass(frozen=True)
class Intake:
    """The result of checking a source.

    Args:
        left_out: other files, system files included, with reasons; named as in the source.
        bad: unusable images; also in `left_out` if they are skipped.
        doubts: about classes; nothing should be written while there are any.
    """

    splits: Mapping[str, Originals]
    left_out: tuple[LeftOut, ...]
    bad: tuple[LeftOut, ...]
    converted: tuple[str, ...]
    doubts: tuple["Doubt", ...]
    notes: tuple[str, ...] = ()

    def counts(self) -> list[tuple[str, int]]:
        """Count the left-out files by kind of reason, most first."""
        return Counter(one.reason.partition(":")[0] for one in self.left_out).most_common()

    def write(self, path: Path) -> None:
        """Write the complete list as a table: file, what became of it, why."""
        path.parent.mkdir(parents=True, exist_ok=True)
        listed = {one.name for one in self.left_out}
        rows = [
            ("file", "what", "reason"),
            *((one.name, "left out", one.reason) for one in self.left_out),
            *((one.name, "bad", one.reason) for one in self.bad if one.name not in listed),
            *((name, "converted", CONVERSION) for name in self.converted),
        ]
        write_csv(path, rows)


class _Split(NamedTuple):
    """A split, with each image's finding ("" if usable, `heic`, or the problem) and pixel digest or b""."""

    originals: Originals
    findings: list[str]
    digests: list[bytes]

    def notes(self) -> list[str]:
        items, prefix, names = self.originals.items, self.originals.prefix, self.originals.class_names

        def label(number: int) -> str:
            return ";".join(names[label] for label in items[number].labels if label >= 0)

        return pixel_notes(self.digests, lambda number: prefix + items[number].key, label)

    def per_class(self, *, usable: bool) -> list[int]:
        """Count the images of each class; with `usable`, without bad images."""
        counts = [0] * len(self.originals.class_names)
        for item, finding in zip(self.originals.items, self.findings, strict=True):
            if usable and _is_bad(finding):
                continue
            for label in item.labels:
                if label >= 0:
                    counts[label] += 1
        return counts


class Known(NamedTuple):
    """What is known of the images of a split.

    Args:
        contents: digest of the bytes of each image.
        found: what `check_image` returned, by digest; it gets what is found of others.
    """

    contents: Sequence[str]
    found: dict[str, tuple[str, bytes]]


def check_originals(
    splits: Mapping[str, Originals],
    *,
    known: Mapping[str, Known] | None = None,
    bad: Bad = "stop",
    drop: Sequence[str] = (),
    keep: Sequence[str] = (),
    workers: int = 0,
    done: Done = lambda _: None,
) -> Intake:
    """Check every image and every class of a user's data set; known data sets are not checked.

    Args:
        known: what is known of the images, by split; these are not decoded again.
        bad: treatment of images that cannot be decoded: `stop` and `skip` list them; `keep` checks no image,
            for sets so large that decoding each image once is too slow.

    Raises:
        DataError: a class to drop or to keep does not exist, or images with several labels would lose one.
    """
    if not (drop or keep) and not any(originals.is_user_data for originals in splits.values()):
        return Intake(splits, (), (), (), ())
    known = known or {name: Known([""] * len(originals.items), {}) for name, originals in splits.items()}
    looked = {
        name: _Split(originals, *_look(originals.items, known[name], bad, workers, done))
        for name, originals in splits.items()
    }
    drop, keep = list(map(same_name, drop)), list(map(same_name, keep))
    _check_named(looked, drop, keep)
    out: dict[str, Originals] = {}
    left_out, wrong, converted = list[LeftOut](), list[LeftOut](), list[str]()
    for name, split in looked.items():
        rest, bad_images, dropped = _sorted_out(split, set(drop), converted)
        wrong += bad_images
        left_out += [*split.originals.left_out, *(bad_images if bad == "skip" else ()), *dropped]
        if rest.items:
            out[name] = rest
    doubts = _doubts(looked, set(drop), set(keep))
    notes = tuple(note for split in looked.values() for note in split.notes())
    return Intake(out, tuple(left_out), tuple(wrong), tuple(converted), tuple(doubts), notes)


def check_image(data: bytes) -> tuple[str, bytes]:
    """Decode an image, and return its finding and the digest of its pixels, empty if there are none.

    The finding is "" if training can read the image, `heic` if it will be converted, else the problem.
    """
    if not data:
        return "empty file", b""
    if len(data) > limits.IMAGE_FILE:
        return f"too large: {len(data):,} bytes, should have at most {limits.IMAGE_FILE:,}", b""
    try:
        picture = open_picture(data)
        pixels = picture.region(0, 0, picture.height, picture.width, reuse_buffer=True)
    except BadSample as error:
        return str(error), b""
    return _HEIC if is_heic(data[:HEAD_BYTES]) else "", pixel_digest(pixels)


def _look(
    items: Sequence[Item], known: Known, bad: Bad, workers: int, done: Done
) -> tuple[list[str], list[bytes]]:
    if bad == "keep":
        found = [_HEIC if item.key.lower().endswith(_HEIC_NAMES) else "" for item in items]
        return found, [b""] * len(items)

    def check(number: int) -> tuple[str, bytes]:
        if breaks_line(items[number].key.rpartition("/")[2]):
            return "its name has a control character", b""
        if found := known.found.get(known.contents[number]):
            return found
        try:
            return check_image(read_item(items[number]))
        except DataError as error:
            return f"unreadable: {error}", b""

    looked = run_each(check, len(items), _IMAGES_PER_TASK, workers=workers, done=done)
    known.found.update({one: found for one, found in zip(known.contents, looked, strict=True) if found[1]})
    return [found for found, _ in looked], [digest for _, digest in looked]


def _is_bad(found: str) -> bool:
    return found not in ("", _HEIC)


def _sorted_out(
    split: _Split, drop: set[str], converted: list[str]
) -> tuple[Originals, list[LeftOut], list[LeftOut]]:
    """Return the split to write, bad images, and images of dropped classes; renumbers labels.

    The names of HEIC images, which become JPEG, are added to `converted`.
    """
    originals = split.originals
    kept = [name for name in originals.class_names if name not in drop]
    new = {originals.class_names.index(name): label for label, name in enumerate(kept)} | {-1: -1}
    items, wrong, dropped = list[Item](), list[LeftOut](), list[LeftOut]()
    num_converted = split.findings.count(_HEIC)
    for item, finding in zip(originals.items, split.findings, strict=True):
        name = originals.prefix + item.key
        if _is_bad(finding):
            wrong.append(LeftOut(name, finding))
            continue
        if finding == _HEIC:
            converted.append(name)
            item = replace(item, read=partial(_converted, item), size=None)
        if isinstance(item.label, tuple):
            items.append(item)
        elif item.label in new:
            items.append(replace(item, label=new[item.label]))
        else:
            dropped.append(LeftOut(name, "class dropped"))
    notes = [
        originals.source,
        *([f"{count_text(len(wrong), 'bad image')} left out"] if wrong else []),
        *([f"{num_converted:,} {CONVERSION}"] if num_converted else []),
    ]
    rest = replace(
        originals,
        items=items,
        class_names=tuple(kept),
        source="; ".join(notes),
        left_out=(),
        empty_classes=(),
        doubts=(),
    )
    return rest, wrong, dropped


def _converted(item: Item) -> bytes:
    data = read_item(item)
    try:
        return without_heic(data)
    except BadSample as error:
        raise DataError(item.key, error) from None


def _check_named(looked: Mapping[str, _Split], drop: Sequence[str], keep: Sequence[str]) -> None:
    known = {
        name for one in looked.values() for name in (*one.originals.class_names, *one.originals.empty_classes)
    }
    for name in (*drop, *keep):
        if name not in known:
            raise no_class(name, sorted(known))
    both = min({*drop} & {*keep}, default=None)
    refuse(
        DataError,
        (both is not None, f"--drop-class and --keep-class name {both!r}: leave one of them out"),
        (
            drop and _has_several(looked),
            "--drop-class",
            "these images have several labels each",
            "remove the label from the table",
        ),
    )


def _has_several(looked: Mapping[str, _Split]) -> bool:
    return any(isinstance(item.label, tuple) for one in looked.values() for item in one.originals.items)


def _doubts(looked: Mapping[str, _Split], drop: set[str], keep: set[str]) -> list[Doubt]:
    """Return doubts about classes that are probably mistakes. A class in doubt is named once."""
    names = next(iter(looked.values())).originals.class_names
    kept = [name for name in names if name not in drop]
    usable = {split: one.per_class(usable=True) for split, one in looked.items()}
    held = {split: one.per_class(usable=False) for split, one in looked.items()}
    doubts = [
        doubt
        for doubt in dict.fromkeys(doubt for one in looked.values() for doubt in one.originals.doubts)
        if doubt.options[1] not in drop | keep
    ]
    # An image with several labels cannot lose one of them here.
    choices = ("--keep-class",) if _has_several(looked) else ("--drop-class", "--keep-class")

    def doubt(name: str, text: str, options: Sequence[str] = choices[:1]) -> None:
        typed = ", or ".join(f"{option} {shlex.quote(name)}" for option in options)
        doubts.append(Doubt(f"class {name!r} {text} type {typed}", (options[0], name)))

    for name in sorted(
        {name for one in looked.values() for name in one.originals.empty_classes} - drop - keep
    ):
        doubt(name, "has no image: add some, or")
    without = [
        name
        for label, name in enumerate(names)
        if name not in drop and not any(counts[label] for counts in held.values())
    ]
    if without and not keep & set(without):
        doubts.append(_without_images(without, len(names), choices[0]))
    twins = _twins(kept, keep)
    for label, name in enumerate(names):
        if name in drop | keep or any(name in one.options for one in twins):
            continue
        if name.lower() in NO_LABEL:
            doubts.append(keep_doubt(name, f"class {name!r} is named like a missing label: rename it, or"))
        is_usable = any(counts[label] > 0 for counts in usable.values())
        if not is_usable and any(counts[label] > 0 for counts in held.values()):
            doubt(name, "has no usable image: fix some, or")
        elif is_usable and "train" in usable and not usable["train"][label]:
            where = " and ".join(split for split, counts in usable.items() if counts[label])
            doubt(name, f"is in {where} alone, so that it cannot be learned:", choices)
    doubts += twins
    named = [word for one in doubts for word in one.options]
    left = [name for name in kept if ("--drop-class", name) not in pairwise(named)]
    if len(left) == 1 and left[0] not in keep | {*named}:
        doubts.append(
            keep_doubt(
                left[0], f"class {left[0]!r} is the only one: add others, or with `vitctl data shards`"
            )
        )
    return doubts


def _without_images(names: Sequence[str], num_classes: int, option: str) -> Doubt:
    """Return the doubt about classes without an image in a list of classes, or in numbers with gaps."""
    few = len(names) <= _FEW_CLASSES and len(names) < num_classes
    options = tuple(word for name in names for word in (option, name)) if few else ("--keep-class", names[0])
    counted = f"{count_text(len(names), 'class', 'classes')} of {num_classes:,}"
    shown = f"{', '.join(map(repr, names[:3]))}{' ...' if len(names) > 3 else ''}"
    why = ": class numbers count from 0" if names[0] == "0" else ""
    if len(names) == num_classes:
        return keep_doubt(names[0], "no image has a label, so that nothing can be learned: add some; if so,")
    return Doubt(
        f"{counted} without an image ({shown}){why}; add some, or type {shlex.join(options)}", options
    )


def _twins(names: Sequence[str], keep: set[str]) -> list[Doubt]:
    doubts = []
    for group in near_twins(names):
        if not set(group) <= keep:
            options = tuple(word for name in group for word in ("--keep-class", name))
            text = (
                f"classes {' and '.join(map(repr, group))} are named nearly the same: rename one to put them "
                f"together, or type {shlex.join(options)} if they are different"
            )
            doubts.append(Doubt(text, options))
    return doubts
