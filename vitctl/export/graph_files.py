"""Graphs as files: ONNX with a short program that runs it, and `torch.export` programs."""

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor

from vitctl.errors import CheckpointError
from vitctl.export.export import ExportRequest, Written, partial_folder
from vitctl.export.graph import INPUT, LOGITS, Raw, folded
from vitctl.export.low_precision import narrow
from vitctl.export.proof import Opened, answering, run_model
from vitctl.export.resizing import stored_transform
from vitctl.jobs.photo_page import photo_page
from vitctl.models.weights.meta import activation_of
from vitctl.recipe.export_formats import OPSET, OPSETS
from vitctl.system.files import write_text

# An ONNX file is limited to 2 GiB; above this size, weights go to a second file.
MOST_BYTES_INSIDE = 2**31 - 2**26
PROGRAM_METADATA = "vitctl.json"  # among torch's extra files
# Pillow's bilinear filter always has antialias.
_PILLOW = {"bilinear": "BILINEAR", "bilinear_antialias": "BILINEAR"}
# Lines of the sample program, by activation.
_PROBABILITIES = {
    "softmax": "likely = numpy.exp(logits - numpy.logaddexp.reduce(logits))  # softmax",
    "sigmoid": "likely = numpy.exp(-numpy.logaddexp(0, -logits))  # sigmoid: each class has its own",
}
_PILLOW |= {"bicubic_antialias": "BICUBIC", "area": "BOX"}


def write_onnx(request: ExportRequest, folder: Path) -> Written:
    """Write NAME.onnx, NAME.py that runs it, and in lower precision NAME.ranges.json with activations.

    Raises CheckpointError if float16 overflows.
    """
    file, notes = folder / f"{request.name}.onnx", []
    with partial_folder(request.run_dir, "float32") as aside, quiet():
        full = file if request.precision == "float32" else aside / file.name
        trace(request.model, full, _metadata(request), request.options.opset)
        if full != file:
            assert request.images is not None  # the recipe requires them
            ranges, text = narrow(
                full, file, request.precision, request.model, request.images, MOST_BYTES_INSIDE
            )
            (folder / f"{request.name}.ranges.json").write_text(json.dumps(ranges, indent=1) + "\n")
            notes.append(text)
    (folder / f"{request.name}.py").write_text(sample_program(_described(request), request.model))
    if request.options.web:
        write_web_page(request, file)
        notes.append(f"the page needs onnxruntime-web beside it: {_ORT_WEB}; then python -m http.server")
    return Written(file, (described(file), *notes))


# The runtime for the page, from npm, into this folder.
_ORT_WEB = "npm pack onnxruntime-web && tar xzf onnxruntime-web-*.tgz --strip-components=2 " + " ".join(
    f"package/dist/ort{name}"
    for name in (".wasm.min.js", *(f"-wasm-simd-threaded.{end}" for end in ("mjs", "wasm")))
)


def write_web_page(request: ExportRequest, file: Path) -> None:
    """Write NAME.html, which runs the file in a browser and asks nobody but its own folder.

    Raises CheckpointError without classes, and for weights beside the file: too large for a browser.
    """
    has_data = file.with_name(f"{file.name}.data").exists()
    if has_data or request.model.model.head is None:
        what = "is too large for a browser" if has_data else "has no classes to show on a page"
        raise CheckpointError(file, f"{what}; it was not kept", "leave out --web")
    meta = _described(request)
    facts = {
        "file": file.name,
        "names": meta.get("class_names", []),
        "activation": meta.get("activation"),
        "upright": meta.get("exif_orientation") is not False,
        "install": _ORT_WEB,
    }
    note = "Nothing leaves this page: the network runs in the browser."
    runtime = '<script src="ort.wasm.min.js"></script>'
    write_text(file.with_suffix(".html"), photo_page(facts, note=note, runtime=runtime))


