"""`vitctl bench data`: how many images the loader of a recipe makes, where their time goes, and whether the
training step can wait less.
"""

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vitctl.bench.budget import Budget
from vitctl.bench.clock import DATA
from vitctl.bench.machine import OtherWork, cpu_seconds, machine_facts, num_cores
from vitctl.bench.model import bench_model
from vitctl.bench.training import SYNTHETIC_IMAGES, without_extras
from vitctl.bench.verdict import Verdict, rate
from vitctl.data.images.decode import BadSample, open_picture
from vitctl.data.images.transforms import TrainTransform, augmentation_rng
from vitctl.data.loader.batches import Batch, train_batches
from vitctl.data.source.order import Order
from vitctl.data.source.views import Source
from vitctl.engine.distributed.runtime import alone
from vitctl.errors import DataError
from vitctl.jobs.inputs.data import open_training_images
from vitctl.jobs.inputs.length import fitted_recipe
from vitctl.jobs.inputs.network import needs_labels
from vitctl.jobs.training import Images, images_of, loader_workers
from vitctl.recipe.schema import Finetune, Pretrain

READ, DECODE, AUGMENT = "read", "decode", "augment"
_LOADER, _SPLIT, _STEP = 0.35, 0.2, 0.4  # shares of the budget
_SCALED_WORTH = 0.25  # of another pass over the same images: less is what two passes differ by
_LEAST_SECONDS, _LEAST_CPU = 0.5, 0.1
_BATCH, _WARM_UP, _MOST_IMAGES = 64, 2, 512


@dataclass(frozen=True)
class LoaderRate:
    """Of a loader with so many workers: images, seconds of the clock, of CPU of all processes, and images
    that are unusable.
    """

    workers: int
    images: int
    seconds: float
    cpu_seconds: float
    bad: int = 0

    @property
    def images_per_second(self) -> float:
        """By the clock."""
        return self.images / self.seconds

    @property
    def images_per_worker(self) -> float:
        """By the clock, of a worker; without workers the process itself is one."""
        return self.images_per_second / max(1, self.workers)

    @property
    def images_per_cpu_second(self) -> float:
        """Whatever else the machine does; 0 where too little was computed to tell."""
        return self.images / self.cpu_seconds if self.cpu_seconds >= _LEAST_CPU else 0.0

    @property
    def notes(self) -> list[str]:
        """What a reader of its rate must know."""
        notes = []
        if self.seconds < _LEAST_SECONDS:
            notes.append(
                f"the loader was measured for {self.seconds:.2g} s on {self.images:,} images, some made "
                f"before: its rate says little"
            )
        if self.bad:
            notes.append(
                f"{self.bad:,} of the {self.images:,} images could not be used, and cost less than others; "
                f"see `vitctl data check`"
            )
        return notes


def bench_data(
    recipe: Pretrain | Finetune, budget: Budget, *, step_rate: float | None = None
) -> dict[str, Any]:
    """Measure the loader of a recipe: its images, its augmentation, its workers.

    Args:
        recipe: checked; its images must be there.
        budget: seconds, and Ctrl-C.
        step_rate: images/s that the training step takes; None: it is measured, on noise; 0: it is left out.

    Returns:
        everything that was measured, and what decides it, ready for JSON.

    Raises:
        DataError: the images are not there.
    """
    recipe = without_extras(recipe)
    computation = alone(precision=recipe.machine.precision, device=recipe.machine.device)
    workers = loader_workers(recipe.machine, computation.device, recipe.machine.processes)
    with tempfile.TemporaryDirectory(prefix="vitctl-bench-") as folder:
        budget.say("looking for data")
        source = _opened(recipe, Path(folder))
        recipe = fitted_recipe(recipe, len(source))
        budget, others = budget.restarted(), OtherWork()
        images = images_of(recipe.data, source, None, recipe.seed, recipe.schedule)
        measured = measure_loader(
            recipe, images, workers, budget.part(_LOADER), pinned=computation.device.type == "cuda"
        )
        split, image_bytes = measure_images(images, recipe.seed, budget.part(_SPLIT))
        scaled = scaled_gain(images, split, recipe.seed, budget.part(_SPLIT))
    busy = others.notes()
    needed, origin = _step_rate(recipe, step_rate, budget)
    found = verdict(measured, split, needed, cores=num_cores(), scaled=scaled)
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
        "workers": measured.workers,
        "images": measured.images,
        "seconds": measured.seconds,
        "cpu_seconds": measured.cpu_seconds,
        "images_per_second": measured.images_per_second,
        "images_per_worker": measured.images_per_worker,
        "images_per_cpu_second": measured.images_per_cpu_second,
        "split": split,
        "scaled_gain": scaled,
        "step_images_per_second": needed,
        "step_source": origin,
        "unusable_images": measured.bad,
        "notes": [*measured.notes, *busy],
        "stopped": budget.stop.raised,
        "machine": machine_facts(computation),
        "bottleneck": found.part,
        "verdict": found.text,
        "setting": found.setting,
    }


