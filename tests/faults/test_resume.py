"""A run resumes with the data, weights and recipe that it started with, and with others only if allowed."""

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY
from tests.launch.conftest import lock_held
from tests.matrix import few, slow, spread
from tests.trained import CPU, do
from vitctl.cli.flags import overrides_of
from vitctl.data.datasets.readers import shapes
from vitctl.data.writer.shard_writer import write_split
from vitctl.engine import agreement
from vitctl.engine.journal import ALLOWED, LOG, STATE, read_records
from vitctl.engine.journal import json_digest as state_digest
from vitctl.errors import CheckpointError, LaunchError, RecipeError, VitctlError
from vitctl.jobs.record.result import RunResult, write_result
from vitctl.launch.prepare_run import prepare_run
from vitctl.launch.run_folder import read_status
from vitctl.launch.worker import launch
from vitctl.recipe.load import Override, load_recipe
from vitctl.recipe.schema import Pretrain
from vitctl.verify.run_check import verify

STEPS = {
    "schedule.total_steps": 4,
    "schedule.warmup_steps": 1,
    "checkpoint.every_steps": 2,
    "checkpoint.keep_last": 5,
    "model.depth": 1,
}
NEWEST = "step_00000004"


def write_shapes(root: Path, split: str, size: int, seed: int) -> None:
    shutil.rmtree(root / split)
    items = shapes.items("shape", split, size, seed=seed, image_size=16)
    write_split(items, root / split, shapes.SHAPES, seed=0, source_text="test", max_samples=18)


def images_replaced(data: Path, _: Path) -> None:
    write_shapes(data, "train", 70, seed=1)


def images_fewer(data: Path, _: Path) -> None:
    write_shapes(data, "train", 60, seed=0)


def scored_images_replaced(data: Path, _: Path) -> None:
    write_shapes(data, "test", 23, seed=1)


def classes_reversed(data: Path, _: Path) -> None:
    for split in ("train", "test"):
        file = data / split / "index.json"
        fields = json.loads(file.read_text())
        fields["class_names"].reverse()
        file.write_text(json.dumps(fields))


def edit(folder: Path, before: str, after: str) -> None:
    text = (folder / "recipe.toml").read_text()
    assert text.count(before) == 1
    (folder / "recipe.toml").write_text(text.replace(before, after))


def rate_edited(_: Path, folder: Path) -> None:
    edit(folder, "\nlr = 0.01 ", "\nlr = 0.02 ")


def seed_edited(_: Path, folder: Path) -> None:
    edit(folder, "\nseed = 0 ", "\nseed = 7 ")


CHANGES: list[tuple[Callable[[Path, Path], None], str, str]] = [
    (images_replaced, "data", "the training images or their labels differ"),
    (images_fewer, "data", "70 training images, now 60"),
    (scored_images_replaced, "data", "the images that are scored or their labels differ"),
    (classes_reversed, "data", "the classes of the training images differ, or their order"),
    (rate_edited, "optimizer.lr", r"optimizer\.lr was 0\.01, now 0\.02"),
    (seed_edited, "seed", "seed was 0, now 7"),
]


