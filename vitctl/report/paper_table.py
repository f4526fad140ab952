"""The paper's tables from the recipes: settings, the paper's result and ours, and the cost of each run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from vitctl.data.datasets.vtab import GROUPS
from vitctl.data.datasets.vtab import VTAB as TASKS
from vitctl.errors import RecipeError, refuse
from vitctl.jobs.plan import plan_training
from vitctl.models.flops import PEAK_TFLOPS, count_parameters
from vitctl.models.variants import ViTConfig, variant
from vitctl.recipe.load import load_recipe
from vitctl.recipe.paper import (
    AVERAGE,
    FIGURE_4_SIZES,
    FIVE,
    OTHERS,
    RESULTS,
    TABLE_1,
    TABLE_3,
    TABLE_4,
    TABLE_9,
    VTAB_MODELS,
)
from vitctl.recipe.schema import Finetune, Vtab
from vitctl.report.our_results import VTAB, OurResults, Ours, Pretraining, experiments_for, pretraining_recipe

SECONDS_PER_DAY = 86_400
SETTINGS = {
    "1": ("model", "layers", "width", "MLP", "heads", "paper", "parameters"),
    "3": ("recipe", "data", "epochs", "lr", "decay", "wd", "dropout", "GPU-days"),
    "4": ("recipe", "steps", "rates", "batch", "pixels"),
}


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU, and the share of its bf16 peak that training reaches (MFU)."""

    device: str
    mfu: float

    def days(self, flops: float) -> float:
        return flops / (self.mfu * PEAK_TFLOPS[self.device] * 1e12 * SECONDS_PER_DAY)


class Accuracy(NamedTuple):
    """A cell: the paper's accuracy in percent and its deviation, None if not printed, and our result."""

    paper: float | None
    deviation: float | None
    ours: Ours | None


class ResultRow(NamedTuple):
    """A pre-training recipe: accuracies, updates, and cost in 10^18 FLOPs and days of one GPU."""

    recipe: str
    accuracies: tuple[Accuracy, ...]
    steps: int
    exaflops: float
    gpu_days: float
    paper_exaflops: float | None
    paper_core_days: float | None


class TaskRow(NamedTuple):
    """A row of Table 9 or Fig. 2: a task, a group or the mean; `others` are Fig. 2's other networks."""

    name: str
    accuracies: tuple[Accuracy, ...]
    others: Mapping[str, float | None]


def find_gpu(device: str, mfu: float) -> Gpu:
    """Return a GPU by name. Raises RecipeError if it is unknown, or the share is outside 0..1."""
    known = {name.lower(): name for name in PEAK_TFLOPS}
    refuse(
        RecipeError,
        (device.lower() not in known, f"--device {device}", f"unknown; known: {', '.join(PEAK_TFLOPS)}"),
        (not 0 < mfu <= 1, f"--mfu {mfu:g}", "a share of the peak, above 0 and at most 1, e.g. 0.4"),
    )
    return Gpu(known[device.lower()], mfu)


def result_rows(number: str, targets: tuple[str, ...], ours: OurResults, gpu: Gpu) -> list[ResultRow]:
    """Return the rows of a table of `RESULTS`, with some of its columns."""
    table, rows = RESULTS[number], []
    for recipe in table.rows:
        plan = plan_training(pretraining_recipe(recipe))
        accuracies = tuple(
            Accuracy(table.value(recipe, t), table.deviation(recipe, t), _ours(number, recipe, t, ours))
            for t in targets
            if t in table.columns
        )
        rows.append(
            ResultRow(
                recipe,
                accuracies,
                plan.steps,
                exaflops=plan.training_flops / 1e18,
                gpu_days=gpu.days(plan.training_flops),
                paper_exaflops=RESULTS["6"].exaflops.get(recipe),
                paper_core_days=RESULTS["2"].core_days.get(recipe),
            )
        )
    return rows


