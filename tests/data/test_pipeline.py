import json
import pickle
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from torch.utils.data import DataLoader

from tests import warm
from tests.conftest import ROOT
from tests.data.conftest import several, store
from tests.matrix import slow
from vitctl.data.images.transforms import TrainTransform
from vitctl.data.loader.batches import train_batches
from vitctl.data.pipeline import as_webdataset
from vitctl.data.shards.index import Index
from vitctl.data.source.order import Order, WindowedOrder, share
from vitctl.data.source.stores import ShardSource, SyntheticSource
from vitctl.errors import DataError

MakeSplit = Callable[..., Index]
STEPS = 9


def own_loader(
    source: ShardSource, batch_size: int, first_step: int, rank: int, num_processes: int
) -> list[list[str]]:
    """The keys of each step of vitctl's own loader."""
    batches = train_batches(
        source,
        Order(len(source), 7),
        TrainTransform(8),
        seed=7,
        batch_size=batch_size,
        micro_batch=batch_size,
        rank=rank,
        num_processes=num_processes,
        first_step=first_step,
        num_workers=0,
    )
    return [[source.key(sample) for sample in batch.samples.tolist()] for batch in islice(batches, STEPS)]


@pytest.mark.parametrize("num_workers", [2, *slow(0)])
@pytest.mark.parametrize(("num_processes", "first_step"), [(1, 0), (3, 1), *slow((2, 5))])
def test_as_webdataset__gives_the_steps_of_our_own_loader(
    make_split: MakeSplit, num_processes: int, first_step: int, num_workers: int
) -> None:
    """30 samples, batches of 8: epochs end within a step; 3 processes have unequal parts of it."""
    source = ShardSource(make_split(30))
    for rank in range(num_processes):
        pipeline = as_webdataset(
            source,
            seed=7,
            batch_size=8,
            first_step=first_step,
            num_steps=STEPS,
            rank=rank,
            num_processes=num_processes,
        )
        own = len(share(8, num_processes, rank))
        loader = DataLoader(pipeline, batch_size=own, num_workers=num_workers, collate_fn=list)
        found = [[sample["__key__"] for sample in batch] for batch in loader]
        assert found == own_loader(source, 8, first_step, rank, num_processes)
        batched = pipeline.compose(
            webdataset.map(lambda sample: (sample["__key__"],)), webdataset.batched(own)
        )
        assert [keys for (keys,) in webdataset.WebLoader(batched, batch_size=None)] == found


def test_as_webdataset__samples_are_what_is_stored(make_split: MakeSplit) -> None:
    index = make_split(10)
    source = ShardSource(index)
    epochs, order = Order(10, 0).at(np.arange(25))
    endless = as_webdataset(index.folder, batch_size=4)
    for sample, number, epoch in zip(endless, order.tolist(), epochs.tolist(), strict=False):
        assert sample == {
            "__key__": source.key(number),
            "__url__": source.location(number),
            "__epoch__": epoch,
            "png": source.read(number),
            "cls": str(source.labels()[number]).encode(),
        }


def test_as_webdataset__several_labels_and_other_sources(tmp_path: Path) -> None:
    index = store(several(8), tmp_path / "train")
    stored = as_webdataset(index.folder.parent, batch_size=8, num_steps=1, order=Order(8, 0, shuffle=False))
    assert {sample["__key__"]: json.loads(sample["json"])["labels"] for sample in stored} == {
        f"k{n}": [[0], [2, 0], [], [1, 2, 0]][n % 4] for n in range(8)
    }
    noise = as_webdataset(
        SyntheticSource(20, 5, 8), batch_size=3, num_steps=2, order=WindowedOrder(20, 1, 4, 2)
    )
    walk = WindowedOrder(20, 1, 4, 2).at(np.arange(6))[1]
    assert [(sample["__key__"], sample["cls"]) for sample in noise] == [
        (str(n), str(n % 5).encode()) for n in walk
    ]


def test_as_webdataset__takes_its_rank_from_the_launcher(
    make_split: MakeSplit, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ShardSource(make_split(12))
    alone = [sample["__key__"] for sample in as_webdataset(source, batch_size=5, num_steps=1)]
    parts = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        parts += [sample["__key__"] for sample in as_webdataset(source, batch_size=5, num_steps=1)]
    assert parts == alone


def test_as_webdataset__travels_to_workers_that_are_not_forked(make_split: MakeSplit) -> None:
    pipeline = as_webdataset(make_split(6).folder, batch_size=2, num_steps=3)
    assert list(pickle.loads(pickle.dumps(pipeline))) == list(pipeline)


@pytest.mark.parametrize("wrong", [{"batch_size": 1}, {"rank": 2}, {"rank": -1}, {"order": Order(3, 0)}])
def test_as_webdataset__refuses_numbers_that_do_not_fit(make_split: MakeSplit, wrong: dict[str, Any]) -> None:
    source = ShardSource(make_split(6))
    with pytest.raises(DataError, match="every process needs a sample of each batch"):
        as_webdataset(source, **{"batch_size": 4, "rank": 0, "num_processes": 2, **wrong})


def test_as_webdataset__a_sample_that_cannot_be_read_is_one_line(make_split: MakeSplit) -> None:
    index = make_split(6)
    shard = index.folder / index.shards[0].name
    pipeline = as_webdataset(index.folder, batch_size=6, num_steps=1)
    shard.write_bytes(shard.read_bytes()[:2000])
    with pytest.raises(DataError, match=r"shard-000000.tar: sample .* cannot be read \(unreadable: .*"):
        list(pipeline)


def test_docs__their_example_runs(make_split: MakeSplit, tmp_path: Path) -> None:
    blocks = [
        block.partition("```")[0]
        for block in (ROOT / "docs" / "python.md").read_text().split("```python\n")[1:]
    ]
    (code,) = [block for block in blocks if "as_webdataset" in block]
    assert len(code.splitlines()) <= 14
    index = make_split(40, "data/mine/train")
    code += '    print("step", step, tuple(images.shape), labels.tolist())\n'
    line = [sys.executable, "-c", code]
    done = warm.run(line, cwd=tmp_path, capture_output=True, text=True, check=True)
    source = ShardSource(index)
    wanted = [
        f"step {step} (8, 64, 64, 3) "
        f"{source.labels(Order(40, 0).at(np.arange(8 * step, 8 * step + 8))[1]).tolist()}"
        for step in range(100, 103)
    ]
    assert done.stdout.splitlines() == wanted
