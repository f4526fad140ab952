import hashlib
import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from webdataset import TarWriter

from tests.data.test_shards import CLASSES, make_items, several
from vitctl.data.index import index_shards
from vitctl.data.read import ShardSource
from vitctl.data.scan import read_shard
from vitctl.data.shards import write_split
from vitctl.data.tar import ShardWriter

KEYS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0."), min_size=1, max_size=160)
SAMPLES = st.lists(st.tuples(KEYS, st.dictionaries(st.sampled_from(["jpg", "cls", "json"]), st.binary(max_size=1300))))


@given(SAMPLES)
@example(
    [
        ("a" * 96, {"jpg": b"x"}),
        ("a" * 97, {"jpg": b"x"}),
        ("é", {"cls": b"1"}),
        ("d" * 90 + "/" + "f" * 90, {"jpg": b""}),
    ]
)
def test_shard_writer__writes_what_webdataset_writes(samples: list[tuple[str, dict[str, bytes]]]) -> None:
    theirs, ours = io.BytesIO(), io.BytesIO()
    with TarWriter(theirs, user="vitctl", group="vitctl", mtime=0, encoder=False) as tar:
        for key, members in samples:
            tar.write({"__key__": key, **members})
    writer = ShardWriter(ours)
    for key, members in samples:
        for extension, (header, begin) in writer.write(key, members).items():
            written = ours.getvalue()
            assert written[begin : begin + len(members[extension])] == members[extension]
            assert header < begin and begin % 512 == header % 512 == 0
    digest = writer.close()
    assert ours.getvalue() == theirs.getvalue()
    assert digest == hashlib.sha256(theirs.getvalue()).hexdigest()
    assert writer.num_bytes == len(theirs.getvalue())


@pytest.mark.parametrize("make", [make_items, several])
def test_write_split__knows_what_a_scan_finds(tmp_path: Path, make: object) -> None:
    index = write_split(make(11), tmp_path / "train", CLASSES, seed=0, source_text="", max_samples=4)  # type: ignore[operator]
    scans = [read_shard(index.folder / shard.name) for shard in index.shards]
    assert len(scans) == 3
    assert [scan.sha256 for scan in scans] == [shard.sha256 for shard in index.shards]
    assert np.concatenate([scan.rows for scan in scans]).tobytes() == index.rows.tobytes()
    again = index_shards([index.folder / shard.name for shard in index.shards], class_names=CLASSES)
    assert (again.labels is None) == (index.labels is None) == (make is make_items)
    assert ShardSource(again).labels().tolist() == ShardSource(index).labels().tolist()
