"""A damaged byte inside a shard: a score is refused, a training is marked, and a result says that its bytes were verified."""

import shutil
from pathlib import Path

import pytest

from tests.data.conftest import damage
from tests.jobs.conftest import CPU, SMALL, Job, do
from vitctl.engine.journal import LOG, read_records
from vitctl.errors import DataError


@pytest.fixture
def damaged(tiny_data: Path, tmp_path: Path) -> Path:
    """The tiny data, of which one byte behind the last image of a shard of each split is another."""
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_data, folder)
    for split in ("train", "test"):
        path = folder / split / "shard-000000.tar"
        found, data = path.stat(), bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        assert path.stat().st_size == found.st_size
    return folder


def test_results__say_that_their_bytes_were_verified(job: Job) -> None:
    for name in ("finetune", "evaluate", "fewshot"):
        values = {"evaluate": {"data.eval_split": "test"}, "fewshot": {"fewshot.shots": [1]}}.get(name, {})
        assert job(name, name, **values)["provenance"]["data_verified"] is True


def test_training__on_a_damaged_shard_is_marked_and_warned(job: Job, damaged: Path, tmp_path: Path) -> None:
    result = job("finetune", "run", **{"data.path": str(damaged)})
    assert result["status"] == "done"
    assert result["provenance"]["data_verified"] is False
    assert [Path(text.split(": ")[0]).parent.name for text in result["provenance"]["data_damaged"]] == ["train", "test"]
    warnings = [r["text"] for r in read_records(tmp_path / "run" / LOG) if r["kind"] == "warning"]
    assert any("shard-000000.tar: sha256 is" in text and "(and 1 more)" in text for text in warnings)


@pytest.mark.parametrize("name", ["evaluate", "fewshot"])
def test_score__of_a_damaged_shard_is_refused(job: Job, damaged: Path, name: str) -> None:
    values = {"evaluate": {"data.eval_split": "test"}, "fewshot": {"fewshot.shots": [1]}}[name]
    with pytest.raises(
        DataError, match=r"shard-000000.tar: sha256 is .* a score must be of exactly the images of its digest"
    ):
        job(name, "run", **{"data.path": str(damaged), **values})


def test_vtab__of_a_damaged_shard_is_refused(pretrained: Path, tmp_path: Path) -> None:
    small = {"vtab.suite": "mini", "vtab.light": True, "vtab.tasks": ["digits"], "data.root": str(tmp_path / "data")}
    values = {**CPU, **small, "weights.source": str(pretrained), "data.image_size": 8}
    result = do("vtab", tmp_path / "good", **values)
    assert result["provenance"]["data_verified"] is True
    shutil.copytree(tmp_path / "good" / "data", tmp_path / "data")
    for path in (tmp_path / "data").rglob("test/*.tar"):
        damage(path, -1)  # behind the last image
    with pytest.raises(DataError, match="sha256 is"):
        do("vtab", tmp_path / "bad", **values)


def test_pretraining__of_synthetic_images_has_nothing_to_verify(tmp_path: Path) -> None:
    result = do("smoke", tmp_path / "run", **CPU, **SMALL, **{"data.synthetic": 16, "data.dataset": ""})
    assert "data_verified" not in result["provenance"]
