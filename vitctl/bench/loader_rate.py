"""`vitctl bench data`: images/s of a recipe's loader."""

import tempfile
import time
from pathlib import Path
from typing import Any

from vitctl.bench.measuring import Budget, cpu_seconds, machine_facts
from vitctl.bench.timed_steps import without_extras
from vitctl.data.loader.batches import train_batches
from vitctl.data.source.order import Order
from vitctl.engine.assemble import Images
from vitctl.engine.runtime import alone, num_workers
from vitctl.engine.schedule import fitted_recipe
from vitctl.errors import DataError
from vitctl.jobs.inputs.data import open_training_images
from vitctl.jobs.resources import image_bytes
from vitctl.jobs.training import images_of
from vitctl.models.weights.meta import COLOURS
from vitctl.recipe.schema import Finetune, Pretrain
from vitctl.system.text import count_text

_LEAST_SECONDS, _LEAST_CPU = 0.5, 0.1
_BATCH, _WARM_UP = 64, 2


def bench_data(recipe: Pretrain | Finetune, budget: Budget) -> dict[str, Any]:
    """Measure a recipe's loader, augmentation and workers. Return the results for JSON. Raises DataError."""
    recipe = without_extras(recipe)
    if recipe.data.synthetic:
        raise DataError(
            "bench data measures the loading of stored images: leave out data.synthetic, and give --data "
            "or --dataset"
        )
    computation = alone(precision=recipe.machine.precision, device=recipe.machine.device)
    workers = num_workers(recipe.machine, computation.device, recipe.machine.processes)
    with tempfile.TemporaryDirectory(prefix="vitctl-bench-") as folder:
        budget.say("opening the data")
        source, _ = open_training_images(recipe.data, Path(folder), needs_labels=recipe.needs_labels)
        recipe = fitted_recipe(recipe, len(source))
        images = images_of(recipe.data, source, None, recipe.seed, recipe.schedule, COLOURS["half"])
        on_gpu = computation.device.type == "cuda"
        loader = measure_loader(recipe, images, workers, budget.restarted(), pinned=on_gpu)
    return {
        "kind": "loader",
        "data": recipe.data.path or recipe.data.dataset or "mixture",
        "num_images": len(source),
        "image_bytes": image_bytes(source),
        "image_size": recipe.data.image_size,
        "crop": recipe.data.crop,
        "decode": recipe.data.decode,
        "resample": recipe.data.resample,
        "randaugment_layers": recipe.data.randaugment_layers,
        "order": recipe.data.order,
        "trace": recipe.log.trace,
        "workers": workers,
        **loader,
        "stopped": budget.stop.raised,
        "machine": machine_facts(computation),
    }


def measure_loader(
    recipe: Pretrain | Finetune, images: Images, workers: int, budget: Budget, *, pinned: bool = False
) -> dict[str, Any]:
    """Take batches from the recipe's loader at full speed, after those it prepared ahead.

    Returns:
        images per wall-clock second, per worker (without workers this process counts as one) and per CPU
        second of all processes; the last is 0 if too little CPU time was used.
    """
    size = min(_BATCH, recipe.schedule.batch_size)
    batches = train_batches(
        images.train,
        images.order or Order(len(images.train), recipe.seed),
        images.augmentation,
        seed=recipe.seed,
        batch_size=size,
        micro_batch=size,
        rank=0,
        num_processes=1,
        first_step=0,
        num_workers=workers,
        needs_labels=recipe.needs_labels,
        checksums=recipe.log.trace,
        pinned=pinned,
    )
    budget.say("starting the loader")
    for _ in range(_WARM_UP * max(1, workers)):
        next(batches)
    began, before, taken, bad = time.perf_counter(), cpu_seconds(), 0, 0
    while not taken or budget.left > 0:
        batch = next(batches)
        taken, bad = taken + len(batch), bad + len(batch.bad)
        budget.say(f"loading: {count_text(taken, 'image')}")
    return loader_numbers(workers, taken, time.perf_counter() - began, cpu_seconds() - before, bad)


def loader_numbers(workers: int, images: int, seconds: float, cpu: float, bad: int = 0) -> dict[str, Any]:
    """Return the rates of a loader, and notes on their reliability; `bad` images could not be used."""
    notes = (
        (
            seconds < _LEAST_SECONDS,
            f"the loader was measured for only {seconds:.2g} s on {count_text(images, 'image')}, some of "
            f"them made earlier: its rate is not reliable",
        ),
        (
            bad,
            f"{bad:,} of the {images:,} images could not be used, and took less time; see `vitctl data "
            f"check`",
        ),
    )
    return {
        "images": images,
        "unusable_images": bad,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "images_per_second": images / seconds,
        "images_per_worker": images / seconds / max(1, workers),
        "images_per_cpu_second": images / cpu if cpu >= _LEAST_CPU else 0.0,
        "notes": [text for is_so, text in notes if is_so],
    }
