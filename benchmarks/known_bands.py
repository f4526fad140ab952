"""Make the bands of recipes whose result is our own, and count what they flag.

`python benchmarks/known_bands.py RECIPE OUT [SHARDS]` trains RECIPE, one of `BANDS`, with the seeds of its
band, which make the points of [known]; they are printed as TOML. Then, up to a quarter of its length, it
trains with other seeds: with each mistake of `MISTAKES`, and honestly with those of `fresh`, which were
looked at last: how many of them are flagged is the rate of false alarms. OUT is a folder; a second call
reuses what is finished. SHARDS are those of `data.path`, if the recipe's data set is not at hand. Two
trainings run at once, each with one thread.
"""

import json
import multiprocessing
import os
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from vitctl.recipe.known import Comparison, Known
from vitctl.recipe.load import load_recipe
from vitctl.recipe.write import toml_value

FIRST_WRONG = 1000  # seed of the first run with a mistake
WINDOWS = 10  # of the sorted images, each shuffled within
METRICS = {"train": ("loss", "pixel_std"), "evaluate": ("accuracy",)}


@dataclass(frozen=True)
class Band:
    """How a band is made.

    Args:
        points: metric -> steps, several in a quarter of the length. The recipe must score at those of its
            accuracies.
        length: of a run, in steps.
        seeds: runs that make the band.
        is_whole: these go on after the last point in a quarter of the length.
        fresh: seeds of the honest runs that are counted.
        wrong: runs of each mistake.
    """

    points: dict[str, tuple[int, ...]]
    length: int
    seeds: int
    is_whole: bool
    fresh: range
    wrong: int


BANDS = {
    "smoke": Band(
        {"loss": (4, 8, 20, 40, 80), "pixel_std": (4, 8), "accuracy": (50, 75, 100, 200, 400)},
        length=400,
        seeds=20,
        is_whole=True,
        fresh=range(100, 140),
        wrong=5,
    ),
    "cifar10_small": Band(
        {"loss": (4, 8, 30, 60, 120), "pixel_std": (4, 8), "accuracy": (97, 194)},
        length=781,
        seeds=10,
        is_whole=False,
        fresh=range(100, 110),
        wrong=2,
    ),
}
RESULTS = Path(__file__).with_name("results") / "known_bands.json"
Run = list[tuple[int, str, float]]  # step, metric and value


def shifted(batches: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Give each training image the label of the next class."""

    def wrong(source: Any, *args: Any, **more: Any) -> Iterator[Any]:
        for batch in batches(source, *args, **more):
            yield replace(batch, labels=(batch.labels + 1) % len(source.class_names))

    return wrong


@dataclass(frozen=True)
class Sorted:
    """Images in the order of their classes, shuffled within windows of a tenth, as a loader with a small
    buffer reads shards that were written class by class.
    """

    samples: np.ndarray
    window_size: int = 0

    @property
    def num_samples(self) -> int:
        """Samples in the data set."""
        return len(self.samples)

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return epoch and sample at the given positions."""
        return positions // len(self.samples), self.samples[positions % len(self.samples)]


def by_class(_data: Any, source: Any, seed: int, _schedule: Any) -> Sorted:
    """Return the order of the mistake, instead of the order of the recipe."""
    generator = np.random.default_rng(seed)
    windows = np.array_split(np.argsort(source.labels(), kind="stable"), WINDOWS)
    return Sorted(np.concatenate([generator.permutation(window) for window in windows]))


# name: keys of the recipe, as factors of its values or as values, and functions that are replaced
MISTAKES: dict[str, tuple[dict[str, Any], dict[str, Callable[[Any], Any]]]] = {
    "rate x 4": ({"optimizer.lr": 4.0}, {}),
    "no warm-up": ({"schedule.warmup_steps": 0}, {}),
    "pixels 0 to 255": ({"data.mean": [0.0] * 3, "data.std": [1 / 255] * 3}, {}),
    "pixels 0 to 1": ({"data.mean": [0.0] * 3, "data.std": [1.0] * 3}, {}),
    "training labels shifted by one": ({}, {"vitctl.engine.assemble.train_batches": shifted}),
    "shards sorted by class": ({}, {"vitctl.jobs.training.training_order": lambda _: by_class}),
}


def main() -> None:
    """Train what is missing, and print the points and the table."""
    recipe, out, shards = sys.argv[1], Path(sys.argv[2]), "".join(sys.argv[3:4])
    band = BANDS[recipe]
    judged = [(name, FIRST_WRONG + number) for number in range(band.wrong) for name in MISTAKES]
    judged += [("", seed) for seed in band.fresh]
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:

        def numbers(tasks: list[tuple[str, int]], known: Known | None) -> list[Run]:
            wanted = {(metric, at) for metric, steps in band.points.items() for at in steps}
            files = pool.map(trained, [(recipe, out, shards, *task, known) for task in tasks])
            runs = [json.loads(Path(file).read_text()) for file in files]
            return [[(at, name, v) for at, name, v in run if (name, at) in wanted] for run in runs]

        honest = numbers([("", seed) for seed in range(band.seeds)], None)
        values = {**load_recipe(recipe).recipe.known.model_dump(), "seeds": band.seeds, "length": band.length}
        values |= {"source": values["source"] or "-", "num_classes": values["num_classes"] or 1}
        known = Known(**values | {"points": points_of(honest)})
        print("points = [")
        for point in known.points:
            cells = (f"{key} = {toml_value(value)}" for key, value in point.model_dump().items() if value)
            print("  {" + ", ".join(cells) + "},", flush=True)
        runs: dict[str, list[Run]] = {"honest": honest}
        for (name, _), run in zip(judged, numbers(judged, known), strict=True):
            runs.setdefault(name or "honest, fresh", []).append(run)
    print("]\n\n| run | runs | flagged | at step |\n|---|---|---|---|")
    for name, some in runs.items():
        if name != "honest":
            steps = sorted(step for run in some if (step := flagged_at(known, run)) is not None)
            print(f"| {name} | {len(some)} | {len(steps)} | {', '.join(map(str, steps))} |")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps({**results, recipe: runs}) + "\n")


