"""vitctl: the loader as the engine uses it.

The state is the number of finished steps, as in `state.json` of a checkpoint.
"""

from collections.abc import Iterator
from pathlib import Path

from job import IMAGE_SIZE, Job, read_state, write_state

from vitctl.data.images.transforms import TrainTransform
from vitctl.data.loader.batches import train_batches
from vitctl.data.shards.index import read_index
from vitctl.data.source.order import Order
from vitctl.data.source.stores import ShardSource

PACKAGES = ("vitctl",)


class Loader:
    """`train_batches`, from any step on."""

    def __init__(self, job: Job, _: str) -> None:
        self.job, self.step = job, 0

    def restore(self, folder: Path) -> None:
        """The state of any rank is that of all."""
        self.step = read_state(folder, 0)["step"]

    def steps(self) -> Iterator[tuple[int, list[int]]]:
        """Steps to the end."""
        job = self.job
        source = ShardSource(read_index(job.data / "shards"))
        batches = train_batches(
            source,
            Order(len(source), job.seed),
            TrainTransform(IMAGE_SIZE),
            seed=job.seed,
            batch_size=job.global_batch,
            micro_batch=job.batch,
            rank=job.rank,
            num_processes=job.world,
            first_step=self.step,
            num_workers=job.workers,
        )
        while self.step < job.epochs * job.steps_per_epoch:
            samples = next(batches).samples.tolist()
            self.step += 1
            yield (self.step - 1) // job.steps_per_epoch, [int(source.key(sample)) for sample in samples]

    def save(self, folder: Path) -> None:
        """One integer."""
        if self.job.rank == 0:
            write_state(folder, 0, {"step": self.step})
