"""Hugging Face datasets, streaming, in torchdata's StatefulDataLoader, as `IterableDataset.state_dict`
documents it.

`shards`: only the order of the shards is shuffled. `buffer`: samples too, in a buffer that is filled from one
shard at a time. `interleaved`: from ten, the default. The content of a buffer is documented to be lost.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
from datasets.distributed import split_dataset_by_node
from job import Job, decoded, write_state
from torchdata.stateful_dataloader import StatefulDataLoader

PACKAGES = ("datasets", "torchdata", "torch")
BUFFERS = {
    "shards": (1, 1),
    "buffer": (100, 1),
    "interleaved": (100, 10),
}  # samples in it, shards it is filled from


class Loader:
    """The shards as they are, by its WebDataset builder."""

    def __init__(self, job: Job, variant: str) -> None:
        self.job, self.epoch = job, 0
        stream = datasets.load_dataset(
            "webdataset", data_files={"train": job.shards}, split="train", streaming=True
        )
        size, shards = BUFFERS[variant]
        stream = stream.decode(False).shuffle(seed=job.seed, buffer_size=size, max_buffer_input_shards=shards)
        self.data = split_dataset_by_node(stream, job.rank, job.world)
        self.loader = StatefulDataLoader(
            self.data, batch_size=job.batch, num_workers=job.workers, collate_fn=read
        )

    def restore(self, folder: Path) -> None:
        """Each rank its own state."""
        state = self.job.own_state(folder)
        self.epoch = state["epoch"]
        self.loader.load_state_dict(state["loader"])

    def steps(self) -> Iterator[tuple[int, list[int]]]:
        """`set_epoch` shuffles anew."""
        for epoch in range(self.epoch, self.job.epochs):
            self.epoch = epoch
            self.data.set_epoch(self.epoch)
            for _, numbers in self.loader:
                yield self.epoch, numbers

    def save(self, folder: Path) -> None:
        """Each rank its own state."""
        write_state(folder, self.job.rank, {"epoch": self.epoch, "loader": self.loader.state_dict()})


def read(samples: list[dict[str, Any]]) -> tuple[list[Any], list[int]]:
    """Images and numbers."""
    images = [decoded(sample["jpg"]["bytes"]) for sample in samples]
    return images, [int(sample["__key__"].rpartition("/")[2]) for sample in samples]
