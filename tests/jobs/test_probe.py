"""The few-shot probe of pre-training: it says the number of `fewshot`, and leaves the training as it is."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Run, checkpoint, run_as_two, train_records
from tests.trained import CPU, do, result_of
from vitctl.errors import DataError, RecipeError
from vitctl.jobs.training import ImagePass

DROPOUT = {"model.dropout": 0.1}


def probe(data: Path, **values: Any) -> dict[str, Any]:
    return {
        "fewshot_probe.path": str(data),
        "fewshot_probe.every_steps": 8,
        "fewshot_probe.shots": (1, 3),
        "fewshot_probe.seeds": (0, 1),
        **DROPOUT,
        **values,
    }


def said(folder: Path) -> list[tuple[int, int, list[float]]]:
    """(step, shots, accuracy by seed) as the journal has them."""
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [(r["step"], r["shots"], r["seeds"]) for r in records if r["kind"] == "fewshot"]


def curve(folder: Path) -> list[tuple[float, ...]]:
    return [(r["loss"], r["lr"], r["grad_norm"]) for r in train_records(folder)]


@pytest.mark.slow
def test_probe__does_not_touch_the_training(run: Run, tiny_data: Path) -> None:
    alone, probed = run("alone", **DROPOUT), run("probed", **probe(tiny_data))
    assert len(curve(alone)) == 20
    assert curve(probed) == curve(alone)
    assert checkpoint(probed, 20) == checkpoint(alone, 20)
    assert [(step, shots) for step, shots, _ in said(probed)] == [
        (step, shots) for step in (8, 16, 20) for shots in (1, 3)
    ]


@pytest.mark.slow
def test_probe__says_the_number_of_fewshot(run: Run, tiny_data: Path, tmp_path: Path) -> None:
    folder = run("probed", **probe(tiny_data))
    ema = folder / "checkpoints" / "step_00000020" / "ema.safetensors"
    values = {"fewshot.shots": (1, 3), "fewshot.seeds": (0, 1), "data.path": str(tiny_data)}
    result = do("fewshot", tmp_path / "few", **CPU, **values, **{"weights.source": str(ema)})
    last = {str(shots): seeds for step, shots, seeds in said(folder) if step == 20}
    assert last == result["metrics"]["by_seed"]
    in_result = {shots: result_of(folder)["metrics"][f"{shots}-shot"] for shots in last}
    assert in_result == result["metrics"]["accuracy"]


@pytest.mark.slow
def test_probe__stopped_inside_it_goes_on_with_it(
    run: Run, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run("whole", **probe(tiny_data))
    look, passes = ImagePass.__call__, []

    def look_and_signal(self: ImagePass, *args: Any) -> Any:
        passes.append(1)
        if len(passes) == 3:  # the first split of step 16
            os.kill(os.getpid(), signal.SIGTERM)
        return look(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(ImagePass, "__call__", look_and_signal)
        folder = run("stopped", **probe(tiny_data))
    assert json.loads((folder / "result.json").read_text())["status"] == "stopped"
    assert {step for step, _, _ in said(folder)} == {8}
    folder = run("stopped", **probe(tiny_data))
    assert said(folder) == said(whole)
    assert curve(folder) == curve(whole)
    assert checkpoint(folder, 20) == checkpoint(whole, 20)
    assert run("stopped", **probe(tiny_data)) == folder
    assert said(folder) == said(whole)


@pytest.mark.slow
def test_probe__two_processes_say_the_same(run: Run, tiny_data: Path, tmp_path: Path) -> None:
    values = {
        k: list(v) if isinstance(v, tuple) else v
        for k, v in probe(tiny_data, **{"model.dropout": 0.0}).items()
    }
    one = run("one", **values)
    shown = run_as_two(tmp_path / "two", tiny_data, **values)
    assert len(said(one)) == 6
    assert said(tmp_path / "two") == said(one)
    assert "3-shot accuracy" in shown


@pytest.mark.parametrize(
    ("values", "error", "text"),
    [
        ({"fewshot_probe.every_steps": 5}, RecipeError, "set fewshot_probe.dataset or fewshot_probe.path"),
        ({"fewshot_probe.dataset": "digits"}, RecipeError, "does nothing without every_steps"),
        ({"fewshot_probe.every_steps": 5, "fewshot_probe.path": "nowhere"}, DataError, "nowhere"),
    ],
)
def test_probe__is_checked_before_the_first_step(
    run: Run, tmp_path: Path, values: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        run("wrong", **values)
    assert not (tmp_path / "wrong").exists()
