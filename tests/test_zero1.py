"""zero1: each process updates its rows, with the bits of DDP, and any number of processes resumes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import run_as, stored, train_records
from vitctl.errors import RecipeError
from vitctl.recipe.load import Override, load_recipe

VALUES = {"schedule.total_steps": 6, "checkpoint.every_steps": 3, "evaluation.every_steps": 0}
ZERO1 = {**VALUES, "machine.sharding": "zero1"}


def same(one: Path, other: Path) -> None:
    """Weights, averages and optimizer state have the same bits."""
    first, second = stored(one, 6), stored(other, 6)
    assert first.keys() == second.keys() == {"model", "ema", "optimizer"}
    for name, tensors in first.items():
        assert tensors.keys() == second[name].keys()
        for key, tensor in tensors.items():
            assert torch.equal(tensor, second[name][key]), f"{name} {key}"


@pytest.mark.parametrize(
    ("processes", "more"),
    [
        (2, {"optimizer.name": "adam"}),
        pytest.param(4, {"optimizer.name": "adam"}, marks=pytest.mark.slow),
        pytest.param(
            2,
            {"optimizer.name": "sgd", "optimizer.momentum": 0.9, "machine.micro_batch": 3},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            2,
            {"machine.precision": "float32", "schedule.lanes": 4, "schedule.leaf_images": 2},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_zero1__has_the_bits_of_ddp(
    processes: int, more: dict[str, Any], tiny_data: Path, tmp_path: Path
) -> None:
    run_as(processes, tmp_path / "ddp", tiny_data, **VALUES, **more)
    run_as(processes, tmp_path / "zero1", tiny_data, **ZERO1, **more)
    same(tmp_path / "ddp", tmp_path / "zero1")
    parts = sorted((tmp_path / "zero1" / "checkpoints" / "step_00000006").glob("optimizer-*"))
    assert len(parts) == processes
    sizes = [part.stat().st_size for part in parts]
    assert max(sizes) < 2 * min(sizes)
    ddp, zero1 = (
        [(record["step"], record["loss"], record["grad_norm"]) for record in train_records(tmp_path / name)]
        for name in ("ddp", "zero1")
    )
    assert ddp == zero1


@pytest.mark.slow
def test_zero1__saved_on_four_goes_on_with_any_number(tiny_data: Path, tmp_path: Path) -> None:
    """As an unsharded run that goes on from the same step does, bit for bit."""
    run_as(4, tmp_path / "four", tiny_data, **ZERO1)
    run_as(4, tmp_path / "ddp", tiny_data, **VALUES)
    for processes, kind in ((4, "zero1"), (2, "zero1"), (1, "none")):
        resumed = []
        for source, sharding in (("four", kind), ("ddp", "none")):
            folder = shutil.copytree(tmp_path / source, tmp_path / f"{source}_{processes}")
            shutil.rmtree(folder / "checkpoints" / "step_00000006")
            (folder / "result.json").unlink()
            run_as(processes, folder, tiny_data, **{**VALUES, "machine.sharding": sharding})
            log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
            assert [record["step"] for record in log if record["kind"] == "resume"] == [3]
            resumed.append(folder)
        same(*resumed)


def test_hsdp__needs_a_number_of_copies() -> None:
    with pytest.raises(RecipeError, match="sharding = 'hsdp' needs sharding_replicas"):
        load_recipe("smoke", [Override("machine.sharding", "hsdp")])


def test_zero1__is_not_for_lamb() -> None:
    values = [Override("machine.sharding", "zero1"), Override("optimizer.name", "lamb")]
    with pytest.raises(RecipeError, match="'zero1' would round the norms of lamb otherwise"):
        load_recipe("smoke", values)
