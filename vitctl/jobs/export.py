"""Files for other programs, verified against the model before they are kept."""

import json
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vitctl.engine.journal import LOG, Journal, Report, silent
from vitctl.engine.preemption import StopFlag, Stopped
from vitctl.errors import CheckpointError, RecipeError
from vitctl.jobs.inputs.weights import FoundWeights, loaded_model, weights_of
from vitctl.jobs.provenance import versions, weights_scored
from vitctl.jobs.record.result import RunResult
from vitctl.jobs.resizing import Resizing, ResizingCheck, card
from vitctl.models.weights.files import read_json, write_json
from vitctl.models.weights.load import read_weights
from vitctl.models.weights.sources import CONFIG
from vitctl.models.weights.write import Target, write_weights
from vitctl.recipe.schema import ExportRecipe
from vitctl.system.files import atomic_write, write_text

TOLERANCE = 1e-4
ONNX_OPSET = 20


def export(recipe: ExportRecipe, run_dir: Path, report: Report = silent, stop: StopFlag | None = None) -> RunResult:
    """Write weights.source as export.to, verify each file by reading it back, and delete it if it does not agree.

    The ONNX file takes uint8 images [B, 3, S, S] (RGB, 0..255), already resized; the value range is inside the graph, and
    class names and pre-processing are in its metadata.

    Args:
        recipe: checked.
        run_dir: gets model.onnx, model.safetensors, and a folder for each format of another program.
        report: called with every log record.
        stop: set by signals, checked before each file.

    Returns:
        the files and, for each, the largest difference to the model's logits in units of their standard deviation.

    Raises:
        CheckpointError: a written file disagrees with the model; it is not kept.
        Stopped: a signal came; the files of earlier formats are complete and verified.
    """
    stop = StopFlag() if stop is None else stop
    unknown = sorted(set(recipe.export.to) - set(WRITERS))
    if unknown or not recipe.export.to:
        raise RecipeError(
            f"export.to: {', '.join(unknown) or 'nothing'} cannot be written; choose from {', '.join(WRITERS)}"
        )
    if recipe.export.file and len(recipe.export.to) > 1:
        raise RecipeError(f"export.file = '{recipe.export.file}' takes one format; choose it with --to")
    found = weights_of(recipe)
    model, _ = loaded_model(found, 0, torch.float32)
    journal = Journal(run_dir / LOG, report)
    text = f"to {', '.join(recipe.export.to)}"
    journal.write("weights", step=0, path=found.path, text="; ".join(filter(None, (found.chosen.text, text))))
    files, differences, resized = {}, {}, {}
    check = ResizingCheck(found, Raw(model.eval(), found.weights.meta), recipe.export.check_images)
    for kind in recipe.export.to:
        if stop.raised:
            raise Stopped
        raw = Raw(model.eval(), found.weights.meta)
        resizing = check(kind)
        path, difference, notes = WRITERS[kind](found, raw, run_dir, recipe.export.batch_sizes, resizing)
        if resizing is not None:
            resized[kind] = {"changed": resizing.changed, "total": resizing.total}
        if recipe.export.file:
            path = _copied(path, Path(recipe.export.file))
        batch_sizes = list(recipe.export.batch_sizes)
        journal.write(
            "export", step=0, path=str(path), difference=difference, batch_sizes=batch_sizes, notes=list(notes)
        )
        files[kind], differences[kind] = str(path), difference
    return RunResult(
        "export",
        "done",
        metrics={"max_difference": differences} | ({"answers_changed": resized} if resized else {}),
        provenance={
            **weights_scored(found),
            "precision": "float32",
            "device": "cpu",
            "versions": versions(),
            "batch_sizes": list(recipe.export.batch_sizes),
        },
        files=files,
    )


def _copied(path: Path, to: Path) -> Path:
    """Copy a file to another path, or into another folder, completely or not at all."""
    target = to / path.name if to.is_dir() else to
    with atomic_write(target) as aside:
        shutil.copyfile(path, aside)
    return target


class Exported(NamedTuple):
    """A written file, its largest difference to the model, and what its users should know."""

    path: Path
    difference: float
    notes: tuple[str, ...]


