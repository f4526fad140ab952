"""The teacher of a fine-tuning: stored weights, at the student's image size."""

from collections.abc import Sequence
from typing import Any

from vitctl.engine.assemble import RunContext
from vitctl.engine.distillation import Teacher
from vitctl.jobs.inputs.checks import check_teacher
from vitctl.jobs.inputs.weights import FoundWeights, check_found, find_weights, loaded_model, remarks
from vitctl.jobs.training import on_device
from vitctl.recipe.schema import Finetune


def load_teacher(
    recipe: Finetune, run: RunContext, start: FoundWeights, image_size: int, classes: Sequence[str]
) -> Teacher | None:
    """Return the teacher of [distillation] on the device; None without one.

    Its position embedding is resized to the student's `image_size` in pixels. Raises CheckpointError if it is
    missing or does not fit the student's `start` weights or the data's `classes`, LaunchError if other
    processes read other weights.
    """
    if not recipe.distillation.teacher:
        return None
    found = find_weights(recipe.distillation.teacher)
    weights = found.weights
    check_teacher(recipe, start.weights.config, found.path, weights.config, weights.meta, classes)
    check_found(run.runtime, found, ())
    model, _ = loaded_model(found, image_size, run.runtime.dtype)
    stored = weights.config.image_size
    said = f"positions from {stored} to {image_size} pixels" if stored != image_size else ""
    text = "; ".join(filter(None, (found.chosen.text, said)))
    run.journal.write("teacher", step=0, path=found.path, text=text)
    shown = ", ".join(f"{key}={value}" for key, value in found.assumed.items())
    assumed = (
        f"assumed, not recorded with the teacher: {shown}; if one differs, write a file that records it "
        f"with `vitctl export --to safetensors --set KEY=VALUE`, and name that file as the teacher"
    )
    run.journal.say("warning", *remarks(weights.meta, assumed if shown else ""))
    colours = tuple(weights.meta["mean"]), tuple(weights.meta["std"])
    return Teacher(on_device(model, run.runtime), colours, weights.digest)


def teacher_used(recipe: Finetune, teacher: Teacher | None) -> dict[str, Any]:
    """Return the teacher's provenance; empty without one."""
    if teacher is None:
        return {}
    return {"distillation": {**recipe.distillation.model_dump(), "teacher_sha256": teacher.sha256}}
