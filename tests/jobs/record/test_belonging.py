"""A checkpoint, a result and a name belong to one run: what is of another run is used by no command."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.conftest import TINY
from tests.matrix import spread
from tests.trained import CPU, do, made_once
from vitctl import load_classifier
from vitctl.cli.show.run_views import show_run
from vitctl.engine.journal import RUN_FILES, json_digest
from vitctl.errors import CheckpointError, RecipeError
from vitctl.jobs.inputs.weights import find_weights
from vitctl.jobs.record.result import choose_weights, newest_run, read_result
from vitctl.launch.listing import all_removals, list_runs, read_line
from vitctl.launch.prepare_run import prepare_run
from vitctl.launch.worker import work
from vitctl.recipe.load import Override, load_recipe
from vitctl.report.compare import compare_runs
from vitctl.report.html_report import write_report
from vitctl.report.run_records import read_run
from vitctl.system.files import check_free
from vitctl.verify.run_check import verify

LAST, BEFORE = "checkpoints/step_00000020", "checkpoints/step_00000018"
Edit = Callable[[Path, Path], object]


@pytest.fixture(scope="session")
def other(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A longer run of another seed, with checkpoints of step 18, 20 and others."""
    values = {"data.path": str(tiny_data), "seed": 7, "schedule.total_steps": 22}
    values |= {"checkpoint.every_steps": 2, "checkpoint.keep_last": 3}
    return made_once(tmp_path_factory, "other_seed", lambda folder: do(TINY, folder, **values))


@pytest.fixture
def run(pretrained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pretrained, tmp_path / "runs" / "a"))


def put(name: str, theirs: str = "") -> Edit:
    """Put a file or folder of the other run there."""

    def edit(run: Path, other: Path) -> None:
        source, target = other / (theirs or name), run / name
        if source.is_file():
            shutil.copyfile(source, target)
            return
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)

    return edit


def rename(new: str, old: str = LAST) -> Edit:
    return lambda run, _: (run / old).rename(run / "checkpoints" / new)


def remove(*names: str) -> Edit:
    def edit(run: Path, _: Path) -> None:
        for name in names:
            path = run / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return edit


def both(*edits: Edit) -> Edit:
    return lambda run, other: [edit(run, other) for edit in edits]


def prepare(recipe: str, run: Path, data: Path, **values: Any) -> None:
    given = {"weights.source": str(run), **({} if recipe == "export" else {**CPU, "data.path": str(data)})}
    given |= values
    prepare_run(load_recipe(recipe, [*map(Override, *zip(*given.items(), strict=True))]), run / "../../out")


