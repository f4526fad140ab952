"""trace.bin is held against the record of steps without a replay."""

from pathlib import Path

import pytest

from tests.verify.conftest import Train, found, said
from vitctl.engine.trace.recorder import read_marks_header


@pytest.mark.parametrize("step", [1, 7, 12])
def test_a_changed_mark__is_named_by_step(copy: Path, step: int) -> None:
    path = copy / "trace.bin"
    header, content = read_marks_header(path), bytearray(path.read_bytes())
    assert header is not None
    content[header.begin(step) + 3] ^= 1
    path.write_bytes(content)
    assert found(copy) == [("trace", f"{path}: the marks of step {step} are not those that its line names")]


def test_missing_marks__are_not_checked(copy: Path) -> None:
    """A full disk leaves a hole, and a kill a file that ends early."""
    path = copy / "trace.bin"
    header, content = read_marks_header(path), bytearray(path.read_bytes())
    assert header is not None
    content[header.begin(3) : header.begin(4)] = bytes(header.size)
    path.write_bytes(content[: header.begin(12)])
    assert said(copy, "trace") == [
        (
            "not checked",
            f"{path}: those of 2 steps, the first is 3: missing; marks of 10 steps as their lines name them",
        )
    ]
    path.unlink()
    [(state, text)] = said(copy, "trace")
    assert (state, text.split(";")[0]) == ("not checked", f"{path}: missing, or not of vitctl")


def test_parameters_without_a_gradient__have_no_marks(train: Train) -> None:
    masked = {
        "loss.name": "masked_patch",
        "model.pre_logits": False,
        "model.head_bias": 0.0,
        "data.eval_split": "",
    }
    assert [state for state, _ in said(train("a", **masked), "trace")] == ["ok"]
