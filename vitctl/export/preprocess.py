"""The evaluation pre-processing as a graph: photographs of any size to the square that a network takes.

Most rules are two matrix products, with weights that the graph computes from the size of the image. An ONNX
`Resize` would not do: it rounds differently, has no rule for `area`, and runtimes interpret its options
differently.
"""

import torch
from torch import Tensor, nn

from vitctl.data.images.transforms import EvalResample, EvalTransform

IN_GRAPHS: tuple[EvalResample, ...] = ("bilinear", "bilinear_antialias", "bicubic_antialias", "area")
_CUBIC = -0.5  # Pillow's and torch's coefficient with antialias
_LARGEST_WEIGHT, _MOST_BITS = 2**15, 22  # torch resizes bytes with 16-bit weights


class Preprocess(nn.Module):
    """`EvalTransform` as a graph: uint8 `[B, H, W, 3]`, one size per batch, to `[B, 3, S, S]`.

    The results are integers in float64. Photographs must be upright: pixels do not show their orientation.
    """

    def __init__(self, transform: EvalTransform) -> None:
        super().__init__()
        self.transform = transform

    def forward(self, images: Tensor) -> Tensor:
        t = self.transform
        old = [torch.scalar_tensor(images.shape[side], dtype=torch.float64) for side in (1, 2)]
        whole = t.method == "letterbox"
        resize = torch.scalar_tensor((not whole and t.resize) or t.image_size, dtype=torch.float64)
        new = [resize, resize]
        if t.method == "shorter_side":
            ratio = resize / torch.minimum(*old)
            new = [torch.round(side * ratio) for side in old]
        elif t.method in ("torchvision", "transformers"):
            new = [torch.floor(resize * side / torch.minimum(*old)) for side in old]
        elif whole:
            ratio = torch.maximum(*old) / resize
            new = [torch.round(side / ratio).clamp(min=1) for side in old]
        rounded = torch.round if t.method == "torchvision" else torch.floor
        first = [rounded((side - t.image_size) / 2) for side in new]
        if whole:
            first = [-torch.floor((t.image_size - side) / 2) for side in new]
        pixels = images.permute(0, 3, 1, 2).to(torch.float64)
        if t.resample == "area":
            for axis in (0, 1):
                edges = self._numbers(first[axis], t.image_size + 1, new[axis])
                pixels = _area_means(pixels, 2 + axis, old[axis], new[axis], edges)
            pixels = torch.floor(pixels + 0.5)
        else:
            rows, columns = (
                _weights(
                    t.resample,
                    images.shape[1 + axis],
                    old[axis],
                    new[axis],
                    self._numbers(first[axis], t.image_size, new[axis] - 1),
                    axis,
                )
                for axis in (0, 1)
            )
            pixels = _rounded(pixels @ columns[0], columns[1])  # as torch: rows first, rounded
            pixels = _rounded(rows[0] @ pixels, rows[1])
        return self._filled(pixels, first, new) if whole else pixels

    def _numbers(self, first: Tensor, count: int, last: Tensor) -> Tensor:
        """Return `count` numbers of new pixels or edges, clamped to the image if it is letterboxed."""
        numbers = first + torch.arange(count, dtype=torch.float64)
        letterbox = self.transform.method == "letterbox"
        return torch.minimum(numbers.clamp(min=0), last) if letterbox else numbers

    def _filled(self, pixels: Tensor, first: list[Tensor], new: list[Tensor]) -> Tensor:
        numbers = [start + torch.arange(self.transform.image_size, dtype=torch.float64) for start in first]
        rows, columns = ((at >= 0) & (at < side) for at, side in zip(numbers, new, strict=True))
        colour = torch.tensor(self.transform.fill, dtype=torch.float64).view(3, 1, 1)
        return torch.where(rows[:, None] & columns[None], pixels, colour)


def _rounded(sums: Tensor, one: Tensor) -> Tensor:
    return torch.floor(sums / one + 0.5).clamp(0, 255)


def _weights(
    resample: EvalResample, num_old: int, old: Tensor, new: Tensor, wanted: Tensor, axis: int
) -> tuple[Tensor, Tensor]:
    """Return the weights of old pixels for the `wanted` new ones, along `axis`, and the weight of 1.

    `num_old` and `old` are the old side, as a number and as a tensor of the graph. Weights of columns are
    made along axis 1, not transposed: onnxruntime to 1.24 fuses that with the product, and has no kernel
    for it in float64.
    """
    # Row 0 is included: it often has the largest weight, which determines the rounding of all.
    numbers = torch.cat([torch.zeros(1, dtype=torch.float64), wanted]).unsqueeze(1 - axis)
    pixels = torch.arange(num_old, dtype=torch.float64).unsqueeze(axis)
    scale = old / new
    if resample == "bilinear":
        centres = torch.minimum((scale * (numbers + 0.5) - 0.5).clamp(min=0), old - 1)
        return _as_integers(_triangle(pixels - centres), axis)
    is_cubic = resample == "bicubic_antialias"
    width = scale.clamp(min=1)
    centres, reach = scale * (numbers + 0.5), width * (2 if is_cubic else 1)
    begin, end = torch.floor((centres - reach + 0.5).clamp(min=0)), torch.floor(centres + reach + 0.5)
    weights = (_cubic if is_cubic else _triangle)((pixels - centres + 0.5) * (1 / width))
    weights = torch.where((pixels >= begin) & (pixels < end), weights, torch.zeros_like(weights))
    return _as_integers(weights / weights.sum(dim=1 - axis, keepdim=True), axis)


def _area_means(values: Tensor, axis: int, old: Tensor, new: Tensor, wanted: Tensor) -> Tensor:
    """Resize as `area_resized` along one axis, in the same order of operations, by a running sum."""
    sums = values.cumsum(dim=axis)
    edges = wanted * (old / new)
    count = len(wanted) - 1
    whole = torch.minimum(torch.floor(edges), old - 1)
    part = (edges - whole).view([-1 if axis == dim else 1 for dim in range(4)])
    own = values.index_select(axis, whole.to(torch.int64))
    at = sums.index_select(axis, whole.to(torch.int64)) - own + part * own
    return (at.narrow(axis, 1, count) - at.narrow(axis, 0, count)) * (new / old)


def _triangle(distance: Tensor) -> Tensor:
    return (1 - distance.abs()).clamp(min=0)


def _cubic(distance: Tensor) -> Tensor:
    x = distance.abs()
    near = ((_CUBIC + 2) * x - (_CUBIC + 3)) * x * x + 1
    far = ((x - 5) * x + 8) * x * _CUBIC - 4 * _CUBIC
    return torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


def _as_integers(weights: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Return the weights as torch rounds them, with as many bits as fit into 16, without the first."""
    bits = torch.arange(1, _MOST_BITS + 1, dtype=torch.float64)
    fits = torch.floor(weights.max() * torch.exp2(bits) + 0.5) < _LARGEST_WEIGHT
    one = torch.exp2(fits.to(torch.float64).sum())
    half = torch.where(weights < 0, -0.5, 0.5)
    return torch.trunc(weights * one + half).narrow(axis, 1, weights.shape[axis] - 1), one
