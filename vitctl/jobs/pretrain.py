"""Pre-training (Section 4.1, Table 3): a ViT from scratch on a large labelled set."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from vitctl.data.images.transforms import EvalTransform
from vitctl.engine.assemble import RunContext
from vitctl.engine.computation import dropout_draws, settled
from vitctl.engine.journal import Report, silent
from vitctl.engine.losses import predict_masked_patches
from vitctl.engine.preemption import StopFlag
from vitctl.engine.runtime import stop_together
from vitctl.engine.schedule import fitted_recipe
from vitctl.jobs.fewshot import score_draw
from vitctl.jobs.inputs.data import FewshotSet, Inputs, open_inputs, training_notes
from vitctl.jobs.record.result import RunResult
from vitctl.jobs.training import (
    Act,
    ImagePass,
    images_of,
    on_device,
    start_run,
    train,
    trained,
    training_result,
    verified,
)
from vitctl.models.build import Model, build
from vitctl.models.variants import MaskedPatchConfig, unseen_pixels
from vitctl.recipe.images import FewshotImages
from vitctl.recipe.schema import Pretrain

Scores = dict[int, list[float]]


def make_probe(recipe: Pretrain, one: FewshotSet, run: RunContext) -> Callable[[Model], Scores]:
    """Return a function from the network to shots -> accuracy of each seed, empty off the main process.

    It uses none of the training's random generators, and does not change the network.

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
    colours = {"mean": d.mean, "std": d.std}
    extract = ImagePass(run, recipe, transform, colours, whole_batches=recipe.schedule.lanes > 0)

    def probe(model: Model) -> Scores:
        features = extract(model, one.train), extract(model, one.test)
        draw = partial(score_draw, one, features, l2s=(p.l2,), dtype=torch.float64)
        scores: Scores = {
            shots: [draw(shots=shots, seed=seed)[0].accuracy for seed in p.seeds if not run.stop.raised]
            for shots in (p.shots if run.runtime.is_main else ())
        }
        stop_together(run.runtime, run.stop)
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
        run_dir: gets checkpoints and log.jsonl; the caller writes result.json.
        act: called with the prepared training instead of `fit`, see `RunContext`.

    Returns:
        accuracy on data.eval_split, and its provenance.

    Raises:
        Stopped: a signal arrived; the state is saved.

    Paper: Section 4.1, Appendix B.1, Table 3
    """
    inputs = inputs or open_inputs(recipe, run_dir)
    train_on, score_on, probed, tested = inputs.train, inputs.scored, inputs.probed, inputs.tested
    assert train_on is not None
    recipe = fitted_recipe(recipe, len(train_on))
    in_order = [score_on, tested, *((probed.train, probed.test) if probed else ()), train_on]
    run = start_run(recipe, run_dir, report, stop, *in_order, act=act)
    run.journal.say("data", *training_notes(recipe, recipe.data, train_on, score_on))

    config = recipe.network(len(train_on.class_names))
    recipe = settled(recipe, run.runtime, config, run_dir, len(train_on))
    run.journal.say("warning", *unseen_pixels(config))
    is_whole = not recipe.machine.divides_model  # otherwise each process initialises its part
    model = build(config, seed=recipe.seed, dtype=run.runtime.dtype, device="cpu" if is_whole else "meta")
    model = on_device(model, run.runtime) if is_whole else model

    objective: Callable[..., Tensor] | None = None
    if isinstance(config, MaskedPatchConfig):
        score_on = tested = None  # no classes to score
        rate = recipe.masked_patch.corrupted  # Appendix B.1.2
        objective = partial(predict_masked_patches, config=config, rate=rate, seed=recipe.seed)
    colours = {"mean": recipe.data.mean, "std": recipe.data.std}
    images = images_of(recipe.data, train_on, score_on, recipe.seed, recipe.schedule, colours, tested)
    probe = make_probe(recipe, probed, run) if probed else None
    score = train(recipe, run, model, images, objective=objective, probe=probe)
    used = {
        **trained(recipe, recipe.data, run, config, images),
        **dropout_draws(recipe, config, run_dir),
        **verified(run, train_on),
    }
    return training_result(recipe, run, score, used, score_on)
