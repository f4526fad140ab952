"""trace.bin: the marks of each step, found again by its number, also after a resume; a torn or missing one is
not used.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.conftest import Tiny, batch
from vitctl.engine.distributed.runtime import Runtime
from vitctl.engine.journal import LOG, Journal, read_records
from vitctl.engine.run_files import STEP_RECORDS, TRACE
from vitctl.engine.step import Result
from vitctl.engine.trace.digests import norm_marks
from vitctl.engine.trace.recorder import Recorder, read_marks
from vitctl.engine.trace.steps import read_steps

SIZE, NORMS = 5, 4


def recorder(folder: Path, runtime: Runtime, size: int = SIZE) -> Recorder:
    return Recorder(folder, Journal(folder / LOG), runtime, Tiny(), range(size), size)


def add(to: Recorder, step: int) -> None:
    norms = torch.arange(NORMS, dtype=torch.float64) + step / 7
    rows = batch(to.batch_size, seed=step)
    rows = type(rows)(
        *(rows.images, rows.labels, rows.weights, rows.samples),
        checksums=rows.labels.numpy()[:, None] + [[1, step]],
    )
    to.add(step, Result(step / 3, 1.0, 0.1, 0, False, gradient=norms), [rows], weights=step == 2)


def marks(folder: Path) -> dict[int, Any]:
    """Of each step that has a line."""
    steps = read_steps(folder)
    assert steps is not None
    return {
        n: read_marks(folder / TRACE, line.model_dump(), SIZE + NORMS) for n, line in steps.by_step.items()
    }


@pytest.fixture
def written(tmp_path: Path, runtime: Runtime) -> Path:
    """Four steps."""
    one = recorder(tmp_path, runtime)
    one.start(0, {"made_of": {}})
    for step in range(1, 5):
        add(one, step)
    return tmp_path


def test_marks__of_each_step_are_found_by_its_number(written: Path) -> None:
    found = marks(written)
    assert sorted(found) == [1, 2, 3, 4]
    for step, own in found.items():
        assert own is not None
        assert own[SIZE:].tolist() == norm_marks(np.arange(NORMS) + step / 7).tolist()
    assert (written / TRACE).stat().st_size == 32 + 4 * 2 * (SIZE + NORMS)
    steps = read_steps(written)
    assert steps is not None
    assert [bool(steps.by_step[n].weights) for n in (1, 2, 3)] == [False, True, False]
    assert [steps.by_step[n].number("loss") for n in (1, 2, 3)] == [1 / 3, 2 / 3, 1.0]


def test_marks__are_cut_on_resume_and_written_again(written: Path, runtime: Runtime) -> None:
    before = (written / TRACE).read_bytes()
    one = recorder(written, runtime)
    one.start(2, {"made_of": {}})
    assert (written / TRACE).stat().st_size == 32 + 2 * 2 * (SIZE + NORMS)
    for step in (3, 4):
        add(one, step)
    assert (written / TRACE).read_bytes() == before


def test_marks__of_another_batch_size_begin_anew(written: Path, runtime: Runtime) -> None:
    one = recorder(written, runtime, 7)
    one.start(4, {"made_of": {}})
    add(one, 5)
    assert {step: own is not None for step, own in marks(written).items()} == dict.fromkeys(
        (1, 2, 3, 4, 5), False
    )
    line = read_records(written / STEP_RECORDS)
    assert line  # the chain goes on
    steps = read_steps(written)
    assert steps is not None
    assert read_marks(written / TRACE, steps.by_step[5].model_dump(), 7 + NORMS) is not None


@pytest.mark.parametrize("harm", ["cut", "zeros", "gone", "foreign"])
def test_marks__that_are_torn_are_not_used(written: Path, harm: str) -> None:
    path = written / TRACE
    content = path.read_bytes()
    if harm == "gone":
        path.unlink()
    else:
        cut = {"cut": content[:-3], "zeros": content[:-18] + bytes(18), "foreign": b"x" * 40}[harm]
        path.write_bytes(cut)
    found = marks(written)
    assert found[4] is None
    assert (found[3] is None) == (harm in ("gone", "foreign"))
