"""A training's needs: memory by kind, data, and time. Imports no torch."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from vitctl.data.source.order import lanes_read, micro_batches
from vitctl.data.source.views import Source, split_sources
from vitctl.engine.schedule import lanes_of
from vitctl.errors import RecipeError
from vitctl.jobs.inputs.data import num_lanes
from vitctl.models.flops import (
    PEAK_TFLOPS,
    USABLE_SHARE,
    block_parameters,
    converted_bytes,
    count_adapted,
    count_parameters,
    count_trained,
    recomputed_share,
    training_memory_bytes,
)
from vitctl.models.roofline import GPUS, Estimate, Step, estimate
from vitctl.models.variants import Config, check_lora, check_recomputed
from vitctl.recipe.images import TrainImages
from vitctl.recipe.schema import Finetune, Machine, Pretrain, frozen_places, lora_of
from vitctl.recipe.sections import OPTIMIZERS
from vitctl.system import limits
from vitctl.system.remote import is_remote

GPU, MFU = "H100", 0.4
# Dense TFLOP/s of a GPU in tf32, float32 and float64, from NVIDIA's data sheets.
_PEAKS = {
    "A100": (156.0, 19.5, 19.5),
    "A100 40GB": (156.0, 19.5, 19.5),
    "H100": (494.5, 67.0, 67.0),
    "H100 PCIe": (378.0, 51.0, 51.0),
    "H200": (494.5, 67.0, 67.0),
    "L40S": (183.0, 91.6, 1.4),
    "L4": (60.0, 30.3, 0.5),
    "GeForce RTX 5090": (104.8, 104.8, 1.6),
    "GeForce RTX 4090": (82.6, 82.6, 1.3),
    "GeForce RTX 3090": (35.6, 35.6, 0.6),
    "V100": (15.7, 15.7, 7.8),  # no tf32
}
Precision = Literal["float32", "tf32", "bf16", "float64"]
CPU_SHARE = 0.33  # of the rate of a product, on a CPU: smoke reaches 20 %, S/16 34 %
RUNTIME_BYTES = 600 * 2**20  # of a process: Python, torch and its libraries; benchmarks/plan_memory.py
LAUNCHER_BYTES = 640 * 2**20  # of a node with several processes: vitctl and accelerate, measured


def precision_of(machine: Machine) -> Precision:
    """Return the precision on a GPU."""
    return "bf16" if machine.precision == "auto" else machine.precision


def number_bytes(machine: Machine) -> int:
    return 8 if machine.precision == "float64" else 4


def usable_flops(machine: Machine, device: str = GPU, mfu: float = MFU) -> float:
    """Return the FLOP/s of all processes at this share of the peak of their precision."""
    names = ("tf32", "float32", "float64")
    peaks = {"bf16": PEAK_TFLOPS[device], **dict(zip(names, _PEAKS[device], strict=True))}
    return mfu * peaks[precision_of(machine)] * 1e12 * machine.processes


def product_flops(config: Config, seconds: float = 0.5) -> float:
    """Return the FLOP/s of a float32 product on this CPU, of the shape of an MLP's where there is one."""
    width = getattr(config, "hidden_size", 512)
    one, other = (np.ones(shape, np.float32) for shape in ((1024, width), (width, 4 * width)))
    out, began, count = one @ other, time.perf_counter(), 0
    while (spent := time.perf_counter() - began) < seconds:
        np.matmul(one, other, out=out)
        count += 1
    return 8 * 1024 * width**2 * count / spent


