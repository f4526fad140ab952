"""Uneven classes and early stopping: the same bytes after a resume, on several processes and replayed."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY, Run, checkpoint, records, run_as, step_images
from tests.matrix import slow
from tests.trained import Job, do, result_of
from tests.verify.conftest import longer
from vitctl.data.datasets.readers import shapes
from vitctl.data.writer.shard_writer import write_split
from vitctl.engine.evaluation import Score
from vitctl.engine.log import RunLog
from vitctl.engine.state import RunState
from vitctl.errors import RecipeError
from vitctl.jobs import training
from vitctl.jobs.inputs.checks import check_recipe
from vitctl.jobs.plan import plan_training
from vitctl.jobs.record.result import choose_weights
from vitctl.launch.listing import read_line
from vitctl.recipe.load import Override, load_recipe
from vitctl.verify.finding import FAILS
from vitctl.verify.run_check import verify

SLOW = pytest.mark.slow
CHANGES = [
    pytest.param(
        {"loss.class_weights": "sqrt", "data.mixup_alpha": 0.5}, id="weights", marks=pytest.mark.slow
    ),
    pytest.param({"data.sampling": "balanced"}, id="sampling"),
]
LANES: dict[str, Any] = {
    "machine.precision": "float32",
    "schedule.lanes": 4,
    "schedule.leaf_images": 3,
    "schedule.batch_size": 15,
    "schedule.total_steps": 4,
    "schedule.warmup_steps": 1,
    "checkpoint.every_steps": 2,
    "evaluation.every_steps": 0,
}


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six shapes: of 96 training images every one of the first class, every sixth of the last."""
    root = tmp_path_factory.mktemp("uneven")
    for split, size in (("train", 96), ("test", 24)):
        items = [*shapes.items("shape", split, size, seed=0, image_size=16)]
        kept = [item for number, item in enumerate(items) if number // 6 % (int(str(item.label)) + 1) == 0]
        chosen = kept if split == "train" else items
        write_split(chosen, root / split, shapes.SHAPES, seed=0, source_text="test", max_samples=18)
    return root


@pytest.mark.parametrize("values", CHANGES)
@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [2, 3])
def test_uneven__any_number_of_processes_gives_the_same_bytes(
    run: Run, uneven: Path, tmp_path: Path, values: dict[str, Any], num_processes: int
) -> None:
    one, several = run("one", **{**LANES, "data.path": str(uneven), **values}), tmp_path / "several"
    run_as(num_processes, several, uneven, **{**LANES, **values})
    assert checkpoint(several, 4) == checkpoint(one, 4)
    assert step_images(several) == step_images(one)


