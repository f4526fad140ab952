"""How cost grows, plotted on logarithmic axes with the slope: `python benchmarks/growth.py`.

Slope 1 is in proportion, 0 is constant. Images: the writer of shards, on small images in memory. Tokens:
forward and backward of ViT-S/16 in float32, resolutions 224 to 518. Processes: `vitctl pretrain --synthetic`
with one global batch, seconds per step from its log. Shards: opening the index of 10 million images and
asking for a batch of numbers; the shards are empty files. Runs: `vitctl sweep --print`, which prepares the
folder of each run. Medians of several rounds, sizes in turns.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from measure import Machine, Numbers, matrix_rates, script_options, take_turns

from vitctl.data.shards.index import FORMAT, read_index
from vitctl.data.shards.tar import ROW
from vitctl.data.source.order import Order
from vitctl.data.source.stores import ShardSource
from vitctl.system.figures import BLUE, GREY, PALE, new_figure, plain_axes, save_figure

LIBRARIES = ("vitctl", "torch", "numpy")
NUM_SAMPLES, BATCH = 10_000_000, 512
Measure = Callable[[int], float]
CURVES: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "images": ("images written to shards", "seconds", (1_000, 3_000, 10_000)),
    "tokens": ("image size in pixels, ViT-S/16", "seconds, forward and backward, batch 2", (224, 288, 384, 448, 518)),
    "processes": ("processes, one core each", "seconds per step, batch 16", (1, 2)),
    "shards": ("shards of an index of 10 million images", "seconds to the first batch of numbers", (10, 100, 1_000, 10_000, 100_000)),
    "runs": ("runs of a sweep", "seconds to prepare them", (2, 8, 32)),
}  # fmt: skip


def main() -> None:
    """Measure, plot, and write results/growth.json and growth.png."""
    parser = script_options(__doc__, rounds=3)
    parser.add_argument("--only", nargs="+", choices=CURVES, default=list(CURVES))
    parser.add_argument("--largest", type=int, default=0, help="leave out sizes above this")
    given = parser.parse_args()
    machine = Machine()
    with tempfile.TemporaryDirectory() as folder:
        found = {name: curve(name, Path(folder), given.rounds, given.largest) for name in given.only}
    given.results.mkdir(parents=True, exist_ok=True)
    record = {
        "command": " ".join(["python", "benchmarks/growth.py", *sys.argv[1:]]),
        "machine": machine.record(LIBRARIES),
        "limits": matrix_rates(),
        "curves": found,
    }
    (given.results / "growth.json").write_text(json.dumps(record, indent=1) + "\n")
    for name, one in found.items():
        print(f"{name}: {one['seconds']} at {one['sizes']}, slope {number_text(one['slope'])}")
    print(save_figure(plot(found), given.results / "growth.png"))


def curve(name: str, folder: Path, rounds: int, largest: int) -> dict[str, Any]:
    """Median seconds at each size, and the slope over all of them; each size once unmeasured before."""
    place = folder / name
    place.mkdir()
    measure: Measure = partial(MEASURES[name], place)
    sizes = [size for size in CURVES[name][2] if not largest or size <= largest] or [CURVES[name][2][0]]
    measure(sizes[0])
    sides: dict[str, Callable[[], Numbers]] = {
        str(size): (lambda size=size: {"seconds": measure(size)})  # type: ignore[misc]
        for size in sizes
    }
    seconds = [
        statistics.median(n["seconds"] for n in numbers) for numbers in take_turns(sides, rounds).values()
    ]
    return {
        "sizes": sizes,
        "seconds": seconds,
        "slope": slope(sizes, seconds),
        "last": slope(sizes[-2:], seconds[-2:]),
    }


def slope(sizes: Sequence[float], seconds: Sequence[float]) -> float | None:
    """Of the straight line through the logarithms; None of a single size."""
    if len(sizes) < 2:
        return None
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def number_text(number: float | None) -> str:
    """With two decimals, - for none."""
    return "-" if number is None else f"{number:.2f}"


def plot(found: dict[str, dict[str, Any]]) -> Any:
    """A panel for each curve, with the line that is expected through its first point."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    figure = new_figure(2.6 * len(found), 3.0)
    for axes, (name, one) in zip(np.atleast_1d(figure.subplots(1, len(found))), found.items(), strict=True):
        sizes, seconds = np.array(one["sizes"], float), np.array(one["seconds"])
        # Attention aside, tokens and with them the work grow with the square of the image size.
        power = {"tokens": 2, "processes": -1}.get(name, 1)
        axes.loglog(sizes, seconds[0] * (sizes / sizes[0]) ** power, color=GREY, lw=1, label=f"slope {power}")
        axes.loglog(
            sizes, seconds, "o-", color=BLUE, ms=4, label=f"measured, slope {number_text(one['slope'])}"
        )
        x, y, _ = CURVES[name]
        axes.set_xlabel(x, fontsize=8, color=PALE)
        axes.set_ylabel(y, fontsize=8, color=PALE)
        axes.set_title(name, fontsize=9)
        axes.set_xticks(sizes, [f"{size / 1000:g}k" if size >= 1000 else f"{size:g}" for size in sizes])
        axes.yaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.minorticks_off()
        plain_axes(axes)
        axes.legend(fontsize=7, frameon=False)
    return figure


