"""What a forger does to a finished run, links and digests computed again where that is possible: each is
found.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.verify.conftest import found, relinked, said
from vitctl.engine.journal import append_record, json_digest
from vitctl.engine.trace.chain import head
from vitctl.engine.trace.steps import read_steps
from vitctl.verify.records import published_digest

Result = dict[str, Any]


def rewrite(run: Path, change: Callable[[Result], Any]) -> None:
    """Change result.json."""
    result = json.loads((run / "result.json").read_text())
    change(result)
    (run / "result.json").write_text(json.dumps(result))


def renamed_heads(run: Path) -> None:
    """The result names the ends of the files as they are now."""
    rewrite(
        run, lambda r: r["record"].update({name: head(run / name) for name in ("log.jsonl", "steps.jsonl")})
    )


def pop(*keys: str) -> Callable[[Result], Any]:
    def change(result: Result) -> None:
        for key in keys[:-1]:
            result = result[key]
        del result[keys[-1]]

    return change


def put(value: Any, *keys: str) -> Callable[[Result], Any]:
    def change(result: Result) -> None:
        for key in keys[:-1]:
            result = result[key]
        result[keys[-1]] = value

    return change


PARTS = [
    ("metrics", name)
    for name in ("accuracy", "correct", "total", "mean_per_class", "majority_class", "chance")
]
PARTS += [
    ("provenance", name) for name in ("weights_sha256", "recipe_sha256", "weights_step", "weights_averaged")
]
PARTS += [("provenance", "weights_chosen"), ("provenance", "train_sha256"), ("provenance", "data_sha256")]
PARTS += [
    ("metrics",),
    ("provenance",),
    ("record",),
    ("record", "log.jsonl"),
    ("record", "steps.jsonl"),
    ("job",),
]
PARTS += [("record", "checkpoints"), ("record", "checkpoints", "step_00000012")]


@pytest.mark.parametrize("keys", PARTS, ids=lambda keys: ".".join(keys))
def test_result__without_a_part_differs(copy: Path, keys: tuple[str, ...]) -> None:
    rewrite(copy, pop(*keys))
    assert found(copy), keys


CHANGED = [
    (("metrics", name), 0.987) for name in ("accuracy", "mean_per_class", "majority_class", "chance", "top5")
]
CHANGED += [(("provenance", name), "0" * 64) for name in ("weights_sha256", "recipe_sha256", "train_sha256")]
CHANGED += [(("status",), "stopped"), (("status",), "failed"), (("job",), "evaluate"), (("record",), {})]
CHANGED += [(("metrics", "correct"), 22), (("metrics", "total"), 22), (("provenance", "weights_step"), 8)]
CHANGED += [(("provenance", "weights_averaged"), False), (("provenance", "weights_chosen"), "best")]
CHANGED += [(("record", "log.jsonl"), "0" * 64), (("record", "checkpoints", "step_00000008"), "0" * 64)]


@pytest.mark.parametrize(
    ("keys", "value"), CHANGED, ids=lambda one: ".".join(one) if isinstance(one, tuple) else str(one)
)
def test_result__with_another_value_differs(copy: Path, keys: tuple[str, ...], value: Any) -> None:
    rewrite(copy, put(value, *keys))
    assert found(copy), keys


def test_result__of_an_earlier_evaluation_differs(copy: Path) -> None:
    """A consistent claim of another step: its counts, step and accuracy."""
    lines = [json.loads(line) for line in (copy / "log.jsonl").read_text().splitlines()]
    [early] = [one for one in lines if one["kind"] == "evaluate" and one["step"] == 6]
    rewrite(
        copy,
        lambda r: r["metrics"].update(
            {k: early[k] for k in ("accuracy", "correct", "total", "mean_per_class")}
        ),
    )
    rewrite(copy, put(6, "provenance", "weights_step"))
    assert ("result", "it is of step 6 (last), should be of the last, step 12") in found(copy)


def test_published_digest__covers_the_score_and_is_printed_for_an_untouched_run_only(copy: Path) -> None:
    from vitctl.jobs.record.result import read_result

    [(_, text)] = said(copy, "digest")
    result = read_result(copy)
    assert result is not None
    assert text.startswith(published_digest(result))
    before = text
    rewrite(copy, lambda r: r.update(error="other words"))
    assert [one for _, one in said(copy, "digest")] == [before]
    rewrite(copy, put(22, "metrics", "correct"))
    assert said(copy, "digest") == []
    changed = read_result(copy)
    assert changed is not None
    assert published_digest(changed) != published_digest(result)


def test_lines_behind_the_end__differ_where_they_carry_numbers(copy: Path) -> None:
    append_record(copy / "log.jsonl", {"kind": "warning", "step": 0, "text": "resumed, and refused"})
    assert found(copy) == []
    append_record(
        copy / "log.jsonl", {"kind": "evaluate", "step": 12, "accuracy": 1.0, "correct": 23, "total": 23}
    )
    texts = dict(found(copy))
    assert (
        "1 records with numbers follow the line that the result names, the first of kind 'evaluate'"
        in texts["log"]
    )
    renamed_heads(copy)
    assert "a record (evaluate) of step 12 follows that of step 12" in dict(found(copy))["log"]


def test_steps_behind_the_end__differ(copy: Path) -> None:
    last = json.loads((copy / "steps.jsonl").read_text().splitlines()[-1])
    del last["sha256"]
    append_record(copy / "steps.jsonl", {**last, "step": 13})
    assert (
        "records with numbers follow the line that the result names, the first of a step"
        in dict(found(copy))["steps"]
    )
    renamed_heads(copy)
    assert "has a record of step 13, and the training ends after step 12" in dict(found(copy))["steps"]


def test_a_second_record_of_a_step__differs(copy: Path) -> None:
    path = copy / "steps.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:6], lines[4], *lines[6:]]) + "\n")
    relinked(path)
    renamed_heads(copy)
    assert "line 7: a second record of a step" in dict(found(copy))["steps"]


def test_a_step_of_a_trillion__is_named_at_once(copy: Path) -> None:
    last = json.loads((copy / "steps.jsonl").read_text().splitlines()[-1])
    del last["sha256"]
    append_record(copy / "steps.jsonl", {**last, "step": 10**12})
    renamed_heads(copy)
    assert "has a record of step 1000000000000, and the training ends" in dict(found(copy))["steps"]
    steps = read_steps(copy)
    assert steps is not None
    assert [(gap.first, gap.last) for gap in steps.gaps] == [(13, 10**12 - 1)]
    notes = [text for state, text in said(copy, "replay", steps="12:13") if state == "not proven"]
    assert notes == ["step 13 has no record; those behind it were not computed again"]


def test_unlinked_lines_in_front__differ(copy: Path) -> None:
    log = copy / "log.jsonl"
    forged = {
        "kind": "evaluate",
        "step": 12,
        "accuracy": 1.0,
        "correct": 23,
        "total": 23,
        "mean_per_class": 1.0,
    }
    log.write_text(json.dumps(forged) + "\n" + log.read_text())
    assert "line 1: does not follow the line before" in dict(found(copy))["log"]


@pytest.mark.parametrize(
    "garbage", [b"nonsense\n", bytes(300) + b"\n", b'{"kind": "train", "step": 3, "lo\n']
)
@pytest.mark.parametrize("name", ["log.jsonl", "steps.jsonl"])
def test_garbage_inside__differs_and_a_crash_does_not(copy: Path, name: str, garbage: bytes) -> None:
    path = copy / name
    before = path.read_bytes()
    path.write_bytes(before + garbage)
    assert found(copy) == []
    lines = before.splitlines(keepends=True)
    middle = next(i for i, line in enumerate(lines) if b'"step": 7' in line)
    path.write_bytes(b"".join([*lines[:middle], garbage, *lines[middle:]]))
    assert (
        f"line {middle + 1}: is no record, and no start follows it as after a crash"
        in dict(found(copy))[name[:-6]]
    )


def test_a_line_that_a_full_disk_cut__is_followed_by_itself(copy: Path) -> None:
    path = copy / "steps.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:5], lines[5][:40] + b"\n", *lines[5:]]))
    assert found(copy) == []


def test_steps_and_the_record_of_a_result_deleted__differ(copy: Path) -> None:
    (copy / "steps.jsonl").unlink()
    (copy / "trace.bin").unlink()
    rewrite(copy, put({}, "record"))
    texts = dict(found(copy))
    assert "it has no record of the last lines and checkpoints" in texts["result"]
    assert "was saved with a record of its steps, and steps.jsonl is gone" in texts["checkpoint"]


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def zeros(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


FILES = ["log.jsonl", "steps.jsonl", "result.json", "checkpoints/step_00000012/model.safetensors"]
FILES += ["checkpoints/step_00000012/ema.safetensors", "checkpoints/step_00000012/state.json"]


@pytest.mark.parametrize("harm", [fifo, folder, zeros])
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file__differs_and_nothing_waits(
    copy: Path, name: str, harm: Callable[[Path], None]
) -> None:
    harm(copy / name)
    assert found(copy), name


def test_a_file_of_tensors_that_no_digest_covers__differs(copy: Path) -> None:
    path = copy / "checkpoints/step_00000012/state.json"
    state = json.loads(path.read_text())
    del state["files"]["ema.safetensors"], state["sha256"]
    digest = json_digest(state)
    path.write_text(json.dumps({**state, "sha256": digest}))
    rewrite(copy, put(digest, "record", "checkpoints", "step_00000012"))
    fifo(path.with_name("ema.safetensors"))
    assert "ema.safetensors is not named in state.json; it was added" in dict(found(copy))["checkpoint"]


@pytest.mark.parametrize("value", [None, 0])
def test_score__of_a_result_without_its_counts_differs(copy: Path, value: Any) -> None:
    """What is scored again is held against the result too, not only against the log."""
    rewrite(copy, pop("metrics", "correct") if value is None else put(value, "metrics", "correct"))
    [(state, text)] = said(copy, "score", scores=True)
    assert state == "differs"
    assert " here, " in text
