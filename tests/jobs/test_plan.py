"""What a run will cost, without data; and what is refused before the first process."""

import math
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY
from tests.models.weights.conftest import hollow
from vitctl.data.datasets.catalog import open_split
from vitctl.errors import CheckpointError, DataError, LaunchError, RecipeError, VitctlError
from vitctl.jobs.inputs.checks import check_recipe, fit_to_data
from vitctl.jobs.plan import call_with_timeout, plan_training
from vitctl.launch.prepare_run import prepare_run
from vitctl.models.flops import block_parameters
from vitctl.recipe.load import Override, load_recipe, parse_override


def recipe(name: str | Path, **values: Any) -> Any:
    return load_recipe(str(name), [Override(key, value) for key, value in values.items()]).recipe


def test_plan_training__of_data_that_is_there_counts_it(tiny_data: Path) -> None:
    plan = plan_training(recipe(TINY, **{"data.path": str(tiny_data)}))
    assert (plan.num_images, plan.num_classes, plan.steps) == (70, 6, 20)
    assert plan.epochs == 20 * 16 / 70
    assert plan.checkpoint_bytes == 8 * plan.parameters * 4  # in float64, as the recipe computes
    assert plan.curve[-1][0] == 19


def test_plan_training__of_a_known_set_needs_nothing_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = plan_training(recipe("jft_h14"))
    assert (plan.parameters, plan.num_images) == (655_835_251, 303_000_000)
    assert plan.data == "jft300m, published size; the data was not read"
    assert 0 < plan.fitting_micro_batch < 4096
    assert list(tmp_path.iterdir()) == []


def test_plan_training__several_processes_share_the_batch() -> None:
    plan = plan_training(recipe("jft_b16", **{"machine.processes": 3, "machine.micro_batch": 64}))
    assert plan.micro_batch == 64
    assert plan_training(recipe("jft_b16", **{"machine.processes": 3})).micro_batch == 1366


def test_plan_training__a_warmup_in_epochs_peaks_where_it_ends(tiny_data: Path) -> None:
    """Seventy images in batches of 16: two epochs are 8 steps."""
    values = {"data.path": str(tiny_data), "schedule.warmup_steps": 0, "schedule.warmup_epochs": 2.0}
    rates = {"schedule.warmup_lr": 1e-6, "schedule.end_lr": 1e-5, "schedule.decay": "cosine"}
    planned = recipe(TINY, **values, **rates)
    lr, curve = planned.optimizer.lr, dict(plan_training(planned).curve)
    assert (curve[0], curve[8], max(curve.values())) == (1e-6, lr, lr)
    assert curve[19] == pytest.approx(1e-5 + (lr - 1e-5) * 0.5 * (1 + math.cos(math.pi * 11 / 12)))


def test_plan_training__synthetic() -> None:
    plan = plan_training(recipe("jft_b16", **{"data.synthetic": 4096 * 20_000}))
    assert (plan.num_classes, plan.steps) == (18_291, 140_000)


def test_plan_training__finetune_takes_the_architecture_of_the_weights(pretrained: Path) -> None:
    plan = plan_training(recipe("finetune_pets", **{"weights.source": str(pretrained)}))
    assert (plan.num_images, plan.num_classes, plan.config.depth) == (3_680, 37, 2)
    assert (plan.config.image_size, plan.config.representation_size) == (384, 0)
    assert plan.curve[0] == (0, 0.0)
    with pytest.raises(CheckpointError, match="not a B/16, it has patch_size 4 instead of 16"):
        plan_training(recipe("finetune_pets", **{"weights.source": str(pretrained), "weights.model": "B/16"}))


def test_plan_training__finetune_counts_its_sweep_and_seeds(pretrained: Path) -> None:
    values = {"weights.source": str(pretrained), "sweep.lrs": (0.1, 0.2, 0.3), "finetune.seeds": (0, 1)}
    assert plan_training(recipe("finetune_pets", **values)).trainings == 5
    assert plan_training(recipe("finetune_pets", **(values | {"sweep.lrs": ()}))).trainings == 2
    assert plan_training(recipe("jft_b16")).trainings == 1


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model.name": "B16"}, "unknown model 'B16'"),
        ({"model.num_heads": 5}, "hidden_size 24 is not a multiple of num_heads 5"),
        ({"model.name": "Ti/32"}, "patch_size 32 is larger than image_size 16"),
        (
            {"checkpoint.keep_best": 1, "evaluation.every_steps": 0},
            "checkpoint.keep_best: there are no scores",
        ),
        (
            {"schedule.total_steps": 0, "schedule.total_epochs": 1.0},
            "4 steps (1 epochs of 70 images in batches of 16) end within",
        ),
        ({"data.eval_split": "tset"}, "has no split 'tset'"),
    ],
)
def test_check__refuses_in_one_line(
    tiny_data: Path, tmp_path: Path, values: dict[str, Any], said: str
) -> None:
    given = {"data.path": str(tiny_data), **values}
    with pytest.raises(VitctlError) as caught:
        prepare_run(load_recipe(str(TINY), [*given.items()]), tmp_path / "run")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


