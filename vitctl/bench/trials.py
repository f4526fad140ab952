"""Other values of the knobs of [machine], each measured beside the run's own on the same images; and larger
micro-batches.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from vitctl.bench.budget import Budget
from vitctl.bench.memory import (
    KEPT_FREE,
    Attempt,
    Largest,
    attempted,
    free_bytes,
    largest_batch,
    reset_peak,
    used_bytes,
)
from vitctl.bench.training import Prepared
from vitctl.bench.verdict import Trial
from vitctl.data.loader.batches import Batch
from vitctl.engine.distributed.sharding import is_sharded
from vitctl.errors import LaunchError
from vitctl.models.blocks import compile_blocks, compile_errors
from vitctl.models.configs import ViTConfig
from vitctl.models.kernels.attention import Kernel, set_attention
from vitctl.models.kernels.linear import Kernel as Library
from vitctl.models.kernels.linear import onednn_problem, set_linear, used_linear

_ROUNDS = 2  # at least


def gradient_seconds(prepared: Prepared, micro_batches: list[Batch]) -> float:
    """Seconds of the gradients of one update, which are thrown away."""
    _wait(prepared.device)
    began = time.perf_counter()
    prepared.trainer.warm_up(micro_batches)
    _wait(prepared.device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class _Way:
    """A way to compute the gradients of the same images."""

    knob: str
    value: str
    seconds: Callable[[], float]


def try_knobs(
    prepared: Prepared, kernel: str, micro_batches: list[Batch], sizes: Sequence[int], budget: Budget
) -> list[Trial]:
    """Measure other attention kernels, activation checkpointing and micro-batches, in turns with the run's
    own values.

    Args:
        prepared: the training.
        kernel: its attention kernel.
        micro_batches: of one of its steps.
        sizes: micro-batches to try.
        budget: rounds go on until it is spent.
    """

    def own() -> float:
        return gradient_seconds(prepared, micro_batches)

    ways = [
        *_attention(prepared, kernel, own),
        *_linear(prepared, own),
        *_checkpointing(prepared, own),
        *(
            _Way("machine.micro_batch", str(size), _bound(prepared, regrouped(micro_batches, size)))
            for size in sizes
            if can_regroup(prepared, micro_batches)
        ),
    ]
    return _in_turns(own, ways, budget, fixed=prepared.trainer.runtime.num_processes > 1)


def _bound(prepared: Prepared, micro_batches: list[Batch]) -> Callable[[], float]:
    return lambda: gradient_seconds(prepared, micro_batches)


def _attention(prepared: Prepared, kernel: str, own: Callable[[], float]) -> Iterator[_Way]:
    """The other kernel, where there is a choice: relative positions need plain products."""
    config = prepared.trainer.unwrapped.config
    if (
        not isinstance(config, ViTConfig)
        or config.position_embedding == "relative"
        or kernel not in ("fused", "math")
    ):
        return
    other: Kernel = "math" if kernel == "fused" else "fused"

    def seconds() -> float:
        set_attention(other)
        try:
            return own()
        finally:
            set_attention("math" if kernel == "math" else "fused")

    yield _Way("machine.attention", other, seconds)


def _linear(prepared: Prepared, own: Callable[[], float]) -> Iterator[_Way]:
    """The other library of the linear layers, where there is a choice."""
    computation, kernel = prepared.trainer.runtime.computation, used_linear()
    if onednn_problem(computation.product_dtype, computation.device):
        return
    other: Library = "torch" if kernel == "onednn" else "onednn"

    def seconds() -> float:
        set_linear(other)
        try:
            return own()
        finally:
            set_linear(kernel)

    yield _Way("machine.linear", other, seconds)


def _checkpointing(prepared: Prepared, own: Callable[[], float]) -> Iterator[_Way]:
    model = prepared.trainer.unwrapped
    if not getattr(model, "checkpoint_blocks", False):
        return

    def seconds() -> float:
        model.checkpoint_blocks = False
        try:
            return own()
        finally:
            model.checkpoint_blocks = True

    yield _Way("machine.checkpoint_blocks", "false", seconds)


def _in_turns(own: Callable[[], float], ways: Sequence[_Way], budget: Budget, *, fixed: bool) -> list[Trial]:
    """Rounds, each with the run's own values and every other way; what there is no time for is left out, the
    last ways first.

    `fixed`: all ways, in a fixed number of rounds: several processes must do the same, and their clocks
    differ.
    """
    chosen: list[_Way] = []
    needed = 0.0
    for way in ways:
        budget.say(f"trying {way.knob} = {way.value}")
        took = way.seconds()  # to warm up
        needed += _ROUNDS * took * (1 if chosen else 2)
        if not fixed and needed > budget.left:
            break
        chosen.append(way)
    rounds: list[list[float]] = []
    while chosen:
        if len(rounds) >= _ROUNDS and (fixed or budget.left <= sum(rounds[-1])):
            break
        if budget.stop.raised and not fixed:
            break
        budget.say(f"comparing knobs, round {len(rounds) + 1}")
        rounds.append([own(), *(way.seconds() for way in chosen)])
    mine, *others = zip(*rounds, strict=True) if rounds else ((),)
    return [trial_of(way.knob, way.value, mine, theirs) for way, theirs in zip(chosen, others, strict=False)]


def trial_of(knob: str, value: str, own: Sequence[float], other: Sequence[float]) -> Trial:
    """From the seconds of each round: medians, and in how many rounds the other value was faster."""
    wins = sum(theirs < mine for mine, theirs in zip(own, other, strict=True))
    return Trial(knob, value, statistics.median(other), statistics.median(own), len(own), wins)


def try_compile(prepared: Prepared, micro_batches: list[Batch], budget: Budget) -> tuple[list[Trial], str]:
    """machine.compile, measured after everything else because it cannot be undone; and a note on what
    compiling took.
    """
    before = [gradient_seconds(prepared, micro_batches) for _ in range(_ROUNDS + 1)]
    budget.say("compiling")
    began = time.perf_counter()
    try:
        with compile_errors():
            compile_blocks(prepared.trainer.unwrapped)
            gradient_seconds(prepared, micro_batches)
            took = time.perf_counter() - began
            after = [gradient_seconds(prepared, micro_batches) for _ in range(_ROUNDS + 1)]
    except LaunchError as error:
        return [], str(error)
    trial = trial_of("machine.compile", "true", before[1:], after[1:])
    return [trial], f"compiling takes {took:.0f} s, once at each start"


def can_regroup(prepared: Prepared, micro_batches: Sequence[Batch]) -> bool:
    """Whether the images can be cut into other micro-batches here: not with lanes, and not where batches are
    blended.
    """
    return not prepared.lanes and all(batch.neighbour is None for batch in micro_batches)


def regrouped(micro_batches: Sequence[Batch], size: int) -> list[Batch]:
    """The same images in micro-batches of `size`, the last of which may be smaller."""
    names = ("images", "labels", "weights", "samples")
    whole = {name: torch.cat([getattr(batch, name) for batch in micro_batches]) for name in names}
    cuts = [slice(begin, begin + size) for begin in range(0, len(whole["labels"]), size)]
    return [
        Batch(whole["images"][c], whole["labels"][c], whole["weights"][c], whole["samples"][c]) for c in cuts
    ]


def enlarged(batch: Batch, num_images: int) -> Batch:
    """So many images, those of a batch again and again."""
    rows = torch.arange(num_images) % len(batch)
    return replace(
        batch,
        images=batch.images[rows],
        labels=batch.labels[rows],
        weights=batch.weights[rows],
        samples=batch.samples[rows],
        bad=(),
        memory=None,
        checksums=None,
    )


def largest_micro_batch(
    prepared: Prepared, batch: Batch, most: int, budget: Budget
) -> tuple[Largest | None, list[Attempt]]:
    """The largest micro-batch whose gradients fit beside weights, optimizer and average; and the sizes that
    were tried.

    None with several processes: they would have to try the same sizes, and one of them may have less memory.
    """
    runtime = prepared.trainer.runtime
    if runtime.num_processes > 1 or is_sharded(prepared.trainer.unwrapped):
        return None, []
    reset_peak(prepared.device)
    known = [Attempt(0, True, used_bytes(prepared.device))]

    def attempt(images: int) -> Attempt:
        budget.say(f"trying a micro-batch of {images:,}")
        one = enlarged(batch, images)
        done = attempted(prepared.device, images, lambda _: gradient_seconds(prepared, [one]))
        if not done.fits:
            prepared.trainer.optimizer.zero_grad(set_to_none=True)
        return done

    room = room_of(prepared.device)
    found = largest_batch(attempt, most, room, lambda: budget.left, known)
    if found.images < len(batch) and not (
        found.tried and found.bound == "memory"
    ):  # the steps before had so many
        found = Largest(len(batch), True, "time")
    return found, [one for one in known if one.images]


def room_of(device: torch.device) -> float:
    """Bytes that the peak of this process may reach; infinite on a GPU, where trying costs nothing."""
    return (
        float("inf") if device.type == "cuda" else used_bytes(device) + (1 - KEPT_FREE) * free_bytes(device)
    )


@contextmanager
def no_exchange(prepared: Prepared) -> Iterator[None]:
    """Within the block the processes do not add up their gradients."""
    with prepared.trainer.runtime.accelerator.no_sync(prepared.trainer.model):
        yield


def communication(prepared: Prepared, micro_batches: list[Batch], budget: Budget) -> float | None:
    """Seconds of an update that the exchange of gradients costs, beyond what hides behind the backward pass.

    Measured: the gradients of the same images with it and without, in turns. None: there is one process, or
    it cannot be left out.
    """
    trainer = prepared.trainer
    if (
        trainer.runtime.num_processes == 1
        or is_sharded(trainer.unwrapped)
        or trainer.model is trainer.unwrapped
    ):
        return None
    pairs = []
    for number in range(2 * _ROUNDS + 1):
        budget.say(f"measuring communication, round {number + 1}")
        together = gradient_seconds(prepared, micro_batches)
        with no_exchange(prepared):
            alone = gradient_seconds(prepared, micro_batches)
        pairs.append((together, alone))
    together, alone = (statistics.median(column) for column in zip(*pairs[1:], strict=True))
    return float(max(0.0, together - alone))
