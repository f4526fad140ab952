"""One tree of files, read by every reader: the same images, classes and bytes; nothing is lost in silence."""

import csv
import io
import json
import math
import os
import stat
import tarfile
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from PIL import Image

from tests.data.conftest import encoded
from tests.matrix import each
from vitctl.data.datasets.catalog import open_originals, original_splits
from vitctl.data.datasets.readers.original_files import Archive, unpack
from vitctl.data.images.decode import BadSample
from vitctl.data.shards.indexing import index_shards
from vitctl.data.source.stores import ShardSource
from vitctl.data.writer.intake import Originals, check_originals, read_item
from vitctl.data.writer.shard_writer import write_originals
from vitctl.errors import DataError
from vitctl.jobs.inputs.given_images import find_images
from vitctl.jobs.predict import known_classes
from vitctl.recipe.images import Place

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

NFC, NFD = (unicodedata.normalize(form, "Müller café") for form in ("NFC", "NFD"))


class Link(NamedTuple):
    """A link, hard or symbolic."""

    to: str
    hard: bool = False


FOLDER = object()
Tree = Mapping[str, Any]
Found = Counter[tuple[str, str, bytes]]  # split, class, bytes


def picture(number: int, form: str = "PNG") -> bytes:
    return encoded(Image.new("RGB", (4, 3), (number, 0, 9)), form)


A, B, C, D = (picture(number) for number in range(4))
J = picture(7, "JPEG")
PLAIN: Tree = {"cat/1.png": A, "cat/2.png": B, "dog/1.png": C, "dog/2.png": D}


