"""What jobs take in: splits, transforms, and the weights of an earlier run, from the words of a recipe."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from pydantic import ValidationError

from vitctl.data.catalog import synthetic
from vitctl.data.labels import check_labels
from vitctl.data.read import Source
from vitctl.data.splits import num_repeated
from vitctl.data.transforms import EvalTransform, TrainTransform
from vitctl.engine.mixing import Mixing
from vitctl.errors import CheckpointError, DataError, RecipeError
from vitctl.jobs import sampling
from vitctl.jobs.runs import RUNS, Chosen, choose_weights, newest_run
from vitctl.models.build import Model, build, load_state, resized, transfer
from vitctl.models.variants import downstream
from vitctl.models.weights.load import Weights, read_weights
from vitctl.models.weights.meta import check_told
from vitctl.recipe.images import Place, TrainImages
from vitctl.recipe.schema import Evaluate, ExportRecipe, Fewshot, Finetune, Vtab
from vitctl.recipe.sections import StartWeights

WeightsRecipe = Evaluate | ExportRecipe | Fewshot | Finetune | Vtab


def open_images(place: Place, split: str, run_dir: Path) -> Source:
    """A split of a recipe's [data]; sets that come with vitctl are written to RUN/data when they are nowhere else."""
    return sampling.open_images(place, split, run_dir / "data")


def open_scored(place: Place, split: str, run_dir: Path) -> Source:
    """The images of a score: each has a label, and comes once.

    Raises:
        DataError: data is missing, a label does not fit, or the expression takes an image twice.
    """
    source = open_images(place, split, run_dir)
    check_labels(source, split, "scoring")
    check_once(source, split)
    return source


def check_once(source: Source, split: str) -> None:
    """Raises DataError where a split expression takes an image twice: no score is of that."""
    if repeated := num_repeated(source):
        raise DataError(
            f"'{split}' takes {repeated:,} image(s) twice, and a score counts every image once; name parts that do not overlap"
        )


def open_training_images(
    data: TrainImages, run_dir: Path, *, needs_labels: bool = True
) -> tuple[Source, Source | None]:
    """The training split, and the split to score on (None: there is none, and the recipe names none).

    Args:
        data, run_dir: of the job.
        needs_labels: False for masked patch prediction, which looks at pixels alone.

    Raises:
        DataError: data is missing, the two splits have other classes, or labels do not fit.
    """
    if data.synthetic:
        return synthetic(data.synthetic, dataset=data.dataset, image_size=data.image_size), None
    train = sampling.open_train(data, run_dir / "data")
    scored = (
        data
        if data.path or data.dataset or not data.mixture
        else data.model_copy(update={"path": data.mixture[0].path})
    )
    check_labels(train, data.train_split, "training" if needs_labels else "pixels")
    test = (open_scored if needs_labels else open_images)(scored, data.eval_split, run_dir) if data.eval_split else None
    if test is not None and not needs_labels:
        check_labels(test, data.eval_split, "pixels")
    if test is not None and test.class_names != train.class_names:
        odd = sorted(set(train.class_names) ^ set(test.class_names))[:3]
        raise DataError(
            f"'{data.train_split}' has {len(train.class_names)} classes, '{data.eval_split}' {len(test.class_names)}, "
            f"and they are not the same{': ' + ', '.join(odd) if odd else ' in order'}; make both with one class list"
        )
    return train, test


def at_size(data: TrainImages, stored: int) -> TrainImages:
    """[data] with its image size: the recipe's, or the one stored with the weights where the recipe says 0.

    Raises:
        RecipeError: the recipe's crop has no room for the stored size.
    """
    try:
        return data if data.image_size else TrainImages(**{**data.model_dump(), "image_size": stored})
    except ValidationError as error:
        raise RecipeError("; ".join(str(detail["ctx"]["error"]) for detail in error.errors())) from None


def train_transform(data: TrainImages) -> TrainTransform:
    """Augmentation of a recipe's [data]."""
    return TrainTransform(
        data.image_size,
        crop=data.crop,
        flip=data.flip,
        resample=data.resample,
        resize=data.train_resize,
        decode=data.decode,
        randaugment_layers=data.randaugment_layers,
        randaugment_magnitude=data.randaugment_magnitude,
        exif_orientation=data.turns_upright,
        truncated=data.truncated,
    )


