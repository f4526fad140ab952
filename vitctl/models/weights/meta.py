"""What is stored beside tensors: how images become the numbers that the model was trained on, and the names
of its classes.

One model for our own files and for what is read from the files of other programs.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from vitctl.errors import CheckpointError
from vitctl.models.configs import Config
from vitctl.models.weights.assumed import KEYS
from vitctl.system.text import one_line

SMALLEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # of float32's numbers, without those of fewer bits
_MAX_PIXELS = 2**14  # as for images in the configurations of models
_SHOWN = 3

# In float32, in which images become numbers.
_Number = Annotated[float, Field(allow_inf_nan=False, ge=-LARGEST, le=LARGEST)]
_Deviation = Annotated[float, Field(allow_inf_nan=False, ge=SMALLEST, le=LARGEST)]


class Meta(BaseModel):
    """Metadata of weights. All of it may be missing, and more may be there; what is there must make sense.

    `mean` and `std` are of colours between 0 and 1, sizes are in pixels. `resample` may be a rule of another
    program that we
    do not have: then it is refused where images are resized by it. `loss` is that of the training: after
    "sigmoid" each class
    has a probability of its own.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    mean: Annotated[list[_Number], Field(min_length=3, max_length=3)] | None = None
    std: Annotated[list[_Deviation], Field(min_length=3, max_length=3)] | None = None
    image_size: Annotated[int, Field(ge=1, le=_MAX_PIXELS)] | None = None
    eval_method: Literal["square", "shorter_side"] | None = None
    eval_resize: Annotated[int, Field(ge=0, le=2 * _MAX_PIXELS)] | None = None
    resample: str | None = None
    exif_orientation: bool | None = None
    position_resize: str | None = None
    class_names: list[str] | None = None
    head: Literal["zero"] | None = None
    assumed: list[str] | None = None
    loss: Literal["softmax", "sigmoid", "masked_patch"] | None = None
    format: str | None = None

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


def check_meta(meta: Mapping[str, Any], config: Config) -> None:
    """Hold metadata against `Meta`, and the names of classes against the head.

    Raises:
        CheckpointError: one line with what makes no sense.
    """
    try:
        found = Meta.model_validate(dict(meta))
    except ValidationError as error:
        problems = [_in_words(one) for one in error.errors(include_url=False, include_context=False)]
        more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointError(
            f"what is stored beside the weights makes no sense: {'; '.join(problems[:_SHOWN])}{more}; take "
            f"another file, or fix it"
        ) from None
    if found.class_names and config.num_classes and len(found.class_names) != config.num_classes:
        raise CheckpointError(
            f"{len(found.class_names)} class names are stored beside a head of {config.num_classes} classes; "
            f"take another file, or fix it"
        )


def require_meta(meta: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Raises CheckpointError where metadata lack something that a job cannot do without."""
    if missing := [name for name in names if meta.get(name) is None]:
        raise CheckpointError(
            f"{', '.join(missing)} of the images is not stored beside the weights, so that no score of them "
            f"means anything; "
            "write the file again with it (vitctl.models.weights.load.save_weights)"
        )


def _in_words(problem: Mapping[str, Any]) -> str:
    place = ".".join(str(part) for part in problem["loc"])
    said = str(problem["msg"]).removeprefix("Value error, ")
    shown = one_line(repr(problem["input"]))
    given = f" (it is {shown[:40]}{'...' if len(shown) > 40 else ''})" if place else ""
    return f"{one_line(place)}: {said[:1].lower()}{said[1:]}{given}" if place else said
