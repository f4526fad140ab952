"""The fixed tree of additions, against a sum by hand, and its parts as processes hold them."""

import ast
import math
import os
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests import warm
from tests.conftest import free_port
from tests.engine.summed_by_lanes import summed
from vitctl.data.source.order import Lanes, Tree, binary_tree, leaves, subtrees
from vitctl.engine import lanes as gradients
from vitctl.engine.lanes import LaneSum, added
from vitctl.engine.runtime import Runtime
from vitctl.engine.schedule import lanes_of
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


SHAPES = [(3, 5), (7,), (), (2, 2, 2), (1,)]
Sent = Counter[tuple[int, int]]  # (rank, rank) -> bytes


def gradient(leaf: int) -> list[np.ndarray]:
    rng = np.random.default_rng(leaf)
    return [
        np.asarray(rng.normal(size=shape)).astype(np.float32) * np.float32(10.0 ** (leaf % 5))
        for shape in SHAPES
    ]


def passed_back(parameters: Sequence[nn.Parameter], leaf: int) -> list[Tensor]:
    """A backward pass that gives the gradients of a leaf."""
    total: Any = sum((p * torch.tensor(g)).sum() for p, g in zip(parameters, gradient(leaf), strict=True))
    total.backward()
    found = [cast("Tensor", p.grad) for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    return found


def sums_of_all(
    lanes: Lanes, num_processes: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[list[Tensor]], Sent]:
    """What each of several processes gets, `size` of them on a node, in threads that meet where processes
    would talk; and what each sends, where all-gathers go round in a ring.
    """
    barrier, boxes = threading.Barrier(num_processes), threading.local()
    shared: dict[int, Tensor] = {}
    sent_bytes: Sent = Counter()

    def swapped(own: Tensor, group: range | None) -> list[Tensor]:
        shared[boxes.rank] = own.clone()
        barrier.wait()
        everything = [shared[rank] for rank in group or range(num_processes)]
        barrier.wait()
        return everything

    def all_to_all(
        received: Tensor, sent: Tensor, theirs: list[int], mine: list[int], group: range | None
    ) -> None:
        assert len(set(mine)) == 1 and sum(mine) == len(sent)
        group = group or range(num_processes)
        place = group.index(boxes.rank)
        for to in group:
            sent_bytes[boxes.rank, to] += sent.nbytes // len(group)
        rows = [other.view(len(group), -1, sent.shape[1])[place] for other in swapped(sent, group)]
        assert [len(row) for row in rows] == theirs
        received.copy_(torch.cat(rows))

    def gather(whole: Tensor, block: Tensor, group: range | None) -> None:
        group = group or range(num_processes)
        sent_bytes[boxes.rank, group[(group.index(boxes.rank) + 1) % len(group)]] += (
            whole.nbytes - block.nbytes
        )
        whole.copy_(torch.cat(swapped(block, group)))

    def member(rank: int) -> list[Tensor]:
        boxes.rank, first = rank, rank - rank % size
        within, between = range(first, first + size), range(rank % size, num_processes, size)
        nodes = (size, within, between) if 1 < size < num_processes else None
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        total = LaneSum(lanes, rank, num_processes, nodes)
        return total.gradients(partial(passed_back, parameters), parameters)

    monkeypatch.setattr(gradients.dist, "all_to_all_single", all_to_all)
    monkeypatch.setattr(gradients, "_gather", gather)
    with ThreadPoolExecutor(num_processes) as pool:
        return list(pool.map(member, range(num_processes))), sent_bytes


@pytest.mark.parametrize(
    ("num_processes", "size"),
    [
        *((count, count) for count in (1, 2, 5, 8)),
        *((4, 2), (6, 2), (6, 3), (8, 2), (8, 4), (9, 3), (15, 5)),
    ],
)
def test_gradients__every_process_gets_the_sum_by_hand(
    num_processes: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes = Lanes(37, 8, 2)
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 60)  # several buckets, of one tensor and of more
    tree = lanes.tree
    expected = [
        by_hand(tree, {leaf: gradient(leaf)[i] for leaf in range(lanes.num_leaves)})
        for i in range(len(SHAPES))
    ]
    straight = [sum(gradient(leaf)[i] for leaf in range(lanes.num_leaves)) for i in range(len(SHAPES))]
    assert any(a.tobytes() != np.asarray(b).tobytes() for a, b in zip(expected, straight, strict=True))
    for found in sums_of_all(lanes, num_processes, size, monkeypatch)[0]:
        assert [t.numpy().tobytes() for t in found] == [value.tobytes() for value in expected]
        assert [tuple(t.shape) for t in found] == SHAPES


def between_nodes(sent: Sent, size: int) -> int:
    """The most that a node sends to others, in bytes."""
    nodes = Counter[int]()
    for (rank, to), count in sent.items():
        nodes[rank // size] += count * (rank // size != to // size)
    return max(nodes.values())


@pytest.mark.parametrize(("lanes", "num_processes", "size"), [(8, 4, 2), (8, 8, 4), (16, 16, 8), (6, 6, 2)])
def test_gradients__a_node_sends_each_of_its_sums_once(
    lanes: int, num_processes: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    split, num_nodes = Lanes(lanes, lanes, 1), num_processes // size
    own = [split.owned(rank, num_processes) for rank in range(num_processes)]
    of_node = [range(own[i].start, own[i + size - 1].stop) for i in range(0, num_processes, size)]
    sums = max(len(subtrees(split.tree, each)) for each in of_node) + 1  # of the nodes, and of all
    of_nodes, of_ranks = (
        between_nodes(sums_of_all(split, num_processes, group, monkeypatch)[1], size)
        for group in (size, num_processes)
    )
    number = sum(math.prod(shape) for shape in SHAPES)
    padded = number + -number % num_processes
    assert of_nodes == pytest.approx(sums * 4 * padded * (1 - 1 / num_nodes))
    if lanes % num_processes == 0:  # each process has one subtree: its sum took as many bytes from each
        ring = 4 * padded * (1 - 1 / num_processes)
        assert of_ranks - ring == size * (of_nodes / 2)


@pytest.mark.parametrize(
    ("sizes", "num_processes"), [((64, 8, 1), 1), ((64, 8, 1), 3), ((96, 12, 4), 5), ((37, 5, 2), 2)]
)
def test_gradients__leaves_are_computed_in_order_and_few_sums_are_held(
    sizes: tuple[int, int, int], num_processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes = Lanes(*sizes)
    monkeypatch.setattr(LaneSum, "_exchange", lambda *_: None)
    made: list[weakref.ref[Tensor]] = []
    order: list[int] = []
    alive: list[int] = []
    parameters = [nn.Parameter(torch.ones(1))]

    def leaf(number: int) -> list[Tensor]:
        order.append(number)
        alive.append(sum(one() is not None for one in made))
        parameters[0].sum().backward()
        tensor, parameters[0].grad = cast("Tensor", parameters[0].grad), None
        made.append(weakref.ref(tensor))
        return [tensor]

    for rank in range(num_processes):
        for noted in (made, order, alive):
            noted.clear()
        LaneSum(lanes, rank, num_processes).gradients(leaf, parameters)
        assert order == list(lanes.owned(rank, num_processes))
        assert max(alive) == lanes.most_held(rank, num_processes)
    assert Lanes(64, 8, 1).most_held(0, 1) == 6


def test_nodes__complete_their_sums_first_during_the_backward_pass(
    runtime: Runtime,
) -> None:
    """Four processes with gloo, two on a node: the bits of one process."""
    port = str(free_port())
    place = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        warm.Popen(
            [sys.executable, "-m", "tests.engine.summed_by_lanes"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank % 2)},
        )
        for rank in range(4)
    ]
    said = [ast.literal_eval(process.communicate(timeout=120)[0]) for process in processes]
    digest, events = summed(runtime)
    assert {found for found, _ in said} == {digest}
    assert sorted(events) == ["body.bias", "body.weight", "head.bias", "head.weight"]
    for rank, (_, events) in enumerate(said):
        exchanged = [str(sorted((rank, rank ^ 1))), str(sorted((rank, rank ^ 2)))]
        assert sorted(events[:2]) == ["head.bias", "head.weight"] and events[2:4] == exchanged
        assert sorted(events[4:-2]) == ["body.bias", "body.weight"] and events[-2:] == exchanged


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
