import hashlib
import io
import tarfile
import time
from itertools import zip_longest
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from PIL import Image
from webdataset.tariterators import base_plus_ext, group_by_keys, tar_file_expander

from vitctl.data.inspect.check_shards import verify_index
from vitctl.data.shards.index import read_index
from vitctl.data.shards.make_index import index_shards
from vitctl.data.shards.scan import Fields, read_shard
from vitctl.data.shards.tar import escape_key, member_name, split_name, unescape_key
from vitctl.data.source.shard_source import ShardSource
from vitctl.errors import DataError
from vitctl.system.files import Bound

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


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (
            [("a.input.jpg", b"i"), ("a.outputs.txt", b"0")],
            "sample a lacks an image .*; found: input.jpg, outputs.txt; .*--image-key",
        ),
        ([IMAGE], "sample a lacks a label .*; found: jpg; .*--label-key"),
        ([IMAGE, ("b.cls", b"0")], "sample a lacks a label"),
        ([IMAGE, ("a.json", b'{"caption": "x"}')], "sample a lacks a label"),
        ([IMAGE, ("a.pyd", b"0")], "sample a lacks a label .*; found: jpg, pyd"),
        ([IMAGE, ("a.png", b"i"), CLASS], "sample a has two images"),
        ([IMAGE, CLASS, ("a.json", b'{"label": 1}')], "sample a has two labels, 0 and 1"),
        ([IMAGE, ("a.cls", b"cat")], "a.cls holds 'cat', should hold an integer label"),
        ([IMAGE, ("a.cls", b"")], "a.cls holds '', should hold an integer label"),
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
        (
            [info("a.jpg", tarfile.SYMTYPE, linkname="/etc/passwd"), CLASS],
            "'a.jpg' is a link, a device or sparse",
        ),
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
    monkeypatch.setattr("vitctl.data.shards.scan.IMAGE_FILE", Bound("image_file", 4, "B", ""))
    with pytest.raises(DataError, match=r"'a.jpg' has 5 bytes, should have at most 4"):
        read_shard(write_tar(tmp_path / "s.tar", [("a.jpg", b"12345"), CLASS]))


def test_scan__never_opens_other_members(tmp_path: Path) -> None:
    members: list[Member | tarfile.TarInfo] = [
        IMAGE,
        CLASS,
        ("a.pkl", b"cos\nsystem\n(S'false'\ntR."),
        ("a.pth", b"x"),
    ]
    rows = read_shard(write_tar(tmp_path / "s.tar", members)).rows
    assert len(rows) == 1


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


def test_scan__missing_file_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_shard(tmp_path / "none.tar")


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
    picture = io.BytesIO()
    Image.new("RGB", (4, 4)).save(picture, "PNG")
    path = write_tar(tmp_path / "s.tar", [("a.input.png", picture.getvalue()), ("a.output.cls", b"1")])
    members = Fields("input.png", "output.cls")
    index_shards([path], class_names=("x", "y"), members=members)
    index = read_index(tmp_path)
    assert index.members == members
    assert ShardSource(index).labels().tolist() == [1]
    assert verify_index(index, decode_images="all").problems == ()
