import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitctl.data.source.order import BLOCK_SIZE, MixtureOrder, Order, SampleOrder, WindowedOrder, quotas
from vitctl.errors import DataError

WALKS: tuple[SampleOrder, ...] = (Order(100, 1), WindowedOrder(51, 2, 5, 3), Order(3, 3))


@given(
    st.sampled_from([*WALKS, Order(500, 3), WindowedOrder(500, 3, 60, 4), MixtureOrder(WALKS, (5, 3, 2), 3)]),
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


def test_order__position_and_sample_are_independent() -> None:
    num_samples, num_epochs = 100, 4000
    _, samples = Order(num_samples, 9).at(np.arange(num_samples * num_epochs))
    table = np.stack(
        [np.bincount(column, minlength=num_samples) for column in samples.reshape(num_epochs, -1).T]
    )
    expected = num_epochs / num_samples
    assert abs(_z(float(((table - expected) ** 2 / expected).sum()), (num_samples - 1) ** 2)) < 4


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


def test_order__seeds_are_unrelated() -> None:
    positions = np.arange(10_000)
    draws = [Order(10_000, seed).at(positions)[1] for seed in (0, 1, 2**64 - 1)]
    for one, other in itertools.combinations(draws, 2):
        assert (one == other).sum() < 10  # about one meeting is expected


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


def test_windowed_order__epochs_and_seeds_differ() -> None:
    positions = np.arange(10_000)
    draws = [
        WindowedOrder(10_000, seed, 100, 10).at(positions + epoch * 10_000)[1]
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    for one, other in itertools.combinations(draws, 2):
        assert (one == other).sum() < 10


def test_windowed_order__one_window_looks_like_chance() -> None:
    _, samples = WindowedOrder(50_000, 2, 1000, 50).at(np.arange(50_000))
    limit = 4 / math.sqrt(50_000)
    assert abs(np.corrcoef(np.arange(50_000), samples)[0, 1]) < limit
    assert abs(np.corrcoef(samples[:-1], samples[1:])[0, 1]) < limit


def test_windowed_order__the_short_block_comes_anywhere() -> None:
    order = WindowedOrder(105, 0, block_size=10, window_blocks=1)
    _, samples = order.at(np.arange(105 * 2000))
    where = np.argwhere(samples.reshape(2000, 105) == 104)[:, 1] // 10
    assert np.bincount(where, minlength=11).min() > 100


def test_windowed_order__is_pinned() -> None:
    assert WindowedOrder(12, 0, 3, 2).at(np.arange(12))[1].tolist() == [2, 9, 10, 0, 1, 11, 6, 8, 5, 7, 3, 4]
    far = WindowedOrder(303_000_000, 1, 3030, 32).at(np.array([0, 1, 10**12]))[1].tolist()
    assert far == [223805029, 280660448, 104612254]


@pytest.mark.parametrize("numbers", [(0, 1, 1), (2**40 + 1, 1, 1), (5, 0, 1), (5, 1, 0)])
def test_windowed_order__refuses_numbers_out_of_range(numbers: tuple[int, int, int]) -> None:
    num_samples, block_size, window_blocks = numbers
    with pytest.raises(ValueError, match="should be"):
        WindowedOrder(num_samples, 0, block_size, window_blocks)


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


@pytest.mark.parametrize("counts", [(3, 1), (3, 1, 0)])
def test_mixture_order__refuses_other_counts(counts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="for 3 orders"):
        MixtureOrder(WALKS, counts, 0)


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


def test_mixture_order__blocks_and_seeds_have_orders_of_their_own() -> None:
    walks = (Order(10**6, 1), Order(10**6, 2))
    from_first = [
        MixtureOrder(walks, quotas((1, 1)), seed).at(np.arange(BLOCK_SIZE) + block * BLOCK_SIZE)[1] < 10**6
        for seed in (0, 1)
        for block in (0, 1)
    ]
    for number, one in enumerate(from_first):
        assert one.sum() == BLOCK_SIZE // 2
        for other in from_first[:number]:
            assert abs((one == other).mean() - 0.5) < 0.05
        assert abs((one[1:] == one[:-1]).mean() - 0.5) < 0.05


def test_mixture_order__one_source_is_itself_shuffled_in_blocks() -> None:
    order = MixtureOrder((Order(12, 4),), (6,), 9)
    epochs, samples = order.at(np.arange(24))
    assert epochs.tolist() == [0] * 12 + [1] * 12
    for begin in range(0, 24, 6):
        assert set(samples[begin : begin + 6]) == set(Order(12, 4).at(np.arange(begin, begin + 6))[1])


def test_mixture_order__is_pinned() -> None:
    order = MixtureOrder(WALKS, (5, 3, 2), 3)
    assert order.at(np.array([0, 1, 2, 3, 10**12]))[1].tolist() == [84, 151, 143, 46, 3]
