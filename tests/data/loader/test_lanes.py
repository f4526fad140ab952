"""Lanes: slots, leaves, owners, and the order in which each lane walks through the data."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitctl.data.source.order import (
    LaneOrder,
    Lanes,
    MixtureOrder,
    Order,
    SampleOrder,
    WindowedOrder,
    micro_batches,
    own_slots,
    share,
)
from vitctl.errors import DataError

SIZES = st.tuples(st.integers(1, 70), st.integers(1, 12), st.integers(1, 9)).filter(lambda s: s[1] <= s[0])


def slots_of(lanes: Lanes, rank: int, num_processes: int) -> list[int]:
    return [slot for part in lanes.parts(rank, num_processes) for slot in part.slots]


@given(SIZES)
def test_lanes__every_slot_belongs_to_one_leaf_of_one_lane(sizes: tuple[int, int, int]) -> None:
    lanes = Lanes(*sizes)
    assert [slot for lane in range(lanes.num_lanes) for slot in lanes.lane(lane)] == list(
        range(lanes.batch_size)
    )
    for lane, leaves in enumerate(lanes.leaves):
        assert [slot for part in leaves for slot in part.slots] == list(lanes.lane(lane))
        assert all(1 <= len(part.slots) <= lanes.leaf_images for part in leaves)
    assert lanes.largest_leaf == max(len(part.slots) for lane in lanes.leaves for part in lane)


@given(SIZES, st.data())
def test_owned__by_every_number_of_processes_each_leaf_has_one_owner(
    sizes: tuple[int, int, int], data: st.DataObject
) -> None:
    lanes = Lanes(*sizes)
    processes = data.draw(st.integers(1, lanes.num_leaves))
    owned = [lanes.owned(rank, processes) for rank in range(processes)]
    assert [leaf for own in owned for leaf in own] == list(range(lanes.num_leaves))
    assert all(owned)
    assert [s for rank in range(processes) for s in slots_of(lanes, rank, processes)] == list(
        range(lanes.batch_size)
    )
    for rank in range(processes):
        assert list(own_slots(lanes.batch_size, lanes, rank, processes)) == slots_of(lanes, rank, processes)
    if processes <= lanes.num_lanes:
        ends = {lanes.lane(number).stop for number in range(lanes.num_lanes)}
        assert {slots_of(lanes, rank, processes)[-1] + 1 for rank in range(processes)} <= ends


def test_leaves__the_example_of_the_paper() -> None:
    lanes = Lanes(4096, 8, 8)
    assert (lanes.num_leaves, len(lanes.leaves), lanes.owned(3, 4), lanes.owned(511, 512)) == (
        512, 8, range(384, 512), range(511, 512)
    )  # fmt: skip
    assert [len(lanes.owned(rank, 3)) // 64 for rank in range(3)] == [2, 3, 3]


def test_leaves__partners_stay_in_the_lane() -> None:
    lanes = Lanes(7, 2, 2)
    assert [[(list(part.slots), part.before) for part in lane] for lane in lanes.leaves] == [
        [([0, 1], 2), ([2], 1)],
        [([3, 4], 6), ([5, 6], 4)],
    ]


def test_micro_batches__without_lanes_partners_are_those_of_the_whole_batch() -> None:
    assert [(list(part.slots), part.before) for part in micro_batches(10, 2, 0, 3)] == [
        ([0, 1, 2], 9),
        ([3, 4], 2),
    ]
    assert [(list(part.slots), part.before) for part in micro_batches(10, 2, 1, 9)] == [([5, 6, 7, 8, 9], 4)]
    assert own_slots(10, None, 1, 3) == share(10, 3, 1) == range(3, 6)


@pytest.mark.parametrize(
    ("sizes", "processes"), [((4, 5, 1), 1), ((4, 0, 1), 1), ((4, 2, 0), 1), ((4, 2, 2), 3)]
)
def test_lanes__impossible_numbers(sizes: tuple[int, int, int], processes: int) -> None:
    with pytest.raises(DataError):
        Lanes(*sizes).owned(0, processes)


@given(st.integers(1, 90), SIZES, st.integers(0, 5), st.integers(0, 10**9))
def test_lane_order__every_epoch_visits_each_sample_once(
    num_samples: int, sizes: tuple[int, int, int], epoch: int, seed: int
) -> None:
    order = LaneOrder(Order(num_samples, seed), *sizes[:2])
    epochs, samples = order.at(np.arange(num_samples) + epoch * num_samples)
    assert set(epochs.tolist()) == {epoch}
    assert sorted(samples.tolist()) == list(range(num_samples))


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "num_lanes"), [(1000, 37, 8), (53, 8, 8), (96, 12, 4), (7, 20, 5)]
)
def test_lane_order__a_lane_walks_through_one_run_of_each_epoch(
    num_samples: int, batch_size: int, num_lanes: int
) -> None:
    """Over an order that does not shuffle, the samples show the run: without a gap, one lane's after the
    other's.
    """
    order = LaneOrder(Order(num_samples, 0, shuffle=False), batch_size, num_lanes)
    positions = np.arange(5 * num_samples)
    epochs, samples = order.at(positions)
    lanes = Lanes(batch_size, num_lanes, 1)
    for epoch in range(5):
        runs = []
        for lane in range(num_lanes):
            chosen = (epochs == epoch) & np.isin(positions % batch_size, lanes.lane(lane))
            runs += samples[chosen].tolist()
        assert runs == list(range(num_samples))


def test_lane_order__a_lane_reads_its_own_shards() -> None:
    """100 shards of 50 samples, 8 lanes, windows of 2 shards: a lane sees its 12.5 and those of the windows
    at its ends.
    """
    inside = WindowedOrder(5000, 3, 50, 2)
    order, positions = LaneOrder(inside, 64, 8), np.arange(5000)
    _, samples = order.at(positions)
    seen = [
        set((samples[np.isin(positions % 64, Lanes(64, 8, 8).lane(lane))] // 50).tolist())
        for lane in range(8)
    ]
    assert all(13 <= len(shards) <= 17 for shards in seen)
    assert sum(map(len, seen)) <= 100 + 7 * 4
    first = samples[(positions % 64 < 8) & (positions < 64 * 6)] // 50  # 48 samples of a window of 100
    assert len(set(first.tolist())) <= 2
    assert order.window_size == 8 * inside.window_size == 800


@pytest.mark.parametrize(
    "inside",
    [WindowedOrder(103, 1, 9, 3), MixtureOrder((WindowedOrder(70, 1, 7, 2), Order(33, 2)), (7, 3), 4)],
    ids=["windowed", "mixture"],
)
def test_lane_order__is_a_pure_function_of_the_position(inside: SampleOrder) -> None:
    order = LaneOrder(inside, 12, 5)
    epochs, samples = order.at(np.arange(500))
    alone = [order.at(np.array([position])) for position in range(0, 500, 37)]
    assert [(int(e[0]), int(s[0])) for e, s in alone] == list(
        zip(epochs[::37].tolist(), samples[::37].tolist(), strict=True)
    )


def test_lane_order__is_for_good() -> None:
    """These decide what a run trains on: a change would change every run with lanes and a windowed order."""
    order = LaneOrder(WindowedOrder(40, 1, 5, 2), 8, 4)
    assert order.at(np.arange(16))[1].tolist() == [33, 6, 10, 12, 3, 15, 37, 28, 34, 8, 14, 13, 16, 1, 35, 38]
    far = (
        LaneOrder(WindowedOrder(303_000_000, 1, 3030, 32), 4096, 8).at(np.array([0, 512, 10**12]))[1].tolist()
    )
    assert far == [223805029, 126351153, 97135882]