USES: dict[str, Callable[[Path, Path], object]] = {
    "weights": lambda run, _: find_weights(str(run)),
    "averaged": lambda run, _: find_weights(str(run), which="model"),
    "classifier": lambda run, _: load_classifier(run),
    "evaluate": lambda run, data: prepare("evaluate", run, data),
    "fewshot": lambda run, data: prepare("fewshot", run, data),
    "export": lambda run, data: prepare("export", run, data, **{"export.to": ("safetensors",)}),
    "finetune": lambda run, data: prepare("finetune", run, data),
}
OF_ANOTHER = r"(log|steps)\.jsonl (has not the digest that it names|is not the one that it was saved with)"
CHECKPOINTS: dict[str, tuple[Edit, str]] = {
    "replaced": (put(LAST), "not the checkpoint that the result names"),
    "replaced, no result": (both(put(LAST), remove("result.json")), "names another checkpoint of step 20"),
    "added": (put("checkpoints/step_00000022"), OF_ANOTHER),
    "added, no result": (both(put("checkpoints/step_00000022"), remove("result.json")), OF_ANOTHER),
    "renamed": (rename("step_00000021"), r"says step 20, so its name should be step_00000020"),
    "renamed to a shorter number": (rename("step_20"), "so its name should be step_00000020"),
    "renamed to a word": (rename("step_best"), "so its name should be step_00000020"),
    "over another": (both(remove(LAST), rename("step_00000020", BEFORE)), "says step 18"),
    "with its log": (put("log.jsonl"), OF_ANOTHER),
    "its result": (put("result.json"), OF_ANOTHER),
    "its result and log": (both(put("result.json"), put("log.jsonl")), OF_ANOTHER),
    "all its records": (
        both(put("result.json"), put("log.jsonl"), put("steps.jsonl")),
        "not the checkpoint that the result names",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("edit", CHECKPOINTS)
def test_another_run__is_used_by_no_command(
    run: Path, other: Path, tiny_data: Path, tmp_path: Path, edit: str
) -> None:
    change, words = CHECKPOINTS[edit]
    change(run, other)
    for name, use in USES.items():
        with pytest.raises(CheckpointError, match=words) as raised:
            use(run, tiny_data)
        assert str(run) in str(raised.value), name
        assert not (tmp_path / "out" / "recipe.toml").exists()
    assert any(one.state == "differs" for _, one in verify(run))
    assert not any("publish" in one.text for _, one in verify(run))
    [plan] = all_removals([run])
    assert (plan.folders, bool(plan.reason)) == ((), True)


@pytest.mark.parametrize("edit", spread(5, [name for name in CHECKPOINTS if name != "its result"]))
def test_another_run__is_not_resumed(run: Path, other: Path, edit: str) -> None:
    """Also where the recipes differ, which `--allow` would permit."""
    CHECKPOINTS[edit][0](run, other)
    again = [Override("schedule.total_steps", 30)]
    prepare_run(load_recipe(str(run / "recipe.toml"), again), run, allow=("schedule.total_steps", "seed"))
    with pytest.raises(
        CheckpointError, match=r"so its name should|log\.jsonl (names|is not the one)"
    ) as raised:
        work(run)
    assert "copy the files of th" in str(raised.value)


@pytest.mark.parametrize(
    "path", [LAST, f"{LAST}/ema.safetensors", f"{LAST}/model.safetensors"], ids=["folder", "average", "model"]
)
def test_another_run__named_by_its_path_in_this_one_is_refused(run: Path, other: Path, path: str) -> None:
    assert find_weights(str(run / path)).weights.state  # the run's own
    put(LAST)(run, other)
    with pytest.raises(CheckpointError, match=r"names; it was replaced; .* move the folder out of the run"):
        find_weights(str(run / path))
    (run / LAST).rename(run.parent / "alone")
    assert find_weights(str(run.parent / "alone" / Path(path).name.replace("step_00000020", "")))


def test_a_file_of_another_checkpoint__is_refused_by_its_path(run: Path, other: Path) -> None:
    put(f"{LAST}/ema.safetensors")(run, other)
    for path in (LAST, f"{LAST}/ema.safetensors"):
        with pytest.raises(CheckpointError, match=r"damaged checkpoint: ema\.safetensors is missing or ch"):
            find_weights(str(run / path))
    remove(f"{LAST}/ema.safetensors")(run, other)  # its model is not taken for it
    with pytest.raises(CheckpointError, match=r"ema\.safetensors: no such weights; the checkpoint was cop"):
        find_weights(str(run / LAST))


def test_an_average__that_the_run_did_not_write_is_not_taken(run: Path, other: Path) -> None:
    """The file fits the network, and state.json does not know it."""
    remove("result.json", "log.jsonl")(run, other)
    folder = run / LAST
    state = json.loads((folder / "state.json").read_text())
    del state["sha256"], state["files"]["ema.safetensors"]
    (folder / "state.json").write_text(json.dumps({**state, "sha256": json_digest(state)}))
    path, chosen = choose_weights(run)
    assert (path.name, chosen.averaged) == ("model.safetensors", False)


def as_earlier_releases(run: Path, _: Path) -> None:
    """No digests of the records in the checkpoints, and none in the result."""
    for file in (run / "checkpoints").glob("*/state.json"):
        state = json.loads(file.read_text())
        for name in ("sha256", "steps_head", "log_head"):
            del state[name]
        file.write_text(json.dumps({**state, "sha256": json_digest(state)}))
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    kept = [{key: value for key, value in one.items() if key != "digest"} for one in log]
    (run / "log.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in kept))
    (run / "steps.jsonl").unlink()
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps({**result, "record": {}}))


HONEST: dict[str, tuple[Edit, bool]] = {
    "whole": (lambda *_: None, True),
    "moved": (lambda run, _: run.rename(run.parent / "b"), True),
    "cleaned": (remove(BEFORE), True),
    "killed": (remove("result.json"), True),
    "no log copied": (remove("log.jsonl"), True),
    "no records copied": (remove("log.jsonl", "result.json", "steps.jsonl"), False),
    "checkpoints alone": (remove("log.jsonl", "result.json", "steps.jsonl", "recipe.toml"), False),
    "earlier releases": (as_earlier_releases, False),
    "earlier releases, no result": (both(as_earlier_releases, remove("result.json")), False),
}


@pytest.mark.parametrize("edit", HONEST)
def test_honest_runs__and_copies_are_used_and_what_was_not_checked_is_said(
    run: Path, other: Path, edit: str
) -> None:
    change, is_known = HONEST[edit]
    change(run, other)
    place = run if run.exists() else run.parent / "b"
    found = find_weights(str(place))
    assert (found.chosen.step, found.chosen.averaged) == (20, True)
    assert ("no record beside it tells whether it is of this run" in found.chosen.text) == (not is_known)
    if (place / "result.json").exists():
        assert compare_runs([place, place]).reasons == []


@pytest.mark.parametrize("names", [("result.json",), ("log.jsonl",)], ids=" ".join)
def test_a_result_of_another_run__is_reported_by_none(run: Path, other: Path, names: tuple[str, ...]) -> None:
    for name in names:
        put(name)(run, other)
    with pytest.raises(CheckpointError, match=OF_ANOTHER):
        read_result(run)
    with pytest.raises(CheckpointError, match=OF_ANOTHER):
        compare_runs([other, run])
    [line] = list_runs(run.parent)
    assert (line.state, line.number) == ("invalid", None)
    records = read_run(run, "a")
    assert records.result is None
    assert "log.jsonl has not the digest that it names: one of the two was changed" in records.problems[0]


def accuracy_edited(run: Path, _: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    result["metrics"] |= {"accuracy": 1.0, "correct": result["metrics"]["total"]}
    (run / "result.json").write_text(json.dumps(result))


STALE: dict[str, tuple[Edit, str]] = {
    "replaced": (put(LAST), "is not the checkpoint that the result names; it was replaced; copy the files"),
    "renamed": (rename("step_00000021"), "step_00000021 says step 20, so its name should be step_00000020"),
    "over another": (both(remove(LAST), rename("step_00000020", BEFORE)), "it was replaced"),
    "result edited": (accuracy_edited, "its digest is not that of its contents; it was changed"),
}


@pytest.mark.parametrize("edit", STALE)
def test_a_result_of_other_weights__is_reported_by_none(
    run: Path, other: Path, tmp_path: Path, edit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`runs list` read no tensors for it."""
    change, words = STALE[edit]
    change(run, other)
    monkeypatch.setattr("vitctl.engine.checkpoint._sha256", lambda path: pytest.fail(f"{path} was hashed"))
    with pytest.raises(CheckpointError, match=words):
        compare_runs([other, run])
    assert any(words in problem for problem in read_run(run, "a").problems)
    write_report([run], tmp_path / "page.html")
    assert words in (tmp_path / "page.html").read_text()
    for line in (list_runs(run.parent)[0], read_line(run)):
        assert (line.state, line.number) == ("invalid", None)
    with pytest.raises(CheckpointError, match=words):
        newest_run("finetune", run.parent)


def test_a_log_that_was_changed__gives_no_numbers(run: Path, tmp_path: Path) -> None:
    """Its curve was drawn."""
    assert not read_run(run, "a").problems
    text = (run / "log.jsonl").read_text()
    (run / "log.jsonl").write_text(text.replace('"loss": ', '"loss": 9', 1))
    found = read_run(run, "a")
    assert not found.records and "and its numbers are not shown; copy" in found.problems[1]
    write_report([run], tmp_path / "page.html")
    assert "its numbers are not shown" in (tmp_path / "page.html").read_text()
    with pytest.raises(CheckpointError, match=r"is not the log that result\.json or a"):
        show_run(run)


def test_verify__without_the_checkpoint_of_the_result_publishes_nothing(run: Path, other: Path) -> None:
    remove(LAST)(run, other)
    said = {one.what: (one.state, one.text) for _, one in verify(run)}
    assert said["weights"] == ("not checked", "the checkpoint of step 20, of the result, is not here")
    assert "publish" not in said["digest"][1]


# Names of files


def test_run_files__are_those_that_runs_write(pretrained: Path, tiny_data: Path, tmp_path: Path) -> None:
    given = {**CPU, "data.path": str(tiny_data), "weights.source": str(pretrained)}
    do("evaluate", tmp_path / "run", **given, **{"evaluation.answers": str(tmp_path / "answers.csv")})
    names = {path.name for run in (pretrained, tmp_path / "run") for path in run.iterdir() if path.is_file()}
    assert names - {".lock"} <= {*RUN_FILES}
    assert {"per_class.csv", "suspects.csv", "trace.bin"} <= names


@pytest.mark.parametrize("name", [name for name in RUN_FILES if name.endswith(".csv")])
def test_answers__are_not_written_over_a_file_of_the_evaluation(
    pretrained: Path, tiny_data: Path, tmp_path: Path, name: str
) -> None:
    given = {**CPU, "data.path": str(tiny_data), "weights.source": str(pretrained)}
    (tmp_path / "link").symlink_to(tmp_path / "run")
    loaded = load_recipe(
        "evaluate",
        [
            *map(Override, given, given.values()),
            Override("evaluation.answers", str(tmp_path / "link" / name)),
        ],
    )
    with pytest.raises(RecipeError, match=f"--answers .*{name}: the command itself reads or writes this"):
        prepare_run(loaded, tmp_path / "run")


@pytest.mark.parametrize("file", [f"{LAST}/model.safetensors", "out/result.json", "net.py"])
def test_export__is_not_written_over_the_weights_or_the_files_of_the_run(
    run: Path, tiny_data: Path, file: str
) -> None:
    place = run / "../.." / file if file.startswith("out") else run / file
    to = "onnx" if file.endswith(".py") else "safetensors"
    with pytest.raises(RecipeError, match=f"--out .*{file}: (is in a check|the command itself reads)"):
        prepare("export", run, tiny_data, **{"export.to": (to,), "export.file": str(place)})


def test_outputs__do_not_replace_files_of_any_checkpoint_or_of_another_kind(
    run: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """The weights of another run were replaced, and a photograph by a page."""
    folder, photo = tmp_path / "other" / "checkpoints" / "step_00000004", tmp_path / "photo.png"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{}")
    (tmp_path / "link").symlink_to(folder)
    Image.new("RGB", (8, 8)).save(photo)
    before = photo.read_bytes()
    for place in (folder / "model.safetensors", tmp_path / "link" / "model.safetensors"):
        with pytest.raises(RecipeError, match=r"--out .*model.safetensors: is in a checkpoint"):
            prepare("export", run, tiny_data, **{"export.to": ("safetensors",), "export.file": str(place)})
    with pytest.raises(RecipeError, match=r"--out .*report.html: is in a checkpoint"):
        write_report([run], folder / "report.html", most_images=0)
    with pytest.raises(RecipeError, match=r"--out .*photo.png: exists, and is of another kind"):
        write_report([run], photo, most_images=0)
    assert photo.read_bytes() == before
    with pytest.raises(RecipeError, match=r"OUT .*step_00000004: is in a checkpoint"):
        check_free("OUT", folder, ())
    with pytest.raises(RecipeError, match=r"OUT .*: is the folder of a run"):
        check_free("OUT", run, ())
    for job in ("export", "evaluate"):  # into the folder of the training: a traceback
        loaded = load_recipe(
            job, [Override("weights.source", str(run)), Override("data.path", str(tiny_data))]
        )
        with pytest.raises(RecipeError, match=f"holds a run of .*, this is {job}; choose another folder"):
            prepare_run(loaded, run)
    for _ in range(2):  # its own page is replaced
        write_report([run], tmp_path / "report.html", most_images=0)


@pytest.mark.parametrize("name", ["result.json", "log.jsonl"])
def test_report__is_not_written_over_what_it_reads(run: Path, name: str) -> None:
    with pytest.raises(RecipeError, match=f"--out .*{name}: the command itself reads or writes this file"):
        write_report([run], run / name, most_images=0)
