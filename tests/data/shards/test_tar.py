import gc
import hashlib
import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from webdataset.tariterators import group_by_keys, tar_file_expander

from tests.data.conftest import CLASSES, make_items, picture, several
from vitctl.data.datasets.readers.arrays import encode_png
from vitctl.data.shards.index import index_shards
from vitctl.data.shards.tar import ShardWriter, read_shard, stored_names, unescape_key
from vitctl.data.source.stores import ShardSource
from vitctl.data.writer.intake import Item
from vitctl.data.writer.write import write_split
from vitctl.errors import DataError

KEYS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0."), min_size=1, max_size=160)
SAMPLES = st.lists(
    st.tuples(
        KEYS, st.dictionaries(st.sampled_from(["jpg", "cls", "json"]), st.binary(max_size=1300), min_size=1)
    ),
    min_size=1,
)


@given(SAMPLES, st.lists(st.text(), max_size=3))
@example(
    [
        ("a" * 96, {"jpg": b"x"}),
        ("a" * 97, {"jpg": b"x"}),
        ("é", {"cls": b"1"}),
        ("d" * 90 + "/" + "f" * 90, {"jpg": b""}),
    ],
    ["cat"],
)
def test_shard_writer__knows_where_everything_is(
    samples: list[tuple[str, dict[str, bytes]]], class_names: list[str]
) -> None:
    file, places = io.BytesIO(), {}
    with ShardWriter(file, class_names) as writer:
        for key, members in samples:
            for extension, place in writer.write(key, members).items():
                places[place] = f"{key}.{extension}", members[extension]
    written = file.getvalue()
    assert (len(written), hashlib.sha256(written).hexdigest()) == (writer.num_bytes, writer.sha256)
    assert len(written) % tarfile.RECORDSIZE == 0
    with tarfile.open(fileobj=io.BytesIO(written)) as tar:
        found = {(one.offset, one.offset_data): (one.name, tar.extractfile(one).read()) for one in tar}  # type: ignore[union-attr]
        assert stored_names(tar) == tuple(class_names)
    assert found == places


NAMES = (
    *("plain", "a.b", "../up", "x/y.z/w", "100%", "%2E", "é ü", "a\u00a0b", "\udce9", "tail/"),
    *("x" * length for length in (91, 92, 93, 94, 95, 96, 97, 120, 300)),
    *("d" * 90 + "/" + "f" * 90, "中" * 40, "日本/." + "k" * 100),
)
# SHA-256 of the shards that vitctl wrote with tar headers of its own, before it left them to webdataset.
WRITTEN_BEFORE = {
    False: "5c26620805fac06f5163bbe87bee324193731d5e27d2179e157c8a4428d10de8",
    True: "46f432440459b23b0f061bab42319237ff58992cfe28e438055a99f0a3200d73",
}


@pytest.mark.parametrize("several_labels", [False, True])
def test_write_split__bytes_are_those_of_every_version_before(tmp_path: Path, several_labels: bool) -> None:
    labels: tuple[Any, ...] = ((0,), (2, 0), ()) if several_labels else (0, 1, 2)
    items = [
        Item(name, labels[number % 3], lambda number=number: picture(number))  # type: ignore[misc]
        for number, name in enumerate(NAMES)
    ]
    index = write_split(
        items, tmp_path / "train", ("cat", "a dog", "é中"), seed=5, source_text="", max_samples=7
    )
    digests = "".join(shard.sha256 for shard in index.shards)
    assert hashlib.sha256(digests.encode()).hexdigest() == WRITTEN_BEFORE[several_labels]


def test_shard_writer__an_error_leaves_nothing_open() -> None:
    """An archive that is collected unfinished writes its end into a closed file: a warning, here an error."""

    def fill() -> None:
        with Path("/dev/full").open("wb", buffering=0) as file, ShardWriter(file) as writer:
            for number in range(100):
                writer.write(str(number), {"jpg": bytes(1000)})

    with pytest.raises(OSError, match="No space left"):
        fill()
    gc.collect()


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


def test_class_names__go_with_the_shards_and_no_reader_sees_a_sample_more(tmp_path: Path) -> None:
    names = ["cat", "a dog", "é\u4e2d", 'with "quotes"', "f", "g", "h", "i"][: len(CLASSES)]
    index = write_split(make_items(11), tmp_path / "train", names, seed=0, source_text="", max_samples=4)
    paths = [index.folder / shard.name for shard in index.shards]
    (tmp_path / "train/index.json").unlink()
    again = index_shards(paths)
    assert again.class_names == tuple(names)
    assert again.rows.tobytes() == index.rows.tobytes()
    theirs = []
    for path in paths:
        with path.open("rb") as file:
            theirs += [
                sample["__key__"]
                for sample in group_by_keys(tar_file_expander([{"url": "", "stream": file}]))
            ]
    source = ShardSource(again)
    assert [unescape_key(key) for key in theirs] == [source.key(n) for n in range(11)]
    with tarfile.open(paths[0]) as tar:
        assert len(tar.getnames()) == 2 * 4 and all(
            name.endswith((".cls", ".jpg", ".png")) for name in tar.getnames()
        )


def test_class_names__of_shards_without_them_are_numbers_and_different_ones_are_refused(
    tmp_path: Path,
) -> None:
    old = tmp_path / "old.tar"
    with old.open("wb") as file, ShardWriter(file) as writer:  # as all were written before
        for number in range(3):
            writer.write(
                f"k{number}", {"png": encode_png(np.zeros((2, 2), np.uint8)), "cls": str(number).encode()}
            )
    assert index_shards([old]).class_names == ("0", "1", "2")
    other = write_split(make_items(4), tmp_path / "new", CLASSES, seed=0, source_text="")
    (tmp_path / "mixed").mkdir()
    paths = [
        old.rename(tmp_path / "mixed/a.tar"),
        (other.folder / other.shards[0].name).rename(tmp_path / "mixed/b.tar"),
    ]
    with pytest.raises(DataError, match="2 different lists of class names; give one with --classes"):
        index_shards(paths)
    assert index_shards(paths, class_names=list("abcdefgh")).class_names == tuple("abcdefgh")
