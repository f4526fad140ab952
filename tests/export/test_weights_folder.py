"""Folders that transformers and timm open give our five best classes, and say what they are."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import TINY
from tests.export.conftest import PREPROCESSING, Saved, network, normalised, pixels
from tests.models.tiny_models import TINY as NETWORKS
from tests.trained import CPU, do
from vitctl.data.images.transforms import EvalTransform
from vitctl.errors import CheckpointError
from vitctl.export import weights_folder
from vitctl.jobs.inputs.weights import find_weights
from vitctl.models.build import build
from vitctl.models.weights.weights_file import read_weights, save_weights

Exported = Callable[..., dict[str, Any]]
SQUARE = {"eval_method": "square", "eval_resize": 0, "resample": "bilinear_antialias"}


@torch.inference_mode()
def ours(number: int) -> list[tuple[str, float]]:
    """The classes by probability."""
    image = EvalTransform(32, resample="bilinear_antialias")(pixels(number))[None]
    chances = network("vit")(normalised(image)).softmax(dim=1)[0]
    return [("abcde"[index], float(chances[index])) for index in chances.argsort(descending=True)]


def assert_same(found: list[tuple[str, float]], number: int) -> None:
    assert [name for name, _ in found] == [name for name, _ in ours(number)]
    np.testing.assert_allclose(
        [chance for _, chance in found], [chance for _, chance in ours(number)], atol=2e-3
    )  # Pillow's levels


def test_hf__pipeline_opens_the_folder_with_our_five_best(
    saved: Saved, exported: Exported, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    exported(saved(**SQUARE), "hf")
    classify = transformers.pipeline("image-classification", str(tmp_path / "run" / "hf"), device="cpu")
    for number in range(6):
        answers = classify(Image.fromarray(pixels(number)), top_k=5)
        assert_same([(answer["label"], answer["score"]) for answer in answers], number)


def test_timm__create_model_opens_the_folder_with_our_five_best(
    saved: Saved, exported: Exported, tmp_path: Path
) -> None:
    timm = pytest.importorskip("timm")
    exported(saved(**SQUARE), "timm")
    model = timm.create_model(f"local-dir:{tmp_path / 'run' / 'timm'}", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
    for number in range(6):
        with torch.inference_mode():
            chances = model(transform(Image.fromarray(pixels(number)))[None]).softmax(dim=1)[0]
        answers = [("abcde"[index], float(chances[index])) for index in chances.argsort(descending=True)]
        assert_same(answers, number)


@pytest.fixture(scope="module")
def trained(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that other programs can hold, with a Polyak average."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    do(TINY, folder, **{"data.path": str(tiny_data), "model.pre_logits": False})
    return folder


@pytest.mark.slow
def test_folder__files_of_the_user_stay_beside_a_second_export(
    exported: Exported, trained: Path, tmp_path: Path
) -> None:
    """The whole folder was replaced."""
    exported(trained, "timm")
    (tmp_path / "run" / "timm" / "NOTES.md").write_text("mine")
    exported(trained, "timm")
    assert (tmp_path / "run" / "timm" / "NOTES.md").read_text() == "mine"
    assert not [path for path in (tmp_path / "run").iterdir() if path.name.endswith(".partial")]


def test_export__nothing_is_kept_unless_every_format_fits(
    saved: Saved, exported: Exported, tmp_path: Path
) -> None:
    """Formats before the one that is refused were written and kept."""
    with pytest.raises(CheckpointError, match=r"torchvision: torchvision cannot hold .*holds every model$"):
        exported(saved(**SQUARE), "safetensors", "timm", "torchvision", "onnx")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert not names & {"model.safetensors", "timm", "torchvision", "model.onnx"}
    assert not [name for name in names if name.endswith(".partial")]


@pytest.mark.slow
def test_card__says_what_is_known(exported: Exported, trained: Path, tiny_data: Path, tmp_path: Path) -> None:
    """Results of the run and of the images given, digests, licence.

    Hugging Face's own reader reads its head.
    """
    exported(trained, "timm", **{"export.data_licence": "CC BY 4.0", "data.path": str(tiny_data)})
    own = do(
        "evaluate", tmp_path / "score", **CPU, **{"weights.source": str(trained), "data.path": str(tiny_data)}
    )
    text = (tmp_path / "run" / "timm" / "README.md").read_text()
    digest = find_weights(str(trained)).weights.digest
    metrics = own["metrics"]
    row = (
        f"{metrics['accuracy']:.2%} | {metrics['correct']} | {metrics['total']} | "
        f"`{own['provenance']['data_sha256']}` |"
    )
    assert text.count(row) == 1  # the run scored the same images
    assert f"| test of {tiny_data} |" in text
    assert (
        f"- weights: SHA-256 of the names, types and values of their tensors (not of a file) `{digest}`\n"
        in text
    )
    assert "- trained on 70 images, train of " in text
    assert "- licence of the images: CC BY 4.0\n" in text
    hub = pytest.importorskip("huggingface_hub")
    head = hub.ModelCard(text).data
    assert (head.library_name, head.pipeline_tag) == ("timm", "image-classification")
    assert (head.license, head.license_name) == ("other", "CC BY 4.0")


@pytest.mark.parametrize(("to", "gelu"), [("torchvision", "erf"), ("google", "tanh")])
@pytest.mark.parametrize("eps", [1e-6, 1e-5])
def test_card__its_usage_runs_and_vitctl_opens_the_folder(
    to: str, gelu: str, eps: float, exported: Exported, tmp_path: Path
) -> None:
    if to == "google" and eps != 1e-6:
        pytest.skip("its norm eps is fixed")
    config = replace(NETWORKS["vit"], image_size=32, gelu=gelu, norm_eps=eps)
    save_weights(tmp_path / "w.safetensors", build(config, seed=0).state_dict(), config, PREPROCESSING)
    exported(tmp_path / "w.safetensors", to)
    folder = tmp_path / "run" / to
    assert read_weights(folder).meta["class_names"] == PREPROCESSING["class_names"]
    bullets = [
        line.removeprefix("- ").replace("FOLDER", str(folder))
        for line in (folder / "README.md").read_text().partition("## Results")[0].splitlines()
        if line.startswith("- ")
    ]
    code = bullets[0].partition(", where MODEL")[0].partition(", whose")[0]
    known: dict[str, Any] = {"numpy": np}
    if to == "torchvision":
        exec(bullets[0].rpartition("; ")[2], known)
        known["MODEL"] = eval(bullets[1], known)
    assert eval(code, known)


def test_card__has_the_result_of_the_run_and_that_of_other_images(
    exported: Exported, trained: Path, tiny_data: Path, tmp_path: Path
) -> None:
    exported(trained, "timm", **{"data.path": str(tiny_data), "data.eval_split": "train[:30]"})
    text = (tmp_path / "run" / "timm" / "README.md").read_text()
    numbers = json.loads((trained / "result.json").read_text())["metrics"]
    assert f"{numbers['accuracy']:.2%} | {numbers['correct']} | {numbers['total']} | " in text
    assert f"| train[:30] of {tiny_data} | " in text


def test_card__of_weights_alone_knows_no_result(saved: Saved, exported: Exported, tmp_path: Path) -> None:
    exported(saved(**SQUARE), "hf")
    text = (tmp_path / "run" / "hf" / "README.md").read_text()
    assert "None is known of exactly these weights" in text
    assert "- licence of the images: not known" in text
    assert "license:" not in text


def test_card__means_are_a_paragraph(
    saved: Saved, exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backslash and an n stood before it."""
    numbers = {"accuracy": 0.5, "correct": 1, "total": 2, "mean_per_class": 0.25}
    used = {"split": "test", "data_source": "photos", "data_sha256": "1"}
    monkeypatch.setattr(weights_folder, "_result", lambda _found: {"metrics": numbers, "provenance": used})
    exported(saved(**SQUARE), "hf")
    text = (tmp_path / "run" / "hf" / "README.md").read_text()
    assert "|\n\ntest of photos: mean accuracy per class 25.00%.\n" in text


def test_card__a_result_of_other_weights_is_not_told(
    exported: Exported, trained: Path, tmp_path: Path
) -> None:
    """The run scored its Polyak average; these are the weights themselves."""
    exported(trained, "timm", **{"weights.which": "model"})
    assert "None is known of exactly these weights" in (tmp_path / "run" / "timm" / "README.md").read_text()


def test_hf__is_read_back_with_the_pre_processing_of_the_export(
    saved: Saved, exported: Exported, tmp_path: Path
) -> None:
    """transformers can only squash to a square; config.json records what these weights expect."""
    expected = {"eval_method": "shorter_side", "eval_resize": 36, "resample": "bicubic_antialias"}
    exported(saved(**expected), "hf")
    meta = read_weights(tmp_path / "run" / "hf").meta
    assert {name: meta[name] for name in expected} == expected
