"""A refused command leaves nothing that refuses the corrected one.

A folder of something else is not taken.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY, Run
from vitctl.engine.journal import read_run_json, write_run_json
from vitctl.errors import DataError, LaunchError, RecipeError
from vitctl.launch.cluster import Job
from vitctl.launch.prepare_run import prepare_run
from vitctl.launch.run_folder import check_not_foreign, leaving_nothing, new_run_dir
from vitctl.recipe.load import Override, load_recipe


def tiny(data: Path, **values: object) -> list[Override]:
    return [Override("data.path", str(data)), *(Override(key, value) for key, value in values.items())]


def _refused(folder: Path, error: Exception) -> None:
    with leaving_nothing(folder):
        (folder / "data" / "digits").mkdir(parents=True)
        raise error


def test_leaving_nothing__the_folder_and_those_above_it(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    for folder in ("new/deep", "kept"):
        with pytest.raises(RecipeError):
            _refused(tmp_path / folder, RecipeError("refused"))
    assert [path.name for path in tmp_path.rglob("*")] == ["kept"]


def test_leaving_nothing__what_was_there_stays(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(LaunchError, match="no space left"):
        _refused(tmp_path, OSError(28, "No space left on device"))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_not_foreign__a_folder_of_something_else(tmp_path: Path) -> None:
    check_not_foreign(tmp_path)
    check_not_foreign(tmp_path / "new")
    (tmp_path / "logs").mkdir()
    check_not_foreign(tmp_path)
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(
        LaunchError, match=r"holds thesis.tex, but not a run; choose a new or empty folder with --out"
    ):
        check_not_foreign(tmp_path)
    (tmp_path / "recipe.toml").write_text("")
    check_not_foreign(tmp_path)


def test_prepare__refused_before_it_began(tiny_data: Path, tmp_path: Path) -> None:
    """digits come with vitctl and are written into the run folder before the plan is refused."""
    run_dir = tmp_path / "run"
    wrong = [
        Override("data.dataset", "digits"),
        Override("data.root", str(tmp_path)),
        Override("data.train_split", "trian"),
    ]
    with pytest.raises(DataError, match="has no split 'trian'"):
        prepare_run(load_recipe(str(TINY), wrong), run_dir)
    assert not run_dir.exists()
    prepare_run(load_recipe(str(TINY), tiny(tiny_data)), run_dir)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"machine.device": "cuda"}, "finds no GPU"),
        ({"machine.device": "cuda", "machine.processes": 2}, "finds no GPU"),
        ({"machine.precision": "tf32"}, "needs an NVIDIA GPU"),
        ({"log.trackers": ("nonsense",)}, "nonsense is not installed"),
    ],
)
def test_prepare__what_this_machine_cannot_compute_is_refused_unless_another_does(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    loaded = load_recipe(str(TINY), tiny(tiny_data, **values))
    with pytest.raises(LaunchError, match=message):
        prepare_run(loaded, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    prepare_run(loaded, tmp_path / "run", batch=Job(1))
    assert (tmp_path / "run" / "recipe.toml").exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"evaluation.labels": "real"}, "ReaL labels are for ImageNet's"),
        ({"evaluation.thresholds": "t.csv"}, "for images with several labels"),
        ({"evaluation.answers": "none/a.csv"}, "the folder none does not exist"),
        ({"data.eval_resize": 3}, "smaller than the crop"),
        (
            {"evaluation.fit_temperature": True, "data.eval_split": "train[:50%]"},
            "is for a softmax and one label",
        ),
    ],
)
def test_prepare__an_evaluation_that_does_not_fit_its_images_is_refused(
    pretrained: Path, tiny_data: Path, tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    place = tiny(tiny_data, **{"weights.source": str(pretrained), "machine.device": "cpu", **values})
    with pytest.raises((DataError, RecipeError), match=message):
        prepare_run(load_recipe("evaluate", place), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_prepare__the_corrected_command_has_the_folder_of_a_run_that_failed_at_once(
    run: Run, tiny_data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "a"
    prepare_run(load_recipe(str(TINY), tiny(tiny_data)), folder)
    write_run_json(folder / "result.json", {"job": "pretrain", "status": "failed", "error": "no memory"})
    write_run_json(folder / "micro_batch.json", {"measured": "for another model"})
    run("a", **{"schedule.batch_size": 8})
    assert read_run_json(folder / "result.json")["status"] == "done"
    assert not (folder / "micro_batch.json").exists()


@pytest.mark.parametrize("kept", ["checkpoints/step_00000002", "tasks/x/result.json"])
def test_prepare__what_a_failed_run_has_made_is_not_lost(tiny_data: Path, tmp_path: Path, kept: str) -> None:
    prepare_run(load_recipe(str(TINY), tiny(tiny_data)), tmp_path)
    write_run_json(tmp_path / "result.json", {"job": "pretrain", "status": "failed", "error": "no memory"})
    (tmp_path / kept).mkdir(parents=True)
    with pytest.raises(RecipeError, match=r"holds a run of another recipe: schedule\.batch_size"):
        prepare_run(load_recipe(str(TINY), tiny(tiny_data, **{"schedule.batch_size": 8})), tmp_path)


def test_new_run_dir__is_named_after_the_recipe_and_new(tmp_path: Path) -> None:
    first = new_run_dir("some/where/jft_h14.toml", tmp_path)
    assert first.parent == tmp_path
    assert first.name.startswith("jft_h14_2")
    first.mkdir()
    assert new_run_dir("jft_h14", tmp_path) not in (first, None)
    assert not new_run_dir("jft_h14", tmp_path).exists()
