"""The tables of a recipe for evaluation protocols: few-shot, the learning rate sweep of fine-tuning, VTAB.

Every field here is read by a job; a test checks this.
"""

from typing import Literal

from pydantic import model_validator

from vitctl.recipe.images import IMAGE_SIZE, RESAMPLE, Place, Resample, check_crop
from vitctl.recipe.sections import Floats, Ints, Names, Section, knob


class FewshotImages(Place):
    """[data] of `fewshot`."""

    datasets: Names = knob(
        (), "several known data sets, scored together; override dataset and path", source="D.2"
    )
    train_split: str = knob(
        "", "split that the shots are drawn from; '': train, or the one of the authors' evaluator where "
            "it differs",
        source="big_vision fewshot_lsr",
    )  # fmt: skip
    eval_split: str = knob(
        "",
        "split that is scored; '': test, or the one of the authors' evaluator where it differs",
        source="big_vision fewshot_lsr",
    )
    image_size: int = knob(0, IMAGE_SIZE, unit="pixels", ge=0)
    eval_resize: int = knob(
        0, "images are squashed to this square before the centre crop; 0: 8/7 of image_size, as 256 for 224",
        unit="pixels", source="big_vision fewshot_lsr", ge=0,
    )  # fmt: skip
    resample: Resample = knob("bilinear", RESAMPLE, source="authors' code")

    @property
    def _is_own(self) -> bool:
        return bool(self.path and not self.datasets)

    @model_validator(mode="after")
    def _crop_needs_room(self) -> "FewshotImages":
        check_crop(self.image_size, self.eval_resize)
        return self


class FewShot(Section):
    """[fewshot] Closed-form regularised least squares on frozen representations."""

    shots: Ints = knob((1, 5, 10, 25), "training images per class", source="Section 4.1, Fig. 4")
    seeds: Ints = knob((0, 1, 2), "one draw of the training images for each")
    l2: float = knob(
        1024.0, "the regulariser, not divided by the number of images", source="big_vision fewshot_lsr", gt=0
    )
    choose_l2: Literal["fixed", "all", "leave_self_out"] = knob(
        "fixed",
        "fixed: l2; all: the one of 2^-10 .. 2^19 with the best mean rank over the data sets, for each "
        "number of shots; "
        "leave_self_out: over the other data sets. Ranks are those of test accuracies, as in the authors' "
        "earlier evaluator",
        source="authors' code",
    )
    float64: bool = knob(
        True, "solve in float64; false: in float32, which is too imprecise for regularisers below 1"
    )
    cache: str = knob(
        "", "cache folder of representations for later runs; '': features/ beside the run folder"
    )
    cache_gib: float = knob(
        10.0,
        "limit of the cache; the least recently used are deleted above it; 0: no cache",
        unit="GiB",
        ge=0,
    )

    @model_validator(mode="after")
    def _something_to_do(self) -> "FewShot":
        if not self.shots or min(self.shots) < 1 or len(set(self.shots)) < len(self.shots):
            raise ValueError(f"shots = {list(self.shots)} should be distinct numbers, 1 or more")
        if not self.seeds or min(self.seeds) < 0 or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds = {list(self.seeds)} should be distinct numbers, 0 or more")
        if self.choose_l2 != "fixed" and self.l2 != 1024.0:
            raise ValueError(
                f"l2 = {self.l2:g} does nothing for choose_l2 = '{self.choose_l2}'; leave it out"
            )
        return self


class FewshotProbe(Place):
    """[fewshot_probe] of `pretrain`: few-shot accuracy of the network while it trains, at the size it trains
    at.
    """

    every_steps: int = knob(0, "every so many steps and at the end; 0: off", unit="steps", source="4.1", ge=0)
    train_split: str = knob("", "split that the shots are drawn from; '': as in `fewshot`")
    eval_split: str = knob("", "split that is scored; '': as in `fewshot`")
    shots: Ints = knob((5,), "training images per class", source="4.1, Fig. 4")
    seeds: Ints = knob((0,), "one draw of the training images for each")
    l2: float = knob(
        1024.0, "the regulariser, not divided by the number of images", source="authors' code", gt=0
    )

    @model_validator(mode="after")
    def _something_to_do(self) -> "FewshotProbe":
        if self.every_steps and not (self.dataset or self.path):
            raise ValueError(
                "fewshot_probe.every_steps needs images: set fewshot_probe.dataset or fewshot_probe.path"
            )
        fields = type(self).model_fields.items()
        if not self.every_steps and any(getattr(self, name) != field.default for name, field in fields):
            raise ValueError(
                "[fewshot_probe] does nothing without every_steps; set it, or leave the table out"
            )
        if not self.shots or min(self.shots) < 1 or not self.seeds or min(self.seeds) < 0:
            raise ValueError("fewshot_probe.shots should be 1 or more, fewshot_probe.seeds 0 or more")
        return self


