"""The lanes of a recipe: what the plan says of them, and what it counts."""

import pytest

from vitctl.data.loader.lanes import Lanes
from vitctl.jobs.inputs.lanes import in_words, lanes_of
from vitctl.jobs.plan import plan_training
from vitctl.recipe.load import Override, load_recipe
from vitctl.recipe.schema import Pretrain


def recipe(**values: object) -> Pretrain:
    given = {"data.synthetic": 1000, **values}
    found = load_recipe("smoke", [Override(key, value) for key, value in given.items()]).recipe
    assert isinstance(found, Pretrain)
    return found


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((4096, 8, 32), "8 lanes of 512 images, in leaves of up to 32: 128 leaves"),
        ((21, 8, 2), "8 lanes of 2 to 3 images, in leaves of up to 2: 13 leaves"),
        ((16, 8, 32), "8 lanes of 2 images, each a leaf: 8 leaves"),
        ((1, 1, 1), "1 lane of 1 image, each a leaf: 1 leaf"),
    ],
)
def test_in_words(sizes: tuple[int, int, int], words: str) -> None:
    assert in_words(Lanes(*sizes)) == words


def test_lanes_of__the_recipe() -> None:
    assert lanes_of(recipe(), 1) is None
    chosen = recipe(**{"schedule.lanes": 8, "schedule.batch_size": 64, "schedule.leaf_images": 4})
    assert lanes_of(chosen, 3) == Lanes(64, 8, 4)


def test_plan__tells_leaves_and_counts_the_sums_that_are_kept() -> None:
    values = {"schedule.batch_size": 64, "schedule.leaf_images": 4}
    plain = plan_training(recipe(**values, **{"machine.micro_batch": 4}))
    plan = plan_training(recipe(**values, **{"schedule.lanes": 8, "machine.micro_batch": 64}))
    assert plan.micro_batch == 4 == plain.micro_batch
    assert (
        plan.memory_bytes - plain.memory_bytes == 4 * plan.parameters * 4
    )  # 16 leaves: a tree of four levels, in float32
    assert plan.notes[-1] == (
        "8 lanes of 8 images, in leaves of up to 4: 16 leaves; the same bytes on up to 16 processes; "
        "machine.micro_batch has no effect"
    )
