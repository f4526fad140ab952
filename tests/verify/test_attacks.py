"""Forged, edited and removed records and checkpoints: each ends as "differs" or "not proven". Honest runs
pass.

A lazy forger computes the digests of what was changed again; a diligent one (`recomputed`) every digest of
the run, so that only steps and scores that are computed again can tell.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.verify.conftest import Train, relinked, trained
from vitctl.engine import nonfinite, training
from vitctl.engine.distributed.agreement import checksum
from vitctl.engine.journal import json_digest
from vitctl.engine.trace.chain import head, linked, split
from vitctl.errors import CheckpointError, VitctlError
from vitctl.jobs import provenance
from vitctl.launch.prepare import prepare_run
from vitctl.launch.worker import work
from vitctl.models.build import build
from vitctl.models.weights.weights_file import read_weights, save_weights, weights_digest
from vitctl.recipe.load import Override, load_recipe
from vitctl.system.text import one_line
from vitctl.verify.finding import FAILS
from vitctl.verify.verify import verify

Change = Callable[[Path], None]
LAST = "checkpoints/step_00000012"
ALL: dict[str, Any] = {"steps": "all", "scores": True, "reads_bytes": True}


def outcome(run: Path, **options: Any) -> list[str]:
    """What fails, a line each; an error is one too."""
    try:
        lines = [f"{one.what}: {one.text}" for _, one in verify(run, **options) if one.state in FAILS]
    except VitctlError as error:
        lines = [str(error)]
    assert all(line == one_line(line) for line in lines)
    return lines


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a JSON file; a state.json gets its digest again."""
    value = json.loads(path.read_text())
    change(value)
    if path.name == "state.json":
        for name, file in value["files"].items():
            content = (path.parent / name).read_bytes()
            file.update(bytes=len(content), sha256=sha256(content).hexdigest())
        value.pop("sha256")
        value["sha256"] = json_digest(value)
    path.write_text(json.dumps(value))


def lines(path: Path, change: Callable[[list[dict[str, Any]]], Any]) -> None:
    """Change the records of a file; their links stay."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records = change(records) or records
    path.write_text("".join(json.dumps(one) + "\n" for one in records))


def recomputed(run: Path) -> None:
    """Compute every digest of a run again, in the order of its writing."""
    new: dict[str, str] = {"": ""}
    steps, log, before = run / "steps.jsonl", run / "log.jsonl", ""
    texts = []
    for line in steps.read_bytes().splitlines() if steps.exists() else ():
        body, old = split(line).body, split(line).sha256
        record = json.loads(body)
        if "before" in record:
            record["before"] = before
        texts.append(linked(json.dumps(record).encode(), before))
        before = new[old] = split(texts[-1]).sha256
    if texts:
        steps.write_bytes(b"\n".join(texts) + b"\n")
    texts, before = [], ""
    for line in log.read_bytes().splitlines():
        body, old = split(line).body, split(line).sha256
        record = json.loads(body)
        state = run / f"checkpoints/step_{record.get('step', 0):08d}/state.json"
        if record["kind"] == "checkpoint" and state.exists():
            ends = {
                key: new.get(json.loads(state.read_text())[key], before) for key in ("steps_head", "log_head")
            }
            rewrite(state, methodcaller("update", ends))
            record["digest"] = json.loads(state.read_text())["sha256"]
        texts.append(linked(json.dumps(record).encode(), before))
        before = new[old] = split(texts[-1]).sha256
    log.write_bytes(b"\n".join(texts) + b"\n")
    named(run)


def named(run: Path) -> None:
    """The result names what is there."""
    states = {
        p.parent.name: json.loads(p.read_text())["sha256"] for p in run.glob("checkpoints/*/state.json")
    }
    heads = {name: head(run / name) for name in ("log.jsonl", "steps.jsonl") if (run / name).exists()}
    used = {"weights_sha256": weights_digest(load_file(run / LAST / "ema.safetensors"))}
    rewrite(
        run / "result.json",
        lambda r: (r.update(record=heads | {"checkpoints": states}), r["provenance"].update(used)),
    )


@pytest.fixture(scope="session")
def on_test(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose weights were trained on the images that are scored."""
    return trained(tmp_path_factory.mktemp("on_test") / "run", tiny_data, **{"data.train_split": "test"})


def put(run: Path, other: Path, *parts: str) -> None:
    """Weights of another run, and what the record says of them."""
    for part in parts or ("model", "ema", "optimizer"):
        shutil.copy(other / LAST / f"{part}.safetensors", run / LAST)
    weights = read_weights(str(run / LAST / "model.safetensors"))
    digest = checksum((name, weights.state[name]) for name in build(weights.config, seed=0).state_dict())
    lines(
        run / "steps.jsonl",
        lambda records: [one for one in records if one["step"] < 12 or not one.update(weights=digest)],
    )


