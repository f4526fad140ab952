"""Digests of a step's global batch that do not depend on how it is split over processes, micro-batches and
workers.

Each sample gives a word of 64 bits from its position in the global batch and its value; the digest is their
sum modulo 2^64. They find what differs by accident or in a replay; they are not cryptographic.
"""

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from vitctl.data.loader.batches import Batch
from vitctl.data.source.order import mix_words
from vitctl.engine.distributed.runtime import Runtime

# Of a batch, in causal order: numbers in the source, encoded images, uint8 images after augmentation and
# before mixing, labels.
PARTS = ("samples", "bytes", "pixels", "labels")
_SLOTS = 4  # marks of 16 bits in a word


class BatchDigest(NamedTuple):
    """Digests of a global batch.

    Args:
        parts: uint64 `[4]`, in the order of `PARTS`.
        marks: uint16 `[batch_size]`, of each sample, mixed from its encoded image, pixels and label.
    """

    parts: np.ndarray
    marks: np.ndarray


def batch_digest(
    runtime: Runtime, batches: Iterable[Batch], positions: range, batch_size: int
) -> BatchDigest:
    """The digests of a global batch; all processes call this together.

    Args:
        runtime: this process among its peers.
        batches: micro-batches of this process, with checksums.
        positions: of their samples in the global batch, in order.
        batch_size: of the global batch.
    """
    values = np.concatenate([_values(batch) for batch in batches])
    places = mix_words(np.arange(positions.start + 1, positions.stop + 1, dtype=np.uint64))
    parts = mix_words(mix_words(values) ^ places[:, None]).sum(axis=0, dtype=np.uint64)
    marks = np.zeros(-(-batch_size // _SLOTS) * _SLOTS, np.uint16)
    marks[positions.start : positions.stop] = _marks(values)
    # Every mark comes from one process, so that the sum of the words of all processes has the marks of all.
    words = runtime.sum_words(np.concatenate((parts, marks.view(np.uint64))))
    return BatchDigest(words[: len(PARTS)], words[len(PARTS) :].view(np.uint16)[:batch_size])


def norm_marks(norms: np.ndarray) -> np.ndarray:
    """A mark of 16 bits of each norm: float64 `[P]` to uint16 `[P]`."""
    return (mix_words(np.ascontiguousarray(norms, np.float64).view(np.uint64)) >> np.uint64(48)).astype(
        np.uint16
    )


def norms_digest(norms: np.ndarray) -> str:
    """A digest of norms, float64 `[P]`, in hexadecimal."""
    return hashlib.sha256(np.ascontiguousarray(norms, "<f8").tobytes()).hexdigest()[:16]


def _values(batch: Batch) -> np.ndarray:
    assert batch.checksums is not None, "train_batches(..., checksums=True) computes them"
    labels = batch.labels.numpy().reshape(len(batch), -1).astype(np.uint64)
    folded = labels[:, 0]
    for column in labels.T[1:]:
        folded = mix_words(folded) ^ column
    columns = (batch.samples.numpy().astype(np.uint64), *batch.checksums.astype(np.uint64).T, folded)
    return np.stack(columns, axis=1)


def _marks(values: np.ndarray) -> np.ndarray:
    _, encoded, pixels, labels = values.T
    return (mix_words(mix_words(mix_words(encoded) ^ pixels) ^ labels) >> np.uint64(48)).astype(np.uint16)
