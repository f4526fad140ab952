"""Megatron-Energon: `get_savable_loader` over the shards, prepared by `energon prepare`, a state for each
rank.

On another number of ranks: `energon checkpoint redist`, with ranks x workers, micro-batch and global batch
unchanged, as its page on reproducible scaling asks for.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from job import Job, NotOfferedError, read_state, write_state
from megatron.energon import WorkerConfig, get_savable_loader, get_train_dataset

PACKAGES = ("megatron-energon", "torch")
BUFFER, SEQUENCE = 100, 100
ENERGON = Path(sys.executable).parent / "energon"


def prepare(job: Job) -> None:
    """Index the shards."""
    folder = job.data / "energon"
    if folder.exists():
        return
    folder.mkdir()
    for shard in job.shards:
        shutil.copy(shard, folder)
    options = ["--non-interactive", "--num-workers", "1", "--split-ratio", "1,0,0", "--no-progress"]
    fields = ["--sample-type", "ImageClassificationSample", "--field-map", '{"image": "jpg", "label": "cls"}']
    subprocess.run(
        [ENERGON, "prepare", *options, *fields, str(folder)], check=True, capture_output=True, text=True
    )


class Loader:
    """Shuffled by the loader; the stream has no epochs."""

    def __init__(self, job: Job, _: str) -> None:
        job.join_group()
        self.job, self.step = job, 0
        saved_world = job.saved_world or job.world
        workers, rest = divmod(saved_world * job.workers, job.world)
        if rest:
            raise NotOfferedError(
                f"{saved_world} x {job.workers} workers cannot be divided among {job.world} ranks"
            )
        self.micro_batch = job.global_batch // (
            saved_world * job.workers
        )  # a step takes as many of every worker
        config = WorkerConfig(rank=job.rank, world_size=job.world, num_workers=workers, seed_offset=job.seed)
        data = get_train_dataset(
            str(job.data / "energon"),
            batch_size=self.micro_batch,
            shuffle_buffer_size=BUFFER,
            max_samples_per_sequence=SEQUENCE,
            worker_config=config,
        )
        self.loader = get_savable_loader(data)

    def restore(self, folder: Path) -> None:
        """Each rank its own, after redistribution."""
        job = self.job
        self.step = read_state(folder, 0)["step"]
        if job.saved_world != job.world:
            old, new = (
                [folder / f"energon_rank{rank}.pt" for rank in range(job.saved_world)],
                folder.with_name(f"{folder.name}_to_{job.world}"),
            )
            new.mkdir(exist_ok=True)
            world = ["--new-world-size", str(job.world)]
            subprocess.run(
                [ENERGON, "checkpoint", "redist", *world, *old, new], check=True, capture_output=True
            )
            folder = new
        state: Any = torch.load(folder / f"energon_rank{job.rank}.pt", weights_only=False)
        self.loader.restore_state_rank(state)

    def steps(self) -> Iterator[tuple[int, list[int]]]:
        """Micro-batches of a step; epochs by counting."""
        job, batches = self.job, iter(self.loader)
        while self.step < job.epochs * job.steps_per_epoch:
            numbers: list[int] = []
            while len(numbers) < job.batch:
                numbers += [int(key.rpartition("/")[2]) for key in next(batches).__key__]
            self.step += 1
            yield (self.step - 1) // job.steps_per_epoch, numbers

    def save(self, folder: Path) -> None:
        """`torch.save`, as documented."""
        torch.save(self.loader.save_state_rank(), folder / f"energon_rank{self.job.rank}.pt")
        if self.job.rank == 0:
            write_state(folder, 0, {"step": self.step})
