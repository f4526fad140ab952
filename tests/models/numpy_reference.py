"""Every forward pass once more, in NumPy float64, from the description of the authors' code and not from
ours.

Maps are `[B, C, H, W]` and tokens `[B, N, D]`, as in the package; weights go by the package's names.
"""

import math
from collections.abc import Mapping
from itertools import product

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from vitctl.models.variants import (
    AxialConfig,
    AxialResNetConfig,
    Config,
    HybridConfig,
    MaskedPatchConfig,
    ResNetConfig,
    ViTConfig,
)

Array = NDArray[np.float64]
Weights = Mapping[str, Array]
# What stands in for dropout at the four sites: a fixed factor shows that each is where it should be, and only
# there.
NO_DROPOUT = (1.0, 1.0, 1.0, 1.0)


def forward(config: Config, w: Weights, images: Array, factors: tuple[float, ...] = NO_DROPOUT) -> Array:
    """The logits of any family; without a head, the representation."""
    if isinstance(config, ResNetConfig) and config.version == "v2":
        features = resnet_v2(config.stage_depths, config.num_groups, w, images).mean((2, 3))
    elif isinstance(config, ResNetConfig):
        axial = config if isinstance(config, AxialResNetConfig) else None
        features = resnet_v1(config.stage_depths, config.num_groups, w, images, axial).mean((2, 3))
    else:
        features = transformer(config, w, images, factors)
    return dense(features, w, "head") if config.num_classes else features


def transformer(
    config: ViTConfig, w: Weights, images: Array, factors: tuple[float, ...] = NO_DROPOUT
) -> Array:
    """The representation that feeds the head."""
    if isinstance(config, HybridConfig):
        images = resnet_v1(config.stage_depths, config.num_groups, w, images)
    states = encode(config, w, embed(config, w, images), factors)
    x, first = states[-1], np.concatenate([x[:, 0] for x in states[-config.token_blocks :]], -1)
    patches = x[:, config.registers + has_token(config) :].mean(1)
    if config.classifier == "attention":
        x = attention_pool(config, w, x)
    elif config.classifier == "token_patches":
        x = np.concatenate([first, patches], -1)
    else:
        x = first if config.classifier == "token" else patches
    x = norm(x, w, "norm", config.norm_eps) if config.norm_at == "pooled" else x
    return np.tanh(dense(x, w, "pre_logits")) if config.representation_size else x


def embed(config: ViTConfig, w: Weights, images: Array) -> Array:
    patch, (rows, columns) = config.patch_size, config.grid
    x = np.empty((len(images), rows * columns, config.hidden_size))
    for row, column in product(range(rows), range(columns)):
        pixels = images[:, :, row * patch : (row + 1) * patch, column * patch : (column + 1) * patch]
        x[:, row * columns + column] = np.einsum("bchw,dchw->bd", pixels, w["patch_embedding.weight"])
    return x + w["patch_embedding.bias"] if config.patch_bias else x


def has_token(config: ViTConfig) -> bool:
    return config.classifier in ("token", "patches", "token_patches")


def encode(config: ViTConfig, w: Weights, x: Array, factors: tuple[float, ...] = NO_DROPOUT) -> list[Array]:
    """The tokens after each block, `[B, N, D]`."""
    states: list[Array] = []
    prefix = [w[name] for name in ("class_token", "registers") if name in w]
    x = np.concatenate([*(np.repeat(one, len(x), 0) for one in prefix), x], 1)
    for layer in range(config.depth):
        if layer == 0 or config.position_at != "stem":
            x = x + position(config, w, layer if config.position_at == "every_layer" else 0)
        if layer == 0:
            x = x * factors[0]
            x = norm(x, w, "norm_pre", config.norm_eps) if config.norm_pre else x
        if isinstance(config, AxialConfig):
            x = axial_block(config, w, f"blocks.{layer}", x, factors)
        else:
            x = block(config, w, f"blocks.{layer}", x, factors)
        states.append(norm(x, w, "norm", config.norm_eps) if config.norm_at == "tokens" else x)
    return states


def position(config: ViTConfig, w: Weights, layer: int) -> Array:
    """What is added to every token: `[N, D]`."""
    table = np.zeros((config.num_tokens, config.hidden_size))
    if config.position_embedding == "learned":
        stored = w["position_embedding"][layer]
        table[config.prefix_tokens :] = stored[-len(table) + config.prefix_tokens :]
        if config.position_class_row and has_token(config):
            table[0] = stored[0]
    if config.position_embedding == "sincos":
        quarter = config.hidden_size // 4
        for token in range(config.prefix_tokens, config.num_tokens):
            for axis, place in enumerate(reversed(divmod(token - config.prefix_tokens, config.grid[1]))):
                for i in range(quarter):
                    angle = place / 10_000 ** (i / (quarter - 1))
                    table[token, 2 * axis * quarter + i] = np.sin(angle)
                    table[token, (2 * axis + 1) * quarter + i] = np.cos(angle)
    if config.position_embedding == "2d":
        half, columns = config.hidden_size // 2, config.grid[1]
        for token in range(config.prefix_tokens, config.num_tokens):
            row, column = divmod(token - config.prefix_tokens, columns)
            table[token, :half] = w["position_columns"][layer, column]
            table[token, half:] = w["position_rows"][layer, row]
    return table


