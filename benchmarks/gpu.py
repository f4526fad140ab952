"""Training steps of B/16, L/16, H/14 and R50+B/16 on a GPU beside timm with torch.compile: `python
benchmarks/gpu.py`.

The best of each side's settings are compared by the wall clock, in bf16; MFU is the share of the rate of a
matrix product that is measured in the same run, not of a data sheet. A batch that does not fit is halved for
both sides. Where there is no CUDA device the script says so and ends with code 3, and nothing is written;
`--device cpu --models Ti/16 --image-size 32` tries its logic.
"""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

from measure import (
    DEFAULT,
    RESULTS,
    Choices,
    Compared,
    Machine,
    Row,
    SideError,
    matrix_rates,
    medians,
    report,
    uncompiled,
)
from sides import OURS, OUT_OF_MEMORY, Work, compare, of_the_matrix_rate, tflops

LIBRARIES = ("torch", "timm", "accelerate", "triton")
NO_DEVICE = 3
BATCHES = {"B/16": 256, "L/16": 128, "H/14": 64, "R50+B/16": 128}
GOAL = 1.15
MFU_GOALS = {"B/16": 0.5, "L/16": 0.6, "H/14": 0.65}
THEIRS = {
    DEFAULT: {},
    "fused AdamW": {"fused": True},
    "fused AdamW, compiled": {"fused": True, "compile": True},
}


def main() -> None:
    """Measure, print tables, and write results/gpu.json and gpu.md."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(BATCHES))
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=0, help="images of a step; 0: by the model")
    parser.add_argument("--steps", type=int, default=10, help="of a turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()

    import torch

    if given.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured", file=sys.stderr)
        sys.exit(NO_DEVICE)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    machine, limits = Machine(), matrix_rates(given.device)
    choices = {"ours": OURS, "timm": THEIRS}
    choices = uncompiled(choices) if given.no_compile else choices
    rows, lines = [], list(TABLE_HEAD)
    for model in given.models:
        batch = given.batch or BATCHES.get(model, 8)
        work = Work(model, given.image_size, batch, "bf16", given.device, given.steps)
        work, found = compare_what_fits(work, given.rounds, choices)
        mfu = of_the_matrix_rate(work, found, "wall", limits)
        speed, memory = rows_of(work, found, mfu)
        rows += [speed, memory]
        lines.append(line(work, speed, memory, mfu))
    table = "\n".join(lines)
    report("gpu", rows, machine, limits, LIBRARIES, given.results)
    (given.results / "gpu.md").write_text(table + "\n")
    print(f"\n{table}")


def compare_what_fits(work: Work, rounds: int, choices: dict[str, Choices]) -> tuple[Work, Compared]:
    """Compare both sides, with the batch halved until it fits for both as they come; returns that batch, too."""
    while True:
        try:
            return work, compare(work, "wall", rounds, choices)
        except SideError as error:
            if error.code != OUT_OF_MEMORY or work.batch == 1:
                raise
            work = replace(work, batch=work.batch // 2)


def rows_of(work: Work, found: Compared, mfu: dict[str, float]) -> tuple[Row, Row]:
    """Time and memory, with MFU and its goal."""
    speed, memory = (
        found.row("training step", "wall", GOAL),
        found.row("memory of a training step", "peak_mib", 1 / 0.9),
    )
    goal = MFU_GOALS.get(work.model)
    speed.notes |= {
        "tflops": tflops(work, found, "wall"),
        "mfu": mfu,
        "mfu_goal": goal,
        "mfu_reached": None if goal is None else mfu["ours"] >= goal,
    }
    return speed, memory


TABLE_HEAD = (
    "| model | images | ours: images/s, settings | timm: images/s, settings | times as fast | MFU, ours | "
    "MFU, timm | MFU, goal "
    "| GiB, ours | GiB, timm |",
    "|---|---|---|---|---|---|---|---|---|---|",
)


def line(work: Work, speed: Row, memory: Row, mfu: dict[str, float]) -> str:
    """A model in the table."""
    rates = [work.batch / medians(side.rounds)["wall"] for side in (speed.ours, speed.theirs)]
    gib = [medians(side.rounds)["peak_mib"] / 1024 for side in (memory.ours, memory.theirs)]
    goal = MFU_GOALS.get(work.model)
    return (
        f"| {work.model} | {work.batch} | {rates[0]:.1f}, {speed.ours.settings} | {rates[1]:.1f}, "
        f"{speed.theirs.settings} "
        f"| {speed.ratio:.2f} | {mfu['ours']:.1%} | {mfu['timm']:.1%} | "
        f"{'' if goal is None else f'{goal:.0%}'} "
        f"| {gib[0]:.1f} | {gib[1]:.1f} |"
    )


if __name__ == "__main__":
    main()
