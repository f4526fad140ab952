"""Tar files: what is written, and one pass over what others wrote."""

import gc
import hashlib
import io
import tarfile
import time
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from webdataset.tariterators import base_plus_ext, group_by_keys, tar_file_expander

from tests.data.conftest import CLASSES, make_items, picture, several, store
from tests.matrix import each
from vitctl.data.datasets.readers.arrays import encode_png
from vitctl.data.inspect.check_shards import verify_index
from vitctl.data.shards.index import read_index
from vitctl.data.shards.indexing import index_shards
from vitctl.data.shards.tar import (
    Fields,
    ShardWriter,
    escape_key,
    member_name,
    read_shard,
    split_name,
    stored_names,
    unescape_key,
)
from vitctl.data.source.stores import ShardSource
from vitctl.data.writer.intake import Item
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
        found = {(one.offset, one.offset_data): (one.name, tar.extractfile(one).read()) for one in tar}
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
    index = store(items, tmp_path / "train", ("cat", "a dog", "é中"), seed=5, max_samples=7)
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
    index = store(make(11), tmp_path / "train", max_samples=4)  # type: ignore[operator]
    scans = [read_shard(index.folder / shard.name) for shard in index.shards]
    assert len(scans) == 3
    assert [scan.sha256 for scan in scans] == [shard.sha256 for shard in index.shards]
    assert np.concatenate([scan.rows for scan in scans]).tobytes() == index.rows.tobytes()
    again = index_shards([index.folder / shard.name for shard in index.shards], class_names=CLASSES)
    assert (again.labels is None) == (index.labels is None) == (make is make_items)
    assert ShardSource(again).labels().tolist() == ShardSource(index).labels().tolist()


def test_class_names__go_with_the_shards_and_no_reader_sees_a_sample_more(tmp_path: Path) -> None:
    names = ["cat", "a dog", "é\u4e2d", 'with "quotes"', "f", "g", "h", "i"][: len(CLASSES)]
    index = store(make_items(11), tmp_path / "train", names, max_samples=4)
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
    other = store(make_items(4), tmp_path / "new")
    (tmp_path / "mixed").mkdir()
    paths = [
        old.rename(tmp_path / "mixed/a.tar"),
        (other.folder / other.shards[0].name).rename(tmp_path / "mixed/b.tar"),
    ]
    with pytest.raises(DataError, match="2 different lists of class names; give one with --classes"):
        index_shards(paths)
    assert index_shards(paths, class_names=list("abcdefgh")).class_names == tuple("abcdefgh")


Member = tuple[str, bytes]


def write_tar(path: Path, members: list[Member | tarfile.TarInfo], **options: object) -> Path:
    with tarfile.open(path, "w", **options) as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
                continue
            name, data = member
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def info(name: str, kind: bytes, **fields: object) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type = kind
    for field, value in fields.items():
        setattr(member, field, value)
    return member


def test_scan__rows_point_at_the_image_bytes(tmp_path: Path) -> None:
    long = "x" * 150
    members: list[Member | tarfile.TarInfo] = [
        info("folder", tarfile.DIRTYPE),
        ("a.cls", b"2"),
        ("a.jpg", b"first"),
        ("folder/b.png", b"second image"),
        ("folder/b.json", b'{"label": 7, "caption": "x"}'),
        (f"{long}.webp", b"third"),
        (f"{long}.txt", b"caption"),
        (f"{long}.cls", b" -1\n"),
        ("é.JPEG", b"fourth"),
        ("é.json", b'{"cls": 1}'),
    ]
    path = write_tar(tmp_path / "s.tar", members)
    rows, digest = read_shard(path).rows, read_shard(path).sha256
    data = path.read_bytes()
    assert digest == hashlib.sha256(data).hexdigest()
    assert rows["label"].tolist() == [2, 7, -1, 1]
    starts = rows["header"] + rows["data"]
    found = [data[start : start + size] for start, size in zip(starts, rows["size"], strict=True)]
    assert found == [b"first", b"second image", b"third", b"fourth"]
    headers = [data[start : start + size] for start, size in zip(rows["header"], rows["data"], strict=True)]
    assert [split_name(member_name(header))[0] for header in headers] == ["a", "folder/b", long, "é"]
    assert {len(header) for header in headers} > {512}  # long names take more than one block


