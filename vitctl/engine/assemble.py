"""A training is put together: its images, its loss, how it is computed, and the parts of a `Trainer`."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from vitctl.data.images.transforms import EvalTransform, TrainTransform
from vitctl.data.loader.batches import train_batches
from vitctl.data.source.order import Order, SampleOrder, own_slots
from vitctl.data.source.uneven import correction
from vitctl.data.source.verification import Verification
from vitctl.data.source.views import Source
from vitctl.engine.agreement import FIX, check_inputs, identity, words_of_start
from vitctl.engine.checkpoint import Saver
from vitctl.engine.computation import (
    choose_attention,
    choose_micro_batch,
    computation,
    computed,
    draws_noise,
    gpu_settings,
    kept_activations,
    shard_as,
    versions,
)
from vitctl.engine.distillation import Distilled, Teacher, distillation_loss
from vitctl.engine.evaluation import Score
from vitctl.engine.journal import CHECKPOINTS, Journal, run_of
from vitctl.engine.lanes import ByLanes, LaneSum
from vitctl.engine.log import RunLog
from vitctl.engine.losses import Measured, Objective, classification, classification_loss
from vitctl.engine.mixing import Mixing
from vitctl.engine.optimizer import Average, build_optimizer, trained_names
from vitctl.engine.preemption import StopFlag
from vitctl.engine.profile import profiled, steps_of
from vitctl.engine.runtime import (
    Runtime,
    check_same,
    gather_texts,
    new_group,
    num_workers,
)
from vitctl.engine.schedule import lanes_of, learning_rate, total_steps
from vitctl.engine.sharding import is_sharded, place_of
from vitctl.engine.state import RunState, computed_on
from vitctl.engine.store import Peers, Sender, Store
from vitctl.engine.trainer import Evaluator, Trainer
from vitctl.engine.update import AllReduced, Gradients, TrainStep
from vitctl.errors import LaunchError
from vitctl.models.blocks import compile_blocks, compile_loss
from vitctl.models.build import Model
from vitctl.models.flops import computed_flops
from vitctl.models.kernels import Narrowed, set_attention
from vitctl.models.masked_patch import masked_patch_loss
from vitctl.models.variants import MaskedPatchConfig, check_recomputed, to_dict
from vitctl.recipe.schema import Finetune, Pretrain, Vtab, frozen_places, lora_of


@dataclass(frozen=True)
class RunContext:
    """Where a training runs: this process among its peers, the folder and its log, the flag that signals set.

    `shards` verifies the images that are scored. `act` is done with the prepared training instead of
    `Trainer.fit`. `recipe_digest` is of RUN/recipe.toml, from which the recipe of a training may differ in a
    learning rate or a seed.
    """

    runtime: Runtime
    folder: Path
    journal: Journal
    stop: StopFlag
    shards: Verification
    act: Callable[[Trainer], Score | None] | None = None
    recipe_digest: str = ""


@dataclass(frozen=True)
class Images:
    """The images of a training.

    Args:
        train, augmentation: training images, and their augmentation.
        scored, pre_processing: images that are scored, or None, and the evaluation pre-processing.
        tested: images that are scored once, by the chosen weights; None: there are none.
        colours: `mean` and `std` of the weights.
        order: of the training images; None: the exact shuffle by the recipe's seed.
        mixing: MixUp and CutMix of training batches.
    """

    train: Source
    augmentation: TrainTransform
    scored: Source | None
    pre_processing: EvalTransform
    colours: Mapping[str, Any]
    order: SampleOrder | None = None
    mixing: Mixing = field(default_factory=Mixing)
    tested: Source | None = None

    def meta(self, loss: str) -> dict[str, Any]:
        """Return the metadata to store with the weights, so that they give the same numbers elsewhere."""
        shown = self.pre_processing
        return {
            "image_size": shown.image_size,
            "eval_method": shown.method,
            "eval_resize": shown.resize,
            "resample": shown.resample,
            "exif_orientation": shown.exif_orientation,
            "mean": list(self.colours["mean"]),
            "std": list(self.colours["std"]),
            "loss": loss,
            "class_names": list(self.train.class_names),
        }


class Options(TypedDict, total=False):
    """What only some trainings have, see `assembled`."""

    objective: Callable[..., Tensor] | None
    probe: Callable[[Model], dict[int, list[float]]] | None
    start: Mapping[str, Tensor]
    start_weights_sha256: str
    teacher: Teacher | None


def assembled(
    recipe: Pretrain | Finetune | Vtab,
    run: RunContext,
    model: Model,
    images: Images,
    meta: dict[str, Any],
    score: Callable[[nn.Module], Score] | None,
    *,
    objective: Callable[..., Tensor] | None = None,
    probe: Callable[[Model], dict[int, list[float]]] | None = None,
    start: Mapping[str, Tensor] = MappingProxyType({}),
    start_weights_sha256: str = "",
    teacher: Teacher | None = None,
    test: Callable[[nn.Module], Score] | None = None,
) -> Trainer:
    """Return the training of a recipe in a folder, as one process sees it.

    Args:
        recipe: with its values resolved: batch size, length, learning rate, seed.
        run: process, folder, log and stop flag.
        model: with its start weights, on the runtime's device.
        images: that it is trained and scored on.
        meta: stored with the weights.
        score: scores a network on the images to score; None: there are none.
        objective: instead of [loss]; it uses no labels.
        probe: gives a network's few-shot accuracies by number of shots and seed; None: it is off.
        start: weights that are read once the network is sharded, by name.
        start_weights_sha256: digest of the pre-trained weights; empty without any.
        teacher: of [distillation]; None without one.
        test: scores the chosen weights on `images.tested`, see `Trainer.test`.

    Raises:
        LaunchError: other processes have other inputs, or the machine cannot compute this.
    """
    runtime, s, machine = run.runtime, recipe.schedule, recipe.machine
    steps = total_steps(len(images.train), s.batch_size, steps=s.total_steps, epochs=s.total_epochs)
    # Processes that read other files would train something that no recipe describes.
    in_parts = any(tensor.is_meta for tensor in model.parameters())
    check_inputs(
        runtime,
        {} if in_parts else model.state_dict(),
        model.config,
        meta,
        (images.train, images.scored, images.tested),
    )

    # The images of this process, and the loss of a batch.
    lanes, share = lanes_of(recipe, runtime.num_processes), -(-s.batch_size // runtime.num_processes)
    own = own_slots(s.batch_size, lanes, runtime.rank, runtime.num_processes)
    batches = partial(
        train_batches,
        images.train,
        images.order or Order(len(images.train), recipe.seed),
        images.augmentation,
        seed=recipe.seed,
        batch_size=s.batch_size,
        rank=runtime.rank,
        num_processes=runtime.num_processes,
        lanes=lanes,
        neighbours=images.mixing.is_on,
        needs_labels=objective is None,
        checksums=recipe.log.trace,
        pinned=runtime.device.type == "cuda",
        outages=True,
    )
    colours = tuple(meta["mean"]), tuple(meta["std"])
    weights = None
    if recipe.loss.class_weights != "none":
        found = correction(recipe.loss.class_weights, "shuffle", images.train)
        weights = torch.from_numpy(found.factors).to(runtime.device)
    objective = objective or classification(recipe.loss, images.mixing, recipe.seed, weights)
    is_masked = isinstance(model.config, MaskedPatchConfig)

    def loss_by(made: Callable[[Measured], Measured] | None = None) -> Objective:
        measured = made and made(masked_patch_loss if is_masked else classification_loss)
        loss: Objective = partial(objective, normalise=runtime.normaliser(*colours), measured=measured)
        if teacher is None:
            return loss
        assert isinstance(recipe, Finetune)
        asked, learnt = recipe.distillation, made and made(distillation_loss)
        return Distilled(loss, asked, teacher, model, colours, runtime, learnt)

    loss = loss_by()

    # How it is computed. Weights are sharded before the micro-batch is measured, and it is measured on
    # the loss itself.
    kernel = choose_attention(model, machine, runtime, lanes=lanes is not None)
    if teacher is not None:
        set_attention(teacher.model, kernel)
    check_recomputed(model.config, machine.checkpoint_blocks)
    model.checkpoint_blocks = machine.checkpoint_blocks
    drawn = shard_as(machine, runtime, model, start, seed=recipe.seed, probed=probe is not None)
    check_same({"start weights": drawn + words_of_start(runtime, model, start)}, FIX)
    one_batch = partial(batches, first_step=0, num_workers=0)
    micro_batch = choose_micro_batch(
        recipe, runtime, run.folder, model, loss, lambda n: next(one_batch(micro_batch=n)), share
    )
    if machine.compile:  # no size that was tried is compiled
        compile_blocks(
            model, mode=machine.compile, kept=kept_activations(recipe, runtime, model.config, micro_batch)
        )
        loss = loss_by(partial(compile_loss, model, mode=machine.compile))
    workers = num_workers(machine, runtime.device, runtime.num_processes)
    is_cuda = runtime.device.type == "cuda"
    how = {"attention": kernel, "compile": machine.compile}
    # Checkpoints of another training are refused. Lanes promise the same bits, so what computes them
    # belongs to what the training is.
    made_of = identity(
        recipe,
        run.folder,
        images.train,
        images.scored,
        start_weights_sha256,
        computation(runtime, **how, versions=versions()) if lanes else {},
        teacher.sha256 if teacher else "",
        network=to_dict(model.config),
    )
    facts: dict[str, Any] = {  # recorded at each start
        **made_of.state,
        "recipe_file": run.recipe_digest,
        **computed(runtime, kernel),
        "micro_batch": s.leaf_images if s.lanes else micro_batch,
        **how,
        "checkpoint_blocks": machine.checkpoint_blocks,
        **({"deterministic": machine.deterministic} if is_cuda else {}),
        "lanes": s.lanes,
        "draws": draws_noise(recipe, model.config),
    }

    # The parts: the update, the log, the state.
    # Compiled blocks cast weights themselves; recomputed blocks save the memory that copies would take.
    eager = is_cuda and not (machine.compile or machine.checkpoint_blocks or is_sharded(model))
    narrow = eager and runtime.precision == "bf16"
    wrapped = runtime.wrap(model, ddp=lanes is None, always_synced=micro_batch >= share)
    gradients: Gradients = AllReduced(runtime, wrapped, recipe.seed)
    if lanes is not None:
        beside = torch.cuda.Stream() if is_cuda else None  # type: ignore[no-untyped-call]
        shared = runtime.rank, runtime.num_processes, runtime.nodes
        tree = LaneSum(lanes, *shared, beside, runtime.clock.switch)
        gradients = ByLanes(runtime, model, recipe.seed, tree)
    flops = partial(  # counted where the first step is logged
        computed_flops,
        model.config,
        frozen_places(recipe, model.config),
        adapters=lora_of(recipe).rank > 0,
        teacher=teacher.model.config if teacher else None,
    )
    log = RunLog(
        recipe,
        runtime,
        run.folder,
        run.journal,
        images.train,
        model,
        own,
        steps,
        runtime.normaliser(*colours),
        flops,
        run.stop,
    )
    ema, optimizer = recipe.averaging, build_optimizer(model, recipe.optimizer)
    kept = recipe.checkpoint.keep_last, recipe.checkpoint.keep_best
    saver = Saver(run.folder / CHECKPOINTS, model.config, meta, *kept, journal=run.journal)
    writes, count = runtime.is_main, 0
    if place := place_of(trained_names(optimizer, model)):
        replica, part, count = place
        saver.peers = Peers(part, count, partial(gather_texts, group=new_group(count)))
        writes = replica == 0
    store = None
    if recipe.checkpoint.store:
        store, peers = Store(recipe.checkpoint.store, run_of(run.folder)), saver.peers
        if count:
            peers = replace(peers, exchange=partial(gather_texts, group=new_group(count)))
        saver.sender = Sender(store, saver.root, peers, run.journal)
    state = RunState(
        runtime,
        model,
        optimizer,
        Average(model, ema.decay, debias=ema.debias) if ema.decay else None,
        log,
        saver,
        writes=writes,
        identity=made_of,
        computed_on=computed_on(facts, runtime.device) | (gpu_settings(machine) if is_cuda else {}),
        batch_size=s.batch_size,
        background=recipe.checkpoint.background,
        store=store,
    )
    evaluators: list[Evaluator] = []
    if score is not None:
        add, every = partial(state.add_score, metric=recipe.evaluation.metric), recipe.evaluation.every_steps
        evaluators.append(Evaluator("evaluate", every, score, lambda step: step in state.scores, add))
    if probe is not None:
        assert isinstance(recipe, Pretrain)
        every = recipe.fewshot_probe.every_steps
        evaluators.append(Evaluator("fewshot", every, probe, log.probed.__contains__, log.write_fewshot))
    train_step = TrainStep(
        runtime,
        wrapped,
        model,
        loss,
        gradients,
        optimizer,
        state.average,
        lr=learning_rate(recipe, steps, len(images.train)),
        batch_size=s.batch_size,
        clip_norm=recipe.optimizer.clip_norm,
        clip_value=recipe.optimizer.clip_value,
        norm_dtype=torch.float64 if lanes else None,
        changing=state.changing,
        holding=Narrowed(model) if narrow else nullcontext,
    )
    batches = partial(batches, micro_batch=micro_batch, num_workers=workers)
    if asked := recipe.log.profile:
        first, _, rank = steps_of(asked)
        if first > steps or rank >= runtime.num_processes:
            what = f"the run has {steps:,} steps, and processes 0 to {runtime.num_processes - 1}"
            raise LaunchError(f"--profile {asked}", what, "give a step and a process of it")
        batches = partial(profiled, batches, asked, len(own), runtime, run.folder)
    return Trainer(
        recipe,
        runtime,
        run.stop,
        own=own,
        batches=batches,
        facts=facts,
        state=state,
        log=log,
        train_step=train_step,
        evaluators=evaluators,
        test=test,
        total_steps=steps,
        steps_behind=int(is_cuda),
        warms_up=bool(machine.compile)
        or (runtime.num_processes > 2 and lanes is None and not is_sharded(model)),
    )
