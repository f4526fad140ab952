"""The steps that `--replay` names."""

import random
from itertools import pairwise
from pathlib import Path

from vitctl.engine.run_files import CHECKPOINTS, step_folders, step_of
from vitctl.engine.trace.steps import Steps
from vitctl.errors import RecipeError

ANY = 3  # places that `any` replays, and steps of each
_ANY_STEPS = 5
_WORDS = ("", "any", "all")


def check_steps_text(text: str) -> None:
    """Whether this can name steps, before anything is read.

    Args:
        text: "A:B", both included; "A"; "all"; "any"; "" for none.

    Raises:
        RecipeError: it cannot.
    """
    if text not in _WORDS:
        _first_and_last(text)


def chosen_ranges(text: str, steps: Steps, folder: Path) -> list[tuple[int, int]]:
    """The steps that --replay names.

    Args:
        text: as `check_steps_text` takes it; "any": a few after checkpoints that are drawn at random, or
            after the start.
        steps: the record.
        folder: of the training.

    Returns:
        (first, last) of each range, in ascending order; no two have a step in common.

    Raises:
        RecipeError: there are no such steps.
    """
    last = max(steps.by_step, default=0)
    if not last:
        raise RecipeError(f"{folder}: no step is recorded, so that none can be replayed")
    if text == "all":
        return [(1, last)]
    if text == "any":
        kept = [step_of(path) or 0 for path in step_folders(folder / CHECKPOINTS)]
        places = [step for step in {0, *kept} if step < last]
        drawn = sorted(random.SystemRandom().sample(places, min(ANY, len(places))))
        return [(step + 1, min(step + _ANY_STEPS, following)) for step, following in pairwise([*drawn, last])]
    first, final = _first_and_last(text)
    if final > last:
        raise RecipeError(f"--replay {text}: {folder} has records of steps 1 to {last}")
    return [(first, final)]


def _first_and_last(text: str) -> tuple[int, int]:
    begin, colon, end = text.partition(":")
    try:
        first, final = int(begin), int(end if colon else begin)
    except ValueError:
        raise RecipeError(
            f"--replay {text}: should be a step as 30, steps as 1200:1210, or any, or all"
        ) from None
    if first < 1:
        raise RecipeError(f"--replay {text}: steps count from 1")
    if final < first:
        raise RecipeError(
            f"--replay {text}: the first step is behind the last; did you mean {final}:{first}?"
        )
    return first, final
