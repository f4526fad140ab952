"""Training on JPEG files of CIFAR-10 from the command line, beside the same on timm's library: `python
benchmarks/end_to_end.py`.

A ViT of 4 layers and 128 channels, 32 pixels in patches of 4, AdamW, cosine, Inception crops. Ours is `vitctl
pretrain` as typed, on shards of the files; the peer (peers/timm_cifar.py) reads the files. One thread and one
worker each. Compared are images/s of the training steps, the median of the log, and seconds from the start of
the command to the first evaluation with the accuracy asked for, imports, data and evaluations included.
`loss` and `accuracy` of the last evaluation show that both learn the same.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from measure import (
    Machine,
    Numbers,
    Row,
    Side,
    decode_rate,
    matrix_rates,
    report,
    script_options,
    take_turns,
)

PHOTOS = Path(__file__).resolve().parents[2] / "shared" / "data" / "cifar10-jpeg.tar"
PEER = Path(__file__).resolve().parent / "peers" / "timm_cifar.py"
LIBRARIES = ("vitctl", "torch", "timm", "torchvision", "pillow", "simplejpeg")
LR, WEIGHT_DECAY = 2e-3, 0.05


def main() -> None:
    """Measure, print, and write results/end_to_end.json."""
    parser = script_options(__doc__, rounds=3)
    parser.add_argument(
        "--photos", type=Path, default=PHOTOS, help="a tar of train/CLASS/*.jpg and test/CLASS/*.jpg"
    )
    parser.add_argument("--train", type=int, default=20_000, help="images of the training split")
    parser.add_argument("--test", type=int, default=1_000, help="images that are scored")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=30, help="steps between evaluations")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--accuracy", type=float, default=0.3)
    parser.add_argument("--precision", choices=("bf16", "float32"), default="float32")
    given = parser.parse_args()
    if not given.photos.is_file():
        sys.exit(f"{given.photos}: not there; give a tar of JPEG files with --photos")
    machine = Machine()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        contents = unpack(given.photos, folder / "photos", given.train, given.test)
        sides = {"ours": partial(ours, folder, given), "theirs": partial(theirs, folder, given)}
        found = take_turns(sides, given.rounds)
        limits = {**decode_rate(contents), **matrix_rates()}
    report("end_to_end", rows(found, given), machine, limits, LIBRARIES, given.results)


def rows(found: dict[str, list[Numbers]], given: argparse.Namespace) -> list[Row]:
    """Both figures; without the second where a run did not get that far."""
    peer = (
        f"create_loader, 1 worker, AdamW fused, {'autocast bf16' if given.precision == 'bf16' else 'float32'}"
    )
    own, other = (
        Side(f"`vitctl pretrain`, {given.precision}, 1 worker", found["ours"]),
        Side(peer, found["theirs"]),
    )
    what = f"CIFAR-10 JPEG, ViT of 4 x 128, batch {given.batch_size}, {given.steps} steps"
    of_all = [Row(what, "images/s", "more", own, other, 1.5)]
    if all(math.isfinite(one["seconds to accuracy"]) for side in found.values() for one in side):
        to = f"{what}, to {given.accuracy:.0%}"
        of_all.append(Row(to, "seconds to accuracy", "less", own, other, 1.5))
    return of_all


def ours(folder: Path, given: argparse.Namespace) -> Numbers:
    """`vitctl pretrain` in a new folder, on the shards."""
    shards, out = folder / "shards", folder / str(time.monotonic_ns())
    if not shards.exists():
        run((sys.executable, "-m", "vitctl", "data", "shards", str(folder / "photos"), str(shards)))
    values = {
        "model.pre_logits": "false",
        "data.dataset": '""',
        "data.crop": "inception",
        "data.train_resize": 0,
        "data.resample": "bilinear_antialias",
        "data.mean": "[0.5,0.5,0.5]",
        "data.std": "[0.5,0.5,0.5]",
        "schedule.batch_size": given.batch_size,
        "schedule.warmup_steps": warmup(given),
        "optimizer.lr": LR,
        "optimizer.weight_decay": WEIGHT_DECAY,
        "evaluation.every_steps": given.every,
        "log.every_steps": given.every,
        "checkpoint.every_steps": given.steps,
        "machine.workers": 1,
    }
    sets = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    words = ("pretrain", "--recipe", "cifar10_small", "--data", str(shards), "--steps", str(given.steps))
    began = time.time()
    run((sys.executable, "-m", "vitctl", *words, "--precision", given.precision, *sets, "--out", str(out)))
    return numbers((out / "log.jsonl").read_text().splitlines(), began, given.accuracy)


def theirs(folder: Path, given: argparse.Namespace) -> Numbers:
    """The same on timm's library."""
    words = [
        f"--data={folder / 'photos'}",
        f"--steps={given.steps}",
        f"--warmup={warmup(given)}",
        f"--every={given.every}",
    ]
    words += [f"--batch-size={given.batch_size}", f"--lr={LR}", f"--weight-decay={WEIGHT_DECAY}"]
    words += ["--bf16"] if given.precision == "bf16" else []
    began = time.time()
    done = run((sys.executable, str(PEER), *words))
    return numbers(done.splitlines(), began, given.accuracy)


def warmup(given: argparse.Namespace) -> int:
    """A tenth of the steps."""
    return max(1, given.steps // 10)


def run(command: Sequence[str]) -> str:
    """Run a command with one thread for matrix products, to its end; returns what it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout


def numbers(lines: Sequence[str], began: float, accuracy: float) -> Numbers:
    """From the lines of a log. A run that never reaches the accuracy counts as infinitely slow."""
    records: list[dict[str, Any]] = [json.loads(line) for line in lines if line.startswith("{")]
    rates = [record["images_per_second"] for record in records if record["kind"] == "train"]
    scores = [
        (record["time"] - began, record["accuracy"]) for record in records if record["kind"] == "evaluate"
    ]
    reached = [seconds for seconds, score in scores if score >= accuracy]
    return {
        "images/s": statistics.median(rates[1:] or rates),
        "seconds to accuracy": min(reached, default=float("inf")),
        "last accuracy": scores[-1][1],
        "seconds in all": scores[-1][0],
    }


def unpack(photos: Path, folder: Path, num_train: int, num_test: int) -> list[bytes]:
    """The first images of each class of both splits as files; returns some of them."""
    wanted, some = {"train": num_train, "test": num_test}, []
    with tarfile.open(photos) as tar:
        seen: dict[str, int] = {}
        classes = 10
        for member in tar:
            split, kind, _ = member.name.split("/")
            place = f"{split}/{kind}"
            if not member.isreg() or seen.get(place, 0) >= wanted[split] // classes:
                continue
            seen[place] = seen.get(place, 0) + 1
            data = tar.extractfile(member).read()  # type: ignore[union-attr]
            (folder / place).mkdir(parents=True, exist_ok=True)
            (folder / member.name).write_bytes(data)
            some += [data] if len(some) < 500 else []
    return some


if __name__ == "__main__":
    main()