@pytest.mark.parametrize("layout", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_scan__names_are_read_in_every_tar_dialect(tmp_path: Path, layout: int) -> None:
    name = f"{'d' * 90}/{'f' * 40}.png"
    path = write_tar(tmp_path / "s.tar", [(name, b"i"), (name[:-4] + ".cls", b"0")], format=layout)
    rows = read_shard(path).rows
    header = path.read_bytes()[: int(rows["data"][0])]
    assert member_name(header) == name


CLASS = ("a.cls", b"0")
IMAGE = ("a.jpg", b"i")


@each(
    ("members", "message"),
    [
        ([("a.input.jpg", b"i"), ("a.outputs.txt", b"0")], "sample a lacks an image .*; found"),
        ([IMAGE], "sample a lacks a label .*; found: jpg; .*--label-key"),
        ([IMAGE, ("b.cls", b"0")], "sample a lacks a label"),
        ([IMAGE, ("a.json", b'{"title": "x"}')], "sample a lacks a label"),
        ([IMAGE, ("a.pyd", b"0")], "sample a lacks a label .*; found: jpg, pyd"),
        ([IMAGE, ("a.png", b"i"), CLASS], "sample a has two images"),
        ([IMAGE, CLASS, ("a.json", b'{"label": 1}')], "sample a has two labels, 0 and 1"),
        ([IMAGE, ("a.cls", b"?")], "a.cls holds '\\?', should hold an integer label"),
        ([IMAGE, ("a.cls", b"")], "a.cls holds '', should hold an integer label"),
        (
            [IMAGE, ("a.cls", b"p\xeache")],
            "a.cls holds 'p\ufffdche', should hold",
        ),
        ([IMAGE, ("a.cls", "cat\u200b".encode())], "should hold an integer label or a class name"),
        ([IMAGE, ("a.cls", "cat".encode("utf-16"))], "should hold an integer label or a class name"),
        ([IMAGE, ("a.cls", b"1_0")], "a.cls holds '1_0', should hold an integer label"),
        ([IMAGE, ("a.cls", "٣".encode())], "a.cls holds '٣', should hold an integer label"),
        ([IMAGE, ("a.json", b'{"label": 0.5}')], "a.json holds .*, should hold an integer label"),
        ([IMAGE, ("a.json", b'{"label": "1_0"}')], "a.json holds .*, should hold an integer label"),
        ([IMAGE, ("a.json", b'{"label": 1e999}')], "a.json holds .*, should hold an integer label"),
        ([IMAGE, ("a.json", b'{"label": true}')], "a.json holds .*, should hold an integer label"),
        ([IMAGE, ("a.json", b"[" * 100_000)], "a.json holds .*, should hold an integer label"),
        ([IMAGE, ("a.cls", b"-2")], "sample a has label -2, should be 0 or more"),
        ([("/etc/a.jpg", b"i"), CLASS], "'/etc/a.jpg' points outside the shard"),
        ([("b/../../a.jpg", b"i"), CLASS], "points outside the shard"),
        ([info("a.jpg", tarfile.SYMTYPE, linkname="/etc/passwd"), CLASS], "'a.jpg' is a link, a device"),
        ([IMAGE, info("b.jpg", tarfile.LNKTYPE, linkname="a.jpg")], "'b.jpg' is a link, a device or sparse"),
        ([info("a.jpg", tarfile.FIFOTYPE), CLASS], "'a.jpg' is a link, a device or sparse"),
    ],
)
def test_scan__refuses(tmp_path: Path, members: list[Member | tarfile.TarInfo], message: str) -> None:
    path = write_tar(tmp_path / "s.tar", members)
    with pytest.raises(DataError, match=message) as caught:
        read_shard(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_scan__refuses_large_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitctl.system.limits.IMAGE_FILE", 4)
    with pytest.raises(DataError, match=r"'a.jpg' has 5 bytes, should have at most 4"):
        read_shard(write_tar(tmp_path / "s.tar", [("a.jpg", b"12345"), CLASS]))


@pytest.mark.parametrize("mode", ["w:gz", "w:xz"])
def test_scan__refuses_compressed_shards(tmp_path: Path, mode: str) -> None:
    with tarfile.open(tmp_path / "s.tar", mode) as tar:
        tar.addfile(tarfile.TarInfo("a.jpg"))
    with pytest.raises(DataError, match="not a complete, uncompressed tar file"):
        read_shard(tmp_path / "s.tar")


def test_scan__no_cut_goes_unnoticed(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "s.tar", [IMAGE, CLASS, ("b.jpg", b"j"), ("b.cls", b"1")])
    whole = path.read_bytes()
    for end in range(0, 4 * 1024, 256):  # four members of a header and a block each
        path.write_bytes(whole[:end])
        with pytest.raises(DataError):
            read_shard(path)


def test_scan__a_damaged_header_is_not_the_end(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "s.tar", [IMAGE, CLASS, ("b.jpg", b"j"), ("b.cls", b"1")])
    data = bytearray(path.read_bytes())
    data[2048] ^= 0xFF  # first byte of the name b.jpg
    path.write_bytes(data)
    with pytest.raises(DataError, match="damaged or truncated at byte 2048"):
        read_shard(path)


@given(st.text(st.characters(exclude_characters="\0/", exclude_categories=["Cs"]), min_size=1))
def test_escape_key__is_undone_and_free_of_dots(key: str) -> None:
    assert "." not in escape_key(key)
    assert unescape_key(escape_key(key)) == key
    assert split_name(escape_key(key) + ".jpg") == (escape_key(key), "jpg")


@given(st.text(st.sampled_from("ab./_é"), max_size=12) | st.text(st.characters(exclude_characters="\n")))
@example("a.b/c.d.JPG")
@example("README")
@example(".jpg")
@example("d/.jpg")
@example("a/b.c/d")
def test_split_name__is_webdatasets(name: str) -> None:
    folder, _, base = name.rpartition("/")
    assume(not base.startswith("._"))  # of macOS
    assume(
        not (base.startswith(".") and "." in folder)
    )  # webdataset loses a sample without a name, in a folder with a dot
    key, extension = base_plus_ext(name)
    assert split_name(name) == (key or "", (extension or "").lower())


def test_split_name__the_longest_is_quick() -> None:
    began = time.process_time()
    assert split_name("a/" * 2**15 + "b") == ("", "")
    assert time.process_time() - began < 0.5  # webdataset's takes seconds


def test_scan__what_webdataset_takes_for_no_member_of_a_sample_is_none(tmp_path: Path) -> None:
    """Files without an extension or without a name, and what macOS puts beside every file."""
    others = ["README", ".DS_Store", "._a.jpg", "folder/._b.jpg", "folder/LICENSE"]
    members = [
        ("a.jpg", b"1"),
        ("a.cls", b"0"),
        ("folder/b.c.jpg", b"2"),
        ("folder/b.jpg", b"3"),
        ("folder/b.cls", b"1"),
    ]
    between = [
        pair for member, name in zip_longest(members, others) for pair in ((name, b"x"), member) if pair
    ]
    path = write_tar(tmp_path / "s.tar", between)
    scan = read_shard(path)
    assert scan.rows["label"].tolist() == [0, 1]
    assert [path.read_bytes()[row["header"] + row["data"] :][:1] for row in scan.rows] == [b"1", b"3"]
    with path.open("rb") as file:
        theirs = list(group_by_keys(tar_file_expander([{"url": "", "stream": file}])))
    assert [sample["__key__"] for sample in theirs if "jpg" in sample] == ["a", "folder/b"]


def test_member_name__is_empty_for_what_is_no_header() -> None:
    assert member_name(bytes(512)) == ""
    assert member_name(b"x" * 1024) == ""


@pytest.mark.parametrize(
    ("image", "label", "expected"),
    [("input.jpg", "target.txt", 4), ("small.png", "target.txt", 4), ("input.jpg", "meta.json:category", 2)],
)
def test_read_shard__of_other_members(tmp_path: Path, image: str, label: str, expected: int) -> None:
    members = [
        ("a.input.jpg", b"iiii"),
        ("a.small.png", b"s"),
        ("a.target.txt", b"4"),
        ("a.meta.json", b'{"category": 2}'),
    ]
    path = write_tar(tmp_path / "s.tar", members)
    rows = read_shard(path, Fields(image, label)).rows
    assert rows["label"].tolist() == [expected]
    assert rows["size"].tolist() == [len(dict(members)[f"a.{image}"])]
    with pytest.raises(DataError, match="sample a lacks an image"):
        read_shard(path)
    with pytest.raises(DataError, match="sample a lacks a label"):
        read_shard(path, Fields(image, "cls"))


def test_read_shard__keeps_which_members_they_are_with_the_index(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "s.tar", [("a.input.png", picture(1)), ("a.output.cls", b"1")])
    members = Fields("input.png", "output.cls")
    index_shards([path], class_names=("x", "y"), members=members)
    index = read_index(tmp_path)
    assert index.members == members
    assert ShardSource(index).labels().tolist() == [1]
    assert verify_index(index, decode_images="all").problems == ()


def test_read_shard__refuses_a_second_archive_behind_the_first(tmp_path: Path) -> None:
    """Readers stop at the end of the first: the samples of the second would be lost without a word."""
    path = tmp_path / "shard.tar"
    with path.open("wb") as file, ShardWriter(file) as writer:
        writer.write("a", {"png": b"image", "cls": b"0"})
    assert len(read_shard(path).rows) == 1
    path.write_bytes(2 * path.read_bytes())
    with pytest.raises(DataError, match="other data follow"):
        read_shard(path, ends=True)
