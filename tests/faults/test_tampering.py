"""A score belongs to the pixels and labels that it was made on: each command refuses data that were changed,
or names the difference.
"""

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from tests import trained as jobs
from tests.conftest import TINY
from tests.data.server import Faults, serving
from tests.matrix import slow
from tests.trained import CPU, do
from vitctl.data.datasets.readers import shapes
from vitctl.data.shards import index as shard_index
from vitctl.data.shards.index import read_index
from vitctl.data.source.splits import write_exclusion
from vitctl.data.source.verification import Verification
from vitctl.data.source.views import Source
from vitctl.data.writer.shard_writer import write_split
from vitctl.engine.journal import LOG, read_records
from vitctl.errors import DataError
from vitctl.report.compare import compare_runs
from vitctl.system.files import cache_folder

SPLITS = ("train", "test")
SIZE = 1000
speck = jobs.speck


def labels_shifted(split: Path) -> None:
    rows = np.load(split / "samples.npy")
    rows["label"] = (rows["label"] + 1) % 6
    np.save(split / "samples.npy", rows)


def labels_shifted_and_noted(split: Path) -> None:
    """By somebody who knows that the index records the digest."""
    labels_shifted(split)
    fields = json.loads((split / "index.json").read_text())
    fields["tables"]["samples.npy"]["sha256"] = shard_index.table_sha256(split / "samples.npy")
    (split / "index.json").write_text(json.dumps(fields))


def two_images_exchanged(split: Path) -> None:
    """Inside a shard, of two classes. All images have the same number of bytes."""
    index = read_index(split)
    rows = np.array(index.rows[: index.shards[0].num_samples])
    pair = rows[0], rows[rows["label"] != rows["label"][0]][0]
    assert pair[0]["size"] == pair[1]["size"]
    path = split / index.shards[0].name
    data = bytearray(path.read_bytes())
    places = [slice(begin, begin + SIZE) for row in pair for begin in [int(row["header"]) + int(row["data"])]]
    data[places[0]], data[places[1]] = data[places[1]], data[places[0]]
    path.write_bytes(data)


def another_image_left_out(split: Path) -> None:
    (split / "excluded.json").unlink()
    write_exclusion(read_index(split), [1], reason="test")


def list_of_left_out_edited(split: Path) -> None:
    text = (split / "excluded.json").read_text()
    assert '"sample": 0' in text
    (split / "excluded.json").write_text(text.replace('"sample": 0', '"sample": 1'))


def leave_out_the_first(split: Path) -> None:
    write_exclusion(read_index(split), [0], reason="test")


class Row(NamedTuple):
    """A tampering, and what evaluate, fewshot and pretrain raise (None: they score it) and compare says."""

    tamper: Callable[[Path], None]
    score: str | None
    train: str | None
    compare: str | None
    before: Callable[[Path], None] = lambda _: None


