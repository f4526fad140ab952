"""What a number depends on beside the recipe and the data: how it was computed, which weights, which
pre-processing.

Every job writes these into the provenance of its result; `vitctl compare` compares them (see
report/compare.py).
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from vitctl.data.images.transforms import EvalTransform
from vitctl.data.source.views import Source, source_text
from vitctl.engine.agreement import changed_on_purpose
from vitctl.engine.checkpoint import SavedCheckpoint, read_state
from vitctl.engine.computation import computed_training
from vitctl.engine.evaluation import Score
from vitctl.engine.journal import tensors_file
from vitctl.engine.metrics import baselines
from vitctl.engine.runtime import Runtime
from vitctl.jobs.inputs.data import eval_transform
from vitctl.jobs.inputs.weights import FoundWeights
from vitctl.jobs.record.result import RunResult, data_used
from vitctl.jobs.record.runs import choose_weights, logged_probes, logged_scores
from vitctl.models.weights.weights_file import weights_digest
from vitctl.recipe.images import TrainImages
from vitctl.recipe.schema import TrainRecipe
from vitctl.recipe.sections import StartWeights


def shown(transform: EvalTransform) -> dict[str, Any]:
    """The evaluation pre-processing, with `eval_resize` resolved."""
    return {
        "image_size": transform.image_size,
        "eval_method": transform.method,
        "eval_resize": transform.resize or transform.image_size,
        "resample": transform.resample,
        "exif_orientation": transform.exif_orientation,
        **({"truncated": transform.truncated} if transform.truncated != "refuse" else {}),
    }


def _network_digest(found: FoundWeights) -> str:
    """Digest of what makes two networks with the same tensors different: the configuration, and the
    normalisation of images.
    """
    meta = found.weights.meta
    described = [repr(found.weights.config), list(meta["mean"]), list(meta["std"])]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def weights_used(found: FoundWeights, section: StartWeights) -> dict[str, Any]:
    """Which pre-trained weights a result starts from."""
    return {
        "from": found.path,
        "from_sha256": found.weights.digest,
        **found.chosen.used("from"),
        "assumed": dict(found.assumed),
        "initialise": section.initialise,
    }


def weights_scored(found: FoundWeights) -> dict[str, Any]:
    """Which weights a result scores."""
    return {
        "weights": found.path,
        "weights_sha256": found.weights.digest,
        "network_sha256": _network_digest(found),
        **found.chosen.used("weights"),
        "assumed": dict(found.assumed),
    }


def trained(
    recipe: TrainRecipe,
    data: TrainImages,
    runtime: Runtime,
    train_on: Source,
    score_on: Source | None,
    meta: dict[str, Any],
) -> dict[str, Any]:
    """Provenance of the numbers of a training run, except its weights.

    Args:
        recipe, runtime: of the run.
        data: [data] with resolved values.
        train_on, score_on: images.
        meta: what is stored with the weights.
    """
    machine = recipe.machine
    own = {
        **computed_training(recipe, runtime),
        "compiled": machine.compile,
        "micro_batch": machine.micro_batch,
        "train_split": data.train_split,
        "train_sha256": train_on.digest,
        "train_source": source_text(train_on),
        "num_train": len(train_on),
    }
    if score_on is None:
        return own
    used = {**data_used(score_on, data.eval_split), "labels": "original", **shown(eval_transform(data))}
    return own | used | {"mean": list(meta["mean"]), "std": list(meta["std"])}


def training_result(
    recipe: TrainRecipe,
    runtime: Runtime,
    run_dir: Path,
    score: Score | None,
    used: dict[str, Any],
    scored: Source | None,
) -> RunResult:
    """The result of a finished training run: of the checkpoint that represents it, with its step and digest.

    Args:
        recipe, runtime, run_dir: of the run.
        score: of that checkpoint; None without images to score.
        used: its provenance, except the weights.
        scored: the images that were scored; None: there are none.

    Paper: Section 4.3 (early stopping)
    """
    if not runtime.is_main:
        return RunResult(recipe.job, "done", provenance=used)
    path, chosen = choose_weights(run_dir)
    metrics: dict[str, Any] = dict(score.numbers) if score else {}
    if scored is not None and score is not None:
        metrics |= baselines(scored.labels(), len(scored.class_names))
    if chosen.step is not None:
        metrics |= logged_probes(run_dir, chosen.step)
    if recipe.evaluation.select_best:
        step, last = max(logged_scores(run_dir).items())
        metrics["last"] = {"step": step, **last.numbers}
    state = read_state(path.parent)
    weights = {
        **chosen.used(),
        "weights_sha256": weights_digest(SavedCheckpoint(path.parent, state).tensors(path.stem)),
        "skipped_updates": state.get("num_skipped", 0),
        **changed_on_purpose(run_dir),
    }
    files = {file.stem: str(file) for file in sorted(path.parent.glob(tensors_file("*")))}
    return RunResult(recipe.job, "done", metrics=metrics, provenance=used | weights, files=files)
