"""From a recipe's training sections to the engine's plain arguments; shared by the jobs that take gradient
steps.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vitctl.data.images.transforms import EvalTransform, TrainTransform
from vitctl.data.loader.batches import Batch, train_batches
from vitctl.data.loader.lanes import Lanes, own_slots
from vitctl.data.source.order import Order, SampleOrder
from vitctl.data.source.verification import Verification
from vitctl.data.source.views import Source, sample_key
from vitctl.engine.averaging import Average
from vitctl.engine.checkpoint.saving import Saver
from vitctl.engine.distributed.exact import computation, exact
from vitctl.engine.distributed.gradients import AllReduced, ByLanes, Gradients
from vitctl.engine.distributed.lane_sum import LaneSum
from vitctl.engine.distributed.runtime import Runtime, start
from vitctl.engine.distributed.sharding import shard
from vitctl.engine.evaluation import Score, evaluate_model
from vitctl.engine.journal import LOG, Journal, Report, json_digest
from vitctl.engine.loop import Trainer
from vitctl.engine.losses import classify
from vitctl.engine.mixing import Mixing, classify_mixed
from vitctl.engine.optimizer import build_optimizer
from vitctl.engine.preemption import StopFlag
from vitctl.engine.run_files import CHECKPOINTS
from vitctl.engine.schedule import total_steps
from vitctl.engine.task import TrainingTask
from vitctl.engine.training import fit
from vitctl.errors import LaunchError
from vitctl.jobs.features import ImagePass
from vitctl.jobs.inputs.data import eval_transform, mixing, train_transform
from vitctl.jobs.inputs.lanes import lanes_of
from vitctl.jobs.inputs.length import learning_rate
from vitctl.jobs.inputs.same_inputs import check_inputs
from vitctl.jobs.inputs.sampling import training_order
from vitctl.jobs.provenance import computed, versions
from vitctl.jobs.record.identity import Identity, identity
from vitctl.jobs.record.kept import Kernels
from vitctl.jobs.record.kernels import choose_kernels, choose_micro_batch, kept_kernels, use_kernels
from vitctl.jobs.record.runs import choose_weights, logged_scores
from vitctl.jobs.record.tracking import tracking
from vitctl.models.blocks import compile_blocks, compile_errors
from vitctl.models.build import Model
from vitctl.models.configs import Config
from vitctl.models.flops import computed_flops
from vitctl.models.kernels.attention import set_attention
from vitctl.models.kernels.linear import set_linear
from vitctl.recipe.images import TrainImages
from vitctl.recipe.machine import Log, Machine, ShardedMachine, TrainMachine
from vitctl.recipe.neutral import deciding_values
from vitctl.recipe.schema import Finetune, Pretrain, TrainRecipe, Vtab
from vitctl.recipe.sections import Loss, Schedule

M = TypeVar("M", bound=nn.Module)
Act = Callable[
    [Path, TrainingTask, Trainer, Saver], Score | None
]  # with the arguments and the result of `fit`
Probe = Callable[[Model], dict[int, list[float]]]


def start_runtime(machine: Machine, run_dir: Path, log: Log | None = None) -> Runtime:
    """Join the processes that [machine] asks for."""
    trackers = log.trackers if log else ()
    set_attention("fused")
    set_linear("torch")
    return start(
        precision=machine.precision,
        device=machine.device,
        processes=machine.processes,
        trackers=trackers,
        folder=run_dir,
    )


def num_workers(machine: Machine, runtime: Runtime) -> int:
    """Data loader workers of each process: machine.workers, or up to 8 with a GPU, and half of the cores
    without one.
    """
    return loader_workers(machine, runtime.device, runtime.num_processes)


def loader_workers(machine: Machine, device: torch.device, num_processes: int) -> int:
    """The same for a process without a `Runtime`."""
    if machine.workers >= 0:
        return machine.workers
    cores = os.cpu_count() or 1
    if device.type == "cuda":
        return min(8, cores // min(num_processes, max(1, torch.cuda.device_count())))
    return max(1, min(8, cores // 2))


def open_journal(runtime: Runtime, run_dir: Path, report: Report) -> Journal:
    """log.jsonl of the main process."""
    return Journal(run_dir / LOG if runtime.is_main else None, report)


@dataclass(frozen=True)
class RunContext:
    """Where a training runs: this process among its peers, the folder and its log, and the flag that signals
    set.

    `shards` verifies the images that it scores. `act` is done with the training once it is prepared; None: it
    is done, see `fit`. `recipe_digest` is of RUN/recipe.toml, from which the recipe of a training may differ
    in a learning rate or a seed.
    """

    runtime: Runtime
    folder: Path
    journal: Journal
    stop: StopFlag
    shards: Verification
    act: Act | None = None
    recipe_digest: str = ""


@dataclass(frozen=True)
class Images:
    """The images of a training.

    Args:
        train, augmentation: training images, and their augmentation.
        scored, pre_processing: images that are scored (None: there are none), and the evaluation
            pre-processing.
        order: of the training images; None: the exact shuffle by the recipe's seed.
        mixing: MixUp and CutMix of training batches.
    """

    train: Source
    augmentation: TrainTransform
    scored: Source | None
    pre_processing: EvalTransform
    order: SampleOrder | None = None
    mixing: Mixing = field(default_factory=Mixing)

    def meta(self, mean: Sequence[float], std: Sequence[float], loss: str) -> dict[str, Any]:
        """Metadata to store with the weights, so that they give the same numbers elsewhere."""
        shown = self.pre_processing
        return {
            "image_size": shown.image_size,
            "eval_method": shown.method,
            "eval_resize": shown.resize,
            "resample": shown.resample,
            "exif_orientation": shown.exif_orientation,
            "mean": list(mean),
            "std": list(std),
            "loss": loss,
            "class_names": list(self.train.class_names),
        }


def images_of(
    data: TrainImages, train_on: Source, score_on: Source | None, seed: int, schedule: Schedule
) -> Images:
    """The images of a recipe's [data], with augmentation and pre-processing, in the order of its seed and
    [schedule].
    """
    order = None if data.synthetic else training_order(data, train_on, seed, schedule)
    return Images(train_on, train_transform(data), score_on, eval_transform(data), order, mixing(data))


def train(
    recipe: Pretrain | Finetune | Vtab,
    context: RunContext,
    model: Model,
    images: Images,
    meta: dict[str, Any],
    *,
    objective: Callable[..., Tensor] | None = None,
    probe: Probe | None = None,
    start_weights_sha256: str = "",
) -> Score | None:
    """Train `model` as [optimizer], [schedule], [loss], [averaging], [evaluation], [checkpoint] and [log]
    say.

    Args:
        recipe: with those sections.
        context: process, folder, log and stop flag.
        model: on the runtime's device.
        images: that it is trained and scored on.
        meta: what is stored with its weights.
        objective: instead of [loss]; it uses no labels.
        probe: few-shot accuracies of the model.
        start_weights_sha256: digest of the pre-trained weights; empty without any.

    Returns:
        the score after the last step, or with select_best that of the best checkpoint; None without images to
        score, and possibly on processes other than the main one.
    """
    s, alike = recipe.schedule, exact(context.runtime, recipe.schedule.threads)
    with alike if s.lanes else nullcontext():
        return _train(recipe, context, model, images, meta, objective, probe, start_weights_sha256)


def _train(
    recipe: Pretrain | Finetune | Vtab,
    context: RunContext,
    model: Model,
    images: Images,
    meta: dict[str, Any],
    objective: Callable[..., Tensor] | None,
    probe: Probe | None,
    start_weights_sha256: str,
) -> Score | None:
    runtime, folder = context.runtime, context.folder
    source, scored = images.train, images.scored
    check_inputs(runtime, model.state_dict(), model.config, meta, (source, scored))
    s, machine, lanes = recipe.schedule, recipe.machine, lanes_of(recipe, runtime.num_processes)
    steps = total_steps(len(source), s.batch_size, steps=s.total_steps, epochs=s.total_epochs)
    mean, std = tuple(meta["mean"]), tuple(meta["std"])
    workers = num_workers(machine, runtime)
    share = -(-s.batch_size // runtime.num_processes)
    loss = partial(
        objective or _classification(recipe.loss, images.mixing, recipe.seed),
        normalise=runtime.normaliser(mean, std),
    )
    batches = _batches(recipe, runtime, images, lanes, needs_labels=objective is None)
    shown, size = images.pre_processing, recipe.evaluation.batch_size
    look = ImagePass(
        runtime,
        context.journal,
        shown,
        mean,
        std,
        size,
        workers,
        context.stop,
        context.shards,
        lanes is not None,
    )

    settled = kept_kernels(machine, runtime, folder)
    kernels = choose_kernels(settled, model.config, runtime.computation, lanes=lanes is not None)
    use_kernels(kernels)
    if machine.checkpoint_blocks:
        model.checkpoint_blocks = True
    if machine.compile:
        compile_blocks(model)
    _shard(machine, runtime, model, probe)
    micro_batch = choose_micro_batch(
        recipe, runtime, folder, model, loss, lambda n: next(batches(0, n, 0)), share
    )
    made_by = {**kernels.model_dump(), "compile": machine.compile, "versions": versions()}
    made_by = computation(runtime, **made_by) if lanes else {}
    made_of = identity(recipe, folder, source, scored, start_weights_sha256, made_by)
    task = TrainingTask(
        batches=lambda first_step: batches(first_step, micro_batch, workers),
        own=own_slots(s.batch_size, lanes, runtime.rank, runtime.num_processes),
        num_images=len(source),
        flops_per_image=computed_flops(model.config),
        key=partial(sample_key, source),
        score=partial(look.through, evaluate_model, "scoring", source=scored) if scored is not None else None,
        probe=probe,
        identity=made_of,
        total_steps=steps,
        evaluate_every=recipe.evaluation.every_steps,
        probe_every=recipe.fewshot_probe.every_steps if isinstance(recipe, Pretrain) else 0,
        save_every=recipe.checkpoint.every_steps,
        save_in_background=recipe.checkpoint.background,
        log_every=recipe.log.every_steps,
        log_sample_keys=recipe.log.sample_keys,
        max_bad_fraction=recipe.data.max_bad_fraction,
        warm_up=machine.compile,
        steps_behind=int(runtime.device.type == "cuda"),
        facts=_facts(recipe, context, made_of, model.config, micro_batch, kernels)
        if recipe.log.trace
        else None,
    )
    trainer = _trainer(
        recipe, context, model, loss, learning_rate(recipe, steps), lanes, always_synced=micro_batch >= share
    )
    kept = recipe.checkpoint.keep_last, recipe.checkpoint.keep_best
    saver = Saver(folder / CHECKPOINTS, model.config, meta, *kept, journal=context.journal)
    with tracking(runtime, recipe, folder), compile_errors() if machine.compile else nullcontext():
        last = (context.act or fit)(folder, task, trainer, saver)
    return _best_score(folder, runtime) if recipe.evaluation.select_best else last


def _shard(machine: TrainMachine, runtime: Runtime, model: Model, probe: Probe | None) -> None:
    """Shard the model where machine.sharding says so."""
    if not (isinstance(machine, ShardedMachine) and machine.sharding == "fsdp"):
        return
    if probe:
        raise LaunchError(
            "fewshot_probe.every_steps calls the model for its features only, which machine.sharding = "
            "'fsdp' does not support; "
            "set fewshot_probe.every_steps = 0 or machine.sharding = 'none'"
        )
    gathers_bf16 = machine.sharding_dtype == "bf16"
    if gathers_bf16 and runtime.precision != "bf16":
        raise LaunchError(
            f"machine.sharding_dtype = 'bf16': this run computes in {runtime.precision}, and would lose "
            f"precision; set "
            "machine.precision to 'bf16' or machine.sharding_dtype to 'float32'"
        )
    machine.shards(runtime.num_processes)  # raises where they cannot be divided so
    shard(model, runtime.device, runtime.num_processes, machine.sharding_replicas, gathers_bf16=gathers_bf16)


def _facts(
    recipe: TrainRecipe,
    context: RunContext,
    made_of: Identity,
    config: Config,
    micro_batch: int,
    kernels: Kernels,
) -> dict[str, Any]:
    """What the record of a training begins with: what it is made of, and what its bits depend on beside that."""
    return {
        **made_of.state,
        "recipe_file": context.recipe_digest,
        **computed(context.runtime),
        "micro_batch": recipe.schedule.leaf_images if recipe.schedule.lanes else micro_batch,
        **kernels.model_dump(),
        "compile": recipe.machine.compile,
        "checkpoint_blocks": recipe.machine.checkpoint_blocks,
        "lanes": recipe.schedule.lanes,
        "draws": bool(getattr(config, "dropout", 0.0) or getattr(config, "drop_path", 0.0)),
    }


def _trainer(
    recipe: TrainRecipe,
    context: RunContext,
    model: Model,
    objective: Callable[..., Tensor],
    lr: Callable[[int], float],
    lanes: Lanes | None,
    *,
    always_synced: bool,
) -> Trainer:
    runtime = context.runtime
    wrapped = runtime.wrap(model, ddp=lanes is None, always_synced=always_synced)
    gradients: Gradients = AllReduced(runtime, wrapped, recipe.seed)
    if lanes is not None:
        gradients = ByLanes(runtime, model, recipe.seed, LaneSum(lanes, runtime.rank, runtime.num_processes))
    average, o = recipe.averaging, recipe.optimizer
    adam = {"beta1": o.beta1, "beta2": o.beta2, "eps": o.eps}
    optimizer = build_optimizer(model, name=o.name, weight_decay=o.weight_decay, momentum=o.momentum, **adam)
    return Trainer(
        runtime=runtime,
        average=Average(model, average.decay, debias=average.debias) if average.decay else None,
        model=wrapped,
        unwrapped=model,
        optimizer=optimizer,
        objective=objective,
        gradients=gradients,
        lr=lr,
        batch_size=recipe.schedule.batch_size,
        clip_norm=o.clip_norm,
        stop=context.stop,
    )


def _best_score(run_dir: Path, runtime: Runtime) -> Score | None:
    """The score of the best checkpoint of a run with select_best; None on processes other than the main one."""
    if not runtime.is_main:
        return None
    _, chosen = choose_weights(run_dir, "best", by_size=True)
    return logged_scores(run_dir)[chosen.step or 0]


def _batches(
    recipe: TrainRecipe, runtime: Runtime, images: Images, lanes: Lanes | None, *, needs_labels: bool
) -> Callable[[int, int, int], Iterator[Batch]]:
    def batches(first_step: int, micro_batch: int, num_workers: int) -> Iterator[Batch]:
        return train_batches(
            images.train,
            images.order or Order(len(images.train), recipe.seed),
            images.augmentation,
            seed=recipe.seed,
            batch_size=recipe.schedule.batch_size,
            micro_batch=micro_batch,
            rank=runtime.rank,
            num_processes=runtime.num_processes,
            first_step=first_step,
            num_workers=num_workers,
            lanes=lanes,
            neighbours=images.mixing.is_on,
            needs_labels=needs_labels,
            checksums=recipe.log.trace,
            pinned=runtime.device.type == "cuda",
        )

    return batches


def _classification(loss: Loss, mixing: Mixing, seed: int) -> Callable[..., Tensor]:
    objective = partial(classify_mixed, mixing=mixing, seed=seed) if mixing.is_on else classify
    return partial(objective, name=loss.name, label_smoothing=loss.label_smoothing, smoothing=loss.smoothing)


def digest_of(recipe: TrainRecipe) -> str:
    """For `RunContext`: of the values that decide the result."""
    return json_digest(deciding_values(recipe))


def on_device(model: M, runtime: Runtime) -> M:
    """The model on the runtime's device, in the runtime's parameter type."""
    return model.to(device=runtime.device, dtype=runtime.dtype)
