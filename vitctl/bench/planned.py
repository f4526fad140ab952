"""What is measured of a recipe on a machine that may be far smaller than the paper's: the micro-batch, and
the images of an update.
"""

from dataclasses import dataclass
from typing import Any, Literal

import psutil
import torch

from vitctl.bench.memory import free_bytes
from vitctl.engine.distributed.runtime import Computation
from vitctl.errors import LaunchError
from vitctl.models.configs import Config
from vitctl.models.costs import OPTIMIZER_SLOTS
from vitctl.models.flops import training_flops, training_memory_bytes
from vitctl.models.variants import variant
from vitctl.recipe.schema import Finetune, Pretrain
from vitctl.system.text import bytes_text

# FLOP/s that a training step is expected to reach, for the choice of a batch only: of one thread, and of a
# GPU.
_THREAD_FLOPS, _GPU_FLOPS = 1e11, 2e14
_STEP_SHARE, _PASS_SHARE = (
    0.05,
    0.03,
)  # of the budget, that an update and a forward and backward pass may take
_SMALLER = ("L/16", "B/16", "S/16", "Ti/16")


@dataclass(frozen=True)
class Measured:
    """The recipe as it is measured, and what the recipe itself asks for.

    Args:
        recipe: with the batch size and micro-batch that are measured.
        config: its network.
        share: images of an update of the recipe itself, for one process.
        recipe_batch: the same over all processes.
        recipe_micro_batch: images of a pass in a run of the recipe itself; `recipe_bytes` the memory that is
            estimated for them.
    """

    recipe: Pretrain | Finetune
    config: Config
    share: int
    recipe_batch: int
    recipe_micro_batch: int
    recipe_bytes: int


def plan_measurement(
    recipe: Pretrain | Finetune,
    config: Config,
    computation: Computation,
    seconds: float,
    batch_size: int | None,
) -> Measured:
    """Choose the batch that is measured: the recipe's where some updates of it fit into the time, else a part
    of it.

    Args:
        recipe: with a length and a batch size.
        config: its network.
        computation: device and precision.
        seconds: that the whole measurement may take.
        batch_size: that the user asks for; None: chosen here.

    Raises:
        LaunchError: not even one image fits into memory.
    """
    processes, s, m = recipe.machine.processes, recipe.schedule, recipe.machine
    memory = _Memory(recipe, config, computation)
    memory.check_one()
    own_share = -(-s.batch_size // processes)
    wanted = -(-(batch_size or s.batch_size) // processes)
    image_seconds = training_flops(config, 1) / _rate(computation)
    fitting = max(1, memory.fitting())
    micro = min(m.micro_batch, wanted) if m.micro_batch > 0 else min(wanted, fitting)
    if (m.micro_batch <= 0 and micro < wanted) or (computation.device.type == "cpu" and m.micro_batch <= 0):
        micro = min(micro, max(1, int(_PASS_SHARE * seconds / image_seconds)))
        micro = wanted if micro >= wanted else 2 ** (micro.bit_length() - 1)
    share = wanted
    if batch_size is None and not s.lanes:
        affordable = int(_STEP_SHARE * seconds / image_seconds)
        share = wanted if affordable >= wanted else max(1, affordable // micro) * micro
    changed: dict[str, Any] = {
        "schedule": s.model_copy(
            update={"batch_size": share * processes if share < wanted or batch_size else s.batch_size}
        ),
        "machine": m.model_copy(update={"micro_batch": min(micro, share)}),
    }
    asked = min(m.micro_batch, own_share) if m.micro_batch > 0 else own_share
    return Measured(
        recipe.model_copy(update=changed), config, own_share, s.batch_size, asked, memory.at(asked)
    )


def _rate(computation: Computation) -> float:
    if computation.device.type == "cuda":
        return _GPU_FLOPS
    return _THREAD_FLOPS * torch.get_num_threads() * (2 if computation.precision == "bf16" else 1)


class _Memory:
    """Estimates of `training_memory_bytes` against what is free; with several processes on a CPU against
    their part of it.
    """

    def __init__(self, recipe: Pretrain | Finetune, config: Config, computation: Computation) -> None:
        self.config, self.recipe, self.computation = config, recipe, computation
        self.free = free_bytes(computation.device)
        if computation.device.type == "cpu" and recipe.machine.processes > 1:
            self.free = psutil.virtual_memory().total // (
                2 * recipe.machine.processes
            )  # the same number on each

    def at(self, images: int, config: Config | None = None) -> int:
        """Bytes with so many images in a pass."""
        precision: Literal["float32", "bf16", "float64"] = "float32"
        if self.computation.precision in ("bf16", "float64"):
            precision = "bf16" if self.computation.precision == "bf16" else "float64"
        slots, average = OPTIMIZER_SLOTS[self.recipe.optimizer.name], self.recipe.averaging.decay > 0
        own = config or self.config
        return training_memory_bytes(
            own, images, precision, slots, average, self.recipe.machine.checkpoint_blocks
        )

    def fitting(self) -> int:
        """Images that half of the free memory has room for."""
        return int((self.free / 2 - self.at(0)) // max(1, self.at(1) - self.at(0)))

    def check_one(self) -> None:
        """Raises LaunchError where one image does not fit."""
        needed = self.at(1)
        if needed <= self.free:
            return
        sizes = {name: self.at(1, variant(name, image_size=self.config.image_size)) for name in _SMALLER}
        smaller = next((name for name, size in sizes.items() if size < min(needed, 0.8 * self.free)), "")
        instead = f"; {smaller} needs about {bytes_text(sizes[smaller])}" if smaller else ""
        raise LaunchError(
            f"this network does not fit here: weights, gradients, optimizer state and one image of "
            f"{self.config.image_size} pixels "
            f"need about {bytes_text(needed)}, and {bytes_text(self.free)} are free; take a smaller one, or "
            f"a machine with more "
            f"memory{instead}"
        )
