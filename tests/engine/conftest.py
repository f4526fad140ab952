"""A process alone, and batches that need no data."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from vitctl.data.loader.batches import Batch
from vitctl.engine.losses import classification_loss
from vitctl.engine.optimizer import build_optimizer
from vitctl.engine.runtime import Runtime, start
from vitctl.engine.update import AllReduced, TrainStep
from vitctl.recipe.sections import Optimizer

NUM_CLASSES = 3


class Tiny(nn.Module):
    """Two layers over flattened images [B, 3, 4, 4]; `features` is what feeds the second."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(48, 5, dtype=dtype)
        self.head = nn.Linear(5, NUM_CLASSES, dtype=dtype)

    def features(self, images: Tensor) -> Tensor:
        return torch.tanh(self.body(images.flatten(1)))

    def forward(self, images: Tensor) -> Tensor:
        return torch.as_tensor(self.head(self.features(images)))


def batch(size: int, *, seed: int = 0, first: int = 0) -> Batch:
    """Random images and labels, all of them good."""
    generator = torch.Generator().manual_seed(seed)
    return Batch(
        torch.randint(0, 256, (size, 3, 4, 4), dtype=torch.uint8, generator=generator),
        torch.randint(0, NUM_CLASSES, (size,), generator=generator),
        torch.ones(size),
        torch.arange(first, first + size),
    )


def rows(whole: Batch, chosen: slice) -> Batch:
    """A part of a batch."""
    return Batch(whole.images[chosen], whole.labels[chosen], whole.weights[chosen], whole.samples[chosen])


@dataclass
class Knobs:
    """What a test may want to be different."""

    name: Literal["adam", "sgd"] = "sgd"
    lr: Callable[[int], float] = field(default=lambda _step: 0.1)
    batch_size: int = 8
    weight_decay: float = 0.0
    clip_norm: float = 0.0


@pytest.fixture
def runtime() -> Runtime:
    return start(precision="float64", device="cpu", processes=1)


@pytest.fixture
def trainer(runtime: Runtime) -> Callable[..., TrainStep]:
    """trainer(loss, **knobs) over a fresh, always equal Tiny."""

    def make(loss: Callable[[Tensor, Tensor, Tensor], Tensor], **knobs: object) -> TrainStep:
        k, model = Knobs(**knobs), Tiny()  # type: ignore[arg-type]
        return TrainStep(
            runtime=runtime,
            model=model,
            network=model,
            optimizer=build_optimizer(model, Optimizer(name=k.name, lr=1.0, weight_decay=k.weight_decay)),
            average=None,
            objective=lambda model, batch, _step: loss(
                model(batch.images.double() / 255), batch.labels, batch.weights
            ),
            lr=k.lr,
            batch_size=k.batch_size,
            clip_norm=k.clip_norm,
            gradients=AllReduced(runtime, model, seed=0),
        )

    return make


LOSS = partial(classification_loss, name="softmax", label_smoothing=0.0)
