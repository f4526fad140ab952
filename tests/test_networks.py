"""Networks of today train exactly: the same bytes on several processes, after a stop, and in a replay."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import checkpoint, run_as
from vitctl.verify.run_check import verify

EXACT: dict[str, Any] = {
    "machine.precision": "float32",
    "schedule.lanes": 6,
    "schedule.leaf_images": 2,
    "schedule.batch_size": 14,
    "schedule.total_steps": 6,
    "schedule.warmup_steps": 1,
    "checkpoint.every_steps": 3,
    "evaluation.every_steps": 0,
    "model.drop_path": 0.2,
}
NETWORKS: dict[str, dict[str, Any]] = {
    "dinov3": {
        "classifier": "token_patches",
        "position_embedding": "none",
        "rotary": "dinov3",
        "rotary_rescale": 2.0,
        "registers": 2,
        "layer_scale": 0.1,
        "mlp": "swiglu",
        "qkv_bias": "qv",
    },
    "beit": {
        "classifier": "patches",
        "norm_at": "pooled",
        "position_embedding": "relative_bias",
        "layer_scale": 0.1,
        "qkv_bias": "qv",
    },
    "siglip": {"classifier": "attention", "position_embedding": "sincos", "gelu": "tanh"},
    "eva": {
        "classifier": "patches",
        "norm_at": "pooled",
        "rotary": "eva",
        "mlp": "swiglu",
        "mlp_norm": True,
        "qkv_bias": "qv",
    },
    "clip": {"gelu": "quick", "norm_pre": True, "patch_bias": False, "position_class_row": False},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_training__is_exact(name: str, tiny_data: Path, tmp_path: Path) -> None:
    recipe = EXACT | {f"model.{key}": value for key, value in NETWORKS[name].items()}
    one, two = tmp_path / "one", tmp_path / "two"
    run_as(1, one, tiny_data, **recipe)
    run_as(2, two, tiny_data, **recipe)
    assert checkpoint(two, 6) == checkpoint(one, 6)
    shutil.rmtree(two / "checkpoints" / "step_00000006")
    (two / "result.json").unlink()
    run_as(3, two, tiny_data, **recipe)  # goes on from step 3
    assert checkpoint(two, 6) == checkpoint(one, 6)
    said = [finding for _, finding in verify(one, steps="all", scores=True)]
    assert [finding.text for finding in said if finding.state in ("differs", "not proven")] == []
    assert any("bit for bit" in finding.text for finding in said)
