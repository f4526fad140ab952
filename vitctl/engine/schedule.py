"""[schedule]: batch size, length, learning rate as a pure function of the step, and lanes.

Imports no torch.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from vitctl.data.source.order import Lanes
from vitctl.errors import RecipeError
from vitctl.recipe.load import Loaded, Override, load_recipe, recipe_names, with_overrides
from vitctl.recipe.schema import Finetune, Pretrain, ShardedMachine, TrainRecipe, Vtab
from vitctl.recipe.sections import Schedule
from vitctl.system.text import count_text


def total_steps(num_images: int, batch_size: int, *, steps: int, epochs: float) -> int:
    """Return a run's length in updates: `steps` if given, else full batches in `epochs` passes, rounded down.

    Paper: Table 3 gives epochs; 7 epochs of 303 million images in batches of 4,096 are 517,822 steps.
    """
    return steps or int(num_images * epochs // batch_size)


def warmup_of(schedule: Schedule, num_images: int) -> int:
    """Return the warm-up in updates: `warmup_steps`, or full batches in `warmup_epochs` passes."""
    if schedule.warmup_epochs:
        return int(num_images * schedule.warmup_epochs // schedule.batch_size)
    return schedule.warmup_steps


def checked_steps(num_images: int, schedule: Schedule, processes: int) -> int:
    """Return the length of a run in updates.

    Raises:
        RecipeError: the run ends within its warm-up, or a process would get no image of a batch.
    """
    s = schedule
    if s.batch_size < processes:
        raise RecipeError(
            f"schedule.batch_size = {s.batch_size} is less than machine.processes = {processes}",
            fix=f"set --processes to {s.batch_size} or less, or a larger --batch-size",
        )
    steps = total_steps(num_images, s.batch_size, steps=s.total_steps, epochs=s.total_epochs)
    if steps <= warmup_of(s, num_images):
        key = "warmup_epochs" if s.warmup_epochs else "warmup_steps"
        raise RecipeError(
            f"{steps} steps ({s.total_epochs:g} epochs of {num_images:,} images in batches of "
            f"{s.batch_size}) end within schedule.{key} = {getattr(s, key)}",
            fix="lower it, or train longer",
        )
    return steps


def batch_too_large(num_images: int, schedule: Schedule) -> RecipeError:
    """Return the error of a new run whose batch has more images than there are."""
    return RecipeError(
        f"schedule.batch_size = {schedule.batch_size:,}",
        f"there are {num_images:,} training images",
        f"give --batch-size {num_images} or less",
    )


def lr_at(
    step: int,
    *,
    base_lr: float,
    total: int,
    warmup: int,
    decay: str,
    end_lr: float = 0.0,
    drops: tuple[float, ...] = (),
    warmup_lr: float = 0.0,
) -> float:
    """Return the learning rate of the update that follows `step` finished updates.

    Args:
        step: finished updates, 0 .. total - 1; with a warm-up the first update has rate warmup_lr.
        base_lr: rate at the end of the warm-up.
        total, warmup: in steps; the decay starts after the warm-up.
        decay: "linear" or "cosine" from base_lr to end_lr, "steps" to a tenth at each of drops, or
            "constant".
        end_lr: last rate of the linear or cosine decay.
        drops: shares of the run, 0..1.
        warmup_lr: first rate of the linear warm-up.

    Paper: Tables 3 and 4; the authors' utils.py; "steps" is BiT's (Appendix D.1). Source: MAE (end_lr of
    "cosine"), timm (warmup_lr)
    """
    progress = min(1.0, max(0.0, (step - warmup) / max(1, total - warmup)))
    if decay == "linear":
        lr = end_lr + (base_lr - end_lr) * (1.0 - progress)
    elif decay == "cosine":
        lr = end_lr + (base_lr - end_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))
    elif decay == "steps":
        lr = base_lr * 0.1 ** sum(step >= drop * total for drop in drops)
    else:
        lr = base_lr
    return warmup_lr + (lr - warmup_lr) * (step / warmup) if step < warmup else lr


def check_falls(recipe: Pretrain | Finetune) -> None:
    """Raise RecipeError if a rate that decays would rise to schedule.end_lr."""
    s, tried = recipe.schedule, recipe.sweep.lrs if isinstance(recipe, Finetune) else ()
    lr = min(tried or [recipe.optimizer.lr])
    if s.decay in ("linear", "cosine") and s.end_lr > lr:
        raise RecipeError(
            f"schedule.end_lr = {s.end_lr:g} is above the learning rate {lr:g}, which would rise to it",
            fix="lower it, e.g. --set schedule.end_lr=0",
        )


def learning_rate(recipe: TrainRecipe, steps: int, num_images: int) -> Callable[[int], float]:
    """Return the learning rate as a function of finished steps, for a run of `steps` on `num_images`."""
    s = recipe.schedule
    return partial(
        lr_at,
        base_lr=recipe.optimizer.lr,
        total=steps,
        warmup=warmup_of(s, num_images),
        decay=s.decay,
        end_lr=s.end_lr,
        drops=s.drops,
        warmup_lr=s.warmup_lr,
    )


def lanes_of(recipe: TrainRecipe, num_processes: int) -> Lanes | None:
    """Return the lanes of [schedule], or None if off; RecipeError if they do not fit batch or machine."""
    s, machine = recipe.schedule, recipe.machine
    if not s.lanes:
        return None
    if s.lanes > s.batch_size:
        raise RecipeError(
            f"schedule.lanes = {s.lanes} is more than schedule.batch_size = {s.batch_size}; every lane needs "
            f"an image of each "
            "batch: set fewer lanes"
        )
    if isinstance(recipe, Pretrain | Finetune):
        data = recipe.data
        if (data.mixup_alpha or data.cutmix_alpha) and 2 * s.lanes > s.batch_size:
            raise RecipeError(
                f"schedule.lanes = {s.lanes} with schedule.batch_size = {s.batch_size}: MixUp and "
                "CutMix blend images of one lane, which needs two images",
                fix=f"set {s.batch_size // 2} lanes or fewer",
            )
    if isinstance(machine, ShardedMachine) and machine.divides_model:
        raise RecipeError(
            f"machine.sharding = '{machine.sharding}' sums gradients in an order that "
            "schedule.lanes cannot control",
            fix="set machine.sharding = 'none' or schedule.lanes = 0",
        )
    lanes = Lanes(s.batch_size, s.lanes, s.leaf_images)
    if num_processes > lanes.num_leaves:
        raise RecipeError(
            f"machine.processes = {num_processes} is more than the leaves of the batch "
            f"({in_words(lanes)}), and every process needs one",
            fix=(
                "use fewer processes or, for a new run, more schedule.lanes or a smaller schedule.leaf_images"
            ),
        )
    return lanes


def lanes_note(lanes: Lanes) -> str:
    text = f"{in_words(lanes)}; the same bytes on up to {_count(lanes.num_leaves, 'process', 'processes')}"
    return f"{text}; machine.micro_batch has no effect"


def in_words(lanes: Lanes) -> str:
    leaves = _count(lanes.num_leaves, "leaf", "leaves")
    size = _count(lanes.largest_leaf, "image", "images")
    return f"{_count(lanes.num_lanes, 'lane', 'lanes')} in {leaves} of up to {size}"


def _count(number: int, one: str, several: str) -> str:
    return f"{number:,} {one if number == 1 else several}"


BATCHES_PER_EPOCH, LEAST_BATCH, MOST_BATCH = 8, 8, 512
EPOCHS, LEAST_STEPS, MOST_STEPS = 20, 200, 20_000
WARMUP_SHARE, MOST_WARMUP = 10, 500
TASK_IMAGES = 1_000  # in every VTAB task
IN_PROPORTION = ", in proportion"  # in the origin of a warm-up that follows a length set by a flag

R = TypeVar("R", bound=TrainRecipe)


def needs_num_images(recipe: object) -> bool:
    """Return whether a value of a recipe's [schedule] depends on the number of training images."""
    if not isinstance(recipe, TrainRecipe):
        return False
    s = recipe.schedule
    is_open = not s.batch_size or not (s.total_steps or s.total_epochs) or s.warmup_steps < 0
    return is_open or _lr_batch(recipe) > 0


