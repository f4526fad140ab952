"""accelerate: a prepared DataLoader over image files, `save_state` and `load_state`.

`default`: `skip_first_batches` with the number of batches read. `skip`: that, with `use_seedable_sampler`.
`stateful`: with `use_stateful_dataloader` instead, and the seedable sampler.
"""

from collections.abc import Iterator
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from job import Job, Photos, read_state, write_state
from torch.utils.data import DataLoader

PACKAGES = ("accelerate", "torchdata", "torch")


class Loader:
    """As its page on checkpoints has it."""

    def __init__(self, job: Job, variant: str) -> None:
        self.job, self.variant, self.epoch, self.read = job, variant, 0, 0
        stateful = variant == "stateful"
        settings = DataLoaderConfiguration(
            use_seedable_sampler=variant != "default", use_stateful_dataloader=stateful
        )
        self.accelerator = Accelerator(cpu=True, dataloader_config=settings)
        set_seed(job.seed)
        photos = DataLoader(Photos(job.data / "photos"), job.batch, shuffle=True, num_workers=job.workers)
        self.loader = self.accelerator.prepare(photos)

    def restore(self, folder: Path) -> None:
        """The state of rank 0 is that of all."""
        state = read_state(folder, 0)
        self.epoch, self.read = state["epoch"], state["read"]
        self.accelerator.load_state(str(folder / "accelerate"))

    def steps(self) -> Iterator[tuple[int, list[int]]]:
        """The rest of an epoch, and the epochs after it."""
        for epoch in range(self.epoch, self.job.epochs):
            self.epoch = epoch
            self.loader.set_epoch(self.epoch)
            rest = self.loader
            if self.variant != "stateful" and self.read:
                rest = self.accelerator.skip_first_batches(self.loader, self.read)
            for _, numbers in rest:
                self.read += 1
                yield self.epoch, numbers.tolist()
            self.read = 0

    def save(self, folder: Path) -> None:
        """Every rank takes part in it."""
        self.accelerator.save_state(str(folder / "accelerate"))
        if self.job.rank == 0:
            write_state(folder, 0, {"epoch": self.epoch, "read": self.read})
