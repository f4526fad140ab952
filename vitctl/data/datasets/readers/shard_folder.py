"""Existing shards, to be written again: shuffled with another seed, or in another size."""

from functools import partial
from pathlib import Path

from vitctl.data.shards.index import find_splits, read_index
from vitctl.data.source.shard_source import ShardSource
from vitctl.data.writer.items import Item, Originals


def read_shard_folder(folder: Path) -> dict[str, Originals]:
    """Every split of a folder of indexed shards; images, keys, labels and class names stay as they are.

    Raises:
        DataError: an index or a shard is damaged.
    """
    return {split: _read_split(place) for split, place in find_splits(folder).items()}


def _read_split(place: Path) -> Originals:
    source = ShardSource(read_index(place))
    sizes, labels = source.index.rows["size"].tolist(), source.labels().tolist()
    items = [
        Item(source.key(sample), _label(labels[sample]), partial(source.read, sample), sizes[sample])
        for sample in range(len(source))
    ]
    return Originals(items, source.class_names, source.index.source)


def _label(stored: int | list[int]) -> int | tuple[int, ...]:
    return tuple(label for label in stored if label >= 0) if isinstance(stored, list) else stored
