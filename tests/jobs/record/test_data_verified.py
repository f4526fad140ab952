"""Damaged bytes: a score is refused, on every way that leads to one; a training is marked; each result
records the state.
"""

import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import TINY
from tests.data.conftest import damage
from tests.data.server import Faults, serving
from tests.matrix import slow
from tests.trained import CPU, SMALL, Job, do
from vitctl.engine.journal import LOG, read_records
from vitctl.errors import DataError
from vitctl.launch.worker import work
from vitctl.report.compare import compare_runs


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


def mend(damaged: Path, intact: Path, split: str) -> None:
    shutil.copyfile(intact / split / "shard-000000.tar", damaged / split / "shard-000000.tar")


def test_training__on_a_damaged_shard_is_marked_and_warned(
    job: Job, damaged: Path, tiny_data: Path, tmp_path: Path
) -> None:
    mend(damaged, tiny_data, "test")
    result = job("finetune", "run", **{"data.path": str(damaged)})
    assert result["status"] == "done"
    assert result["provenance"]["data_verified"] == "damaged"
    assert [Path(text.split(": ")[0]).parent.name for text in result["provenance"]["data_damaged"]] == [
        "train"
    ]
    warnings = [r["text"] for r in read_records(tmp_path / "run" / LOG) if r["kind"] == "warning"]
    assert any("shard-000000.tar: checksum mismatch" in text for text in warnings)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["finetune", *slow("pretrain")])
def test_training__its_score_of_a_damaged_shard_is_refused_and_a_resume_with_the_intact_one_only_scores(
    damaged: Path, tiny_data: Path, pretrained: Path, tmp_path: Path, name: str
) -> None:
    mend(damaged, tiny_data, "train")
    source = {"weights.source": str(pretrained)} if name == "finetune" else {}
    folder = tmp_path / "run"
    values = {**CPU, **SMALL, **source, "data.path": str(damaged), "evaluation.every_steps": 0}
    with pytest.raises(
        DataError, match=r"shard-000000.tar: checksum mismatch.* a score must be of exactly the images"
    ):
        do("finetune" if source else TINY, folder, **values)
    steps = SMALL["schedule.total_steps"]
    assert (folder / f"checkpoints/step_{steps:08d}").is_dir()
    with pytest.raises(DataError, match=r"shard-000000.tar: checksum mismatch"):
        work(folder)
    mend(damaged, tiny_data, "test")
    before = [r for r in read_records(folder / LOG) if r["kind"] in ("train", "evaluate")]
    work(folder)
    after = [r for r in read_records(folder / LOG) if r["kind"] in ("train", "evaluate")]
    assert [r["kind"] for r in after[len(before) :]] == ["evaluate"]
    result = json.loads((folder / "result.json").read_text())
    # The test shard was damaged before, which no image of the training or of the score was.
    assert (result["status"], result["provenance"]["data_verified"]) == ("done", "whole")


@pytest.mark.slow
def test_training__on_a_shard_that_was_damaged_at_an_earlier_start_stays_marked(
    job: Job, damaged: Path, tiny_data: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError):
        job("finetune", "run", **{"data.path": str(damaged)})
    for split in ("train", "test"):
        mend(damaged, tiny_data, split)
    work(tmp_path / "run")
    used = json.loads((tmp_path / "run/result.json").read_text())["provenance"]
    assert used["data_verified"] == "damaged"
    (text,) = used["data_damaged"]
    assert "/train/shard-000000.tar: was damaged before (checksum mismatch" in text


@pytest.mark.slow
def test_sweep__on_a_damaged_shard_is_refused(job: Job, damaged: Path) -> None:
    split = {"sweep.lrs": [0.1, 0.2], "sweep.train_split": "train[:80%]", "sweep.eval_split": "train[80%:]"}
    with pytest.raises(DataError, match=r"train/shard-000000.tar: checksum mismatch.* a score must be"):
        job("finetune", "run", **{"data.path": str(damaged), **split})


