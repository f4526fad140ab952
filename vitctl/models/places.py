"""Places of parameters in a network, by name: for freezing, and for learning rates by layer.

Imports no torch.
"""

# All other names belong to the embedding: patches, class token, registers, positions, the norm before the
# blocks, a hybrid's backbone; in a ResNet everything but the head.
_BLOCKS, _LAST_NORM, _HEAD = "blocks.", "norm.", "head."
_POOLING = ("pool.", "pre_logits.")  # between the last norm and the head
EMBEDDING = 0
# Two dimensions or more, but not multiplied as a matrix: timm's `no_weight_decay`.
_TABLES = ("class_token", "registers", "position_", "mask_embedding")


def num_blocks(names: list[str]) -> int:
    """Return the number of blocks of a network from its parameter names."""
    return 1 + max((int(name.split(".")[1]) for name in names if name.startswith(_BLOCKS)), default=-1)


def place(name: str, depth: int) -> int:
    """Return 0 for the embedding, 1 to `depth` for a block, then last norm, pooling and head."""
    if name.startswith(_BLOCKS):
        return 1 + int(name.split(".")[1])
    if name.startswith(_HEAD):
        return depth + 3
    if name.startswith(_POOLING):
        return depth + 2
    return depth + 1 if name.startswith(_LAST_NORM) else EMBEDDING


def decay_exponent(name: str, depth: int, numbering: str) -> int:
    """Return how often a parameter's rate is multiplied by the layer decay.

    The embedding has depth + 1, block i of 0 to depth - 1 has depth - i, the head 0. Numberings differ in the
    last norm: timm assigns it to the last block, MAE to the head.
    """
    at = place(name, depth)
    return 1 if at == depth + 1 and numbering == "timm" else max(0, depth + 1 - at)


def is_head(name: str) -> bool:
    return name.startswith(_HEAD)


def is_matrix(name: str, dimensions: int) -> bool:
    """Return whether weight decay on matrices applies to this parameter."""
    return dimensions > 1 and not name.startswith(_TABLES) and not is_relative(name)


def is_relative(name: str) -> bool:
    return ".relative_" in name
