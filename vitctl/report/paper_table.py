"""The paper's tables from the recipes: their settings, the paper's result and ours, and what each run would
cost.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from vitctl.data.datasets.vtab import GROUPS
from vitctl.data.datasets.vtab import VTAB as TASKS
from vitctl.errors import RecipeError
from vitctl.jobs.inputs.network import model_config
from vitctl.jobs.plan import plan_training
from vitctl.models.configs import ViTConfig
from vitctl.models.flops import count_parameters
from vitctl.models.hardware import PEAK_TFLOPS
from vitctl.models.variants import variant
from vitctl.recipe.load import load_recipe
from vitctl.recipe.paper import AVERAGE, FIGURE_4_SIZES, FIVE, RESULTS, TABLE_1, TABLE_3, TABLE_4
from vitctl.recipe.paper_vtab import COLUMNS, OTHERS, TABLE_9
from vitctl.recipe.schema import Finetune, Pretrain, Vtab
from vitctl.report.our_results import OurResults, Ours, Pretraining
from vitctl.report.paper_cells import VTAB, experiments_for

SECONDS_PER_DAY = 86_400


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU, and the share of its bf16 peak that training reaches (MFU)."""

    device: str
    mfu: float

    def days(self, flops: float) -> float:
        """Days of one such GPU for this many FLOPs."""
        return flops / (self.mfu * PEAK_TFLOPS[self.device] * 1e12 * SECONDS_PER_DAY)


@dataclass(frozen=True)
class TrainingCost:
    """The cost of a pre-training: updates, 10^18 floating-point operations, days of one GPU."""

    steps: int
    exaflops: float
    gpu_days: float


@dataclass(frozen=True)
class Accuracy:
    """A cell: the paper's accuracy in percent and its deviation over runs, None where it prints none, and
    ours.
    """

    paper: float | None
    deviation: float | None
    ours: Ours | None


@dataclass(frozen=True)
class ResultRow:
    """A pre-training recipe: its accuracy in each requested column, and its cost."""

    recipe: str
    accuracies: tuple[Accuracy, ...]
    cost: TrainingCost
    paper_exaflops: float | None
    paper_core_days: float | None


@dataclass(frozen=True)
class SettingRow:
    """A row of Table 1, 3 or 4: what the model or the recipe sets, as text by column."""

    recipe: str
    values: tuple[str, ...]
    cost: TrainingCost | None


@dataclass(frozen=True)
class TaskRow:
    """A row of Table 9 or Fig. 2: a task, a group or the mean of all 19, with an accuracy for each of
    `TABLE_9_RECIPES`.

    `others` are the numbers of Fig. 2's other networks, which have no run.
    """

    name: str
    accuracies: tuple[Accuracy, ...]
    others: Mapping[str, float | None]


# The pre-trainings of Table 9's columns.
TABLE_9_RECIPES = dict(zip(COLUMNS, ("jft_h14", "jft_l16_14ep", "in21k_l16"), strict=True))

SETTINGS = {
    "1": ("layers", "width", "MLP", "heads", "paper", "parameters"),
    "3": ("data", "epochs", "lr", "decay", "wd", "dropout"),
    "4": ("steps", "rates", "batch", "pixels"),
}


def find_gpu(device: str, mfu: float) -> Gpu:
    """A GPU that is known by name.

    Raises:
        RecipeError: it is not, or the share lies outside 0..1.
    """
    known = {name.lower(): name for name in PEAK_TFLOPS}
    if device.lower() not in known:
        raise RecipeError(f"--device {device}: unknown; known are {', '.join(PEAK_TFLOPS)}")
    if not 0 < mfu <= 1:
        raise RecipeError(f"--mfu {mfu:g}: a share of the peak, above 0 and at most 1, e.g. 0.4")
    return Gpu(known[device.lower()], mfu)


def result_rows(number: str, targets: tuple[str, ...], ours: OurResults, gpu: Gpu) -> list[ResultRow]:
    """The rows of a table of results.

    Args:
        number: of `RESULTS`.
        targets: of its columns.
        ours: results of our runs.
        gpu: for the costs.
    """
    table = RESULTS[number]
    return [
        ResultRow(
            recipe,
            tuple(
                Accuracy(table.value(recipe, t), table.deviation(recipe, t), _ours(number, recipe, t, ours))
                for t in targets
                if t in table.columns
            ),
            cost_of(recipe, gpu),
            RESULTS["6"].exaflops.get(recipe),
            RESULTS["2"].core_days.get(recipe),
        )
        for recipe in table.rows
    ]


