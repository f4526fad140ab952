"""The recipe of an experiment: one frozen schema for each job, and its tables. [data] is in images.py."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, PlainValidator, model_validator

from vitctl.errors import LaunchError, RecipeError, refuse
from vitctl.models.variants import (
    Config,
    MaskedPatchConfig,
    Recomputed,
    ViTConfig,
    variant,
    with_fresh_norm,
)
from vitctl.recipe.images import (
    EvaluateImages,
    ExportImages,
    FewshotImages,
    Place,
    PretrainImages,
    ProbeImages,
    TrainImages,
    VtabImages,
)
from vitctl.recipe.known import Known
from vitctl.recipe.sections import (
    Averaging,
    Distillation,
    EvaluateScoring,
    Evaluation,
    Export,
    FinetuneLoss,
    FittedSchedule,
    Floats,
    Ints,
    LayerRates,
    LocalPath,
    LoRA,
    Loss,
    MaskedPatch,
    Model,
    Names,
    Optimizer,
    Rate,
    Schedule,
    Scoring,
    Section,
    StartWeights,
    WeightsSource,
    knob,
)

# Of a recipe, and of a training: whether, and in which mode of torch.
Compile = bool | Literal["auto", "max-autotune", "reduce-overhead"]


def _compile(value: Any) -> Compile:
    if isinstance(value, bool) or value in ("auto", "max-autotune", "reduce-overhead"):
        return value  # type: ignore[no-any-return]
    raise ValueError("should be 'auto', true, false, 'max-autotune' or 'reduce-overhead'")


class Machine(Section):
    """[machine] Distribution of the work; changes the result by rounding only, mostly through precision.

    One exception: dropout and stochastic depth draw random numbers for each forward pass of each process, so
    `processes`, `micro_batch` and `compile` change the draws, and the result. With schedule.lanes they change
    no bit.
    """

    processes: int = knob(
        1,
        "processes, one per GPU; started by vitctl, or by srun, torchrun or accelerate launch; with dropout "
        "or drop_path "
        "their number changes the random draws",
        ge=1,
    )
    workers: int = knob(
        -1, "data loader workers of each process; -1: chosen by the number of cores; 0: none", ge=-1
    )
    precision: Literal["auto", "bf16", "float32", "tf32", "float64"] = knob(
        "auto",
        "auto: bf16 where the device computes it fast, else float32; master weights, loss and norms stay "
        "float32. tf32: as float32, but "
        "an NVIDIA GPU keeps 10 of 23 mantissa bits of what it multiplies",
    )
    device: Literal["auto", "cpu", "cuda"] = knob(
        "auto", "auto: CUDA where available, else CPU; cuda: an error where there is none"
    )
    start_timeout: float = knob(
        600.0,
        "how long the processes and machines of a run wait for each other at its start",
        unit="seconds",
        gt=0,
    )
    group_timeout: float = knob(
        600.0,
        "how long one operation of all processes may take, such as the sum of gradients, before the run "
        "ends; raise it where a process may be busy for longer, as with storage that stalls",
        unit="seconds",
        gt=0,
    )


class NetworkMachine(Machine):
    """[machine] of the jobs that compute a network."""

    attention: Literal["auto", "flash", "efficient", "cudnn", "math", "fused"] = knob(
        "auto",
        "kernel of the attention product. auto: math on a CPU in bf16 up to 1,024 tokens, with relative "
        "positions and lanes; else fused, on a GPU flash in bf16 and efficient in float32; a training keeps "
        "that of its start",
    )
    compile: Annotated[Compile, PlainValidator(_compile)] = knob(
        "auto",
        "torch.compile each layer. auto: on a GPU, where it saves more time than it takes; a training keeps "
        "the choice of its start. true, 'max-autotune' and 'reduce-overhead' are torch's modes. With dropout "
        "or drop_path it changes the random draws",
    )


def _recomputed(value: Any) -> Recomputed:
    value = int(value) if isinstance(value, bool) else value
    if value == "attention" or (type(value) is int and value >= 0):
        return value  # type: ignore[no-any-return]
    raise ValueError("should be a whole number of layers from 0, or 'attention'")


class TrainMachine(NetworkMachine):
    """[machine] of the jobs that train."""

    checkpoint_blocks: Annotated[Recomputed, PlainValidator(_recomputed)] = knob(
        0,
        "activation checkpointing: recompute one in so many layers in the backward pass instead of storing "
        "its activations; 1: each, 0: none; true stands for 1; attention: of each layer the attention alone",
    )
    deterministic: bool = knob(
        True,
        "on a GPU only kernels that add in a fixed order, so that a resume has the same bits; false: faster. "
        "A CPU always has them",
    )
    micro_batch: int = knob(
        0,
        "maximum number of images in one forward pass of a process; 0: its whole share; -1: as many as fit "
        "into device memory, "
        "measured at the start of the run and then kept. With dropout or drop_path this changes the random "
        "draws and the result",
        unit="images",
        ge=-1,
    )

    @model_validator(mode="after")
    def _values_fit(self) -> Self:
        return self._refusing(
            (
                self.attention == "cudnn" and self.deterministic,
                "attention = 'cudnn' adds in no fixed order in the backward pass, and deterministic = true; "
                "set machine.attention = 'flash', or machine.deterministic = false",
            ),
            (
                self.compile not in (False, "auto") and self.checkpoint_blocks == "attention",
                "checkpoint_blocks = 'attention' cuts compiled layers in two; set compile = false, or "
                "checkpoint_blocks to a number",
            ),
        )


class ShardedMachine(TrainMachine):
    """[machine] of the jobs that may train a model too large for one device."""

    sharding: Literal["none", "hsdp", "fsdp"] = knob(
        "none",
        "none: each process has all (DDP); fsdp: a part of weights, gradients and optimizer state (FSDP2); "
        "hsdp: fsdp within each of sharding_replicas groups of processes",
    )
    sharding_replicas: int = knob(
        1,
        "with hsdp: copies of the model, each sharded over the processes divided by this (HSDP), such as the "
        "number of nodes: then "
        "weights are gathered within a node, and only gradients go between nodes",
        unit="copies",
        ge=1,
    )
    sharding_dtype: Literal["float32", "bf16"] = knob(
        "float32",
        "with fsdp or hsdp: type that the matrices of layers are gathered in. bf16, where machine.precision "
        "is bf16: half of the traffic and no "
        "bf16 copy of the whole model in memory, for the same bits; gradients are added up in float32. With "
        "compile a layer then "
        "becomes several graphs",
    )

    @property
    def divides_model(self) -> bool:
        """Return whether no process has all weights."""
        return self.sharding != "none"

    def shards(self, processes: int) -> int:
        """Return the parts that each copy of the model is cut into. Raises LaunchError if it cannot be."""
        if not self.divides_model:
            return 1
        if processes == 1:
            raise LaunchError(
                f"machine.sharding = '{self.sharding}' divides a model over several processes, "
                "and there is one",
                fix="give --processes, or set machine.sharding = 'none'",
            )
        if processes % self.sharding_replicas:
            raise LaunchError(
                f"machine.sharding_replicas = {self.sharding_replicas}",
                f"{processes} process{'es' * (processes > 1)} cannot hold so many copies of equal parts",
                "set it to a divisor of machine.processes, such as the number of nodes",
            )
        return processes // self.sharding_replicas

    @model_validator(mode="after")
    def _nothing_idle(self) -> Self:
        idle = [
            k
            for k in ("sharding_replicas", "sharding_dtype")
            if getattr(self, k) != type(self).model_fields[k].default
        ]
        return self._refusing(
            (
                self.sharding == "hsdp" and self.sharding_replicas == 1,
                "sharding = 'hsdp' needs sharding_replicas of at least 2, such as the number of nodes; on "
                "one node, set sharding = 'fsdp'",
            ),
            (
                idle and not self.divides_model,
                f"{', '.join(idle)} does nothing while nothing is sharded; leave it out, or set sharding "
                f"= 'fsdp'",
            ),
            (
                self.sharding_dtype == "bf16" and self.precision not in ("auto", "bf16"),
                f"sharding_dtype = 'bf16' would lose precision with precision = '{self.precision}'; set "
                f"machine.precision = 'bf16', or machine.sharding_dtype = 'float32'",
            ),
        )


def _store(text: str) -> str:
    text = text.rstrip("/")
    if ".." in text.split("/") or not re.fullmatch(r"|/.+|(s3|gs|az)://[\w.-]+(/[^\s?*#/]+)+", text):
        raise ValueError(
            f"'{text}' should be s3://BUCKET/FOLDER, gs:// or az://, without spaces or wildcards, or an "
            f"absolute path"
        )
    return text


class Checkpoint(Section):
    """[checkpoint] What is kept on disk."""

    every_steps: int = knob(
        1000, "save every so many steps; 0: only at the end and on a signal", unit="steps", ge=0
    )
    background: bool = knob(
        True, "write while training continues, from a copy in host memory; false: no copy, training waits"
    )
    keep_last: int = knob(2, "newest checkpoints kept", ge=1)
    keep_best: int = knob(
        0,
        "best checkpoints kept, by evaluation.metric on data.eval_split (needs evaluation.every_steps)",
        ge=0,
    )
    store: Annotated[str, AfterValidator(_store)] = knob(
        "",
        "where each checkpoint is copied to, with the records of the run: s3://, gs://, az://, or a folder "
        "on another disk; another machine resumes from it",
    )


def _profiled(text: str) -> str:
    found = re.fullmatch(r"([1-9][0-9]*)(?:-([1-9][0-9]*))?(@[0-9]+)?", text)
    if text and (not found or int(found[2] or found[1]) < int(found[1])):
        raise ValueError(f"'{text}' should be a step such as 20, or steps such as 20-24, or 20-24@3")
    return text


class Log(Section):
    every_steps: int = knob(
        50, "a record in log.jsonl, and a line where there is no terminal", unit="steps", ge=1
    )
    profile: Annotated[str, AfterValidator(_profiled)] = knob(
        "",
        "steps to profile, such as 20 or 20-24, or 20-24@3 in process 3: RUN/profile gets a trace by torch, "
        "and on a GPU the history of its memory",
    )
    trackers: Names = knob((), "accelerate trackers, e.g. ['tensorboard']")
    trace: bool = knob(
        True,
        "record every step for `vitctl verify`: a line in steps.jsonl (loss, norm, learning rate, digests of "
        "the batch), and in "
        "trace.bin 2 bytes for each image of a batch and each parameter, of so many steps as fit in 64 MiB",
    )


class FeatureCache(Section):
    """Cache of representations."""

    cache: LocalPath = knob(
        "", "cache folder of representations for later runs; '': features/ beside the run folder"
    )
    cache_gib: float = knob(
        10.0,
        "limit of the cache; the least recently used are deleted above it; 0: no cache",
        unit="GiB",
        ge=0,
    )

    @property
    def class_token_blocks(self) -> Ints:
        """The numbers of last blocks whose class tokens are read, see `with_blocks`."""
        return ()


class FewShot(FeatureCache):
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

    @property
    def most_shots(self) -> int:
        """Training images that each class needs."""
        return max(self.shots)

    @property
    def with_fewer(self) -> str:
        """A fix if a class has fewer images."""
        return "use fewer --shots"

    @model_validator(mode="after")
    def _something_to_do(self) -> Self:
        return self._refusing(
            (
                not self.shots or min(self.shots) < 1 or len(set(self.shots)) < len(self.shots),
                f"shots = {list(self.shots)} should be distinct numbers, 1 or more",
            ),
            (
                not self.seeds or min(self.seeds) < 0 or len(set(self.seeds)) < len(self.seeds),
                f"seeds = {list(self.seeds)} should be distinct numbers, 0 or more",
            ),
            (
                self.choose_l2 != "fixed" and self.l2 != 1024.0,
                f"l2 = {self.l2:g} does nothing for choose_l2 = '{self.choose_l2}'; leave it out",
            ),
        )


class Probing(FeatureCache):
    """[probe] A classifier on frozen representations of all training images."""

    method: Literal["knn", "logistic", "linear"] = knob(
        "knn",
        "knn: nearest neighbours by cosine similarity; logistic: logistic regression by L-BFGS, in float64; "
        "linear: layers by SGD at several learning rates, side by side",
        source="DINO; DINOv2",
    )
    k: Ints = knob((10, 20, 100, 200), "method = 'knn': numbers of neighbours", source="DINO")
    temperature: float = knob(
        0.07, "method = 'knn': a neighbour votes with softmax(similarity / temperature)", source="DINO", gt=0
    )
    float64: bool = knob(True, "method = 'knn', 'linear': in float64; false: in float32")
    hold_out: float = knob(
        0.1,
        "method = 'logistic', 'linear': share of each class's training images that C, or input and rate, are "
        "chosen on; the layer is then fitted to all",
        source="DINOv2",
        gt=0,
        lt=1,
    )
    blocks: Ints = knob(
        (1, 4),
        "method = 'linear': layers read the class tokens of so many last blocks, each with and without the "
        "mean of the patches; []: the input of the classification layer alone",
        source="DINOv2",
    )
    lrs: Floats = knob(
        (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1),
        "method = 'linear': first learning rates, times batch_size / 256",
        source="DINOv2",
    )
    steps: int = knob(12_500, "method = 'linear'", unit="steps", source="DINOv2", ge=1)
    batch_size: int = knob(128, "method = 'linear'", unit="images", source="DINOv2", ge=1)
    momentum: float = knob(0.9, "method = 'linear': of SGD", source="DINOv2", ge=0, lt=1)

    @property
    def class_token_blocks(self) -> Ints:
        """`blocks`, for the method that reads them."""
        return self.blocks if self.method == "linear" else ()

    @property
    def most_shots(self) -> int:
        """Training images that each class needs: one on either side of the hold-out."""
        return 1 if self.method == "knn" else 2

    @property
    def with_fewer(self) -> str:
        """A fix if a class has fewer images."""
        other = "" if self.method == "knn" else "use --method knn, or "
        return f"{other}add images of this class to the training split"

    @model_validator(mode="after")
    def _something_to_do(self) -> Self:
        return self._refusing(
            (
                not self.k or min(self.k) < 1 or len(set(self.k)) < len(self.k),
                f"k = {list(self.k)} should be distinct numbers, 1 or more",
            ),
            (
                not self.lrs or min(self.lrs) <= 0 or len(set(self.lrs)) < len(self.lrs),
                f"lrs = {list(self.lrs)} should be distinct rates above 0",
            ),
            (
                len(set(self.blocks)) < len(self.blocks)
                or not all(0 < number <= 1000 for number in self.blocks),
                f"blocks = {list(self.blocks)} should be distinct numbers, 1 to 1000",
            ),
        )


class FewshotProbe(Place):
    """[fewshot_probe] of `pretrain`: few-shot accuracy during training, at the training resolution."""

    every_steps: int = knob(0, "every so many steps and at the end; 0: off", unit="steps", source="4.1", ge=0)
    train_split: str = knob("", "split that the shots are drawn from; '': as in `fewshot`")
    eval_split: str = knob("", "split that is scored; '': as in `fewshot`")
    shots: Ints = knob((5,), "training images per class", source="4.1, Fig. 4")
    seeds: Ints = knob((0,), "one draw of the training images for each")
    l2: float = knob(
        1024.0, "the regulariser, not divided by the number of images", source="authors' code", gt=0
    )

    @model_validator(mode="after")
    def _something_to_do(self) -> Self:
        return self._refusing(
            (
                self.every_steps and not (self.dataset or self.path),
                "fewshot_probe.every_steps needs images: set fewshot_probe.dataset or fewshot_probe.path",
            ),
            (
                not self.every_steps and self != type(self).model_construct(),
                "[fewshot_probe] does nothing without every_steps; set it, or leave the table out",
            ),
            (
                not self.shots or min(self.shots) < 1 or not self.seeds or min(self.seeds) < 0,
                "fewshot_probe.shots should be 1 or more, fewshot_probe.seeds 0 or more",
            ),
        )


class LrSweep(Section):
    """[sweep] Learning rates tried on a part of the training images before `finetune` trains on all."""

    lrs: Floats = knob(
        (), "base learning rates, tried in this order; []: optimizer.lr and no sweep", source="Table 4"
    )
    train_split: str = knob("train[:90%]", "split that the rates are tried on", source="B.1.1")
    eval_split: str = knob("train[90%:]", "split that chooses the rate", source="B.1.1")

    @model_validator(mode="after")
    def _sound(self) -> Self:
        return self._refusing(
            (
                any(lr <= 0 for lr in self.lrs) or len(set(self.lrs)) < len(self.lrs),
                f"sweep.lrs = {list(self.lrs)} should be distinct rates above 0",
            ),
        )


def _frozen(text: str) -> str:
    if not re.fullmatch("none|embedding|backbone|[1-9][0-9]{0,3} blocks?", text):
        raise ValueError(f"{text!r} should be none, embedding, backbone, or a number of blocks as '6 blocks'")
    return text


class Repeats(Section):
    """[finetune] What `finetune` trains, from which head, and how often, after one learning-rate sweep."""

    freeze: Annotated[str, AfterValidator(_frozen)] = knob(
        "none",
        "what keeps its start weights: embedding (patches, class token, positions); '6 blocks', with the "
        "embedding; backbone, all but the head; none. Frozen layers compute as in evaluation, without "
        "dropout and drop_path",
        source="not in the paper",
    )

    seeds: Ints = knob(
        (),
        "one run per seed, with mean and population standard deviation of their accuracies; the sweep uses "
        "`seed`; "
        "[]: one run, with `seed`",
        source="Table 2, caption",
    )
    head: Literal["zero", "random", "fewshot", "as_stored"] = knob(
        "zero",
        "what the classification layer starts from. zero: zeros; random: normal numbers of deviation "
        "head_std, a bias of zeros; fewshot: the closed-form few-shot solution on the training images "
        "without augmentation, times the factor that gives its leave-one-out scores the least loss; "
        "as_stored: that of the weights, if its classes are those of the data",
        source="zero: Section 3.2; random: timm, MAE; fewshot: linear probing, then fine-tuning (Kumar et "
        "al. 2022)",
    )
    head_std: float = knob(
        0.02, "head = 'random': standard deviation; MAE: 2e-5", source="timm: 0.02; MAE", gt=0, le=1
    )
    fresh_norm: bool = knob(
        False,
        "the mean of the patches goes through a new norm, instead of the stored one before the mean",
        source="MAE's fc_norm, BEiT",
    )
    head_l2: float = knob(
        1024.0,
        "head = 'fewshot': the regulariser, not divided by the number of images",
        source="as fewshot.l2",
        gt=0,
    )
    head_images: int = knob(
        50_000,
        "head = 'fewshot': most training images it is solved on; of more, a random subset",
        unit="images",
        ge=1,
    )

    @model_validator(mode="after")
    def _sound(self) -> Self:
        return self._refusing(
            (
                self.head != "fewshot" and (self.head_l2, self.head_images) != (1024.0, 50_000),
                f"head_l2 and head_images do nothing for head = '{self.head}'; leave them out, or set "
                f"finetune.head = 'fewshot'",
            ),
            (
                self.head != "random" and self.head_std != 0.02,
                f"head_std does nothing for head = '{self.head}'; leave it out, or set finetune.head = "
                f"'random'",
            ),
            (
                self.fresh_norm and self.head == "as_stored",
                "fresh_norm would put an untrained norm before a trained head; set finetune.head = 'zero'",
            ),
            (
                any(seed < 0 for seed in self.seeds) or len(set(self.seeds)) < len(self.seeds),
                f"seeds = {list(self.seeds)} should be distinct numbers, 0 or more",
            ),
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
    keep_checkpoints: bool = knob(
        False, "keep the fine-tuned weights of finished runs; else only their results are kept"
    )

    @model_validator(mode="after")
    def _sound(self) -> Self:
        for name in ("tasks", "seeds", "sweep_lrs", "sweep_steps"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ValueError(f"{name} = {list(values)} names something twice")
        return self._refusing(
            (not self.seeds, "seeds = [] leaves nothing to run; give at least one"),
            (
                any(value <= 0 for value in (*self.sweep_lrs, *self.sweep_steps)),
                "sweep_lrs and sweep_steps should be above 0",
            ),
        )


# Keys of earlier releases, still in the recipes of their runs. Digests of recipes keep these names.
RENAMED = {"evaluation.early_stopping": "evaluation.select_best"}


class Removed(NamedTuple):
    """A key, or some values of a key, of earlier releases.

    Args:
        values: in the recipe.toml of a run: replacement of each value; None removes the key.
        instead: the fix for other recipes, where it is refused.
    """

    values: Mapping[Any, Any]
    instead: str


REMOVED = {
    "log.sample_keys": Removed({False: None, True: None}, "log.trace records the images of every step"),
    "machine.attention": Removed({"mixed": "math"}, "set 'math' or 'fused', or leave it out"),
    "machine.linear": Removed(dict.fromkeys(("auto", "torch", "onednn")), "torch multiplies; leave it out"),
    "machine.sharding": Removed({"zero1": "none"}, "set 'fsdp', or 'hsdp' on several machines"),
    "vtab.light": Removed({False: None, True: None}, "`vitctl probe` scores frozen features"),
    "machine.engine": Removed({"onnxruntime": None}, "to run an ONNX file in OpenVINO, open it there"),
}


def _uneven_problems(loss: Loss, data: TrainImages) -> tuple[tuple[object, str], ...]:
    """Return where class weights or balanced sampling make no sense, for `Section._refusing`."""
    is_masked, is_weighted = loss.name == "masked_patch", loss.class_weights != "none"
    other = "data.mixture" if data.mixture else "loss.name = 'masked_patch'"
    return (
        (
            data.sampling == "balanced" and is_masked and not is_weighted,
            "data.sampling = 'balanced' draws by label, and masked_patch uses none; leave it out",
        ),
        (
            is_weighted and (is_masked or data.mixture),
            f"loss.class_weights weighs images by the labels of one source, which {other} does not have; "
            f"leave one of them out",
        ),
        (
            is_weighted and data.sampling == "balanced",
            "loss.class_weights and data.sampling = 'balanced' correct uneven classes twice; leave one of "
            "them out",
        ),
    )


_DROPOUT = (
    "dropout while fine-tuning, 0 to below 1; as_stored: the value stored with the weights, "
    "0 where there is none"
)
_DROP_PATH = (
    "chance of dropping the last layer's branches while fine-tuning, 0 to below 1; as_stored: as for dropout"
)
_ROTARY_RESCALE = (
    "rotary positions: in training all coordinates are multiplied by one number from 1 / this to this, drawn "
    "for each forward pass; 2 in DINOv3's and transformers' code; 1: off, as in timm"
)
_DIVIDED = "an inference: Table 5 suggests as_stored, uncertainty-baselines suggests 0"


class Recipe(Section):
    """The keys of every recipe."""

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
    known: Known = Known()

    @property
    def needs_labels(self) -> bool:
        """Return whether the training uses labels: masked patch prediction does not. Paper: Section 4.6"""
        return self.loss.name != "masked_patch"


class Pretrain(TrainRecipe):
    """`vitctl pretrain`"""

    job: Literal["pretrain"]
    model: Model
    data: PretrainImages = PretrainImages()
    masked_patch: MaskedPatch = MaskedPatch()
    machine: ShardedMachine = ShardedMachine()
    fewshot_probe: FewshotProbe = FewshotProbe()

    @model_validator(mode="after")
    def _no_idle_section(self) -> Self:
        is_masked, name = self.loss.name == "masked_patch", self.loss.name
        return self._refusing(
            (
                not is_masked and self.masked_patch != MaskedPatch(),
                f"[masked_patch] does nothing for loss.name = '{name}'; leave it out",
            ),
            (
                is_masked and (self.data.mixup_alpha or self.data.cutmix_alpha),
                "loss.name = 'masked_patch' has no targets to blend; leave out data.mixup_alpha and "
                "data.cutmix_alpha",
            ),
            *_uneven_problems(self.loss, self.data),
            (
                is_masked and self.evaluation.metric == "loss",
                "evaluation.metric = 'loss' is of labels, and loss.name = 'masked_patch' uses none; leave it "
                "out",
            ),
            (
                is_masked and self.data.random_erasing,
                "loss.name = 'masked_patch' would predict the noise of data.random_erasing; leave it out",
            ),
        )

    def network(self, num_classes: int) -> Config:
        """Return the network of [model] for n classes; masked patch prediction sets its outputs by target.

        Raises RecipeError if the named model's family lacks a field that is set.
        """
        name, data = self.model.name, self.data
        fields = self.model.model_dump(exclude={"name", "pre_logits"}, exclude_none=True)
        num_classes = num_classes if self.needs_labels else 0
        config = variant(name, image_size=data.image_size, num_classes=num_classes, **fields)
        if self.needs_labels and not self.model.pre_logits:
            return config
        if not isinstance(config, ViTConfig):
            raise RecipeError(
                f"model.name = '{name}'", "only a ViT has pre-logits or predicts masked patches"
            )
        if self.needs_labels:
            return replace(config, representation_size=config.hidden_size)
        refuse(
            RecipeError,
            (
                (data.mean, data.std) != ((0.5,) * 3, (0.5,) * 3),
                "loss.name = 'masked_patch'",
                "its targets need pixels in the range -1..1",
                "leave data.mean and data.std at 0.5",
            ),
            (
                type(config) is not ViTConfig,
                f"model.name = '{name}'",
                "masked patches are predicted by a plain ViT, e.g. B/16",
            ),
        )
        return MaskedPatchConfig(**vars(config), target=self.masked_patch.target)


class TransferRecipe(TrainRecipe):
    """A job that continues from pre-trained weights."""

    data: TrainImages | VtabImages
    weights: StartWeights = StartWeights()
    optimizer: LayerRates
    loss: FinetuneLoss
    dropout: Rate = knob(0.0, _DROPOUT, source=_DIVIDED)
    drop_path: Rate = knob(0.0, _DROP_PATH, source="AugReg; not in the paper")
    rotary_rescale: float = knob(1.0, _ROTARY_RESCALE, source="DINOv3", ge=1, le=100)


class Finetune(TransferRecipe):
    """`vitctl finetune`"""

    job: Literal["finetune"]
    data: TrainImages = TrainImages()
    machine: ShardedMachine = ShardedMachine()
    schedule: FittedSchedule = FittedSchedule()
    sweep: LrSweep = LrSweep()
    finetune: Repeats = Repeats()
    lora: LoRA = LoRA()
    distillation: Distillation = Distillation()

    @model_validator(mode="after")
    def _sound(self) -> Self:
        taught, frozen = self.distillation, self.finetune.freeze
        return self._refusing(
            (
                self.lora.rank and self.weights.initialise == "random",
                "[lora] freezes the body, and weights.initialise = 'random' leaves nothing worth freezing; "
                "leave one of them out",
            ),
            (
                self.lora.rank and self.machine.sharding_dtype == "bf16",
                "machine.sharding_dtype = 'bf16' gathers weights that adapters are merged into in float32; "
                "leave it out with [lora]",
            ),
            (
                self.lora.rank and frozen != "none",
                f"finetune.freeze = '{frozen}': [lora] freezes all but adapters and head; "
                f"leave it out, and choose their blocks with lora.blocks",
            ),
            (
                taught.teacher and taught.kind != "features" and self.loss.name != "softmax",
                f"distillation.kind = '{taught.kind}' compares classes that exclude each other; set "
                f"loss.name = 'softmax', or distillation.kind = 'features'",
            ),
            (
                taught.kind == "features" and frozen == "backbone",
                "distillation.kind = 'features' teaches the backbone, which finetune.freeze = 'backbone' "
                "freezes; leave one of them out",
            ),
            (
                frozen != "none" and self.weights.initialise == "random",
                f"finetune.freeze = '{frozen}' would keep random weights; set finetune.freeze "
                f"= 'none' or weights.initialise = 'pretrained'",
            ),
            (
                frozen == "backbone" and self.optimizer.layer_decay != 1,
                "optimizer.layer_decay does nothing for the head, all that finetune.freeze = 'backbone' "
                "trains; leave it out",
            ),
            (
                self.sweep.lrs and self.data.synthetic,
                "data.synthetic has no labels to choose a learning rate by; set sweep.lrs = []",
            ),
            (
                len(self.finetune.seeds) > 1 and (self.data.synthetic or not self.data.eval_split),
                "finetune.seeds gives a mean of accuracies, and there is nothing to score; set "
                "data.eval_split",
            ),
            *_uneven_problems(self.loss, self.data),
            (
                self.finetune.head in ("fewshot", "as_stored") and self.weights.initialise == "random",
                f"finetune.head = '{self.finetune.head}' needs trained features, and weights.initialise = "
                f"'random' has none; set finetune.head = 'zero'",
            ),
            (
                self.finetune.head == "fewshot" and self.data.synthetic,
                "data.synthetic has no labels to solve a head for; set finetune.head = 'zero'",
            ),
        )


class FrozenRecipe(SeededRecipe):
    """A job that reads the representations of a frozen network."""

    weights: StartWeights = StartWeights()
    machine: NetworkMachine = NetworkMachine()
    data: FewshotImages = FewshotImages()
    evaluation: Scoring = Scoring()

    @property
    def classifier(self) -> FewShot | Probing:
        """[fewshot] or [probe]: the classifier on the representations."""
        return getattr(self, self.job)  # type: ignore[no-any-return]


class Probe(FrozenRecipe):
    """`vitctl probe`"""

    job: Literal["probe"]
    data: ProbeImages = ProbeImages()
    probe: Probing = Probing()
    known: Known = Known()


class Fewshot(FrozenRecipe):
    """`vitctl fewshot`"""

    job: Literal["fewshot"]
    fewshot: FewShot = FewShot()

    @model_validator(mode="after")
    def _others_to_choose_by(self) -> Self:
        return self._refusing(
            (
                self.fewshot.choose_l2 == "leave_self_out" and len(self.data.datasets) < 2,
                "choose_l2 = 'leave_self_out' needs two data sets or more in data.datasets",
            ),
        )


class Vtab(TransferRecipe):
    """`vitctl vtab`"""

    job: Literal["vtab"]
    data: VtabImages = VtabImages()
    vtab: Suite = Suite()

    @model_validator(mode="after")
    def _keeps_the_protocol(self) -> Self:
        return self._refusing(
            (
                self.vtab.suite == "mini" and self.data.path,
                f"data.path = '{self.data.path}' is not read: suite 'mini' makes its own images; leave it "
                f"out",
            ),
            (
                not self.schedule.total_steps,
                "the tasks of vtab are trained for one number of steps: set schedule.total_steps",
            ),
            (
                self.evaluation.select_best,
                "evaluation.select_best would choose a checkpoint by the test images, the only ones that a "
                "task of vtab scores",
            ),
            (
                self.loss.class_weights != "none" or self.evaluation.metric != "accuracy",
                "loss.class_weights and evaluation.metric would leave the protocol of vtab; leave them out",
            ),
        )


def rates_of(recipe: Finetune | Vtab, stored: Config) -> dict[str, float]:
    """Return a fine-tuning run's dropout and drop_path, with stored values, and rotary_rescale if on."""
    wanted = {"dropout": recipe.dropout, "drop_path": recipe.drop_path}
    rates = {
        name: float(getattr(stored, name, 0.0) if rate == "as_stored" else rate)
        for name, rate in wanted.items()
    }
    return rates | ({"rotary_rescale": recipe.rotary_rescale} if recipe.rotary_rescale > 1 else {})


