"""What each way to fine-tune does to accuracy, time and memory: `python benchmarks/fine_tuning.py TAR OUT`.

TAR has the JPEG files of CIFAR-10 (`train/<class>/NNNN.jpg`, `test/...`), OUT is a folder for shards and
runs; a second call reuses what is finished. A ViT of 6 layers with 4-pixel patches is pre-trained on five of
the classes, then fine-tuned on 1,080 images of the other five: once 216 of each class, once with a long tail.
Each way first tries three learning rates with seed 0, scored by the mean per class on 1,000 images kept from
training; while the best is the lowest or highest, the next one is tried. The best is used with three seeds,
each with images of its own, on test images: 500 of each class, or with the proportions of the long tail.

Each training is a process with one thread. CPU seconds are those of its updates and of solving the head,
without start and scoring; memory is the peak of the process until the last update.
"""

import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

BEFORE = ("airplane", "bird", "cat", "frog", "truck")
AFTER = ("automobile", "deer", "dog", "horse", "ship")
Counts = tuple[int, ...]
EVEN: Counts = (216,) * 5
TAIL: Counts = (500, 280, 160, 90, 50)
TESTED = {EVEN: (500,) * 5, TAIL: (1000, 560, 320, 180, 100)}
NUM_HELD_OUT = 200  # of each class
SEEDS = (0, 1, 2)
STEPS, BATCH = 60, 32
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
NETWORK = {
    "model.name": "Ti/4",
    "model.depth": 6,
    "model.hidden_size": 96,
    "model.mlp_size": 384,
    "model.num_heads": 3,
    "model.pre_logits": False,
}
ALONE = {
    "machine.device": "cpu",
    "machine.workers": 0,
    "data.dataset": "",
    "log.trace": False,
}
# name: keys of the recipe, and the first rate to try
WAYS: dict[Counts, dict[str, tuple[dict[str, Any], float]]] = {
    EVEN: {
        "every weight": ({}, 1e-3),
        '`finetune.freeze = "3 blocks"`': ({"finetune.freeze": "3 blocks"}, 1e-3),
        '`finetune.freeze = "backbone"`': ({"finetune.freeze": "backbone"}, 3e-3),
        '`finetune.head = "fewshot"`': ({"finetune.head": "fewshot"}, 1e-3),
        "`optimizer.layer_decay = 0.75`": ({"optimizer.layer_decay": 0.75}, 1e-3),
        "`lora.rank = 8`": ({"lora.rank": 8}, 3e-3),
    },
    TAIL: {
        "neither": ({}, 1e-3),
        '`loss.class_weights = "balanced"`': ({"loss.class_weights": "balanced"}, 1e-3),
        '`loss.class_weights = "sqrt"`': ({"loss.class_weights": "sqrt"}, 1e-3),
        '`data.sampling = "balanced"`': ({"data.sampling": "balanced"}, 1e-3),
    },
}
CHILD = "--train-here"  # first argument of the process of one training


def main() -> None:
    """Train what is missing, print the tables, and write OUT/fine_tuning.json."""
    tar, out = Path(sys.argv[1]), Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    draws = shards_of_draws(tar, out)
    before = out / "before"
    make_shards(tar, before)
    values = {
        **NETWORK,
        "data.classes": BEFORE,
        "data.path": str(before),
        "machine.precision": "bf16",
        "schedule.total_epochs": 3.0,
        "evaluation.every_steps": 0,
    }
    numbers = trained("cifar10_small", out / "pretrained", values)
    print(f"pre-training: accuracy {numbers['accuracy']:.2%}, {numbers['cpu']:.0f} CPU s", flush=True)
    rows = []
    for counts, ways in WAYS.items():
        rates = {name: best_rate(out, draws, counts, name) for name in ways}
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
        for seed in SEEDS:  # outermost: all ways meet the same state of the machine
            for name in ways:
                runs[name].append(fine_tuned(out, draws, counts, name, rates[name][0], seed, "test"))
        print(table(rates, runs), flush=True)
        rows += [
            {"images": counts, "way": name, "lr": rates[name][0], "tried": rates[name][1], "runs": runs[name]}
            for name in ways
        ]
    (out / "fine_tuning.json").write_text(json.dumps(rows, indent=1))


