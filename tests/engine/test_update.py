"""One update is one update of the global batch, however it is cut and whatever could not be read."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.engine.conftest import LOSS, batch, rows
from vitctl.data.loader.batches import Batch, take
from vitctl.engine.optimizer import Average
from vitctl.engine.update import Result, TrainStep

Make = Callable[..., TrainStep]


def weights(trainer: TrainStep) -> list[Tensor]:
    return [p.detach().clone() for p in trainer.network.parameters()]


def close(one: list[Tensor], two: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-13, atol=1e-15) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("cuts", [[8], [4, 4], [5, 3], [1, 6, 1], [1] * 8])
def test_update__does_not_depend_on_micro_batches(trainer: Make, cuts: list[int]) -> None:
    whole, reference, cut = batch(8), trainer(LOSS, clip_norm=0.5), trainer(LOSS, clip_norm=0.5)
    expected = reference.update(0, [whole]).result()
    ends = [sum(cuts[: i + 1]) for i in range(len(cuts))]
    got = cut.update(
        0, [rows(whole, slice(end - size, end)) for end, size in zip(ends, cuts, strict=True)]
    ).result()
    assert got.loss == pytest.approx(expected.loss, rel=1e-14)
    assert got.grad_norm == pytest.approx(expected.grad_norm, rel=1e-13)
    assert close(weights(reference), weights(cut))
    assert not close(weights(cut), weights(trainer(LOSS)))


def test_update__its_gradient_is_that_of_the_mean_loss(trainer: Make) -> None:
    whole, t = batch(8), trainer(LOSS, name="sgd", lr=lambda _: 1.0)
    logits = t.network(whole.images.double() / 255)
    mean = torch.nn.functional.cross_entropy(logits, whole.labels)
    grads = torch.autograd.grad(mean, list(t.network.parameters()))
    before = weights(t)
    result = t.update(0, [whole]).result()
    assert result.loss == pytest.approx(float(mean.detach()), rel=1e-14)
    assert result.grad_norm == pytest.approx(float(torch.sqrt(sum((g**2).sum() for g in grads))), rel=1e-13)
    assert close(weights(t), [w - g for w, g in zip(before, grads, strict=True)])


def spoil(whole: Batch, row: int) -> Batch:
    """The row as the loader gives what it could not read: zeros, weight 0, and a line in `bad`."""
    images, marks = whole.images.clone(), whole.weights.clone()
    images[row], marks[row] = 0, 0
    return replace(whole, images=images, weights=marks, bad=((row, f"key{row}", "damaged"),))


def test_update__a_bad_sample_is_as_if_it_had_not_been_drawn(trainer: Make) -> None:
    """The mean is over the images that could be read, also when the bad one is alone in its micro-batch."""
    whole = batch(8)
    kept = torch.tensor([i != 2 for i in range(8)])
    without = Batch(whole.images[kept], whole.labels[kept], whole.weights[kept], whole.samples[kept])
    reference = trainer(LOSS, batch_size=7, clip_norm=0.1)
    expected = reference.update(0, [without]).result()
    bad = spoil(whole, 2)
    alone = [rows(whole, slice(0, 2)), replace(rows(bad, slice(2, 3)), bad=bad.bad), rows(whole, slice(3, 8))]
    for parts in ([bad], alone):
        t = trainer(LOSS, batch_size=8, clip_norm=0.1)
        got = t.update(0, parts).result()
        assert got.loss == pytest.approx(expected.loss, rel=1e-14)
        assert got.grad_norm == pytest.approx(expected.grad_norm, rel=1e-13)
        assert got.num_bad == 1
        assert close(weights(t), weights(reference))


def test_update__a_batch_of_nothing_but_bad_samples_moves_nothing(trainer: Make) -> None:
    whole = batch(2)
    t = trainer(LOSS, batch_size=2, clip_norm=1.0)
    result = t.update(
        0, [replace(whole, weights=torch.zeros(2), bad=((0, "a", "x"), (1, "b", "x")))]
    ).result()
    assert (result.loss, result.grad_norm, result.num_bad) == (0.0, 0.0, 2)
    assert close(weights(t), weights(trainer(LOSS)))


def test_update__asks_for_the_rate_of_its_step_and_clips(trainer: Make) -> None:
    asked: list[int] = []

    def lr(step: int) -> float:
        asked.append(step)
        return 0.0

    t = trainer(LOSS, lr=lr, clip_norm=1e-3)
    results = [t.update(step, [batch(8, seed=step)]).result() for step in (0, 1, 7)]
    assert asked == [0, 1, 7]
    assert [r.lr for r in results] == [0.0] * 3
    assert close(weights(t), weights(trainer(LOSS)))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_update__a_loss_that_is_not_finite_is_skipped(trainer: Make, value: float) -> None:
    t, spoilt = (
        trainer(LOSS, name="adam", clip_norm=1.0),
        trainer(lambda logits, *_: logits.sum() * value, clip_norm=1.0),
    )
    before = weights(spoilt)
    result = spoilt.update(41, [batch(8)]).result()
    assert result.skipped
    assert result.gradient is not None
    norms = dict(zip(result.parameters, result.gradient, strict=True))
    assert set(norms) == {"body.weight", "body.bias", "head.weight", "head.bias"}
    assert not norms["head.bias"].isfinite()
    assert close(weights(spoilt), before)
    good = t.update(0, [batch(8)]).result()
    assert not good.skipped


def test_update__a_skipped_one_leaves_no_trace(trainer: Make) -> None:
    """The state of the optimizer too is as if it had not been tried: the next steps are those of a run
    without it.
    """
    straight, t = trainer(LOSS, name="adam", clip_norm=0.5), trainer(LOSS, name="adam", clip_norm=0.5)
    spoilt = replace(t, objective=lambda *_: t.network.head.bias.sum() * float("nan"))
    for step in range(3):
        straight.update(step, [batch(8, seed=step)])
        assert spoilt.update(step, [batch(8)]).result().skipped
        t.update(step, [batch(8, seed=step)])
    assert all(torch.equal(a, b) for a, b in zip(weights(t), weights(straight), strict=True))


def test_update__after_an_outage_nothing_changes_any_more(trainer: Make) -> None:
    """A GPU is told of the next update before the host has read that this one was lost."""
    t, straight = trainer(LOSS, name="adam"), trainer(LOSS, name="adam")
    for one in (t, straight):
        one.update(0, [batch(8)])
    away = replace(batch(8, seed=1), weights=torch.zeros(8), outage="away")
    results = [t.update(1, [away]).result(), t.update(2, [batch(8, seed=2)]).result()]
    assert [result.lost for result in results] == [True, True]
    assert all(torch.equal(a, b) for a, b in zip(weights(t), weights(straight), strict=True))


def test_warm_up__changes_nothing(trainer: Make) -> None:
    t, straight = trainer(LOSS, name="adam"), trainer(LOSS, name="adam")
    t.warm_up([batch(5), batch(3)])
    assert all(p.grad is None for p in t.network.parameters())
    t.update(0, [batch(8)])
    straight.update(0, [batch(8)])
    assert all(torch.equal(a, b) for a, b in zip(weights(t), weights(straight), strict=True))


def test_update__averages_after_the_step(trainer: Make) -> None:
    t = trainer(LOSS)
    t = replace(t, average=Average(t.network, 0.5))
    before = weights(t)
    t.update(0, [batch(8)])
    assert t.average is not None
    halves = [(a + b) / 2 for a, b in zip(before, weights(t), strict=True)]
    assert close(list(t.average.tensors.values()), halves)


def test_take__whole_shares() -> None:
    parts = iter([batch(5), batch(3), batch(5), batch(3)])
    assert [len(b) for b in take(parts, 8)] == [5, 3]
    assert [len(b) for b in take(parts, 8)] == [5, 3]


def test_result__is_plain_numbers(trainer: Make) -> None:
    result = trainer(LOSS).update(0, [batch(8)]).result()
    assert [type(v) for v in (result.loss, result.grad_norm, result.lr, result.num_bad, result.stop)] == [
        float,
        float,
        float,
        int,
        bool,
    ]
    assert isinstance(result, Result)


@pytest.mark.parametrize(("processes", "waits"), [(1, False), (2, True)])
def test_parts__the_exchange_begins_where_the_backward_pass_ends(
    trainer: Make, processes: int, waits: bool
) -> None:
    """DDP waits at the end of the pass, after the callbacks that were there before."""
    one = trainer(LOSS)
    counts = torch.tensor([8.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    one.gradients = lambda backward, step, batches, _stopped: torch.cat(
        [backward(batches[0], step, processes)[None], counts]
    )
    stamps = one.update(0, [batch(8)]).stamps
    exchange = ["exchange"] * waits
    assert [part for part, _ in stamps] == ["forward", "forward", "backward", *exchange, "optimizer", ""]
    assert one.runtime.clock.taken()[0][0] == ""  # the next step has stamps of its own
