"""The cost of an order over a very large set: `python benchmarks/order.py`.

A synthetic index of 303 million samples in 100,000 empty shards is opened, as a run opens it, and sought in.
Set-up is from the index on disk to the first batch of sample numbers; memory is what the process has gained
by then.
"""

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path

import numpy as np

from vitctl.data.shards.index import FORMAT, read_index
from vitctl.data.shards.scan import ROW
from vitctl.data.source.order import MixtureOrder, Order, SampleOrder, WindowedOrder, quotas
from vitctl.data.source.shard_source import ShardSource

BATCH, SEEKS = 512, 200
WINDOW_SHARDS = 64


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=303_000_000)
    parser.add_argument("--shards", type=int, default=100_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        synthesise(Path(folder), given.samples, given.shards)
        before, began = private_mib(), time.perf_counter()
        source = ShardSource(read_index(Path(folder)))
        orders: tuple[SampleOrder, ...] = (
            Order(len(source), 0),
            WindowedOrder(len(source), 0, len(source) // given.shards, WINDOW_SHARDS),
        )
        orders += (MixtureOrder(orders, quotas((3.0, 1.0)), 0),)
        orders[0].at(np.arange(BATCH))
        seconds, mebibytes = time.perf_counter() - began, private_mib() - before
    print(
        f"{platform.platform()}, numpy {np.__version__}; {given.samples:,} samples in {given.shards:,} "
        f"shards\n"
    )
    print(f"set-up: {seconds:.2f} s, {mebibytes:.0f} MiB\n")
    print(f"| order | seek to one sample, ms | seek to a batch of {BATCH}, ms |\n|---|---|---|")
    for order in orders:
        print(f"| {type(order).__name__} | {seek(order, 1):.2f} | {seek(order, BATCH):.2f} |")


def seek(order: SampleOrder, batch_size: int) -> float:
    """Median milliseconds to tell the samples of a batch somewhere in the first hundred epochs."""
    places = np.random.default_rng(0).integers(0, 100 * order.num_samples, SEEKS)
    times = []
    for place in places:
        began = time.perf_counter()
        order.at(np.arange(place, place + batch_size))
        times.append(time.perf_counter() - began)
    return float(np.median(times)) * 1e3


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


def private_mib() -> float:
    """Memory of this process that it shares with nobody."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


if __name__ == "__main__":
    main()
