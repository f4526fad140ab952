"""The README.md beside exported weights: how they are used, what they score, what they were made of.

Hugging Face reads its head.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from vitctl import __version__
from vitctl.errors import CheckpointError
from vitctl.export.written import Order
from vitctl.jobs.inputs.weights import FoundWeights, run_of
from vitctl.jobs.record.result import read_result
from vitctl.models.weights.assumed import assumed_line
from vitctl.system.text import one_line

_LIBRARIES = {"hf": "transformers", "timm": "timm"}
_OPENED = {
    "hf": "transformers.pipeline('image-classification', FOLDER)",
    "timm": "timm.create_model('local-dir:FOLDER', pretrained=True); turn photographs upright first, with "
    "PIL.ImageOps.exif_transpose",
}


def model_card(to: str, order: Order, notes: Sequence[str]) -> str:
    """A model card in Markdown.

    Args:
        to: of export.to.
        order: the weights, and the images that the user gives.
        notes: a line each: how the weights are read, and how images are resized.
    """
    found, licence = order.found, order.options.data_licence
    config = found.weights.config
    scored = list(_results(order))
    lines = [
        *_head(to, licence),
        f"# Weights of {found.weights.meta.get('format', 'vitctl')}",
        "",
        f"An image classifier ({type(config).__name__.removesuffix('Config')}, {config.num_classes:,} "
        f"classes, images of "
        f"{config.image_size} pixels), written by vitctl {__version__} from `{found.path}`.",
        "",
        *(f"- {line}" for line in (_OPENED.get(to, ""), *notes, assumed_line(found.assumed)) if line),
        "",
        "## Results",
        "",
        *(scored or ["None is known of exactly these weights: score them with `vitctl evaluate`."]),
        "",
        "## Made of",
        "",
        f"- weights: SHA-256 of the names, types and values of their tensors (not of a file) "
        f"`{found.weights.digest}`",
        *(f"- {line}" for line in _data(found)),
        f"- licence of the images: {licence or 'not known; it may bind what these weights are used for'}",
    ]
    return "\n".join(map(one_line, lines)) + "\n"


def _head(to: str, licence: str) -> list[str]:
    if to not in _LIBRARIES:
        return []
    said = (
        [f"license_name: {json.dumps(one_line(licence), ensure_ascii=False)}", "license: other"]
        if licence
        else []
    )
    tags = ["tags:", "- image-classification", "- vision-transformer", "- vitctl"]
    return [
        "---",
        f"library_name: {_LIBRARIES[to]}",
        "pipeline_tag: image-classification",
        *tags,
        *said,
        "---",
        "",
    ]


def _results(order: Order) -> Iterator[str]:
    """A table of the accuracies that are of these weights: the run's own, and that on the images given."""
    rows = []
    own = _own_result(order.found)
    given = order.images.source.digest if order.images is not None else ""
    if own and own["metrics"].get("total") and isinstance(own["metrics"].get("accuracy"), float):
        used, numbers = own["provenance"], own["metrics"]
        if used.get("data_sha256") != given:
            rows.append(
                (
                    f"{used.get('split', '')} of {used.get('data_source', '')}",
                    numbers,
                    used.get("data_sha256", ""),
                )
            )
    if order.images is not None:
        rows.append((order.images.where, order.own_score().numbers, given))
    if rows:
        yield from (
            "| images | top-1 | correct | of | digest of images and labels |",
            "|---|---|---|---|---|",
        )
    for name, numbers, digest in rows:
        cells = (
            name,
            f"{numbers['accuracy']:.2%}",
            f"{numbers['correct']:,}",
            f"{numbers['total']:,}",
            f"`{digest}`",
        )
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _data(found: FoundWeights) -> Iterator[str]:
    own = _own_result(found)
    if own and "train_sha256" in own["provenance"]:
        used = own["provenance"]
        yield (
            f"trained on {used.get('num_train', 0):,} images, {used.get('train_split', '')} of "
            f"{used.get('train_source', '')}, "
            f"SHA-256 `{used['train_sha256']}`"
        )


def _own_result(found: FoundWeights) -> dict[str, Any]:
    """The result of the run that the weights are of, if it is the result of these weights; else empty."""
    run = run_of(found.path)
    try:
        result = None if run is None else read_result(run)
    except CheckpointError:
        return {}
    if result is None or result.provenance.get("weights_sha256") != found.weights.digest:
        return {}
    return {"metrics": result.metrics, "provenance": result.provenance}
