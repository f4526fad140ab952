"""The largest micro-batch that fits into device memory, found by trying.

Global batch and learning rate do not change.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vitctl.data.loader.batches import Batch
from vitctl.engine.distributed.runtime import Runtime
from vitctl.errors import LaunchError


def largest_micro_batch(fits: Callable[[int], bool], share: int) -> int:
    """Cut a share into as few equal parts as possible: double their number until one fits, then bisect.

    Args:
        fits: whether a forward and backward pass over so many images succeeds.
        share: images of a process in a global batch, at least 1.

    Returns:
        images of a part, 1 to share; the last part may be smaller.

    Raises:
        LaunchError: a single image does not fit.
    """
    too_few, enough = 0, 1
    while not fits(-(-share // enough)):
        if enough == share:
            raise LaunchError(
                "machine.micro_batch = -1: not even one image at a time fits on this device; set "
                "machine.checkpoint_blocks = true, "
                "machine.sharding = 'fsdp', or take a smaller model"
            )
        too_few, enough = enough, min(2 * enough, share)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if fits(-(-share // middle)):
            enough = middle
        else:
            too_few = middle
    return -(-share // enough)


def fits_everywhere(
    runtime: Runtime,
    model: nn.Module,
    objective: Callable[[nn.Module, Batch, int], Tensor],
    batch: Batch,
    reserve: int,
    *,
    adds_up: bool,
) -> bool:
    """Whether a forward and backward pass fits on all processes. Model and gradients are left unchanged.

    Args:
        runtime: of this process.
        model: not wrapped yet, so that a process that fails does not block the others.
        objective: the loss of a batch.
        batch: of this process.
        reserve: bytes that training needs in addition: optimizer state, averages.
        adds_up: the pass adds to gradients that are there before it: sums of earlier micro-batches, or DDP's
            buckets.
    """
    model.train()
    fitted = True
    try:
        kept = torch.empty(reserve, dtype=torch.uint8, device=runtime.device)
        if adds_up:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        with runtime.autocast():
            loss = objective(model, batch, 0)
        torch.autograd.backward(loss)
        del kept, loss
    except torch.OutOfMemoryError:
        fitted = False
    model.zero_grad(set_to_none=True)
    if runtime.device.type == "cuda":
        torch.cuda.empty_cache()
    return runtime.sum([float(not fitted)])[0] == 0
