"""Everyone who uses weights is told the same of them: a licence that binds, remarks, assumed values."""

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.matrix import few
from tests.trained import Job, do
from vitctl import load_classifier
from vitctl.errors import CheckpointError
from vitctl.jobs.inputs.classifier import open_classifier
from vitctl.jobs.inspection import inspect
from vitctl.jobs.plan import plan_scoring
from vitctl.jobs.predict import predict
from vitctl.models.build import build
from vitctl.models.variants import ViTConfig
from vitctl.models.weights.layouts import rules_for, to_theirs
from vitctl.models.weights.timm import LAYOUT
from vitctl.models.weights.weights_file import save_weights
from vitctl.recipe.load import Override, load_recipe
from vitctl.recipe.schema import Evaluate


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """Raw and averaged weights in timm's names, under a licence that binds, without a config.json."""
    config = ViTConfig(patch_size=8, hidden_size=64, depth=1, mlp_size=64, num_heads=1, image_size=32,
                       num_classes=6)  # fmt: skip
    state = build(config, seed=1).state_dict()
    state["head.weight"].normal_(generator=torch.Generator().manual_seed(0))
    theirs = to_theirs(state, rules_for(LAYOUT.table(1), state))
    (tmp_path / "weights").mkdir()
    torch.save({"state_dict": theirs, "state_dict_ema": theirs}, tmp_path / "weights/w.pth")
    (tmp_path / "weights/README.md").write_text("---\nlicense: cc-by-nc-4.0\n---\n")
    Image.new("RGB", (40, 40)).save(tmp_path / "a.png")
    return tmp_path / "weights/w.pth"


def _recipe(source: Path) -> Evaluate:
    recipe = load_recipe("evaluate", [("weights.source", str(source)), ("machine.device", "cpu")]).recipe
    return recipe


def _logged(job: Job, recipe: str, source: Path, folder: Path, **values: Any) -> list[str]:
    job(recipe, **{"weights.source": str(source), **values})
    records = map(json.loads, (folder / "run/log.jsonl").read_text().splitlines())
    return [record["text"] for record in records if record["kind"] == "warning"]


def _predicted(_job: Job, source: Path, _folder: Path) -> list[str]:
    said: list[str] = []
    list(predict(_recipe(source), [], note=said.append))
    return said


def _warned(_job: Job, source: Path, _folder: Path) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        classify = load_classifier(source, device="cpu")
    assert [str(one.message) for one in caught] == list(classify.warnings)
    assert {one.filename for one in caught} == {__file__}
    assert classify.logits(np.zeros((40, 40, 3), np.uint8)).shape == (1, 6)
    return list(classify.warnings)


def _inspected(_job: Job, source: Path, folder: Path) -> list[str]:
    return [row.text for row in inspect(_recipe(source), [str(source)], [], folder / "pictures")]


def _card(_job: Job, source: Path, folder: Path) -> list[str]:
    do("export", folder / "run", **{"weights.source": str(source), "export.to": ("timm",)})
    return (folder / "run/timm/README.md").read_text().splitlines()


def _of_onnx(_job: Job, source: Path, folder: Path) -> list[str]:
    do("export", folder / "run", **{"weights.source": str(source), "export.to": ("onnx",)})
    return list(open_classifier(_recipe(folder / "run/model.onnx")).warnings)


CONSUMERS: dict[str, Callable[[Job, Path, Path], list[str]]] = {
    "evaluate": lambda job, source, folder: _logged(job, "evaluate", source, folder),
    "fewshot": lambda job, source, folder: _logged(job, "fewshot", source, folder, **{"fewshot.shots": (1,)}),
    "finetune": lambda job, source, folder: _logged(job, "finetune", source, folder),
    "serve": lambda _job, source, _folder: list(open_classifier(_recipe(source)).warnings),
    "predict": _predicted,
    "load_classifier": _warned,
    "inspect": _inspected,
    "export": _card,
    "predict an export": _of_onnx,
}


