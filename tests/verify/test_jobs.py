"""Fine-tuning with a sweep and seeds, and a task of VTAB: every training in a run is verified on its own."""

import json
from pathlib import Path

import pytest

from tests.trained import CPU, Job, table
from tests.verify.conftest import edit, found, said
from vitctl.errors import RecipeError
from vitctl.verify.run_check import verify


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
    inside = tuned / "sweep" / "lr_0.01"
    assert {folder for folder, _ in verify(inside)} == {inside}
    assert said(inside, "replay", steps="2:3") == [("ok", "steps 1 to 3: equal, bit for bit")]


def test_finetune__a_changed_result_is_named(tuned: Path) -> None:
    path = tuned / "result.json"
    before = path.read_text()
    result = json.loads(before)
    result["metrics"]["sweep"]["0.1"] += 0.125
    path.write_text(json.dumps(result))
    assert [text.split(": ")[0] for _, text in found(tuned)] == [str(path)]
    path.write_text(before)
    edit(tuned / "sweep/lr_0.1/result.json", '"correct": ', '"correct": 1')
    assert [text.split(": ")[0] for _, text in found(tuned)] == [str(tuned / "sweep/lr_0.1/result.json")]


@pytest.mark.slow
def test_vtab__a_task_is_replayed(pretrained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "suite"
    table(folder, pretrained, **CPU, **{"vtab.keep_checkpoints": True, "log.every_steps": 1})
    with pytest.raises(RecipeError, match=r"holds 2 trainings; name one: vitctl verify \S+ --replay 1:2"):
        found(folder, steps="1:2")
    task = folder / "tasks" / "digits" / "lr_0.03_steps_2" / "seed_0"
    assert said(task, "replay", steps="1:2") == [("ok", "steps 1 to 2: equal, bit for bit")]
    assert found(folder, scores=True) == []
    assert [state for state, _ in said(task, "score", scores=True)] == ["ok"]


@pytest.mark.slow
def test_evaluate__is_scored_again(job: Job, tmp_path: Path) -> None:
    answers = tmp_path / "answers.csv"
    correct = job("evaluate", "a", **{"evaluation.answers": str(answers)})["metrics"]["correct"]
    folder, written = tmp_path / "a", answers.stat()
    assert found(folder, scores=True, reads_bytes=True) == []
    assert answers.stat() == written  # a run is only read
    assert said(folder, "weights") == []  # they are those of another run
    assert said(folder, "score", scores=True) == [
        ("ok", f"scored again: {correct} of 23 correct, the same integers")
    ]
    edit(folder / "result.json", f'"correct": {correct}', f'"correct": {correct + 2}')
    assert [what for what, _ in found(folder, scores=True)] == ["result", "score"]


def test_fewshot__has_no_steps_and_no_counts(job: Job, tmp_path: Path) -> None:
    job("fewshot", "a", **{"fewshot.shots": (1,)})
    assert {one.state for _, one in verify(tmp_path / "a")} == {"ok", "not checked"}
    assert [what for what, _ in found(tmp_path / "a", scores=True)] == ["score"]  # asked for, and not proven
