"""What the files of a run say of each other: an honest run passes, and each change is named."""

import json
import re
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.verify.conftest import Train, edit, found, relinked, said
from vitctl.engine import training
from vitctl.engine.checkpoint.files import read_checkpoint, save_checkpoint
from vitctl.engine.journal import json_digest
from vitctl.engine.run_files import MODEL, OPTIMIZER
from vitctl.errors import CheckpointError
from vitctl.launch.worker import work
from vitctl.models.weights.weights_file import read_weights
from vitctl.verify.finding import FAILS
from vitctl.verify.verify import verify

STEP_12 = Path("checkpoints/step_00000012")


def test_honest_run__passes_and_says_what_was_not_checked(finished: Path) -> None:
    findings = [(one.what, one.state) for _, one in verify(finished)]
    assert findings == [
        ("steps", "ok"),
        ("log", "ok"),
        ("checkpoints", "ok"),
        ("result", "ok"),
        ("weights", "ok"),
        ("trace", "ok"),
        ("provenance", "ok"),
        ("the rest", "not checked"),
        ("recipe", "ok"),
        ("data", "ok"),
        ("shards", "not checked"),
        ("digest", "ok"),
        ("replay", "not checked"),
        ("score", "not checked"),
    ]


def test_honest_run__on_another_machine(train: Train, tiny_data: Path, tmp_path: Path) -> None:
    """Run and data lie elsewhere, and the run is only read."""
    shutil.copytree(tiny_data, tmp_path / "data")
    run = tmp_path / "elsewhere" / "run"
    shutil.copytree(train("a", tmp_path / "data"), run)
    shutil.move(tmp_path / "data", tmp_path / "elsewhere" / "data")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    [(state, text)] = said(run, "data")
    assert state == "not checked"
    assert str(tmp_path / "data") in text
    assert text.endswith("; --data SHARDS names another place")
    data = str(tmp_path / "elsewhere" / "data")
    checked = [one for _, one in verify(run, steps="10:11", scores=True, reads_bytes=True, data=data)]
    assert {one.state for one in checked if one.what != "the rest"} == {"ok"}
    assert [one.text for one in checked if one.what == "replay"] == ["steps 9 to 11: equal, bit for bit"]
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["log.jsonl", "steps.jsonl"])
def test_edited_line__is_named(copy: Path, name: str) -> None:
    lines = (copy / name).read_text().splitlines()
    lines[4] = re.sub(r'("time": |"gradient": ")', r"\g<0>7", lines[4], count=1)
    (copy / name).write_text("\n".join(lines) + "\n")
    what = name.removesuffix(".jsonl")
    thing, text = found(copy)[0]
    assert thing == what
    assert f"{copy / name}, line 5: does not follow the line before" in text


def test_edited_line__of_a_forger_who_links_anew(copy: Path) -> None:
    """The result names the end of the chain; and the numbers are those of the other file."""
    record = next(
        json.loads(line) for line in (copy / "log.jsonl").read_text().splitlines() if '"step": 7' in line
    )
    edit(copy / "log.jsonl", f'"loss": {record["loss"]!r}', '"loss": 0.001')
    relinked(copy / "log.jsonl")
    texts = dict(found(copy))
    assert "that the result names; its end was removed or changed" in texts["log"]
    assert "log.jsonl has no line with the digest that it was saved with" in texts["checkpoint"]
    edit(
        copy / "result.json",
        json.loads((copy / "result.json").read_text())["record"]["log.jsonl"],
        head_of(copy / "log.jsonl"),
    )
    text = dict(found(copy))["log"]
    assert text == f"step 7: loss is 0.001 in log.jsonl, {record['loss']!r} in steps.jsonl"


def head_of(path: Path) -> str:
    return str(json.loads(path.read_text().splitlines()[-1])["sha256"])


