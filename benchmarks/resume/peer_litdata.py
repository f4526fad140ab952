"""litData: StreamingDataset in StreamingDataLoader, from shards converted to its own chunks by `optimize`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from job import Job, decoded, read_state, tar_samples, write_state
from litdata import StreamingDataLoader, StreamingDataset, optimize

PACKAGES = ("litdata", "torch")
CHUNK = 80


def prepare(job: Job) -> None:
    """Convert, in one process, so that a chunk has as many samples as a shard."""
    if not (job.data / "litdata").exists():
        optimize(
            same, list(tar_samples(job.shards)), str(job.data / "litdata"), chunk_size=CHUNK, num_workers=1
        )


def same(sample: tuple[int, bytes]) -> dict[str, Any]:
    """What a chunk keeps of a sample."""
    return {"number": sample[0], "jpg": sample[1]}


class Decoded(StreamingDataset):
    """Image and number."""

    def __getitem__(self, index: Any) -> Any:
        sample = super().__getitem__(index)
        return decoded(sample["jpg"]), sample["number"]


class Loader:
    """As its README has it; `drop_last` is given, because its default is another on one process, and a state
    with another is refused.
    """

    def __init__(self, job: Job, _: str) -> None:
        job.join_group()
        self.job, self.epoch = job, 0
        data = Decoded(str(job.data / "litdata"), shuffle=True, seed=job.seed, drop_last=True)
        self.loader = StreamingDataLoader(data, batch_size=job.batch, num_workers=job.workers)

    def restore(self, folder: Path) -> None:
        """The state of rank 0, for all."""
        state = read_state(folder, 0)
        self.epoch = state["epoch"]
        self.loader.load_state_dict(state["loader"])

    def steps(self) -> Iterator[tuple[int, list[int]]]:
        """The loader counts epochs itself."""
        for epoch in range(self.epoch, self.job.epochs):
            self.epoch = epoch
            for _, numbers in self.loader:
                yield self.epoch, numbers.tolist()

    def save(self, folder: Path) -> None:
        """Rank 0: the state holds a count over all ranks."""
        state = self.loader.state_dict()
        if self.job.rank == 0:
            write_state(folder, 0, {"epoch": self.epoch, "loader": state})
