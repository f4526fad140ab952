"""A temperature is fitted to images that were held out, and every later probability is divided by it."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.trained import Job
from vitctl import load_classifier, open_split
from vitctl.errors import CheckpointError, DataError, RecipeError

HELD_OUT = {"data.eval_split": "train[50%:]", "evaluation.fit_temperature": True}


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
    fitted = job("evaluate", "fitted", **source, **HELD_OUT)
    file = Path(fitted["files"]["temperature"])
    temperature = json.loads(file.read_text())["temperature"]
    assert fitted["provenance"]["temperature"] == temperature != 1
    after_fit = json.loads(file.read_text())["nll_after"]
    assert fitted["metrics"]["nll"] == pytest.approx(after_fit, rel=1e-12)

    scored = job("evaluate", "scored", **source)
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

    file.write_text(file.read_text().replace('"weights_sha256": "', '"weights_sha256": "0'))  # of others
    assert load_classifier(str(run), precision="float64", device="cpu", top=6)(images) == before(images)
    file.write_text("{}")
    with pytest.raises(CheckpointError, match="is not a temperature"):
        load_classifier(str(run), device="cpu")


def test_temperature__is_for_a_softmax_and_for_images_that_the_user_names(job: Job) -> None:
    with pytest.raises(DataError, match="is for a softmax"):
        job("evaluate", **HELD_OUT)
    with pytest.raises(RecipeError, match="images that choose a temperature"):
        job("evaluate", "test", **{"evaluation.fit_temperature": True})
