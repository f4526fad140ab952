"""Every family of models goes the whole way: pre-trained from shards, then fine-tuned from its checkpoint."""

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Run, checkpoint, train_records
from tests.matrix import few
from vitctl.errors import RecipeError

HYBRID = {"model.stage_depths": [1, 1], "model.width": 8, "model.num_groups": 4, "model.patch_size": 1}
RESNET: dict[str, Any] = {
    "model.stage_depths": [1, 1], "model.width": 8, "model.num_groups": 4, "model.depth": None,
    "model.hidden_size": None,
    "model.mlp_size": None, "model.pre_logits": False,
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "Ti/4": {"model.position_embedding": "2d", "model.position_at": "every_layer"},
    "Ti/8": {"model.classifier": "gap", "model.position_embedding": "relative", "model.drop_path": 0.1},
    "R+Ti/16": HYBRID,
    "R50x1": RESNET,
    "R101x1": RESNET | {"model.version": "v2"},
    "Axial-B/16": {"model.patch_size": 4, "model.num_heads": 2, "model.pre_logits": False},
}
TINY_RESNET = """
job = "pretrain"
[machine]
workers = 0
precision = "float64"
device = "cpu"
[model]
name = "R50x1"
[data]
image_size = 16
[optimizer]
name = "adam"
lr = 1e-3
[schedule]
batch_size = 8
total_steps = 2
[loss]
name = "softmax"
"""


def recipe_for(name: str, tmp_path: Path) -> Path | None:
    if not name.startswith("R") or "/" in name:
        return None
    path = tmp_path / "resnet.toml"
    path.write_text(TINY_RESNET)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", few([*SMALL], *[*SMALL][::2]))
def test_family__pretrained_then_fine_tuned(name: str, run: Run, tmp_path: Path) -> None:
    values = {
        "model.name": name,
        "schedule.total_steps": 2,
        "schedule.warmup_steps": 1,
        "evaluation.every_steps": 0,
    }
    values |= {key: value for key, value in SMALL[name].items() if value is not None}
    given = recipe_for(name, tmp_path)
    folder = run("pretrain", given, **values) if given else run("pretrain", **values)
    assert len(train_records(folder)) >= 1
    fine = {
        "weights.source": str(folder),
        "schedule.total_steps": 2,
        "schedule.warmup_steps": 1,
        "schedule.batch_size": 8,
    }
    tuned = run(
        "finetune", "finetune", **fine, **{"machine.workers": 0, "log.every_steps": 1, "data.dataset": ""}
    )
    records = train_records(tuned)
    assert [record["step"] for record in records] == [1, 2]
    assert all(0 < record["loss"] < 10 for record in records)


def test_family__a_field_that_it_lacks_is_refused(run: Run) -> None:
    with pytest.raises(RecipeError, match=r"R50x1.*hidden_size|hidden_size"):
        run("refused", **{"model.name": "R50x1"})


@pytest.mark.slow
def test_masked_patches__resume_and_micro_batches_change_nothing(run: Run) -> None:
    masked = {
        "loss.name": "masked_patch",
        "model.pre_logits": False,
        "model.head_bias": 0.0,
        "averaging.decay": 0.0,
    }
    straight = run("straight", **masked)
    losses = [record["loss"] for record in train_records(straight)]
    assert len(losses) == 20
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
    pieces = run("pieces", **masked, **{"machine.micro_batch": 5, "machine.workers": 1})
    assert [record["loss"] for record in train_records(pieces)] == pytest.approx(losses, rel=1e-9)
    fine = {
        "weights.source": str(straight),
        "schedule.total_steps": 2,
        "schedule.warmup_steps": 1,
        "schedule.batch_size": 8,
    }
    tuned = run("finetune", "finetune", **fine, **{"machine.workers": 0, "data.dataset": ""})
    assert "model.safetensors" in checkpoint(tuned, 2)


def test_masked_patches__idle_sections_are_refused(run: Run) -> None:
    with pytest.raises(
        RecipeError, match=r"loss.name = 'masked_patch' has no targets to blend; leave out data.mixup"
    ):
        run("mixed", **{"loss.name": "masked_patch", "data.mixup_alpha": 0.2})
    with pytest.raises(RecipeError, match=r"would predict the noise of data.random_erasing; leave it out"):
        run("erased", **{"loss.name": "masked_patch", "data.random_erasing": 0.2})
    with pytest.raises(RecipeError, match=r"\[masked_patch\] does nothing for loss.name = 'sigmoid'"):
        run("idle", **{"masked_patch.corrupted": 0.15})
    with pytest.raises(RecipeError, match="plain ViT"):
        run("axial", **{"model.name": "Axial-B/16", "model.pre_logits": False, "loss.name": "masked_patch"})