CHANGED = r"samples\.npy changed since its index was written \(sha256 \w{12}\.\.\., should be \w{12}\.\.\.\)"
SHARD = r"shard-000000\.tar: checksum mismatch: index has \w{12}\.\.\., file has \w{12}\.\.\."
LIST = r"excluded\.json: made for other shards"
OTHER = "data_sha256 is "
TABLE = [
    Row(labels_shifted, CHANGED, CHANGED, None),
    Row(two_images_exchanged, SHARD, None, None),
    Row(labels_shifted_and_noted, None, None, OTHER),
    Row(another_image_left_out, None, None, OTHER, leave_out_the_first),
    Row(list_of_left_out_edited, LIST, LIST, None, leave_out_the_first),
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """As the tiny data, each image of SIZE bytes: a PNG may be followed by zeros."""
    for split, number in (("train", 70), ("test", 23)):
        items = [
            replace(item, read=lambda item=item: item.read().ljust(SIZE, b"\0"), size=None)
            for item in shapes.items("shape", split, number, seed=0, image_size=16)
        ]
        write_split(
            items, tmp_path / "data" / split, shapes.SHAPES, seed=0, source_text="test", max_samples=18
        )
    return tmp_path / "data"


def score(job: str, weights: Path, data: Path | str, folder: Path, **values: Any) -> dict[str, Any]:
    own: dict[str, Any] = {"data.eval_split": "test"} if job == "evaluate" else {"fewshot.shots": [1]}
    return do(job, folder, **{**CPU, **own, "data.path": str(data), "weights.source": str(weights), **values})


def warnings_of(folder: Path) -> str:
    return "\n".join(
        record.get("text", "") for record in read_records(folder / LOG) if record["kind"] == "warning"
    )


FEWSHOT = (labels_shifted, two_images_exchanged, another_image_left_out)  # what evaluate reads, it reads too


@pytest.mark.parametrize(
    ("job", "row"),
    [("evaluate", row) for row in TABLE[:2]]
    + slow(*(("evaluate", row) for row in TABLE[2:]))
    + slow(*(("fewshot", row) for row in TABLE if row.tamper in FEWSHOT)),
    ids=lambda given: given if isinstance(given, str) else given.tamper.__name__,
)
def test_scores(row: Row, job: str, speck: Path, data: Path, tmp_path: Path) -> None:
    for split in SPLITS:
        row.before(data / split)
    score(job, speck, data, tmp_path / "one")
    for split in SPLITS:
        row.tamper(data / split)
    if row.score:
        with pytest.raises(DataError, match=row.score):
            score(job, speck, data, tmp_path / "two")
        result = tmp_path / "two" / "result.json"
        assert not result.exists() or "failed" in result.read_text()
        return
    score(job, speck, data, tmp_path / "two")
    assert row.compare
    assert any(row.compare in reason for reason in compare_runs([tmp_path / "one", tmp_path / "two"]).reasons)


@pytest.mark.parametrize("row", [*TABLE[:1], *slow(*TABLE[1:])], ids=lambda row: row.tamper.__name__)
def test_pretraining(row: Row, data: Path, tmp_path: Path) -> None:
    small = {"schedule.total_steps": 1, "schedule.warmup_steps": 0, "data.path": str(data), "model.depth": 1}
    for split in SPLITS:
        row.before(data / split)
    first = do(TINY, tmp_path / "one", **CPU, **small)
    for split in SPLITS:
        row.tamper(data / split)
    if row.train or row.score:  # with the images, not the index, damaged it trains; the score is refused
        with pytest.raises(DataError, match=row.train or row.score):
            do(TINY, tmp_path / "two", **CPU, **small)
        assert (tmp_path / "two/checkpoints/step_00000001").is_dir() == (row.train is None)
        return
    second = do(TINY, tmp_path / "two", **CPU, **small)
    keys = ("train_sha256", "data_sha256")
    assert all(first["provenance"][key] != second["provenance"][key] for key in keys)


@pytest.mark.slow
def test_large_tables__are_verified_while_the_score_is_computed(
    speck: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_index, "VERIFIED_ON_OPEN", 100)
    result = score("evaluate", speck, data, tmp_path / "one")
    assert result["provenance"]["data_verified"] == "whole"
    labels_shifted(data / "test")
    with pytest.raises(
        DataError,
        match=r"samples\.npy: checksum mismatch.* a score must be of exactly the images of its digest",
    ):
        score("evaluate", speck, data, tmp_path / "two")


@pytest.mark.slow
def test_cached_features__that_are_damaged_are_computed_again(
    speck: Path, data: Path, tmp_path: Path
) -> None:
    cache = {"fewshot.cache": str(tmp_path / "kept")}
    first = score("fewshot", speck, data, tmp_path / "one", **cache)
    for file in (tmp_path / "kept").iterdir():
        with safe_open(file, framework="pt") as stored:
            features, metadata = stored.get_tensor("features"), stored.metadata()
        save_file({"features": features.flip(0).contiguous()}, file, metadata)
    again = score("fewshot", speck, data, tmp_path / "two", **cache)
    assert again["metrics"] == first["metrics"]
    assert "the cached representations are damaged; they are computed again" in warnings_of(tmp_path / "two")
    score("fewshot", speck, data, tmp_path / "three", **cache)
    assert warnings_of(tmp_path / "three") == ""
    assert [
        record["read"] for record in read_records(tmp_path / "three" / LOG) if record["kind"] == "features"
    ] == [True]


def test_cached_features__are_not_those_of_a_damaged_shard(speck: Path, data: Path, tmp_path: Path) -> None:
    """They were cached before the shard was verified, under the digest of the good one."""
    cache, first = {"fewshot.cache": str(tmp_path / "kept")}, score("fewshot", speck, data, tmp_path / "one")
    whole = (data / "test" / "shard-000000.tar").read_bytes()
    two_images_exchanged(data / "test")
    with pytest.raises(DataError, match=SHARD):
        score("fewshot", speck, data, tmp_path / "two", **cache)
    (data / "test" / "shard-000000.tar").write_bytes(whole)
    again = score("fewshot", speck, data, tmp_path / "three", **cache)
    assert again["metrics"] == first["metrics"]


def test_scores__a_shard_that_changes_after_it_was_verified(
    speck: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = Verification.wait

    def changed(verification: Verification, *sources: Source) -> None:
        wait(verification, *sources)
        path = data / "test" / "shard-000000.tar"
        path.write_bytes(path.read_bytes())

    monkeypatch.setattr(Verification, "wait", changed)
    with pytest.raises(DataError, match=r"shard-000000\.tar: changed while it was in use"):
        score("evaluate", speck, data, tmp_path / "two")


def test_scores__without_records_of_the_background_process_the_job_verifies_the_shards(
    speck: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk."""
    real = subprocess.Popen
    quiet = lambda *_, **named: real(["cat"], **named)  # noqa: E731 - it hashes nothing
    monkeypatch.setattr("vitctl.data.source.verification.subprocess.Popen", quiet)
    assert score("evaluate", speck, data, tmp_path / "two")["provenance"]["data_verified"] == "whole"
    path = data / "test" / "shard-000000.tar"
    path.write_bytes(path.read_bytes()[:-1] + b"1")  # behind the last image
    with pytest.raises(DataError, match=r"shard-000000\.tar: checksum mismatch"):
        score("evaluate", speck, data, tmp_path / "three")


@pytest.mark.slow
def test_cached_shards__overwritten_at_the_same_size(
    speck: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path / "cache"))
    with serving(data, Faults()) as url:
        first = score("evaluate", speck, url, tmp_path / "one")
        assert first["provenance"]["data_verified"] == "whole"
        again = score("evaluate", speck, url, tmp_path / "again")
        assert again["provenance"]["data_verified"] == "whole"
        victim = max((cache_folder() / "shards").glob("*.tar"), key=lambda path: path.stat().st_size)
        content = bytearray(victim.read_bytes())
        content[-1] ^= 1
        victim.write_bytes(content)
        with pytest.raises(
            DataError, match=r"checksum mismatch.*a copy in the cache; it was removed and is fetched again"
        ):
            score("evaluate", speck, url, tmp_path / "two")
        third = score("evaluate", speck, url, tmp_path / "three")
    assert third["metrics"] == first["metrics"]
    assert compare_runs([tmp_path / "one", tmp_path / "three"]).reasons == []
