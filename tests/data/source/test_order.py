"""Orders, and lanes: slots, leaves, owners, and the order in which each lane walks through the data."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitctl.data.source.order import (
    BalancedOrder,
    LaneOrder,
    Lanes,
    MixtureOrder,
    Order,
    RepeatedOrder,
    SampleOrder,
    WindowedOrder,
    micro_batches,
    own_slots,
    quotas,
    share,
)
from vitctl.errors import DataError

LABELS = np.array([2, 0, 1, 0, 0, 1, 0, 0, 0, 1])  # 6, 3 and 1 samples of three classes
WALKS: tuple[SampleOrder, ...] = (Order(100, 1), WindowedOrder(51, 2, 5, 3), Order(3, 3))


@given(
    st.sampled_from(
        [
            *WALKS,
            Order(500, 3),
            WindowedOrder(500, 3, 60, 4),
            MixtureOrder(WALKS, (5, 3, 2), 3),
            BalancedOrder.of(LABELS, 3, 3),
        ]
    ),
    st.lists(st.integers(0, 10**12), min_size=1, max_size=40),
)
def test_orders__a_position_does_not_depend_on_its_company(order: SampleOrder, positions: list[int]) -> None:
    together = order.at(np.array(positions))
    alone = [order.at(np.array([position])) for position in positions]
    assert together[0].tolist() == [int(epochs[0]) for epochs, _ in alone]
    assert together[1].tolist() == [int(samples[0]) for _, samples in alone]


@given(st.integers(1, 3000), st.integers(-5, 2**70), st.integers(0, 2**40))
def test_order__every_epoch_is_a_bijection(num_samples: int, seed: int, epoch: int) -> None:
    epochs, samples = Order(num_samples, seed).at(np.arange(num_samples) + epoch * num_samples)
    assert (epochs == epoch).all()
    assert (np.sort(samples) == np.arange(num_samples)).all()


def test_order__without_shuffle_is_storage_order() -> None:
    epochs, samples = Order(3, 0, shuffle=False).at(np.arange(7))
    assert epochs.tolist() == [0, 0, 0, 1, 1, 1, 2]
    assert samples.tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_order__is_pinned() -> None:
    assert Order(10, 0).at(np.arange(10))[1].tolist() == [5, 6, 1, 8, 0, 9, 3, 4, 2, 7]
    assert Order(303_000_000, 1).at(np.array([0, 1, 10**12]))[1].tolist() == [243204896, 58523708, 72207209]


@pytest.mark.parametrize("num_samples", [2**40, 303_000_000, 2**28 + 1])
def test_order__large_sets_stay_in_range_without_repeats(num_samples: int) -> None:
    _, samples = Order(num_samples, 5).at(np.arange(20_000))
    assert samples.min() >= 0
    assert samples.max() < num_samples
    assert len(np.unique(samples)) == 20_000


@pytest.mark.parametrize("num_samples", [0, -1, 2**40 + 1])
def test_order__refuses_sizes_out_of_range(num_samples: int) -> None:
    with pytest.raises(ValueError, match="should be 1 to"):
        Order(num_samples, 0)


@pytest.mark.parametrize("num_samples", [2, 3, 4, 5])
def test_order__small_sets_meet_every_permutation_equally(num_samples: int) -> None:
    num_epochs = 12_000
    _, samples = Order(num_samples, 3).at(np.arange(num_epochs * num_samples))
    counts = Counter(map(tuple, samples.reshape(num_epochs, num_samples).tolist()))
    expected = num_epochs / math.factorial(num_samples)
    permutations = itertools.permutations(range(num_samples))
    chi_square = sum((counts[permutation] - expected) ** 2 / expected for permutation in permutations)
    assert _z(chi_square, math.factorial(num_samples) - 1) < 4


def test_order__looks_like_chance() -> None:
    num_samples = 50_000
    _, samples = Order(num_samples, 2).at(np.arange(2 * num_samples))
    first, second = samples[:num_samples], samples[num_samples:]
    limit = 4 / math.sqrt(num_samples)
    assert abs(np.corrcoef(np.arange(num_samples), first)[0, 1]) < limit
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < limit
    assert abs(np.corrcoef(first, second)[0, 1]) < limit
    steps = np.diff(first) % num_samples  # uniform over the circle
    counts = np.bincount(steps * 100 // num_samples, minlength=100)
    assert abs(_z(float(((counts - len(steps) / 100) ** 2 / (len(steps) / 100)).sum()), 99)) < 4


@given(
    st.integers(1, 700), st.integers(1, 90), st.integers(1, 9), st.integers(-5, 2**70), st.integers(0, 2**30)
)
def test_windowed_order__every_epoch_is_a_bijection(
    num_samples: int, block_size: int, window_blocks: int, seed: int, epoch: int
) -> None:
    order = WindowedOrder(num_samples, seed, block_size, window_blocks)
    epochs, samples = order.at(np.arange(num_samples) + epoch * num_samples)
    assert (epochs == epoch).all()
    assert (np.sort(samples) == np.arange(num_samples)).all()


@given(st.integers(1, 3000), st.integers(1, 90), st.integers(1, 9), st.integers(0, 2**30))
def test_windowed_order__a_window_reads_only_its_blocks(
    num_samples: int, block_size: int, window_blocks: int, epoch: int
) -> None:
    order = WindowedOrder(num_samples, 7, block_size, window_blocks)
    _, samples = order.at(np.arange(num_samples) + epoch * num_samples)
    window_size = block_size * window_blocks
    openings: Counter[int] = Counter()
    for begin in range(0, num_samples, window_size):
        blocks = set((samples[begin : begin + window_size] // block_size).tolist())
        assert len(blocks) <= window_blocks + 2  # the short block moves those behind it over a window's edge
        openings.update(blocks)
    assert sum(openings.values()) <= -(-num_samples // block_size) + -(-num_samples // window_size)


def test_windowed_order__equal_shards_are_read_once_an_epoch() -> None:
    order = WindowedOrder(40 * 25, 1, block_size=25, window_blocks=8)
    _, samples = order.at(np.arange(2000))
    windows = [set((samples[begin : begin + 200] // 25).tolist()) for begin in range(0, 2000, 200)]
    assert all(len(shards) == 8 for shards in windows)
    for epoch in (windows[:5], windows[5:]):
        assert set.union(*epoch) == set(range(40))
    assert not any(shards in windows[:5] for shards in windows[5:])  # other shards meet in the next epoch


def test_windowed_order__is_pinned() -> None:
    assert WindowedOrder(12, 0, 3, 2).at(np.arange(12))[1].tolist() == [2, 9, 10, 0, 1, 11, 6, 8, 5, 7, 3, 4]
    far = WindowedOrder(303_000_000, 1, 3030, 32).at(np.array([0, 1, 10**12]))[1].tolist()
    assert far == [223805029, 280660448, 104612254]


def _z(chi_square: float, degrees: int) -> float:
    return (chi_square - degrees) / math.sqrt(2 * degrees)


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=20), st.integers(300, 5000))
def test_quotas__are_whole_and_near(weights: list[float], block_size: int) -> None:
    if min(weights) / sum(weights) * block_size < 1:
        return
    counts = quotas(weights, block_size)
    assert sum(counts) == block_size
    exact = np.array(weights) / sum(weights) * block_size
    assert (np.abs(np.array(counts) - exact) < 1).all()


def test_quotas__the_largest_remainders_are_rounded_up() -> None:
    assert quotas((1, 1, 1), 10) == (4, 3, 3)
    assert quotas((0.55, 0.26, 0.19), 10) == (5, 3, 2)
    with pytest.raises(DataError, match=r"weight 0.0001 is .* of the mixture, should be at least 1/4096"):
        quotas((1, 0.0001))


def test_mixture_order__shares_are_exact_and_each_source_walks_on() -> None:
    counts = (7, 2, 1)
    order = MixtureOrder(WALKS, counts, 5)
    assert order.num_samples == 154
    epochs, samples = order.at(np.arange(10 * 300))
    begins = np.array([0, 100, 151, 154])
    for block in range(300):
        inside = np.searchsorted(begins, samples[block * 10 : block * 10 + 10], side="right") - 1
        assert Counter(inside.tolist()) == {0: 7, 1: 2, 2: 1}
    for number, walk in enumerate(WALKS):
        mine = (samples >= begins[number]) & (samples < begins[number + 1])
        own_epochs, own_samples = walk.at(np.arange(300 * counts[number]))
        # Within a block the order is drawn, over blocks the walk goes on: block by block the same samples
        # come.
        shape = (300, counts[number])
        found = np.sort(((samples[mine] - begins[number]) + 1000 * epochs[mine]).reshape(shape))
        assert (found == np.sort((own_samples + 1000 * own_epochs).reshape(shape))).all()


def test_mixture_order__is_pinned() -> None:
    order = MixtureOrder(WALKS, (5, 3, 2), 3)
    assert order.at(np.array([0, 1, 2, 3, 10**12]))[1].tolist() == [84, 151, 143, 46, 3]


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


@given(st.lists(st.integers(0, 4), max_size=60), st.integers(0, 2**40), st.integers(0, 10**9))
def test_balanced_order__every_class_in_every_block_and_its_samples_in_turn(
    labels: list[int], seed: int, first: int
) -> None:
    of = np.array([*range(5), *labels])
    order = BalancedOrder.of(of, 5, seed)
    assert (order.num_samples, order.window_size) == (len(of), 0)
    epochs, samples = order.at(np.arange(5 * first, 5 * (first + len(of))))
    drawn = of[samples].reshape(-1, 5)
    assert (np.sort(drawn, axis=1) == np.arange(5)).all()
    for label in range(5):
        mine, size = of[samples] == label, int((of == label).sum())
        assert epochs[mine].tolist() == [(first + block) // size for block in range(len(of))]
        for epoch in np.unique(epochs[mine]):
            passed = samples[mine & (epochs == epoch)]
            assert len(set(passed.tolist())) == len(passed)


def test_balanced_order__is_pinned_and_its_blocks_are_shuffled() -> None:
    order = BalancedOrder.of(LABELS, 3, 0)
    assert order.at(np.arange(12))[1].tolist() == [0, 3, 5, 0, 2, 7, 1, 9, 0, 0, 8, 9]
    assert order.at(np.array([10**12]))[1].tolist() == [5]
    drawn = BalancedOrder.of(LABELS, 3, 1).at(np.arange(18_000))[1]
    first = np.bincount(LABELS[drawn[::3]], minlength=3)
    assert (abs(first - 2000) < 200).all()
    assert np.bincount(drawn, minlength=10).tolist() == [1000 * 6 // int((x == LABELS).sum()) for x in LABELS]


@pytest.mark.parametrize(("num_samples", "repeats", "batch_size"), [(70, 3, 21), (64, 2, 16), (50, 4, 9)])
def test_repeated_order__an_epoch_is_that_of_deits_sampler(
    num_samples: int, repeats: int, batch_size: int
) -> None:
    """Its rule: the shuffled images, each so many times in a row, cut off after the number of images."""
    inside = Order(num_samples, 3)
    order = RepeatedOrder(inside, repeats, batch_size)
    epochs, samples = order.at(np.arange(2 * num_samples * batch_size))
    drawn = list(zip(epochs.tolist(), samples.tolist(), strict=True))
    assert len(set(drawn)) == len(drawn)  # so every copy is augmented otherwise
    for first in range(0, len(drawn), batch_size):
        at = np.arange(first, first + batch_size)
        shuffled = [
            inside.at(np.arange(num_samples) + epoch * num_samples)[1].repeat(repeats)[:num_samples]
            for epoch in np.unique(at // num_samples)
        ]
        expected = np.concatenate(shuffled)[at - at[0] // num_samples * num_samples]
        assert sorted(samples[at]) == sorted(expected)
        if not first % num_samples:  # dealt out: first copies first, and no neighbour is the same image
            assert (samples[at] != np.roll(samples[at], 1)).all()
            assert len(set(samples[at][: batch_size // repeats])) == batch_size // repeats
