"""What every result tells of how its number came about."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.trained import Job
from vitctl.data.source.splits import open_shards
from vitctl.engine.metrics import baselines, mean_per_class
from vitctl.engine.state import Counts
from vitctl.errors import VitctlError

COMPUTED = {"precision", "device", "device_name", "hardware", "processes", "threads", "versions"}
SHOWN = {"image_size", "eval_method", "eval_resize", "resample"}
WEIGHTS = {"chosen", "step", "averaged", "sha256"}
FEW = {"fewshot.shots": (1,), "fewshot.seeds": (0,)}


@pytest.mark.parametrize(
    ("name", "prefix", "values"),
    [("evaluate", "weights", {}), ("finetune", "weights", {}), ("fewshot", "from", FEW)],
)
def test_results__tell_how_they_were_computed(
    job: Job, name: str, prefix: str, values: dict[str, Any]
) -> None:
    p = job(name, **values)["provenance"]
    assert {
        *COMPUTED,
        *SHOWN,
        *(f"{prefix}_{key}" for key in WEIGHTS),
        "data_source",
        "recipe_sha256",
    } <= p.keys()
    assert (p["precision"], p["device"]) == ("float64", "cpu")
    assert (
        p["versions"]["torch"] == torch.__version__.split("+")[0]
        or p["versions"]["torch"] == torch.__version__
    )


def test_recipe_digest__knows_the_precision_that_auto_stands_for(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One recipe, two machines: of the one "auto" makes float32, of the other bf16."""
    found = {}
    for precision in ("float32", "bf16"):
        monkeypatch.setattr("vitctl.engine.runtime.best_precision", lambda _cpu, chosen=precision: chosen)
        found[precision] = job("evaluate", precision, **{"machine.precision": "auto"})["provenance"]
    assert {name: p["precision"] for name, p in found.items()} == {"float32": "float32", "bf16": "bf16"}
    assert found["float32"]["recipe_sha256"] != found["bf16"]["recipe_sha256"]
    named = job("evaluate", "named", **{"machine.precision": "float32"})["provenance"]
    assert named["recipe_sha256"] == found["float32"]["recipe_sha256"]


@pytest.mark.slow
def test_accuracy__is_told_with_its_baselines(job: Job, tiny_data: Path) -> None:
    labels = open_shards(tiny_data / "test").labels()
    wanted = {"majority_class": max(np.bincount(labels)) / 23, "chance": 1 / 6}
    evaluated, tuned, few = job("evaluate", "e"), job("finetune", "f"), job("fewshot", "s", **FEW)
    for metrics in (evaluated["metrics"], tuned["metrics"], *few["metrics"]["baselines"].values()):
        assert {key: metrics[key] for key in wanted} == wanted
    rows = [line.split(",") for line in Path(evaluated["files"]["per_class"]).read_text().splitlines()[1:]]
    shares = [int(row[2]) / int(row[1]) for row in rows if int(row[1])]
    assert evaluated["metrics"]["mean_per_class"] == pytest.approx(sum(shares) / len(shares), rel=1e-12)
    assert 0 <= tuned["metrics"]["mean_per_class"] <= 1
    [table] = few["metrics"]["data_sets"].values()
    assert 0 <= table["1"]["mean_per_class"] <= 1


def test_baselines__by_hand() -> None:
    assert baselines(np.array([0, 0, 0, 1, 2, -1]), 4) == {"majority_class": 3 / 5, "chance": 1 / 4}
    several = np.array([[0, 1], [1, -1], [1, 1], [-1, -1]])  # 2, 1 and 1 right answers; 1 is right for all
    assert baselines(several, 4) == {"majority_class": 1.0, "chance": 4 / 3 / 4}
    assert mean_per_class(np.array([[8, 4, 9], [2, 2, 9], [0, 0, 0]])) == (0.5 + 1.0) / 2


def test_skipped__more_than_half_of_the_updates_is_no_result(tmp_path: Path) -> None:
    Counts(num_skipped=5).check_share(10, tmp_path)
    with pytest.raises(
        VitctlError, match="6 of 10 updates were not finite and were skipped: this is not the training"
    ):
        Counts(num_skipped=6).check_share(10, tmp_path)