class LrSweep(Section):
    """[sweep] Learning rates tried on a part of the training images before `finetune` trains on all of them."""

    lrs: Floats = knob(
        (), "base learning rates, tried in this order; []: optimizer.lr and no sweep", source="Table 4"
    )
    train_split: str = knob("train[:90%]", "split that the rates are tried on", source="B.1.1")
    eval_split: str = knob("train[90%:]", "split that chooses the rate", source="B.1.1")

    @model_validator(mode="after")
    def _sound(self) -> "LrSweep":
        if any(lr <= 0 for lr in self.lrs) or len(set(self.lrs)) < len(self.lrs):
            raise ValueError(f"sweep.lrs = {list(self.lrs)} should be distinct rates above 0")
        return self


class Repeats(Section):
    """[finetune] How often `finetune` trains, after one sweep of learning rates."""

    seeds: Ints = knob(
        (),
        "one run per seed, with mean and population standard deviation of their accuracies; the sweep uses "
        "`seed`; "
        "[]: one run, with `seed`",
        source="Table 2, caption",
    )

    @model_validator(mode="after")
    def _sound(self) -> "Repeats":
        if any(seed < 0 for seed in self.seeds) or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds = {list(self.seeds)} should be distinct numbers, 0 or more")
        return self


class VtabImages(Section):
    """[data] of `vtab`: splits, crop and flip are those of each task."""

    path: str = knob("", "folder that holds a folder of shards for each task; unset: data.root")
    root: str = knob("data", "folder that holds known data sets, one folder each")
    image_size: int = knob(
        384, "side of the square that the model sees, for all tasks; 0: as stored with "
             "the weights", unit="pixels",
        source="B.1.1", ge=0,
    )  # fmt: skip
    augment: Literal["bit", "none"] = knob(
        "bit",
        "bit: random crop out of 7/6 of image_size and flip, each for the tasks where BiT has it; none: "
        "resize only",
        source="B.1.1; BiT App. F",
    )
    resample: Resample = knob("bilinear", RESAMPLE, source="authors' code")
    allow_partial: bool = knob(
        False, "use data sets that lack some of their images; the result is labelled accordingly"
    )
    max_bad_fraction: float = knob(
        0.0, "stop when more than this share of the images read is unreadable", ge=0, le=1
    )


class Suite(Section):
    """[vtab] A table of small tasks, each fine-tuned on 1,000 images with one setting."""

    suite: Literal["vtab", "mini"] = knob(
        "vtab", "vtab: the 19 tasks; mini: tasks that need no download", source="4.1, D.10"
    )
    tasks: Names = knob((), "only these tasks; the means are then labelled partial")
    seeds: Ints = knob((0,), "fine-tuning runs per task", source="Table 2 caption")
    sweep_lrs: Floats = knob(
        (),
        "learning rates tried on the 200 validation images, one choice for all tasks; []: optimizer.lr",
        source="B.1.1",
    )
    sweep_steps: Ints = knob(
        (),
        "schedules tried with them, the warm-up in proportion; []: schedule.total_steps",
        unit="steps",
        source="B.1.1",
    )
    light: bool = knob(
        False,
        "a linear classifier on frozen features instead of fine-tuning: a quick estimate, not the protocol",
    )
    keep_checkpoints: bool = knob(
        False, "keep the fine-tuned weights of finished runs; else only their results are kept"
    )

    @model_validator(mode="after")
    def _sound(self) -> "Suite":
        for name in ("tasks", "seeds", "sweep_lrs", "sweep_steps"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ValueError(f"{name} = {list(values)} names something twice")
        if not self.seeds:
            raise ValueError("seeds = [] leaves nothing to run; give at least one")
        if any(value <= 0 for value in (*self.sweep_lrs, *self.sweep_steps)):
            raise ValueError("sweep_lrs and sweep_steps should be above 0")
        return self
