"""The recipe of an experiment: one frozen schema for each job, made of the tables in sections.py and
images.py.

Only jobs and the rooms above them read a recipe.
"""

from typing import Literal

from pydantic import model_validator

from vitctl.recipe.images import EvaluateImages, ExportImages, PretrainImages, TrainImages
from vitctl.recipe.machine import Checkpoint, Log, Machine, NetworkMachine, ShardedMachine, TrainMachine
from vitctl.recipe.protocols import FewShot, FewshotImages, FewshotProbe, LrSweep, Repeats, Suite, VtabImages
from vitctl.recipe.sections import (
    Averaging,
    EvaluateScoring,
    Evaluation,
    Export,
    FinetuneLoss,
    FittedSchedule,
    Loss,
    MaskedPatch,
    Model,
    Optimizer,
    Rate,
    Schedule,
    Scoring,
    Section,
    StartWeights,
    WeightsSource,
    knob,
)

# Keys of earlier releases, which the recipes of their runs have. Digests of recipes keep these names.
RENAMED = {"evaluation.early_stopping": "evaluation.select_best"}

_DROPOUT = "dropout while fine-tuning, 0 to below 1; as_stored: the value stored with the weights, 0 where there is none"
_DROP_PATH = (
    "chance of dropping the last layer's branches while fine-tuning, 0 to below 1; as_stored: as for dropout"
)
_DIVIDED = "an inference: Table 5 suggests as_stored, uncertainty-baselines suggests 0"


class Recipe(Section):
    """What every recipe has."""

    job: str
    note: str = knob("", "one line: what this recipe is, and what of the paper it reproduces")
    machine: Machine = Machine()


class SeededRecipe(Recipe):
    """A recipe of a job that draws at random."""

    seed: int = knob(0, "of the weights, the sample order, the augmentation and dropout", ge=0, lt=2**32)


class TrainRecipe(SeededRecipe):
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
    masked_patch: MaskedPatch = MaskedPatch()
    machine: ShardedMachine = ShardedMachine()
    fewshot_probe: FewshotProbe = FewshotProbe()

    @model_validator(mode="after")
    def _no_idle_section(self) -> "Pretrain":
        if self.loss.name != "masked_patch" and self.masked_patch != MaskedPatch():
            raise ValueError(f"[masked_patch] does nothing for loss.name = '{self.loss.name}'; leave it out")
        if self.loss.name == "masked_patch" and (self.data.mixup_alpha or self.data.cutmix_alpha):
            raise ValueError(
                "loss.name = 'masked_patch' has no targets to blend; leave out data.mixup_alpha and "
                "data.cutmix_alpha"
            )
        return self


class Finetune(TrainRecipe):
    """`vitctl finetune`"""

    job: Literal["finetune"]
    data: TrainImages = TrainImages()
    weights: StartWeights = StartWeights()
    machine: ShardedMachine = ShardedMachine()
    schedule: FittedSchedule = FittedSchedule()
    loss: FinetuneLoss
    sweep: LrSweep = LrSweep()
    finetune: Repeats = Repeats()
    dropout: Rate = knob(0.0, _DROPOUT, source=_DIVIDED)
    drop_path: Rate = knob(0.0, _DROP_PATH, source="AugReg; not in the paper")

    @model_validator(mode="after")
    def _noise_tells_no_rate(self) -> "Finetune":
        if self.sweep.lrs and self.data.synthetic:
            raise ValueError("data.synthetic has no labels to choose a learning rate by; set sweep.lrs = []")
        if len(self.finetune.seeds) > 1 and (self.data.synthetic or not self.data.eval_split):
            raise ValueError(
                "finetune.seeds gives a mean of accuracies, and there is nothing to score; set "
                "data.eval_split"
            )
        return self


class Fewshot(SeededRecipe):
    """`vitctl fewshot`"""

    job: Literal["fewshot"]
    weights: StartWeights = StartWeights()
    machine: NetworkMachine = NetworkMachine()
    data: FewshotImages = FewshotImages()
    evaluation: Scoring = Scoring()
    fewshot: FewShot = FewShot()

    @model_validator(mode="after")
    def _others_to_choose_by(self) -> "Fewshot":
        if self.fewshot.choose_l2 == "leave_self_out" and len(self.data.datasets) < 2:
            raise ValueError("choose_l2 = 'leave_self_out' needs two data sets or more in data.datasets")
        return self


class Vtab(TrainRecipe):
    """`vitctl vtab`"""

    job: Literal["vtab"]
    data: VtabImages = VtabImages()
    weights: StartWeights = StartWeights()
    loss: FinetuneLoss
    dropout: Rate = knob(0.0, _DROPOUT, source=_DIVIDED)
    drop_path: Rate = knob(0.0, _DROP_PATH, source="AugReg; not in the paper")
    vtab: Suite = Suite()

    @model_validator(mode="after")
    def _one_length_for_all_tasks(self) -> "Vtab":
        if not self.schedule.total_steps:
            raise ValueError(
                "the tasks of vtab are trained for one number of steps: set schedule.total_steps"
            )
        if self.evaluation.select_best:
            raise ValueError(
                "evaluation.select_best would choose a checkpoint by the test images, the only ones that a "
                "task of vtab scores"
            )
        return self


class Evaluate(Recipe):
    """`vitctl evaluate`"""

    job: Literal["evaluate"]
    weights: WeightsSource = WeightsSource()
    machine: NetworkMachine = NetworkMachine()
    data: EvaluateImages = EvaluateImages()
    evaluation: EvaluateScoring = EvaluateScoring()


class ExportRecipe(Recipe):
    """`vitctl export`"""

    job: Literal["export"]
    weights: WeightsSource = WeightsSource()
    data: ExportImages = ExportImages()
    export: Export = Export()

    @model_validator(mode="after")
    def _accuracy_needs_images(self) -> "ExportRecipe":
        precision = self.export.precision
        if precision != "float32" and not (self.data.path or self.data.dataset):
            raise ValueError(
                f"export.precision = '{precision}' is proven by its accuracy on images: give some with "
                f"--check-data"
            )
        return self


JOBS: dict[str, type[Recipe]] = {
    "pretrain": Pretrain,
    "finetune": Finetune,
    "fewshot": Fewshot,
    "vtab": Vtab,
    "evaluate": Evaluate,
    "export": ExportRecipe,
}