def open_onnx(_request: ExportRequest, path: Path) -> Opened:
    """Return an ONNX file as onnxruntime runs it on the CPU, with answers by its metadata.

    Raises CheckpointError if it cannot be opened.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no common base class
        text = str(error).splitlines()[0]
        raise CheckpointError(path, f"onnxruntime cannot open it ({text}); it was not kept") from error

    def run(images: Tensor) -> list[np.ndarray]:
        return list(session.run(None, {INPUT: images.numpy()}))

    told = session.get_modelmeta().custom_metadata_map
    meta = {"class_names": json.loads(told["class_names"]), "loss": told.get("activation")}
    return Opened(run, answering(meta, 1.0))


_ONNX_TRACE = "pkg.torch.onnx.stack_trace"


def trace(model: Raw, path: Path, metadata: dict[str, str], opset: int = OPSET) -> None:
    """Write a float32 model as ONNX with a free batch size; large weights go to PATH.data."""
    program = torch.onnx.export(
        folded(model.traced()),
        (model.example(2),),
        input_names=[INPUT],
        output_names=model.outputs,
        dynamic_shapes=(model.free_sizes(),),
        dynamo=True,
        opset_version=opset,
        verbose=False,
    )
    assert program is not None
    program.model.ir_version = OPSETS[opset][0]
    program.model.metadata_props.update(metadata)
    for node in program.model.graph.all_nodes():
        node.metadata_props.pop(_ONNX_TRACE, None)  # with paths of this machine
    weights = [value.const_value for value in program.model.graph.initializers.values()]
    size = sum(weight.nbytes for weight in weights if weight is not None)
    program.save(path, external_data=size > MOST_BYTES_INSIDE)


def described(path: Path) -> str:
    """Return the operator set of an ONNX file, who reads it, and its inputs and outputs with free axes."""
    file = onnx.load(path, load_external_data=False)
    opset = next(entry.version for entry in file.opset_import if entry.domain in ("", "ai.onnx"))
    inputs, outputs = (", ".join(map(_in_words, values)) for values in (file.graph.input, file.graph.output))
    readers = (since for number, (ir, since) in OPSETS.items() if number >= opset and ir >= file.ir_version)
    return f"opset {opset}, for onnxruntime {next(readers)} or newer; {inputs} -> {outputs}"


def _in_words(value: onnx.ValueInfoProto) -> str:
    tensor = value.type.tensor_type
    shape = ", ".join(axis.dim_param or str(axis.dim_value) for axis in tensor.shape.dim)
    return f"{value.name} {onnx.TensorProto.DataType.Name(tensor.elem_type).lower()} [{shape}]"


def _metadata(request: ExportRequest) -> dict[str, str]:
    weights, meta = request.found.weights, _described(request)
    return {
        "class_names": json.dumps(meta.pop("class_names", [])),
        **({"activation": meta.pop("activation")} if "activation" in meta else {}),
        "preprocessing": json.dumps(meta),
        "input": "squares" if request.model.preprocess is None else "photographs",
        "producer": "vitctl",
        "precision": request.options.precision,
        **({"flip_average": "true"} if request.options.flip_average else {}),
        "weights_sha256": weights.digest,
        **({"licence": weights.meta["licence"]} if weights.meta.get("licence") else {}),
        **({"resizing": request.resizing.note} if request.resizing else {}),
    }


def _described(request: ExportRequest) -> dict[str, Any]:
    """Return the weights' metadata with the activation for their logits, or with "none" as head."""
    meta, rows = request.found.weights.meta, request.found.weights.config.num_classes
    return meta | ({"activation": activation_of(meta, rows)} if rows else {"head": "none"})


