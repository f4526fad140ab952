"""The classification layer that fine-tuning starts from: drawn, or solved in closed form on the training
images.
"""

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from vitctl.data.source.views import random_subset
from vitctl.engine.assemble import Images, RunContext
from vitctl.engine.checkpoint import newest_name
from vitctl.engine.computation import choose_attention, exact
from vitctl.engine.evaluation import representations
from vitctl.engine.fewshot_ridge import count_correct, decompose, fitted_scale
from vitctl.engine.journal import CHECKPOINTS, LOG, read_records
from vitctl.errors import DataError
from vitctl.jobs.training import ImagePass
from vitctl.models.build import Model
from vitctl.recipe.schema import Finetune

_HEAD_STREAM = 0x68656164  # separates these random draws from others of the seed
_MOST_SCORES = 2**24  # that the scale is fitted on: images times classes


def start_head(recipe: Finetune, run: RunContext, model: Model, images: Images) -> None:
    """Put the few-shot solution into the head of `model`, the same bits on every process.

    Does nothing if the run has a checkpoint, which holds the trained head. With lanes the bits depend neither
    on the number of processes nor on evaluation.batch_size. The images get the scoring pre-processing.

    Raises:
        DataError: an image cannot be read, or a feature is NaN or infinite.

    Paper: Section 4.1 (the solution)
    """
    runtime, lanes, asked = run.runtime, recipe.schedule.lanes > 0, recipe.finetune
    is_resumed = runtime.is_main and newest_name(run.folder / CHECKPOINTS) != ""
    if runtime.sum([float(is_resumed)])[0]:
        return
    source = random_subset(images.train, min(asked.head_images, len(images.train)), recipe.seed)
    scoring = recipe.evaluation
    if lanes:
        scoring = scoring.model_copy(update={"batch_size": recipe.schedule.leaf_images})
    shown = recipe.model_copy(update={"evaluation": scoring})
    look = ImagePass(run, shown, images.pre_processing, images.colours, whole_batches=lanes)
    choose_attention(model, recipe.machine, runtime, lanes=lanes)
    assert model.head is not None
    classes, width = model.head.weight.shape
    solved = torch.zeros(classes, width + 1, dtype=torch.float64)
    with exact(runtime, recipe.schedule.threads) if lanes else nullcontext():
        features = look.through(representations, "features for the head", model, source, verifies=False)
        if runtime.is_main:
            if not features.isfinite().all():
                raise DataError(
                    "the features of the training images are NaN or infinite",
                    fix="use other weights, or set finetune.head = 'zero'",
                )
            labels = torch.from_numpy(source.labels())
            ridge = decompose(features, labels, num_classes=classes)
            some = slice(None, None, -(-len(source) * classes // _MOST_SCORES))
            unseen = ridge.left_out(features[some], labels[some], asked.head_l2)
            scale = fitted_scale(unseen, labels[some], recipe.loss.name)
            weight, bias = ridge.layer(asked.head_l2)
            solved = scale * torch.cat([weight, bias.unsqueeze(1)], dim=1) + 0.0  # no -0.0: sums have none
            right = count_correct(ridge, features, labels, [asked.head_l2])[0].sum() / len(source)
            alone = float((unseen.argmax(dim=1) == labels[some]).double().mean())
            text = (
                f"from the few-shot solution of {len(source):,} images times {scale:.4g}, accuracy on them "
                f"{right:.2%}, on each by the others {alone:.2%}"
            )
            used = {"num_images": len(source), "scale": scale, "accuracy": float(right), "left_out": alone}
            run.journal.write("head", step=0, text=text, used=used)
    solved = runtime.add(solved)
    with torch.no_grad():
        model.head.weight.copy_(solved[:, :-1])
        model.head.bias.copy_(solved[:, -1])


def draw_head(model: Model, std: float, seed: int) -> None:
    """Draw the weights of the head in place, the same on every device. Source: timm, MAE"""
    assert model.head is not None
    drawn = np.random.default_rng((seed, _HEAD_STREAM)).normal(0.0, std, model.head.weight.shape).astype("f4")
    with torch.no_grad():
        model.head.weight.copy_(torch.from_numpy(drawn))


def head_used(recipe: Finetune, run: RunContext) -> dict[str, Any]:
    """Return the head that a training started from, for its provenance; empty if it was zero."""
    if recipe.finetune.head == "zero":
        return {}
    records = read_records(run.folder / LOG) if run.runtime.is_main else []
    solved = [record.get("used") for record in records if record.get("kind") == "head"]
    return {"head": recipe.finetune.head} | ({"head_solved": solved[-1]} if solved else {})
