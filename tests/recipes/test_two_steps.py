"""Every recipe that trains: its network at its real shape on the meta device, and two steps of it shrunk on
noise.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.matrix import few
from tests.trained import do
from vitctl.jobs.plan import plan_training
from vitctl.models.build import build
from vitctl.models.variants import Config, MaskedPatchConfig
from vitctl.recipe.load import Override, load_recipe, recipe_names
from vitctl.recipe.schema import Finetune, Pretrain

RECIPES = {name: load_recipe(name).recipe for name in recipe_names()}
PRETRAIN = {name: recipe for name, recipe in RECIPES.items() if isinstance(recipe, Pretrain)}
FINETUNE = {name: recipe for name, recipe in RECIPES.items() if isinstance(recipe, Finetune)}
QUICK = (
    "jft_b16",
    "jft_r50x1",
    "jft_r50_l16",
    "d1_r50x1_sgd",
    "d4_relative",
    "d6_axial_b16",
    "masked_patch_b16_pixels",
)

TRAINED: dict[str, Any] = {
    "data.synthetic": 12,
    "data.repeats": 1,
    "data.dataset": "digits",
    "data.root": "nowhere",
    "data.train_split": "train",
    "data.crop": "none",
    "data.train_resize": 0,
    "data.eval_resize": 0,
    "data.image_size": 32,
    "schedule.batch_size": 4,
    "schedule.total_steps": 2,
    "schedule.total_epochs": 0.0,
    "schedule.warmup_steps": 1,
    "schedule.warmup_epochs": 0.0,
    "schedule.warmup_lr": 0.0,
    "evaluation.every_steps": 0,
    "evaluation.select_best": False,
    "checkpoint.every_steps": 0,
    "checkpoint.keep_best": 0,
    "log.every_steps": 1,
    "machine.workers": 0,
    "machine.device": "cpu",
    "machine.precision": "float32",
}
SMALL_VIT = {"model.depth": 2, "model.hidden_size": 24, "model.mlp_size": 32, "model.num_heads": 2}
SMALL_RESNET = {"model.stage_depths": [1, 1], "model.width": 16, "model.num_groups": 4}


def some_slow(*quick: str) -> list[Any]:
    """Every pre-training recipe, all but a few of them marked slow."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in PRETRAIN]


@cache
def on_meta(config: Config) -> tuple[int, tuple[int, ...] | None]:
    """Parameters of a network, and the shape of its logits of two images; None where it has no classes."""
    model = build(config, device="meta")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if isinstance(config, MaskedPatchConfig):
        return parameters, None
    return parameters, tuple(
        model(torch.empty(2, 3, config.image_size, config.image_size, device="meta")).shape
    )


def shrunk(recipe: Pretrain) -> dict[str, Any]:
    """What makes a network tiny and leaves its family and everything else as the recipe has it."""
    small: dict[str, Any] = (
        {} if recipe.model.name[0] in "Rr" or "AxialR" in recipe.model.name else dict(SMALL_VIT)
    )
    if "R" in recipe.model.name:
        small |= SMALL_RESNET
    if "+" in recipe.model.name:
        small |= SMALL_VIT
    elif small.keys() == SMALL_VIT.keys():
        small["model.patch_size"] = 8
    return small


@pytest.mark.parametrize("name", some_slow(*QUICK))
def test_recipe__at_its_real_shape(name: str) -> None:
    recipe = PRETRAIN[name]
    plan = plan_training(recipe)
    parameters, shape = on_meta(plan.config)
    assert parameters == plan.parameters
    assert shape == (None if recipe.loss.name == "masked_patch" else (2, plan.num_classes))


@pytest.mark.parametrize("name", some_slow(*QUICK))
def test_recipe__takes_two_steps(name: str, tmp_path: Path) -> None:
    recipe = PRETRAIN[name]
    result = do(name, tmp_path / "run", **TRAINED, **shrunk(recipe))
    losses = [record for record in log(tmp_path / "run") if record["kind"] == "train"]
    assert [record["step"] for record in losses] == [1, 2]
    assert all(torch.isfinite(torch.tensor(record["loss"])) for record in losses)
    drop = 0.1 if recipe.schedule.decay == "steps" else 1.0  # the first lies after a quarter of the two steps
    assert [record["lr"] for record in losses] == pytest.approx([0.0, drop * recipe.optimizer.lr], rel=1e-6)
    assert result["status"] == "done"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny ViT of 32 pixels after two steps."""
    folder = tmp_path_factory.mktemp("weights") / "run"
    do("jft_b16", folder, **TRAINED, **shrunk(PRETRAIN["jft_b16"]))
    return folder


@pytest.mark.parametrize("name", few([*FINETUNE], *[*FINETUNE][::4]))
def test_finetune_recipe__takes_two_steps(name: str, tmp_path: Path, weights: Path) -> None:
    do(
        name,
        tmp_path / "run",
        **TRAINED,
        **{"sweep.lrs": [], "finetune.seeds": [], "weights.source": str(weights)},
    )
    losses = [record["loss"] for record in log(tmp_path / "run") if record["kind"] == "train"]
    assert len(losses) == 2
    assert all(torch.isfinite(torch.tensor(losses)))


def test_recipes__that_train_were_all_found() -> None:
    assert len(PRETRAIN) >= 58
    assert len(FINETUNE) >= 7
    assert set(QUICK) <= set(PRETRAIN)
    families = {type(PRETRAIN[name].network(10)).__name__ for name in QUICK}
    assert families == {"ViTConfig", "ResNetConfig", "HybridConfig", "AxialConfig", "MaskedPatchConfig"}


def test_shrunk__leaves_the_family_alone() -> None:
    for name, recipe in PRETRAIN.items():
        values = [Override(key, value) for key, value in {**TRAINED, **shrunk(recipe)}.items()]
        small = load_recipe(name, values).recipe
        assert isinstance(small, Pretrain)
        assert type(small.network(10)) is type(recipe.network(10)), name


def log(folder: Path) -> list[dict[str, Any]]:
    """The records of a run."""
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
