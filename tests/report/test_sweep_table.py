"""The table and the plot of a sweep, from run folders."""

import csv
import json
from pathlib import Path

import pytest

from vitctl.engine.journal import write_run_json
from vitctl.report.sweep_table import (
    Group,
    Outcome,
    draw_sweep,
    groups,
    numeric_axis,
    outcome,
    shared_words,
    write_sweep_table,
)
from vitctl.system.figures import can_plot


def run_folder(out: Path, name: str, accuracy: float | None) -> Path:
    """A run of 20 steps of 10 images at 100 images/s, with two evaluations and a probe; unfinished without
    accuracy.
    """
    folder = out / name
    folder.mkdir(parents=True)
    records = [
        {"kind": "train", "step": 10, "samples": 100, "images_per_second": 50.0, "loss": 3.0},
        {"kind": "evaluate", "step": 10, "accuracy": 0.75},
        {"kind": "train", "step": 20, "samples": 200, "images_per_second": 100.0, "loss": 2.5},
        {"kind": "fewshot", "step": 20, "shots": 5, "accuracy": 0.125},
    ]
    (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if accuracy is not None:
        metrics = {"accuracy": accuracy, "correct": 1, "by": {"seed": 2}}
        write_run_json(folder / "result.json", {"job": "pretrain", "status": "done", "metrics": metrics})
    return folder


def seeded(name: str, value: float | None, **varied: object) -> Outcome:
    return Outcome(name, "smoke", varied, "done", value, {}, None, None)


def test_outcome__of_a_finished_run(tmp_path: Path) -> None:
    one = outcome(run_folder(tmp_path, "a", 0.5), "smoke", {"seed": 1}, "accuracy", "")
    assert (one.status, one.value, one.loss, one.seconds) == ("done", 0.5, 2.5, 3.0)
    assert one.numbers == {
        "accuracy": 0.5,
        "correct": 1,
        "by.seed": 2,
        "best_accuracy": 0.75,
        "5-shot": 0.125,
    }
    assert outcome(tmp_path / "a", "smoke", {}, "best_accuracy", "").value == 0.75
    assert outcome(tmp_path / "a", "smoke", {}, "nothing", "").value is None


def test_outcome__of_runs_that_are_not_finished(tmp_path: Path) -> None:
    assert outcome(run_folder(tmp_path, "a", None), "smoke", {}, "accuracy", "").status == "stopped"
    assert outcome(tmp_path / "none", "smoke", {}, "accuracy", "").status == "waiting"
    failed = outcome(tmp_path / "a", "smoke", {}, "accuracy", "it broke")
    assert (failed.status, failed.value, failed.error) == ("failed", None, "it broke")


def test_groups__are_runs_without_their_seeds() -> None:
    found = groups(
        [
            seeded("lr_1__seed_0", 0.25, **{"optimizer.lr": 1, "seed": 0}),
            seeded("lr_1__seed_1", 0.75, **{"optimizer.lr": 1, "seed": 1}),
            seeded("lr_2__seed_0", 1.0, **{"optimizer.lr": 2, "seed": 0}),
            seeded("lr_2__seed_1", None, **{"optimizer.lr": 2, "seed": 1}),
        ]
    )
    assert [(group.name, group.values, group.varied) for group in found] == [
        ("lr_1", (0.25, 0.75), {"optimizer.lr": 1}),
        ("lr_2", (1.0,), {"optimizer.lr": 2}),
    ]
    assert [(group.mean, group.std) for group in found] == [(0.5, 0.25), (1.0, 0.0)]


def test_groups__of_seeds_alone_are_one() -> None:
    found = groups([seeded("seed_0", 0.1, seed=0), seeded("seed_1", 0.3, seed=1)])
    assert [(group.name, len(group.values)) for group in found] == [("smoke", 2)]


def test_write_table__csv_and_json_hold_every_run(tmp_path: Path) -> None:
    one = outcome(run_folder(tmp_path, "a", 0.5), "smoke", {"optimizer.lr": 0.1}, "accuracy", "")
    two = outcome(tmp_path / "b", "smoke", {"model.depth": 2}, "accuracy", 'no, "really"')
    write_sweep_table(tmp_path, [one, two])
    with (tmp_path / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [
        (row["run"], row["status"], row["optimizer.lr"], row["model.depth"], row["accuracy"]) for row in rows
    ] == [
        ("a", "done", "0.1", "", "0.5"),
        ("b", "failed", "", "2", ""),
    ]
    stored = json.loads((tmp_path / "sweep.json").read_text())["runs"]
    assert [(run["value"], run["error"]) for run in stored] == [(0.5, ""), (None, 'no, "really"')]


def test_shared_words__leave_out_what_all_have() -> None:
    assert shared_words(["a__lr_1__seed_0", "a__lr_2__seed_0"]) == ["lr_1", "lr_2"]
    assert shared_words(["only"]) == ["only"]
    assert shared_words(["same", "same"]) == ["same", "same"]


def grid(values: list[object], recipes: tuple[str, ...] = ("smoke",)) -> list[Group]:
    return [Group(f"{r}_{v}", r, {"model.depth": v}, (0.25, 0.5)) for r in recipes for v in values]


def test_numeric_axis__is_the_one_number_that_varies() -> None:
    assert numeric_axis(grid([1, 2, 4])) == "model.depth"
    assert numeric_axis(grid([1, 2, 4], ("a", "b"))) == "model.depth"
    assert numeric_axis(grid(["x", "y"])) == ""
    assert numeric_axis(grid([True, False])) == ""
    assert numeric_axis(grid([3])) == ""
    assert numeric_axis([Group("a", "smoke", {}, (1.0,))]) == ""


@pytest.mark.skipif(not can_plot(), reason="matplotlib is not installed")
@pytest.mark.parametrize(
    "found", [grid([1, 2, 64], ("a", "b")), grid(["x", "y", "z"])], ids=["lines", "rows"]
)
def test_draw__writes_a_picture_and_nothing_beside_it(tmp_path: Path, found: list[Group]) -> None:
    from PIL import Image

    path = draw_sweep(found, "accuracy", "a title of $\\nonsense{$ " * 10, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["sweep.png"]
    with Image.open(path) as image:
        assert image.width == 960
        assert len(image.convert("RGB").getcolors(1 << 24)) > 10
