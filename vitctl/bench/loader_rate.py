"""`vitctl bench data`: a recipe's loader: images/s, where time goes, and whether the step waits."""

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np

from vitctl.bench.measuring import Budget, cpu_seconds, machine_facts
from vitctl.bench.step_speed import bench_model
from vitctl.bench.timed_steps import DATA, SYNTHETIC_IMAGES, without_extras
from vitctl.data.images.decode import BadSample, open_picture
from vitctl.data.images.transforms import TrainTransform, augmentation_rng
from vitctl.data.loader.batches import train_batches
from vitctl.data.source.order import Order
from vitctl.data.source.views import Source
from vitctl.engine.assemble import Images
from vitctl.engine.runtime import alone, num_workers
from vitctl.engine.schedule import fitted_recipe
from vitctl.errors import DataError
from vitctl.jobs.inputs.data import open_training_images
from vitctl.jobs.training import images_of
from vitctl.recipe.schema import Finetune, Pretrain
from vitctl.system.files import scratch_folder
from vitctl.system.process import usable_cores
from vitctl.system.text import count_text, rate_text

READ, DECODE, AUGMENT = "read", "decode", "augment"
_LOADER, _SPLIT, _STEP = 0.35, 0.2, 0.4  # shares of the budget
_LEAST_SECONDS, _LEAST_CPU = 0.5, 0.1
_BATCH, _WARM_UP, _MOST_IMAGES = 64, 2, 512


def bench_data(
    recipe: Pretrain | Finetune, budget: Budget, *, step_rate: float | None = None
) -> dict[str, Any]:
    """Measure the loader of a recipe: its images, its augmentation, its workers.

    Args:
        recipe: of pretrain or finetune.
        budget: seconds, and Ctrl-C.
        step_rate: images/s that the training step takes; None: measured on noise, 0: left out.

    Returns:
        all measurements, and what decides them, ready for JSON.

    Raises:
        DataError: the images are not there.
    """
    recipe = without_extras(recipe)
    if recipe.data.synthetic:
        raise DataError(
            "bench data measures the loading of stored images: leave out data.synthetic, and give --data "
            "or --dataset"
        )
    computation = alone(precision=recipe.machine.precision, device=recipe.machine.device)
    workers = num_workers(recipe.machine, computation.device, recipe.machine.processes)
    with scratch_folder("bench") as folder:
        budget.say("opening the data")
        source, _ = open_training_images(recipe.data, folder, needs_labels=recipe.needs_labels)
        recipe = fitted_recipe(recipe, len(source))
        budget = budget.restarted()
        images = images_of(recipe.data, source, None, recipe.seed, recipe.schedule)
        on_gpu = computation.device.type == "cuda"
        loader = measure_loader(recipe, images, workers, budget.part(_LOADER), pinned=on_gpu)
        split, image_bytes = measure_images(images, recipe.seed, budget.part(_SPLIT))
    needed, origin = _step_rate(recipe, step_rate, budget)
    bottleneck, text = verdict(loader["images_per_second"], workers, split, needed, cores=usable_cores())
    return {
        "kind": "loader",
        "data": recipe.data.path or recipe.data.dataset or "noise",
        "num_images": len(source),
        "image_bytes": image_bytes,
        "image_size": recipe.data.image_size,
        "crop": recipe.data.crop,
        "decode": recipe.data.decode,
        "resample": recipe.data.resample,
        "randaugment_layers": recipe.data.randaugment_layers,
        "order": recipe.data.order,
        "trace": recipe.log.trace,
        "workers": workers,
        **loader,
        "split": split,
        "step_images_per_second": needed,
        "step_source": origin,
        "stopped": budget.stop.raised,
        "machine": machine_facts(computation),
        "bottleneck": bottleneck,
        "verdict": text,
    }


