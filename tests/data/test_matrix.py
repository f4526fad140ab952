"""Any number of processes and workers over ragged shards: the same batches, each sample once, resumed
anywhere.
"""

import io
import tarfile
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from vitctl.data.datasets.readers.arrays import encode_png
from vitctl.data.images.transforms import TrainTransform
from vitctl.data.loader.batches import train_batches
from vitctl.data.shards.index import index_shards
from vitctl.data.source.order import MixtureOrder, Order, SampleOrder, WindowedOrder, share
from vitctl.data.source.stores import ShardSource
from vitctl.data.source.views import Source, concat

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores

SHARD_SIZES, EXTRA_SIZES = range(1, 18), (5, 1, 9)
GLOBAL, MICRO, STEPS = 24, 5, 13  # two epochs of 153 samples
WORLDS, WORKERS = (1, 2, 3, 8), (0, 1, 4)
DIAGONAL = {(1, 1), (2, 4), (3, 1)}
TRANSFORM = TrainTransform(6)


class Batches(NamedTuple):
    samples: np.ndarray
    """int64 `[steps, GLOBAL]`"""
    pixels: np.ndarray
    """uint8 `[steps, GLOBAL, 3, 6, 6]`"""


def write_shards(folder: Path, sizes: tuple[int, ...] | range, seed: int) -> ShardSource:
    folder.mkdir()
    paths, number = [], 0
    for shard, size in enumerate(sizes):
        paths.append(folder / f"{shard:03d}.tar")
        with tarfile.open(paths[-1], "w") as tar:
            for _ in range(size):
                pixels = np.random.default_rng((seed, number)).integers(0, 256, (9, 8, 3), dtype=np.uint8)
                for extension, data in (("png", encode_png(pixels)), ("cls", str(number % 3).encode())):
                    member = tarfile.TarInfo(f"{seed}-{number:04d}.{extension}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
                number += 1
    return ShardSource(index_shards(paths, class_names=("a", "b", "c")))


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Source, SampleOrder]]:
    folder = tmp_path_factory.mktemp("ragged")
    one = write_shards(folder / "one", SHARD_SIZES, 0)
    other = write_shards(folder / "other", EXTRA_SIZES, 1)
    assert (len(one), len(one.index.shards)) == (153, 17)
    walks = (WindowedOrder(153, 1, 9, 3), Order(15, 2))
    return {
        "exact": (one, Order(153, 1)),
        "windowed": (one, WindowedOrder(153, 1, 9, 3)),
        "mixture": (concat((one, other)), MixtureOrder(walks, (51, 5), 3)),
    }


@pytest.fixture(scope="module")
def references(cases: dict[str, tuple[Source, SampleOrder]]) -> dict[str, Batches]:
    return {name: global_batches(case, 1, 0, range(STEPS)) for name, case in cases.items()}


def global_batches(case: tuple[Source, SampleOrder], world: int, workers: int, steps: range) -> Batches:
    """What all processes together see, each asked for exactly its steps."""
    source, order = case
    samples: list[list[np.ndarray]] = [[] for _ in steps]
    pixels: list[list[np.ndarray]] = [[] for _ in steps]
    for rank in range(world):
        own = len(share(GLOBAL, world, rank))
        batches = train_batches(
            source,
            order,
            TRANSFORM,
            seed=7,
            batch_size=GLOBAL,
            micro_batch=MICRO,
            rank=rank,
            num_processes=world,
            first_step=steps.start,
            num_workers=workers,
        )
        for step in range(len(steps)):
            taken = list(islice(batches, -(-own // MICRO)))
            assert sum(map(len, taken)) == own
            assert not any(batch.bad for batch in taken)
            samples[step] += [batch.samples.numpy() for batch in taken]
            pixels[step] += [batch.images.numpy() for batch in taken]
    return Batches(
        np.stack([np.concatenate(parts) for parts in samples]),
        np.stack([np.concatenate(parts) for parts in pixels]),
    )


def same(one: Batches, other: Batches) -> bool:
    return np.array_equal(one.samples, other.samples) and np.array_equal(one.pixels, other.pixels)


CELLS = [
    pytest.param(
        world, workers, id=f"{world}x{workers}", marks=[pytest.mark.slow] if workers and (world, workers) not in DIAGONAL else []
    )
    for world in WORLDS
    for workers in WORKERS
    if (world, workers) != (1, 0)
]  # fmt: skip


@pytest.mark.parametrize("name", ["exact", "windowed", "mixture"])
@pytest.mark.parametrize(("world", "workers"), CELLS)
def test_batches__are_the_same_on_every_machine(
    cases: dict[str, tuple[Source, SampleOrder]],
    references: dict[str, Batches],
    name: str,
    world: int,
    workers: int,
) -> None:
    steps = range(STEPS) if not workers else range(4)
    expected = Batches(references[name].samples[: len(steps)], references[name].pixels[: len(steps)])
    assert same(global_batches(cases[name], world, workers, steps), expected)


@pytest.mark.parametrize("name", ["exact", "windowed"])
def test_batches__every_sample_once_an_epoch_in_another_order(
    references: dict[str, Batches], name: str
) -> None:
    drawn = references[name].samples.reshape(-1)
    first, second = drawn[:153], drawn[153:306]
    assert sorted(first) == sorted(second) == list(range(153))
    assert (first == second).sum() < 12


def test_batches__every_source_of_a_mixture_keeps_its_own_epochs(
    cases: dict[str, tuple[Source, SampleOrder]], references: dict[str, Batches]
) -> None:
    drawn = references["mixture"].samples.reshape(-1)
    rare = drawn[drawn >= 153]
    assert len(rare) >= 25
    assert (
        len(set(rare[:15].tolist()) | set(rare[10:25].tolist())) == 15
    )  # blocks of 5: an epoch is three of them
    source, order = cases["mixture"]
    epochs, samples = order.at(np.arange(56 * 9))
    for begin, size in ((0, 153), (153, 15)):
        for epoch in range(3):
            own = samples[(epochs == epoch) & (samples >= begin) & (samples < begin + size)]
            assert sorted(own) == list(range(begin, begin + size))
    assert len(source) == 168


@pytest.mark.parametrize("name", ["exact", "windowed", "mixture"])
@pytest.mark.parametrize(("before", "after"), [(8, 4), (1, 3), (3, 1)])
def test_batches__go_on_from_any_step_with_other_processes(
    cases: dict[str, tuple[Source, SampleOrder]],
    references: dict[str, Batches],
    name: str,
    before: int,
    after: int,
) -> None:
    for stopped in (1, 7):
        begun = global_batches(cases[name], before, 0, range(stopped))
        rest = global_batches(cases[name], after, 0, range(stopped, STEPS))
        joined = Batches(
            np.concatenate([begun.samples, rest.samples]), np.concatenate([begun.pixels, rest.pixels])
        )
        assert same(joined, references[name])


def test_orders__resume_at_every_single_sample(cases: dict[str, tuple[Source, SampleOrder]]) -> None:
    for _, order in cases.values():
        whole = np.stack(order.at(np.arange(200)))
        for start in range(200):
            assert (
                np.stack(order.at(np.arange(start, min(start + 3, 200)))) == whole[:, start : start + 3]
            ).all()
