"""finetune with [distillation]: the same bytes however it is run, one teacher for a run, refusals."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import TINY, checkpoint, records, stored
from tests.matrix import slow
from tests.trained import CPU, SMALL, Job, crash_after, do, finetuned, made_once, result_of
from tests.verify.conftest import said
from vitctl.errors import CheckpointError, VitctlError
from vitctl.jobs.plan import plan_training
from vitctl.launch.worker import work
from vitctl.models.flops import count_macs, count_parameters
from vitctl.models.weights.weights_file import read_weights
from vitctl.recipe.load import Override, load_recipe
from vitctl.recipe.schema import Finetune
from vitctl.verify.run_check import verify

# Of another image size, normalisation and architecture than the student.
TEACHER: dict[str, Any] = {
    "data.image_size": 32,
    "data.mean": [0.3, 0.4, 0.5],
    "data.std": [0.2, 0.25, 0.3],
    "model.depth": 1,
    "model.pre_logits": False,
    "model.dropout": 0.1,
    "loss.name": "softmax",
    "averaging.decay": 0.0,
    "schedule.total_steps": 4,
    "schedule.warmup_steps": 1,
    "seed": 5,
}
DISTIL: dict[str, Any] = {
    **CPU,
    **SMALL,
    "machine.precision": "float32",
    "optimizer.lr": 0.1,
    "data.mixup_alpha": 0.5,
    "data.random_erasing": 0.5,
    "dropout": 0.1,
    "distillation.weight": 0.3,
    "distillation.temperature": 2.0,
    "checkpoint.every_steps": 2,
    "evaluation.every_steps": 3,
}
LANES = {"schedule.lanes": 4, "schedule.leaf_images": 2}
FEATURES = {"distillation.kind": "features", "distillation.temperature": 1.0}


@pytest.fixture(scope="session")
def teacher(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network to learn from."""
    values = {"data.path": str(tiny_data), **TEACHER}
    return made_once(tmp_path_factory, "teacher", lambda folder: do(TINY, folder, **values))


