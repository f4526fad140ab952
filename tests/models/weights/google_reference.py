"""The authors' networks in NumPy float64, straight from their `.npz` names, and random weights in their
layouts.

Written from the description of their code and files; knows nothing of vitctl. Images are [B, H, W, 3] in [-1,
1].
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Weights = dict[str, Array]  # as drawn float32; a forward pass wants float64


def draw(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> Weights:
    """Random weights of a useful size: kernels keep the variance, norms lie around 1, the rest around 0."""
    generator = np.random.default_rng(seed)
    weights = {}
    for name, shape in shapes.items():
        scale = 0.3 if len(shape) == 1 else np.prod(shape[:-1]) ** -0.5 if name.endswith("kernel") else 0.5
        centre = 1.0 if name.endswith(("scale", "gamma")) else 0.0
        weights[name] = (centre + scale * generator.standard_normal(shape)).astype(np.float32)
    return weights


def transformer_shapes(
    width: int,
    heads: int,
    mlp: int,
    depth: int,
    tokens: int,
    kernel: tuple[int, int, int],
    classes: int,
    rep: int = 0,
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the Transformer; `kernel` is the patch's height, width and channels."""
    size = width // heads
    yield from (("embedding/kernel", (*kernel, width)), ("embedding/bias", (width,)), ("cls", (1, 1, width)))
    yield "Transformer/posembed_input/pos_embedding", (1, tokens + 1, width)
    for i in range(depth):
        block = f"Transformer/encoderblock_{i}"
        attention = f"{block}/MultiHeadDotProductAttention_1"
        for part in ("query", "key", "value"):
            yield from (
                (f"{attention}/{part}/kernel", (width, heads, size)),
                (f"{attention}/{part}/bias", (heads, size)),
            )
        yield from ((f"{attention}/out/kernel", (heads, size, width)), (f"{attention}/out/bias", (width,)))
        for norm in ("LayerNorm_0", "LayerNorm_2"):
            yield from ((f"{block}/{norm}/scale", (width,)), (f"{block}/{norm}/bias", (width,)))
        for dense, shape in (("Dense_0", (width, mlp)), ("Dense_1", (mlp, width))):
            yield from (
                (f"{block}/MlpBlock_3/{dense}/kernel", shape),
                (f"{block}/MlpBlock_3/{dense}/bias", shape[1:]),
            )
    yield from (("Transformer/encoder_norm/scale", (width,)), ("Transformer/encoder_norm/bias", (width,)))
    if rep:
        yield from (("pre_logits/kernel", (width, rep)), ("pre_logits/bias", (rep,)))
    yield from (("head/kernel", (rep or width, classes)), ("head/bias", (classes,)))


