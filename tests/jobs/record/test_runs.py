"""Which weights of a run stand for it, and which run is taken where none is named."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Run
from tests.trained import result_of
from vitctl.engine.evaluation import Score
from vitctl.errors import CheckpointError, RecipeError
from vitctl.jobs import training
from vitctl.jobs.inputs.weights import find_weights
from vitctl.jobs.record.result import choose_weights, newest_run
from vitctl.models.weights.weights_file import read_weights, weights_digest

STEPS = {
    "schedule.total_steps": 8,
    "checkpoint.every_steps": 2,
    "checkpoint.keep_last": 1,
    "checkpoint.keep_best": 1,
}
SCORED = {**STEPS, "evaluation.every_steps": 4, "data.eval_split": "train[67%:]"}  # no test image chooses
FALLING = [
    Score(12, 23, {"mean_per_class": 0.5}),
    Score(9, 23, {"mean_per_class": 0.4}),
]  # after 4 and after 8 steps


@pytest.fixture
def falling(run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs of eight steps whose accuracy falls."""

    def do(name: str, **values: Any) -> Path:
        scores = iter(FALLING)
        monkeypatch.setattr(training, "evaluate_model", lambda *_, **__: next(scores))
        return run(name, **{**SCORED, **values})

    return do


def test_select_best__the_best_checkpoint_stands_for_the_run(falling: Run) -> None:
    folder = falling("a", **{"evaluation.select_best": True})
    result = result_of(folder)
    metrics, p = result["metrics"], result["provenance"]
    assert (metrics["accuracy"], metrics["correct"], metrics["mean_per_class"]) == (12 / 23, 12, 0.5)
    assert metrics["last"] == {
        "step": 8,
        "accuracy": 9 / 23,
        "correct": 9,
        "total": 23,
        "mean_per_class": 0.4,
    }
    assert (p["weights_chosen"], p["weights_step"], p["weights_averaged"]) == ("best", 4, True)
    best = read_weights(folder / "checkpoints" / "step_00000004" / "ema.safetensors")
    assert p["weights_sha256"] == weights_digest(best.state)
    assert result["files"]["ema"] == str(folder / "checkpoints" / "step_00000004" / "ema.safetensors")
    found = find_weights(str(folder))
    assert weights_digest(found.weights.state) == p["weights_sha256"]
    assert found.chosen.text == "the Polyak average; the best checkpoint kept, step 4, accuracy 52.17%"
    assert choose_weights(folder, "last")[0].parent.name == "step_00000008"


def test_last__stands_for_any_other_run(falling: Run) -> None:
    folder = falling("a")
    metrics, p = result_of(folder)["metrics"], result_of(folder)["provenance"]
    assert (metrics["correct"], "last" in metrics) == (9, False)
    assert (p["weights_chosen"], p["weights_step"]) == ("last", 8)
    path, chosen = choose_weights(folder)
    assert (path.parent.name, path.name) == ("step_00000008", "ema.safetensors")
    assert chosen.text == "the Polyak average; the last checkpoint, step 8, accuracy 39.13%"
    assert choose_weights(folder, "best")[0] == choose_weights(folder, "4")[0]
    assert choose_weights(folder, "best")[1].used() == {
        "weights_chosen": "best",
        "weights_step": 4,
        "weights_averaged": True,
    }
    assert choose_weights(folder, "model")[0].name == "model.safetensors"
    with pytest.raises(CheckpointError, match=r"has no checkpoint of step 6; it has 4, 8"):
        choose_weights(folder, "6")
    with pytest.raises(CheckpointError, match="--weights best chooses among the checkpoints of a run"):
        choose_weights(folder / "checkpoints" / "step_00000008", "best")
    with pytest.raises(CheckpointError, match="--weights ema: there is only one set of weights"):
        choose_weights(path, "ema")