def fitted_recipe(recipe: R, num_images: int) -> R:
    """Fill in the open values of a recipe's [schedule]: batch_size = 0, no length, warmup_steps = -1.

    Large sets get the paper's values: batches of 512, at most the 20,000 steps of Table 4, and the warm-up
    of 500 of vision_transformer's configs/common.py. Small ones get eight batches an epoch, and at least 200
    updates.

    Args:
        num_images: in data.train_split.

    Paper: Table 4 gives 512 images a batch, and 500 to 20,000 steps; the rule between them is a choice of
    vitctl
    """
    if not needs_num_images(recipe):
        return recipe
    s = recipe.schedule
    batch = s.batch_size or _batch_size(num_images)
    length = {}
    if not (s.total_steps or s.total_epochs):
        length = {"total_steps": min(max(EPOCHS * num_images // batch, LEAST_STEPS), MOST_STEPS)}
    s = s.model_copy(update={"batch_size": batch, **length})
    if s.warmup_steps < 0:
        steps = total_steps(num_images, batch, steps=s.total_steps, epochs=s.total_epochs)
        warmup = 0 if s.warmup_epochs else min(steps // WARMUP_SHARE, MOST_WARMUP)
        s = s.model_copy(update={"warmup_steps": warmup})
    return recipe.model_copy(update={"schedule": s})


def fit_schedule(loaded: Loaded, num_images: int) -> Loaded:
    """Apply `fitted_recipe`, with origins; after --steps or --epochs scale the warm-up too."""
    loaded = _with_smaller_batch(loaded, num_images)
    before = loaded.recipe
    assert isinstance(before, TrainRecipe)
    now = fitted_recipe(before, num_images)
    words = f"chosen for {count_text(num_images, 'image')}"
    found = {
        f"schedule.{name}": words
        for name in ("batch_size", "total_steps", "warmup_steps")
        if getattr(now.schedule, name) != getattr(before.schedule, name)
    }
    if loaded.origin("schedule.warmup_steps").endswith(IN_PROPORTION) and before.schedule.warmup_steps < 0:
        warmup = _in_proportion(loaded.name, now, num_images)
        now = now.model_copy(update={"schedule": now.schedule.model_copy(update=warmup)})
        for name, value in warmup.items():
            if getattr(before.schedule, name) != value:
                found[f"schedule.{name}"] = "the recipe's, in proportion to the length"
    return _with_rates(replace(loaded, recipe=now, origins={**loaded.origins, **found}))


def _batch_size(num_images: int, most: int = MOST_BATCH) -> int:
    share = max(1, num_images // BATCHES_PER_EPOCH)
    return min(max(1 << (share.bit_length() - 1), LEAST_BATCH), most)


def _lr_batch(recipe: TrainRecipe) -> int:
    return recipe.optimizer.lr_batch if isinstance(recipe, Finetune | Vtab) else 0


def _with_smaller_batch(loaded: Loaded, num_images: int) -> Loaded:
    """Return a recipe whose rate follows the batch with one that gives the images eight batches an epoch."""
    recipe, origin = loaded.recipe, loaded.origin("schedule.batch_size")
    assert isinstance(recipe, TrainRecipe)
    given = recipe.schedule.batch_size
    fits = _batch_size(num_images, most=given)
    if not _lr_batch(recipe) or fits == given or not _is_shipped(origin):
        return loaded
    words = f"{given:,} in {origin}; chosen for {count_text(num_images, 'image')}"
    return with_overrides(loaded, [Override("schedule.batch_size", fits, words)])


def _with_rates(loaded: Loaded) -> Loaded:
    """Return a recipe with its rate for its batch, if optimizer.lr_batch says so."""
    recipe = loaded.recipe
    assert isinstance(recipe, TrainRecipe)
    for_batch, batch, rate = _lr_batch(recipe), recipe.schedule.batch_size, recipe.optimizer.lr
    if not for_batch:
        return loaded
    at, layer = loaded.origin("optimizer.lr"), _layer(loaded.origin("optimizer.lr_batch"))
    scaled = []
    tries = isinstance(recipe, Finetune) and recipe.sweep.lrs  # they are the rates
    if rate and not tries and batch != for_batch and (_is_shipped(at) or _layer(at) == layer):
        # Linear for SGD, the root for optimizers that divide by the gradients' size: timm's rule.
        factor = batch / for_batch if recipe.optimizer.name == "sgd" else math.sqrt(batch / for_batch)
        words = f"{rate:g} for a batch of {for_batch:,}, by timm's rule for other batches"
        scaled = [Override("optimizer.lr", rate * factor, words)]
    loaded = with_overrides(loaded, [*scaled, Override("optimizer.lr_batch", 0)])
    return replace(loaded, origins={key: at for key, at in loaded.origins.items() if "lr_batch" not in key})


def _layer(origin: str) -> str:
    """Return the file that set a value; "flags" for --set, and a flag's own name, such as --lr."""
    return "flags" if origin.startswith(("--set", "overrides")) else origin.partition(":")[0]


def _is_shipped(origin: str) -> bool:
    return _layer(origin).removesuffix(".toml") in recipe_names()


def _in_proportion(name: str, now: TrainRecipe, num_images: int) -> dict[str, float]:
    """Return the warm-up of the recipe `name`, in its unit, shortened as its length is, never extended."""
    own = load_recipe(name).recipe
    assert isinstance(own, TrainRecipe)
    given = own.schedule.model_copy(update={"batch_size": now.schedule.batch_size})
    before, s = fitted_recipe(own.model_copy(update={"schedule": given}), num_images).schedule, now.schedule
    if s.total_epochs and before.total_epochs:
        share = s.total_epochs / before.total_epochs
    else:
        steps, own_steps = (
            total_steps(num_images, one.batch_size, steps=one.total_steps, epochs=one.total_epochs)
            for one in (s, before)
        )
        share = steps / max(1, own_steps)
    share = min(1.0, share)
    return {"warmup_steps": int(before.warmup_steps * share), "warmup_epochs": before.warmup_epochs * share}
