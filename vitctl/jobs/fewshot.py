"""Few-shot linear evaluation (Section 4.1): closed-form ridge regression on frozen representations."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitctl.data.images.transforms import EvalTransform, fill_colour
from vitctl.engine.assemble import RunContext
from vitctl.engine.computation import choose_attention, computed
from vitctl.engine.evaluation import Score
from vitctl.engine.fewshot_ridge import L2_GRID, choose_l2, choose_shots, count_correct, decompose
from vitctl.engine.journal import FEATURES, Report, silent
from vitctl.engine.metrics import baselines, mean_per_class
from vitctl.engine.preemption import StopFlag
from vitctl.engine.runtime import stop_together
from vitctl.errors import DataError
from vitctl.jobs.inputs.data import FewshotSet, Inputs, open_inputs
from vitctl.jobs.inputs.weights import FoundWeights, check_found, loaded_model, random_in_words, weights_of
from vitctl.jobs.record.result import RunResult
from vitctl.jobs.training import (
    WHOLE,
    ImagePass,
    check_whole,
    on_device,
    shown,
    start_run,
    weights_used,
)
from vitctl.models.build import Model, build
from vitctl.models.kernels import attention_of, is_compiled
from vitctl.models.variants import unseen_pixels, with_blocks
from vitctl.models.weights.meta import HALF
from vitctl.models.weights.weights_file import weights_digest
from vitctl.recipe.schema import Fewshot, FrozenRecipe
from vitctl.recipe.sections import StartWeights
from vitctl.system.files import write_csv

SCORES = "fewshot.csv"


class Line(NamedTuple):
    """The score of one draw at one regulariser."""

    data_set: str
    shots: int
    seed: int
    l2: float
    accuracy: float
    correct: int
    total: int
    mean_per_class: float


def fewshot(
    recipe: Fewshot,
    run_dir: Path,
    report: Report = silent,
    stop: StopFlag | None = None,
    inputs: Inputs | None = None,
) -> RunResult:
    """Score frozen representations with a few images per class, for every data set, number of shots and seed.

    One pass over each split gives the representations for all shots, seeds and regularisers; later runs reuse
    them.

    Args:
        run_dir: gets log.jsonl and fewshot.csv; the caller writes result.json.

    Returns:
        accuracy per number of shots, the mean over data sets and seeds; and for each data set, with its
        regulariser.

    Raises:
        DataError: the splits have different classes, or a class has fewer images than shots.
        Stopped: a signal reached any process; finished passes over the data are kept.

    Paper: Section 4.1 (few-shot accuracies), Fig. 4
    """
    frozen = open_frozen(recipe, run_dir, report, stop, inputs)
    run, sets, runtime, journal = frozen.run, frozen.sets, frozen.run.runtime, frozen.run.journal
    lines: list[Line] = []
    for one in sets:
        features = frozen.features(one)
        if features is not None:
            lines += _score(recipe, one, features, run.stop)
        stop_together(runtime, run.stop)
    check_whole(run.shards, runtime)  # including the shards of cached representations
    metrics: dict[str, Any] = {}
    if runtime.is_main:
        metrics = _table(recipe, sets, lines)
        write_csv(run_dir / SCORES, [Line._fields, *lines])
        for shots in metrics["accuracy"]:
            seeds = metrics["by_seed"][shots]
            journal.write(
                "fewshot", step=0, shots=int(shots), accuracy=metrics["accuracy"][shots], seeds=seeds
            )
    f = recipe.fewshot
    used = frozen.used | {
        "shots": list(f.shots),
        "l2": f.l2 if f.choose_l2 == "fixed" else list(L2_GRID),
        "choose_l2": f.choose_l2,
        "float64": f.float64,
        "seeds": list(f.seeds),
        **WHOLE,
    }
    return RunResult("fewshot", "done", metrics, used, {"scores": str(run_dir / SCORES)})


@dataclass(frozen=True)
class Frozen:
    """A frozen network and the data sets it represents."""

    run: RunContext
    sets: list[FewshotSet]
    found: FoundWeights
    transform: EvalTransform
    look: ImagePass
    model: Model
    digest: str
    folder: Path
    limit: int
    weights: StartWeights

    def features(self, one: FewshotSet) -> tuple[Tensor, Tensor] | None:
        """Return features of training and test images, [N, R] and [M, R]; None off the main process."""
        (train, _), (test, was_read) = (
            self.look.cached(self.model, self.digest, source, self.folder, self.limit)
            for source in (one.train, one.test)
        )
        self.run.journal.write("features", step=0, data_set=one.name, read=was_read, folder=str(self.folder))
        if not self.run.runtime.is_main or train is None or test is None:
            return None
        if not all(bool(part.isfinite().all()) for part in (train, test)):
            raise DataError(
                "the model's representations are NaN or infinite, so their accuracy is meaningless",
                fix="use other weights",
            )
        return train, test

    @property
    def used(self) -> dict[str, Any]:
        """Return the provenance of the representations."""
        sets = self.sets
        data = sets[0].used if len(sets) == 1 else {"tasks": {one.name: one.used for one in sets}}
        weights = weights_used(self.found, self.weights)
        how = computed(self.run.runtime, attention_of(self.model), compiled=is_compiled(self.model))
        return weights | how | data | shown(self.transform)


def open_frozen(
    recipe: FrozenRecipe, run_dir: Path, report: Report, stop: StopFlag | None, inputs: Inputs | None
) -> Frozen:
    """Join the processes of a job on frozen representations, open its data, and load its network."""
    found = weights_of(recipe)
    sets = (inputs or open_inputs(recipe, run_dir)).sets
    sources = [source for one in sets for source in (one.train, one.test)]
    run = start_run(recipe, run_dir, report, stop, *sources)
    runtime, journal = run.runtime, run.journal
    check_found(runtime, found, sources)

    frozen = found
    config = with_blocks(found.weights.config, recipe.classifier.class_token_blocks)
    if config is not found.weights.config:
        others = ("head.", "pre_logits.", "mask_embedding")
        state = {name: one for name, one in found.weights.state.items() if not name.startswith(others)}
        frozen = replace(found, weights=replace(found.weights, config=config, state=state))
    model, image_size = loaded_model(frozen, recipe.data.image_size, runtime.dtype)
    if recipe.weights.initialise == "random":
        model = build(model.config, seed=recipe.seed, dtype=runtime.dtype)
    model, data, is_whole = on_device(model, runtime), recipe.data, recipe.data.eval_method == "letterbox"
    transform = EvalTransform(
        image_size,
        method=data.eval_method,
        resize=data.eval_resize or (image_size if is_whole else round(image_size * 256 / 224)),
        resample=data.eval_resample or data.resample,
        exif_orientation=data.turns_upright,
        truncated=data.truncated,
        fill=fill_colour(found.weights.meta["mean"] if is_whole else HALF),  # HALF keeps cache keys equal
    )
    choose_attention(model, recipe.machine, runtime, images=sum(map(len, sources)))
    found.log(journal, random_in_words(recipe.weights, recipe.seed), f"frozen, {transform}")
    journal.say("warning", *unseen_pixels(found.weights.config, transform.image_size))
    look, digest = ImagePass(run, recipe, transform, found.weights.meta), weights_digest(model.state_dict())
    folder = Path(recipe.classifier.cache) if recipe.classifier.cache else run_dir.parent / FEATURES
    limit = int(recipe.classifier.cache_gib * 2**30)

    return Frozen(run, sets, found, transform, look, model, digest, folder, limit, recipe.weights)


def _grid(recipe: Fewshot) -> tuple[float, ...]:
    return (recipe.fewshot.l2,) if recipe.fewshot.choose_l2 == "fixed" else L2_GRID


def _score(recipe: Fewshot, one: FewshotSet, features: tuple[Tensor, Tensor], stop: StopFlag) -> list[Line]:
    """Return the lines of a data set; after a signal only some of them."""
    dtype = torch.float64 if recipe.fewshot.float64 else torch.float32
    return [
        Line(
            one.name,
            shots,
            seed,
            l2,
            score.accuracy,
            score.correct,
            score.total,
            score.means["mean_per_class"],
        )
        for shots in recipe.fewshot.shots
        for seed in recipe.fewshot.seeds
        if not stop.raised
        for l2, score in zip(
            _grid(recipe),
            score_draw(one, features, shots=shots, seed=seed, l2s=_grid(recipe), dtype=dtype),
            strict=True,
        )
    ]


def score_draw(
    one: FewshotSet,
    features: tuple[Tensor, Tensor],
    *,
    shots: int,
    seed: int,
    l2s: Sequence[float],
    dtype: torch.dtype,
) -> list[Score]:
    """Return one draw's test scores per regulariser from training and test features, [N, R] and [M, R]."""
    labels = one.train.labels()
    chosen = choose_shots(labels, shots, num_classes=one.num_classes, seed=seed)
    chosen_labels = torch.from_numpy(labels[chosen])
    ridge = decompose(features[0][chosen], chosen_labels, num_classes=one.num_classes, dtype=dtype)
    test_labels = one.test.labels()
    images = np.bincount(test_labels, minlength=one.num_classes)
    return [
        Score(
            int(right.sum()),
            len(test_labels),
            {"mean_per_class": mean_per_class(np.stack([images, right], axis=1))},
        )
        for right in count_correct(ridge, features[1], torch.from_numpy(test_labels), l2s)
    ]


