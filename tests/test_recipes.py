"""Every shipped recipe, held against one transcription of the paper's tables."""

from typing import Any

import pytest

from vitctl.data.catalog import DATA_SETS
from vitctl.jobs.plan import make_plan
from vitctl.jobs.pretrain import model_config
from vitctl.models.flops import count_parameters
from vitctl.recipe.load import load_recipe, recipe_folder, recipe_names
from vitctl.recipe.schema import JOBS, Finetune, Pretrain, Vtab

JFT, IN21K, IN1K = "jft300m", "imagenet21k", "imagenet"

# Table 3: recipe -> (model, data set, epochs, base lr, decay, weight decay, dropout).
# All: batch 4096, warm-up 10k steps, 224 pixels.
TABLE_3 = {
    "jft_b16": ("B/16", JFT, 7, 8e-4, "linear", 0.1, 0.0),
    "jft_b32": ("B/32", JFT, 7, 8e-4, "linear", 0.1, 0.0),
    "jft_l32": ("L/32", JFT, 7, 6e-4, "linear", 0.1, 0.0),
    "jft_l16": ("L/16", JFT, 7, 4e-4, "linear", 0.1, 0.0),
    "jft_l16_14ep": ("L/16", JFT, 14, 4e-4, "linear", 0.1, 0.0),
    "jft_h14": ("H/14", JFT, 14, 3e-4, "linear", 0.1, 0.0),
    "in21k_b16": ("B/16", IN21K, 90, 1e-3, "linear", 0.03, 0.1),
    "in21k_b32": ("B/32", IN21K, 90, 1e-3, "linear", 0.03, 0.1),
    "in21k_l16": ("L/16", IN21K, 90, 1e-3, "linear", 0.03, 0.1),
    "in21k_l16_30ep": ("L/16", IN21K, 30, 1e-3, "linear", 0.03, 0.1),
    "in21k_l32": ("L/32", IN21K, 90, 1e-3, "linear", 0.03, 0.1),
    "in21k_l32_30ep": ("L/32", IN21K, 30, 1e-3, "linear", 0.03, 0.1),
    "in1k_b16": ("B/16", IN1K, 300, 3e-3, "cosine", 0.3, 0.1),
    "in1k_b32": ("B/32", IN1K, 300, 3e-3, "cosine", 0.3, 0.1),
    "in1k_l16": ("L/16", IN1K, 300, 3e-3, "cosine", 0.3, 0.1),
    "in1k_l32": ("L/32", IN1K, 300, 3e-3, "cosine", 0.3, 0.1),
}
# Table 4: recipe -> (data set, steps, grid of base lr). All: batch 512, cosine, clip at norm 1, 384 pixels.
TABLE_4: dict[str, tuple[str, int, tuple[float, ...]]] = {
    "finetune_imagenet": ("imagenet", 20_000, (0.003, 0.01, 0.03, 0.06)),
    "finetune_cifar100": ("cifar100", 10_000, (0.001, 0.003, 0.01, 0.03)),
    "finetune_cifar10": ("cifar10", 10_000, (0.001, 0.003, 0.01, 0.03)),
    "finetune_pets": ("pets", 500, (0.001, 0.003, 0.01, 0.03)),
    "finetune_flowers102": ("flowers102", 500, (0.001, 0.003, 0.01, 0.03)),
}
OWN = {"smoke", "quickstart", "quickstart_finetune", "vtab", "vtab_mini", "finetune", "fewshot", "evaluate", "export"}

# Exact parameters with the pre-training head, counted in the authors' code.
PARAMETERS = {
    ("B/16", JFT): 100_455_027,
    ("B/32", JFT): 102_111_603,
    ("L/16", JFT): 323_099_507,
    ("L/32", JFT): 325_308_275,
    ("H/14", JFT): 655_835_251,
    ("B/16", IN21K): 103_186_515,
    ("B/32", IN21K): 104_843_091,
    ("L/16", IN21K): 326_740_307,
    ("L/32", IN21K): 328_949_075,
}
WITHOUT_HEAD = {"B/16": 85_798_656, "B/32": 87_455_232, "L/16": 303_301_632, "L/32": 305_510_400}
WIDTH = {"B/16": 768, "B/32": 768, "L/16": 1024, "L/32": 1024}
# Table 6: exaFLOPs of pre-training, and the step counts that follow from Table 3.
EXAFLOPS = {"jft_b32": 55, "jft_b16": 224, "jft_l32": 196, "jft_l16": 783, "jft_l16_14ep": 1567, "jft_h14": 4262}
STEPS = {(JFT, 7): 517_822, (JFT, 14): 1_035_644, (IN21K, 90): 309_698, (IN21K, 30): 103_232, (IN1K, 300): 93_835}