TREES: dict[str, Tree] = {
    "plain": PLAIN,
    "upper-case extensions": {**PLAIN, "cat/3.PNG": J, "dog/3.JPG": J, "dog/4.JPEG": B},
    "an extension of another format": {**PLAIN, "cat/3.jpg": D, "dog/3.png": J},
    "no extension": {**PLAIN, "cat/nameless": J},
    "dots in names": {**PLAIN, "cat/a.b.c.png": C, "dog/..png": D, "dog/x..png": J},
    "dots in classes": {"v1.0/1.png": A, "v1.1/1.png": B},
    "blanks": {"big cat/my photo 1.png": A, "dog/ 2.png": B, "dog/3 .png": C},
    "composed": {f"{NFC}/{NFC}.png": A, "dog/1.png": B},
    "decomposed": {f"{NFD}/{NFD}.png": A, "dog/1.png": B},
    "both forms are one class": {f"{NFC}/1.png": A, f"{NFD}/2.png": B, "dog/1.png": C},
    "both forms in two splits": {
        f"train/{NFC}/1.png": A,
        "train/dog/1.png": B,
        f"test/{NFD}/1.png": C,
        "test/dog/2.png": D,
    },
    "other alphabets": {"猫/一.png": A, "собака/два.png": B, "😀/1.png": C},
    "percent signs": {"cat/a%2Eb.png": A, "cat/a%25.png": B, "dog/100%.png": C, "dog/%2E.png": D},
    "escaped and not": {"cat/a%2Eb.png": A, "cat/a.b.png": B, "dog/1.png": C},
    "marks of shells": {"cat/a;b,c.png": A, "dog/it's $HOME.png": B, 'dog/"q".png': C},
    "one name in two classes": {"cat/1.png": A, "dog/1.png": B},
    "one stem twice": {"cat/1.png": A, "cat/1.jpg": J, "dog/1.png": B},
    "case of names": {"cat/A.png": A, "cat/a.png": B, "dog/1.PNG": C, "dog/1.png": D},
    "case of classes": {"Cat/1.png": A, "cat/1.png": B, "dog/1.png": C},
    "nested": {"cat/x/1.png": A, "cat/2.png": B, "dog/y/z/1.png": C},
    "a class below another": {"cat/1.png": A, "cat/dog/1.png": B, "dog/1.png": C, "owl/cat/1.png": D},
    "a class below another in splits": {"train/cat/dog/1.png": A, "train/dog/1.png": B, "val/cat/1.png": C},
    "one folder in each class": {"cat/images/1.png": A, "dog/images/1.png": B},
    "splits": {"train/cat/1.png": A, "train/dog/1.png": B, "val/cat/2.png": C, "val/dog/2.png": D},
    "splits in capitals": {"Training/cat/1.png": A, "Training/dog/1.png": B, "Valid/cat/2.png": C},
    "other spellings of splits": {"part1/cat/1.png": A, "part1/dog/1.png": B, "part2/cat/2.png": C},
    "split in the class names": {f"{n}_{s}/1.png": A for n in ("cat", "dog") for s in ("train", "test")},
    "split before the class names": {"train-cat/1.png": A, "Test cat/1.png": B, "dog/1.png": C},
    "splits in one class": {"cat/train/1.png": A, "cat/test/1.png": B, "dog/1.png": C},
    "splits in the classes, spelled otherwise": {"cat/Train/1.png": A, "dog/TEST/1.png": B, "owl/1.png": C},
    "splits with the class": {"cat/cat_train/1.png": A, "cat/cat_test/1.png": B, "dog/1.png": C},
    "splits far down": {"cat/imgs/train/1.png": A, "cat/imgs/val/1.png": B, "dog/imgs/1.png": C},
    "one split below a class": {"cat/train/1.png": A, "dog/train/1.png": B},
    "- and _": {"great-owl/1.png": A, "great_owl/1.png": B, "great owl/1.png": C},
    "invisible": {"owl/1.png": A, "owl\u200b/1.png": B, "dog/1.png": C},
    "words for no label": {"None/1.png": A, "cat/1.png": B, "dog/1.png": C},
    "labels beside the images": {**PLAIN, "cat/1.cls": b"1", "dog/2.cls": b"0"},
    "folds": {f"fold{n}/{name}/1.png": picture(n) for n in (1, 2, 3) for name in ("cat", "dog")},
    "splits in the classes": {"cat/train/1.png": A, "cat/test/1.png": B, "dog/train/1.png": C},
    "a class called train": {"bus/1.png": A, "car/1.png": B, "train/1.png": C},
    "splits and another": {"train/cat/1.png": A, "train/dog/1.png": B, "extra/cat/1.png": C},
    "a folder on top": {f"photos/{name}": data for name, data in PLAIN.items()},
    "one class": {"cat/1.png": A, "cat/2.png": B},
    "no class": {"1.png": A, "2.png": B},
    "an image beside the classes": {**PLAIN, "logo.png": A},
    "class of -1": {"-1/1.png": A, "cat/1.png": B},
    "class of nan": {"NaN/1.png": A, "cat/1.png": B},
    "numbers": {"0/1.png": A, "1/1.png": B, "10/1.png": C, "2/1.png": D},
    "zeros in front": {"07/1.png": A, "7/1.png": B, "8/1.png": C},
    "hidden files": {**PLAIN, ".DS_Store": b"x", "cat/.hidden.png": A, "dog/._1.png": b"x"},
    "hidden folders": {**PLAIN, ".git/config": b"x", "cat/.cache/1.png": A},
    "of other systems": {**PLAIN, "__MACOSX/cat/._1.png": b"x", "cat/Thumbs.db": b"x", "desktop.ini": b"x"},
    "a hidden tar": {**PLAIN, "__MACOSX/._cat.tar": b"x", "._dog.tar": b"x"},
    "no images": {**PLAIN, "README": b"read", "labels.txt": b"cat", "cat/a.pdf": b"%PDF", "cat/v.mp4": b"v"},
    "empty files": {**PLAIN, "cat/0.png": b"", "dog/none": b""},
    "damaged files": {**PLAIN, "cat/0.png": A[:30], "dog/text.jpg": b"text"},
    "an empty class": {**PLAIN, "owl": FOLDER},
    "a class of texts": {**PLAIN, "owl/a.txt": b"text"},
    "an empty class in a split": {"train/cat/1.png": A, "train/dog/1.png": B, "train/owl": FOLDER},
    "a hard link": {**PLAIN, "dog/3.png": Link("cat/1.png", hard=True)},
    "a hard link to itself by another": {
        **PLAIN,
        "dog/3.png": Link("cat/1.png", hard=True),
        "dog/4.png": Link("dog/3.png", hard=True),
    },
    "a link": {**PLAIN, "dog/3.png": Link("../cat/1.png")},
    "a link to a link": {**PLAIN, "dog/3.png": Link("../cat/1.png"), "dog/4.png": Link("3.png")},
    "a link to nothing": {**PLAIN, "dog/3.png": Link("gone.png")},
    "a link to itself": {**PLAIN, "dog/3.png": Link("3.png")},
    "a text that is a link to nothing": {**PLAIN, "dog/notes": Link("gone")},
    "a link to a class": {**PLAIN, "wolf": Link("dog")},
    "a large file that is no image": {**PLAIN, "cat/v.mp4": b"v" * 5000},
}
# Those that stop, or are refused, must do so whoever reads them; all others give all images.
STOPPED = {
    "case of classes",
    "other spellings of splits",
    "folds",
    "both forms are one class",
    "split in the class names",
    "split before the class names",
    "splits in one class",
    "splits in the classes, spelled otherwise",
    "splits with the class",
    "splits far down",
    "- and _",
    "invisible",
    "words for no label",
    "labels beside the images",
    "splits in the classes",
    "a class called train",
    "splits and another",
    "one class",
    "class of -1",
    "class of nan",
    "zeros in front",
    "empty files",
    "damaged files",
    "an empty class",
    "a class of texts",
    "an empty class in a split",
    "a link to nothing",
    "a link to itself",
    "a link to a class",
}
REFUSED = {"no class", "an image beside the classes"}