def mixing(data: TrainImages) -> Mixing:
    """How batches are blended, of a recipe's [data]."""
    return Mixing(data.mixup_alpha, data.cutmix_alpha)


def eval_transform(data: TrainImages) -> EvalTransform:
    """Evaluation pre-processing of a recipe's [data]."""
    return EvalTransform(
        data.image_size,
        method=data.eval_method,
        resize=data.eval_resize,
        resample=data.eval_resample or data.resample,
        exif_orientation=data.turns_upright,
        truncated=data.truncated,
    )


@dataclass(frozen=True)
class Found:
    """Weights, where they were found (a path, or the address as it was given), and which of a run's they are."""

    path: str
    weights: Weights
    chosen: Chosen = field(default_factory=Chosen)


def find_weights(source: str, runs: Path = RUNS, *, which: str = "", model: str = "", job: str = "") -> Found:
    """The weights that a recipe's [weights] means.

    Args:
        source: a weights file of any known format, a checkpoint folder, a run folder, an address, or "newest".
        runs: where "newest" looks for the newest finished run.
        which: of the weights of a run or of a checkpoint, see `choose_weights`.
        model: name of the model, for what a foreign file's shapes cannot tell.
        job: that takes them, which decides what "newest" is, see `newest_run`.

    Raises:
        CheckpointError: there are none; the message says where was looked.
    """
    if "://" in source:
        if which:
            raise CheckpointError(f"{source}: --weights {which}: this is one set of weights; leave --weights out")
        return _told(Found(source, read_weights(source, model=model or None)))
    place = newest_run(job, runs).folder if source == "newest" else Path(source)
    path, chosen = choose_weights(place, which)
    return _told(Found(str(path), read_weights(str(path), model=model or None), chosen))


def _told(found: Found, names: tuple[str, ...] = ("mean", "std")) -> Found:
    """The same weights, when what a job needs is stored beside them. Raises CheckpointError."""
    try:
        check_told(found.weights.meta, names)
    except CheckpointError as error:
        raise CheckpointError(f"{found.path}: {error}") from None
    return found


def scored_weights(recipe: Evaluate) -> Found:
    """What `find_weights` finds, when all of the pre-processing that a score needs is stored there. Raises CheckpointError."""
    return _told(weights_of(recipe), ("image_size", "eval_method", "eval_resize", "resample"))


def weights_of(recipe: WeightsRecipe) -> Found:
    """What `find_weights` finds for a recipe."""
    return find_weights(recipe.weights.source, which=recipe.weights.which, model=recipe.weights.model, job=recipe.job)


def loaded_model(found: Found, image_size: int, dtype: torch.dtype) -> tuple[Model, int]:
    """The stored model with its own head, and its image size.

    Args:
        found: weights.
        image_size: other than the stored one: the position embedding is resized; 0 keeps it.
        dtype: of the parameters.
    """
    weights = found.weights
    model = build(replace(weights.config, image_size=image_size or weights.config.image_size), dtype=dtype)
    state, _ = resized(model, weights.config, weights.state, weights.meta.get("position_resize", "zoom"))
    load_state(model, state)
    return model, model.config.image_size


def transferred_model(
    weights: Weights,
    wanted: StartWeights,
    *,
    num_classes: int,
    image_size: int,
    dropout: float,
    drop_path: float,
    seed: int,
    dtype: torch.dtype,
) -> tuple[Model, list[str]]:
    """The stored body under a new zero head for `num_classes`, or only its architecture with fresh weights.

    Returns:
        the model, and lines that say what was done.
    """
    target = downstream(
        weights.config, num_classes=num_classes, image_size=image_size, dropout=dropout, drop_path=drop_path
    )
    model = build(target, seed=seed, dtype=dtype)
    if wanted.initialise == "random":
        return model, [f"random weights (seed {seed}), the architecture alone is taken"]
    method = weights.meta.get("position_resize", "zoom")
    return model, transfer(model, weights.config, weights.state, method=method)