def measure_loader(
    recipe: Pretrain | Finetune, images: Images, workers: int, budget: Budget, *, pinned: bool = False
) -> dict[str, Any]:
    """Take batches from the recipe's loader as fast as it gives them, after those it prepared ahead.

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
    """Return the rates of a loader, and notes on how far to trust them; `bad` images could not be used."""
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


def measure_images(images: Images, seed: int, budget: Budget) -> tuple[dict[str, float], float]:
    """Measure the parts of images that this process makes one by one; the first warms up.

    Returns:
        mean seconds of reading, decoding (of a JPEG its crop only) and augmenting (resizing, flip,
        RandAugment), and the mean bytes of an image.
    """
    source, parts, stored = images.train, list[dict[str, float]](), list[int]()
    order = images.order or Order(len(source), seed)
    epochs, samples = order.at(np.arange(_MOST_IMAGES))
    for epoch, sample in zip(epochs.tolist(), samples.tolist(), strict=True):
        if len(parts) > 1 and budget.left <= 0:
            break
        budget.say(f"timing single images: {len(parts):,}")
        try:
            seconds, num_bytes = image_parts(source, sample, images.augmentation, seed, epoch)
        except BadSample:
            continue
        parts.append(seconds)
        stored.append(num_bytes)
    if len(parts) < 2:
        raise DataError(f"none of the first {_MOST_IMAGES} images can be used; see `vitctl data check`")
    means = {part: float(np.mean([seconds[part] for seconds in parts[1:]])) for part in parts[0]}
    return means, float(np.mean(stored[1:]))


def image_parts(
    source: Source, sample: int, transform: TrainTransform, seed: int, epoch: int
) -> tuple[dict[str, float], int]:
    """Return the seconds of the parts of one image, which add up to the whole, and its bytes."""
    begun = time.perf_counter()
    data = source.read(sample)
    read = time.perf_counter()
    picture = open_picture(data, exif_orientation=transform.exif_orientation, truncated=transform.truncated)
    opened = time.perf_counter()
    decoding, region = 0.0, picture.region

    def timed_region(*box: int, **options: Any) -> Any:
        nonlocal decoding
        began = time.perf_counter()
        pixels = region(*box, **options)
        decoding += time.perf_counter() - began
        return pixels

    vars(picture)["region"] = timed_region
    rng = augmentation_rng(seed, epoch, sample)
    transform.apply(picture, transform.draw(picture.height, picture.width, rng))
    rest = time.perf_counter() - opened - decoding
    return {READ: read - begun, DECODE: opened - read + decoding, AUGMENT: rest}, len(data)


def _step_rate(recipe: Pretrain | Finetune, given: float | None, budget: Budget) -> tuple[float, str]:
    """Return the images/s of the training step without a wait for images, and the source of the number."""
    if given is not None:
        return given, "as given"
    if budget.left <= 0:
        return 0.0, "no time left to measure it"
    # One process is measured, with its share of the images, as its loader is.
    share = -(-recipe.schedule.batch_size // recipe.machine.processes)
    changes = {
        "data": recipe.data.model_copy(update={"synthetic": SYNTHETIC_IMAGES}),
        "machine": recipe.machine.model_copy(update={"processes": 1}),
        "schedule": recipe.schedule.model_copy(update={"batch_size": share}),
    }
    part = replace(budget, seconds=_STEP * budget.seconds)
    result = bench_model(recipe.model_copy(update=changes), part, quick=True)
    rate = result["batch_size"] / (result["seconds"] - result["split"].get(DATA, 0.0))
    images = count_text(result["batch_size"], "noise image")
    if result["batch_size"] < share:
        rate = result["recipe_images_per_second"]
        images = f"{images} a step, extended to {share:,}"
    return rate, f"measured here, {result['precision']}, {images}"


def verdict(
    given: float, workers: int, split: dict[str, float], needed: float, *, cores: int
) -> tuple[str, str]:
    """Return the bottleneck, and a sentence: whether the loader keeps up, and how many workers would.

    Args:
        given: images/s of the loader, with this many workers.
        workers: of the loader.
        split: seconds of the parts of an image.
        needed: images/s of the step; 0: unknown.
        cores: of this machine.
    """
    longest = max(split, key=lambda part: split[part])
    made_of = f"{longest} takes {split[longest] / sum(split.values()):.0%} of an image"
    if not needed:
        return longest, f"The loader makes {rate_text(given)} images/s; {made_of}."
    enough = math.ceil(max(1, workers) * needed / given)
    rates = f"{rate_text(given)} images/s, the step needs {rate_text(needed)}"
    if given >= needed:
        fewer = f"; {count_text(enough, 'worker')} would be enough" if workers > enough else ""
        return "step", f"The loader is not the bottleneck: {rates}{fewer}."
    if workers < enough <= cores:
        return "loader", f"The loader is the bottleneck: {rates}; machine.workers = {enough} would keep up."
    return "loader", (
        f"The loader is the bottleneck: {rates}; it would need {enough} workers, more than the "
        f"{count_text(cores, 'core')} here; {made_of}."
    )