def expected(
    config: Config,
    recipe: Pretrain | Finetune,
    teacher: Config | None,
    device: str,
    micro_batch: int,
    most: tuple[int, int],
) -> Estimate | str:
    """Return the `models.roofline` estimate of one GPU that waits for nothing, or why there is none.

    Args:
        device: a row of `roofline.GPUS`; "": no GPU.
        micro_batch: most images of a forward pass that fit; 0: none does.
        most: result of `busiest`.
    """
    m = recipe.machine
    reasons = {
        "machine.device is 'cpu'": not device,
        "no micro-batch fits": not micro_batch,
        f"machine.precision is '{m.precision}', not bf16": m.precision not in ("auto", "bf16"),
        "some weights are not trained": trained_parameters(recipe, config) < count_parameters(config),
    }
    if why := next((why for why, holds in reasons.items() if holds), ""):
        return why
    # Mirrors `engine.computation.attention_kernel` on a GPU.
    plain = m.attention == "math" or (m.attention == "auto" and recipe.schedule.lanes > 0)
    step = Step(
        images=most[0],
        passes=max(most[1], -(-most[0] // micro_batch)),
        compiled=m.compile not in (False, "auto"),
        plain=plain,
        slots=OPTIMIZERS[recipe.optimizer.name].slots,
        averaging=recipe.averaging.decay > 0,
        shards=m.shards(m.processes),
        again=computed_again(config, recipe),
        teacher=teacher,
    )
    try:
        return estimate(config, device, step)
    except RecipeError:
        return "it knows ViTs only"


def computed_again(config: Config, recipe: Pretrain | Finetune) -> float:
    """Return what the backward pass recomputes, as a share of both passes."""
    return recomputed_share(config, recipe.machine.checkpoint_blocks) / 3


def trained_parameters(recipe: Pretrain | Finetune, config: Config) -> int:
    lora = lora_of(recipe)
    if lora.rank:
        check_lora(config, lora.blocks)
        return count_adapted(config, lora.rank, lora.targets, lora.blocks)
    return count_trained(config, frozen_places(recipe, config))


@dataclass(frozen=True)
class Memory:
    """Memory of a process in bytes.

    Args:
        fixed: by kind, independent of the micro-batch.
        accumulated: gradients of a sharded model, unsharded until the last micro-batch of a step.
        image: activations per image.
        share: images of a step, or of a leaf: the maximum in a forward pass.
        room: of a GPU, without the reserve; infinite if unknown.
    """

    fixed: Mapping[str, int]
    accumulated: int
    image: int
    share: int
    room: float

    @classmethod
    def of(
        cls, config: Config, recipe: Pretrain | Finetune, teacher: Config | None, device: str = GPU
    ) -> "Memory":
        """Return the memory of a process on such a GPU; "" is a CPU, with unknown room."""
        m, slots, averaging = (
            recipe.machine,
            OPTIMIZERS[recipe.optimizer.name].slots,
            recipe.averaging.decay > 0,
        )
        check_recomputed(config, m.checkpoint_blocks)
        precision, wide = precision_of(m), number_bytes(m)
        frozen, trained = frozen_places(recipe, config), trained_parameters(recipe, config)
        none, one = (
            training_memory_bytes(config, images, precision, slots, averaging, m.checkpoint_blocks, frozen)
            for images in (0, 1)
        )
        parameters, shards = count_parameters(config), m.shards(m.processes)
        narrow, is_cut = m.sharding_dtype == "bf16", shards > 1
        blocks, largest = block_parameters(config), max([0, *block_parameters(config)])
        # A block computes while the next one is gathered; parameters outside blocks are always gathered. Two
        # blocks have unsharded gradients: one is computed while the other is sent.
        gathered = wide * (parameters - sum(blocks)) + 2 * largest * ((2 if narrow else wide) + wide)
        lanes = lanes_of(recipe, m.processes)
        held = max(lanes.most_held(rank, m.processes) for rank in range(m.processes)) if lanes else 0
        fixed = {
            "weights": -(-wide * parameters // shards),
            "gradients": -(-wide * trained // shards),
            "moments": -(-wide * slots * trained // shards),
            "averages": -(-wide * averaging * trained // shards),
            "bf16 copies": converted_bytes(
                config, precision, m.checkpoint_blocks, gathers_bf16=is_cut and narrow, frozen=frozen
            ),
            "teacher": wide * count_parameters(teacher) if teacher else 0,
            "buffers": gathered if is_cut else wide * trained * held,
        }
        share = lanes.largest_leaf if lanes else -(-recipe.schedule.batch_size // m.processes)
        room = USABLE_SHARE * GPUS[device].memory * 2**30 if device else math.inf
        return cls(fixed, wide * trained * is_cut, one - none, share, room)

    def kinds(self, micro_batch: int) -> dict[str, int]:
        """Return the bytes of each kind with `micro_batch` images in a forward pass."""
        kinds = {**self.fixed, "activations": micro_batch * self.image}
        kinds["buffers"] += self.accumulated * (micro_batch < self.share)
        return {kind: size for kind, size in kinds.items() if size}

    def at(self, micro_batch: int) -> int:
        return sum(self.kinds(micro_batch).values())

    def fitting(self) -> int:
        """Return the largest micro-batch that fits; 0 if none does."""
        return self.share if self.at(self.share) <= self.room else self.largest()

    def largest(self) -> int:
        """Return the largest micro-batch that would fit in a step of more images; 0 if none does."""
        return max(0, int((self.room - self.at(0)) // self.image)) if self.room < math.inf else self.share


def image_bytes(source: Source) -> float:
    """Return the mean bytes of an image in a source's shards; 0 without shards."""
    shards = [shard for split in split_sources(source) for shard in split.index.shards]
    return sum(shard.num_bytes for shard in shards) / max(1, sum(shard.num_samples for shard in shards))


def loader_rate(data: TrainImages) -> tuple[int, str]:
    """Return the images/s of a core of the loader, and of what they were measured; see docs/speed.md.

    One core of a Xeon for photographs (benchmarks/results/loader.json); small images with a core shared.
    """
    if not 0 < data.image_size <= limits.SMALL_SIDE:
        return 700, "photographs as in ImageNet, cropped and flipped"
    if data.auto_augment or data.randaugment_layers:
        return 2000, "images of 32 pixels with AutoAugment"
    return 4500, "images of 32 pixels"


def nodes_of_a_shard(recipe: Pretrain | Finetune, nodes: int) -> float:
    """Return how many nodes fetch a shard, on average; with a cache, remote shards are fetched in full."""
    data, lanes = recipe.data, 1
    places = (data.path, *(part.path for part in data.mixture))
    if not data.cache_gib or not any(map(is_remote, places)):
        return 1.0
    if data.order == "windowed":
        lanes = max(1, num_lanes(data, recipe.schedule))
    return sum(lanes_read(lanes, nodes)) / lanes


def busiest(recipe: Pretrain | Finetune, micro_batch: int) -> tuple[int, int]:
    """Return the images per step, and the forward passes, of the process with the most images."""
    batch, processes = recipe.schedule.batch_size, recipe.machine.processes
    lanes = lanes_of(recipe, processes)
    parts = (
        lanes.parts(rank, processes) if lanes else micro_batches(batch, processes, rank, micro_batch)
        for rank in range(processes)
    )
    return max((sum(len(part.slots) for part in own), len(own)) for own in parts)
