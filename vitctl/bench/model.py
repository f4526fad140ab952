"""`vitctl bench model`: how fast a recipe's own training step is on this machine, where its time goes, and
what would help.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from vitctl.bench.budget import Budget
from vitctl.bench.clock import BACKWARD, DATA, LOG, OPTIMIZER, total
from vitctl.bench.machine import machine_facts
from vitctl.bench.memory import Attempt, Largest, free_bytes, guarded
from vitctl.bench.planned import Measured, plan_measurement
from vitctl.bench.rates import matrix_rate, peak
from vitctl.bench.training import (
    Prepared,
    Steps,
    loader_rate,
    measure_steps,
    reach,
    with_images,
    without_extras,
)
from vitctl.bench.trials import communication, largest_micro_batch, try_compile, try_knobs
from vitctl.bench.verdict import WAITS, StepFacts, Trial, bottleneck
from vitctl.engine.distributed.runtime import alone, num_workers
from vitctl.errors import LaunchError, RecipeError, is_out_of_memory
from vitctl.jobs.inputs.length import fitted_recipe
from vitctl.jobs.plan import plan_training
from vitctl.models.flops import computed_flops, count_parameters
from vitctl.models.kernels.linear import used_linear
from vitctl.models.variants import to_dict
from vitctl.recipe.schema import Finetune, Pretrain
from vitctl.system.text import bytes_text

COMMUNICATION = "communication"
ONCE = (OPTIMIZER, COMMUNICATION, LOG)  # done once in an update, whatever its number of images
_STEPS, _LARGEST, _KNOBS, _RATES, _LOADER = 0.4, 0.25, 0.2, 0.04, 0.05  # shares of the budget

_MATRIX_SECONDS = 2.0  # for each precision at most: the rate of a quiet machine is known sooner
_COMPARISONS = (
    20  # passes over one update's images, for which there should be time to compare knobs on all of them
)
_QUIET = 0.85  # share of the time that the threads of a step compute on a quiet machine


def bench_model(
    recipe: Pretrain | Finetune,
    budget: Budget,
    *,
    batch_size: int | None = None,
    compiled: bool = False,
    quick: bool = False,
) -> dict[str, Any]:
    """Measure the update of a recipe's training: the one that `pretrain` or `finetune` makes, on its images
    or on noise.

    Args:
        recipe: checked.
        budget: seconds, and Ctrl-C.
        batch_size: images of an update; None: the recipe's, or a part of it where that takes too long here.
        compiled: also try machine.compile.
        quick: the step only, without the largest micro-batch and other values of knobs.

    Returns:
        everything that was measured, and what decides it, ready for JSON; seconds are of one update.

    Raises:
        LaunchError: not even one image fits into memory.
    """
    if not isinstance(recipe, Pretrain | Finetune):
        raise RecipeError(
            f"a recipe of {recipe.job} has no training step of its own; take one of pretrain or finetune"
        )
    computation = alone(precision=recipe.machine.precision, device=recipe.machine.device)
    found: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="vitctl-bench-") as folder,
        _no_memory(),
        guarded(computation.device),
    ):
        budget.say("looking for data")
        recipe, note = with_images(without_extras(recipe), Path(folder))
        plan = plan_training(recipe)
        recipe = fitted_recipe(recipe, plan.num_images)
        measured = plan_measurement(recipe, plan.config, computation, budget.seconds, batch_size)
        budget.say("building the network")
        reach(
            measured.recipe,
            Path(folder),
            lambda prepared: found.append(
                _measure(prepared, measured, budget, compiled=compiled, quick=quick)
            ),
        )
    (result,) = found
    result["notes"] = [*filter(None, [note]), *result["notes"]]
    return result


def _measure(
    prepared: Prepared, measured: Measured, budget: Budget, *, compiled: bool, quick: bool
) -> dict[str, Any]:
    """Everything about one prepared training, the most important first: the budget may end, or Ctrl-C come."""
    runtime, budget = prepared.trainer.runtime, budget.restarted()
    budget.say("measuring matrix products")
    rates = {
        name: matrix_rate(runtime.device, name, min(_MATRIX_SECONDS, _RATES * budget.seconds / 2))
        for name in dict.fromkeys((runtime.precision, "bf16", "float32"))
        if name != "bf16" or runtime.device.type == "cpu" or torch.cuda.is_bf16_supported()
    }
    steps = measure_steps(prepared, budget.part(_STEPS))
    one_step = prepared.step_of(prepared.batches())
    exchange = communication(prepared, one_step, budget)
    loader = 0.0
    if not prepared.synthetic and total(steps.split)[DATA] >= WAITS * sum(total(steps.split).values()):
        loader = loader_rate(prepared, budget.part(_LOADER)) * runtime.num_processes
    largest, sizes, trials, notes = None, list[Attempt](), list[Trial](), list[str]()
    kernel = str((prepared.task.facts or {}).get("attention", measured.recipe.machine.attention))
    if not quick and not budget.stop.raised:
        largest, sizes = largest_micro_batch(prepared, one_step[0], measured.share, budget.part(_LARGEST))
    several = runtime.num_processes > 1
    if not quick and runtime.sum([budget.left])[0] > 0:
        part = budget.part(_KNOBS)
        backward = total(steps.split)[BACKWARD] / len(steps.split)
        shown = one_step if not several and _COMPARISONS * backward < part.left else one_step[:1]
        others = _other_sizes(len(one_step[0]), sum(map(len, shown)), sizes)
        trials = try_knobs(prepared, kernel, shown, others, part)
    if compiled and not runtime.sum([float(budget.stop.raised)])[0]:
        more, note = try_compile(prepared, one_step, budget)
        trials, notes = [*trials, *more], [note]
    speed = _speed(prepared, measured, steps, exchange, rates)
    free = free_bytes(runtime.device)
    result = {
        **_described(prepared, measured, kernel),
        **speed,
        "loader_images_per_second": loader,
        "peak_memory_bytes": steps.peak,
        "free_memory_bytes": free,
        "largest_micro_batch": None if largest is None else asdict(largest),
        "micro_batches": [asdict(one) for one in sizes],
        "trials": [{**asdict(one), "gain": one.gain} for one in trials],
        "notes": [*_notes(measured, largest, speed["cpu_share"], free), *notes],
        "stopped": budget.stop.raised,
        "machine": machine_facts(runtime.computation),
    }
    return result | _verdict(result, trials, speed["cpu_share"])


def _other_sizes(micro_batch: int, images: int, sizes: list[Attempt]) -> list[int]:
    """Micro-batches worth a comparison: the best of the sizes that were tried, and half."""
    fast = [one for one in sizes if one.fits and one.images <= images and one.seconds]
    best = max(fast, key=lambda one: one.images / one.seconds, default=None)
    wanted = {best.images if best else micro_batch, max(1, micro_batch // 2)} - {micro_batch}
    return sorted(wanted)


def _described(prepared: Prepared, measured: Measured, kernel: str) -> dict[str, Any]:
    """What was measured: all that decides the numbers, beside the machine."""
    recipe, config, runtime = measured.recipe, measured.config, prepared.trainer.runtime
    s, m = recipe.schedule, recipe.machine
    return {
        "kind": "model",
        "job": recipe.job,
        "network": to_dict(config),
        "parameters": count_parameters(config),
        "image_size": config.image_size,
        "flops_per_image": computed_flops(config),
        "data": "noise" if prepared.synthetic else recipe.data.path or recipe.data.dataset or "mixture",
        "batch_size": s.batch_size,
        "recipe_batch_size": measured.recipe_batch,
        "micro_batch": s.leaf_images if s.lanes else m.micro_batch,
        "recipe_micro_batch": measured.recipe_micro_batch,
        "recipe_micro_batch_bytes": measured.recipe_bytes,
        "lanes": s.lanes,
        "optimizer": recipe.optimizer.name,
        "averaging": recipe.averaging.decay > 0,
        "precision": runtime.precision,
        "attention": kernel,
        "linear": used_linear(),
        "compile": m.compile,
        "checkpoint_blocks": m.checkpoint_blocks,
        "sharding": getattr(m, "sharding", "none"),
        "processes": runtime.num_processes,
        "workers": 0 if prepared.synthetic else num_workers(m, runtime),
        "log_trace": recipe.log.trace,
    }


def _speed(
    prepared: Prepared, measured: Measured, steps: Steps, exchange: float | None, rates: dict[str, float]
) -> dict[str, Any]:
    """Rates, and the split of a mean step, whose parts add up to its seconds.

    Without images of its own the wait for data is not measured, and left out of the step.
    """
    runtime, flops = prepared.trainer.runtime, computed_flops(measured.config)
    sums = total(steps.split)
    if prepared.synthetic:
        sums.pop(DATA, None)
    split = {name: seconds / len(steps.split) for name, seconds in sums.items()}
    if exchange is not None:
        hidden = min(exchange, split[BACKWARD])
        split = {**split, BACKWARD: split[BACKWARD] - hidden, COMMUNICATION: hidden}
    seconds, images = sum(split.values()), measured.recipe.schedule.batch_size
    at_peak = peak(runtime.device, runtime.precision, rates[runtime.precision])
    achieved = images / seconds * flops / runtime.num_processes
    return {
        "steps": len(steps.split),
        "cpu_share": _cpu_share(prepared, steps),
        "step_seconds": [sum(one[name] for name in sums) for one in steps.split],
        "seconds": seconds,
        "split": split,
        "images_per_second": images / seconds,
        "recipe_images_per_second": _at_recipe_batch(split, images, measured.recipe_batch),
        "tflops": achieved / 1e12,
        "mfu": achieved / at_peak.flops,
        "mfu_against": at_peak.source,
        "peak_tflops": at_peak.flops / 1e12,
        "matrix_tflops": {name: value / 1e12 for name, value in rates.items()},
    }


def _at_recipe_batch(split: dict[str, float], images: int, recipe_batch: int) -> float:
    """Images/s in the recipe's own batch: what is done once in an update is shared by more images there."""
    once = sum(split.get(name, 0.0) for name in ONCE)
    each = (sum(split.values()) - once) / images
    return recipe_batch / (each * recipe_batch + once)


