"""`torch.export` programs run without vitctl, in another process."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.export.conftest import NUM_IMAGES, Saved, network, pixels
from vitctl.errors import CheckpointError
from vitctl.export import graph_files
from vitctl.export.resizing import stored_transform
from vitctl.jobs.inputs.weights import find_weights

Exported = Callable[..., dict[str, Any]]
ELSEWHERE = """
import json, sys, numpy, torch
extra = {"vitctl.json": ""}
run = torch.export.load(sys.argv[1], extra_files=extra).module()
names = json.loads(extra["vitctl.json"])["class_names"]
logits, features = run(torch.from_numpy(numpy.load(sys.argv[2])))
assert "vitctl" not in sys.modules
print(json.dumps([names, logits.tolist(), list(features.shape)]))
"""


@pytest.mark.parametrize("family", ["vit", pytest.param("resnet v1", marks=pytest.mark.slow)])
def test_program__runs_elsewhere(saved: Saved, exported: Exported, tmp_path: Path, family: str) -> None:
    result = exported(saved(family), "pt2", **{"export.features": True})
    assert result["metrics"]["max_difference"]["pt2"] <= 1e-4
    images = np.random.default_rng(0).integers(0, 256, (5, 3, 32, 32), dtype=np.uint8)
    np.save(tmp_path / "images.npy", images)
    file = tmp_path / "run" / "model.pt2"
    command = [sys.executable, "-W", "ignore", "-c", ELSEWHERE, str(file), str(tmp_path / "images.npy")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    names, logits, shape = json.loads(done.stdout)
    model = network(family)
    mean, std = torch.tensor([0.5, 0.4, 0.6]).view(3, 1, 1), torch.tensor([0.5, 0.3, 0.4]).view(3, 1, 1)
    with torch.inference_mode():
        normalised = (torch.from_numpy(images).float() / 255 - mean) / std
        wanted = model(normalised).numpy()
        assert shape == list(model.features(normalised).shape)
    np.testing.assert_allclose(logits, wanted, atol=1e-4 * wanted.std())
    assert names == list("abcde")


def test_program__with_pre_processing(saved: Saved, exported: Exported, tmp_path: Path, photos: Path) -> None:
    weights = saved()
    result = exported(weights, "pt2", **{"export.include_preprocess": True, "data.path": str(photos)})
    assert result["metrics"]["scores"]["pt2"]["same_answers"] == NUM_IMAGES
    run = torch.export.load(tmp_path / "run" / "model.pt2").module()
    transform, model = stored_transform(find_weights(str(weights)).weights.meta), network("vit")
    mean, std = torch.tensor([0.5, 0.4, 0.6]).view(3, 1, 1), torch.tensor([0.5, 0.3, 0.4]).view(3, 1, 1)
    for number in range(4):
        with torch.inference_mode():
            wanted = model((transform(pixels(number))[None].float() / 255 - mean) / std)
            torch.testing.assert_close(run(torch.from_numpy(pixels(number))[None]), wanted, rtol=0, atol=1e-4)


def test_program__that_disagrees_is_not_kept(
    saved: Saved, exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        graph_files, "run_model", lambda _: lambda images: [np.zeros((len(images), 5), np.float32)]
    )
    with pytest.raises(CheckpointError, match=r"run/model\.pt2: the exported file differs from the model by"):
        exported(saved(), "pt2")
    assert [file.name for file in (tmp_path / "run").iterdir() if "pt2" in file.name] == []
