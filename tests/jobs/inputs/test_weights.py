"""Weights that do not record how they were trained: what is assumed is logged, recorded and can be given."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from tests.matrix import slow
from tests.trained import SMALL, Job, do
from vitctl.errors import CheckpointError, RecipeError
from vitctl.jobs.inputs.weights import find_weights
from vitctl.models.build import build
from vitctl.models.variants import ResNetConfig
from vitctl.models.weights.weights_file import Weights, read_weights, write_weights
from vitctl.report.compare import compare_runs

IMAGENET = {"weights.mean": (0.485, 0.456, 0.406), "weights.std": (0.229, 0.224, 0.225)}
TRAINING = [
    "weights.mean",
    "weights.std",
    "weights.gelu",
    "weights.norm_eps",
    "weights.position_resize",
    "weights.classifier",
    "num_heads",
]
SCORING = [*TRAINING, "data.eval_method", "data.eval_resize", "data.eval_resample"]


@pytest.fixture
def bare(pretrained: Path, tmp_path: Path) -> Path:
    """A plain state dict with the tensors of the tiny run, as timm names them, of another number of heads."""
    found = find_weights(str(pretrained)).weights
    config = found.config
    config = replace(config, hidden_size=64, num_heads=1, gelu="erf", representation_size=0)
    state = build(config, seed=1).state_dict()
    state["head.weight"].normal_(generator=torch.Generator().manual_seed(0))
    meta = found.meta | {"loss": "softmax"}  # a plain state dict has no place for another
    return write_weights(Weights(config, state, meta), tmp_path / "bare.safetensors", "timm").files[0]


def logged(folder: Path) -> list[str]:
    records = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [
        record["text"] for record in records if record["kind"] == "warning" and "assumed" in record["text"]
    ]


def test_evaluate__says_and_records_what_is_assumed(job: Job, bare: Path, tmp_path: Path) -> None:
    result = job("evaluate", **{"weights.source": str(bare)})
    assumed = result["provenance"]["assumed"]
    assert list(assumed) == [*SCORING, "classes"]
    assert assumed["weights.mean"] == result["provenance"]["mean"] == [0.5, 0.5, 0.5]
    (line,) = logged(tmp_path / "run")
    assert "--preprocess half (or imagenet, clip)" in line
    assert all(key in line for key in assumed if key not in ("weights.mean", "weights.std"))


def test_evaluate__given_values_are_used_and_not_assumed(job: Job, bare: Path, tmp_path: Path) -> None:
    job("evaluate", "guessed", **{"weights.source": str(bare)})
    given = {**IMAGENET, "weights.gelu": "tanh", "weights.norm_eps": 1e-5, "data.eval_method": "square"}
    used = job("evaluate", **{"weights.source": str(bare), **given})["provenance"]
    assert (used["mean"], used["eval_method"]) == ([0.485, 0.456, 0.406], "square")
    assert list(used["assumed"]) == [
        "weights.position_resize", "weights.classifier", "num_heads", "data.eval_resize",
        "data.eval_resample", "classes",
    ]  # fmt: skip
    differing = dict(compare_runs([tmp_path / "guessed", tmp_path / "run"]).differences)
    assert differing["assumed weights.mean"] == [[0.5, 0.5, 0.5], "not assumed"]


def test_evaluate__weights_of_a_run_assume_nothing(job: Job, tmp_path: Path) -> None:
    assert job("evaluate")["provenance"]["assumed"] == {}
    assert logged(tmp_path / "run") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "values"),
    [
        ("finetune", {**SMALL, "weights.initialise": "pretrained"}),
        *slow(("fewshot", {"fewshot.shots": (1,)})),
    ],
)
def test_jobs_that_do_not_use_the_stored_crop__do_not_name_it(
    job: Job, bare: Path, tmp_path: Path, recipe: str, values: dict[str, Any]
) -> None:
    result = job(recipe, **{"weights.source": str(bare), **values})
    assert list(result["provenance"]["assumed"]) == TRAINING
    assert len(set(logged(tmp_path / "run"))) == 1
    given = job(recipe, "given", **{"weights.source": str(bare), **values, **IMAGENET})
    assert list(given["provenance"]["assumed"]) == TRAINING[2:]


def test_finetune__its_own_weights_record_what_they_were_trained_with(
    job: Job, bare: Path, tmp_path: Path
) -> None:
    job("finetune", "tuned", **{"weights.source": str(bare), **IMAGENET})
    meta = find_weights(str(tmp_path / "tuned")).weights.meta
    assert meta["mean"] == [0.485, 0.456, 0.406] and "assumed" not in meta


@pytest.mark.slow
def test_export__what_was_assumed_goes_along(bare: Path, tmp_path: Path) -> None:
    values = {
        "weights.source": str(bare),
        "export.to": ("timm", "onnx"),
        "weights.std": IMAGENET["weights.std"],
    }
    do("export", tmp_path / "run", **values)
    card = (tmp_path / "run/timm/README.md").read_text()
    assert "weights.mean=[0.5,0.5,0.5]" in card and "weights.std" not in card
    again = read_weights(tmp_path / "run/timm/model.safetensors").meta
    assert "mean" in again["assumed"] and "std" not in again["assumed"]
    assert again["std"] == [0.229, 0.224, 0.225]
    stored = {one.key: one.value for one in onnx.load(tmp_path / "run/model.onnx").metadata_props}
    assert json.loads(stored["preprocessing"])["assumed"] == again["assumed"]


def told(folder: Path, kind: str) -> list[str]:
    records = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [record["text"] for record in records if record["kind"] == kind]


@pytest.mark.slow
def test_licence__is_stated_once_and_stays_with_what_is_made(job: Job, bare: Path, tmp_path: Path) -> None:
    card = "---\ntags:\n- timm\nlicense: other\nlicense_name: dinov3-license\n---\nlicense: mit\n"
    (bare.parent / "README.md").write_text(card)
    result = job("finetune", "tuned", **{"weights.source": str(bare), **IMAGENET})
    assert result["provenance"]["licence"] == "dinov3-license"
    assert told(tmp_path / "tuned", "weights")[0].endswith("licence: dinov3-license")
    assert sum("pass the agreement on" in text for text in told(tmp_path / "tuned", "warning")) == 1
    scored = job("evaluate", "scored", **{"weights.source": str(tmp_path / "tuned")})
    assert scored["provenance"]["licence"] == "dinov3-license"

    to = {"weights.source": str(tmp_path / "tuned"), "export.to": ("timm", "onnx")}
    out = do("export", tmp_path / "out", **to)
    assert out["provenance"]["licence"] == "dinov3-license"
    text = (tmp_path / "out/timm/README.md").read_text()
    assert 'license_name: "dinov3-license"\nlicense: other\n' in text
    assert "- licence of the weights that these were made of: dinov3-license\n- the DINOv3 License" in text
    config = json.loads((tmp_path / "out/timm/config.json").read_text())
    assert config["license"] == "dinov3-license"
    stored = {one.key: one.value for one in onnx.load(tmp_path / "out/model.onnx").metadata_props}
    assert stored["licence"] == "dinov3-license"
    (tmp_path / "out/timm/README.md").unlink()
    assert read_weights(tmp_path / "out/timm").meta["licence"] == "dinov3-license"


def test_licence__unknown_stays_unknown_and_the_user_may_state_it(
    job: Job, bare: Path, tmp_path: Path
) -> None:
    unknown = job("evaluate", "unknown", **{"weights.source": str(bare)})
    assert "licence" not in unknown["provenance"]
    assert not any("licence" in text for text in told(tmp_path / "unknown", "weights"))
    given = job("evaluate", "given", **{"weights.source": str(bare), "weights.licence": "cc-by-nc-4.0"})
    assert given["provenance"]["licence"] == "cc-by-nc-4.0"
    assert sum("no commercial use" in text for text in told(tmp_path / "given", "warning")) == 1
    assert given["metrics"]["accuracy"] == unknown["metrics"]["accuracy"]
    values = {"weights.source": str(bare), "weights.licence": "apache-2.0", "export.to": ("timm",)}
    do("export", tmp_path / "out", **values)
    head = (tmp_path / "out/timm/README.md").read_text().split("---")[1]
    assert "\nlicense: apache-2.0\n" in head and "license_name" not in head


def test_given__refuses_nonsense(job: Job, bare: Path) -> None:
    with pytest.raises(RecipeError, match="std"):
        job("evaluate", **{"weights.source": str(bare), "weights.std": (0.2, 0.0, 0.2)})


def test_given__a_resnet_has_no_gelu(tmp_path: Path) -> None:
    config = ResNetConfig(stage_depths=(1,), width=32, version="v2", image_size=32, num_classes=3)
    file = write_weights(Weights(config, build(config).state_dict(), {}), tmp_path / "w.npz", "google").files[
        0
    ]
    with pytest.raises(CheckpointError, match=r"weights\.gelu"):
        find_weights(str(file), given={"gelu": "erf"})