def plant(root: Path, tree: Tree) -> Path:
    for name, content in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is FOLDER:
            path.mkdir()
        elif isinstance(content, Link):
            path.hardlink_to(root / content.to) if content.hard else path.symlink_to(content.to)
        else:
            path.write_bytes(content)
    return root


def pack(path: Path, tree: Tree, prefix: str = "") -> Path:
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in tree.items():
            member = tarfile.TarInfo(prefix + name)
            if content is FOLDER:
                member.type = tarfile.DIRTYPE
            elif isinstance(content, Link):
                member.type = tarfile.LNKTYPE if content.hard else tarfile.SYMTYPE
                member.linkname = prefix + content.to if content.hard else content.to
            else:
                member.size = len(content)
            tar.addfile(member, io.BytesIO(content) if isinstance(content, bytes) else None)
    return path


def unzipped(folder: Path, tree: Tree) -> Path:
    """Unpack a tree as the archives of known sets are."""
    path = folder / "set.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in tree.items():
            entry = zipfile.ZipInfo(name + "/" * (content is FOLDER))
            is_link = isinstance(content, Link) and not content.hard
            entry.external_attr = (stat.S_IFLNK if is_link else stat.S_IFREG) << 16
            given = tree[content.to] if isinstance(content, Link) and content.hard else content
            given = tree[given.to] if isinstance(given, Link) and given.hard else given
            archive.writestr(
                entry, given.to if isinstance(given, Link) else b"" if given is FOLDER else given
            )
    unpack(Archive("https://example.org/set.zip", into="set"), path, folder)
    return folder / "set"


def tar_of_tars(path: Path, tree: Tree) -> Path:
    """Pack each folder at the top into a tar file of its own."""
    inner: dict[str, dict[str, Any]] = {}
    for name, content in tree.items():
        top, slash, rest = name.partition("/")
        inner.setdefault(f"{top}.tar" if slash else top, {})[rest] = content
    outer: dict[str, Any] = {}
    for name, own in inner.items():
        outer[name] = own.get("", None)
        if outer[name] is None:
            outer[name] = pack(path.with_suffix(".inner"), own).read_bytes()
    return pack(path, outer)


SPLITS = {"train": "train", "Training": "train", "val": "validation", "Valid": "validation", "test": "test"}
SYSTEM = ("__MACOSX", "Thumbs.db", "desktop.ini")


class Picture(NamedTuple):
    """An image of a tree, as a person reads it; `path` is within the split."""

    split: str
    path: str
    content: bytes

    @property
    def of_class(self) -> str:
        return unicodedata.normalize("NFC", self.path.split("/")[0])


def pictures(tree: Tree) -> list[Picture]:
    tops = {name.split("/")[0] for name in tree}
    found = []
    for name, content in tree.items():
        at = name
        for _ in tree:
            if isinstance(content, Link):
                at = content.to if content.hard else os.path.normpath(f"{os.path.dirname(at)}/{content.to}")
                content = tree.get(at)
        if content in (A, B, C, D, J) and not any(p[0] == "." or p in SYSTEM for p in name.split("/")):
            if tops == {"photos"}:  # a folder on top
                name = name.removeprefix("photos/")
            top, _, rest = name.partition("/")
            found.append(
                Picture(SPLITS[top], rest, content)
                if tops <= SPLITS.keys()
                else Picture("train", name, content)
            )
    return found


