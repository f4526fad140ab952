"""The formats of `vitctl export`: one row each, without torch.

The command, its completion, the recipe, the writer, the proof, model cards, errors and docs/weights.md use
these rows. To add a format, add a row here and the functions that it names.
"""

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from vitctl.data.images.transforms import EvalResample, EvalTransform

_GRAPH, _WEIGHTS = "vitctl.export.graph_files", "vitctl.export.weights_folder"
_DEVICE = "vitctl.export.device_graphs"
_PIPELINE = ("transformers", "vitctl.export.other_programs:open_pipeline")
_REPOSITORY = re.compile(r"(?!.*(--|\.\.))\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)
_PILLOW = "Pillow, with which most programs resize,"


@dataclass(frozen=True, kw_only=True)
class ExportFormat:
    """A format of export.to. The defaults are those of weights that another program reads from a folder.

    Args:
        what: description of the output, for docs/weights.md.
        writer: `module:function` that writes the file of an `ExportRequest` into a folder, and returns
            `Written`.
        prover: `module:function` that opens the written file and returns it as `Opened`.
        readers: (package, prover) of other programs; only installed ones are run.
        is_graph: the file computes, so features and the average over a mirror image can be inside.
        takes_photographs: pre-processing can be inside too, which needs float64 and free sizes.
        requires: modules that writer and prover import, of the extra with the format's name.
        in_folder: written into a folder with a model card, not into the run folder.
        reader: the program that reads it, as the subject of "... resizes by ...".
        resizing: how that program resizes images, as far as the format can express it.
        library: name of the reader on Hugging Face's hub, if the hub has a button for it.
        usage: how the reader opens the folder, for the model card.
    """

    name: str
    ending: str
    what: str
    writer: str = f"{_WEIGHTS}:write_weights_file"
    prover: str = f"{_WEIGHTS}:open_weights_file"
    readers: tuple[tuple[str, str], ...] = ()
    is_graph: bool = False
    takes_photographs: bool = False
    precisions: tuple[str, ...] = ("float32",)
    requires: tuple[str, ...] = ()
    in_folder: bool = True
    reader: str = ""
    resizing: Literal["as scored", "pillow", "square", "square, no antialias", "timm", "torchvision"]
    library: str = ""
    usage: str = ""

    def place(self, run_dir: Path) -> Path:
        """Return the folder, or the file with its usual name, that an export writes into a run folder."""
        return run_dir / (self.name if self.in_folder else f"model{self.ending}")


_ROWS = (
    ExportFormat(
        name="onnx",
        ending=".onnx",
        what="a graph from uint8 images to logits, any batch size, normalisation included; metadata; a short "
        "program that runs it",
        writer=f"{_GRAPH}:write_onnx",
        prover=f"{_GRAPH}:open_onnx",
        is_graph=True,
        takes_photographs=True,
        precisions=("float32", "float16", "int8"),
        in_folder=False,
        reader=_PILLOW,
        resizing="pillow",
    ),
    ExportFormat(
        name="pt2",
        ending=".pt2",
        what="the same graph as a `torch.export` program",
        writer=f"{_GRAPH}:write_program",
        prover=f"{_GRAPH}:open_program",
        is_graph=True,
        takes_photographs=True,
        in_folder=False,
        reader=_PILLOW,
        resizing="pillow",
    ),
    ExportFormat(
        name="openvino",
        ending=".xml",
        what="the graph of `onnx` for Intel's OpenVINO, an `.xml` with its weights in a `.bin`",
        writer=f"{_DEVICE}:write_openvino",
        prover=f"{_DEVICE}:open_openvino",
        is_graph=True,
        requires=("openvino",),
        in_folder=False,
        reader=_PILLOW,
        resizing="pillow",
    ),
    ExportFormat(
        name="executorch",
        ending=".pte",
        what="a program for phones: ExecuTorch with XNNPACK, one image a call",
        writer=f"{_DEVICE}:write_executorch",
        prover=f"{_DEVICE}:open_executorch",
        is_graph=True,
        requires=("executorch",),
        in_folder=False,
        reader=_PILLOW,
        resizing="pillow",
    ),
    ExportFormat(
        name="litert",
        ending=".tflite",
        what="a graph for phones: LiteRT, which was TensorFlow Lite, one image a call",
        writer=f"{_DEVICE}:write_litert",
        prover=f"{_DEVICE}:open_litert",
        is_graph=True,
        precisions=("float32", "int8"),
        requires=("litert_torch", "ai_edge_litert"),
        in_folder=False,
        reader=_PILLOW,
        resizing="pillow",
    ),
    ExportFormat(
        name="safetensors",
        ending=".safetensors",
        what="one file in vitctl's format",
        in_folder=False,
        resizing="as scored",
    ),
    ExportFormat(
        name="timm",
        ending=".safetensors",
        what="a folder with weights, `config.json` and a README.md",
        readers=(("timm", "vitctl.export.other_programs:open_timm"), _PIPELINE),
        reader="timm's transform",
        resizing="timm",
        library="timm",
        usage="timm.create_model('local-dir:FOLDER', pretrained=True); turn photographs upright first, with "
        "PIL.ImageOps.exif_transpose",
    ),
    ExportFormat(
        name="hf",
        ending=".safetensors",
        what="a folder with weights, `config.json`, `preprocessor_config.json` and a README.md",
        readers=(_PIPELINE,),
        reader="transformers' image processor",
        resizing="square",
        library="transformers",
        usage="transformers.pipeline('image-classification', FOLDER)",
    ),
    ExportFormat(
        name="peft",
        ending=".safetensors",
        what="of a run with `[lora]`: a folder with adapters and head, `adapter_config.json`, `config.json`, "
        "`preprocessor_config.json` and a README.md",
        writer="vitctl.export.peft_adapter:write_peft",
        prover="vitctl.export.peft_adapter:open_peft",
        reader="transformers' image processor",
        resizing="square",
        library="peft",
        usage="peft.PeftModel.from_pretrained(MODEL, FOLDER), where MODEL is transformers' "
        "ViTForImageClassification with the start weights",
    ),
    ExportFormat(
        name="torchvision",
        ending=".safetensors",
        what="a folder with a state dict and a README.md",
        readers=(("torchvision", "vitctl.export.other_programs:open_torchvision"),),
        reader="torchvision's transform",
        resizing="torchvision",
        usage="MODEL.load_state_dict(safetensors.torch.load_file('FOLDER/model.safetensors')), "
        "where MODEL is below; import functools, safetensors.torch, torch, torchvision",
    ),
    ExportFormat(
        name="google",
        ending=".npz",
        what="a folder with a `.npz` in the paper authors' format and a README.md",
        reader="the authors' code",
        resizing="square, no antialias",
        usage="numpy.load('FOLDER/model.npz'), whose arrays have the names of the authors' checkpoints",
    ),
)
FORMATS: dict[str, ExportFormat] = {row.name: row for row in _ROWS}
GRAPHS = ", ".join(row.name for row in _ROWS if row.is_graph)
RESIZING = ", ".join(row.name for row in _ROWS if row.takes_photographs)

# Operator set -> IR version that holds it, and the first onnxruntime with both: its documentation's table
# (https://onnxruntime.ai/docs/reference/compatibility.html), which ends with 21.
OPSETS = {18: (8, "1.14"), 19: (9, "1.16"), 20: (9, "1.17"), 21: (10, "1.18")}
OPSET = 20


def formats_in_words(rows: Iterable[ExportFormat] = _ROWS) -> str:
    *names, last = (row.name for row in rows)
    return f"{', '.join(names)} or {last}" if names else last


def check_options(to: Iterable[str], file: str, precision: str, inside: Iterable[str]) -> None:
    """Raise ValueError for options that the chosen formats do not have; `inside` are those of graphs."""
    chosen = [FORMATS[name] for name in to]
    lacking = [(row.name, name) for row in chosen for name in row.requires if find_spec(name) is None]
    if lacking:
        extras, packages = (list(dict.fromkeys(names)) for names in zip(*lacking, strict=True))
        missing, extra = f"to = {', '.join(extras)}: missing {', '.join(packages)}", ",".join(extras)
        raise ValueError(f"{missing}; pip install 'vitctl[{extra}]'")
    if file and len(chosen) > 1:
        raise ValueError(f"file = '{file}' takes one format; choose it with --to")
    if file and chosen[0].in_folder:
        raise ValueError(
            f"file = '{file}': weights of {chosen[0].name} alone lack what the files beside them record of "
            f"network, images and classes; name a folder, such as --out "
            f"{shlex.quote(str(Path(file).with_suffix('')))}"
        )
    for option in inside:
        takes = "takes_photographs" if option == "include_preprocess" else "is_graph"
        if not any(getattr(row, takes) for row in chosen):
            able = formats_in_words(row for row in _ROWS if getattr(row, takes))
            raise ValueError(f"{option} is for {able} alone; export to {able}, or leave it out")
    able = formats_in_words(row for row in _ROWS if precision in row.precisions)
    if not any(precision in row.precisions for row in chosen):
        raise ValueError(f"precision = '{precision}' is for {able} alone; export to {able}, or leave it out")


def check_onnx(to: Iterable[str], opset: int, web: bool, inside: Iterable[str]) -> None:
    """Raise ValueError for an operator set that the writer of onnx does not have, or options without onnx."""
    if opset not in OPSETS:
        raise ValueError(f"opset = {opset} should be one of {', '.join(map(str, OPSETS))}")
    for option in ["opset"] * (opset != OPSET) + ["web"] * web:
        if "onnx" not in to:
            raise ValueError(f"{option} is for onnx alone; export to onnx, or leave it out")
    if web and "include_preprocess" not in inside:
        raise ValueError("web needs the pre-processing inside the file; add --include-preprocess")


def check_push(to: Iterable[str], push: str, public: bool) -> None:
    """Raise ValueError unless `push` names a repository, and one of the formats is a folder for a hub."""
    chosen = [name for name in to if FORMATS[name].library]
    if push and not _REPOSITORY.fullmatch(push):
        raise ValueError(f"push = '{push}' should be ORGANISATION/NAME or ACCOUNT/NAME")
    if push and len(chosen) != 1:
        able = formats_in_words(row for row in _ROWS if row.library)
        raise ValueError(f"push = '{push}' takes one folder with a model card: choose {able} with --to")
    if public and not push:
        raise ValueError("public is for push alone; add --push ORGANISATION/NAME, or leave it out")


def readers_transform(row: ExportFormat, ours: "EvalTransform") -> "EvalTransform":
    """Return the pre-processing of the program that reads a format, for weights scored with `ours`."""
    antialias: EvalResample = "bilinear_antialias" if ours.resample in ("bilinear", "area") else ours.resample
    square = replace(ours, method="square", resize=ours.image_size, resample=antialias)
    match row.resizing:
        case "as scored":
            return ours
        case "square":
            return square
        case "square, no antialias":
            return replace(square, resample="bilinear")
        case "timm" if ours.method == "square":
            return square
        case "timm" if ours.method == "letterbox":
            return replace(ours, resample=antialias)
        case "timm" | "torchvision" if ours.method != "square":
            return replace(ours, method="torchvision", resample=antialias)
        case _:
            return replace(ours, resample=antialias)
