"""finetune with [distillation]: the loss in NumPy, the same bytes however it is run, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY
from tests.trained import CPU, SMALL, do, made_once
from vitctl.verify.run_check import verify

# A teacher of another image size and normalisation: what differs has to be converted.
TEACHER: dict[str, Any] = {
    "data.image_size": 32,
    "data.mean": [0.3, 0.4, 0.5],
    "data.std": [0.2, 0.25, 0.3],
    "model.pre_logits": False,
    "loss.name": "softmax",
    "model.hidden_size": 24,
    "seed": 5,
}
DISTIL: dict[str, Any] = {
    **CPU,
    **SMALL,
    "machine.precision": "float32",
    "optimizer.lr": 0.1,
    "data.mixup_alpha": 0.5,
    "data.random_erasing": 0.5,
    "distillation.weight": 0.3,
    "distillation.temperature": 2.0,
    "averaging.decay": 0.5,
    "checkpoint.every_steps": 2,
    "evaluation.every_steps": 3,
}
LANES = {"schedule.lanes": 4, "schedule.leaf_images": 2}


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


def test_verify__computes_every_step_again(taught: Path) -> None:
    findings = [one for _, one in verify(taught, steps="all", scores=True)]
    assert {one.state for one in findings if one.what in ("replay", "score", "weights")} == {"ok"}
    assert "steps 1 to 6: equal, bit for bit" in {one.text for one in findings}
