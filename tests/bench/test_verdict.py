"""The sentence for planted timings: its part, its reason, its knob."""

from typing import Any

import pytest

from vitctl.bench.loader import LoaderRate, verdict
from vitctl.bench.verdict import StepFacts, Trial, bottleneck

COMPUTE = {"data": 0.0, "forward": 1.0, "backward": 2.0, "optimizer": 0.5, "log": 0.0}


def facts(split: dict[str, float], **values: Any) -> StepFacts:
    own: dict[str, Any] = {
        "images": 100, "recipe_batch": 100, "workers": 1, "cores": 8, "precision": "float32", "utilisation": 0.4,
        "against": "2 TFLOP/s", **values
    }  # fmt: skip
    return StepFacts(split=split, **own)


def test_data__workers_that_would_keep_up() -> None:
    """One worker alone gives 25 images/s, as measured; the step needs 100: four workers."""
    split = {"data": 3.0, "forward": 0.4, "backward": 0.5, "optimizer": 0.1, "log": 0.0}
    found = bottleneck(facts(split, loader=25.0))
    assert (found.part, found.setting) == ("data", "machine.workers=4")
    assert found.text == (
        "Data is the bottleneck: a step waits 75% of its time for images; the loader alone gives 25 images/s "
        "with 1 worker(s), the "
        "step needs 100: machine.workers = 4 would keep up."
    )
    unknown = bottleneck(facts(split))
    assert (unknown.setting, unknown.text.partition("; ")[2]) == (
        "",
        "`vitctl bench data` measures the loader alone.",
    )


def test_data__a_loader_that_gives_enough_is_no_bottleneck() -> None:
    """A step waits an eighth of its time though the loader alone gives three times what it needs: no number
    of workers helps.
    """
    split = {"data": 0.5, "forward": 1.5, "backward": 1.0, "optimizer": 0.9, "log": 0.1}
    found = bottleneck(facts(split, loader=90.0))
    assert (found.part, found.setting) == ("forward", "")
    assert (
        "waits 12% of its time for images, though the loader alone gives 90 images/s and the step needs 28.6"
        in found.text
    )
    assert bottleneck(facts(split, loader=20.0)).part == "data"


@pytest.mark.parametrize("part", ["data", "communication", "optimizer", "log"])
def test_best_knob__is_named_whatever_the_bottleneck(part: str) -> None:
    trials = [Trial("machine.compile", "true", 1.0, 1.5, rounds=4, wins=4)]
    found = bottleneck(facts({**COMPUTE, part: 5.0}, trials=trials, recipe_batch=10_000))
    assert found.part == part
    assert found.text.endswith(
        "machine.compile = true made forward and backward 50% faster when tried in this run."
    )
    assert found.setting


def test_data__without_workers_and_without_cores() -> None:
    split = {"data": 3.0, "forward": 0.4, "backward": 0.6}
    assert bottleneck(facts(split, workers=0)).setting == "machine.workers=1"
    assert (
        bottleneck(facts(split, workers=0, loader=900.0)).setting == "machine.workers=1"
    )  # a fast loader is waited for, too
    few = bottleneck(facts(split, cores=2, loader=25.0))
    assert few.setting == ""
    assert "it would take 4 workers, too many for 2 core(s) that also compute the step" in few.text


def test_computing__the_fastest_knob_that_won() -> None:
    trials = [
        Trial("machine.attention", "math", 2.0, 2.2, rounds=4, wins=4),
        Trial(
            "machine.micro_batch", "8", 1.0, 3.0, rounds=4, wins=2
        ),  # faster in the median, and not in most rounds
        Trial("machine.compile", "true", 1.96, 2.0, rounds=4, wins=4),  # too little
    ]
    found = bottleneck(facts(COMPUTE, trials=trials, bf16_gain=4.0))
    assert (found.part, found.setting) == ("backward", "machine.attention=math")
    assert found.text == (
        "The backward pass is the bottleneck: 57% of a step; machine.attention = math made forward and "
        "backward 10% faster when "
        "tried in this run."
    )


def test_computing__precision_by_the_measured_rates() -> None:
    found = bottleneck(facts(COMPUTE, bf16_gain=2.0))
    assert found.setting == "machine.precision=bf16"
    assert "multiplies bf16 2.0 times as fast as float32 (measured)" in found.text
    assert bottleneck(facts(COMPUTE, bf16_gain=2.0, precision="bf16")).setting == ""


def test_computing__nothing_helps_and_no_guess() -> None:
    found = bottleneck(
        facts(COMPUTE, trials=[Trial("machine.attention", "math", 2.5, 2.0, rounds=3, wins=0)])
    )
    assert found.setting == ""
    assert found.text == (
        "The backward pass is the bottleneck: 57% of a step; none of the knobs tried helps "
        "(machine.attention=math -20%). The step "
        "reaches 40% of 2 TFLOP/s."
    )


def test_optimizer__in_the_recipes_own_batch() -> None:
    """Half a second in 1.0 for 100 images; in 10,000 images it is half a second in 50.5."""
    split = {"forward": 0.2, "backward": 0.3, "optimizer": 0.5}
    found = bottleneck(facts(split, recipe_batch=10_000))
    assert (found.part, found.setting) == ("optimizer", "")
    assert "in an update of the recipe's 10,000 images it is 1.0%" in found.text
    assert bottleneck(facts({**split, "optimizer": 2.0})).setting == "schedule.batch_size=200"


def test_communication__is_worth_a_word_before_computing() -> None:
    found = bottleneck(facts({**COMPUTE, "communication": 1.5}))
    assert (found.part, found.setting) == ("communication", "schedule.batch_size=200")
    assert "30% of a step" in found.text
    assert "would make it 18%" in found.text  # 1.5 of 8.5 seconds


@pytest.mark.parametrize(
    ("needed", "cores", "scaled", "part", "setting"),
    [
        (50.0, 2, 1.0, "step", ""),
        (400.0, 4, 1.0, "loader", "machine.workers=4"),
        (400.0, 2, 1.0, "loader", "data.decode=scaled"),
        (400.0, 2, 0.1, "loader", ""),  # as of small images, where it changes nothing
        (0.0, 2, 1.0, "decode", ""),
    ],
)
def test_loader__against_the_step(needed: float, cores: int, scaled: float, part: str, setting: str) -> None:
    """100 images/s of one worker."""
    loader = LoaderRate(workers=1, images=200, seconds=2.0, cpu_seconds=2.5)
    assert (loader.images_per_second, loader.images_per_worker, loader.images_per_cpu_second) == (
        100.0,
        100.0,
        80.0,
    )
    found = verdict(loader, {"read": 1.0, "decode": 7.0, "augment": 2.0}, needed, cores=cores, scaled=scaled)
    assert (found.part, found.setting) == (part, setting)
