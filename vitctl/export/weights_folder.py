"""Weights in vitctl's and other programs' formats, with the JSON files and model card that these expect.

The card is the folder's README.md: usage, scores and provenance of the weights. Hugging Face reads its
header.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from vitctl import __version__
from vitctl.engine.metrics import METRICS, interval_text, metric_text, wilson
from vitctl.errors import CheckpointError
from vitctl.export.export import ExportRequest, Written
from vitctl.export.graph import Raw
from vitctl.export.proof import Opened, answering, run_model
from vitctl.jobs.inputs.weights import FoundWeights, loaded_model, run_of
from vitctl.jobs.record.result import read_result
from vitctl.models.weights.containers import read_json
from vitctl.models.weights.download import CONFIG
from vitctl.models.weights.licence import licence_sentence
from vitctl.models.weights.meta import activation_of
from vitctl.models.weights.weights_file import read_weights, write_weights
from vitctl.system.files import write_json, write_text
from vitctl.system.text import one_line

# Licences that Hugging Face identifies by name.
_OF_HUB = ("apache-2.0", "mit", "bsd-3-clause", "cc0-1.0", "cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0")
_TABLE = (
    "| images | top-1 | correct | of | digest of images and labels | 95 % interval |",
    "|---|---|---|---|---|---|",
)


def write_weights_file(request: ExportRequest, folder: Path) -> Written:
    """Write the weights for a program, and for another program's folder also a README.md.

    Raises CheckpointError if the format cannot hold the model.
    """
    row, weights = request.row, request.found.weights
    target = folder / f"model{row.ending}" if row.ending == ".npz" else folder
    written = write_weights(weights, target, row.name)
    if row.in_folder:
        write_text(folder / "README.md", model_card(request, (*written.notes, *request.resizing_note)))
        config = read_json(folder / CONFIG)
        dropped = {"temperature"} | ({"class_names"} if config else set())  # the head is divided by it
        meta = {key: value for key, value in weights.meta.items() if key not in dropped}
        heads = getattr(weights.config, "num_heads", None)
        ours = {
            "preprocessing": meta,
            "weights_sha256": weights.digest,
            **({"num_heads": heads} if heads else {}),
            **({"resizing": request.resizing.note} if request.resizing else {}),
        }
        names = {"licence": "license", "licence_link": "license_link"}
        known = {theirs: meta[name] for name, theirs in names.items() if meta.get(name)}
        write_json(folder / CONFIG, config | known | {"vitctl": ours}, sort_keys=True)
    return Written(written.files[0], written.notes)


def open_weights_file(_request: ExportRequest, path: Path) -> Opened:
    """Return the weights as vitctl reads them back, from nothing but the file."""
    weights = read_weights(path)
    model, _ = loaded_model(FoundWeights(str(path), weights), 0, torch.float32)
    return Opened(
        run_model(Raw(model.eval(), weights.meta)), answering(weights.meta, weights.meta.get("temperature"))
    )


def model_card(request: ExportRequest, notes: tuple[str, ...]) -> str:
    """Return a model card in Markdown; `notes` are lines on reading the weights and resizing images."""
    found, licence, row = request.found, request.options.data_licence, request.row
    config = found.weights.config
    result = _result(found)
    task = "image-classification" if config.num_classes else "image-feature-extraction"
    what = "An image classifier" if config.num_classes else "A body without a head"
    usage = row.usage if config.num_classes or "pipeline" not in row.usage else ""
    head, own, link = [], found.weights.meta.get("licence", ""), found.weights.meta.get("licence_link", "")
    binding = licence_sentence(own) if own else ""
    if row.library:
        name = json.dumps(one_line(own or licence), ensure_ascii=False)
        head = [
            *("---", f"library_name: {row.library}", f"pipeline_tag: {task}"),
            *("tags:", f"- {task}", "- vision-transformer", "- vitctl"),
            *([f"license_name: {name}"] if (own or licence) and own not in _OF_HUB else []),
            *([f"license: {own if own in _OF_HUB else 'other'}"] if own or licence else []),
            *([f"license_link: {json.dumps(link, ensure_ascii=False)}"] if own and link else []),
            *("---", ""),
        ]
    data, temperature = result.get("provenance", {}), found.weights.meta.get("temperature")
    kind = activation_of(found.weights.meta, config.num_classes)
    lines = [
        *head,
        f"# Weights of {found.weights.meta.get('format', 'vitctl')}",
        "",
        f"{what} ({type(config).__name__.removesuffix('Config')}, {config.num_classes:,} "
        f"classes, images of {config.image_size} pixels), written by vitctl {__version__} from "
        f"`{found.path}`.",
        "",
        *(f"- {line}" for line in (usage, *notes, *found.warnings) if line and line != binding),
        "",
        "## Results",
        "",
        *(
            list(_score_rows(request, result))
            or ["None is known of exactly these weights: score them with `vitctl evaluate`."]
        ),
        "",
        "## Made of",
        "",
        f"- weights: SHA-256 of the names, types and values of their tensors (not of a file) "
        f"`{found.weights.digest}`",
        *(
            [
                f"- trained on {data.get('num_train', 0):,} images, {data.get('train_split', '')} of "
                f"{data.get('train_source', '')}, SHA-256 `{data['train_sha256']}`"
            ]
            if "train_sha256" in data
            else []
        ),
        *([f"- probabilities are the {kind} of the logits"] if config.num_classes else []),
        *([f"- its head is divided by {temperature:.6g}, which calibrates them"] if temperature else []),
        *([f"- licence of the weights that these were made of: {own}"] if own else []),
        *([f"- {binding}"] if binding else []),
        f"- licence of the images: {licence or 'not known; it may bind what these weights are used for'}",
    ]
    return "\n".join(map(one_line, lines)) + "\n"


def _score_rows(request: ExportRequest, result: dict[str, Any]) -> Iterator[str]:
    """Return a table of the accuracies of exactly these weights: the run's, and that on the user's images."""
    rows = []
    given = request.images.source.digest if request.images is not None else ""
    numbers, used = result.get("metrics", {}), result.get("provenance", {})
    is_scored = numbers.get("total") and isinstance(numbers.get("accuracy"), float)
    if is_scored and used.get("data_sha256") != given:
        name = f"{used.get('split', '')} of {used.get('data_source', '')}"
        rows.append((name, numbers, used.get("data_sha256", "")))
    if request.images is not None:
        rows.append((request.images.where, request.model_score().numbers, given))
    yield from _TABLE if rows else ()
    for name, numbers, digest in rows:
        interval = interval_text(wilson(numbers["correct"], numbers["total"]))
        counts = f"{numbers['accuracy']:.2%} | {numbers['correct']:,} | {numbers['total']:,}"
        yield f"| {name.replace('|', '/')} | {counts} | `{digest.replace('|', '/')}` | {interval} |"
    for name, numbers, _ in rows:
        means = [
            f"{text} {metric_text(key, numbers[key])}" for key, text in METRICS.items() if numbers.get(key)
        ][1:]
        if means:
            yield from ("", f"{name}: {', '.join(means)}.")


def _result(found: FoundWeights) -> dict[str, Any]:
    """Return metrics and provenance of the weights' run; empty if its result belongs to other weights."""
    run = run_of(found.path)
    try:
        result = None if run is None else read_result(run)
    except CheckpointError:
        return {}
    if result is None or result.provenance.get("weights_sha256") != found.weights.digest:
        return {}
    return {"metrics": result.metrics, "provenance": result.provenance}
