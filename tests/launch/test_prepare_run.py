"""A folder that can be run: what is written, what is refused, and what may change when a run goes on."""

import json
import os
import shlex
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from tests.conftest import free_port
from tests.launch.conftest import Load, lock_held
from vitctl.engine import runtime
from vitctl.engine.checkpoint import keep
from vitctl.engine.journal import json_digest, write_run_json
from vitctl.errors import CheckpointError, LaunchError, RecipeError
from vitctl.jobs.inputs.weights import weights_of
from vitctl.jobs.record.result import choose_weights
from vitctl.launch.cluster import Job, LaunchConfig
from vitctl.launch.listing import plan_removal
from vitctl.launch.prepare_run import prepare_run
from vitctl.recipe.load import Override, load_recipe, parse_override, with_overrides
from vitctl.recipe.write import to_toml, written_name


def test_prepare__writes_what_the_processes_need(load: Load, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "[b16] ü"
    loaded = load(seed=3)
    prepare_run(loaded, folder)
    assert sorted(p.name for p in folder.iterdir()) == [".lock", "env.json", "launch.txt", "recipe.toml"]
    assert load_recipe(str(folder / "recipe.toml")).recipe == loaded.recipe
    assert "seed = 3                                  # --set" in (folder / "recipe.toml").read_text()
    assert shlex.split((folder / "launch.txt").read_text()) == [
        sys.executable,
        "-m",
        "vitctl.launch.worker",
        str(folder),
    ]
    env = json.loads((folder / "env.json").read_text())
    known = {"versions", "python", "platform", "host", "cpu", "cpus", "git_commit", "folder", "run"}
    assert known == set(env)
    assert (env["folder"], env["run"]) == (os.getcwd(), str(folder))
    assert env["versions"]["torch"][0].isdigit()


def test_prepare__lanes_follow_from_the_nodes_of_the_first_start(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lanes(name: str, nodes: int, order: str = "windowed", **more: int) -> int:
        given = {f"data.{key}": value for key, value in more.items()}
        loaded = with_overrides(
            load(), [Override("data.order", order), *map(Override, given, given.values())]
        )
        with monkeypatch.context() as context:
            context.setattr("vitctl.jobs.inputs.data.num_shards", lambda _: 10_000)
            context.setattr("vitctl.jobs.inputs.data._check_entropy", lambda *_: None)
            found = prepare_run(loaded, tmp_path / name, batch=Job(nodes)).recipe
        assert load_recipe(str(tmp_path / name / "recipe.toml")).recipe == found
        return int(found.data.lanes)  # type: ignore[attr-defined]

    assert [lanes("new", 3), lanes("new", 1), lanes("new", 8)] == [4, 4, 4]
    assert [lanes("one", 1), lanes("one", 4)] == [0, 0]  # as a run of before lanes
    assert [lanes("given", 4, lanes=1), lanes("exact", 4, "exact")] == [1, 0]
    with pytest.raises(RecipeError, match=r"data\.lanes was 4, now 8"):
        lanes("new", 8, lanes=8)


@pytest.mark.parametrize("recipe", ["finetune", "evaluate", "export"])
def test_prepare__gives_the_recipe_that_its_file_holds(
    recipe: str, pretrained: Path, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what it found for itself: the newest run, and a length that fits the images."""
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "[b16] 'ü'").symlink_to(pretrained)
    monkeypatch.chdir(tmp_path)
    data = {} if recipe == "export" else {"data.path": str(tiny_data)}
    loaded = load_recipe(recipe, [Override(key, value) for key, value in data.items()])
    prepared = prepare_run(loaded, tmp_path / "out")
    assert prepared.recipe == load_recipe(str(tmp_path / "out" / "recipe.toml")).recipe != loaded.recipe
    assert prepared.recipe.weights.source == "runs/[b16] 'ü'"  # type: ignore[attr-defined]
    assert prepared.taken.startswith("no --from: using the newest finished ")


def test_prepare__a_changed_recipe_is_refused_and_its_keys_are_named(load: Load, tmp_path: Path) -> None:
    prepare_run(load(), tmp_path)
    before = (tmp_path / "recipe.toml").read_text()
    with pytest.raises(RecipeError) as caught:
        prepare_run(load(**{"optimizer.lr": 0.5, "seed": 1}), tmp_path)
    assert "seed was 0, now 1; optimizer.lr was 0.01, now 0.5" in str(caught.value)
    assert str(caught.value).endswith(
        f"vitctl resume {tmp_path} --set seed=1 --set optimizer.lr=0.5 --allow seed --allow optimizer.lr"
    )
    assert (tmp_path / "recipe.toml").read_text() == before
    with pytest.raises(RecipeError, match=r'machine.precision was "float64", now "float32"'):
        prepare_run(load(**{"machine.precision": "float32"}), tmp_path)  # it decides the numbers
    with pytest.raises(RecipeError, match="holds a run of another recipe: seed was 0, now 1; choose"):
        prepare_run(load(**{"optimizer.lr": 0.5, "seed": 1}), tmp_path, allow=["optimizer"])
    with pytest.raises(RecipeError, match=r"--set seed=1 --set optimizer.lr=0.5 --allow seed --allow opt"):
        prepare_run(load(**{"optimizer.lr": 0.5, "seed": 1}), tmp_path, allow=["optimizer"])  # both again
    with pytest.raises(RecipeError, match=r"--allow optimzer\.lr: not a recipe key"):
        prepare_run(load(**{"optimizer.lr": 0.5}), tmp_path, allow=["optimzer.lr"])
    many = load(seed=1, **{"optimizer.lr": 0.5, "model.depth": 3, "data.flip": False, "averaging.decay": 0.5})
    with pytest.raises(RecipeError, match="; and 1 more; choose another"):
        prepare_run(many, tmp_path)


def test_prepare__the_proposed_resume_also_undoes_a_value(load: Load, tmp_path: Path) -> None:
    """TOML has no null: `--set key=` would set an empty text, which most keys refuse."""
    prepare_run(load(**{"model.dropout": 0.5}), tmp_path)
    with pytest.raises(RecipeError, match=r"model.dropout was 0.5, now unset; ") as caught:
        prepare_run(load(), tmp_path)
    words = shlex.split(str(caught.value).partition("with: vitctl resume ")[2])
    overrides = [parse_override(word) for flag, word in pairwise(words) if flag == "--set"]
    allow = [word for flag, word in pairwise(words) if flag == "--allow"]
    loaded = load_recipe(str(tmp_path / "recipe.toml"), overrides)
    assert prepare_run(loaded, tmp_path, allow=allow).recipe == load().recipe


def test_prepare__the_machine_the_log_and_the_keep_budgets_may_change(load: Load, tmp_path: Path) -> None:
    prepare_run(load(), tmp_path)
    free = {
        "machine.workers": 1,
        "machine.micro_batch": 3,
        "log.every_steps": 9,
        "checkpoint.keep_last": 5,
        "note": "again",
    }
    prepare_run(load(**free), tmp_path)
    assert load_recipe(str(tmp_path / "recipe.toml")).recipe == load(**free).recipe


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("file", "is a file, should be a folder for a run; choose another name with --out"),
        ("file/run", "not a directory; there is a file where a folder should be; choose another path"),
    ],
)
def test_prepare__a_folder_that_cannot_be_written(load: Load, tmp_path: Path, folder: str, said: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError) as caught:
        prepare_run(load(), tmp_path / folder)
    assert str(caught.value) == f"{tmp_path / folder}: {said}"


def test_prepare__allowed_changes_are_made_and_said(load: Load, tmp_path: Path) -> None:
    prepare_run(load(), tmp_path)
    longer = load(**{"schedule.total_steps": 30, "optimizer.lr": 0.5})
    prepare_run(longer, tmp_path, allow=["schedule.total_steps", "optimizer"])
    assert load_recipe(str(tmp_path / "recipe.toml")).recipe == longer.recipe
    [said] = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert said["text"] == (
        "the recipe was changed on purpose: optimizer.lr was 0.01, now 0.5; schedule.total_steps was "
        "20, now 30"
    )
    prepare_run(longer, tmp_path)
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 1


def test_prepare__a_resumed_recipe_keeps_its_name(load: Load, tmp_path: Path) -> None:
    prepare_run(load(), tmp_path)
    file = tmp_path / "recipe.toml"
    name = written_name(file)
    prepare_run(
        load_recipe(str(file), [Override("schedule.total_steps", 30)]), tmp_path, ["schedule.total_steps"]
    )
    assert "total_steps = 30" in file.read_text()
    assert written_name(file) == name != str(file)


def test_prepare__waits_while_another_machine_writes_the_folder(load: Load, tmp_path: Path) -> None:
    """It looked for others' files before it had the lock, and took its own run's first files for them."""
    loaded, config = load(**{"machine.processes": 2}), LaunchConfig(2, "127.0.0.1", free_port())
    (tmp_path / "env.json").write_text("{}")
    with ThreadPoolExecutor() as pool:
        with lock_held(tmp_path):
            second = pool.submit(prepare_run, loaded, tmp_path, config=config)
            with pytest.raises(TimeoutError):
                second.result(timeout=1.0)
            (tmp_path / "recipe.toml").write_text(to_toml(loaded))
        assert second.result().recipe == loaded.recipe


def rewrite_state(folder: Path, **values: object) -> None:
    state = json.loads((folder / "state.json").read_text()) | values
    del state["sha256"]
    write_run_json(folder / "state.json", {**state, "sha256": json_digest(state)})


def test_prepare__pins_the_checkpoint_that_a_run_starts_from(
    pretrained: Path, tiny_data: Path, tmp_path: Path
) -> None:
    start, out = tmp_path / "start", tmp_path / "out"
    shutil.copytree(pretrained, start)
    (start / "result.json").unlink()  # it is under way
    given = [Override("weights.source", str(start)), Override("data.path", str(tiny_data))]
    loaded = load_recipe("finetune", given)
    prepare_run(loaded, out)
    before = weights_of(load_recipe(str(out / "recipe.toml")).recipe)  # type: ignore[arg-type]
    [newest] = (start / "checkpoints").glob("step_00000020")
    later = newest.with_name("step_00000021")
    shutil.copytree(newest, later)
    rewrite_state(later, step=21)
    # Neither the training that goes on nor `vitctl runs clean` deletes what a run started from.
    keep(newest.parent, last=1, best=0, scores={})
    assert newest.is_dir() and newest not in plan_removal(start).folders
    assert choose_weights(start)[1].step == 21

    prepare_run(loaded, out)  # the same line again
    recipe = prepare_run(load_recipe(str(out / "recipe.toml")), out).recipe  # `vitctl resume`
    again = weights_of(recipe)  # type: ignore[arg-type]
    assert (again.path, again.chosen.used()) == (before.path, before.chosen.used())
    assert (again.chosen.how, again.chosen.step) == ("last", 20)
    other = load_recipe(str(out / "recipe.toml"), [Override("weights.which", "21")])
    assert prepare_run(other, out, allow=("weights",)).recipe.weights.pinned.startswith("step:21:")  # type: ignore[attr-defined]

    prepare_run(loaded, tmp_path / "new")
    rewrite_state(later, num_bad=1)
    with pytest.raises(CheckpointError, match="overwritten by another training; this run started"):
        prepare_run(loaded, tmp_path / "new")
    shutil.rmtree(later)
    with pytest.raises(CheckpointError, match="step_00000021: it was deleted; this run started from that"):
        prepare_run(loaded, tmp_path / "new")
    shutil.rmtree(start)
    with pytest.raises(CheckpointError, match="no such weights; this run started from them: restore them"):
        prepare_run(load_recipe(str(tmp_path / "new" / "recipe.toml")), tmp_path / "new")


def test_prepare__a_process_that_hangs_is_noticed_before_the_work(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*, cpu: bool) -> None:
        assert cpu
        raise LaunchError("a process hangs")

    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    for name, value in {**ranks, "MASTER_ADDR": "here", "MASTER_PORT": "2950"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(runtime, "join", lambda **_: None)
    monkeypatch.setattr(runtime, "check_all_reduce", fail)
    with pytest.raises(LaunchError, match="a process hangs"):
        prepare_run(load(), tmp_path / "run")
    assert not (tmp_path / "run").exists()
