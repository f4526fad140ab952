"""`vitctl bench model`: the speed and memory of a recipe's training step, and where its time goes."""

import math
import statistics
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from vitctl.bench.largest_batch import (
    Attempt,
    Largest,
    attempted,
    free_bytes,
    guarded,
    largest_batch,
    reset_peak,
    room_of,
    used_bytes,
)
from vitctl.bench.measuring import Budget, machine_facts, matrix_rate, peak, seconds_of
from vitctl.bench.timed_steps import (
    LOG,
    WARM_UP,
    measure_steps,
    micro_batches,
    with_images,
    with_training,
    without_extras,
)
from vitctl.data.loader.batches import Batch, take
from vitctl.engine.lanes import ByLanes
from vitctl.engine.runtime import DATA, EXCHANGE, OPTIMIZER, PARTS, Computation, alone, num_workers
from vitctl.engine.schedule import fitted_recipe
from vitctl.engine.sharding import is_sharded
from vitctl.engine.trainer import Trainer
from vitctl.errors import LaunchError, is_out_of_memory
from vitctl.jobs.plan import plan_training
from vitctl.models.flops import (
    count_parameters,
    training_flops,
    training_memory_bytes,
)
from vitctl.models.variants import Config, to_dict
from vitctl.recipe.schema import Finetune, Pretrain
from vitctl.recipe.sections import OPTIMIZERS
from vitctl.system.text import bytes_text, count_text

ONCE = (OPTIMIZER, EXCHANGE, LOG)  # once per update, whatever its number of images
_STEPS, _LARGEST, _RATE = 0.6, 0.3, 0.04  # shares of the budget
_FEW_STEPS = 5  # with fewer, a note says so
_MATRIX_SECONDS = 2.0  # upper bound: a quiet machine needs less
# Expected FLOP/s of a training step on one thread and on a GPU, for the choice of a batch only.
_THREAD_FLOPS, _GPU_FLOPS = 1e11, 2e14
_STEP_SHARE, _PASS_SHARE = 0.05, 0.03  # of the budget, for an update and for a pass through the network


def bench_model(
    recipe: Pretrain | Finetune, budget: Budget, *, batch_size: int | None = None
) -> dict[str, Any]:
    """Measure the update of a recipe's training, on its images or on noise. Return the results for JSON.

    `batch_size` None takes the recipe's, or a part of it if that takes too long here. Seconds are per update.

    Raises LaunchError if not even one image fits into memory.
    """
    computation = alone(precision=recipe.machine.precision, device=recipe.machine.device)
    results: list[dict[str, Any]] = []
    try:
        with tempfile.TemporaryDirectory(prefix="vitctl-bench-") as name, guarded(computation.device):
            folder = Path(name)
            budget.say("opening the data")
            recipe, notes = with_images(without_extras(recipe), folder)
            plan = plan_training(recipe)
            recipe = fitted_recipe(recipe, plan.num_images)
            measured = measured_recipe(recipe, plan.config, computation, budget.seconds, batch_size)
            budget.say("building the network")
            with_training(
                measured,
                folder,
                lambda trainer: results.append(
                    _measure(trainer, measured, plan.config, recipe.schedule.batch_size, budget.restarted())
                ),
            )
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise LaunchError(
            "this network's training step does not fit into the free memory: use a smaller --batch-size, "
            "--set machine.micro_batch=1, --set machine.checkpoint_blocks=1, or a smaller network"
        ) from error
    (result,) = results
    return {**result, "notes": notes + result["notes"]}


