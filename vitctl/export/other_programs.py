"""Written folders as their programs open them, if installed, for verification; nothing is downloaded."""

from collections.abc import Sequence
from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitctl.export.export import ExportRequest
from vitctl.export.graph_files import quiet
from vitctl.export.proof import Opened, answering, run_model
from vitctl.jobs.inputs.classifier import Ranking
from vitctl.models.variants import ViTConfig
from vitctl.models.weights.containers import read_json, read_tensors
from vitctl.models.weights.download import CONFIG
from vitctl.models.weights.torchvision import arguments


class _Scaled(nn.Module):
    """Another program's model on uint8 images, with its mean and standard deviation."""

    def __init__(self, model: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.model = model.float().eval()
        self.mean, self.std = (torch.tensor(value).view(3, 1, 1) for value in (mean, std))

    def forward(self, images: Tensor) -> Tensor:
        outputs: Any = self.model((images.float() / 255 - self.mean) / self.std)
        logits: Tensor = getattr(outputs, "logits", outputs)  # for transformers, and for others
        return logits


def open_pipeline(request: ExportRequest, path: Path) -> Opened | None:
    """Return the answers of transformers' pipeline for a folder; `ResizingCheck` covers its resizing.

    None without a head, which the pipeline requires, or with a norm eps that timm's architecture lacks.
    """
    from transformers import pipeline

    weights = request.found.weights
    if not weights.config.num_classes or "norm_eps" in read_json(path.parent / CONFIG):
        return None
    with quiet(), redirect_stderr(StringIO()):  # a progress bar
        found: Any = pipeline("image-classification", str(path.parent), device="cpu")
    processor, named = found.image_processor, bool(weights.meta.get("class_names"))
    colours = getattr(processor, "data_config", None)  # of timm
    mean, std = (colours["mean"], colours["std"]) if colours else (processor.image_mean, processor.image_std)

    def answers(logits: Tensor) -> list[Ranking]:
        rows = (found.postprocess({"logits": row[None]}, top_k=len(row)) for row in logits)
        return [[(one["label"] if named else "", one["score"]) for one in row] for row in rows]

    return Opened(run_model(_Scaled(found.model, mean, std)), answers)


def open_timm(_request: ExportRequest, path: Path) -> Opened:
    """Return a folder as timm opens it, with the note's norm eps, and answers by `config.json`."""
    import timm

    told = read_json(path.parent / CONFIG)
    norm: Any = {"norm_layer": partial(nn.LayerNorm, eps=told["norm_eps"])} if "norm_eps" in told else {}
    model: Any = timm.create_model(f"local-dir:{path.parent}", pretrained=True, **norm)
    colours = model.pretrained_cfg
    loss = "sigmoid" if told.get("problem_type") == "multi_label_classification" else "softmax"
    meta = {"loss": loss, "class_names": told.get("label_names")}
    return Opened(run_model(_Scaled(model, colours["mean"], colours["std"])), answering(meta, 1.0))


def open_torchvision(request: ExportRequest, path: Path) -> Opened:
    """Return a folder as torchvision opens it with the note's arguments, which are all it has."""
    from torchvision.models import VisionTransformer

    weights = request.found.weights
    assert isinstance(weights.config, ViTConfig)
    given = arguments(weights.config)
    norm = partial(nn.LayerNorm, eps=given.pop("norm_eps"))
    model = VisionTransformer(**given, norm_layer=norm)
    model.load_state_dict(read_tensors(path))
    run = run_model(_Scaled(model, weights.meta["mean"], weights.meta["std"]))
    return Opened(run, answering(weights.meta, 1.0))
