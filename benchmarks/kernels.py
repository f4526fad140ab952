"""Time the kernels that machine.attention chooses from. The rule of "auto" (vitctl/models/kernels.py) follows
this table.

    python benchmarks/kernels.py [--device cuda] [--rounds 5] [--scoring]

Prints milliseconds of a forward and backward pass, the least of all rounds; the kernels take turns. With
--scoring, it is a forward pass without gradients.
"""

import argparse
import time
from collections.abc import Callable

import torch

from vitctl.engine.computation import processor
from vitctl.models.kernels import AttentionKernel, attend, attention_rule

TOKENS, HEADS, HEAD_SIZE = (17, 50, 101, 197, 257, 577, 785, 1025), (3, 12), 64
DTYPES = (torch.float32, torch.bfloat16)
# Of all images and heads: enough work for a timer; on a GPU, for the kernels to take longer than their start.
LOGITS = {"cpu": 2**21, "cuda": 2**28}
NUMBERS = 2**27  # of a query at most, which many images of few tokens would exceed


def main() -> None:
    """Print the table."""
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
                fused, plain = in_turns(attention(shape, dtype, device, options.scoring), options.rounds)
                rule = attention_rule(device.type, dtype, tokens)
                print(
                    f"| {name(dtype)} | {heads} | {tokens} | {fused:.1f} | {plain:.1f} | {fused / plain:.2f} "
                    f"| {rule} |",
                    flush=True,
                )


def name(dtype: torch.dtype) -> str:
    """Return the dtype without its module."""
    return str(dtype).removeprefix("torch.")


def attention(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, scoring: bool = False
) -> Callable[[AttentionKernel], object]:
    """Return a forward and backward pass of the attention product, of query, key and value of `shape`, which
    are parts of one product as in a network; if `scoring`, a forward pass.
    """
    batch, heads, tokens, size = shape
    joined = torch.randn(batch, tokens, 3, heads, size, device=device).to(dtype)
    query, key, value = (one.requires_grad_() for one in joined.permute(2, 0, 3, 1, 4).unbind())
    if scoring:
        return torch.no_grad()(lambda kernel: attend(query, key, value, kernel=kernel))

    def both(kernel: AttentionKernel) -> object:
        mixed = attend(query, key, value, kernel=kernel)
        return torch.autograd.grad(mixed.float().sum(), (query, key, value))

    return both


def in_turns(work: Callable[[AttentionKernel], object], rounds: int) -> list[float]:
    """Return the least milliseconds of the fused and the plain kernel, after one round to warm up."""
    least = {"fused": float("inf"), "math": float("inf")}
    for turn in range(1 + rounds):
        for kernel in least:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            began = time.perf_counter()
            work(kernel)  # type: ignore[arg-type]
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            took = 1e3 * (time.perf_counter() - began)
            least[kernel] = min(least[kernel], took) if turn else least[kernel]
    return list(least.values())


if __name__ == "__main__":
    main()
