"""`probe` as a job: its accuracies are those of a direct computation, and come again from the cache."""

import numpy as np
import torch
from safetensors.torch import load_file

from tests.trained import Job
from vitctl.data.datasets.catalog import open_split


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


def test_probe__logistic_records_its_choice(job: Job) -> None:
    row = job("probe", **{"probe.method": "logistic"})["metrics"]["data_sets"]
    (found,) = row.values()
    assert 0 < found["logistic"]["c"] <= 1e5 and found["logistic"]["num_held_out"] >= 6
