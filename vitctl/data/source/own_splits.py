"""Default splits of a user's own data set: which to train on and which to score, where no split is called
`test`.
"""

from collections.abc import Sequence
from typing import NamedTuple

TRAIN, TEST = "train", "test"
_VALIDATION = ("validation", "val", "valid", "dev")
_OTHER_TRAIN = ("training",)
_OTHER_TEST = ("testing",)
NOT_TRAINED = (TEST, *_OTHER_TEST, *_VALIDATION)
# Name of a folder or a shard -> its role.
ROLES = {
    **dict.fromkeys((TRAIN, *_OTHER_TRAIN), TRAIN),
    **dict.fromkeys((TEST, *_OTHER_TEST), TEST),
    **dict.fromkeys(_VALIDATION, _VALIDATION[0]),
}


class OwnSplits(NamedTuple):
    """Split expressions.

    Args:
        train: to train on.
        scored: to score.
        lr_train: training split of the search for the learning rate.
        lr_validation: validation split of that search; neither has a scored image.
        note: one line for the user; empty where the splits are `train` and `test`.
    """

    train: str
    scored: str
    lr_train: str
    lr_validation: str
    note: str


def own_splits(found: Sequence[str]) -> OwnSplits | None:
    """Choose the splits of a data set for training and scoring.

    A data set with one split is divided: the last 20% of each class, in md5 order of the names, are scored.

    Args:
        found: names of its splits.

    Returns:
        None where there is no clear choice: several splits, none of them for training or none to score.
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
            f"no test split: '{name}[80%: of each class]' is kept aside to be scored, in the order of the "
            f"MD5 of the names; the "
            "others are trained on",
        )
    if not train or not scored:
        return None
    note = "" if (train, scored) == (TRAIN, TEST) else f"'{train}' is trained on, '{scored}' is scored"
    return OwnSplits(train, scored, f"{train}[:90%]", f"{train}[90%:]", note)
