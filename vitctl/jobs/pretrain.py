"""Pre-training (Section 4.1, Table 3): a ViT from scratch on a large labelled set."""

from dataclasses import replace
from pathlib import Path

from vitctl.engine.journal import Report, silent
from vitctl.engine.preemption import StopFlag
from vitctl.jobs.inputs import eval_transform, open_training_images, preprocessing, train_transform
from vitctl.jobs.result import RunResult
from vitctl.jobs.setup import on_device, open_journal, provenance, start_runtime, train, training_result
from vitctl.models.build import build
from vitctl.models.variants import ViTConfig, variant
from vitctl.recipe.schema import Pretrain


def pretrain(recipe: Pretrain, run_dir: Path, report: Report = silent, stop: StopFlag | None = None) -> RunResult:
    """Train [model] on data.train_split, going on where run_dir's last checkpoint stands.

    Args:
        recipe: checked.
        run_dir: gets checkpoints, log.jsonl and, by the caller, result.json.
        report: called with every log record of the main process.
        stop: raised by signals.

    Returns:
        accuracy on data.eval_split, and what it belongs to.

    Raises:
        Stopped: a signal came; the state is saved.

    Paper: Section 4.1, Appendix B.1, Table 3
    """
    stop = StopFlag() if stop is None else stop
    train_on, score_on = open_training_images(recipe.data, run_dir)
    runtime = start_runtime(recipe.machine, run_dir, recipe.log)
    journal = open_journal(runtime, run_dir, report)

    config = model_config(recipe, len(train_on.class_names))
    model = on_device(build(config, seed=recipe.seed, dtype=runtime.dtype), runtime)
    meta = preprocessing(recipe.data, recipe.data.mean, recipe.data.std) | {"class_names": list(train_on.class_names)}

    score = train(
        recipe,
        runtime,
        run_dir,
        journal,
        stop,
        model=model,
        config=config,
        meta=meta,
        train_on=(train_on, train_transform(recipe.data)),
        score_on=(score_on, eval_transform(recipe.data)) if score_on is not None else None,
        max_bad_fraction=recipe.data.max_bad_fraction,
    )
    return training_result(recipe, run_dir, score, provenance(recipe.data, train_on, score_on, model))


def model_config(recipe: Pretrain, num_classes: int) -> ViTConfig:
    """The network of a recipe's [model] for this many classes."""
    m = recipe.model
    shape = {k: getattr(m, k) for k in ("hidden_size", "depth", "mlp_size", "num_heads") if getattr(m, k) is not None}
    config = variant(
        m.name,
        image_size=recipe.data.image_size,
        num_classes=num_classes,
        classifier=m.classifier,
        position_embedding=m.position_embedding,
        dropout=m.dropout,
        head_bias=m.head_bias,
        **shape,
    )
    return replace(config, representation_size=config.hidden_size) if m.pre_logits else config
