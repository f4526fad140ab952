"""Fine-tuning (Section 3.2, Table 4): a pre-trained body, a new zero head, often a higher resolution."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from vitctl.data.inspect.duplicates import NEAR_BITS, compare_within, describe, write_matches
from vitctl.data.source.views import Source, shared_samples, split_sources
from vitctl.engine.assemble import RunContext
from vitctl.engine.computation import dropout_draws, settled
from vitctl.engine.distillation import Teacher
from vitctl.engine.evaluation import Score
from vitctl.engine.journal import Report, silent
from vitctl.engine.metrics import baselines
from vitctl.engine.preemption import StopFlag
from vitctl.engine.schedule import checked_steps, fitted_recipe
from vitctl.errors import DataError
from vitctl.jobs.inputs.data import (
    Inputs,
    at_size,
    open_inputs,
    open_training_images,
    training_notes,
)
from vitctl.jobs.inputs.weights import FoundWeights, checked_by_one, transferred_model, weights_of
from vitctl.jobs.lr_sweep import SEEDS, Trial, best, broadcast_score, run_trials
from vitctl.jobs.record.result import RunResult
from vitctl.jobs.start_head import draw_head, head_used, start_head
from vitctl.jobs.teacher import load_teacher, teacher_used
from vitctl.jobs.training import (
    Act,
    images_of,
    on_device,
    start_run,
    train,
    trained,
    training_result,
    verified,
    weights_used,
    within,
)
from vitctl.models.blocks import freeze, trainable
from vitctl.models.lora import adapt
from vitctl.models.variants import unseen_pixels
from vitctl.recipe.images import TrainImages
from vitctl.recipe.schema import Finetune, frozen_places, rates_in_words, rates_of
from vitctl.system.pool import default_workers

DUPLICATES = "duplicates.csv"
_MOST_COMPARED, _COMPARING_SECONDS = 20_000, 5.0
_ENOUGH = 256  # images that make worker processes worth starting


def finetune(
    recipe: Finetune,
    run_dir: Path,
    report: Report = silent,
    stop: StopFlag | None = None,
    act: Act | None = None,
    inputs: Inputs | None = None,
) -> RunResult:
    """Fine-tune weights.source on data.train_split, resuming from run_dir's newest checkpoint.

    With sweep.lrs, each learning rate is first trained on sweep.train_split and scored on sweep.eval_split,
    in sweep/lr_VALUE/; the best one then trains on all of data.train_split. With finetune.seeds, the first
    seed trains in run_dir, whose weights represent the run. Each other seed trains in seeds/seed_VALUE/,
    which keeps its result and log.

    Both pre-training head layers are dropped; the new head is one zero-initialised linear layer, unless
    finetune.head says otherwise. The position embedding is resized when the image size changes.

    Args:
        run_dir: gets checkpoints and log.jsonl; the caller writes result.json.
        act: called with each prepared training instead of `fit`, see `RunContext`.

    Returns:
        accuracy on data.eval_split (with several seeds mean and deviation), its provenance, and the sweep's
        table.

    Raises:
        Stopped: a signal arrived; the state is saved, and finished rates and seeds are not trained again.

    Paper: Section 3.2, Appendix B.1.1, Table 4; Table 2 (three runs)
    """
    in_parts = recipe.machine.divides_model and recipe.finetune.head not in ("fewshot", "random")
    found = weights_of(recipe, later=in_parts)
    data = at_size(recipe.data, found.weights.config.image_size)
    inputs = inputs or open_inputs(recipe, run_dir)
    train_on, score_on = inputs.train, inputs.scored
    if data.synthetic:  # the weights may decide their size
        train_on, score_on = open_training_images(data, run_dir)
    assert train_on is not None
    recipe = fitted_recipe(recipe, len(train_on))
    run = start_run(recipe, run_dir, report, stop, score_on, inputs.tested, train_on, act=act)
    found = checked_by_one(found, run.runtime)
    run.journal.say("data", *training_notes(recipe, data, train_on, score_on))
    if inputs.tried and score_on and (count := shared_samples(score_on, inputs.tried[1])):
        text = f"{count:,} of the {len(score_on):,} scored images choose the learning rate"
        run.journal.write("warning", step=0, text=f"{text}: the score looks better than that of new images")
    _warn_of_duplicates(data, run, {"tested": inputs.tested, "scored": score_on, "train": train_on})
    teacher = load_teacher(recipe, run, found, data.image_size, train_on.class_names)
    start = _Start(found, data, teacher)
    tried = _sweep(recipe, start, run, inputs.tried) if inputs.tried else []
    recipe = _with_lr(recipe, best(tried).value) if tried else recipe
    seeds = recipe.finetune.seeds or (recipe.seed,)
    score, used = _train(_with_seed(recipe, seeds[0]), start, run, (train_on, score_on), inputs.tested)
    used |= weights_used(found, recipe.weights) | {
        "lr": recipe.optimizer.lr,
        "total_steps": checked_steps(len(train_on), recipe.schedule, recipe.machine.processes),
        "seeds": list(seeds),
        **verified(run, train_on),
    }
    result = training_result(recipe, run, score, used, score_on)
    if len(seeds) > 1:
        repeated = _repeat(recipe, seeds, start, run, (train_on, score_on), score)
        beside = baselines(score_on.labels(), len(score_on.class_names)) if score_on is not None else {}
        first = {name: result.metrics[name] for name in ("test",) if name in result.metrics}
        result = replace(result, metrics=over_seeds(repeated) | beside | first)
    if not tried:
        return result
    table = {f"{one.value:g}": one.score.number for one in tried}
    splits = {
        "train_split": recipe.sweep.train_split,
        "split": recipe.sweep.eval_split,
        "total": tried[0].score.total,
    }
    return replace(
        result,
        metrics={**result.metrics, "sweep": table},
        provenance={**result.provenance, "sweep": splits},
    )


def _warn_of_duplicates(data: TrainImages, run: RunContext, images: Mapping[str, Source | None]) -> None:
    """Write near-duplicates among local images to RUN/duplicates.csv: once per run, for a few seconds."""
    file, sides = run.folder / DUPLICATES, {side: one for side, one in images.items() if one is not None}
    indexes = [split.index for source in sides.values() for split in split_sources(source)]
    if not (data.path and run.runtime.is_main) or file.exists() or any(index.is_remote for index in indexes):
        return
    total = sum(map(len, sides.values()))
    if total > _MOST_COMPARED:
        run.journal.say(
            "data", f"no look for near-duplicates among {total:,} images; `vitctl data dedup` finds them"
        )
        return
    until, workers = time.monotonic() + _COMPARING_SECONDS, default_workers() if total > _ENOUGH else 0
    try:
        compared = compare_within(sides, max_bits=NEAR_BITS, workers=workers, until=until)
        write_matches(compared, file)
    except (DataError, OSError) as error:  # a failed search must not end a training
        run.journal.say("data", f"near-duplicates could not be looked for: {error}")
        return
    lines = [describe(found) for found in compared if found.matches]
    if time.monotonic() > until:
        lines.append(
            f"not all images were compared within {_COMPARING_SECONDS:g} s; `vitctl data dedup` does"
        )
    if lines:
        run.journal.say("warning", "; ".join((*lines, f"pairs: {file}")))


Pair = tuple[Source, Source | None]  # images to train on, and to score on


class _Start(NamedTuple):
    """State shared by all trainings of a run: start weights, [data] with resolved values, and the teacher."""

    found: FoundWeights
    data: TrainImages
    teacher: Teacher | None


def _sweep(recipe: Finetune, start: _Start, run: RunContext, images: tuple[Source, Source]) -> list[Trial]:
    def attempt(lr: float, folder: Path) -> Score | None:
        return _train(_with_lr(recipe, lr), start, within(run, folder, f"lr {lr:g}"), images)[0]

    must_match = _score_identity(recipe, start, *images)
    tried = run_trials(recipe.sweep.lrs, attempt, run.folder, run.runtime, knob="lr", must_match=must_match)
    table = {f"{one.value:g}": one.score.number for one in tried}
    if (
        len(equal := [f"{one.value:g}" for one in tried if one.score.deciding == best(tried).score.deciding])
        > 1
    ):
        run.journal.say("warning", f"learning rates {' and '.join(equal)} are equal: took the first")
    run.journal.write("sweep", step=0, split=recipe.sweep.eval_split, accuracies=table, lr=best(tried).value)
    return tried


def _repeat(
    recipe: Finetune, seeds: Sequence[int], start: _Start, run: RunContext, images: Pair, first: Score | None
) -> list[Trial]:
    """Return the score of every seed; the first is trained already."""
    train_on, score_on = images
    assert score_on is not None
    run.runtime.release()

    def attempt(seed: float, folder: Path) -> Score | None:
        return _train(_with_seed(recipe, int(seed)), start, within(run, folder, f"seed {seed}"), images)[0]

    must_match = _score_identity(recipe, start, train_on, score_on) | {"lr": recipe.optimizer.lr}
    others = run_trials(
        seeds[1:], attempt, run.folder, run.runtime, knob="seed", must_match=must_match, where=SEEDS
    )
    return [Trial(seeds[0], broadcast_score(first, run.runtime)), *others]


def over_seeds(repeated: Sequence[Trial]) -> dict[str, Any]:
    """Return the mean and population deviation of the accuracies of several seeds, and each of them; also
    the mean of evaluation.metric, if it is another.
    """
    accuracies, metric = [one.score.accuracy for one in repeated], repeated[0].score.metric
    deciding = {metric: statistics.fmean(one.score.number for one in repeated), "metric": metric}
    by_seed = {
        str(one.value): {"accuracy": one.score.accuracy, "correct": one.score.correct} for one in repeated
    }
    return {
        "accuracy": statistics.fmean(accuracies),
        "std": statistics.pstdev(accuracies),
        "total": repeated[0].score.total,
        "by_seed": by_seed,
        **(deciding if metric != "accuracy" else {}),
    }


def _score_identity(recipe: Finetune, start: _Start, train_on: Source, score_on: Source) -> dict[str, Any]:
    return {
        "from_sha256": start.found.weights.digest,
        "train_sha256": train_on.digest,
        "data_sha256": score_on.digest,
        "initialise": recipe.weights.initialise,
        **({} if recipe.finetune.freeze == "none" else {"freeze": recipe.finetune.freeze}),
        **rates_of(recipe, start.found.weights.config),
        **teacher_used(recipe, start.teacher),
    }


def _with_seed(recipe: Finetune, seed: int) -> Finetune:
    return recipe.model_copy(update={"seed": seed})


def _with_lr(recipe: Finetune, lr: float) -> Finetune:
    return recipe.model_copy(update={"optimizer": recipe.optimizer.model_copy(update={"lr": lr})})


def _train(
    recipe: Finetune, start: _Start, run: RunContext, pair: Pair, tested: Source | None = None
) -> tuple[Score | None, dict[str, Any]]:
    """Train in a folder. Return the score after the last step, and its provenance."""
    train_on, score_on = pair
    data, found = start.data, start.found
    rates = rates_of(recipe, found.weights.config)
    model, start_from, lines = transferred_model(
        found.weights,
        recipe.weights,
        num_classes=len(train_on.class_names),
        image_size=data.image_size,
        **rates,
        seed=recipe.seed,
        dtype=run.runtime.dtype,
        keeps_head=recipe.finetune.head == "as_stored",
        fresh_norm=recipe.finetune.fresh_norm,
    )
    if recipe.finetune.head == "random":
        draw_head(model, recipe.finetune.head_std, recipe.seed)
    freeze(model, frozen_places(recipe, model.config))
    adapted, lora = dict[str, Any](), recipe.lora
    if lora.rank:
        sizes: dict[str, Any] = {"rank": lora.rank, "alpha": lora.alpha, "dropout": lora.dropout}
        adapt(model, lora.targets, lora.blocks, **sizes, seed=recipe.seed)
        adapted["lora"] = {
            **lora.model_dump(mode="json"),
            "from_sha256": found.weights.digest,
            "from_image_size": found.weights.config.image_size,
        }
    counts = [sum(p.numel() for p in some) for some in (trainable(model).values(), model.parameters())]
    if counts[0] < counts[1]:
        lines.append(f"{counts[0]:,} of {counts[1]:,} parameters trained, the others frozen: those layers "
                     f"compute as in evaluation")  # fmt: skip
    found.log(run.journal, *lines, rates_in_words(recipe, rates))
    run.journal.say("warning", *unseen_pixels(model.config))
    images = images_of(data, train_on, score_on, recipe.seed, recipe.schedule, found.weights.meta, tested)
    if not found.weights.is_later:  # otherwise parts are read later
        model = on_device(model, run.runtime)
    recipe = settled(recipe, run.runtime, model.config, run.folder, len(train_on))
    if recipe.finetune.head == "fewshot":
        start_head(recipe, run, model, images)
    score = train(
        recipe,
        run,
        model,
        images,
        adapted,
        start=start_from,
        start_weights_sha256=found.weights.digest,
        teacher=start.teacher,
    )
    used = trained(recipe, data, run, model.config, images)
    used |= {"trained_parameters": counts[0]} if counts[0] < counts[1] else {}
    used |= adapted | rates | dropout_draws(recipe, model.config, run.folder) | head_used(recipe, run)
    used |= teacher_used(recipe, start.teacher)
    return score, used
