"""Ten steps of the authors' training, written once more: another forward pass, other losses, other updates.

The network below is a set of plain functions over arrays in the authors' public layout; only the derivative
is torch's.
"""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.conftest import Run, train_records
from vitctl.data.datasets.catalog import open_split
from vitctl.data.images.transforms import TrainTransform
from vitctl.data.loader.batches import train_batches
from vitctl.data.source.order import Order
from vitctl.models.variants import ViTConfig
from vitctl.models.weights.weights_file import Weights, read_weights, write_weights

STEPS, BATCH, PATCH, HEADS = 10, 16, 4, 3
Params = dict[str, Tensor]


def norm(x: Tensor, p: Params, name: str) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = (x * x).mean(-1, keepdim=True) - mean * mean
    return (x - mean) / torch.sqrt(variance + 1e-6) * p[f"{name}/scale"] + p[f"{name}/bias"]


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def forward(p: Params, images: Tensor) -> Tensor:
    """Logits of images [B, S, S, 3] in -1..1."""
    b, s = images.shape[:2]
    g = s // PATCH
    patches = images.reshape(b, g, PATCH, g, PATCH, 3).permute(0, 1, 3, 2, 4, 5)
    x = torch.einsum("bghijc,ijcd->bghd", patches, p["embedding/kernel"]) + p["embedding/bias"]
    x = (
        torch.cat([p["cls"].expand(b, 1, -1), x.reshape(b, g * g, -1)], 1)
        + p["Transformer/posembed_input/pos_embedding"]
    )
    for i in range(sum(name.endswith("LayerNorm_2/bias") for name in p)):
        at = f"Transformer/encoderblock_{i}/"
        y, a = norm(x, p, at + "LayerNorm_0"), at + "MultiHeadDotProductAttention_1/"
        q, k, v = (
            torch.einsum("bnd,dhe->bhne", y, p[f"{a}{n}/kernel"]) + p[f"{a}{n}/bias"][:, None]
            for n in ("query", "key", "value")
        )
        weights = torch.exp(q @ k.mT / math.sqrt(q.shape[-1]))
        y = (weights / weights.sum(-1, keepdim=True)) @ v
        x = x + torch.einsum("bhne,hed->bnd", y, p[a + "out/kernel"]) + p[a + "out/bias"]
        y, m = norm(x, p, at + "LayerNorm_2"), at + "MlpBlock_3/"
        y = gelu(y @ p[m + "Dense_0/kernel"] + p[m + "Dense_0/bias"])
        x = x + y @ p[m + "Dense_1/kernel"] + p[m + "Dense_1/bias"]
    x = norm(x, p, "Transformer/encoder_norm")[:, 0]
    if "pre_logits/kernel" in p:
        x = torch.tanh(x @ p["pre_logits/kernel"] + p["pre_logits/bias"])
    return x @ p["head/kernel"] + p["head/bias"]


def sigmoid_loss(logits: Tensor, onehot: Tensor) -> Tensor:
    return (
        -(onehot * torch.log(torch.sigmoid(logits)) + (1 - onehot) * torch.log(1 - torch.sigmoid(logits)))
        .sum(-1)
        .mean()
    )


def softmax_loss(logits: Tensor, onehot: Tensor) -> Tensor:
    return (torch.log(torch.exp(logits).sum(-1)) - (logits * onehot).sum(-1)).mean()


def losses(
    p: Params,
    batches: list[tuple[Tensor, Tensor]],
    loss: Callable[[Tensor, Tensor], Tensor],
    update: Callable,
) -> list[float]:  # type: ignore[type-arg]
    seen, slots = [], {name: (np.zeros(value.shape), np.zeros(value.shape)) for name, value in p.items()}
    for step, (images, onehot) in enumerate(batches):
        leaves = {name: value.clone().requires_grad_() for name, value in p.items()}
        value = loss(forward(leaves, images), onehot)
        gradients = dict(
            zip(leaves, (g.numpy() for g in torch.autograd.grad(value, list(leaves.values()))), strict=True)
        )
        norm_ = math.sqrt(sum((g**2).sum() for g in gradients.values()))
        for name, gradient in gradients.items():
            p[name] = torch.from_numpy(
                update(step, p[name].numpy(), gradient * min(1.0, 1.0 / norm_), slots, name)
            )
        seen.append(value.item())
    return seen


