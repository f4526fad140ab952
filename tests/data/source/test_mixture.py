from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitctl.data.source.mixture import BLOCK_SIZE, MixtureOrder, quotas
from vitctl.data.source.order import Order, SampleOrder, WindowedOrder
from vitctl.errors import DataError

WALKS: tuple[SampleOrder, ...] = (Order(100, 1), WindowedOrder(51, 2, 5, 3), Order(3, 3))


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


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=40))
def test_mixture_order__a_position_does_not_depend_on_its_company(positions: list[int]) -> None:
    order = MixtureOrder(WALKS, (5, 3, 2), 3)
    together = order.at(np.array(positions))
    alone = [order.at(np.array([position])) for position in positions]
    assert together[0].tolist() == [int(epochs[0]) for epochs, _ in alone]
    assert together[1].tolist() == [int(samples[0]) for _, samples in alone]


def test_mixture_order__one_source_is_itself_shuffled_in_blocks() -> None:
    order = MixtureOrder((Order(12, 4),), (6,), 9)
    epochs, samples = order.at(np.arange(24))
    assert epochs.tolist() == [0] * 12 + [1] * 12
    for begin in range(0, 24, 6):
        assert set(samples[begin : begin + 6]) == set(Order(12, 4).at(np.arange(begin, begin + 6))[1])


def test_mixture_order__is_pinned() -> None:
    order = MixtureOrder(WALKS, (5, 3, 2), 3)
    assert order.at(np.array([0, 1, 2, 3, 10**12]))[1].tolist() == [84, 151, 143, 46, 3]
