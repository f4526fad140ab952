"""A process of several: features of images that all read, and the nearest of them; run by
`test_divided_features`.
"""

import sys
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vitctl.data.loader.batches import Batch
from vitctl.engine import evaluation, probes
from vitctl.engine.preemption import StopFlag
from vitctl.engine.runtime import start

IMAGES, TESTS, WIDTH, K, BATCH = 301, 23, 37, 30, 4
WINDOW, QUERIES, STORED = 16, 5, 13


class Held(TorchDispatchMode):
    """Counts the rows of WIDTH features in memory, and the most that there were."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.most, self.known = 0, 0, set()  # type: ignore[var-annotated]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else (out,):
            if isinstance(one, Tensor) and one.device.type == "cpu" and (size := self.size(one)):
                self.count(one.untyped_storage(), size)
        return out

    def size(self, one: Tensor) -> int:
        return one.numel() // WIDTH if WIDTH in one.shape else 0

    def count(self, storage: Any, rows: int) -> None:
        place = storage._cdata
        if place not in self.known:
            self.known.add(place)
            self.now += rows
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.free, place, rows)

    def free(self, place: int, rows: int) -> None:
        self.known.discard(place)
        self.now -= rows


class HeldBytes(Held):
    """Counts the bytes of all tensors that are made, and the most that there were."""

    def size(self, one: Tensor) -> int:
        return one.untyped_storage().nbytes()


class Signs(torch.nn.Module):
    """Features of 1 and -1 and few different ones, so that many similarities are equal; -0.0 stays."""

    def features(self, images: Tensor) -> Tensor:
        drawn = [torch.Generator().manual_seed(int(i) % 7) for i in images.flatten()]
        rows = [torch.randint(0, 3, (WIDTH,), generator=one).float() - 1 for one in drawn]
        return torch.stack(rows) * (1 - 2 * (images.flatten() % 2)).float()[:, None]


def batches(number: int, rank: int, size: int) -> list[Batch]:
    """Return those of a process, of which the last are padded."""
    share = -(-number // size)
    mine = [i if i < number else -1 for i in range(rank * share, (rank + 1) * share)]
    mine += [-1] * (-len(mine) % BATCH)
    parts = torch.tensor(mine).split(BATCH)
    return [Batch(at.clamp(min=0)[:, None], at, (at >= 0).float(), at) for at in parts]


def main(folder: Path, size: int) -> None:
    evaluation._WINDOW, probes._QUERIES, probes._STORED = WINDOW, QUERIES, STORED
    runtime = start(precision="float64", device="cpu", processes=size)
    found: dict[str, Any] = {}
    for everywhere in (False, True):
        with Held() as held:
            tables = [
                evaluation._table(
                    runtime,
                    batches(number, runtime.rank, size),
                    lambda batch: Signs().features(batch.images),
                    number,
                    StopFlag(),
                    everywhere=everywhere,
                )
                for number in (IMAGES, TESTS)
            ]
        found |= {f"tables {everywhere}": tables, f"rows {everywhere}": held.most}
        if everywhere:
            continue
        with Held() as held:
            for dtype in (torch.float32, torch.float64):
                found[str(dtype)] = probes.nearest(*tables, K, dtype=dtype, runtime=runtime)
        found["rows of nearest"] = held.most
        few = tables[0][: 2 * STORED - 6]  # of two chunks
        found["few"] = probes.nearest(few, tables[1], len(few), dtype=torch.float64, runtime=runtime)
    torch.save(found, folder / f"{size}_{runtime.rank}.pt")
    runtime.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
