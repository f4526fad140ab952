"""How long training stands still for a checkpoint: written in the background, and written while it waits.

    python benchmarks/saving.py --model L/16 --out /tmp/saving

The steps of a stand-in training (a matrix product) go on meanwhile, so that a write that holds the interpreter shows in them.
"""

import argparse
import shutil
import statistics
import time
from pathlib import Path

import torch

from vitctl.engine.averaging import Average
from vitctl.engine.checkpoint.saving import Saver, parts
from vitctl.engine.journal import Journal
from vitctl.engine.optimizer import build_optimizer
from vitctl.models.build import build
from vitctl.models.variants import variant


def main() -> None:
    """Print the medians as a line of a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="B/16")
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    config = variant(given.model, image_size=224, num_classes=1000)
    model = build(config, seed=0).to(given.device)
    optimizer = build_optimizer(model, name="adam", weight_decay=0.1, beta1=0.9, beta2=0.999, eps=1e-8, momentum=0.9)
    average = Average(model, 0.999)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    saver = Saver(given.out / "checkpoints", config, {}, 1, 0, Journal(None))

    def save(step: int, wait: bool) -> tuple[float, float]:
        """Seconds that the training waits, and the longest gap between two steps until all is on disk."""
        synchronise(given.device)
        began = time.perf_counter()
        saver.start(step, parts(model, average, optimizer), {}, {})
        if wait:
            assert saver.finish() == ""
        stall = time.perf_counter() - began
        gap = longest_step(saver, given.device)
        assert saver.finish() == ""
        return stall, gap

    save(0, wait=True)  # takes the memory of the copy
    plain = longest_step(saver, given.device)
    waits = [save(2 * n + 1, wait=True)[0] for n in range(given.saves)]
    background = [save(2 * n + 2, wait=False) for n in range(given.saves)]
    size = sum(p.stat().st_size for p in (given.out / "checkpoints").rglob("*.safetensors"))
    shutil.rmtree(given.out)
    wait, stall = statistics.median(waits), statistics.median(stall for stall, _ in background)
    gap = statistics.median(gap for _, gap in background)
    print(f"| {given.model} | {given.device} | {size / 1e9:.2f} GB | {wait:.2f} s | {stall:.3f} s | {stall / wait:.1%} "
          f"| {plain:.3f} s | {gap:.3f} s |")  # fmt: skip


def longest_step(saver: Saver, device: str, at_least: int = 20) -> float:
    """The longest of the stand-in steps while a write is under way."""
    a, longest, steps = torch.randn(1024, 1024, device=device), 0.0, 0
    while steps < at_least or saver.is_writing:
        began = time.perf_counter()
        a = torch.tanh(a @ a)
        synchronise(device)
        longest, steps = max(longest, time.perf_counter() - began), steps + 1
    return longest


def synchronise(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
