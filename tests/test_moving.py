"""The three examples of docs/moving.md, trained here and by the other program's own parts.

Both sides get the same start weights and the same pixels, random erasing included, in float64. The other side
has its own network, optimizer, groups, schedule, loss, mixing, clipping and average. The shares and boxes of
MixUp and CutMix, and the dropped paths, are drawn here and given to it. Its new head is set to zero, as ours.
"""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.conftest import ROOT, Run, stored, train_records
from vitctl.data.loader.batches import Batch
from vitctl.engine import assemble, losses
from vitctl.engine.journal import AVERAGE
from vitctl.engine.mixing import Blend, draw_blend, erased
from vitctl.engine.runtime import seed_step
from vitctl.models.weights.weights_file import read_weights, write_weights

IMAGES, CLASSES, SIZE = 64, 6, 16
SHAPE: dict[str, Any] = {"img_size": SIZE, "patch_size": 4, "embed_dim": 64, "depth": 2, "num_heads": 1}
COMMON: dict[str, Any] = {
    "finetune.head": "zero", "data.eval_split": "", "data.image_size": SIZE, "log.every_steps": 1,
    "evaluation.every_steps": 0, "checkpoint.every_steps": 0,
    "machine.precision": "float64", "machine.device": "cpu", "machine.workers": 0,
}  # fmt: skip
Tensors = dict[str, Tensor]
_DECAYED = ("cls_token", "position_embeddings")


class Pass(NamedTuple):
    """Images of one forward pass as the network is given them, before mixing, each with its partner."""

    step: int
    images: Tensor
    labels: Tensor
    partners: Tensor
    partner_labels: Tensor
    blend: Blend


class Ours(NamedTuple):
    """A run of ours: the loss of each step, the passes, the last weights and their average."""

    losses: list[float]
    passes: list[Pass]
    weights: Tensors
    average: Tensors


def example(name: str) -> str:
    """Return a recipe of the page."""
    [text] = re.findall(rf"```toml\n(# {name}\.toml.*?)```", (ROOT / "docs" / "moving.md").read_text(), re.S)
    return str(text)


@pytest.fixture
def ours(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ours]:
    """ours("timm", "timm", start, **values): that example from the file `start`, its results in a layout."""
    passes: list[Pass] = []

    def classification(loss: Any, mixing: Any, seed: int, weights: Tensor | None) -> Any:
        plain = losses.classification(loss, mixing, seed, weights)

        def recording(model: nn.Module, batch: Batch, step: int, *, normalise: Any, **how: Any) -> Tensor:
            def ready(part: Batch) -> Tensor:
                pixels = normalise(part.images).clone()
                return erased(pixels, part.positions, probability=mixing.random_erasing, seed=seed)

            images, before, blend = ready(batch), batch.neighbour, Blend(1.0)
            first, label = images[:1], batch.labels[:1]
            if before is not None:
                first, label = ready(before), before.labels
                blend = draw_blend(mixing, seed=seed, step=step, image_size=SIZE)
            passes.append(
                Pass(step, images, batch.labels, torch.cat((first, images[:-1])),
                     torch.cat((label, batch.labels[:-1])), blend)
            )  # fmt: skip
            return plain(model, batch, step, normalise=normalise, **how)

        return recording

    def do(name: str, layout: str, start: Path, **values: Any) -> Ours:
        monkeypatch.setattr(assemble, "classification", classification)
        (tmp_path / f"{name}.toml").write_text(example(name))
        given = {"weights.source": str(start), "data.subset_images": IMAGES, **COMMON, **values}
        folder = run(name, tmp_path / f"{name}.toml", **given)
        [last] = (folder / "checkpoints").iterdir()
        weights, ends = read_weights(last), []
        for averages in ({}, stored(folder, int(last.name[5:])).get(AVERAGE, {})):
            result = replace(weights, state=weights.state | averages)
            [file, *_] = write_weights(result, tmp_path / "ours", layout).files
            ends.append(load_file(file))
        return Ours([record["loss"] for record in train_records(folder)], passes, *ends)

    return do


def steps(passes: list[Pass]) -> Iterator[tuple[int, list[Pass]]]:
    """Yield each step with its passes."""
    for step, group in groupby(passes, lambda one: one.step):
        yield step, list(group)


