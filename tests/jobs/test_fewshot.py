"""Few-shot accuracies against a direct computation outside the job."""

import csv
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import records
from tests.trained import CPU, Job, do
from vitctl.data.datasets.catalog import open_split
from vitctl.data.datasets.known_sets import DATA_SETS
from vitctl.data.images.decode import decode
from vitctl.data.images.transforms import EvalTransform
from vitctl.engine.fewshot_ridge import L2_GRID, choose_l2
from vitctl.errors import DataError, RecipeError
from vitctl.jobs.inputs.data import SPLITS
from vitctl.jobs.inputs.weights import find_weights, loaded_model
from vitctl.launch.prepare_run import prepare_run
from vitctl.recipe.load import Override, load_recipe


def test_fewshot__equals_a_direct_computation(job: Job, pretrained, tiny_data) -> None:
    result = job("fewshot", **{"fewshot.shots": (1, 3), "fewshot.seeds": (0, 1), "fewshot.float64": True})
    model, _ = loaded_model(find_weights(str(pretrained)), 0, torch.float64)
    model.eval()
    transform = EvalTransform(16, method="square", resize=round(16 * 256 / 224), resample="bilinear")
    features, labels = {}, {}
    for split in ("train", "test"):
        source = open_split(split, path=str(tiny_data))
        images = torch.stack([transform(decode(source.read(i))) for i in range(len(source))])
        with torch.inference_mode():
            features[split] = model.features((images.double() / 255 - 0.5) / 0.5).float().double().numpy()
        labels[split] = source.labels()
    for shots in (1, 3):
        expected = []
        for seed in (0, 1):
            rng = np.random.default_rng(seed)
            chosen = np.concatenate(
                [rng.permutation(np.where(labels["train"] == c)[0])[:shots] for c in range(6)]
            )
            x, z = features["train"][chosen], features["test"]
            mean, std = x.mean(0), x.std(0) + 1e-5
            x, z = (np.hstack([(t - mean) / std, np.full((len(t), 1), 100.0)]) for t in (x, z))
            y = 2 * np.eye(6)[labels["train"][chosen]] - 1
            w = np.linalg.solve(x.T @ x + 1024 * np.eye(x.shape[1]), x.T @ y)
            expected.append(float(((z @ w).argmax(1) == labels["test"]).mean()))
        assert result["metrics"]["by_seed"][str(shots)] == expected
        assert result["metrics"]["accuracy"][str(shots)] == pytest.approx(np.mean(expected), rel=1e-12)
    assert result["metrics"]["total"] == 23
    assert (
        result["provenance"]["image_size"],
        result["provenance"]["eval_resize"],
        result["provenance"]["l2"],
    ) == (
        16,
        18,
        1024,
    )


@pytest.mark.slow
def test_fewshot__batch_size_does_not_matter(job: Job) -> None:
    values = {"fewshot.shots": (2,), "fewshot.float64": True}
    one = job("fewshot", "a", **values, **{"evaluation.batch_size": 7})
    two = job("fewshot", "b", **values, **{"evaluation.batch_size": 256})
    assert one["metrics"] == two["metrics"]


def test_fewshot__more_shots_than_images(job: Job) -> None:
    with pytest.raises(
        DataError,
        match=r"class '\w+' has \d+ training images, 25 are needed; use fewer --shots",
    ):
        job("fewshot", **{"fewshot.shots": (1, 25)})


def was_read(folder: Path) -> list[object]:
    return [record["read"] for record in records(folder, "features")]


@pytest.mark.slow
def test_fewshot__later_runs_read_the_features_unless_something_differs(job: Job, tmp_path: Path) -> None:
    values = {"fewshot.shots": (1, 2), "fewshot.float64": True}
    first = job("fewshot", "first", **values)
    assert was_read(tmp_path / "first") == [False]
    assert len(list((tmp_path / "features").iterdir())) == 2
    again = job("fewshot", "again", **values)
    assert was_read(tmp_path / "again") == [True]
    assert (again["metrics"], again["provenance"]) == (first["metrics"], first["provenance"])
    for number, other in enumerate(
        (
            {"data.eval_resize": 20},
            {"weights.initialise": "random"},
            {"machine.precision": "float32"},
            {"seed": 1},
        )
    ):
        job("fewshot", f"other_{number}", **values, **other)
        assert was_read(tmp_path / f"other_{number}") == [other == {"seed": 1}]


