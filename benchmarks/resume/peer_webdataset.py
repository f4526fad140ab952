"""webdataset in torchdata's StatefulDataLoader, which counts the batches of each worker and reads up to there
again.

webdataset counts epochs inside the workers, which are new in each epoch; so the pipeline is made anew with
another seed for each epoch.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import webdataset
from job import Job, decoded, write_state
from torchdata.stateful_dataloader import StatefulDataLoader

PACKAGES = ("webdataset", "torchdata", "torch")
BUFFER = 100


class Loader:
    """Shards split by process and by worker, shuffled, then samples shuffled in a buffer."""

    def __init__(self, job: Job, _: str) -> None:
        job.join_group()
        self.job, self.epoch, self.state = job, 0, None

    def restore(self, folder: Path) -> None:
        """Each rank its own state."""
        state = self.job.own_state(folder)
        self.epoch, self.state = state["epoch"], state["loader"]

    def loader(self) -> Any:
        """Of an epoch."""
        seed = self.job.seed + self.epoch
        samples = webdataset.WebDataset(
            self.job.shards,
            shardshuffle=len(self.job.shards),
            detshuffle=True,
            seed=seed,
            nodesplitter=webdataset.split_by_node,
        )
        samples = samples.compose(webdataset.detshuffle(BUFFER, BUFFER, seed=seed)).map(image_and_number)
        return StatefulDataLoader(samples, batch_size=self.job.batch, num_workers=self.job.workers)

    def steps(self) -> Iterator[tuple[int, list[int]]]:
        """The rest of an epoch, and the epochs after it."""
        for epoch in range(self.epoch, self.job.epochs):
            self.epoch = epoch
            self.current = self.loader()
            if self.state is not None:
                self.current.load_state_dict(self.state)
                self.state = None
            for _, numbers in self.current:
                yield self.epoch, numbers.tolist()

    def save(self, folder: Path) -> None:
        """Each rank its own state."""
        write_state(folder, self.job.rank, {"epoch": self.epoch, "loader": self.current.state_dict()})


def image_and_number(sample: dict[str, Any]) -> tuple[Any, int]:
    """What training needs."""
    return decoded(sample["jpg"]), int(sample["__key__"])
