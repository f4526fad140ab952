"""Score a classifier on a split: every image once, by its labels, ReaL labels or ObjectNet's rules."""

import csv
import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitctl.data.datasets.readers.imagenet import (
    CORRUPTIONS,
    by_validation_number,
    imagenet_classes,
    is_part_of_imagenet,
    read_real,
)
from vitctl.data.datasets.readers.original_files import class_list
from vitctl.data.images.decode import BadSample
from vitctl.data.source.stores import ImageFiles, ShardSource
from vitctl.data.source.views import Source, View, keys_of, numbered_as, sample_key, shared_samples, stored
from vitctl.engine.calibration import calibration, fit_temperature, image_losses, suspected_labels
from vitctl.engine.computation import choose_attention, computed
from vitctl.engine.evaluation import top_predictions
from vitctl.engine.journal import RECIPE, Report, run_of, silent
from vitctl.engine.metrics import (
    TOP_K,
    average_precisions,
    baselines,
    best_thresholds,
    bootstrap,
    class_scores,
    correct_predictions,
    count_by_class,
    count_confusions,
    count_hits,
    label_set_scores,
    macro_scores,
    mean_per_class,
    padded_sets,
    wilson,
)
from vitctl.engine.preemption import StopFlag
from vitctl.errors import DataError, RecipeError, VitctlError, refuse
from vitctl.jobs.inputs.checks import HELD_OUT, check_head_classes, training_of
from vitctl.jobs.inputs.classifier import probabilities
from vitctl.jobs.inputs.data import Inputs, open_inputs, open_recipe_split, open_train
from vitctl.jobs.inputs.weights import (
    OBJECTNET,
    OF_OBJECTNET,
    RESTRICTED,
    FoundWeights,
    check_found,
    loaded_model,
    scored_weights,
    stored_eval_transform,
)
from vitctl.jobs.record.answer_table import COLUMNS, SUSPECTS, check_place, joined, write_answers
from vitctl.jobs.record.result import RunResult, data_used, read_result
from vitctl.jobs.record.start_folder import at_start
from vitctl.jobs.training import (
    WHOLE,
    ImagePass,
    on_device,
    shown,
    start_run,
    weights_scored,
)
from vitctl.models.build import Model
from vitctl.models.kernels import is_compiled
from vitctl.models.variants import unseen_pixels
from vitctl.models.weights.meta import (
    Activation,
    Temperature,
    activation_of,
    distinct,
    no_head,
    stored_temperature,
)
from vitctl.recipe.load import load_recipe
from vitctl.recipe.schema import Evaluate, Finetune, Pretrain
from vitctl.system import limits
from vitctl.system.files import read_bytes, write_csv
from vitctl.system.text import one_line, same_name

REAL_PLACE = Path("imagenet_real") / "real.json"
_MOST_NAMED = 5  # classes in a warning
_MOST_READ = 20_000  # training images that a prediction looks for by their content
_MOST_COMPARED = 2_000_000  # training images that an evaluation looks for
_FIT_OF_SCORED = (
    "the temperature is fitted to images that score the network, so their calibration looks better than that "
    "of new images; fit it to images that were held out of the training and of the scoring"
)
_CALIBRATED = "the calibration below is of the images that the temperature was fitted to"
ORIGINAL, REAL, PART = "original", "real", "restricted"