WITHOUT_TORCH = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "accelerate", "safetensors"):
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Blocked())
import vitctl.models.flops
from vitctl.errors import RecipeError
from vitctl.jobs.plan import plan_training
from vitctl.recipe.load import Override, load_recipe
print(plan_training(load_recipe("jft_h14").recipe).parameters)
from_run = [Override("weights.source", sys.argv[1]), Override("data.path", sys.argv[2])]
print(plan_training(load_recipe("finetune", from_run).recipe).steps)
"""


@pytest.mark.slow
def test_plan_training__needs_no_torch(pretrained: Path, tiny_data: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, str(pretrained), str(tiny_data)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stderr, done.stdout.split()) == ("", ["655835251", "200"])


@pytest.mark.parametrize("name", ["finetune", "fewshot", "evaluate", "export"])
def test_check__reads_no_tensor(
    name: str, pretrained: Path, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of the tensors are missing: each file has its header and its size, and a hole."""
    run = tmp_path / "run"
    shutil.copytree(pretrained, run)
    for path in run.glob("checkpoints/*/*.safetensors"):
        hollow(path)
    monkeypatch.setattr("vitctl.models.weights.weights_file.read_tensors", None)
    data: dict[str, Any] = {} if name == "export" else {"data.path": str(tiny_data)}
    data |= {"fewshot.shots": (1,)} if name == "fewshot" else {}
    loaded = load_recipe(name, [Override(k, v) for k, v in {"weights.source": str(run), **data}.items()])
    check_recipe(fit_to_data(loaded, tmp_path / "x")[0].recipe, tmp_path / "x")


@pytest.mark.parametrize(
    ("name", "values", "device", "gib"),
    [
        ("jft_h14", {}, "H100", 79.1),
        ("jft_h14", {"machine.processes": 8}, "H200", 139.7),
        ("in1k_b16", {"machine.precision": "float32"}, "L4", 22.0),
        ("in1k_b16", {"machine.precision": "float32"}, "H100", 79.1),  # three processes would do
        ("jft_h14", {"model.depth": 640}, "A100", 79.1),  # 13 billion parameters: no GPU holds them and Adam
    ],
)
def test_plan_training__what_does_not_fit_is_told_what_to_set(
    name: str, values: dict[str, Any], device: str, gib: float
) -> None:
    """Each way is typed, and the plan of it fits with the memory that was told."""
    plan, room = plan_training(recipe(name, **values), device=device), 0.9 * gib * 2**30
    assert plan.memory_bytes > room
    assert plan.ways
    for way, memory in plan.ways:
        words = way.replace("--processes ", "--set machine.processes=").replace("--set ", "").split()
        overrides = values | dict(parse_override(word)[:2] for word in words)
        assert not 4096 % overrides.get("machine.processes", 1)
        other = plan_training(recipe(name, **overrides), device=device)
        assert other.memory_bytes == memory <= room
        assert other.ways == ()


def test_plan_training__of_another_gpu() -> None:
    """Its memory decides what fits, its peak the seconds."""
    plans = {device: plan_training(recipe("in1k_b16"), device=device) for device in ("A100", "H100", "H200")}
    assert plan_training(recipe("in1k_b16")) == plans["H100"]
    fixed = plans["H100"].memory_bytes - plans["H100"].memory["activations"]
    image = plans["H100"].memory["activations"] / 4096
    for device, gib in (("A100", 79.1), ("H200", 139.7)):
        assert plans[device].fitting_micro_batch == plans[device].largest_batch
        assert plans[device].largest_batch == int((0.9 * gib * 2**30 - fixed) / image)
    slow, fast = (
        plan_training(recipe("in1k_b16", **{"machine.precision": "tf32"}), device=device).step_seconds
        for device in ("A100", "H100")
    )
    assert slow / fast == pytest.approx(494.5 / 156)  # data sheets
    small = plan_training(recipe("in1k_b16", **{"machine.processes": 64}), device="H200")
    assert small.fitting_micro_batch == 64 < small.largest_batch == plans["H200"].largest_batch


