"""Score frozen representations of all training images by nearest neighbours, logistic regression or SGD."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitctl.engine.evaluation import Score, window_bytes
from vitctl.engine.journal import MODEL, RECIPE, Report, silent, tensors_file
from vitctl.engine.metrics import baselines, mean_per_class, wilson
from vitctl.engine.preemption import StopFlag
from vitctl.engine.probes import (
    C_GRID,
    answer_bytes,
    chunk_bytes,
    drawn,
    linear,
    logistic,
    logistic_bytes,
    nearest,
    predicted,
    share_of,
    vote,
)
from vitctl.engine.runtime import stop_together
from vitctl.jobs.fewshot import Frozen, open_frozen
from vitctl.jobs.inputs.data import FewshotSet, Inputs
from vitctl.jobs.plan import ASSUMED_CLASSES, ScoringPlan
from vitctl.jobs.record.result import RunResult
from vitctl.jobs.training import WHOLE, check_whole, shown, stated
from vitctl.models.variants import Config, ViTConfig, downstream
from vitctl.models.weights.weights_file import save_weights
from vitctl.recipe.known import Comparison
from vitctl.recipe.neutral_keys import unlike_known
from vitctl.recipe.schema import Probe
from vitctl.system.text import count_text


def probe(
    recipe: Probe,
    run_dir: Path,
    report: Report = silent,
    stop: StopFlag | None = None,
    inputs: Inputs | None = None,
) -> RunResult:
    """Score frozen representations by probe.method, for every data set.

    Images get the scoring pre-processing. Each process extracts representations and searches for neighbours
    in its share of the training images. Only the main process holds all of them and solves the layers.

    Returns:
        accuracy per head, the mean over data sets; and for each data set.

    Raises:
        DataError: the splits have different classes, or there are fewer training images than neighbours.
        Stopped: a signal reached any process; finished passes over the data are kept.
    """
    frozen = open_frozen(recipe, run_dir, report, stop, inputs)
    run, runtime = frozen.run, frozen.run.runtime
    rows: dict[str, dict[str, Any]] = {}
    files: dict[str, str] = {}
    for one in frozen.sets:
        features = frozen.features(one)
        if recipe.probe.method == "knn":
            rows[one.name] = _neighbours(recipe, one, features, frozen)
        elif features and (found := _LAYERS[recipe.probe.method](recipe, one, features[0], frozen)):
            read, layer, more = found
            classes = predicted(features[1][:, read.features], layer)
            rows[one.name] = {recipe.probe.method: _row(one, classes) | more}
            name = MODEL if len(frozen.sets) == 1 else one.name
            files[name] = str(keep(run_dir / tensors_file(name), frozen, one, layer, read.config))
        scored = rows.get(one.name, {})
        best = max((row["accuracy"] for row in scored.values()), default=0.0)
        known = Comparison(recipe.known, 0, recipe.known.length, one.num_classes)  # for the best head
        for head, row in scored.items():
            said = {"data_set": one.name, "head": head, "accuracy": row["accuracy"], "chosen": _chosen(row)}
            beside = known.of(0, accuracy=best) if row["accuracy"] == best else {}
            run.journal.write("probe", step=0, **said, **beside)
        stop_together(runtime, run.stop)
    check_whole(run.shards, runtime)
    run.journal.say("warning", unlike_known(run_dir / RECIPE))
    metrics: dict[str, Any] = {}
    if runtime.is_main:
        heads = next(iter(rows.values()))
        metrics = {
            "accuracy": {h: float(np.mean([row[h]["accuracy"] for row in rows.values()])) for h in heads},
            "data_sets": rows,
            "baselines": {one.name: baselines(one.test.labels(), one.num_classes) for one in frozen.sets},
            "total": sum(len(one.test) for one in frozen.sets),
        }
    p = recipe.probe
    by_method: dict[str, dict[str, Any]] = {
        "knn": {"k": list(p.k), "temperature": p.temperature, "float64": p.float64},
        "logistic": {"hold_out": p.hold_out, "hold_out_seed": recipe.seed, "c": list(C_GRID)},
        "linear": {"hold_out": p.hold_out, "hold_out_seed": recipe.seed, "float64": p.float64}
        | {"lrs": list(p.lrs), "steps": p.steps, "batch_size": p.batch_size, "momentum": p.momentum}
        | {"refitted": True}  # the layer of earlier releases had not seen the held-out images
        | {"heads": [head.name for head in heads_of(frozen.model.config, p.blocks)]},
    }
    used = frozen.used | WHOLE | {"method": p.method} | by_method[p.method]
    return RunResult("probe", "done", metrics, used, files)


class Head(NamedTuple):
    """The input of a linear layer: a name, its slice of the features, and the network's configuration."""

    name: str
    features: slice
    config: Config