@dataclass(frozen=True)
class LabelRule:
    """Labels, and the rule by which logits become predictions.

    Args:
        labels: name of a label set -> int64 `[N]` or `[N, L]`, padded with -1; the first is the main set.
        classes: int64 `[N]`, the class that counts an image: its first label, or -1 if it has none.
        class_names: names of `classes`.
        prediction_names: names of the classes that may be predicted.
        to_scores: logits `[B, K]` to scores of the classes that may be predicted, `[B, A]`.
    """

    labels: dict[str, np.ndarray]
    classes: np.ndarray
    class_names: Sequence[str]
    prediction_names: Sequence[str]
    to_scores: Callable[[Tensor], Tensor] = field(default=lambda logits: logits)

    @property
    def main(self) -> np.ndarray:
        return next(iter(self.labels.values()))

    def count_by_class(self, best: np.ndarray) -> np.ndarray:
        """Return each class's images, top-1 and top-5 hits, int64 `[K, 3]`, from predictions `[N, 5]`."""
        counted = self.classes >= 0
        right = correct_predictions(best, self.main)[counted]
        return count_by_class(right, self.classes[counted], len(self.class_names))

    @property
    def single_labels(self) -> Tensor | None:
        """Return the main labels, int64 `[N]`; None if images may have several."""
        return torch.from_numpy(self.main.astype(np.int64)) if self.main.ndim == 1 else None

    @property
    def has_f1(self) -> bool:
        """Return whether F1 is defined: one label per image, among the same classes as the predictions."""
        return self.main.ndim == 1 and self.prediction_names == self.class_names

    @property
    def has_label_sets(self) -> bool:
        """Return whether images may have several labels, all among the predicted classes."""
        return list(self.labels) == [ORIGINAL] and self.labels[ORIGINAL].ndim > 1

    @property
    def truth(self) -> np.ndarray:
        """Return which classes each image has, bool `[N, K]`."""
        labels = self.main
        images, places = np.nonzero(labels >= 0)
        truth = np.zeros((len(labels), len(self.prediction_names)), bool)
        truth[images, labels[images, places]] = True
        return truth

    def with_predictions(self, counts: np.ndarray, best: np.ndarray) -> np.ndarray:
        """Return each class's images, correct predictions and predictions, `[K, 3]`."""
        predicted = np.bincount(best[self.classes >= 0, 0], minlength=len(counts))
        return np.stack([counts[:, 0], counts[:, 1], predicted], axis=1)


def choose_label_rule(wanted: str, source: Source, found: FoundWeights, root: Path) -> LabelRule:
    """Return the rule that evaluation.labels names, for the images of `open_scored`.

    `root` holds the ReaL labels. Raises VitctlError if there are no such labels, or they do not fit.
    """
    in_part = is_part_of_imagenet(source.class_names, found.weights.config.num_classes)
    if wanted in OF_OBJECTNET or (not wanted and in_part):
        return _among_imagenet(wanted or PART, source, found)
    check_found_classes(found, source.class_names)
    source = numbered_as(source, distinct(found.weights.meta.get("class_names") or ()))
    labels = {ORIGINAL: source.labels()}
    if wanted == REAL or wanted.endswith(".json"):
        names, wnids = source.class_names, class_list("imagenet")
        are_wnids = bool(set(names) & set(wnids))
        if len(names) != len(wnids) or (are_wnids and names != wnids):
            raise DataError(
                f"ReaL labels are for ImageNet's {len(wnids):,} classes in order, but these images have "
                f"{len(names):,} "
                f"({', '.join(names[:3])} ...)"
            )
        sets = read_real(root / REAL_PLACE if wanted == REAL else Path(wanted))
        labels[REAL] = padded_sets(by_validation_number(keys_of(source), sets))
    elif wanted not in ("", ORIGINAL):
        raise RecipeError(
            f"evaluation.labels = '{wanted}'",
            f"should be {ORIGINAL}, {REAL}, {OBJECTNET}, {RESTRICTED} or the path of a real.json",
        )
    return LabelRule(labels, _first(labels[ORIGINAL]), source.class_names, source.class_names)


def _first(labels: np.ndarray) -> np.ndarray:
    """Return the first label of each image, -1 for none."""
    return labels.reshape(len(labels), -1)[:, 0]


def check_found_classes(found: FoundWeights, names: Sequence[str]) -> None:
    """Check that the head's classes are those of the data. Raises CheckpointError."""
    stored = found.weights.meta.get("class_names") or []
    check_head_classes(found.path, found.weights.config, stored, names, is_scored=True)


