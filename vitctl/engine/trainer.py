"""One training in a folder: prepared from a recipe, resumed, trained, logged, scored, saved.

`Trainer.fit` is the schedule, and `TrainStep.update` in update.py the mathematics.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vitctl.data.images.transforms import EvalTransform, TrainTransform
from vitctl.data.loader.batches import Batch, take, train_batches
from vitctl.data.source.order import Order, SampleOrder, own_slots
from vitctl.data.source.uneven import correction
from vitctl.data.source.verification import Verification
from vitctl.data.source.views import Source
from vitctl.engine.agreement import FIX, check_inputs, identity, words_of_start
from vitctl.engine.checkpoint import Peers, Saver
from vitctl.engine.computation import (
    choose_kernels,
    choose_micro_batch,
    computation,
    computed,
    draws_noise,
    use_kernels,
    versions,
)
from vitctl.engine.distillation import Distilled, Teacher
from vitctl.engine.evaluation import Score, stop_together
from vitctl.engine.journal import CHECKPOINTS, Journal
from vitctl.engine.lanes import ByLanes, LaneSum
from vitctl.engine.log import SKIPPED, RunLog, is_due
from vitctl.engine.losses import Objective
from vitctl.engine.mixing import Mixing, classification
from vitctl.engine.optimizer import Average, build_optimizer, trained_names
from vitctl.engine.preemption import StopFlag, Stopped
from vitctl.engine.runtime import (
    Runtime,
    check_same,
    gather_texts,
    moment,
    new_group,
    num_workers,
    seconds_between,
)
from vitctl.engine.schedule import lanes_of, learning_rate, total_steps
from vitctl.engine.sharding import place_of, rows_of, shard_as
from vitctl.engine.state import RunState, computed_on
from vitctl.engine.update import AllReduced, Gradients, TrainStep, Update
from vitctl.errors import DataError
from vitctl.models.blocks import compile_blocks
from vitctl.models.build import Model
from vitctl.models.flops import computed_flops
from vitctl.models.variants import check_recomputed, to_dict
from vitctl.recipe.schema import Finetune, Pretrain, Vtab, frozen_places, lora_of
from vitctl.recipe.sections import OPTIMIZERS
from vitctl.system.text import typed

BUDGET_FLOOR = 10_000  # images; the budget of bad samples is computed from at least this many
Found = TypeVar("Found")


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
    act: "Callable[[Trainer], Score | None] | None" = None
    recipe_digest: str = ""


@dataclass(frozen=True)
class Images:
    """The images of a training.

    Args:
        train, augmentation: training images, and their augmentation.
        scored, pre_processing: images that are scored, or None, and the evaluation pre-processing.
        order: of the training images; None: the exact shuffle by the recipe's seed.
        mixing: MixUp and CutMix of training batches.
    """

    train: Source
    augmentation: TrainTransform
    scored: Source | None
    pre_processing: EvalTransform
    order: SampleOrder | None = None
    mixing: Mixing = field(default_factory=Mixing)

    def meta(self, mean: tuple[float, ...], std: tuple[float, ...], loss: str) -> dict[str, Any]:
        """Return the metadata to store with the weights, so that they give the same numbers elsewhere."""
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


class Trainer:
    """A training of `recipe` in a folder, as one process sees it.

    Args:
        recipe: with its values resolved: batch size, length, learning rate, seed.
        run: process, folder, log and stop flag.
        model: with its start weights, on the runtime's device.
        images: that it is trained and scored on.
        meta: stored with the weights.
        objective: instead of [loss]; it uses no labels.
        score: scores a network on the images to score; None: there are none.
        probe: gives a network's few-shot accuracies by number of shots and seed; None: it is off.
        start_weights_sha256: digest of the pre-trained weights; empty without any.
        teacher: of [distillation]; None without one.

    Raises:
        LaunchError: other processes have other inputs, or the machine cannot compute this.
    """

    def __init__(
        self,
        recipe: Pretrain | Finetune | Vtab,
        run: RunContext,
        model: Model,
        images: Images,
        meta: dict[str, Any],
        *,
        objective: Callable[..., Tensor] | None = None,
        score: Callable[[nn.Module], Score] | None = None,
        probe: Callable[[Model], dict[int, list[float]]] | None = None,
        start: Mapping[str, Tensor] = MappingProxyType({}),
        start_weights_sha256: str = "",
        teacher: Teacher | None = None,
    ) -> None:
        self.recipe, self.runtime, self.stop = recipe, run.runtime, run.stop
        self.score, self.probe = score, probe
        runtime, s, machine = run.runtime, recipe.schedule, recipe.machine
        steps = total_steps(len(images.train), s.batch_size, steps=s.total_steps, epochs=s.total_epochs)
        # Processes that read other files would train something that no recipe describes.
        in_parts = any(tensor.is_meta for tensor in model.parameters())
        check_inputs(
            runtime,
            {} if in_parts else model.state_dict(),
            model.config,
            meta,
            (images.train, images.scored),
        )

        # The images of this process, and the loss of a batch.
        lanes, share = lanes_of(recipe, runtime.num_processes), -(-s.batch_size // runtime.num_processes)
        self.own = own_slots(s.batch_size, lanes, runtime.rank, runtime.num_processes)
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
        loss: Objective = partial(objective, normalise=runtime.normaliser(*colours))
        if teacher is not None:
            assert isinstance(recipe, Finetune)
            loss = Distilled(loss, recipe.distillation, teacher, model, colours, runtime)

        # How it is computed. Weights are sharded before the micro-batch is measured, and it is measured on
        # the loss itself.
        kernels = choose_kernels(machine, model.config, runtime, lanes=lanes is not None)
        use_kernels(kernels)
        check_recomputed(model.config, machine.checkpoint_blocks)
        model.checkpoint_blocks = machine.checkpoint_blocks
        if machine.compile:
            compile_blocks(model)
        drawn = shard_as(machine, runtime, model, start, seed=recipe.seed, probed=probe is not None)
        check_same({"start weights": drawn + words_of_start(runtime, model, start)}, FIX)
        one_batch = partial(batches, first_step=0, num_workers=0)
        micro_batch = choose_micro_batch(
            recipe, runtime, run.folder, model, loss, lambda n: next(one_batch(micro_batch=n)), share
        )
        workers = num_workers(machine, runtime.device, runtime.num_processes)
        self.batches = partial(batches, micro_batch=micro_batch, num_workers=workers)
        how = {**kernels.model_dump(), "compile": machine.compile}
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
        self.facts: dict[str, Any] = {  # recorded at each start
            **made_of.state,
            "recipe_file": run.recipe_digest,
            **computed(runtime),
            "micro_batch": s.leaf_images if s.lanes else micro_batch,
            **how,
            "checkpoint_blocks": machine.checkpoint_blocks,
            "lanes": s.lanes,
            "draws": draws_noise(recipe, model.config),
        }

        # The parts: the update, the log, the state.
        is_cuda = runtime.device.type == "cuda"
        wrapped = runtime.wrap(model, ddp=lanes is None, always_synced=micro_batch >= share)
        gradients: Gradients = AllReduced(runtime, wrapped, recipe.seed)
        if lanes is not None:
            beside = torch.cuda.Stream() if is_cuda else None  # type: ignore[no-untyped-call]
            tree = LaneSum(lanes, runtime.rank, runtime.num_processes, runtime.nodes, beside)
            gradients = ByLanes(runtime, model, recipe.seed, tree)
        flops = computed_flops(
            model.config,
            frozen_places(recipe, model.config),
            adapters=lora_of(recipe).rank > 0,
            teacher=teacher.model.config if teacher else None,
        )
        self.log = RunLog(
            recipe,
            runtime,
            run.folder,
            run.journal,
            images.train,
            model,
            self.own,
            steps,
            runtime.normaliser(*colours),
            flops,
            run.stop,
        )
        ema, is_zero1 = recipe.averaging, getattr(machine, "sharding", "none") == "zero1"
        rows = rows_of(model, runtime.device, runtime.num_processes) if is_zero1 else {}
        optimizer = build_optimizer(model, recipe.optimizer, rows)
        kept = recipe.checkpoint.keep_last, recipe.checkpoint.keep_best
        saver = Saver(run.folder / CHECKPOINTS, model.config, meta, *kept, journal=run.journal)
        writes = runtime.is_main
        if place := place_of(trained_names(optimizer, model)):
            replica, part, count = place
            saver.peers = Peers(part, count, partial(gather_texts, group=new_group(count)))
            writes = replica == 0
        self.state = RunState(
            runtime,
            model,
            optimizer,
            Average(model, ema.decay, debias=ema.debias) if ema.decay else None,
            self.log,
            saver,
            writes=writes,
            identity=made_of,
            computed_on=computed_on(self.facts, runtime.device),
            batch_size=s.batch_size,
            background=recipe.checkpoint.background,
        )
        self.train_step = TrainStep(
            runtime,
            wrapped,
            model,
            loss,
            gradients,
            optimizer,
            self.state.average,
            lr=learning_rate(recipe, steps, len(images.train)),
            batch_size=s.batch_size,
            clip_norm=recipe.optimizer.clip_norm,
            norm_dtype=torch.float64 if lanes else None,
            changing=self.state.changing,
        )
        self.total_steps, self.steps_behind = steps, int(is_cuda)  # that numbers are read late
        # Not read from the device yet: step, update, moments around the wait for its images.
        self.pending: deque[tuple[int, Update, tuple[Any, Any], list[Batch]]] = deque()

    def fit(self) -> Score | None:
        """Train to the last step, resuming from the newest checkpoint in the folder.

        Returns:
            the score after the last step; None when there are no images to score.

        Raises:
            Stopped: a signal came, or images could not be fetched; the state is saved.
            DataError: too many images cannot be read.
            Exception: the error that ended the training; the last consistent state is saved before.
        """
        state, log = self.state, self.log
        with state.finishing(), self.stop.rescued_by(state.save_alone):
            # 1. Load the newest checkpoint, and cut all records back to its step.
            state.resume(self.total_steps, self.recipe.evaluation.metric, self._ends_at)
            if self.runtime.is_main:
                state.check_space(OPTIMIZERS[self.recipe.optimizer.name].slots)
            # 2. A run that stopped between a step and its score has none of that step yet.
            if state.step:
                self.measure_if_due()
            # 3. Train. A finished run only gives its score again.
            trains = state.step < self.total_steps
            log.start(state.step, self.facts, state.resumed_from, trains=trains)
            if trains:
                self.run_steps(self.batches(first_step=state.step))
            # 4. A signal after the last step still stops the run: it resumes at its result.
            stop_together(self.runtime, self.stop)
            state.counts.check_share(self.total_steps, log.folder / SKIPPED)
            log.report_problems(state.counts.num_bad, state.counts.num_skipped)
        return state.scores.get(self.total_steps)

    def run_steps(self, batches: Iterator[Batch]) -> None:
        """Take all steps that are left; log, score and save after each of them what is due.

        Args:
            batches: endless micro-batches of this process, from the next step on: a function of seed and
                step, so that a resumed run goes on with the images that come next.
        """
        state, every = self.state, self.recipe.checkpoint.every_steps
        try:
            stop_together(self.runtime, self.stop)  # a signal before the first step
            if self.recipe.machine.compile:
                batches = self._compiled(batches)
            self.log.start_clock(state.step)
            while state.step < self.total_steps:
                # Wait for the images of the step; the device still computes the step before.
                began = moment(self.runtime.device)
                micro_batches = take(batches, len(self.own), self.stop.miss_images)
                waited = began, moment(self.runtime.device)
                # Tell the device to compute the step. The update carries this process's stop flag: all
                # processes learn of a signal, or that one has no images, at the same step, without another
                # exchange.
                update = self.train_step.update(state.step, micro_batches, self.stop.raised)
                self.pending.append((state.step, update, waited, micro_batches))
                # On a GPU read and log the numbers of the step before, so that it never waits for the next
                # batch; all of them before anything is logged, scored or saved. Only here the host waits for
                # the device, and a signal stops the run.
                if self.log_pending(keep=0 if self._is_read_at_once() else self.steps_behind):
                    raise Stopped
                # Score first: it decides which checkpoints are the best. Then save.
                self.measure_if_due()
                if state.step == self.total_steps or is_due(state.step, every):
                    state.save(last=state.step == self.total_steps)
        except Stopped:
            # Every process is at the same step: save it together, and wait until it is on disk.
            self.log_pending()
            state.save(last=True)
            raise
        except Exception as error:
            with suppress(Exception):  # the first error is the one to report
                self.log_pending()
            state.rescue(error, self.stop)
            raise

    def _compiled(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Return the same batches, after a first pass over one update's that triggers torch.compile."""
        began, journal = time.perf_counter(), self.log.journal
        journal.show_progress(at_once=True, text="compiling")
        first = take(batches, len(self.own), self.stop.miss_images)
        self.train_step.warm_up(first)
        journal.write("compile", step=self.state.step, seconds=round(time.perf_counter() - began, 3))
        return chain(first, batches)

    def _is_read_at_once(self) -> bool:
        """Whether the numbers of this step are read before the next one begins."""
        recipe, step = self.recipe, self.state.step
        often = (recipe.evaluation.every_steps, self._probe_every, recipe.checkpoint.every_steps)
        is_now = step == self.total_steps or self.log.reads(step)
        return is_now or any(is_due(step, every) for every in often)

    def log_pending(self, keep: int = 0) -> bool:
        """Log all but the newest `keep` updates; return whether a process should stop.

        Raises:
            DataError: too many images cannot be used.
            VitctlError: too many updates in a row were not finite.
        """
        stopped, counts = False, self.state.counts
        while len(self.pending) > keep:
            step, update, waited, batches = self.pending.popleft()
            result = update.result()
            stopped = stopped or result.stop
            if result.lost:  # it changed nothing, on any process: the state is that of the step before
                self.pending.clear()
                self.state.go_to(step - 1)
                break
            counts.add(result)
            self.log.add(
                step,
                result,
                seconds_between(*waited),
                update.forward,
                batches,
                num_bad=counts.num_bad,
                num_skipped=counts.num_skipped,
            )
            # Checks that end the run come last: the step and its log are complete.
            self._check_budget(step)
            counts.check_progress(step, result, self.log.folder / SKIPPED)
        return stopped

    def _check_budget(self, step: int) -> None:
        read, allowed = step * self.recipe.schedule.batch_size, self.recipe.data.max_bad_fraction
        if (num_bad := self.state.counts.num_bad) > allowed * max(read, BUDGET_FLOOR):
            raise DataError(
                f"{num_bad} of {read} images read so far cannot be used, more than data.max_bad_fraction = "
                f"{allowed:g} allows; {self.log.bad_samples()} lists them: {self.log.bad_reasons()}; fix the "
                f"data, or resume with: vitctl resume {typed(self.log.folder)} --set "
                f"data.max_bad_fraction=SHARE --allow data.max_bad_fraction"
            )

    # Evaluation by schedule

    @property
    def _probe_every(self) -> int:
        return self.recipe.fewshot_probe.every_steps if isinstance(self.recipe, Pretrain) else 0

    def measure_if_due(self) -> None:
        """Score and probe the network after this step, if the recipe asks for it and the log has it not yet.

        The training ends at this step if the last evaluation.patience scores have not improved the best.
        """
        state, log, asked, step = self.state, self.log, self.recipe.evaluation, self.state.step
        is_last = step == self.total_steps
        scores_now = is_last or is_due(step, asked.every_steps)
        if self.score and scores_now and not self._main_has(step in state.scores):
            score, seconds = self._measured(self.score)
            state.scores[step] = replace(score, metric=asked.metric)
            log.write_score(step, state.scores[step], seconds)
        probes_now = (is_last and self._probe_every > 0) or is_due(step, self._probe_every)
        if self.probe and probes_now and not self._main_has(step in log.probed):
            log.write_fewshot(step, *self._measured(self.probe))
        if self._is_stale(step):
            best = max(state.scores, key=lambda at: (state.scores[at].deciding, -at), default=0)
            numbers = {"total_steps": self.total_steps, "best": best, "patience": asked.patience}
            log.journal.write("early_stop", step=step, **numbers)
            self.total_steps = step  # the learning rate stays that of the planned length

    def _measured(self, function: Callable[[Model], Found]) -> tuple[Found, float]:
        """Return what a function finds of the network, or of its average if there is one, and its seconds."""
        if self.state.step == self.total_steps:
            self.state.save(last=True)  # if the process ends during the last evaluation, no step is lost
        began = time.perf_counter()
        with self.state.averaged() as network:
            found = function(network)
        return found, round(time.perf_counter() - began, 3)

    def _ends_at(self, step: int) -> bool:
        return step == self.total_steps or self._is_stale(step)

    def _is_stale(self, step: int) -> bool:
        asked = self.recipe.evaluation
        if not asked.patience or step >= self.total_steps or not is_due(step, asked.every_steps):
            return False
        return self._main_has(Score.since_best(self.state.scores) >= asked.patience)

    def _main_has(self, has: bool) -> bool:
        """Return the main process's value: after a resume only that one has read the log."""
        return self.runtime.sum([float(self.runtime.is_main and has)])[0] > 0