def counted(found: Iterable[tuple[str, str, bytes]]) -> Found:
    return Counter(found)


def as_counted(splits: Mapping[str, Originals]) -> Found:
    return counted(
        (split, own.class_names[item.label] if item.label >= 0 else "", read_item(item))
        for split, own in splits.items()
        for item in own.items
        if isinstance(item.label, int)
    )


class Reading(NamedTuple):
    """What came of a tree: images that can be used, names of all files that are used or listed, options of
    the doubts, and the names of images that cannot be used.
    """

    found: Found
    named: frozenset[str]
    doubts: tuple[tuple[str, ...], ...]
    bad: frozenset[str]
    splits: Mapping[str, Originals]

    def same(self) -> tuple[Found, tuple[tuple[str, ...], ...], frozenset[str]]:
        return self.found, self.doubts, self.bad


def reading(source: Path) -> Reading | None:
    """None: refused."""
    try:
        splits = open_originals(str(source))
    except DataError:
        return None
    intake = check_originals(splits, bad="skip")
    keys = {own.prefix + item.key for own in splits.values() for item in own.items}
    return Reading(
        as_counted(intake.splits),
        frozenset(one.name for one in intake.left_out) | keys,
        tuple(doubt.options for doubt in intake.doubts),
        frozenset(one.name for one in intake.bad),
        intake.splits,
    )


def vanished(tree: Tree, named: frozenset[str]) -> list[str]:
    """Return the files that are neither used nor named, nor in a folder or an inner tar that is named."""
    named |= {name.removesuffix(".tar") for name in named}
    files = [name for name, content in tree.items() if content is not FOLDER]
    return [name for name in files if not {name, *map(str, Path(name).parents)} & named]


def test_trees__are_enough() -> None:
    assert len(TREES) >= 40 and TREES.keys() > STOPPED | REFUSED


@each("name", TREES)
def test_class_folders__packed_or_not_are_read_alike(name: str, tmp_path: Path) -> None:
    tree = TREES[name]
    folder, tar = reading(plant(tmp_path / "set", tree)), reading(pack(tmp_path / "set.tar", tree))
    assert (folder is None, tar is None) == (name in REFUSED,) * 2
    if folder is None or tar is None:
        return
    assert folder.found == counted((one.split, one.of_class, one.content) for one in pictures(tree))
    assert bool(folder.doubts or folder.bad) == (name in STOPPED)
    others = [tar, reading(pack(tmp_path / "dotted.tar", tree, "./"))]
    (tmp_path / "zip").mkdir()
    links = [content for content in tree.values() if isinstance(content, Link)]
    if all(link.hard for link in links):
        others.append(reading(unzipped(tmp_path / "zip", tree)))
    else:
        with pytest.raises(DataError, match="is a link or a device"):
            unzipped(tmp_path / "zip", tree)
    if not links:
        others.append(reading(tar_of_tars(tmp_path / "parts.tar", tree)))
    for other in (folder, *others):
        assert other is not None and vanished(tree, other.named) == []
        assert other.same() == folder.same()


def in_a_table(label: str) -> str:
    """Return what a label is called that a table names: blanks around it do not count, nor zeros in front."""
    text = label.strip()
    return "" if text == "-1" else text.lstrip("0") or "0" if text.isdecimal() else text


def tables(folder: Path, labels: Mapping[str, Any], splits: Mapping[str, str]) -> Iterator[Path]:
    """Write paths and labels as every kind of table."""
    rows = [("path", "label", "split"), *((path, label, splits[path]) for path, label in labels.items())]
    for name, delimiter in (("a.csv", ","), ("b.csv", ";"), ("c.tsv", "\t"), ("d.csv", "\t")):
        with (folder / name).open("w", newline="", encoding="utf-8-sig" if name == "b.csv" else None) as file:
            csv.writer(file, delimiter=delimiter).writerows(rows)
        yield folder / name
    columns = {"path": list(labels), "label": list(labels.values()), "split": list(splits.values())}
    pq.write_table(pa.table(columns), folder / "e.parquet")
    yield folder / "e.parquet"
    for split in dict.fromkeys(splits.values()):
        own = [path for path in labels if splits[path] == split]
        images = [{"bytes": (folder / path).read_bytes(), "path": path} for path in own]
        (folder / "f").mkdir(exist_ok=True)
        table = pa.table({"image": images, "label": pa.array([labels[path] for path in own])})
        pq.write_table(table, folder / "f" / f"{split}-00000-of-00001.parquet")
    yield folder / "f"


