from collections.abc import Callable

from vitctl.data.datasets.detect import open_originals
from vitctl.data.shards.index import Index
from vitctl.data.source.shard_source import ShardSource
from vitctl.data.writer.write import write_split


def test_read_shard_folder__new_shards_hold_the_same_samples(make_split: Callable[..., Index]) -> None:
    old = make_split(20)
    make_split(5, "test")
    splits = open_originals(str(old.folder.parent))
    assert {split: len(originals.items) for split, originals in splits.items()} == {"train": 20, "test": 5}
    originals = splits["train"]
    new = write_split(
        originals.items,
        old.folder.parent / "new",
        originals.class_names,
        seed=9,
        source_text="",
        max_samples=4,
    )

    def samples(index: Index) -> dict[str, tuple[int, bytes]]:
        source = ShardSource(index)
        return {source.key(n): (int(source.labels()[n]), source.read(n)) for n in range(len(source))}

    assert len(new.shards) == 5 != len(old.shards)
    assert samples(new) == samples(old)
    assert list(samples(new)) != list(samples(old))
    assert new.class_names == old.class_names
