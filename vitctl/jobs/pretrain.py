"""Pre-training (Section 4.1, Table 3): a ViT from scratch on a large labelled set."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from vitctl.data.images.transforms import EvalTransform
from vitctl.data.source.verification import Verification
from vitctl.engine.computation import dropout_draws
from vitctl.engine.evaluation import stop_together
from vitctl.engine.journal import Journal, Report, silent
from vitctl.engine.losses import predict_masked_patches
from vitctl.engine.preemption import StopFlag
from vitctl.engine.runtime import Runtime, num_workers
from vitctl.engine.schedule import fitted_recipe
from vitctl.engine.trainer import RunContext
from vitctl.jobs.features import ImagePass
from vitctl.jobs.inputs.data import sampling_notes
from vitctl.jobs.inputs.fewshot_sets import FewshotSet, score_draw
from vitctl.jobs.inputs.network import model_config, unseen_pixels
from vitctl.jobs.inputs.opened import Inputs, open_inputs
from vitctl.jobs.provenance import trained, training_result
from vitctl.jobs.record.data_verified import verified, verify
from vitctl.jobs.record.result import RunResult
from vitctl.jobs.training import (
    Act,
    digest_of,
    images_of,
    on_device,
    open_journal,
    start_runtime,
    train,
)
from vitctl.models.build import Model, build
from vitctl.models.variants import MaskedPatchConfig
from vitctl.recipe.protocols import FewshotImages
from vitctl.recipe.schema import Pretrain

Scores = dict[int, list[float]]


def make_probe(
    recipe: Pretrain,
    one: FewshotSet,
    runtime: Runtime,
    journal: Journal,
    stop: StopFlag,
    shards: Verification,
) -> Callable[[Model], Scores]:
    """A function from the network to shots -> accuracy of each seed, on the main process; empty on the
    others.

    It uses none of the random generators of training, and does not change the network.

    Args:
        recipe: of the pre-training, whose pre-processing it shares.
        one: the data set.
        runtime, journal, stop, shards: of the job.

    Paper: Section 4.1: few-shot accuracies for fast on-the-fly evaluation
    """
    p, d = recipe.fewshot_probe, recipe.data
    transform = EvalTransform(
        d.image_size,
        method="square",
        resize=round(d.image_size * 256 / 224),
        resample=FewshotImages().resample,
        exif_orientation=p.turns_upright,
        truncated=p.truncated,
    )
    workers, size, by_lanes = (
        num_workers(recipe.machine, runtime),
        recipe.evaluation.batch_size,
        recipe.schedule.lanes > 0,
    )
    extract = ImagePass(runtime, journal, transform, d.mean, d.std, size, workers, stop, shards, by_lanes)

    def probe(model: Model) -> Scores:
        features = extract(model, one.train), extract(model, one.test)
        scores: Scores = {}
        for shots in p.shots if runtime.is_main else ():
            draws = [
                score_draw(one, features, shots=shots, seed=seed, l2s=(p.l2,), dtype=torch.float64)[0]
                for seed in p.seeds
                if not stop.raised
            ]
            scores[shots] = [score.accuracy for score in draws]
        stop_together(runtime, stop)
        return scores

    return probe


def pretrain(
    recipe: Pretrain,
    run_dir: Path,
    report: Report = silent,
    stop: StopFlag | None = None,
    act: Act | None = None,
    inputs: Inputs | None = None,
) -> RunResult:
    """Train [model] on data.train_split, resuming from run_dir's newest checkpoint.

    Args:
        recipe: checked.
        run_dir: gets checkpoints, log.jsonl and, by the caller, result.json.
        report: called with every log record of the main process.
        stop: set by signals.
        act: done with the prepared training instead of it, see `RunContext`.
        inputs: the images, if they are open already.

    Returns:
        accuracy on data.eval_split, and its provenance.

    Raises:
        Stopped: a signal came; the state is saved.

    Paper: Section 4.1, Appendix B.1, Table 3
    """
    stop = StopFlag() if stop is None else stop
    inputs = inputs or open_inputs(recipe, run_dir)
    train_on, score_on, probed = inputs.train, inputs.scored, inputs.probed
    assert train_on is not None
    recipe = fitted_recipe(recipe, len(train_on))
    runtime = start_runtime(recipe.machine, run_dir, recipe.log)
    journal = open_journal(runtime, run_dir, report)
    for text in sampling_notes(recipe.data, train_on):
        journal.write("data", step=0, text=text)
    bytes_read = verify(
        runtime, run_dir, score_on, *((probed.train, probed.test) if probed else ()), train_on
    )

    config = model_config(recipe, len(train_on.class_names))
    for text in unseen_pixels(config):
        journal.write("warning", step=0, text=text)
    model = on_device(build(config, seed=recipe.seed, dtype=runtime.dtype), runtime)

    objective = None
    if isinstance(config, MaskedPatchConfig):
        objective, score_on = masked_patch_objective(recipe, config), None  # there are no classes to score
    context, images = (
        RunContext(runtime, run_dir, journal, stop, bytes_read, act, digest_of(recipe)),
        images_of(recipe.data, train_on, score_on, recipe.seed, recipe.schedule),
    )
    meta = images.meta(recipe.data.mean, recipe.data.std, recipe.loss.name)
    probe = make_probe(recipe, probed, runtime, journal, stop, bytes_read) if probed else None
    score = train(recipe, context, model, images, meta, objective=objective, probe=probe)
    used = trained(recipe, recipe.data, runtime, train_on, score_on, meta) | dropout_draws(
        recipe, config, run_dir
    )
    used |= verified(bytes_read, runtime, journal, train_on)
    return training_result(recipe, runtime, run_dir, score, used, score_on)


def masked_patch_objective(recipe: Pretrain, config: MaskedPatchConfig) -> Callable[..., Tensor]:
    """The objective of [masked_patch]. Paper: Appendix B.1.2"""
    return partial(
        predict_masked_patches, config=config, rate=recipe.masked_patch.corrupted, seed=recipe.seed
    )
