"""What 303 million images on 64 nodes of 8 GPUs read, from the order alone, and what opening them costs.

python benchmarks/scale.py [--data-only]

100,000 shards of 3,030 images of 120 kB in an object store, read by ViT-H/14's batch of 4,096 in windows of
16 shards. For a sample of nodes the walk of one epoch is followed shard by shard through a cache of two
windows a lane. Nothing is fetched. Then a folder, a list and a random subset of an index of that size are
opened, each in a process of its own.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections import OrderedDict
from pathlib import Path

import numpy as np

from vitctl.data.shards.index import FORMAT, ROW
from vitctl.data.source.order import LaneOrder, SampleOrder, WindowedOrder, lanes_read, share

SHARDS, IMAGES, IMAGE_BYTES = 100_000, 3_030, 120_000
BATCH, NODES, WINDOW = 4_096, 64, 16
SHARD_GIB = IMAGES * IMAGE_BYTES / 2**30
OPEN = """
import resource, sys, time
from vitctl.data.datasets.catalog import open_split
from vitctl.data.source.views import check_labels, random_subset
before = time.process_time()
source = open_split("train", path=sys.argv[1], cache_bytes=0)
source = random_subset(source, int(sys.argv[2]), 0) if int(sys.argv[2]) else source
check_labels(source, "train", "training")
seconds, kib = time.process_time() - before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(f"{len(source):>11,} images  {seconds:5.2f} s of CPU  {kib / 2**20:5.2f} GiB")
"""


def shards_of(order: SampleOrder, steps: range, slots: range) -> np.ndarray:
    """Return the shard of each image of some updates, in the order in which a node reads them."""
    positions = np.arange(steps.start, steps.stop)[:, None] * BATCH + np.array(slots)
    return np.asarray(order.at(positions.ravel())[1]) // IMAGES


def fetched(order: SampleOrder, node: int, nodes: int, cache: int) -> int:
    """Return the shards that a node fetches in an epoch through a cache of so many shards."""
    held: OrderedDict[int, None] = OrderedDict()
    slots, number = share(BATCH, nodes, node), 0
    steps = max(1, order.window_size // (8 * BATCH))  # looked at together: an eighth of a window
    for begin in range(0, order.num_samples // BATCH, steps):
        for shard in np.unique(shards_of(order, range(begin, begin + steps), slots)).tolist():
            number += shard not in held
            held[shard] = None
            held.move_to_end(shard)
            if len(held) > cache:
                held.popitem(last=False)
    return number


def measure(name: str, order: SampleOrder, num_lanes: int, nodes: int) -> None:
    """Print what the nodes fetch and mix."""
    cache = 2 * WINDOW * max(lanes_read(num_lanes, nodes))
    needed = order.num_samples / nodes / IMAGES
    most = max(fetched(order, node, nodes, cache) for node in (0, nodes - 1))
    first = shards_of(order, range(1), range(BATCH))
    own = shards_of(order, range(1), share(BATCH, nodes, 0))
    mib, gib = len(own) * IMAGE_BYTES / 2**20, len(np.unique(own)) * SHARD_GIB
    print(
        f"{name:25} amplification {most / needed:6.3f}  shards a batch {len(np.unique(first)):>5,}  cache "
        f"of a node {cache * SHARD_GIB:5.1f} GiB  first batch of one {mib:.1f} MiB in {gib:.2f} GiB of shards"
    )


def write_index(folder: Path) -> None:
    """Write an index of empty shards, which take no space."""
    shards = []
    for number in range(SHARDS):
        name, size = f"train-{number:06d}.tar", IMAGES * IMAGE_BYTES
        with open(folder / name, "wb") as file:
            os.truncate(file.fileno(), size)
        sha256 = hashlib.sha256(name.encode()).hexdigest()
        shards.append({"name": name, "num_samples": IMAGES, "num_bytes": size, "sha256": sha256})
    np.lib.format.open_memmap(folder / "samples.npy", "w+", ROW, (SHARDS * IMAGES,)).flush()
    with open(folder / "names.bin", "wb") as file:
        os.truncate(file.fileno(), SHARDS * IMAGES)  # empty names
    tables = {
        name: {"num_bytes": (folder / name).stat().st_size, "sha256": "0" * 64}
        for name in ("samples.npy", "names.bin")
    }
    fields = {
        "format": FORMAT,
        "class_names": [str(label) for label in range(18_291)],
        "num_samples": SHARDS * IMAGES,
        "shards": shards,
        "source": "benchmark",
        "tables": tables,
        "labels": {"missing": 0, "outside": 0},
    }
    (folder / "index.json").write_text(json.dumps(fields))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-only", action="store_true", help="only open the index")
    if not parser.parse_args().data_only:
        walk = WindowedOrder(SHARDS * IMAGES, 0, IMAGES, WINDOW)
        measure("64 lanes on 64 nodes", LaneOrder(walk, BATCH, NODES), NODES, NODES)
        measure("64 lanes on 48 nodes", LaneOrder(walk, BATCH, NODES), NODES, 48)
        measure("48 lanes on 48 nodes", LaneOrder(walk, BATCH, 48), 48, 48)
        measure("without lanes on 64 nodes", walk, 1, NODES)
    with tempfile.TemporaryDirectory(prefix="vitctl-scale-") as place:
        folder = Path(place) / "train"
        folder.mkdir()
        write_index(folder)
        listed = f"{folder}/train-{{000000..{SHARDS - 1:06d}}}.tar"
        for name, path, images in (
            ("folder", place, 0),
            ("list", listed, 0),
            ("subset", place, SHARDS * IMAGES // 10),
        ):
            print(f"{name:8}", end=" ", flush=True)
            subprocess.run([sys.executable, "-c", OPEN, path, str(images)], check=True)


if __name__ == "__main__":
    main()
