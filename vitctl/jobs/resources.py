"""What a training takes from its machines: memory by kind, traffic between nodes, data, and time.

Imports no torch.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from vitctl.data.source.order import lanes_read, micro_batches, subtrees
from vitctl.data.source.views import Source, split_sources
from vitctl.engine.schedule import lanes_of
from vitctl.errors import RecipeError
from vitctl.jobs.inputs.data import num_lanes
from vitctl.models.flops import (
    PEAK_TFLOPS,
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
from vitctl.recipe.schema import Finetune, Machine, Pretrain, frozen_places, lora_of
from vitctl.recipe.sections import OPTIMIZERS

GPU, MFU = "H100", 0.4
# TFLOP/s of a GPU beside its bf16, without sparsity: tf32, float32 and float64 by NVIDIA's data sheets.
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
    "V100": (15.7, 15.7, 7.8),  # it has no tf32
}
Precision = Literal["float32", "tf32", "bf16", "float64"]
USABLE_SHARE = 0.9  # of a GPU's memory; the rest is for the framework
RUNTIME_BYTES = 600 * 2**20  # of a process: Python, torch and its libraries; benchmarks/plan_memory.py

_LINK = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)x([0-9]{1,3})")


def precision_of(machine: Machine) -> Precision:
    """Return the precision on a GPU."""
    return "bf16" if machine.precision == "auto" else machine.precision


def number_bytes(machine: Machine) -> int:
    """Return the bytes of a weight, or of its gradient."""
    return 8 if machine.precision == "float64" else 4


def usable_flops(machine: Machine, device: str = GPU, mfu: float = MFU) -> float:
    """Return the FLOP/s of all processes at this share of the peak of their precision."""
    names = ("tf32", "float32", "float64")
    peaks = {"bf16": PEAK_TFLOPS[device], **dict(zip(names, _PEAKS[device], strict=True))}
    return mfu * peaks[precision_of(machine)] * 1e12 * machine.processes


def expected(
    config: Config,
    recipe: Pretrain | Finetune,
    teacher: Config | None,
    device: str,
    micro_batch: int,
    most: tuple[int, int],
    trained: int,
) -> Estimate | str:
    """Return what `models.roofline` expects of one GPU that waits for nothing, or why it expects nothing.

    Args:
        config: of the network.
        recipe: that trains.
        teacher: of a distillation.
        device: a row of `roofline.GPUS`; "": no GPU.
        micro_batch: the most images of a forward pass that fit; 0: none does.
        most: `busiest`.
        trained: parameters.
    """
    m = recipe.machine
    reasons = {
        "machine.device is 'cpu'": not device,
        "no micro-batch fits": not micro_batch,
        f"machine.precision is '{m.precision}', not bf16": m.precision not in ("auto", "bf16"),
        "some weights are not trained": trained < count_parameters(config),
    }
    if why := next((why for why, holds in reasons.items() if holds), ""):
        return why
    # As `engine.computation.attention_kernel` on a GPU.
    plain = m.attention == "math" or (m.attention == "auto" and recipe.schedule.lanes > 0)
    step = Step(
        images=most[0],
        passes=max(most[1], -(-most[0] // micro_batch)),
        compiled=m.compile,
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
    """Return what the backward pass computes again, as a share of both passes."""
    return recomputed_share(config, recipe.machine.checkpoint_blocks) / 3


def trained_parameters(recipe: Pretrain | Finetune, config: Config) -> int:
    """Return the number of parameters that are trained."""
    lora = lora_of(recipe)
    if lora.rank:
        check_lora(config, lora.blocks)
        return count_adapted(config, lora.rank, lora.targets, lora.blocks)
    return count_trained(config, frozen_places(recipe, config))


@dataclass(frozen=True)
class Memory:
    """Memory of a process in bytes.

    Args:
        fixed: by kind, whatever the micro-batch.
        accumulated: gradients of a sharded model, which are whole until the last micro-batch of a step.
        image: activations of each image.
        share: images of a step, or of a leaf: a forward pass has no more.
        room: of a GPU, without what is kept free; infinite where it is not known.
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
        """Return the memory of a process on such a GPU; with "", on a CPU, whose room is not known."""
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
        # A block computes while the next one is gathered; what is in no block is gathered all the time. Two
        # blocks have whole gradients: one is computed while the other is sent.
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
        """Return the sum of `kinds`."""
        return sum(self.kinds(micro_batch).values())

    def fitting(self) -> int:
        """Return the largest micro-batch that fits, 0 when none does."""
        return self.share if self.at(self.share) <= self.room else self.largest()

    def largest(self) -> int:
        """Return the largest micro-batch that fits in a step of more images, 0 when none does."""
        return max(0, int((self.room - self.at(0)) // self.image)) if self.room < math.inf else self.share


class Link(NamedTuple):
    """The network of a node: links, each of so many Gbit/s."""

    gigabits: float = 400.0
    links: int = 8

    @property
    def bytes_per_second(self) -> float:
        """Of all links of a node, in one direction."""
        return self.gigabits * self.links * 1e9 / 8

    def __str__(self) -> str:
        return f"{self.gigabits:g}x{self.links}"


def parse_link(text: str) -> Link:
    """Read --link, such as "400x8": Gbit/s of a link, and links of a node.

    Raises:
        RecipeError: the text has another form.
    """
    match = _LINK.fullmatch(text)
    if match is None or not float(match[1]) * int(match[2]):
        raise RecipeError(f"--link {text}: should be the Gbit/s of a link and the links of a node, as 400x8")
    return Link(float(match[1]), int(match[2]))


class Reading(NamedTuple):
    """The shards behind a training split: their number, bytes and images, and whether they are fetched."""

    num_shards: int
    num_bytes: int
    num_images: int
    is_remote: bool


def reading_of(source: Source) -> Reading:
    """Return the shards behind a source."""
    splits = split_sources(source)
    shards = [shard for split in splits for shard in split.index.shards]
    num_bytes, num_images = (
        sum(getattr(shard, name) for shard in shards) for name in ("num_bytes", "num_samples")
    )
    return Reading(len(shards), num_bytes, num_images, any(split.index.is_remote for split in splits))


class Fetched(NamedTuple):
    """What a node reads.

    Args:
        per_image: bytes of an image in its shard.
        amplification: nodes that fetch a shard, on average.
        shards: that the images of a batch come from, at most.
        cache: bytes of the shards that a node keeps at a time; 0 where it keeps none.
        is_once: the cache has room for all shards: after the first epoch nothing is fetched.
    """

    per_image: float
    amplification: float
    shards: int
    cache: int
    is_once: bool


def fetched(recipe: Pretrain | Finetune, reading: Reading, nodes: int) -> Fetched:
    """Return what a node reads of these shards, in the order of the recipe."""
    data, shards, lanes, window = recipe.data, reading.num_shards, 1, reading.num_shards
    if data.order == "windowed":
        lanes, window = max(1, num_lanes(data, recipe.schedule)), 2 * data.order_window_shards
    read, is_cached = lanes_read(lanes, nodes), reading.is_remote and data.cache_gib > 0
    kept = min(shards, window * max(read)) if is_cached else 0
    return Fetched(
        reading.num_bytes / max(1, reading.num_images),
        sum(read) / lanes if is_cached else 1.0,
        min(recipe.schedule.batch_size, shards, window * lanes),
        kept * reading.num_bytes // max(1, shards),
        is_cached and data.cache_gib * 2**30 >= reading.num_bytes,
    )


def busiest(recipe: Pretrain | Finetune, micro_batch: int) -> tuple[int, int]:
    """Return the images of a step, and the forward passes, of the process with the most images."""
    batch, processes = recipe.schedule.batch_size, recipe.machine.processes
    lanes = lanes_of(recipe, processes)
    parts = (
        lanes.parts(rank, processes) if lanes else micro_batches(batch, processes, rank, micro_batch)
        for rank in range(processes)
    )
    return max((sum(len(part.slots) for part in own), len(own)) for own in parts)


class Traffic(NamedTuple):
    """Bytes that a node sends to others in a step: weights that are gathered in every pass and in its
    backward pass, and gradients in the last backward pass.
    """

    gathered: float = 0.0
    gradients: float = 0.0


def traffic_bytes(
    config: Config, recipe: Pretrain | Finetune, passes: int, nodes: int, trained: int
) -> Traffic:
    """Return the bytes that a node sends to others. Collectives go round in rings.

    A ring crosses the edge of each node once, whatever the number of its processes. With lanes a node
    completes its subtrees first, and its processes send a slice of their sums each. `passes` are the forward
    passes of a process.
    """
    m = recipe.machine
    size = number_bytes(m) * trained
    if nodes == 1:
        return Traffic()
    local, shards = m.processes // nodes, m.shards(m.processes)
    ring = size * (1 - 1 / m.processes)
    if lanes := lanes_of(recipe, m.processes):
        own = [lanes.owned(rank, m.processes) for rank in range(local * nodes)]
        of_nodes = (range(own[i].start, own[i + local - 1].stop) for i in range(0, len(own), local))
        size *= max(len(subtrees(lanes.tree, node)) for node in of_nodes) + 1
        return Traffic(0.0, size * (1 - 1 / nodes))
    if shards == 1:
        return Traffic(0.0, 2 * ring)
    copies = m.processes // shards
    between = 2 * size * (1 - 1 / copies) * min(1.0, local / shards)  # the copies add up their parts
    if shards <= local:
        return Traffic(0.0, between)
    narrow = sum(block_parameters(config)) if m.sharding_dtype == "bf16" else 0
    whole = number_bytes(m) * count_parameters(config) - 2 * narrow
    cut = 1 - 1 / shards
    return Traffic(2 * passes * whole * cut, between + size * cut)  # forward and backward


class Seconds(NamedTuple):
    """Seconds of a step.

    Args:
        computation: of the process with the most images.
        network: of what a node sends.
        busy: of computation, and of the network what computation does not hide.
        data: of what a node reads; 0 where nothing is known of it.
    """

    computation: float
    network: float
    busy: float
    data: float

    @property
    def step(self) -> float:
        """Of a step: images are read while others are computed."""
        return max(self.busy, self.data)


def step_seconds(
    flops: float,
    recipe: Pretrain | Finetune,
    most: tuple[int, int],
    sent: Traffic,
    read: Fetched | None,
    nodes: int,
    link: Link,
    device: str = GPU,
    mfu: float = MFU,
) -> Seconds:
    """Return the seconds of a step on GPUs; on a CPU (no device) computation counts 0, as it is not known.

    All processes wait for the one with the most images. Gradients are sent during the last backward pass of
    a step, two thirds of its computation divided by the passes, and weights of FSDP are gathered in every
    pass: there, and in all of the step before it, the longer of computation and network counts.

    Args:
        flops: of a step, without what is computed again.
        recipe: that trains.
        most: `busiest`.
        sent: `traffic_bytes`.
        read: None where nothing is known of the data.
        nodes: machines.
        link: of each.
        device: the GPU.
        mfu: share of its peak that it reaches with these FLOPs.
    """
    m, batch, (images, passes) = recipe.machine, recipe.schedule.batch_size, most
    flops *= images * m.processes / batch
    computed = flops / usable_flops(m, device, mfu) if device else 0.0
    gathered, gradients = (size / link.bytes_per_second for size in sent)
    last = 2 / 3 * computed / passes
    before = max(computed - last, gathered * (1 - 1 / (2 * passes)))
    busy = before + max(last, gathered / (2 * passes) + gradients)
    fetched = batch / nodes * read.per_image * read.amplification if read else 0.0
    return Seconds(computed, gathered + gradients, busy, fetched / link.bytes_per_second)
