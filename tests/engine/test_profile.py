"""`--profile`: a trace whose regions are the parts of a step, of a run that computes the same bits."""

import gzip
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import SHORT, TINY
from tests.trained import do
from vitctl.cli.show import run_views
from vitctl.engine.journal import read_records
from vitctl.engine.runtime import PARTS
from vitctl.errors import VitctlError
from vitctl.jobs.training import _expect
from vitctl.launch.prepare_run import prepare_run
from vitctl.launch.worker import work
from vitctl.models.variants import variant
from vitctl.recipe.load import Override, load_recipe


def test_profile__names_the_parts_and_changes_no_bit(short: Path, tiny_data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    do(TINY, run, **{"data.path": str(tiny_data), **SHORT, "log.profile": "7-99"})
    steps, same = (read_records(folder / "steps.jsonl")[1:] for folder in (run, short))
    assert [one["bits"] for one in steps] == [one["bits"] for one in same]
    weights = "checkpoints/step_00000008/model.safetensors"
    assert (run / weights).read_bytes() == (short / weights).read_bytes()
    assert [path.name for path in (run / "profile").iterdir()] == ["steps_7-8.json.gz"]  # what it has
    with gzip.open(run / "profile/steps_7-8.json.gz") as file:
        events = json.load(file)["traceEvents"]
    named = Counter(one["name"] for one in events if one.get("cat") == "user_annotation")
    assert {part: named[part] for part in PARTS} == dict.fromkeys(PARTS, 2) | {"forward": 4}
    logged = [one["phases"] for one in read_records(run / "log.jsonl") if one["kind"] == "train"]
    assert [tuple(one) for one in logged] == [PARTS] * len(logged)
    assert all(0 < sum(share for (share,) in one.values()) < 1.001 for one in logged)
    assert "phases" not in (run / "steps.jsonl").read_text()


def test_profile__that_a_resume_interrupts_has_a_second_file(tiny_data: Path, tmp_path: Path) -> None:
    values = {"data.path": str(tiny_data), **SHORT, "log.profile": "2-7"}
    do(TINY, tmp_path, **{**values, "schedule.total_steps": 6})
    longer = load_recipe(str(TINY), [Override(key, value) for key, value in values.items()])
    prepare_run(longer, tmp_path, allow=["schedule.total_steps"])
    work(tmp_path)
    assert {path.name for path in (tmp_path / "profile").iterdir()} == {
        "steps_2-6.json.gz",
        "steps_7.json.gz",
    }


def test_profile__of_finished_steps_is_said(tiny_data: Path, tmp_path: Path) -> None:
    values = {"data.path": str(tiny_data), **SHORT}
    do(TINY, tmp_path, **values)
    for asked, count in (("3-4", 1), ("3-4", 2), ("8", 3), ("8-9", 3)):
        again = load_recipe(str(tmp_path / "recipe.toml"), [Override("log.profile", asked)])
        prepare_run(again, tmp_path)
        work(tmp_path)
        said = [one["text"] for one in read_records(tmp_path / "log.jsonl") if one["kind"] == "warning"]
        assert (
            sum("no trace is written, since the run goes on after step 8" in text for text in said) == count
        )


@pytest.mark.parametrize("asked", ["0", "7-6", "５", "9@1", "x"])
def test_profile__of_what_cannot_be_is_refused(asked: str, tiny_data: Path, tmp_path: Path) -> None:
    with pytest.raises(
        VitctlError, match="20-24" if asked != "9@1" else "the run has 8 steps, and processes 0 to 0"
    ):
        do(TINY, tmp_path, **{"data.path": str(tiny_data), **SHORT, "log.profile": asked})


def train(**more: Any) -> dict[str, Any]:
    parts = dict(zip(PARTS, ([0.1, 0.02], [0.2, 0.2], [0.3, 0.3], [0.2, 0.28], [0.1, 0.1]), strict=True))
    return {"kind": "train", "phases": parts, **more}


def test_time__beside_what_the_plan_expects() -> None:
    memory = {"allocated": 2**30, "reserved": 2**31, "peak": 3 * 2**29}
    records = [{"kind": "expected", "mfu": 0.44}, train(mfu=0.29, gpu_memory=memory)]
    assert [*run_views._time_rows(records)] == [
        ("time of a step", "data 6%, forward 20%, backward 30%, exchange 24%, optimizer 10%, rest 10%"),
        ("of the GPU's peak", "29%, expected 44%: data 6%, exchange 24%, rest 10%"),
        ("GPU memory", "1.0 GiB allocated, 2.0 GiB reserved, 1.5 GiB peak"),
    ]
    assert [name for name, _ in run_views._time_rows([train(mfu=None)])] == ["time of a step"]
    assert [*run_views._time_rows([{"kind": "train", "step": 1}])] == []


@pytest.mark.parametrize(("device", "says"), [("NVIDIA H100 80GB HBM3", True), ("a GPU", False)])
def test_expectation__is_logged_of_a_known_gpu(device: str, says: bool) -> None:
    values = {"machine.processes": 8, "machine.precision": "bf16"}
    recipe: Any = load_recipe("in1k_b16", [Override(*one) for one in values.items()]).recipe
    written: list[Any] = []
    trainer: Any = SimpleNamespace(
        facts={"micro_batch": 64},
        state=SimpleNamespace(network=SimpleNamespace(config=variant("B/16", num_classes=1000))),
        log=SimpleNamespace(journal=SimpleNamespace(write=lambda _, **values: written.append(values))),
    )
    _expect(recipe, trainer, device)
    assert len(written) == says
    assert all(0.3 < one["mfu"] < 0.8 and one["images_per_second"] > 8 * 500 for one in written)
