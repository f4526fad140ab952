"""How long training stands still for a checkpoint, beside torch.save and torch's asynchronous DCP: `python
benchmarks/saving.py`.

All save the same tensors: weights, both moments of Adam, and the average of the weights. A save comes after a
step; a forward and backward pass of the model follows, and before the optimizer would change the tensors a
side waits for what it is still copying. `stall` is what the call and that wait took; `lost` is what all of it
took longer than the same pass without a save, so that a copy that slows the pass down shows too. DCP gets one
`DefaultStager` for all saves, so that it keeps its memory, as its documentation advises: once as `async_save`
works by default, which returns when the state is copied, and once with asynchronous staging, whose end is
waited for before the optimizer. torch.save returns when the kernel has the bytes; ours is on disk (fsync)
when a save is finished, which `finished` shows.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from measure import Machine, Numbers, Row, Side, disk_rates, rate, report, script_options, take_turns
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from vitctl.engine.checkpoint import Saver, parts
from vitctl.engine.journal import Journal
from vitctl.engine.optimizer import Average, build_optimizer
from vitctl.models.build import build
from vitctl.models.variants import variant
from vitctl.recipe.sections import Optimizer

GOAL, GOAL_OF = 1 / 0.1, ("torch.save", "dcp")
LIBRARIES = ("vitctl", "torch", "safetensors")
Wait = Callable[[], None]
Save = Callable[
    [int], tuple[Wait, Wait]
]  # of a number: wait until the tensors may change, and until it is on disk


def main() -> None:
    """Measure, print, and write results/saving.json."""
    parser = script_options(__doc__, rounds=5)
    parser.add_argument("--model", default="B/16")
    parser.add_argument("--images", type=int, default=8, help="of the pass beside a save")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--out", type=Path, help="folder on the disk that is measured; default: a temporary one"
    )
    given = parser.parse_args()
    machine = Machine()
    with tempfile.TemporaryDirectory(dir=given.out) as folder:
        training = Training(given.model, given.device, given.images)
        saves = {
            "vitctl": ours(training, Path(folder) / "vitctl"),
            "torch.save": by_torch(training, Path(folder) / "torch.pt"),
            "dcp": by_dcp(training, Path(folder) / "dcp", staged_later=False),
            "dcp, staged later": by_dcp(training, Path(folder) / "dcp_later", staged_later=True),
        }
        sides = {name: partial(measured, save, training, iter(range(100))) for name, save in saves.items()}
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

    def __init__(self, name: str, device: str, images: int) -> None:
        self.config = variant(name, image_size=224, num_classes=1000)
        self.model = build(self.config, seed=0).to(device)
        self.optimizer = build_optimizer(self.model, Optimizer(name="adam", lr=1.0, weight_decay=0.1))
        self.average = Average(self.model, 0.999)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.images = torch.randn(images, 3, 224, 224, device=device)

    def step(self) -> float:
        """A forward and backward pass; returns its seconds."""
        began = time.perf_counter()
        self.model(self.images).square().mean().backward()
        self.wait()
        return time.perf_counter() - began

    def wait(self) -> None:
        """Until the device has nothing to do."""
        if self.images.is_cuda:
            torch.cuda.synchronize()

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
    log = folder.with_suffix(".jsonl")
    saver = Saver(folder, training.config, {}, 1, 0, Journal(log, lambda _: None))

    def finish() -> None:
        assert saver.finish() == ""

    def save(number: int) -> tuple[Wait, Wait]:
        saver.start(number, training.parts(), {}, {})
        return saver.wait_for_copy, finish

    return save


def by_torch(training: Training, path: Path) -> Save:
    """By torch.save of all state, over the file of the last save."""

    def save(_number: int) -> tuple[Wait, Wait]:
        torch.save(training.state(), path)
        return lambda: None, lambda: None

    return save


def by_dcp(training: Training, folder: Path, *, staged_later: bool) -> Save:
    """By `async_save`; the checkpoint before the last is removed, which ours does too."""
    pinned = next(training.model.parameters()).is_cuda
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=pinned,
            use_shared_memory=False,
            use_async_staging=staged_later,
            use_non_blocking_copy=pinned,
        )
    )

    def save(number: int) -> tuple[Wait, Wait]:
        saved = dcp.async_save(
            training.state(), checkpoint_id=folder / str(number), async_stager=stager, no_dist=True
        )
        staged, written = (
            (saved.staging_completion, saved.upload_completion)
            if isinstance(saved, AsyncSaveResponse)
            else (None, saved)
        )

        def wait() -> None:
            if staged is not None:
                staged.result()

        def finish() -> None:
            written.result()
            shutil.rmtree(folder / str(number - 1), ignore_errors=True)

        return wait, finish

    return save


def measured(save: Save, training: Training, numbers: Iterator[int]) -> Numbers:
    """Seconds that a save holds training up, that it costs, and until it is finished."""
    alone = training.step()
    began = time.perf_counter()
    wait, finish = save(next(numbers))
    training.wait()
    called = time.perf_counter() - began
    training.step()
    waiting = time.perf_counter()
    wait()
    training.wait()
    ended = time.perf_counter()
    finish()
    return {
        "stall": called + ended - waiting,
        "lost": ended - began - alone,
        "whole": ended - began,
        "finished": time.perf_counter() - began,
        "pass": alone,
    }


def copy_seconds(training: Training) -> float:
    """The same tensors copied to memory that is there: what a copy takes at least."""
    tensors = list(training.state().values())
    copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda) for t in tensors]
    return 1 / rate(lambda: [copy.copy_(t) for copy, t in zip(copies, tensors, strict=True)], 1.0)


def rows(found: dict[str, list[Numbers]], what: str) -> list[Row]:
    """Ours against each peer."""
    own = Side("Saver, which copies until the optimizer steps", found["vitctl"])
    peers = {
        "torch.save": "torch.save",
        "dcp": "torch.distributed.checkpoint.async_save, DefaultStager kept",
        "dcp, staged later": "the same with use_async_staging",
    }
    goals = {name: GOAL if name in GOAL_OF else None for name in peers}
    stalls = [
        Row(f"checkpoint of {what}", "stall", "less", own, Side(peers[name], found[name]), goals[name])
        for name in peers
    ]
    whole = f"the pass with a checkpoint of {what}"
    return stalls + [Row(whole, "whole", "less", own, Side(peers[name], found[name])) for name in peers]


if __name__ == "__main__":
    main()