def _cpu_share(prepared: Prepared, steps: Steps) -> float | None:
    """Of a step on the CPU, without waits: the share in which its threads really computed; the rest went to
    other programs.
    """
    if prepared.device.type != "cpu":
        return None
    waited = total(steps.split)[DATA]
    return steps.cpu_seconds / max(1e-9, sum(total(steps.split).values()) - waited) / torch.get_num_threads()


def _notes(measured: Measured, largest: Largest | None, cpu_share: float | None, free: int) -> list[str]:
    """What a user must know to read the numbers, or to start the run."""
    notes = []
    if cpu_share is not None and cpu_share < _QUIET:
        notes.append(
            f"the threads of this process ran {cpu_share:.0%} of the time: other programs took the rest, or "
            f"threads waited"
        )
    if measured.recipe.schedule.batch_size < measured.recipe_batch:
        notes.append(
            f"an update of {measured.recipe.schedule.batch_size:,} images was measured; the recipe's own has "
            f"{measured.recipe_batch:,}"
        )
    is_memory = largest is not None and largest.bound == "memory" and measured.recipe_bytes > free
    if largest is not None and is_memory and largest.images < measured.recipe_micro_batch:
        needed = largest.image_bytes * measured.recipe_micro_batch or measured.recipe_bytes
        notes.append(
            f"a run of this recipe asks for {measured.recipe_micro_batch:,} images in a pass, about "
            f"{bytes_text(needed)}: "
            f"set machine.micro_batch = {largest.images} or less"
        )
    return notes