def write_images(folder: Path, number: int) -> float:
    """Write so many small images as shards."""
    from vitctl.data.writer.intake import Item
    from vitctl.data.writer.write import write_split

    image, out = small_image(), folder / str(time.monotonic_ns())
    items = [Item(f"{n:07d}", 0, lambda: image, len(image)) for n in range(number)]
    began = time.perf_counter()
    write_split(items, out, ("any",), seed=0, source_text="")
    return time.perf_counter() - began


@cache
def small_image() -> bytes:
    """A picture of 32 x 32 random pixels."""
    from vitctl.data.datasets.readers.arrays import encode_png

    return encode_png(np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8))


def train_step(_folder: Path, image_size: int) -> float:
    """Forward and backward of random images."""
    import torch

    model = network(image_size // 16 * 16)
    images, labels = torch.randn(2, 3, image_size // 16 * 16, image_size // 16 * 16), torch.arange(2)
    began = time.perf_counter()
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    return time.perf_counter() - began


@cache
def network(image_size: int) -> Any:
    """ViT-S/16 after one backward pass, so that its gradients have their memory."""
    from vitctl.models.build import build
    from vitctl.models.variants import variant

    return build(variant("S/16", image_size=image_size, num_classes=1000), seed=0)


def run_processes(folder: Path, processes: int) -> float:
    """Seconds per step of a run, the median of its log after the first three."""
    out = folder / str(time.monotonic_ns())
    model = (
        "--set model.depth=4 --set checkpoint.every_steps=100 --set log.every_steps=1 --set machine.workers=0"
    )
    sizes = f"--res 128 --batch-size 16 --steps 8 --precision float32 --processes {processes}"
    words = f"pretrain --recipe in1k_b16 --synthetic --set model.name=S/16 {model} {sizes} --out {out}"
    command = [sys.executable, "-m", "vitctl", *words.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True, env=environment)
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    rates = [record["images_per_second"] for record in records if record["kind"] == "train"]
    return 16 / statistics.median(rates[3:])


def open_index(folder: Path, shards: int) -> float:
    """From an index on disk to the sample numbers of the first batch."""
    place = folder / str(shards)
    if not place.exists():
        place.mkdir()
        synthesise(place, NUM_SAMPLES, shards)
        ShardSource(read_index(place))
    began = time.perf_counter()
    source = ShardSource(read_index(place))
    Order(len(source), 0).at(np.arange(BATCH))
    return time.perf_counter() - began


def synthesise(folder: Path, num_samples: int, num_shards: int) -> None:
    """An index whose shards are empty files, and whose table of samples is a hole on the disk."""
    sizes = np.full(num_shards, num_samples // num_shards)
    sizes[: num_samples % num_shards] += 1
    shards = [
        {"name": f"shard-{number:06d}.tar", "num_samples": size, "num_bytes": 0, "sha256": "0" * 64}
        for number, size in enumerate(sizes.tolist())
    ]
    for shard in shards:
        (folder / str(shard["name"])).touch()
    fields = {
        "format": FORMAT,
        "class_names": ["any"],
        "num_samples": num_samples,
        "shards": shards,
        "source": "none",
    }
    (folder / "index.json").write_text(json.dumps(fields))
    np.lib.format.open_memmap(folder / "samples.npy", "w+", ROW, (num_samples,))


def prepare_sweep(folder: Path, runs: int) -> float:
    """A command to its end: folders of so many runs are prepared, none is started."""
    data = folder / "data"
    if not data.exists():
        for split in ("train", "test"):
            write_images(data, 100)
            next(path for path in data.iterdir() if path.name.isdigit()).rename(data / split)
    seeds = ",".join(map(str, range(runs)))
    words = ["sweep", "smoke", "--grid", f"seed={seeds}", "--data", str(data), "--print"]
    command = [sys.executable, "-m", "vitctl", *words, "--out", str(folder / str(time.monotonic_ns()))]
    began = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


MEASURES: dict[str, Callable[[Path, int], float]] = {
    "images": write_images,
    "tokens": train_step,
    "processes": run_processes,
    "shards": open_index,
    "runs": prepare_sweep,
}

if __name__ == "__main__":
    main()
