"""The images that a job reads: splits and transforms, from a recipe."""

from pathlib import Path

from pydantic import ValidationError

from vitctl.data.datasets.catalog import synthetic
from vitctl.data.images.transforms import EvalTransform, TrainTransform
from vitctl.data.source.splits import num_repeated
from vitctl.data.source.views import Source, check_labels
from vitctl.engine.mixing import Mixing
from vitctl.errors import DataError, RecipeError
from vitctl.jobs.inputs import sampling
from vitctl.recipe.images import Place, TrainImages


def open_images(place: Place, split: str, run_dir: Path) -> Source:
    """A split of a recipe's [data]; data sets that come with vitctl are generated in RUN/data where they are
    missing.
    """
    return sampling.open_recipe_split(place, split, run_dir / "data")


def open_whole(place: Place, split: str, run_dir: Path) -> Source:
    """A split behind a score: remote shards are read whole through the cache, which verifies them, also with
    data.cache_gib = 0.
    """
    limit = place.cache_gib or Place.model_fields["cache_gib"].default
    return open_images(place.model_copy(update={"cache_gib": limit}), split, run_dir)


def open_scored(place: Place, split: str, run_dir: Path) -> Source:
    """The images of a score: each has a label, and occurs once.

    Raises:
        DataError: data is missing, a label does not fit, or the expression takes an image twice.
    """
    source = open_whole(place, split, run_dir)
    check_labels(source, split, "scoring")
    check_once(source, split)
    return source


def check_once(source: Source, split: str) -> None:
    """Raises DataError where a split expression takes an image twice: it cannot be scored."""
    if repeated := num_repeated(source):
        raise DataError(
            f"'{split}' takes {repeated:,} image(s) twice, and a score counts every image once; name parts "
            f"that do not overlap"
        )


def open_training_images(
    data: TrainImages, run_dir: Path, *, needs_labels: bool = True
) -> tuple[Source, Source | None]:
    """The training split, and the split to score on (None: there is none, and the recipe names none).

    Args:
        data, run_dir: of the job.
        needs_labels: False for masked patch prediction, which uses pixels only.

    Raises:
        DataError: data is missing, the two splits have different classes, or labels are invalid.
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
    test = (
        (open_scored if needs_labels else open_images)(scored, data.eval_split, run_dir)
        if data.eval_split
        else None
    )
    if test is not None and not needs_labels:
        check_labels(test, data.eval_split, "pixels")
    if test is not None and test.class_names != train.class_names:
        odd = sorted(set(train.class_names) ^ set(test.class_names))[:3]
        raise DataError(
            f"'{data.train_split}' has {len(train.class_names)} classes, '{data.eval_split}' "
            f"{len(test.class_names)}, "
            f"and they are not the same{': ' + ', '.join(odd) if odd else ' in order'}; make both with one "
            f"class list"
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