def heads_of(config: Config, blocks: Sequence[int]) -> list[Head]:
    """Return the layer inputs of a network `with_blocks`, in DINOv2's order."""
    if not blocks or not isinstance(config, ViTConfig) or config.classifier != "token_patches":
        return [Head("classifier input", slice(None), config)]
    heads, most, width = [], config.token_blocks, config.hidden_size
    for number in sorted({min(number, most) for number in blocks}):
        name, first = count_text(number, "block"), (most - number) * width
        token = replace(config, classifier="token", token_blocks=number)
        heads.append(Head(name, slice(first, most * width), token))
        joined = replace(token, classifier="token_patches")
        heads.append(Head(f"{name} and patches", slice(first, (most + 1) * width), joined))
    return heads


def probe_bytes(recipe: Probe, plan: ScoringPlan) -> tuple[int, int]:
    """Return a method's planned memory besides the representations, on the main and on each other process.

    For `logistic` and `linear` it includes the copies of fitted and held-out images.
    """
    p, dtype, config = recipe.probe, torch.float64 if recipe.probe.float64 else torch.float32, plan.config
    widths = sum(len(range(config.feature_size)[head.features]) for head in heads_of(config, p.blocks))
    classes = plan.num_classes or ASSUMED_CLASSES
    heads = 5 * len(p.lrs) * widths * classes * dtype.itemsize  # with gradients
    knn, window = chunk_bytes(config.feature_size, dtype), window_bytes(config.feature_size)
    most = max(number for _, number in plan.images[::2])  # of training images
    size = (most, config.feature_size, classes)
    train, share = (4 * number * size[1] for number in (most, share_of(most, recipe.machine.processes)))
    layers = heads + int(p.hold_out * train) + answer_bytes(*size)
    regression = train + max(logistic_bytes(*size), answer_bytes(*size))
    of_main = {"knn": knn, "logistic": regression, "linear": layers}[p.method]
    return max(of_main, window), max(share + knn if share else 0, window)


def _neighbours(
    recipe: Probe, one: FewshotSet, features: tuple[Tensor, Tensor] | None, frozen: Frozen
) -> dict[str, Any]:
    """Return the scores by number of neighbours; empty off the main process."""
    p, runtime = recipe.probe, frozen.run.runtime
    dtype, width = torch.float64 if p.float64 else torch.float32, frozen.model.config.feature_size
    train, test = features or (torch.empty(len(s), width, device="meta") for s in (one.train, one.test))
    near, places = nearest(train, test, max(p.k), dtype=dtype, runtime=runtime)
    if not runtime.is_main:
        return {}
    labels = torch.from_numpy(one.train.labels())
    classes = vote(near, labels[places], p.k, num_classes=one.num_classes, temperature=p.temperature)
    return {f"k={k}": _row(one, classes[k]) for k in p.k}


def _regression(
    recipe: Probe, one: FewshotSet, train: Tensor, frozen: Frozen
) -> tuple[Head, Tensor, dict[str, Any]] | None:
    """Return the layer, [R + 1, K], its input, and how it was chosen; None after a signal."""
    labels, many = torch.from_numpy(one.train.labels()), one.num_classes
    held = held_out(one.train.labels(), recipe.probe.hold_out, recipe.seed)
    best, chosen, fitted, left = -1, 0.0, train[~held], train[held]
    layer: Tensor | None = None
    for number, c in enumerate(C_GRID, 1):
        if frozen.run.stop.raised:  # all processes stop together afterwards
            return None
        text = f"logistic regression, C = {c:.3g}, {number} of {len(C_GRID)}"
        frozen.run.journal.show_progress(at_once=number == 1, text=text)
        layer = logistic(fitted, labels[~held], c, num_classes=many, start=layer, rough=True)
        right = int((predicted(left, layer) == labels[held]).sum())
        if right > best:  # ties keep the lower C
            best, chosen = right, c
        if best == held.sum():  # perfect
            break
    frozen.run.journal.show_progress(
        at_once=True, text=f"logistic regression on all images, C = {chosen:.3g}"
    )
    layer = logistic(train, labels, chosen, num_classes=many)
    more = {"c": chosen, "held_out_accuracy": best / int(held.sum()), "num_held_out": int(held.sum())}
    return heads_of(frozen.model.config, ())[0], layer, more


