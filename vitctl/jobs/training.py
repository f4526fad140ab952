"""What the jobs that take gradient steps share: runtime, images, and one training."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from vitctl.data.source.views import Source
from vitctl.engine.computation import exact
from vitctl.engine.evaluation import Score, evaluate_model
from vitctl.engine.journal import LOG, Journal, Report, json_digest
from vitctl.engine.runtime import Runtime, num_workers, start, tracking
from vitctl.engine.trainer import Images, RunContext, Trainer
from vitctl.jobs.features import ImagePass
from vitctl.jobs.inputs.data import eval_transform, mixing, train_transform, training_order
from vitctl.jobs.record.runs import choose_weights, logged_scores
from vitctl.models.blocks import compile_errors
from vitctl.models.build import Model
from vitctl.models.kernels import set_attention, set_linear
from vitctl.recipe.images import TrainImages
from vitctl.recipe.machine import Log, Machine
from vitctl.recipe.schema import Finetune, Pretrain, TrainRecipe, Vtab
from vitctl.recipe.sections import Schedule
from vitctl.recipe.write import deciding_values

M = TypeVar("M", bound=nn.Module)
Act = Callable[[Trainer], Score | None]  # done with a prepared training instead of `Trainer.fit`
Probe = Callable[[Model], dict[int, list[float]]]


def start_runtime(machine: Machine, run_dir: Path, log: Log | None = None) -> Runtime:
    """Join the processes that [machine] asks for."""
    set_attention("fused")
    set_linear("torch")
    return start(
        precision=machine.precision,
        device=machine.device,
        processes=machine.processes,
        trackers=log.trackers if log else (),
        folder=run_dir,
    )


def open_journal(runtime: Runtime, run_dir: Path, report: Report) -> Journal:
    """Open log.jsonl on the main process."""
    return Journal(run_dir / LOG if runtime.is_main else None, report)


def images_of(
    data: TrainImages, train_on: Source, score_on: Source | None, seed: int, schedule: Schedule
) -> Images:
    """Return the images of [data] with augmentation and pre-processing, in the order of the seed and [schedule]."""
    order = None if data.synthetic else training_order(data, train_on, seed, schedule)
    return Images(train_on, train_transform(data), score_on, eval_transform(data), order, mixing(data))


def train(
    recipe: Pretrain | Finetune | Vtab,
    run: RunContext,
    model: Model,
    images: Images,
    meta: dict[str, Any],
    *,
    objective: Callable[..., Tensor] | None = None,
    probe: Probe | None = None,
    start_weights_sha256: str = "",
) -> Score | None:
    """Train `model` in run.folder; see `Trainer` for the arguments.

    Returns:
        the score after the last step, or with select_best that of the best checkpoint; None without images to
        score, and possibly on processes other than the main one.
    """
    runtime, lanes = run.runtime, recipe.schedule.lanes > 0
    score = None
    if images.scored is not None:
        workers, size = num_workers(recipe.machine, runtime), recipe.evaluation.batch_size
        colours = tuple(meta["mean"]), tuple(meta["std"])
        shown = ImagePass(
            runtime, run.journal, images.pre_processing, *colours, size, workers, run.stop, run.shards, lanes
        )
        score = partial(shown.through, evaluate_model, "scoring", source=images.scored)
    with (
        exact(runtime, recipe.schedule.threads) if lanes else nullcontext(),
        compile_errors() if recipe.machine.compile else nullcontext(),
    ):
        trainer = Trainer(
            recipe,
            run,
            model,
            images,
            meta,
            objective=objective,
            score=score,
            probe=probe,
            start_weights_sha256=start_weights_sha256,
        )
        with tracking(runtime, recipe, run.folder):
            last = (run.act or Trainer.fit)(trainer)
    if not recipe.evaluation.select_best:
        return last
    if not runtime.is_main:
        return None
    _, chosen = choose_weights(run.folder, "best", by_size=True)
    return logged_scores(run.folder)[chosen.step or 0]


def digest_of(recipe: TrainRecipe) -> str:
    """Return the digest of the values that decide the result, for `RunContext`."""
    return json_digest(deciding_values(recipe))


def on_device(model: M, runtime: Runtime) -> M:
    """Move the model to the runtime's device, in the runtime's parameter type."""
    return model.to(device=runtime.device, dtype=runtime.dtype)