@pytest.mark.slow
@pytest.mark.parametrize("values", CHANGES)
def test_uneven__resumes_and_replays_bit_for_bit(
    run: Run, uneven: Path, tmp_path: Path, values: dict[str, Any]
) -> None:
    given = {"data.path": str(uneven), "schedule.total_steps": 8, "checkpoint.every_steps": 4, **values}
    whole, plain = (
        run("whole", **given),
        run("plain", **{**given, "loss.class_weights": "none"} | dict.fromkeys(values, None)),
    )
    name = "model.safetensors"
    assert checkpoint(whole, 8)[name] != checkpoint(plain, 8)[name]
    cut = Path(shutil.copytree(whole, tmp_path / "cut"))
    shutil.rmtree(cut / "checkpoints" / "step_00000008")
    (cut / "result.json").unlink()
    assert (
        checkpoint(run("cut", **{**given, "machine.micro_batch": 5}), 8).keys() == checkpoint(whole, 8).keys()
    )
    assert step_images(cut) == step_images(whole)
    losses = [[r["loss"] for r in records(folder, "train")] for folder in (whole, cut)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    findings = [one for _, one in verify(whole, steps="all", scores=True)]
    assert [one for one in findings if one.state in FAILS] == []
    assert [one.text for one in findings if one.what == "replay"] == ["steps 1 to 8: equal, bit for bit"]


def test_uneven__plan_log_and_result_say_it(job: Job, uneven: Path, tmp_path: Path, pretrained: Path) -> None:
    values = {"data.path": str(uneven), "data.sampling": "balanced"}
    result = job("finetune", **values)
    used = result["provenance"]["sampling"]
    assert used["largest"]["images"] > 2 * used["smallest"]["images"]
    num_train = result["provenance"]["num_train"]
    for end in ("smallest", "largest"):
        assert used[end]["draws_per_epoch"] == pytest.approx(num_train / 6 / used[end]["images"])
    [said] = [r["text"] for r in records(tmp_path / "run", "data") if "sampling" in r["text"]]
    given = {**values, "weights.source": str(pretrained), "schedule.batch_size": 8}
    recipe: Any = load_recipe("finetune", [Override(key, value) for key, value in given.items()]).recipe
    assert said in plan_training(recipe).notes


def test_uneven__a_table_trains_and_is_read_back(job: Job, uneven: Path, tmp_path: Path) -> None:
    table = {shapes.SHAPES[0]: 3.0, shapes.SHAPES[5]: 0.5}
    result = job("finetune", **{"data.path": str(uneven), "loss.class_weights": table})
    assert result["provenance"]["class_weights"]["name"] == "table"
    loaded = load_recipe(str(tmp_path / "run" / "recipe.toml"))
    assert getattr(loaded.recipe, "loss").class_weights == table  # noqa: B009
    text = (tmp_path / "run" / "recipe.toml").read_text()
    assert "class_weights = {" in text
    assert loaded.origin("loss.class_weights").startswith("recipe.toml:")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"data.sampling": "balanced", "data.order": "windowed"}, "set data.order = 'exact'"),
        ({"data.sampling": "balanced", "loss.class_weights": "sqrt"}, "correct uneven classes twice"),
        ({"loss.class_weights": "balance"}, "'balance' should be 'none', 'balanced', 'sqrt', or a table"),
        ({"loss.class_weights": {"circle": 0}}, "or a table of numbers above 0"),
        ({"loss.class_weights": {"circel": 2}}, "did you mean circle"),
        ({"evaluation.patience": 2}, "patience = 2 stops when scores get no better"),
        (
            {"data.subset_images": 2, "schedule.batch_size": 2, "loss.class_weights": "balanced"},
            "classes without training images",
        ),
    ],
)
def test_uneven__refused_before_the_start(
    uneven: Path, pretrained: Path, tmp_path: Path, values: dict[str, Any], said: str
) -> None:
    given = {"data.path": str(uneven), "weights.source": str(pretrained), "schedule.batch_size": 8, **values}
    with pytest.raises(RecipeError) as refused:
        check_recipe(load_recipe("finetune", [Override(k, v) for k, v in given.items()]).recipe, tmp_path)
    assert said in str(refused.value)


def test_vtab__keeps_its_protocol() -> None:
    for key, value in (("loss.class_weights", "balanced"), ("evaluation.metric", "f1")):
        with pytest.raises(RecipeError, match="would leave the protocol of vtab"):
            load_recipe("vtab", [Override(key, value)])


STOPS: dict[str, Any] = {
    "schedule.total_steps": 12,
    "checkpoint.every_steps": 2,
    "checkpoint.keep_best": 1,
    "evaluation.every_steps": 2,
    "evaluation.select_best": True,
    "evaluation.patience": 2,
    "evaluation.metric": "f1",
    "data.eval_split": "train[67%:]",
}
# Accuracy rises and macro F1 is best after the second score, step 4: the third is equal, the fourth lower.
SCORES = [
    Score(5 + n, 23, {"mean_per_class": 0.1 * n, "f1": f1})
    for n, f1 in enumerate((0.3, 0.5, 0.5, 0.4, 0.9, 0.9))
]
Fake = Callable[[int], None]


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """scored(n) gives the scores from the n-th on."""

    def do(first: int) -> None:
        scores: Iterator[Score] = iter(SCORES[first:])
        monkeypatch.setattr(training, "evaluate_model", lambda *_, **__: next(scores))

    do(0)
    return do


