"""The lanes of a recipe, and checks that batch, mixing and machine leave room for them."""

from vitctl.data.loader.lanes import Lanes
from vitctl.errors import RecipeError
from vitctl.recipe.machine import ShardedMachine
from vitctl.recipe.schema import Finetune, Pretrain, TrainRecipe


def lanes_of(recipe: TrainRecipe, num_processes: int) -> Lanes | None:
    """The lanes of [schedule] with its resolved batch size; None where they are off.

    Args:
        recipe: that trains.
        num_processes: that the lanes are divided among.

    Raises:
        RecipeError: they do not fit the batch, its mixing, or the machine.
    """
    s, machine = recipe.schedule, recipe.machine
    if not s.lanes:
        return None
    if s.lanes > s.batch_size:
        raise RecipeError(
            f"schedule.lanes = {s.lanes} is more than schedule.batch_size = {s.batch_size}; every lane needs an image of each "
            "batch: set fewer lanes"
        )
    if isinstance(recipe, Pretrain | Finetune):
        data = recipe.data
        if (data.mixup_alpha or data.cutmix_alpha) and 2 * s.lanes > s.batch_size:
            raise RecipeError(
                f"schedule.lanes = {s.lanes} with schedule.batch_size = {s.batch_size}: MixUp and CutMix blend images of one lane, "
                f"which needs two images; set {s.batch_size // 2} lanes or fewer"
            )
    if isinstance(machine, ShardedMachine) and machine.sharding == "fsdp":
        raise RecipeError(
            "machine.sharding = 'fsdp' adds gradients in an order of its own, so that schedule.lanes cannot fix it; set "
            "machine.sharding = 'none' or schedule.lanes = 0"
        )
    lanes = Lanes(s.batch_size, s.lanes, s.leaf_images)
    if num_processes > lanes.num_leaves:
        raise RecipeError(
            f"machine.processes = {num_processes} is more than the {lanes.num_leaves} leaves of the batch ({in_words(lanes)}), and "
            "every process needs one; take fewer processes, or for a new run more schedule.lanes or a smaller schedule.leaf_images"
        )
    return lanes


def lanes_note(lanes: Lanes) -> str:
    """For the plan."""
    return f"{in_words(lanes)}, so that up to {lanes.num_leaves} processes give the same bytes"


def in_words(lanes: Lanes) -> str:
    """For messages."""
    sizes = [len(lanes.lane(number)) for number in range(lanes.num_lanes)]
    counts = [len(own) for own in lanes.leaves]
    leaf = f"in leaves of up to {lanes.leaf_images}" if max(counts) > 1 else "each one leaf"
    return f"{lanes.num_lanes} lanes of {_range(sizes)} images, {leaf}: {lanes.num_leaves} leaves"


def _range(numbers: list[int]) -> str:
    return f"{min(numbers)} to {max(numbers)}" if min(numbers) < max(numbers) else f"{numbers[0]}"