def test_lines_removed_from_the_end__are_missed(copy: Path) -> None:
    path = copy / "steps.jsonl"
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines()[:-2]))
    texts = dict(found(copy))
    assert "its end was removed or changed" in texts["steps"]
    assert "steps.jsonl has no line with the digest that it was saved with" in texts["checkpoint"]


def test_records_that_a_full_disk_swallowed__are_told(copy: Path) -> None:
    path = copy / "steps.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("".join(line + "\n" for line in [*lines[:5], *lines[7:]]))
    relinked(path)
    edit(
        copy / "result.json",
        json.loads((copy / "result.json").read_text())["record"]["steps.jsonl"],
        head_of(path),
    )
    assert found(copy)[0] == (
        "steps",
        "2 have no record, the first is step 5: a full disk, or lines were removed",
    )


@pytest.mark.parametrize(
    "name", ["model.safetensors", "ema.safetensors", "optimizer.safetensors", "state.json"]
)
def test_edited_checkpoint__is_named(copy: Path, name: str) -> None:
    path = copy / STEP_12 / name
    content = bytearray(path.read_bytes())
    content[-7] ^= 1
    path.write_bytes(content)
    thing, text = found(copy)[0]
    assert thing == "checkpoint"
    assert f"{copy / STEP_12}: not a whole checkpoint: {name}" in text


def forged(run: Path, step: int) -> None:
    """A checkpoint with other weights and digests of them."""
    folder = run / f"checkpoints/step_{step:08d}"
    saved, stored = read_checkpoint(folder), read_weights(str(folder / "model.safetensors"))
    model = {name: tensor + 0.25 for name, tensor in saved.tensors(MODEL).items()}
    rest = {name: saved.tensors(name) for name in ("ema", OPTIMIZER)}
    state = {key: value for key, value in saved.state.items() if key not in ("format", "step", "files")}
    shutil.rmtree(folder)
    tensors = {MODEL: model, **rest}
    save_checkpoint(folder.parent, step, tensors=tensors, config=stored.config, meta=stored.meta, state=state)


def test_edited_checkpoint__of_a_forger_who_computes_its_digests(copy: Path) -> None:
    forged(copy, 8)
    [(thing, text)] = found(copy)
    assert thing == "checkpoint"
    assert text.endswith(
        "step_00000008: is not the one that the result names; it was changed and its digests too"
    )
    # and where the result is forged too, a replay that starts from it tells
    result = json.loads((copy / "result.json").read_text())
    state = json.loads((copy / "checkpoints/step_00000008/state.json").read_text())
    result["record"]["checkpoints"]["step_00000008"] = state["sha256"]
    (copy / "result.json").write_text(json.dumps(result))
    named = (
        "checkpoint",
        f"{copy / 'checkpoints/step_00000008'}: log.jsonl names another checkpoint of step 8",
    )
    assert found(copy) == [named]
    assert found(copy, steps="9:10") == [
        named,
        (
            "replay",
            "step 8: checkpoint of step 8: its weights are not those that were recorded after that step",
        ),
    ]


def test_edited_result__is_named(copy: Path) -> None:
    correct = json.loads((copy / "result.json").read_text())["metrics"]["correct"]
    edit(copy / "result.json", f'"correct": {correct}', f'"correct": {correct + 1}')
    [(thing, text)] = found(copy)
    assert (thing, text) == (
        "result",
        f"{correct + 1} of 23 are correct in it, {correct} of 23 in the log at step 12",
    )
    edit(copy / "result.json", f'"correct": {correct + 1}', f'"correct": {correct}')
    edit(copy / "result.json", '"weights_sha256": "', '"weights_sha256": "0')
    assert [thing for thing, _ in found(copy)] == ["weights"]


