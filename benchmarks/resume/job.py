"""What every peer of benchmarks/resume_conformance.py is given, and what it answers; standard library, NumPy
and Pillow only.
"""

import io
import json
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

IMAGE_SIZE = 32


class NotOfferedError(Exception):
    """The peer documents no way to do this; the text says what its documentation says instead."""


@dataclass(frozen=True)
class Job:
    """One process of a run.

    Args:
        data: folder of the images, in every format: `shards/*.tar`, `photos/*.jpg`, and what `prepare` of a
            peer has written.
        rank: of this process.
        world: processes.
        workers: loader processes of each process.
        global_batch: samples of a step, over all processes; a multiple of `world`.
        num_samples: of an epoch; a multiple of `global_batch`.
        epochs: in the whole run.
        seed: of the order.
        saved_world: processes that wrote the state to go on from; 0 for a run from the start.
    """

    data: Path
    rank: int
    world: int
    workers: int
    global_batch: int
    num_samples: int
    epochs: int
    seed: int
    saved_world: int = 0

    @property
    def batch(self) -> int:
        """Samples of a step in this process."""
        return self.global_batch // self.world

    @property
    def steps_per_epoch(self) -> int:
        """Global batches of an epoch."""
        return self.num_samples // self.global_batch

    @property
    def shards(self) -> list[str]:
        """The tar files."""
        return [str(path) for path in sorted((self.data / "shards").glob("*.tar"))]

    def own_state(self, folder: Path) -> Any:
        """What this rank saved.

        Raises:
            NotOfferedError: another number of ranks saved it.
        """
        if self.saved_world != self.world:
            raise NotOfferedError("one state for each rank, and no documented way to another number of ranks")
        return read_state(folder, self.rank)

    def join_group(self) -> None:
        """Join the gloo process group that training would have."""
        import torch.distributed

        if self.world > 1:
            torch.distributed.init_process_group("gloo")


class Loader(Protocol):
    """What a module `peer_*.py` offers under this name: one process of its training data."""

    def __init__(self, job: Job, variant: str) -> None: ...

    def restore(self, folder: Path) -> None:
        """Go on from what all ranks have saved into a folder; called before `steps`."""
        ...

    def steps(self) -> Iterator[tuple[int, list[int]]]:
        """Epoch and samples of this process at each step, to the end of the last epoch."""
        ...

    def save(self, folder: Path) -> None:
        """Write the state after the step that was given last."""
        ...


def write_state(folder: Path, rank: int, state: Any) -> None:
    """Write a state as JSON where that loses nothing, else by torch.save, as the documentation of all of them
    does.
    """
    try:
        text = json.dumps(state)
        plain = json.loads(text) == state
    except (TypeError, ValueError):
        plain = False
    if plain:
        (folder / f"rank{rank}.json").write_text(text)
    else:
        import torch

        torch.save(state, folder / f"rank{rank}.pt")


def read_state(folder: Path, rank: int) -> Any:
    """The state that a rank has written."""
    path = folder / f"rank{rank}.json"
    if path.exists():
        return json.loads(path.read_text())
    import torch

    return torch.load(folder / f"rank{rank}.pt", weights_only=False)


def decoded(data: bytes) -> Any:
    """The image as uint8 `[S, S, 3]`."""
    import numpy as np
    from PIL import Image

    return np.array(Image.open(io.BytesIO(data)).convert("RGB"))


@dataclass(frozen=True)
class Photos:
    """The images as files, by number: what map-style loaders read."""

    folder: Path

    @cached_property
    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("*/*.jpg"))

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, number: int) -> tuple[Any, int]:
        path = self._paths[number]
        return decoded(path.read_bytes()), int(path.stem)


def tar_samples(shards: list[str]) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of every image of the shards, in storage order: what conversions to other formats
    read.
    """
    for shard in shards:
        with tarfile.open(shard) as tar:
            for member in tar:
                stem, extension = os.path.splitext(member.name)
                file = tar.extractfile(member)
                if extension == ".jpg" and file is not None:
                    yield int(stem), file.read()
