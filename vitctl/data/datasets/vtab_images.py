"""The images of a VTAB task: from shards of the original files, or from the community's copy."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vitctl.data.datasets.catalog import find_data_set, known_size, open_split
from vitctl.data.datasets.readers import community
from vitctl.data.datasets.readers.community import LIST
from vitctl.data.datasets.vtab import VTAB, VtabTask, is_published_train800
from vitctl.data.shards.index import INDEX_FILE, find_splits
from vitctl.data.source.exclusion import open_shards
from vitctl.data.source.labels import check_labels
from vitctl.data.source.provenance import source_text, source_texts
from vitctl.data.source.read import Concat, Source
from vitctl.data.source.splits import resolve
from vitctl.data.writer.items import Originals
from vitctl.data.writer.write import write_originals
from vitctl.errors import DataError
from vitctl.system.parsing import parsing

_COMMUNITY = ("train800", "val200", "test")


@dataclass(frozen=True)
class TaskData:
    """The opened splits of a task.

    Args:
        task: its row of the table.
        train800, val200, train, test: images; `train` is the first two together.
        names: the split expressions, by those four words.
        source: where the images came from, in words.
        proven: whether the 800 training images are the benchmark's by a published digest of their names; None
            where no digest is known.
        copy: in what the images are not those of the benchmark; empty when they are.
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
        task: a row of a suite.
        root: folder of known data sets.
        scratch: gets the shards of the community's copy, and of sets that come with vitctl.
        allow_partial: take splits that have not all of their images, where the expressions still mean
            something.

    Raises:
        DataError: in one line what is missing or wrong.
    """
    shards = find_splits(root / task.data_set)
    if not shards and scratch is not None and (root / task.community / LIST).is_file():
        shards = _written(task, root, scratch)
    again = set(_COMMUNITY) <= set(shards)
    if again:
        names = {name: name for name in _COMMUNITY}
        opened = [open_shards(shards[name]) for name in _COMMUNITY]
    else:
        names = dict(zip(_COMMUNITY, (task.train800, task.val200, task.test), strict=True))
        opened = [
            open_split(split, dataset=task.data_set, root=str(root), scratch=scratch, whole=not allow_partial)
            for split in names.values()
        ]
    train800, val200, test = opened
    _check(task, dict(zip(_COMMUNITY, opened, strict=True)), root, allow_partial)
    published = task in VTAB and not again
    proven = is_published_train800(task, map(train800.key, range(len(train800)))) if published else None
    return TaskData(
        task,
        train800,
        val200,
        Concat((train800, val200)),
        test,
        {**names, "train": f"{names['train800']}+{names['val200']}"},
        source_text(test),
        proven,
        _copy(task, tuple(opened), again=again, proven=proven),
    )


def num_test(task: VtabTask) -> int:
    """Images of the whole test split of a task."""
    known = known_size(task.data_set, task.test)
    assert known is not None, task.name
    return known[0]


def _written(task: VtabTask, root: Path, scratch: Path) -> dict[str, Path]:
    """The community's lists of a task as shards of the same bytes, written once."""
    folder = scratch / task.name
    if not set(_COMMUNITY) <= set(find_splits(folder)):
        originals = read_community(task, root)
        for name in _COMMUNITY:
            if not (folder / name / INDEX_FILE).is_file():
                write_originals(originals[name], folder, name)
    return find_splits(folder)


def _check(task: VtabTask, sources: Mapping[str, Source], root: Path, allow_partial: bool) -> None:
    """Classes are those of the task, each image is of one; numbers too, which expressions over whole splits
    settle but lists do not.
    """
    classes = {source.class_names for source in sources.values()}
    counts = {len(names) for names in classes}
    if counts != {task.num_classes} or len(classes) > 1:
        raise DataError(
            f"{root}: {task.name} has {task.num_classes} classes, the same in each split; found "
            f"{sorted(counts)}"
        )
    for name, source in sources.items():
        check_labels(
            source, f"{task.name}, {name}", "training" if name == "train800" else "scoring", single=True
        )
    wanted = {"train800": {800}, "val200": {200}, "test": {num_test(task)}}
    if task.name == "caltech101":
        wanted["test"].add(num_test(task) + 1)  # two splits of it were drawn, see its reader
    wrong = [
        f"{name} has {len(sources[name]):,}" for name in wanted if len(sources[name]) not in wanted[name]
    ]
    if wrong and not allow_partial:
        raise DataError(
            f"{root}: not the whole of {task.name}: {', '.join(wrong)} images; data.allow_partial takes it"
        )


def _copy(task: VtabTask, opened: tuple[Source, ...], *, again: bool, proven: bool | None) -> str:
    """In which way the images of train800, val200 and test are not those of the benchmark."""
    texts = dict.fromkeys(text for source in opened for text in source_texts(source))
    again = again or any(text.startswith(community.SOURCE) for text in texts)
    said = ["the community's copy: JPEG again, not the original bytes"] if again else []
    said += [text for text in texts if "copy" in text and not text.startswith(community.SOURCE)]
    whole = (800, 200, num_test(task))
    for name, source, wanted in zip(("training", "validation", "test"), opened, whole, strict=True):
        if len(source) < wanted:
            said.append(f"partial: {len(source):,} of {wanted:,} {name} images")
    if proven is False:
        said.append("other training images than the benchmark's, by the digest of their names")
    if task.name == "caltech101" and not again:
        said.append(
            "a split of our own: the published one hung on the order of a folder, and differs per machine"
        )
    return "; ".join(said)


def read_community(task: VtabTask, root: Path) -> dict[str, Originals]:
    """The splits `train800`, `val200`, `train800val200` and `test` of a task in the community's copy of
    VTAB-1k.

    Args:
        task: a row of `VTAB`.
        root: holds a folder per task.

    Raises:
        DataError: the task's lists or images are missing or wrong.
    """
    (test,) = resolve(task.test, find_data_set(task.data_set).sizes)
    num_test = test.stop - test.start
    one_more = (
        {num_test + 1} if task.name == "caltech101" else set()
    )  # two splits of it were drawn, see its reader
    with parsing(root / task.community, DataError):
        return community.read(root / task.community, task.num_classes, {num_test} | one_more)
