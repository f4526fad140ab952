"""Every image once, or no score."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, one_hot

from tests.engine.conftest import NUM_CLASSES, Tiny, batch, rows
from tests.fake_card import FakeCard, card_runtime
from vitctl.data.loader.batches import Batch
from vitctl.engine.evaluation import Score, evaluate_model, representations, top_predictions
from vitctl.engine.preemption import StopFlag, Stopped
from vitctl.engine.runtime import Runtime
from vitctl.errors import DataError


def scaled(images: torch.Tensor) -> torch.Tensor:
    return images.double() / 255


def padded(whole: Batch, extra: int) -> Batch:
    """The batch and rows that do not count, as the last batch of a process has them."""
    more = batch(extra, seed=9)
    return Batch(
        torch.cat([whole.images, more.images]),
        torch.cat([whole.labels, more.labels]),
        torch.cat([whole.weights, torch.zeros(extra)]),
        torch.cat([whole.samples, torch.full((extra,), -1)]),
    )


def test_evaluate__counts_right_answers_and_not_the_padding(runtime: Runtime) -> None:
    model, whole = Tiny(), batch(23)
    right = int((model(scaled(whole.images)).argmax(1) == whole.labels).sum())
    assert 0 < right < 23
    parts = [rows(whole, slice(0, 10)), rows(whole, slice(10, 20)), padded(rows(whole, slice(20, 23)), 7)]
    score = evaluate_model(runtime, model, parts, num_images=23, normalise=scaled, stop=StopFlag())
    assert score == Score(right, 23)
    assert score.accuracy == right / 23


def test_evaluate__a_batch_of_padding_alone_counts_nothing(runtime: Runtime) -> None:
    """Of a process that has no more images while others have."""
    nothing = padded(rows(batch(8), slice(0, 0)), 4)
    evaluate = partial(evaluate_model, runtime, Tiny(), num_images=8, normalise=scaled, stop=StopFlag())
    assert evaluate([batch(8), nothing]) == evaluate([batch(8)])


@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_evaluate__the_loss_is_torchs_mean_whatever_the_batches(runtime: Runtime, name: str) -> None:
    model, whole = Tiny(), batch(23)
    run = partial(evaluate_model, runtime, model, num_images=23, normalise=scaled, stop=StopFlag(), loss=name)
    parts = [
        padded(rows(whole, slice(20, 23)), 7),
        *(rows(whole, slice(at, at + 4)) for at in range(0, 20, 4)),
    ]
    scores = [replace(run(some), metric="loss") for some in ([whole], parts)]
    logits = model(scaled(whole.images)).detach()
    if name == "softmax":
        expected = cross_entropy(logits, whole.labels)
    else:
        truth = one_hot(whole.labels, NUM_CLASSES).double()
        expected = binary_cross_entropy_with_logits(logits, truth) * NUM_CLASSES
    assert scores[0].means == scores[1].means and scores[0].number == -scores[0].deciding
    assert scores[0].number == pytest.approx(float(expected), abs=2**-24)
    assert Score.of(scores[0].numbers).means == scores[0].means
    by_step = dict(enumerate([scores[0], replace(scores[0], means={"loss": 9.0}), scores[0]]))
    assert Score.since_best(by_step) == 2


def test_evaluate__a_loss_that_is_not_finite_is_no_score(runtime: Runtime) -> None:
    model = Tiny()
    torch.nn.init.constant_(next(model.parameters()), torch.nan)
    with pytest.raises(DataError, match="NaN or infinite"):
        evaluate_model(
            runtime, model, [batch(8)], num_images=8, normalise=scaled, stop=StopFlag(), loss="softmax"
        )


@pytest.mark.parametrize("num_images", [7, 9])
def test_evaluate__refuses_a_count_that_is_not_the_splits(runtime: Runtime, num_images: int) -> None:
    with pytest.raises(
        DataError, match=f"evaluation counted 8 images, the split has {num_images}; no score is given"
    ):
        evaluate_model(runtime, Tiny(), [batch(8)], num_images=num_images, normalise=scaled, stop=StopFlag())


def test_evaluate__turns_dropout_off_and_keeps_no_graph(runtime: Runtime) -> None:
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Dropout(0.9), torch.nn.Linear(48, 3, dtype=torch.float64)
    )
    run = partial(evaluate_model, runtime, model, num_images=20, normalise=scaled, stop=StopFlag())
    assert run([batch(20)]) == run([batch(20)])


def test_evaluate__stops_between_batches(runtime: Runtime) -> None:
    stop, seen = StopFlag(), []

    def batches():  # type: ignore[no-untyped-def]
        for number in range(9):
            seen.append(number)
            if number == 2:
                stop.raise_(15)
            yield batch(2)

    with pytest.raises(Stopped):
        evaluate_model(runtime, Tiny(), batches(), num_images=18, normalise=scaled, stop=stop)
    assert seen == [0, 1, 2]


def test_representations__come_in_the_order_of_the_split(runtime: Runtime) -> None:
    model, whole = Tiny(), batch(11)
    mixed = [rows(whole, slice(7, 11)), padded(rows(whole, slice(0, 3)), 2), rows(whole, slice(3, 7))]
    table = representations(runtime, model, mixed, num_images=11, normalise=scaled, stop=StopFlag())
    assert table.dtype == torch.float32
    with torch.no_grad():
        expected = model.features(scaled(whole.images)).float()
    torch.testing.assert_close(table, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("samples", [[0, 1, 2, 2], [0, 1, 2, -1]])
def test_representations__refuse_the_missing_and_the_doubled(runtime: Runtime, samples: list[int]) -> None:
    odd = replace(batch(4), samples=torch.tensor(samples))
    with pytest.raises(DataError, match="3 different images were read, the split has 4"):
        representations(runtime, Tiny(), [odd], num_images=4, normalise=scaled, stop=StopFlag())


def test_evaluate__an_image_without_its_one_label_is_no_wrong_answer(runtime: Runtime) -> None:
    whole = batch(12)
    whole.labels[[3, 7]] = -1
    with pytest.raises(DataError, match="2 of the 12 images have no label; no score is given"):
        evaluate_model(runtime, Tiny(), [whole], num_images=12, normalise=scaled, stop=StopFlag())


def test_evaluate__several_labels(runtime: Runtime) -> None:
    """Every image comes through; those without a label are in neither number."""
    model, whole = Tiny(), batch(12)
    predicted = model(scaled(whole.images)).argmax(1)
    other = (predicted + 1) % 3
    labels = torch.stack([other, torch.full((12,), -1)], dim=1)
    labels[:5, 1] = predicted[:5]
    labels[9:] = -1
    parts = [replace(whole, labels=labels)]
    assert evaluate_model(runtime, model, parts, num_images=12, normalise=scaled, stop=StopFlag()) == Score(
        5, 9
    )
    parts = [replace(parts[0], labels=torch.full_like(labels, -1))]
    with pytest.raises(DataError, match="none of the 12 images has a label; there is nothing to score"):
        evaluate_model(runtime, model, parts, num_images=12, normalise=scaled, stop=StopFlag())


def test_best_answers__come_in_order_and_begin_with_the_argmax(runtime: Runtime) -> None:
    model, whole = Tiny(), batch(11)
    mixed = [rows(whole, slice(7, 11)), padded(rows(whole, slice(0, 3)), 2), rows(whole, slice(3, 7))]
    best = top_predictions(runtime, model, mixed, num_images=11, normalise=scaled, stop=StopFlag())
    logits = model(scaled(whole.images))
    assert best.tolist() == logits.argsort(dim=1, descending=True).tolist()
    assert best[:, 0].tolist() == logits.argmax(dim=1).tolist()


def test_best_answers__equals_go_by_number_and_answers_may_be_fewer(runtime: Runtime) -> None:
    run = partial(top_predictions, runtime, Tiny(), num_images=3, normalise=scaled, stop=StopFlag())
    assert run([batch(3)], to_scores=torch.zeros_like).tolist() == [[0, 1, 2]] * 3
    assert run([batch(3)], to_scores=lambda logits: logits[:, :1]).tolist() == [[0]] * 3
    with pytest.raises(DataError, match="2 different images were read, the split has 3"):
        run([batch(2)])


def on_a_gpu(function, num_batches: int, normalise=None, **more) -> list[str]:  # type: ignore[no-untyped-def]
    """What the host waited for in a pass over batches."""
    model, batches = Tiny(torch.float32), [batch(4, seed=n, first=4 * n) for n in range(num_batches)]
    with FakeCard() as card:
        card.put(model)
        runtime = card_runtime()
        shown = normalise or runtime.normaliser((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
        card.waits.clear()
        more["num_images"] = 4 * num_batches
        found = function(runtime, model, iter(batches), normalise=shown, stop=StopFlag(), **more)
        if isinstance(found, Score):  # the card answers 0 whatever it is asked
            assert found.correct == sum(int((one.labels == 0).sum()) for one in batches)
        return card.waits


@pytest.mark.parametrize("num_batches", [1, 7])
def test_evaluation__waits_for_a_gpu_at_the_end_alone(num_batches: int) -> None:
    assert len(on_a_gpu(evaluate_model, num_batches)) == 1
    assert len(on_a_gpu(representations, num_batches)) == 1
    (shape,) = [wait for wait in on_a_gpu(top_predictions, num_batches) if "copy" in wait]
    assert f"[{4 * num_batches}, {NUM_CLASSES}]" in shape
