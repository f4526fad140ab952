"""`probe` as a job: its accuracies are those of a direct computation, and come again from the cache."""

import json
import math
import os
import signal
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.matrix import slow
from tests.trained import CPU, Job
from vitctl.data.datasets.catalog import open_split
from vitctl.engine import probes
from vitctl.engine.probes import C_GRID
from vitctl.errors import CheckpointError, DataError
from vitctl.jobs import probe
from vitctl.jobs.plan import ScoringPlan, plan_scoring
from vitctl.jobs.predict import predict
from vitctl.launch.prepare_run import prepare_run
from vitctl.launch.worker import work
from vitctl.recipe.known import standing
from vitctl.recipe.load import Override, load_recipe


def test_probe__equals_a_direct_computation_and_is_cached(job: Job, tiny_data, tmp_path) -> None:
    values = {"probe.k": (1, 5), "probe.cache": str(tmp_path / "cache")}
    first = job("probe", "a", **values)
    again = job("probe", "b", **values, **{"evaluation.batch_size": 7})
    assert first["metrics"] == again["metrics"]
    labels = {split: open_split(split, path=str(tiny_data)).labels() for split in ("train", "test")}
    stored = [load_file(file)["features"] for file in (tmp_path / "cache").iterdir()]
    unit = {
        split: torch.nn.functional.normalize(next(f for f in stored if len(f) == len(labels[split])).double())
        for split in labels
    }
    similar = (unit["test"] @ unit["train"].T).numpy()
    order = np.argsort(-similar, axis=1, kind="stable")
    for k in (1, 5):
        votes = np.zeros((len(order), 6))
        for row, near in enumerate(order[:, :k]):
            np.add.at(votes[row], labels["train"][near], np.exp(similar[row, near] / 0.07))
        expected = float((votes.argmax(1) == labels["test"]).mean())
        assert first["metrics"]["accuracy"][f"k={k}"] == expected