@pytest.fixture(scope="module")
def began(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data/ and run/: a training of four steps on it that was killed after the second."""
    root = tmp_path_factory.mktemp("began")
    shutil.copytree(tiny_data, root / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        do(TINY, root / "run", **CPU, **STEPS, **{"data.path": "data"})
    shutil.rmtree(root / "run" / "checkpoints" / NEWEST)
    (root / "run" / "result.json").unlink()
    return root


@pytest.fixture
def stopped(began: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run, a copy; its data lie in the current folder."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(began, tmp_path, dirs_exist_ok=True) / "run")


@pytest.fixture
def data(stopped: Path) -> Path:
    """Its data."""
    return stopped.parent / "data"


def resume(folder: Path, *allow: str, **values: Any) -> dict[str, Any]:
    """As `vitctl resume RUN --set ... --allow ...`."""
    overrides = [Override(key, value) for key, value in values.items()]
    prepare_run(load_recipe(str(folder / "recipe.toml"), overrides), folder, allow)
    return launch(folder, lambda _: None)


def warnings(folder: Path) -> str:
    return "\n".join(record["text"] for record in read_records(folder / LOG) if record["kind"] == "warning")


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    ("change", "key", "words"),
    few(
        {row[0].__name__: row for row in CHANGES},
        "images_replaced",
        "rate_edited",
    ),
)
def test_resume__something_else_is_refused_and_named_unless_allowed(
    change: Callable[[Path, Path], None], key: str, words: str, data: Path, stopped: Path
) -> None:
    change(data, stopped)
    kept = content(stopped / "checkpoints")
    with pytest.raises(CheckpointError, match=rf"step_00000002 .*{words}.*--allow {key}$"):
        resume(stopped)
    assert content(stopped / "checkpoints") == kept
    result = resume(stopped, key)
    assert result["status"] == "done"
    assert words.replace("\\", "")[:20] in "; ".join(result["provenance"]["changed_on_purpose"])
    assert words.replace("\\", "")[:20] in warnings(stopped)


def test_resume__the_same_says_nothing(stopped: Path) -> None:
    assert "changed_on_purpose" not in resume(stopped)["provenance"]
    assert warnings(stopped) == ""
    assert not (stopped / ALLOWED).exists()


@pytest.mark.slow
def test_resume__what_was_allowed_is_not_a_licence_for_more(data: Path, stopped: Path) -> None:
    images_fewer(data, stopped)
    with pytest.raises(CheckpointError, match="70 training images, now 60"):
        resume(stopped, "schedule")
    resume(stopped, "data")
    shutil.rmtree(stopped / "checkpoints" / NEWEST)
    assert resume(stopped)["status"] == "done"  # a job of a cluster that is started again cannot be asked
    shutil.rmtree(stopped / "checkpoints" / NEWEST)
    images_replaced(data, stopped)
    with pytest.raises(CheckpointError, match="the training images or their labels differ"):
        resume(stopped)


@pytest.mark.slow
def test_resume__allowed_when_a_job_was_handed_over(data: Path, stopped: Path) -> None:
    """`vitctl resume RUN --allow data --slurm` prepares; the job in the queue types `vitctl resume RUN`."""
    images_fewer(data, stopped)
    prepare_run(load_recipe(str(stopped / "recipe.toml")), stopped, ["data"])
    assert resume(stopped)["status"] == "done"


def test_resume__retyped_with_the_same_out(data: Path, stopped: Path) -> None:
    images_replaced(data, stopped)
    with pytest.raises(CheckpointError, match="the training images or their labels differ"):
        do(TINY, stopped, **CPU, **STEPS, **{"data.path": "data"})


def test_resume__a_finished_run_keeps_its_result_where_going_on_is_refused(data: Path, stopped: Path) -> None:
    resume(stopped)
    result = (stopped / "result.json").read_bytes()
    images_replaced(data, stopped)
    with pytest.raises(CheckpointError, match="the training images or their labels differ"):
        resume(stopped)
    assert (stopped / "result.json").read_bytes() == result


@pytest.mark.parametrize("value", spread(2, [None, {}, {"images": 3}, {"images": {"train": {}}}]))
def test_resume__a_checkpoint_that_does_not_record_its_data_is_refused(stopped: Path, value: object) -> None:
    file = stopped / "checkpoints" / "step_00000002" / STATE
    state = json.loads(file.read_text())
    del state["sha256"], state[agreement.KEY]
    state |= {agreement.KEY: value} if value else {}
    file.write_text(json.dumps(state | {"sha256": state_digest(state)}))
    with pytest.raises(
        CheckpointError,
        match=r"step_00000002 (does not record its data and recipe|was not trained with)"
        "|names another checkpoint of step 2",
    ):
        resume(stopped)


@pytest.mark.slow
def test_resume__other_start_weights(stopped: Path, tmp_path: Path) -> None:
    resume(shutil.move(stopped, tmp_path / "one"))
    do(TINY, tmp_path / "two", **CPU, **STEPS, **{"data.path": "data", "seed": 1})
    values = {**CPU, **STEPS, "schedule.batch_size": 8, "data.path": "data"}
    del values["model.depth"]
    values["weights.source"] = str(tmp_path / "one")
    do("finetune", tmp_path / "run", **values)
    shutil.rmtree(tmp_path / "one")
    (tmp_path / "two").rename(tmp_path / "one")
    with pytest.raises(CheckpointError, match="overwritten by another training"):
        resume(tmp_path / "run")


def test_prepare__leaves_an_active_run_alone(stopped: Path) -> None:
    """The recipe is not rewritten before the lock is held."""
    with lock_held(stopped):
        before = content(stopped)
        with pytest.raises(LaunchError, match="another vitctl is running in this folder"):
            resume(stopped, "schedule.total_steps", **{"schedule.total_steps": 9})
        assert content(stopped) == before
    assert resume(stopped, "schedule.total_steps", **{"schedule.total_steps": 5})["status"] == "done"


@pytest.mark.slow
def test_prepare__a_finished_run_cannot_end_earlier(stopped: Path) -> None:
    """It wrote the weights of its last step over those of an earlier one."""
    resume(stopped)
    before = content(stopped)
    with pytest.raises(
        RecipeError, match=r"has a checkpoint of step 4, but schedule\.total_steps = 2; set it to 4"
    ):
        resume(stopped, "schedule.total_steps", **{"schedule.total_steps": 2})
    edit(stopped, "total_steps = 4", "total_steps = 2")
    with pytest.raises(RecipeError, match=r"but schedule\.total_steps = "):
        resume(stopped)
    with pytest.raises(CheckpointError, match="checkpoint of step 4, but this run ends at step 2; set"):
        launch(stopped, lambda _: None)  # as the line in launch.txt does
    edit(stopped, "total_steps = 2", "total_steps = 4")
    after = content(stopped)
    names = [
        name for name in before if "checkpoints" in name or name.endswith(("result.json", "recipe.toml"))
    ]
    assert {name: after[name] for name in names} == {name: before[name] for name in names}


def records_of(folder: Path) -> dict[str, bytes]:
    """What describes a run; a refused launch may add to its logs alone."""
    names = ("recipe.toml", "env.json", "launch.txt", ALLOWED)
    return {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}


def other_data(stopped: Path) -> dict[str, Any]:
    shutil.copytree(stopped.parent / "data", stopped.parent / "other")
    write_shapes(stopped.parent / "other", "train", 60, seed=1)
    return {"data.path": "other"}


@pytest.mark.parametrize("is_finished", [False, *slow(True)], ids=["stopped", "finished"])
@pytest.mark.parametrize(
    ("allow", "values"),
    [
        ((), {}),
        *slow((("schedule.total_steps",), {"schedule.total_steps": 9})),
        (("seed", "optimizer"), {"seed": 7, "optimizer.lr": 0.5}),
        *slow(((), {"machine.processes": 2})),
    ],
    ids=["data", "steps", "keys", "processes"],
)
def test_resume__refused_leaves_the_records_as_they_were(
    stopped: Path, allow: tuple[str, ...], values: dict[str, Any], is_finished: bool
) -> None:
    """The recipe named the other images afterwards, so that a plain resume failed and verify accused."""
    if values.get("machine.processes") and is_finished:
        pytest.skip("the processes of one run are enough")
    if is_finished:
        resume(stopped)
    before, log = records_of(stopped), warnings(stopped)
    with pytest.raises(VitctlError, match="was trained with other inputs"):
        resume(stopped, *allow, **values, **other_data(stopped))
    assert records_of(stopped) == before
    assert warnings(stopped) == log
    assert resume(stopped)["status"] == "done"
    assert not any(one.state == "differs" for _, one in verify(stopped))


def test_resume__refused_leaves_the_result_of_a_stopped_run(
    stopped: Path,
) -> None:
    """`runs show` called a stopped run failed."""
    other = other_data(stopped)
    with pytest.raises(VitctlError, match="was trained with other inputs"):
        resume(stopped, **other)
    assert read_status(stopped) == "failed"  # it was killed, and had no result
    write_result(stopped, RunResult("pretrain", "stopped"))
    before = (stopped / "result.json").read_bytes()
    with pytest.raises(VitctlError, match="was trained with other inputs"):
        resume(stopped, **other)
    assert (stopped / "result.json").read_bytes() == before


@pytest.mark.slow
def test_resume__the_proposed_command_makes_the_change_again(stopped: Path) -> None:
    with pytest.raises(CheckpointError, match="resume anyway with: ") as raised:
        resume(stopped, "seed", seed=7, **other_data(stopped))
    words = shlex.split(str(raised.value).partition("resume anyway with: ")[2])
    assert words[:3] == ["vitctl", "resume", str(stopped)]
    flags = [*zip(words[3::2], words[4::2], strict=True)]
    given = overrides_of({}, [value for flag, value in flags if flag == "--set"])
    allowed = [value for flag, value in flags if flag == "--allow"]
    prepare_run(load_recipe(str(stopped / "recipe.toml"), given), stopped, allowed)
    result = launch(stopped, lambda _: None)
    assert result["provenance"]["num_train"] == 60
    recipe = load_recipe(str(stopped / "recipe.toml")).recipe
    assert isinstance(recipe, Pretrain) and (recipe.data.path, recipe.seed) == ("other", 7)
    assert warnings(stopped).count("seed was 0, now 7") == 1


def test_resume__killed_before_it_was_refused_the_next_refusal_puts_the_records_back(stopped: Path) -> None:
    before = records_of(stopped)
    changed = [Override(key, value) for key, value in other_data(stopped).items()]
    prepare_run(load_recipe(str(stopped / "recipe.toml"), changed), stopped)
    with pytest.raises(CheckpointError, match="was trained with other inputs"):
        resume(stopped)
    assert records_of(stopped) == before


def test_resume__lost_data_leave_the_records_as_they_were(stopped: Path) -> None:
    """They were there when the run was prepared."""
    before = records_of(stopped)
    shutil.copytree("data", "copy")
    prepare_run(load_recipe(str(stopped / "recipe.toml"), [Override("data.path", "copy")]), stopped)
    shutil.rmtree("copy")
    with pytest.raises(VitctlError, match="copy"):
        launch(stopped, lambda _: None)
    assert records_of(stopped) == before


def test_resume__the_same_data_elsewhere_is_no_change(stopped: Path) -> None:
    """Of a finished run verify called the new path a difference."""
    first = resume(stopped)
    shutil.move("data", "moved")
    assert resume(stopped, **{"data.path": "moved"})["metrics"] == first["metrics"]
    assert not any(one.state == "differs" for _, one in verify(stopped, steps="3:4"))
    assert 'path = "moved"' in (stopped / "recipe.toml").read_text()
    assert warnings(stopped) == ""


@pytest.mark.parametrize("key", ["data", *slow("optimizer")])
def test_resume__nothing_can_be_allowed_to_a_finished_run(stopped: Path, key: str) -> None:
    """It printed its old accuracy as if it were of the other images."""
    resume(stopped)
    before = records_of(stopped), (stopped / "result.json").read_bytes()
    values = other_data(stopped) if key == "data" else {"optimizer.lr": 0.5}
    with pytest.raises(CheckpointError, match=r"it is finished, so that nothing of it would be trained"):
        resume(stopped, key, **values)
    assert (records_of(stopped), (stopped / "result.json").read_bytes()) == before


def test_resume__of_other_classes_proposes_nothing_that_cannot_fit(data: Path, stopped: Path) -> None:
    for split in ("train", "test"):
        file = data / split / "index.json"
        fields = json.loads(file.read_text())
        file.write_text(json.dumps(fields | {"class_names": [*fields["class_names"], "one more"]}))
    with pytest.raises(CheckpointError, match=r"undo the change, or choose another folder with --out$"):
        resume(stopped)
