"""The run of end_to_end.py on timm's library, in the manner of its train.py: a line of JSON for each log and
each evaluation.

Same network, images, augmentation, batch, optimizer, clipping, schedule and precision as ours; fused AdamW;
autocast where asked, and then plain attention, with which a step of this network takes 313 instead of 558 ms
(in float32: as long).
"""

import argparse
import json
import math
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import create_dataset, create_loader
from timm.layers import set_fused_attn
from timm.scheduler import CosineLRScheduler

MODEL = {"img_size": 32, "patch_size": 4, "embed_dim": 128, "depth": 4, "num_heads": 4, "num_classes": 10}
MEAN = STD = (0.5, 0.5, 0.5)


def main() -> None:
    """Train for a number of steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--weight-decay", type=float, required=True)
    parser.add_argument("--bf16", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    set_fused_attn(not given.bf16)
    train, test = (
        loader(given.data / split, given.batch_size, split == "train") for split in ("train", "test")
    )
    model = timm.create_model("vit_tiny_patch16_224", **MODEL)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=given.lr, weight_decay=given.weight_decay, fused=True
    )
    schedule = CosineLRScheduler(
        optimizer, t_initial=given.steps, warmup_t=given.warmup, warmup_prefix=False, t_in_epochs=False
    )
    precision = torch.autocast("cpu", torch.bfloat16) if given.bf16 else nullcontext()
    step, since = 0, time.perf_counter()
    while step < given.steps:
        for images, labels in train:
            schedule.step_update(step)
            with precision:
                loss = torch.nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            if step % given.every == 0:
                seconds = time.perf_counter() - since
                assert math.isfinite(loss.item())
                say("train", step, images_per_second=given.every * given.batch_size / seconds)
                say("evaluate", step, accuracy=score(model, test, precision))
                since = time.perf_counter()
            if step == given.steps:
                break


def loader(folder: Path, batch_size: int, is_training: bool) -> Any:
    """timm's loader of a folder of classes, one worker."""
    return create_loader(
        create_dataset("", root=str(folder)),
        input_size=(3, 32, 32),
        batch_size=batch_size,
        is_training=is_training,
        scale=(0.05, 1.0),
        ratio=(0.75, 1.33),
        color_jitter=None,
        interpolation="bilinear",
        mean=MEAN,
        std=STD,
        crop_pct=1.0,
        num_workers=1,
        device=torch.device("cpu"),
        pin_memory=False,
        persistent_workers=True,
        use_multi_epochs_loader=is_training,
    )


def score(model: torch.nn.Module, test: Any, precision: Any) -> float:
    """Share of the test images that are recognised."""
    model.eval()
    right = total = 0
    with torch.inference_mode(), precision:
        for images, labels in test:
            right += int((model(images).argmax(1) == labels).sum())
            total += len(labels)
    model.train()
    return right / total


def say(kind: str, step: int, **numbers: float) -> None:
    """A line of the log."""
    print(json.dumps({"kind": kind, "step": step, "time": time.time(), **numbers}), flush=True)


if __name__ == "__main__":
    main()