def claim(**values: Any) -> Change:
    """The start says so."""

    def change(run: Path) -> None:
        lines(run / "steps.jsonl", lambda records: records[0].update(values))

    return change


def other_torch(run: Path) -> None:
    claim(versions={"torch": "1.0.0"})(run)
    rewrite(run / "result.json", lambda r: r["provenance"].update(versions={"torch": "1.0.0"}))


def two_processes(run: Path) -> None:
    claim(processes=2, draws=True)(run)
    rewrite(run / "result.json", lambda r: r["provenance"].update(processes=2))


def last_step_unrecorded(run: Path) -> None:
    lines(run / "steps.jsonl", lambda records: records[:-1])
    rewrite(run / LAST / "state.json", lambda s: s.update(unrecorded=1, steps_head=head(run / "steps.jsonl")))


def nothing(_: Path) -> None:
    """The forger claims nothing."""


CLAIMS: list[Change] = [nothing, other_torch, two_processes, claim(precision="bf16"), claim(processes=8)]
CLAIMS += [claim(lanes=4, processes=2), claim(device="cuda", device_name="NVIDIA H100"), last_step_unrecorded]
CLAIMS += [claim(before=None), claim(weights="0" * 64, versions={})]
NAMES = [
    "nothing",
    "torch",
    "processes",
    "precision",
    "many",
    "lanes",
    "cuda",
    "unrecorded",
    "old",
    "weights",
]


@pytest.mark.parametrize("made", CLAIMS, ids=NAMES)
def test_weights_trained_on_the_test_set__are_not_passed(copy: Path, on_test: Path, made: Change) -> None:
    put(copy, on_test)
    made(copy)
    recomputed(copy)
    assert outcome(copy, steps="all")


def test_dropout_of_more_processes__proves_nothing(train: Train) -> None:
    run = train("a", **{"model.dropout": 0.1})
    claim(processes=2)(run)
    rewrite(run / "result.json", lambda r: r["provenance"].update(processes=2))
    recomputed(run)
    [line] = [one for one in outcome(run, steps="all") if one.startswith("replay")]
    assert (
        line
        == "replay: dropout was drawn by 2 processes: loss, gradient and weights cannot be compared by one"
    )


@pytest.mark.parametrize("part", ["model", "ema", "optimizer"])
def test_a_part_of_a_checkpoint__is_not_passed(copy: Path, on_test: Path, part: str) -> None:
    put(copy, on_test, part)
    other_torch(copy)
    recomputed(copy)
    assert f"the checkpoint of step 12: {part} " in "".join(outcome(copy, steps="all"))


def test_a_single_tensor_of_another_training__is_not_passed(copy: Path) -> None:
    path = copy / LAST / "ema.safetensors"
    weights = read_weights(str(path))
    weights.state["head.weight"] = (
        torch.randn_like(weights.state["head.weight"]) * weights.state["head.weight"].std()
    )
    save_weights(path, weights.state, weights.config, weights.meta)
    other_torch(copy)
    recomputed(copy)
    assert "ema head.weight" in "".join(outcome(copy, steps="all"))


@pytest.mark.parametrize(
    "said", [{"eval_method": "shorter_side"}, {"exif_orientation": False}, {"mean": [0.4, 0.5, 0.5]}]
)
def test_what_follows_from_the_recipe__is_not_read_from_the_record(copy: Path, said: dict[str, Any]) -> None:
    before = json.loads((copy / "result.json").read_text())["provenance"]
    rewrite(copy / "result.json", lambda r: r["provenance"].update(said))
    assert any(f"{key} is " in line for key in said for line in outcome(copy))
    rewrite(copy / "result.json", lambda r: r.update(provenance=before))
    path = copy / LAST / "model.safetensors"
    weights = read_weights(str(path))
    save_weights(path, weights.state, weights.config, {**weights.meta, **said})
    recomputed(copy)
    assert any(f"model says another {next(iter(said))}" in line for line in outcome(copy, steps="all"))


def removed(*names: str) -> Change:
    return lambda run: [(run / name).unlink() for name in names] and None


def record_without(chosen: Callable[[dict[str, Any]], bool], name: str = "steps.jsonl") -> Change:
    def change(run: Path) -> None:
        lines(run / name, lambda records: [one for one in records if not chosen(one)])
        relinked(run / name)
        named(run)

    return change