@pytest.mark.parametrize("name", ["evaluate", *slow("fewshot")])
def test_score__of_images_changed_on_the_way(job: Job, tiny_data: Path, tmp_path: Path, name: str) -> None:
    """Before, a byte that changed in each range was decoded and scored, and `compare` approved."""
    values = {
        "evaluate": {"data.eval_split": "test"},
        "fewshot": {"fewshot.shots": [1], "fewshot.cache_gib": 0},
    }[name]
    intact = job(name, "intact", **values)
    for gib in (0, 1):
        with serving(tiny_data, Faults(flip_range=1.0)) as url:
            result = job(name, f"ranges{gib}", **values, **{"data.path": url, "data.cache_gib": gib})
        assert result["metrics"]["accuracy"] == intact["metrics"]["accuracy"]
        assert result["provenance"]["data_verified"] == "whole"
    assert compare_runs([tmp_path / "intact", tmp_path / "ranges0"]).reasons == []


@pytest.mark.parametrize(("name", "gib"), [("evaluate", 0), ("fewshot", 1), ("finetune", 1)])
def test_score__of_shards_changed_on_the_way_is_refused(
    job: Job, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, gib: int
) -> None:
    values = {"evaluate": {"data.eval_split": "test"}, "fewshot": {"fewshot.shots": [1]}, "finetune": {}}[
        name
    ]
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path / "cache"))
    with (
        serving(tiny_data, Faults(flip=1.0)) as url,
        pytest.raises(DataError, match=r"shard-\d+.tar: \d+ bytes with sha256"),
    ):
        job(name, "run", **values, **{"data.path": url, "data.cache_gib": gib})


@pytest.mark.slow
def test_training__by_ranges_is_not_verified(job: Job, tiny_data: Path, tmp_path: Path) -> None:
    with serving(tiny_data, Faults()) as url:
        result = job("finetune", "run", **{"data.path": url, "data.cache_gib": 0})
    assert result["provenance"]["data_verified"] == "none"
    reasons = compare_runs([tmp_path / "run", tmp_path / "run"]).reasons
    assert [reason.partition(": ")[2] for reason in reasons] == [
        "it does not record that any of its bytes were verified against their digests"
    ] * 2


@pytest.mark.parametrize("name", ["evaluate", "fewshot"])
def test_score__of_a_damaged_shard_is_refused(job: Job, damaged: Path, name: str) -> None:
    values = {"evaluate": {"data.eval_split": "test"}, "fewshot": {"fewshot.shots": [1]}}[name]
    with pytest.raises(
        DataError,
        match=r"shard-000000.tar: checksum mismatch.* a score must be of exactly the images of its digest",
    ):
        job(name, "run", **{"data.path": str(damaged), **values})


@pytest.mark.slow
def test_vtab__of_a_damaged_shard_is_refused(pretrained: Path, tmp_path: Path) -> None:
    small = {
        "vtab.suite": "mini",
        "vtab.tasks": ["digits"],
        "vtab.sweep_lrs": [],
        "vtab.sweep_steps": [],
        "schedule.total_steps": 1,
        "schedule.warmup_steps": 0,
        "data.root": str(tmp_path / "data"),
    }
    values = {**CPU, **small, "weights.source": str(pretrained), "data.image_size": 8}
    result = do("vtab", tmp_path / "good", **values)
    assert result["provenance"]["data_verified"] == "whole"
    shutil.copytree(tmp_path / "good" / "data", tmp_path / "data")
    for path in (tmp_path / "data").rglob("test/*.tar"):
        damage(path, -1)  # behind the last image
    with pytest.raises(DataError, match="checksum mismatch"):
        do("vtab", tmp_path / "bad", **values)


@pytest.mark.slow
def test_pretraining__of_synthetic_images_is_whole(tmp_path: Path) -> None:
    result = do("smoke", tmp_path / "run", **CPU, **SMALL, **{"data.synthetic": 16, "data.dataset": ""})
    assert result["provenance"]["data_verified"] == "whole"


@pytest.mark.slow
def test_export__its_accuracy_on_a_damaged_shard_is_refused(
    damaged: Path, pretrained: Path, tmp_path: Path
) -> None:
    values = {"weights.source": str(pretrained), "export.to": ["onnx"], "export.precision": "float16"}
    with pytest.raises(DataError, match="a score must be of exactly the images of its digest"):
        do("export", tmp_path / "run", **values, **{"data.path": str(damaged), "data.eval_split": "test"})
