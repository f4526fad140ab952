"""A key of a recipe that is set does something, or is refused."""

import json
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from tests.conftest import TINY, records
from tests.trained import CPU, do
from vitctl.errors import RecipeError, VitctlError
from vitctl.jobs.inputs.checks import check_choices
from vitctl.recipe.load import Override, every_key, load_recipe, recipe_names, takes
from vitctl.recipe.neutral_keys import RESULT_NEUTRAL, idle_keys
from vitctl.recipe.schema import JOBS

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


@pytest.mark.parametrize("name", recipe_names())
def test_idle__no_shipped_recipe_has_one(name: str) -> None:
    assert idle_keys(load_recipe(name).recipe) == {}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"evaluation.select_best": True}, "set checkpoint.keep_best = 1"),
        ({"checkpoint.keep_best": 1}, "set evaluation.every_steps"),
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


# What it changes depends on the data or on the machine, not on other keys; or it is text.
OF_DATA = {
    "data.exif_orientation", "data.truncated", "data.max_bad_fraction", "data.decode", "loss.class_weights",
    "data.order", "data.eval_method",
}  # fmt: skip
SMALL = {"schedule.batch_size": 8, "schedule.total_steps": 3, "schedule.warmup_steps": 1}
NUMBERS = (0.25, 3, 1, 0.75, 20, 100)


def others(key: str, job: str) -> list[Any]:
    """Values other than the default, by type; none for text and tables."""
    schema: Any = JOBS[job]
    for part in key.split(".")[:-1]:
        schema = schema.model_fields[part].annotation
    field = schema.model_fields[key.rpartition(".")[2]]
    default, words = field.default, [field.annotation, *get_args(field.annotation)]
    chosen = [w for one in words if get_origin(one) is Literal for w in get_args(one)]
    if isinstance(default, bool):
        return [not default]
    if chosen or not isinstance(default, int | float):
        return [word for word in chosen if word != default]
    return [n for n in NUMBERS if n != default and takes(key, str(n))][:1]


@pytest.mark.slow
@pytest.mark.parametrize("job", ["pretrain", "finetune"])
def test_every_key__changes_a_number_or_is_refused(
    job: str, tiny_data: Path, pretrained: Path, tmp_path: Path
) -> None:
    base: dict[str, Any] = {**CPU, "data.path": str(tiny_data), "evaluation.every_steps": 2, **SMALL}
    base |= {"weights.source": str(pretrained)} if job == "finetune" else {}

    def picture(name: str, **values: Any) -> str:
        folder = tmp_path / name.replace(" ", "")
        result = do(TINY if job == "pretrain" else job, folder, **base | values)
        steps = [(r["loss"], r["lr"]) for r in records(folder, "train")]
        scores = [
            {k: v for k, v in r.items() if k not in ("seconds", "time")} for r in records(folder, "evaluate")
        ]
        return json.dumps(
            [result["metrics"], result["provenance"]["weights_sha256"], steps, scores], default=str
        )

    base |= {"log.every_steps": 1}
    plain, silent = picture("plain"), []
    assert picture("again") == plain
    for key in every_key(JOBS[job]):
        if key in base or key in OF_DATA or key.startswith((*RESULT_NEUTRAL, "machine.", "log.")):
            continue
        for value in others(key, job):
            try:
                load_recipe(TINY if job == "pretrain" else job, [Override(key, value)])
                changed = picture(f"{key}={value}", **{key: value}) != plain
            except VitctlError:
                continue
            if not changed:
                silent.append(f"{key} = {value}")
    assert silent == []
