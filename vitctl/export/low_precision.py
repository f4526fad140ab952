"""ONNX in float16 and int8, by onnxruntime's converters, with activation ranges on the user's images."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnxruntime.quantization import QuantFormat, create_calibrator, quantize_static
from onnxruntime.transformers.float16 import convert_float_to_float16
from torch import Tensor

from vitctl.errors import CheckpointError
from vitctl.export.graph import INPUT, SCOPES, Raw
from vitctl.export.proof import GivenImages
from vitctl.system.text import count_text

LARGEST_FLOAT16 = 65504.0
_MODULES = "pkg.torch.onnx.name_scopes"  # a node's enclosing modules, outermost first
_QUANTISED = ["Conv", "Gemm", "MatMul"]


class _Reader:
    """The user's images batch by batch, as onnxruntime requests them."""

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        self._inputs = iter(inputs)

    def get_next(self) -> dict[str, np.ndarray] | None:
        images = next(self._inputs, None)
        return None if images is None else {INPUT: images.numpy()}


def narrow(
    full: Path, path: Path, precision: str, model: Raw, given: GivenImages, most_inside: int
) -> tuple[dict[str, Any], str]:
    """Write a float32 ONNX file in float16 or int8. Its input and outputs keep their types.

    float16 checks each image that is scored. int8 covers the products with weights, except the head:
    weights have a scale for each output, activations one per tensor, by its range on
    data.calibration_split. Weights larger than `most_inside` bytes go to PATH.data. Return the range of
    each activation, and a line for the user.

    Raises:
        CheckpointError: a weight or an activation exceeds float16; the message names its layer.
        DataError: there are no images to calibrate on.
    """
    source = given.source if precision == "float16" else given.calibration
    photographs = model.preprocess is not None
    has_data = full.with_name(f"{full.name}.data").exists()
    ranges = _ranges(full, _Reader(given.inputs(source, photographs=photographs)), has_data)
    if precision == "float16":
        text = _refuse_overflow(full, ranges, path)
        graph = onnx.load(full)
        del graph.graph.value_info[:]  # it repeats weights, and the converter would convert them twice
        half = convert_float_to_float16(graph, keep_io_types=True, disable_shape_infer=True, op_block_list=[])
        beside = sum(len(tensor.raw_data) for tensor in half.graph.initializer) > most_inside
        onnx.save(half, path, save_as_external_data=beside, location=f"{path.name}.data" if beside else None)
        return ranges, f"float16: {text}; float16 ends at {LARGEST_FLOAT16:,.0f}"
    graph = onnx.load(full, load_external_data=False).graph
    weights = {tensor.name for tensor in graph.initializer}
    quantised = [
        node.name
        for node in graph.node
        if node.op_type in _QUANTISED and weights & set(node.input) and layer_of(node) not in ("", "head")
    ]
    quantize_static(
        full,
        path,
        _Reader(given.inputs(source, photographs=photographs)),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        op_types_to_quantize=_QUANTISED,
        nodes_to_quantize=quantised,
        extra_options={"MatMulConstBOnly": True},
        use_external_data_format=has_data,
    )
    where = f"{count_text(len(source), 'image')} of {given.calibration_split}"
    return ranges, f"int8: {len(quantised)} products with weights, activations by their range on {where}"


def layer_of(node: onnx.NodeProto) -> str:
    """Return a node's module, named as in the state dictionary; "" before and after the network."""
    scopes = next((entry.value for entry in node.metadata_props if entry.key == _MODULES), "")
    modules = re.findall(r"'([^']*)'", scopes)[:-1]
    return (_in_network(modules[-1]) or "network") if SCOPES[-1] in modules else ""


def _in_network(name: str) -> str:
    for scope in SCOPES:
        name = name.removeprefix(scope)
    return name.removeprefix(".")


def _ranges(full: Path, reader: _Reader, has_data: bool) -> dict[str, Any]:
    """Return layer, operator, minimum and maximum of each float output of a node, in graph order.

    An infinity, such as the border of a max-pooling, is None.
    """
    augmented = str(full.with_name("ranges.onnx"))
    calibrator = create_calibrator(full, augmented_model_path=augmented, use_external_data_format=has_data)
    calibrator.collect_data(reader)
    by_tensor = {name: data.range_value for name, data in calibrator.compute_data().items()}
    ranges = {}
    for node in onnx.load(full, load_external_data=False).graph.node:
        for name in node.output:
            if name in by_tensor and (layer := layer_of(node)):
                low, high = by_tensor[name]
                values = float(np.min(low)), float(np.max(high))
                shown = [value if np.isfinite(value) else None for value in values]
                ranges[name] = {"layer": layer, "operator": node.op_type, "range": shown}
    return ranges


def _refuse_overflow(full: Path, ranges: dict[str, Any], path: Path) -> str:
    """Return the largest activation in words. Raises CheckpointError for what float16 cannot hold."""
    sizes: list[tuple[str, float]] = []
    for tensor in onnx.load(full, load_external_data=False).graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            values = onnx.numpy_helper.to_array(tensor, str(full.parent))
            largest = float(np.abs(values[np.isfinite(values)]).max(initial=0.0))
            sizes.append((f"weight {_in_network(tensor.name)}", largest))
    activations = [(max(abs(value or 0.0) for value in row["range"]), row) for row in ranges.values()]
    sizes += [(f"layer {row['layer']} ({row['operator']})", largest) for largest, row in activations]
    for name, largest in sizes:
        if not largest <= LARGEST_FLOAT16:
            raise CheckpointError(
                path,
                f"float16 overflows in {name}: {largest:.3g}, above its maximum of "
                f"{LARGEST_FLOAT16:,.0f}; the file was not kept",
                "export it without --fp16",
            )
    largest, row = max(activations, key=lambda pair: pair[0])
    return f"the largest activation is {largest:,.4g} in {row['layer']}"
