"""The paper's recipe against those of families: `python benchmarks/family_recipes.py TAR OUT`.

TAR has the JPEG files of CIFAR-10 (`train/<class>/NNNN.jpg`, `test/...`), OUT is a folder for shards and
runs; a second call reuses what is finished. A small ViT predicts masked patches of 20,000 images. It is then
fine-tuned on others of all ten classes by each recipe, for the same epochs, with three seeds, each with
images of its own; the accuracy is that on 2,000 test images. Prints the table, and writes
OUT/family_recipes.json.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tarfile
from pathlib import Path

SEEDS = (0, 1, 2)
LENGTHS = ((500, 10), (500, 40), (5_000, 2))  # training images, epochs
BATCH = {500: 32, 5_000: 512}  # that the recipes choose for them
BEFORE, TESTED = 2_000, 200  # images of each class: before, and tested
NETWORK = (
    *("model.name=Ti/8", "model.depth=4", "model.hidden_size=96", "model.mlp_size=384"),
    *("model.num_heads=3", "evaluation.every_steps=0"),
)
WAYS = {
    "`finetune`, the paper's": ("finetune", 0.0),
    "`mae_b16`, the rate by the root of the batch": ("mae_b16", 0.5),
    "`mae_b16`, the rate in proportion to the batch": ("mae_b16", 1.0),
    "`dinov2_finetune`, by the root": ("dinov2_finetune", 0.5),
}
PUBLISHED = {"mae_b16": (2e-3, 1024), "dinov2_finetune": (1e-4, 64)}  # rate, and the batch that it is for


def main() -> None:
    """Train what is missing, and show the table."""
    tar, out = Path(sys.argv[1]), Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    data = shards(tar, out)
    start = out / "start"
    vitctl(
        "pretrain", "--recipe", "masked_patch_b16", "--data", str(data["before"]), "--out", str(start),
        "--res", "32", "--batch-size", "128", "--epochs", "1", "--lr", "1e-3",
        *(word for value in NETWORK for word in ("--set", value)),
    )  # fmt: skip
    scores: dict[str, dict[str, list[float]]] = {name: {} for name in WAYS}
    for seed in SEEDS:  # outermost: all ways meet the same state of the machine
        for size, epochs in LENGTHS:
            for number, name in enumerate(WAYS):
                folder = out / f"{number}_{size}x{epochs}_{seed}"
                score = fine_tuned(name, data[f"{size}_{seed}"], start, folder, size, epochs, seed)
                scores[name].setdefault(f"{size:,} images, {epochs} epochs", []).append(score)
    (out / "family_recipes.json").write_text(json.dumps(scores, indent=1))
    heads = [f"{size:,} images, {epochs} epochs" for size, epochs in LENGTHS]
    print(f"| recipe | {' | '.join(heads)} |\n|---|---|---|---|")
    for name, row in scores.items():
        cells = [f"{statistics.mean(s):.1%} ({min(s):.1%} to {max(s):.1%})" for s in row.values()]
        print(f"| {name} | {' | '.join(cells)} |".replace("%", " %"))


def fine_tuned(name: str, data: Path, start: Path, folder: Path, size: int, epochs: int, seed: int) -> float:
    """Return the accuracy of one fine-tuning."""
    recipe, power = WAYS[name]
    words = ["finetune", "--recipe", recipe, "--from", str(start), "--data", str(data), "--out", str(folder)]
    words += ["--res", "32", "--epochs", str(epochs), "--seed", str(seed)]
    if power:
        rate, batch = PUBLISHED[recipe]
        words += ["--lr", f"{rate * (BATCH[size] / batch) ** power:g}", "--batch-size", str(BATCH[size])]
        words += ["--set", "weights.preprocess="]
    vitctl(*words, "--set", "evaluation.every_steps=0", "--set", "checkpoint.every_steps=0")
    return float(json.loads((folder / "result.json").read_text())["metrics"]["accuracy"])


def vitctl(*words: str) -> None:
    """Run a command unless its run is finished."""
    folder = Path(words[words.index("--out") + 1])
    if not (folder / "result.json").exists():
        sets = ("--set", "machine.device=cpu", "--set", "machine.workers=0")
        line, env = [sys.executable, "-m", "vitctl", *words, *sets], os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(line, check=True, stdout=subprocess.DEVNULL, env=env)
        print(*words[1:3], folder.name, flush=True)


def shards(tar: Path, out: Path) -> dict[str, Path]:
    """Write shards: images to pre-train on, and for each size and seed others, with the tested ones."""
    draws = {"before": (0, BEFORE)} | {
        f"{size}_{seed}": (BEFORE + seed * 500, size // 10) for seed in SEEDS for size in BATCH
    }
    with tarfile.open(tar) as images:
        members = {one.name: one for one in images.getmembers() if one.isfile()}
        classes = sorted({name.split("/")[-2] for name in members})
        for draw, (first, count) in draws.items():
            if (out / draw).exists():
                continue
            part = out / f"{draw}.tar"
            with tarfile.open(part, "w") as file:
                for label in classes:
                    for split, begin, number in (("train", first, count), ("test", 0, TESTED)):
                        some = sorted(name for name in members if f"{split}/{label}/" in name)
                        for name in random.Random(label).sample(some, len(some))[begin : begin + number]:
                            entry = tarfile.TarInfo(f"{split}/{label}/{Path(name).name}")
                            entry.size = members[name].size
                            file.addfile(entry, images.extractfile(members[name]))
            call = ["-m", "vitctl", "data", "shards", str(part), str(out / draw), "--workers", "0"]
            subprocess.run([sys.executable, *call], check=True, stdout=subprocess.DEVNULL)
            part.unlink()
    return {draw: out / draw for draw in draws}


if __name__ == "__main__":
    main()
