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
            f"schedule.lanes = {s.lanes} is more than schedule.batch_size = {s.batch_size}; every lane needs "
            f"an image of each "
            "batch: set fewer lanes"
        )
    if isinstance(recipe, Pretrain | Finetune):
        data = recipe.data
        if (data.mixup_alpha or data.cutmix_alpha) and 2 * s.lanes > s.batch_size:
            raise RecipeError(
                f"schedule.lanes = {s.lanes} with schedule.batch_size = {s.batch_size}: MixUp and CutMix "
                f"blend images of one lane, "
                f"which needs two images; set {s.batch_size // 2} lanes or fewer"
            )
    if isinstance(machine, ShardedMachine) and machine.sharding == "fsdp":
        raise RecipeError(
            "machine.sharding = 'fsdp' adds gradients in an order of its own, so that schedule.lanes cannot "
            "fix it; set "
            "machine.sharding = 'none' or schedule.lanes = 0"
        )
    lanes = Lanes(s.batch_size, s.lanes, s.leaf_images)
    if num_processes > lanes.num_leaves:
        raise RecipeError(
            f"machine.processes = {num_processes} is more than the leaves of the batch "
            f"({in_words(lanes)}), and "
            "every process needs one; take fewer processes, or for a new run more schedule.lanes or a "
            "smaller schedule.leaf_images"
        )
    return lanes


def lanes_note(lanes: Lanes) -> str:
    """For the plan."""
    text = f"{in_words(lanes)}; the same bytes on up to {_count(lanes.num_leaves, 'process', 'processes')}"
    return f"{text}; machine.micro_batch has no effect"


def in_words(lanes: Lanes) -> str:
    """For messages."""
    sizes = [len(lanes.lane(number)) for number in range(lanes.num_lanes)]
    counts = [len(own) for own in lanes.leaves]
    least, most = min(sizes), max(sizes)
    size = f"{least} to {most} images" if least < most else _count(most, "image", "images")
    leaf = f"in leaves of up to {lanes.leaf_images}" if max(counts) > 1 else "each a leaf"
    return f"{_count(lanes.num_lanes, 'lane', 'lanes')} of {size}, {leaf}: {_count(lanes.num_leaves, 'leaf', 'leaves')}"


def _count(number: int, one: str, several: str) -> str:
    return f"{number:,} {one if number == 1 else several}"
