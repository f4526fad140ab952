"""Batch size, length and warm-up of a run, where its recipe derives them from the number of training images.

Imports no torch.
"""

from dataclasses import replace
from typing import TypeVar

from vitctl.engine.schedule import total_steps
from vitctl.recipe.load import Loaded, load_recipe
from vitctl.recipe.schema import TrainRecipe

BATCHES_PER_EPOCH, LEAST_BATCH, MOST_BATCH = 8, 8, 512
EPOCHS, LEAST_STEPS, MOST_STEPS = 20, 200, 20_000
WARMUP_SHARE, MOST_WARMUP = 10, 500
TASK_IMAGES = 1_000  # of every VTAB task
IN_PROPORTION = ", in proportion"  # marks, in the origin of the warm-up, that a flag changed the length

R = TypeVar("R", bound=TrainRecipe)


def needs_num_images(recipe: object) -> bool:
    """Whether a value of a recipe's [schedule] depends on the number of training images."""
    if not isinstance(recipe, TrainRecipe):
        return False
    s = recipe.schedule
    return not s.batch_size or not (s.total_steps or s.total_epochs) or s.warmup_steps < 0


def fitted_recipe(recipe: R, num_images: int) -> R:
    """`recipe` with the open values of its [schedule] filled in: batch_size = 0, no length, warmup_steps =
    -1.

    Large sets come out as the paper's: batches of 512, at most the 20,000 steps of Table 4, and the warm-up
    of 500 of vision_transformer's configs/common.py. Small ones get eight batches an epoch, and at least 200
    updates.

    Args:
        recipe: checked.
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
        s = s.model_copy(update={"warmup_steps": min(steps // WARMUP_SHARE, MOST_WARMUP)})
    return recipe.model_copy(update={"schedule": s})


def fit_schedule(loaded: Loaded, num_images: int) -> Loaded:
    """`loaded` as `fitted_recipe` gives it, each value with its origin; after --steps or --epochs the warm-up
    is scaled with the length.

    Args:
        loaded: a recipe that trains.
        num_images: in its data.train_split.
    """
    before = loaded.recipe
    assert isinstance(before, TrainRecipe)
    now = fitted_recipe(before, num_images)
    words = f"chosen for {num_images:,} images"
    found = {
        f"schedule.{name}": words
        for name in ("batch_size", "total_steps", "warmup_steps")
        if getattr(now.schedule, name) != getattr(before.schedule, name)
    }
    if loaded.origin("schedule.warmup_steps").endswith(IN_PROPORTION) and before.schedule.warmup_steps < 0:
        warmup = _in_proportion(loaded.name, now, num_images)
        now = now.model_copy(update={"schedule": now.schedule.model_copy(update={"warmup_steps": warmup})})
        found["schedule.warmup_steps"] = "the recipe's, in proportion to the length"
    return replace(loaded, recipe=now, origins={**loaded.origins, **found})


def _batch_size(num_images: int) -> int:
    share = max(1, num_images // BATCHES_PER_EPOCH)
    return min(max(1 << (share.bit_length() - 1), LEAST_BATCH), MOST_BATCH)


def _in_proportion(name: str, now: TrainRecipe, num_images: int) -> int:
    """The warm-up of the recipe called `name`, shortened as its length is."""
    own = load_recipe(name).recipe
    assert isinstance(own, TrainRecipe)
    before = fitted_recipe(own, num_images).schedule
    steps, own_steps = (
        total_steps(num_images, s.batch_size, steps=s.total_steps, epochs=s.total_epochs)
        for s in (now.schedule, before)
    )
    return int(before.warmup_steps * min(1.0, steps / max(1, own_steps)))