def pretrain(name: str) -> Pretrain:
    recipe = load_recipe(name).recipe
    assert isinstance(recipe, Pretrain)
    return recipe


def finetune(name: str) -> Finetune:
    recipe = load_recipe(name).recipe
    assert isinstance(recipe, Finetune)
    return recipe


def test_recipes__all_load_and_say_what_they_are() -> None:
    files = sorted(recipe_folder().rglob("*"))
    assert [file.name for file in files] == [f"{name}.toml" for name in recipe_names()]
    assert len(files) >= 29
    recipes = [load_recipe(name).recipe for name in recipe_names()]
    assert all(len(recipe.note) > 20 for recipe in recipes)
    assert {recipe.job for recipe in recipes} == set(JOBS)


def test_recipes__every_row_of_tables_3_and_4_and_nothing_unknown() -> None:
    of_tables = {*TABLE_3, *TABLE_4}
    own = set(recipe_names()) - of_tables
    assert of_tables <= set(recipe_names())
    assert {name for name in own if name.startswith(("jft", "in21k", "in1k"))} == set()
    assert {"smoke", "vtab", "vtab_mini", "finetune", "fewshot", "evaluate", "export"} <= own
    of_appendix_b = {name for name in own if name.startswith("masked_patch_b16")}
    assert len(of_appendix_b) == 3
    for name in own - OWN - of_appendix_b:
        assert "Not the paper's" in load_recipe(name).recipe.note, name


@pytest.mark.parametrize("name", TABLE_3)
def test_table_3(name: str) -> None:
    r, (model, dataset, epochs, lr, decay, weight_decay, dropout) = pretrain(name), TABLE_3[name]
    assert (r.model.name, r.data.dataset, model_config(r, 10).dropout) == (model, dataset, dropout)
    assert (r.schedule.batch_size, r.schedule.total_epochs, r.schedule.total_steps) == (4096, epochs, 0)
    assert (r.schedule.warmup_steps, r.schedule.decay, r.data.image_size) == (10_000, decay, 224)
    assert (r.optimizer.name, r.optimizer.lr, r.optimizer.weight_decay) == ("adam", lr, weight_decay)
    assert (r.optimizer.beta1, r.optimizer.beta2, r.optimizer.eps) == (0.9, 0.999, 1e-8)


@pytest.mark.parametrize("name", TABLE_3)
def test_pretraining__what_the_authors_said_beyond_the_table(name: str) -> None:
    """Table 3 states the clip for the ImageNet rows; loss, head bias and the last rate are from the authors' issues."""
    r = pretrain(name)
    jft, small = r.data.dataset == JFT, r.data.dataset == IN1K
    assert r.optimizer.clip_norm == (0.0 if jft else 1.0)
    assert r.schedule.end_lr == (0.0 if small else 1e-5)
    assert (r.loss.name, r.loss.label_smoothing) == ("sigmoid", 1e-4 if small else 0.0)
    assert (r.model.head_bias, r.model.pre_logits, model_config(r, 10).classifier) == (-10.0, True, "token")
    assert (r.data.crop, r.data.flip, r.data.mean, r.data.std) == ("inception", True, (0.5,) * 3, (0.5,) * 3)
    if r.data.dataset == IN21K:
        assert (r.data.train_split, r.data.eval_split) == ("train[102400:]", "train[:102400]")


