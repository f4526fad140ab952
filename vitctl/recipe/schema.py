"""What an experiment is: one frozen schema for each job, made of the tables in sections.py.

Nothing below the jobs reads a recipe.
"""

from typing import Literal

from pydantic import model_validator

from vitctl.recipe.sections import (
    Averaging,
    Checkpoint,
    EvaluateImages,
    Evaluation,
    Export,
    FewShot,
    FewshotImages,
    Log,
    Loss,
    Machine,
    MaskedPatch,
    Model,
    Optimizer,
    PretrainImages,
    PretrainLoss,
    Schedule,
    Scoring,
    Section,
    StartWeights,
    Suite,
    TrainImages,
    TrainMachine,
    VtabImages,
    Weights,
    knob,
)


class Recipe(Section):
    """What every recipe has."""

    job: str
    note: str = knob("", "one line: what this recipe is, and what of the paper it reproduces")
    seed: int = knob(0, "of the weights, the sample order, the augmentation and dropout", ge=0, lt=2**32)
    machine: Machine = Machine()


class TrainRecipe(Recipe):
    """The sections of every job that takes gradient steps."""

    machine: TrainMachine = TrainMachine()
    optimizer: Optimizer
    schedule: Schedule
    loss: Loss
    averaging: Averaging = Averaging()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()


class Pretrain(TrainRecipe):
    """`vitctl pretrain`"""

    job: Literal["pretrain"]
    model: Model
    data: PretrainImages = PretrainImages()
    loss: PretrainLoss
    masked_patch: MaskedPatch = MaskedPatch()

    @model_validator(mode="after")
    def _no_idle_section(self) -> "Pretrain":
        if self.loss.name != "masked_patch" and self.masked_patch != MaskedPatch():
            raise ValueError(f"[masked_patch] does nothing for loss.name = '{self.loss.name}'; leave it out")
        return self


class Finetune(TrainRecipe):
    """`vitctl finetune`"""

    job: Literal["finetune"]
    data: TrainImages = TrainImages()
    weights: StartWeights = StartWeights()
    dropout: float = knob(0.0, "dropout of the fine-tuned model", source="authors' code", ge=0, lt=1)


class Fewshot(Recipe):
    """`vitctl fewshot`"""

    job: Literal["fewshot"]
    weights: StartWeights = StartWeights()
    data: FewshotImages = FewshotImages()
    evaluation: Scoring = Scoring()
    fewshot: FewShot = FewShot()


class Vtab(TrainRecipe):
    """`vitctl vtab`"""

    job: Literal["vtab"]
    data: VtabImages = VtabImages()
    weights: StartWeights = StartWeights()
    dropout: float = knob(0.0, "dropout of the fine-tuned models", ge=0, lt=1)
    vtab: Suite = Suite()


class Evaluate(Recipe):
    """`vitctl evaluate`"""

    job: Literal["evaluate"]
    weights: Weights = Weights()
    data: EvaluateImages = EvaluateImages()
    evaluation: Scoring = Scoring()


class ExportRecipe(Recipe):
    """`vitctl export`"""

    job: Literal["export"]
    weights: Weights = Weights()
    export: Export = Export()


JOBS: dict[str, type[Recipe]] = {
    "pretrain": Pretrain,
    "finetune": Finetune,
    "fewshot": Fewshot,
    "vtab": Vtab,
    "evaluate": Evaluate,
    "export": ExportRecipe,
}