class Raw(nn.Module):
    """A model with its value range in front: uint8 images [B, 3, S, S] to logits [B, K]."""

    def __init__(self, model: nn.Module, meta: dict[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", torch.tensor(meta["mean"]).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(meta["std"]).view(1, 3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, K] of images [B, 3, S, S], uint8."""
        normalised: Tensor = (images.float() / 255.0 - self.mean) / self.std
        logits: Tensor = self.model(normalised)
        return logits


def _write_onnx(
    found: FoundWeights, raw: Raw, run_dir: Path, batch_sizes: tuple[int, ...], resizing: Resizing | None
) -> Exported:
    import onnx

    path = run_dir / "model.onnx"
    size = found.weights.config.image_size
    example = torch.zeros(2, 3, size, size, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            raw,
            (example,),
            input_names=["images"],
            output_names=["logits"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            dynamo=True,
            opset_version=ONNX_OPSET,
            verbose=False,
        )
    assert program is not None
    proto = program.model_proto
    meta = {k: v for k, v in found.weights.meta.items() if k != "class_names"}
    notes = {"class_names": json.dumps(found.weights.meta.get("class_names", [])), "preprocessing": json.dumps(meta)}
    notes |= {"resizing": resizing.note} if resizing else {}
    onnx.helper.set_model_props(proto, {**notes, "producer": "vitctl", "weights_sha256": found.weights.digest})
    with atomic_write(path) as aside:
        onnx.save(proto, aside, format="protobuf")
        largest = _agree(path, raw, size, batch_sizes, _run_onnx(aside))
    return Exported(path, largest, (resizing.note,) if resizing else ())


def _run_onnx(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda images: session.run(["logits"], {"images": images.numpy()})[0]


def _write_weights(
    to: Target, found: FoundWeights, raw: Raw, run_dir: Path, batch_sizes: tuple[int, ...], resizing: Resizing | None
) -> Exported:
    """A weights file in vitctl's or another program's format, read back to verify it, with the files that the program expects."""
    folder, aside = run_dir / to, run_dir / f".{to}.partial"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        written = write_weights(found.weights, aside / "model.npz" if to == "google" else aside, to)
        file = written.files[0]
        again, _ = loaded_model(
            FoundWeights(str(file), read_weights(file, num_heads=getattr(found.weights.config, "num_heads", None))),
            0,
            torch.float32,
        )
        read_back = Raw(again.eval(), found.weights.meta)
        notes = (*written.notes, *((resizing.note,) if resizing else ()))
        if to != "safetensors":
            _write_beside(aside, found, notes, resizing)
        largest = _agree(file, raw, found.weights.config.image_size, batch_sizes, lambda x: read_back(x).numpy())
    except CheckpointError as error:
        shutil.rmtree(aside)
        raise CheckpointError(str(error).replace(str(aside), str(folder))) from None
    if to == "safetensors":
        folder = run_dir
        file.replace(folder / file.name)
        aside.rmdir()
    else:
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    return Exported(folder / file.name, largest, notes)


def _write_beside(folder: Path, found: FoundWeights, notes: tuple[str, ...], resizing: Resizing | None) -> None:
    """Write a README.md, and add the pre-processing to config.json where the format has one."""
    name = found.weights.meta.get("format", "vitctl")
    write_text(folder / "README.md", card(f"Weights of {name}", found.path, notes))
    config = read_json(folder / CONFIG)
    if config:
        meta = {key: value for key, value in found.weights.meta.items() if key != "class_names"}
        said = {"resizing": resizing.note} if resizing else {}
        write_json(folder / CONFIG, config | {"vitctl": {"preprocessing": meta, **said}})


@torch.inference_mode()
def _agree(path: Path, raw: Raw, size: int, batch_sizes: tuple[int, ...], run: Any) -> float:
    """Largest difference over all batch sizes in standard deviations of the logits. Raises CheckpointError when it is not small."""
    largest = 0.0
    generator = torch.Generator().manual_seed(0)
    for batch in batch_sizes:
        images = torch.randint(0, 256, (batch, 3, size, size), dtype=torch.uint8, generator=generator)
        expected, got = raw(images).numpy(), np.asarray(run(images))
        spread = float(expected.std()) or 1.0
        difference = float(np.abs(expected - got).max()) / spread if got.shape == expected.shape else float("inf")
        largest = largest if difference <= largest else difference  # NaN too
    if not largest <= TOLERANCE:
        raise CheckpointError(
            f"{path}: the exported file differs from the model by {largest:.1e} standard deviations of the logits "
            f"(allowed {TOLERANCE:g}); it was not kept"
        )
    return largest


WRITERS: dict[str, Callable[[FoundWeights, Raw, Path, tuple[int, ...], Resizing | None], Exported]] = {
    "onnx": _write_onnx,
    "safetensors": partial(_write_weights, "safetensors"),
    "google": partial(_write_weights, "google"),
    "timm": partial(_write_weights, "timm"),
    "hf": partial(_write_weights, "hf"),
    "torchvision": partial(_write_weights, "torchvision"),
}