@pytest.mark.parametrize("name", TABLE_3)
def test_pretraining__the_plan_has_the_papers_numbers(name: str) -> None:
    r = pretrain(name)
    plan = make_plan(r)
    model, dataset, epochs = TABLE_3[name][:3]
    assert plan.steps == STEPS[dataset, epochs]
    assert plan.tokens == {"B/16": 197, "L/16": 197, "B/32": 50, "L/32": 50, "H/14": 257}[model]
    if dataset == IN1K:
        width = WIDTH[model]
        assert plan.parameters == WITHOUT_HEAD[model] + width * width + width + 1000 * width + 1000
    else:
        assert plan.parameters == PARAMETERS[model, dataset]
    assert plan.curve[0] == (0, 0.0)
    assert max(lr for _, lr in plan.curve) == r.optimizer.lr
    assert dict(plan.curve)[10_000] == r.optimizer.lr
    if name in EXAFLOPS:
        assert plan.training_flops / 1e18 == pytest.approx(EXAFLOPS[name], rel=0.025)


def test_every_pretraining_recipe__makes_a_plan() -> None:
    planned = [
        name
        for name in recipe_names()
        if isinstance(recipe := load_recipe(name).recipe, Pretrain) and make_plan(recipe)
    ]
    assert len(planned) >= len(TABLE_3) + 2


@pytest.mark.parametrize("name", TABLE_4)
def test_table_4(name: str) -> None:
    r, (dataset, steps, grid) = finetune(name), TABLE_4[name]
    assert (r.data.dataset, r.data.image_size) == (dataset, 384)
    assert (r.schedule.total_steps, r.schedule.batch_size, r.schedule.decay) == (steps, 512, "cosine")
    assert r.optimizer.lr in grid
    assert all(f"{lr:g}" in r.note for lr in grid)
    assert (r.optimizer.name, r.optimizer.momentum, r.optimizer.weight_decay) == ("sgd", 0.9, 0.0)
    assert (r.optimizer.clip_norm, r.loss.name, r.loss.label_smoothing) == (1.0, "softmax", 0.0)
    assert r.schedule.warmup_steps == (100 if steps == 500 else 500)
    assert (r.data.crop, r.data.flip, r.data.eval_method) == ("inception", True, "square")
    assert r.data.eval_split in DATA_SETS[dataset].sizes


def test_table_4__vtab() -> None:
    r = load_recipe("vtab").recipe
    assert isinstance(r, Vtab)
    assert (r.schedule.total_steps, r.schedule.batch_size, r.schedule.decay, r.optimizer.lr) == (
        2500,
        512,
        "cosine",
        0.01,
    )
    assert (r.optimizer.name, r.optimizer.momentum, r.optimizer.weight_decay) == ("sgd", 0.9, 0.0)
    assert (r.optimizer.clip_norm, r.data.image_size, r.vtab.suite, r.vtab.tasks) == (1.0, 384, "vtab", ())
    assert r.vtab.seeds == (0, 1, 2)


def test_fewshot__the_constants_of_the_authors_evaluator() -> None:
    r: Any = load_recipe("fewshot").recipe
    assert (r.fewshot.l2, r.fewshot.shots, r.fewshot.seeds) == (2.0**10, (1, 5, 10, 25), (0, 1, 2))


def test_parameters__with_and_without_the_hidden_layer_of_the_head() -> None:
    for name, width in (("jft_b16", 768), ("jft_h14", 1280)):
        r = pretrain(name)
        plain = r.model_copy(update={"model": r.model.model_copy(update={"pre_logits": False})})
        counts = [count_parameters(model_config(recipe, 18_291)) for recipe in (r, plain)]
        assert counts[0] - counts[1] == width * width + width


def test_citations__every_value_of_the_papers_recipes_says_where_it_is_from() -> None:
    """A value in a file of the paper's rows carries a comment, apart from what names things."""
    free = (
        "job",
        "note",
        "extends",
        "name",
        "dataset",
        "every_steps",
        "eval_split",
        "eval_method",
        "eval_resize",
        "end_lr = 0.0",
    )
    seen = 0
    for name in (*TABLE_3, *TABLE_4, "vtab"):
        for line in (recipe_folder() / f"{name}.toml").read_text().splitlines():
            if "=" in line and not line.startswith(free):
                seen += 1
                assert "#" in line or line.startswith("keep_last"), f"{name}: {line}"
    assert seen > 40