def test_plan_training__the_rate_is_that_of_the_command() -> None:
    """Not compiled, each element-wise operation reads and writes memory. A V100 has no bf16."""
    plain, compiled = (
        plan_training(recipe("in1k_b16", **{"machine.compile": value})).expected for value in (False, True)
    )
    assert not isinstance(plain, str) and not isinstance(compiled, str)
    assert plain.images_per_second < compiled.images_per_second
    assert plain.seconds["matrices"] == compiled.seconds["matrices"]
    for precision, lacks in (("auto", "bf16"), ("tf32", "tf32")):
        with pytest.raises(RecipeError, match=f"V100 has no {lacks}"):
            plan_training(recipe("in1k_b16", **{"machine.precision": precision}), device="V100")
    slow = plan_training(recipe("in1k_b16", **{"machine.precision": "float32"}), device="V100")
    assert isinstance(slow.expected, str)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_plan_training__copies_of_weights_in_bf16_are_cut_where_they_are_gathered_in_bf16(
    checkpointed: bool,
) -> None:
    """H/14 has 32 blocks of 12 x 1280^2 weights that autocast converts, which keeps 2 bytes of each in every
    process.
    """
    values = {"machine.processes": 64, "machine.sharding": "fsdp", "machine.checkpoint_blocks": checkpointed}
    plain, gathered = (
        plan_training(recipe("jft_h14", **values, **{"machine.sharding_dtype": dtype}))
        for dtype in ("float32", "bf16")
    )
    copies = [one.memory["bf16 copies"] for one in (plain, gathered)]
    assert copies[0] - copies[1] == (1 if checkpointed else 32) * 12 * 1280**2 * 2
    whole = plan_training(recipe("jft_h14", **{**values, "machine.sharding": "none"}))
    assert whole.memory["bf16 copies"] == copies[0]
    # Two blocks are gathered at a time.
    assert plain.memory["buffers"] - gathered.memory["buffers"] == 2 * 2 * max(block_parameters(plain.config))


def test_within__says_why_there_is_nothing() -> None:
    never = threading.Event()
    assert call_with_timeout(0.2, never.wait) == "no answer within 0.2 s"
    never.set()
    assert call_with_timeout(60, lambda: 7) == 7

    def refuse() -> int:
        raise DataError("no such server")

    assert call_with_timeout(5, refuse) == "no such server"


def test_plan_training__archives_of_a_known_set_are_not_taken_for_shards(tmp_path: Path) -> None:
    """ImageNet's own lie there as train/n01440764.tar.

    They were not given with --data, and are not indexed.
    """
    (tmp_path / "imagenet/train").mkdir(parents=True)
    (tmp_path / "imagenet/train/n01440764.tar").write_bytes(bytes(10_240))
    plan = plan_training(recipe("in1k_b16", **{"data.root": str(tmp_path)}))
    assert plan.data == "imagenet, published size; the data was not read"
    with pytest.raises(DataError, match="expected shards with split 'train'"):
        open_split("train", dataset="imagenet", root=str(tmp_path))


def test_plan_training__replicas_that_the_processes_cannot_hold() -> None:
    values = {"machine.sharding": "fsdp", "machine.sharding_replicas": 3, "machine.processes": 2}
    with pytest.raises(LaunchError, match="2 processes cannot hold so many copies"):
        plan_training(recipe("smoke", **values))


def test_plan_training__adapters_are_all_that_is_trained(tiny_data: Path, pretrained: Path) -> None:
    given = {"data.path": str(tiny_data), "weights.source": str(pretrained)}
    whole = plan_training(recipe("finetune", **given))
    given |= {"lora.rank": 3, "lora.targets": ("q", "fc1"), "lora.blocks": (1,)}
    some = plan_training(recipe("finetune", **given))
    assert some.trained_parameters == 3 * (24 + 24 + 24 + 48) + 24 * 6 + 6
    assert some.parameters == whole.parameters == whole.trained_parameters
    assert some.memory_bytes < whole.memory_bytes
    assert whole.training_flops / 3 < some.training_flops < whole.training_flops * 2 / 3
