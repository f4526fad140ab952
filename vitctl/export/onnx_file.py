"""The ONNX file of an export, in float32, float16 or int8, verified, with a program beside it that runs it."""

import json

from vitctl.export.low_precision import Narrowed, to_float16, to_int8
from vitctl.export.onnx_graph import described, open_onnx, trace
from vitctl.export.proof import TOLERANCE, agree
from vitctl.export.sample import sample
from vitctl.export.written import Exported, Order, kept, partial_folder

_NARROW = {"float16": to_float16, "int8": to_int8}
_INF = float("inf")


def write_onnx(order: Order) -> Exported:
    """Write NAME.onnx, NAME.py that runs it, and in a lower precision NAME.ranges.json with the range of each
    activation.

    Args:
        order: what is wanted.

    Returns:
        the file, verified by onnxruntime on noise in batches of each size, and on the images given.

    Raises:
        CheckpointError: the written file disagrees with the model or loses accuracy, or float16 overflows; no
            file is kept.
    """
    path, precision = order.run_dir / f"{order.name}.onnx", order.options.precision
    with partial_folder(order.run_dir, "onnx") as aside, partial_folder(order.run_dir, "float32") as full:
        file, lines = aside / path.name, []
        trace(order.model, (aside if precision == "float32" else full) / path.name, _metadata(order))
        if precision != "float32":
            assert order.images is not None  # by the recipe
            narrowed: Narrowed = _NARROW[precision](full / path.name, file, order.model, order.images)
            (aside / f"{order.name}.ranges.json").write_text(json.dumps(narrowed.ranges, indent=1) + "\n")
            lines.append(narrowed.text)
        run = open_onnx(file)
        tolerance = TOLERANCE if precision == "float32" else _INF
        difference = agree(file, order.model, order.options.batch_sizes, run, tolerance)
        scores = order.scores(file, run)
        (aside / f"{order.name}.py").write_text(sample(order.found.weights.meta, order.model))
        notes = (described(file), *scores.lines, *lines, *order.resizing_note)
        return kept(aside, Exported(path, difference, notes, scores.numbers))


def _metadata(order: Order) -> dict[str, str]:
    weights = order.found.weights
    meta = {key: value for key, value in weights.meta.items() if key != "class_names"}
    notes = {
        "class_names": json.dumps(weights.meta.get("class_names", [])),
        "preprocessing": json.dumps(meta),
        "input": "squares" if order.model.preprocess is None else "photographs",
        "producer": "vitctl",
        "weights_sha256": weights.digest,
    }
    return notes | ({"resizing": order.resizing.note} if order.resizing else {})
