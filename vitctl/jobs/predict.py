"""Predict the classes and features of unlabelled images; `load_classifier` does the same in Python."""

import json
import os
import warnings as python_warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitctl.data.images.decode import BadSample, from_pillow
from vitctl.data.images.transforms import open_for
from vitctl.data.source.stores import ImageFiles
from vitctl.data.source.views import Source, numbered_as
from vitctl.engine.evaluation import most_likely
from vitctl.engine.metrics import correct_predictions, label_sets
from vitctl.engine.runtime import num_workers
from vitctl.errors import CheckpointError, DataError, RecipeError, explaining, refuse
from vitctl.jobs.inputs.classifier import (
    Answers,
    OpenClassifier,
    Outputs,
    Ranking,
    check_finite,
    open_classifier,
)
from vitctl.models.weights.containers import save_tensors
from vitctl.models.weights.meta import no_head
from vitctl.recipe.load import load_recipe
from vitctl.recipe.schema import Evaluate
from vitctl.system.files import atomic_write
from vitctl.system.text import count_text, escaped_json, printable, same_name

FORMAT = "vitctl-embeddings/1"
_DIGEST_BYTES = 32
GivenImage = str | Path | Image.Image | NDArray[np.uint8]


@dataclass(frozen=True)
class Prediction:
    """The prediction for one image.

    Args:
        name: its path, its address, or its key in a shard.
        error: why the image cannot be used; "" if it can.
        is_right: whether the most likely class matches the label or the folder; None if neither is known.
    """

    name: str
    classes: Ranking
    error: str = ""
    is_right: bool | None = None

    def json(self) -> str:
        """Return the record of `vitctl predict --format jsonl`, without a line break."""
        classes = [{"class": label, "probability": p} for label, p in self.classes]
        record = {"image": self.name, "classes": classes}
        record |= {"error": self.error} if self.error else {}
        return escaped_json(json.dumps(record, ensure_ascii=False))


