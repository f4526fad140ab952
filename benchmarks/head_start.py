"""What the head that fine-tuning starts from does to accuracy: `python benchmarks/head_start.py SHARDS OUT`.

SHARDS are those of CIFAR-10 (`vitctl data shards cifar10-jpeg.tar SHARDS`), OUT a folder for runs; a second
call resumes. A ViT of 4 layers is pre-trained for three epochs on six of the classes, then fine-tuned on 50,
500 and 5,000 images of the other four, three draws and seeds each, from a zero head and from the few-shot
solution. 2,000 test images of the four classes are scored after half of the steps and at the end.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from vitctl.engine.journal import LOG, read_records
from vitctl.launch.prepare_run import prepare_run
from vitctl.launch.worker import launch
from vitctl.recipe.load import load_recipe

BEFORE = ("airplane", "bird", "cat", "frog", "ship", "truck")
AFTER = ("automobile", "deer", "dog", "horse")
STEPS = {50: 40, 500: 80, 5000: 120}
BATCH = {50: 16, 500: 32, 5000: 64}
SEEDS, RATES, HEADS = (0, 1, 2), (0.01, 0.03), ("zero", "fewshot")
NETWORK = {
    "model.name": "Ti/8",
    "model.depth": 4,
    "model.hidden_size": 96,
    "model.mlp_size": 384,
    "model.num_heads": 4,
    "model.pre_logits": False,
}
ALONE = {"machine.device": "cpu", "machine.workers": 0, "machine.precision": "float32", "log.trace": False}


def main() -> None:
    """Train what is missing, print the table, and write OUT/head_start.json."""
    shards, out = sys.argv[1], Path(sys.argv[2])
    start = out / "pretrained"
    length = {"schedule.total_epochs": 3.0, "evaluation.every_steps": 0, "log.every_steps": 50}
    run("cifar10_small", start, shards, BEFORE, {**NETWORK, **length})
    rows = []
    for rate in RATES:
        for num, steps in STEPS.items():
            for head in HEADS:
                tuned = [fine_tuned(start, out, shards, num, steps, rate, head, seed) for seed in SEEDS]
                rows.append({"images": num, "lr": rate, "head": head, "steps": steps, "runs": tuned})
                early, last = ([each[name] for each in tuned] for name in ("half", "end"))
                print(
                    f"{num:>5} images  lr {rate:<6g} {head:8} {statistics.mean(early):7.2%} after half, "
                    f"{statistics.mean(last):7.2%} at the end (deviation {statistics.pstdev(last):.2%})",
                    flush=True,
                )
    (out / "head_start.json").write_text(json.dumps(rows, indent=1))


def fine_tuned(
    start: Path, out: Path, shards: str, num: int, steps: int, rate: float, head: str, seed: int
) -> dict[str, Any]:
    """Return the accuracies of one training after half of its steps and at its end, and its head."""
    folder = out / f"{num}_{rate:g}_{head}_{seed}"
    values = {
        "weights.source": str(start),
        "finetune.head": head,
        "optimizer.lr": rate,
        "seed": seed,
        "data.subset_images": num,
        "data.subset_seed": seed,
        "data.crop": "random",
        "data.train_resize": 40,
        "schedule.batch_size": BATCH[num],
        "schedule.total_steps": steps,
        "schedule.warmup_steps": steps // 10,
        "evaluation.every_steps": steps // 2,
        "data.eval_split": "test[:50%]",
    }
    result = run("finetune", folder, shards, AFTER, values)
    scores = {
        record["step"]: record["accuracy"]
        for record in read_records(folder / LOG)
        if record["kind"] == "evaluate"
    }
    solved = result["provenance"].get("head_solved")
    return {"seed": seed, "half": scores[steps // 2], "end": scores[steps], "solved": solved}


def run(
    recipe: str, folder: Path, shards: str, classes: tuple[str, ...], values: dict[str, Any]
) -> dict[str, Any]:
    """Return the result of a run of CPU trainings on some classes; a finished one is only read."""
    given = {"data.dataset": "", "data.path": shards, "data.classes": classes, **ALONE, **values}
    prepared = prepare_run(load_recipe(recipe, [*given.items()]), folder)
    return launch(folder, lambda _: None, prepared=prepared)


if __name__ == "__main__":
    main()
