"""The fixed tree of additions, against a sum by hand, and its parts as processes hold them."""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vitctl.data.source.order import Lanes, Tree, binary_tree, leaves, subtrees
from vitctl.engine import step as gradients
from vitctl.engine.schedule import lanes_of
from vitctl.engine.step import LaneSum, added
from vitctl.jobs.plan import plan_training
from vitctl.recipe.load import Override, load_recipe
from vitctl.recipe.schema import Pretrain


def by_hand(tree: Tree, values: dict[int, np.ndarray]) -> np.ndarray:
    return values[tree] if isinstance(tree, int) else by_hand(tree[0], values) + by_hand(tree[1], values)


def test_binary_tree__shape() -> None:
    assert binary_tree([0]) == 0
    assert binary_tree([0, 1, 2, 3]) == ((0, 1), (2, 3))
    assert binary_tree([0, 1, 2, 3, 4]) == (((0, 1), (2, 3)), 4)
    assert binary_tree([0, 1, 2, 3, 4, 5, 6]) == (((0, 1), (2, 3)), ((4, 5), 6))


def test_tree__of_lanes_over_trees_of_leaves() -> None:
    assert Lanes(14, 2, 2).tree == (((0, 1), (2, 3)), ((4, 5), (6, 7)))
    assert Lanes(10, 3, 2).tree == (((0, 1), (2, 3)), (4, 5))


@given(st.integers(1, 40), st.data())
def test_subtrees__any_runs_of_leaves_make_up_the_tree(count: int, data: st.DataObject) -> None:
    tree = binary_tree(range(count))
    cuts = sorted({0, count, *data.draw(st.lists(st.integers(0, count), max_size=5))})
    parts = [subtrees(tree, range(a, b)) for a, b in pairwise(cuts)]
    assert [leaf for part in parts for node in part for leaf in leaves(node)] == list(range(count))
    values = {
        leaf: np.float32(np.random.default_rng(leaf).normal()) * np.float32(3.0**leaf)
        for leaf in range(count)
    }
    known = {node: [torch.tensor(by_hand(node, values))] for part in parts for node in part}
    whole = added(tree, lambda node: known.get(node))
    assert whole[0].numpy().tobytes() == by_hand(tree, values).tobytes()


def sums_of_all(
    lanes: Lanes, num_processes: int, gradient: Callable[[int], list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> list[list[Tensor]]:
    """What each of several processes gets, in threads that meet where processes would talk."""
    barrier, boxes = threading.Barrier(num_processes), threading.local()
    shared: dict[int, Tensor] = {}

    def swapped(own: Tensor) -> list[Tensor]:
        shared[boxes.rank] = own.clone()
        barrier.wait()
        everything = [shared[rank] for rank in range(num_processes)]
        barrier.wait()
        return everything

    def all_to_all(received: Tensor, sent: Tensor, theirs: list[int], mine: list[int]) -> None:
        assert len(set(mine)) == 1 and sum(mine) == len(sent)
        rows = [other.view(num_processes, -1, sent.shape[1])[boxes.rank] for other in swapped(sent)]
        assert [len(row) for row in rows] == theirs
        received.copy_(torch.cat(rows))

    def member(rank: int) -> list[Tensor]:
        boxes.rank = rank
        return LaneSum(lanes, rank, num_processes).gradients(gradient)

    monkeypatch.setattr(gradients.dist, "all_to_all_single", all_to_all)
    monkeypatch.setattr(gradients, "_gather", lambda whole, block: whole.copy_(torch.cat(swapped(block))))
    with ThreadPoolExecutor(num_processes) as pool:
        return list(pool.map(member, range(num_processes)))


@pytest.mark.parametrize("num_processes", [1, 2, 3, 4, 5, 7, 8, 11])
def test_gradients__every_process_gets_the_sum_by_hand(
    num_processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes, shapes = Lanes(37, 8, 2), [(3, 5), (7,), (), (2, 2, 2), (1,)]
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 60)  # several buckets, of one tensor and of more

    def gradient(leaf: int) -> list[Tensor]:
        rng = np.random.default_rng(leaf)
        return [
            torch.tensor(rng.normal(size=shape).astype(np.float32) * np.float32(10.0 ** (leaf % 5)))
            for shape in shapes
        ]

    tree = lanes.tree
    expected = [
        by_hand(tree, {leaf: gradient(leaf)[i].numpy() for leaf in range(lanes.num_leaves)})
        for i in range(len(shapes))
    ]
    straight = [
        sum(gradient(leaf)[i].numpy() for leaf in range(lanes.num_leaves)) for i in range(len(shapes))
    ]
    assert any(a.tobytes() != np.asarray(b).tobytes() for a, b in zip(expected, straight, strict=True))
    for found in sums_of_all(lanes, num_processes, gradient, monkeypatch):
        assert [t.numpy().tobytes() for t in found] == [value.tobytes() for value in expected]
        assert [tuple(t.shape) for t in found] == shapes


@pytest.mark.parametrize(
    ("sizes", "num_processes"), [((64, 8, 1), 1), ((64, 8, 1), 3), ((96, 12, 4), 5), ((37, 5, 2), 2)]
)
def test_gradients__leaves_are_computed_in_order_and_few_sums_are_held(
    sizes: tuple[int, int, int], num_processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes = Lanes(*sizes)
    monkeypatch.setattr(LaneSum, "_exchanged", lambda _, sums: next(iter(sums.values())))
    made: list[weakref.ref[Tensor]] = []
    order: list[int] = []
    alive: list[int] = []

    def gradient(leaf: int) -> list[Tensor]:
        order.append(leaf)
        alive.append(sum(one() is not None for one in made))
        tensor = torch.ones(1)
        made.append(weakref.ref(tensor))
        return [tensor]

    for rank in range(num_processes):
        for noted in (made, order, alive):
            noted.clear()
        LaneSum(lanes, rank, num_processes).gradients(gradient)
        assert order == list(lanes.owned(rank, num_processes))
        assert max(alive) == lanes.most_held(rank, num_processes)
    assert Lanes(64, 8, 1).most_held(0, 1) == 6


def test_table__without_other_processes_is_that_of_the_rows() -> None:
    rows = torch.tensor([[float("nan"), 1.0], [-0.0, 2.0]], dtype=torch.float64)
    assert LaneSum(Lanes(2, 2, 1), 0, 1).table(rows).numpy().tobytes() == rows.numpy().tobytes()


def recipe(**values: object) -> Pretrain:
    given = {"data.synthetic": 1000, **values}
    found = load_recipe("smoke", [Override(key, value) for key, value in given.items()]).recipe
    assert isinstance(found, Pretrain)
    return found


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
        "8 lanes in 16 leaves of up to 4 images; the same bytes on up to 16 processes; "
        "machine.micro_batch has no effect"
    )
