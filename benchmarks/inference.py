"""Inference of ViT-S/16 and B/16 at 224 on a CPU beside timm's: `python benchmarks/inference.py`.

Both sides have the same weights, random ones that timm drew and stored, and the same images. Ours in torch is
the network of `vitctl predict`, and our ONNX file that of `vitctl export`, as `vitctl predict model.onnx`
runs it; both take uint8 images and normalise them. timm gets normalised images. Its ONNX file is that of its
own `timm.utils.onnx_export`. Either file runs in onnxruntime and in OpenVINO, with the same threads. Logits
of all sides are compared before anything is measured. In int8 our file is that of `vitctl export --int8`,
beside the float32 files; what it costs in accuracy is told by an export of trained weights. Where torch is
told to compute with AVX2 alone, files are left out: their runtimes choose their own instructions. Of the
larger model only the settings are tried that were best for the smaller one, unless `--thorough`.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import measure
import numpy as np
from measure import (
    DEFAULT,
    Choices,
    Machine,
    Numbers,
    Row,
    answer_turns,
    clock,
    matrix_rates,
    question,
    report,
    script_options,
)
from step import TIMM_NAMES

LIBRARIES = ("torch", "timm", "onnx", "onnxruntime", "onnxscript", "openvino")
GOAL = 1.2
# The largest difference of a logit, in standard deviations of the logits, by precision.
MOST_DIFFERENT = {"float32": 1e-3, "bf16": 0.2, "int8": 1.0}
NARROWED: Choices = {
    "autocast": {"autocast": True},
    "autocast, plain attention": {"autocast": True, "plain": True},
    "autocast, compiled": {"autocast": True, "compile": True},
    "autocast, plain attention, compiled": {"autocast": True, "plain": True, "compile": True},
    "bf16 weights": {"narrow": True},
    "bf16 weights, plain attention": {"narrow": True, "plain": True},
    "bf16 weights, compiled": {"narrow": True, "compile": True},
    "bf16 weights, plain attention, compiled": {"narrow": True, "plain": True, "compile": True},
}
SIDES: dict[str, dict[str, Choices]] = {
    "float32": {
        "ours in torch": {DEFAULT: {}},
        "timm in torch": {
            DEFAULT: {},
            "plain attention": {"plain": True},
            "compiled": {"compile": True},
            "plain attention, compiled": {"plain": True, "compile": True},
        },
        "our ONNX": {DEFAULT: {}, "OpenVINO": {"openvino": True}},
        "timm's ONNX": {
            DEFAULT: {"dynamo": True},
            "TorchScript exporter": {"dynamo": False},
            "OpenVINO": {"dynamo": True, "openvino": True},
            "TorchScript exporter, OpenVINO": {"dynamo": False, "openvino": True},
        },
    },
    "bf16": {
        "ours in torch": {DEFAULT: {}},
        "timm in torch": {DEFAULT: NARROWED.pop("autocast"), **NARROWED},
        "our ONNX in OpenVINO": {DEFAULT: {"openvino": True}},
        "timm's ONNX in OpenVINO": {DEFAULT: {"dynamo": True, "openvino": True}},
    },
}
SIDES["int8"] = {
    "our int8 ONNX": {DEFAULT: {}},
    "our ONNX": SIDES["float32"]["our ONNX"],
    "timm's ONNX": SIDES["float32"]["timm's ONNX"],
}
PAIRS = {
    "float32": (
        ("ours in torch", "timm in torch", GOAL),
        ("our ONNX", "timm's ONNX", GOAL),
        ("our ONNX", "ours in torch", 1.0),
        ("our ONNX", "timm in torch", None),
    ),
    "bf16": (
        ("ours in torch", "timm in torch", GOAL),
        ("our ONNX in OpenVINO", "timm in torch", GOAL),
        ("our ONNX in OpenVINO", "timm's ONNX in OpenVINO", GOAL),
    ),
    "int8": (("our int8 ONNX", "our ONNX", None), ("our int8 ONNX", "timm's ONNX", None)),
}
Forward = Callable[[], np.ndarray]


def main() -> None:
    """Measure, print a table, and write results/inference.json."""
    if asked := question():
        answer_turns(partial(prepare, **asked))
        return
    parser = script_options(__doc__, rounds=5)
    parser.add_argument("--models", nargs="+", default=["S/16", "B/16"])
    parser.add_argument("--precisions", nargs="+", default=list(PAIRS), choices=list(PAIRS))
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--number", default="cpu", choices=["cpu", "wall"])
    parser.add_argument("--thorough", action="store_true", help="try all settings for every model")
    parser.add_argument(
        "--no-compile", action="store_true", help="leave torch.compile out, which takes a minute each"
    )
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(given.threads)  # of all processes
    machine, limits = Machine(), matrix_rates()
    rows: list[Row] = []
    choices = {precision: SIDES[precision] for precision in given.precisions}
    if measure.only_avx2():
        choices = {
            precision: {side: own for side, own in sides.items() if "ONNX" not in side}
            for precision, sides in choices.items()
            if precision != "int8"
        }
    if given.no_compile:
        choices = {precision: measure.uncompiled(sides) for precision, sides in choices.items()}
    for model in given.models:
        with tempfile.TemporaryDirectory() as folder:
            write_weights(model, given.image_size, Path(folder), in_int8="int8" in choices)
            asked = {"folder": folder, "model": model, "size": given.image_size, "batch": given.batch}
            for precision in choices:
                found = measure.compare(
                    __file__,
                    {**asked, "precision": precision},
                    choices[precision],
                    given.number,
                    given.rounds,
                )
                differences = compare_logits(Path(folder), precision)
                figure = f"inference, {model} at {given.image_size}, {given.batch} images, {precision}"
                for first, second, goal in PAIRS[precision]:
                    if not {first, second} <= choices[precision].keys():
                        continue
                    row = found.row(
                        f"{figure}, {first} and {second}", given.number, goal, sides=(first, second)
                    )
                    rows.append(row)
                    row.notes["largest_differences"] = differences
                if not given.thorough:
                    choices[precision] = {
                        side: found.narrowed(side, own) for side, own in choices[precision].items()
                    }
    report("inference", rows, machine, limits, LIBRARIES, given.results)


def write_weights(model: str, image_size: int, folder: Path, *, in_int8: bool) -> None:
    """Weights that timm drew, and the head too, in a folder of its hub; and our ONNX files of them."""
    import timm
    import torch
    from timm.models import save_for_hf

    torch.manual_seed(0)
    network = timm.create_model(TIMM_NAMES[model], img_size=image_size)
    torch.nn.init.normal_(network.head.weight, std=0.02)
    save_for_hf(network, str(folder / "timm"), safe_serialization=True)
    export = ("export", "--from", folder / "timm", "--to", "onnx", "--out")
    exports = [(*export, folder / "ours")]
    if in_int8:
        write_noise(image_size, folder / "noise")
        exports.append((*export, folder / "int8", "--int8", "--check-data", folder / "noise"))
    for words in exports:
        subprocess.run([sys.executable, "-m", "vitctl", *map(str, words)], check=True, stdout=sys.stderr)


def write_noise(image_size: int, out: Path) -> None:
    """Shards of random images: what int8 sets its ranges by, and a few to be scored."""
    from vitctl.data.datasets.readers.arrays import encode_png
    from vitctl.data.writer.intake import Item
    from vitctl.data.writer.shard_writer import write_split

    random, names = np.random.default_rng(0), [str(number) for number in range(1000)]
    for split, images in (("train", 32), ("test", 8)):
        pixels = random.integers(0, 256, (images, image_size, image_size, 3), np.uint8)
        items = [Item(f"{split}{n}", n, partial(encode_png, image)) for n, image in enumerate(pixels)]
        write_split(items, out / split, names, seed=0, source_text="noise")


def prepare(
    side: str, settings: Mapping[str, Any], folder: str, model: str, size: int, batch: int, precision: str
) -> Callable[[], Numbers]:
    """Open a side and warm it up; its logits are written into the folder. Returns what measures a turn."""
    import torch

    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (batch, 3, size, size), dtype=torch.uint8, generator=generator)
    shown = (images.float() / 255 - 0.5) / 0.5
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    place = Path(folder)
    forward = {
        "ours in torch": lambda: our_network(place / "timm", precision, images),
        "our ONNX": lambda: our_network(place / "ours" / "model.onnx", "float32", images, settings),
        "our int8 ONNX": lambda: our_network(place / "int8" / "model.onnx", "float32", images, settings),
        "our ONNX in OpenVINO": lambda: our_network(place / "ours" / "model.onnx", "bf16", images, settings),
        "timm in torch": lambda: timm_network(place / "timm", model, settings, shown),
        "timm's ONNX": lambda: timm_onnx(place, model, settings, shown),
        "timm's ONNX in OpenVINO": lambda: timm_onnx(place, model, settings, shown, "bf16"),
    }[side]()
    for _ in range(2):
        logits = forward()
    assert np.isfinite(logits).all() and logits.std() > 0
    np.save(place / f"{precision} {side}, {len(list(place.glob('*.npy')))}.npy", logits)

    def turn() -> Numbers:
        numbers: Numbers = {}
        with clock(numbers):
            forward()
        return {**numbers, "images_per_second": batch / numbers["wall"]}

    return turn


def our_network(
    source: Path, precision: str, images: Any, settings: Mapping[str, Any] = MappingProxyType({})
) -> Forward:
    """The network of `vitctl predict`, or our file in OpenVINO."""
    if settings.get("openvino"):
        return in_openvino(source, images.numpy(), precision)
    from vitctl import load_recipe
    from vitctl.jobs.inputs.classifier import open_classifier

    values = {"weights.source": str(source), "machine.device": "cpu", "machine.precision": precision}
    values |= settings
    network = open_classifier(load_recipe("evaluate", list(values.items())).recipe).network

    def forward() -> np.ndarray:
        logits = network(images).logits
        assert logits is not None
        return logits.float().numpy()

    return forward


def timm_model(weights: Path, model: str, size: int, *, exportable: bool = False) -> Any:
    """timm's model with these weights."""
    import timm

    file = str(weights / "model.safetensors")
    return timm.create_model(
        TIMM_NAMES[model], img_size=size, checkpoint_path=file, exportable=exportable
    ).eval()


