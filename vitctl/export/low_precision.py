"""ONNX in float16 and in int8, by onnxruntime's converters, with the range of each activation on the images
given.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnxruntime.quantization import QuantFormat, create_calibrator, quantize_static
from onnxruntime.transformers.float16 import convert_float_to_float16
from torch import Tensor

from vitctl.errors import CheckpointError
from vitctl.export.given_images import GivenImages
from vitctl.export.graph import INPUT, SCOPES, Raw
from vitctl.export.onnx_graph import has_data_beside, quiet, save

LARGEST_FLOAT16 = 65504.0
_MODULES = "pkg.torch.onnx.name_scopes"  # of a node: the modules that it lies in, outermost first
_QUANTISED = ("Conv", "Gemm", "MatMul")


class Narrowed(NamedTuple):
    """The range of each activation of a converted file, by tensor, and a line for the user."""

    ranges: dict[str, Any]
    text: str


def to_float16(full: Path, path: Path, model: Raw, given: GivenImages) -> Narrowed:
    """Write a float32 ONNX file in float16; input and outputs keep their types.

    Args:
        full: the float32 file.
        path: the file to write.
        model: what `full` is of.
        given: each of these images is looked at.

    Raises:
        CheckpointError: a weight or an activation is larger than float16 can hold; the message names its
            layer.
    """
    ranges = _ranges(full, _feeds(model, given, scored=True))
    largest = _refuse_overflow(full, ranges, path)
    graph = onnx.load(full)
    del graph.graph.value_info[:]  # it repeats weights, and the converter would convert them twice
    half = convert_float_to_float16(graph, keep_io_types=True, disable_shape_infer=True, op_block_list=[])
    save(half, path)
    return Narrowed(ranges, f"float16: {largest}; float16 ends at {LARGEST_FLOAT16:,.0f}")


def to_int8(full: Path, path: Path, model: Raw, given: GivenImages) -> Narrowed:
    """Write a float32 ONNX file whose products with weights are in int8, but for the head; see `to_float16`.

    Weights have a scale for each output, activations one for each tensor, by its range on the images of
    data.calibration_split.

    Raises:
        DataError: there are no images to calibrate on.
    """
    ranges = _ranges(full, _feeds(model, given, scored=False))
    graph = onnx.load(full, load_external_data=False).graph
    weights = {tensor.name for tensor in graph.initializer}
    quantised = [
        node.name
        for node in graph.node
        if node.op_type in _QUANTISED and weights & set(node.input) and layer_of(node) not in ("", "head")
    ]
    with quiet():
        quantize_static(
            full,
            path,
            _Reader(_feeds(model, given, scored=False)),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            op_types_to_quantize=list(_QUANTISED),
            nodes_to_quantize=quantised,
            extra_options={"MatMulConstBOnly": True},
            use_external_data_format=has_data_beside(full),
        )
    split = f"{len(given.calibration):,} images of {given.calibration_split}"
    return Narrowed(
        ranges, f"int8: {len(quantised)} products with weights, activations by their range on {split}"
    )


def layer_of(node: onnx.NodeProto) -> str:
    """The module of the network that a node belongs to, as in its state dictionary; "" before and after the
    network.
    """
    scopes = next((own.value for own in node.metadata_props if own.key == _MODULES), "")
    modules = re.findall(r"'([^']*)'", scopes)[:-1]
    return (_own_name(modules[-1]) or "network") if SCOPES[-1] in modules else ""


def _own_name(name: str) -> str:
    """A name in the graph as the network itself calls it."""
    for scope in SCOPES:
        name = name.removeprefix(scope)
    return name.removeprefix(".")


class _Reader:
    """Images one batch after the other, as onnxruntime's calibration asks for them."""

    def __init__(self, feeds: Iterable[Tensor]) -> None:
        self._feeds = iter(feeds)

    def get_next(self) -> dict[str, np.ndarray] | None:
        images = next(self._feeds, None)
        return None if images is None else {INPUT: images.numpy()}


def _feeds(model: Raw, given: GivenImages, *, scored: bool) -> Iterator[Tensor]:
    source = given.source if scored else given.calibration
    return (given.squares if model.preprocess is None else given.photographs)(source)


def _ranges(full: Path, feeds: Iterable[Tensor]) -> dict[str, Any]:
    """Smallest and largest value of each float tensor that a node gives, by tensor, in the order of the
    graph, with its layer.
    """
    with quiet():
        calibrator = create_calibrator(
            full,
            augmented_model_path=str(full.with_name("ranges.onnx")),
            use_external_data_format=has_data_beside(full),
        )
        calibrator.collect_data(_Reader(feeds))
        found = calibrator.compute_data()
    by_tensor = {
        name: [_finite(np.min(low)), _finite(np.max(high))]
        for name, data in found.items()
        for low, high in [data.range_value]
    }
    nodes = onnx.load(full, load_external_data=False).graph.node
    return {
        name: {"layer": layer_of(node), "operator": node.op_type, "range": by_tensor[name]}
        for node in nodes
        for name in node.output
        if name in by_tensor and layer_of(node)
    }


def _finite(value: float) -> float | None:
    """None for an infinity, such as the border of a max-pooling; a model that overflows in float32 does not
    get here.
    """
    return float(value) if np.isfinite(value) else None


def _refuse_overflow(full: Path, ranges: dict[str, Any], path: Path) -> str:
    """Raises CheckpointError with the first layer that float16 cannot hold; else the largest activation in
    words.
    """
    for tensor in onnx.load(full, load_external_data=False).graph.initializer:
        if tensor.data_type != onnx.TensorProto.FLOAT:
            continue
        values = onnx.numpy_helper.to_array(tensor, str(full.parent))
        largest = float(np.abs(values[np.isfinite(values)]).max(initial=0.0))
        if not largest <= LARGEST_FLOAT16:
            raise CheckpointError(_overflow(path, f"weight {_own_name(tensor.name)}", largest))
    sizes = {tensor: max(abs(value or 0.0) for value in own["range"]) for tensor, own in ranges.items()}
    for tensor, largest in sizes.items():
        if not largest <= LARGEST_FLOAT16:
            own = ranges[tensor]
            raise CheckpointError(_overflow(path, f"layer {own['layer']} ({own['operator']})", largest))
    top = max(sizes, key=lambda tensor: sizes[tensor])
    return f"the largest activation is {sizes[top]:,.4g} in {ranges[top]['layer']}"


def _overflow(path: Path, what: str, largest: float) -> str:
    return (
        f"{path}: float16 overflows in {what}: {largest:.3g}, and it ends at {LARGEST_FLOAT16:,.0f}; the "
        f"file was not kept; "
        "export it without --fp16"
    )