def _among_imagenet(name: str, source: Source, found: FoundWeights) -> LabelRule:
    """Return the rule for images of ObjectNet, or of a part of ImageNet's classes.

    A class of ObjectNet is several of ImageNet's. Predictions are restricted to the classes of the images,
    except for `OBJECTNET`, as the authors of ObjectNet, ImageNet-A and ImageNet-R do.
    """
    names, labels = source.class_names, source.labels()
    wnids = [[each] if name == PART else imagenet_classes(each) for each in names]
    if not all(wnids):
        odd = names[wnids.index([])]
        raise DataError(
            f"class '{odd}' names no ImageNet classes: these are not the images of `vitctl data prepare "
            f"objectnet`"
        )
    numbers = {wnid: number for number, wnid in enumerate(class_list("imagenet"))}
    check_found_classes(found, tuple(numbers))
    sets = [[numbers[wnid] for wnid in of_class] for of_class in wnids]
    if name == OBJECTNET:
        return LabelRule({name: padded_sets(sets)[_first(labels)]}, _first(labels), names, tuple(numbers))
    return LabelRule(
        {name: labels},
        _first(labels),
        names,
        names,
        lambda logits: torch.stack([logits[:, numbers].amax(dim=1) for numbers in sets], dim=1),
    )


def corruption_errors(split: str, source: Source, right: np.ndarray) -> dict[str, Any]:
    """Return the error of each ImageNet-C corruption, and their mean relative to AlexNet's errors.

    Args:
        split: names entire corruptions, as `fog+snow`; any other split gives an empty result.
        right: bool `[N]`, whether each image is classified correctly.

    Returns:
        `corruption_errors`, 0 to 1; with all 15 of the benchmark also `mce`, 1 for AlexNet.

    Paper: arXiv 1903.12261, Section 4
    """
    names = [name.strip() for name in split.split("+")]
    parts = source.parts if isinstance(source, View) and source.parts else (source,)
    if not set(names) <= CORRUPTIONS.keys() or len(parts) != len(names):
        return {}
    ends = np.cumsum([len(part) for part in parts])[:-1]
    errors = {name: 1 - float(one.mean()) for name, one in zip(names, np.split(right, ends), strict=True)}
    ratios = [errors[name] / error for name, (_, error) in CORRUPTIONS.items() if error and name in errors]
    is_all = len(ratios) == sum(error is not None for _, error in CORRUPTIONS.values())
    return {"corruption_errors": errors} | ({"mce": float(np.mean(ratios))} if is_all else {})


def write_counts(run_dir: Path, rule: LabelRule, best: np.ndarray) -> dict[str, str]:
    """Write per_class.csv and confusion.csv from top-5 predictions, int64 `[N, 5]`. Return name -> path."""
    names, predictions = rule.class_names, rule.prediction_names
    counted = rule.classes >= 0
    counts = rule.count_by_class(best)
    scores = np.full((len(names), 3), np.nan)
    if rule.has_f1:
        scores = class_scores(rule.with_predictions(counts, best))
    by_class = zip(names, counts.tolist(), scores.tolist(), strict=True)
    tables: dict[str, list[Sequence[object]]] = {
        "per_class": [
            ("class", "images", "correct", "top5_correct", "accuracy", "precision", "recall", "f1"),
            *(
                (name, n, top1, top5, top1 / n if n else "", *("" if s != s else s for s in of_class))
                for name, (n, top1, top5), of_class in by_class
            ),
        ],
        "confusion": [
            ("class", "answer", "images"),
            *(
                (names[own], predictions[predicted], count)
                for own, predicted, count in count_confusions(best[counted], rule.classes[counted])
            ),
        ],
    }
    return {name: str(write_csv(run_dir / f"{name}.csv", rows)) for name, rows in tables.items()}


