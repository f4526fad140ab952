"""Memory without a name: what is in it, who sees it, and that nothing of it has a name at any time."""

import gc
import os
from itertools import islice
from multiprocessing import Pipe, Process
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from vitctl.data.images.transforms import TrainTransform
from vitctl.data.loader.batches import train_batches
from vitctl.data.loader.workers import SharedMemory
from vitctl.data.source.order import Order
from vitctl.data.source.unsharded import SyntheticSource


def open_memories() -> int:
    names = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    return sum("memfd:vitctl (" in name for name in names)  # beside it there may be the memory lock


def test_zeros__all_are_and_two_views_are_one_memory() -> None:
    memory = SharedMemory.zeros(10_000)
    first, second = memory.tensor(at_once=True), memory.tensor()
    assert first.shape == (10_000,)
    assert first.dtype == torch.uint8
    assert not first.any()
    first[9_999] = 7
    assert second[9_999] == 7


def test_tensor__outlives_the_object_and_closes_what_it_held() -> None:
    before = open_memories()
    tensor = SharedMemory.zeros(5_000).tensor()
    tensor.fill_(3)
    assert int(tensor.sum()) == 15_000
    del tensor
    gc.collect()
    assert open_memories() == before


def fill(there: Connection) -> None:
    memory = SharedMemory.zeros(6)
    memory.tensor().copy_(torch.arange(6))
    there.send(memory)
    assert there.recv() == "seen"


def test_pickled__another_process_sees_the_same_bytes() -> None:
    here, there = Pipe()
    process = Process(target=fill, args=(there,))
    process.start()
    assert here.recv().tensor().tolist() == [0, 1, 2, 3, 4, 5]
    here.send("seen")
    process.join(60)
    assert process.exitcode == 0


def batches(num_workers: int, num: int) -> list[Tensor]:
    sizes = {"batch_size": 40, "micro_batch": 20, "rank": 0, "num_processes": 1, "first_step": 0}
    made = train_batches(
        SyntheticSource(99, 3, 16), Order(99, 0), TrainTransform(16), seed=0, num_workers=num_workers, **sizes
    )
    return [batch.images for batch in islice(made, num)]


def test_batches__of_workers_lie_in_it_in_the_layout_of_those_made_here() -> None:
    before = open_memories()
    ours, theirs = batches(0, 6), batches(2, 6)
    assert open_memories() == before + 6
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
    del theirs, other
    gc.collect()
    assert open_memories() == before


def test_batches__more_than_are_read_at_once_come_in_order() -> None:
    """Groups of 16 images are begun together; 20 make one and a part of one."""
    [whole] = batches(0, 1)
    source, order, transform = SyntheticSource(99, 3, 16), Order(99, 0), TrainTransform(16)
    sizes = {
        "batch_size": 40,
        "micro_batch": 1,
        "rank": 0,
        "num_processes": 1,
        "first_step": 0,
        "num_workers": 0,
    }
    single = islice(train_batches(source, order, transform, seed=0, **sizes), 20)
    assert torch.equal(whole, torch.cat([batch.images for batch in single]))