def lora_of(recipe: Recipe) -> LoRA:
    return recipe.lora if isinstance(recipe, Finetune) else LoRA()


def frozen_places(recipe: Pretrain | Finetune | Vtab, config: Config) -> int:
    """Return the last `place` of a network that the recipe freezes; -1: none.

    Raises RecipeError if the network has no such part, or no layers to decay the learning rate over.
    """
    of_transformer = isinstance(config, ViTConfig)
    if isinstance(recipe, Finetune) and recipe.finetune.fresh_norm:
        with_fresh_norm(config)  # raises where there is no place for one
    if not isinstance(recipe, Pretrain) and recipe.optimizer.layer_decay != 1 and not of_transformer:
        raise RecipeError(
            "optimizer.layer_decay numbers the blocks of a Transformer, and a ResNet has none",
            fix="leave it out",
        )
    if lora_of(recipe).rank:  # the blocks before the first adapter need no backward pass
        return min(lora_of(recipe).blocks, default=0)
    freeze = recipe.finetune.freeze if isinstance(recipe, Finetune) else "none"
    if freeze in ("none", "backbone"):
        return -1 if freeze == "none" else (config.depth if isinstance(config, ViTConfig) else 0) + 2
    if not isinstance(config, ViTConfig):
        raise RecipeError(
            f"finetune.freeze = '{freeze}' is for a Transformer, and this is a ResNet",
            fix="set finetune.freeze = 'backbone'",
        )
    count = 0 if freeze == "embedding" else int(freeze.split()[0])
    if count > config.depth:
        raise RecipeError(
            f"finetune.freeze = '{freeze}'",
            f"the network has {config.depth} blocks",
            "freeze so many or fewer",
        )
    return count