def predict(
    recipe: Evaluate,
    sources: Sequence[Source],
    *,
    top: int = 5,
    threshold: float = 0.0,
    features: Path | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> Iterator[list[Prediction]]:
    """Yield the most likely classes of images, computed as `vitctl evaluate` computes them.

    Args:
        recipe: checked; its data names no images.
        sources: the images, see `find_images`.
        top: maximum number of classes per image.
        threshold: lowest probability to include, 0 to 1.
        features: file for the features of all images, see `Embeddings`; allows weights without a head.
        note: called with lines that name the weights, and with warnings.

    Yields:
        the predictions of each batch, in order, as soon as they are computed.

    Raises:
        CheckpointError: there are no such weights, or they do not predict classes.
        DataError: logits are NaN or infinite.

    Paper: Section 3.1
    """
    count, total = 0, sum(map(len, sources))
    opened = open_classifier(recipe, needs_head=features is None, note=note, images=total)
    if features is not None and not opened.network.has_features:
        raise CheckpointError(opened.path, "has no features output", "use the run that it was exported from")
    note(f"weights: {opened.path} ({opened.text})")
    if total > 1:  # of one image nobody takes the accuracy
        from vitctl.jobs.evaluate import num_trained_on

        count = num_trained_on(opened.path, sources)
    trained = f"the network was trained on {count:,} of these {count_text(total, 'image')}" if count else ""
    for text in filter(None, (*opened.warnings, trained)):
        note(f"warning: {text}")
    embeddings = Embeddings(features, total) if features is not None else None
    workers = num_workers(recipe.machine, opened.network.device, 1)
    for source in sources:
        truth, done = known_classes(source, opened.class_names), 0
        for answers in opened.answers(
            source,
            batch_size=recipe.evaluation.batch_size,
            workers=workers,
            with_features=embeddings is not None,
        ):
            if embeddings is not None:
                embeddings.add(answers)
            classes: list[Ranking] = [[]] * len(answers.names)
            right: list[bool | None] = [None] * len(answers.names)
            labels = truth[done : (done := done + len(right))]
            if answers.logits is not None:
                classes = opened.rankings(answers.logits, top, threshold)
                if labels.max() >= 0:
                    right = _right(answers.logits, labels)
            yield [
                Prediction(name, [], error) if error else Prediction(name, own, is_right=hit)
                for name, error, own, hit in zip(answers.names, answers.errors, classes, right, strict=True)
            ]
    if embeddings is not None:
        embeddings.write(opened)


def _right(logits: Tensor, labels: np.ndarray) -> list[bool | None]:
    """Return whether each image's most likely class is right; None for images without a label."""
    hits = correct_predictions(most_likely(logits, 1).numpy(), labels)[:, 0]
    known = labels.max(axis=1) >= 0
    return [bool(hit) if is_known else None for hit, is_known in zip(hits, known, strict=True)]


def known_classes(source: Source, class_names: Sequence[str]) -> np.ndarray:
    """Return the true classes of images, int64 `[N, L]`, padded with -1; an unknown class is -1, too.

    Shards have labels if their classes are among the classifier's. An image in a folder tree has the class
    that `arrange` gives it, as in `vitctl evaluate`. A file given by name has the class its folder is named
    after, unless a folder further up is named after another class. `class_names` are in the order of the
    logits.
    """
    if isinstance(source, ImageFiles):
        numbers = {name: number for number, name in enumerate(class_names)}
        known = []
        for name, of_class in zip(source.names, source.classes, strict=True):
            folders = [same_name(folder) for folder in Path(name).parts[:-1]]
            is_clear = len({*folders} & numbers.keys()) == 1
            own = of_class if of_class is not None else folders[-1] if is_clear else ""
            known.append([numbers.get(own, -1)])
        return np.array(known, np.int64)
    source = numbered_as(source, class_names)
    is_same = class_names and tuple(source.class_names) == class_names
    return label_sets(source.labels()) if is_same else np.full((len(source), 1), -1)


def _format_of(path: Path) -> str:
    try:
        with safe_open(path, framework="pt") as file:
            return str((file.metadata() or {}).get("format", ""))
    except (SafetensorError, OSError):
        return ""


class Embeddings:
    """The features of images, written as one safetensors file when all are computed.

    The file holds `features` float32 [N, R]; `sha256` uint8 [N, 32], the digests of the encoded images; and
    `names` uint8, the names in UTF-8, separated by NUL bytes. Unusable images are left out; `most` is the
    maximum number.
    """

    def __init__(self, path: Path, most: int) -> None:
        refuse(
            RecipeError,
            (
                path.suffix != ".safetensors" or path.is_dir(),
                f"--features {path}",
                "should be the name of a .safetensors file",
            ),
            (
                os.path.lexists(path) and _format_of(path) != FORMAT,
                f"--features {path}",
                "already exists and holds no features",
                "choose another name",
            ),
            (
                not path.parent.is_dir(),
                f"--features {path}",
                f"there is no folder {path.parent}",
                "make it first",
            ),
        )
        self.path, self._most, self._names = path, most, list[bytes]()
        self._features = torch.empty(0, 0)
        self._digests = torch.empty(most, _DIGEST_BYTES, dtype=torch.uint8)

    def add(self, answers: Answers) -> None:
        assert answers.features is not None
        if not self._features.numel():
            self._features = torch.empty(self._most, answers.features.shape[1])
        for row, (name, error) in enumerate(zip(answers.names, answers.errors, strict=True)):
            if not error:
                self._features[len(self._names)] = answers.features[row]
                digest = bytearray.fromhex(answers.digests[row])
                self._digests[len(self._names)] = torch.frombuffer(digest, dtype=torch.uint8)
                self._names.append(name.encode("utf-8", "surrogateescape"))

    def write(self, opened: OpenClassifier) -> None:
        """Write the file atomically. Raises DataError if none of the images can be used."""
        count = len(self._names)
        if not count:
            raise DataError(self.path, "not written, because none of the images can be used")
        names = torch.frombuffer(bytearray(b"\0".join(self._names)), dtype=torch.uint8)
        tensors = {"features": self._features[:count], "sha256": self._digests[:count], "names": names}
        about = {
            "format": FORMAT,
            "weights": printable(opened.path),
            **opened.digests,
            "preprocessing": json.dumps(asdict(opened.transform)),
        }
        with atomic_write(self.path) as aside:
            save_tensors(tensors, aside, about)


class Classifier:
    """A trained classifier of images; `load_classifier` makes one."""

    def __init__(self, opened: OpenClassifier, top: int, batch_size: int) -> None:
        self._opened, self._top = opened, top
        self._batch_size = 1 if opened.network.resizes else batch_size  # photographs differ in size

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return the warnings of `vitctl predict` for these weights, one per line."""
        return self._opened.warnings

    @property
    def class_names(self) -> tuple[str, ...]:
        """Return the names in the order of the logits; empty if the weights have none."""
        return self._opened.class_names

    @overload
    def __call__(self, images: GivenImage) -> Ranking: ...  # type: ignore[overload-overlap]

    @overload
    def __call__(self, images: Sequence[GivenImage]) -> list[Ranking]: ...

    def __call__(self, images: GivenImage | Sequence[GivenImage]) -> Ranking | list[Ranking]:
        """Return the most likely classes as (name, probability), the most likely first: one list per image.

        Args:
            images: one image or several: a path or address, a Pillow image of any size and mode, or a uint8
                array `[H, W, 3]`. Photographs are rotated upright if the weights say so.

        Raises:
            VitctlError: an image cannot be decoded, or the weights have no head.
        """
        rankings = self._opened.rankings(self.logits(images), self._top)
        return rankings[0] if _is_one(images) else rankings

    @explaining()
    def logits(self, images: GivenImage | Sequence[GivenImage]) -> Tensor:
        """Return the logits `[N, K]` on the CPU; N is 1 for a single image. Raises as a call does."""
        if not self._opened.network.has_head:
            raise no_head(self._opened.path)
        found = (outputs.logits for outputs in self._outputs(images, with_features=False))
        return torch.cat([logits for logits in found if logits is not None])

    @explaining()
    def features(self, images: GivenImage | Sequence[GivenImage]) -> Tensor:
        """Return the classification layer's input, float32 `[N, R]`, on the CPU. Raises as a call does."""
        if not self._opened.network.has_features:
            raise CheckpointError(
                self._opened.path, "has no features output", "use the run that it was exported from"
            )
        found = (outputs.features for outputs in self._outputs(images, with_features=True))
        return torch.cat([features for features in found if features is not None])

    def _outputs(
        self, images: GivenImage | Sequence[GivenImage], *, with_features: bool
    ) -> Iterator[Outputs]:
        given: Any = images
        several: list[GivenImage] = [given] if _is_one(given) else list(given)
        if not several:
            raise DataError("images should be an image, or a list of images that is not empty")
        for begin in range(0, len(several), self._batch_size):
            batch = [
                self._shown(several, number)
                for number in range(begin, min(begin + self._batch_size, len(several)))
            ]
            shown = torch.stack(batch).contiguous(
                memory_format=torch.channels_last
            )  # the loader's memory format
            outputs = self._opened.network(shown, with_features=with_features)
            check_finite(outputs)
            yield outputs

    def _shown(self, images: Sequence[GivenImage], number: int) -> Tensor:
        transform, image = self._opened.transform, images[number]
        try:
            if isinstance(image, str | Path):
                picture = open_for(transform, ImageFiles([str(image)]).read(0))
            else:
                picture = from_pillow(_pillow(image), exif_orientation=transform.exif_orientation)
            return self._opened.shown(picture)
        except BadSample as error:
            raise DataError(f"image {number} of {len(images)}: {error}") from None


def _is_one(images: Any) -> bool:
    """Return whether it is a single image, or anything else that is not a list of images."""
    if isinstance(images, np.ndarray | Tensor):
        return images.ndim < 4
    return isinstance(images, str | bytes | Path | Image.Image) or not isinstance(images, Iterable)


def _pillow(image: Any) -> Image.Image:
    if isinstance(image, Image.Image):
        return image
    if not (isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.shape[2:] == (3,)):
        is_array = isinstance(image, np.ndarray)
        what = f"{image.dtype} {list(image.shape)}" if is_array else type(image).__name__
        raise BadSample("should be a path, a PIL.Image.Image or a NumPy array, uint8 [H, W, 3]", f"is {what}")
    return Image.fromarray(image)


def check_counts(**counts: int) -> None:
    """Raise RecipeError, naming the first argument that is not a whole number above 0."""
    for name, count in counts.items():
        if not isinstance(count, Integral) or count < 1:
            raise RecipeError(f"{name} = {count!r}", "should be a whole number, at least 1")


@explaining()
def load_classifier(
    source: str | Path,
    *,
    weights: str = "",
    model: str = "",
    image_size: int = 0,
    device: str = "auto",
    precision: str = "auto",
    top: int = 5,
    batch_size: int = 32,
) -> Classifier:
    """Load a trained classifier with its pre-processing and class names, to be called with images.

    It answers as `vitctl predict` does, except for damaged images that Pillow has already decoded.

    Example:
        from vitctl import load_classifier
        from PIL import Image

        classify = load_classifier("runs/mine")
        for name, probability in classify(Image.open("photo.jpg")):
            print(f"{probability:.1%} {name}")
        both = classify(["photo.jpg", Image.new("RGB", (640, 480))])  # one list per image
        logits = classify.logits("photo.jpg")
        features = classify.features(Image.open("photo.jpg"))

    Args:
        source: a run, a checkpoint, a weights file of any known program, its address, or a .onnx file written
            by `vitctl export`.
        weights: for a run: "last", "best" or a step; "ema" or "model" selects averaged weights or not. ""
            chooses as `vitctl evaluate` does.
        model: model name, e.g. "B/16", for what the shapes in a foreign file cannot tell.
        image_size: input width and height in pixels; 0 keeps the stored size.
        device: "auto" (a GPU if there is one), "cpu" or "cuda".
        precision: "auto" (bf16 if the device is fast at it), "bf16", "float32", "tf32" or "float64".
        top: maximum number of classes per image.
        batch_size: maximum number of images in one forward pass.

    Returns:
        a callable: an image (path, PIL image or uint8 NumPy array `[H, W, 3]`) to a list of (class name,
        probability), the most likely first; a list of images to a list of such lists.
        Its `class_names`; `warnings` about the weights, also issued as Python warnings; `logits(images)`,
        `[N, K]`; and `features(images)`, the input of the classification layer, `[N, R]`.

    Raises:
        VitctlError: the weights do not exist, are damaged or lack their pre-processing, or a value is
            invalid.

    Paper: Section 3.1
    """
    check_counts(top=top, batch_size=batch_size)
    values: dict[str, Any] = {
        "weights.source": str(source),
        "weights.which": weights,
        "weights.model": model,
        "data.image_size": image_size,
        "machine.device": device,
        "machine.precision": precision,
    }
    recipe = load_recipe("evaluate", [*values.items()]).recipe
    assert isinstance(recipe, Evaluate)
    opened = open_classifier(recipe, needs_head=False)
    for text in opened.warnings:
        python_warnings.warn(text, stacklevel=3)  # the caller's line, above `explaining`
    return Classifier(opened, top, batch_size)
