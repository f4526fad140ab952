"""`torch.export` programs: `torch.export.load(FILE).module()` runs them without vitctl."""

import json

import torch

from vitctl.export.onnx_graph import quiet
from vitctl.export.proof import agree, run_model
from vitctl.export.written import Exported, Order, kept, partial_folder

METADATA = "vitctl.json"  # of torch's extra files


def write_program(order: Order) -> Exported:
    """Write NAME.pt2, with class names and pre-processing as the extra file `vitctl.json`, and verify it by
    loading it.

    Args:
        order: what is wanted.

    Raises:
        CheckpointError: the loaded program disagrees with the model; it is not kept.
    """
    path = order.run_dir / f"{order.name}.pt2"
    model = order.model.traced()
    axes = ", ".join(order.model.free_axes)
    said = f"torch.export.load(FILE).module()(images) gives {' and '.join(model.outputs)}; free axes: {axes}"
    with partial_folder(order.run_dir, "pt2") as aside:
        file = aside / path.name
        with quiet():
            program = torch.export.export(model, (model.example(2),), dynamic_shapes=(model.free_sizes(),))
            meta = order.found.weights.meta | {"weights_sha256": order.found.weights.digest}
            torch.export.save(program, file, extra_files={METADATA: json.dumps(meta)})
            run = run_model(torch.export.load(file).module())
        difference = agree(file, order.model, order.options.batch_sizes, run)
        scores = order.scores(file, run)
        return kept(
            aside, Exported(path, difference, (said, *scores.lines, *order.resizing_note), scores.numbers)
        )
