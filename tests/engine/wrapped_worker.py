"""One of two processes that train a small ViT twice: in a plain DDP, and as `Runtime.wrap` wraps it; prints
digests of the weights.
"""

import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.models.tiny_models import TINY
from vitctl.engine.agreement import checksum
from vitctl.engine.optimizer import build_optimizer, clip_gradients
from vitctl.engine.runtime import Runtime, join, start
from vitctl.models.blocks import compile_blocks
from vitctl.models.build import Model, build
from vitctl.recipe.sections import Optimizer

STEPS, SKIPPED = 5, 2


def trained(runtime: Runtime, model: Model, wrapped: Any, micro_batches: int) -> str:
    """A digest of the weights after a few steps, with dropout, clipping, an evaluation, and one step that is
    skipped.
    """
    optimizer = build_optimizer(model, Optimizer(name="adam", lr=1.0, weight_decay=0.1))
    optimizer.param_groups[0]["lr"] = 1e-2
    for step in range(STEPS):
        torch.manual_seed(2 * step + runtime.rank)
        wrapped.train()
        for number in range(micro_batches):
            images, labels = torch.randn(3 - number % 2, 3, 32, 32), torch.randint(0, 5, (3 - number % 2,))
            with wrapped.no_sync() if number < micro_batches - 1 else nullcontext():
                nn.functional.cross_entropy(wrapped(images), labels).backward()
        clip_gradients(model.parameters(), 0.1)
        if step != SKIPPED:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        model.eval()
        with torch.no_grad():
            model(images)
    return checksum(model.named_parameters())


def main() -> None:
    """`wrapped_worker MICRO_BATCHES HOW...`, with what is done to the model."""
    torch.set_num_threads(1)
    join(cpu=True)
    runtime = start(precision="float32", device="cpu", processes=2)
    micro_batches, how = int(sys.argv[1]), sys.argv[2:]
    for ours in (False, True):
        depth = 1 if "compiled" in how else 2  # each block has two graphs, for training and evaluation
        model = build(replace(TINY["vit"], depth=depth, dropout=0.1, drop_path=0.1))
        model.checkpoint_blocks = "checkpointed" in how
        if "frozen" in how:
            model.patch_embedding.requires_grad_(False)
        if "compiled" in how:
            compile_blocks(model, backend="aot_eager")
        if ours:
            wrapped: Any = runtime.wrap(model, always_synced=micro_batches == 1)
            assert wrapped.gradient_as_bucket_view
            assert wrapped.static_graph == (micro_batches == 1)
        else:
            wrapped = DistributedDataParallel(model)
        print("weights", trained(runtime, model, wrapped, micro_batches), flush=True)


if __name__ == "__main__":
    main()
