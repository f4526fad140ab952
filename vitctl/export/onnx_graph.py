"""ONNX graphs: traced from a model, written with their weights, and run."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor

from vitctl.errors import CheckpointError
from vitctl.export.folded import folded
from vitctl.export.graph import INPUT, Raw
from vitctl.export.proof import Run

OPSET = 20
# One file of ONNX cannot be larger than 2 GiB; above this, weights lie in a file beside it.
MOST_BYTES_INSIDE = 2**31 - 2**26


def trace(model: Raw, path: Path, notes: dict[str, str]) -> None:
    """Write a model as an ONNX file, whose batch size is free.

    Args:
        model: in evaluation mode, float32.
        path: the file; larger weights go to PATH.data.
        notes: metadata of the file.
    """
    with quiet():
        program = torch.onnx.export(
            folded(model.traced()),
            (model.example(2),),
            input_names=[INPUT],
            output_names=model.outputs,
            dynamic_shapes=(model.free_sizes(),),
            dynamo=True,
            opset_version=OPSET,
            verbose=False,
        )
    assert program is not None
    program.model.metadata_props.update(notes)
    weights = [value.const_value for value in program.model.graph.initializers.values()]
    size = sum(weight.nbytes for weight in weights if weight is not None)
    program.save(path, external_data=size > MOST_BYTES_INSIDE)


def save(graph: onnx.ModelProto, path: Path) -> None:
    """Write a graph; larger weights go to PATH.data."""
    size = sum(len(tensor.raw_data) for tensor in graph.graph.initializer)
    beside = size > MOST_BYTES_INSIDE
    onnx.save(graph, path, save_as_external_data=beside, location=f"{path.name}.data" if beside else None)


def has_data_beside(path: Path) -> bool:
    """Whether the weights of an ONNX file lie in a file beside it."""
    return path.with_name(f"{path.name}.data").exists()


def described(path: Path) -> str:
    """The operator set of a file, and its inputs and outputs with their free axes."""
    file = onnx.load(path, load_external_data=False)
    opset = next(own.version for own in file.opset_import if own.domain in ("", "ai.onnx"))
    inputs, outputs = (", ".join(map(_in_words, values)) for values in (file.graph.input, file.graph.output))
    return f"opset {opset}; {inputs} -> {outputs}"


def _in_words(value: onnx.ValueInfoProto) -> str:
    tensor = value.type.tensor_type
    shape = ", ".join(axis.dim_param or str(axis.dim_value) for axis in tensor.shape.dim)
    return f"{value.name} {onnx.TensorProto.DataType.Name(tensor.elem_type).lower()} [{shape}]"


def open_onnx(path: Path) -> Run:
    """An ONNX file as onnxruntime runs it on the CPU. Raises CheckpointError where it cannot be opened."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own kinds share no base
        said = str(error).splitlines()[0]
        raise CheckpointError(f"{path}: onnxruntime cannot open it ({said}); it was not kept") from error

    def run(images: Tensor) -> list[np.ndarray]:
        return list(session.run(None, {INPUT: images.numpy()}))

    return run


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of exporters and converters, which are about their own insides."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