def check_evaluation(
    recipe: Evaluate, found: FoundWeights, source: Source
) -> tuple[LabelRule, np.ndarray, list[str]]:
    """Return the label rule, each class's threshold, and warnings; no tensor is read. Raises VitctlError."""
    _check_held_out(recipe.data.eval_split, recipe.data.group_by, found, source)
    scoring = recipe.evaluation
    cautions = check_place(Path(scoring.answers)) if scoring.answers else []
    rule = choose_label_rule(scoring.labels, source, found, Path(recipe.data.root))
    if empty := [name for name in rule.class_names if name not in source.class_names]:
        shown = ", ".join(map(one_line, empty[:_MOST_NAMED])) + ", ..." * (len(empty) > _MOST_NAMED)
        cautions.append(
            f"{len(empty):,} of the {len(rule.class_names):,} classes of the weights have no image here: "
            f"{shown}; mean_per_class leaves them out, and f1 those that are never predicted"
        )
    if scoring.fit_temperature:
        cautions += _check_fit(recipe.data.eval_split, found, source, rule)
    thresholds = read_thresholds(scoring.thresholds, rule)
    if scoring.thresholds:
        cautions += _check_thresholds(Path(scoring.thresholds), source)
    return rule, thresholds, cautions


def evaluate(
    recipe: Evaluate,
    run_dir: Path,
    report: Report = silent,
    stop: StopFlag | None = None,
    inputs: Inputs | None = None,
) -> RunResult:
    """Score weights.source on data.eval_split, with the pre-processing stored with the weights.

    Args:
        run_dir: gets log.jsonl, per_class.csv and confusion.csv; the caller writes result.json.

    Returns:
        the accuracies and their counts, under the data's labels and under evaluation.labels.

    Raises:
        CheckpointError: the head has other classes than the data, or is all zeros.
        DataError: an image was not counted exactly once, or evaluation.labels is for other images.
        Stopped: a signal arrived.

    Paper: Section 4.1; Appendix D.9 (ObjectNet)
    """
    found = scored_weights(recipe)
    source = (inputs or open_inputs(recipe, run_dir)).scored
    assert source is not None
    if not found.weights.has_head:
        raise no_head(found.path)
    rule, thresholds, cautions = check_evaluation(recipe, found, source)
    trained_on, warning = (
        (0, "") if recipe.evaluation.fit_temperature else _trained_on(found, source, recipe.data.path)
    )
    cautions.append(warning)
    run = start_run(recipe, run_dir, report, stop, source)
    runtime, journal = run.runtime, run.journal
    check_found(runtime, found, [source])
    meta = found.weights.meta
    transform = stored_eval_transform(recipe, meta)
    model, _ = loaded_model(found, transform.image_size, runtime.dtype)
    if not meta.get("class_names"):
        found = replace(found, assumed={**found.assumed, "classes": "in the order of the data"})
    temperature = 1.0 if recipe.evaluation.fit_temperature else meta.get("temperature") or 1.0
    found.log(journal, f"temperature {temperature:.4g}" if temperature != 1 else "", str(transform))
    journal.say("warning", *unseen_pixels(model.config), *cautions)
    look = ImagePass(run, recipe, transform, meta)
    model = on_device(model, runtime)
    kernel = choose_attention(model, recipe.machine, runtime, images=len(source))
    rows, fitted = _answered(look, recipe, found, model, source, rule)
    best, likely = np.split(rows, [min(TOP_K, len(rule.prediction_names))], axis=1)
    best = best.astype(np.int64)
    files: dict[str, str] = {}
    of_sets: dict[str, Any] = {}
    digest = ""
    if rule.has_label_sets:
        of_sets = label_set_scores(likely, rule.truth, thresholds)
        rows = np.concatenate([best, np.take_along_axis(likely, best, axis=1)], axis=1)
    is_softmax = activation_of(meta, model.config.num_classes) == "softmax"
    metrics = _metrics(rule, best, rows if is_softmax else None)
    first, *others = metrics
    metrics[first] |= of_sets | corruption_errors(recipe.data.eval_split, source, _right(rule, best))
    for name, numbers in metrics.items():
        journal.write("evaluate", step=0, labels=name, **numbers)
    if runtime.is_main:
        files = write_counts(run_dir, rule, best)
        if rule.has_label_sets:
            files |= _write_thresholds(run_dir, rule, likely)
        if recipe.evaluation.answers:
            digest = _write_answers(Path(recipe.evaluation.answers), run_dir, source, rule, rows, files)
        files |= {"temperature": fitted.write(found.path)} if fitted else {}
    told = {
        "group_by": recipe.data.group_by,
        "flip_average": recipe.evaluation.flip_average,
        "answers_sha256": digest,
        "trained_on": trained_on,
        "temperature_sha256": fitted.data_sha256 if fitted else meta.get("temperature_sha256"),
    }
    if (temperature := fitted.temperature if fitted else meta.get("temperature") or 1.0) != 1:
        told["temperature"] = temperature
    return RunResult(
        "evaluate",
        "done",
        metrics=metrics[first] | {name: metrics[name] for name in others},
        provenance={
            **weights_scored(found),
            **computed(runtime, kernel, compiled=is_compiled(model)),
            **data_used(source, recipe.data.eval_split),
            **WHOLE,
            "labels": first,
            **shown(transform),
            **{name: value for name, value in told.items() if value},
            "mean": list(meta["mean"]),
            "std": list(meta["std"]),
        },
        files=files,
    )


