"""How the program that a file is exported for resizes images, and how often that changes a prediction."""

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from vitctl.data.images.transforms import EvalTransform, TorchvisionTransform
from vitctl.data.loader.batches import eval_batches
from vitctl.data.source.views import Source, random_subset
from vitctl.engine.run_files import RECIPE
from vitctl.errors import DataError, VitctlError
from vitctl.jobs.inputs.sampling import open_recipe_split
from vitctl.jobs.inputs.weights import FoundWeights, run_of
from vitctl.recipe.images import TrainImages
from vitctl.recipe.load import load_recipe

_BATCH, _SECONDS = 16, 60.0
_READERS = {
    "hf": "transformers' image processor",
    "timm": "timm's transform",
    "onnx": "Pillow, with which most programs resize,",
    "pt2": "Pillow, with which most programs resize,",
    "torchvision": "torchvision's transform",
    "google": "the authors' code",
}
_WORDS = {
    "bilinear": "bilinear without antialias",
    "bilinear_antialias": "bilinear with antialias",
    "bicubic_antialias": "bicubic with antialias",
    "area": "area",
}


@dataclass(frozen=True)
class Resizing:
    """How another program pre-processes images, where that differs from the pre-processing that the weights
    are scored with.

    Args:
        note: one line for the user.
        changed: images whose prediction changes; None where that was not measured.
        total: images that it was measured on.
    """

    note: str
    changed: int | None
    total: int


def own_transform(meta: dict[str, Any]) -> EvalTransform:
    """The pre-processing that is stored with weights."""
    size = meta["image_size"]
    return EvalTransform(
        size,
        method=meta["eval_method"],
        resize=meta["eval_resize"] or size,
        resample=meta["resample"],
        exif_orientation=bool(meta.get("exif_orientation", False)),
    )


def their_transform(to: str, own: EvalTransform) -> EvalTransform:
    """The pre-processing of the program that reads an exported file, as far as its format can express it.

    Args:
        to: a format of export.to.
        own: of the weights.
    """
    antialias = own.resample if own.resample.endswith("_antialias") else "bilinear_antialias"
    plain = replace(
        own, method="square", resize=own.image_size, resample="bilinear"
    )  # same orientation: only the resizing is compared
    if to == "safetensors":
        return own
    if to == "google":
        return plain
    if to == "hf" or (to == "timm" and own.method == "square"):
        return replace(plain, resample=antialias)
    if to in ("timm", "torchvision") and (own.method == "shorter_side" or own.resize > own.image_size):
        return TorchvisionTransform(
            own.image_size, own.method, own.resize, antialias, exif_orientation=own.exif_orientation
        )
    return replace(own, resample=antialias)


class ResizingCheck:
    """Counts the predictions that another pre-processing changes, on images of the run that trained the
    model.
    """

    def __init__(
        self, found: FoundWeights, model: nn.Module, num_images: int, given: tuple[Source, str] | None = None
    ) -> None:
        """Nothing is read before it is needed.

        Args:
            found: the weights.
            model: of these weights, uint8 images [B, 3, S, S] to logits [B, K].
            num_images: maximum number of images; 0 for none.
            given: images that the user gives instead of those of the run, and their name.
        """
        self.found, self.model, self.num_images, self.given = found, model, num_images, given
        self._answers: dict[EvalTransform, Tensor] = {}

    def __call__(self, to: str) -> Resizing | None:
        """How images are resized by the reader of a format.

        Args:
            to: of export.to.

        Returns:
            None where it is the pre-processing that the weights are scored with, or where none is stored.
        """
        try:
            own = own_transform(self.found.weights.meta)
        except (KeyError, DataError):
            return None
        theirs = their_transform(to, own)
        if theirs == own:
            return None
        changed, total, where = None, 0, ""
        try:
            source, where = self._images()
            total = len(self._best(source, own))
            changed = int((self._best(source, theirs, total) != self._best(source, own)).sum())
        except VitctlError as error:
            where = str(error).splitlines()[0]
        measured = (
            f"how many predictions that changes was not measured: {where}"
            if changed is None
            else f"that changes {changed:,} of {total:,} predictions ({changed / total:.1%}) on {where}"
        )
        note = f"{_READERS[to]} resizes by {_in_words(theirs)}, these weights are scored by {_in_words(own)}; {measured}"
        return Resizing(note, changed, total)

    def _images(self) -> tuple[Source, str]:
        """Some of the images that the run scores, and their name.

        Raises VitctlError where they are not available.
        """
        if not self.num_images:
            raise DataError("export.check_images = 0")
        if not self.found.weights.has_head:
            raise DataError("the model has no head")
        if self.given is not None:
            source, where = self.given
            return random_subset(source, min(self.num_images, len(source)), 0), where
        path = self.found.path
        run = run_of(path)
        if run is None:
            raise DataError("the weights are not in a run folder, whose recipe would name its images")
        data = getattr(load_recipe(str(run / RECIPE)).recipe, "data", None)
        if not isinstance(data, TrainImages) or data.synthetic or not data.eval_split:
            raise DataError("the run scores no images")
        if data.mixture and not (data.path or data.dataset):
            data = data.model_copy(update={"path": data.mixture[0].path})
        if "://" in data.path:
            raise DataError(f"its images are not on this machine ({data.path})")
        source = open_recipe_split(data, data.eval_split, run / "data" if (run / "data").is_dir() else None)
        return random_subset(source, min(self.num_images, len(source)), 0), f"{data.eval_split} of {run}"

    @torch.inference_mode()
    def _best(self, source: Source, transform: EvalTransform, total: int = 0) -> Tensor:
        """The predictions for the first `total` images; when it is 0 for all, or for as many as the time
        limit allows.
        """
        if transform not in self._answers:
            end, answers = time.monotonic() + _SECONDS, []
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
    shape = f"shorter side {resize}" if transform.method == "shorter_side" else f"square {resize}"
    crop = f", centre {size}" if resize > size or transform.method == "shorter_side" else ""
    rounding = ", torchvision's rounding" if crop and isinstance(transform, TorchvisionTransform) else ""
    return f"{_WORDS[transform.resample]} ({shape}{crop}{rounding})"
