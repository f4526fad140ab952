"""Classifiers on frozen representations: nearest neighbours, logistic regression, and linear layers by SGD.

N training images, M test images, R features, K classes. Chunks have fixed sizes, so that no setting changes
the order of a sum.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitctl.engine.evaluation import most_likely
from vitctl.engine.runtime import Runtime
from vitctl.engine.schedule import lr_at

C_GRID = tuple(torch.logspace(-6, 5, 45, dtype=torch.float64).tolist())
_QUERIES, _STORED = 2**10, 2**15  # test and training images at a time
_STEPS, _HISTORY = 1000, 20
# L-BFGS's tolerances of gradient and loss. Rough is enough to choose C: on the data sets of
# benchmarks/results/probe.md the numbers of correct answers are equal, in 0.11 to 0.6 of the time.
_EXACT, _ROUGH = (1e-12, 0.0), (1e-7, 1e-15)


def chunk_bytes(width: int, dtype: torch.dtype) -> int:
    """Return the memory of the largest chunk of `nearest`: similarities with their order, and images."""
    return _QUERIES * _STORED * (dtype.itemsize + 8) + (_QUERIES + _STORED) * width * dtype.itemsize


def logistic_bytes(num_images: int, width: int, num_classes: int) -> int:
    """Return the memory of `logistic`: features, a copy of them or scores and gradients, and L-BFGS."""
    features, scores = (8 * num_images * each for each in (width, num_classes))
    return features + max(features, 3 * scores) + (2 * _HISTORY + 10) * 8 * (width + 1) * num_classes


def answer_bytes(num_images: int, width: int, num_classes: int) -> int:
    """Return the memory of the largest chunk of `predicted`: images, scores, and sorted scores."""
    return 8 * min(num_images, _STORED) * (width + 3 * num_classes)


def share_of(num_images: int, num_processes: int) -> int:
    """Return how many training images a process other than the main one holds at most in `nearest`."""
    chunks = -(-num_images // _STORED)
    return min(-(-(chunks - 1) // num_processes) * _STORED, max(0, num_images - _STORED))


def nearest(
    train: Tensor, test: Tensor, k: int, *, dtype: torch.dtype, runtime: Runtime
) -> tuple[Tensor, Tensor]:
    """Return similarity and position of the k nearest training images, [M, k] each, on the main process.

    Similarity is the cosine, computed in `dtype`. The nearest come first; ties go to the lower position. Each
    process holds its share of the chunks of training images, and gets the test images chunk by chunk. `train`
    [N, R], N >= k, and `test` [M, R] are meta tensors on processes other than the main one.
    """
    device = runtime.device
    values, places = (torch.empty(len(test), k, dtype=kind) for kind in (dtype, torch.int64))
    shared = enumerate(map(runtime.share, torch.split(train, _STORED)))
    own = {number: part for number, part in shared if number % runtime.num_processes == runtime.rank}
    for first, queries in enumerate(torch.split(test, _QUERIES)):
        unit = F.normalize(runtime.share(queries).to(device, dtype), dim=1)
        # A process with fewer than k images pads with neighbours farther than any image.
        best = torch.full((len(unit), k), -torch.inf, dtype=dtype, device=device)
        at = torch.full((len(unit), k), len(train), device=device)
        for number, stored in own.items():
            near, column = _highest(unit @ F.normalize(stored.to(device, dtype), dim=1).T, k)
            best, at = _merged([best, near], [at, column + number * _STORED], k)
        every = [runtime.gather(part.cpu(), everywhere=False) for part in (best, at)]
        if runtime.is_main:
            rows = slice(first * _QUERIES, first * _QUERIES + len(unit))
            values[rows], places[rows] = _merged(every[0], every[1], k)
    return values, places


def _merged(values: Sequence[Tensor], places: Sequence[Tensor], k: int) -> tuple[Tensor, Tensor]:
    """Return the k highest values of each row and their places; ties: the lower place first."""
    at, order = torch.cat([*places], 1).sort(dim=1)
    near, by_value = torch.cat([*values], 1).gather(1, order).sort(dim=1, descending=True, stable=True)
    return near[:, :k], at.gather(1, by_value)[:, :k]


def _highest(rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k highest values of each row and their columns; ties: the lower column first."""
    k = min(k, rows.shape[1])
    values, columns = rows.topk(k, dim=1)
    columns, order = columns.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    columns = columns.gather(1, order)
    tied = (rows >= values[:, -1:]).sum(dim=1) > k  # topk picks any of equal values
    if tied.any():
        every, of_row = rows[tied].sort(dim=1, descending=True, stable=True)
        values[tied], columns[tied] = every[:, :k], of_row[:, :k]
    return values, columns


def vote(
    similarities: Tensor, labels: Tensor, ks: Sequence[int], *, num_classes: int, temperature: float
) -> dict[int, Tensor]:
    """Return the class [M] of each test image for each number of neighbours in `ks`, at most k.

    Each neighbour votes for its class with softmax(similarity / temperature); ties go to the lower class.
    `similarities` and `labels` are [M, k], the nearest first. Temperature is 0.07 in DINO.
    """
    weights = (similarities.double() / temperature).softmax(dim=1)
    chosen: dict[int, list[Tensor]] = {k: [] for k in ks}
    for some, of_some in zip(torch.split(weights, _QUERIES), torch.split(labels, _QUERIES), strict=True):
        for k in ks:
            votes = torch.zeros(len(some), num_classes, dtype=some.dtype)
            votes.scatter_add_(1, of_some[:, :k], some[:, :k])
            chosen[k].append(most_likely(votes, 1)[:, 0])
    return {k: torch.cat(parts) for k, parts in chosen.items()}