def edited(name: str, old: str, new: str) -> Change:
    def change(run: Path) -> None:
        text = (run / name).read_text()
        found = re.search(old, text)
        assert found, old
        (run / name).write_text(text.replace(found[0], found.expand(new), 1))
        recomputed(run)

    return change


def state(**values: Any) -> Change:
    def change(run: Path) -> None:
        rewrite(run / LAST / "state.json", lambda s: s.update(values))
        named(run)

    return change


def renamed(run: Path) -> None:
    (run / LAST).rename(run / "checkpoints/step_00000018")
    rewrite(run / "checkpoints/step_00000018/state.json", lambda s: s.update(step=18))


def untraced(run: Path) -> None:
    removed("steps.jsonl", "trace.bin")(run)
    edited("recipe.toml", "trace = true", "trace = false")(run)
    for path in run.glob("checkpoints/*/state.json"):
        rewrite(path, lambda s: s.update(steps_head="", unrecorded=s["step"]))
    recomputed(run)


def better_score(run: Path) -> None:
    def change(records: list[dict[str, Any]]) -> None:
        last = next(one for one in reversed(records) if one["kind"] == "evaluate")
        last.update(correct=23, accuracy=1.0, mean_per_class=1.0)
        rewrite(
            run / "result.json", lambda r: r["metrics"].update(correct=23, accuracy=1.0, mean_per_class=1.0)
        )

    lines(run / "log.jsonl", change)
    recomputed(run)


