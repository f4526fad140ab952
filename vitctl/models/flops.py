"""What a model costs, in closed form: parameters, multiply-accumulates, FLOPs and training memory. Imports no torch."""

from typing import Literal

from vitctl.models.variants import ViTConfig

_FLOPS_PER_MAC = 2
_FORWARD_AND_BACKWARD = 3  # the backward pass multiplies twice, for the inputs and for the weights

# Bytes of a stored number (weights, gradients, residual stream) and of one inside the matrix products.
_WIDTHS = {"float32": (4, 4), "bf16": (4, 2), "float64": (8, 8)}


def count_parameters(config: ViTConfig) -> int:
    """Return the number of trainable parameters, exactly. Paper: Table 1"""
    width, mlp = config.hidden_size, config.mlp_size
    learned_tokens = config.prefix_tokens + (config.num_tokens if config.position_embedding == "learned" else 0)
    embedding = _patch_weights(config) + width + learned_tokens * width
    biases_and_norms = (4 * width + mlp + width) + 4 * width
    blocks = config.depth * (_block_weights(config) + biases_and_norms)
    return embedding + blocks + 2 * width + _head_weights(config) + config.representation_size + config.num_classes


def count_macs(config: ViTConfig) -> int:
    """Return the multiply-accumulates of one image's forward pass: every matrix product, nothing element-wise.

    The paper's own cost figures (B/16 at 224: 17.563 G) are met without the head, that is with `num_classes` and
    `representation_size` 0.
    Paper: Table 6
    """
    tokens, patches = config.num_tokens, config.num_tokens - config.prefix_tokens
    attention = 2 * tokens * tokens * config.hidden_size
    blocks = config.depth * (tokens * _block_weights(config) + attention)
    return patches * _patch_weights(config) + blocks + _head_weights(config)


def training_flops(config: ViTConfig, num_images: int) -> int:
    """Return the FLOPs of training on `num_images` images, repeats counted: 2 per multiply-accumulate, times 3.

    Paper: Table 6
    """
    return _FLOPS_PER_MAC * _FORWARD_AND_BACKWARD * count_macs(config) * num_images


def training_memory_bytes(
    config: ViTConfig,
    micro_batch: int,
    precision: Literal["float32", "bf16", "float64"],
    optimizer_slots: int,
    averaging: bool,
) -> int:
    """Estimate the device memory of one training step with `micro_batch` images.

    Counted: weights, gradients, `optimizer_slots` numbers per weight (SGD with momentum 1, Adam 2), one averaged copy,
    and what the forward pass keeps for the backward one. `bf16` is autocast over float32 weights. Fused attention is
    assumed, which keeps no [N, N] matrix. Not counted: the framework's own context, workspaces and fragmentation.
    """
    wide, _ = _WIDTHS[precision]
    copies = 2 + optimizer_slots + averaging
    return copies * wide * count_parameters(config) + _saved_bytes(config, micro_batch, precision)


def _saved_bytes(config: ViTConfig, micro_batch: int, precision: Literal["float32", "bf16", "float64"]) -> int:
    """What autograd keeps between forward and backward, beside the weights."""
    wide, narrow = _WIDTHS[precision]
    width, mlp, dropped = config.hidden_size, config.mlp_size, config.dropout > 0
    # The inputs of two norms with their mean and deviation, and attention's log-sum per head.
    kept_wide = 2 * (width + 2) + config.num_heads
    # The inputs of qkv, out, fc1, fc2 and GELU, and the query, key and value.
    kept_narrow = 6 * width + 2 * mlp
    masks = (2 * width + mlp) * dropped
    block = wide * kept_wide + narrow * kept_narrow + masks
    ends = wide * (2 * width + 2) + width * dropped  # the last norm's input and output, the first dropout
    pixels = 3 * config.image_size**2
    per_image = config.num_tokens * (config.depth * block + ends) + narrow * pixels + wide * config.num_classes
    weight_copies = _patch_weights(config) + config.depth * _block_weights(config) + _head_weights(config)
    return micro_batch * per_image + (narrow * weight_copies if narrow != wide else 0)


def _patch_weights(config: ViTConfig) -> int:
    return 3 * config.patch_size**2 * config.hidden_size


def _block_weights(config: ViTConfig) -> int:
    """Query, key, value and output, then the two layers of the MLP."""
    return 4 * config.hidden_size**2 + 2 * config.hidden_size * config.mlp_size


def _head_weights(config: ViTConfig) -> int:
    return config.hidden_size * config.representation_size + config.feature_size * config.num_classes
