"""Which predictions are correct: by the labels of the data, the ReaL labels, or ObjectNet's rules."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitctl.data.datasets.readers.files import class_list
from vitctl.data.datasets.readers.imagenet import imagenet_classes
from vitctl.data.source.imagenet_real import label_sets, read_real
from vitctl.data.source.views import Source
from vitctl.engine.metrics import correct_predictions, count_by_class, count_confusions, padded_sets
from vitctl.errors import CheckpointError, DataError, RecipeError
from vitctl.jobs.inputs.weights import FoundWeights
from vitctl.system.tables import write_csv

REAL_PLACE = Path("imagenet_real") / "real.json"
ORIGINAL, REAL, OBJECTNET, RESTRICTED = "original", "real", "objectnet", "objectnet_restricted"
OF_OBJECTNET = (OBJECTNET, RESTRICTED)


@dataclass(frozen=True)
class LabelRule:
    """How predictions are made from logits, and which of them are correct.

    Args:
        labels: name of a set of labels -> int64 `[N]` or `[N, L]`, padded with -1; the first is the main one.
        classes: int64 `[N]`, the class of each image, for the counts by class: its first label where it has
            several, -1 where it has none and is not counted.
        class_names: of `classes`.
        prediction_names: of the classes that may be predicted.
        to_scores: logits `[B, K]` to the scores of the classes that may be predicted `[B, A]`.
    """

    labels: dict[str, np.ndarray]
    classes: np.ndarray
    class_names: Sequence[str]
    prediction_names: Sequence[str]
    to_scores: Callable[[Tensor], Tensor] = field(default=lambda logits: logits)

    def count_by_class(self, best: np.ndarray) -> np.ndarray:
        """Images, top-1 and top-5 hits of each class under the main labels, int64 `[K, 3]`, from predictions
        `[N, 5]`.
        """
        counted = self.classes >= 0
        right = correct_predictions(best, next(iter(self.labels.values())))[counted]
        return count_by_class(right, self.classes[counted], len(self.class_names))


def choose_label_rule(wanted: str, source: Source, found: FoundWeights, root: Path) -> LabelRule:
    """The rule that evaluation.labels names, for the images of a split.

    Args:
        wanted: as in the recipe.
        source: the images, as `open_scored` gives them.
        found: the classifier.
        root: folder of known data sets, where the ReaL labels are found.

    Raises:
        RecipeError: there are no such labels.
        DataError: the labels are for other images.
        CheckpointError: the head has other classes.
    """
    given = source.labels()
    classes = given.reshape(len(given), -1)[:, 0]
    if wanted in OF_OBJECTNET:
        return _objectnet(source, classes, found, restricted=wanted == RESTRICTED)
    check_head_classes(found, source.class_names)
    labels = {ORIGINAL: given}
    if wanted == REAL or wanted.endswith(".json"):
        check_imagenet(source)
        sets = read_real(root / REAL_PLACE if wanted == REAL else Path(wanted))
        labels[REAL] = padded_sets(label_sets(map(source.key, range(len(source))), sets))
    elif wanted not in ("", ORIGINAL):
        raise RecipeError(
            f"evaluation.labels = '{wanted}': should be {ORIGINAL}, {REAL}, {OBJECTNET}, {RESTRICTED} "
            "or the path of a real.json"
        )
    return LabelRule(labels, classes, source.class_names, source.class_names)


def check_imagenet(source: Source) -> None:
    """Raises DataError unless the classes are ImageNet's in their order, as far as their names tell."""
    names, wnids = source.class_names, class_list("imagenet")
    are_wnids = bool(set(names) & set(wnids))
    if len(names) != len(wnids) or (are_wnids and names != wnids):
        raise DataError(
            f"ReaL labels are for ImageNet's {len(wnids):,} classes in order, but these images have "
            f"{len(names):,} "
            f"({', '.join(names[:3])} ...)"
        )


def check_head_classes(found: FoundWeights, names: tuple[str, ...]) -> None:
    """Compare the classes of head and data: by name, or by number where the weights file has no names.

    Raises CheckpointError.
    """
    stored = found.weights.meta.get("class_names") or []
    num_classes = len(stored) or found.weights.config.num_classes
    if stored != list(names) if stored else num_classes != len(names):
        said = f" ({', '.join(stored[:3])} ...)" if stored else ""
        raise CheckpointError(
            f"{found.path}: its head has {num_classes} classes{said}, the data has {len(names)} "
            f"({', '.join(names[:3])} ...): the scores would be meaningless; fine-tune on this data first"
        )


def _objectnet(source: Source, classes: np.ndarray, found: FoundWeights, *, restricted: bool) -> LabelRule:
    wnids = [imagenet_classes(name) for name in source.class_names]
    if not all(wnids):
        odd = source.class_names[wnids.index([])]
        raise DataError(
            f"class '{odd}' names no ImageNet classes: these are not the images of `vitctl data prepare "
            f"objectnet`"
        )
    numbers = {wnid: number for number, wnid in enumerate(class_list("imagenet"))}
    check_head_classes(found, tuple(numbers))
    sets = [[numbers[wnid] for wnid in of_class] for of_class in wnids]
    if restricted:
        return LabelRule(
            {RESTRICTED: classes},
            classes,
            source.class_names,
            source.class_names,
            lambda logits: _highest(logits, sets),
        )
    return LabelRule({OBJECTNET: padded_sets(sets)[classes]}, classes, source.class_names, tuple(numbers))


def _highest(logits: Tensor, sets: Sequence[Sequence[int]]) -> Tensor:
    """The highest logit of each set of classes: `[B, K]` to `[B, A]`."""
    return torch.stack([logits[:, numbers].amax(dim=1) for numbers in sets], dim=1)


def write_counts(run_dir: Path, rule: LabelRule, best: np.ndarray) -> dict[str, str]:
    """Write per_class.csv and confusion.csv by the main labels; returns name -> path.

    Args:
        run_dir: gets the files.
        rule: which predictions are correct.
        best: int64 `[N, 5]`, the top-5 predictions.
    """
    names, predictions = rule.class_names, rule.prediction_names
    counted = rule.classes >= 0
    by_class = rule.count_by_class(best).tolist()
    tables: dict[str, list[Sequence[object]]] = {
        "per_class": [
            ("class", "images", "correct", "top5_correct", "accuracy"),
            *(
                (name, n, top1, top5, top1 / n if n else "")
                for name, (n, top1, top5) in zip(names, by_class, strict=True)
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
    for name, rows in tables.items():
        write_csv(run_dir / f"{name}.csv", rows)
    return {name: str(run_dir / f"{name}.csv") for name in tables}
