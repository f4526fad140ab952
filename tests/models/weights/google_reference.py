"""Random weights in the layouts of the authors' `.npz` files, and where they stand in numpy_reference.py.

Written from the description of their code and files, not from vitctl's tables.
"""

import re
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


# Their names -> those of numpy_reference.py, in this order.
_NAMES = (
    (r"/(kernel|scale|gamma)$", ".weight"),
    (r"/(bias|beta)$", ".bias"),
    (r"^cls$", "class_token"),
    (r"^Transformer/posembed_input/pos_embedding$", "position_embedding"),
    (r"^embedding", "patch_embedding"),
    (r"^Transformer/encoderblock_(\d+)/", r"blocks.\1."),
    (r"^Transformer/encoder_norm", "norm"),
    (r"LayerNorm_0", "norm1"),
    (r"LayerNorm_2", "norm2"),
    (r"MultiHeadDotProductAttention_1/", "attention."),
    (r"MlpBlock_3/Dense_0", "mlp.fc1"),
    (r"MlpBlock_3/Dense_1", "mlp.fc2"),
    (r"^(resnet/head/conv2d)", "head"),
    (r"^resnet/group_norm", "norm"),
    (r"^resnet/root_block/standardized_conv2d|^conv_root", "backbone.root.conv"),
    (r"^gn_root", "backbone.root.norm"),
    (r"/a/proj/standardized_conv2d|/conv_proj", ".projection"),
    (r"/gn_proj", ".projection_norm"),
    (r"/conv(\d)", r".conv\1"),
    (r"/gn(\d)", r".norm\1"),
    (r"/([abc])/standardized_conv2d", lambda found: f".conv{'abc'.index(found[1]) + 1}"),
    (r"/([abc])/group_norm", lambda found: f".norm{'abc'.index(found[1]) + 1}"),
    (
        r"^(?:resnet/)?block(\d+)/unit(\d+)",
        lambda found: f"backbone.stages.{int(found[1]) - 1}.{int(found[2]) - 1}",
    ),
)


def renamed(w: Weights) -> Weights:
    """Their weights for numpy_reference.py: OIHW, `[out, in]`, and query, key and value in one."""
    found: Weights = {}
    for name, array in w.items():
        for pattern, other in _NAMES:
            name = re.sub(pattern, other, name)
        if array.ndim == 4:
            array = array.transpose(3, 2, 0, 1)
        elif name.endswith("attention.out.weight"):
            array = array.reshape(-1, array.shape[-1]).T
        elif ".attention." in name:  # a head and its channels are one axis of ours
            array = array.reshape(len(array), -1).T if name.endswith("weight") else array.ravel()
        elif array.ndim == 2:
            array = array.T
        found[name] = array[..., 0, 0] if name == "head.weight" and array.ndim == 4 else array
    for name in [name for name in found if ".attention.query." in name]:
        parts = [found.pop(name.replace("query", part)) for part in ("query", "key", "value")]
        found[name.replace("query", "qkv")] = np.concatenate(parts)
    return found
