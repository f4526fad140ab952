"""How much of a run is not the step: `python benchmarks/waiting.py`.

A run of ViT-S/16 at 224 pixels on photographs by `vitctl pretrain`, with its log, record of steps, worker and
checkpoints. Then the same step alone: `TrainStep.update` on one batch that is in memory, at the end of that
same run, so with the same network, optimizer, precision and micro-batch. The share is what the run's step
took longer, by wall clock, from the beginning of an update to that of the next; the wait for images is the
log's own figure. Steps with a checkpoint count with the rest; the start and the first three do not.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from loader import PHOTOS, unpack
from measure import (
    Machine,
    Numbers,
    Row,
    Side,
    in_fresh_process,
    matrix_rates,
    question,
    report,
    script_options,
)

LIBRARIES = ("vitctl", "torch", "pillow", "simplejpeg")
SKIPPED = 3  # steps, while memory is taken


def main() -> None:
    """Measure, print, and write results/waiting.json."""
    asked = question()
    if asked:
        print(json.dumps(run(Path(asked["folder"]), asked["words"])))
        return
    parser = script_options(__doc__, rounds=3)
    parser.add_argument("--photos", type=Path, default=PHOTOS, help="a tar of JPEG files")
    parser.add_argument("--model", default="S/16")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    if not given.photos.is_file():
        sys.exit(f"{given.photos}: not there; give a tar of JPEG files with --photos")
    machine = Machine()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        unpack(given.photos, folder, 1)
        (folder / "data").mkdir()
        (folder / "shards").rename(folder / "data" / "train")
        asked = {"folder": name, "words": words(folder / "data", given)}
        found = [in_fresh_process(__file__, asked, OMP_NUM_THREADS="1") for _ in range(given.rounds)]
        limits = matrix_rates()
    report("waiting", [row(found, given)], machine, limits, LIBRARIES, given.results)


def row(found: list[Numbers], given: argparse.Namespace) -> Row:
    """The run's step against the step alone; goal: at most 2 % of a run is something else."""
    what = f"{given.model} at {given.image_size}, batch {given.batch_size}, {given.steps} steps: what is not the step"
    own = [{"seconds per step": numbers["run"], **numbers} for numbers in found]
    alone = [{"seconds per step": numbers["alone"]} for numbers in found]
    notes = {
        "share that is not the step": statistics.median(share(numbers) for numbers in found),
        "share outside of the update, in the run": statistics.median(
            1 - n["inside"] / n["run"] for n in found
        ),
        "data-wait": statistics.median(numbers["waited"] for numbers in found),
    }
    sides = (
        Side("`vitctl pretrain`, all it does", own),
        Side("`TrainStep.update` on a batch in memory", alone),
    )
    return Row(what, "seconds per step", "less", *sides, 0.98, notes)


def share(numbers: Numbers) -> float:
    """Of a run's time, what is not the step alone."""
    return 1 - numbers["alone"] / numbers["run"]


def words(data: Path, given: argparse.Namespace) -> list[str]:
    """The recipe of the run."""
    sets = [
        f"model.name={given.model}",
        "checkpoint.every_steps=20",
        "machine.workers=1",
        "data.eval_split=",
        "schedule.warmup_steps=2",
    ]
    return [
        *("--recipe", "in1k_b16", "--data", str(data), "--res", str(given.image_size)),
        *("--batch-size", str(given.batch_size), "--steps", str(given.steps)),
        *(word for each in sets for word in ("--set", each)),
    ]


def run(folder: Path, given: list[str]) -> Numbers:
    """`vitctl pretrain`, then its last step again and again."""
    from vitctl.cli.app import main as vitctl
    from vitctl.engine.step import TrainStep

    out, kept, begins, inside, alone = folder / str(time.monotonic_ns()), [], [], [], []
    update = TrainStep.update

    def keeping(self: TrainStep, step: int, micro_batches: Any) -> Any:
        kept[:] = [self, step, micro_batches]
        began = time.perf_counter()
        result = update(self, step, micro_batches)
        begins.append(began)
        inside.append(time.perf_counter() - began)
        return result

    TrainStep.update = keeping  # type: ignore[method-assign]
    sys.argv = ["vitctl", "pretrain", *given, "--out", str(out)]
    with suppress(SystemExit):
        vitctl()
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    last = [record for record in records if record["kind"] == "train"][-1]
    trainer, step, micro_batches = kept
    for _ in range(SKIPPED + 10):
        began = time.perf_counter()
        update(trainer, step, micro_batches)
        trainer.changing.release()  # gives back the lock on the weights, as the loop does
        alone.append(time.perf_counter() - began)
    return {
        "run": (begins[-1] - begins[SKIPPED]) / (len(begins) - 1 - SKIPPED),
        "waited": last["data_wait"],
        "inside": statistics.mean(inside[SKIPPED:-1]),
        "alone": statistics.median(alone[SKIPPED:]),
    }


if __name__ == "__main__":
    main()
