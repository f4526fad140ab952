"""Weights files in vitctl's and other programs' formats, read back to verify them, with what those programs
expect beside them.
"""

from pathlib import Path

import torch

from vitctl.export.card import model_card
from vitctl.export.graph import Raw
from vitctl.export.proof import agree, run_model
from vitctl.export.written import Exported, Order, kept, partial_folder
from vitctl.jobs.inputs.weights import FoundWeights, loaded_model
from vitctl.models.weights.files import read_json, write_json
from vitctl.models.weights.load import read_weights
from vitctl.models.weights.sources import CONFIG
from vitctl.models.weights.write import Target, write_weights
from vitctl.system.files import write_text

_OWN = "safetensors"


def write_weights_file(to: Target, order: Order) -> Exported:
    """Write the weights for a program, and verify them by reading them back.

    Args:
        to: of export.to.
        order: what is wanted.

    Returns:
        our own file in the run; a folder of it for other programs, with a README.md.

    Raises:
        CheckpointError: the format cannot hold the model, or the weights that come back disagree with it.
    """
    found = order.found
    folder = order.run_dir if to == _OWN else order.run_dir / to
    with partial_folder(order.run_dir, to, folder) as aside:
        written = write_weights(found.weights, aside / "model.npz" if to == "google" else aside, to)
        file = written.files[0]
        heads = getattr(found.weights.config, "num_heads", None)
        again, _ = loaded_model(
            FoundWeights(str(file), read_weights(file, num_heads=heads)), 0, torch.float32
        )
        read_back = Raw(again.eval(), found.weights.meta)
        difference = agree(
            file, Raw(order.model.model, found.weights.meta), order.options.batch_sizes, run_model(read_back)
        )
        notes = (*written.notes, *order.resizing_note)
        if to != _OWN:
            write_text(aside / "README.md", model_card(to, order, notes))
            _say_preprocessing(order, aside / CONFIG)
        return kept(aside, Exported(folder / file.name, difference, notes))


def _say_preprocessing(order: Order, path: Path) -> None:
    """Add the pre-processing to config.json where the format has one."""
    config = read_json(path)
    if config:
        meta = {key: value for key, value in order.found.weights.meta.items() if key != "class_names"}
        said = {"resizing": order.resizing.note} if order.resizing else {}
        write_json(path, config | {"vitctl": {"preprocessing": meta, **said}})
