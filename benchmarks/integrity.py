"""What it costs to hold shards against their digests beside a loader that reads and decodes them, and tables
when they are opened.

    python benchmarks/integrity.py --out /tmp/integrity
    python benchmarks/integrity.py --out /tmp/integrity --rows 1281167

The loader is run alone and beside the hashing in turns; the images are noise, as JPEG.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vitctl.data.images.transforms import TrainTransform
from vitctl.data.loader.batches import train_batches
from vitctl.data.shards import index as shard_index
from vitctl.data.shards.index import FORMAT, SAMPLES, read_index, write_table
from vitctl.data.shards.tar import ROW
from vitctl.data.source.order import Order
from vitctl.data.source.stores import ShardSource, SyntheticSource
from vitctl.data.source.verification import Verification
from vitctl.data.writer.intake import Item
from vitctl.data.writer.write import write_split

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
    parser.add_argument(
        "--rows", type=int, default=0, help="time the opening of a split of so many samples instead"
    )
    given = parser.parse_args()
    if given.rows:
        print_opening(given.out / f"{given.rows}", given.rows)
        return
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


def print_opening(folder: Path, num_rows: int) -> None:
    """CPU time of opening a split whose index notes no digest of its table, and one whose index does."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "shard.tar").write_bytes(b"x")
    noted = write_table(folder / SAMPLES, np.zeros(num_rows, ROW))
    shard = {"name": "shard.tar", "num_samples": num_rows, "num_bytes": 1, "sha256": "0" * 64}
    fields = {
        "format": FORMAT,
        "class_names": ["a"],
        "num_samples": num_rows,
        "shards": [shard],
        "source": "",
    }
    before, after = (opening(folder, {**fields, **own}) for own in ({}, {"tables": {SAMPLES: noted}}))
    print(
        f"| {num_rows:,} | {noted['num_bytes'] / 1e6:.1f} MB | {before * 1e3:.2f} ms | {after * 1e3:.2f} ms |"
    )


def opening(folder: Path, fields: dict[str, Any]) -> float:
    """Seconds of this process."""
    (folder / "index.json").write_text(json.dumps(fields))
    seconds = []
    for _ in range(9):
        shard_index._hashed.cache_clear()
        began = time.process_time()
        read_index(folder)
        seconds.append(time.process_time() - began)
    return statistics.median(seconds)


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