def mixed(mixup: Any, one: Pass) -> tuple[Tensor, Tensor]:
    """Return images and targets of timm's Mixup, which blends an image with the one at the mirrored place:
    behind the batch stand its partners, mirrored.
    """
    from timm.data import mixup as module

    mixup._params_per_batch = lambda: (one.blend.own, one.blend.box is not None)
    top, left, bottom, right = one.blend.box or (0, 0, 0, 0)
    images = torch.cat((one.images, one.partners.flip(0)))
    labels = torch.cat((one.labels, one.partner_labels.flip(0)))
    with pytest.MonkeyPatch.context() as patch:
        area = (top, bottom, left, right)
        patch.setattr(module, "cutmix_bbox_and_lam", lambda *_, **__: (area, one.blend.own))
        pixels, targets = mixup(images, labels)
    return pixels[: len(one.images)], targets[: len(one.images)]


@contextmanager
def our_paths() -> Iterator[None]:
    """Let timm's drop path draw as ours does."""
    from timm.layers import drop

    def drop_path(x: Tensor, rate: float, training: bool, scale_by_keep: bool) -> Tensor:
        assert training and scale_by_keep
        return x * ((torch.rand(len(x), 1, 1).double() >= rate) / (1 - rate))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drop, "drop_path", drop_path)
        yield


def timms(start: Tensors | None = None, **more: Any) -> Any:
    """timm's network: with random weights, or with those of a file and a head of zeros."""
    import timm

    torch.manual_seed(0)
    model = timm.models.VisionTransformer(**SHAPE, num_classes=CLASSES, **more)
    if start is not None:
        head = {"head.weight": torch.zeros(CLASSES, SHAPE["embed_dim"]), "head.bias": torch.zeros(CLASSES)}
        model.load_state_dict(start | head)
    return model.double()


def started(tmp_path: Path, **more: Any) -> tuple[Path, Tensors]:
    """Return a file of a network without a head, and its tensors."""
    state = {
        name: tensor.float() for name, tensor in timms(**more).state_dict().items() if "head" not in name
    }
    save_file(state, tmp_path / "start.safetensors")
    return tmp_path / "start.safetensors", state


def apart(got: Tensors, theirs: Tensors) -> dict[str, float]:
    """Return the largest difference of each tensor."""
    assert got.keys() == theirs.keys()
    return {name: float((got[name] - tensor).abs().max()) for name, tensor in theirs.items()}


def largest(got: list[float], theirs: list[float]) -> float:
    """Return the largest difference of the losses of all steps."""
    assert len({*theirs}) > len(theirs) // 2
    return max(abs(a - b) for a, b in zip(got, theirs, strict=True))


def test_timm__trains_the_same(ours: Callable[..., Ours], tmp_path: Path) -> None:
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from timm.utils import ModelEmaV3, dispatch_clip_grad

    file, start = started(tmp_path)
    got = ours("timm", "timm", file, **{"data.eval_resize": 17, "machine.micro_batch": 16})
    model = timms(start, drop_path_rate=0.1)
    optimizer = create_optimizer_v2(
        model, opt="adamw", lr=5e-4, betas=(0.9, 0.95), weight_decay=0.05, layer_decay=0.75
    )
    scheduler, _ = create_scheduler_v2(
        optimizer, sched="cosine", num_epochs=9, warmup_epochs=1, warmup_prefix=True, warmup_lr=0.0,
        step_on_epochs=False, updates_per_epoch=IMAGES // 16,
    )  # fmt: skip
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=CLASSES)
    average, seen = ModelEmaV3(model, decay=0.98), []
    with our_paths():
        for step, [one] in steps(got.passes):
            seed_step(0, step, 0)
            images, targets = mixed(mixup, one)
            loss = SoftTargetCrossEntropy()(model(images), targets)
            optimizer.zero_grad()
            loss.backward()
            dispatch_clip_grad(model.parameters(), 1.0)
            optimizer.step()
            average.update(model, step=step + 1)
            scheduler.step_update(step + 1)
            seen.append(loss.item())
    assert len(seen) == 40
    assert largest(got.losses, seen) < 5e-7  # timm's mixed targets are float32
    assert max(apart(got.weights, model.state_dict()).values()) < 3e-7
    assert max(apart(got.average, average.module.state_dict()).values()) < 3e-7