def _table(recipe: Fewshot, sets: list[FewshotSet], lines: list[Line]) -> dict[str, Any]:
    """Return the accuracies at the regularisers chosen per number of shots, by the mean over seeds."""
    f, grid = recipe.fewshot, _grid(recipe)
    shape = (len(sets), len(f.shots), len(f.seeds), len(grid))
    every: NDArray[np.float64] = np.array([line.accuracy for line in lines]).reshape(shape)
    by_class = np.array([line.mean_per_class for line in lines]).reshape(shape)
    rows: dict[str, dict[str, Any]] = {one.name: {} for one in sets}
    by_seed: dict[str, list[float]] = {}
    for i, shots in enumerate(f.shots):
        at = choose_l2(every[:, i].mean(axis=1), leave_self_out=f.choose_l2 == "leave_self_out")
        taken = np.stack([every[s, i, :, at[s]] for s in range(len(sets))])
        by_seed[str(shots)] = taken.mean(axis=0).tolist()
        for s, one in enumerate(sets):
            values = taken[s].tolist()
            row = {"accuracy": float(np.mean(values)), "std": float(np.std(values)), "by_seed": values}
            mean = float(by_class[s, i, :, at[s]].mean())
            rows[one.name][str(shots)] = row | {"mean_per_class": mean, "l2": grid[at[s]]}
    return {
        "accuracy": {shots: float(np.mean(values)) for shots, values in by_seed.items()},
        "by_seed": by_seed,
        "data_sets": rows,
        "baselines": {one.name: baselines(one.test.labels(), one.num_classes) for one in sets},
        "total": sum(len(one.test) for one in sets),
    }