@pytest.mark.parametrize("method", [3, *slow("logistic", "linear", 0, 1, 2)])
def test_probe__keeps_a_classifier_that_scores_as_it_said(
    job: Job, tmp_path, method: str | int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitctl.jobs.probe.C_GRID", C_GRID[16:33:8])
    if isinstance(method, int):  # one of DINOv2's inputs alone
        every, only, method = probe.heads_of, method, "linear"
        monkeypatch.setattr(probe, "heads_of", lambda *asked: every(*asked)[only : only + 1])
    said = job("probe", "probe", **{"probe.method": method, "probe.steps": 40, "data.image_size": 32})
    (row,) = said["metrics"]["data_sets"].values()
    found = row[method]
    assert 0 < found[{"logistic": "c", "linear": "lr"}[method]] <= 1e5 and found["num_held_out"] >= 6
    share, total = found["accuracy"], found["total"]  # its ends solve (p - share)^2 = z^2 p (1 - p) / n
    for end in found["accuracy_interval"]:
        assert (end - share) ** 2 == pytest.approx(1.959963984540054**2 * end * (1 - end) / total)
    again = job("evaluate", "again", **{"weights.source": str(tmp_path / "probe")})
    names = ("accuracy", "correct", "total", "mean_per_class")
    assert [again["metrics"][name] for name in names] == [found[name] for name in names]
    alike = ("image_size", "eval_method", "eval_resize", "resample", "exif_orientation", "data_sha256")
    assert [again["provenance"][name] for name in alike] == [said["provenance"][name] for name in alike]
    assert again["provenance"]["eval_resize"] > again["provenance"]["image_size"] == 32


def test_probe__one_image_of_a_class(job: Job) -> None:
    values = {"data.train_split": "train[:1% of each class]"}
    with pytest.raises(DataError, match=r"has 1 training image, 2 are needed; use --method knn, or add"):
        job("probe", **values, **{"probe.method": "linear"})


@pytest.mark.slow
def test_probe__logistic_shows_its_progress_at_most_once_a_second(
    pretrained, tiny_data, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitctl.engine.journal.SHOW_SECONDS", math.inf)
    monkeypatch.setattr("vitctl.jobs.probe.C_GRID", C_GRID[16:33:8])
    values = {"weights.source": str(pretrained), "data.path": str(tiny_data), "probe.method": "logistic"}
    overrides = [Override(*each) for each in (CPU | values).items()]
    prepare_run(load_recipe("probe", overrides), tmp_path / "probe")
    shown: list[dict[str, Any]] = []
    work(tmp_path / "probe", shown.append)
    texts = [record["text"] for record in shown if "C = " in record.get("text", "")]
    assert len(texts) == 2 and "1 of " in texts[0] and "on all images" in texts[1]


@pytest.mark.slow
def test_probe__linear_layers_as_in_dinov2(job: Job) -> None:
    values = {"probe.method": "linear", "probe.steps": 30, "probe.lrs": (0.01, 0.1)}
    (row,) = job("probe", "all", **values)["metrics"]["data_sets"].values()
    table = row["linear"]["held_out_by_head"]  # the network has two blocks, not four
    assert list(table) == [
        "1 block",
        "1 block and patches",
        "2 blocks",
        "2 blocks and patches",
    ]  # of 2 blocks
    assert all(len(shares) == 2 for shares in table.values())
    best = max(max(shares) for shares in table.values())
    first = next((head, lr) for head in table for lr in range(2) if table[head][lr] == best)
    assert (row["linear"]["head"], row["linear"]["lr"]) == (first[0], values["probe.lrs"][first[1]])
    (alone,) = job("probe", "one", **values, **{"probe.blocks": (1,)})["metrics"]["data_sets"].values()
    assert alone["linear"]["held_out_by_head"] == {name: table[name] for name in list(table)[:2]}
    (given,) = job("probe", "none", **values, **{"probe.blocks": ()})["metrics"]["data_sets"].values()
    assert list(given["linear"]["held_out_by_head"]) == ["classifier input"]


@pytest.mark.parametrize("dtype", [torch.float32, *slow(torch.float64)])
def test_probe__the_chosen_layer_is_trained_on_all_images(job: Job, tiny_data, tmp_path, dtype) -> None:
    values = {"probe.method": "linear", "probe.steps": 30, "probe.lrs": (0.01, 0.1), "probe.blocks": ()}
    values |= {"probe.float64": dtype == torch.float64, "probe.cache": str(tmp_path / "cache"), "seed": 3}
    (row,) = job("probe", **values)["metrics"]["data_sets"].values()
    labels = torch.from_numpy(open_split("train", path=str(tiny_data)).labels())
    stored = [load_file(file)["features"] for file in (tmp_path / "cache").iterdir()]
    batches = [probes.drawn(3, len(labels), 128, step) for step in range(30)]
    assert len(torch.cat(batches).unique()) == len(labels)
    same = {"num_classes": 6, "steps": 30, "seed": 3, "momentum": 0.9, "device": torch.device("cpu")}
    train = next(f for f in stored if len(f) == len(labels))
    rates = [row["linear"]["lr"] * 128 / 256]
    ((layer,),) = probes.linear(train, labels, rates, batches=batches, dtype=dtype, **same)
    kept = load_file(tmp_path / "run" / "model.safetensors")
    assert torch.equal(torch.cat([kept["head.weight"].T, kept["head.bias"][None]]), layer.double())


SHOWN = {"data.eval_method": "torchvision", "data.eval_resize": 21, "data.eval_resample": "bicubic_antialias"}


@pytest.mark.parametrize("name", ["fewshot", *slow("probe")])
@pytest.mark.parametrize(("precision", "off"), [("float32", 1e-5), *slow(("bf16", 0.05))])
@pytest.mark.parametrize(
    "shown", [SHOWN, {"data.eval_method": "letterbox", "weights.preprocess": "imagenet"}]
)
def test_frozen_features__are_those_of_predict(
    job: Job, pretrained, tiny_data, tmp_path, name: str, precision: str, off: float, shown: dict[str, Any]
) -> None:
    """By the same keys and in the same precision, which float32 is not rounded from."""
    values = {f"{name}.cache": str(tmp_path / "cache"), "machine.precision": precision, **shown}
    said = job(name, **values, **({"probe.k": (1,)} if name == "probe" else {"fewshot.shots": (1,)}))
    assert said["provenance"]["eval_method"] == shown["data.eval_method"]
    test = open_split("test", path=str(tiny_data))
    stored = [load_file(file)["features"] for file in (tmp_path / "cache").iterdir()]
    found = next(f for f in stored if len(f) == len(test))
    for computed, most in ((precision, 1e-6), ("float64", off)):
        given = CPU | {"weights.source": str(pretrained), **shown, "machine.precision": computed}
        file = tmp_path / f"{computed}.safetensors"
        recipe = load_recipe("evaluate", [*({"evaluation.batch_size": 256} | given).items()]).recipe
        assert len([*predict(recipe, [test], features=file)]) == 1
        told = load_file(file)["features"]
        assert told.dtype == found.dtype == torch.float32
        assert (told - found).abs().max() <= most * told.std()


@pytest.mark.parametrize(("value", "place"), [(0.999, "below"), *slow((0.001, "above"))])
def test_probe__best_head_is_compared_with_known(job: Job, tmp_path, value: float, place: str) -> None:
    known = {"source": "a test", "length": 1.0, "num_classes": 6, "points": [{"at": 1.0, "value": value}]}
    more = {f"known.{key}": one for key, one in known.items()}
    said = job("probe", "probe", **{"probe.k": (1, 40)}, **more)["metrics"]["accuracy"]
    lines = [json.loads(line) for line in (tmp_path / "probe" / "log.jsonl").read_text().splitlines()]
    places = {r["head"]: r["known"]["accuracy"]["place"] for r in lines if "known" in r}
    assert places == {head: place for head in said if said[head] == max(said.values())}
    assert standing(lines) == f"accuracy {place}"
    other = job("probe", "other", **{"probe.k": (1,)} | more | {"known.num_classes": 7})
    text = (tmp_path / "other" / "log.jsonl").read_text()
    assert other["status"] == "done" and '"known"' not in text


def test_probe__neighbours_keep_nothing(job: Job, tmp_path) -> None:
    job("probe", "probe", **{"probe.k": (1,)})
    with pytest.raises(CheckpointError, match="has no checkpoints; give a trained run"):
        job("evaluate", **{"weights.source": str(tmp_path / "probe")})


@pytest.mark.parametrize(("method", "function"), [*slow(("logistic", "logistic")), ("linear", "drawn")])
def test_probe__stopped_inside_a_method_goes_on_to_the_same_result(
    job: Job, tmp_path, method: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitctl.jobs.probe.C_GRID", C_GRID[16:33:8])
    values = {"probe.method": method, "probe.steps": 40, "probe.cache": str(tmp_path / "cache")}
    whole, original, calls = job("probe", "whole", **values), getattr(probes, function), []

    def and_signal(*args: Any, **more: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **more)

    with monkeypatch.context() as patched:
        patched.setattr(f"vitctl.jobs.probe.{function}", and_signal)
        assert job("probe", "stopped", **values)["status"] == "stopped"
    assert len(calls) == 2 and not (tmp_path / "stopped" / "model.safetensors").exists()
    assert job("probe", "stopped", **values)["metrics"] == whole["metrics"]
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "stopped")]
    assert all(tensor.equal(weights[1][name]) for name, tensor in weights[0].items())


def test_plan__refuses_more_neighbours_than_training_images(pretrained, tiny_data) -> None:
    def planned(k: int) -> ScoringPlan:
        values = {"weights.source": str(pretrained), "data.path": str(tiny_data), "probe.k": (k,)}
        return plan_scoring(load_recipe("probe", [Override(*each) for each in values.items()]).recipe)

    assert planned(70).feature_bytes and planned(70).num_classes == 6
    with pytest.raises(
        DataError, match=r"70 training images, but 71 neighbours; use fewer: --set probe.k=1,5$"
    ):
        planned(71)
