"""mosaicml streaming: StreamingDataset in StreamingDataLoader, from shards in its own format (MDS)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from job import Job, decoded, read_state, tar_samples, write_state
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from streaming.base.util import clean_stale_shared_memory

PACKAGES = ("mosaicml-streaming", "torch")


def prepare(job: Job) -> None:
    """Convert."""
    folder = job.data / "mds"
    if folder.exists():
        return
    limit = sum(len(data) for _, data in tar_samples(job.shards)) // len(job.shards)
    with MDSWriter(out=str(folder), columns={"jpg": "bytes", "number": "int"}, size_limit=limit) as writer:
        for number, data in tar_samples(job.shards):
            writer.write({"jpg": data, "number": number})


class Decoded(StreamingDataset):
    """Image and number."""

    def __getitem__(self, index: Any) -> Any:
        sample = super().__getitem__(index)
        return decoded(sample["jpg"]), sample["number"]


class Loader:
    """One node; its canonical nodes are left at their default, the nodes of the first run."""

    def __init__(self, job: Job, _: str) -> None:
        job.join_group()
        self.job, self.epoch = job, 0
        clean_stale_shared_memory()  # a killed run leaves some
        data = Decoded(local=str(job.data / "mds"), shuffle=True, shuffle_seed=job.seed, batch_size=job.batch)
        self.loader = StreamingDataLoader(data, batch_size=job.batch, num_workers=job.workers)

    def restore(self, folder: Path) -> None:
        """All ranks read the state of rank 0."""
        state = read_state(folder, 0)
        self.epoch = state["epoch"]
        self.loader.load_state_dict(state)

    def steps(self) -> Iterator[tuple[int, list[int]]]:
        """The data set counts epochs itself, and goes on in the one of its state."""
        for epoch in range(self.epoch, self.job.epochs):
            self.epoch = epoch
            for _, numbers in self.loader:
                yield self.epoch, numbers.tolist()

    def save(self, folder: Path) -> None:
        """Rank 0, as documented."""
        state = self.loader.state_dict()
        if self.job.rank == 0:
            write_state(folder, 0, state)
