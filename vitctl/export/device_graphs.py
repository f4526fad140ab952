"""Graphs for the runtimes of boards and phones: OpenVINO, ExecuTorch and LiteRT.

Their runtimes compute in float32, where the pre-processing of `Preprocess` would round other pixels, so
these graphs take prepared squares.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile, ZipInfo

import numpy as np
import torch
from torch import Tensor

from vitctl.errors import CheckpointError
from vitctl.export.export import ExportRequest, Written, partial_folder
from vitctl.export.graph import INPUT, Raw, folded
from vitctl.export.graph_files import PROGRAM_METADATA, program_metadata, quiet, trace
from vitctl.export.proof import Opened, answering
from vitctl.system.process import installed
from vitctl.system.text import one_line

_SHOWN = 300  # letters of another program's error


def write_openvino(request: ExportRequest, folder: Path) -> Written:
    """Write NAME.xml and the weights NAME.bin, with class names and pre-processing in the XML's `rt_info`."""
    file = folder / f"{request.name}.xml"
    with partial_folder(request.run_dir, "float32") as aside, _foreign("openvino", file):
        openvino = _openvino()
        full = aside / f"{request.name}.onnx"
        trace(request.model, full, {})
        model = openvino.Core().read_model(full)
        model.set_rt_info(json.dumps(program_metadata(request)), ["vitctl"])
        openvino.save_model(model, file, compress_to_fp16=False)
    text = (
        "openvino.Core().compile_model(FILE, 'CPU', {'INFERENCE_PRECISION_HINT': 'f32'})(images) gives "
        f"{' and '.join(request.model.outputs)}; without the hint it computes in bf16 where the CPU has that"
    )
    return Written(file, (text,))


def open_openvino(_request: ExportRequest, path: Path) -> Opened:
    """Return an OpenVINO file as OpenVINO runs it on the CPU in float32, with answers by its metadata."""
    with _foreign("openvino", path):
        core = _openvino().Core()
        model = core.read_model(path)
        told = model.get_rt_info(["vitctl"]).astype(str)
        compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def run(images: Tensor) -> list[np.ndarray]:
        return [np.array(value) for value in compiled(images.numpy()).values()]

    return _opened("openvino", path, run, told)


def _openvino() -> Any:
    """Return the module, which would report its import to its maker."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    return import_module("openvino")


def write_executorch(request: ExportRequest, folder: Path) -> Written:
    """Write NAME.pte for one image a call, in XNNPACK's kernels, with `vitctl.json` after the program."""
    file = folder / f"{request.name}.pte"
    with _foreign("executorch", file):
        from executorch.backends.xnnpack.partition.config import ALL_PARTITIONER_CONFIGS
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower

        program = torch.export.export(*_one_image(request.model))
        # XNNPACK computes the GELU with tanh as the exact one, 3e-4 away; ExecuTorch's own kernel has both.
        is_exact = not any(node.kwargs.get("approximate") == "tanh" for node in program.graph.nodes)
        rules = [rule for rule in ALL_PARTITIONER_CONFIGS if is_exact or rule.target_name != "gelu.default"]
        lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner(configs=rules)])
        file.write_bytes(lowered.to_executorch().buffer)
    return _with_metadata(request, file, "executorch.runtime.Runtime.get().load_program(FILE)")


def open_executorch(_request: ExportRequest, path: Path) -> Opened:
    """Return a .pte file as ExecuTorch runs it, image by image, with answers by its metadata."""
    with _foreign("executorch", path):
        from executorch.runtime import Runtime

        method = Runtime.get().load_program(path).load_method("forward")

    def run(image: Tensor) -> list[np.ndarray]:
        return [value.numpy().copy() for value in method.execute([image])]

    return _opened("executorch", path, _image_by_image(run), _metadata(path))


def write_litert(request: ExportRequest, folder: Path) -> Written:
    """Write NAME.tflite for one image a call, with `vitctl.json` after the graph.

    int8 is by ai-edge-quantizer: weights are stored in it, and activations are rounded by their range in
    each call, so that nothing is calibrated.
    """
    file = folder / f"{request.name}.tflite"
    with _foreign("litert-torch", file):
        model, (image,) = _one_image(request.model)
        import_module("litert_torch").convert(model, sample_kwargs={INPUT: image}).export(str(file))
    if request.precision == "int8":
        with _foreign("ai-edge-quantizer", file):
            rules = import_module("ai_edge_quantizer.recipe").dynamic_wi8_afp32()
            narrower = import_module("ai_edge_quantizer.quantizer").Quantizer(str(file), rules)
            file.write_bytes(narrower.quantize().quantized_model)
    return _with_metadata(request, file, "ai_edge_litert.interpreter.Interpreter(FILE)")


def open_litert(_request: ExportRequest, path: Path) -> Opened:
    """Return a .tflite file as LiteRT runs it, image by image, with answers by its metadata."""
    with _foreign("ai-edge-litert", path):
        interpreter = import_module("ai_edge_litert.interpreter").Interpreter(str(path), num_threads=1)
        interpreter.allocate_tensors()
    [place], outputs = interpreter.get_input_details(), interpreter.get_output_details()

    def run(image: Tensor) -> list[np.ndarray]:
        interpreter.set_tensor(place["index"], image.numpy())
        interpreter.invoke()
        return [interpreter.get_tensor(output["index"]) for output in outputs]

    return _opened("ai-edge-litert", path, _image_by_image(run), _metadata(path))


def _one_image(model: Raw) -> tuple[Raw, tuple[Tensor]]:
    return folded(model.traced()), (model.example(1),)


def _image_by_image(run: Callable[[Tensor], Sequence[np.ndarray]]) -> Callable[[Tensor], list[np.ndarray]]:
    """Return a run of any batch size, of a graph that takes one image."""

    def of_batch(images: Tensor) -> list[np.ndarray]:
        return [np.concatenate(rows) for rows in zip(*map(run, torch.split(images, 1)), strict=True)]

    return of_batch


def _with_metadata(request: ExportRequest, file: Path, opened: str) -> Written:
    """Append `vitctl.json` as a zip archive, which runtimes pass over and any unzip reads."""
    with ZipFile(file, "a") as archive:
        archive.writestr(ZipInfo(PROGRAM_METADATA), json.dumps(program_metadata(request)))
    size = request.model.model.config.image_size
    text = f"{opened} takes one image, uint8 [1, 3, {size}, {size}], and gives"
    return Written(
        file, (f"{text} {' and '.join(request.model.outputs)}; `unzip -p FILE {PROGRAM_METADATA}`",)
    )


def _metadata(path: Path) -> str:
    with ZipFile(path) as archive:
        return archive.read(PROGRAM_METADATA).decode()


def _opened(package: str, path: Path, run: Callable[[Tensor], Sequence[np.ndarray]], metadata: str) -> Opened:
    def guarded(images: Tensor) -> Sequence[np.ndarray]:
        with _foreign(package, path):
            return run(images)

    told = json.loads(metadata)
    return Opened(guarded, answering(told | {"loss": told.get("activation")}, 1.0))


@contextmanager
def _foreign(package: str, path: Path) -> Iterator[None]:
    """Silence another program, in C++ too, and raise CheckpointError for whatever it raises."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with quiet(), redirect_stdout(StringIO()), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
            yield
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # what a converter cannot take has no class of its own
        text = one_line(str(error))[:_SHOWN] or type(error).__name__
        raise CheckpointError(
            path,
            f"{package} {installed((package,))[package]} cannot take this network ({text}); it was not kept",
            "export it with --to onnx",
        ) from error
    finally:
        os.dup2(kept, 2)
        os.close(kept)
