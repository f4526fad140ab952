"""benchmarks/resume_conformance.py: what it counts, against planted sequences; the rows of loaders that go
wrong; vitctl's row.
"""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.benchmarks.conftest import script
from tests.matrix import each, slow

ROOT = Path(__file__).resolve().parents[1]
PLANTED = '''
"""Epochs of 40 numbers, each in an order of its own. What goes wrong after a resume is in its variant."""
import random
from job import NotOfferedError, read_state, write_state

PACKAGES = ("pip",)
SAVES_AT_EPOCHS = ("at_epochs",)

class Loader:
    def __init__(self, job, variant):
        self.job, self.variant, self.step, self.resumed = job, variant, 0, False

    def restore(self, folder):
        if self.variant == "refuses":
            raise ValueError("another number of ranks: 2, not 1")
        if self.variant == "cannot":
            raise NotOfferedError("nowhere documented")
        self.step, self.resumed = read_state(folder, 0)["step"], True

    def steps(self):
        job = self.job
        while self.step < job.epochs * job.steps_per_epoch:
            epoch, begin = divmod(self.step * job.global_batch, job.num_samples)
            order = random.Random(epoch).sample(range(job.num_samples), job.num_samples)
            numbers = order[begin:begin + job.global_batch][job.rank::job.world]
            if self.resumed and epoch == 1 and self.variant == "loses" and job.rank == 0:
                numbers[0] = order[0]
            self.step += 1
            yield epoch, numbers

    def save(self, folder):
        write_state(folder, self.job.rank, {"step": self.step})
'''


@pytest.fixture(scope="module")
def suite() -> Any:
    return imported("suite")


@pytest.fixture(scope="module")
def counting() -> Any:
    return imported("suite")


def imported(name: str) -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks" / "resume"))
    try:
        return __import__(name)
    finally:
        sys.path.pop(0)


def shares(counting: Any, epochs: Sequence[Sequence[Sequence[int]]], world: int = 1) -> list[Any]:
    """A run of epochs of steps of samples; rank 0 has the first of each step."""
    found, step = [], 0
    for epoch, steps in enumerate(epochs):
        for samples in steps:
            step += 1
            cuts = [len(samples) * rank // world for rank in range(world + 1)]
            for rank in range(world):
                found.append(counting.Share(step, rank, epoch, tuple(samples[cuts[rank] : cuts[rank + 1]])))
    return found


STRAIGHT = [[[0, 1, 2, 3], [4, 5, 6, 7]], [[7, 6, 5, 4], [3, 2, 1, 0]]]


@each(
    ("epoch", "expected"),
    [
        ([[7, 6, 5, 4], [3, 2, 1, 0]], (0, 0, "same")),
        ([[4, 5, 6, 7], [3, 2, 1, 0]], (0, 0, "same batches")),
        ([[3, 2, 1, 0], [7, 6, 5, 4]], (0, 0, "other")),
        ([[7, 6, 5, 3], [4, 2, 1, 0]], (0, 0, "other")),
        ([[7, 6, 5, 4], [3, 2, 1, 7]], (1, 1, "other")),
        ([[7, 7, 7, 4], [3, 2, 1, 0]], (2, 2, "other")),
        ([[7, 6, 5, 4]], (0, 4, "other")),
        ([[7, 6, 5, 4], [7, 6, 5, 4], [3, 2, 1, 0]], (4, 0, "other")),
        ([], (0, 8, "other")),
    ],
)
@each("worlds", [(1, 1), (2, 1), (2, 3)])
def test_difference__of_planted_epochs(
    counting: Any, epoch: list[list[int]], expected: tuple[int, int, str], worlds: tuple[int, int]
) -> None:
    before, after = (
        shares(counting, run, world)
        for run, world in zip((STRAIGHT, [STRAIGHT[0], epoch]), worlds, strict=True)
    )
    found = counting.difference(before, random.Random(0).sample(after, len(after)), 1)
    assert (found.repeated, found.skipped, found.order) == expected
    assert found.exact == (expected != (0, 0, "other") and not expected[0] + expected[1])
    assert counting.difference(before, after, 0) == counting.Difference(0, 0, "same")


def test_joined__rolls_back_to_the_state(counting: Any) -> None:
    straight = shares(counting, STRAIGHT)
    killed = [*straight[:2], counting.Share(3, 0, 1, (9, 9, 9, 9))]
    assert counting.joined(killed, 2, straight[2:]) == straight
    assert counting.is_whole(straight, 1, 8)
    assert not counting.is_whole(killed, 1, 8)


@pytest.fixture
def planted(suite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A suite for loaders that are planted beside its own."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "peer_planted.py").write_text(PLANTED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    plan = suite.Plan(num_samples=40, global_batch=8, workers=0, save_every=3, stop=8, limit_seconds=30.0)
    return suite.Suite(tmp_path, {}, plan)


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        *slow(("honest", {"1 -> 1": "exact", "2 -> 3": "same batches"})),
        ("loses", {"1 -> 1": "4 repeated, 4 skipped; other order"}),
        *slow(
            ("refuses", {"1 -> 1": "failed", "2 -> 3": "refused"}),
            ("cannot", {"1 -> 1": "not offered"}),
            ("at_epochs", {"1 -> 1": "exact"}),
        ),
    ],
)
def test_suite__finds_what_is_planted(planted: Any, variant: str, expected: dict[str, str]) -> None:
    layouts = [layout for layout in ((1, 1), (2, 3)) if f"{layout[0]} -> {layout[1]}" in expected]
    found = planted.run(f"planted:{variant}", layouts)
    assert {name: one.text for name, one in found.items()} == expected
    first = found["1 -> 1"]
    assert first.saved == (5 if variant == "at_epochs" else 6)  # killed after 8
    assert (first.whole, first.repeatable) == (True, True)
    assert first.state_bytes == len(json.dumps({"step": first.saved}))
    assert first.message == {
        "refuses": "ValueError: another number of ranks: 2, not 1",
        "cannot": "nowhere documented",
    }.get(variant, "")


@pytest.mark.slow
def test_suite__vitctl_is_exact_on_another_number_of_processes(
    suite: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = script("resume_conformance")
    plan = suite.Plan(num_samples=48, shard_samples=12, global_batch=12, workers=1, save_every=3, stop=7)
    module.write_data(tmp_path / "data", plan)
    found = suite.Suite(tmp_path, {}, plan).run("vitctl", [(2, 3)])["2 -> 3"]
    assert (found.text, found.saved, found.whole) == ("exact", 6, True)
    assert found.state_bytes <= 16
    rows = module.table({"vitctl": {"2 -> 3": found}}).splitlines()
    assert rows[2].startswith("| vitctl |  |  |  | exact |")
