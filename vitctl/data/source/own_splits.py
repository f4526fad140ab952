"""The splits of a data set of one's own: what to train on and what to score where no split is called `test`."""

from collections.abc import Sequence
from typing import NamedTuple

TRAIN, TEST = "train", "test"
_VALIDATION = ("validation", "val", "valid", "dev")
_OTHER_TRAIN = ("training",)
_OTHER_TEST = ("testing",)
NOT_TRAINED = (TEST, *_OTHER_TEST, *_VALIDATION)
# What a folder or a shard is called, and what it is then for.
ROLES = {
    **dict.fromkeys((TRAIN, *_OTHER_TRAIN), TRAIN),
    **dict.fromkeys((TEST, *_OTHER_TEST), TEST),
    **dict.fromkeys(_VALIDATION, _VALIDATION[0]),
}


class OwnSplits(NamedTuple):
    """Split expressions.

    Args:
        train: what is trained on.
        scored: what is scored.
        tried_on: what learning rates are tried on, and
        chosen_by: what they are chosen by; neither has a scored image.
        note: one line that says so; empty where the splits are the usual ones.
    """

    train: str
    scored: str
    tried_on: str
    chosen_by: str
    note: str


def own_splits(found: Sequence[str]) -> OwnSplits | None:
    """The splits that a data set offers for training and scoring.

    A set in one piece is cut: of each class the last fifth, in the order of the MD5 of the names, is scored.

    Args:
        found: names of its splits.

    Returns:
        None where that cannot be told: several splits, none of them for training or none to be scored.
    """
    train = next((name for name in (TRAIN, *_OTHER_TRAIN) if name in found), "")
    scored = next((name for name in (TEST, *_OTHER_TEST, *_VALIDATION) if name in found), "")
    if len(found) == 1:
        name = found[0]
        return OwnSplits(
            f"{name}[:80% of each class]",
            f"{name}[80%: of each class]",
            f"{name}[:60% of each class]",
            f"{name}[60%:80% of each class]",
            f"no test split: '{name}[80%: of each class]' is kept aside to be scored, in the order of the MD5 of the names; the "
            "others are trained on",
        )
    if not train or not scored:
        return None
    note = "" if (train, scored) == (TRAIN, TEST) else f"'{train}' is trained on, '{scored}' is scored"
    return OwnSplits(train, scored, f"{train}[:90%]", f"{train}[90%:]", note)
