"""Grain over ArrayRecord files, one for each shard.

`loader`: `DataLoader` and the state of its iterator. `elastic`: the experimental `ElasticIterator`.
"""

import struct
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import grain.python as grain
from array_record.python.array_record_module import ArrayRecordWriter
from grain.experimental import ElasticIterator
from job import Job, decoded, read_state, tar_samples, write_state

PACKAGES = ("grain", "array-record")
SHARD = 80


def prepare(job: Job) -> None:
    """Convert: the number, then the image."""
    folder = job.data / "array_record"
    if folder.exists():
        return
    folder.mkdir()
    for shard, samples in groupby(enumerate(tar_samples(job.shards)), key=lambda one: one[0] // SHARD):
        writer = ArrayRecordWriter(str(folder / f"{shard:03d}.array_record"), "group_size:1")
        for _, (number, data) in samples:
            writer.write(struct.pack("<q", number) + data)
        writer.close()


class Decode(grain.MapTransform):
    """Image and number."""

    def map(self, element: bytes) -> tuple[Any, int]:
        """Of a record."""
        return decoded(element[8:]), struct.unpack("<q", element[:8])[0]


class Loader:
    """An exact shuffle, anew in each epoch."""

    def __init__(self, job: Job, variant: str) -> None:
        self.job, self.variant, self.step = job, variant, 0
        source = grain.ArrayRecordDataSource(sorted(map(str, (job.data / "array_record").glob("*"))))
        shard = grain.ShardOptions(job.rank, job.world, drop_remainder=True)
        if variant == "elastic":
            samples = grain.MapDataset.source(source).shuffle(job.seed).repeat(job.epochs).map(Decode())
            workers = grain.MultiprocessingOptions(num_workers=job.workers)
            self.batches: Any = iter(
                ElasticIterator(samples, job.global_batch, shard, multiprocessing_options=workers)
            )
        else:
            sampler = grain.IndexSampler(
                job.num_samples, shard_options=shard, shuffle=True, num_epochs=job.epochs, seed=job.seed
            )
            steps = [Decode(), grain.Batch(job.batch, drop_remainder=True)]
            loader = grain.DataLoader(
                data_source=source, sampler=sampler, operations=steps, worker_count=job.workers
            )
            self.batches = iter(loader)

    def restore(self, folder: Path) -> None:
        """Of an elastic iterator any state serves all; else each rank has its own, and a new number of ranks
        that of rank 0.
        """
        same = self.variant == "loader" and self.job.saved_world == self.job.world
        state = read_state(folder, self.job.rank if same else 0)
        self.step = state["step"]
        self.batches.set_state(state["loader"].encode() if self.variant == "loader" else state["loader"])

    def steps(self) -> Iterator[tuple[int, list[int]]]:
        """One stream; epochs by counting."""
        for _, numbers in self.batches:
            self.step += 1
            yield (self.step - 1) // self.job.steps_per_epoch, numbers.tolist()

    def save(self, folder: Path) -> None:
        """JSON in both cases."""
        state = self.batches.get_state()
        if self.variant == "loader" or self.job.rank == 0:
            plain = state.decode() if isinstance(state, bytes) else state
            write_state(folder, self.job.rank, {"step": self.step, "loader": plain})
