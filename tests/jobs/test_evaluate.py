"""A stored classifier scored anew gives the number that its run gave."""

import csv
import io
import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from sklearn.metrics import f1_score

from tests.matrix import each
from tests.trained import Job
from vitctl import load_classifier, open_split
from vitctl.data.shards.index import read_index
from vitctl.data.source.stores import ShardSource
from vitctl.data.writer.intake import Item
from vitctl.data.writer.shard_writer import write_split
from vitctl.engine import checkpoint as files
from vitctl.engine.calibration import calibration
from vitctl.errors import CheckpointError, DataError, RecipeError
from vitctl.jobs.inputs.weights import stored_eval_transform
from vitctl.jobs.record.answer_table import (
    COLUMNS,
    answers_digest,
    check_place,
    is_right,
    joined,
    read_answers,
    write_answers,
)
from vitctl.models.weights.weights_file import read_weights
from vitctl.recipe.load import Override, load_recipe


def test_evaluate__the_averaged_weights_give_the_accuracy_of_their_run(
    job: Job, pretrained: Path, tmp_path: Path
) -> None:
    trained = json.loads((pretrained / "result.json").read_text())
    ema = pretrained / "checkpoints" / "step_00000020" / "ema.safetensors"
    result = job("evaluate", **{"weights.source": str(ema)})
    assert trained["metrics"].items() < result["metrics"].items()
    assert result["provenance"]["data_sha256"] == trained["provenance"]["data_sha256"]
    assert f'"path": "{ema}"' in (tmp_path / "run" / "log.jsonl").read_text()


def test_evaluate__a_part_of_a_split_at_another_size(job: Job) -> None:
    result = job("evaluate", **{"data.eval_split": "train[:10]", "data.image_size": 32})
    assert (result["metrics"]["total"], result["provenance"]["image_size"]) == (10, 32)


@pytest.mark.slow
def test_evaluate__refuses_data_of_other_classes(job: Job) -> None:
    with pytest.raises(
        CheckpointError, match=r"its head has 6 classes \(circle, .*\), the data has 10 \(0, 1, 2 \.\.\.\)"
    ):
        job("evaluate", **{"data.path": "", "data.dataset": "digits"})


def table_rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def test_evaluate__data_may_lack_classes_of_the_head(job: Job, tiny_data: Path, tmp_path: Path) -> None:
    """They are matched by name, in any order; answers may be any class of the head. Means and counts are
    those of the whole test set's images of these classes, as scikit-learn has them.
    """
    names = ("square", "circle")
    whole = ShardSource(read_index(tiny_data / "test"))
    kept = [n for n in range(len(whole)) if whole.class_names[whole.labels()[n]] in names]
    labels = [names.index(whole.class_names[whole.labels()[n]]) for n in kept]
    items = [Item(str(n), label, partial(whole.read, n)) for n, label in zip(kept, labels, strict=True)]
    write_split(items, tmp_path / "two" / "test", names, seed=0, source_text="two classes")
    answers = {"evaluation.answers": str(tmp_path / "all.csv")}
    job("evaluate", "all", **answers)
    answers = {"evaluation.answers": str(tmp_path / "some.csv")}
    metrics = job("evaluate", "some", **{**answers, "data.path": str(tmp_path / "two")})["metrics"]
    rows = [row for row in table_rows(tmp_path / "all.csv") if row["truth"] in names]
    truth, answered = [row["truth"] for row in rows], [row["answer"] for row in rows]
    again = table_rows(tmp_path / "some.csv")
    assert sorted((row["truth"], row["answer"]) for row in again) == sorted(zip(truth, answered, strict=True))
    macro = f1_score(truth, answered, average="macro", zero_division=0)
    assert metrics["f1"] == pytest.approx(macro, abs=1e-12)
    by_class = [
        np.mean([a == t for t, a in zip(truth, answered, strict=True) if t == name]) for name in names
    ]
    assert metrics["mean_per_class"] == pytest.approx(np.mean(by_class), abs=1e-12)
    assert metrics["chance"] == pytest.approx(1 / 6)
    warning = "4 of the 6 classes of the weights have no image here"
    assert warning in (tmp_path / "some" / "log.jsonl").read_text()
    counts = {row["class"]: int(row["images"]) for row in table_rows(tmp_path / "some" / "per_class.csv")}
    assert counts == {**dict.fromkeys(whole.class_names, 0), **{name: truth.count(name) for name in names}}


