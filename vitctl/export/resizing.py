"""Resizing by the program that reads an exported file, and how often it changes a prediction."""

import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitctl.data.images.transforms import EvalTransform, fill_colour
from vitctl.data.loader.batches import eval_batches
from vitctl.data.source.views import Source, random_subset
from vitctl.engine.journal import RECIPE
from vitctl.errors import DataError, VitctlError, refuse
from vitctl.jobs.inputs.data import open_recipe_split
from vitctl.jobs.inputs.weights import FoundWeights, run_of
from vitctl.jobs.record.start_folder import at_start
from vitctl.models.weights.meta import HALF
from vitctl.recipe.export_formats import ExportFormat, readers_transform
from vitctl.recipe.images import TrainImages
from vitctl.recipe.load import load_recipe

_BATCH, _SECONDS = 16, 60.0
_WORDS = {
    "bilinear": "bilinear without antialias",
    "bilinear_antialias": "bilinear with antialias",
    "bicubic_antialias": "bicubic with antialias",
    **{name: name for name in ("area", "lanczos", "box", "hamming", "nearest")},
}


class Resizing(NamedTuple):
    """Another program's pre-processing, where it differs from the one that scores the weights.

    `note` is a line for the user; `changed` of `total` predictions change, None if that was not measured.
    """

    note: str
    changed: int | None
    total: int


def stored_transform(meta: dict[str, Any]) -> EvalTransform:
    is_whole = meta["eval_method"] == "letterbox"
    return EvalTransform(
        meta["image_size"],
        method=meta["eval_method"],
        resize=meta["image_size"] if is_whole else meta["eval_resize"] or meta["image_size"],
        resample=meta["resample"],
        exif_orientation=bool(meta.get("exif_orientation", False)),
        fill=fill_colour(meta.get("mean") or HALF),
    )


class ResizingCheck:
    """Counts predictions that another pre-processing changes, on images of the training run; reads lazily.

    `num_images` is the maximum, 0 for none; `given` are the user's images, used instead, and their name.
    """

    def __init__(
        self, found: FoundWeights, model: nn.Module, num_images: int, given: tuple[Source, str] | None = None
    ) -> None:
        self.found, self.model, self.num_images, self.given = found, model, num_images, given
        self._answers: dict[EvalTransform, Tensor] = {}

    def __call__(self, row: ExportFormat) -> Resizing | None:
        """Return how a format's reader resizes images; None if as when scoring, or if that is not stored."""
        try:
            ours = stored_transform(self.found.weights.meta)
        except (KeyError, DataError):
            return None
        theirs = readers_transform(row, ours)
        if theirs == ours:
            return None
        changed, total = None, 0
        try:
            source, where = self._images()
            best = self._best(source, ours)
            total = len(best)
            changed = int((self._best(source, theirs, total) != best).sum())
            measured = f"that changes {changed:,} of {total:,} predictions ({changed / total:.1%}) on {where}"
        except VitctlError as error:
            reason = str(error).splitlines()[0]
            measured = f"how many predictions that changes was not measured: {reason}"
        how = f"{row.reader} resizes by {_in_words(theirs)}, these weights are scored by {_in_words(ours)}"
        return Resizing(f"{how}; {measured}", changed, total)

    def _images(self) -> tuple[Source, str]:
        """Return some of the images that the run scores, and their name. Raises VitctlError for none."""
        refuse(
            DataError,
            (not self.num_images, "export.check_images = 0"),
            (not self.found.weights.has_head, "the model has no head"),
        )
        source, where = self.given or self._images_of_run()
        return random_subset(source, min(self.num_images, len(source)), 0), where

    def _images_of_run(self) -> tuple[Source, str]:
        run = run_of(self.found.path)
        if run is None:
            raise DataError("the weights are not in a run folder, whose recipe would name its images")
        recipe = at_start(load_recipe(str(run / RECIPE)).recipe, run)
        data = getattr(recipe, "data", None)
        if not isinstance(data, TrainImages):
            what = f"the images of `vitctl {recipe.job}` are not opened here"
            raise DataError(what, fix="measure it with --check-data SHARDS")
        if data.synthetic or not data.eval_split:
            raise DataError("the run scores no images")
        if data.mixture and not (data.path or data.dataset):
            data = data.model_copy(update={"path": data.mixture[0].path})
        if "://" in data.path:
            raise DataError(f"its images are not on this machine ({data.path})")
        source = open_recipe_split(data, data.eval_split, run / "data" if (run / "data").is_dir() else None)
        return source, f"{data.eval_split} of {run}"

    @torch.inference_mode()
    def _best(self, source: Source, transform: EvalTransform, total: int = 0) -> Tensor:
        """Return predictions for the first `total` images, or for all (0) within the time limit."""
        if transform not in self._answers:
            end, answers = time.monotonic() + _SECONDS, list[Tensor]()
            for batch in eval_batches(
                source, transform, batch_size=_BATCH, rank=0, num_processes=1, num_workers=0
            ):
                answers.append(self.model(batch.images).argmax(1)[batch.weights > 0])
                if sum(map(len, answers)) >= total if total else time.monotonic() > end:
                    break
            self._answers[transform] = torch.cat(answers)
        return self._answers[transform]


def _in_words(transform: EvalTransform) -> str:
    size, resize = transform.image_size, transform.resize
    is_square = transform.method == "square"
    if transform.method == "letterbox":
        return f"{_WORDS[transform.resample]} (longer side {size}, letterbox)"
    shape = f"{'square' if is_square else 'shorter side'} {resize}"
    if not is_square or resize > size:
        theirs = transform.method in ("torchvision", "transformers")
        rounding = f", {transform.method}'s rounding" if theirs else ""
        shape += f", centre {size}{rounding}"
    return f"{_WORDS[transform.resample]} ({shape})"
