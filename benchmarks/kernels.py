"""Time the kernels that machine.attention and machine.linear choose from. The rule of "auto"
(vitctl/models/kernels/) follows this table.

    python benchmarks/kernels.py [--device cuda] [--rounds 5] [--scoring]

Prints milliseconds of a forward and backward pass, the least of all rounds; the kernels take turns. With
--scoring, attention is a forward pass without gradients, in which the rule's "mixed" is the fused kernel.
"""

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from vitctl.engine.computation import processor
from vitctl.models.kernels import Linear, attend, attention_rule, onednn_problem, set_attention, set_linear

TOKENS, HEADS, HEAD_SIZE = (17, 50, 101, 197, 257, 577, 785, 1025), (3, 12), 64
WIDTHS = (192, 384, 768)
DTYPES = (torch.float32, torch.bfloat16)
# Of all images and heads: enough work for a timer; on a GPU, for the kernels to take longer than their start.
LOGITS = {"cpu": 2**21, "cuda": 2**28}
NUMBERS = 2**27  # of a query at most, which many images of few tokens would exceed


def main() -> None:
    """Print a table for attention and one for linear layers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scoring", action="store_true")
    options = parser.parse_args()
    device = torch.device(options.device)
    print(f"{processor(device)}, {torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print(
        "| precision | heads | tokens | fused ms | math ms | fused / math | rule "
        "|\n|---|---|---|---|---|---|---|"
    )
    for dtype in DTYPES:
        for heads in HEADS:
            for tokens in TOKENS:
                images = LOGITS[device.type] // (heads * tokens * tokens)
                images = max(1, min(images, NUMBERS // (heads * tokens * HEAD_SIZE)))
                shape = (images, heads, tokens, HEAD_SIZE)
                fused, plain = in_turns(
                    attention(shape, dtype, device, options.scoring),
                    set_attention,
                    ("fused", "math"),
                    options.rounds,
                )
                rule = attention_rule(device.type, dtype, tokens)
                print(
                    f"| {name(dtype)} | {heads} | {tokens} | {fused:.1f} | {plain:.1f} | {fused / plain:.2f} "
                    f"| {rule} |",
                    flush=True,
                )
    print("\n| precision | width | torch ms | onednn ms | torch / onednn |\n|---|---|---|---|---|")
    for dtype in DTYPES:
        if onednn_problem(dtype, device):
            continue
        for width in WIDTHS:
            first, second = in_turns(linear(width, dtype), set_linear, ("torch", "onednn"), options.rounds)
            print(
                f"| {name(dtype)} | {width} | {first:.1f} | {second:.1f} | {first / second:.2f} |", flush=True
            )


def name(dtype: torch.dtype) -> str:
    """Return the dtype without its module."""
    return str(dtype).removeprefix("torch.")


def attention(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, scoring: bool = False
) -> Callable[[], object]:
    """Return a forward and backward pass of the attention product, of query, key and value of `shape`, which
    are parts of one product as in a network; if `scoring`, a forward pass.
    """
    batch, heads, tokens, size = shape
    joined = torch.randn(batch, tokens, 3, heads, size, device=device).to(dtype)
    query, key, value = (one.requires_grad_() for one in joined.permute(2, 0, 3, 1, 4).unbind())
    if scoring:
        return torch.no_grad()(lambda: attend(query, key, value))
    return lambda: torch.autograd.grad(attend(query, key, value).float().sum(), (query, key, value))


def linear(width: int, dtype: torch.dtype) -> Callable[[], object]:
    """Return a forward and backward pass of the MLP's first layer, of 2^30 multiplications."""
    layer = Linear(width, 4 * width).to(dtype)
    tokens: Tensor = torch.randn(2**30 // (4 * width * width), width).to(dtype).requires_grad_()
    return lambda: torch.autograd.grad(F.gelu(layer(tokens)).float().sum(), (tokens, *layer.parameters()))


def in_turns(
    work: Callable[[], object], choose: Callable[..., None], kernels: tuple[str, ...], rounds: int
) -> list[float]:
    """Return the least milliseconds of each kernel, after one round to warm up."""
    least = [float("inf")] * len(kernels)
    for turn in range(1 + rounds):
        for number, kernel in enumerate(kernels):
            choose(kernel)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            began = time.perf_counter()
            work()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            least[number] = min(least[number], 1e3 * (time.perf_counter() - began)) if turn else least[number]
    choose(kernels[0])
    return least


if __name__ == "__main__":
    main()
