"""torchdata.nodes: a sampler, batches of it read by two processes, and a stateful `Loader` around them."""

from collections.abc import Iterator
from pathlib import Path

from job import Job, Photos, write_state
from torch.utils.data import DistributedSampler
from torchdata.nodes import Batcher, ParallelMapper, SamplerWrapper
from torchdata.nodes import Loader as NodesLoader

PACKAGES = ("torchdata", "torch")


class Loader:
    """Image files in the order of a DistributedSampler."""

    def __init__(self, job: Job, _: str) -> None:
        self.job, self.epoch, self.photos = job, 0, Photos(job.data / "photos")
        sampler = DistributedSampler(self.photos, job.world, job.rank, shuffle=True, seed=job.seed)
        batches = Batcher(SamplerWrapper(sampler), job.batch, drop_last=True)
        self.loader = NodesLoader(
            ParallelMapper(batches, self.read, num_workers=job.workers, method="process")
        )

    def read(self, numbers: list[int]) -> list[int]:
        """A batch; its images stay where they were read."""
        return [self.photos[number][1] for number in numbers]

    def restore(self, folder: Path) -> None:
        """Each rank its own state."""
        state = self.job.own_state(folder)
        self.epoch = state["epoch"]
        self.loader.load_state_dict(state["loader"])

    def steps(self) -> Iterator[tuple[int, list[int]]]:
        """The sampler begins its next epoch with each iterator."""
        for epoch in range(self.epoch, self.job.epochs):
            self.epoch = epoch
            for numbers in self.loader:
                yield self.epoch, numbers

    def save(self, folder: Path) -> None:
        """Each rank its own state."""
        write_state(folder, self.job.rank, {"epoch": self.epoch, "loader": self.loader.state_dict()})
