"""Distillation: a network also learns from a frozen one, its teacher."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitctl.data.loader.batches import Batch
from vitctl.engine.losses import Measured, Objective, classification_loss
from vitctl.engine.runtime import Computation, given, sent
from vitctl.models.build import Model
from vitctl.recipe.sections import Distillation

Colours = tuple[tuple[float, ...], tuple[float, ...]]  # mean and std of images


@dataclass(frozen=True)
class Teacher:
    """A network to learn from, on the device at the student's image size; `colours` are its mean and std."""

    model: Model
    colours: Colours
    sha256: str


class Distilled:
    """Objective with a teacher: (1 - weight) * loss + weight * distillation, summed over the batch.

    The teacher, frozen and in evaluation mode, sees the student's pixels, augmented, erased and blended,
    normalised by its mean and std. It computes first, without keeping activations. `colours` are those of the
    student's images, `measured` computes what `distillation_loss` does.

    Paper: Hinton et al. 2015; Touvron et al. 2021 (DeiT); Beyer et al. 2022 (the same view for both)
    """

    def __init__(
        self,
        objective: Objective,
        asked: Distillation,
        teacher: Teacher,
        student: Model,
        colours: Colours,
        computation: Computation,
        measured: Measured | None = None,
    ) -> None:
        self._objective, self._asked, self._student = objective, asked, student
        self._measured = measured or distillation_loss
        self._teacher = teacher.model.requires_grad_(False).eval()
        self._computation = computation
        (mean, std), (its_mean, its_std) = (
            [torch.tensor(one, dtype=torch.float64).view(1, 3, 1, 1) for one in pair]
            for pair in (colours, teacher.colours)
        )
        self._is_same = colours == teacher.colours
        self._scale, self._shift = (
            one.to(computation.device, computation.dtype)
            for one in (std / its_std, (mean - its_mean) / its_std)
        )

    def __call__(self, model: nn.Module, batch: Batch, step: int) -> Tensor:
        answers: list[Tensor] = []
        by_features = self._asked.kind == "features"

        def teach(_: nn.Module, inputs: tuple[Tensor]) -> None:
            answers.append(self._answer(inputs[0]))

        def learn(_: nn.Module, inputs: tuple[Tensor], logits: Tensor | None = None) -> None:
            answers.append(inputs[0] if logits is None else logits)

        student, head = self._student, self._student.head
        assert head is not None
        heard = head.register_forward_pre_hook if by_features else student.register_forward_hook
        hooks = student.register_forward_pre_hook(teach), heard(learn)
        try:
            loss = self._objective(model, batch, step)
        finally:
            for hook in hooks:
                hook.remove()
        wanted, own = answers
        weights = sent(given(batch).weights, own.device)
        asked = self._asked
        learnt = self._measured(own, wanted, weights, kind=asked.kind, temperature=asked.temperature)
        return (1 - asked.weight) * loss + asked.weight * learnt

    @torch.no_grad()
    def _answer(self, images: Tensor) -> Tensor:
        with self._computation.autocast():
            seen = images if self._is_same else images * self._scale + self._shift
            answer: Tensor = (
                self._teacher.features(seen) if self._asked.kind == "features" else self._teacher(seen)
            )
        return answer


def distillation_loss(
    student: Tensor, teacher: Tensor, weights: Tensor, *, kind: str, temperature: float = 1.0
) -> Tensor:
    """Return the sum over the batch of the distillation loss of each image, in float32 or wider.

    Args:
        student, teacher: logits `[B, K]`, or for "features" representations `[B, R]`.
        weights: `[B]`, 0 for images that do not count.
        kind: "soft": temperature^2 * KL(teacher || student) of softmax(logits / temperature); "hard":
            cross-entropy with the teacher's class; "features": 1 - cosine similarity.

    Paper: Hinton et al. 2015; Touvron et al. 2021, Section 4 (hard); Sanh et al. 2019, Section 3 (cosine)
    """
    if kind == "hard":
        return classification_loss(
            student, teacher.argmax(dim=-1), weights, name="softmax", label_smoothing=0.0
        )
    student, teacher = (one if one.dtype == torch.float64 else one.float() for one in (student, teacher))
    if kind == "soft":
        own, wanted = (F.log_softmax(one / temperature, dim=-1) for one in (student, teacher))
        each = temperature**2 * (wanted.exp() * (wanted - own)).sum(dim=-1)
    else:
        each = 1 - F.cosine_similarity(student, teacher, dim=-1)
    return (each * weights.to(each.dtype)).sum()