def block(config: ViTConfig, w: Weights, name: str, x: Array, factors: tuple[float, ...]) -> Array:
    _, after_attention, after_gelu, after_mlp = factors
    mixed = attention(config, norm(x, w, f"{name}.norm1", config.norm_eps), w, f"{name}.attention")
    x = x + after_attention * mixed * w.get(f"{name}.scale1", 1.0)
    changed = mlp(config, norm(x, w, f"{name}.norm2", config.norm_eps), w, f"{name}.mlp", after_gelu)
    return x + after_mlp * changed * w.get(f"{name}.scale2", 1.0)


def mlp(config: ViTConfig, x: Array, w: Weights, name: str, after_gelu: float = 1.0) -> Array:
    hidden = dense(x, w, f"{name}.fc1")
    if config.mlp == "swiglu":
        gate, hidden = hidden[..., : config.mlp_size], hidden[..., config.mlp_size :]
        hidden = gate / (1 + np.exp(-gate)) * hidden
    elif config.gelu == "quick":
        hidden = hidden / (1 + np.exp(-1.702 * hidden))
    else:
        hidden = gelu_tanh(hidden) if config.gelu == "tanh" else hidden * normal_cdf(hidden)
    hidden = hidden * after_gelu
    hidden = norm(hidden, w, f"{name}.norm", config.norm_eps) if config.mlp_norm else hidden
    return dense(hidden, w, f"{name}.fc2")


def attention_pool(config: ViTConfig, w: Weights, x: Array) -> Array:
    """One query that no token gave."""
    width, size = config.hidden_size, config.hidden_size // config.num_heads
    matrix, bias = w["pool.qkv.weight"], w["pool.qkv.bias"]
    query = w["pool.probe"][0, 0] @ matrix[:width].T + bias[:width]
    key = x @ matrix[width : 2 * width].T + bias[width : 2 * width]
    value = x @ matrix[2 * width :].T + bias[2 * width :]
    heads = []
    for head in range(config.num_heads):
        of = slice(head * size, (head + 1) * size)
        shares = softmax(key[..., of] @ query[of] / np.sqrt(size))
        heads.append(np.einsum("bn,bnd->bd", shares, value[..., of]))
    pooled = dense(np.concatenate(heads, -1), w, "pool.out")
    return pooled + mlp(config, norm(pooled, w, "pool.norm", config.norm_eps), w, "pool.mlp")


def axial_block(config: ViTConfig, w: Weights, name: str, x: Array, factors: tuple[float, ...]) -> Array:
    """Each row on its own, then each column on its own."""
    rows, columns = config.grid
    x = x.copy()
    for row in range(rows):
        members = np.arange(columns) + row * columns
        x[:, members] = block(config, w, f"{name}.row", x[:, members], factors)
    for column in range(columns):
        members = np.arange(rows) * columns + column
        x[:, members] = block(config, w, f"{name}.column", x[:, members], factors)
    return x


def norm(x: Array, w: Weights, name: str, eps: float = 1e-6) -> Array:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + eps) * w[f"{name}.weight"] + w[f"{name}.bias"]


def dense(x: Array, w: Weights, name: str) -> Array:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def attention(config: ViTConfig, x: Array, w: Weights, name: str) -> Array:
    width, count, num_heads = x.shape[-1], x.shape[-2], config.num_heads
    size = width // num_heads
    parts = x @ w[f"{name}.qkv.weight"].T
    if config.qkv_bias == "qkv":
        parts = parts + w[f"{name}.qkv.bias"]
    if config.qkv_bias == "qv":
        parts[..., :width] += w[f"{name}.qkv.query_bias"]
        parts[..., 2 * width :] += w[f"{name}.qkv.value_bias"]
    query, key, value = (parts[..., i * width : (i + 1) * width] for i in range(3))
    if config.rotary != "none":
        query, key = (turned(config, part) for part in (query, key))
    offsets = w.get(f"{name}.relative_position", np.zeros((2 * count - 1, width)))
    heads = []
    for head in range(num_heads):
        of_head = slice(head * size, (head + 1) * size)
        scores = query[..., of_head] @ key[..., of_head].swapaxes(1, 2)
        for q, k in product(range(count), range(count)):
            scores[:, q, k] += query[:, q, of_head] @ offsets[q - k + count - 1, of_head]
        scores = scores / np.sqrt(size)
        if f"{name}.relative_bias" in w:
            for q, k in product(range(count), range(count)):
                scores[:, q, k] += w[f"{name}.relative_bias"][offset_row(config, q, k), head]
        heads.append(softmax(scores) @ value[..., of_head])
    return dense(np.concatenate(heads, -1), w, f"{name}.out")


