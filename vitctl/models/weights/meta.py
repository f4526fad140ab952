"""Metadata of weights: image normalisation, class names, and which values are assumed.

One model for our files and for those of other programs.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from vitctl.errors import CheckpointError, writing
from vitctl.models.variants import BOUNDS, CHOICES, WITH_CLASS_TOKEN, Config
from vitctl.system import limits
from vitctl.system.files import read_json, write_json
from vitctl.system.text import count_text, one_line, same_name

Activation = Literal["softmax", "sigmoid"]
SMALLEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # float32's normal numbers
TEMPERATURE_SUFFIX = ".temperature.json"
HALF = (0.5, 0.5, 0.5)
# Mean and standard deviation of colours by name. Source: timm.data.constants
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
CLIP = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}
COLOURS = {"imagenet": IMAGENET, "clip": CLIP, "half": {"mean": HALF, "std": HALF}}
# Values that weights may not record -> the recipe key that sets each. The one without a dot is read from a
# config.json next to the tensors.
KEYS = {
    "mean": "weights.mean",
    "std": "weights.std",
    "gelu": "weights.gelu",
    "norm_eps": "weights.norm_eps",
    "position_resize": "weights.position_resize",
    "classifier": "weights.classifier",
    "num_heads": "num_heads",
    "eval_method": "data.eval_method",
    "eval_resize": "data.eval_resize",
    "resample": "data.eval_resample",
}
# Jobs that train or draw shots have separate rules for these.
OF_SCORING = ("eval_method", "eval_resize", "resample")
_MAX_PIXELS = BOUNDS["image_size"][1]
_SHOWN = 3

# In float32, the type of normalised images.
_Number = Annotated[float, Field(allow_inf_nan=False, ge=-LARGEST, le=LARGEST)]
_Deviation = Annotated[float, Field(allow_inf_nan=False, ge=SMALLEST, le=LARGEST)]


class LoRAMeta(BaseModel):
    """Training settings of merged adapters, see [lora]; `from_*` describes the start weights."""

    model_config = ConfigDict(strict=True)

    rank: int = Field(ge=1, le=4096)
    alpha: _Number = Field(ge=0)
    dropout: float = Field(ge=0, lt=1)
    targets: list[Literal["q", "k", "v", "out", "fc1", "fc2"]] = Field(min_length=1, max_length=6)
    blocks: list[Annotated[int, Field(ge=0)]] = Field(max_length=1000)
    from_sha256: str = Field(max_length=100)
    from_image_size: int


class Meta(BaseModel):
    """Metadata of weights. Every field is optional, and other fields are allowed.

    `mean` and `std` are of colours between 0 and 1, sizes are in pixels. `resample` may be another program's
    rule that vitctl lacks: it is refused when images are resized by it. `eval_share` is the share of the side
    that timm's crop keeps, at any image size. `loss` is that of the training: after "sigmoid" the
    probabilities of the classes are independent. `licence` and its address are as stated with the weights,
    `remarks` are for their user. `temperature` divides the logits before the softmax. `head` is "zero" if its
    weights are all 0, and "none" for the graph of a network without one.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    mean: Annotated[list[_Number], Field(min_length=3, max_length=3)] | None = None
    std: Annotated[list[_Deviation], Field(min_length=3, max_length=3)] | None = None
    image_size: Annotated[int, Field(ge=1, le=_MAX_PIXELS)] | None = None
    eval_method: Literal["square", "shorter_side", "torchvision", "transformers", "letterbox"] | None = None
    eval_resize: Annotated[int, Field(ge=0, le=2 * _MAX_PIXELS)] | None = None
    eval_share: Annotated[float, Field(gt=0, le=1)] | None = None
    resample: str | None = None
    exif_orientation: bool | None = None
    position_resize: str | None = None
    class_names: list[str] | None = None
    head: Literal["zero", "none"] | None = None
    assumed: list[str] | None = None
    loss: Literal["softmax", "sigmoid", "masked_patch"] | None = None
    format: str | None = None
    licence: str | None = None
    licence_link: str | None = None
    remarks: list[str] | None = None
    lora: LoRAMeta | None = None
    temperature: Annotated[float, Field(ge=0.01, le=100)] | None = None

    @field_validator("assumed")
    @classmethod
    def _are_known(cls, names: list[str] | None) -> list[str] | None:
        if odd := sorted(set(names or ()) - KEYS.keys()):
            raise ValueError(f"{odd[0]!r} should be one of {', '.join(KEYS)}")
        return names

    @model_validator(mode="after")
    def _crop_has_room(self) -> "Meta":
        if self.image_size and self.eval_resize and self.eval_resize < self.image_size:
            raise ValueError(
                f"eval_resize = {self.eval_resize} is smaller than image_size = {self.image_size}"
            )
        return self


def activation_of(meta: Mapping[str, Any], num_classes: int) -> Activation:
    """Return the activation for the training's loss; by default sigmoid for one logit, else softmax."""
    loss = meta.get("loss") or ("sigmoid" if num_classes == 1 else "softmax")
    return "sigmoid" if loss == "sigmoid" else "softmax"


def no_head(path: str | Path) -> CheckpointError:
    """Return the error for class predictions from weights without a head, or with one of zeros."""
    return CheckpointError(
        path,
        "has no trained head, so it cannot predict classes",
        "fine-tune it first, or take its features (vitctl predict IMAGES --features FILE.safetensors)",
    )


