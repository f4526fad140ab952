"""Measure what verifying shards costs beside a loader that reads and decodes them.

    python benchmarks/integrity.py --out /tmp/integrity

The loader runs alone and beside the hashing in turns; the images are noise, as JPEG.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

from vitctl.data.images.transforms import TrainTransform
from vitctl.data.loader.batches import train_batches
from vitctl.data.source.order import Order
from vitctl.data.source.stores import ShardSource, SyntheticSource
from vitctl.data.source.verification import Verification
from vitctl.data.writer.intake import Item
from vitctl.data.writer.shard_writer import write_split

BATCH = 64


def main() -> None:
    """Print the medians as a line of a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--images", type=int, default=400, help="different ones; each is stored --copies times"
    )
    parser.add_argument("--copies", type=int, default=20)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    noise = SyntheticSource(given.images, 10, 256)
    pictures = [noise.read(number) for number in range(given.images)]
    items = [
        Item(f"{n}", n % 10, partial(bytes, pictures[n % given.images]))
        for n in range(given.images * given.copies)
    ]
    index = write_split(
        items, given.out / "train", noise.class_names, seed=0, source_text="noise", max_bytes=32 << 20
    )
    source, size = ShardSource(index), sum(shard.num_bytes for shard in index.shards)
    hashing, alone, beside, share = [], [], [], []
    for _ in range(given.repeats):
        alone.append(images_per_second(source, given))
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            begun = Verification([source], Path(folder))
            begun.finish(None)
            hashing.append(size / (time.perf_counter() - began))
        with tempfile.TemporaryDirectory() as folder:
            begun = Verification([source], Path(folder))
            beside.append(images_per_second(source, given))
            share.append(begun.found().share)
            begun.finish(0)
    shutil.rmtree(given.out)
    one, both = statistics.median(alone), statistics.median(beside)
    print(
        f"| {size / 1e6:.0f} MB in {len(index.shards)} | {statistics.median(hashing) / 1e6:.0f} MB/s | "
        f"{one:.0f} | {both:.0f} "
        f"| {both / one - 1:+.1%} | {statistics.median(share):.0%} |"
    )


def images_per_second(source: ShardSource, given: argparse.Namespace) -> float:
    """Of a loader with its transforms, after its first batch."""
    batches = train_batches(
        source,
        Order(len(source), 0),
        TrainTransform(224),
        seed=0,
        batch_size=BATCH,
        micro_batch=BATCH,
        rank=0,
        num_processes=1,
        first_step=0,
        num_workers=given.workers,
    )
    next(batches)
    began = time.perf_counter()
    for _ in range(given.batches):
        next(batches)
    return BATCH * given.batches / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
