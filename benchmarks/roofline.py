"""The times that vitctl/models/roofline.py expects, and how far published runs are from them.

`python benchmarks/roofline.py TIMM > benchmarks/results/roofline.md`: TIMM is a clone of
huggingface/pytorch-image-models, of which the tables of measured rates in results/ are read. Needs no GPU.
"""

import csv
import hashlib
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from vitctl.models import roofline
from vitctl.models.roofline import GPUS, Step, estimate
from vitctl.models.variants import ViTConfig, variant

SHOWN = (
    ("Ti/16", (224, 384)),
    ("S/16", (224, 384)),
    ("B/16", (224, 384)),
    ("L/16", (224, 384)),
    ("H/14", (224, 392)),
)
DEVICES = ("A100", "H100", "H200")
# timm's table: GPU, whether it trains, whether it is compiled, whether attention is plain
TABLES = {
    "benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv": ("GeForce RTX 3090", True, False, True),
    "benchmark-infer-amp-nchw-pt240-cu124-rtx3090.csv": ("GeForce RTX 3090", False, False, False),
    "benchmark-infer-amp-nchw-pt240-cu124-rtx4090.csv": ("GeForce RTX 4090", False, False, False),
    "benchmark-infer-amp-nchw-pt240-cu124-rtx4090-dynamo.csv": ("GeForce RTX 4090", False, True, False),
    "benchmark-infer-amp-nchw-pt291-cu128-4090.csv": ("GeForce RTX 4090", False, False, False),
    "benchmark-infer-amp-nchw-pt291-cu128-4090-dynamo.csv": ("GeForce RTX 4090", False, True, False),
    "benchmark-infer-amp-nchw-pt291-cu130-5090.csv": ("GeForce RTX 5090", False, False, False),
    "benchmark-infer-amp-nchw-pt291-cu130-5090-dynamo.csv": ("GeForce RTX 5090", False, True, False),
}
NAMES = {"tiny": "Ti", "small": "S", "base": "B", "large": "L", "huge": "H"}
# Whole runs, with their data loading and scoring: network, pixels, epochs, batch per GPU, GPUs, drop path,
# hours. Source: MAE, FINETUNE.md.
RUNS = (
    ("B/16", 224, 100, 32, 32, 0.1, 7 + 11 / 60),
    ("L/16", 224, 50, 32, 32, 0.2, 8 + 52 / 60),
    ("H/14", 224, 50, 16, 64, 0.3, 13 + 9 / 60),
)
IMAGENET = 1_281_167
# Images/s of ViT-5-S in training on one H100 SXM, batch 256.
# Source: nvSubquadratic, benchmarks/README.md, 5129112
VIT_5_S = {"eager": 2305.0, "compiled": 7716.0}
# Images/s of a node of 8 GPUs that trains g/14, with its data loading and exchange; 64 images at a time,
# 4,096 for each update, dropout 0.1. Whether attention is fused, or blocks are recomputed, is not said.
# Source: NeMo user guide, Vision Transformer, Performance and Training.
NEMO = {"A100": 693.0, "H100": 1428.0}
GIANT = ViTConfig(patch_size=14, hidden_size=1408, depth=40, mlp_size=6144, num_heads=16, dropout=0.1)


def measured(file: Path, key: str) -> Iterator[tuple[str, str, int, int, float]]:
    """Yield name, network, image size, batch size and images per second of the plain ViTs of a table."""
    for row in csv.DictReader(file.read_text().splitlines()):
        words = row["model"].split("_")
        is_plain = len(words) == 4 and words[0] == "vit" and words[1] in NAMES
        if is_plain and words[2].startswith("patch") and words[3].isdigit():
            network = f"{NAMES[words[1]]}/{words[2].removeprefix('patch')}"
            yield (
                row["model"],
                network,
                int(row[f"{key}_img_size"]),
                int(row[f"{key}_batch_size"]),
                float(row[f"{key}_samples_per_sec"]),
            )


def spread(group: str, ratios: Sequence[float]) -> str:
    """Return the row of a group: its rows, mean error, range and median."""
    error = statistics.mean(abs(math.log(ratio)) for ratio in ratios)
    ends = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return f"| {group} | {len(ratios)} | {error:.3f} | {ends} | {statistics.median(ratios):.2f} |"


def is_fitted(table: str, name: str) -> bool:
    """Whether a row is of the half that WIDEST and NARROW are fitted to, which only its names decide."""
    return hashlib.sha256(f"{table} {name}".encode()).digest()[0] % 2 == 0


def fit(rows: Sequence[tuple[ViTConfig, str, Step, float]]) -> tuple[float, float]:
    """The WIDEST and NARROW with the least mean error, to 0.05 and 20."""
    asked = roofline.WIDEST, roofline.NARROW
    errors = {}
    for widest in (1.0, 1.05, 1.1, 1.15, 1.2):
        for narrow in range(0, 161, 20):
            roofline.WIDEST, roofline.NARROW = widest, float(narrow)
            errors[widest, float(narrow)] = statistics.mean(
                abs(math.log(estimate(config, device, step).images_per_second / rate))
                for config, device, step, rate in rows
            )
    roofline.WIDEST, roofline.NARROW = asked
    return min(errors, key=errors.__getitem__)