def check_stopped(folder: Path) -> None:
    result = result_of(folder)
    assert result["status"] == "done"
    assert result["metrics"]["stopped_early"] == {"step": 8, "total_steps": 12, "best": 4}
    assert (result["metrics"]["metric"], result["metrics"]["f1"]) == ("f1", 0.5)
    assert (result["metrics"]["last"]["step"], result["metrics"]["last"]["f1"]) == (8, 0.4)
    assert (result["provenance"]["weights_chosen"], result["provenance"]["weights_step"]) == ("best", 6)
    assert [r["step"] for r in records(folder, "evaluate")] == [2, 4, 6, 8]
    assert records(folder, "train")[-1]["step"] == 8


def test_patience__stops_by_the_deciding_metric(run: Run, scored: Fake) -> None:
    assert scored
    folder = run("a", **STOPS)
    check_stopped(folder)
    assert "macro F1 50.00%" in choose_weights(folder)[1].text
    line = read_line(folder)
    assert (line.state, line.step, line.total_steps, line.what, line.number) == (
        "done",
        8,
        12,
        "macro F1",
        0.5,
    )
    assert [one.text for _, one in verify(folder) if one.state in FAILS] == []


@pytest.mark.slow
@pytest.mark.parametrize("killed_in", ["save", *slow("report")])
def test_patience__killed_at_the_deciding_score_it_stops_there_again(
    run: Run, scored: Fake, monkeypatch: pytest.MonkeyPatch, killed_in: str, tmp_path: Path
) -> None:
    """Before the checkpoint of the last step is written, and after it."""
    save = RunState.save

    def killed(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    def save_but_the_last(own: RunState, *more: Any, **named: Any) -> None:
        (killed if own.step == 8 else save)(own, *more, **named)

    with monkeypatch.context() as patch:
        patch.setattr(RunState, "rescue", lambda *_: None)
        if killed_in == "save":
            patch.setattr(RunState, "save", save_but_the_last)
        else:
            patch.setattr(RunLog, "report_problems", killed)
        with pytest.raises(ZeroDivisionError):
            run("a", **STOPS)
    scored(3 if killed_in == "save" else 5)
    check_stopped(run("a", **STOPS))
    assert len(records(tmp_path / "a", "resume")) == 1


@pytest.mark.slow
def test_patience__a_longer_one_goes_on_from_the_stop(run: Run, scored: Fake) -> None:
    folder = run("a", **STOPS)
    scored(4)
    with pytest.raises(RecipeError, match=r"evaluation\.patience was 2, now 3"):
        run("a", **{**STOPS, "evaluation.patience": 3})
    longer(folder, "evaluation.patience", **{"evaluation.patience": 3})
    metrics = result_of(folder)["metrics"]
    assert (metrics["f1"], metrics["last"]["step"], "stopped_early" in metrics) == (0.9, 12, False)


@pytest.mark.slow
def test_patience__with_a_sweep_and_seeds_each_training_stops_alone(job: Job, tmp_path: Path) -> None:
    small = {"schedule.total_steps": 8, "evaluation.every_steps": 1, "checkpoint.every_steps": 1}
    values = {**STOPS, **small, "evaluation.patience": 1, "optimizer.lr": 1e-9}
    sweep = {"sweep.lrs": (1e-9, 1e-8), "finetune.seeds": (0, 1)}
    result = job("finetune", **{**values, **sweep, "evaluation.metric": "mean_per_class"})
    assert result["metrics"]["metric"] == "mean_per_class"
    assert set(result["metrics"]["sweep"]) == {"1e-09", "1e-08"}
    for folder in (tmp_path / "run", *tmp_path.glob("run/sweep/*"), *tmp_path.glob("run/seeds/*")):
        assert records(folder, "early_stop")[0]["step"] < 8


def test_tiny__is_what_it_was(uneven: Path, tmp_path: Path) -> None:
    """Keys at their defaults add nothing to the provenance."""
    result = do(TINY, tmp_path / "run", **{"data.path": str(uneven), "schedule.total_steps": 6})
    assert not {"sampling", "class_weights"} & result["provenance"].keys()
    assert "metric" not in result["metrics"]
