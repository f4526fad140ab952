"""Compare a network in every exported format: `python benchmarks/formats.py > benchmarks/results/formats.md`.

Networks of published sizes with random weights are exported by `vitctl export`, so each file is verified in
its own runtime, by one thread. Formats whose packages are not installed are left out. What the columns are is
said above the table.
"""

import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch

from vitctl.models.build import build
from vitctl.models.variants import ViTConfig, variant
from vitctl.models.weights.weights_file import save_weights
from vitctl.recipe.export_formats import FORMATS
from vitctl.system.process import cpu_name

CALLS, SIZE = 20, 224
META = {
    "mean": [0.485, 0.456, 0.406],
    "std": [0.229, 0.224, 0.225],
    "image_size": SIZE,
    "eval_method": "shorter_side",
    "eval_resize": 256,
    "resample": "bicubic_antialias",
}
PACKAGES = ("torch", "onnxruntime", "openvino", "executorch", "litert-torch", "ai-edge-litert")
HEADER = "| network | format | pre-processing | deviation | MB | CPU ms an image |\n|" + "---|" * 6


def main() -> None:
    """Print the table, with its preface."""
    torch.set_num_threads(1)
    print(PREFACE.format(machine=f"{cpu_name()}, Python {platform.python_version()}", versions=versions()))
    print(HEADER)
    with tempfile.TemporaryDirectory() as folder:
        for name, source in networks(Path(folder)):
            for line in lines(name, source, False, Path(folder) / "run"):
                print(line, flush=True)
            if name == "ViT-S/16":
                for line in lines(name, source, True, Path(folder) / "run"):
                    print(line, flush=True)


def versions() -> str:
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def networks(folder: Path) -> list[tuple[str, Path]]:
    """Write the weights, and return names and files; the fine-tuning is `vitctl finetune`, two steps long."""
    plain = variant("S/16", num_classes=1000, image_size=SIZE)
    assert isinstance(plain, ViTConfig)
    rotary = replace(
        plain, position_embedding="none", rotary="dinov3", registers=4, layer_scale=0.1, gelu="erf",
        qkv_bias="qv", norm_eps=1e-5,
    )  # fmt: skip
    several = replace(plain, num_classes=20)
    drawn = [
        ("ViT-S/16", random(folder / "vit.safetensors", plain)),
        ("DINOv3 S/16, rotary tables", random(folder / "dinov3.safetensors", rotary)),
        ("ViT-S/16, 20 labels, sigmoid", random(folder / "labels.safetensors", several, loss="sigmoid")),
    ]
    tuned = folder / "lora"
    words = (
        "--dataset digits --set lora.rank=8 --steps 2 --batch-size 8 --res 224 --lr 0.1 --recipe finetune "
    )
    words += "--set data.eval_split=test[:8]"
    vitctl("finetune", "--from", drawn[0][1], *words.split(), "--out", tuned)
    return [*drawn, ("ViT-S/16, LoRA of rank 8, merged", tuned)]


def vitctl(*words: object) -> None:
    said = subprocess.run([sys.executable, "-m", "vitctl", *map(str, words)], capture_output=True, text=True)
    if said.returncode:
        raise SystemExit(said.stderr + said.stdout)


def random(path: Path, config: ViTConfig, **meta: Any) -> Path:
    """Write a network whose parameters all matter."""
    model = build(config, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    save_weights(path, model.state_dict(), config, META | meta)
    return path


def lines(name: str, source: Path, inside: bool, run: Path) -> Iterator[str]:
    """Export to all formats at once, and yield a line of the table for each."""
    rows = [row for row in FORMATS.values() if (row.takes_photographs if inside else row.is_graph)]
    rows = [row for row in rows if all(map(find_spec, row.requires))]
    shutil.rmtree(run, ignore_errors=True)
    words = [word for row in rows for word in ("--to", row.name)] + ["--include-preprocess"] * inside
    vitctl("export", "--from", source, *words, "--out", run, "--set", "export.check_images=0")
    result = json.loads((run / "result.json").read_text())
    shape = (1, 480, 640, 3) if inside else (1, 3, SIZE, SIZE)
    images = torch.randint(0, 256, shape, dtype=torch.uint8)
    for row in rows:
        file, taken = Path(result["files"][row.name]), []
        weights = file.with_suffix(".bin") if row.name == "openvino" else None
        size = sum(path.stat().st_size for path in (file, weights) if path)
        opened = resolve_name(row.prover)(None, file)
        for _ in range(CALLS + 2):
            began = time.process_time()
            opened.run(images)
            taken.append(time.process_time() - began)
        where = "inside, from 640 x 480" if inside else "outside"
        deviation = result["metrics"]["max_difference"][row.name]
        cells = (name, row.name, where, f"{deviation:.1e}", f"{size / 1e6:.1f}")
        yield f"| {' | '.join(cells)} | {statistics.median(taken[2:]) * 1e3:.1f} |"


PREFACE = """# A network in every format

`python benchmarks/formats.py` ([script](../formats.py)), one thread of {machine}, on which other work ran;
{versions}.

Random weights at published sizes; the fine-tuning is two steps of `vitctl finetune --set lora.rank=8`.

- **deviation**: the largest difference of the file in its own runtime to the model in torch, at batches of 1,
  3 and 8 images of noise, in standard deviations of the logits; at most 1e-4 is allowed.
- **MB**: of all files.
- **CPU ms**: CPU time of one call with one image, the median of 20. OpenVINO computes in float32.
- **pre-processing**: shorter side to 256, centre 224, bicubic with antialias.
"""

if __name__ == "__main__":
    main()
