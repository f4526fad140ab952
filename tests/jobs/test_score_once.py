"""Test images choose nothing: the chosen weights are scored on them once, whatever is killed in between."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trained import CPU, SMALL, Job, do
from vitctl.engine.journal import read_records
from vitctl.errors import DataError
from vitctl.jobs import finetune as job_of_finetune
from vitctl.jobs import training
from vitctl.jobs.inputs.checks import fit_splits
from vitctl.jobs.inputs.data import roles_note
from vitctl.launch.prepare_run import prepare_run
from vitctl.launch.worker import work
from vitctl.recipe.load import Override, load_recipe
from vitctl.recipe.write import flat
from vitctl.verify.finding import FAILS
from vitctl.verify.run_check import verify

CHOOSES: dict[str, Any] = {
    "evaluation.select_best": True,
    "evaluation.every_steps": 2,
    "checkpoint.every_steps": 2,
    "checkpoint.keep_best": 1,
    "data.train_split": "train[:80%]",
    "data.eval_split": "train[80%:]",
    "data.test_split": "test",
}


def recipe(start: Path, data: Path, **more: Any) -> list[tuple[str, Any]]:
    places = {"weights.source": str(start), "data.path": str(data)}
    return [*{**CPU, **SMALL, **CHOOSES, **places, **more}.items()]


def scored_on_test(folder: Path) -> list[dict[str, Any]]:
    return [one for one in read_records(folder / "log.jsonl") if one["kind"] == "test"]


def test_test_split__is_scored_once_by_the_chosen_weights_over_kills_and_verify_knows_it(
    tiny_data: Path, pretrained: Path, tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    prepare_run(load_recipe("finetune", [Override(*one) for one in recipe(pretrained, tiny_data)]), folder)

    compare, sides = job_of_finetune.compare_within, list[set[str]]()

    def compared(given: Any, **how: Any) -> Any:
        sides.append({*given})
        return compare(given, **how)

    monkeypatch.setattr(job_of_finetune, "compare_within", compared)

    def killed(*_: Any) -> None:
        raise ZeroDivisionError

    for number, (module, name) in enumerate([(training, "_test"), (job_of_finetune, "verified")]):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, killed)
            with pytest.raises(ZeroDivisionError):
                work(folder)
        assert len(scored_on_test(folder)) == number
    work(folder)
    result = json.loads((folder / "result.json").read_text())
    assert sides == [{"tested", "scored", "train"}]
    (once,) = scored_on_test(folder)
    assert once["step"] == result["provenance"]["weights_step"]
    assert result["provenance"]["test"]["split"] == "test"
    loaded, said = fit_splits(load_recipe("evaluate", [Override("weights.source", str(folder))]))
    assert said == f"no --data: 'test' of {tiny_data}, the data of {folder}"
    again = job("evaluate", "again", **flat(loaded.recipe))
    of_test = result["metrics"]["test"]
    for key in ("correct", "total", "mean_per_class", "accuracy_interval"):
        assert of_test[key] == again["metrics"][key]
    assert result["metrics"]["total"] == 14
    findings = [found for _, found in verify(folder, scores=True)]
    assert not [found for found in findings if found.state in FAILS]
    assert any("test 23 images" in found.text for found in findings)

    result["metrics"]["test"] |= {"correct": 1, "accuracy": 1 / 23}
    result["provenance"]["test"]["data_sha256"] = "0" * 64
    (folder / "result.json").write_text(json.dumps(result))
    failed = {found.what for _, found in verify(folder, scores=True) if found.state in FAILS}
    assert failed == {"result", "data", "score"}


def test_test_split__images_that_train_or_choose_are_refused(
    tiny_data: Path, pretrained: Path, tmp_path: Path
) -> None:
    given = recipe(pretrained, tiny_data, **{"data.test_split": "train[90%:]"})
    with pytest.raises(DataError, match=r"7 of its 7 images are in 'train\[80%:\]', which chooses"):
        do("finetune", tmp_path / "run", **dict(given))


@pytest.mark.parametrize(
    ("typed", "fitting"),
    [
        ({}, ""),  # nothing chooses: the test split is scored as before
        ({"evaluation.select_best": True}, "test"),
        ({"evaluation.select_best": True, "data.test_split": ""}, ""),
    ],
)
def test_test_split__is_filled_in_where_other_images_choose(
    tiny_data: Path, typed: dict[str, Any], fitting: str
) -> None:
    given = {"data.path": str(tiny_data), **typed} | ({"checkpoint.keep_best": 1} if typed else {})
    loaded, _ = fit_splits(load_recipe("finetune", [Override(*one, "--set") for one in given.items()]))
    data = loaded.recipe.data
    assert (data.test_split, data.eval_split) == (fitting, "train[90%:]" if typed else "test")
    said = "; the chosen weights are scored once on 'test'"
    assert roles_note(loaded.recipe, 63, 7).endswith(said) is bool(fitting)