def points_of(runs: list[Run]) -> list[dict[str, Any]]:
    """Return mean and spread over runs of each number, as points of [known]."""
    values: dict[tuple[str, int], list[float]] = {}
    for run in runs:
        for step, metric, value in run:
            values.setdefault((metric, step), []).append(value)
    return [
        {
            "metric": metric,
            "at": at,
            "value": rounded(statistics.mean(some), 6),  # a loss starts with hardly any spread
            "spread": rounded(statistics.stdev(some)),
        }
        for (metric, at), some in sorted(values.items(), key=lambda item: item[0][1])
    ]


def rounded(value: float, digits: int = 4) -> float:
    """Return a number with so many digits."""
    return float(f"{value:.{digits}g}")


def flagged_at(known: Known, run: Run) -> int | None:
    """Return the step at which a run is flagged; None if it never is."""
    comparison = Comparison(known, int(known.length), known.length, known.num_classes)
    for step, metric, value in sorted(run):
        comparison.of(step, **{metric: value})
        if comparison.flagged:
            return step
    return None


def trained(task: tuple[str, Path, str, str, int, Known | None]) -> str:
    """Train once, unless it was done, and return a file with its numbers.

    A run that is judged by a band ends where it is flagged, or after a quarter of its length.
    """
    recipe_name, out, shards, mistake, seed, known = task
    folder = out / recipe_name / f"{mistake.replace(' ', '_') or 'honest'}_{seed}"
    done = folder.with_name(f"{folder.name}.json")
    if done.exists():
        return str(done)
    shutil.rmtree(folder, ignore_errors=True)
    import torch

    from vitctl.launch.prepare_run import prepare_run
    from vitctl.launch.worker import launch

    torch.set_num_threads(1)
    keys, replaced = MISTAKES.get(mistake, ({}, {}))
    is_quarter = known is not None or not BANDS[recipe_name].is_whole
    values: dict[str, Any] = {
        "seed": seed,
        "machine.workers": 0,
        "machine.device": "cpu",
        "checkpoint.every_steps": 0,
        "log.every_steps": 1,
        "log.trace": False,
        **({"data.path": shards} if shards else {}),
        **keys,
    }
    if "optimizer.lr" in keys:
        values["optimizer.lr"] = keys["optimizer.lr"] * load_recipe(recipe_name).recipe.optimizer.lr
    points: list[tuple[int, str, float]] = []

    class Enough(BaseException):
        """The rest of the run would tell nothing."""

    def report(record: dict[str, Any]) -> None:
        for metric in METRICS.get(record.get("kind", ""), ()):
            points.append((record["step"], metric, record[metric]))
        if known is not None and flagged_at(known, points) is not None:
            raise Enough
        if is_quarter and record.get("kind") == "now" and record.get("step", 0) > record["total_steps"] / 4:
            raise Enough

    with ExitStack() as stack:
        for name, function in replaced.items():
            module, _, attribute = name.rpartition(".")
            original = getattr(__import__(module, fromlist=[attribute]), attribute)
            stack.enter_context(mock.patch(name, function(original)))
        prepared = prepare_run(load_recipe(recipe_name, [*values.items()]), folder)
        with suppress(Enough):
            launch(folder, report, prepared=prepared)
    shutil.rmtree(folder)
    done.write_text(json.dumps(points))
    return str(done)


if __name__ == "__main__":
    main()