def start_added(run: Path) -> None:
    """A second start explains that three steps are missing."""

    def change(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        start = {**records[0], "step": 8, "unrecorded": 3, "checkpoint": "0" * 64, "weights": ""}
        return [*records[:6], start, *records[9:]]

    lines(run / "steps.jsonl", change)
    recomputed(run)


ATTACKS: list[tuple[str, Change, dict[str, Any]]] = [
    ("steps removed", removed("steps.jsonl"), {}),
    ("steps and result removed", removed("steps.jsonl", "result.json"), {}),
    ("log removed", removed("log.jsonl"), {}),
    ("log and result removed", removed("log.jsonl", "result.json"), {}),
    ("last step removed", record_without(lambda r: r["step"] == 12), {}),
    ("a step removed", record_without(lambda r: r["step"] == 5), {}),
    ("start removed", record_without(lambda r: r.get("kind") == "start"), {}),
    ("end of the log removed", record_without(lambda r: r["step"] == 12, "log.jsonl"), {}),
    ("state of a later step", state(step=18), {}),
    ("checkpoint of a later step", renamed, {}),
    ("state without a head", state(steps_head="", unrecorded=0), {}),
    ("state of another log", state(log_head="0" * 64), {}),
    ("start added", start_added, ALL),
    ("no record at all", untraced, ALL),
    ("better score", better_score, ALL),
    ("another loss", edited("steps.jsonl", r'("step": 12, "bits": {"loss": "0x1\.)', r"\g<1>0"), ALL),
    ("another learning rate", edited("steps.jsonl", r'("step": 9,.*?"lr": "0x1\.)', r"\g<1>0"), ALL),
    ("another batch size", edited("steps.jsonl", r'"batch_size": 16, ', '"batch_size": 32, '), ALL),
    ("another image", edited("steps.jsonl", r'("step": 3,.*?"bytes": ")\w', r"\g<1>x"), ALL),
    ("a start of before", edited("steps.jsonl", r'"before": "", ', ""), {}),
    ("a draw of dropout", edited("steps.jsonl", '"draws": false', '"draws": true'), ALL),
]


@pytest.mark.parametrize(("attack", "options"), [one[1:] for one in ATTACKS], ids=[one[0] for one in ATTACKS])
def test_attack__is_not_passed(copy: Path, attack: Change, options: dict[str, Any]) -> None:
    attack(copy)
    assert outcome(copy, **options)


@pytest.mark.parametrize("options", [{"steps": "2"}, {"scores": True}, {"reads_bytes": True}], ids=str)
def test_what_was_asked_for_and_cannot_be_computed__is_not_passed(
    finished: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    assert outcome(finished, data=str(tmp_path / "gone")) == []
    assert outcome(finished, data=str(tmp_path / "gone"), **options)


RESUMED: list[tuple[str, Change, str]] = [
    ("a later step", state(step=18), "state.json says step 18"),
    ("a renamed folder", renamed, "is of step 18, and the record that it was saved with ends at step 12"),
    ("no steps", removed("steps.jsonl"), "steps.jsonl is gone"),
    ("the last line", record_without(lambda r: r["step"] == 12), "steps.jsonl has no line with the digest"),
    ("no log", removed("log.jsonl"), "log.jsonl has no line with the digest"),
    ("another digest", state(num_skipped=0, samples=1), "log.jsonl names another checkpoint of step 12"),
    (
        "no heads",
        lambda run: rewrite(run / LAST / "state.json", lambda s: s.pop("log_head")),
        "does not say log_head",
    ),
]


@pytest.mark.parametrize(("change", "words"), [one[1:] for one in RESUMED], ids=[one[0] for one in RESUMED])
def test_resume__is_refused_where_checkpoint_and_record_do_not_fit(
    copy: Path, change: Change, words: str
) -> None:
    change(copy)
    steps = copy / "steps.jsonl"
    before = steps.read_bytes() if steps.exists() else b""
    with pytest.raises(
        CheckpointError, match=f"{re.escape(words)}.*delete this folder to resume from the checkpoint"
    ):
        longer(copy)
    assert (steps.read_bytes() if steps.exists() else b"") == before


def test_resume__other_weights_are_refused(copy: Path, on_test: Path) -> None:
    for part in ("model", "ema", "optimizer"):
        shutil.copy(on_test / LAST / f"{part}.safetensors", copy / LAST)
    recomputed(copy)
    words = "its weights are not those that steps.jsonl has after step 12"
    assert any(words in line for line in outcome(copy))
    with pytest.raises(CheckpointError, match=words.replace(".", r"\.")):
        longer(copy)


def test_resume__beside_a_damaged_log_is_refused(copy: Path) -> None:
    log = copy / "log.jsonl"
    log.write_bytes(log.read_bytes().replace(b'"time": 1', b'"time": 2', 1))
    with pytest.raises(CheckpointError, match=r"log\.jsonl, line \d+, does not follow the line before"):
        longer(copy)


def longer(run: Path, **values: Any) -> None:
    given = [Override(key, value) for key, value in {"schedule.total_steps": 20, **values}.items()]
    prepare_run(load_recipe(str(run / "recipe.toml"), given), run, allow=("schedule.total_steps",))
    work(run)


def stopped(train: Train, name: str, monkeypatch: pytest.MonkeyPatch, *, saves: bool) -> None:
    """An error after step 7; the state is saved, or not, as after SIGKILL."""

    def fails(step: int, *_: Any) -> None:
        if step == 7:
            raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(nonfinite, "check_bound", fails)
        if not saves:
            patched.setattr(training, "rescue", lambda *_: None)
        with pytest.raises(ZeroDivisionError):
            train(name)


@pytest.mark.parametrize("saves", [False, True], ids=["killed", "stopped"])
def test_honest_run__that_was_resumed_passes(
    train: Train, monkeypatch: pytest.MonkeyPatch, saves: bool
) -> None:
    stopped(train, "a", monkeypatch, saves=saves)
    run = train("a")
    assert outcome(run, **ALL) == []
    starts = [
        json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines() if '"start"' in line
    ]
    assert [(one["step"], one["unrecorded"], bool(one["checkpoint"])) for one in starts] == [
        (0, 0, False),
        (7 if saves else 4, 0, True),
    ]


def test_honest_run__passes_also_elsewhere(finished: Path, tmp_path: Path) -> None:
    assert outcome(finished, **ALL) == []
    assert outcome(Path(shutil.copytree(finished, tmp_path / "deep" / "moved")), **ALL) == []


def test_honest_run__with_a_record_of_some_steps_is_proven_there_alone(train: Train) -> None:
    run = train("off", **{"log.trace": False})
    assert outcome(run, scores=True) == []
    longer(run, **{"log.trace": True})
    [text] = outcome(run, steps="17:20", scores=True)
    assert "steps 1 to 12 have none" in text
    assert "no start is recorded before step 1" in outcome(run, steps="all")[-1]


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="there are no vector instructions to leave out",
)
def test_another_machine__is_compared_within_a_tolerance(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor without vector instructions rounds otherwise, from the first weights on."""
    with monkeypatch.context() as patched:
        patched.setattr(provenance, "versions", lambda: {"torch": "1.0.0"})
        run = train(
            "a", **{"machine.precision": "float32", "machine.attention": "math", "schedule.total_steps": 20}
        )
    line = [sys.executable, "-m", "vitctl", "verify", str(run), "--replay", "all"]
    done = subprocess.run(
        line, capture_output=True, text=True, env={**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    )
    [text] = [line for line in done.stdout.splitlines() if line.startswith("ok          replay")]
    assert "replay within a tolerance: steps 1 to 20: " in text
    assert "2 checkpoints within 0.05 of their updates" in text
    assert done.returncode == 0, done.stdout