@pytest.mark.parametrize("consumer", few([*CONSUMERS], "finetune", "predict"))
def test_remarks__are_those_of_every_consumer(consumer: str, job: Job, foreign: Path, tmp_path: Path) -> None:
    said = CONSUMERS[consumer](job, foreign, tmp_path)
    for words in ("allows no commercial use", "averaged weights (state_dict_ema) of the file are", "assumed"):
        assert sum(words in line for line in said) == 1, (words, said)


@pytest.mark.parametrize(
    ("given", "word"),
    [
        (
            ("weights.preprocess", "imagenet"),
            "weights.mean = [0.485, 0.456, 0.406] (recorded: [0.5, 0.5, 0.5])",
        ),
        (("weights.std", (0.25, 0.5, 0.5)), "weights.std = [0.25, 0.5, 0.5] (recorded: [0.5, 0.5, 0.5])"),
        (("weights.gelu", "quick"), "weights.gelu = quick (recorded: "),
        (("weights.preprocess", "half"), ""),
        (("data.eval_method", "letterbox"), ""),
    ],
)
def test_remarks__a_recorded_value_that_is_replaced_is_named(
    pretrained: Path, foreign: Path, tiny_data: Path, given: tuple[str, Any], word: str
) -> None:
    """Where the value was assumed, there is none to replace."""
    for source in (pretrained, foreign):
        recipe = load_recipe(
            "evaluate",
            [
                ("weights.source", str(source)),
                ("machine.device", "cpu"),
                ("data.path", str(tiny_data)),
                given,
            ],
        ).recipe
        for said in (open_classifier(recipe).warnings, plan_scoring(recipe).notes):
            named = [line for line in said if "other than the weights record" in line]
            assert len(named) == bool(word and source == pretrained)
            assert word in "".join(named) or source == foreign
            assert not named or ("temperature" in named[0]) == ("gelu" not in given[0])


def test_plan__refuses_to_score_weights_without_a_head_as_the_job_does(
    job: Job, tiny_data: Path, tmp_path: Path
) -> None:
    """Also where the images are not here, of which only the number is known."""
    config = ViTConfig(patch_size=8, hidden_size=64, depth=1, mlp_size=64, num_heads=1, image_size=32)
    meta = {"image_size": 32, "mean": [0.5] * 3, "std": [0.5] * 3, "resample": "bilinear", "eval_resize": 32,
            "eval_method": "square"}  # fmt: skip
    config = replace(config, num_classes=0)
    body = save_weights(tmp_path / "body.safetensors", build(config, seed=1).state_dict(), config, meta)
    absent = {"data.dataset": "imagenet", "data.root": str(tmp_path), "data.eval_split": "validation"}
    for values in ({"data.path": str(tiny_data)}, absent):
        given = {"weights.source": str(body), "machine.device": "cpu", **values}
        with pytest.raises(CheckpointError, match="has no trained head"):
            plan_scoring(load_recipe("evaluate", [Override(*one) for one in given.items()]).recipe)
    with pytest.raises(CheckpointError, match="has no trained head"):
        job("evaluate", **{"weights.source": str(body)})


def test_weights__of_a_foreign_file_are_chosen_on_the_command_line(foreign: Path, tmp_path: Path) -> None:
    from vitctl.jobs.inputs.weights import find_weights

    assert find_weights(str(foreign)).chosen.averaged
    raw = find_weights(str(foreign), which="model")
    assert not raw.chosen.averaged
    assert "the raw weights (state_dict) of the file are taken; --weights ema" in "".join(raw.warnings)
    for which, words in (("best", "chooses among the checkpoints"), ("3", "chooses among the checkpoints")):
        with pytest.raises(CheckpointError, match=words):
            find_weights(str(foreign), which=which)
    torch.save(torch.load(foreign)["state_dict"], tmp_path / "one.pth")
    with pytest.raises(CheckpointError, match=r"one\.pth: --weights ema: there is only one set of weights"):
        find_weights(str(tmp_path / "one.pth"), which="ema")
