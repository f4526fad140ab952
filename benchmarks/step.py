"""The training step of ViT-S/16 and B/16 at 224 beside timm's, in bf16 and float32: `python
benchmarks/step.py`.

Every setting of a side is a process of its own; the best one of each side, by a first step, and those that
both come with take turns. Of the larger model only the settings are tried that were best for the smaller one,
unless `--thorough`. On a CPU the number that is compared is seconds of the processor, on one thread, which
other work disturbs least; on a CUDA device, seconds by the wall clock. Memory is what a process holds at most
during a step, beyond its imported libraries.
"""

import argparse
import os
from pathlib import Path

from measure import RESULTS, Compared, Machine, Numbers, Row, matrix_rates, report, uncompiled
from sides import OURS, THEIRS, Work, compare, of_the_matrix_rate, tflops

LIBRARIES = ("torch", "timm", "accelerate")
GOAL, MEMORY_GOAL = 1.4, 1 / 0.9


def main() -> None:
    """Measure, print a table, and write results/step.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["S/16", "B/16"])
    parser.add_argument("--precisions", nargs="+", default=["bf16", "float32"], choices=["bf16", "float32"])
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=0, help="images of a step; 0: 8, or 128 on a GPU")
    parser.add_argument("--steps", type=int, default=0, help="of a turn; 0: 1, or 10 on a GPU")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--device", default="", choices=["", "cpu", "cuda"], help="else CUDA where there is one"
    )
    parser.add_argument("--number", default="", choices=["", "cpu", "wall"])
    parser.add_argument("--thorough", action="store_true", help="try all settings for every model")
    parser.add_argument(
        "--no-compile", action="store_true", help="leave torch.compile out, which takes a minute each"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(given.threads)  # of all processes

    import torch

    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    batch, steps, number = (128, 10, "wall") if device == "cuda" else (8, 1, "cpu")
    batch, steps, number = given.batch or batch, given.steps or steps, given.number or number
    machine, limits = Machine(), matrix_rates(device)
    rows: list[Row] = []
    for precision in given.precisions:
        choices = {"ours": OURS, "timm": THEIRS}
        choices = uncompiled(choices) if given.no_compile else choices
        for model in given.models:
            work = Work(model, given.image_size, batch, precision, device, steps)
            found = compare(work, number, given.rounds, choices)
            rows += rows_of(work, found, number, limits)
            if not given.thorough:
                choices = {side: found.narrowed(side, own) for side, own in choices.items()}
    report("step", rows, machine, limits, LIBRARIES, given.results)


def rows_of(work: Work, found: Compared, number: str, limits: Numbers) -> list[Row]:
    """Time and memory of the best settings and of those that both sides come with."""
    rows = [
        found.row(f"training step, {work}", number, GOAL),
        found.row(f"training step, as it comes, {work}", number, None, best=False),
        found.row(f"memory of a training step, {work}", "peak_mib", MEMORY_GOAL),
        found.row(f"memory of a training step, as it comes, {work}", "peak_mib", None, best=False),
    ]
    rows[0].notes["tflops"] = tflops(work, found, number)
    rows[0].notes["of_the_matrix_rate"] = of_the_matrix_rate(work, found, number, limits)
    return rows


if __name__ == "__main__":
    main()
