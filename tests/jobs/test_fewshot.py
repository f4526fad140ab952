"""Few-shot accuracies against a direct computation outside the job."""

import numpy as np
import pytest
import torch

from tests.jobs.conftest import Job
from vitctl.data.catalog import open_split
from vitctl.data.decode import decode
from vitctl.data.transforms import EvalTransform
from vitctl.errors import DataError
from vitctl.jobs.inputs import find_weights, loaded_model


def test_fewshot__equals_a_direct_computation(job: Job, pretrained, tiny_data) -> None:  # type: ignore[no-untyped-def]
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
            chosen = np.concatenate([rng.permutation(np.where(labels["train"] == c)[0])[:shots] for c in range(6)])
            x, z = features["train"][chosen], features["test"]
            mean, std = x.mean(0), x.std(0) + 1e-5
            x, z = (np.hstack([(t - mean) / std, np.full((len(t), 1), 100.0)]) for t in (x, z))
            y = 2 * np.eye(6)[labels["train"][chosen]] - 1
            w = np.linalg.solve(x.T @ x + 1024 * np.eye(x.shape[1]), x.T @ y)
            expected.append(float(((z @ w).argmax(1) == labels["test"]).mean()))
        assert result["metrics"]["by_seed"][str(shots)] == expected
        assert result["metrics"]["accuracy"][str(shots)] == pytest.approx(np.mean(expected), rel=1e-12)
    assert result["metrics"]["total"] == 23
    assert (result["provenance"]["image_size"], result["provenance"]["eval_resize"], result["provenance"]["l2"]) == (
        16,
        18,
        1024,
    )


def test_fewshot__batch_size_does_not_matter(job: Job) -> None:
    values = {"fewshot.shots": (2,), "fewshot.float64": True}
    one = job("fewshot", "a", **values, **{"evaluation.batch_size": 7})
    two = job("fewshot", "b", **values, **{"evaluation.batch_size": 256})
    assert one["metrics"] == two["metrics"]


def test_fewshot__random_weights_are_the_baseline(job: Job) -> None:
    result = job("fewshot", **{"fewshot.shots": (2,), "weights.initialise": "random"})
    assert result["provenance"]["initialise"] == "random"


def test_fewshot__more_shots_than_images(job: Job) -> None:
    with pytest.raises(
        DataError, match=r"class \d has \d+ training images, 25 shots were asked; set fewshot\.shots lower"
    ):
        job("fewshot", **{"fewshot.shots": (1, 25)})
