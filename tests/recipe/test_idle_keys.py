"""A key of a recipe that is set does something, or is refused."""

import shlex
from typing import Any

import pytest

from tests.matrix import each
from vitctl.errors import RecipeError
from vitctl.jobs.inputs.checks import check_choices
from vitctl.recipe.load import Override, load_recipe, parse_override, recipe_names
from vitctl.recipe.neutral_keys import idle_keys

IDLE = {
    "schedule.leaf_images": ("finetune", 8, {"schedule.lanes": 4}),
    "schedule.threads": ("finetune", 2, {"schedule.lanes": 4}),
    "schedule.end_lr": ("finetune", 1e-5, {"schedule.decay": "linear"}),
    "data.train_resize": ("pretrain", 256, {"data.crop": "random"}),
    "data.subset_seed": ("finetune", 1, {"data.subset_fraction": 0.5}),
    "probe.momentum": ("probe", 0.8, {"probe.method": "linear"}),
    "probe.k": ("probe", [7], {"probe.method": "knn"}),
}
SHIPPED = {"pretrain": "in1k_b16", "finetune": "finetune", "probe": "probe"}


@pytest.mark.parametrize("key", IDLE)
def test_idle__refused_alone_but_not_with_what_it_belongs_to_nor_in_an_earlier_run(key: str) -> None:
    job, value, needs = IDLE[key]
    off = {"schedule.end_lr": ("schedule.decay", "constant"), "probe.k": ("probe.method", "logistic")}
    loaded = load_recipe(SHIPPED[job], [(key, value), *([off[key]] if key in off else [])])
    with pytest.raises(RecipeError, match=f"{key} does nothing") as caught:
        check_choices(loaded)
    assert f"--set {key}=" in str(caught.value.fix)
    check_choices(loaded, loaded.recipe)
    check_choices(load_recipe(SHIPPED[job], [(key, value), *needs.items()]))


@each("name", recipe_names())
def test_idle__no_shipped_recipe_has_one(name: str) -> None:
    assert idle_keys(load_recipe(name).recipe) == {}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"checkpoint.keep_best": 1}, "add --set evaluation.every_steps="),
        ({"data.erasing_mode": "rand"}, "set data.random_erasing"),
        ({"data.mixup_off_epoch": 1.0, "data.mixup_probability": 0.5}, "set data.mixup_alpha"),
        ({"data.cutmix_share": 0.1, "data.mixup_alpha": 0.1}, "data.mixup_alpha and data.cutmix_alpha"),
        ({"finetune.head_std": 0.1}, "finetune.head = 'random'"),
        ({"finetune.fresh_norm": True, "finetune.head": "as_stored"}, "finetune.head = 'zero'"),
    ],
)
def test_idle__is_refused_with_what_it_belongs_to(values: dict[str, Any], said: str) -> None:
    """By a run and its dry run alike."""
    with pytest.raises(RecipeError) as caught:
        check_choices(load_recipe("finetune", [*values.items()]))
    assert said in str(caught.value)


@pytest.mark.parametrize("job", ["finetune", "in1k_b16", "jft_b16"])
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"evaluation.every_steps": 5},
        {"checkpoint.keep_best": 1, "evaluation.every_steps": 0},
        {"data.eval_split": "", "checkpoint.every_steps": 0},
    ],
)
def test_select_best__is_refused_once_with_a_line_that_works(job: str, values: dict[str, Any]) -> None:
    given = [Override(*one) for one in {"data.eval_split": "validation", **values}.items()]
    given.append(Override("evaluation.select_best", True))
    with pytest.raises(RecipeError) as caught:
        check_choices(load_recipe(job, given))
    assert caught.value.where == "evaluation.select_best" and caught.value.fix.startswith("add --set ")
    typed = shlex.split(caught.value.fix.removeprefix("add "))
    check_choices(load_recipe(job, [*given, *map(parse_override, typed[1::2])]))