def hybrid_root_shapes(width: int, depths: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the ResNet in front of a hybrid."""
    yield from (
        ("conv_root/kernel", (7, 7, 3, width)),
        ("gn_root/scale", (width,)),
        ("gn_root/bias", (width,)),
    )
    inputs = width
    for stage, units in enumerate(depths):
        middle = width * 2**stage
        for unit in range(units):
            name = f"block{stage + 1}/unit{unit + 1}"
            convs = {
                "1": (1, 1, inputs, middle),
                "2": (3, 3, middle, middle),
                "3": (1, 1, middle, 4 * middle),
            }
            if unit == 0:
                convs["_proj"] = (1, 1, inputs, 4 * middle)
            for suffix, shape in convs.items():
                yield f"{name}/conv{suffix}/kernel", shape
                yield from ((f"{name}/gn{suffix}/{kind}", shape[3:]) for kind in ("scale", "bias"))
            inputs = 4 * middle


def bit_shapes(width: int, depths: tuple[int, ...], classes: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a BiT ResNet."""
    yield "resnet/root_block/standardized_conv2d/kernel", (7, 7, 3, width)
    inputs = width
    for stage, units in enumerate(depths):
        middle = width * 2**stage
        for unit in range(units):
            name = f"resnet/block{stage + 1}/unit{unit + 1:02d}"
            convs = {
                "a": (1, 1, inputs, middle),
                "b": (3, 3, middle, middle),
                "c": (1, 1, middle, 4 * middle),
            }
            for letter, shape in convs.items():
                yield f"{name}/{letter}/standardized_conv2d/kernel", shape
                yield from ((f"{name}/{letter}/group_norm/{kind}", shape[2:3]) for kind in ("gamma", "beta"))
            if unit == 0:
                yield f"{name}/a/proj/standardized_conv2d/kernel", (1, 1, inputs, 4 * middle)
            inputs = 4 * middle
    yield from (("resnet/group_norm/gamma", (inputs,)), ("resnet/group_norm/beta", (inputs,)))
    yield from (
        ("resnet/head/conv2d/kernel", (1, 1, inputs, classes)),
        ("resnet/head/conv2d/bias", (classes,)),
    )


def vit(w: Weights, images: Array) -> Array:
    """Logits of a ViT, or of the Transformer of a hybrid when `images` is the feature map."""
    patch = w["embedding/kernel"].shape[0]
    x = conv(images, w["embedding/kernel"], patch, ((0, 0), (0, 0))) + w["embedding/bias"]
    x = x.reshape(len(x), -1, x.shape[-1])
    if "cls" in w:
        x = np.concatenate([np.repeat(w["cls"], len(x), 0), x], 1)
    x = x + w["Transformer/posembed_input/pos_embedding"]
    depth = sum(name.endswith("LayerNorm_0/scale") for name in w)
    for i in range(depth):
        block = f"Transformer/encoderblock_{i}"
        x = x + attention(
            layer_norm(x, w, f"{block}/LayerNorm_0"), w, f"{block}/MultiHeadDotProductAttention_1"
        )
        hidden = dense(layer_norm(x, w, f"{block}/LayerNorm_2"), w, f"{block}/MlpBlock_3/Dense_0")
        hidden = 0.5 * hidden * (1 + np.tanh(np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)))
        x = x + dense(hidden, w, f"{block}/MlpBlock_3/Dense_1")
    x = layer_norm(x, w, "Transformer/encoder_norm")
    x = x[:, 0] if "cls" in w else x.mean(1)
    if "pre_logits/kernel" in w:
        x = np.tanh(dense(x, w, "pre_logits"))
    return dense(x, w, "head")


def hybrid(w: Weights, images: Array) -> Array:
    """Logits of a ViT behind a ResNet V1."""
    x = conv(images, v1_kernel(w["conv_root/kernel"]), 2, same(images, 7, 2))
    x = np.maximum(group_norm(x, w["gn_root/scale"], w["gn_root/bias"], 1e-6), 0)
    x = max_pool(np.pad(x, ((0, 0), *same(x, 3, 2), (0, 0)), constant_values=-np.inf))
    for stage, unit in units(w, "block{}/unit{}/conv1/kernel"):
        name, stride = f"block{stage}/unit{unit}", 2 if stage > 1 and unit == 1 else 1
        shortcut = x
        if f"{name}/conv_proj/kernel" in w:
            shortcut = v1_layer(x, w, name, "_proj", stride)
        y = np.maximum(v1_layer(x, w, name, "1", 1), 0)
        y = np.maximum(v1_layer(y, w, name, "2", stride), 0)
        x = np.maximum(shortcut + v1_layer(y, w, name, "3", 1), 0)
    return vit(w, x)


def v1_layer(x: Array, w: Weights, name: str, suffix: str, stride: int) -> Array:
    kernel = v1_kernel(w[f"{name}/conv{suffix}/kernel"])
    x = conv(x, kernel, stride, same(x, len(kernel), stride))
    return group_norm(x, w[f"{name}/gn{suffix}/scale"], w[f"{name}/gn{suffix}/bias"], 1e-6)


def v1_kernel(kernel: Array) -> Array:
    return (kernel - kernel.mean((0, 1, 2))) / (kernel.std((0, 1, 2)) + 1e-5)


