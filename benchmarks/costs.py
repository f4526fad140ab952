"""What schedule.lanes and each step's record cost: `python benchmarks/costs.py lanes` or `costs.py trace`.

Each side is `vitctl bench model` on noise, with one thread in each process; the sides take turns. Ratios
are of the same round: their median, lowest and highest. `lanes` adds leaves in a fixed tree, `plain` is DDP
with the same leaves as micro-batches, `whole` is DDP with each share in one pass. `trace`: the part of a step
that is its record, with log.trace and without; then a digest of the weights, and the checksums that a loader
worker adds to an image of 256 pixels.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from measure import Machine, Numbers, medians, rate, script_options, take_turns


def main() -> None:
    """Measure, and print a table."""
    parser = script_options(__doc__, rounds=3)
    parser.add_argument("what", choices=("lanes", "trace"))
    parser.add_argument("--models", nargs="+", default=["Ti/16", "S/16"])
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--precisions", nargs="+", default=["bf16", "float32"])
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--leaf", type=int, default=4)
    parser.add_argument("--seconds", type=int, default=20, help="of a turn")
    given, machine = parser.parse_args(), Machine()
    names = ("lanes", "plain", "whole") if given.what == "lanes" else ("trace", "no trace")
    heads = [f"{name}: s, log ms, MiB" for name in names]
    heads += [f"{names[0]} / {name}" for name in names[1:]]
    print(f"| model | precision | processes | {' | '.join(heads)} |")
    for model, precision, processes in product(given.models, given.precisions, given.processes):
        sides = {name: partial(step, given, name, model, precision, processes) for name in names}
        cells, found = [], take_turns(sides, given.rounds)
        for one in map(medians, found.values()):
            cells.append(f"{one['seconds']:.3f}, {1e3 * one['log']:.2f}, {one['peak_mib']:.0f}")
        first, *others = found.values()
        for other in others:
            ratios = [one["seconds"] / two["seconds"] for one, two in zip(first, other, strict=True)]
            cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        print(f"| {model} | {precision} | {processes} | {' | '.join(cells)} |", flush=True)
    if given.what == "trace":
        print(records())
    print(json.dumps(machine.record(("vitctl", "torch"))))


def step(given: argparse.Namespace, side: str, model: str, precision: str, processes: int) -> Numbers:
    """Run `vitctl bench model`; return the mean seconds of a step and of its record, and the peak memory."""
    sets = {
        "lanes": ["schedule.lanes=8", f"schedule.leaf_images={given.leaf}"],
        "plain": [f"machine.micro_batch={given.leaf}"],
        "whole": [f"machine.micro_batch={-(-given.batch // processes)}"],
        "trace": ["log.trace=true"],
        "no trace": ["log.trace=false"],
    }[side]
    words = [model, "--synthetic", "--res", given.image_size, "--batch-size", given.batch]
    words += ["--precision", precision, "--processes", processes, "--seconds", given.seconds]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "step.json"
        command = [sys.executable, "-m", "vitctl", "bench", "model", *map(str, words), "--json", str(file)]
        command += [word for value in sets for word in ("--set", value)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(file.read_text())
    mib = found["peak_memory_bytes"] / 2**20
    return {"seconds": found["seconds"], "log": found["split"]["log"], "peak_mib": mib}


def records() -> str:
    """Time a digest of the weights of S/16, and a loader's checksums beside its decoding and cropping."""
    from vitctl.data.images.decode import open_picture
    from vitctl.data.images.transforms import TrainTransform, augmentation_rng
    from vitctl.data.source.stores import SyntheticSource
    from vitctl.engine.trace import weights_checksum
    from vitctl.models.build import build
    from vitctl.models.variants import variant

    model = build(variant("S/16", num_classes=1000, image_size=224), seed=0)
    digest = 1 / rate(partial(weights_checksum, model), 1.0)
    source, transform, made, check = SyntheticSource(100, 10, 256), TrainTransform(224), [], []
    for number in range(100):
        data = source.read(number)
        began = time.perf_counter()
        pixels = transform(open_picture(data), augmentation_rng(0, 0, number))
        decoded = time.perf_counter()
        zlib.crc32(data), zlib.crc32(pixels.permute(1, 2, 0).contiguous().numpy())
        made.append(decoded - began)
        check.append(time.perf_counter() - decoded)
    one, two = (1e3 * statistics.median(seconds) for seconds in (made, check))
    return (
        f"digest of the weights: {1e3 * digest:.1f} ms; in a loader worker {one:.2f} ms an image, "
        f"{two:.3f} for checksums"
    )


if __name__ == "__main__":
    main()
