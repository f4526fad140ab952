"""The weights of every attention, beside a forward pass that stays as it is."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.analysis.conftest import FAMILIES, TRANSFORMERS, noisy_model, numpy_attentions, random_images
from tests.models import numpy_reference as reference
from vitctl.analysis.attention import AttentionLayer, attention_layers, pixels_per_patch, watch_attention
from vitctl.models.axial import AxialAttention
from vitctl.models.variants import variant


def watched(model: Any, images: Tensor) -> tuple[list[tuple[AttentionLayer, Tensor]], Tensor]:
    found: list[tuple[AttentionLayer, Tensor]] = []
    with watch_attention(model, lambda number, layer, weights: found.insert(number, (layer, weights))):
        return found, model(images)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("mode", ["fused", "math"])
def test_watch__output_and_gradients_are_the_same_bits(
    name: str, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vitctl.models.kernels import attention

    monkeypatch.setattr(attention, "_kernel", mode)
    model, images = noisy_model(FAMILIES[name]).train(), random_images(FAMILIES[name].image_size)
    plain = model(images)
    plain.square().sum().backward()
    before = {
        key: parameter.grad.clone()
        for key, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad()
    found, output = watched(model, images)
    output.square().sum().backward()
    assert torch.equal(output, plain)
    assert before and all(
        torch.equal(before[key], p.grad) for key, p in model.named_parameters() if key in before
    )
    assert len(found) == len(attention_layers(model))
    assert not any(weights.requires_grad for _, weights in found)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_watch__weights_equal_numpy(name: str) -> None:
    model, images = noisy_model(TRANSFORMERS[name]), random_images(32)
    found, _ = watched(model, images)
    expected = list(numpy_attentions(model, images))
    assert len(found) == len(expected) > 1
    for (layer, weights), all_tokens in zip(found, expected, strict=True):
        for row, column in np.ndindex(*layer.grid) if layer.along != "grid" else ():
            place = row * layer.grid[1] + column
            number, line = (
                (row, range(layer.grid[1])) if layer.along == "row" else (column, range(layer.grid[0]))
            )
            keys = [
                row * layer.grid[1] + k if layer.along == "row" else k * layer.grid[1] + column for k in line
            ]
            of_query = weights[:, number, :, column if layer.along == "row" else row].numpy()
            np.testing.assert_allclose(of_query, all_tokens[:, :, place, keys], atol=1e-12)
        if layer.along == "grid":
            np.testing.assert_allclose(weights.numpy(), all_tokens, atol=1e-12)


def test_watch__axial_resnet_equals_loops() -> None:
    """Logits are q k + q r_k + k r_q with the embeddings r of the offset i - j, from what each attention
    receives.
    """
    model = noisy_model(FAMILIES["axial resnet"])
    attentions = [module for module in model.modules() if isinstance(module, AxialAttention)]
    received: list[np.ndarray] = []
    handles = [
        one.register_forward_pre_hook(lambda _, given: received.append(given[0].numpy()))
        for one in attentions
    ]
    with torch.no_grad():
        found, _ = watched(model, random_images(32))
    for handle in handles:
        handle.remove()
    assert [(layer.grid[0], layer.stride) for layer, _ in found] == [(8, 4)] * 6
    assert [layer.along for layer, _ in found] == ["row", "column"] * 3
    for (_, weights), module, x in zip(found, attentions, received, strict=True):
        w = {name: tensor.numpy() for name, tensor in module.state_dict().items()}
        qkv = reference.group_norm(np.einsum("oc,bcl->bol", w["qkv.weight"], x), w, "qkv_norm", 4, 1e-4)
        size, table = module.head_size, w["relative_position"]
        for head in range(2):
            query, key = (
                qkv[:, head * 2 * size :][:, : size // 2],
                qkv[:, head * 2 * size :][:, size // 2 : size],
            )
            logits = np.einsum("bdi,bdj->bij", query, key)
            for i, j in np.ndindex(8, 8):
                offset = table[i - j + 7]
                logits[:, i, j] += (
                    query[:, :, i] @ offset[size // 2 : size] + key[:, :, j] @ offset[: size // 2]
                )
            powers = np.exp(logits - logits.max(-1, keepdims=True))
            expected = powers / powers.sum(-1, keepdims=True)
            np.testing.assert_allclose(weights[:, :, head].flatten(0, 1).numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("name", ["vit", "axial", "axial resnet"])
def test_watch__weights_are_wide_under_autocast(name: str) -> None:
    model = noisy_model(FAMILIES[name]).float()
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = watched(model, random_images(32).float())
    assert {weights.dtype for _, weights in found} == {torch.float32}


def test_watch__a_resnet_has_nothing_to_watch() -> None:
    assert attention_layers(noisy_model(FAMILIES["resnet v1"])) == []
    assert attention_layers(noisy_model(FAMILIES["resnet v2"])) == []


@pytest.mark.parametrize(
    ("name", "pixels"),
    [("B/16", 16), ("H/14", 14), ("R50+B/32", 32), ("R50+B/16", 16), ("R50+L/32", 32), ("R+Ti/16", 32)],
)
def test_pixels_per_patch__is_the_stride_of_the_tokens(name: str, pixels: int) -> None:
    """R+Ti/16 has 8x8 patches at stride 4, whatever its name says."""
    config: Any = variant(name)
    assert pixels_per_patch(config) == pixels == 224 // config.grid[0]