def test_edited_recipe__is_named(copy: Path) -> None:
    edit(copy / "recipe.toml", "lr = 0.01", "lr = 0.02")
    assert found(copy) == [
        (
            "recipe",
            "recipe.toml: its values are not those of the result: optimizer.lr was 0.01, is 0.02",
        )
    ]
    edit(copy / "recipe.toml", "lr = 0.02", "lr = 0.01")
    edit(copy / "recipe.toml", 'precision = "float64"', 'precision = "float32"')
    [(_, text)] = found(copy)
    assert text.endswith(' steps was made with its values: machine.precision was "float64", is "float32"')


def test_a_run_whose_starts_name_no_head__is_not_proven(copy: Path) -> None:
    """Made before starts and checkpoints named the ends of the records."""
    path = copy / "steps.jsonl"
    edit(path, '"before": "", "unrecorded": 0, "checkpoint": "", ', "")
    relinked(path)
    lines = {step: line for line in path.read_text().splitlines() if (step := json.loads(line)["step"])}
    states = {}
    for file in sorted((copy / "checkpoints").glob("*/state.json")):
        state = json.loads(file.read_text())
        for name in ("sha256", "log_head", "unrecorded"):
            del state[name]
        state["steps_head"] = json.loads(lines[state["step"]])["sha256"]
        states[file.parent.name] = json_digest(state)
        file.write_text(json.dumps({**state, "sha256": states[file.parent.name]}))
    log = copy / "log.jsonl"
    log.write_text(re.sub(r'"digest": "\w+", ', "", log.read_text()))
    relinked(log)
    result = json.loads((copy / "result.json").read_text())
    result["record"] = {"log.jsonl": head_of(log), "steps.jsonl": head_of(path), "checkpoints": states}
    (copy / "result.json").write_text(json.dumps(result))
    failing = [(one.what, one.state) for _, one in verify(copy, steps="all") if one.state in FAILS]
    assert failing == [("starts", "not proven"), ("checkpoints", "not proven")]
    assert said(copy, "replay", steps="all") == [("ok", "steps 1 to 12: equal, bit for bit")]
    for place in ("result.json", "checkpoints/step_00000012/state.json"):
        (copy / place).unlink()
    work(copy)
    warned = [json.loads(line)["text"] for line in log.read_text().splitlines() if '"warning"' in line]
    assert warned[-1].startswith("step_00000008 does not say unrecorded, log_head")
    assert found(copy, steps="9:12") == [
        (what, text) for what, text in found(copy) if what in ("starts", "checkpoints")
    ]


def test_trace_off__writes_neither_file(train: Train) -> None:
    folder = train("off", **{"log.trace": False, "schedule.total_steps": 6})
    assert not (folder / "steps.jsonl").exists()
    assert not (folder / "trace.bin").exists()
    assert found(folder) == []
    assert said(folder, "log")[0][0] == "ok"


def test_stopped_and_killed__the_chain_goes_on(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error after step 7 saves; lines behind the newest whole checkpoint are cut; torn lines are told."""
    log_step = training.Run._log_step

    def fails(run: training.Run, step: int, *rest: object) -> None:
        log_step(run, step, *rest)  # type: ignore[arg-type]
        if step == 7:
            raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(training.Run, "_log_step", fails)
        patched.setattr(training, "rescue", Mock())  # as SIGKILL: nothing is saved
        with pytest.raises(ZeroDivisionError):
            train("a")
    folder = tmp_path / "a"
    for name in ("log.jsonl", "steps.jsonl"):
        with (folder / name).open("a") as file:
            file.write('{"kind": "tra')
    assert found(folder) == []
    assert "1 incomplete, as a crash leaves them" in said(folder, "steps")[0][1]
    train("a")
    assert found(folder, steps="all", scores=True) == []
    assert said(folder, "steps")[0][1].startswith("12 records, each follows the one before, 2 starts; head ")
    assert said(folder, "replay", steps="all") == [("ok", "steps 1 to 12: equal, bit for bit")]


def test_no_run__is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"not a run, it has no recipe\.toml; give a run folder"):
        list(verify(tmp_path))