def _opened(recipe: Pretrain | Finetune, scratch: Path) -> Source:
    """The training images.

    Raises:
        DataError: they are not there; noise would tell nothing about a loader.
    """
    if recipe.data.synthetic:
        raise DataError(
            "bench data measures a loader on its own images: leave data.synthetic out, give --data or "
            "--dataset"
        )
    return open_training_images(recipe.data, scratch, needs_labels=needs_labels(recipe))[0]


def measure_loader(
    recipe: Pretrain | Finetune, images: Images, workers: int, budget: Budget, *, pinned: bool = False
) -> LoaderRate:
    """Take batches from the recipe's loader as fast as it gives them, after a few that it had made ahead."""
    size = min(_BATCH, recipe.schedule.batch_size)
    batches: Iterator[Batch] = train_batches(
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
        needs_labels=needs_labels(recipe),
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
        budget.say(f"loading: {taken:,} images")
    return LoaderRate(workers, taken, time.perf_counter() - began, cpu_seconds() - before, bad)


def measure_images(images: Images, seed: int, budget: Budget) -> tuple[dict[str, float], float]:
    """Seconds of each part of an image, made in this process one after the other, and the mean bytes of an
    image.

    The parts: reading its bytes, decoding (of a JPEG its crop only), and augmenting (resizing, flip,
    RandAugment). The first image is made once before, unmeasured.
    """
    source, transform = images.train, images.augmentation
    sums, stored, made, warm = dict.fromkeys((READ, DECODE, AUGMENT), 0.0), 0, 0, False
    order = images.order or Order(len(source), seed)
    for position in range(_MOST_IMAGES):
        if made and budget.left <= 0:
            break
        budget.say(f"taking images apart: {made + 1:,}")
        epochs, samples = order.at(torch.tensor([position]).numpy())
        sample = int(samples[0])
        try:
            if not warm:
                image_parts(source, sample, transform, seed, int(epochs[0]))
                warm = True
            parts, num_bytes = image_parts(source, sample, transform, seed, int(epochs[0]))
        except BadSample:
            continue
        made, stored = made + 1, stored + num_bytes
        sums = {name: sums[name] + parts[name] for name in sums}
    if not made:
        raise DataError(f"none of the first {_MOST_IMAGES} images can be used; see `vitctl data check`")
    return {name: seconds / made for name, seconds in sums.items()}, stored / made


def scaled_gain(images: Images, split: dict[str, float], seed: int, budget: Budget) -> float:
    """How much faster an image is made with data.decode = "scaled", measured where decoding takes the most;
    else 0.
    """
    if images.augmentation.decode == "scaled" or split[DECODE] < max(split.values()):
        return 0.0
    scaled = replace(images, augmentation=replace(images.augmentation, decode="scaled"))
    return sum(split.values()) / sum(measure_images(scaled, seed, budget)[0].values()) - 1


def image_parts(
    source: Source, sample: int, transform: TrainTransform, seed: int, epoch: int
) -> tuple[dict[str, float], int]:
    """Seconds of the parts of one image, which add up to the whole, and its bytes."""
    begun = time.perf_counter()
    data = source.read(sample)
    read = time.perf_counter()
    picture = open_picture(data, exif_orientation=transform.exif_orientation, truncated=transform.truncated)
    opened = time.perf_counter()
    decoding = 0.0
    region: Callable[..., Any] = picture.region

    def timed(*box: int, **options: Any) -> Any:
        nonlocal decoding
        began = time.perf_counter()
        pixels = region(*box, **options)
        decoding += time.perf_counter() - began
        return pixels

    vars(picture)["region"] = timed
    rng = augmentation_rng(seed, epoch, sample)
    transform.apply(picture, transform.draw(picture.height, picture.width, rng))
    rest = time.perf_counter() - opened - decoding
    return {READ: read - begun, DECODE: opened - read + decoding, AUGMENT: rest}, len(data)


def _step_rate(recipe: Pretrain | Finetune, given: float | None, budget: Budget) -> tuple[float, str]:
    """Images/s of the training step without a wait for images, and where the number is from."""
    if given is not None:
        return given, "as given"
    if budget.left <= 0:
        return 0.0, "no time to measure it"
    processes = (
        recipe.machine.processes
    )  # one of them is measured, with its share of the images, as its loader is
    changes = {
        "data": recipe.data.model_copy(update={"synthetic": SYNTHETIC_IMAGES}),
        "machine": recipe.machine.model_copy(update={"processes": 1}),
        "schedule": recipe.schedule.model_copy(
            update={"batch_size": -(-recipe.schedule.batch_size // processes)}
        ),
    }
    noise = recipe.model_copy(update=changes)
    result = bench_model(noise, replace(budget, seconds=_STEP * budget.seconds), quick=True)
    step = result["seconds"] - result["split"].get(DATA, 0.0)
    return result[
        "batch_size"
    ] / step, f"measured here, {result['precision']}, {result['batch_size']:,} noise images"


def verdict(
    loader: LoaderRate, split: dict[str, float], needed: float, *, cores: int, scaled: float = 0.0
) -> Verdict:
    """Whether the loader keeps up with the step, and what would help where it does not.

    Args:
        loader: as measured.
        split: seconds of the parts of an image.
        needed: images/s of the step; 0: unknown.
        cores: of this machine.
        scaled: of `scaled_gain`.
    """
    part = max(split, key=lambda name: split[name])
    share = split[part] / sum(split.values())
    made_of = f"{part} takes {share:.0%} of an image"
    if not needed:
        return Verdict(part, f"The loader gives {rate(loader.images_per_second)} images/s; {made_of}.")
    ratio = loader.images_per_second / needed
    workers = max(1, math.ceil(loader.workers * needed / loader.images_per_second))
    if ratio >= 1:
        return Verdict(
            "step",
            f"The loader is not the bottleneck: {rate(loader.images_per_second)} images/s, {rate(ratio)} "
            f"times what the step needs"
            + (f"; {workers} worker(s) would do." if loader.workers > workers else "."),
        )
    begin = f"The loader is the bottleneck: {rate(loader.images_per_second)} images/s, the step needs {rate(needed)}"
    if loader.workers < workers <= cores:
        return Verdict(
            "loader", f"{begin}: machine.workers = {workers} would keep up.", f"machine.workers={workers}"
        )
    begin = f"{begin}; it would take {workers} workers, more than the {cores} core(s) here; {made_of}"
    if scaled >= _SCALED_WORTH:
        return Verdict(
            "loader",
            f"{begin}: data.decode = 'scaled', which decodes large photographs at a part of their size, made "
            f"an image {scaled:.0%} "
            "faster when tried; so does storing smaller ones (`vitctl data shards --max-side`).",
            "data.decode=scaled",
        )
    return Verdict("loader", f"{begin}.")
