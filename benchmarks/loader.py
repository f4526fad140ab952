"""Our loader beside timm's over the same photographs: `python benchmarks/loader.py`.

Both crop at random, resize to 224 by bilinear interpolation, flip, and hand over uint8 batches. Every measurement is a process
of its own; the sides take turns. Wall time counts whatever else the machine does; CPU time, of the workers and of the
process that receives their batches, much less so: it is the steadier figure. Memory is proportional (PSS): pages that a
worker shares with its parent are counted by halves, on both sides alike.
"""

import argparse
import io
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from multiprocessing import active_children
from pathlib import Path
from typing import Any

PHOTOS = Path(__file__).resolve().parents[2] / "shared" / "data" / "imagenet-500.tar"
SIZE, BATCH, WARM_UP_BATCHES = 224, 50, 10
SIDES = ("vitctl", "vitctl-scaled", "timm")
LIBRARIES = ("torch", "torchvision", "timm", "pillow", "simplejpeg", "numpy")
Numbers = dict[str, float]


def main() -> None:
    """Measure, and print a table and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--photos", type=Path, default=PHOTOS, help="a tar of JPEG files")
    parser.add_argument("--images", type=int, default=2000, help="per measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--enlarge", type=int, default=1, help="times that the photographs are enlarged first")
    parser.add_argument("--measure", nargs=3, metavar=("SIDE", "WORKERS", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        side, workers, folder = given.measure
        print(json.dumps(measure(side, int(workers), Path(folder), given.images)))
        return
    if not given.photos.is_file():
        sys.exit(f"{given.photos}: not there; give a tar of JPEG files with --photos")
    with tempfile.TemporaryDirectory() as folder:
        unpack(given.photos, Path(folder), given.enlarge)
        report(compare(Path(folder), given.images, given.rounds), given.rounds)


def compare(folder: Path, num_images: int, rounds: int) -> dict[tuple[str, int], list[Numbers]]:
    """Let the sides take turns; returns the numbers of every round by side and workers."""
    found: dict[tuple[str, int], list[Numbers]] = {}
    for _, workers, side in itertools.product(range(rounds), (1, 2), SIDES):
        command = [sys.executable, __file__, "--images", str(num_images), "--measure", side, str(workers), str(folder)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found.setdefault((side, workers), []).append(json.loads(done.stdout.splitlines()[-1]))
    return found


def report(found: dict[tuple[str, int], list[Numbers]], rounds: int) -> None:
    """Print medians of the rounds."""
    print(f"{platform.platform()}, {cpu_name()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    print(", ".join(f"{name} {version(name)}" for name in LIBRARIES), f"; medians of {rounds} rounds\n")
    print("| side | workers | images/s | images per CPU second | CPU ms per image | PSS per worker, MiB |")
    print("|---|---|---|---|---|---|")
    middle = {
        key: {name: statistics.median(numbers[name] for numbers in rounds) for name in rounds[0]}
        for key, rounds in found.items()
    }
    for (side, workers), row in middle.items():
        print(
            f"| {side} | {workers} | {row['wall']:.0f} | {row['cpu']:.0f} | {1e3 / row['cpu']:.2f} | {row['pss']:.0f} |"
        )
    print()
    for workers, side in itertools.product((1, 2), SIDES[:-1]):
        ours, theirs = middle[side, workers], middle["timm", workers]
        wall, cpu, pss = (ours[name] / theirs[name] for name in ("wall", "cpu", "pss"))
        print(
            f"{side} / timm, {workers} worker(s): {cpu:.2f} per CPU second, {wall:.2f} by wall clock, {pss:.2f} of its memory"
        )
    for side in SIDES:
        wall, cpu = (middle[side, 2][name] / middle[side, 1][name] for name in ("wall", "cpu"))
        print(f"{side}, 1 to 2 workers: {wall / 2:.2f} of linear by wall clock, {cpu:.2f} per CPU second")


def measure(side: str, workers: int, folder: Path, num_images: int) -> Numbers:
    """Run one side for a while; returns images/s by wall clock, per CPU second, and memory per worker in MiB."""
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    batches = {"vitctl": our_batches, "vitctl-scaled": our_scaled_batches, "timm": timm_batches}[side](folder, workers)
    for _ in range(WARM_UP_BATCHES):
        next(batches)
    pids = [os.getpid(), *(child.pid or 0 for child in active_children())]
    assert len(pids) == 1 + workers
    busy, began, seen = sum(map(cpu_seconds, pids)), time.perf_counter(), 0
    while seen < num_images:
        images = next(batches)
        assert images.shape == (BATCH, 3, SIZE, SIZE) and images.dtype == torch.uint8
        seen += len(images)
    wall, busy = time.perf_counter() - began, sum(map(cpu_seconds, pids)) - busy
    memory = statistics.median(pss_mib(pid) for _ in range(10) if next(batches) is not None for pid in pids[1:])
    return {"wall": seen / wall, "cpu": seen / busy, "pss": memory}


def our_batches(folder: Path, workers: int, **choices: Any) -> Iterator[Any]:
    """Batches of vitctl, with timm's range of areas."""
    from vitctl.data.images.transforms import TrainTransform
    from vitctl.data.loader.batches import train_batches
    from vitctl.data.shards.index import read_index
    from vitctl.data.source.order import Order
    from vitctl.data.source.read import ShardSource

    source = ShardSource(read_index(folder / "shards"))
    transform = TrainTransform(SIZE, area_range=(0.08, 1.0), **choices)
    sizes = {"batch_size": BATCH, "micro_batch": BATCH, "rank": 0, "num_processes": 1, "first_step": 0}
    for batch in train_batches(source, Order(len(source), 0), transform, seed=0, num_workers=workers, **sizes):
        assert not batch.bad
        yield batch.images


