"""The answers of a run's classifier to its test images, if its weights and its data still exist."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from vitctl.data.source.views import Source, numbered_as, sample_key, subset
from vitctl.engine.evaluation import most_likely
from vitctl.engine.metrics import label_sets
from vitctl.errors import CheckpointError, DataError, refuse
from vitctl.jobs.inputs.classifier import OpenClassifier, TorchNetwork, open_classifier
from vitctl.jobs.inputs.data import open_recipe_split, scored_place
from vitctl.jobs.record.start_folder import at_start
from vitctl.models.flops import training_flops
from vitctl.recipe.load import Override, load_recipe
from vitctl.recipe.schema import Evaluate
from vitctl.recipe.write import toml_value
from vitctl.report.run_records import RunRecords

MOST_IMAGES = 1000
_FLOPS = {"cpu": 1e13, "cuda": 1e15}  # FLOPs for a run's answers if the user sets no number of images
_FEWEST, _BATCH, _TOP = 64, 64, 5
_TRAINING_PASSES = 3  # cost of forward and backward, in forward passes


@dataclass(frozen=True, eq=False)
class Answers:
    """Answers of a classifier.

    Args:
        source: the images of the split.
        rows: per image, the columns of an evaluation's answers; `sample`, its number in the split; and
            `best`, names and probabilities of its first classes.
        remark: how many images were classified, and whether the answers agree with the result.
    """

    source: Source
    rows: list[dict[str, Any]]
    split: str
    remark: str


def answer_split(run: RunRecords, most: int | None) -> Answers:
    """Run a finished run's classifier on its scored images: all of them, or evenly spaced ones.

    Args:
        most: number of images; None: as many as take little time, at most 1,000.

    Raises VitctlError if the weights or the data cannot be opened, or are not the result's.
    """
    recipe = _scoring(run)
    precision = {"precision": run.provenance.get("precision", "auto")}
    recipe = recipe.model_copy(update={"machine": recipe.machine.model_copy(update=precision)})
    scratch = run.folder / "data"  # where the run generated a data set that comes with vitctl
    source = open_recipe_split(recipe.data, recipe.data.eval_split, scratch if scratch.is_dir() else None)
    recorded = run.provenance.get("data_sha256")
    if recorded not in (None, source.digest):
        raise DataError(
            f"the images found for {toml_value(run.provenance.get('split', ''))} are not those of the result "
            f"(digest {source.digest[:12]}, recorded {str(recorded)[:12]})"
        )
    opened = open_classifier(recipe)
    source = numbered_as(source, opened.class_names)
    refuse(
        CheckpointError,
        (
            run.provenance.get("weights_sha256") not in (None, opened.digests.get("weights_sha256")),
            "the current weights are not those of the result",
        ),
        (
            opened.class_names and opened.class_names != tuple(source.class_names),
            opened.path,
            "its classes differ from those of the images",
        ),
    )
    number, names = min(most or _affordable(opened), len(source)), source.class_names
    samples = np.arange(number, dtype=np.int64) * len(source) // number
    shown = subset(source, samples) if number < len(source) else source
    labels, rows = label_sets(shown.labels()), list[dict[str, Any]]()
    for answers in opened.answers(shown, batch_size=min(_BATCH, len(shown)), workers=0):
        assert answers.logits is not None
        best = most_likely(answers.logits, _TOP)
        shares = opened.probabilities(answers.logits).gather(1, best).tolist()
        for name, error, first, likely in zip(
            answers.names, answers.errors, best.tolist(), shares, strict=True
        ):
            if error:
                raise DataError(f"a test image cannot be used: {name}: {error}")
            own, sample = labels[len(rows)], int(samples[len(rows)])
            rows.append(
                {
                    "sample": sample,
                    "path": sample_key(source, sample),
                    "truth": names[own[0]] if own[0] >= 0 else None,
                    "answer": names[first[0]],
                    "probability": likely[0],
                    "truth_probability": None,
                    "is_right": first[0] in own,
                    "best": [(names[one], share) for one, share in zip(first, likely, strict=True)],
                }
            )
    correct = sum(row["is_right"] for row in rows)
    return Answers(source, rows, recipe.data.eval_split, _remark(run, correct, len(shown), len(source)))


def _scoring(run: RunRecords) -> Evaluate:
    assert run.recipe is not None
    recipe: Any = at_start(run.recipe.recipe, run.folder)
    if isinstance(recipe, Evaluate):
        return recipe
    values = {**scored_place(recipe.data), "weights.source": str(run.folder)}
    loaded = load_recipe("evaluate", [Override(key, value, "report") for key, value in values.items()]).recipe
    assert isinstance(loaded, Evaluate)
    return loaded


def _affordable(opened: OpenClassifier) -> int:
    network = opened.network
    assert isinstance(network, TorchNetwork)
    flops = training_flops(network.model.config, 1) / _TRAINING_PASSES
    return max(_FEWEST, min(MOST_IMAGES, int(_FLOPS.get(network.device.type, _FLOPS["cpu"]) / flops)))


def _remark(run: RunRecords, correct: int, shown: int, whole: int) -> str:
    if shown < whole:
        return f"{shown:,} of the {whole:,} images, evenly spaced, {correct / shown:.2%} of them correct"
    recorded, labels = run.metrics.get("correct"), run.provenance.get("labels", "original")
    if isinstance(recorded, int) and recorded != correct and labels == "original":
        counted = f"{correct:,} of {shown:,} correct, while the result records {recorded:,}"
        return f"computed again for this page: {counted}"
    return f"all {shown:,} images, computed again for this page: {correct:,} correct, as in the result"
