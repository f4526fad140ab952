"""Learning rate as a pure function of the step. There is no scheduler object to be stepped once too often."""

import math


def total_steps(num_images: int, batch_size: int, *, steps: int, epochs: float) -> int:
    """Length of a run in updates: `steps` when given, else whole batches in `epochs` passes, rounded down.

    Paper: Table 3 gives epochs; 7 epochs of 303 million images in batches of 4,096 are 517,822 steps.
    """
    return steps or int(num_images * epochs // batch_size)


def lr_at(
    step: int,
    *,
    base_lr: float,
    total: int,
    warmup: int,
    decay: str,
    end_lr: float = 0.0,
    drops: tuple[float, ...] = (),
) -> float:
    """Learning rate of the update that follows `step` finished updates.

    Args:
        step: finished updates, 0 .. total - 1; with a warm-up the first update has rate 0.
        base_lr: rate at the end of the warm-up.
        total, warmup: in steps; the decay starts after the warm-up.
        decay: "linear" from base_lr to end_lr, "cosine" from base_lr to 0, "steps" to a tenth at each of
            drops, or "constant".
        end_lr: last rate of the linear decay.
        drops: shares of the whole run, 0..1.

    Paper: Tables 3 and 4; the authors' utils.py; "steps" is BiT's (Appendix D.1).
    """
    progress = min(1.0, max(0.0, (step - warmup) / max(1, total - warmup)))
    if decay == "linear":
        lr = end_lr + (base_lr - end_lr) * (1.0 - progress)
    elif decay == "cosine":
        lr = base_lr * 0.5 * (1.0 + math.cos(math.pi * progress))
    elif decay == "steps":
        lr = base_lr * 0.1 ** sum(step >= drop * total for drop in drops)
    else:
        lr = base_lr
    return lr * min(1.0, step / warmup) if warmup else lr
