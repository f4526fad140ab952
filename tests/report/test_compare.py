"""Which results may stand in one table."""

import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vitctl.data.writer.intake import Item
from vitctl.data.writer.shard_writer import write_split
from vitctl.errors import CheckpointError
from vitctl.jobs.record.answer_table import answers_digest, write_answers
from vitctl.jobs.record.result import RunResult, read_result, write_result
from vitctl.launch.listing import read_line
from vitctl.recipe.load import Override, load_recipe
from vitctl.recipe.write import to_toml
from vitctl.report.compare import compare_runs

USED = {
    "split": "test",
    "num_images": 23,
    "data_sha256": "a" * 64,
    "data_digest": "index, tables, views",
    "labels": "original",
    "data_verified": "whole",
    "data_source": "CIFAR-10",
    "image_size": 16,
    "recipe_sha256": "c" * 64,
    "precision": "float32",
    "resample": "bilinear",
    "eval_method": "square",
    "eval_resize": 16,
    "exif_orientation": False,
    "device": "cpu",
    "versions": {"torch": "2.14.1"},
}
SCORED = RunResult("evaluate", "done", {"accuracy": 0.5, "correct": 12, "real": {"accuracy": 0.75}}, USED)


PART, NONE = "only a part of its bytes were verified", "does not record that any of its bytes were verified"
UNVERIFIED = {"damaged": "its shards do not match their index", "part": PART, "none": NONE}


def put(folder: Path, result: RunResult = SCORED, **used: Any) -> Path:
    folder.mkdir(parents=True)
    write_result(folder, replace(result, provenance=result.provenance | used))
    return folder


def test_compare__the_same_images_by_other_means(tmp_path: Path) -> None:
    one, two = (
        put(tmp_path / "one"),
        put(tmp_path / "two", image_size=32, eval_resize=32, recipe_sha256="d" * 64),
    )
    found = compare_runs([one, two])
    assert found.reasons == []
    assert found.numbers == [("accuracy", [0.5, 0.5]), ("real accuracy", [0.75, 0.75])]
    assert found.differences == [
        ("image_size", ["16", "32"]),
        ("recipe_sha256 (a recipe.toml is missing or invalid)", ["c" * 12, "d" * 12]),
    ]


@pytest.mark.parametrize(("orientation", "count"), [(None, 0), (1, 0), (6, 1)])
def test_compare__rotation_by_exif_counts_where_an_image_has_one(
    tmp_path: Path, orientation: int | None, count: int
) -> None:
    exif, file = Image.Exif(), io.BytesIO()
    exif.update({0x0112: orientation} if orientation else {})
    Image.new("RGB", (8, 6)).save(file, "JPEG", exif=exif)
    plain = io.BytesIO()
    Image.new("RGB", (8, 6)).save(plain, "PNG")
    items = [Item(str(n), 0, one.getvalue) for n, one in enumerate((plain, file))]
    index = write_split(items, tmp_path / "data/test", ("a",), seed=0, source_text="")
    used = {"split": "test", "data_sha256": index.digest}
    runs = [put(tmp_path / name, **used, exif_orientation=name == "on") for name in ("on", "off", "moved")]
    for run, data in zip(runs, ("data", "data", "gone"), strict=True):
        loaded = load_recipe("evaluate", [Override("data.path", str(tmp_path / data))])
        (run / "recipe.toml").write_text(to_toml(loaded))
    for first, other, reasons in ((0, 1, count), (1, 0, count), (2, 0, 1), (2, 1, 0)):
        found = compare_runs([runs[first], runs[other]]).reasons
        assert [reason.split()[1] for reason in found] == ["exif_orientation"] * reasons


def of_recipes(
    tmp_path: Path, one: dict[str, Any], two: dict[str, Any], other: str = "finetune"
) -> dict[str, list[Any]]:
    """What `compare` shows of a fine-tuning and another run, by the values of their recipes."""
    folders = [put(tmp_path / "one"), put(tmp_path / "two", recipe_sha256="d" * 64)]
    for folder, name, values in zip(folders, ("finetune", other), (one, two), strict=True):
        given = {"data.path": "x", "weights.source": "y"} | values
        loaded = load_recipe(name, [Override(key, value) for key, value in given.items()])
        (folder / "recipe.toml").write_text(to_toml(loaded))
    return dict(compare_runs(folders).differences)


