"""The arguments of a training run: plain values and callables; jobs fill them from a recipe."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from vitctl.data.loader.batches import Batch
from vitctl.engine.distributed.agreement import Identity
from vitctl.engine.evaluation import Score
from vitctl.models.build import Model


@dataclass(frozen=True)
class TrainingTask:
    """Training data, length, metrics, and how often each action is done.

    `batches(first_step)` gives this process's micro-batches, `own` are its slots of a global batch,
    `flops_per_image` are those of training, `key(sample)` names an image, `score(model)` evaluates it (None:
    nothing to evaluate on), `probe(model)` gives few-shot accuracies of each number of shots, by seed,
    `identity` is compared with that of the checkpoint that it resumes from. `evaluate_every` and `save_every`
    are in steps, 0 for never before the end; so is `probe_every`, 0 for never. `warm_up`: run torch.compile
    before the first step. `steps_behind`: steps after which the numbers of a step are read, 1 on a GPU, which
    computes on meanwhile; those of steps that are logged, scored or saved are read at once. `facts` are
    recorded at each start, beside a record of every step (None: no records).
    """

    batches: Callable[[int], Iterator[Batch]]
    own: range
    num_images: int
    flops_per_image: int
    key: Callable[[int], str]
    score: Callable[[nn.Module], Score] | None
    probe: Callable[[Model], dict[int, list[float]]] | None
    identity: Identity | None
    total_steps: int
    evaluate_every: int
    probe_every: int
    save_every: int
    save_in_background: bool
    log_every: int
    log_sample_keys: bool
    max_bad_fraction: float
    warm_up: bool
    steps_behind: int
    facts: Mapping[str, Any] | None = None

    def is_read_at_once(self, step: int) -> bool:
        """Whether the numbers of this step are read before the next one begins."""
        often = self.log_every, self.evaluate_every, self.probe_every, self.save_every
        return step == self.total_steps or any(is_due(step, every) for every in often)


def is_due(step: int, every: int) -> bool:
    """Whether an action that is done every `every` steps (0: never) is due after this step."""
    return every > 0 and step % every == 0
