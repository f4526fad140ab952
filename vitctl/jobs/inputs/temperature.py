"""The temperature of a classifier, in a file beside its weights, which keep their digest."""

from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vitctl.errors import CheckpointError
from vitctl.system.files import RUN_FILE, read_json, write_json

SUFFIX = ".temperature.json"


class Temperature(BaseModel):
    """What a fit found: `weights_sha256` of which weights, on which images, and the loss before and after."""

    model_config = ConfigDict(strict=True)

    temperature: float = Field(ge=0.01, le=100)
    weights_sha256: str
    split: str
    data_sha256: str
    images: int
    nll_before: float
    nll_after: float

    def write(self, weights: str) -> str:
        """Write the file beside the weights, atomically; returns its path. Raises CheckpointError."""
        place = _place(weights)
        try:
            return str(write_json(place, self.model_dump()))
        except OSError as error:
            reason = error.strerror or error
            raise CheckpointError(
                f"{place}: could not be written ({reason}); copy the weights first"
            ) from None


def stored_temperature(weights: str, digest: Callable[[], str]) -> float | None:
    """Return the temperature beside weights; None if there is none, or if it is of other weights.

    Args:
        weights: their path; an address has nothing beside it.
        digest: returns that of the weights; called only where there is a file.

    Raises:
        CheckpointError: the file is damaged.
    """
    place = _place(weights)
    if "://" in weights or not place.is_file():
        return None
    try:
        found = Temperature.model_validate(read_json(place, RUN_FILE.limit, error=CheckpointError))
    except ValidationError:
        raise CheckpointError(
            f"{place}: is not a temperature of `vitctl evaluate --fit-temperature`; fit again, or remove it"
        ) from None
    return found.temperature if found.weights_sha256 == digest() else None


def _place(weights: str) -> Path:
    path = Path(weights)
    return path.with_name((path.name if path.is_dir() else path.stem) + SUFFIX)