def logistic(
    train: Tensor,
    labels: Tensor,
    c: float,
    *,
    num_classes: int,
    start: Tensor | None = None,
    rough: bool = False,
) -> Tensor:
    """Return weights and bias [R + 1, K], float64, of multinomial logistic regression by L-BFGS on [N, R].

    They minimise C times the sum of cross-entropies plus half the squared weights; the bias is free. C is not
    divided by N. `start` is [R + 1, K], by default zeros. `rough` stops earlier, to compare values of C.
    """
    x, width = train.double(), train.shape[1]
    # Solved for centred features of unit scale, since others may need very many steps. The minimum is the
    # same: the free bias absorbs the centre, and the regulariser divides the weights by the scale.
    centre = x.mean(dim=0)
    x = x - centre  # not in place: `train` may be float64 already
    scale = x.square().mean().sqrt().clamp(min=1e-300).item()
    x /= scale
    made = torch.zeros(width + 1, num_classes, dtype=x.dtype) if start is None else start.clone()
    made[-1] += centre @ made[:-1]
    made[:-1] *= scale
    made.requires_grad_()
    gradient, change = _ROUGH if rough else _EXACT
    solver = torch.optim.LBFGS(
        [made],
        max_iter=_STEPS,
        max_eval=2 * _STEPS,
        tolerance_grad=gradient,
        tolerance_change=change,
        history_size=_HISTORY,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        solver.zero_grad()
        value = F.cross_entropy(x @ made[:-1] + made[-1], labels)
        value = value + (made[:-1] / scale).square().sum() / (2 * c * len(x))
        value.backward()  # type: ignore[no-untyped-call]
        return value

    with torch.enable_grad():
        solver.step(loss)  # type: ignore[no-untyped-call]
    made = made.detach()
    made[:-1] /= scale
    made[-1] -= centre @ made[:-1]
    return made


def drawn(seed: int, num_images: int, batch_size: int, step: int) -> Tensor:
    """Return the image positions of a step, [B], from successive permutations seeded by `seed`."""
    places = range(step * batch_size, (step + 1) * batch_size)
    epochs = range(places[0] // num_images, places[-1] // num_images + 1)
    order = np.concatenate([_order(seed, num_images, epoch) for epoch in epochs])
    start = places[0] - epochs[0] * num_images
    return torch.from_numpy(order[start : start + batch_size])


@lru_cache(maxsize=2)
def _order(seed: int, num_images: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(num_images)


def linear(
    train: Tensor,
    labels: Tensor,
    lrs: Sequence[float],
    *,
    num_classes: int,
    batches: Iterable[Tensor],
    steps: int,
    seed: int,
    momentum: float,
    dtype: torch.dtype,
    device: torch.device,
    inputs: Sequence[slice] = (slice(None),),
) -> list[Tensor]:
    """Train one linear layer per input and learning rate by SGD; return [L, R_i + 1, K] for each input, on
    the CPU.

    All layers are trained together, with a cosine schedule to 0, without weight decay. Weights start from a
    normal distribution of deviation 0.01, the same for each rate; biases from 0.

    Args:
        lrs: L initial learning rates.
        batches: image positions, [B], of at most `steps` steps.
        momentum: 0.9 in DINOv2.
        inputs: features of `train` [N, R] that the layers of each group read; R_i of them.

    Source: DINOv2 (code)
    """
    made = []
    for part in inputs:
        layer = torch.zeros(train[:0, part].shape[1] + 1, num_classes, dtype=torch.float64)
        layer[:-1].normal_(0, 0.01, generator=torch.Generator().manual_seed(seed))
        made.append(layer.to(device, dtype).repeat(len(lrs), 1, 1))
    moved = [torch.zeros_like(layers) for layers in made]
    rates = torch.tensor(lrs, dtype=dtype, device=device).view(-1, 1, 1)
    for step, at in enumerate(batches):
        seen, wanted = train[at].to(device, dtype), F.one_hot(labels[at].to(device), num_classes)
        rate = lr_at(step, base_lr=1.0, total=steps, warmup=0, decay="cosine") * rates
        for part, layers, velocity in zip(inputs, made, moved, strict=True):
            x = seen[:, part]
            excess = ((x @ layers[:, :-1] + layers[:, -1:]).softmax(dim=2) - wanted) / len(at)
            gradient = torch.cat([x.T @ excess, excess.sum(dim=1, keepdim=True)], dim=1)
            layers -= rate * velocity.mul_(momentum).add_(gradient)
    return [layers.cpu() for layers in made]


def predicted(images: Tensor, made: Tensor) -> Tensor:
    """Return the class [M] of representations [M, R] by a layer [R + 1, K]; ties go to the lower class."""
    weights, biases = made[:-1].double(), made[-1].double()
    return torch.cat(
        [most_likely(some.double() @ weights + biases, 1)[:, 0] for some in torch.split(images, _STORED)]
    )