@each("name", TREES)
def test_doors__give_a_file_the_same_class(name: str, tmp_path: Path) -> None:
    """`data shards`, the jobs with --data, and `predict` of the tree, of a list, of each file by itself."""
    root = plant(tmp_path / "set", TREES[name])
    try:
        splits = open_originals(str(root))
    except DataError:
        with pytest.raises(DataError):
            original_splits(str(root))
        return
    names = next(iter(splits.values())).class_names
    doubted = any(own.doubts for own in splits.values())
    by_shards, by_jobs = Counter[tuple[int, bytes]](), Counter[tuple[int, bytes]]()
    for split, own in splits.items():
        by_shards.update((item.label, content) for item in own.items if (content := contents(item.read)))
        planned = original_splits(str(root))[split]
        reads = [partial(planned.read, n) for n in range(len(planned))]
        labels = planned.labels().tolist()
        by_jobs.update((label, c) for label, read in zip(labels, reads, strict=True) if (c := contents(read)))
    assert by_jobs == by_shards

    def predicted(*inputs: str, stdin: bytes = b"") -> list[tuple[int, bytes]]:
        sources = find_images(inputs, Place(), stdin=io.BytesIO(stdin), note=lambda _: None)
        return [
            (label, content)
            for source in sources
            for n, [label] in enumerate(known_classes(source, names).tolist())
            if (content := contents(partial(source.read, n)))
        ]

    wanted = Counter((-1, c) for _, c in by_shards.elements()) if doubted else by_shards
    assert Counter(predicted(str(root))) == Counter(predicted("-", stdin=os.fsencode(root))) == wanted
    images = {content for _, content in by_shards}
    for path in map(str, sorted(root.rglob("*"))):
        if not doubted and os.path.isfile(path) and not path.endswith(".tar"):
            found = [one for one in predicted(path) if one[0] != -1 and one[1] in images]
            assert all(one in by_shards for one in found)


def contents(read: Callable[[], bytes]) -> bytes:
    """Return b"" for what cannot be read."""
    try:
        return read()
    except (DataError, BadSample):
        return b""


READABLE = [name for name in TREES if name not in REFUSED]


@each("name", READABLE)
def test_tables__name_the_same_images_and_classes(name: str, tmp_path: Path) -> None:
    found = pictures(TREES[name])
    for one in found:
        (tmp_path / one.split / one.path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / one.split / one.path).write_bytes(one.content)
    splits = {f"{one.split}/{one.path}": one.split for one in found}
    labels = {f"{one.split}/{one.path}": one.path.split("/")[0] for one in found}
    for table in tables(tmp_path, labels, splits):
        if "NaN" in labels.values():
            with pytest.raises(DataError, match="has the label 'NaN'; give it a class, or -1 for none"):
                open_originals(str(table))
        else:
            wanted = counted((one.split, in_a_table(one.of_class), one.content) for one in found)
            assert as_counted(open_originals(str(table))) == wanted, table


@each("name", READABLE)
def test_shards__keep_names_classes_and_bytes(name: str, tmp_path: Path) -> None:
    read = reading(plant(tmp_path / "set", TREES[name]))
    assert read is not None
    for split, own in read.splits.items():
        write_originals(own, tmp_path / "out", split)
    again = open_originals(str(tmp_path / "out"))
    assert as_counted(again) == read.found
    for split, own in read.splits.items():
        assert {item.key for item in again[split].items} == {item.key for item in own.items}
        assert again[split].class_names == own.class_names


# The first dot of a file's name ends the key of a sample, which has one image.
NO_SAMPLES = {"dots in names", "no extension", "escaped and not", "one stem twice", "case of names"}


@each("name", READABLE)
def test_foreign_shards__are_read_like_the_folder_or_refused(name: str, tmp_path: Path) -> None:
    found = pictures(TREES[name])
    classes, refusals = sorted({one.of_class for one in found}), list[str]()
    for split in {one.split for one in found}:
        own = [one for one in found if one.split == split]
        members: dict[str, bytes] = {}
        for one in own:
            stem, _ = os.path.splitext(one.path)
            members |= {one.path: one.content, f"{stem}.cls": str(classes.index(one.of_class)).encode()}
        (tmp_path / split).mkdir()
        try:
            path = pack(tmp_path / split / "0.tar", members)
            source = ShardSource(index_shards([path], class_names=classes))
        except DataError as error:
            refusals.append(str(error))
            continue
        labels = [classes[label] for label in source.labels().tolist()]
        read = [(split, label, source.read(n)) for n, label in enumerate(labels)]
        assert counted(read) == counted((one.split, one.of_class, one.content) for one in own)
        assert {source.key(n) for n in range(len(source))} == {os.path.splitext(one.path)[0] for one in own}
    assert all("lacks an image" in text or "two images" in text for text in refusals)
    assert bool(refusals) == (name in NO_SAMPLES)


