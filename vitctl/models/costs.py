"""Parameters, FLOPs and memory of one layer for one image, in closed form. Imports no torch."""

from dataclasses import dataclass, fields

OPTIMIZER_SLOTS = {"adam": 2, "sgd": 1}  # numbers that an optimizer keeps for each weight


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of some layers. What they keep for the backward pass counts numbers, unless it says bytes.

    parameters: weights and biases. macs: multiply-accumulates of the forward pass; `padded_macs` adds those
    with a convolution's zero padding. wide: numbers kept in the precision of the weights; `narrow`: in that
    of the matrix products. casts: numbers that are kept once more, narrow, only where the two precisions
    differ. weight_casts: the like for weights, once for all images. standardised: weights that are kept
    centred, wide, and finished, narrow, once for all images. masks: bytes kept by dropout and max-pooling.
    boundary: wide numbers that enter the layers, all that is kept of them when they are recomputed.
    """

    parameters: int = 0
    macs: int = 0
    padded_macs: int = 0
    wide: int = 0
    narrow: int = 0
    casts: int = 0
    weight_casts: int = 0
    standardised: int = 0
    masks: int = 0
    boundary: int = 0


def add(*costs: Cost) -> Cost:
    """Return the sum, field by field."""
    return Cost(**{field.name: sum(getattr(cost, field.name) for cost in costs) for field in fields(Cost)})


def product(macs: int) -> Cost:
    """A matrix product, of whatever sizes, that keeps nothing."""
    return Cost(macs=macs, padded_macs=macs)


def linear(count: int, inputs: int, outputs: int, *, bias: bool = True, is_head: bool = False) -> Cost:
    """A matrix over `count` tokens.

    Its input is kept; that of a head, which stays in the precision of its weights, wide.
    """
    weights, seen = inputs * outputs, count * inputs if outputs else 0
    kept = Cost(wide=seen) if is_head else Cost(narrow=seen, weight_casts=weights)
    return add(product(count * weights), kept, Cost(parameters=weights + bias * outputs))


def norm(count: int, width: int, groups: int) -> Cost:
    """LayerNorm or GroupNorm of `count` positions.

    The input is kept, and the mean and deviation of `groups`.
    """
    return Cost(parameters=2 * width, wide=count * width + 2 * groups)


def relu(count: int, width: int) -> Cost:
    """A ReLU of `count` positions. The output is kept."""
    return Cost(wide=count * width)


def convolution(
    inputs: int, outputs: int, kernel: int, stride: int, side: int, *, same: bool, first: bool
) -> Cost:
    """A standardised convolution of a map of `side`.

    Its input is kept: by the layer before unless this is the `first` one, or unless an uneven SAME padding
    copies it.
    """
    after = -(-side // stride)
    padding = max(0, (after - 1) * stride + kernel - side)
    begin = padding // 2 if same else kernel // 2
    valid = sum(0 <= place * stride + tap - begin < side for place in range(after) for tap in range(kernel))
    weights = inputs * outputs * kernel**2
    copied = same and padding % 2 == 1
    kept = inputs * (side + padding if copied else side) ** 2
    return Cost(
        parameters=weights,
        macs=inputs * outputs * valid**2,
        padded_macs=weights * after**2,
        narrow=kept if copied or first else 0,
        casts=0 if copied or first else kept,
        standardised=weights,
    )