def distinct(names: Iterable[str]) -> tuple[str, ...]:
    """Return class names, appending the class number to repeated names: ImageNet has two cranes.

    All names in the result differ, and applying this again changes nothing.
    """
    given = tuple(names)
    counts = Counter(given)
    told = tuple(f"{name} ({at})" if counts[name] > 1 else name for at, name in enumerate(given))
    return told if told == given else distinct(told)


def compared_names(stored: Any) -> dict[str, Any]:
    """Return stored class names in the form for comparisons; empty for anything else."""
    is_list = isinstance(stored, list) and all(isinstance(name, str) for name in stored)
    return {"class_names": list(map(same_name, stored))} if is_list else {}


def check_meta(meta: Mapping[str, Any], config: Config) -> None:
    """Check metadata against `Meta`, and the class names against the head. Raises CheckpointError."""
    try:
        found = Meta.model_validate(dict(meta))
    except ValidationError as error:
        problems = [_in_words(problem) for problem in error.errors(include_url=False, include_context=False)]
        more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointError(
            f"the metadata stored with the weights is not valid: {'; '.join(problems[:_SHOWN])}{more}",
            fix="use another file, or fix it",
        ) from None
    if found.class_names and config.num_classes and len(found.class_names) != config.num_classes:
        raise CheckpointError(
            f"{len(found.class_names)} class names are stored with a head of {config.num_classes} classes",
            fix="use another file, or fix it",
        )


def _in_words(problem: Mapping[str, Any]) -> str:
    place = ".".join(str(part) for part in problem["loc"])
    text = str(problem["msg"]).removeprefix("Value error, ")
    if not place:
        return text
    shown = one_line(repr(problem["input"]))
    return (
        f"{one_line(place)}: {text[:1].lower()}{text[1:]} "
        f"(it is {shown[:40]}{'...' if len(shown) > 40 else ''})"
    )


def require_meta(meta: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Raise CheckpointError if metadata lack something that a job needs."""
    if missing := [name for name in names if meta.get(name) is None]:
        raise CheckpointError(
            f"{', '.join(missing)} of the images is not stored with the weights, so scores would "
            "be meaningless",
            fix="write the file again with it (vitctl.models.weights.weights_file.save_weights)",
        )


def assumed_values(meta: Mapping[str, Any], config: Config, *, scoring: bool) -> dict[str, Any]:
    """Return what is assumed about weights: recipe key -> value.

    `scoring`: whether their evaluation pre-processing is used.
    """
    names = [name for name in meta.get("assumed") or () if scoring or name not in OF_SCORING]
    stored = {name: getattr(config, name, None) for name in names} | {**meta}
    if stored.get("eval_resize") == 0:  # no crop, which a recipe expresses by the image size
        stored["eval_resize"] = config.image_size
    return {KEYS[name]: stored[name] for name in names}


def _with_choices(key: str, value: Any) -> str:
    """Return an assumed value, and its alternatives if they are few."""
    named = {KEYS["gelu"]: CHOICES["gelu"], KEYS["classifier"]: WITH_CLASS_TOKEN}.get(key, ())
    others = [one for one in named if one != value] if value in named else []
    return str(value).replace(", ", ",") + (f" (or {', '.join(others)})" if others else "")


def assumed_line(values: Mapping[str, Any]) -> str:
    """Return one line with every assumed value and the key that sets it; "" if nothing is assumed."""
    if not values:
        return ""
    parts = {key: f"{key}={_with_choices(key, value)}" for key, value in values.items()}
    colours = tuple(tuple(values.get(KEYS[name], ())) for name in ("mean", "std"))
    if named := next((name for name, known in COLOURS.items() if colours == tuple(known.values())), ""):
        others = ", ".join(name for name in COLOURS if name != named)
        parts |= {KEYS["mean"]: f"--preprocess {named} (or {others})", KEYS["std"]: ""}
    shown = ", ".join(filter(None, parts.values()))
    elsewhere = " (num_heads: in a config.json beside the file)" if "num_heads" in values else ""
    return (
        f"assumed, not recorded with the weights: {shown}; set what differs with --set KEY=VALUE{elsewhere}"
    )


class Temperature(BaseModel):
    """A classifier's temperature and its fit, in a file next to its weights, whose digest does not change."""

    model_config = ConfigDict(strict=True)

    temperature: float = Field(ge=0.01, le=100)
    weights_sha256: str
    split: str
    data_sha256: str
    images: int
    nll_before: float
    nll_after: float

    def __str__(self) -> str:
        images, data = count_text(self.images, "image"), self.data_sha256[:12]
        return f"temperature {self.temperature:.4f}, fitted to {self.split} ({images}, digest {data})"

    def write(self, weights: str) -> str:
        """Write the file next to the weights, atomically; return its path."""
        place = _beside(weights)
        with writing(place):
            return str(write_json(place, self.model_dump()))


def stored_temperature(weights: str, digest: Callable[[], str]) -> Temperature | None:
    """Return the temperature next to a weights path; None if there is none, or if it is for other weights.

    `digest` is called only if there is a file. Raises CheckpointError if that is damaged.
    """
    place = _beside(weights)
    if "://" in weights or not place.is_file():
        return None
    try:
        found = Temperature.model_validate(read_json(place, limits.RUN_FILE, error=CheckpointError))
    except ValidationError:
        raise CheckpointError(
            place, "is not a temperature of `vitctl evaluate --fit-temperature`", "fit again, or remove it"
        ) from None
    return found if found.weights_sha256 == digest() else None


def _beside(weights: str) -> Path:
    path = Path(weights)
    return path.with_name((path.name if path.is_dir() else path.stem) + TEMPERATURE_SUFFIX)