def adam(step: int, weight: np.ndarray, gradient: np.ndarray, slots: dict, name: str) -> np.ndarray:
    """flax's Adam with weight decay; linear warm-up over 3 steps, then linear to 1e-5."""
    m, v = slots[name]
    m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
    slots[name] = m, v
    progress = max(0.0, (step - 3) / (STEPS - 3))
    lr = (1e-5 + (1e-2 - 1e-5) * (1 - progress)) * min(1.0, step / 3)
    return (
        weight
        - lr * (m / (1 - 0.9 ** (step + 1))) / (np.sqrt(v / (1 - 0.999 ** (step + 1))) + 1e-8)
        - lr * 0.1 * weight
    )


def momentum(step: int, weight: np.ndarray, gradient: np.ndarray, slots: dict, name: str) -> np.ndarray:
    """SGD with momentum 0.9; linear warm-up over 3 steps, cosine to 0."""
    m = 0.9 * slots[name][0] + gradient
    slots[name] = m, m
    progress = max(0.0, (step - 3) / (STEPS - 3))
    return weight - 0.05 * 0.5 * (1 + math.cos(math.pi * progress)) * min(1.0, step / 3) * m


def authors_layout(folder: Path, tmp_path: Path) -> tuple[Params, ViTConfig]:
    weights = read_weights(folder)
    assert isinstance(weights.config, ViTConfig)
    plain = Weights(weights.config, weights.state, weights.meta | {"loss": "softmax"})
    [file] = write_weights(plain, tmp_path / f"{folder.parent.parent.name}.npz", "google").files
    with np.load(file) as arrays:
        return {name: torch.from_numpy(arrays[name].astype(np.float64)) for name in arrays}, weights.config


def the_same_batches(data: Path) -> list[tuple[Tensor, Tensor]]:
    source = open_split("train", path=str(data))
    stream = train_batches(
        source, Order(len(source), 0), TrainTransform(16), seed=0, batch_size=BATCH, micro_batch=BATCH,
        rank=0,
        num_processes=1, first_step=0, num_workers=0,
    )  # fmt: skip
    batches = [next(stream) for _ in range(STEPS)]
    return [
        (
            (b.images.permute(0, 2, 3, 1).double() - 127.5) / 127.5,
            torch.eye(len(source.class_names), dtype=torch.float64)[b.labels],
        )
        for b in batches
    ]


COMMON = {
    "schedule.total_steps": STEPS, "schedule.warmup_steps": 3, "schedule.batch_size": BATCH,
    "averaging.decay": 0.0,
    "log.every_steps": 1, "evaluation.every_steps": 0, "checkpoint.every_steps": 0, "data.eval_split": "",
    "machine.precision": "float64", "machine.device": "cpu", "machine.workers": 0,
}  # fmt: skip


def start_of(
    run: Run, name: str, recipe: str | Path | None, values: dict[str, object], tmp_path: Path
) -> tuple[Path, Params]:
    """The run, and the weights that it starts from: those after one step of a run whose first learning rate
    is 0.
    """
    given = () if recipe is None else (recipe,)
    folder = run(name, *given, **COMMON, **values)
    zero = run(
        name + "_start",
        *given,
        **{
            **COMMON,
            **values,
            "schedule.total_steps": 4,
            "checkpoint.every_steps": 1,
            "checkpoint.keep_last": 9,
        },
    )
    return folder, authors_layout(zero / "checkpoints" / "step_00000001", tmp_path)[0]


def test_pretraining__ten_steps_of_adam_with_the_sigmoid_loss(
    run: Run, tiny_data: Path, tmp_path: Path
) -> None:
    folder, p = start_of(run, "pretrain", None, {}, tmp_path)
    # The first update has learning rate 0, so the weights after it are the first ones.
    expected = losses(p, the_same_batches(tiny_data), sigmoid_loss, adam)
    got = [record["loss"] for record in train_records(folder)]
    assert len(set(got)) > 8
    assert got == pytest.approx(expected, rel=1e-4)
    assert got == pytest.approx(expected, rel=1e-7)  # float64; the weights passed through a float32 file


def test_fine_tuning__ten_steps_of_momentum_with_clipping(run: Run, tiny_data: Path, tmp_path: Path) -> None:
    source = run("source", **{"averaging.decay": 0.0})
    values = {"weights.source": str(source), "optimizer.lr": 0.05, "data.dataset": ""}
    folder, p = start_of(run, "finetune", "finetune", values, tmp_path)
    assert float(p["head/kernel"].abs().max()) == 0.0
    expected = losses(p, the_same_batches(tiny_data), softmax_loss, momentum)
    got = [record["loss"] for record in train_records(folder)]
    assert len(set(got)) > 8
    assert got == pytest.approx(expected, rel=1e-7)
