"""The one rule for labels, at every job: what it needs is held against what was opened, before anything is
computed.
"""

import csv
import shutil
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import TINY
from tests.data.noted_tables import note_tables
from tests.matrix import spread
from tests.models.tiny_models import VIT
from tests.models.weights.conftest import META
from tests.trained import CPU, SMALL, do
from vitctl import load_recipe, open_split
from vitctl.data.datasets.readers import shapes
from vitctl.data.datasets.readers.arrays import encode_png
from vitctl.data.datasets.vtab import SUITES
from vitctl.data.datasets.vtab_images import open_task
from vitctl.data.source.stores import ImageFiles
from vitctl.data.writer.intake import Item
from vitctl.data.writer.shard_writer import write_split
from vitctl.errors import DataError
from vitctl.jobs.inputs.data import open_scored, open_train, sampling_notes
from vitctl.jobs.predict import predict
from vitctl.jobs.record.answer_table import is_right, read_answers
from vitctl.models.build import build
from vitctl.models.weights.weights_file import save_weights
from vitctl.recipe.images import Place, TrainImages
from vitctl.system.text import count_text

CLASSES = shapes.SHAPES
NONE, BEYOND = -1, 6


def write(folder: Path, split: str, size: int = 36, *, label: int = 0) -> Path:
    """Pictures of six classes; the label of number 5 is put into the index afterwards."""
    picture = partial(np.random.default_rng(len(split)).integers, 0, 256, (16, 16, 3), dtype=np.uint8)
    items = [Item(f"{split}{n}", n % 6, partial(encode_png, picture())) for n in range(size)]
    write_split(items, folder / split, CLASSES, seed=0, source_text="noise")
    rows = np.load(folder / split / "samples.npy")
    if label:
        rows["label"][5] = label
        np.save(folder / split / "samples.npy", rows)
        note_tables(folder / split)
    return folder


def of(label: int) -> str:
    return "1 of 36 images have no label" if label == NONE else "1 of 36 images have labels outside 0..5"


@pytest.mark.parametrize("label", [NONE, BEYOND])
@pytest.mark.parametrize(
    ("job", "split"),
    spread(4, product(["pretrain", "finetune", "evaluate", "fewshot"], ["train", "test"]), 1),
)
def test_jobs__refuse_labels_that_mean_nothing(
    pretrained: Path, tmp_path: Path, job: str, split: str, label: int
) -> None:
    for name in ("train", "test"):
        write(tmp_path / "data", name, label=label if name == split else 0)
    values = {"data.path": str(tmp_path / "data"), **CPU}
    recipe = TINY if job == "pretrain" else job
    values |= {} if job == "pretrain" else {"weights.source": str(pretrained)}
    values |= SMALL if job == "finetune" else {}
    values |= {"fewshot.shots": (1,), "fewshot.seeds": (0,)} if job == "fewshot" else {}
    unread = (job, split) == ("evaluate", "train") or (job, split, label) == ("fewshot", "train", NONE)
    if unread:
        assert do(recipe, tmp_path / "run", **values)["metrics"]["total"] == 36
    else:
        with pytest.raises(DataError, match=rf"'{split}': {of(label)}"):
            do(recipe, tmp_path / "run", **values)


def test_probe__holds_its_own_images_to_the_rule(tiny_data: Path, tmp_path: Path) -> None:
    write(write(tmp_path / "data", "train"), "test", label=BEYOND)
    probe = {"every_steps": 20, "path": str(tmp_path / "data"), "shots": (1,)}
    with pytest.raises(DataError, match=rf"'test': {of(BEYOND)}"):
        do(
            TINY,
            tmp_path / "run",
            **CPU,
            **{"data.path": str(tiny_data)},
            **{f"fewshot_probe.{k}": v for k, v in probe.items()},
        )


@pytest.mark.slow
@pytest.mark.parametrize(("split", "label"), [("train", NONE), ("test", BEYOND)])
def test_vtab__holds_every_task_to_the_rule(
    task_shards: Path, tmp_path: Path, split: str, label: int
) -> None:
    shutil.copytree(task_shards / "digits", tmp_path / "digits")
    task = next(task for task in SUITES["mini"] if task.data_set == "digits")
    opened = open_task(task, tmp_path, scratch=tmp_path)
    folder = tmp_path / "digits" / split
    rows = np.load(folder / "samples.npy")
    rows["label"][:] = np.where(rows["label"] == 3, 12 if label == BEYOND else label, rows["label"])
    np.save(folder / "samples.npy", rows)
    note_tables(folder)
    assert opened.test.class_names
    with pytest.raises(DataError, match=r"digits.*images have (no label|labels outside 0..9)"):
        open_task(task, tmp_path, scratch=tmp_path)


