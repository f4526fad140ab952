"""Which known data sets are here, and whether their images are those of the benchmark."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vitctl.data.datasets.catalog import find_data_set, open_split
from vitctl.data.datasets.known_sets import DATA_SETS, DataSet
from vitctl.data.datasets.readers.class_folder import CALTECH101_SPLIT
from vitctl.data.datasets.vtab import (
    VAL200_AND_TEST_DIGESTS,
    VTAB,
    VtabTask,
    is_published_train800,
    names_digest,
)
from vitctl.data.shards.index import find_splits
from vitctl.data.source.stores import open_index
from vitctl.data.source.views import Source, keys_of, source_texts
from vitctl.errors import DataError

# The paper's transfer and few-shot sets (Section 4.1; big_vision's few-shot list), and those of pre-training.
USES = {
    "transfer": ("imagenet", "imagenet_v2", "objectnet", "cifar10", "cifar100", "pets", "flowers102"),
    "few-shot": (
        *("caltech101", "cars196", "birds", "dtd", "uc_merced", "colorectal", "pets", "cifar100", "imagenet"),
    ),
    "robustness": ("imagenet_v2", "objectnet", "imagenet_a", "imagenet_r", "imagenet_sketch", "imagenet_c"),
    "pre-training": ("imagenet", "imagenet21k", "jft300m"),
}
ABSENT, SHARDS, BUILT_IN = "absent", "shards", "built in"
MATCH, COUNTS = "match", "counts match, no digest known"


@dataclass(frozen=True)
class InventoryEntry:
    """A known data set, and its state on disk.

    Args:
        name: of the set.
        uses: what the paper and this project use it for.
        num_classes: size of its head.
        sizes: images of every split, by the table.
        state: absent, originals, shards, a copy or a part in words, or that it comes with vitctl.
        ready: whether `--dataset NAME` finds it.
    """

    name: str
    uses: tuple[str, ...]
    num_classes: int
    sizes: dict[str, int]
    state: str
    ready: bool


def list_inventory(root: Path) -> list[InventoryEntry]:
    """Return every known data set and its state under `root`."""
    return [_holding(row, root) for row in DATA_SETS.values()]


def _holding(row: DataSet, root: Path) -> InventoryEntry:
    try:
        indexes = {name: open_index(place) for name, place in find_splits(root / row.name).items()}
        notes = dict.fromkeys(index.source for index in indexes.values())
        missing = [name for name in row.sizes if name not in indexes and "train800" not in indexes]
        state = "; ".join(text for text in notes if "partial" in text or "copy" in text) or SHARDS
        if not indexes:
            state = ABSENT if row.make is None else BUILT_IN
        elif missing:
            state = f"{SHARDS} without {', '.join(missing)}"
        is_ready = bool(indexes) or row.make is not None
    except DataError as error:
        state, is_ready = f"damaged: {error}", False
    uses = [f"VTAB {task.group}" for task in VTAB if task.data_set == row.name]
    uses += [use for use, names in USES.items() if row.name in names]
    return InventoryEntry(row.name, tuple(uses), row.num_classes, dict(row.sizes), state, is_ready)


@dataclass(frozen=True)
class TaskCheck:
    """The check of one task of VTAB-1k against published digests.

    Args:
        sizes: images of train800, val200 and test; empty if the set is absent.
        digests: of their keys.
        verdict: "match" when all that is known of the images agrees; else in words.
        is_wrong: whether the images are not the benchmark's although they claim to be.
    """

    sizes: tuple[int, ...]
    digests: tuple[str, ...]
    verdict: str
    is_wrong: bool = False


def check_task(
    task: VtabTask, root: Path, progress: Callable[[int, int], None] = lambda _done, _total: None
) -> TaskCheck:
    """Compare the keys of the 800, 200 and test images of a task with their published digests.

    Args:
        task: a row of `VTAB`.
        root: folder of known data sets.
        progress: called with (splits done, 3).
    """
    if not find_splits(root / find_data_set(task.data_set).name):
        return TaskCheck((), (), ABSENT)
    try:
        opened = [open_split(split, dataset=task.data_set, root=str(root)) for split in task.splits.values()]
    except DataError as error:
        return TaskCheck((), (), str(error), is_wrong=True)
    keys = []
    for done, source in enumerate(opened):
        keys.append(keys_of(source))
        progress(done + 1, len(opened))
    digests = tuple(map(names_digest, keys))
    sizes = tuple(map(len, opened))
    return TaskCheck(sizes, digests, *_verdict(task, opened, keys[0], digests))


def _verdict(
    task: VtabTask, opened: list[Source], train800: list[str], digests: tuple[str, ...]
) -> tuple[str, bool]:
    copies = [text for source in opened for text in source_texts(source) if "copy" in text]
    published = is_published_train800(task, train800)
    others = VAL200_AND_TEST_DIGESTS.get(task.name, (None, None))
    agree = {"train800": published} | {
        split: None if wanted is None else digest == wanted
        for split, digest, wanted in zip(("val200", "test"), digests[1:], others, strict=True)
    }
    wrong = [split for split, same in agree.items() if same is False]
    if copies and wrong:
        return f"a copy without the original names: {copies[0]}", False
    if wrong:
        return f"NO MATCH: {', '.join(wrong)}", True
    if task.name == "caltech101":
        return f"ours: {CALTECH101_SPLIT}; the benchmark's split cannot be drawn again", False
    known = [split for split, same in agree.items() if same]
    text = f"{MATCH} ({', '.join(known)})" if known else COUNTS
    return text + (f"; {copies[0]}" if copies else ""), False