def test_best__that_is_damaged_is_not_replaced_in_silence(falling: Run) -> None:
    folder = falling("a", **{"evaluation.select_best": True})
    file = folder / "checkpoints" / "step_00000004" / "ema.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=r"step_00000004: damaged checkpoint: ema\.safetensors"):
        choose_weights(folder)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"checkpoint.keep_best": 0}, r"add --set checkpoint\.keep_best=1$"),
        ({"checkpoint.every_steps": 3}, r"add --set checkpoint\.every_steps=4$"),
    ],
)
def test_select_best__needs_a_checkpoint_at_every_score(run: Run, values: dict[str, Any], match: str) -> None:
    with pytest.raises(RecipeError, match=match):
        run("a", **{**SCORED, "evaluation.select_best": True, **values})


@pytest.mark.slow
def test_last__of_a_finished_run_is_the_one_of_its_result(falling: Run) -> None:
    """A checkpoint that is gone or damaged is not replaced by an older one whose number is another."""
    folder = falling("a")
    last = folder / "checkpoints" / "step_00000008"
    (last / "ema.safetensors").write_bytes(b"damaged")
    said = r"its result is of step 8, whose checkpoint cannot be used \(.*ema\.safetensors.*\); .*--weights 4"
    for which in ("", "last"):
        with pytest.raises(CheckpointError, match=said):
            choose_weights(folder, which)
    shutil.rmtree(last)
    with pytest.raises(CheckpointError, match="its folder is gone"):
        choose_weights(folder)
    assert choose_weights(folder, "4")[1].step == 4
    (folder / "result.json").unlink()  # a run under way goes on from what is there
    chosen = choose_weights(folder)[1]
    assert (chosen.step, chosen.unfinished) == (4, True)
    assert "of a run that is not finished" in chosen.text


@pytest.mark.slow
def test_average__that_a_run_did_not_keep(run: Run) -> None:
    folder = run("a", **{**SCORED, "averaging.decay": 0.0})
    with pytest.raises(
        CheckpointError, match=r"ema\.safetensors: no such weights; only a run with averaging\.decay"
    ):
        choose_weights(folder, "ema")
    assert choose_weights(folder)[0].name == choose_weights(folder, "model")[0].name == "model.safetensors"


@pytest.mark.slow
def test_passed_over__stands_in_the_provenance(falling: Run) -> None:
    folder = falling("a")
    (folder / "result.json").unlink()
    (folder / "checkpoints" / "step_00000008" / "ema.safetensors").write_bytes(b"damaged")
    [told] = choose_weights(folder)[1].used()["weights_passed_over"]
    assert "step_00000008: damaged checkpoint" in told


def finished(
    runs: Path, name: str, when: int, job: str = "pretrain", status: str = "done", **metrics: float
) -> Path:
    folder = runs / name
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps({"job": job, "status": status, "metrics": metrics}))
    (folder / "recipe.toml").write_text(f'# smoke, resolved; the origin\njob = "{job}"\n')
    for file in folder.iterdir():
        os.utime(file, (10**9 + when, 10**9 + when))
    return folder


def test_newest__of_any_training_to_score_and_of_pretraining_to_start_from(tmp_path: Path) -> None:
    old = finished(tmp_path, "old", 1)
    tuned = finished(tmp_path, "tuned", 2, "finetune", accuracy=0.431)
    finished(tmp_path, "scored", 3, "evaluate", accuracy=0.431)
    assert {newest_run(job, tmp_path)[0] for job in ("evaluate", "export")} == {tuned}
    assert {newest_run(job, tmp_path)[0] for job in ("finetune", "fewshot", "vtab")} == {old}
    said = newest_run("evaluate", tmp_path)[1]
    assert said.startswith(
        f"no --from: using the newest finished training run, {tuned} (finetune, recipe smoke, finished 2001-"
    )
    assert said.endswith("accuracy 43.10%)")
    assert "not scored" in newest_run("vtab", tmp_path)[1]
