"""transformers itself reads what we write and computes the same, and we read what it writes."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.models.weights.conftest import assert_equal_logits, refused
from vitctl import load_classifier
from vitctl.models.variants import ViTConfig
from vitctl.models.weights.weights_file import Weights, read_weights, write_weights

transformers = pytest.importorskip("transformers")
Logits = Callable[[Weights, Tensor], Tensor]
Make = Callable[..., Weights]

CHANGES: list[dict[str, Any]] = [
    {"norm_eps": 1e-12},
    {"gelu": "tanh", "num_heads": 4},
    {"num_classes": 0, "representation_size": 48},
    {"dropout": 0.1},
]


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_folder__is_one_that_transformers_opens(
    plain: ViTConfig,
    make_weights: Make,
    logits_of: Logits,
    images: Tensor,
    tmp_path: Path,
    change: dict[str, Any],
) -> None:
    config = replace(plain, **change)
    weights = make_weights(config)
    write_weights(weights, tmp_path, "hf")
    kind = transformers.ViTForImageClassification if config.num_classes else transformers.ViTModel
    # Its eager attention takes the softmax in float32, whatever the model's dtype.
    model, info = kind.from_pretrained(tmp_path, attn_implementation="sdpa", output_loading_info=True)
    assert not any(info.values())

    def run(pixels: Tensor) -> Tensor:
        found = model.to(pixels.dtype).eval()(pixels)
        return found.logits if config.num_classes else found.pooler_output

    assert_equal_logits(run, logits_of, weights, images)


@pytest.mark.parametrize(
    ("to", "place", "change", "words"),
    [
        ("hf", "", {"model_type": "deit"}, "model_type 'deit', only 'vit' or 'vit_mae' is read"),
        ("hf", "", {"hidden_act": "relu"}, "hidden_act 'relu', known are gelu, "),
        ("hf", "", {"pooler_act": "gelu"}, 'pooler_act is "gelu", only "tanh" is supported'),
        ("hf", "", {"id2label": {"one": "cat"}}, "id2label is "),
        ("hf", "", {"num_attention_heads": 5}, "hidden_size 128 is not a multiple of num_heads 5"),
        ("timm", "", {"global_pool": "max"}, "global_pool 'max' does not go with its tensors, known are tok"),
        ("timm", "model_args", {"act_layer": "silu"}, "act_layer 'silu', known are"),
        ("timm", "model_args", {"num_heads": "two"}, 'model_args.num_heads is "two", should be a whole num'),
        ("timm", "model_args", {"img_size": [32, 64]}, "img_size [32, 64] is not square"),
        ("timm", "", {"model_args": [1]}, "model_args is [1], should be an object"),
    ],
)
def test_read__refuses_what_it_would_compute_otherwise(
    plain: ViTConfig, make_weights: Make, tmp_path: Path, to: str, place: str, change: Any, words: str
) -> None:
    write_weights(make_weights(plain), tmp_path, to)
    path = tmp_path / "config.json"
    described = json.loads(path.read_text())
    (described[place] if place else described).update(change)
    path.write_text(json.dumps(described))
    refused(tmp_path, words, "config.json" if "multiple" not in words else "")


def test_notes__say_what_the_folder_cannot(plain: ViTConfig, make_weights: Make, tmp_path: Path) -> None:
    cropped = make_weights(plain, {"eval_method": "shorter_side", "eval_resize": 37})
    notes = write_weights(cropped, tmp_path, "hf").notes
    assert notes[0] == "transformers.ViTForImageClassification.from_pretrained(folder)"
    assert "expect the shorter side and a centre crop" in notes[1]
    whole = make_weights(plain, {"eval_method": "letterbox", "eval_resize": 0})
    assert "expect the whole image padded to a square" in write_weights(whole, tmp_path, "hf").notes[1]
    headless = make_weights(replace(plain, num_classes=0))
    assert write_weights(headless, tmp_path, "hf").notes == (
        "transformers.ViTModel.from_pretrained(folder, add_pooling_layer=False)",
    )


@pytest.mark.parametrize("problem", [None, "multi_label_classification", "single_label_classification"])
@pytest.mark.parametrize("num_labels", [1, 3])
def test_problem_type__makes_the_answers_of_the_pipeline(
    tmp_path: Path, problem: str | None, num_labels: int
) -> None:
    """Every head was a softmax, and one logit a certainty."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=num_labels)
    config.id2label = dict(enumerate("abc"[:num_labels]))
    model = transformers.ViTForImageClassification(config)
    torch.nn.init.normal_(model.classifier.weight, generator=torch.Generator().manual_seed(0))
    config.problem_type = None if num_labels == 1 and problem == "single_label_classification" else problem
    model.save_pretrained(tmp_path)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    image = Image.effect_noise((32, 32), 90).convert("RGB")
    classify = transformers.pipeline("image-classification", str(tmp_path), device="cpu")
    wanted = {one["label"]: one["score"] for one in classify(image, top_k=9)}
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(written | {"problem_type": problem}))
    found = dict(load_classifier(tmp_path, precision="float32")(image))
    assert found == pytest.approx(wanted, abs=1e-5)
    assert (sum(found.values()) == pytest.approx(1)) == (num_labels > 1 and "multi" not in str(problem))


