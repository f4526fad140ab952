import pickle
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.conftest import store
from tests.matrix import each, slow, spread
from vitctl.data.datasets.readers.arrays import encode_png
from vitctl.data.images.decode import decode
from vitctl.data.images.transforms import EvalTransform, TrainTransform, augmentation_rng
from vitctl.data.loader import batches as module
from vitctl.data.loader.batches import Batch, eval_batches, train_batches
from vitctl.data.shards.index import Index, has_label
from vitctl.data.source.order import Order, share
from vitctl.data.source.stores import ShardSource, SyntheticSource
from vitctl.data.source.views import Source, concat, subset
from vitctl.data.writer.intake import Item
from vitctl.errors import DataError
from vitctl.system import limits

MakeSplit = Callable[..., Index]
SIZE, GLOBAL = 8, 10
TRAIN, EVAL = TrainTransform(SIZE), EvalTransform(SIZE)


def train(source: Source, **changes: Any) -> Iterator[Batch]:
    arguments: dict[str, Any] = {
        "seed": 5,
        "batch_size": GLOBAL,
        "micro_batch": 4,
        "rank": 0,
        "num_processes": 1,
        "first_step": 0,
        "num_workers": 0,
        **changes,
    }
    order = arguments.pop("order", Order(len(source), 1))
    return train_batches(source, order, TRAIN, **arguments)


def joined(batches: list[Batch]) -> dict[str, Any]:
    return {
        "images": torch.cat([batch.images for batch in batches]),
        "labels": torch.cat([batch.labels for batch in batches]),
        "weights": torch.cat([batch.weights for batch in batches]),
        "samples": torch.cat([batch.samples for batch in batches]),
        "bad": [bad for batch in batches for bad in batch.bad],
    }


