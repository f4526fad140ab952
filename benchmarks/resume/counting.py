"""What a run that was stopped and went on has read, against the run that was not: samples repeated, skipped,
and their order.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

SAME, SAME_BATCHES, OTHER = "same", "same batches", "other"


@dataclass(frozen=True)
class Share:
    """What one process read at one step.

    Args:
        step: from 1, over the whole run.
        rank: of the process.
        epoch: as the loader counts, from 0.
        samples: their numbers, in order.
    """

    step: int
    rank: int
    epoch: int
    samples: tuple[int, ...]


@dataclass(frozen=True)
class Difference:
    """How an epoch differs from that of the uninterrupted run.

    Args:
        repeated: times that samples were read more often.
        skipped: times that samples were read less often.
        order: `same` sample for sample; `same batches`, where each step has the same samples in another
            order, which adds the same gradients; or `other`.
    """

    repeated: int
    skipped: int
    order: str

    @property
    def exact(self) -> bool:
        """Whether there is no difference but the order within a step."""
        return self.repeated == self.skipped == 0 and self.order != OTHER


def joined(before: Iterable[Share], saved: int, after: Iterable[Share]) -> list[Share]:
    """The run that counts: what was read up to the saved step, and from there by the run that went on; the
    rest was rolled back.
    """
    return [share for share in before if share.step <= saved] + list(after)


def difference(straight: Iterable[Share], run: Iterable[Share], epoch: int) -> Difference:
    """Compare one epoch of two runs, whatever their numbers of processes.

    Args:
        straight: the uninterrupted run.
        run: the other.
        epoch: which.
    """
    wanted, found = steps_of(straight, epoch), steps_of(run, epoch)
    often, seen = (Counter(sample for step in steps for sample in step) for steps in (wanted, found))
    if wanted == found:
        order = SAME
    else:
        order = (
            SAME_BATCHES if [sorted(step) for step in wanted] == [sorted(step) for step in found] else OTHER
        )
    return Difference((seen - often).total(), (often - seen).total(), order)


def steps_of(run: Iterable[Share], epoch: int) -> list[list[int]]:
    """Samples of each step of an epoch, those of all processes in the order of their ranks."""
    shares = sorted(
        (share for share in run if share.epoch == epoch), key=lambda share: (share.step, share.rank)
    )
    by_step = groupby(shares, key=lambda share: share.step)
    return [[sample for share in group for sample in share.samples] for _, group in by_step]


def is_whole(run: Iterable[Share], epoch: int, num_samples: int) -> bool:
    """Whether an epoch has every sample once."""
    samples = [sample for step in steps_of(run, epoch) for sample in step]
    return sorted(samples) == list(range(num_samples))
