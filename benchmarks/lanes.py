"""What the same bytes on any number of processes cost: a training step with schedule.lanes against one
without, in one run.

    python benchmarks/lanes.py --models Ti/16 S/16 --processes 1 2 --batch 64 --leaf 8

Both sides train the same model on the same images with AdamW and clipping, in interleaved rounds, in every
process with one thread: `lanes` adds leaves in the fixed tree, `plain` is DDP with the same leaves as
micro-batches, `whole` is DDP with each share in one pass. The rest of a machine's load falls on all sides
alike. Memory is the peak of a process that runs one side alone.
"""

import argparse
import json
import os
import platform
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vitctl.engine.distributed.exact import exact
from vitctl.engine.loop import Trainer

from vitctl.data.loader.batches import Batch
from vitctl.data.loader.lanes import Lanes, own_slots
from vitctl.engine.distributed.gradients import AllReduced, ByLanes, Gradients
from vitctl.engine.distributed.lane_sum import LaneSum
from vitctl.engine.distributed.process_group import join
from vitctl.engine.distributed.runtime import Runtime, start
from vitctl.engine.losses import classify
from vitctl.engine.optimizer import build_optimizer
from vitctl.engine.preemption import StopFlag
from vitctl.models.build import build
from vitctl.models.variants import variant

SIDES = ("lanes", "plain", "whole")
NUM_CLASSES, SIDE, NUM_LANES = 1000, 224, 8


def main() -> None:
    """Start the processes of each setting, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["Ti/16", "S/16"])
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--precisions", nargs="+", default=["bf16", "float32"])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--leaf", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--member", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.member:
        print(json.dumps(member(**json.loads(given.member))))
        return
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch "
          f"{torch.__version__}, "
          f"batch {given.batch}, {NUM_LANES} lanes, leaves of {given.leaf}, medians of {given.rounds} "
          f"interleaved rounds")  # fmt: skip
    print(
        "| model | precision | processes | lanes | plain | whole | lanes / plain | lanes / whole | MiB "
        "lanes, plain, whole |"
    )
    rows = []
    for name in given.models:
        for precision in given.precisions:
            for processes in given.processes:
                setting = {"name": name, "precision": precision, "batch": given.batch, "leaf": given.leaf}
                seconds = run(processes, {**setting, "sides": SIDES, "rounds": given.rounds})["seconds"]
                memory = {
                    side: run(processes, {**setting, "sides": [side], "rounds": 1})["peak_mib"]
                    for side in SIDES
                }
                row = {**setting, "processes": processes, "seconds": seconds, "peak_mib": memory}
                rows.append(row)
                one, same, whole = (statistics.median(seconds[side]) for side in SIDES)
                print(f"| {name} | {precision} | {processes} | {one:.3f} s | {same:.3f} s | {whole:.3f} s | "
                      f"{one / same:.3f} "
                      f"| {one / whole:.3f} | "
                      f"{' / '.join(f'{memory[side]:.0f}' for side in SIDES)} |", flush=True)  # fmt: skip
    if given.json:
        given.json.write_text(
            json.dumps({"machine": platform.machine(), "cores": os.cpu_count(), "rows": rows}, indent=1)
        )


def run(processes: int, setting: dict[str, Any]) -> dict[str, Any]:
    """What rank 0 of several processes measured."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
    }
    line = [sys.executable, __file__, "--member", json.dumps({**setting, "processes": processes})]
    members = [
        subprocess.Popen(
            line,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **place, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(processes)
    ]
    said = [process.communicate()[0] for process in members]
    assert not any(process.returncode for process in members)
    return dict(json.loads(said[0].splitlines()[-1]))


def member(
    name: str, precision: str, batch: int, leaf: int, sides: list[str], rounds: int, processes: int
) -> dict[str, Any]:
    """One process: the seconds of each side's steps, and the peak of its memory."""
    if processes > 1:
        join(cpu=True)
    runtime = start(precision=precision, device="cpu", processes=processes)
    lanes = Lanes(batch, NUM_LANES, leaf)
    steps = {side: prepared(side, runtime, name, lanes) for side in sides}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds + 1):
        for side, step in steps.items():
            runtime.wait()
            began = time.perf_counter()
            step(number)
            seconds[side].append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": {side: found[1:] for side, found in seconds.items()}, "peak_mib": peak}


def prepared(side: str, runtime: Runtime, name: str, lanes: Lanes) -> Callable[[int], None]:
    """A function that does a training step of one side."""
    model = build(variant(name, image_size=SIDE, num_classes=NUM_CLASSES), seed=0)
    own = len(
        own_slots(lanes.batch_size, lanes if side == "lanes" else None, runtime.rank, runtime.num_processes)
    )
    size = own if side == "whole" else lanes.leaf_images
    generator = torch.Generator().manual_seed(runtime.rank)
    batches = [images(min(size, own - first), generator) for first in range(0, own, size)]
    wrapped = runtime.wrap(model, ddp=side != "lanes")
    gradients: Gradients = AllReduced(runtime, wrapped, 0)
    if side == "lanes":
        gradients = ByLanes(runtime, model, 0, LaneSum(lanes, runtime.rank, runtime.num_processes))
    normalise = partial(runtime.images, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    trainer = Trainer(
        runtime=runtime,
        model=wrapped,
        unwrapped=model,
        optimizer=build_optimizer(
            model, name="adam", weight_decay=0.1, beta1=0.9, beta2=0.999, eps=1e-8, momentum=0.9
        ),
        average=None,
        objective=partial(classify, normalise=normalise, name="softmax", label_smoothing=0.0),
        gradients=gradients,
        lr=lambda _step: 1e-4,
        batch_size=lanes.batch_size,
        clip_norm=1.0,
        stop=StopFlag(),
    )

    def step(number: int) -> None:
        if side != "lanes":
            trainer.update(number, batches)
            return
        with exact(runtime, 1):
            trainer.update(number, batches)

    return step


def images(size: int, generator: torch.Generator) -> Batch:
    """Random pixels and labels."""
    pixels = torch.randint(0, 256, (size, SIDE, SIDE, 3), dtype=torch.uint8, generator=generator).permute(
        0, 3, 1, 2
    )
    labels = torch.randint(0, NUM_CLASSES, (size,), generator=generator)
    return Batch(pixels, labels, torch.ones(size), torch.arange(size))


if __name__ == "__main__":
    main()
