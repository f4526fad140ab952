"""DALI on the CPU: `readers.webdataset` with `enable_checkpointing`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from job import IMAGE_SIZE, Job, NotOfferedError, read_state, write_state
from nvidia.dali import fn, pipeline_def

PACKAGES = ("nvidia-dali-cuda120",)
BUFFER = 100


@pipeline_def(enable_checkpointing=True)
def images(job: Job) -> Any:
    """Shards of the rank in an order that changes with the epoch, samples shuffled in a buffer, decoded."""
    files, labels = fn.readers.webdataset(
        paths=job.shards,
        ext=["jpg", "cls"],
        random_shuffle=True,
        initial_fill=BUFFER,
        shuffle_after_epoch=True,
        num_shards=job.world,
        shard_id=job.rank,
        seed=job.seed,
        name="reader",
    )
    return fn.resize(fn.decoders.image(files, device="cpu"), size=(IMAGE_SIZE, IMAGE_SIZE)), labels


class Loader:
    """A pipeline; its threads are the workers."""

    def __init__(self, job: Job, _: str) -> None:
        self.job, self.step, self.checkpoint = job, 0, None

    def restore(self, folder: Path) -> None:
        """Each rank its own."""
        if self.job.saved_world != self.job.world:
            raise NotOfferedError(
                "a checkpoint is of one pipeline, and a pipeline of one num_shards and shard_id"
            )
        self.step = read_state(folder, self.job.rank)["step"]
        self.checkpoint = (folder / f"rank{self.job.rank}.cpt").read_bytes()

    def steps(self) -> Iterator[tuple[int, list[int]]]:
        """One stream; epochs by counting."""
        job = self.job
        self.pipeline = images(
            job,
            batch_size=job.batch,
            num_threads=job.workers,
            device_id=None,
            seed=job.seed,
            checkpoint=self.checkpoint,
        )
        self.pipeline.build()
        while self.step < job.epochs * job.steps_per_epoch:
            _, labels = self.pipeline.run()
            self.step += 1
            numbers = [int(bytes(labels.at(row))) for row in range(job.batch)]
            yield (self.step - 1) // job.steps_per_epoch, numbers

    def save(self, folder: Path) -> None:
        """Its own format, a protocol buffer."""
        (folder / f"rank{self.job.rank}.cpt").write_bytes(self.pipeline.checkpoint())
        write_state(folder, self.job.rank, {"step": self.step})
