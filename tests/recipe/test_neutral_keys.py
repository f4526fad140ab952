"""One list says what changes no number: for resuming, for digests, for what counts as a run of a recipe."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Run, train_records
from vitctl.engine.journal import json_digest
from vitctl.jobs.record.result import RunResult, with_recipe
from vitctl.recipe.load import Override, every_key, load_recipe, recipe_names
from vitctl.recipe.neutral_keys import (
    FREE_TO_CHANGE,
    RESULT_NEUTRAL,
    deciding_values,
    unlike_known,
    with_added,
)
from vitctl.recipe.schema import JOBS
from vitctl.recipe.write import flat, to_toml, toml_value
from vitctl.report.our_results import FinishedRun, recipe_misfit

OTHERS: dict[str, Any] = {
    "note": "another",
    "machine.workers": 1,
    "machine.micro_batch": 3,
    "machine.attention": "math",
    "machine.checkpoint_blocks": True,
    "evaluation.batch_size": 7,
    "checkpoint.keep_last": 4,
    "data.root": "elsewhere",
    "data.cache_gib": 2.0,
    "log.every_steps": 2,
}


def test_every_entry_is_of_a_key() -> None:
    keys = {key for schema in JOBS.values() for key in every_key(schema)}
    assert [entry for entry in FREE_TO_CHANGE if not any(key.startswith(entry) for key in keys)] == []


@pytest.mark.slow
def test_neutral__changes_no_number_no_digest_and_the_run_goes_on(
    run: Run, pretrained: Path, tmp_path: Path
) -> None:
    before, after = Path(shutil.copytree(pretrained, tmp_path / "a")), run("b", **OTHERS)
    losses = [{r["step"]: r["loss"] for r in train_records(folder)} for folder in (before, after)]
    assert len(losses[1]) == 10
    assert {step: losses[0][step] for step in losses[1]} == pytest.approx(losses[1], rel=1e-9, abs=0)
    digests = [
        json.loads((f / "result.json").read_text())["provenance"]["recipe_sha256"] for f in (before, after)
    ]
    assert digests[0] == digests[1]
    assert run("a", **OTHERS) == before  # which is refused where a key decides a number


@pytest.mark.parametrize("name", ["finetune_pets", "vtab", "fewshot", "evaluate", "jft_b16"])
def test_neutral__a_run_with_other_values_is_of_its_recipe(name: str, tmp_path: Path) -> None:
    keys = every_key(JOBS[load_recipe(name).recipe.job])
    changed = load_recipe(name, [Override(key, value) for key, value in OTHERS.items() if key in keys])
    shipped = load_recipe(name)
    result = RunResult(shipped.recipe.job, "done")
    assert deciding_values(changed.recipe, RESULT_NEUTRAL) == deciding_values(shipped.recipe, RESULT_NEUTRAL)
    one, two = (with_recipe(result, recipe).provenance for recipe in (shipped.recipe, changed.recipe))
    assert one == two
    misfits = [
        recipe_misfit(FinishedRun(tmp_path, "", name, loaded.recipe, result)) for loaded in (shipped, changed)
    ]
    assert misfits[0] == misfits[1]


def test_deciding_values__coupled_decay_is_not_the_decoupled_one_of_before() -> None:
    """A run that began with SGD's decoupled decay does not resume with the coupled one of the same number."""
    sgd = [("optimizer.name", "sgd"), ("optimizer.weight_decay", 0.1)]
    assert deciding_values(load_recipe("smoke", sgd).recipe)["optimizer.weight_decay"] == "0.1 (coupled)"
    assert deciding_values(load_recipe("smoke", sgd[1:]).recipe)["optimizer.weight_decay"] == "0.1"
    assert deciding_values(load_recipe("finetune").recipe)["optimizer.weight_decay"] in ("0.0", "0")


def test_deciding_values__a_cosine_with_a_last_rate_is_not_the_one_to_0_of_before() -> None:
    cosine = [("schedule.decay", "cosine"), ("schedule.end_lr", 1e-5)]
    assert deciding_values(load_recipe("smoke", cosine).recipe)["schedule.end_lr"] == "1e-05 (of the cosine)"
    linear = [("schedule.decay", "linear"), *cosine[1:]]
    assert deciding_values(load_recipe("smoke", linear).recipe)["schedule.end_lr"] == "1e-05"
    assert deciding_values(load_recipe("finetune").recipe)["schedule.end_lr"] == "0.0"


def test_deciding_values__digests_of_shipped_recipes_are_those_of_earlier_runs() -> None:
    """Keys that are younger than a run are in no digest while they are off: it resumes and verifies."""
    golden = json.loads((Path(__file__).parents[1] / "golden" / "recipe_digests.json").read_text())
    now = {name: json_digest(deciding_values(load_recipe(name).recipe)) for name in golden}
    assert now == golden


def test_added__every_entry_is_of_a_key_and_its_default() -> None:
    defaults: dict[str, Any] = {}
    for name in recipe_names():
        loaded = load_recipe(name)
        values = {key: toml_value(value) for key, value in flat(loaded.recipe).items()}
        defaults |= {key: value for key, value in values.items() if loaded.origin(key) == "default"}
    assert {key: defaults[key] for key in with_added({})} == with_added({})


def test_unlike_known__names_what_a_run_changes_in_the_recipe_of_its_known_result(tmp_path: Path) -> None:
    def keys(name: str, *values: tuple[str, Any]) -> list[str]:
        (tmp_path / "recipe.toml").write_text(to_toml(load_recipe(name, values)))
        return unlike_known(tmp_path / "recipe.toml").partition("differs in ")[2].split(", ")

    own = tmp_path / "own.toml"
    own.write_text('extends = "smoke"\n[optimizer]\nlr = 1e-3\n[machine]\nworkers = 0\n')
    assert keys("smoke", ("seed", 3), ("log.every_steps", 7), ("data.root", "elsewhere")) == [""]
    assert keys("mae_b16", ("weights.source", "mae.pth")) == [""]
    changed = ("schedule.warmup_steps", 0), ("data.mean", [0.0] * 3)
    assert keys("smoke", *changed) == ["data.mean", "schedule.warmup_steps"]
    assert keys("deit3_b16", ("model.drop_path", 0.0)) == ["model.drop_path"]
    assert keys(str(own), *changed[:1]) == ["optimizer.lr", "schedule.warmup_steps"]
    assert keys("in1k_b16", ("optimizer.lr", 1.0)) == [""]
    own.unlink()
    assert unlike_known(tmp_path / "recipe.toml") == ""
    assert unlike_known(tmp_path / "none.toml") == ""