def test_compare__the_recipe_values_that_differ(tmp_path: Path) -> None:
    """Values that change no result are not among them, nor a data set that an address overrides."""
    two = {"seed": 3, "optimizer.lr": 0.5, "log.every_steps": 7}
    assert list(of_recipes(tmp_path / "a", {}, two)) == ["seed", "optimizer.lr"]
    one, two = {"data.dataset": "digits"}, {"data.path": "", "data.dataset": "pets"}
    found = of_recipes(tmp_path / "b", one, two)
    assert (found["data.path"], found["data.dataset"]) == (['"x"', '""'], ["-", '"pets"'])
    jobs = of_recipes(tmp_path / "c", {}, {"data.path": "z"}, "evaluate")
    assert "data.path" in jobs and not {"optimizer.lr", "job"} & set(jobs)


@pytest.mark.parametrize(("key", "values"), [("seed", (0, 1, 2)), ("optimizer.lr", (0.1, 0.2, 0.3))])
def test_compare__runs_that_differ_in_the_seed_alone(
    tmp_path: Path, key: str, values: tuple[float, ...]
) -> None:
    runs = []
    for number, value in enumerate(values):
        runs.append(put(tmp_path / f"r{number}", recipe_sha256=f"{number}" * 64))
        given = [Override("data.path", "x"), Override("weights.source", "y"), Override(key, value)]
        (runs[-1] / "recipe.toml").write_text(to_toml(load_recipe("finetune", given)))
    assert compare_runs(runs).are_seeds == (key == "seed")
    if key == "seed":  # as `finetune` records them
        for number, run in enumerate(runs):
            result = read_result(run)
            assert result is not None
            used = result.provenance | {"seeds": [number], "weights_sha256": f"{number}" * 64}
            write_result(run, replace(result, provenance=used))
        assert compare_runs(runs).are_seeds
    assert not compare_runs(runs[:2]).are_seeds


def test_compare__a_temperature_that_was_fitted_to_the_same_images(tmp_path: Path) -> None:
    scored = replace(SCORED, metrics=SCORED.metrics | {"nll": 0.5, "ece": 0.1, "brier": 0.2})
    one = put(tmp_path / "one", scored)
    two = put(tmp_path / "two", scored, temperature=2.0, temperature_sha256="a" * 64)
    three = put(tmp_path / "three", scored, temperature=2.0, temperature_sha256="b" * 64)
    found = compare_runs([one, two, three])
    assert found.reasons == []  # of the same images and answers
    numbers = dict(found.numbers)
    assert numbers["accuracy"] == [0.5, 0.5, 0.5]
    assert [numbers[key] for key in ("nll", "ece", "brier")] == [[v, None, v] for v in (0.5, 0.1, 0.2)]
    assert [note.split(",")[0] for note in found.notes] == [
        f"{two}: its temperature was fitted to these images"
    ]


@pytest.mark.parametrize(
    ("used", "reason"),
    [
        *(({"data_verified": state}, said) for state, said in UNVERIFIED.items()),
        ({"split": "train[:10%]"}, r"split is train\[:10%\], but test in .*one: another split"),
        ({"num_images": 22}, r"num_images is 22, but 23 in .*one: another number of images"),
        ({"labels": "real"}, r"labels is real, but original in .*one: other labels"),
        (
            {"data_sha256": "b" * 64},
            r"data_sha256 is bbbbbbbbbbbb, but aaaaaaaaaaaa in .*one: other images",
        ),
        (
            {"changed_on_purpose": ["seed was 0, now 1", "70 training images, now 60"]},
            r"was resumed with a change \(seed was 0, now 1; 70 training images, now 60\)",
        ),
        (
            {"precision": "bf16"},
            r"precision is bf16, but float32 in .*one: the same network scores differently",
        ),
        ({"resample": "bilinear_antialias"}, r"resample is bilinear_antialias, but bilinear in .*one"),
        ({"eval_method": "shorter_side"}, r"eval_method is shorter_side, but square in .*one"),
        ({"eval_resize": 18}, r"eval_share is 0\.8889, but 1 in .*one"),
    ],
)
def test_compare__says_why_not(tmp_path: Path, used: dict[str, Any], reason: str) -> None:
    one, two = put(tmp_path / "one"), put(tmp_path / "two", **used)
    [said] = compare_runs([one, two]).reasons
    assert said.startswith(f"{two}: ")
    assert re.search(reason, said)


