"""The paper's tables from the recipes, and which of our runs stand beside its results."""

from pathlib import Path
from typing import Any

import pytest

from vitctl.engine.journal import write_json
from vitctl.errors import RecipeError
from vitctl.jobs.our_results import our_results
from vitctl.jobs.paper_table import Machine, cost_of, machine, result_rows, setting_rows
from vitctl.recipe.load import Override, load_recipe
from vitctl.recipe.paper import RESULTS
from vitctl.recipe.write import to_toml

H100 = Machine("H100", 0.4)


def finished(runs: Path, name: str, recipe: str, metrics: dict[str, Any], values: dict[str, Any], **used: str) -> None:
    """A folder as a finished run of a shipped recipe leaves it."""
    folder = runs / name
    folder.mkdir(parents=True)
    loaded = load_recipe(recipe, [Override(key, value) for key, value in values.items()])
    (folder / "recipe.toml").write_text(to_toml(loaded))
    result = {"job": loaded.recipe.job, "status": "done", "metrics": metrics, "provenance": used}
    write_json(folder / "result.json", result)


def pretrained(runs: Path) -> None:
    finished(runs, "pre", "jft_b32", {"accuracy": 0.4}, {}, weights_sha256="b32")


def test_our_results__are_joined_to_their_pretraining_by_digest(tmp_path: Path) -> None:
    pretrained(tmp_path)
    for number, accuracy in enumerate((0.93, 0.95)):
        free = {"seed": number, "data.root": "elsewhere", "machine.workers": 3, "weights.source": f"runs/{number}"}
        finished(tmp_path, f"pets{number}", "finetune_pets", {"accuracy": accuracy}, free, from_sha256="b32")
    finished(tmp_path, "other", "finetune_cifar10", {"accuracy": 0.1}, {}, from_sha256="unknown")
    ours = our_results(tmp_path)
    assert ours.mean("jft_b32", "Pets", large=False) == pytest.approx(94.0)
    assert ours.mean("jft_b32", "CIFAR-10", large=False) is None
    assert ours.mean("jft_b16", "Pets", large=False) is None


def test_our_results__a_changed_recipe_or_random_weights_do_not_count(tmp_path: Path) -> None:
    pretrained(tmp_path)
    for number, (key, value) in enumerate(
        {"schedule.total_steps": 300, "data.path": "shards", "optimizer.clip_norm": 2.0}.items()
    ):
        finished(tmp_path, f"run{number}", "finetune_pets", {"accuracy": 0.9}, {key: value}, from_sha256="b32")
    scratch = {"weights.initialise": "random"}
    finished(tmp_path, "scratch", "finetune_pets", {"accuracy": 0.9}, scratch, from_sha256="b32", initialise="random")
    assert our_results(tmp_path).accuracies == {}


def test_our_results__imagenet_at_512_is_for_table_2_alone(tmp_path: Path) -> None:
    pretrained(tmp_path)
    finished(tmp_path, "small", "finetune_imagenet", {"accuracy": 0.8}, {}, from_sha256="b32")
    finished(tmp_path, "large", "finetune_imagenet_512", {"accuracy": 0.9}, {}, from_sha256="b32")
    ours = our_results(tmp_path)
    assert ours.mean("jft_b32", "ImageNet", large=False) == pytest.approx(80.0)
    assert ours.mean("jft_b32", "ImageNet", large=True) == pytest.approx(90.0)


def test_our_results__vtab_whole_and_few_shot_on_imagenet(tmp_path: Path) -> None:
    pretrained(tmp_path)
    finished(tmp_path, "part", "vtab", {"mean": 0.1, "partial": True}, {}, from_sha256="b32")
    finished(tmp_path, "whole", "vtab", {"mean": 0.7, "partial": False}, {}, from_sha256="b32")
    shots = {"accuracy": {"1": 0.3, "5": 0.6}}
    finished(tmp_path, "digits", "fewshot", {"accuracy": {"5": 0.9}}, {}, from_sha256="b32")
    finished(tmp_path, "shots", "fewshot", shots, {"data.dataset": "imagenet"}, from_sha256="b32")
    ours = our_results(tmp_path)
    assert ours.mean("jft_b32", "VTAB", large=True) == pytest.approx(70.0)
    assert ours.mean("jft_b32", "5-shot", large=False) == pytest.approx(60.0)


def test_our_results__of_no_folder_and_of_broken_runs(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "result.json").write_text("{")
    assert our_results(tmp_path).accuracies == {}
    assert our_results(tmp_path / "nowhere").accuracies == {}


def test_result_rows__paper_ours_and_cost_side_by_side(tmp_path: Path) -> None:
    pretrained(tmp_path)
    finished(tmp_path, "pets", "finetune_pets", {"accuracy": 0.9}, {}, from_sha256="b32")
    rows = {row.recipe: row for row in result_rows("6", ("Pets", "ReaL"), tmp_path, H100)}
    assert list(rows) == list(RESULTS["6"].rows)
    assert rows["jft_b32"].accuracies == ((93.40, pytest.approx(90.0)), (86.27, None))
    assert (rows["jft_b32"].paper_exaflops, rows["jft_b32"].paper_core_days) == (55, None)
    assert (rows["jft_h14"].paper_exaflops, rows["jft_h14"].paper_core_days) == (4262, 2500)


def test_cost__is_flops_over_what_the_gpu_reaches() -> None:
    cost = cost_of("jft_b16", H100)
    assert cost.steps == 517_822
    assert cost.gpu_days == pytest.approx(cost.exaflops * 1e18 / (0.4 * 989e12) / 86_400)
    assert cost_of("jft_b16", Machine("H100", 0.2)).gpu_days == pytest.approx(2 * cost.gpu_days)


def test_setting_rows__are_what_the_recipes_say() -> None:
    three = {row.recipe: row.values for row in setting_rows("3", H100)}
    assert three["in1k_l16"] == ("imagenet", "300", "0.003", "cosine", "0.3", "0.1")
    assert three["jft_r50x1"] == ("jft300m", "7", "0.001", "linear", "0.1", "none")
    four = {row.recipe: row.values for row in setting_rows("4", H100)}
    assert four["finetune_imagenet"] == ("20,000", "0.003, 0.01, 0.03, 0.06", "512", "384")
    assert four["vtab"][0] == "2,500"


def test_machine__refuses() -> None:
    assert machine("h100", 1.0) == Machine("H100", 1.0)
    with pytest.raises(RecipeError, match="--device TPU: unknown; known are H200, H100"):
        machine("TPU", 0.4)
    with pytest.raises(RecipeError, match=r"--mfu 40: a share of the peak, above 0 and at most 1, e\.g\. 0\.4"):
        machine("H100", 40)
