"""The network that a weights file holds. Imports torch only for files of other programs."""

from pathlib import Path
from typing import Any

from vitctl.errors import CheckpointError, VitctlError
from vitctl.models.variants import Config, from_dict
from vitctl.models.weights.header import check_named, own_header


def read_network(path: Path, *, model: str = "", which: str = "") -> tuple[Config, dict[str, Any]]:
    """Return a weights file's configuration and metadata, for any layout, without reading tensors.

    `model` names what the shapes of another program's file cannot show; `which` is "ema" or "model".

    Raises:
        CheckpointError: the file is missing or truncated, or its tensors make no known model.
    """
    ours = own_header(path)
    try:
        if ours is not None:
            config = from_dict(ours["config"])
            check_named(config, model)
            return config, ours["meta"]
        from vitctl.models.weights.weights_file import foreign_network

        return foreign_network(path, model, which)
    except VitctlError as error:
        raise CheckpointError(path, error) from error
