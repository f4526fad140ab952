"""Which model a weights file fits, from its header alone."""

import json
from pathlib import Path

from vitctl.errors import CheckpointError
from vitctl.models.configs import Config
from vitctl.models.variants import from_dict
from vitctl.models.weights.header import OWN_KEY, safetensors_header
from vitctl.system.text import one_line


def read_config(path: Path, *, model: str = "") -> Config:
    """The configuration of the model that a weights file of any format fits.

    Args:
        path: a file.
        model: name of the model, for what a foreign file's shapes cannot tell.

    Raises:
        CheckpointError: it is missing, cut short, or its tensors make no model that we know.
    """
    if (header := safetensors_header(path)) is not None:
        own = header.get("__metadata__", {}).get(OWN_KEY)
        if own is not None:
            try:
                return from_dict(json.loads(own)["config"])
            except (
                CheckpointError,
                LookupError,
                TypeError,
                ValueError,
                RecursionError,
                AttributeError,
            ) as error:
                raise CheckpointError(
                    f"{path}: its vitctl metadata describes no model ({one_line(str(error))})"
                ) from error
    from vitctl.models.weights.load import foreign_config

    return foreign_config(path, model or None)