def test_compare__a_copy_of_the_same_images_is_told_by_its_source(tmp_path: Path) -> None:
    """The words alone decide nothing: a path may be spelled in many ways."""
    one, two = put(tmp_path / "one"), put(tmp_path / "two", data_source="/elsewhere/CIFAR-10")
    assert compare_runs([one, two]).reasons == []
    copy = put(tmp_path / "copy", data_source="community copy (JPEG again)", data_sha256="b" * 64)
    assert [reason.split(": ")[1].split(",")[0] for reason in compare_runs([one, copy]).reasons] == [
        f"data_sha256 is {'b' * 12}",
        "data_source is community copy (JPEG again)",
    ]


def test_compare__other_jobs_and_unfinished_ones(tmp_path: Path) -> None:
    other = put(tmp_path / "few", replace(SCORED, job="fewshot"))
    stopped = put(tmp_path / "stopped", replace(SCORED, status="stopped"))
    failed = put(tmp_path / "failed", RunResult("evaluate", "failed", error="6 classes"))
    tuned = put(tmp_path / "tuned", replace(SCORED, job="finetune"))  # a classifier too
    reasons = compare_runs([put(tmp_path / "one"), other, stopped, failed, tuned]).reasons
    assert reasons == [
        f"{other}: is of the job fewshot, but {tmp_path / 'one'} scores a classifier",
        f"{stopped}: is stopped, not done",
        f"{failed}: is failed, not done: 6 classes",
    ]


def test_compare__tables_of_tasks_task_by_task(tmp_path: Path) -> None:
    def table(**digests: str) -> dict[str, Any]:
        return {
            "suite": "vtab",
            "tasks": {name: {"split": "test", "data_sha256": d} for name, d in digests.items()},
        }

    result = replace(SCORED, job="vtab", provenance={"data_verified": "whole"})
    one = put(tmp_path / "one", result, **table(dtd="1", svhn="2", pets="3"))
    two = put(tmp_path / "two", result, **table(dtd="1", svhn="9"))
    assert compare_runs([one, two]).reasons == [f"{two}: other data or splits in the tasks pets, svhn"]


def test_compare__two_networks_of_other_sizes_may_be_compared(tmp_path: Path) -> None:
    """224 of 256 and 384 of 438 pixels show the same share of an image."""
    one = put(tmp_path / "one", image_size=224, eval_resize=256, weights_sha256="1" * 64, device="cuda")
    two = put(
        tmp_path / "two",
        image_size=384,
        eval_resize=438,
        weights_sha256="2" * 64,
        versions={"torch": "2.11.0"},
    )
    found = compare_runs([one, two])
    assert (found.reasons, found.unrecorded) == ([], [])
    assert dict(found.differences) == {
        "image_size": ["224", "384"],
        "weights_sha256": ["1" * 12, "2" * 12],
        "device": ["cuda", "cpu"],
        "versions torch": ["2.14.1", "2.11.0"],
    }


def test_compare__what_an_old_result_does_not_tell_is_never_silently_equal(tmp_path: Path) -> None:
    old = {key: value for key, value in USED.items() if key not in ("precision", "device")}
    one, two = put(tmp_path / "one", replace(SCORED, provenance=old)), put(tmp_path / "two")
    found = compare_runs([one, two])
    assert [reason.split(": ")[1] for reason in found.reasons] == [
        f"precision is float32, but not recorded in {one}"
    ]
    assert ("device", ["not recorded", "cpu"]) in found.differences
    other = put(tmp_path / "three", replace(SCORED, provenance=old))
    found = compare_runs([one, other])
    assert (found.reasons, found.unrecorded) == ([], ["precision"])