def measured_recipe(
    recipe: Pretrain | Finetune,
    config: Config,
    computation: Computation,
    seconds: float,
    batch_size: int | None,
) -> Pretrain | Finetune:
    """Choose the batch to measure: the recipe's if several updates fit into the time, else a part of it.

    `seconds` are for the entire measurement, `batch_size` is the user's. Raises LaunchError if no image fits.
    """
    processes, s, m = recipe.machine.processes, recipe.schedule, recipe.machine
    on_cpu = computation.device.type == "cpu"

    def estimate(images: int) -> int:
        kept, average = OPTIMIZERS[recipe.optimizer.name].slots, recipe.averaging.decay > 0
        precision: Any = computation.precision
        return training_memory_bytes(config, images, precision, kept, average, m.checkpoint_blocks)

    free = free_bytes(computation.device)
    if on_cpu and processes > 1:
        free = psutil.virtual_memory().total // (2 * processes)  # the same on each process
    if estimate(1) > free:
        raise LaunchError(
            "this network does not fit into memory: weights, gradients, optimizer state and one "
            f"image of {config.image_size} pixels need about {bytes_text(estimate(1))}, and "
            f"{bytes_text(free)} is free",
            fix="choose a smaller network, or a machine with more memory",
        )
    wanted = -(-(batch_size or s.batch_size) // processes)
    rate = _THREAD_FLOPS * torch.get_num_threads() * (2 if computation.precision == "bf16" else 1)
    image_seconds = training_flops(config, 1) / (rate if on_cpu else _GPU_FLOPS)
    if m.micro_batch > 0:
        micro = min(m.micro_batch, wanted)
    else:
        fitting = int((free / 2 - estimate(0)) // max(1, estimate(1) - estimate(0)))  # leave half of it free
        micro = min(wanted, max(1, fitting))
        if on_cpu or micro < wanted:
            micro = min(micro, max(1, int(_PASS_SHARE * seconds / image_seconds)))
            micro = wanted if micro >= wanted else 2 ** (micro.bit_length() - 1)
    share = wanted
    if batch_size is None and not s.lanes:
        affordable = int(_STEP_SHARE * seconds / image_seconds)
        share = wanted if affordable >= wanted else max(1, affordable // micro) * micro
    images = share * processes if share < wanted or batch_size else s.batch_size
    changed = {
        "schedule": s.model_copy(update={"batch_size": images}),
        "machine": m.model_copy(update={"micro_batch": min(micro, share)}),
    }
    return recipe.model_copy(update=changed)


def _measure(
    trainer: Trainer, recipe: Pretrain | Finetune, config: Config, recipe_batch: int, budget: Budget
) -> dict[str, Any]:
    """Measure a prepared training, the most important part first: the budget or Ctrl-C may end it."""
    runtime, s, m = trainer.runtime, recipe.schedule, trainer.recipe.machine
    is_noise = bool(recipe.data.synthetic)
    if m.compile:
        budget.say("compiling")
        trainer.train_step.warm_up(one_step(trainer))
        budget = budget.restarted()
    budget.say("measuring matrix products")
    matrix_seconds = min(_MATRIX_SECONDS, _RATE * budget.seconds)
    matrix = matrix_rate(runtime.device, runtime.precision, matrix_seconds)
    steps, peak_memory = measure_steps(trainer, budget.part(_STEPS))
    split = {part: statistics.fmean(step[part] for step in steps) for part in (*PARTS, LOG)}
    if runtime.num_processes == 1:
        del split[EXCHANGE]
    if is_noise:
        del split[DATA]  # noise needs no loading
    batches = one_step(trainer)
    largest, sizes = None, list[Attempt]()
    if budget.left > 0:
        most = -(-recipe_batch // runtime.num_processes)
        largest, sizes = largest_micro_batch(trainer, batches[0], most, budget.part(_LARGEST))
    seconds = sum(split.values())
    peak_flops, peak_source = peak(runtime.device, runtime.precision, matrix)
    notes, enough = list[str](), math.ceil((WARM_UP + _FEW_STEPS) * seconds / _STEPS)
    if len(steps) < _FEW_STEPS:
        notes.append(
            f"{count_text(len(steps), 'step')} after the warm-up: the split of the time is not reliable; "
            f"--seconds {enough} measures about {_FEW_STEPS}"
        )
    achieved = s.batch_size / seconds * trainer.log.flops_per_image() / runtime.num_processes
    return {
        "kind": "model",
        "job": recipe.job,
        "network": to_dict(config),
        "parameters": count_parameters(config),
        "image_size": config.image_size,
        "flops_per_image": trainer.log.flops_per_image(),
        "data": "noise" if is_noise else recipe.data.path or recipe.data.dataset or "mixture",
        "batch_size": s.batch_size,
        "recipe_batch_size": recipe_batch,
        "micro_batch": s.leaf_images if s.lanes else m.micro_batch,
        "lanes": s.lanes,
        "optimizer": recipe.optimizer.name,
        "averaging": recipe.averaging.decay > 0,
        "precision": runtime.precision,
        "attention": str(trainer.facts.get("attention", m.attention)),
        "compile": m.compile,
        "checkpoint_blocks": m.checkpoint_blocks,
        "sharding": getattr(m, "sharding", "none"),
        "processes": runtime.num_processes,
        "workers": 0 if is_noise else num_workers(m, runtime.device, runtime.num_processes),
        "log_trace": recipe.log.trace,
        "steps": len(steps),
        "step_seconds": [sum(step[part] for part in split if part in step) for step in steps],
        "seconds": seconds,
        "split": split,
        "images_per_second": s.batch_size / seconds,
        "recipe_images_per_second": _at_recipe_batch(split, s.batch_size, recipe_batch),
        "tflops": achieved / 1e12,
        "mfu": achieved / peak_flops,
        "mfu_against": peak_source,
        "peak_tflops": peak_flops / 1e12,
        "matrix_tflops": {runtime.precision: matrix / 1e12},
        "peak_memory_bytes": peak_memory,
        "free_memory_bytes": free_bytes(runtime.device),
        "largest_micro_batch": None if largest is None else asdict(largest),
        "micro_batches": [asdict(one) for one in sizes],
        "notes": notes,
        "stopped": budget.stop.raised,
        "machine": machine_facts(runtime),
    }


def _at_recipe_batch(split: dict[str, float], images: int, recipe_batch: int) -> float:
    """Return images/s at the recipe's batch size, over which the once-per-update parts are spread."""
    once = sum(split.get(part, 0.0) for part in ONCE)
    each = (sum(split.values()) - once) / images
    return recipe_batch / (each * recipe_batch + once)


def one_step(trainer: Trainer) -> list[Batch]:
    """Return this process's micro-batches of one step."""
    return take(micro_batches(trainer), len(trainer.own))


def gradient_seconds(trainer: Trainer, batches: list[Batch]) -> float:
    """Return the seconds of one update's gradients, which are discarded."""
    return seconds_of(trainer.runtime.device, lambda: trainer.train_step.warm_up(batches))


def largest_micro_batch(
    trainer: Trainer, batch: Batch, most: int, budget: Budget
) -> tuple[Largest | None, list[Attempt]]:
    """Find the largest micro-batch whose gradients fit next to weights, optimizer and average.

    Returns it, and the sizes that were tried, which are not compiled. None in two cases: with several
    processes, because one may have less memory than the others; and with lanes, whose leaves have a fixed
    size.
    """
    device = trainer.runtime.device
    has_lanes = isinstance(trainer.train_step.gradients, ByLanes)
    if trainer.runtime.num_processes > 1 or is_sharded(trainer.state.network) or has_lanes:
        return None, []
    reset_peak(device)
    known = [Attempt(0, True, used_bytes(device))]

    def attempt(images: int) -> Attempt:
        budget.say(f"trying a micro-batch of {images:,}")
        larger = enlarged(batch, images)
        done = attempted(device, images, lambda _: gradient_seconds(trainer, [larger]))
        if not done.fits:
            trainer.state.optimizer.zero_grad(set_to_none=True)
        return done

    largest = largest_batch(attempt, most, room_of(device), lambda: budget.left, known)
    if largest.images < len(batch) and not (largest.tried and largest.bound == "memory"):
        largest = Largest(len(batch), True, "time")  # the measured steps used this size
    return largest, [one for one in known if one.images]


def enlarged(batch: Batch, num_images: int) -> Batch:
    rows = torch.arange(num_images) % len(batch)
    repeated = {
        name: getattr(batch, name)[rows]
        for name in ("images", "labels", "weights", "samples", "positions")
        if len(getattr(batch, name))  # a scored batch has no positions
    }
    return replace(batch, **repeated, bad=(), memory=None, checksums=None)
