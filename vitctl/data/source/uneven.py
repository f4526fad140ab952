"""Uneven classes: a weight for each class in the loss, or balanced sampling of the classes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitctl.data.source.views import Source, label_shape, no_class
from vitctl.errors import RecipeError
from vitctl.system.text import count_text, same_name

ClassWeights = str | Mapping[str, float]  # "none", "balanced", "sqrt", or a number for each class name
_MOST_SHOWN, _CHUNK = 12, 2**20


@dataclass(frozen=True, eq=False)
class Correction:
    """The correction of uneven classes in a training.

    Args:
        key: of the recipe: "loss.class_weights" or "data.sampling".
        name: value of the key; "table" for a table.
        counts: training images of each class, int64 `[K]`.
        factors: float64 `[K]`: weights, or how often each image of a class is drawn in an epoch. Their mean
            over the training images is 1.
    """

    key: str
    name: str
    class_names: tuple[str, ...]
    counts: np.ndarray
    factors: np.ndarray

    @property
    def note(self) -> str:
        """One line for plan and log: images of each class x factor, the smallest class first."""
        order = np.argsort(self.counts, kind="stable").tolist()
        rows = [f"{self.class_names[c]} {self.counts[c]:,} x {self.factors[c]:.3g}" for c in order]
        if len(rows) > _MOST_SHOWN:
            rows = [*rows[: _MOST_SHOWN // 2], "...", *rows[-_MOST_SHOWN // 2 :]]
        what = "weight" if self.key == "loss.class_weights" else "how often each image is drawn in an epoch"
        return f"{self.key} = {self.name}; images of each class x {what}: {', '.join(rows)}"

    @property
    def used(self) -> dict[str, Any]:
        ends = {"smallest": int(self.counts.argmin()), "largest": int(self.counts.argmax())}
        factor = "weight" if self.key == "loss.class_weights" else "draws_per_epoch"
        rows = {
            end: {
                "class": self.class_names[c],
                "images": int(self.counts[c]),
                factor: float(self.factors[c]),
            }
            for end, c in ends.items()
        }
        return {self.key.partition(".")[2]: {"name": self.name, **rows}}


def correction(weights: ClassWeights, sampling: str, source: Source) -> Correction:
    """Return the correction of uneven classes for a training on `source`.

    balanced: n / (K n_c) for class c with n_c of the n images of K classes, as in scikit-learn's
    compute_class_weight; also the draws of each image in an epoch with balanced sampling. sqrt: its square
    root, and table: the given numbers, 1 for other classes, both scaled to a mean of 1 over the images.

    Raises:
        RecipeError: images may have several labels, a class has no image, or the table has an unknown class.
    """
    key = "data.sampling" if weights == "none" else "loss.class_weights"
    name = sampling if weights == "none" else weights if isinstance(weights, str) else "table"
    if label_shape(source):
        raise RecipeError(key, "needs one label per image, but these images may have several", "leave it out")
    names = source.class_names
    counts = sum(
        np.bincount(source.labels(np.arange(at, min(at + _CHUNK, len(source)))), minlength=len(names))
        for at in range(0, len(source), _CHUNK)
    )
    assert isinstance(counts, np.ndarray)
    if isinstance(weights, Mapping):
        table = {same_name(one): float(weight) for one, weight in weights.items()}
        for unknown in sorted(set(table) - set(names)):
            raise RecipeError(key, no_class(unknown, names))
        factors = np.array([table.get(one, 1.0) for one in names])
    else:
        empty = [one for one, count in zip(names, counts.tolist(), strict=True) if not count]
        if empty:
            shown = ", ".join(empty[:3]) + " ..." * (len(empty) > 3)
            raise RecipeError(
                f"{key} = '{name}'",
                f"{count_text(len(empty), 'class', 'classes')} without training images ({shown})",
                f"name the others in data.classes, or leave {key} out",
            )
        factors = len(source) / (len(names) * counts)
    factors = np.sqrt(factors) if name == "sqrt" else factors
    if name in ("sqrt", "table"):
        factors = factors * (len(source) / math.fsum((factors * counts).tolist()))
    return Correction(key, name, names, counts, factors)
