"""The sentence for planted timings: its part, its reason, its knob."""

from typing import Any

import pytest

from vitctl.jobs.bench.loader import LoaderRate, verdict
from vitctl.jobs.bench.verdict import StepFacts, Trial, bottleneck

COMPUTE = {"data": 0.0, "forward": 1.0, "backward": 2.0, "optimizer": 0.5, "log": 0.0}


def facts(split: dict[str, float], **values: Any) -> StepFacts:
    own: dict[str, Any] = {
        "images": 100, "recipe_batch": 100, "workers": 1, "cores": 8, "precision": "float32", "utilisation": 0.4,
        "against": "2 TFLOP/s", **values
    }  # fmt: skip
    return StepFacts(split=split, **own)


def test_data__workers_that_would_keep_up() -> None:
    """One worker gives 100 images in 4 seconds; the step alone takes 100 in 1: four workers."""
    found = bottleneck(facts({"data": 3.0, "forward": 0.4, "backward": 0.5, "optimizer": 0.1, "log": 0.0}))
    assert (found.part, found.setting) == ("data", "machine.workers=4")
    assert found.text == (
        "Data is the bottleneck: a step waits 75% of its time for images; the loader gives 25 images/s, the step alone takes 100 "
        "with 1 worker(s): machine.workers = 4 would keep up."
    )


def test_data__without_workers_and_without_cores() -> None:
    split = {"data": 3.0, "forward": 0.4, "backward": 0.6}
    assert bottleneck(facts(split, workers=0)).setting == "machine.workers=1"
    few = bottleneck(facts(split, cores=2))
    assert (few.setting, "data.decode" in few.text) == ("", True)
    assert "4 workers that would keep up are more than 2 core(s)" in few.text


def test_computing__the_fastest_knob_that_won() -> None:
    trials = [
        Trial("machine.attention", "math", 2.0, 2.2, rounds=4, wins=4),
        Trial("machine.micro_batch", "8", 1.0, 3.0, rounds=4, wins=2),  # faster in the median, and not in most rounds
        Trial("machine.compile", "true", 1.96, 2.0, rounds=4, wins=4),  # too little
    ]
    found = bottleneck(facts(COMPUTE, trials=trials, bf16_gain=4.0))
    assert (found.part, found.setting) == ("backward", "machine.attention=math")
    assert found.text == (
        "The backward pass is the bottleneck: 57% of a step; machine.attention = math made forward and backward 10% faster when "
        "tried in this run."
    )


def test_computing__precision_by_the_measured_rates() -> None:
    found = bottleneck(facts(COMPUTE, bf16_gain=2.0))
    assert found.setting == "machine.precision=bf16"
    assert "multiplies bf16 2.0 times as fast as float32 (measured)" in found.text
    assert bottleneck(facts(COMPUTE, bf16_gain=2.0, precision="bf16")).setting == ""


def test_computing__nothing_helps_and_no_guess() -> None:
    found = bottleneck(facts(COMPUTE, trials=[Trial("machine.attention", "math", 2.5, 2.0, rounds=3, wins=0)]))
    assert found.setting == ""
    assert found.text == (
        "The backward pass is the bottleneck: 57% of a step; none of the knobs tried helps (machine.attention=math -20%). The step "
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
    ("needed", "cores", "part", "setting"),
    [
        (50.0, 2, "step", ""),
        (400.0, 4, "loader", "machine.workers=4"),
        (400.0, 2, "loader", "data.decode=scaled"),
        (0.0, 2, "decode", ""),
    ],
)
def test_loader__against_the_step(needed: float, cores: int, part: str, setting: str) -> None:
    """100 images/s of one worker."""
    loader = LoaderRate(workers=1, images=200, seconds=2.0, cpu_seconds=2.5)
    assert (loader.images_per_second, loader.images_per_worker, loader.images_per_cpu_second) == (100.0, 100.0, 80.0)
    found = verdict(loader, {"read": 1.0, "decode": 7.0, "augment": 2.0}, needed, cores=cores, decode="exact")
    assert (found.part, found.setting) == (part, setting)