def rates_in_words(recipe: Finetune | Vtab, rates: Mapping[str, float]) -> str:
    """Return the rates as text, marking those stored with the weights."""
    stored = {"dropout": recipe.dropout == "as_stored", "drop_path": recipe.drop_path == "as_stored"}
    return ", ".join(
        f"{name} {rate:g}{' as stored' if stored.get(name) else ''}" for name, rate in rates.items()
    )


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
    def _accuracy_needs_images(self) -> Self:
        precision = self.export.precision
        return self._refusing(
            (
                precision != "float32" and not (self.data.path or self.data.dataset),
                f"export.precision = '{precision}' is proven by its accuracy on images: give some with "
                f"--check-data",
            ),
            (
                self.machine.device == "cuda" or self.machine.precision not in ("auto", "float32"),
                "export computes on the CPU in float32; leave out machine.device and machine.precision. "
                "--fp16 and --int8 choose the numbers of an ONNX file",
            ),
        )


WeightsRecipe = Evaluate | ExportRecipe | FrozenRecipe | Finetune | Vtab
JOBS: dict[str, type[Recipe]] = {
    "pretrain": Pretrain,
    "finetune": Finetune,
    "fewshot": Fewshot,
    "probe": Probe,
    "vtab": Vtab,
    "evaluate": Evaluate,
    "export": ExportRecipe,
}
