"""What a training takes from its machines: memory by kind, traffic between nodes, data, and time.

Imports no torch.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from vitctl.data.source.order import subtrees
from vitctl.data.source.views import Source, split_sources
from vitctl.engine.schedule import lanes_of
from vitctl.errors import RecipeError
from vitctl.models.flops import (
    PEAK_TFLOPS,
    block_parameters,
    converted_bytes,
    count_adapted,
    count_parameters,
    count_trained,
    training_memory_bytes,
)
from vitctl.models.roofline import MEMORY
from vitctl.models.variants import Config, check_lora
from vitctl.recipe.schema import Finetune, Pretrain, frozen_places, lora_of
from vitctl.recipe.sections import OPTIMIZERS

GPU, MFU = "H100", 0.4
USABLE_SHARE = 0.9  # of a GPU's memory; the rest is for the framework
RUNTIME_BYTES = 750 * 2**20  # of a process: Python, torch and its libraries; benchmarks/plan_memory.py

_LINK = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)x([0-9]{1,3})")


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
        share: images of a step.
        room: of a GPU, without what is kept free.
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
        m, slots, averaging = (
            recipe.machine,
            OPTIMIZERS[recipe.optimizer.name].slots,
            recipe.averaging.decay > 0,
        )
        precision: Literal["float32", "tf32", "bf16", "float64"] = (
            "bf16" if m.precision == "auto" else m.precision
        )
        frozen, trained = frozen_places(recipe, config), trained_parameters(recipe, config)
        none, one = (
            training_memory_bytes(config, images, precision, slots, averaging, m.checkpoint_blocks, frozen)
            for images in (0, 1)
        )
        wide, parameters, shards = (
            8 if precision == "float64" else 4,
            count_parameters(config),
            m.shards(m.processes),
        )
        narrow, is_cut = m.sharding_dtype == "bf16", shards > 1
        blocks, largest = block_parameters(config), max([0, *block_parameters(config)])
        # A block computes while the next one is gathered; what is in no block is gathered all the time. Two
        # blocks have whole gradients: one is computed while the other is sent.
        gathered = wide * (parameters - sum(blocks)) + 2 * largest * ((2 if narrow else wide) + 4)
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
            "buffers": gathered if is_cut else 4 * trained * held,
        }
        share = -(-recipe.schedule.batch_size // m.processes)
        room = USABLE_SHARE * MEMORY[device][0] * 2**30
        return cls(fixed, 4 * trained * is_cut, one - none, share, room)

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
        return max(0, int((self.room - self.at(0)) // self.image))


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
        amplification: nodes that fetch each shard.
        shards: that the images of a batch come from, at most.
        cache: bytes of the shards that a node keeps at a time; 0 where it keeps none.
    """

    per_image: float
    amplification: int
    shards: int
    cache: int


def fetched(recipe: Pretrain | Finetune, reading: Reading, nodes: int) -> Fetched:
    """Return what a node reads of these shards, in the order of the recipe."""
    data, batch, lanes = recipe.data, recipe.schedule.batch_size, recipe.data.lanes or recipe.schedule.lanes
    shards, is_windowed = reading.num_shards, data.order == "windowed"
    window = 2 * data.order_window_shards * max(1, lanes)
    mean = reading.num_bytes / max(1, shards)
    share = -(-window // nodes) if lanes else window
    return Fetched(
        reading.num_bytes / max(1, reading.num_images),
        1 if lanes >= nodes or not reading.is_remote or not data.cache_gib else nodes,
        min(batch, shards, window if is_windowed else shards),
        int(min(shards, share if is_windowed else shards) * mean) if reading.is_remote else 0,
    )


def traffic_bytes(
    config: Config, recipe: Pretrain | Finetune, micro_batch: int, nodes: int, trained: int
) -> float:
    """Return the bytes that a node sends to others in a step, with collectives that go round in rings.

    A ring crosses the edge of each node once, whatever the number of its processes. With lanes each process
    sends the sums of its subtrees to those that complete them.
    """
    m, batch, size = recipe.machine, recipe.schedule.batch_size, 4 * trained
    if nodes == 1:
        return 0.0
    local, shards = m.processes // nodes, m.shards(m.processes)
    if lanes := lanes_of(recipe, m.processes):
        held = max(len(subtrees(lanes.tree, lanes.owned(rank, m.processes))) for rank in range(m.processes))
        away = (m.processes - local) / m.processes
        return local * held * size * away + size * (1 - 1 / m.processes)
    if shards == 1:
        return 2 * size * (1 - 1 / m.processes)
    copies = m.processes // shards
    between = 2 * size * (1 - 1 / copies) * min(1.0, local / shards)  # the copies add up their parts
    if shards <= local:
        return between
    narrow = sum(block_parameters(config)) if m.sharding_dtype == "bf16" else 0
    whole = 4 * count_parameters(config) - 2 * narrow
    passes = 2 * math.ceil(math.ceil(batch / m.processes) / micro_batch)  # forward and backward, of each
    return between + (passes * whole + size) * (1 - 1 / shards)


def step_seconds(
    flops: float,
    recipe: Pretrain | Finetune,
    sent: float,
    read: Fetched | None,
    nodes: int,
    link: Link,
    device: str = GPU,
) -> dict[str, float]:
    """Return the seconds of a step on GPUs by what they are spent on.

    With lanes the gradients are sent after the backward pass, which "computation" then includes.

    Args:
        flops: of a step.
        recipe: that trains.
        sent: `traffic_bytes`.
        read: None where nothing is known of the data.
        nodes: machines.
        link: of each.
        device: the GPU.
    """
    again = 4 / 3 if recipe.machine.checkpoint_blocks else 1.0  # the forward pass is computed twice
    computed = again * flops / (MFU * PEAK_TFLOPS[device] * 1e12 * recipe.machine.processes)
    network = sent / link.bytes_per_second
    seconds = {"computation": computed + network * (recipe.schedule.lanes > 0), "network": network}
    if read is not None:
        images = recipe.schedule.batch_size / nodes
        seconds["data"] = images * read.per_image * read.amplification / link.bytes_per_second
    return seconds
