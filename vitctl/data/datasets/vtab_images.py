"""The images of VTAB tasks, from shards of the original files or in the community's layout.

The community's copy of VTAB-1k has a folder per task with four lists and the images, re-encoded as JPEG.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from vitctl.data.datasets.catalog import known_size, open_split
from vitctl.data.datasets.readers.original_files import (
    file_items,
    need,
    numbered_labels,
    read_lines,
)
from vitctl.data.datasets.vtab import VTAB, VtabTask, is_published_train800
from vitctl.data.shards.index import INDEX_FILE, find_splits
from vitctl.data.source.splits import open_shards
from vitctl.data.source.views import Source, check_labels, concat, keys_of, source_text, source_texts
from vitctl.data.writer.intake import Originals
from vitctl.data.writer.shard_writer import write_originals
from vitctl.errors import DataError
from vitctl.system.files import parsing

COMMUNITY_LIST = "train800.txt"  # identifies a folder of a task
COMMUNITY_SOURCE = "VTAB-1k, community copy (JPEG again, not the original bytes)"
COMMUNITY_SIZES = {"train800": 800, "val200": 200, "train800val200": 1000}
_ARCHIVE = (
    "vtab-1k.zip, the layout with train800.txt, val200.txt, "
    "train800val200.txt and test.txt in a folder per task"
)
_COMMUNITY = ("train800", "val200", "test")


@dataclass(frozen=True)
class TaskData:
    """The opened splits of a task.

    Args:
        names: the split expressions, by those four words.
        proven: whether the 800 training images are the benchmark's, by a published digest of their names;
            None if no digest is known.
        copy: how the images differ from the benchmark's; empty if they do not.
    """

    task: VtabTask
    train800: Source
    val200: Source
    train: Source
    test: Source
    names: Mapping[str, str]
    source: str
    proven: bool | None
    copy: str


def open_task(task: VtabTask, root: Path, *, scratch: Path | None, allow_partial: bool = False) -> TaskData:
    """Open the splits of a task: `root/NAME` (shards), or the task's folder in the community's layout.

    Args:
        scratch: folder for the shards of the community's copy, and of sets that come with vitctl.
        allow_partial: accept splits that lack some of their images, if the expressions still select enough.
    """
    shards = find_splits(root / task.data_set)
    if not shards and scratch is not None and (root / task.community / COMMUNITY_LIST).is_file():
        shards = _written(task, root, scratch)
    again = set(_COMMUNITY) <= set(shards)
    if again:
        names = {name: name for name in _COMMUNITY}
        opened = [open_shards(shards[name]) for name in _COMMUNITY]
    else:
        names = task.splits
        opened = [
            open_split(split, dataset=task.data_set, root=str(root), scratch=scratch, whole=not allow_partial)
            for split in names.values()
        ]
    train800, val200, test = opened
    _check(task, dict(zip(_COMMUNITY, opened, strict=True)), root, allow_partial)
    published = task in VTAB and not again
    proven = is_published_train800(task, keys_of(train800)) if published else None
    return TaskData(
        task,
        train800,
        val200,
        concat((train800, val200)),
        test,
        {**names, "train": f"{names['train800']}+{names['val200']}"},
        source_text(test),
        proven,
        _copy(task, tuple(opened), again=again, proven=proven),
    )


def num_test(task: VtabTask) -> int:
    known = known_size(task.data_set, task.test)
    assert known is not None, task.name
    return known[0]


def _written(task: VtabTask, root: Path, scratch: Path) -> dict[str, Path]:
    """Write the community's lists of a task as shards of the same bytes, once."""
    folder = scratch / task.name
    if not set(_COMMUNITY) <= set(find_splits(folder)):
        originals = read_community(task, root)
        for name in _COMMUNITY:
            if not (folder / name / INDEX_FILE).is_file():
                write_originals(originals[name], folder, name)
    return find_splits(folder)


def _check(task: VtabTask, sources: Mapping[str, Source], root: Path, allow_partial: bool) -> None:
    classes = {source.class_names for source in sources.values()}
    counts = {len(names) for names in classes}
    if counts != {task.num_classes} or len(classes) > 1:
        raise DataError(
            root,
            f"{task.name} has {task.num_classes} classes, the same in each split; found {sorted(counts)}",
        )
    for name, source in sources.items():
        check_labels(
            source, f"{task.name}, {name}", "training" if name == "train800" else "scoring", single=True
        )
    wanted = {"train800": {800}, "val200": {200}, "test": _test_sizes(task)}
    wrong = [
        f"{name} has {len(sources[name]):,}" for name in wanted if len(sources[name]) not in wanted[name]
    ]
    if wrong and not allow_partial:
        raise DataError(
            root, f"{task.name} is incomplete: {', '.join(wrong)} images", "accept it with data.allow_partial"
        )


def _copy(task: VtabTask, opened: tuple[Source, ...], *, again: bool, proven: bool | None) -> str:
    """Describe how the images differ from the benchmark's; "" if they do not."""
    texts = dict.fromkeys(text for source in opened for text in source_texts(source))
    again = again or any(text.startswith(COMMUNITY_SOURCE) for text in texts)
    notes = ["the community's copy: JPEG again, not the original bytes"] if again else []
    notes += [text for text in texts if "copy" in text and not text.startswith(COMMUNITY_SOURCE)]
    whole = (800, 200, num_test(task))
    notes += [
        f"partial: {len(source):,} of {wanted:,} {name} images"
        for name, source, wanted in zip(("training", "validation", "test"), opened, whole, strict=True)
        if len(source) < wanted
    ]
    more = (
        (proven is False, "other training images than the benchmark's, by the digest of their names"),
        (
            task.name == "caltech101" and not again,
            "a split of our own: the published one hung on the order of a folder, and differs per machine",
        ),
    )
    return "; ".join([*notes, *(text for is_so, text in more if is_so)])


def read_community(task: VtabTask, root: Path) -> dict[str, Originals]:
    """Read `train800`, `val200`, `train800val200` and `test` of a task in the community's layout."""
    folder = root / task.community
    with parsing(folder, DataError):
        return read_community_lists(folder, task.num_classes, _test_sizes(task))


def _test_sizes(task: VtabTask) -> set[int]:
    """Return the valid sizes of the test split: Caltech101 has two, see its reader."""
    return {num_test(task), num_test(task) + (task.name == "caltech101")}


def read_community_lists(folder: Path, num_classes: int, test_sizes: Collection[int]) -> dict[str, Originals]:
    """Read the four lists of a task; class names are numbers.

    Scores differ from those on original files where compression shows, as on CIFAR-100 and SVHN.
    """
    splits = {}
    for split in (*COMMUNITY_SIZES, "test"):
        path = need(folder, f"{split}.txt", archive=_ARCHIVE)
        rows = [line.rpartition(" ") for line in read_lines(path)]
        names = [name for name, *_ in rows]
        if "" in names:
            raise DataError(path, f"every line should be like images/{split}/000000.jpg 7")
        wanted = {COMMUNITY_SIZES[split]} if split in COMMUNITY_SIZES else set(test_sizes)
        if len(names) not in wanted:
            expected = " or ".join(f"{size:,}" for size in sorted(wanted))
            raise DataError(path, f"{len(names):,} images, should be {expected}")
        labels = numbered_labels((label for *_, label in rows), num_classes, path, first=0)
        class_names = tuple(map(str, range(num_classes)))
        splits[split] = Originals(file_items(folder, names, labels), class_names, COMMUNITY_SOURCE)
    return splits