def table(rates: dict[str, tuple[float, dict[float, float]]], runs: dict[str, list[dict[str, Any]]]) -> str:
    """Return the Markdown table of some ways."""
    lines = [
        "| way | learning rate | accuracy | mean per class | CPU s | peak memory, MiB | trained parameters |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, some in runs.items():
        scores = [
            f"{statistics.mean(values):.1%} ± {100 * statistics.stdev(values):.1f}".replace("%", " %", 1)
            for values in ([each[key] for each in some] for key in ("accuracy", "mean_per_class"))
        ]
        cpu, peak = (statistics.mean(each[key] for each in some) for key in ("cpu", "peak_mib"))
        lines.append(
            f"| {name} | {rates[name][0]:g} | {scores[0]} | {scores[1]} | {cpu:.1f} | {peak:.0f} "
            f"| {some[0]['trained_parameters']:,} |"
        )
    return "\n".join(lines)


def shards_of_draws(tar: Path, out: Path) -> dict[tuple[Counts, int], Path]:
    """Write shards of each draw: its training images, the held-out images, and its test images."""
    draws = {
        (counts, seed): out / f"{'even' if counts == EVEN else 'tail'}_{seed}"
        for counts in WAYS
        for seed in SEEDS
    }
    with tarfile.open(tar) as images:
        members = {member.name: member for member in images.getmembers() if member.isfile()}
        for (counts, seed), folder in draws.items():
            if folder.exists():
                continue
            part = folder.with_suffix(".tar")
            with tarfile.open(part, "w") as file:
                for label, num, tested in zip(AFTER, counts, TESTED[counts], strict=True):
                    train, test = (
                        random.Random(label).sample(some, len(some))
                        for some in (
                            sorted(name for name in members if f"{split}/{label}/" in name)
                            for split in ("train", "test")
                        )
                    )
                    first = NUM_HELD_OUT + seed * TAIL[0]
                    places = {
                        "train": train[first : first + num],
                        "validation": train[:NUM_HELD_OUT],
                        "test": test[:tested],
                    }
                    for split, names in places.items():
                        for name in names:
                            entry = tarfile.TarInfo(f"{split}/{label}/{Path(name).name}")
                            entry.size = members[name].size
                            file.addfile(entry, images.extractfile(members[name]))
            make_shards(part, folder)
            part.unlink()
    return draws


def make_shards(tar: Path, folder: Path) -> None:
    """Write shards of all images of a tar, unless they are there."""
    if not folder.exists():
        call = ["-m", "vitctl", "data", "shards", str(tar), str(folder), "--workers", "0"]
        subprocess.run([sys.executable, *call], check=True, stdout=subprocess.DEVNULL)


def best_rate(
    out: Path, draws: dict[tuple[Counts, int], Path], counts: Counts, name: str
) -> tuple[float, dict[float, float]]:
    """Return the learning rate with the best mean per class on held-out images, and those of all tried."""
    at = RATES.index(WAYS[counts][name][1])
    wanted, tried = set(RATES[at - 1 : at + 2]), dict[float, float]()
    while wanted:
        for rate in sorted(wanted):
            tried[rate] = fine_tuned(out, draws, counts, name, rate, 0, "validation")["mean_per_class"]
        at = RATES.index(max(tried, key=lambda rate: tried[rate]))
        wanted = set(RATES[max(at - 1, 0) : at + 2]) - set(tried)
    print(name, {rate: f"{score:.2%}" for rate, score in tried.items()}, flush=True)
    return RATES[at], tried


def fine_tuned(
    out: Path,
    draws: dict[tuple[Counts, int], Path],
    counts: Counts,
    name: str,
    rate: float,
    seed: int,
    split: str,
) -> dict[str, Any]:
    """Return the numbers of one fine-tuning."""
    values = {
        "weights.source": str(out / "pretrained"),
        "data.path": str(draws[counts, seed]),
        "data.classes": AFTER,
        "data.eval_split": split,
        "data.crop": "random",
        "data.train_resize": 40,
        "optimizer.name": "adam",
        "optimizer.lr": rate,
        "schedule.batch_size": BATCH,
        "schedule.total_steps": STEPS,
        "schedule.warmup_steps": STEPS // 10,
        "machine.precision": "float32",
        "seed": seed,
        **WAYS[counts][name][0],
    }
    number = list(WAYS[counts]).index(name)
    return trained("finetune", out / f"{draws[counts, seed].name}_{number}_{rate:g}_{split}", values)


def trained(recipe: str, folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of a training in a process of its own; those of a finished one are only read."""
    numbers = folder / "numbers.json"
    if not numbers.exists():
        call = [sys.executable, __file__, CHILD, recipe, str(folder), json.dumps({**ALONE, **values})]
        subprocess.run(call, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return dict(json.loads(numbers.read_text()))


def train_here(recipe: str, folder: Path, values: dict[str, Any]) -> None:
    """Train in this process, and write its numbers into the folder."""
    # Not at the top: the parent stays small, since a child's peak counts its parent's memory at the start.
    from safetensors import safe_open

    from vitctl.launch.prepare_run import prepare_run
    from vitctl.launch.worker import launch
    from vitctl.recipe.load import load_recipe

    cpu: dict[str, float] = {}
    peak: dict[str, int] = {}

    def report(record: dict[str, Any]) -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        kind = "first" if record["kind"] == "now" and record.get("step") == 0 else record["kind"]
        cpu[kind], peak[kind] = used.ru_utime + used.ru_stime, used.ru_maxrss // 1024

    prepared = prepare_run(load_recipe(recipe, [*values.items()]), folder)
    result = launch(folder, report, prepared=prepared)
    weights = next(folder.glob("checkpoints/*/model.safetensors"))
    with safe_open(weights, "np") as tensors:
        names = list(tensors.keys())
        every = sum(math.prod(tensors.get_slice(name).get_shape()) for name in names)
    head = cpu["head"] - cpu["weights"] if "head" in cpu else 0.0
    numbers = {
        "accuracy": result["metrics"]["accuracy"],
        "mean_per_class": result["metrics"]["mean_per_class"],
        "cpu": cpu["train"] - cpu["first"] + head,
        "head_cpu": head,
        "start_mib": peak["first"],
        "peak_mib": peak["train"],
        "trained_parameters": result["provenance"].get("trained_parameters", every),
    }
    (folder / "numbers.json").write_text(json.dumps(numbers))


if __name__ == "__main__":
    if sys.argv[1] == CHILD:
        train_here(sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4]))
    else:
        main()