CROPPED = {"image_size": 224, "eval_method": "shorter_side", "eval_resize": 256, "resample": "area"}
SQUARE = {"image_size": 384, "eval_method": "square", "eval_resize": 0, "resample": "bilinear"}


@each(
    ("stored", "values", "expected"),
    [
        (CROPPED, {}, (224, "shorter_side", 256, "area")),
        (CROPPED, {"data.image_size": 336}, (336, "shorter_side", 384, "area")),  # 224 of 256
        (CROPPED, {"data.image_size": 112}, (112, "shorter_side", 128, "area")),
        (CROPPED, {"data.eval_method": "square", "data.eval_resize": 224}, (224, "square", 224, "area")),
        (
            CROPPED,
            {"data.eval_resample": "bicubic_antialias"},
            (224, "shorter_side", 256, "bicubic_antialias"),
        ),
        # timm cuts 320 of 288 pixels for a share of 0.9; 248 of 224, its rounded size, would give 319.
        (
            {**CROPPED, "eval_method": "torchvision", "eval_resize": 248, "eval_share": 0.9},
            {"data.image_size": 288},
            (288, "torchvision", 320, "area"),
        ),
        (SQUARE, {"data.image_size": 512}, (512, "square", 0, "bilinear")),
        (
            SQUARE,
            {"data.eval_method": "shorter_side", "data.eval_resize": 438},
            (384, "shorter_side", 438, "bilinear"),
        ),
        (SQUARE, {"evaluation.labels": "objectnet"}, (480, "shorter_side", 512, "bilinear")),
        (
            SQUARE,
            {"evaluation.labels": "objectnet", "data.image_size": 240},
            (240, "shorter_side", 256, "bilinear"),
        ),
        (
            SQUARE,
            {"evaluation.labels": "objectnet_restricted", "data.eval_resize": 500},
            (480, "shorter_side", 500, "bilinear"),
        ),
    ],
)
def test_evaluate__preprocessing(
    stored: dict[str, object], values: dict[str, object], expected: tuple[object, ...]
) -> None:
    recipe = load_recipe("evaluate", [Override(key, value) for key, value in values.items()]).recipe
    found = stored_eval_transform(recipe, stored)
    assert (found.image_size, found.method, found.resize, found.resample) == expected


@pytest.mark.slow
def test_evaluate__another_size_keeps_the_share_of_the_crop(job: Job, tmp_path: Path) -> None:
    """Where it silently became 1, the numbers were those of other images."""
    weights = {"weights.source": str(tmp_path / "fine")}
    given = {
        "data.image_size": 12,
        "data.eval_method": "shorter_side",
        "data.eval_resize": 16,
        "data.eval_resample": "area",
    }
    trained = job("finetune", "fine", **given)
    used = job("evaluate", "same", **weights)
    keys = ("image_size", "eval_method", "eval_resize", "resample")
    assert [used["provenance"][key] for key in keys] == [12, "shorter_side", 16, "area"]
    assert [trained["provenance"][key] for key in keys] == [12, "shorter_side", 16, "area"]
    assert used["metrics"]["correct"] == trained["metrics"]["correct"]
    assert job("evaluate", "large", **weights, **{"data.image_size": 24})["provenance"]["eval_resize"] == 32


def test_evaluate__a_crop_without_room_is_refused(job: Job) -> None:
    with pytest.raises(RecipeError, match=r"^data.eval_resize = 8 is smaller than the crop of 16 pixels"):
        job("evaluate", **{"data.eval_resize": 8})
    with pytest.raises(RecipeError, match=r"set data.eval_resize to at least 32$"):
        job("evaluate", **{"data.eval_resize": 24, "data.image_size": 32})