def test_compare__an_accuracy_that_is_not_that_of_its_counts(tmp_path: Path) -> None:
    one, two = put(tmp_path / "one"), put(tmp_path / "two")
    result = json.loads((two / "result.json").read_text())
    result["metrics"] |= {"accuracy": 0.9, "correct": 22, "total": 1000}
    result["record"] = {}  # as of releases without a digest of the result, which refuses it first
    (two / "result.json").write_text(json.dumps(result))
    with pytest.raises(CheckpointError, match=r"two/result.json: its accuracy is not correct / total;"):
        compare_runs([one, two])
    assert (read_line(two).state, read_line(two).number) == ("invalid", None)


NEIGHBOURS = {"method": "knn", "k": [10, 20], "temperature": 0.07, "float64": True}
LAYERS = {"method": "linear", "hold_out": 0.1, "hold_out_seed": 0, "float64": True, "lrs": [0.1], "steps": 9}


@pytest.mark.parametrize(
    ("one", "two", "refused", "shown"),
    [
        (NEIGHBOURS, NEIGHBOURS | {"temperature": 0.1}, ["temperature"], []),
        (NEIGHBOURS, NEIGHBOURS | {"k": [10]}, [], ["k"]),
        (NEIGHBOURS, NEIGHBOURS | {"train_sha256": "e" * 64}, ["train_sha256"], []),
        (LAYERS, LAYERS | {"hold_out": 0.2, "float64": False}, ["float64", "hold_out"], []),
        (
            LAYERS,
            LAYERS | {"lrs": [0.2], "steps": 8, "hold_out_seed": 1},
            ["lrs", "steps"],
            ["hold_out_seed"],
        ),
        (NEIGHBOURS, LAYERS, ["method"], ["hold_out_seed", "k"]),
    ],
)
def test_compare__probes(
    tmp_path: Path, one: dict[str, Any], two: dict[str, Any], refused: list[str], shown: list[str]
) -> None:
    probed = RunResult("probe", "done", {"accuracy": {"k=10": 0.5}}, USED | {"train_sha256": "b" * 64})
    found = compare_runs([put(tmp_path / "one", probed, **one), put(tmp_path / "two", probed, **two)])
    assert sorted(reason.split(": ")[1].split(" is ")[0] for reason in found.reasons) == refused
    assert sorted(key for key, _ in found.differences) == shown
    assert not (NEIGHBOURS | LAYERS).keys() & set(found.unrecorded)


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_compare__tests_answers_to_the_same_images(tmp_path: Path, ending: str) -> None:
    """Of 23 images each gets 12 right; they agree on 4 of those."""
    runs = []
    for name, right in (("one", range(12)), ("two", range(8, 20))):
        rows = [(f"{n}.jpg", "a", "a" if n in right else "b", 0.9, 0.8, 0.1) for n in range(23)]
        file = tmp_path / f"{name}{ending}"
        write_answers(file, rows)
        result = replace(SCORED, files={"answers": str(file)})
        runs.append(put(tmp_path / name, result, answers_sha256=answers_digest(file)))
    (text,) = compare_runs(runs).notes
    assert "one is right on 8 images" in text and "two on 8:" in text and text.endswith("p = 1")
    assert not compare_runs(runs).differences  # digests of the answers differ
    shutil.copy(tmp_path / f"one{ending}", tmp_path / f"two{ending}")  # as many right answers, of another run
    assert f"no longer has the answers of {runs[1]}" in compare_runs(runs).notes[0]
    (tmp_path / f"two{ending}").unlink()
    assert "no McNemar's test" in compare_runs(runs).notes[0]
    assert compare_runs([put(tmp_path / "three"), runs[0]]).notes == []


@pytest.mark.parametrize(
    ("accuracy", "correct", "total"),
    [(float("nan"), 6, 18), (1, 6, 18), (0.0, 0, 0), (0.5, 10**400, 18), (0.5, 9, 10**400), (-0.5, -9, 18)],
)
def test_compare__an_accuracy_that_is_not_its_counts(accuracy: float, correct: int, total: int) -> None:
    from vitctl.jobs.record.result import _is_miscounted

    assert _is_miscounted({"accuracy": accuracy, "correct": correct, "total": total})
    assert not _is_miscounted({"accuracy": 0.5, "correct": 9, "total": 18})
    assert _is_miscounted({"accuracy": 0.5, "correct": 9, "total": 18, "nll": 10**400})
