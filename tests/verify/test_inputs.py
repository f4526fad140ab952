"""The recipe and the data of a run against what its starts recorded."""

import shutil
from pathlib import Path

from tests.trained import Job
from tests.verify.conftest import Train, edit, found, said
from vitctl.launch.prepare import prepare_run
from vitctl.launch.worker import work
from vitctl.recipe.load import Override, load_recipe


def resumed(run: Path, allow: str, **values: object) -> None:
    given = [Override(key, value) for key, value in values.items()]
    prepare_run(load_recipe(str(run / "recipe.toml"), given), run, allow=(allow,))
    work(run)


def test_a_learning_rate_that_no_step_used__differs(copy: Path) -> None:
    resumed(copy, "optimizer.lr", **{"optimizer.lr": 5.0})
    text = (
        "recipe.toml: none of the 12 recorded steps was made with its values: optimizer.lr was 0.01, is 5.0"
    )
    assert ("recipe", text) in found(copy)


def test_a_change_on_purpose__is_told_with_its_steps(copy: Path) -> None:
    resumed(copy, "schedule.total_steps", **{"schedule.total_steps": 16})
    assert found(copy) == []
    text = "recipe.toml: its values are those of the result; changed on purpose after 12 of 16 steps: "
    assert said(copy, "recipe") == [("ok", f"{text}schedule.total_steps was 12, is 16")]
    edit(copy / "log.jsonl", "the recipe was changed on purpose", "all is well")
    assert "the log tells of no change" in dict(found(copy))["recipe"]


def test_shards_that_are_not_those_of_the_run__are_not_read(
    train: Train, tiny_data: Path, tmp_path: Path
) -> None:
    run = train("a")
    shutil.copytree(tiny_data, tmp_path / "other")
    shutil.rmtree(tmp_path / "other" / "train")
    shutil.copytree(tiny_data / "test", tmp_path / "other" / "train")
    assert [what for what, _ in found(run, reads_bytes=True, data=str(tmp_path / "other"))] == ["data"]
    shards = said(run, "shards", reads_bytes=True, data=str(tmp_path / "other"))
    assert shards == [("not checked", "not read, since they are not those of the run")]


def test_missing_data__leaves_the_other_checks(train: Train, tiny_data: Path, tmp_path: Path) -> None:
    data = Path(shutil.copytree(tiny_data, tmp_path / "data"))
    run = train("a", data)
    shutil.rmtree(data)
    for what, options in (("replay", {"steps": "2"}), ("score", {"scores": True})):
        [(state, text)] = said(run, what, **options)
        assert state == "not proven"
        assert text.endswith("; --data SHARDS names another place")
    assert found(run) == []


def test_missing_start_weights__are_not_needed_after_a_checkpoint(
    job: Job, pretrained: Path, tmp_path: Path
) -> None:
    shutil.copytree(pretrained, tmp_path / "weights")
    job("finetune", "a", **{"weights.source": str(tmp_path / "weights"), "checkpoint.every_steps": 2})
    run = tmp_path / "a"
    shutil.rmtree(tmp_path / "weights")
    assert said(run, "replay", steps="6") == [("ok", "steps 5 to 6: equal, bit for bit")]
    [(state, text)] = said(run, "score", scores=True)
    assert (state, text.startswith("scored again: ")) == ("ok", True)
    [(state, text)] = said(run, "replay", steps="1:6")
    assert state == "not proven"
    assert text.startswith("steps 1 to 6 begin with the start weights: ")
    assert "--from START" in text
