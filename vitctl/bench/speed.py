"""Fig. 12: images/s of a forward pass, best over batch sizes, and the largest batch that fits, against the
resolution.

As in the paper the networks only predict: it takes the ratio of forward and backward time as the same for all
models. Paper: Appendix D.5, Figure 12; Figure 13 (right) for the axial models
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from vitctl.bench.budget import Budget
from vitctl.bench.machine import OtherWork, machine_facts
from vitctl.bench.memory import KEPT_FREE, Attempt, attempted, free_bytes, guarded, largest_batch, used_bytes
from vitctl.bench.rates import matrix_rate, peak
from vitctl.engine.computation import choose_kernels, use_kernels
from vitctl.engine.distributed.runtime import Computation, alone
from vitctl.errors import RecipeError, is_out_of_memory
from vitctl.models.build import build
from vitctl.models.flops import FORWARD_AND_BACKWARD, computed_flops
from vitctl.models.variants import variant
from vitctl.recipe.machine import NetworkMachine

SIDES = (64, 128, 224, 384, 512)  # of the paper's figure
MODELS = ("B/32", "B/16", "R50+B/16", "R50x1", "Axial-B/16", "Axial-B/32", "AxialR50")
_CLASSES, _MOST = 1000, 2**24
_ONE_PASS = "one image at a time was measured, and no time was left for more: its rate says little; give more --seconds"
_MATRIX_SECONDS, _LEAST = 1.0, 0.25  # share of a cell's time that is kept for its fastest batch


@dataclass(frozen=True)
class Cell:
    """One network at one resolution.

    `images_per_second` are those of the device at its best batch size, `batches` every size that was tried.
    `largest_batch` is 0 where it is unknown; `largest_tried`: it was computed, else it follows from the
    memory that smaller batches took. `note` says why there is no number, or why it says little. `gflops` are
    of a forward pass as it is computed, `attention` and `linear` the kernels that every job takes.
    """

    model: str
    image_size: int
    gflops: float = 0.0
    images_per_second: float = 0.0
    best_batch: int = 0
    largest_batch: int = 0
    largest_tried: bool = False
    largest_bound: str = ""
    image_bytes: int = 0
    attention: str = ""
    linear: str = ""
    batches: tuple[dict[str, Any], ...] = ()
    note: str = ""


def parse_sides(text: str) -> tuple[int, ...]:
    """The resolutions of --resolutions: 64..512 is the paper's between the two; or a list, 64,224,384.

    Raises:
        RecipeError: the text has another form.
    """
    first, dots, last = text.partition("..")
    try:
        numbers = [int(part) for part in ((first, last) if dots else text.split(","))]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1 or max(numbers) > 4096 or (dots and numbers[0] > numbers[1]):
        raise RecipeError(
            f"--resolutions {text}: should be two sides in pixels as 64..512, or a list as 64,224,384"
        )
    if not dots:
        return tuple(dict.fromkeys(numbers))
    low, high = numbers
    return tuple(sorted({low, high, *(side for side in SIDES if low < side < high)}))


def bench_resolutions(
    models: Sequence[str],
    sides: Sequence[int],
    budget: Budget,
    *,
    precision: str = "auto",
    device: str = "auto",
) -> dict[str, Any]:
    """Measure every network at every resolution, the small ones first; each cell gets the same part of the
    time that is left.

    Args:
        models: names of the table of models.
        sides: resolutions in pixels.
        budget: of all cells; a cell takes at least one forward pass.
        precision, device: as [machine] has them.

    Returns:
        `cells` and everything that decides their numbers.

    Raises:
        RecipeError: an unknown model.
    """
    for name in models:
        variant(name)
    computation = alone(precision=precision, device=device)
    others = OtherWork()
    budget.say("measuring matrix products")
    matrix = matrix_rate(computation.device, computation.precision, _MATRIX_SECONDS)
    at_peak = peak(computation.device, computation.precision, matrix)
    cells: list[Cell] = []
    wanted = [(side, name) for side in sorted(sides) for name in models]
    for number, (side, name) in enumerate(wanted):
        if budget.left <= 0 and budget.stop.raised:
            break
        part = Budget(budget.left / (len(wanted) - number), budget.stop)
        budget.say(f"{name} at {side}: {number + 1} of {len(wanted)}")
        cells.append(measure_cell(name, side, computation, part))
    return {
        "kind": "resolutions",
        "cells": [asdict(cell) for cell in cells],
        "cores": torch.get_num_threads() if computation.device.type == "cpu" else 1,
        "core": "thread" if computation.device.type == "cpu" else "GPU",
        "precision": computation.precision,
        "compile": False,
        "num_classes": _CLASSES,
        "peak_tflops": at_peak.flops / 1e12,
        "peak_source": at_peak.source,
        "free_memory_bytes": free_bytes(computation.device),
        "notes": others.notes(),
        "stopped": budget.stop.raised,
        "machine": machine_facts(computation),
    }


def measure_cell(name: str, side: int, computation: Computation, budget: Budget) -> Cell:
    """One network at one resolution; a note where it has none, or does not fit."""
    try:
        config = variant(name, image_size=side, num_classes=_CLASSES)
    except RecipeError as error:
        return Cell(name, side, note=str(error))
    gflops = computed_flops(config) / FORWARD_AND_BACKWARD / 1e9
    device = computation.device
    kernels = choose_kernels(NetworkMachine(), config, computation)
    use_kernels(kernels)
    try:
        with guarded(device):
            model = filled(build(config, dtype=computation.dtype, device="meta"), device)
            predict = predictor(model, side, computation)
            predict(1)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return Cell(name, side, gflops, note="its weights and one image do not fit into memory")
    known = [Attempt(0, True, used_bytes(device))]
    room = float("inf")
    if device.type == "cpu":
        room = used_bytes(device) + (1 - KEPT_FREE) * free_bytes(device)

    def attempt(images: int) -> Attempt:
        return attempted(device, images, predict)

    known.append(attempt(1))  # whatever the time: each cell has a number
    kept = _LEAST * budget.seconds
    largest = largest_batch(attempt, _MOST, room, lambda: budget.left - kept, known)
    fast = best(known)
    if fast is None:
        return Cell(name, side, gflops, note="not even one image fits into memory")
    seconds = _again(predict, fast, budget)
    return Cell(
        model=name,
        image_size=side,
        gflops=gflops,
        images_per_second=fast.images / seconds,
        best_batch=fast.images,
        largest_batch=largest.images if largest.bound != "time" else 0,
        largest_tried=largest.tried,
        largest_bound=largest.bound,
        image_bytes=largest.image_bytes,
        attention=kernels.attention,
        linear=kernels.linear,
        note=_ONE_PASS if fast.images == 1 and (largest.bound == "time" or not largest.tried) else "",
        batches=tuple(asdict(one) for one in known if one.images),
    )


def filled(model: nn.Module, device: torch.device) -> nn.Module:
    """The network with random numbers for weights: drawing those of a training takes longer than measuring
    it.
    """
    model = model.to_empty(device=device).eval()
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        parameter.detach().uniform_(-0.05, 0.05, generator=generator)
    for buffer in model.buffers():
        buffer.zero_()
    return model


def predictor(model: nn.Module, side: int, computation: Computation) -> Callable[[int], float]:
    """A function that predicts so many random images, and returns the seconds of the forward pass."""
    device = computation.device
    generator = torch.Generator(device).manual_seed(0)
    context: Callable[[], AbstractContextManager[Any]] = computation.autocast

    def predict(images: int) -> float:
        shown = torch.randn(
            images, 3, side, side, generator=generator, device=device, dtype=computation.dtype
        )
        with torch.inference_mode(), context():
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            began = time.perf_counter()
            model(shown)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return time.perf_counter() - began

    return predict


def best(known: Sequence[Attempt]) -> Attempt | None:
    """The size with the most images/s."""
    fits = [one for one in known if one.fits and one.seconds]
    return max(fits, key=lambda one: one.images / one.seconds, default=None)


def _again(predict: Callable[[int], float], fast: Attempt, budget: Budget) -> float:
    """The least seconds of the best size, tried again while there is time: the first pass of a size also
    prepares it.
    """
    seconds = fast.seconds
    while budget.left > seconds:
        seconds = min(seconds, predict(fast.images))
    return seconds