def main() -> None:
    """Print the tables."""
    results = Path(sys.argv[1]) / "results"
    print("# Expected and published rates\n\n`python benchmarks/roofline.py TIMM`. No GPU was used.\n")
    print("## Expected, training in bf16, compiled, 64 images per step\n")
    print("| network | pixels | " + " | ".join(f"{name}: images/s, MFU" for name in DEVICES) + " |")
    print("|---" * (2 + len(DEVICES)) + "|")
    for name, sizes in SHOWN:
        for size in sizes:
            config = variant(name, image_size=size, num_classes=1000)
            found = [estimate(config, device, Step(64)) for device in DEVICES]
            cells = " | ".join(f"{one.images_per_second:,.0f}, {one.mfu:.0%}" for one in found)
            print(f"| {name} | {size} | {cells} |")
    print("\n## timm's measured rates\n")
    print("Expected over measured; 1 is exact. In fp16, which has the peak of bf16. The training of torch")
    print("1.12 has plain attention, and SGD. Error: the mean of |log(expected / measured)|. WIDEST and")
    print("NARROW are fitted to half of the rows, chosen by a hash of their names; the groups are of the")
    print("other half, but for the tables and `all`. Two numbers were chosen after all rows had been seen:")
    print("that products on a 4090 reach its peak, and that plain attention has a share of its own for each")
    print("GPU.\n")
    rows, groups, known = [], dict[str, list[float]](), []
    for file, (device, training, compiled, plain) in TABLES.items():
        for name, network, size, batch, rate in measured(results / file, "train" if training else "infer"):
            config = variant(network, image_size=size, num_classes=1000, classifier="patches")
            step = Step(batch, training=training, compiled=compiled, plain=plain, slots=1)
            found = estimate(config, device, step).images_per_second
            rows.append(f"| {file} | {name} | {batch} | {rate:,.0f} | {found:,.0f} | {found / rate:.2f} |")
            half = is_fitted(file, name)
            known += [(config, device, step, rate)] * half
            for group in (file, "all", *(["fitted"] if half else ["tested", network.split("/")[0]])):
                groups.setdefault(group, []).append(found / rate)
    widest, narrow = fit(known)
    print(f"Fitted: WIDEST {widest:g}, NARROW {narrow:g}; used: {roofline.WIDEST:g}, {roofline.NARROW:g}.\n")
    print("| group | rows | error | range | median |")
    print("|---" * 5 + "|")
    for group in (*TABLES, *NAMES.values(), "fitted", "tested", "all"):
        print(spread(group, groups[group]))
    print("\n| table | network | batch | measured, images/s | expected | ratio |")
    print("|---" * 6 + "|")
    print("\n".join(rows))
    print("\n## Compiled training of a small network on an H100\n")
    print("ViT-5-S, batch 256 (nvSubquadratic, benchmarks/README.md), beside S/16: another network of the")
    print("same size, so the ratio is of the estimate and of the network.\n")
    print("| kernels | measured, images/s | expected of S/16 | ratio |")
    print("|---" * 4 + "|")
    for kind, rate in VIT_5_S.items():
        config = variant("S/16", image_size=224, num_classes=1000)
        found = estimate(config, "H100", Step(256, compiled=kind == "compiled")).images_per_second
        print(f"| {kind} | {rate:,.0f} | {found:,.0f} | {found / rate:.2f} |")
    print("\n## Published runs\n")
    print("With data loading, scoring, exchange of gradients and kernels of their time, not compiled.\n")
    print("| run | GPUs | hours | expected of the GPUs alone | times as long |")
    print("|---" * 5 + "|")
    for name, size, epochs, batch, gpus, drop_path, hours in RUNS:
        config = variant(name, image_size=size, num_classes=1000, classifier="gap", drop_path=drop_path)
        step = Step(batch, compiled=False, plain=True)
        expected = epochs * IMAGENET / (gpus * estimate(config, "V100", step).images_per_second) / 3600
        run = f"MAE {name}, {epochs} epochs"
        print(f"| {run} | {gpus} V100 | {hours:.1f} | {expected:.1f} | {hours / expected:.2f} |")
    print("\nRates of a node that trains, with data loading and exchange of gradients:\n")
    print("| run | GPUs | images/s | expected, attention fused | plain |")
    print("|---" * 5 + "|")
    for device, rate in NEMO.items():
        steps = (Step(512, passes=8, compiled=False, plain=plain, shards=8) for plain in (False, True))
        rates = [8 * estimate(GIANT, device, step).images_per_second for step in steps]
        cells = " | ".join(f"{expected:,.0f} ({expected / rate:.2f})" for expected in rates)
        print(f"| NeMo g/14 | 8 {device} | {rate:,.0f} | {cells} |")
    assert set(DEVICES) <= set(GPUS)


if __name__ == "__main__":
    main()
