"""Leaks between training and test images: near-duplicates are named before a fine-tune, groups stay on one
side of the split.
"""

import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.trained import CPU, SMALL, do
from vitctl.data.datasets.catalog import open_split
from vitctl.data.writer.intake import Item
from vitctl.data.writer.shard_writer import write_split
from vitctl.errors import DataError, RecipeError
from vitctl.jobs import finetune as job
from vitctl.jobs.inputs.data import group_notes
from vitctl.recipe.images import Place
from vitctl.recipe.load import load_recipe

NAMES = ("cat", "dog")
SIDES = {"data.train_split": "train[:80% of each class]", "data.eval_split": "train[80%: of each class]"}
Tune = Callable[..., dict[str, Any]]


def picture(seed: int, **options: int) -> bytes:
    noise = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    file = io.BytesIO()
    size = (80, 60) if not options else (120, 90)
    Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC).save(
        file, "JPEG", **(options or {"quality": 95})
    )
    return file.getvalue()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """40 pictures of two classes; some of the training side once more among those that are held out."""
    items = {f"{NAMES[n % 2]}/{n:02d}.jpg": picture(n) for n in range(40)}
    plain = write(tmp_path / "plain", items)
    train, scored = (open_split(split, path=plain) for split in SIDES.values())
    held_out = [scored.key(n) for n in range(len(scored))]
    trained = [train.key(n) for n in range(len(train))]
    cats, dogs = ([key for key in trained if key.startswith(name)] for name in NAMES)
    for key, other in zip(held_out[:3], (cats[0], dogs[0], dogs[1]), strict=True):
        items[key] = items[other]  # the same bytes
    items[held_out[3]] = picture(int(cats[2][4:6]), quality=60)  # another size and quality
    items[cats[3]] = items[dogs[4]]  # on the training side, with another label
    return write(tmp_path / "photos", items)


def write(folder: Path, items: dict[str, bytes]) -> Path:
    rows = [Item(key, NAMES.index(key[:3]), lambda key=key: items[key]) for key in items]
    write_split(rows, folder / "train", NAMES, seed=0, source_text="noise")
    return folder


@pytest.fixture
def tune(pretrained: Path, photos: Path, tmp_path: Path) -> Tune:
    def run(name: str, **values: Any) -> dict[str, Any]:
        given = {**CPU, **SMALL, **SIDES, "data.path": str(photos), "weights.source": str(pretrained)}
        return do("finetune", tmp_path / name, **given, **{"sweep.lrs": (), "optimizer.lr": 0.01, **values})

    return run


def texts(folder: Path) -> list[str]:
    records = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [record.get("text", "") for record in records if record["kind"] in ("data", "warning")]


