"""The machine and the counts that a result names are those that were recorded."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.verify.conftest import found, said
from vitctl.engine import computation
from vitctl.launch.worker import work


def changed(run: Path, **values: Any) -> None:
    path = run / "result.json"
    result = json.loads(path.read_text())
    path.write_text(json.dumps(result | {"provenance": result["provenance"] | values}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("device", "cuda"),
        ("device_name", "NVIDIA H100"),
        ("processes", 8),
        ("threads", 63),
        ("num_train", 71),
        ("micro_batch", 3),
    ],
)
def test_another_machine_in_the_result__is_named_by_its_key(copy: Path, key: str, value: Any) -> None:
    changed(copy, **{key: value})
    [(what, text)] = found(copy)
    assert what == "provenance"
    assert text.startswith(f"{copy / 'result.json'}: {key} is {value}, ")
    assert " at the last start" in text


def test_another_package_in_the_result__is_named(copy: Path) -> None:
    versions = json.loads((copy / "result.json").read_text())["provenance"]["versions"]
    changed(copy, versions=versions | {"torch": "1.0"})
    text = f"{copy / 'result.json'}: versions.torch is 1.0, {versions['torch']} at the last start"
    assert found(copy) == [("provenance", text)]


def test_another_precision__is_named_by_its_key(copy: Path) -> None:
    changed(copy, precision="float32")
    texts = dict(found(copy))
    assert "precision is float32, float64 at the last start" in texts["provenance"]
    assert texts["recipe"].endswith(": precision was float64, is float32 in result.json")


def test_skipped_updates__are_those_of_the_checkpoint(copy: Path) -> None:
    changed(copy, skipped_updates=2)
    text = f"{copy / 'result.json'}: skipped_updates is 2, 0 in step_00000012"
    assert found(copy) == [("provenance", text)]


def test_bad_samples__of_log_and_checkpoint_agree(copy: Path) -> None:
    path = copy / "log.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line.pop("sha256")
        if line.get("kind") == "train" and line["step"] == 12:
            line["num_bad"] = 4
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "num_bad is 4 in log.jsonl at step 12, 0 in step_00000012" in dict(found(copy))["provenance"]


def test_what_nothing_is_compared_with__is_one_line(copy: Path) -> None:
    changed(copy, data_verified=0.25)
    (copy / "bad_samples.jsonl").write_text("")
    [(state, text)] = said(copy, "the rest")
    assert state == "not checked"
    for name in ("data_verified", "env.json", "bad_samples.jsonl"):
        assert name in text
    assert found(copy) == []


def test_deleted_checkpoints__leave_a_line_about_the_weights(copy: Path) -> None:
    for path in (copy / "checkpoints").iterdir():
        shutil.rmtree(path)
    [(state, text)] = said(copy, "weights")
    path = copy / "checkpoints/step_00000012/ema.safetensors"
    assert (state, text) == ("not checked", f"{path} is gone: the weights of the result cannot be compared")
    assert found(copy) == []


def test_damaged_result__says_nothing_of_deleting_it(copy: Path) -> None:
    (copy / "result.json").write_text("{")
    texts = dict(found(copy))
    assert "not a valid result of vitctl" in texts["result"]
    assert "delete" not in texts["result"]


def test_a_finished_run_that_another_machine_scored_again__is_told(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step is made, so that no start is recorded; the result names the other machine."""
    with monkeypatch.context() as patched:
        patched.setattr(computation, "versions", lambda: {"torch": "1.0"})
        work(copy)
    assert found(copy) == []
    [(state, text)] = said(copy, "provenance")
    assert state == "not checked"
    assert text.startswith("the run was resumed at its last step, 12, and scored again: versions.")
    assert "versions.torch is 1.0, " in text
