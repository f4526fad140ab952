"""The files of a run against its records: an honest run passes, and each changed, damaged or missing file is
named.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.matrix import slow, spread
from tests.trained import crash_after
from tests.verify.conftest import (
    LAST,
    Train,
    as_earlier,
    edit,
    found,
    longer,
    recorded,
    replaced,
    rewrite,
    said,
)
from vitctl.engine.journal import append_record, end_of, json_digest
from vitctl.engine.state import RunState
from vitctl.errors import CheckpointError
from vitctl.jobs.record.result import published_digest, read_result
from vitctl.launch.worker import work
from vitctl.verify.run_check import verify

Harm = Callable[[Path], Any]


def test_honest_run__passes_and_says_what_was_not_checked(finished: Path) -> None:
    findings = [(one.what, one.state) for _, one in verify(finished)]
    assert findings == [
        ("steps", "ok"),
        ("log", "ok"),
        ("checkpoints", "ok"),
        ("result", "ok"),
        ("weights", "ok"),
        ("recipe", "ok"),
        ("data", "ok"),
        ("shards", "not checked"),
        ("digest", "ok"),
        ("replay", "not checked"),
        ("score", "not checked"),
    ]


@pytest.mark.slow
def test_honest_run__on_another_machine(train: Train, tiny_data: Path, tmp_path: Path) -> None:
    """Run and data were moved, and the run is only read."""
    shutil.copytree(tiny_data, tmp_path / "data")
    run = tmp_path / "elsewhere" / "run"
    shutil.copytree(train("a", tmp_path / "data"), run)
    shutil.move(tmp_path / "data", tmp_path / "elsewhere" / "data")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    [(state, text)] = said(run, "data")
    assert state == "not checked"
    assert text.endswith("; --data SHARDS names another place")
    assert found(run) == []
    options: tuple[dict[str, Any], ...] = ({"steps": "2"}, {"scores": True}, {"reads_bytes": True})
    for asked in options:  # what was asked for and cannot be computed is not proven
        assert {text.endswith("; --data SHARDS names another place") for _, text in found(run, **asked)} == {
            True
        }
    data = str(tmp_path / "elsewhere" / "data")
    checked = [one for _, one in verify(run, steps="10:11", scores=True, reads_bytes=True, data=data)]
    assert {one.state for one in checked} == {"ok"}
    assert [one.text for one in checked if one.what == "replay"] == ["steps 9 to 11: equal, bit for bit"]
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def lines(name: str, change: Callable[[list[bytes]], list[bytes]]) -> Harm:
    def do(run: Path) -> None:
        path = run / name
        path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))

    return do


def flip(name: str) -> Harm:
    def do(run: Path) -> None:
        content = bytearray((run / name).read_bytes())
        content[-7] ^= 1
        (run / name).write_bytes(content)

    return do


def put(value: Any, *keys: str) -> Harm:
    def change(result: dict[str, Any]) -> None:
        for key in keys[:-1]:
            result = result[key]
        result[keys[-1]] = value

    return lambda run: rewrite(run / "result.json", change)


def remove(*names: str) -> Harm:
    return lambda run: [(run / name).unlink() for name in names]


def rename_checkpoint(run: Path) -> None:
    (run / LAST).rename(run / "checkpoints/step_00000018")


CHANGES: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "edited": lambda all_: [*all_[:4], all_[4].replace(b'": ', b'":  ', 1), *all_[5:]],
    "removed": lambda all_: [*all_[:4], *all_[5:]],
    "added": lambda all_: [b'{"kind": "evaluate", "step": 12}\n', *all_],
    "damaged": lambda all_: [*all_[:4], bytes(300) + b"\n", *all_[5:]],
    "cut": lambda all_: all_[:-2],
}
HARMS: list[tuple[str, Harm, str, str]] = [
    (
        f"{name} {how}",
        lines(name, change),
        name[:-6],
        f"{name}(: has not the digest that the result names: it was changed, cut|, line 1: not a record)",
    )
    for name in ("log.jsonl", "steps.jsonl")
    for how, change in CHANGES.items()
]
HARMS += [
    (name, flip(f"{LAST}/{name}"), "checkpoint", f"step_00000012: damaged checkpoint: {name}")
    for name in ("model.safetensors", "ema.safetensors", "optimizer.safetensors", "state.json")
]
HARMS += [
    (".".join(keys), put(value, *keys), "result", "result.json: its digest is not that of its contents")
    for value, *keys in (
        (22, "metrics", "correct"),
        ("NVIDIA H100", "provenance", "device_name"),
        ("stopped", "status"),
        ("0" * 64, "record", "checkpoints", "step_00000008"),
    )
]
HARMS += [
    (
        "lr",
        lambda run: edit(run / "recipe.toml", "lr = 0.01", "lr = 0.02"),
        "recipe",
        "not those of the result",
    ),
    (
        "no result",
        lambda run: (run / "result.json").write_text("{"),
        "result",
        "not a valid result of vitctl",
    ),
    ("no log", remove("log.jsonl"), "log", "log.jsonl is gone"),
    ("no steps", remove("steps.jsonl"), "steps", "steps.jsonl is gone; the result names"),
    ("no steps, no result", remove("steps.jsonl", "result.json"), "steps", "gone; the recipe says log.trace"),
    ("no digests", put({}, "record"), "result", "names no digests of the records"),
    ("renamed checkpoint", rename_checkpoint, "checkpoint", "step_00000018: state.json says step 12"),
]


@pytest.mark.parametrize(
    ("harm", "what", "text"), spread(12, [one[1:] for one in HARMS]), ids=[one[0] for one in HARMS]
)
def test_harm__is_found_and_the_file_named(copy: Path, harm: Harm, what: str, text: str) -> None:
    harm(copy)
    texts = [line for thing, line in found(copy) if thing == what]
    assert re.search(text, texts[0])
    assert said(copy, "digest") == []


@pytest.mark.slow
def test_replaced_weights__are_found_in_an_unfinished_run_and_by_resume(copy: Path, on_test: Path) -> None:
    """Their digests are right, and there is no result: the log names the checkpoint."""
    (copy / "result.json").unlink()
    replaced(copy, on_test, "model", "ema", "optimizer")
    assert found(copy) == [
        ("checkpoint", f"{copy / LAST}: log.jsonl names another checkpoint of step 12"),
        ("result", f"{copy / 'result.json'}: missing, though the last step is done"),
    ]
    with pytest.raises(CheckpointError, match=r"log\.jsonl names another .*copy the files of this run back"):
        longer(copy)


RESUMED: list[tuple[Harm, str]] = [
    (rename_checkpoint, "state.json says step 12"),
    (remove("steps.jsonl"), "steps.jsonl is gone"),
    (lines("steps.jsonl", CHANGES["edited"]), "steps.jsonl is not the one that it was saved with"),
    (lines("steps.jsonl", lambda all_: all_[:-1]), "steps.jsonl is not the one that it was saved with"),
    (remove("log.jsonl"), "log.jsonl is not the one that it was saved with"),
    (lines("log.jsonl", CHANGES["edited"]), "log.jsonl is not the one that it was saved with"),
]


@pytest.mark.parametrize(("harm", "words"), RESUMED)
def test_resume__is_refused_beside_other_records(copy: Path, harm: Harm, words: str) -> None:
    harm(copy)
    with pytest.raises(CheckpointError, match=f"{re.escape(words)}.*copy the files of th"):
        longer(copy)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def zeros(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("log.jsonl", fifo),
        ("result.json", zeros),
        *slow(("steps.jsonl", zeros), ("result.json", fifo), (f"{LAST}/ema.safetensors", fifo)),
    ],
)
def test_what_is_not_a_file__differs_and_nothing_waits(copy: Path, name: str, harm: Harm) -> None:
    harm(copy / name)
    assert found(copy)


@pytest.mark.parametrize("odd", [3, {"a": []}], ids=str)
def test_malformed_result__is_not_a_traceback(copy: Path, odd: object) -> None:
    before = json.loads((copy / "result.json").read_text())
    fields = [("metrics", name) for name in ("by_seed", "tasks", "correct", "accuracy")]
    fields += [("provenance", name) for name in ("weights_step", "weights_sha256", "tasks", "versions")]
    fields += [("record", name) for name in ("checkpoints", "log.jsonl", "result.json")]
    for part, name in fields:
        (copy / "result.json").write_text(json.dumps({**before, part: {**before[part], name: odd}}))
        assert found(copy)


def test_published_digest__covers_the_result_and_is_printed_for_an_untouched_run(copy: Path) -> None:
    [(_, text)] = said(copy, "digest")
    result = read_result(copy)
    assert text.startswith(published_digest(result))
    assert result.record["result.json"] == published_digest(result)
    put("other words", "error")(copy)
    assert said(copy, "digest") == [("ok", text)]


@pytest.mark.slow
def test_missing_records__are_not_proven(copy: Path) -> None:
    """A disk that was full loses lines."""
    path = copy / "steps.jsonl"
    lines("steps.jsonl", lambda all_: [*all_[:5], *all_[7:]])(copy)
    recorded(copy, **{"steps.jsonl": end_of(path)})
    [(_, text)] = [one for one in found(copy, steps="all") if one[0] == "steps"]
    assert "; steps 5 to 6 have no record: " in text
    assert (
        "step 5 has no record; the steps after it were not computed again"
        in dict(found(copy, steps="5:8"))["replay"]
    )


def test_deleted_checkpoints__are_told(copy: Path) -> None:
    shutil.rmtree(copy / "checkpoints")
    assert found(copy) == []
    [(state, text)] = said(copy, "checkpoints")
    assert (state, text) == ("not checked", "step_00000008, step_00000012 of the result: deleted since")


def test_what_a_crash_leaves__is_not_accused(copy: Path) -> None:
    """An incomplete line, and a resume that made no step."""
    lines("steps.jsonl", lambda all_: [*all_, all_[5][:40]])(copy)
    append_record(copy / "log.jsonl", {"kind": "warning", "step": 0, "text": "resumed, and refused"})
    assert found(copy) == []


def test_result_of_an_earlier_vitctl__has_no_digest_and_is_scored_again(copy: Path) -> None:
    rewrite(copy / "result.json", lambda r: r["record"].pop("result.json"))
    put(22, "metrics", "correct")(copy)
    assert found(copy) == []
    [(state, text)] = said(copy, "result")
    assert (state, "has no digest of its fields" in text) == ("not checked", True)
    assert [what for what, _ in found(copy, scores=True)] == ["score"]


def test_checkpoints__that_name_no_records_are_refused(copy: Path) -> None:
    """Without the ends of the records, any records would fit."""
    states = {}
    for file in sorted((copy / "checkpoints").glob("*/state.json")):
        state = json.loads(file.read_text())
        for name in ("sha256", "log_head"):
            del state[name]
        states[file.parent.name] = json_digest(state)
        file.write_text(json.dumps({**state, "sha256": states[file.parent.name]}))
    log = copy / "log.jsonl"
    log.write_text(re.sub(r'"digest": "\w+", ', "", log.read_text()))
    recorded(copy, **{"log.jsonl": end_of(log), "checkpoints": states})
    assert any("state.json does not say log_head" in text for _, text in found(copy))
    (copy / "result.json").unlink()
    with pytest.raises(CheckpointError, match=r"state\.json does not say log_head; copy"):
        work(copy)


@pytest.mark.slow
def test_trace_off__then_on_proves_the_recorded_steps_alone(train: Train) -> None:
    run = train("off", **{"log.trace": False})
    assert not (run / "steps.jsonl").exists()
    assert not (run / "trace.bin").exists()
    assert found(run, scores=True) == []
    longer(run, **{"log.trace": True, "schedule.total_steps": 20})
    [(_, text)] = found(run, steps="17:20", scores=True)
    assert "steps 1 to 12 have no record" in text
    assert found(run, steps="all")[-1] == ("replay", "12 of the steps have no recorded start before them")


def test_earlier_release__is_verified_resumed_and_replayed(copy: Path) -> None:
    as_earlier(copy)
    assert found(copy, steps="all", scores=True) == []
    unnamed = "records; no result names their digest: see the checkpoints"
    assert said(copy, "steps") == [("not checked", f"12 {unnamed}")]
    assert said(copy, "log")[0][0] == "not checked"
    assert "publish" not in said(copy, "digest")[0][1]
    longer(copy)
    assert found(copy, steps="17:20", scores=True) == []


@pytest.mark.slow
def test_stopped_and_killed__the_record_continues(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines after the newest complete checkpoint are cut; torn lines are passed over."""
    with monkeypatch.context() as patched, crash_after(7):
        patched.setattr(RunState, "rescue", Mock())  # as SIGKILL: nothing is saved
        train("a")
    folder = tmp_path / "a"
    for name in ("log.jsonl", "steps.jsonl"):
        with (folder / name).open("a") as file:
            file.write('{"kind": "tra')
    assert found(folder) == []
    train("a")
    assert found(folder, steps="all", scores=True, reads_bytes=True) == []
    assert said(folder, "steps")[0][1] == "12 records, 2 starts, as the result names them"
    assert said(folder, "replay", steps="all") == [("ok", "steps 1 to 12: equal, bit for bit")]


