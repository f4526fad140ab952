"""The splits of a user's data set that a recipe uses, where those that it names do not exist."""

from pathlib import Path
from typing import NamedTuple

from vitctl.data.shards.remote import is_remote
from vitctl.data.source.locate import locate_splits
from vitctl.data.source.splits import NOT_TRAINED, TEST, TRAIN, DefaultSplits, default_splits
from vitctl.errors import DataError
from vitctl.jobs.inputs.fewshot_sets import SPLITS
from vitctl.jobs.inputs.photographs import is_photographs, planned_splits
from vitctl.recipe.images import Place
from vitctl.recipe.load import Loaded, Override
from vitctl.recipe.schema import Evaluate, ExportRecipe, Fewshot, Finetune, Pretrain

_ASKED_FOR = "train+test+validation+val"  # an address cannot be listed
_CALIBRATION = "data.calibration_split"
_FLAG = "the splits of --data"


class FittedSplits(NamedTuple):
    """Values to be set in a recipe, and a line that says why; empty where the recipe needs no change."""

    overrides: list[Override]
    note: str


def fit_splits(loaded: Loaded) -> FittedSplits:
    """Replace the default splits of a recipe by those that data.path has.

    Splits that the user named stay. The result is written into the recipe of the run, where every later job
    reads what was trained on.

    Args:
        loaded: a recipe of any job.
    """
    recipe = loaded.recipe
    data = getattr(recipe, "data", None)
    if (
        not isinstance(data, Place)
        or not data.path
        or getattr(data, "synthetic", False)
        or getattr(data, "mixture", None)
    ):
        return FittedSplits([], "")
    try:
        photographs = is_photographs(data.path)
        found = list(planned_splits(data.path) if photographs else locate_splits(data.path, _ASKED_FOR))
    except DataError:
        if not is_remote(data.path):
            raise
        return FittedSplits([], "")  # opening the data later raises the error
    fitting = default_splits(found)
    if fitting is None:
        return FittedSplits([], "")
    if isinstance(recipe, Evaluate | ExportRecipe):
        fitted = _scored(loaded, data.eval_split, found, fitting)
        if isinstance(recipe, ExportRecipe) and fitted.overrides and not _is_from_flag(loaded, _CALIBRATION):
            fitted.overrides.append(Override(_CALIBRATION, fitting.train, _FLAG))
        return fitted
    if isinstance(recipe, Fewshot):
        if recipe.data.datasets or Path(data.path).name in SPLITS:
            return FittedSplits([], "")
        return _both(loaded, recipe.data.train_split or TRAIN, data.eval_split or TEST, found, fitting)
    if isinstance(recipe, Pretrain | Finetune) and data.eval_split:
        return _both(loaded, recipe.data.train_split, data.eval_split, found, fitting)
    return FittedSplits([], "")


def _both(loaded: Loaded, train: str, scored: str, found: list[str], fitting: DefaultSplits) -> FittedSplits:
    keys = ("data.train_split", "data.eval_split")
    if (_has(found, train) and _has(found, scored)) or any(_is_from_flag(loaded, key) for key in keys):
        return FittedSplits([], "")
    if len(found) == 1 and found[0] in NOT_TRAINED:
        name = found[0]
        raise DataError(
            f"the data holds '{name}' alone, and no split to train on; if writing it was not finished, type "
            f"the `vitctl data shards` "
            f"line again; to train on a part of it: --set data.train_split='{name}[:80%]' --set "
            f"data.eval_split='{name}[80%:]'"
        )
    values = dict(zip(keys, (fitting.train, fitting.scored), strict=True))
    if isinstance(loaded.recipe, Finetune):
        values |= _sweep(loaded, loaded.recipe, found, fitting)
    return FittedSplits([Override(key, value, _FLAG) for key, value in values.items()], fitting.note)


def _sweep(loaded: Loaded, recipe: Finetune, found: list[str], fitting: DefaultSplits) -> dict[str, str]:
    """Learning rates are tried and chosen on training images: never on those that are scored."""
    keys = ("sweep.train_split", "sweep.eval_split")
    if any(_is_from_flag(loaded, key) for key in keys) or (
        len(found) > 1 and _has(found, recipe.sweep.train_split)
    ):
        return {}
    return dict(zip(keys, (fitting.lr_train, fitting.lr_validation), strict=True))


def _scored(loaded: Loaded, scored: str, found: list[str], fitting: DefaultSplits) -> FittedSplits:
    """A data set with one split: score the part that fine-tuning on it would score; all of it where it is not
    called train.
    """
    if _has(found, scored) or _is_from_flag(loaded, "data.eval_split"):
        return FittedSplits([], "")
    (value, note) = fitting.scored, f"'{fitting.scored}' is scored"
    if len(found) == 1 and not found[0].startswith(TRAIN):
        (value, note) = found[0], f"'{found[0]}', the only split, is scored"
    elif len(found) == 1:
        note = f"no test split: '{value}' is scored, as after training on the rest; --split {found[0]} scores all, what was trained on too"
    return FittedSplits([Override("data.eval_split", value, _FLAG)], note)


def _has(found: list[str], expression: str) -> bool:
    return all(part.partition("[")[0].strip() in found for part in expression.split("+"))


def _is_from_flag(loaded: Loaded, key: str) -> bool:
    return loaded.origin(key).startswith("--")