def our_scaled_batches(folder: Path, workers: int) -> Iterator[Any]:
    """Batches of vitctl, decoded to a fraction of the size where the crop allows it."""
    return our_batches(folder, workers, decode="scaled")


def timm_batches(folder: Path, workers: int) -> Iterator[Any]:
    """Batches of timm as its workers hand them over, before it normalises them."""
    import torch
    from timm.data import ImageDataset, create_loader

    loader = create_loader(
        ImageDataset(str(folder / "photos")),
        input_size=(3, SIZE, SIZE),
        batch_size=BATCH,
        is_training=True,
        num_workers=workers,
        color_jitter=None,
        auto_augment=None,
        interpolation="bilinear",
        device=torch.device("cpu"),
        pin_memory=False,
        use_multi_epochs_loader=True,
    )
    while True:
        for images, _ in loader.loader:
            yield images


def unpack(photos: Path, folder: Path, enlarge: int) -> None:
    """Put the photographs into a folder for timm and into a shard for us."""
    from vitctl.data.writer.items import Item
    from vitctl.data.writer.write import write_split

    with tarfile.open(photos) as tar:
        files = [tar.extractfile(member) for member in tar if member.isreg()]
        contents = [enlarged(file.read(), enlarge) for file in files if file is not None]
    place = folder / "photos" / "any"
    place.mkdir(parents=True)
    for number, data in enumerate(contents):
        (place / f"{number}.jpg").write_bytes(data)
    reads: list[Callable[[], bytes]] = [(place / f"{number}.jpg").read_bytes for number in range(len(contents))]
    items = [Item(str(number), 0, read) for number, read in enumerate(reads)]
    write_split(items, folder / "shards", ("any",), seed=0, source_text="photographs")


def enlarged(data: bytes, times: int) -> bytes:
    """The photograph as a camera of more pixels would have stored it."""
    from PIL import Image

    if times == 1:
        return data
    image, file = Image.open(io.BytesIO(data)).convert("RGB"), io.BytesIO()
    image.resize((image.width * times, image.height * times)).save(file, "JPEG", quality=90)
    return file.getvalue()


def cpu_seconds(pid: int) -> float:
    """Seconds that a process has computed, in user and in kernel mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def pss_mib(pid: int) -> float:
    """Memory of a process, in which shared pages are divided among their users."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def cpu_name() -> str:
    """The processor as Linux names it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
