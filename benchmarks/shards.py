"""Importing 50,000 small images beside `tar` and webdataset's own writer: `python benchmarks/shards.py
IMAGES.tar`.

The images of a tar file of class folders are unpacked first, so that all sides begin with the same folder,
which was read once before. `tar` packs the folder as it is; webdataset's writer is given image and label of
every file in the order of the folder; vitctl lists, checks, shuffles, writes, hashes and indexes. All of it
in one run, in turns.
"""

import argparse
import os
import platform
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import webdataset

from vitctl.data.datasets.detect import open_originals
from vitctl.data.writer.write import write_split

ROUNDS, MAX_SAMPLES = 3, 5_000


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", type=Path)
    parser.add_argument("--num-images", type=int, default=50_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root, out = Path(folder) / "photos", Path(folder) / "out"
        num_images = unpack(given.images, root, given.num_images)
        sides: dict[str, Callable[[], object]] = {
            "tar": lambda: subprocess.run(
                ["tar", "cf", out / "all.tar", root], check=True, stderr=subprocess.DEVNULL
            ),
            "webdataset.ShardWriter": lambda: write_with_webdataset(root, out),
            "vitctl, 1 process": lambda: write_with_vitctl(root, out, 0),
            "vitctl, 2 workers": lambda: write_with_vitctl(root, out, 2),
        }
        timed(sides["tar"], out)  # reads all files once
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for _ in range(ROUNDS):
            for name, side in sides.items():
                times[name].append(timed(side, out))
    show(times, num_images)


def unpack(archive: Path, root: Path, num_images: int) -> int:
    """Lay out the first images of the train split as class folders, and tell how many there are."""
    items = sorted(open_originals(str(archive))["train"].items, key=lambda item: item.key)[:num_images]
    for item in items:
        path = root / item.key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(item.read())
    return len(items)


def write_with_webdataset(root: Path, out: Path) -> None:
    """The usual loop: a label per folder, image and label to the writer."""
    with webdataset.ShardWriter(f"{out}/%06d.tar", maxcount=MAX_SAMPLES, verbose=0) as writer:
        for label, folder in enumerate(sorted(root.iterdir())):
            for path in sorted(folder.iterdir()):
                writer.write(
                    {
                        "__key__": f"{folder.name}/{path.stem}",
                        "jpg": path.read_bytes(),
                        "cls": str(label).encode(),
                    }
                )


def write_with_vitctl(root: Path, out: Path, workers: int) -> None:
    """All that `vitctl data shards` does."""
    (split,) = open_originals(str(root)).values()
    write_split(
        split.items,
        out / "train",
        split.class_names,
        seed=0,
        source_text="",
        max_samples=MAX_SAMPLES,
        workers=workers,
    )


def timed(side: Callable[[], object], out: Path) -> tuple[float, float]:
    """Wall seconds and CPU seconds of this process and its children."""
    out.mkdir()
    began, before = time.perf_counter(), cpu_seconds()
    side()
    found = time.perf_counter() - began, cpu_seconds() - before
    shutil.rmtree(out)
    return found


def cpu_seconds() -> float:
    """Used so far, by all that has ended."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def show(times: dict[str, list[tuple[float, float]]], num_images: int) -> None:
    """The table, and ratios to the sum of what the others need for the same."""
    medians = {
        name: [statistics.median(column) for column in zip(*rows, strict=True)]
        for name, rows in times.items()
    }
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    print(f"{platform.platform()}, {cpu}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    print(
        f"webdataset {webdataset.__version__}, numpy {np.__version__}; {num_images:,} images, medians of "
        f"{ROUNDS} rounds\n"
    )
    print("| side | seconds | CPU seconds | images/s |\n|---|---|---|---|")
    for name, (wall, used) in medians.items():
        print(f"| {name} | {wall:.1f} | {used:.1f} | {num_images / wall:,.0f} |")
    both = [medians["tar"][n] + medians["webdataset.ShardWriter"][n] for n in (0, 1)]
    print()
    for name in ("vitctl, 1 process", "vitctl, 2 workers"):
        wall, used = medians[name]
        alone = medians["webdataset.ShardWriter"]
        print(
            f"{name}: {alone[0] / wall:.2f} of the speed of webdataset's writer by wall clock, "
            f"{alone[1] / used:.2f} per CPU "
            f"second; {both[0] / wall:.2f} and {both[1] / used:.2f} of tar and that writer after each other"
        )


if __name__ == "__main__":
    main()
