"""Fine-tuning (Section 3.2, Table 4): a pre-trained body under a new zero head, often at a higher resolution."""

from pathlib import Path

from vitctl.engine.journal import Report, silent
from vitctl.engine.preemption import StopFlag
from vitctl.jobs.inputs import (
    at_size,
    eval_transform,
    find_weights,
    open_training_images,
    preprocessing,
    train_transform,
    transferred_model,
)
from vitctl.jobs.result import RunResult
from vitctl.jobs.setup import (
    on_device,
    open_journal,
    provenance,
    start_runtime,
    train,
    training_result,
    weights_used,
)
from vitctl.recipe.schema import Finetune


def finetune(recipe: Finetune, run_dir: Path, report: Report = silent, stop: StopFlag | None = None) -> RunResult:
    """Fine-tune weights.source on data.train_split, going on where run_dir's last checkpoint stands.

    Both pre-training head layers are dropped; the new head is one zero-initialised linear layer. The position embedding is
    resized when the image size changes.

    Args:
        recipe: checked.
        run_dir: gets checkpoints, log.jsonl and, by the caller, result.json.
        report: called with every log record of the main process.
        stop: raised by signals.

    Returns:
        accuracy on data.eval_split, and what it belongs to.

    Raises:
        Stopped: a signal came; the state is saved.

    Paper: Section 3.2, Appendix B.1.1, Table 4
    """
    stop = StopFlag() if stop is None else stop
    found = find_weights(recipe.weights.source, model=recipe.weights.model)
    data = at_size(recipe.data, found.weights.config.image_size)
    train_on, score_on = open_training_images(data, run_dir)
    runtime = start_runtime(recipe.machine, run_dir, recipe.log)
    journal = open_journal(runtime, run_dir, report)

    model, lines = transferred_model(
        found.weights,
        recipe.weights,
        num_classes=len(train_on.class_names),
        image_size=data.image_size,
        dropout=recipe.dropout,
        seed=recipe.seed,
        dtype=runtime.dtype,
    )
    journal.write("weights", step=0, path=found.path, text="; ".join(lines))
    mean, std = tuple(found.weights.meta["mean"]), tuple(found.weights.meta["std"])
    meta = preprocessing(data, mean, std) | {"class_names": list(train_on.class_names)}

    score = train(
        recipe,
        runtime,
        run_dir,
        journal,
        stop,
        model=on_device(model, runtime),
        config=model.config,
        meta=meta,
        train_on=(train_on, train_transform(data)),
        score_on=(score_on, eval_transform(data)) if score_on is not None else None,
        max_bad_fraction=data.max_bad_fraction,
    )
    used = provenance(data, train_on, score_on, model) | weights_used(found, recipe.weights)
    return training_result(recipe, run_dir, score, used)
