"""The typed, frozen tables of a recipe. `recipes explain` prints each field's description, unit and source.

Every field here is read by a job; a test checks this.
"""

import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from vitctl.errors import refuse
from vitctl.models.variants import LORA_TARGETS
from vitctl.models.weights.meta import HALF, LARGEST, SMALLEST
from vitctl.models.weights.names import full_address
from vitctl.recipe.export_formats import (
    FORMATS,
    GRAPHS,
    OPSET,
    OPSETS,
    RESIZING,
    check_onnx,
    check_options,
    check_push,
    formats_in_words,
)
from vitctl.system.address import check_local

MOST_NUMBER = 10**12
UNSET = "unset"  # stands for null, which TOML lacks


def _tuple(value: Any) -> Any:
    """Convert a TOML array: frozen sections hold tuples."""
    return tuple(value) if isinstance(value, list) else value


def _several(value: Any) -> Any:
    """Accept one value for a list of it, as typed after --set: log.trackers=tensorboard."""
    return (value,) if isinstance(value, str | int | float) else _tuple(value)


def _numbers(value: Any) -> Any:
    """Accept comma-separated numbers, as fewshot.shots=1,5, which are not TOML and arrive as a string."""
    if not isinstance(value, str):
        return _several(value)
    try:
        return tuple(float(part) if set(part) & set(".eE") else int(part) for part in value.split(","))
    except ValueError:
        return value


def _strengths(values: tuple[float, ...]) -> tuple[float, ...]:
    """Check colour jitter strengths; a single number applies to brightness, contrast and saturation."""
    values = values * 3 if len(values) == 1 else values
    if len(values) not in (0, 3, 4) or any(value < 0 for value in values) or max(values[3:], default=0) > 0.5:
        raise ValueError("should be one strength, three or four of 0 or more, the fourth (hue) at most 0.5")
    return values if any(values) else ()


def _range(values: tuple[float, float]) -> tuple[float, float]:
    """Check a range, the smaller number first."""
    if not 0 < values[0] <= values[1]:
        raise ValueError(f"{list(values)} should be two numbers above 0, the smaller first")
    return values


Ints = Annotated[tuple[int, ...], BeforeValidator(_numbers)]
LocalPath = Annotated[str, AfterValidator(partial(check_local, "", error=ValueError))]
Floats = Annotated[tuple[float, ...], BeforeValidator(_numbers)]
Names = Annotated[tuple[str, ...], BeforeValidator(_several)]
Jitter = Annotated[tuple[float, ...], AfterValidator(_strengths), BeforeValidator(_numbers)]
Triple = Annotated[tuple[float, float, float], BeforeValidator(_tuple)]
Pair = Annotated[tuple[float, float], AfterValidator(_range), BeforeValidator(_numbers)]


def knob(default: Any, what: str, *, unit: str = "", source: str = "", **limits: Any) -> Any:
    """Define one recipe value: default (`...` if required), description, unit, and the paper's section."""
    return Field(default, description=what, json_schema_extra={"unit": unit, "source": source}, **limits)


class Section(BaseModel):
    """A table of a recipe: frozen, strictly typed, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _none_in_toml(cls, given: Any) -> Any:
        """Convert `UNSET`, with which --set undoes a recipe's value."""
        if not isinstance(given, dict) or UNSET not in given.values():
            return given
        may_be = {name for name, field in cls.model_fields.items() if field.default is None}
        return {key: None if value == UNSET and key in may_be else value for key, value in given.items()}

    @field_validator("*")
    @classmethod
    def _is_bounded(cls, value: Any, info: ValidationInfo) -> Any:
        """Check that steps, bytes and operations fit into a float; a learning rate may be far larger."""
        most = 1e200 if info.field_name == "lr" else MOST_NUMBER
        numbers = (
            value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,)
        )
        for number in numbers:
            if isinstance(number, int | float) and abs(number) > most:
                raise ValueError(f"should be at most {most:,}")
        return value

    def _sets(self, *keys: str) -> str:
        """Return those of `keys` that are not at their default, for a message."""
        return ", ".join(key for key in keys if getattr(self, key) != type(self).model_fields[key].default)

    def _refusing(self, *problems: tuple[object, str]) -> Self:
        """Return this table, or raise ValueError with the text of the first problem that applies."""
        refuse(ValueError, *problems)
        return self


