"""The user's data: folders of photographs, and splits where those that a recipe names do not exist."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitctl.data.datasets.detect import open_originals
from vitctl.data.shards.index import find_splits
from vitctl.data.shards.remote import is_remote
from vitctl.data.source.locate import locate_splits
from vitctl.data.source.splits import NOT_TRAINED, TEST, TRAIN, DefaultSplits, default_splits
from vitctl.data.source.views import Source
from vitctl.data.writer.intake import Originals, read_item
from vitctl.errors import DataError
from vitctl.jobs.inputs.fewshot_sets import SPLITS
from vitctl.recipe.images import Place
from vitctl.recipe.load import Loaded, Override
from vitctl.recipe.schema import Evaluate, ExportRecipe, Fewshot, Finetune, Pretrain

RECORD = "photographs.json"  # in the folder of shards, written last: what they were made of


def is_photographs(path: str) -> bool:
    """Return whether a path is a local folder with class folders and no shards."""
    folder = Path(path)
    if not path or not folder.is_dir() or find_splits(folder) or next(folder.rglob("*.tar"), None):
        return False
    return any(one.is_dir() and not one.name.startswith(".") for one in folder.iterdir())


def shards_folder(path: str, runs: Path, state: Mapping[str, Any]) -> Path:
    """Return the folder beside the runs for the shards of photographs in a state, see `fingerprint`.

    Photographs that changed get another folder, so that the shards of earlier runs stay.
    """
    place = Path(path).resolve()
    digest = hashlib.sha256(os.fsencode(place) + str(state["sha256"]).encode())
    return runs / "shards" / f"{place.name}-{digest.hexdigest()[:8]}"


def fingerprint(path: str) -> dict[str, Any]:
    """Return the number of files in a folder, and a digest of their names, sizes and times; no file is read."""
    digest, count = hashlib.sha256(), 0
    for folder, folders, names in os.walk(path):
        folders.sort()
        for name in sorted(names):
            file = os.path.join(folder, name)
            stat = os.stat(file, follow_symlinks=os.path.exists(file))
            digest.update(os.fsencode(f"{os.path.relpath(file, path)}\0{stat.st_size}\0{stat.st_mtime_ns}\n"))
            count += 1
    return {"files": count, "sha256": digest.hexdigest()}


@dataclass(frozen=True)
class _Unwritten:
    """A split of photographs before it is written, for plans: the samples of its shards in another order."""

    originals: Originals
    parts: tuple[Source, ...] = ()
    digest: str = ""

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.originals.class_names

    def __len__(self) -> int:
        return len(self.originals.items)

    def labels(self, samples: np.ndarray | None = None) -> np.ndarray:
        labels = np.array([item.label for item in self.originals.items], np.int64)
        return labels if samples is None else labels[samples]

    def key(self, sample: int) -> str:
        return self.originals.items[sample].key

    def location(self, sample: int) -> str:
        return self.key(sample)

    def read(self, sample: int) -> bytes:
        return read_item(self.originals.items[sample])


def planned_splits(path: str) -> dict[str, Source]:
    """Return the splits that the shards of photographs will have; nothing is decoded or written.

    Raises DataError.
    """
    return {name: _Unwritten(originals) for name, originals in open_originals(path).items()}


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
            f"the data holds '{name}' only, and no split to train on; if the shards are incomplete, run "
            f"`vitctl data shards` again; to train on a part of it: --set data.train_split='{name}[:80%]' "
            f"--set "
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
