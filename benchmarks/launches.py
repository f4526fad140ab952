"""Kernels that a GPU would start in a step, beside timm's: `python benchmarks/launches.py`, on a CPU.

Operations are counted as torch dispatches them, without those that only make a view. A `_foreach_` operation
counts once where torch 2.14 has a kernel for many tensors (ATen/native/ForeachUtils.h: one type, equal sizes
of the lists, a scalar of their type), otherwise once a tensor. Ours takes the ways of a CUDA device. timm's
is a step of its train.py: AdamW or LAMB, clipping by norm, ModelEmaV3. Launches are linear in the depth, so
two shallow networks tell those of all.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

PARTS = ("forward", "backward", "clip", "optimizer", "average", "rest")
SHALLOW = (2, 3)
CLIP_NORM, DECAY, RATE = 1e-3, 0.999, 1e-3  # the norm is always clipped
SHAPES = {"Ti/16": (192, 3, 12), "S/16": (384, 6, 12), "B/16": (768, 12, 12), "L/16": (1024, 16, 24)}
OUT = Path(__file__).parent / "results" / "gpu" / "launches.md"
# Memory and names of views; `aminmax` is one_hot's check, which a CPU alone makes.
_FREE = ("empty", "new_empty", "detach", "alias", "_unsafe_view", "lift_", "_local_", "_record", "aminmax")
# A convolution adds its bias by a kernel of its own (ATen/native/Convolution.cpp), whose gradient is another.
_TWO = ("convolution", "convolution_backward")


class Launches(TorchDispatchMode):
    """Counts operations by part; `host_steps`: not those of an optimizer's step numbers, of the CPU."""

    def __init__(self, *, host_steps: bool = False) -> None:
        super().__init__()
        self.found: dict[str, Counter[str]] = {part: Counter() for part in (*PARTS, "host")}
        self.part, self._host_steps = "rest", host_steps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not (func.is_view or name.startswith(_FREE) or (args and self._is_of_host(args))):
            self.found[self.part][name] += launches(name, args)
        return func(*args, **(kwargs or {}))

    def _is_of_host(self, args: Any) -> bool:
        numbers = isinstance(args[0], list) and all(isinstance(t, Tensor) and not t.dim() for t in args[0])
        return self._host_steps and self.part == "optimizer" and numbers

    def within(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call whose operations count for a part."""

        def counted(*args: Any, **more: Any) -> Any:
            before, self.part = self.part, part
            try:
                return call(*args, **more)
            finally:
                self.part = before

        return counted

    def totals(self) -> dict[str, int]:
        return {part: found.total() for part, found in self.found.items()}


def launches(name: str, args: Any) -> int:
    """Return the kernels of an operation, by torch's conditions for one kernel of many tensors."""
    lists = [one for one in args if isinstance(one, list) and one and isinstance(one[0], Tensor)]
    if not name.startswith("_foreach") or not lists:
        return 1 + (name in _TWO)
    scalars = [one for one in args if isinstance(one, Tensor)]
    first = lists[0]
    types = {one.dtype for several in lists for one in several} | {one.dtype for one in scalars}
    is_equal = all(
        one.shape == other.shape and one.stride() == other.stride()
        for several in lists[1:]
        for one, other in zip(first, several, strict=True)
    )
    is_fast = is_equal and (len(types) == 1 or name == "_foreach_copy_")
    return 1 if is_fast else len(first)


def ours(model: nn.Module, precision: str, *, optimizer: str, lanes: bool = False, **how: Any) -> Launches:
    """Count an update of vitctl, the second, as on CUDA."""
    from vitctl.data.loader.batches import Batch
    from vitctl.data.source.order import Lanes
    from vitctl.engine import optimizer as engine
    from vitctl.engine import update
    from vitctl.engine.lanes import ByLanes, LaneSum
    from vitctl.engine.losses import classification
    from vitctl.engine.mixing import Mixing
    from vitctl.engine.optimizer import Average, build_optimizer
    from vitctl.engine.runtime import start
    from vitctl.recipe.sections import Loss, Optimizer

    runtime = start(precision=precision, device="cpu", processes=1)
    wrapped = runtime.wrap(model, ddp=False)
    gradients: Any = update.AllReduced(runtime, wrapped, 0)
    if lanes:
        gradients = ByLanes(runtime, model, 0, LaneSum(Lanes(4, 2, 2), 0, 1))  # type: ignore[arg-type]
    counts, batch = Launches(), Batch(*examples(model), torch.ones(4), torch.arange(4))
    objective = classification(Loss(name="softmax"), how.get("mixing", Mixing()), 0)
    normalise = runtime.normaliser((0.5,) * 3, (0.5,) * 3)
    step = update.TrainStep(
        runtime,
        wrapped,
        model,
        counts.within("forward", partial(objective, normalise=normalise)),
        gradients,
        build_optimizer(model, Optimizer(name=optimizer, lr=RATE, weight_decay=0.1)),
        Average(model, DECAY),
        lr=lambda _: RATE,
        batch_size=4,
        clip_norm=CLIP_NORM,
        norm_dtype=torch.float64 if lanes else None,
        **held_as_on_cuda(model, precision),
    )
    if hasattr(model, "as_product"):
        model.embed = model.as_product
    parts = [batch] if not lanes else [part(batch, slice(at, at + 2)) for at in (0, 2)]
    step.update(0, parts)
    with (
        patch.object(torch.autograd, "backward", counts.within("backward", torch.autograd.backward)),
        patch.object(update, "batch_sums", counts.within("host", update.batch_sums)),
        patch.object(update, "clip_gradients", counts.within("clip", update.clip_gradients)),
        patch.object(update, "take_step", counts.within("optimizer", update.take_step)),
        patch.object(Average, "update", counts.within("average", Average.update)),
        as_on_cuda(engine),
        counts,
    ):
        step.update(1, parts)
    return counts


@contextmanager
def as_on_cuda(engine: Any) -> Iterator[None]:
    """Within the block tensors of the CPU are updated as those of a GPU."""
    with patch.object(engine, "MANY_AT_ONCE", ("cpu",)) if hasattr(engine, "MANY_AT_ONCE") else nullcontext():
        yield


def held_as_on_cuda(model: nn.Module, precision: str) -> dict[str, Any]:
    """Return what a `TrainStep` gets in bf16 on CUDA alone."""
    from vitctl.models import kernels

    return (
        {"holding": kernels.Narrowed(model)} if precision == "bf16" and hasattr(kernels, "Narrowed") else {}
    )


def part(batch: Any, rows: slice) -> Any:
    """Return some images of a batch."""
    names = "images", "labels", "weights", "samples"
    return replace(batch, **{name: getattr(batch, name)[rows] for name in names})


def examples(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Return four images, uint8, of the size that a network takes, and their labels."""
    config: Any = getattr(model, "config", None)
    size = config.image_size if config else model.patch_embed.img_size[0]  # type: ignore[union-attr, index]
    return torch.randint(0, 256, (4, 3, size, size), dtype=torch.uint8), torch.arange(4)


def timms(model: nn.Module, precision: str, *, optimizer: str) -> Launches:
    """Count a step of timm's train.py, the second."""
    from timm.optim import create_optimizer_v2
    from timm.utils import ModelEmaV3, dispatch_clip_grad

    name = {"adam": "adamw", "lamb": "lamb", "sgd": "sgd"}[optimizer]
    steps = create_optimizer_v2(model, name, lr=RATE, weight_decay=0.1, foreach=True)  # two groups, as there
    average, counts = ModelEmaV3(model, DECAY), Launches(host_steps=True)
    images, labels = examples(model)
    mean = std = torch.full((1, 3, 1, 1), 127.5)

    def loss() -> Tensor:
        inputs = images.float().sub_(mean).div_(std)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            return nn.functional.cross_entropy(model(inputs), labels)

    for run in (nullcontext(), counts):
        with run:
            found = counts.within("forward", loss)()
            counts.within("backward", found.backward)()
            counts.within("clip", dispatch_clip_grad)(model.parameters(), CLIP_NORM)
            counts.within("optimizer", steps.step)()
            counts.within("average", average.update)(model)
            steps.zero_grad()
    return counts


def of(side: str, name: str, depth: int, precision: str, **how: Any) -> Launches:
    """Count a step of a network with so many blocks, at 32 pixels."""
    width, heads, _ = SHAPES[name]
    if side == "ours":
        from vitctl.models.build import build
        from vitctl.models.variants import variant

        more = how.pop("network", {})
        config = variant(name, image_size=32, num_classes=10, depth=depth, dropout=0.0, **more)
        return ours(build(config, seed=0), precision, **how)
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(img_size=32, embed_dim=width, num_heads=heads, depth=depth, num_classes=10)
    return timms(model.train(), precision, **how)


def whole(side: str, name: str, precision: str, **how: Any) -> dict[str, int]:
    """Return the launches of a step by part, from two shallow networks."""
    few, more = (of(side, name, depth, precision, **how).totals() for depth in SHALLOW)
    return {part: few[part] + (more[part] - few[part]) * (SHAPES[name][2] - SHALLOW[0]) for part in PARTS}


BOTH = ("ours", "timm")
CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "AdamW": (BOTH, {"optimizer": "adam"}),
    "LAMB": (BOTH, {"optimizer": "lamb"}),
    "SGD": (BOTH, {"optimizer": "sgd"}),
    "AdamW, 2 lanes": (("ours",), {"optimizer": "adam", "lanes": True}),
    "AdamW, drop path": (("ours",), {"optimizer": "adam", "network": {"drop_path": 0.1}}),
}


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="S/16", choices=list(SHAPES))
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--title", default="now")
    given = parser.parse_args()
    lines = [f"| {given.title} | {' | '.join(PARTS)} | all |", "|---" * (len(PARTS) + 2) + "|"]
    for precision in ("bf16", "float32"):
        for title, (sides, how) in CASES.items():
            for side in sides:
                found = whole(side, given.model, precision, **how)
                cells = " | ".join(map(str, [*found.values(), sum(found.values())]))
                lines.append(f"| {given.model}, {precision}, {title}, {side} | {cells} |")
    print("\n".join(lines))
    before = given.out.read_text() + "\n" if given.out.exists() else ""
    given.out.write_text(before + "\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
