"""Fine-tuning with a sweep and seeds, and a task of VTAB: every training in a run is verified on its own."""

import json
import shutil
from pathlib import Path

import pytest

from tests.trained import CPU, Job, table
from tests.verify.conftest import edit, found, said
from vitctl.errors import RecipeError
from vitctl.verify.verify import verify


@pytest.fixture
def tuned(job: Job, tmp_path: Path) -> Path:
    """A fine-tuning with two learning rates and two seeds."""
    splits = {"sweep.train_split": "train[:50]", "sweep.eval_split": "train[50:]"}
    job("finetune", "a", **splits, **{"sweep.lrs": (0.1, 0.01), "finetune.seeds": (3, 4)})
    return tmp_path / "a"


@pytest.mark.slow
def test_finetune__all_its_trainings_are_replayed(tuned: Path) -> None:
    assert found(tuned, steps="all", scores=True) == []
    replayed = {
        str(folder.relative_to(tuned)): one.text
        for folder, one in verify(tuned, steps="all")
        if one.what == "replay"
    }
    equal = "steps 1 to 6: equal, bit for bit"
    assert replayed == dict.fromkeys((".", "sweep/lr_0.01", "sweep/lr_0.1", "seeds/seed_4"), equal)
    assert said(tuned, "parts") == [("ok", "the accuracies of 3 trainings are those of their own results")]
    inside = tuned / "sweep" / "lr_0.01"
    assert {folder for folder, _ in verify(inside)} == {inside}
    assert said(inside, "replay", steps="2:3") == [("ok", "steps 1 to 3: equal, bit for bit")]


def test_finetune__a_number_of_its_sweep_or_seeds_that_was_changed_is_named(tuned: Path) -> None:
    path = tuned / "result.json"
    before = path.read_text()
    result = json.loads(before)
    accuracy = result["metrics"]["sweep"]["0.1"]
    result["metrics"]["sweep"]["0.1"] = accuracy + 0.125
    path.write_text(json.dumps(result))
    name = tuned / "sweep/lr_0.1"
    assert found(tuned) == [
        ("parts", f"{name}: accuracy {accuracy}, in the result of the run {accuracy + 0.125}")
    ]
    path.write_text(before)
    edit(name / "result.json", '"correct": ', '"correct": 1')
    assert [what for what, _ in found(tuned)] == ["result"]


def test_finetune__start_weights_lie_elsewhere(job: Job, pretrained: Path, tmp_path: Path) -> None:
    shutil.copytree(pretrained, tmp_path / "weights")
    job("finetune", "a", **{"weights.source": str(tmp_path / "weights")})
    shutil.move(tmp_path / "weights", tmp_path / "moved")
    folder = tmp_path / "a"
    equal = [("ok", "steps 1 to 6: equal, bit for bit")]
    assert said(folder, "replay", steps="all", weights=str(tmp_path / "moved")) == equal


@pytest.mark.slow
def test_vtab__a_task_is_replayed(pretrained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "suite"
    table(folder, pretrained, **CPU, **{"vtab.keep_checkpoints": True, "log.every_steps": 1})
    with pytest.raises(RecipeError, match=r"holds 2 trainings; name one: vitctl verify \S+ --replay 1:2"):
        found(folder, steps="1:2")
    task = folder / "tasks" / "digits" / "lr_0.03_steps_2" / "seed_0"
    assert said(task, "replay", steps="1:2") == [("ok", "steps 1 to 2: equal, bit for bit")]
    assert found(folder, scores=True) == []
    assert {state for state, _ in said(folder, "parts")} == {"ok"}
    assert [state for state, _ in said(task, "score", scores=True)] == ["ok"]


def test_evaluate__is_scored_again(job: Job, tmp_path: Path) -> None:
    correct = job("evaluate", "a")["metrics"]["correct"]
    folder = tmp_path / "a"
    assert found(folder, scores=True, reads_bytes=True) == []
    assert said(folder, "weights") == []  # they are those of another run
    assert said(folder, "score", scores=True) == [
        ("ok", f"scored again: {correct} of 23 correct, the same integers")
    ]
    edit(folder / "result.json", '"eval_method": "square"', '"eval_method": "shorter_side"')
    assert found(folder, scores=True) == [("score", "eval_method is square here, shorter_side in the result")]
    edit(folder / "result.json", '"eval_method": "shorter_side"', '"eval_method": "square"')
    edit(folder / "result.json", f'"correct": {correct}', f'"correct": {correct + 2}')
    assert [what for what, _ in found(folder, scores=True)] == ["result", "score"]


def test_fewshot__has_no_steps_and_no_counts(job: Job, tmp_path: Path) -> None:
    job("fewshot", "a", **{"fewshot.shots": (1,)})
    assert {one.state for _, one in verify(tmp_path / "a")} == {"ok", "not checked"}
    assert [what for what, _ in found(tmp_path / "a", scores=True)] == ["score"]  # asked for, and not proven


@pytest.mark.parametrize("odd", [3, None, [], {"a": []}, {"3": 1}, "x"], ids=str)
def test_forged_result__is_no_traceback(job: Job, tmp_path: Path, odd: object) -> None:
    job("finetune", "a")
    path = tmp_path / "a" / "result.json"
    result = json.loads(path.read_text())
    for field in ("sweep", "by_seed", "tasks", "correct", "accuracy"):
        path.write_text(json.dumps({**result, "metrics": {**result["metrics"], field: odd}}))
        assert len(list(verify(tmp_path / "a"))) > 6
    for field in ("weights_step", "weights_sha256", "tasks", "train_sha256", "labels", "weights_averaged"):
        path.write_text(json.dumps({**result, "provenance": {**result["provenance"], field: odd}}))
        assert len(list(verify(tmp_path / "a"))) > 6
    for record in ({"checkpoints": odd}, {"log.jsonl": odd, "steps.jsonl": odd}):
        path.write_text(json.dumps({**result, "record": record}))
        assert len(list(verify(tmp_path / "a"))) > 6