class Model(Section):
    """[model] The network. Its image size is data.image_size, its number of classes comes from the data.

    Unset fields default to the named model's value; fields that its family lacks cannot be set.
    """

    name: str = knob(
        ...,
        "a known model: B/16, L/32, H/14, Ti/4, R50+B/32, R152x2, Axial-B/16, AxialR50, ...",
        source="Tables 1, 6; D.6",
    )
    patch_size: int | None = knob(None, "side of a patch", unit="pixels", source="D.2", ge=1)
    hidden_size: int | None = knob(
        None, "width D of the tokens", unit="features", source="Table 1, D.2", ge=1
    )
    depth: int | None = knob(None, "number of layers", source="Table 1, D.2", ge=1)
    mlp_size: int | None = knob(None, "width of the MLP", unit="features", source="Table 1, D.2", ge=1)
    num_heads: int | None = knob(None, "number of attention heads", source="Table 1", ge=1)
    classifier: Literal["token", "gap", "patches", "token_patches", "attention"] | None = knob(
        None,
        "token: class token; gap: average of all tokens, without a class token; patches: of the patches "
        "beside one; token_patches: both joined; attention: a learned query",
        source="3.1, D.3; DINOv2; SigLIP",
    )
    pre_logits: bool = knob(
        False, "hidden layer of width D with tanh before the head, in pre-training only", source="3.1, D.3"
    )
    position_embedding: Literal["learned", "none", "2d", "relative", "relative_bias", "sincos"] | None = knob(
        None,
        "learned: 1-D in raster order; 2d: separate rows and columns; relative: inside the attention; "
        "relative_bias: a table added to its logits; sincos: a fixed table of both axes",
        source="D.4, Table 8; BEiT; big_vision",
    )
    position_at: Literal["stem", "every_layer", "every_layer_shared"] | None = knob(
        None, "where position embeddings are added", source="D.4, Table 8"
    )
    dropout: float | None = knob(
        None,
        "after every dense layer but q, k, v, and after the position embedding",
        source="Table 3, B.1",
        ge=0,
        lt=1,
    )
    drop_path: float | None = knob(
        None, "stochastic depth: chance of dropping the last layer's branches", source="AugReg", ge=0, lt=1
    )
    gelu: Literal["tanh", "erf", "quick"] | None = knob(
        None, "form of the activation; quick: x sigmoid(1.702 x)", source="authors' code: tanh; CLIP"
    )
    norm_eps: float | None = knob(
        None, "added to the variance in LayerNorm", source="authors' code: 1e-6", gt=0, lt=1
    )
    norm_at: Literal["tokens", "pooled"] | None = knob(
        None, "the last norm: of all tokens, or of their mean", source="MAE, BEiT"
    )
    norm_pre: bool | None = knob(None, "a norm before the first layer", source="CLIP")
    patch_bias: bool | None = knob(None, "whether the patch embedding has a bias", source="CLIP: false")
    position_class_row: bool | None = knob(
        None, "whether the class token has a learned position", source="DeiT III: false"
    )
    registers: int | None = knob(
        None, "tokens beside the class token, without position, that no head reads", source="DINOv2", ge=0
    )
    layer_scale: float | None = knob(
        None, "initial scale of each branch, learned for each channel; 0: off", source="DeiT III: 1e-4", ge=0
    )
    mlp: Literal["gelu", "swiglu"] | None = knob(
        None, "swiglu: mlp_size is the width of the gate, and of what it multiplies", source="DINOv2, EVA-02"
    )
    mlp_norm: bool | None = knob(None, "swiglu: a norm before its last matrix", source="EVA-02")
    qkv_bias: Literal["qkv", "qv", "none"] | None = knob(
        None, "which of query, key and value have a bias", source="BEiT: qv"
    )
    rotary: Literal["none", "dinov3", "eva"] | None = knob(
        None, "rotary positions by the rule of DINOv3 or of EVA-02", source="DINOv3; EVA-02"
    )
    rotary_rescale: float | None = knob(
        None, "see rotary_rescale of finetune", source="DINOv3: 2", ge=1, le=100
    )
    head_bias: float | None = knob(
        None, "initial bias of the classification head", source="authors' code, issue 2"
    )
    version: Literal["v1", "v2"] | None = knob(
        None,
        "ResNets: norm after each convolution (v1) or before (v2, the public BiT weights)",
        source="not stated; v1 is an inference from copies of the authors' JFT baselines and the hybrids",
    )
    width: int | None = knob(
        None, "ResNets and hybrids: channels of the root, 64 times the factor in the name", source="4.1", ge=1
    )
    stage_depths: Ints | None = knob(None, "ResNets and hybrids: units in each stage", source="4.1")
    num_groups: int | None = knob(
        None, "ResNets and hybrids: groups of every GroupNorm", source="authors' code: 32", ge=1
    )


class MaskedPatch(Section):
    """[masked_patch] Self-supervision by loss.name = 'masked_patch': predict corrupted patches."""

    target: Literal["mean_color", "downsized", "pixels"] = knob(
        "mean_color",
        "what is predicted: 3-bit mean colour, that of a 4x4 version, or the pixels (L2)",
        source="B.1.2",
    )
    corrupted: float = knob(
        0.5,
        "share of the patches corrupted: 80 % masked, 10 % replaced, 10 % kept",
        source="B.1.2",
        gt=0,
        le=1,
    )