def _answered(
    look: ImagePass, recipe: Evaluate, found: FoundWeights, model: Model, source: Source, rule: LabelRule
) -> tuple[np.ndarray, Temperature | None]:
    """Run the network on every image once; return the likeliest classes and `_columns`, `[N, 5 + C]`.

    Also returns the temperature fitted to these images, if evaluation.fit_temperature is set.
    """
    meta, journal, fits = found.weights.meta, look.run.journal, recipe.evaluation.fit_temperature
    temperature = meta.get("temperature") or 1.0
    columns = partial(
        _columns,
        truth=rule.single_labels,
        activation=activation_of(meta, model.config.num_classes),
        whole=rule.has_label_sets,
    )
    scored = partial(columns, temperature=temperature)
    table = look.through(
        top_predictions,
        "scoring",
        model,
        source,
        to_scores=rule.to_scores,
        to_columns=(lambda scores, *_: scores.double()) if fits else scored,
        flip_average=recipe.evaluation.flip_average,
    )
    if not fits:
        return table.numpy(), None
    answers, scores = table.tensor_split([min(TOP_K, len(rule.prediction_names))], dim=1)
    fitted: Temperature | None = None
    try:
        fitted = _fitted(recipe.data.eval_split, found, source, scores, rule.single_labels)
        temperature = fitted.temperature
        journal.write("temperature", step=0, **fitted.model_dump())
        text = f"{_CALIBRATED}; score other images for an independent number"
    except DataError as error:  # the accuracy does not depend on it
        text = f"{error}; no temperature was written, it stays {temperature:.4g}"
    journal.say("warning", text)
    every = columns(scores, answers.long(), torch.arange(len(scores)), temperature=temperature)
    return torch.cat([answers, every], dim=1).numpy(), fitted


def _metrics(rule: LabelRule, best: np.ndarray, rows: np.ndarray | None) -> dict[str, dict[str, Any]]:
    """Return the metrics under each set of labels; the main set also gets means over classes.

    Args:
        best: int64 `[N, 5]`, the top-5 predictions.
        rows: float64 `[N, 5 + ...]`, after `best` the answer's probability, and last the two columns of
            `image_losses`, for the calibration; None if the network has no softmax.
    """
    metrics = {}
    for name, labels in rule.labels.items():
        hits = count_hits(best, labels)
        metrics[name] = {
            "accuracy": hits.accuracy,
            "correct": hits.correct,
            "total": hits.total,
            "top5_accuracy": hits.top5,
            "top5_correct": hits.correct_top5,
            "accuracy_interval": wilson(hits.correct, hits.total),
            "top5_interval": wilson(hits.correct_top5, hits.total),
            **baselines(labels, len(rule.prediction_names)),
        }
    main, right = next(iter(metrics.values())), _right(rule, best)
    by_class, counted = rule.count_by_class(best), rule.classes >= 0
    main["mean_per_class"] = mean_per_class(by_class)
    if rule.has_f1:
        main |= macro_scores(rule.with_predictions(by_class, best))
    intervals = bootstrap(rule.classes[counted], best[counted, 0], right[counted])
    main |= {f"{mean}_interval": interval for mean, interval in intervals.items() if mean in main}
    if rule.single_labels is not None and rows is not None:
        main |= calibration(rows[counted, best.shape[1]], right[counted], rows[counted, -2:])
    return metrics