def sample_program(meta: dict[str, Any], model: Raw) -> str:
    """Return a short Python program that prints a photograph's best classes, or features without a head.

    `meta` is that of the weights, with the activation.
    """
    opened = "Image.open(sys.argv[1])"
    if meta.get("exif_orientation") is not False:  # the default of `vitctl predict`
        opened = f"ImageOps.exif_transpose({opened})"
    inside, output = model.preprocess is not None, model.outputs[0]
    lines = [
        "import json, pathlib, sys",
        "import numpy, onnxruntime",
        f"from PIL import Image{', ImageOps' if 'ImageOps' in opened else ''}",
        'if len(sys.argv) != 2: sys.exit(f"usage: python {sys.argv[0]} PHOTOGRAPH")',
        'session = onnxruntime.InferenceSession(pathlib.Path(__file__).with_suffix(".onnx"))',
        f'image = {opened}.convert("RGB")',
        *([] if inside or "eval_method" not in meta else _resizing_lines(meta)),
        f'[{output}] = session.run(["{output}"], {{"images": numpy.asarray(image)[None]'
        f"{'' if inside else '.transpose(0, 3, 1, 2)'}}})[0]",
    ]
    ranked = [
        'names = json.loads(session.get_modelmeta().custom_metadata_map["class_names"])',
        _PROBABILITIES.get(meta.get("activation", ""), ""),
        'for number in (-logits).argsort(kind="stable")[:5]:',
        '    print(f"{likely[number]:8.4f}", names[number] if names else number)',
    ]
    return "\n".join(lines + (ranked if output == LOGITS else ["print(*features)"])) + "\n"


def _resizing_lines(meta: dict[str, Any]) -> list[str]:
    transform = stored_transform(meta)
    size, side = transform.image_size, transform.resize
    rule = f"Image.Resampling.{_PILLOW.get(transform.resample, transform.resample.upper())}"
    if transform.method == "letterbox":
        return [
            f"scale = max(image.size) / {size}",
            f"whole = image.resize([max(1, round(side / scale)) for side in image.size], {rule})",
            f'image = Image.new("RGB", ({size}, {size}), {transform.fill})',
            f"image.paste(whole, tuple(({size} - side) // 2 for side in whole.size))",
        ]
    new_size = f"({side}, {side})"
    if transform.method == "shorter_side":
        new_size = f"[round(side * {side} / min(image.size)) for side in image.size]"
    elif transform.method in ("torchvision", "transformers"):
        new_size = f"[int({side} * side / min(image.size)) for side in image.size]"
    resized = f"image = image.resize({new_size}, {rule})"
    if transform.method == "square" and side == size:
        return [resized]
    margin = f"round((side - {size}) / 2)" if transform.method == "torchvision" else f"(side - {size}) // 2"
    return [
        resized,
        f"left, top = ({margin} for side in image.size)",
        f"image = image.crop((left, top, left + {size}, top + {size}))",
    ]


def write_program(request: ExportRequest, folder: Path) -> Written:
    """Write NAME.pt2, with class names and pre-processing as the extra file `vitctl.json`.

    `torch.export.load(FILE).module()` runs it without vitctl.
    """
    file, model = folder / f"{request.name}.pt2", request.model.traced()
    with quiet():
        program = torch.export.export(model, (model.example(2),), dynamic_shapes=(model.free_sizes(),))
        for module in program.graph_module.modules():
            for node in getattr(module, "graph", torch.fx.Graph()).nodes:
                node.meta.pop("stack_trace", None)  # with paths of this machine
        torch.export.save(
            program, file, extra_files={PROGRAM_METADATA: json.dumps(program_metadata(request))}
        )
    outputs, axes = " and ".join(model.outputs), ", ".join(model.free_axes)
    text = f"torch.export.load(FILE).module()(images) gives {outputs}; free axes: {axes}"
    return Written(file, (text,))


def program_metadata(request: ExportRequest) -> dict[str, Any]:
    """Return what `vitctl.json` holds: class names, pre-processing, activation, the digest of the weights."""
    meta = _described(request) | {"weights_sha256": request.found.weights.digest}
    return meta | ({"flip_average": True} if request.options.flip_average else {})


def open_program(_request: ExportRequest, path: Path) -> Opened:
    """Return a `torch.export` program as torch runs it, with answers by its metadata."""
    extra = {PROGRAM_METADATA: ""}
    with quiet():
        run = run_model(torch.export.load(path, extra_files=extra).module())
    told = json.loads(extra[PROGRAM_METADATA])
    return Opened(run, answering(told | {"loss": told.get("activation")}, 1.0))


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings of exporters and converters about their internals."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
