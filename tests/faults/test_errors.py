"""An error in the training loop saves what is whole, and what is not whole is not saved; both are said."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.faults.conftest import assert_same, prepared, warnings
from vitctl.engine import evaluation, optimizer, step, trainer
from vitctl.engine.checkpoint import newest_checkpoint
from vitctl.engine.journal import CHECKPOINTS
from vitctl.engine.trainer import Trainer
from vitctl.errors import DataError, VitctlError
from vitctl.launch.worker import work

Broken = Callable[..., None]


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Broken:
    """broken(owner, "function", 5, error): the fifth call from now on raises, before or after it has done its
    work.
    """

    def arm(owner: ModuleType | type, name: str, call: int, error: Exception, *, after: bool = False) -> None:
        real, calls = getattr(owner, name), count(1)

        def called(*given: Any, **named: Any) -> Any:
            this = next(calls)
            if this == call and not after:
                raise error
            done = real(*given, **named)
            if this == call:
                raise error
            return done

        monkeypatch.setattr(owner, name, called)

    return arm


WHOLE = {
    "images": (trainer, "take", 6, DataError("a loader process was killed"), 5),
    "forward": (step.TrainStep, "_backward", 6, MemoryError("no memory"), 5),
    "a bug": (step, "clip_gradients", 6, ZeroDivisionError("a bug"), 5),
    "evaluation": (evaluation, "count_hits", 1, KeyError("a bug"), 4),
    "too many bad samples": (Trainer, "log", 5, DataError("too many"), 5),
}


@pytest.mark.parametrize(("owner", "name", "call", "error", "step"), WHOLE.values(), ids=WHOLE)
def test_error__between_two_updates_is_saved_and_goes_on_bit_for_bit(
    tiny_data: Path, straight: Path, tmp_path: Path, broken: Broken, owner: Any, name: str, call: int, error: Exception, step: int
) -> None:  # fmt: skip
    folder = prepared(tmp_path / "run", tiny_data)
    broken(owner, name, call, error, after=owner is Trainer)
    with pytest.raises((type(error), VitctlError)):
        work(folder)
    saved, problems = newest_checkpoint(folder / CHECKPOINTS)
    assert saved is not None
    assert (saved.step, problems) == (step, [])
    kind = type(error).__name__
    assert warnings(folder)[-1] == (
        f"ended by an error ({kind}) after step {step}, which is saved: the run can resume from its newest "
        f"checkpoint"
    )
    assert work(folder)["status"] == "done"
    assert_same(folder, straight)


HALF = {
    "half an update": (step.Average, "update", 6, "it came in the middle of an update"),
    "before it is counted": (step.TrainStep, "_step", 6, "it came in the middle of an update"),
    "half a swap": (optimizer, "_swap", 2, "it came while weights and their average were swapped"),
}


@pytest.mark.parametrize("case", HALF)
def test_error__in_the_middle_is_not_saved_and_the_one_before_goes_on_bit_for_bit(
    tiny_data: Path, straight: Path, tmp_path: Path, broken: Broken, case: str
) -> None:
    owner, name, call, why = HALF[case]
    folder = prepared(tmp_path / "run", tiny_data)
    broken(owner, name, call, RuntimeError("a bug"), after=case == "before it is counted")
    with pytest.raises(RuntimeError):
        work(folder)
    saved, problems = newest_checkpoint(folder / CHECKPOINTS)
    assert saved is not None
    assert (saved.step, problems) == (3, [])
    done = 4 if case == "half a swap" else 5
    assert warnings(folder)[-1] == (
        f"ended by an error (RuntimeError) after step {done}, not saved: {why}; the run can resume from its "
        f"newest checkpoint"
    )
    assert work(folder)["status"] == "done"
    assert_same(folder, straight)


def test_error__whose_save_fails_too_is_the_one_that_is_heard(
    tiny_data: Path, straight: Path, tmp_path: Path, broken: Broken, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepared(tmp_path / "run", tiny_data)
    with monkeypatch.context() as once:
        broken(trainer, "take", 6, DataError("the first error"))
        start = Trainer.start_saving

        def failing(run: Trainer, step: int) -> None:
            if step == 5:
                raise MemoryError("no room for a copy")
            start(run, step)

        once.setattr(Trainer, "start_saving", failing)
        with pytest.raises(DataError, match="the first error"):
            work(folder)
    assert warnings(folder)[-1].startswith(
        "ended by an error (DataError) after step 5, not saved: MemoryError: no room for a copy"
    )
    assert work(folder)["status"] == "done"
    assert_same(folder, straight)