def bit(w: Weights, images: Array) -> Array:
    """Logits of a BiT ResNet (V2)."""
    x = conv(images, v2_kernel(w, "resnet/root_block"), 2, ((3, 3), (3, 3)))
    x = max_pool(np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))))
    for stage, unit in units(w, "resnet/block{}/unit{:02d}/a/standardized_conv2d/kernel"):
        name, stride = f"resnet/block{stage}/unit{unit:02d}", 2 if stage > 1 and unit == 1 else 1
        active = v2_active(x, w, f"{name}/a/group_norm")
        shortcut = x
        if f"{name}/a/proj/standardized_conv2d/kernel" in w:
            shortcut = conv(active, v2_kernel(w, f"{name}/a/proj"), stride, ((0, 0), (0, 0)))
        y = conv(active, v2_kernel(w, f"{name}/a"), 1, ((0, 0), (0, 0)))
        y = conv(v2_active(y, w, f"{name}/b/group_norm"), v2_kernel(w, f"{name}/b"), stride, ((1, 1), (1, 1)))
        y = conv(v2_active(y, w, f"{name}/c/group_norm"), v2_kernel(w, f"{name}/c"), 1, ((0, 0), (0, 0)))
        x = shortcut + y
    x = v2_active(x, w, "resnet/group_norm").mean((1, 2))
    return x @ w["resnet/head/conv2d/kernel"][0, 0] + w["resnet/head/conv2d/bias"]


def v2_active(x: Array, w: Weights, name: str) -> Array:
    return np.maximum(group_norm(x, w[f"{name}/gamma"], w[f"{name}/beta"], 1e-5), 0)


def v2_kernel(w: Weights, name: str) -> Array:
    kernel = w[f"{name}/standardized_conv2d/kernel"]
    return (kernel - kernel.mean((0, 1, 2))) / np.sqrt(kernel.var((0, 1, 2)) + 1e-10)


def units(w: Weights, pattern: str) -> Iterator[tuple[int, int]]:
    """Stage and unit numbers, from 1, in order, as far as the names go."""
    stage, unit = 1, 1
    while pattern.format(stage, unit) in w:
        while pattern.format(stage, unit) in w:
            yield stage, unit
            unit += 1
        stage, unit = stage + 1, 1


def attention(x: Array, w: Weights, name: str) -> Array:
    query, key, value = (
        np.einsum("bnd,dhc->bhnc", x, w[f"{name}/{part}/kernel"]) + w[f"{name}/{part}/bias"][:, None]
        for part in ("query", "key", "value")
    )
    scores = query @ key.swapaxes(2, 3) / np.sqrt(query.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = weights / weights.sum(-1, keepdims=True) @ value
    return np.einsum("bhnc,hcd->bnd", mixed, w[f"{name}/out/kernel"]) + w[f"{name}/out/bias"]


def layer_norm(x: Array, w: Weights, name: str) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * w[f"{name}/scale"] + w[f"{name}/bias"]


def group_norm(x: Array, scale: Array, bias: Array, eps: float) -> Array:
    grouped = x.reshape(*x.shape[:3], 32, -1)
    centred = grouped - grouped.mean((1, 2, 4), keepdims=True)
    return (centred / np.sqrt(grouped.var((1, 2, 4), keepdims=True) + eps)).reshape(
        x.shape
    ) * scale.ravel() + bias.ravel()


def dense(x: Array, w: Weights, name: str) -> Array:
    return x @ w[f"{name}/kernel"] + w[f"{name}/bias"]


def same(x: Array, kernel: int, stride: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """TensorFlow's SAME padding of height and width."""
    totals = [max(0, (-(-side // stride) - 1) * stride + kernel - side) for side in x.shape[1:3]]
    return (totals[0] // 2, totals[0] - totals[0] // 2), (totals[1] // 2, totals[1] - totals[1] // 2)


def conv(x: Array, kernel: Array, stride: int, padding: tuple[tuple[int, int], tuple[int, int]]) -> Array:
    x = np.pad(x, ((0, 0), *padding, (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(x, kernel.shape[:2], (1, 2))[:, ::stride, ::stride]
    return np.einsum("bijchw,hwcd->bijd", windows, kernel, optimize=True)


def max_pool(x: Array) -> Array:
    return np.lib.stride_tricks.sliding_window_view(x, (3, 3), (1, 2))[:, ::2, ::2].max((-2, -1))