@pytest.mark.parametrize("which", ["", "last", "20"])
def test_evaluate__verifies_each_file_of_a_checkpoint_once(
    which: str, job: Job, pretrained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it loads the weights; what is looked at before, and by a plan, are sizes."""
    read: list[str] = []
    sha256 = files._sha256
    monkeypatch.setattr(files, "_sha256", lambda path: read.append(path.name) or sha256(path))
    job("evaluate", **{"weights.source": str(pretrained), "weights.which": which})
    assert sorted(read) == ["ema.safetensors", "model.safetensors", "optimizer.safetensors"]


def test_evaluate__answers_are_those_of_predict(
    job: Job, pretrained: Path, tiny_data: Path, tmp_path: Path
) -> None:
    plain = job("evaluate", "plain")
    result = job("evaluate", **{"evaluation.answers": str(tmp_path / "answers.csv")})
    assert result["metrics"] == plain["metrics"]
    assert result["provenance"]["recipe_sha256"] == plain["provenance"]["recipe_sha256"]
    rows = list(csv.DictReader((tmp_path / "answers.csv").read_text().splitlines()))
    assert sum(row["truth"] == row["answer"] for row in rows) == plain["metrics"]["correct"]
    classify = load_classifier(str(pretrained), precision="float64", device="cpu", top=2)
    test = open_split("test", path=tiny_data)
    for row, data in zip(rows, map(test.read, range(len(test))), strict=True):
        (answer, probability), (_, second) = classify(Image.open(io.BytesIO(data)))
        assert row["answer"] == answer
        assert float(row["probability"]) == pytest.approx(probability, rel=1e-9)
        assert float(row["margin"]) == pytest.approx(probability - second, rel=1e-6, abs=1e-9)


@pytest.mark.slow
def test_evaluate__calibrates_a_softmax_on_single_labels(job: Job, tmp_path: Path) -> None:
    """The tiny weights were trained with a sigmoid, and have no such numbers."""
    assert "ece" not in job("evaluate", "sigmoid")["metrics"]
    job("finetune", "tuned")
    source = {"weights.source": str(tmp_path / "tuned"), "evaluation.answers": str(tmp_path / "answers.csv")}
    metrics = job("evaluate", "scored", **source)["metrics"]
    assert sum(one["images"] for one in metrics["calibration_bins"]) == metrics["total"]
    rows = list(csv.DictReader((tmp_path / "answers.csv").read_text().splitlines()))
    likely = np.array([float(row["probability"]) for row in rows])
    right = np.array([row["truth"] == row["answer"] for row in rows])
    found = calibration(likely, right, np.zeros((len(rows), 2)))
    assert (metrics["ece"], metrics["calibration_bins"]) == (found["ece"], found["calibration_bins"])


HELD_OUT = {"data.eval_split": "train[50%:]", "evaluation.fit_temperature": True}


@pytest.mark.slow
def test_temperature__of_held_out_images_divides_all_logits(
    job: Job, tiny_data: Path, tmp_path: Path
) -> None:
    run = tmp_path / "tuned"
    source = {"weights.source": str(run)}
    job("finetune", "tuned", **{"data.train_split": "train[:50%]"})
    plain = job("evaluate", "plain", **source)
    test = open_split("test", path=tiny_data)
    images = [Image.open(io.BytesIO(test.read(n))) for n in range(len(test))]
    before = load_classifier(str(run), precision="float64", device="cpu", top=6)
    with pytest.raises(DataError, match=r"was trained on 7 of these 42 images"):
        job("evaluate", "leak", **source, **HELD_OUT | {"data.eval_split": "train[40%:]"})
    for split, count in (("train[40%:]", 7), ("train[50%:]", 0)):
        job("evaluate", "seen", **source, **{"data.eval_split": split})
        log = (tmp_path / "seen" / "log.jsonl").read_text()
        assert (f"was trained on {count} of these" in log) == bool(count)
        shutil.rmtree(tmp_path / "seen")
    fitted = job("evaluate", "fitted", **source, **HELD_OUT)
    file = Path(fitted["files"]["temperature"])
    temperature = json.loads(file.read_text())["temperature"]
    assert fitted["provenance"]["temperature"] == temperature != 1
    after_fit = json.loads(file.read_text())["nll_after"]
    assert fitted["metrics"]["nll"] == pytest.approx(after_fit, rel=1e-12)

    with pytest.raises(RecipeError, match="images that choose a temperature test it no longer"):
        job("evaluate", "refused", **source, **HELD_OUT | {"data.eval_split": "test"})
    job("evaluate", "leaky", **source, **HELD_OUT | {"data.eval_split": "test[:50%]"})
    assert json.loads(file.read_text())["split"] == "test[:50%]"
    job("evaluate", "again", **source, **HELD_OUT)
    assert json.loads(file.read_text())["temperature"] == temperature
    for name, of_test, replaced in (
        ("fitted", False, None),
        ("leaky", True, f"temperature {temperature:.4f}, fitted to train[50%:] (35 images, "),
        ("again", False, "fitted to test[:50%] (12 images, "),
    ):
        said = (tmp_path / name / "log.jsonl").read_text()
        assert ("fitted to images that score the network" in said) == of_test
        assert ("an earlier fit would be replaced" in said) == bool(replaced) and (replaced or "") in said

    scored = job("evaluate", "scored", **source)
    assert f"temperature {temperature:.4g}; images of" in (tmp_path / "scored" / "log.jsonl").read_text()
    kept = [name for name in plain["metrics"] if name not in ("ece", "nll", "brier", "calibration_bins")]
    assert {name: scored["metrics"][name] for name in kept} == {name: plain["metrics"][name] for name in kept}
    assert scored["provenance"]["weights_sha256"] == plain["provenance"]["weights_sha256"]

    after = load_classifier(str(run), precision="float64", device="cpu", top=6)
    logits = before.logits(images)
    assert torch.equal(after.logits(images), logits)
    expected = np.sort((logits.double() / temperature).softmax(1).numpy())[:, ::-1]
    found = [[share for _, share in row] for row in after(images)]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert [row[0][0] for row in after(images)] == [row[0][0] for row in before(images)]

    job("export", "files", **source, **{"export.to": ("onnx", "safetensors"), "machine.precision": "auto"})
    graph = load_classifier(str(tmp_path / "files" / "model.onnx"), device="cpu", top=6)
    np.testing.assert_allclose(graph.logits(images), logits / temperature, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose([[p for _, p in row] for row in graph(images)], expected, atol=1e-5)
    (copied,) = (tmp_path / "files").rglob("*.safetensors")
    tensors = load_classifier(str(copied), precision="float64", device="cpu", top=6)
    assert tensors(images) == after(images)
    job("export", "hf", **source, **{"export.to": ("hf",), "machine.precision": "auto"})
    (config,) = (tmp_path / "hf").rglob("config.json")
    exported = load_classifier(str(config.parent), precision="float64", device="cpu", top=6)
    np.testing.assert_allclose([[p for _, p in row] for row in exported(images)], expected, rtol=1e-9)
    changed, answers = json.loads(config.read_text()), exported(images)
    assert "temperature" not in changed["vitctl"]["preprocessing"]
    changed["vitctl"]["preprocessing"]["temperature"] = 2.0  # as earlier exports: beside an undivided head
    for digest, is_divided in ((read_weights(config.parent).digest, True), ("0" * 64, False)):
        changed["vitctl"]["weights_sha256"] = digest  # else of weights that were trained on
        config.write_text(json.dumps(changed))
        again = load_classifier(str(config.parent), precision="float64", device="cpu", top=6)
        assert (again(images) != answers) == is_divided

    file.write_text(file.read_text().replace('"weights_sha256": "', '"weights_sha256": "0'))  # of others
    assert load_classifier(str(run), precision="float64", device="cpu", top=6)(images) == before(images)
    file.write_text("{}")
    with pytest.raises(CheckpointError, match="is not a temperature"):
        load_classifier(str(run), device="cpu")


@pytest.mark.slow
def test_temperature__where_none_is_found_the_accuracy_is_kept(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, split = {"weights.source": str(tmp_path / "tuned")}, {"data.eval_split": "train[50%:]"}
    job("finetune", "tuned", **{"data.train_split": "train[:50%]"})
    plain = job("evaluate", "plain", **run, **split)
    for name in ("_LOWEST", "_HIGHEST"):
        monkeypatch.setattr(f"vitctl.engine.calibration.{name}", 99.0)
    kept = job("evaluate", "kept", **run, **HELD_OUT)
    assert (kept["status"], kept["metrics"]) == ("done", plain["metrics"])
    assert "temperature" not in kept["files"] and "temperature" not in kept["provenance"]
    said = (tmp_path / "kept" / "log.jsonl").read_text()
    assert "is not between" in said and "no temperature was written, it stays 1" in said


def test_evaluate__warns_of_images_that_chose_the_checkpoint(job: Job, tmp_path: Path) -> None:
    chosen_by = {"data.train_split": "train[:50%]", "data.eval_split": "train[50%:80%]"}
    every = {"evaluation.every_steps": 2, "checkpoint.every_steps": 2, "checkpoint.keep_best": 1}
    job("finetune", "tuned", **chosen_by, **every, **{"evaluation.select_best": True})
    for split, count in (("train[60%:]", 14), ("test", 0)):
        name = f"of_{count}"
        job("evaluate", name, **{"weights.source": str(tmp_path / "tuned"), "data.eval_split": split})
        said = (tmp_path / name / "log.jsonl").read_text()
        assert (f"chose this checkpoint by {count} of these" in said) == bool(count)


def test_temperature__is_for_a_softmax_and_for_images_that_the_user_names(job: Job) -> None:
    with pytest.raises(DataError, match="is for a softmax"):
        job("evaluate", **HELD_OUT)
    with pytest.raises(RecipeError, match="images that choose a temperature"):
        job("evaluate", "test", **{"evaluation.fit_temperature": True})


def test_check_place__other_files_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "labels.csv").write_text("path,label\nx,y\n")
    pq.write_table(pa.table({"path": ["x"]}), tmp_path / "labels.parquet")
    (tmp_path / "text.parquet").write_text("path,label\nx,y\n")
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "link.csv").symlink_to(tmp_path / "gone.csv")
    names = ("labels.csv", "labels.parquet", "text.parquet", "nowhere/a.csv", ".", "pipe.csv", "link.csv")
    for name in names:
        with pytest.raises(
            DataError, match=r"another name|does not exist|is not a regular file|not a complete parquet"
        ):
            check_place(tmp_path / name)
    for name in ("a.csv", "a.parquet"):
        assert check_place(tmp_path / name) == []
        write_answers(tmp_path / name, [("x", "a", "b", 0.5, 0.25, None)])
        (warning,) = check_place(tmp_path / name)
        assert "earlier evaluation" in warning
    with pytest.raises(RecipeError, match=r"should be the name of a \.csv or \.parquet file"):
        load_recipe("evaluate", [Override("evaluation.answers", "answers.json")])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pip install 'vitctl\[data\]'"):
        check_place(tmp_path / "b.parquet")


def test_answers__parquet_holds_the_rows_of_csv(tmp_path: Path) -> None:
    rows = [("a\x1b/1.png", "x;y", "x", 0.1, -2.5e-300, None), ("ü.png", "=z", "y", 0.5, 0.0, 1 / 3)]
    tables = []
    for ending in (".csv", ".parquet"):
        assert write_answers(tmp_path / f"a{ending}", rows) == answers_digest(tmp_path / f"a{ending}")
        tables.append(read_answers(tmp_path / f"a{ending}"))
    tables[0][1]["truth"] = tables[0][1]["truth"].removeprefix("'")  # a formula, in a spreadsheet
    assert tables[0] == tables[1]
    assert [tuple(row.values())[3:] for row in tables[1]] == [row[3:] for row in rows]
    assert [is_right(row) for row in tables[1]] == [True, False]
    table = pq.read_table(tmp_path / "a.parquet")
    assert [str(kind) for kind in table.schema.types] == ["string"] * 3 + ["double"] * 3


def test_read_answers__refuses_other_tables(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("path,truth,answer,probability,margin\n1.png,a,a,0.5,0.1\n")
    (tmp_path / "b.csv").write_text(f"{','.join(COLUMNS)}\n1.png,a,a,most,0.1,\n")
    for name in ("a.csv", "b.csv"):
        with pytest.raises(CheckpointError, match="not a file of answers"):
            read_answers(tmp_path / name)


@pytest.mark.parametrize(
    ("truth", "answer", "right"),
    [(["a;b"], "a", False), (["a;b"], "a;b", True), (["a", "=x"], "=x", True), (["=x", "a"], "=x", True),
     (["=x"], "x", False), (["b", "a;"], "a;", True), ([], "", True), (["a\\"], "a\\", True)],
)  # fmt: skip
def test_answers__names_may_hold_what_separates_them(
    truth: list[str], answer: str, right: bool, tmp_path: Path
) -> None:
    for written in (joined([answer]), answer):  # the second by earlier releases
        write_answers(tmp_path / "a.csv", [("x", joined(truth), written, 0.5, 0.25, None)])
        assert is_right(read_answers(tmp_path / "a.csv")[0]) == right
