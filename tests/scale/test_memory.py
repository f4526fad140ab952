"""A sharded fine-tune needs little more than its share of the model, on each process, from start to end."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from vitctl.launch.cluster import WORKER
from vitctl.launch.prepare_run import launch_line, prepare_run
from vitctl.launch.run_folder import LOGS
from vitctl.models.build import build
from vitctl.models.variants import ViTConfig
from vitctl.models.weights.weights_file import save_weights
from vitctl.recipe.load import Override, load_recipe

SIDE, PROCESSES = 32, 4
META: dict[str, Any] = {
    "mean": [0.5] * 3,
    "std": [0.5] * 3,
    "image_size": SIDE,
    "eval_method": "square",
    "eval_resize": SIDE,
    "resample": "bilinear_antialias",
}
VALUES: dict[str, Any] = {
    "data.synthetic": 64,
    "data.train_split": "",
    "data.eval_split": "",
    "data.image_size": SIDE,
    "schedule.total_steps": 2,
    "schedule.warmup_steps": 1,
    "schedule.batch_size": 8,
    "evaluation.every_steps": 0,
    "checkpoint.every_steps": 1,
    "machine.device": "cpu",
    "machine.precision": "float32",
    "machine.workers": 0,
    "machine.processes": PROCESSES,
    "machine.sharding": "fsdp",
}


def peaks(folder: Path, depth: int, width: int) -> tuple[list[int], list[int], int]:
    """Return the peak bytes of each process of a run and of its resume, and the bytes of the model."""
    config = ViTConfig(
        patch_size=16, hidden_size=width, depth=depth, mlp_size=4 * width, num_heads=4, image_size=SIDE,
        num_classes=10,
    )  # fmt: skip
    file = save_weights(folder.with_suffix(".safetensors"), build(config), config, META)
    given = {**VALUES, "weights.source": str(file)}
    loaded = load_recipe("finetune", [Override(key, value) for key, value in given.items()])
    found = []
    for _ in range(2):
        prepare_run(loaded, folder)
        line = launch_line(folder, loaded.recipe).replace(WORKER, "benchmarks.peak_worker")
        env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**17)}
        done = subprocess.run(line, shell=True, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        files = [folder / LOGS / f"peak_{rank}.txt" for rank in range(PROCESSES)]
        found.append([int(one.read_text()) for one in files])
        (folder / "result.json").unlink()
        shutil.rmtree(folder / "checkpoints" / "step_00000002")
    return found[0], found[1], file.stat().st_size


@pytest.mark.slow
def test_sharded_finetune__needs_its_share_and_little_more(tmp_path: Path) -> None:
    empty, model = peaks(tmp_path / "empty", 1, 64), peaks(tmp_path / "model", 24, 512)
    size = model[2]
    # Weights, gradients and momentum, and the copies of weights and momentum that are being saved.
    shares = 5 * size / PROCESSES
    for without, needed in zip(empty[:2], model[:2], strict=True):
        assert max(needed) - max(without) < shares + 0.3 * size
        assert max(needed) - min(needed) < 0.05 * size  # rank 0 is like the others