@pytest.mark.parametrize(
    ("to", "file", "name", "value"),
    [
        ("hf", "config.json", "num_attention_heads", 4),
        ("hf", "config.json", "num_attention_heads", None),  # transformers takes 12
        ("timm", "config.json", "model_args.num_heads", 4),
        ("hf", "preprocessor_config.json", "resample", 0),
    ],
)
def test_vitctl_key__does_not_hide_what_was_edited(
    plain: ViTConfig, make_weights: Make, tmp_path: Path, to: str, file: str, name: str, value: int | None
) -> None:
    """The key won, and other programs followed the edit."""
    write_weights(make_weights(plain), tmp_path, to)
    if not (tmp_path / file).exists():
        (tmp_path / file).write_text(json.dumps({"image_processor_type": "ViTImageProcessor", "resample": 2}))
    ours = {"num_heads": plain.num_heads, "preprocessing": {"resample": "bilinear"}}
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vitctl": ours}))
    read_weights(tmp_path)
    told = json.loads((tmp_path / file).read_text())
    section, _, key = name.rpartition(".")
    inner = told[section] if section else told
    if value is None:
        del inner[key]
    else:
        inner[key] = value
    (tmp_path / file).write_text(json.dumps(told))
    refused(tmp_path, f"{name} is {value or 12}, and the vitctl key|{name} is 'nearest")


@pytest.mark.parametrize(
    ("to", "change", "words"),
    [
        ("hf", {"id2label": {"1": "a", "2": "b", "3": "c"}}, "names 3 classes, numbered 1 to 3, .* 0 to 2;"),
        ("hf", {"id2label": {"0": "a", "1": "b", "7": "c"}}, "names 3 classes, numbered 0 to 7, .* 0 to 2;"),
        ("hf", {"id2label": {"0": "a", "1": "b", "01": "c"}}, "names 3 classes, numbered 0 to 1, .* 0 to 2;"),
        ("hf", {"id2label": {str(n): f"LABEL_{n}" for n in range(5)}}, "names 5 classes, numbered 0 to 4"),
        ("hf", {"num_labels": 5, "id2label": {}}, "num_labels is 5, and the head has 3 classes"),
        ("timm", {"num_classes": 5}, "num_classes is 5, and the head has 3 classes"),
        ("timm", {"num_classes": 0}, "num_classes is 0, and the head has 3 classes"),
    ],
)
def test_read__classes_that_are_not_those_of_the_head_are_refused(
    plain: ViTConfig, make_weights: Make, tmp_path: Path, to: str, change: dict[str, Any], words: str
) -> None:
    """Names were taken in order of any numbers, and other counts passed, which both programs refuse."""
    for num_classes in (3, 0):
        write_weights(make_weights(replace(plain, num_classes=num_classes)), tmp_path / str(num_classes), to)
        file = tmp_path / str(num_classes) / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    refused(tmp_path / "3", f"config.json: .*{words}")
    assert read_weights(tmp_path / "0").config.num_classes == 0  # as transformers writes it of a body


@pytest.mark.parametrize("to", ["hf", "timm"])
@pytest.mark.parametrize("problem", ["regression", "ranking"])
def test_problem_type__what_is_no_classifier_is_refused(
    plain: ViTConfig, make_weights: Make, tmp_path: Path, to: str, problem: str
) -> None:
    write_weights(make_weights(plain), tmp_path / "head", to)
    write_weights(make_weights(replace(plain, num_classes=0)), tmp_path / "body", to)
    for folder in (tmp_path / "head", tmp_path / "body"):
        written = json.loads((folder / "config.json").read_text()) | {"problem_type": problem}
        (folder / "config.json").write_text(json.dumps(written))
    refused(tmp_path / "head", f"config.json: problem_type '{problem}', only multi_label")
    read_weights(tmp_path / "body")
