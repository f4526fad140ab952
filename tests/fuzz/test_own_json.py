"""Whatever stands in the JSON files that a run or a split keeps: one clean line, or values that hold
together.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.data.conftest import MakeSplit
from tests.fuzz.mutate import fuzz, mutated, mutated_json
from vitctl.data.source.splits import FILE as EXCLUDED
from vitctl.data.source.splits import open_shards, write_exclusion
from vitctl.engine.checkpoint import FORMAT, read_state
from vitctl.engine.computation import read_kept
from vitctl.engine.journal import RESULT, STATE
from vitctl.errors import VitctlError
from vitctl.jobs.record.result import RunResult, read_result
from vitctl.launch.peers import first_error
from vitctl.launch.run_folder import LOGS, read_status
from vitctl.report.compare import compare_runs
from vitctl.system.text import has_control

EXAMPLES = [20, pytest.param(2000, marks=pytest.mark.slow)]
STATE_OF_A_RUN = {
    "format": FORMAT,
    "step": 3,
    "num_bad": 0,
    "num_skipped": 1,
    "files": {"model.safetensors": {"bytes": 10, "sha256": "0" * 64}},
    "sha256": "0" * 64,
}
RESULT_OF_A_RUN = {
    "job": "evaluate",
    "status": "done",
    "metrics": {"accuracy": 0.5, "real": {"accuracy": 0.75}, "tasks": {"a": {"accuracy": 0.5}}},
    "provenance": {
        "split": "test",
        "image_size": 8,
        "eval_resize": 9,
        "data_verified": "damaged",
        "data_damaged": ["a"],
        "tasks": {"a": {"split": "test"}},
    },
    "files": {"model": "a/b"},
    "error": "",
}
MICRO = {"share": 8, "device": "CPU", "precision": "float32", "micro_batch": 4}
NOTE = {"rank": 0, "time": 1.5, "mendable": True, "text": "x", "log": "y", "lost_peer": False}


def told(read: Callable[[], Any], path: Path) -> str:
    """What came of it: refused in one plain line that names the file or its folder, or read."""
    said = ""
    try:
        read()
    except VitctlError as error:
        said = str(error)
    assert not has_control(said), repr(said)
    assert not said or str(path.parent) in said
    return "refused" if said else "read"


def both(path: Path, good: Any, read: Callable[[], Any], num_examples: int) -> None:
    """Mutations of the value and of the bytes of a file."""

    def check(data: bytes) -> str:
        path.write_bytes(data)
        return told(read, path)

    assert check(json.dumps(good).encode()) == "read"
    for files in (mutated_json(good), mutated((json.dumps(good).encode(),))):
        assert fuzz(check, files, num_examples)["refused"] > 0


@pytest.mark.parametrize("num_examples", EXAMPLES)
def test_state(tmp_path: Path, num_examples: int) -> None:
    def read() -> None:
        state = read_state(tmp_path)
        assert type(state["step"]) is int and all(
            type(state.get(name, 0)) is int for name in ("num_bad", "num_skipped")
        )
        assert all("/" not in name and type(noted["bytes"]) is int for name, noted in state["files"].items())

    both(tmp_path / STATE, STATE_OF_A_RUN, read, num_examples)


@pytest.mark.parametrize("num_examples", EXAMPLES)
def test_result(tmp_path: Path, num_examples: int) -> None:
    def read() -> None:
        assert read_status(tmp_path) is None or isinstance(read_status(tmp_path), str)
        result = read_result(tmp_path)
        assert isinstance(result, RunResult) and result.status in ("done", "stopped", "failed")
        assert all(isinstance(value, str) for value in result.files.values())
        compare_runs([tmp_path, tmp_path])

    both(tmp_path / RESULT, RESULT_OF_A_RUN, read, num_examples)


@pytest.mark.parametrize("num_examples", EXAMPLES)
def test_what_a_run_measured(tmp_path: Path, num_examples: int) -> None:
    both(tmp_path / "a.json", MICRO, lambda: read_kept(tmp_path / "a.json"), num_examples)


@pytest.mark.parametrize("num_examples", EXAMPLES)
def test_index_and_exclusions(make_split: MakeSplit, num_examples: int) -> None:
    index = make_split(20)
    write_exclusion(index, [3, 4], reason="in the test set")
    for name in (EXCLUDED, "index.json"):
        path = index.folder / name
        text = path.read_bytes()
        both(path, json.loads(text), lambda: len(open_shards(index.folder)) and None, num_examples)
        path.write_bytes(text)
        (index.folder / EXCLUDED).unlink(missing_ok=True)  # it is of the index as it was


@pytest.mark.parametrize("num_examples", EXAMPLES)
def test_notes_of_processes__never_hide_the_error(tmp_path: Path, num_examples: int) -> None:
    """Only one process may write them; one that is damaged is passed over."""
    (tmp_path / LOGS).mkdir()

    def check(data: bytes) -> str:
        (tmp_path / LOGS / "error_00.json").write_bytes(data)
        return "read" if first_error(tmp_path) else "passed over"

    assert check(json.dumps(NOTE).encode()) == "read"
    assert fuzz(check, mutated_json(NOTE), num_examples)["passed over"] > 0
