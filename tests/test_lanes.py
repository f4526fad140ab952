"""schedule.lanes: the same bytes on any number of processes, whatever stops a run between."""

import json
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from tests.conftest import Run, checkpoint, command, paced, records, run_as, started, step_images
from tests.matrix import slow
from vitctl.engine.trace import read_steps
from vitctl.errors import CheckpointError, RecipeError
from vitctl.verify.run_check import verify

# Everything that is random or adds up, an odd batch, leaves of unequal size; in float32, where the order of
# additions shows.
LANES: dict[str, Any] = {
    "machine.precision": "float32",
    "schedule.lanes": 8,
    "schedule.leaf_images": 2,
    "schedule.batch_size": 21,
    "schedule.total_steps": 8,
    "schedule.warmup_steps": 2,
    "model.dropout": 0.1,
    "model.drop_path": 0.3,
    "data.mixup_alpha": 0.5,
    "data.cutmix_alpha": 1.0,
    "data.randaugment_layers": 1,
    "data.randaugment_rules": "big_vision",
    "data.augment3": True,
    "data.color_jitter": [0.3, 0.3, 0.3, 0.1],
    "data.vertical_flip": True,
    "data.random_erasing": 0.5,
    "data.repeats": 3,
    "seed": 2,  # whose steps read the damaged image
    "data.max_bad_fraction": 0.5,
    "checkpoint.every_steps": 3,
    "evaluation.every_steps": 4,
}
SLOW = pytest.mark.slow


def metrics(folder: Path) -> dict[str, Any]:
    """The numbers of a finished run."""
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())["metrics"]
    return found