def _right(rule: LabelRule, best: np.ndarray) -> np.ndarray:
    """Return bool `[N]`: whether each top-1 prediction is right under the main labels."""
    return correct_predictions(best, rule.main)[:, 0]


def _columns(
    scores: Tensor,
    answers: Tensor,
    samples: Tensor,
    *,
    truth: Tensor | None,
    activation: Activation,
    temperature: float,
    whole: bool,
) -> Tensor:
    """Return each answer's probability, the true class's and `image_losses`, float64 `[B, 5 + 3]`.

    Without single labels `truth` only the answers' probabilities; if `whole`, those of all classes instead.
    """
    shares = probabilities(scores, activation, temperature)
    if whole:
        return shares
    if truth is None:
        return shares.gather(1, answers)
    classes = truth[samples.clamp(min=0)].clamp(min=0).to(scores.device)
    own = shares.gather(1, torch.cat([answers, classes[:, None]], dim=1))
    return torch.cat([own, image_losses(scores.double() / temperature, classes)], dim=1)


def read_thresholds(path: str, rule: LabelRule) -> np.ndarray:
    """Return each class's decision threshold, float64 `[K]`, from a thresholds.csv; 0.5 without a file.

    Raises DataError if the file has other classes, or images have one label each.
    """
    names = list(rule.prediction_names)
    if not path:
        return np.full(len(names), 0.5)
    if not rule.has_label_sets:
        raise DataError("evaluation.thresholds is for images with several labels each", fix="leave it out")
    text = read_bytes(Path(path), limits.TABLE, error=DataError).decode("utf-8-sig", errors="replace")
    try:
        rows = {same_name(row["class"]): float(row["threshold"]) for row in csv.DictReader(io.StringIO(text))}
    except (KeyError, TypeError, ValueError):
        raise DataError(path, "should have the columns class and threshold, with a number each") from None
    if list(rows) != names:
        raise DataError(path, f"should have the {len(names)} classes of the weights, in their order")
    if odd := [name for name, threshold in rows.items() if not 0 <= threshold <= 1]:
        raise DataError(path, f"the threshold of {one_line(odd[0])} should be a probability, 0 to 1")
    return np.array([*rows.values()])


def _check_thresholds(file: Path, source: Source) -> list[str]:
    """Refuse thresholds that were chosen on some of these images; warn if that is unknown."""
    chosen, count = read_result(file.parent), None
    if chosen is not None and chosen.provenance.get("data_sha256") == source.digest:
        count = len(source)
    elif chosen is not None:
        with suppress(VitctlError, OSError):
            recipe = at_start(load_recipe(str(file.parent / RECIPE)).recipe, file.parent)
            theirs = open_inputs(recipe, file.parent).scored
            if theirs is not None and theirs.digest == chosen.provenance.get("data_sha256"):
                count = shared_samples(source, theirs)
    if count:
        raise DataError(
            file,
            f"its thresholds were chosen by {count:,} of these {len(source):,} images, which test "
            "them no longer",
            "score others with --split",
        )
    unknown = f"{file}: it is unknown which images chose its thresholds; images that did test them no longer"
    return [unknown] if count is None else []


def _write_thresholds(run_dir: Path, rule: LabelRule, likely: np.ndarray) -> dict[str, str]:
    """Write each class's threshold with the best F1 on these images."""
    precise, best = average_precisions(likely, rule.truth), best_thresholds(likely, rule.truth)
    rows = zip(rule.prediction_names, best.tolist(), precise.tolist(), strict=True)
    table = [(name, threshold, "" if ap != ap else ap) for name, threshold, ap in rows]
    path = write_csv(run_dir / "thresholds.csv", [("class", "threshold", "average_precision"), *table])
    return {"thresholds": str(path)}


