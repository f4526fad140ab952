import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.data.conftest import damage, store
from tests.data.noted_tables import note_tables
from tests.data.server import Faults, serving
from vitctl.data.inspect.check_shards import verify_index
from vitctl.data.shards import index as shard_index
from vitctl.data.shards.index import NAMES, Index, read_index, table_sha256
from vitctl.data.source.stores import ShardSource
from vitctl.data.writer.intake import Item

MakeSplit = Callable[..., Index]


@pytest.mark.parametrize(("choice", "num_decoded"), [("all", 20), ("sample", 20), ("none", 0)])
def test_verify_index__a_good_split(make_split: MakeSplit, choice: str, num_decoded: int) -> None:
    calls: list[tuple[int, int]] = []
    report = verify_index(make_split(20), decode_images=choice, progress=lambda *call: calls.append(call))
    assert report.problems == ()
    assert (report.num_samples, report.num_decoded) == (20, num_decoded)
    assert report.class_counts == (7, 7, 6)
    shards = 3 if choice != "sample" else 0  # which reads none whole
    assert calls == [(done, shards + num_decoded) for done in range(1, shards + 1 + num_decoded)]


def test_verify_index__samples_images_evenly(make_split: MakeSplit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitctl.data.inspect.check_shards._SAMPLED_IMAGES", 5)
    assert verify_index(make_split(20), decode_images="sample").num_decoded == 5


def test_verify_index__decodes_every_image_by_itself_and_by_any_number_of_processes(
    make_split: MakeSplit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitctl.data.inspect.check_shards._SAMPLED_IMAGES", 5)
    monkeypatch.setattr("vitctl.data.inspect.check_shards._IMAGES_PER_TASK", 3)
    index = make_split(20, bad=(4, 9))
    path = index.folder / index.shards[2].name
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    reports = [verify_index(index, workers=workers) for workers in (0, 2, 3)]
    assert [report.num_decoded for report in reports] == [20] * 3
    assert len(reports[0].problems) == 3
    for report in reports[1:]:
        assert report == reports[0]
        assert (report.digests == reports[0].digests).all()


def test_verify_index__remote_shards_are_checked_as_local_ones_and_leave_nothing(
    make_split: MakeSplit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    index = make_split(20, bad=(4,))
    path = index.folder / index.shards[1].name
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    before = sorted(tmp_path.iterdir())
    with serving(index.folder, Faults()) as url:
        far = verify_index(read_index(index.folder, url), workers=2)
        (index.folder / index.shards[2].name).unlink()
        with (index.folder / index.shards[0].name).open("ab") as file:
            file.write(bytes(512))  # the bytes before it are those of the index
        gone = verify_index(read_index(index.folder, url))
    near = [problem.line.replace(str(index.folder), url) for problem in far.problems]
    assert (
        len(near) == 2
        and any("checksum mismatch" in one for one in near)
        and any("k4: " in one for one in near)
    )
    assert [one.kind for one in gone.problems if one.file == index.shards[2].name] == ["not fetched"]
    assert [one.kind for one in gone.problems if one.file == index.shards[0].name] == ["not fetched"]
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("name", "byte", "said"),
    [
        ("shard-000001.tar", 2620, "shard-000001.tar: checksum mismatch"),
        ("shard-000000.tar", 6144, "damaged or truncated at byte 6144"),  # a header
        (
            "samples.npy",
            -4,  # the label of the last sample
            "shard-000002.tar: sample 5 of it is not where, or not labelled as, samples.npy says",
        ),
    ],
)
def test_verify_index__one_changed_byte_is_found(
    make_split: MakeSplit, monkeypatch: pytest.MonkeyPatch, name: str, byte: int, said: str
) -> None:
    monkeypatch.setattr(shard_index, "VERIFIED_ON_OPEN", 0)  # as of a table that opening leaves to others
    folder = make_split(20).folder
    damage(folder / name, byte)
    (problem,) = verify_index(read_index(folder), decode_images="none").problems
    assert said in problem.line


def test_verify_index__problems_are_of_a_file_a_kind_and_a_member(make_split: MakeSplit) -> None:
    index = make_split(20, bad=(4, 9, 14))
    source = ShardSource(index)
    wanted = [
        (Path(source.location(sample)).name, "truncated", source.key(sample))
        for sample in range(20)
        if source.key(sample) in ("k4", "k9", "k14")
    ]
    assert [problem[:3] for problem in verify_index(index).problems] == wanted
    (index.folder / index.shards[1].name).write_bytes(b"text" * 200)
    (problem,) = verify_index(index, decode_images="none").problems
    assert (problem.file, problem.kind) == ("shard-000001.tar", "damaged shard")
    assert problem.member.startswith("not a complete, uncompressed tar file")


def test_verify_index__names_images_that_are_there_twice(
    tmp_path: Path, tiny_png: Callable[[int], bytes]
) -> None:
    items = [Item(f"k{n}", 0, partial(tiny_png, n % 5)) for n in range(7)]
    index = store(items, tmp_path / "train", ("a",))
    source, report = ShardSource(index), verify_index(index)
    found = {frozenset((source.key(first), source.key(later))) for first, later in report.repeated}
    assert found == {frozenset(("k0", "k5")), frozenset(("k1", "k6"))}
    assert all(first < later for first, later in report.repeated)
    assert report.problems == ()


def test_verify_index__one_changed_label_of_several_is_found(
    tmp_path: Path, tiny_png: Callable[[int], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_index, "VERIFIED_ON_OPEN", 0)
    items = [Item(f"k{n}", (n % 3, (n + 1) % 3)[: 1 + n % 2], partial(tiny_png, n)) for n in range(6)]
    index = store(items, tmp_path / "train", tuple("abc"), max_samples=4)
    assert verify_index(index).problems == ()
    table = np.load(index.folder / "labels.npy")
    table[5, 1] = 2 if table[5, 1] != 2 else -1
    np.save(index.folder / "labels.npy", table)
    report = verify_index(read_index(index.folder))
    assert [problem.kind for problem in report.problems] == ["other samples"]
    assert "shard-000001.tar: sample 1 of it is not where, or not labelled as" in report.problems[0].line


def test_verify_index__labels_of_no_class_are_a_problem(make_split: MakeSplit) -> None:
    index = make_split(9)
    rows = np.load(index.folder / "samples.npy")
    rows["label"][2] = 7
    np.save(index.folder / "samples.npy", rows)
    note_tables(index.folder)
    report = verify_index(read_index(index.folder))
    assert len(report.class_counts) == 3
    assert any(
        "1 of 9 images have labels outside 0..2, first number 2 (7)" in one.line for one in report.problems
    )


def test_verify_index__names_that_the_shards_do_not_have_are_a_problem(make_split: MakeSplit) -> None:
    """Their order decides which images a part of a split holds."""
    index = make_split(9)
    file, json_file = index.folder / NAMES, index.folder / "index.json"
    text = json_file.read_text().replace(table_sha256(file), "{}")
    file.write_bytes(file.read_bytes().replace(b"k1", b"k9"))
    json_file.write_text(text.replace("{}", table_sha256(file)))
    (problem,) = verify_index(read_index(index.folder)).problems
    assert problem.kind == "other names"
