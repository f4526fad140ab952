"""How long training stands still for a checkpoint, beside torch.save and torch's asynchronous DCP: `python benchmarks/saving.py`.

All save the same tensors: weights, both moments of Adam, and the average of the weights. A save comes after a step, and training
goes on when the call comes back: with ours and with DCP's `async_save` the state has been copied by then, and is written by a
thread. DCP gets one `DefaultStager` for all saves, so that it keeps its memory, as its documentation advises. torch.save returns
when the kernel has the bytes; ours is on disk (fsync) when a save is finished, which `finished` shows. Stand-in steps (a matrix product) go
on meanwhile, so that a write that holds the interpreter shows in the longest of them.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from measure import Machine, Numbers, Row, Side, disk_rates, rate, report, take_turns
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from vitctl.engine.averaging import Average
from vitctl.engine.checkpoint.saving import Saver, parts
from vitctl.engine.journal import Journal
from vitctl.engine.optimizer import build_optimizer
from vitctl.models.build import build
from vitctl.models.variants import variant

LIBRARIES = ("vitctl", "torch", "safetensors")
STEPS = 20  # at least, beside each save
Done = Callable[[], bool]
Finish = Callable[[], None]
Save = Callable[[int], tuple[Done, Finish]]  # of a number: whether it is on disk, and wait until it is


def main() -> None:
    """Measure, print, and write results/saving.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="B/16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="folder on the disk that is measured; default: a temporary one")
    parser.add_argument("--results", type=Path, default=Path(__file__).resolve().parent / "results")
    given = parser.parse_args()
    machine = Machine()
    with tempfile.TemporaryDirectory(dir=given.out) as folder:
        training = Training(given.model, given.device)
        saves = {
            "vitctl": ours(training, Path(folder) / "vitctl"),
            "torch.save": by_torch(training, Path(folder) / "torch.pt"),
            "dcp": by_dcp(training, Path(folder) / "dcp"),
        }
        sides = {name: partial(measured, save, given.device, iter(range(100))) for name, save in saves.items()}
        for measure in sides.values():
            measure()  # the first save takes the memory of the copy
        found = take_turns(sides, given.rounds)
        limits = {"copy_seconds": copy_seconds(training), **disk_rates(Path(folder))}
    size = training.num_bytes / 1e9
    report(
        "saving",
        rows(found, f"{given.model} on {given.device}, {size:.2f} GB"),
        machine,
        limits,
        LIBRARIES,
        given.results,
    )


class Training:
    """A model after its first step, with optimizer and average."""

    def __init__(self, name: str, device: str) -> None:
        self.config = variant(name, image_size=224, num_classes=1000)
        self.model = build(self.config, seed=0).to(device)
        adam = {"weight_decay": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "momentum": 0.9}
        self.optimizer = build_optimizer(self.model, name="adam", **adam)
        self.average = Average(self.model, 0.999)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """All tensors of a checkpoint, as a user of torch would collect them."""
        return {f"{part}/{name}": tensor for part, name, tensor in self.parts()}

    def parts(self) -> Any:
        """The same as our `Saver` takes them."""
        return parts(self.model, self.average, self.optimizer)

    @property
    def num_bytes(self) -> int:
        """Of a checkpoint."""
        return sum(tensor.nbytes for tensor in self.state().values())


def ours(training: Training, folder: Path) -> Save:
    """By `Saver`."""
    written: list[int] = []
    log = folder.with_suffix(".jsonl")
    saver = Saver(folder, training.config, {}, 1, 0, Journal(log, lambda record: written.append(record["step"])))

    def finish() -> None:
        assert saver.finish() == ""

    def save(number: int) -> tuple[Done, Finish]:
        saver.start(number, training.parts(), {}, {})
        return lambda: number in written, finish

    return save


def by_torch(training: Training, path: Path) -> Save:
    """By torch.save of all state, over the file of the last save."""

    def save(_number: int) -> tuple[Done, Finish]:
        torch.save(training.state(), path)
        return lambda: True, lambda: None

    return save


def by_dcp(training: Training, folder: Path) -> Save:
    """By `async_save`; the checkpoint before the last is removed, which ours does too."""
    pinned = next(training.model.parameters()).is_cuda
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=pinned, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=pinned
        )
    )

    def save(number: int) -> tuple[Done, Finish]:
        future = dcp.async_save(training.state(), checkpoint_id=folder / str(number), async_stager=stager, no_dist=True)

        def finish() -> None:
            future.result()
            shutil.rmtree(folder / str(number - 1), ignore_errors=True)

        return future.done, finish

    return save


def measured(save: Save, device: str, numbers: Any) -> Numbers:
    """Seconds that a save holds training up, until it is finished, and the longest stand-in step until then."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    done, finish = save(next(numbers))
    wait()
    stall = time.perf_counter() - began
    a, longest, steps = torch.randn(1024, 1024, device=device), 0.0, 0
    while steps < STEPS or not done():
        step = time.perf_counter()
        a = torch.tanh(a @ a)
        wait()
        longest, steps = max(longest, time.perf_counter() - step), steps + 1
    finish()
    return {"stall": stall, "finished": time.perf_counter() - began, "longest step": longest}


def copy_seconds(training: Training) -> float:
    """The same tensors copied to memory that is there: what a copy takes at least."""
    tensors = list(training.state().values())
    copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda) for t in tensors]
    return 1 / rate(lambda: [copy.copy_(t) for copy, t in zip(copies, tensors, strict=True)], 1.0)


def rows(found: dict[str, list[Numbers]], what: str) -> list[Row]:
    """Ours against each peer."""
    own = Side("Saver, a copy, then a thread", found["vitctl"])
    peers = {"torch.save": "torch.save", "dcp": "torch.distributed.checkpoint.async_save, DefaultStager kept"}
    return [
        Row(f"checkpoint of {what}", "stall", "less", own, Side(peers[name], found[name]), 1 / 0.1) for name in peers
    ]


if __name__ == "__main__":
    main()