@pytest.mark.slow
def test_fewshot__a_torn_or_foreign_file_is_computed_anew(job: Job, tmp_path: Path) -> None:
    first = job("fewshot", "first", **{"fewshot.shots": (2,)})
    files = sorted((tmp_path / "features").iterdir())
    files[0].write_bytes(files[0].read_bytes()[:40])
    files[1].write_bytes(b"{}")
    again = job("fewshot", "again", **{"fewshot.shots": (2,)})
    assert was_read(tmp_path / "again") == [False]
    assert again["metrics"] == first["metrics"]
    job("fewshot", "third", **{"fewshot.shots": (2,)})
    assert was_read(tmp_path / "third") == [True]


def test_fewshot__the_cache_has_a_bound(job: Job, tmp_path: Path) -> None:
    job(
        "fewshot",
        **{"fewshot.shots": (2,), "fewshot.cache_gib": 0.0, "fewshot.cache": str(tmp_path / "kept")},
    )
    assert list((tmp_path / "kept").iterdir()) == []
    assert not (tmp_path / "features").exists()


@pytest.mark.slow
@pytest.mark.parametrize("rule", [pytest.param("all", marks=pytest.mark.slow), "leave_self_out"])
def test_fewshot__the_grid_over_several_sets(job: Job, tmp_path: Path, rule: str) -> None:
    names = ("digits", "shapes-count")
    assert set(names) <= set(DATA_SETS)
    result = job(
        "fewshot",
        **{"data.path": "", "data.datasets": names, "fewshot.shots": (1, 2), "fewshot.choose_l2": rule},
    )
    with (tmp_path / "run" / "fewshot.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(names) * 2 * 3 * 30
    for shots in (1, 2):
        table = np.array(
            [
                [
                    np.mean(
                        [
                            float(r["accuracy"])
                            for r in rows
                            if (r["data_set"], r["shots"], float(r["l2"])) == (name, str(shots), l2)
                        ]
                    )
                    for l2 in L2_GRID
                ]
                for name in names
            ]
        )
        at = choose_l2(table, leave_self_out=rule == "leave_self_out")
        for i, name in enumerate(names):
            row = result["metrics"]["data_sets"][name][str(shots)]
            assert row["l2"] == L2_GRID[at[i]]
            assert row["accuracy"] == pytest.approx(table[i, at[i]], rel=1e-12)
        mean = np.mean([result["metrics"]["data_sets"][name][str(shots)]["accuracy"] for name in names])
        assert result["metrics"]["accuracy"][str(shots)] == pytest.approx(mean, rel=1e-12)
    assert sorted(result["provenance"]["tasks"]) == sorted(names)


def test_fewshot__leave_self_out_needs_others(job: Job) -> None:
    with pytest.raises(RecipeError, match=r"needs two data sets or more in data\.datasets"):
        job("fewshot", **{"fewshot.choose_l2": "leave_self_out"})


def test_splits__are_of_sets_that_are_known() -> None:
    assert len(SPLITS) == 3
    assert set(SPLITS) <= set(DATA_SETS)
    assert all(
        split.split("[")[0] in DATA_SETS[name].sizes for name, pair in SPLITS.items() for split in pair
    )


@pytest.mark.slow
def test_fewshot__two_processes_give_the_same_features(
    job: Job, pretrained: Path, tiny_data: Path, tmp_path: Path
) -> None:
    one = job("fewshot", "one", **{"fewshot.shots": (2,)})
    values = {**CPU, "data.path": str(tiny_data), "weights.source": str(pretrained), "fewshot.shots": (2,)}
    folder = tmp_path / "other" / "two"
    two = {**values, "machine.processes": 2}
    loaded = load_recipe("fewshot", [Override(key, value) for key, value in two.items()])
    prepare_run(loaded, folder)
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    line = (folder / "launch.txt").read_text()
    subprocess.run(line, shell=True, check=True, env=environment, capture_output=True)
    assert json.loads((folder / "result.json").read_text())["metrics"] == one["metrics"]
    from safetensors.torch import load_file

    names = sorted(path.name for path in (tmp_path / "features").iterdir())
    assert len(names) == 2
    for name in names:
        a, b = (load_file(root / "features" / name)["features"] for root in (tmp_path, tmp_path / "other"))
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert do("fewshot", tmp_path / "other" / "again", **values)["metrics"] == one["metrics"]
    assert was_read(tmp_path / "other" / "again") == [True]