def _write_answers(
    file: Path, run_dir: Path, source: Source, rule: LabelRule, rows: np.ndarray, files: dict[str, str]
) -> str:
    """Write the answer to every image, in the split's order, and suspects.csv if images have single labels.

    `rows` are float64 `[N, 2 A + C]`, the most likely classes and `_columns`. Adds name -> path to `files`.
    Returns the answers' digest.
    """
    half, truth = min(TOP_K, len(rule.prediction_names)), rule.main
    names, single = rule.prediction_names, rule.single_labels is not None
    table = [
        (
            sample_key(source, sample),
            joined(names[label] for label in np.atleast_1d(truth[sample]) if label >= 0),
            joined([names[int(row[0])]]),
            row[half],
            row[half] - (row[half + 1] if half > 1 else 0.0),
            row[2 * half] if single else None,
        )
        for sample, row in enumerate(rows.tolist())
    ]
    files["answers"] = str(file.absolute())
    if single:
        likely, own = rows[:, half], rows[:, 2 * half]
        found = suspected_labels(truth, own, rows[:, 0].astype(np.int64), likely)
        suspects = [(*table[n][:4], likely[n] - own[n], own[n]) for n in found.tolist()]
        files["suspects"] = str(write_csv(run_dir / SUSPECTS, [COLUMNS, *suspects]))
    return write_answers(file.absolute(), table)


class _Training(NamedTuple):
    """The run that trained some weights; `is_same`: its images are still those that it was trained on."""

    run: Path
    recipe: Pretrain | Finetune
    train: Source
    is_same: bool


def _training_of(weights: str, moved: str = "") -> _Training | None:
    """Return the training of the weights; None if no run made them.

    `moved` is where its images may be, if they are gone.
    """
    run, recipe = training_of(weights)
    if recipe is None:
        return None
    result = read_result(run)
    try:
        train = open_train(recipe.data, run / "data")
    except DataError:
        if not moved:
            raise
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"path": moved})})
        train = open_train(recipe.data, run / "data")
    is_same = result is None or result.provenance.get("train_sha256") == train.digest
    return _Training(run, recipe, train, is_same)


def num_trained_on(weights: str, sources: Sequence[Source]) -> int:
    """Return how many images the run of these weights was trained on; 0 if the run or its images are gone."""
    with suppress(VitctlError, OSError, BadSample):
        training = _training_of(weights)
        if training is not None and training.is_same:
            return sum(_num_same(training.train, source) for source in sources)
    return 0


def _num_same(train: Source, source: Source) -> int:
    """Return how many images of a source are training images, by their place, or by their content if these
    are not too many to read.
    """
    if (count := shared_samples(train, source)) or len(train) + len(source) > _MOST_READ:
        return count
    held = [*_held(source)]
    sizes = {size for _, size in held}
    known = {hashlib.sha256(read()).digest() for read, size in _held(train) if size in sizes}
    return sum(hashlib.sha256(read()).digest() in known for read, _ in held if known)


def _held(source: Source) -> Iterator[tuple[Callable[[], bytes], int]]:
    """Yield each image that is on this machine, as a function that reads it, and its bytes."""
    for store, rows, _ in stored(source):
        for row in range(len(store)) if rows is None else rows.tolist():
            if isinstance(store, ShardSource) and not store.index.is_remote:
                yield partial(store.read, row), int(store.index.rows[row]["size"])
            elif isinstance(store, ImageFiles) and Path(store.names[row]).is_file():
                yield partial(store.read, row), Path(store.names[row]).stat().st_size


