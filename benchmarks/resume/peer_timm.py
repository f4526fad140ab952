"""timm: `create_loader` and the checkpoints of its train.py, which knows epochs: `--resume` goes on with the
next one.

`epoch`: the checkpoint that train.py writes at the end of an epoch. `recovery`: that of
`--recovery-interval`, in the middle.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import timm.data
import torch
from job import IMAGE_SIZE, Job
from timm.models import resume_checkpoint
from timm.utils import CheckpointSaver, random_seed

PACKAGES = ("timm", "torch")
SAVES_AT_EPOCHS = ("epoch",)


class Keyed(timm.data.ImageDataset):
    """timm's data set of image files, whose target is the number of the image."""

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image, _ = super().__getitem__(index)
        return image, int(Path(self.filename(index)).stem)


class Loader:
    """What train.py does about its training data, seeds included."""

    def __init__(self, job: Job, _: str) -> None:
        job.join_group()
        self.job, self.epoch, self.model = job, 0, torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        random_seed(job.seed, job.rank)
        self.loader = timm.data.create_loader(
            Keyed(str(job.data / "photos")),
            input_size=(3, IMAGE_SIZE, IMAGE_SIZE),
            batch_size=job.batch,
            is_training=True,
            num_workers=job.workers,
            distributed=job.world > 1,
            device=torch.device("cpu"),
            pin_memory=False,
        )

    def restore(self, folder: Path) -> None:
        """As `--resume` does it: every process reads the one file."""
        (path,) = folder.glob("*.pth.tar")
        self.epoch = resume_checkpoint(self.model, str(path), self.optimizer) or 0

    def steps(self) -> Iterator[tuple[int, list[int]]]:
        """Epochs, each from its start."""
        for epoch in range(self.epoch, self.job.epochs):
            self.epoch = epoch
            if self.job.world > 1:
                self.loader.sampler.set_epoch(self.epoch)
            for _, targets in self.loader:
                yield self.epoch, targets.tolist()

    def save(self, folder: Path) -> None:
        """As train.py does it, on rank 0."""
        if self.job.rank == 0:
            saver = CheckpointSaver(
                self.model, self.optimizer, checkpoint_dir=str(folder), recovery_dir=str(folder)
            )
            saver.save_recovery(self.epoch)