def _rate(value: Any) -> Any:
    """Check a rate, with one error message for both forms, number and text."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1
    if not is_number and value != "as_stored":
        raise ValueError(f"{value!r} should be a number from 0 to below 1, or 'as_stored'")
    return value


Rate = Annotated[float | Literal["as_stored"], BeforeValidator(_rate)]


def weights_choice(text: str) -> str:
    """Return the text if it is valid for --weights, or raise ValueError."""
    if text and not re.fullmatch("last|best|ema|model|[0-9]{1,18}", text):
        raise ValueError(f"{text!r} should be last, best, ema, model or the number of a step")
    return text


_MOST_COLOUR = 10.0


def colour_problems(
    mean: tuple[float, ...], std: tuple[float, ...]
) -> tuple[tuple[bool, str], tuple[bool, str]]:
    """Return why images cannot be normalised by these values in float32, for `Section._refusing`."""
    return (
        (
            not all(abs(value) <= LARGEST for value in (*mean, *std)) or min(std) < SMALLEST,
            f"mean = {list(mean)}, std = {list(std)} should be finite in float32, and std above 0 in it",
        ),
        (
            max(*mean, *std) > _MOST_COLOUR,
            f"mean = {list(mean)}, std = {list(std)} should be of pixels from 0 to 1; divide those of 0 to "
            f"255 by 255",
        ),
    )


_GIVEN = "if the weights do not record it, or record it wrongly; unset: as recorded, or assumed and shown"


class WeightsSource(Section):
    """[weights] The source of a job's pre-trained weights."""

    source: Annotated[str, AfterValidator(full_address)] = knob(
        "newest",
        "a run folder, a checkpoint folder, a weights file, an https://, hf:// or gs:// address, a name of "
        "`vitctl weights`, timm:NAME, hf:OWNER/NAME; or 'newest': the newest finished run in ./runs, of any "
        "training for evaluate and export, of pre-training for the others",
    )
    which: Annotated[str, AfterValidator(weights_choice)] = knob(
        "",
        "which weights of a run: last, best (by its accuracies), a step, ema (the Polyak average), model "
        "(not averaged); '': the "
        "best of a run with evaluation.select_best, else the last, averaged where there is an average",
        source="4.1, 4.3",
    )
    pinned: str = knob(
        "",
        "the checkpoint of a run that was taken when this run started: how it was chosen, its step and the "
        "digest of its state; vitctl writes it, and resumes and replays with it",
        pattern=r"^((last|best|step):[0-9]{1,18}:[0-9a-f]{64})?$",
    )
    model: str = knob("", "name of the model, for what a foreign file's shapes cannot tell; '': as detected")
    mean: Triple | None = knob(None, f"mean of the colours, {_GIVEN}")
    std: Triple | None = knob(None, f"standard deviation of the colours, {_GIVEN}")
    preprocess: Literal["", "imagenet", "clip", "half"] = knob(
        "", f"mean and std by name, {_GIVEN}; half: 0.5 each", source="timm.data.constants"
    )
    classifier: Literal["", "token", "gap", "patches", "token_patches"] = knob(
        "",
        "what of the network's output feeds the new head, instead of what the weights record: token: the "
        "class token; patches: the mean of the patches beside one; token_patches: both joined, as DINOv2's "
        "and DINOv3's linear evaluation; gap: the mean, without a class token. A stored head is dropped",
        source="DINOv2, DINOv3, MAE",
    )
    gelu: Literal["tanh", "erf", "quick"] | None = knob(None, f"form of the activation, {_GIVEN}")
    norm_eps: float | None = knob(None, f"added to the variance in LayerNorm, {_GIVEN}", gt=0, lt=1)
    position_resize: (
        Literal["zoom", "bicubic", "bicubic_antialias", "bicubic_aligned", "bicubic_offset"] | None
    ) = knob(None, f"how the position embedding is resized to another image size, {_GIVEN}")
    licence: str = knob(
        "",
        "licence of the weights, if none is stated with them: shown, and written into results and exports",
        max_length=100,
        pattern=r"^[^\x00-\x1f]*$",
    )

    @model_validator(mode="after")
    def _values_stay_numbers(self) -> Self:
        return self._refusing(
            *colour_problems(self.mean or HALF, self.std or HALF),
            (
                self.preprocess and (self.mean or self.std),
                f"preprocess = '{self.preprocess}' sets mean and std; leave them out",
            ),
        )