def _linear(
    recipe: Probe, one: FewshotSet, train: Tensor, frozen: Frozen
) -> tuple[Head, Tensor, dict[str, Any]] | None:
    """Return a layer trained on all images, [R + 1, K], its input and how both were chosen."""
    p, labels, run = recipe.probe, torch.from_numpy(one.train.labels()), frozen.run
    heads = heads_of(frozen.model.config, p.blocks)
    held = held_out(one.train.labels(), p.hold_out, recipe.seed)

    def trained(on: Tensor, lrs: Sequence[float], inputs: Sequence[Head], what: str) -> list[Tensor]:
        steps = itertools.takewhile(lambda _: not run.stop.raised, range(p.steps))
        batches = (on[drawn(recipe.seed, len(on), p.batch_size, step)] for step in steps)
        return linear(
            train,
            labels,
            [lr * p.batch_size / 256 for lr in lrs],
            num_classes=one.num_classes,
            batches=run.journal.watch(batches, what, p.steps * p.batch_size, 1),
            steps=p.steps,
            seed=recipe.seed,
            momentum=p.momentum,
            dtype=torch.float64 if p.float64 else torch.float32,
            device=run.runtime.device,
            inputs=[head.features for head in inputs],
        )

    layers = trained(torch.nonzero(~held)[:, 0], p.lrs, heads, "linear layers")
    if run.stop.raised:
        return None
    left, answers = train[held], labels[held]
    shares = [
        [float((predicted(left[:, head.features], layer) == answers).double().mean()) for layer in of_head]
        for head, of_head in zip(heads, layers, strict=True)
    ]
    # Ties go to the earlier head, then to the lower rate.
    at = max(
        itertools.product(range(len(heads)), range(len(p.lrs))),
        key=lambda at: (shares[at[0]][at[1]], -at[0], -p.lrs[at[1]]),
    )
    by_head = {head.name: of_head for head, of_head in zip(heads, shares, strict=True)}
    head, lr = heads[at[0]], p.lrs[at[1]]
    ((layer,),) = trained(torch.arange(len(train)), [lr], [head], "linear layer on all images")
    if run.stop.raised:
        return None
    more = {
        "head": head.name,
        "lr": lr,
        "held_out_accuracy": shares[at[0]][at[1]],
        "num_held_out": len(answers),
        "held_out_by_head": by_head,
    }
    return head, layer, more


def _chosen(row: Mapping[str, Any]) -> str:
    what = f"C = {row['c']:.3g}" if "c" in row else f"{row['head']}, lr {row['lr']:g}" if "lr" in row else ""
    images = count_text(row.get("num_held_out", 0), "held-out image")
    return f"{what}, accuracy {row['held_out_accuracy']:.2%} on {images}" if what else ""


_LAYERS = {"logistic": _regression, "linear": _linear}


def keep(path: Path, frozen: Frozen, one: FewshotSet, layer: Tensor, body: Config) -> Path:
    """Write the network with a layer, [R + 1, K], as weights with this pre-processing. Return the path.

    `body` is its configuration. A hidden layer before the classification layer is kept, because the
    representations are its output.
    """
    meta = frozen.found.weights.meta
    config = downstream(body, num_classes=one.num_classes, image_size=frozen.transform.image_size)
    if isinstance(config, ViTConfig) and isinstance(body, ViTConfig):
        config = replace(config, representation_size=body.representation_size)
    head = layer.to(frozen.run.runtime.dtype)
    state = {
        name: tensor
        for name, tensor in frozen.model.state_dict().items()
        if not name.startswith(("head.", "mask_embedding"))
    } | {"head.weight": head[:-1].T, "head.bias": head[-1]}
    said = {
        "mean": meta["mean"],
        "std": meta["std"],
        "loss": "softmax",
        **stated(meta),
        **shown(frozen.transform),
        "class_names": list(one.train.class_names),
    }
    return save_weights(path, state, config, said)


def held_out(labels: np.ndarray, share: float, seed: int) -> Tensor:
    """Return which images are held out, bool [N]: a share of each class drawn by the seed, at least one."""
    rng, held = np.random.default_rng(seed), np.zeros(len(labels), bool)
    for label in np.unique(labels):
        of_class = rng.permutation(np.flatnonzero(labels == label))
        held[of_class[: min(len(of_class) - 1, max(1, round(share * len(of_class))))]] = True
    return torch.from_numpy(held)


def _row(one: FewshotSet, classes: Tensor) -> dict[str, Any]:
    labels = one.test.labels()
    images = np.bincount(labels, minlength=one.num_classes)
    right = np.bincount(labels[classes.numpy() == labels], minlength=one.num_classes)
    means = {"mean_per_class": mean_per_class(np.stack([images, right], axis=1))}
    score = Score(int(right.sum()), len(labels), means)
    return score.numbers | {"accuracy_interval": wilson(score.correct, score.total)}
