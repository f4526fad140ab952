"""All 19 tasks from one command, over the true numbers of names; as published."""

import csv
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.jobs.vtab_names import PART, Catalog
from tests.trained import CPU, do
from vitctl.data.datasets import vtab_images
from vitctl.data.datasets.vtab import VTAB
from vitctl.data.datasets.vtab_images import num_test
from vitctl.data.source.splits import md5_order
from vitctl.recipe.paper import VTAB_MODELS

FEW = {
    **CPU,
    "machine.precision": "float32",
    "data.image_size": 8,
    "schedule.batch_size": 4,
    "schedule.total_steps": 4,
    "schedule.warmup_steps": 2,
    "vtab.sweep_lrs": (0.003, 0.01),
    "vtab.sweep_steps": (2,),
    "vtab.seeds": (0,),
    "evaluation.batch_size": 512,
}
NEVER_CUT = {
    "eurosat",
    "resisc45",
    "smallnorb-azim",
    "smallnorb-elev",
}  # test splits in the midst of a folder
PROVEN = {
    "cifar100",
    "patch_camelyon",
    "eurosat",
    "clevr-count",
    "clevr-dist",
    "dsprites-loc",
    "dsprites-ori",
}
INVENTED = {"dtd", "pets", "retinopathy", "kitti-dist"}  # names of files that only the originals have


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True], ids=["parts", "whole"])
def test_vtab__all_nineteen_tasks(
    whole: bool, speck: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweep, the final runs and the table.

    `parts` cuts test splits that end their folder; `whole` scores 388,000 images.
    """
    monkeypatch.setattr(vtab_images, "open_split", Catalog(whole_tests=whole).open_split)
    folder = tmp_path / "table"
    given = {**FEW, "weights.source": str(speck), "data.root": str(tmp_path), "data.allow_partial": not whole}
    result = do("vtab", folder, **given)
    metrics, used = result["metrics"], result["provenance"]

    assert list(metrics["tasks"]) == [task.name for task in VTAB]
    assert (metrics["partial"], metrics["num_tasks"]) == (False, 19)
    for task in VTAB:
        row, images = metrics["tasks"][task.name], used["tasks"][task.name]
        expected = num_test(task) if whole or task.name in NEVER_CUT else PART
        assert row["total"] == expected, task.name
        assert (f"partial: {PART} of" in row["copy"]) == (expected < num_test(task)), task.name
        proven = True if task.name in PROVEN else False if task.name in INVENTED else None
        assert images["train800_proven"] is proven, task.name
        assert ("other training images than the benchmark's" in row["copy"]) == (proven is False)
        assert (images["crop"], images["flip"]) == (task.crop, task.flip)
    assert metrics["tasks"]["eurosat"]["copy"] == ""
    assert metrics["copies"] == [name for name, row in metrics["tasks"].items() if row["copy"]]
    assert metrics["label"] == f"mean of 19 tasks ({5 if whole else 15} not as published)"
    assert "a split of our own" in metrics["tasks"]["caltech101"]["copy"]

    _check_means(metrics)
    _check_sweep(folder, metrics, used)
    _check_provenance(folder, used, speck)
    _check_csv(folder, metrics)


def _check_means(metrics: dict[str, Any]) -> None:
    means = {name: row["mean"] for name, row in metrics["tasks"].items()}
    assert metrics["mean"] == pytest.approx(sum(means.values()) / 19, rel=1e-14)
    for group, size in {"natural": 7, "specialized": 4, "structured": 8}.items():
        own = [means[task.name] for task in VTAB if task.group == group]
        assert len(own) == size
        assert metrics["groups"][group] == pytest.approx(sum(own) / size, rel=1e-14)
    assert metrics["mean_of_groups"] == pytest.approx(sum(metrics["groups"].values()) / 3, rel=1e-14)
    assert tuple(metrics["paper"]) == tuple(VTAB_MODELS)
    printed = [round(100 * column["mean"], 1) for column in metrics["paper"].values()]
    assert printed == [77.6, 76.3, 72.7]  # the last row of Table 9


def _check_sweep(folder: Path, metrics: dict[str, Any], used: dict[str, Any]) -> None:
    """Both settings saw every task's 200 images, and the better mean was taken for all."""
    assert [(row["lr"], row["total_steps"]) for row in metrics["sweep"]] == [(0.003, 2), (0.01, 2)]
    for row in metrics["sweep"]:
        totals = []
        for task in VTAB:
            own = json.loads((folder / f"sweep/{task.name}/lr_{row['lr']:g}_steps_2/result.json").read_text())
            totals.append(own["metrics"]["total"])
            assert own["metrics"]["accuracy"] == row["tasks"][task.name]
            assert own["provenance"]["split"] == task.val200
            assert own["provenance"]["warmup_steps"] == 1  # half of 4 was, so half of 2 is
        assert totals == [200] * 19
        assert row["val200"] == pytest.approx(np.mean(list(row["tasks"].values())), rel=1e-14)
    best = max(metrics["sweep"], key=lambda row: row["val200"])
    assert best["chosen"] is True
    assert used["lr"] == best["lr"]


def _check_provenance(folder: Path, used: dict[str, Any], speck: Path) -> None:
    from vitctl.models.weights.weights_file import read_weights, weights_digest

    from_sha256 = weights_digest(
        read_weights(speck / "checkpoints" / "step_00000001" / "ema.safetensors").state
    )
    weights, images = set(), set()
    for task in VTAB:
        own = folder / "tasks" / task.name / f"lr_{used['lr']:g}_steps_2" / "seed_0"
        p = json.loads((own / "result.json").read_text())["provenance"]
        assert (p["train_split"], p["split"]) == (task.train, task.test)
        assert p["data_sha256"] == used["tasks"][task.name]["data_sha256"]
        assert (p["from_sha256"], p["image_size"], p["num_classes"]) == (from_sha256, 8, task.num_classes)
        assert (p["flip"], p["crop"]) == (task.flip, "random out of 9" if task.crop else "none")
        assert not (own / "checkpoints").exists()
        weights.add(p["weights_sha256"])
        images.add(p["train_sha256"])
    assert len(images) == 19
    assert len(weights) == 18  # the two of dSprites have the same pictures, labels and number of classes here


def _check_csv(folder: Path, metrics: dict[str, Any]) -> None:
    with (folder / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["row"] for row in rows[:19]] == [task.name for task in VTAB]
    assert [row["row"] for row in rows[19:]] == [
        "group natural",
        "group specialized",
        "group structured",
        metrics["label"],
    ]
    assert float(rows[-1]["accuracy"]) == metrics["mean"]
    assert float(rows[-1]["paper L/16 I21k"]) == pytest.approx(0.7271, abs=1e-4)
    assert float(rows[2]["accuracy"]) == metrics["tasks"]["dtd"]["mean"]


def test_names__choose_what_the_published_lists_name() -> None:
    """The stand-in's splits are those of the original files where their names are known."""
    catalog = Catalog(whole_tests=True)
    given: dict[str, Any] = {"whole": True}
    validation = catalog.open_split("train[63000:63200]", dataset="clevr-dist", **given)
    assert [validation.key(n) for n in range(3)] == [
        f"CLEVR_train_{n}.png" for n in ("035084", "029360", "004525")
    ]
    test = catalog.open_split("test[50%:]", dataset="smallnorb-azim", **given)
    order = sorted(range(24_300), key=lambda n: hashlib.md5(f"test{n}".encode()).digest())
    assert [int(test.key(n)) for n in range(len(test))] == order[12_150:]
    assert md5_order(range(24_300), "train")[:3].tolist() == [16399, 1680, 17307]