def _verdict(result: dict[str, Any], trials: list[Trial], cpu_share: float | None) -> dict[str, Any]:
    rates, precision = result["matrix_tflops"], result["precision"]
    facts = StepFacts(
        split=result["split"],
        images=result["batch_size"],
        recipe_batch=result["recipe_batch_size"],
        workers=result["workers"],
        loader=result["loader_images_per_second"],
        cores=result["machine"]["cores"],
        precision=precision,
        bf16_gain=rates["bf16"] / rates[precision] if "bf16" in rates else 0.0,
        utilisation=result["mfu"],
        against=f"{result['peak_tflops']:.3g} TFLOP/s ({result['mfu_against']})",
        trials=trials,
    )
    found = bottleneck(facts)
    busy = (
        ""
        if cpu_share is None or cpu_share >= _QUIET
        else " Its threads did not run all of the time: measure again while nothing else runs."
    )
    return {"bottleneck": found.part, "verdict": found.text + busy, "setting": found.setting}


@contextmanager
def _no_memory() -> Iterator[None]:
    """An allocation that fails becomes a line for the user."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise LaunchError(
            "this network's training step does not fit into the memory that is free here: take a smaller "
            "--batch-size, "
            "--set machine.micro_batch=1, --set machine.checkpoint_blocks=true, or a smaller network"
        ) from error