@pytest.fixture(scope="session")
def taught(
    pretrained: Path, teacher: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run with a teacher, uninterrupted."""
    values = {**DISTIL, **LANES, "data.path": str(tiny_data), "weights.source": str(pretrained)}
    values["distillation.teacher"] = str(teacher)
    return made_once(tmp_path_factory, "taught", lambda folder: do("finetune", folder, **values))


@pytest.mark.slow
def test_teacher__is_recorded_and_every_step_computed_again(taught: Path, teacher: Path) -> None:
    digest = read_weights(teacher / "checkpoints" / "step_00000004").digest
    asked = {"teacher": str(teacher), "kind": "soft", "weight": 0.3, "temperature": 2.0}
    assert result_of(taught)["provenance"]["distillation"] == {**asked, "teacher_sha256": digest}
    [record] = records(taught, "teacher")
    assert record["text"].endswith("positions from 32 to 16 pixels")
    findings = [one for _, one in verify(taught, steps="all", scores=True)]
    assert {one.state for one in findings if one.what in ("replay", "score", "weights")} == {"ok"}
    assert "steps 1 to 6: equal, bit for bit" in {one.text for one in findings}


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"distillation.kind": "hard", "distillation.temperature": 1.0}, FEATURES])
def test_kinds__train_other_weights(
    taught: Path, teacher: Path, job: Job, tmp_path: Path, change: dict[str, Any]
) -> None:
    """Otherwise the equalities here would show nothing."""
    job("finetune", **{**DISTIL, **LANES, "distillation.teacher": str(teacher), **change})
    assert checkpoint(tmp_path / "run", 6)["model.safetensors"] != checkpoint(taught, 6)["model.safetensors"]
    assert {state for state, _ in said(tmp_path / "run", "replay", steps="3:6")} == {"ok"}


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_lanes__any_number_of_processes_gives_the_same_bytes(
    taught: Path, pretrained: Path, teacher: Path, tiny_data: Path, tmp_path: Path, num_processes: int
) -> None:
    values = {**DISTIL, **LANES, "distillation.teacher": teacher}
    finetuned(num_processes, tmp_path / "several", pretrained, tiny_data, **values)
    assert checkpoint(tmp_path / "several", 6) == checkpoint(taught, 6)
    assert result_of(tmp_path / "several")["metrics"] == result_of(taught)["metrics"]


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"machine.sharding": "fsdp"}], ids=["ddp", "fsdp"])
@pytest.mark.parametrize("kind", [{}, FEATURES], ids=["soft", "features"])
def test_several_processes__train_the_same_weights(
    pretrained: Path,
    teacher: Path,
    tiny_data: Path,
    job: Job,
    tmp_path: Path,
    kind: dict[str, Any],
    more: dict[str, Any],
) -> None:
    values = {**DISTIL, "distillation.teacher": str(teacher), **kind, "dropout": 0.0}
    values["machine.precision"] = "float64"
    job("finetune", "one", **values)
    finetuned(2, tmp_path / "two", pretrained, tiny_data, **values, **more, **{"machine.micro_batch": 3})
    one, two = stored(tmp_path / "one", 6), stored(tmp_path / "two", 6)
    torch.testing.assert_close(two, one, rtol=1e-9, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, *slow(LANES)], ids=["", "lanes"])
def test_resume__gives_the_same_bytes_from_the_same_teacher_alone(
    job: Job, teacher: Path, tmp_path: Path, more: dict[str, Any]
) -> None:
    weights = teacher / "checkpoints" / "step_00000004" / "model.safetensors"
    copied = Path(shutil.copyfile(weights, tmp_path / "teacher.safetensors"))
    values = {**DISTIL, **more, "distillation.teacher": str(copied)}
    job("finetune", "whole", **values)
    with crash_after(3):
        job("finetune", **values)
    kept = copied.read_bytes()
    copied.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    with pytest.raises(
        CheckpointError, match=r"other inputs: the teacher \w{12}, now \w{12}.*--allow distil"
    ):
        work(tmp_path / "run")
    copied.write_bytes(kept)
    work(tmp_path / "run")
    assert checkpoint(tmp_path / "run", 6) == checkpoint(tmp_path / "whole", 6)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"distillation.teacher": ""}, r"\[distillation\] does nothing without distillation\.teacher"),
        ({"distillation.teacher": "newest"}, "teacher = 'newest' may be the student's start"),
        ({"distillation.kind": "hard"}, "temperature = 2 does nothing for kind = 'hard'"),
        ({"loss.name": "sigmoid"}, "compares classes that exclude each other"),
        ({**FEATURES, "finetune.freeze": "backbone"}, "teaches the backbone, which finetune.freeze"),
        (
            {"data.classes": ("circle", "star")},
            "its head has 6 classes .*the data has 2.*fine-tune the teacher",
        ),
        ({"distillation.teacher": "nothing"}, "^the teacher nothing: no such weights; .* with --teacher$"),
    ],
)
def test_refused__before_anything_is_written(
    job: Job, teacher: Path, tmp_path: Path, values: dict[str, Any], words: str
) -> None:
    with pytest.raises(VitctlError, match=words) as caught:
        job("finetune", **{**DISTIL, "distillation.teacher": str(teacher), **values})
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "recipe.toml").exists()


def test_refused__probabilities_of_a_sigmoid_and_other_widths(
    job: Job, pretrained: Path, speck: Path
) -> None:
    with pytest.raises(CheckpointError, match="its probabilities are sigmoids"):
        job("finetune", **{**DISTIL, "distillation.teacher": str(pretrained)})
    with pytest.raises(CheckpointError, match="has 12 numbers, the student's 24: "):
        job("finetune", **{**DISTIL, **FEATURES, "distillation.teacher": str(speck)})


def test_plan__counts_the_teacher(tiny_data: Path, pretrained: Path, teacher: Path) -> None:
    values = {"data.path": str(tiny_data), "weights.source": str(pretrained), "schedule.batch_size": 8}
    given = [Override(key, value) for key, value in values.items()]
    recipes = [
        load_recipe("finetune", [*given, *more]).recipe
        for more in ([], [Override("distillation.teacher", str(teacher))])
    ]
    alone, both = (plan_training(recipe) for recipe in recipes if isinstance(recipe, Finetune))
    config = replace(read_weights(teacher / "checkpoints" / "step_00000004").config, image_size=16)
    assert both.memory_bytes - alone.memory_bytes == 4 * count_parameters(config)
    more = 2 * count_macs(config) * both.steps * 8
    assert both.training_flops - alone.training_flops == more
    assert any(note.startswith("teacher ") for note in both.notes)