def _trained_on(found: FoundWeights, source: Source, place: str) -> tuple[int, str]:
    """Return how many of these images the run of the weights was trained on, and a warning of these, or of
    images that its checkpoint was chosen by; 0 and "" if its images are gone.
    """
    with suppress(VitctlError, OSError, BadSample):
        training = _training_of(found.path, place)
        if training is not None and training.is_same and len(training.train) <= _MOST_COMPARED:
            run, data = training.run, training.recipe.data
            if count := _num_same(training.train, source):
                return count, (
                    f"{run} was trained on {count:,} of these {len(source):,} images: the score says little "
                    f"about others"
                )
            if found.chosen.how == "best" and data.eval_split:
                chosen_by = open_recipe_split(data, data.eval_split, run / "data")
                if count := shared_samples(chosen_by, source):
                    return 0, (
                        f"{run} chose this checkpoint by {count:,} of these {len(source):,} images: the "
                        f"score looks better than that of new images"
                    )
    return 0, ""


def _check_fit(split: str, found: FoundWeights, source: Source, rule: LabelRule) -> list[str]:
    """Refuse to fit a temperature that would be meaningless or could not be stored. Return warnings.

    It needs a softmax, single labels, images outside the training set, and a local weights file.
    """
    key = "evaluation.fit_temperature"
    refuse(
        DataError,
        (
            rule.single_labels is None
            or activation_of(found.weights.meta, found.weights.config.num_classes) != "softmax",
            key,
            "is for a softmax and one label per image",
            "leave it out",
        ),
        ("://" in found.path, key, f"{found.path} is an address", "give a copy of the file"),
    )
    old: object = stored_temperature(found.path, lambda: found.weights.digest)
    if old is None and (stored := found.weights.meta.get("temperature")):
        old = f"temperature {stored:.4f}, stored in the weights"
    replaced = [f"an earlier fit would be replaced: {old}"] if old else []
    training = _training_of(found.path)
    if training is None:
        return [*([_FIT_OF_SCORED] if split.startswith("test") else []), *replaced]
    run, recipe, train, is_same = training
    if not is_same:
        raise DataError(
            key,
            f"the training images of {run} are no longer those that it was trained on, so that "
            "these could be some of them",
            "bring them back",
        )
    if count := shared_samples(train, source):
        raise DataError(
            key,
            f"{run} was trained on {count:,} of these {len(source):,} images",
            f"name others with --split; {HELD_OUT}",
        )
    data = recipe.data
    scored = open_recipe_split(data, data.eval_split, run / "data") if data.eval_split else None
    is_test = scored is not None and not recipe.evaluation.select_best and shared_samples(scored, source)
    return [*([_FIT_OF_SCORED] if is_test else []), *replaced]


def _fitted(
    split: str, found: FoundWeights, source: Source, scores: Tensor, truth: Tensor | None
) -> Temperature:
    """Return the temperature of scores `[N, K]`, and the mean loss without and with it."""
    assert truth is not None
    temperature = fit_temperature(scores, truth)
    before, after = (image_losses(scores / t, truth)[:, 0].mean().item() for t in (1.0, temperature))
    return Temperature(
        temperature=temperature,
        weights_sha256=found.weights.digest,
        split=split,
        data_sha256=source.digest,
        images=len(source),
        nll_before=before,
        nll_after=after,
    )


def _check_held_out(split: str, group_by: str, found: FoundWeights, source: Source) -> None:
    """Refuse a sub-split that the run scored too, but on other images: some may be training images."""
    run = run_of(Path(found.path))
    trained = read_result(run) if (run / RECIPE).is_file() else None
    used = trained.provenance if trained is not None else {}
    if "[" in split and used.get("split") == split and used.get("data_sha256") != source.digest:
        whole, grouped = split.partition("[")[0], used.get("group_by", "")
        if grouped != group_by:
            raise DataError(
                f"data.group_by = '{group_by}'", f"{run} held out {split} with '{grouped}'", "give that value"
            )
        raise DataError(
            f"data.eval_split = '{split}'",
            f"{run} held out this part of other shards, and may have been trained on some of these images",
            f"give the data that it was trained on, or score all of another set with --split {whole}",
        )