def test_masked_patches__need_no_labels(tmp_path: Path) -> None:
    write(write(tmp_path / "data", "train", label=NONE), "test", label=NONE)
    masked = {
        "loss.name": "masked_patch",
        "model.pre_logits": False,
        "model.head_bias": 0.0,
        "averaging.decay": 0.0,
    }
    steps = {
        "schedule.total_steps": 3,
        "schedule.warmup_steps": 1,
        "data.max_bad_fraction": 0.0,
        "data.crop": "none",
    }
    values = {**CPU, **masked, **steps, "data.path": str(tmp_path / "data")}
    assert do(TINY, tmp_path / "run", **values)["status"] == "done"
    write(tmp_path / "odd", "train", label=BEYOND)
    with pytest.raises(DataError, match=rf"'train': {of(BEYOND)}"):
        do(TINY, tmp_path / "other", **{**values, "data.path": str(tmp_path / "odd"), "data.eval_split": ""})
    write(write(tmp_path / "scored", "train"), "test", label=BEYOND)
    with pytest.raises(DataError, match=rf"'test': {of(BEYOND)}"):
        do(TINY, tmp_path / "third", **{**values, "data.path": str(tmp_path / "scored")})


@pytest.mark.parametrize(
    ("split", "twice"),
    [("test[:20]+test[10:]", 10), ("test+test", 36), ("test[:50%]+test", 18), ("test[:6]+train[:6]", 0)],
)
def test_splits__that_overlap_themselves_are_refused_for_scores_and_said_in_training(
    tmp_path: Path, split: str, twice: int
) -> None:
    write(write(tmp_path / "data", "train"), "test")
    place = Place(path=str(tmp_path / "data"))
    data = TrainImages(path=place.path, train_split=split, image_size=16)
    if not twice:
        source = open_scored(place, split, tmp_path)
        assert sampling_notes(data, source) == []
        return
    for classes in ((), CLASSES[:6]):
        with pytest.raises(DataError, match=rf"takes {twice} images? twice"):
            open_scored(place.model_copy(update={"classes": classes}), split, tmp_path)
    assert sampling_notes(data, open_train(data, None)) == [
        f"'{split}' takes {count_text(twice, 'image')} twice"
    ]


def test_same_names__are_scored_by_number_and_told_apart_in_every_table(tmp_path: Path) -> None:
    """ImageNet has two cranes and two maillots: folders, answers and confusions know names alone. No data set
    has a name twice.
    """
    names, stored = ("hen", "crane", "tench", "crane"), ("hen", "crane (1)", "tench", "crane (3)")
    colours = [np.random.default_rng(n).integers(0, 256, (1, 1, 3)) for n in range(24)]
    pictures = [np.tile(colour, (32, 32, 1)).astype(np.uint8) for colour in colours]
    items = [Item(f"{n}", n % 4, partial(encode_png, picture)) for n, picture in enumerate(pictures)]
    write_split(items, tmp_path / "data" / "test", stored, seed=0, source_text="noise")
    model = build(replace(VIT, num_classes=4), seed=0)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(11))
    meta = {**META, "class_names": list(names)}
    weights = save_weights(tmp_path / "own.safetensors", model.state_dict(), model.config, meta)
    values = {"weights.source": str(weights), "data.path": str(tmp_path / "data"), **CPU}
    result = do("evaluate", tmp_path / "run", **values, **{"evaluation.answers": str(tmp_path / "a.csv")})
    correct = result["metrics"]["correct"]
    rows = read_answers(tmp_path / "a.csv")
    answered = {row["answer"] for row in rows}
    assert {"crane (1)", "crane (3)"} <= answered <= set(stored)  # or the test shows nothing
    assert sum(map(is_right, rows)) == correct
    files = [tmp_path / "run" / f"{name}.csv" for name in ("per_class", "confusion")]
    tables = [list(csv.DictReader(file.read_text().splitlines())) for file in files]
    assert [row["class"] for row in tables[0]] == list(stored)
    assert sum(int(row["correct"]) for row in tables[0]) == correct
    assert {row["class"] for row in tables[1]} <= set(stored)
    for folder, is_known in (("crane", False), ("crane (1)", True), ("hen", True)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "1.png").write_bytes(encode_png(pictures[0]))
        said = list[str]()
        recipe = load_recipe("evaluate", [("weights.source", str(weights)), *CPU.items()]).recipe
        [[one]] = predict(recipe, [ImageFiles([str(tmp_path / folder / "1.png")])], note=said.append)
        assert (one.is_right is not None) == is_known
        assert {name for name, _ in one.classes} == set(stored)
        assert "several classes have one name: here they are 'crane (1)', 'crane (3)', and the" in " ".join(
            said
        )
    source = open_split("test", path=tmp_path / "data")
    told = [one for batch in predict(recipe, [source]) for one in batch]
    assert sum(bool(one.is_right) for one in told) == correct