class StartWeights(WeightsSource):
    """[weights] of the jobs that measure the effect of pre-training."""

    initialise: Literal["pretrained", "random"] = knob(
        "pretrained", "'random' takes only the architecture and starts from scratch: the baseline"
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerRow:
    """An optimizer for `optimizer.name`.

    Args:
        knobs: keys of [optimizer] that not every optimizer has.
        slots: numbers that it keeps for each weight.
        builder: `module:function` that takes parameters and [optimizer], and returns a torch optimizer. It
            creates its state before the first step, so that checkpoints can be loaded, and skips a step whose
            `found_inf` is set.
        defaults: values of keys that differ from those of [optimizer].
    """

    name: str
    what: str
    knobs: tuple[str, ...]
    slots: int
    builder: str
    defaults: tuple[tuple[str, float], ...] = ()


_OPTIMIZER = "vitctl.engine.optimizer"
OPTIMIZERS = {
    row.name: row
    for row in (
        OptimizerRow(
            name="adam",
            what="in the AdamW form",
            knobs=("beta1", "beta2", "eps"),
            slots=2,
            builder=f"{_OPTIMIZER}:adam",
        ),
        OptimizerRow(
            name="sgd",
            what="with momentum",
            knobs=("momentum", "nesterov"),
            slots=1,
            builder=f"{_OPTIMIZER}:momentum_sgd",
        ),
        OptimizerRow(
            name="lamb",
            what="Adam whose update of each tensor has the norm of that tensor (You et al. 2020; DeiT III)",
            knobs=("beta1", "beta2", "eps"),
            slots=2,
            builder=f"{_OPTIMIZER}:lamb",
            defaults=(("eps", 1e-6), ("clip_norm", 1.0)),  # timm
        ),
    )
}
if TYPE_CHECKING:
    OptimizerName = str
else:
    OptimizerName = Annotated[
        Literal[tuple(OPTIMIZERS)],
        BeforeValidator(
            lambda name: name.lower().replace("adamw", "adam") if isinstance(name, str) else name
        ),
    ]


class Optimizer(Section):
    """[optimizer] AdamW over every parameter, SGD with momentum, or another of `OPTIMIZERS`."""

    name: OptimizerName = knob(
        ..., "; ".join(f"{row.name}: {row.what}" for row in OPTIMIZERS.values()), source="4.1"
    )
    lr: float = knob(..., "base learning rate", source="Tables 3, 4", gt=0)
    weight_decay: float = knob(
        0.0,
        "on every parameter, or those of decay_on; adam: decoupled, p -= lr_t * weight_decay * p; sgd: "
        "coupled, gradient += weight_decay * p before "
        "the momentum, as torch.optim.SGD and BiT; lamb: update += weight_decay * p before the trust ratio",
        source="Table 3; D.1; BiT",
        ge=0,
    )
    decay_on: Literal["all", "matrices", "matrices_and_relative"] = knob(
        "all",
        "what weight_decay is on. matrices: not on biases, norms and other vectors, class token, registers, "
        "tables of positions; matrices_and_relative: also on tables of relative positions",
        source="authors' code: all; timm, MAE: matrices; BEiT: matrices_and_relative",
    )
    beta1: float = knob(0.9, "adam, lamb: decay of the first moment", source="Section 4.1", ge=0, lt=1)
    beta2: float = knob(0.999, "adam, lamb: decay of the second moment", source="Section 4.1", ge=0, lt=1)
    eps: float = knob(
        1e-8,
        "adam, lamb: added to the square root of the second moment; if not set, 1e-6 for lamb",
        source="authors' code (flax); timm",
        gt=0,
    )
    momentum: float = knob(0.9, "sgd: momentum", source="Section 4.1", ge=0, lt=1)
    nesterov: bool = knob(
        False,
        "sgd: Nesterov momentum, the step is gradient + momentum * buffer; timm's sgd is that, its momentum "
        "is not",
        source="torch.optim.SGD; timm",
    )
    clip_norm: float = knob(
        0.0,
        "gradients are scaled down to this global norm; 0: off; if not set, 1 for lamb",
        source="Tables 3, 4; timm",
        ge=0,
    )
    clip_value: float = knob(
        0.0,
        "each number of the gradient is cut to this, on either side of 0; 0: off",
        source="torch's clip_grad_value_; timm's --clip-mode value",
        ge=0,
    )

    @model_validator(mode="before")
    @classmethod
    def _has_own_defaults(cls, values: Any) -> Any:
        row = OPTIMIZERS.get(str(values.get("name"))) if isinstance(values, dict) else None
        return {**dict(row.defaults), **values} if row else values

    @model_validator(mode="after")
    def _no_idle_knob(self) -> Self:
        changed = {
            key for key, field in type(self).model_fields.items() if getattr(self, key) != field.default
        }
        for row in OPTIMIZERS.values():
            idle = [key for key in row.knobs if key in changed and key not in OPTIMIZERS[self.name].knobs]
            if idle:
                raise ValueError(
                    f"{', '.join(idle)} belongs to {row.name} and does nothing for {self.name}; leave it out"
                )
        return self._refusing(
            (
                self.decay_on != "all" and not self.weight_decay,
                "decay_on does nothing without optimizer.weight_decay; set it, or leave it out",
            ),
            (
                self.nesterov and not self.momentum,
                "nesterov does nothing without optimizer.momentum; set it, or leave it out",
            ),
            (
                self.clip_value and self.clip_norm,
                f"clip_value = {self.clip_value:g} and clip_norm = {self.clip_norm:g} both clip gradients; "
                f"set optimizer.clip_norm = 0, or leave clip_value out",
            ),
        )


class LayerRates(Optimizer):
    """[optimizer] of `finetune` and `vtab`, where layers may learn at different rates."""

    lr_batch: int = knob(
        0,
        "the batch that lr is for: at another batch, lr of a recipe changes with it, in proportion for sgd "
        "and by its root for the others; a rate that you set stays, and so do end_lr and warmup_lr. A "
        "shipped recipe's batch_size is then the largest, and 300 images get 32; 0: off",
        unit="images",
        source="timm: --lr-base-size, --lr-base-scale",
        ge=0,
    )
    layer_decay: float = knob(
        1.0,
        "the rate of a layer is this times that of the next one, from the head down to the embedding; 1: off",
        source="BEiT, MAE; not in the paper",
        gt=0,
        le=1,
    )
    layer_decay_numbering: Literal["timm", "mae"] = knob(
        "timm", "the last norm has the rate of the last block (timm) or of the head (mae)", source="timm; MAE"
    )
    head_lr_multiplier: float = knob(
        1.0,
        "the rate of the new head is this times that of the rest",
        source="not in the paper",
        gt=0,
    )

    @model_validator(mode="after")
    def _numbers_layers(self) -> Self:
        return self._refusing(
            (
                self.layer_decay_numbering != "timm" and self.layer_decay == 1,
                "layer_decay_numbering does nothing without optimizer.layer_decay; set it, or leave it out",
            ),
        )


class Schedule(Section):
    """[schedule] Batch, length and learning rate over time."""

    batch_size: int = knob(
        ...,
        "global batch, whatever the number of processes",
        unit="images",
        source="Tables 3, 4",
        ge=1,
        lt=2**30,
    )
    total_steps: int = knob(0, "length in updates; exactly one of total_steps and total_epochs", unit="steps",
                            source="Table 4", ge=0)  # fmt: skip
    total_epochs: float = knob(0.0, "length in passes over the training split, rounded down to "
                                    "whole steps", unit="epochs",
                               source="Table 3", ge=0)  # fmt: skip
    warmup_steps: int = knob(
        0, "linear warm-up; the very first update has learning rate warmup_lr; -1: a tenth of the run, "
           "500 at most, unless warmup_epochs is set", unit="steps",
        source="Table 3", ge=-1,
    )  # fmt: skip
    warmup_epochs: float = knob(
        0.0,
        "linear warm-up in passes over the training split, rounded down to whole steps, instead of "
        "warmup_steps; 0: off",
        unit="epochs",
        source="timm, MAE",
        ge=0,
    )
    warmup_lr: float = knob(
        0.0, "learning rate that the warm-up starts from; DeiT: 1e-6", source="Table 3: 0; timm, DeiT", ge=0
    )
    decay: Literal["linear", "cosine", "steps", "constant"] = knob(
        "cosine",
        "from lr down to end_lr (steps: divided by ten at each of drops)",
        source="Tables 3, 4; D.1",
    )
    drops: Floats = knob(
        (), "steps: shares of the run after which the rate is divided by ten", source="BiT; D.1"
    )
    end_lr: float = knob(
        0.0,
        "linear and cosine: the last learning rate; MAE: 1e-6",
        source="authors' code, issue 2; MAE, DeiT: min_lr",
        ge=0,
    )
    lanes: int = knob(
        0, "parts of the global batch whose gradients are added in a fixed order: then weights are the same "
           "bits on any number of "
        "processes, whatever machine.micro_batch; with data.order = 'windowed' each reads shards of its "
        "own; 0: off", ge=0, le=4096,
    )  # fmt: skip
    leaf_images: int = knob(
        32, "with lanes: images that go through the model together; lanes are cut into so many leaves, and "
            "as many processes "
        "can take part", unit="images", ge=1,
    )  # fmt: skip
    threads: int = knob(
        1,
        "with lanes: threads of each process on a CPU, where their number changes the last bits",
        ge=1,
        le=1024,
    )

    _needs_length: ClassVar[bool] = True

    @model_validator(mode="after")
    def _sound(self) -> Self:
        given = bool(self.total_steps) + bool(self.total_epochs)
        return self._refusing(
            (
                given > 1 or (self._needs_length and not given),
                "set exactly one of schedule.total_steps and schedule.total_epochs (0 switches one off)",
            ),
            (
                self.total_steps and self.warmup_steps >= self.total_steps,
                f"warmup_steps = {self.warmup_steps} must be below total_steps = {self.total_steps}; lower "
                f"schedule.warmup_steps, or give --steps {self.total_steps}, which scales the recipe's",
            ),
            (
                self.warmup_steps > 0 and self.warmup_epochs,
                f"warmup_steps = {self.warmup_steps} and warmup_epochs = {self.warmup_epochs:g} both set the "
                f"warm-up; set one of them to 0, e.g. schedule.warmup_epochs = 0",
            ),
            (
                self.warmup_lr and not (self.warmup_steps or self.warmup_epochs),
                f"warmup_lr = {self.warmup_lr:g} does nothing without a warm-up; set "
                f"schedule.warmup_steps or schedule.warmup_epochs, or leave it out",
            ),
            (
                (self.decay == "steps") != bool(self.drops),
                f"decay = '{self.decay}' with drops = {list(self.drops)}: drops need decay = "
                f"'steps', "
                f"e.g. schedule.drops = [0.3, 0.6, 0.9]",
            ),
            (
                list(self.drops) != sorted({drop for drop in self.drops if 0 < drop < 1}),
                f"drops = {list(self.drops)} should be increasing shares between 0 and 1",
            ),
        )


class FittedSchedule(Schedule):
    """[schedule] of `finetune`, where batch size and length may depend on the number of training images."""

    batch_size: int = knob(
        0, "global batch; 0: an eighth of the training images, rounded down to a power of 2, from "
           "8 to 512", unit="images",
        source="Table 4", ge=0, lt=2**30,
    )  # fmt: skip
    total_steps: int = knob(0, "length in updates; with total_epochs 0 too: 20 epochs, from 200 steps "
                               "to 20,000", unit="steps",
                            source="Table 4", ge=0)  # fmt: skip

    _needs_length: ClassVar[bool] = False


def _class_weights(value: Any) -> Any:
    """Check class weights, with one error message for both forms, word and table."""
    numbers = value.values() if isinstance(value, dict) else ()
    is_table = numbers and all(
        isinstance(one, int | float) and not isinstance(one, bool) and 0 < one < MOST_NUMBER
        for one in numbers
    )
    if value not in ("none", "balanced", "sqrt") and not is_table:
        raise ValueError(
            f"{value!r} should be 'none', 'balanced', 'sqrt', or a table of numbers above 0, such as "
            f"{{cat = 2, dog = 0.5}}"
        )
    return value


ClassWeights = Annotated[
    Literal["none", "balanced", "sqrt"] | dict[str, float], BeforeValidator(_class_weights)
]


class Loss(Section):
    """[loss] The loss, computed in float32; `pretrain` can also do without labels."""

    name: Literal["sigmoid", "softmax", "masked_patch"] = knob(
        ...,
        "sigmoid: sum of binary cross-entropies over classes; masked_patch: see [masked_patch]",
        source="issue 34; 3.1; B.1.2",
    )
    label_smoothing: float = knob(
        0.0, "how far targets are from 0 and 1; see loss.smoothing", source="issue 89", ge=0, lt=1
    )
    smoothing: Literal["spread", "per_class"] = knob(
        "spread",
        "spread: label_smoothing is a share of the target, spread evenly over all classes. per_class, only "
        "for the sigmoid "
        "loss: the target is 1 - label_smoothing for each label, label_smoothing for every other class",
        source="authors' configurations: per_class",
    )
    class_weights: ClassWeights = knob(
        "none",
        "weight of an image in the loss, by its label. balanced: images / (classes * images of the class); "
        "sqrt: its square root; {name = number}: a table, 1 for other classes. Weights have a mean of 1 over "
        "the training images; sqrt and tables are scaled to it. The loss is the mean of weight * loss over "
        "the global batch. It is not divided by the batch's weights as in torch's CrossEntropyLoss, so it "
        "is the same however the batch is divided. MixUp and CutMix blend two weighted losses; label "
        "smoothing changes no weight",
        source="scikit-learn's compute_class_weight('balanced'); not in the paper",
    )

    @model_validator(mode="after")
    def _per_class_is_of_sigmoid(self) -> Self:
        return self._refusing(
            (
                self.smoothing == "per_class" and self.name != "sigmoid",
                f"smoothing = 'per_class' belongs to the sigmoid loss, where classes do not share one "
                f"target; "
                f"for name = '{self.name}' set loss.smoothing = 'spread'",
            ),
        )


class FinetuneLoss(Loss):
    """[loss] The loss to minimise, in float32."""

    name: Literal["sigmoid", "softmax"] = knob(
        ..., "sigmoid: sum of binary cross-entropies over classes", source="issue 34; 3.1"
    )


class Averaging(Section):
    """[averaging] Polyak averaging of the weights; the average is scored and stored with the weights."""

    decay: float = knob(
        0.0,
        "ema = decay * ema + (1 - decay) * weights after each step; 0: off. The initial weights keep a "
        "share of "
        "decay ^ steps: 13.5 % after 20,000 steps at 0.9999",
        source="Section 4.1",
        ge=0,
        lt=1,
    )
    debias: bool = knob(
        False, "leave the initial weights out of the average, and rescale the other shares to sum to 1"
    )

    @model_validator(mode="after")
    def _no_idle_knob(self) -> Self:
        return self._refusing(
            (
                self.debias and not self.decay,
                "debias does nothing without an average; set averaging.decay, e.g. to 0.9999, or leave it "
                "out",
            ),
        )


class LoRA(Section):
    """[lora] Low-rank adapters: pairs of small matrices on frozen linear layers train, with the head."""

    rank: int = knob(
        0, "rank r of the adapters; 0: off, every weight is trained", source="LoRA, 4.1", ge=0, le=4096
    )
    alpha: float = knob(
        0.0, "outputs of adapters are multiplied by alpha / rank; 0: by 1", source="LoRA, 4.1", ge=0
    )
    dropout: float = knob(0.0, "dropout of the inputs of adapters in training", source="peft", ge=0, lt=1)
    targets: Names = knob(
        ("q", "v"), f"layers that have adapters: {', '.join(LORA_TARGETS)}", source="LoRA, 4.2"
    )
    blocks: Ints = knob((), "blocks whose layers have adapters, from 0; []: all")

    @model_validator(mode="after")
    def _sound(self) -> Self:
        odd = sorted(set(self.targets) - set(LORA_TARGETS))
        return self._refusing(
            (
                not self.rank and self != type(self).model_construct(),
                "[lora] does nothing without lora.rank; set it, e.g. to 8, or leave the table out",
            ),
            (odd, f"targets names {', '.join(map(repr, odd[:1]))}; choose from {', '.join(LORA_TARGETS)}"),
            (
                not self.targets or len(set(self.targets)) < len(self.targets),
                f"targets = {list(self.targets)} should name each layer once",
            ),
            (
                any(number < 0 for number in self.blocks) or len(set(self.blocks)) < len(self.blocks),
                f"blocks = {list(self.blocks)} should be distinct numbers, 0 or more",
            ),
        )


class Distillation(Section):
    """[distillation] A frozen teacher, which sees the augmented images of the student.

    The loss is (1 - weight) * loss + weight * distillation.
    """

    teacher: Annotated[str, AfterValidator(full_address)] = knob(
        "",
        "weights to learn from: a run, a checkpoint, a weights file or an address; '': off",
        source="Hinton et al. 2015; Beyer et al. 2022",
    )
    kind: Literal["soft", "hard", "features"] = knob(
        "soft",
        "soft: temperature^2 * KL divergence of the classes' probabilities; hard: cross-entropy with the "
        "teacher's class; features: 1 - cosine of the representations before the head",
        source="soft: Hinton et al. 2015; hard: DeiT; features: DistilBERT",
    )
    weight: float = knob(0.5, "share of the distillation in the loss", source="DeiT", gt=0, le=1)
    temperature: float = knob(
        1.0,
        "kind = 'soft': both networks' logits are divided by it",
        source="Hinton et al. 2015",
        gt=0,
        le=1000,
    )

    @model_validator(mode="after")
    def _nothing_idle(self) -> Self:
        return self._refusing(
            (
                not self.teacher and self != type(self).model_construct(),
                "[distillation] does nothing without distillation.teacher; set it, or leave the table out",
            ),
            (self.teacher == "newest", "teacher = 'newest' may be the student's start; name a run or a file"),
            (
                self.temperature != 1 and self.kind != "soft",
                f"temperature = {self.temperature:g} does nothing for kind = '{self.kind}'; leave it out",
            ),
        )


def _with_ending(name: str, endings: tuple[str, ...]) -> str:
    if name and not name.endswith(endings):
        raise ValueError(f"'{name}' should be the name of a {' or '.join(endings)} file")
    return name


class Scoring(Section):
    """[evaluation] of the jobs that only score."""

    batch_size: int = knob(256, "images in one forward pass of a process", unit="images", ge=1)


class EvaluateScoring(Scoring):
    """[evaluation] of `evaluate`."""

    labels: str = knob(
        "",
        "which labels count as correct: '': the labels of the data; 'real': also the ReaL labels of "
        "ImageNet's validation images, "
        "or the path of their real.json; 'objectnet': any ImageNet class of the object; "
        "'objectnet_restricted': the same "
        "with predictions restricted to ObjectNet's classes",
        source="4.1; ReaL; ObjectNet",
    )
    flip_average: bool = knob(
        False,
        "logits are the mean over each image and its mirror image, for twice the computation",
        source="not in the paper",
    )
    answers: Annotated[LocalPath, AfterValidator(partial(_with_ending, endings=(".csv", ".parquet")))] = knob(
        "",
        "also write the answer to each image to this .csv or .parquet, and suspected labels to "
        "RUN/suspects.csv",
    )
    fit_temperature: bool = knob(
        False,
        "find the temperature that minimises the negative log likelihood of these images, which must not be "
        "those of the training, and write it beside the weights for later predictions",
        source="not in the paper; Guo et al. 2017, Section 4.2",
    )
    thresholds: Annotated[str, AfterValidator(partial(_with_ending, endings=(".csv",)))] = knob(
        "",
        "images with several labels each: the thresholds.csv of an evaluation on other images, such as "
        "train[90%:]; '': a class is predicted from 0.5 on",
    )


class Evaluation(Scoring):
    """[evaluation] Scoring of data.eval_split during and after training."""

    every_steps: int = knob(0, "score every so many steps; 0: only at the end", unit="steps", ge=0)
    select_best: bool = knob(
        False,
        "the best checkpoint by evaluation.metric on data.eval_split represents the run, not the last (needs "
        "checkpoint.keep_best, and "
        "a checkpoint at every score)",
        source="4.3",
    )
    metric: Literal["accuracy", "mean_per_class", "f1", "loss"] = knob(
        "accuracy",
        "number on data.eval_split that chooses the best checkpoint and learning rate, and sums up the run: "
        "accuracy; mean_per_class: mean of the accuracies of the classes with images; f1: mean of the F1 "
        "scores of the classes that occur as labels or predictions, as scikit-learn's macro average; loss: "
        "least mean of loss.name over the images, without label smoothing and class weights",
        source="loss: Hugging Face's eval_loss, timm's validation loss",
    )
    patience: int = knob(
        0,
        "stop after so many scores in a row without a better evaluation.metric; 0: off. Needs every_steps "
        "and select_best",
        unit="scores",
        ge=0,
    )

    @model_validator(mode="after")
    def _patience_keeps_the_best(self) -> Self:
        return self._refusing(
            (
                self.patience and not (self.every_steps and self.select_best),
                f"patience = {self.patience} stops when scores get no better, and the best checkpoint then "
                f"represents the run: set evaluation.select_best = true, checkpoint.keep_best = 1, and "
                f"evaluation.every_steps and checkpoint.every_steps to the same number",
            ),
        )


class Export(Section):
    """[export] A file for other programs, verified before it is kept."""

    to: Names = knob(
        ("onnx", "safetensors"),
        f"formats: {formats_in_words()}",
    )
    file: LocalPath = knob("", "also copy the one exported weights file here")
    batch_sizes: Ints = knob((1, 3, 8), "batch sizes at which the exported file must agree", unit="images")
    include_preprocess: bool = knob(
        False,
        f"{RESIZING}: pre-processing inside the graph; its input is then photographs of any size, uint8 "
        "[B, H, W, 3], one size per batch",
    )
    features: bool = knob(False, f"{GRAPHS}: the representation before the head as a second output, [B, R]")
    flip_average: bool = knob(
        False, f"{GRAPHS}: logits are the mean over an image and its mirror image, computed inside the graph"
    )
    precision: Literal["float32", "float16", "int8"] = knob(
        "float32",
        "onnx, litert (int8): number format of weights and activations; below float32 proven by accuracy on "
        "[data]",
    )
    opset: int = knob(
        OPSET, f"onnx: operator set, {min(OPSETS)} to {max(OPSETS)}; a smaller one for an older runtime"
    )
    max_accuracy_loss: float = knob(
        0.01,
        "largest loss of top-1 accuracy of a file on the images of [data], beside the float32 model",
        unit="share",
        ge=0,
        le=1,
    )
    calibration_images: int = knob(
        128, "onnx in int8: images on which the ranges of activations are measured", unit="images", ge=1
    )
    data_licence: str = knob(
        "", "licence of the training images, for the model card (README.md); '': not known"
    )
    check_images: int = knob(
        256,
        "where the other program resizes images differently: maximum number of images of [data], or of the "
        "run's eval_split, on "
        "which changed predictions are counted; 0: none",
        unit="images",
        ge=0,
    )

    web: bool = knob(
        False,
        "onnx, with include_preprocess: also a page that runs the file in a browser, on a dropped photograph",
    )
    push: str = knob(
        "",
        "also upload the folder of hf, timm or peft to this repository of Hugging Face's hub, "
        "ORGANISATION/NAME, with the token of huggingface_hub",
    )
    public: bool = knob(False, "a repository that push makes is public; else it is private")

    @field_validator("to")
    @classmethod
    def _are_formats(cls, to: tuple[str, ...]) -> tuple[str, ...]:
        unknown = sorted(set(to) - set(FORMATS))
        if unknown or not to:
            names = ", ".join(unknown) or "nothing"
            raise ValueError(f"{names} cannot be written; choose from {', '.join(FORMATS)}")
        return to

    @model_validator(mode="after")
    def _formats_have_options(self) -> Self:
        inside = [key for key in ("include_preprocess", "features", "flip_average") if getattr(self, key)]
        check_options(self.to, self.file, self.precision, inside)
        check_onnx(self.to, self.opset, self.web, inside)
        check_push(self.to, self.push, self.public)
        return self