def offset_row(config: ViTConfig, query: int, key: int) -> int:
    """The row of BEiT's table for a pair of tokens, of which token 0 is the class token."""
    rows, columns = config.grid
    num_rows = (2 * rows - 1) * (2 * columns - 1) + 3
    if query == 0 or key == 0:
        return num_rows - (1 if query == key else 3 if query == 0 else 2)
    (down, right), (key_down, key_right) = divmod(query - 1, columns), divmod(key - 1, columns)
    return (down - key_down + rows - 1) * (2 * columns - 1) + right - key_right + columns - 1


def turned(config: ViTConfig, x: Array) -> Array:
    """Queries or keys of all heads, those of each patch turned by its row and its column."""
    size, (rows, columns) = config.hidden_size // config.num_heads, config.grid
    x = x.copy()
    for token, head in product(range(config.prefix_tokens, config.num_tokens), range(config.num_heads)):
        row, column = divmod(token - config.prefix_tokens, columns)
        for i in range(size // 2):
            axis, step = divmod(i, size // 4)
            place, count = (row, rows) if axis == 0 else (column, columns)
            if config.rotary == "dinov3":
                angle = 2 * np.pi * (2 * (place + 0.5) / count - 1) / 100 ** (step / (size // 4))
                pair = [head * size + i, head * size + i + size // 2]
            else:
                angle = place / count * 16 / 10_000 ** (step / (size // 4))
                pair = [head * size + 2 * i, head * size + 2 * i + 1]
            one, two = x[..., token, pair].T
            x[..., token, pair[0]] = one * np.cos(angle) - two * np.sin(angle)
            x[..., token, pair[1]] = one * np.sin(angle) + two * np.cos(angle)
    return x


def normal_cdf(x: Array) -> Array:
    return (1 + np.vectorize(math.erf)(x / np.sqrt(2))) / 2


def softmax(scores: Array) -> Array:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


def same(x: Array, kernel: int, stride: int, value: float = 0.0) -> Array:
    """TensorFlow's SAME padding, by the rule of its documentation."""
    side = x.shape[-1]
    total = max(kernel - (side % stride or stride), 0)
    pads = (total // 2, total - total // 2)
    return np.pad(x, ((0, 0), (0, 0), pads, pads), constant_values=value)


def symmetric(x: Array, pad: int) -> Array:
    return np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))


def windows(x: Array, kernel: int, stride: int) -> Array:
    """`[B, C, H', W', kernel, kernel]`."""
    return sliding_window_view(x, (kernel, kernel), axis=(2, 3))[:, :, ::stride, ::stride]


def std_conv(x: Array, kernel: Array, stride: int, std_eps: float = 0.0, variance_eps: float = 0.0) -> Array:
    """A VALID convolution by a standardised kernel."""
    centred = kernel - kernel.mean((1, 2, 3), keepdims=True)
    std = np.sqrt((centred**2).mean((1, 2, 3), keepdims=True) + variance_eps)
    return np.einsum(
        "bchwij,ocij->bohw", windows(x, kernel.shape[-1], stride), centred / (std + std_eps), optimize=True
    )


def group_norm(x: Array, w: Weights, name: str, groups: int, eps: float) -> Array:
    grouped = x.reshape(len(x), groups, -1)
    mean, variance = grouped.mean(-1, keepdims=True), grouped.var(-1, keepdims=True)
    normal = ((grouped - mean) / np.sqrt(variance + eps)).reshape(x.shape)
    shape = (-1, *[1] * (x.ndim - 2))
    return normal * w[f"{name}.weight"].reshape(shape) + w[f"{name}.bias"].reshape(shape)


def resnet_v1(
    stage_depths: tuple[int, ...], groups: int, w: Weights, x: Array, axial: AxialResNetConfig | None = None
) -> Array:
    """The map after the last stage: post-activation, SAME padding, std + 1e-5, GroupNorm eps 1e-6.

    An axial one has attention for 3x3, sqrt(var + 1e-5) and GroupNorm eps 1e-4.
    """
    epsilons, eps = ({"variance_eps": 1e-5}, 1e-4) if axial else ({"std_eps": 1e-5}, 1e-6)

    def conv_norm(x: Array, conv: str, gn: str, stride: int) -> Array:
        kernel = w[f"{conv}.weight"]
        x = std_conv(same(x, kernel.shape[-1], stride), kernel, stride, **epsilons)
        return group_norm(x, w, gn, groups, eps)

    x = relu(conv_norm(x, "backbone.root.conv", "backbone.root.norm", 2))
    x = windows(same(x, 3, 2, -np.inf), 3, 2).max((-1, -2))
    for stage, depth in enumerate(stage_depths):
        for unit in range(depth):
            name, stride = f"backbone.stages.{stage}.{unit}", 2 if stage > 0 and unit == 0 else 1
            shortcut = x
            if f"{name}.projection.weight" in w:
                shortcut = conv_norm(x, f"{name}.projection", f"{name}.projection_norm", stride)
            y = relu(conv_norm(x, f"{name}.conv1", f"{name}.norm1", 1))
            if axial:
                rows = [axial_attention(y[:, :, i], w, f"{name}.row", axial) for i in range(y.shape[2])]
                y = np.stack(rows, 2)
                columns = [axial_attention(y[..., i], w, f"{name}.column", axial) for i in range(y.shape[3])]
                y = np.stack(columns, 3)
                y = windows(same(y, 2, 2), 2, 2).mean((-1, -2)) if stride == 2 else y
                y = relu(y)
            else:
                y = relu(conv_norm(y, f"{name}.conv2", f"{name}.norm2", stride))
            x = relu(shortcut + conv_norm(y, f"{name}.conv3", f"{name}.norm3", 1))
    return x


def resnet_v2(stage_depths: tuple[int, ...], groups: int, w: Weights, x: Array) -> Array:
    """The map after the last norm: pre-activation, symmetric pads, sqrt(var + 1e-10), GroupNorm eps 1e-5."""

    def conv(x: Array, name: str, stride: int) -> Array:
        kernel = w[f"{name}.weight"]
        return std_conv(symmetric(x, kernel.shape[-1] // 2), kernel, stride, variance_eps=1e-10)

    def active(x: Array, name: str) -> Array:
        return relu(group_norm(x, w, name, groups, 1e-5))

    x = windows(symmetric(conv(x, "backbone.root.conv", 2), 1), 3, 2).max((-1, -2))
    for stage, depth in enumerate(stage_depths):
        for unit in range(depth):
            name, stride = f"backbone.stages.{stage}.{unit}", 2 if stage > 0 and unit == 0 else 1
            y = active(x, f"{name}.norm1")
            shortcut = conv(y, f"{name}.projection", stride) if f"{name}.projection.weight" in w else x
            y = conv(y, f"{name}.conv1", 1)
            y = conv(active(y, f"{name}.norm2"), f"{name}.conv2", stride)
            x = shortcut + conv(active(y, f"{name}.norm3"), f"{name}.conv3", 1)
    return active(x, "norm")


def axial_attention(x: Array, w: Weights, name: str, config: AxialResNetConfig) -> Array:
    """One sequence `[B, C, L]`: query and key of half a head's size, an embedding of i - j beside each of the
    three.
    """
    width, length = x.shape[1:]
    size, half = width // config.num_heads, width // config.num_heads // 2
    qkv = group_norm(
        np.einsum("oc,bcl->bol", w[f"{name}.qkv.weight"], x), w, f"{name}.qkv_norm", config.num_groups, 1e-4
    )
    table = w[f"{name}.relative_position"]
    out = np.zeros_like(x)
    for head in range(config.num_heads):
        mine = qkv[:, head * 2 * size : (head + 1) * 2 * size]
        query, key, value = mine[:, :half], mine[:, half:size], mine[:, size:]
        scores = np.einsum("bdi,bdj->bij", query, key)
        for i, j in product(range(length), range(length)):
            embedding = table[i - j + length - 1]
            scores[:, i, j] += query[:, :, i] @ embedding[half:size] + key[:, :, j] @ embedding[:half]
        weights = softmax(scores)
        for i, j in product(range(length), range(length)):
            values = value[:, :, j] + table[i - j + length - 1][size:]
            out[:, head * size : (head + 1) * size, i] += weights[:, i, j, None] * values
    return group_norm(out, w, f"{name}.norm", config.num_groups, 1e-4)


def masked_patch(config: MaskedPatchConfig, w: Weights, images: Array, source: NDArray[np.int64]) -> Array:
    """The predictions of every patch when `source` says whose embedding stands at each place, -1 for the
    mask's.
    """
    patches = embed(config, w, images)
    moved = np.empty_like(patches)
    for image, place in product(*map(range, source.shape)):
        from_ = source[image, place]
        moved[image, place] = w["mask_embedding"][0, 0] if from_ < 0 else patches[image, from_]
    return dense(encode(config, w, moved)[-1][:, config.prefix_tokens :], w, "head")