def _ours(number: str, recipe: str, column: str, ours: OurResults) -> Ours | None:
    if column == AVERAGE:
        parts = [_ours(number, recipe, one, ours) for one in FIVE]
        means = [part.mean for part in parts if part is not None]
        return Ours((sum(means) / len(means),)) if len(means) == len(FIVE) else None
    pretraining = Pretraining(recipe, FIGURE_4_SIZES[column] if number == "fig4" else 0)
    return ours.best(pretraining, experiments_for(number, recipe, column))


def task_rows(number: str, ours: OurResults) -> list[TaskRow]:
    """The rows of Table 9 ("9": every task and their mean), or those of Fig. 2 ("fig2": the mean, and that of
    each group).

    The paper prints Fig. 2 as bars; its numbers here are means of those of Table 9.
    """
    by_task = [(task.name, [task.name]) for task in TASKS]
    by_group = [(group, [task.name for task in TASKS if task.group == group]) for group in GROUPS]
    mean = (VTAB, [task.name for task in TASKS])
    rows = [*by_task, mean] if number == "9" else [mean, *by_group]
    return [
        TaskRow(
            name if name != VTAB else f"mean of {len(TASKS)} tasks",
            tuple(
                Accuracy(
                    sum(TABLE_9[task][column] for task in tasks) / len(tasks),
                    None,
                    ours.best(Pretraining(recipe), (VTAB if name == VTAB else f"{VTAB} {name}",)),
                )
                for column, recipe in enumerate(TABLE_9_RECIPES.values())
            ),
            {other: means[place] for other, means in OTHERS.items()} if number == "fig2" else {},
        )
        for place, (name, tasks) in enumerate(rows)
    ]


def setting_rows(number: str, gpu: Gpu) -> list[SettingRow]:
    """The rows of Table 1, 3 or 4, as the models and the recipes have them."""
    if number == "1":
        return [_table_1(name, size) for size, (_, names) in TABLE_1.items() for name in names]
    return (
        [_table_3(name, gpu) for name in TABLE_3] if number == "3" else [_table_4(name) for name in TABLE_4]
    )


def cost_of(name: str, gpu: Gpu) -> TrainingCost:
    """The cost of a pre-training recipe."""
    plan = plan_training(_pretrain(name))
    return TrainingCost(plan.steps, plan.training_flops / 1e18, gpu.days(plan.training_flops))


def _table_1(name: str, size: str) -> SettingRow:
    config = variant(name, num_classes=1000)
    assert isinstance(config, ViTConfig)
    sizes = (config.depth, config.hidden_size, config.mlp_size, config.num_heads)
    values = (*map(str, sizes), f"{TABLE_1[size][0]}M", f"{count_parameters(config):,}")
    return SettingRow(name, values, None)


def _table_3(name: str, gpu: Gpu) -> SettingRow:
    r = _pretrain(name)
    config = model_config(r, 1000)
    dropout = f"{config.dropout:g}" if isinstance(config, ViTConfig) else "none"
    o, s = r.optimizer, r.schedule
    values = (r.data.dataset, f"{s.total_epochs:g}", f"{o.lr:g}", s.decay, f"{o.weight_decay:g}", dropout)
    return SettingRow(name, values, cost_of(name, gpu))


def _table_4(name: str) -> SettingRow:
    r = load_recipe(name).recipe
    assert isinstance(r, Finetune | Vtab)
    s = r.schedule
    if isinstance(r, Finetune):
        steps, rates = f"{s.total_steps:,}", ", ".join(f"{lr:g}" for lr in r.sweep.lrs or (r.optimizer.lr,))
    else:  # B.1.1 has two rates and two schedules, of which Table 4 prints one, which the recipe uses
        steps = ", ".join(
            f"{n:,}" + " (ours)" * (n != s.total_steps) for n in r.vtab.sweep_steps or (s.total_steps,)
        )
        tried = r.vtab.sweep_lrs or (r.optimizer.lr,)
        rates = ", ".join(f"{lr:g}" + " (ours)" * (lr != r.optimizer.lr) for lr in tried)
    return SettingRow(name, (steps, rates, str(s.batch_size), str(r.data.image_size)), None)


def _pretrain(name: str) -> Pretrain:
    recipe = load_recipe(name).recipe
    assert isinstance(recipe, Pretrain)
    return recipe