@pytest.mark.slow
@pytest.mark.parametrize(("decay", "loss", "weight"), [(0.01, 2e-6, 1e-6), (0.0, 1e-8, 1e-8)])
def test_trainer__trains_the_same(
    ours: Callable[..., Ours], tmp_path: Path, decay: float, loss: float, weight: float
) -> None:
    """With weight decay all but two tables, which it decays and ours does not."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1, "intermediate_size": 256}
    config = transformers.ViTConfig(image_size=SIZE, patch_size=4, num_labels=CLASSES, **shape)
    model = transformers.ViTForImageClassification(config)
    nn.init.zeros_(model.classifier.weight)
    model.save_pretrained(tmp_path / "start")
    without = {} if decay else {"optimizer.weight_decay": 0.0, "optimizer.decay_on": "all"}
    got = ours("hf", "hf", tmp_path / "start", **{"machine.micro_batch": 8, **without})
    items = iter([
        {"pixel_values": image, "labels": label}
        for one in got.passes
        for image, label in zip(one.images, one.labels, strict=True)
    ])  # fmt: skip
    seen = []

    class Fed(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return IMAGES

        def __getitem__(self, _: int) -> Any:
            return next(items)

    class Trainer(transformers.Trainer):  # type: ignore[name-defined, misc]
        def compute_loss(self, *given: Any, **more: Any) -> Any:
            loss = super().compute_loss(*given, **more)
            seen.append(loss.item())
            return loss

    chosen = transformers.TrainingArguments(
        str(tmp_path / "hf_out"), learning_rate=2e-4, num_train_epochs=5, per_device_train_batch_size=8,
        weight_decay=decay, warmup_steps=0.1, seed=1337, remove_unused_columns=False, use_cpu=True,
        report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    Trainer(model=model.double(), args=chosen, train_dataset=Fed()).train()
    assert len(seen) == 40
    assert largest(got.losses, seen) < loss
    model.save_pretrained(tmp_path / "end")
    found = apart(got.weights, load_file(tmp_path / "end" / "model.safetensors"))
    tables = {f"vit.embeddings.{name}": found.pop(f"vit.embeddings.{name}") for name in _DECAYED}
    assert max(found.values()) < weight
    assert max(tables.values()) < (1e-5 if decay else weight)


@pytest.mark.slow
def test_mae__trains_the_same(ours: Callable[..., Ours], tmp_path: Path) -> None:
    """Its layer rates and its schedule are written here after util/lr_decay.py and util/lr_sched.py."""
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy

    _, start = started(tmp_path, global_pool="avg")
    torch.save({"model": start}, tmp_path / "mae.pth")
    got = ours("mae", "timm", tmp_path / "mae.pth", **{
        "weights.preprocess": "imagenet", "data.eval_resize": 16, "machine.micro_batch": 16,
    })  # fmt: skip
    model = timms(start, global_pool="avg", drop_path_rate=0.1)
    lr, last, warmup, epochs, passes = 5e-4 * 32 / 256, 1e-6, 2, 10, IMAGES // 16
    groups = []
    for name, parameter in model.named_parameters():
        block = re.match(r"blocks\.(\d+)", name)
        first = name in ("cls_token", "pos_embed") or name.startswith("patch_embed")
        layer = int(block[1]) + 1 if block else 0 if first else len(model.blocks) + 1
        spared = parameter.ndim == 1 or name in ("cls_token", "pos_embed")
        scale = 0.65 ** (len(model.blocks) + 1 - layer)
        groups.append({"params": [parameter], "weight_decay": 0.0 if spared else 0.05, "scale": scale})
    optimizer, seen = torch.optim.AdamW(groups, lr=lr), []
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=CLASSES)
    with our_paths():
        for step, two in steps(got.passes):
            seed_step(0, step, 0)
            epoch = 2 * step / passes
            share = (epoch - warmup) / (epochs - warmup)
            rate = last + (lr - last) * 0.5 * (1 + math.cos(math.pi * share))
            rate = lr * epoch / warmup if epoch < warmup else rate
            for group in optimizer.param_groups:
                group["lr"] = rate * group["scale"]
            total = 0.0
            for one in two:
                images, targets = mixed(mixup, one)
                loss = SoftTargetCrossEntropy()(model(images), targets) / 2
                loss.backward()
                total += loss.item()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(total)
    assert len(seen) == 20
    assert largest(got.losses, seen) < 5e-7
    assert max(apart(got.weights, model.state_dict()).values()) < 1e-9