# Labels, and the class of each image; None: refused. "" is no label.
LABELS: dict[str, tuple[list[Any], list[str] | None]] = {
    "names": (["dog", "cat", "dog"], ["dog", "cat", "dog"]),
    "blanks around names": ([" dog", "cat ", "dog"], ["dog", "cat", "dog"]),
    "both forms": ([NFC, NFD, "dog"], [NFC, NFC, "dog"]),
    "numbers": ([0, 1, 2], ["0", "1", "2"]),
    "numbers as text": (["0", "01", " 2"], ["0", "1", "2"]),
    "numbers with a gap": ([0, 10, 2], ["0", "10", "2"]),
    "numbers from 1": ([1, 2, 3], ["1", "2", "3"]),
    "whole floats": ([0.0, 1.0, 2.0], ["0", "1", "2"]),
    "whole floats as text": (["0.0", "1.", "2.00"], ["0", "1", "2"]),
    "none": ([0, -1, 1], ["0", "", "1"]),
    "none as text": (["0", "-1", "1"], ["0", "", "1"]),
    "none as a float": ([0.0, -1.0, 1.0], ["0", "", "1"]),
    "none among names": (["dog", "-1", "cat"], ["dog", "", "cat"]),
    "none at all": ([-1, -1, -1], ["", "", ""]),
    "negative": ([0, -2, 1], None),
    "fractions": ([0.5, 1.0, 2.0], None),
    "fractions as text": (["0.5", "1", "2"], None),
    "large": ([0, 10**9, 1], None),
    "larger": ([0, 10**17, 1], None),
    "larger as text": (["0", "1" * 30, "1"], None),
    "larger floats": ([0.0, 1e20, 1.0], None),
    "infinite": ([0.0, math.inf, 1.0], None),
    "not a number": ([0.0, math.nan, 1.0], None),
    "not a number as text": (["cat", "nan", "dog"], None),
    "missing": (["cat", None, "dog"], None),
    "missing numbers": ([0, None, 1], None),
    "empty": (["cat", "", "dog"], None),
    "blank": (["cat", "  ", "dog"], None),
    "numbers and names": (["7", "cat", "9"], ["7", "cat", "9"]),
    "words for nothing": (["None", "null", "NA"], ["None", "null", "NA"]),
    "truths": ([True, False, True], ["True", "False", "True"]),
}


@each("name", LABELS)
def test_labels__mean_the_same_in_every_table(name: str, tmp_path: Path) -> None:
    labels, wanted = LABELS[name]
    paths = [f"{n}.png" for n in range(3)]
    for n, path in enumerate(paths):
        (tmp_path / path).write_bytes(picture(n))
    for table in tables(tmp_path, dict(zip(paths, labels, strict=True)), dict.fromkeys(paths, "train")):
        if wanted is None:
            with pytest.raises(DataError):
                open_originals(str(table))
        else:
            named = [("train", one, picture(n)) for n, one in enumerate(wanted)]
            assert as_counted(open_originals(str(table))) == counted(named), table


@each("name", LABELS)
def test_labels__of_foreign_shards_are_class_numbers_or_refused(name: str, tmp_path: Path) -> None:
    labels, wanted = LABELS[name]
    for kind in ("cls", "json"):
        members: dict[str, bytes] = {}
        for n, label in enumerate(labels):
            text = json.dumps({"label": label}) if kind == "json" else "" if label is None else str(label)
            members |= {f"{n}.png": picture(n), f"{n}.{kind}": text.encode()}
        (tmp_path / kind).mkdir()
        try:
            source = ShardSource(index_shards([pack(tmp_path / kind / "0.tar", members)]))
        except DataError:
            assert not all(type(label) is int and label >= -1 for label in labels) or wanted is None
            continue
        classes = [source.class_names[label] if label >= 0 else "" for label in source.labels().tolist()]
        assert classes == wanted
