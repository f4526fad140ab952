"""Copies of weights in bf16 for a step: the bits of autocast, with a cast a step in place of one a pass."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from vitctl.models.kernels import Head, Linear, Narrowed
from vitctl.models.lora import adapt
from vitctl.models.variants import ViTConfig

MakeModel = Callable[..., Any]
MakeImages = Callable[..., Tensor]


def gradients(model: Any, images: Tensor) -> list[Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(images).square().sum()
    torch.autograd.backward(loss)
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def change(model: Any) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.01)


@pytest.mark.parametrize(
    "values",
    [
        {},
        *(
            pytest.param(more, marks=pytest.mark.slow)
            for more in (
                {"classifier": "attention"},
                {"qkv_bias": "qv"},
                {"mlp": "swiglu"},
                {"layer_scale": 0.1},
            )
        ),
    ],
)
@pytest.mark.parametrize("recomputed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_narrowed__gives_the_bits_of_autocast(
    values: dict[str, Any], recomputed: Any, tiny: ViTConfig, random_model: MakeModel, images_for: MakeImages
) -> None:
    model, images = random_model(replace(tiny, **values)).float().train(), images_for(tiny).float()
    model.checkpoint_blocks = recomputed
    narrowed = Narrowed(model)
    for _ in range(2):  # the second after the weights have changed
        wanted = gradients(model, images)
        with narrowed():
            assert any(one.narrow for one in model.modules() if isinstance(one, Linear))
            found = gradients(model, images)
        assert len(found) == len(wanted) > 20
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, wanted, strict=True))
        assert not any(one.narrow for one in model.modules() if isinstance(one, Linear))
        change(model)


def test_narrowed__leaves_heads_and_adapted_layers_alone(
    tiny: ViTConfig, random_model: MakeModel, images_for: MakeImages
) -> None:
    model, images = random_model(tiny).float().train(), images_for(tiny).float()
    adapt(model, ["q", "v"], [], rank=2, alpha=4.0, dropout=0.0, seed=0)
    model.requires_grad_(True)  # frozen weights are left alone, too
    change(model)
    wanted = gradients(model, images)
    with Narrowed(model)():
        held = [one for one in model.modules() if isinstance(one, Linear) and one.narrow]
        assert held and not any(isinstance(one, Head) or hasattr(one, "adapters") for one in held)
        assert all(torch.equal(a, b) for a, b in zip(gradients(model, images), wanted, strict=True))