def test_a_learning_rate_that_no_step_used__differs(copy: Path) -> None:
    recipe = (copy / "recipe.toml").read_text()
    (copy / "recipe.toml").write_text(re.sub(r"(?m)^lr = 0.01", "lr = 5.0", recipe))
    (copy / "result.json").unlink()
    text = "recipe.toml: its values are not those of the last start"
    assert ("recipe", text) in found(copy)


@pytest.mark.slow
def test_a_change_on_purpose__is_told(copy: Path) -> None:
    longer(copy)
    assert found(copy) == []
    [(state, text)] = said(copy, "recipe")
    assert state == "ok"
    assert text.endswith("; 1 of 2 starts had others")
    text = "steps 1 to 12: made with another recipe: schedule.total_steps was 12, now 20"
    assert ("not proven", text) in said(copy, "replay", steps="all")


def test_shards_that_are_not_those_of_the_run__are_not_read(
    finished: Path, tiny_data: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_data / "test", tmp_path / "other" / "train")
    shutil.copytree(tiny_data / "test", tmp_path / "other" / "test")
    here = {"reads_bytes": True, "data": str(tmp_path / "other")}
    [(what, text)] = found(finished, **here)
    assert what == "data"
    assert text.startswith("train: digest ")
    assert said(finished, "shards", **here) == [
        ("not checked", "not read, since they are not those of the run")
    ]


def test_no_run__is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"not a run, it has no recipe\.toml; give a run folder"):
        list(verify(tmp_path))