def _ours(number: str, recipe: str, column: str, ours: OurResults) -> Ours | None:
    if column == AVERAGE:
        parts = [_ours(number, recipe, one, ours) for one in FIVE]
        means = [part.mean for part in parts if part is not None]
        return Ours((sum(means) / len(means),)) if len(means) == len(FIVE) else None
    pretraining = Pretraining(recipe, FIGURE_4_SIZES[column] if number == "fig4" else 0)
    return ours.best(pretraining, experiments_for(number, recipe, column))


def task_rows(number: str, ours: OurResults) -> list[TaskRow]:
    """Return the rows of Table 9 ("9") or Fig. 2 ("fig2"), whose numbers here are means over Table 9."""
    mean = {VTAB: list(TASKS)}
    parts = {task.name: [task] for task in TASKS} | mean
    if number == "fig2":
        parts = mean | {group: [task for task in TASKS if task.group == group] for group in GROUPS}
    rows = []
    for place, (name, tasks) in enumerate(parts.items()):
        experiment = VTAB if name == VTAB else f"{VTAB} {name}"
        accuracies = tuple(
            Accuracy(
                sum(TABLE_9[task.name][column] for task in tasks) / len(tasks),
                None,
                ours.best(Pretraining(recipe), (experiment,)),
            )
            for column, recipe in enumerate(VTAB_MODELS.values())
        )
        title = f"mean of {len(TASKS)} tasks" if name == VTAB else name
        others = {other: means[place] for other, means in OTHERS.items()} if number == "fig2" else {}
        rows.append(TaskRow(title, accuracies, others))
    return rows


def setting_rows(number: str, gpu: Gpu) -> list[tuple[str, ...]]:
    """Return the rows of Table 1, 3 or 4, from the models and the recipes: name, then `SETTINGS`."""
    if number == "1":
        return [_table_1(name) for name in TABLE_1]
    if number == "3":
        return [_table_3(name, gpu) for name in TABLE_3]
    return [_table_4(name) for name in TABLE_4]


def _table_1(name: str) -> tuple[str, ...]:
    config = variant(name, num_classes=1000)
    assert isinstance(config, ViTConfig)
    sizes = (config.depth, config.hidden_size, config.mlp_size, config.num_heads)
    return (name, *map(str, sizes), f"{TABLE_1[name]}M", f"{count_parameters(config):,}")


def _table_3(name: str, gpu: Gpu) -> tuple[str, ...]:
    recipe = pretraining_recipe(name)
    config = recipe.network(1000)
    dropout = f"{config.dropout:g}" if isinstance(config, ViTConfig) else "none"
    o, s = recipe.optimizer, recipe.schedule
    rates = (f"{s.total_epochs:g}", f"{o.lr:g}", s.decay, f"{o.weight_decay:g}")
    return (
        name,
        recipe.data.dataset,
        *rates,
        dropout,
        cost_text(gpu.days(plan_training(recipe).training_flops)),
    )


def _table_4(name: str) -> tuple[str, ...]:
    recipe = load_recipe(name).recipe
    assert isinstance(recipe, Finetune | Vtab)
    s, lr = recipe.schedule, recipe.optimizer.lr
    if isinstance(recipe, Finetune):
        steps, rates = f"{s.total_steps:,}", ", ".join(f"{one:g}" for one in recipe.sweep.lrs or (lr,))
    else:  # B.1.1 has two rates and two schedules; the recipe uses those that Table 4 prints
        tried = recipe.vtab.sweep_steps or (s.total_steps,)
        steps = ", ".join(f"{n:,}" + " (ours)" * (n != s.total_steps) for n in tried)
        rates = ", ".join(f"{one:g}" + " (ours)" * (one != lr) for one in recipe.vtab.sweep_lrs or (lr,))
    return (name, steps, rates, str(s.batch_size), str(recipe.data.image_size))


def cost_text(value: float | None) -> str:
    """Write a cost with three digits and no exponent."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