def timm_network(weights: Path, model: str, settings: Mapping[str, Any], shown: Any) -> Forward:
    """timm's model in torch, as its benchmark.py runs it: autocast or bf16 weights, torch.compile; without
    gradients.
    """
    import torch
    from timm.layers import set_fused_attn

    set_fused_attn(not settings.get("plain", False))
    network = timm_model(weights, model, shown.shape[-1])
    if settings.get("narrow"):
        network, shown = network.bfloat16(), shown.bfloat16()
    if settings.get("compile"):
        torch._inductor.config.freezing = True  # packs the weights beforehand
        network = torch.compile(network)
    is_mixed = settings.get("autocast", False)

    def forward() -> np.ndarray:
        # no_grad where it is compiled: only that lets weights be frozen
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
            logits: np.ndarray = network(shown).float().numpy()
        return logits

    return forward


def timm_onnx(
    folder: Path, model: str, settings: Mapping[str, Any], shown: Any, precision: str = "float32"
) -> Forward:
    """timm's model in onnxruntime, as its onnx_export.py writes it."""
    import onnxruntime
    from timm.utils.onnx import onnx_export

    file = folder / f"timm-{settings['dynamo']}.onnx"
    network = timm_model(folder / "timm", model, shown.shape[-1], exportable=True)
    onnx_export(
        network, str(file), example_input=shown, use_dynamo=settings["dynamo"], input_names=["images"]
    )
    if settings.get("openvino"):
        return in_openvino(file, shown.numpy(), precision)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = int(os.environ["OMP_NUM_THREADS"])
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    feed = {"images": shown.numpy()}

    def forward() -> np.ndarray:
        logits: np.ndarray = session.run(None, feed)[0]
        return logits

    return forward


def in_openvino(file: Path, images: np.ndarray, precision: str) -> Forward:
    """An ONNX file in OpenVINO."""
    import openvino

    threads = int(os.environ["OMP_NUM_THREADS"])
    how = {"INFERENCE_PRECISION_HINT": precision.replace("float", "f"), "INFERENCE_NUM_THREADS": threads}
    request = openvino.Core().compile_model(file, "CPU", how).create_infer_request()
    return lambda: request.infer([images])[0]


def compare_logits(folder: Path, precision: str) -> dict[str, float]:
    """The largest difference of each side's logits from ours in torch, or from our float32 file, in standard
    deviations; ends where one is too large.
    """
    logits = {
        path.stem.rpartition(",")[0]: np.load(path) for path in sorted(folder.glob(f"{precision} *.npy"))
    }
    reference = "our ONNX" if precision == "int8" else "ours in torch"
    own = logits[f"{precision} {reference}"]
    found = {name: float(np.abs(other - own).max() / own.std()) for name, other in logits.items()}
    for name, difference in found.items():
        if not difference <= MOST_DIFFERENT[precision]:
            sys.exit(f"{name} differs from {reference} by {difference:.2g} standard deviations of the logits")
    return found


if __name__ == "__main__":
    main()
