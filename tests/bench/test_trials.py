"""Other values of knobs: which are tried, on which images, and that the training is left as it was."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from vitctl.bench import trials as module
from vitctl.bench.budget import Budget
from vitctl.bench.training import Prepared
from vitctl.bench.trials import enlarged, largest_micro_batch, regrouped, trial_of, try_compile, try_knobs
from vitctl.models.kernels import attention


class Looks(Budget):
    """A budget that is spent once it was looked at so many times."""

    def __init__(self, looks: int) -> None:
        super().__init__(1e9)
        self.looks = looks

    @property
    def left(self) -> float:
        self.looks -= 1
        return 1e9 if self.looks >= 0 else 0.0


def test_knobs__each_in_turns_with_the_runs_own(prepared: Callable[..., Any]) -> None:
    def measure(one: Prepared) -> Any:
        before = {name: tensor.clone() for name, tensor in one.trainer.unwrapped.state_dict().items()}
        found = try_knobs(one, "fused", one.step_of(one.batches()), [4, 8], Looks(3))
        after = one.trainer.unwrapped.state_dict()
        return found, all(torch.equal(before[name], after[name]) for name in before), attention._kernel

    trials, unchanged, mode = prepared(measure)
    assert [(one.knob, one.value) for one in trials] == [
        ("machine.attention", "math"),
        ("machine.micro_batch", "4"),
        ("machine.micro_batch", "8"),
    ]
    assert all(one.rounds == 2 and 0 <= one.wins <= 2 for one in trials)
    assert unchanged
    assert mode == "fused"


def test_knobs__without_time_the_last_are_left_out(prepared: Callable[..., Any]) -> None:
    trials = prepared(lambda one: try_knobs(one, "fused", one.step_of(one.batches()), [4, 8], Looks(1)))
    assert [one.knob for one in trials] == ["machine.attention"]


def test_knobs__recomputed_blocks_are_tried_without(prepared: Callable[..., Any]) -> None:
    def measure(one: Prepared) -> Any:
        return try_knobs(
            one, "fused", one.step_of(one.batches()), [], Looks(2)
        ), one.trainer.unwrapped.checkpoint_blocks

    trials, still = prepared(measure, **{"machine.checkpoint_blocks": True})
    assert [(one.knob, one.value) for one in trials][1:] == [("machine.checkpoint_blocks", "false")]
    assert still


def test_knobs__lanes_have_leaves_of_their_own(prepared: Callable[..., Any]) -> None:
    lanes = {"schedule.lanes": 4, "schedule.leaf_images": 4}
    trials = prepared(lambda one: try_knobs(one, "math", one.step_of(one.batches()), [4], Looks(2)), **lanes)
    assert [one.setting for one in trials] == ["machine.attention=fused"]


def test_micro_batch__the_whole_share_is_tried(prepared: Callable[..., Any]) -> None:
    def measure(one: Prepared) -> Any:
        return largest_micro_batch(one, one.step_of(one.batches())[0], 16, Budget(1e9))

    found, known = prepared(measure)
    assert (found.images, found.tried, found.bound) == (16, True, "batch")
    assert [one.images for one in known] == [1, 2, 4, 8, 16]


def test_micro_batch__without_time_that_of_the_steps(prepared: Callable[..., Any]) -> None:
    def measure(one: Prepared) -> Any:
        batch = one.step_of(one.batches())[0]
        return largest_micro_batch(one, batch, 1000, Looks(2))[0], len(batch)

    found, own = prepared(measure)
    assert (found.images, found.tried, found.bound) == (own, True, "time")


def test_micro_batch__a_planted_limit(prepared: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The device holds 11 images; none above the limit leaves a gradient behind."""
    own = module.gradient_seconds

    def limited(one: Prepared, micro_batches: Any) -> float:
        if len(micro_batches[0]) > 11:
            raise torch.OutOfMemoryError("planted")
        return own(one, micro_batches)

    def measure(one: Prepared) -> Any:
        found, _ = largest_micro_batch(one, one.step_of(one.batches())[0], 16, Budget(1e9))
        return found, [p.grad for p in one.trainer.unwrapped.parameters()]

    monkeypatch.setattr(module, "gradient_seconds", limited)
    found, gradients = prepared(measure)
    assert (found.images, found.tried, found.bound) == (11, True, "memory")
    assert gradients == [None] * len(gradients)


def test_compile__is_compared_and_a_failure_is_a_note(
    prepared: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without compiling: with a stand-in that succeeds, and one that fails as torch does without a compiler."""

    def measure(one: Prepared) -> Any:
        return try_compile(one, one.step_of(one.batches()), Budget(1e9))

    asked: list[Any] = []
    monkeypatch.setattr(module, "compile_blocks", asked.append)
    (trial,), note = prepared(measure)
    assert (trial.knob, trial.value, trial.rounds) == ("machine.compile", "true", 2)
    assert len(asked) == 1
    assert re.fullmatch(r"compiling takes \d+ s, once at each start", note)

    def fail(_model: Any) -> None:
        raise BackendCompilerFailed(compile, RuntimeError("no C++ compiler"), None)

    monkeypatch.setattr(module, "compile_blocks", fail)
    trials, note = prepared(measure)
    assert trials == []
    assert "machine.compile" in note
    assert "\n" not in note


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, while it compiles
def test_compile__for_real(prepared: Callable[..., Any]) -> None:
    (trial,), note = prepared(lambda one: try_compile(one, one.step_of(one.batches()), Budget(1e9)))
    assert 0 < trial.seconds < 60
    assert "compiling takes" in note


def test_regrouped__the_same_images_in_their_order(prepared: Callable[..., Any]) -> None:
    def measure(one: Prepared) -> Any:
        whole = one.step_of(one.batches())
        return whole, regrouped(whole, 6), enlarged(whole[0], 40)

    whole, parts, many = prepared(measure)
    assert [len(part) for part in parts] == [6, 6, 4]
    for name in ("images", "labels", "weights", "samples"):
        own = torch.cat([getattr(batch, name) for batch in whole])
        assert torch.equal(own, torch.cat([getattr(part, name) for part in parts]))
        assert torch.equal(getattr(many, name), torch.cat([own, own, own])[:40])


def test_trial__medians_and_rounds_won() -> None:
    trial = trial_of("machine.attention", "math", [2.0, 4.0, 3.0], [1.0, 5.0, 2.0])
    assert (trial.seconds, trial.own_seconds, trial.gain, trial.wins, trial.rounds) == (2.0, 3.0, 0.5, 2, 3)