def steps(source: Source, num_steps: int, **changes: Any) -> list[dict[str, Any]]:
    """Global batches as all ranks together see them."""
    num_processes, micro_batch = changes.get("num_processes", 1), changes.get("micro_batch", 4)
    ranks = []
    for rank in range(num_processes):
        own = len(share(GLOBAL, num_processes, rank))
        per_step = -(-own // micro_batch)
        batches = train(source, rank=rank, **changes)
        ranks.append([list(islice(batches, per_step)) for _ in range(num_steps)])
    return [joined([batch for rank in ranks for batch in rank[step]]) for step in range(num_steps)]


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    tensors = ("images", "labels", "weights", "samples")
    return one["bad"] == other["bad"] and all(torch.equal(one[name], other[name]) for name in tensors)


def test_train_batches__are_what_the_definition_says(make_split: MakeSplit) -> None:
    source = ShardSource(make_split(23))
    order = Order(23, 1)
    found = steps(source, 5)
    for step, batch in enumerate(found):
        epochs, samples = order.at(np.arange(step * GLOBAL, (step + 1) * GLOBAL))
        assert batch["samples"].tolist() == samples.tolist()
        assert batch["labels"].tolist() == source.labels(samples).tolist()
        assert batch["weights"].tolist() == [1] * GLOBAL
        for image, epoch, sample in zip(batch["images"], epochs.tolist(), samples.tolist(), strict=True):
            expected = TRAIN(decode(source.read(sample)), augmentation_rng(5, epoch, sample))
            assert torch.equal(image, expected)
    drawn = torch.cat([batch["samples"] for batch in found]).tolist()
    assert sorted(drawn[:23]) == sorted(drawn[23:46]) == list(range(23))


@pytest.mark.parametrize(
    ("num_processes", "num_workers"), [(1, 0), (3, 0), (3, 1), *slow((2, 0), (8, 0), (1, 2))]
)
def test_train_batches__do_not_depend_on_the_machine(
    make_split: MakeSplit, num_processes: int, num_workers: int
) -> None:
    source = ShardSource(make_split(23, bad=(3, 11)))
    expected = steps(source, 3)
    assert sum(len(batch["bad"]) for batch in expected) >= 2
    for micro_batch in (1, 3, 100) if num_workers == 0 else (3,):
        found = steps(
            source, 3, num_processes=num_processes, num_workers=num_workers, micro_batch=micro_batch
        )
        assert all(same(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("first_step", [1, 2, 7, 10**9])
def test_train_batches__resume_gives_the_same_rest(first_step: int) -> None:
    source = SyntheticSource(23, 3, 12)
    resumed = steps(source, 2, first_step=first_step)
    if first_step < 100:
        straight = steps(source, first_step + 2)[first_step:]
        assert all(same(one, other) for one, other in zip(resumed, straight, strict=True))
    _, samples = Order(23, 1).at(np.arange(first_step * GLOBAL, (first_step + 2) * GLOBAL))
    assert torch.cat([batch["samples"] for batch in resumed]).tolist() == samples.tolist()


@pytest.mark.parametrize(
    ("num_processes", "micro_batch", "num_workers"), [(1, 10, 0), (3, 2, 0), *slow((1, 3, 2), (8, 1, 0))]
)
def test_train_batches__neighbours_are_those_before_in_the_global_batch(
    make_split: MakeSplit, num_processes: int, micro_batch: int, num_workers: int
) -> None:
    source = ShardSource(make_split(23, bad=(3, 11)))
    expected = steps(source, 3)
    assert sum(len(batch["bad"]) for batch in expected) >= 2
    changes = {"num_processes": num_processes, "micro_batch": micro_batch, "num_workers": num_workers}
    found = steps(source, 3, neighbours=True, **changes)
    assert all(same(one, other) for one, other in zip(found, expected, strict=True))
    for rank in range(num_processes):
        own = share(GLOBAL, num_processes, rank)
        batches = train(source, rank=rank, neighbours=True, **changes)
        for step in range(3):
            for first in range(own.start, own.stop, micro_batch):
                neighbour, before = next(batches).neighbour, (first - 1) % GLOBAL
                assert neighbour is not None
                for name in ("images", "labels", "weights", "samples"):
                    assert torch.equal(getattr(neighbour, name)[0], expected[step][name][before])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_train_batches__leave_global_chance_alone(num_workers: int) -> None:
    torch_state, numpy_state, python_state = (
        torch.get_rng_state(),
        np.random.get_state()[1],
        random.getstate(),
    )
    list(islice(train(SyntheticSource(23, 3, 12), num_workers=num_workers), 4))
    assert torch.equal(torch.get_rng_state(), torch_state)
    np.testing.assert_array_equal(np.random.get_state()[1], numpy_state)
    assert random.getstate() == python_state


@pytest.mark.parametrize("num_workers", [0, 2])
def test_train_batches__bad_samples_weigh_nothing(make_split: MakeSplit, num_workers: int) -> None:
    source = ShardSource(make_split(20, bad=(4,)))
    bad = next(sample for sample in range(20) if source.key(sample) == "k4")
    batch = joined(list(islice(train(source, num_workers=num_workers, micro_batch=GLOBAL), 2)))
    row = batch["samples"].tolist().index(bad)
    assert batch["bad"] == [(bad, "k4", "truncated")]
    assert not batch["images"][row].any()
    assert batch["weights"].tolist() == [float(number != row) for number in range(20)]


def test_train_batches__unlabelled_samples_are_bad() -> None:
    class Unlabelled(SyntheticSource):
        def labels(self, samples: np.ndarray | None = None) -> np.ndarray:
            labels = super().labels(samples)
            return np.where(labels == 2, -1, labels)

    batch = next(train(Unlabelled(30, 3, 12), micro_batch=30))
    lost = batch.samples % 3 == 2
    assert {reason for _, _, reason in batch.bad} == {"no label"}
    assert len(batch.bad) == int(lost.sum()) > 0
    assert batch.labels.min() == 0
    assert torch.equal(batch.weights, (~lost).float())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_processes": 11}, "batch_size 10, micro-batch 4, 11 processes: every process needs a sample"),
        ({"micro_batch": 0}, "a micro-batch at least one"),
    ],
)
def test_train_batches__refuse_numbers_that_do_not_fit(changes: dict[str, int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        train(SyntheticSource(20, 3, 12), **changes)


@pytest.mark.parametrize("pinned", [False, True])
def test_batches__are_pinned_where_that_is_asked_for(pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, loader = list[bool](), module.DataLoader

    def recorded(*args: Any, pin_memory: bool, **named: Any) -> Any:
        asked.append(pin_memory)
        return loader(*args, pin_memory=False, **named)

    monkeypatch.setattr(module, "DataLoader", recorded)
    source = SyntheticSource(20, 3, 12)
    next(train(source, pinned=pinned))
    next(eval_batches(source, EVAL, batch_size=4, rank=0, num_processes=1, num_workers=0, pinned=pinned))
    assert asked == [pinned, pinned]


@each("num_samples", [1, 2, 5, 16, 17, 23])
@each("num_processes", [1, 2, 3, 8])
def test_eval_batches__count_every_sample_once(num_samples: int, num_processes: int) -> None:
    source = SyntheticSource(num_samples, 3, 12)
    ranks = [
        list(eval_batches(source, EVAL, batch_size=4, rank=rank, num_processes=num_processes, num_workers=0))
        for rank in range(num_processes)
    ]
    assert len({tuple(len(batch) for batch in rank) for rank in ranks}) == 1
    whole = joined([batch for rank in ranks for batch in rank])
    counted = whole["weights"] > 0
    assert whole["samples"][counted].tolist() == list(range(num_samples))
    assert whole["labels"][counted].tolist() == source.labels().tolist()
    assert whole["samples"][~counted].eq(-1).all()
    assert not whole["images"][~counted].any()
    expected = [EVAL(decode(source.read(sample))) for sample in range(num_samples)]
    assert torch.equal(whole["images"][counted], torch.stack(expected))


@each("num_samples", [1, 4, 9, 23])
@each("num_processes", [1, 2, 3, 5])
def test_eval_batches__whole_ones_hold_the_same_images_for_any_number_of_processes(
    num_samples: int, num_processes: int
) -> None:
    source = SyntheticSource(num_samples, 3, 12)
    how = {"batch_size": 4, "num_processes": num_processes, "num_workers": 0, "whole_batches": True}
    parts = [
        [batch.samples.tolist() for batch in eval_batches(source, EVAL, rank=rank, **how)]
        for rank in range(num_processes)
    ]
    assert len({len(part) for part in parts}) == 1  # all take part in what comes after each batch
    full = [batch for part in parts for batch in part if batch[0] >= 0]
    size = min(4, num_samples)
    padded = [*range(num_samples), *[-1] * (-num_samples % size)]
    assert full == [padded[first : first + size] for first in range(0, num_samples, size)]


def test_eval_batches__workers_change_nothing(make_split: MakeSplit) -> None:
    source = ShardSource(make_split(23))
    one, other = (
        list(eval_batches(source, EVAL, batch_size=4, rank=1, num_processes=2, num_workers=num_workers))
        for num_workers in (0, 2)
    )
    assert len(one) == 3
    assert same(joined(one), joined(other))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_eval_batches__a_bad_sample_is_an_error(make_split: MakeSplit, num_workers: int) -> None:
    source = ShardSource(make_split(20, "test", bad=(13,)))
    for chosen in (source, subset(source, np.arange(20)[::-1])):
        batches = eval_batches(chosen, EVAL, batch_size=4, rank=0, num_processes=1, num_workers=num_workers)
        with pytest.raises(DataError, match=r"test/shard-00000\d.tar: sample k13 cannot be evaluated"):
            list(batches)


def test_batch__survives_pickling() -> None:
    batch = next(train(SyntheticSource(20, 3, 12), neighbours=True))
    again = pickle.loads(pickle.dumps(batch))
    assert batch.neighbour is not None
    assert same(joined([again, again.neighbour]), joined([batch, batch.neighbour]))


@pytest.mark.gpu
def test_batch__is_pinned_beside_a_gpu() -> None:
    for num_workers in (0, 2):
        batch = next(train(SyntheticSource(20, 3, 12), num_workers=num_workers, pinned=True))
        assert all(
            tensor.is_pinned() for tensor in (batch.images, batch.labels, batch.weights, batch.samples)
        )


def test_batches__several_labels(tmp_path: Path, tiny_png: Callable[[int], bytes]) -> None:
    """`[B, L]`, padded with -1; an image without any is not trained on, but comes through in evaluation."""
    labels = [(0,), (2, 1), (), (1,), (2,)]
    items = [Item(f"k{n}", own, partial(tiny_png, n)) for n, own in enumerate(labels)]
    source = ShardSource(store(items, tmp_path / "train", ("a", "b", "c")))
    [none] = [sample for sample in range(5) if source.key(sample) == "k2"]
    batch = next(train(source, batch_size=5, micro_batch=5))
    by_key = {
        source.key(sample): row
        for sample, row in zip(batch.samples.tolist(), batch.labels.tolist(), strict=True)
    }
    assert (by_key["k0"], by_key["k1"], by_key["k3"]) == ([0, -1], [2, 1], [1, -1])
    assert batch.bad == ((none, "k2", "no label"),)
    assert batch.weights.sum() == 4
    parts = list(eval_batches(source, EVAL, batch_size=2, rank=0, num_processes=1, num_workers=0))
    assert [part.labels.shape for part in parts] == [(2, 2)] * 3
    together = joined(parts)
    assert together["labels"][:5].tolist() == source.labels().tolist()
    assert together["weights"].tolist() == [1] * 5 + [0]


def test_concat__labels_of_any_width_are_padded(tmp_path: Path, tiny_png: Callable[[int], bytes]) -> None:
    sources = []
    for name, labels in (("one", [0, -1]), ("three", [(1,), (2, 1, 0)])):
        items = [Item(f"k{n}", own, partial(tiny_png, n)) for n, own in enumerate(labels)]
        sources.append(ShardSource(store(items, tmp_path / name, ("a", "b", "c"))))
    both = concat((sources[0], sources[1]))
    assert sorted(both.labels().tolist()) == [[-1, -1, -1], [0, -1, -1], [1, -1, -1], [2, 1, 0]]
    assert both.labels(np.array([3, 0])).tolist() == both.labels()[[3, 0]].tolist()
    assert both.labels(np.zeros(0, np.int64)).shape == (0, 3)
    assert concat((sources[0], sources[0])).labels().shape == (4,)
    assert has_label(both.labels()).tolist() == [label != [-1] * 3 for label in both.labels().tolist()]


def noise_png(number: int, height: int, width: int) -> bytes:
    return encode_png(np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8))


def checksums_of(source: Source) -> np.ndarray:
    return np.concatenate([batch.checksums for batch in islice(train(source, checksums=True), 12)])


WAYS: dict[str, dict[str, Any]] = {
    "inception": {},
    "random_resized": {"crop": "random_resized", "resample": "bilinear_antialias", "auto_augment": "cifar10"},
    "random": {"crop": "random", "resize": 12, "vertical_flip": True, "randaugment_layers": 1},
    "padded": {"crop": "padded", "resize": 12, "auto_augment": "cifar10"},
    "none": {"crop": "none", "resample": "bicubic_antialias", "augment3": True, "color_jitter": (0.3,)},
    "letterbox": {"crop": "letterbox", "auto_augment": "v0", "fill": (1, 2, 3)},
}


@pytest.mark.parametrize("way", spread(3, WAYS))
def test_train_batches__of_kept_pixels_are_those_of_decoded_files(
    way: str, make_split: MakeSplit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every crop and distortion, several times over the set; one file is damaged, one has another size."""
    monkeypatch.setattr("tests.data.conftest._tiny_png", lambda n: noise_png(n, 12, 15 + 3 * (n == 5)))
    source, transform = ShardSource(make_split(23, bad=(7,))), TrainTransform(SIZE, **WAYS[way])
    monkeypatch.setitem(globals(), "TRAIN", transform)
    reads: list[int] = []
    read = ShardSource.read
    monkeypatch.setattr(ShardSource, "read", lambda self, sample: reads.append(sample) or read(self, sample))
    kept, sums = steps(source, 5), checksums_of(source)
    num_read = len(reads)
    shared = steps(source, 5, num_workers=2) if way == "padded" else kept
    monkeypatch.setattr(limits, "SMALL_SIDE", 1)
    decoded = steps(source, 5)
    np.testing.assert_array_equal(sums, checksums_of(source))
    assert all(same(*pair) for pair in zip(kept, decoded, strict=True))
    assert all(same(*pair) for pair in zip(shared, decoded, strict=True))
    assert num_read < len(reads) - num_read
