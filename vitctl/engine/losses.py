"""The two losses of the paper, summed over a batch; the loop divides by the global batch."""

import torch
import torch.nn.functional as F
from torch import Tensor


def classification_loss(
    logits: Tensor, labels: Tensor, weights: Tensor, *, name: str, label_smoothing: float
) -> Tensor:
    """Sum over the batch of the weighted loss of each image, in float32 or wider.

    Args:
        logits: [B, K].
        labels: [B] integers.
        weights: [B], 0 for images that do not count.
        name: "sigmoid": sum over the classes of binary cross-entropies; "softmax": cross-entropy.
        label_smoothing: share of the target that is spread evenly over the K classes.

    Returns:
        a scalar.

    Paper: Section 3.1, Table 3; sigmoid in pre-training as in the authors' code.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    num_classes = logits.shape[-1]
    targets = F.one_hot(labels, num_classes).to(logits.dtype)
    if label_smoothing:
        targets = targets * (1 - label_smoothing) + label_smoothing / num_classes
    if name == "sigmoid":
        each = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(dim=-1)
    else:
        each = -(targets * F.log_softmax(logits, dim=-1)).sum(dim=-1)
    return (each * weights.to(each.dtype)).sum()
