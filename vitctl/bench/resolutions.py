"""Fig. 12: images/s of a forward pass at the best batch size, and the largest batch, at several resolutions.

As in the paper only forward passes are measured: the ratio of forward to backward time is assumed to be the
same for all models. Paper: Appendix D.5, Figure 12; Figure 13 (right) for the axial models
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from vitctl.bench.largest_batch import (
    Attempt,
    attempted,
    free_bytes,
    guarded,
    largest_batch,
    room_of,
    used_bytes,
)
from vitctl.bench.measuring import Budget, machine_facts, matrix_rate, peak, seconds_of
from vitctl.engine.computation import choose_attention
from vitctl.engine.runtime import Computation, alone
from vitctl.errors import RecipeError, is_out_of_memory
from vitctl.models.build import Model, build
from vitctl.models.flops import FORWARD_AND_BACKWARD, computed_flops
from vitctl.models.variants import variant
from vitctl.recipe.schema import NetworkMachine

SIDES = (64, 128, 224, 384, 512)  # in the paper's figure
MODELS = ("B/32", "B/16", "R50+B/16", "R50x1", "Axial-B/16", "Axial-B/32", "AxialR50")
_CLASSES, _MOST = 1000, 2**24
_ONE_PASS = "only single images were measured in this time, so the rate is not reliable; give more --seconds"
_MATRIX_SECONDS, _LEAST = 1.0, 0.25  # share of a cell's time reserved for its fastest batch
# One network at one resolution. `images_per_second` is the rate at the best batch size, `batches` lists every
# size tried. `largest_batch` is 0 if unknown; with `largest_tried` it was computed, else it follows from the
# memory of smaller batches. `note` says why a number is missing or unreliable. `gflops` are those of a
# forward pass as computed, `attention` the kernel of every job.
_EMPTY_CELL: dict[str, Any] = {
    "model": "",
    "image_size": 0,
    "gflops": 0.0,
    "images_per_second": 0.0,
    "best_batch": 0,
    "largest_batch": 0,
    "largest_tried": False,
    "largest_bound": "",
    "image_bytes": 0,
    "attention": "",
    "batches": [],
    "note": "",
}


def parse_sides(text: str) -> tuple[int, ...]:
    """Parse --resolutions: 64..512 means the paper's sizes in between; or a list, 64,224,384."""
    first, dots, last = text.partition("..")
    try:
        numbers = [int(part) for part in ((first, last) if dots else text.split(","))]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1 or max(numbers) > 4096 or (dots and numbers[0] > numbers[1]):
        raise RecipeError(
            f"--resolutions {text}",
            "should be a range of sizes in pixels such as 64..512, or a list such as 64,224,384",
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
    """Measure every network at every resolution, small ones first, with an equal share of the time for each.

    Args:
        models: names of the table of models.
        sides: resolutions in pixels.
        budget: for all cells; each cell takes at least one forward pass.
        precision, device: as in [machine].

    Returns `cells`, and all settings. Raises RecipeError on an unknown model.
    """
    for name in models:
        variant(name)
    computation = alone(precision=precision, device=device)
    budget.say("measuring matrix products")
    matrix = matrix_rate(computation.device, computation.precision, _MATRIX_SECONDS)
    peak_flops, peak_source = peak(computation.device, computation.precision, matrix)
    on_cpu = computation.device.type == "cpu"
    cells: list[dict[str, Any]] = []
    wanted = [(side, name) for side in sorted(sides) for name in models]
    for number, (side, name) in enumerate(wanted):
        if budget.stop.raised:
            break
        part = Budget(budget.left / (len(wanted) - number), budget.stop)
        budget.say(f"{name} at {side}: {number + 1} of {len(wanted)}")
        cells.append(
            {**_EMPTY_CELL, "model": name, "image_size": side, **measure_cell(name, side, computation, part)}
        )
    return {
        "kind": "resolutions",
        "cells": cells,
        "cores": torch.get_num_threads() if on_cpu else 1,
        "core": "thread" if on_cpu else "GPU",
        "precision": computation.precision,
        "compile": False,
        "num_classes": _CLASSES,
        "peak_tflops": peak_flops / 1e12,
        "peak_source": peak_source,
        "free_memory_bytes": free_bytes(computation.device),
        "stopped": budget.stop.raised,
        "machine": machine_facts(computation),
    }


def measure_cell(name: str, side: int, computation: Computation, budget: Budget) -> dict[str, Any]:
    """Measure one network at one resolution; if it cannot be built or does not fit, return a note."""
    try:
        config = variant(name, image_size=side, num_classes=_CLASSES)
    except RecipeError as error:
        return {"note": str(error)}
    gflops, device = computed_flops(config) / FORWARD_AND_BACKWARD / 1e9, computation.device
    try:
        with guarded(device):
            model = filled(build(config, dtype=computation.dtype, device="meta"), device)
            kernel = choose_attention(model, NetworkMachine(), computation)
            predict = predictor(model, side, computation)
            predict(1)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return {"gflops": gflops, "note": "its weights and one image do not fit into memory"}

    def attempt(images: int) -> Attempt:
        return attempted(device, images, predict)

    known = [Attempt(0, True, used_bytes(device))]
    room = room_of(device)
    known.append(attempt(1))  # even without time left: each cell gets a number
    kept = _LEAST * budget.seconds
    largest = largest_batch(attempt, _MOST, room, lambda: budget.left - kept, known)
    tried = [one for one in known if one.images]
    fitting = [one for one in tried if one.fits]
    if not fitting:
        return {"gflops": gflops, "note": "not even one image fits into memory"}
    fast = max(fitting, key=lambda one: one.images / one.seconds)
    seconds = fast.seconds
    while budget.left > seconds:  # the first pass of a size includes its preparation
        seconds = min(seconds, predict(fast.images))
    too_short = fast.images == 1 and (largest.bound == "time" or not largest.tried)
    return {
        "gflops": gflops,
        "images_per_second": fast.images / seconds,
        "best_batch": fast.images,
        "largest_batch": largest.images if largest.bound != "time" else 0,
        "largest_tried": largest.tried,
        "largest_bound": largest.bound,
        "image_bytes": largest.image_bytes,
        "attention": kernel,
        "batches": [asdict(one) for one in tried],
        "note": _ONE_PASS if too_short else "",
    }


def filled(model: Model, device: torch.device) -> Model:
    """Fill a network with random weights; proper initialisation would take longer than measuring."""
    model = model.to_empty(device=device).eval()
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        parameter.detach().uniform_(-0.05, 0.05, generator=generator)
    for buffer in model.buffers():
        buffer.zero_()
    return model


def predictor(model: nn.Module, side: int, computation: Computation) -> Callable[[int], float]:
    """Return a function that predicts n random images and returns the seconds of the forward pass."""
    device = computation.device
    generator = torch.Generator(device).manual_seed(0)

    def predict(images: int) -> float:
        shape = images, 3, side, side
        pixels = torch.randn(shape, generator=generator, device=device, dtype=computation.dtype)
        with torch.inference_mode(), computation.autocast():
            return seconds_of(device, lambda: model(pixels))

    return predict