@pytest.fixture(scope="module")
def data(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny shards with a damaged image."""
    root = Path(shutil.copytree(tiny_data, tmp_path_factory.mktemp("lanes_data") / "tiny"))
    shard = min((root / "train").glob("*.tar"))
    found = shard.read_bytes()
    at = found.index(b"\x89PNG") if b"\x89PNG" in found else found.index(b"\xff\xd8\xff")
    shard.write_bytes(found[:at] + b"none" + found[at + 4 :])
    return root


@pytest.fixture(scope="module")
def one(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in one process."""
    folder = tmp_path_factory.mktemp("lanes") / "one"
    run_as(1, folder, data, **LANES)
    assert any(r["text"].startswith("images that could not be used: ") for r in records(folder, "warning"))
    return folder


@pytest.fixture(scope="module")
def three(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run in three processes."""
    folder = tmp_path_factory.mktemp("lanes") / "three"
    run_as(3, folder, data, **LANES)
    return folder


# Chains and random recipes below also have two processes.
@pytest.mark.parametrize(
    ("num_processes", "nodes"),
    [(3, 1), *(pytest.param(*given, marks=SLOW) for given in ((2, 1), (4, 2), (6, 3), (8, 1), (8, 4)))],
)
def test_lanes__any_number_of_processes_gives_the_same_bytes(
    one: Path, data: Path, tmp_path: Path, num_processes: int, nodes: int, request: pytest.FixtureRequest
) -> None:
    folder = tmp_path / "several"
    if num_processes == 3:
        folder = request.getfixturevalue("three")
    else:
        run_as(num_processes, folder, data, nodes, **LANES)
    assert checkpoint(folder, 8) == checkpoint(one, 8)
    assert set(checkpoint(one, 8)) == {"model.safetensors", "ema.safetensors", "optimizer.safetensors"}
    assert step_images(folder) == step_images(one)
    numbers = [(r["loss"], r["grad_norm"], r["num_bad"]) for r in records(one, "train")]
    assert numbers == [(r["loss"], r["grad_norm"], r["num_bad"]) for r in records(folder, "train")]
    assert metrics(folder) == metrics(one)


@pytest.mark.parametrize("change", [{"schedule.lanes": 4}, *slow({"schedule.leaf_images": 3})])
def test_lanes__what_is_in_the_recipe_decides(
    run: Run, one: Path, data: Path, change: dict[str, Any]
) -> None:
    """Otherwise the equality above would show nothing."""
    folder = run("other", **{**LANES, "data.path": str(data), **change})
    assert checkpoint(folder, 8)["model.safetensors"] != checkpoint(one, 8)["model.safetensors"]


@pytest.mark.parametrize(
    "change",
    [
        *slow({"machine.micro_batch": 1, "machine.checkpoint_blocks": True}),
        {
            "machine.micro_batch": -1,
            "machine.workers": 2,
            "checkpoint.background": False,
            "evaluation.every_steps": 0,
            "evaluation.batch_size": 3,
        },
    ],
    ids=str,
)
def test_lanes__nothing_of_the_machine_decides(
    run: Run, one: Path, data: Path, change: dict[str, Any]
) -> None:
    folder = run("other", **{**LANES, "data.path": str(data), **change})
    assert checkpoint(folder, 8) == checkpoint(one, 8)


CHAINS = [
    pytest.param(((2, signal.SIGTERM), (1, signal.SIGKILL), (3, None)), id="2, 1, 3"),
    pytest.param(
        ((4, signal.SIGTERM), (3, signal.SIGKILL), (1, signal.SIGTERM), (2, None)),
        id="4, 3, 1, 2",
        marks=SLOW,
    ),
    pytest.param(
        ((1, signal.SIGKILL), (8, signal.SIGTERM), (5, signal.SIGKILL), (6, None)),
        id="1, 8, 5, 6",
        marks=SLOW,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("chain", CHAINS)
def test_lanes__stopped_and_killed_it_goes_on_with_other_numbers_of_processes(
    one: Path, data: Path, tmp_path: Path, chain: tuple[tuple[int, signal.Signals | None], ...]
) -> None:
    folder, step = tmp_path / "moved", 0
    for number, (num_processes, end) in enumerate(chain):
        values = {**LANES, "machine.processes": num_processes}
        line, shown = command(folder, data, **values), tmp_path / f"{number}.txt"
        processes = started(line if end is None else paced(line), shown, num_processes)
        if end is not None:
            step += 2
            until = time.monotonic() + 120
            while (
                not (folder / "log.jsonl").exists()
                or f'"step": {step},' not in (folder / "log.jsonl").read_text()
            ):
                assert time.monotonic() < until and all(p.poll() is None for p in processes), (
                    shown.read_text()
                )
                time.sleep(0.005)
            for process in processes:
                process.send_signal(end)
        codes = {process.wait(timeout=240) for process in processes}
        assert codes == {{None: 0, signal.SIGTERM: 3, signal.SIGKILL: -9}[end]}, shown.read_text()
    assert checkpoint(folder, 8) == checkpoint(one, 8)
    assert step_images(folder) == step_images(one)
    assert records(folder, "resume")  # not every kill comes after a checkpoint


RECIPES = st.fixed_dictionaries(
    {
        "schedule.batch_size": st.integers(8, 24),
        "schedule.lanes": st.integers(3, 8),
        "schedule.leaf_images": st.integers(1, 4),
        "model.dropout": st.sampled_from([0.0, 0.2]),
        "model.drop_path": st.sampled_from([0.0, 0.5]),
        "data.mixup_alpha": st.sampled_from([0.0, 0.3]),
        "optimizer.name": st.sampled_from(["adam", "sgd"]),
        "optimizer.clip_norm": st.sampled_from([0.0, 0.1]),
        "averaging.decay": st.sampled_from([0.0, 0.9]),
        "machine.precision": st.sampled_from(["float32", "bf16", "float64"]),
        "machine.attention": st.sampled_from(["fused", "math", "auto"]),
        "loss.name": st.sampled_from(["sigmoid", "softmax", "masked_patch"]),
        "seed": st.integers(0, 2**32 - 1),
    }
)


def compared(root: Path, data: Path, values: dict[str, Any], num_processes: int) -> None:
    """A recipe of three steps in one process and in several."""
    values = {**values, "schedule.total_steps": 3, "schedule.warmup_steps": 1, "evaluation.every_steps": 0}
    values["data.max_bad_fraction"] = 0.5
    if 2 * values["schedule.lanes"] > values["schedule.batch_size"] or values["loss.name"] == "masked_patch":
        values["data.mixup_alpha"] = 0.0
    if values["loss.name"] == "masked_patch":
        values |= {"masked_patch.target": "mean_color", "model.pre_logits": False, "model.head_bias": 0.0}
    folders = [root / f"{count}_{random.getrandbits(64):x}" for count in (1, num_processes)]
    for count, folder in zip((1, num_processes), folders, strict=True):
        run_as(count, folder, data, **values)
    assert checkpoint(folders[0], 3) == checkpoint(folders[1], 3)
    assert step_images(folders[0]) == step_images(folders[1])


@pytest.mark.slow
@hypothesis.settings(max_examples=2, derandomize=True, phases=[hypothesis.Phase.generate])
@hypothesis.given(RECIPES, st.integers(2, 3))
def test_lanes__random_recipes(
    data: Path, tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any], num_processes: int
) -> None:
    compared(tmp_path_factory.mktemp("recipes"), data, values, num_processes)


@pytest.mark.slow
@hypothesis.settings(max_examples=40, phases=[hypothesis.Phase.generate])
@hypothesis.given(RECIPES, st.integers(2, 5))
def test_lanes__many_random_recipes(
    data: Path, tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any], num_processes: int
) -> None:
    hypothesis.assume(num_processes <= values["schedule.lanes"])
    compared(tmp_path_factory.mktemp("recipes"), data, values, num_processes)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"schedule.lanes": 22}, "schedule.lanes = 22 is more than schedule.batch_size = 21"),
        (
            {"schedule.lanes": 11},
            "MixUp and CutMix blend images of one lane, which needs two images; set 10 lanes or fewer",
        ),
        (
            {"machine.processes": 2, "machine.sharding": "fsdp"},
            "machine.sharding = 'none' or schedule.lanes = 0",
        ),
        (
            {"schedule.leaf_images": 32, "machine.processes": 9},
            "machine.processes = 9 is more than the leaves of the batch (8 lanes in 8 leaves",
        ),
    ],
)
def test_lanes__what_they_cannot_do_is_refused_before_the_start(
    run: Run, data: Path, values: dict[str, Any], said: str
) -> None:
    with pytest.raises(RecipeError) as refused:
        run("a", **{**LANES, "data.path": str(data), **values})
    assert said in str(refused.value)


@pytest.mark.slow
def test_lanes__a_run_of_three_processes_is_replayed_in_one(one: Path, three: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(three, tmp_path / "three"))
    steps, of_one = ([*read_steps(path).by_step.values()] for path in (folder, one))  # type: ignore[union-attr]
    assert len(steps) == 8
    assert steps == of_one
    found = {
        f"{finding.what}, {finding.state}": finding.text
        for _, finding in verify(folder, steps="all", scores=True)
    }
    assert found["replay, ok"] == "steps 1 to 8: equal, bit for bit"
    assert "the same integers" in found["score, ok"]
    assert not [what for what in found if "differs" in what]


def test_lanes__what_would_change_the_bits_is_refused_on_resume(
    run: Run, one: Path, data: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(one, tmp_path / "a"))
    shutil.rmtree(folder / "checkpoints" / "step_00000008")
    (folder / "result.json").unlink()
    values = {**LANES, "data.path": str(data)}
    with pytest.raises(CheckpointError) as refused:
        run("a", **values, **{"machine.attention": "fused"})
    assert "computed with attention math, now fused, which may change the last bits" in str(refused.value)
    assert str(refused.value).endswith("--allow computation")
    with pytest.raises(RecipeError, match=r"schedule\.threads was 1, now 2"):
        run("a", **values, **{"schedule.threads": 2})
    run("a", **values)
    assert checkpoint(folder, 8) == checkpoint(one, 8)


@pytest.mark.slow
def test_lanes__the_result_names_the_threads_of_the_training(run: Run, data: Path) -> None:
    """A process alone has as many threads as cores before and after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        folder = run(
            "a", **{**LANES, "data.path": str(data), "schedule.total_steps": 3, "schedule.threads": before}
        )
    finally:
        torch.set_num_threads(before)
    assert json.loads((folder / "result.json").read_text())["provenance"]["threads"] == before
    assert not [finding.text for _, finding in verify(folder) if finding.state == "differs"]