@pytest.mark.slow
def test_finetune__names_duplicates_across_the_split_and_their_labels(
    tune: Tune, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tune("run")
    (line,) = [text for text in texts(tmp_path / "run") if "identical" in text]
    with (tmp_path / "run" / "duplicates.csv").open() as file:
        rows = list(csv.DictReader(file))
    source = open_split("train", path=photos)
    data = {source.key(n): source.read(n) for n in range(len(source))}
    held_out = open_split(SIDES["data.eval_split"], path=photos)
    scored = {held_out.key(n) for n in range(len(held_out))}
    pairs = {(row["key"], row["other_key"]) for row in rows if row["kind"] == "exact"}
    assert {frozenset(pair) for pair in pairs} == {
        frozenset((one, other)) for one in data for other in data if one < other and data[one] == data[other]
    }
    across = [row for row in rows if (row["key"] in scored) != (row["other_key"] in scored)]
    assert sorted(row["kind"] for row in across) == ["exact", "exact", "exact", "near"]
    wrong = [row for row in rows if row["key"][:3] != row["other_key"][:3]]
    assert wrong and all(
        (row["label"], row["other_label"]) == (row["key"][:3], row["other_key"][:3]) for row in rows
    )
    assert any(
        f"{row['key']} ({row['label']}) and {row['other_key']} ({row['other_label']})" in line
        for row in wrong
    )
    assert "3 identical and 1 near-duplicate image" in line
    for name, limits, said in (
        ("many", {"_MOST_COMPARED": 39}, "no look for near-duplicates among 40 images"),
        ("slow", {"_COMPARING_SECONDS": -1.0}, "not all images were compared"),
    ):
        for limit, value in limits.items():
            monkeypatch.setattr(job, limit, value)
        other = tune(name)
        assert any(said in text for text in texts(tmp_path / name))
        assert other["metrics"] == found["metrics"]
        assert other["provenance"]["weights_sha256"] == found["provenance"]["weights_sha256"]
        monkeypatch.undo()


@pytest.mark.slow
def test_finetune__a_look_that_fails_stops_nothing(
    tune: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise DataError("a worker process was killed")

    monkeypatch.setattr(job, "compare_within", fail)
    assert tune("run")["status"] == "done"
    assert any("a worker process was killed" in text for text in texts(tmp_path / "run"))


def test_group_by__is_recorded_and_wanted_of_evaluate(tune: Tune, photos: Path, tmp_path: Path) -> None:
    pattern = "/[0-9]"  # the first digit: groups of ten, of both classes
    found = tune("run", **{"data.group_by": pattern})
    assert found["provenance"]["group_by"] == pattern
    assert any("groups of " in text for text in texts(tmp_path / "run"))
    sides = [open_split(split, path=photos, group_by=pattern) for split in SIDES.values()]
    tens = [{side.key(n)[4] for n in range(len(side))} for side in sides]
    assert not tens[0] & tens[1] and len(sides[0]) + len(sides[1]) == 40
    assert found["provenance"]["train_sha256"] == sides[0].digest
    scored = {
        **CPU,
        "data.path": str(photos),
        "data.eval_split": SIDES["data.eval_split"],
        "weights.source": str(tmp_path / "run"),
    }
    with pytest.raises(DataError, match=r"data\.group_by = ''.*give that value"):
        do("evaluate", tmp_path / "other", **scored)
    again = do("evaluate", tmp_path / "same", **scored, **{"data.group_by": pattern})
    assert again["metrics"]["correct"] == found["metrics"]["correct"]


def test_group_notes__count_groups_on_each_side_and_on_both(photos: Path) -> None:
    sides = {split: open_split(split, path=photos) for split in SIDES.values()}
    place = Place(path=str(photos), group_by="/[0-9]")
    tens = [{one.key(n)[4] for n in range(len(one))} for one in sides.values()]
    (note,) = group_notes(place, sides)
    assert f"; {len(tens[0] & tens[1])} groups on both sides" in note
    assert group_notes(place.model_copy(update={"group_by": ""}), sides) == []
    apart = {split: open_split(split, path=photos, group_by="/[0-9]") for split in SIDES.values()}
    assert "both" not in group_notes(place, apart)[0]


@pytest.mark.slow
def test_group_by__is_the_same_in_every_process(photos: Path) -> None:
    """Python hashes text differently in each process; all ranks must have the same images."""
    program = (
        "import sys; from vitctl import open_split; "
        "print(open_split('train[80%: of each class]', path=sys.argv[1], group_by='/[0-9]').digest)"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program, str(photos)],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert digests == {open_split(SIDES["data.eval_split"], path=photos, group_by="/[0-9]").digest + "\n"}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"data.dataset": "digits", "data.group_by": "a"}, "known data sets have splits of their own"),
        ({"data.datasets": ("pets",), "data.group_by": "a"}, "known data sets have splits of their own"),
        ({"data.path": "x", "data.group_by": "(a"}, "not a regular expression"),
        ({"data.path": "x", "data.group_by": "a" * 1001}, "1,001 characters"),
    ],
)
def test_group_by__what_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        load_recipe("fewshot" if "data.datasets" in values else "finetune", [*values.items()])
