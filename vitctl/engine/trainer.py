"""One training in a folder: prepared from a recipe, resumed, trained, logged, scored, saved.

`Trainer` reads from top to bottom in the order in which a run does it.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from vitctl.data.images.transforms import EvalTransform, TrainTransform
from vitctl.data.loader.batches import Batch, train_batches
from vitctl.data.source.order import Order, SampleOrder, own_slots
from vitctl.data.source.uneven import correction
from vitctl.data.source.verification import Verification
from vitctl.data.source.views import Source, sample_key
from vitctl.engine.agreement import (
    FIX,
    agreed_checkpoint,
    agreed_tensors,
    check_inputs,
    check_resumable,
    check_same_state,
    identity,
    words_of_start,
)
from vitctl.engine.checkpoint import (
    MOVE_IT,
    Peers,
    SavedCheckpoint,
    Saver,
    check_space,
    foreign,
    parts,
    set_aside_after,
)
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
from vitctl.engine.journal import (
    ADAPTERS,
    AVERAGE,
    CHECKPOINTS,
    COMPUTED_ON,
    LOG,
    LOG_HEAD,
    MODEL,
    OPTIMIZER,
    RECIPE,
    STEP_RECORDS,
    STEPS_HEAD,
    UNRECORDED,
    Journal,
    Record,
    cut_after,
    head,
    read_logged_ends,
    read_records,
    records_agreed,
    run_of,
)
from vitctl.engine.mixing import Mixing, classification
from vitctl.engine.optimizer import (
    Average,
    averaged,
    build_optimizer,
    load_optimizer_tensors,
    trained_names,
)
from vitctl.engine.preemption import StopFlag, Stopped
from vitctl.engine.runtime import (
    Runtime,
    check_same,
    gather_texts,
    moment,
    new_group,
    num_workers,
    raised_on_all,
    seconds_between,
    slowest,
)
from vitctl.engine.schedule import lanes_of, learning_rate, total_steps
from vitctl.engine.sharding import is_sharded, place_of, rows_of, shard_as
from vitctl.engine.step import (
    SKIPPED,
    AllReduced,
    ByLanes,
    Counts,
    Gradients,
    LaneSum,
    Result,
    TrainStep,
    Update,
    check_progress,
    check_share,
    in_words,
    skipped_record,
    take,
)
from vitctl.engine.trace import (
    Recorder,
    end_of_steps,
    read_steps,
    record_problem,
    weights_checksum,
)
from vitctl.errors import CheckpointError, DataError, VitctlError, is_lost_peer
from vitctl.models.blocks import compile_blocks
from vitctl.models.build import Model
from vitctl.models.flops import computed_flops
from vitctl.models.lora import adapted_layers
from vitctl.models.variants import check_recomputed, to_dict
from vitctl.recipe.known import Comparison, known_in_words
from vitctl.recipe.neutral_keys import unlike_known
from vitctl.recipe.schema import Finetune, Pretrain, Vtab, frozen_places, lora_of
from vitctl.recipe.sections import OPTIMIZERS
from vitctl.system.process import HERE
from vitctl.system.remote import GaveUpError
from vitctl.system.text import typed

BAD_SAMPLES = "bad_samples*.jsonl"  # rank 0 writes the one without a number
_PIXELS_OF = 64  # images of a step, those of the main process, whose pixels are logged
BUDGET_FLOOR = 10_000  # images; the budget of bad samples is computed from at least this many


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


class Trainer(TrainStep):
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
        runtime, s, machine = run.runtime, recipe.schedule, recipe.machine
        self.recipe, self.runtime, self.folder, self.journal = recipe, runtime, run.folder, run.journal
        self.images, self.score, self.probe_model = images, score, probe
        self.total_steps = total_steps(
            len(images.train), s.batch_size, steps=s.total_steps, epochs=s.total_epochs
        )
        self.probe_every = recipe.fewshot_probe.every_steps if isinstance(recipe, Pretrain) else 0
        # Processes that read other files would train something that no recipe describes.
        in_parts = any(tensor.is_meta for tensor in model.parameters())
        read = {} if in_parts else model.state_dict()
        check_inputs(runtime, read, model.config, meta, (images.train, images.scored))

        # How it is computed. Weights are sharded before the micro-batch is measured, and it is measured on
        # the loss itself.
        self.lanes = lanes_of(recipe, runtime.num_processes)
        share = -(-s.batch_size // runtime.num_processes)
        self.workers = num_workers(machine, runtime.device, runtime.num_processes)
        self.own = own_slots(s.batch_size, self.lanes, runtime.rank, runtime.num_processes)
        self.needs_labels = objective is None
        weights = None
        if recipe.loss.class_weights != "none":
            found = correction(recipe.loss.class_weights, "shuffle", images.train)
            weights = torch.from_numpy(found.factors).to(runtime.device)
        self.normalise = runtime.normaliser(tuple(meta["mean"]), tuple(meta["std"]))
        objective = partial(
            objective or classification(recipe.loss, images.mixing, recipe.seed, weights),
            normalise=self.normalise,
        )
        if teacher is not None:
            assert isinstance(recipe, Finetune)
            colours = tuple(meta["mean"]), tuple(meta["std"])
            objective = Distilled(objective, recipe.distillation, teacher, model, colours, runtime)
        kernels = choose_kernels(machine, model.config, runtime, lanes=self.lanes is not None)
        use_kernels(kernels)
        check_recomputed(model.config, machine.checkpoint_blocks)
        model.checkpoint_blocks = machine.checkpoint_blocks
        if machine.compile:
            compile_blocks(model)
        drawn = shard_as(machine, runtime, model, start, seed=recipe.seed, probed=probe is not None)
        check_same({"start weights": drawn + words_of_start(runtime, model, start)}, FIX)
        self.micro_batch = choose_micro_batch(
            recipe, runtime, run.folder, model, objective, lambda n: next(self.batches(0, n, 0)), share
        )

        # What the training is: checkpoints of another one are refused. Lanes promise the same bits, so what
        # computes them belongs to it.
        how = {**kernels.model_dump(), "compile": machine.compile}
        exactly = computation(runtime, **how, versions=versions()) if self.lanes else {}
        self.identity = identity(
            recipe,
            run.folder,
            images.train,
            images.scored,
            start_weights_sha256,
            exactly,
            teacher.sha256 if teacher else "",
            network=to_dict(model.config),
        )
        self.facts: dict[str, Any] = {  # recorded at each start
            **self.identity.state,
            "recipe_file": run.recipe_digest,
            **computed(runtime),
            "micro_batch": s.leaf_images if s.lanes else self.micro_batch,
            **how,
            "checkpoint_blocks": machine.checkpoint_blocks,
            "lanes": s.lanes,
            "draws": draws_noise(recipe, model.config),
        }
        self.flops_per_image = computed_flops(
            model.config,
            frozen_places(recipe, model.config),
            adapters=lora_of(recipe).rank > 0,
            teacher=teacher.model.config if teacher else None,
        )
        self.steps_behind = int(runtime.device.type == "cuda")  # that numbers are read late

        wrapped = runtime.wrap(model, ddp=self.lanes is None, always_synced=self.micro_batch >= share)
        gradients: Gradients = AllReduced(runtime, wrapped, recipe.seed)
        if self.lanes is not None:
            beside = torch.cuda.Stream() if self.steps_behind else None  # type: ignore[no-untyped-call]
            tree = LaneSum(self.lanes, runtime.rank, runtime.num_processes, runtime.nodes, beside)
            gradients = ByLanes(runtime, model, recipe.seed, tree)
        average = recipe.averaging
        is_zero1 = getattr(machine, "sharding", "none") == "zero1"
        rows = rows_of(model, runtime.device, runtime.num_processes) if is_zero1 else {}
        super().__init__(
            runtime=runtime,
            model=wrapped,
            unwrapped=model,
            average=Average(model, average.decay, debias=average.debias) if average.decay else None,
            optimizer=build_optimizer(model, recipe.optimizer, rows),
            objective=objective,
            gradients=gradients,
            lr=learning_rate(recipe, self.total_steps, len(images.train)),
            batch_size=s.batch_size,
            clip_norm=recipe.optimizer.clip_norm,
            stop=run.stop,
            norm_dtype=torch.float64 if self.lanes else None,
        )
        kept = recipe.checkpoint.keep_last, recipe.checkpoint.keep_best
        self.saver = Saver(run.folder / CHECKPOINTS, model.config, meta, *kept, journal=run.journal)
        self.writes = runtime.is_main  # a checkpoint, or a part of one
        if place := place_of(trained_names(self.optimizer, model)):
            replica, part, count = place
            exchange = partial(gather_texts, group=new_group(count))
            self.saver.peers, self.writes = Peers(part, count, exchange), replica == 0
        self.start_state()

    def start_state(self) -> None:
        """Set what a training knows before its first step."""
        self.counts = Counts()
        self.finished_step = self.saved_step = self.logged_step = self.counted_step = -1
        self.resumed_from = ""  # digest of the checkpoint
        self.scores: dict[int, Score] = {}
        self.probed: set[int] = set()
        self.known = self.comparison(())
        self.recorder: Recorder | None = None
        self.changing = threading.Lock()  # held while weights, optimizer or average change
        # Not read from the device yet: step, update, moments around the wait for its images.
        self.pending: deque[tuple[int, Update, tuple[Any, Any], list[Batch]]] = deque()
        self.slowest: dict[str, Any] = {}
        self._window, self._waited = (
            (0.0, 0),
            0.0,
        )  # of the throughput logged next: start, step; without images

    def batches(
        self, first_step: int, micro_batch: int | None = None, workers: int | None = None
    ) -> Iterator[Batch]:
        """Yield micro-batches of this process after `first_step` finished steps, without end: a function of
        seed and step.
        """
        return train_batches(
            self.images.train,
            self.images.order or Order(len(self.images.train), self.recipe.seed),
            self.images.augmentation,
            seed=self.recipe.seed,
            batch_size=self.recipe.schedule.batch_size,
            micro_batch=self.micro_batch if micro_batch is None else micro_batch,
            rank=self.runtime.rank,
            num_processes=self.runtime.num_processes,
            first_step=first_step,
            num_workers=self.workers if workers is None else workers,
            lanes=self.lanes,
            neighbours=self.images.mixing.is_on,
            needs_labels=self.needs_labels,
            checksums=self.recipe.log.trace,
            pinned=self.runtime.device.type == "cuda",
            outages=True,
        )

    def fit(self) -> Score | None:
        """Train to the last step, resuming from the newest checkpoint in the folder.

        Returns:
            the score after the last step; None when there are no images to score.

        Raises:
            Stopped: a signal came, or images could not be fetched; the state is saved.
            DataError: too many images cannot be read.
        """
        self.stop.save_alone = self.save_alone
        try:
            # 1. Load the newest checkpoint, and cut all records back to its step.
            step = self.resume()
            if self.runtime.is_main:
                kept = self.saver.last + self.saver.best
                slots = OPTIMIZERS[self.recipe.optimizer.name].slots
                check_space(self.saver.root, self.unwrapped, self.average, slots=slots, kept=kept)
            # 2. A run that stopped between a step and its score has none of that step yet.
            if step:
                self.evaluate_if_due(step)
                self.stop_if_stale(step)
            # 3. Train. A finished run only gives its score again.
            if self.recipe.log.trace:  # of a finished run it tells where its inputs were found last
                self.recorder = Recorder(
                    self.folder, self.journal, self.runtime, self.unwrapped, self.own, self.batch_size
                )
                self.recorder.start(step, self.facts, self.resumed_from)
            if step < self.total_steps:
                if self.known.bands and (text := unlike_known(run_of(self.folder) / RECIPE)):
                    self._warn(text, step)
                self.train_from(step)
            # 4. A signal after the last step still stops the run: it resumes at its result.
            stop_together(self.runtime, self.stop)
            self.report_problems()
        finally:
            self.stop.save_alone = None
            self.saver.finish()
        return self.scores.get(self.total_steps)

    def report_problems(self) -> None:
        """Warn about skipped updates and unusable images of a finished run.

        Fail if most updates were skipped.
        """
        check_share(self.total_steps, self.counts, self.folder / SKIPPED)
        if self.counts.num_skipped:
            text = f"{self.counts.num_skipped} of {self.total_steps} updates were not finite and were skipped"
            self._warn(f"{text}; {self.folder / SKIPPED} lists them", self.total_steps)
        if self.counts.num_bad:
            text = f"images that could not be used: {self.bad_reasons()}"
            self._warn(f"{text}; {self._bad_samples()} lists them", self.total_steps)

    def resume(self) -> int:
        """Resume from the newest complete checkpoint that rank 0 sees; returns its step, 0 without any.

        Raises:
            CheckpointError: a process could not read it, it belongs to another training, or the records
                beside it belong to another state.
            LaunchError: the state is not the same on all processes.
        """
        saved, problems = agreed_checkpoint(self.runtime, self.folder / CHECKPOINTS)
        for problem in problems:
            self._warn(problem, 0)
        step = 0
        if saved is not None:
            step = saved.step
            with raised_on_all():
                log = read_logged_ends(self.folder) if self.runtime.is_main else None
                if log is not None and (problem := foreign(saved, log, {})):
                    raise CheckpointError(f"{saved.folder}: {problem}; {MOVE_IT}")
            if log is not None:
                metric, scored = self.recipe.evaluation.metric, Score.by_step(read_records(self.folder / LOG))
                self.scores |= {at: replace(one, metric=metric) for at, one in scored.items() if at <= step}
            ends_here = step == self.total_steps or self._is_stale(step)
            if change := check_resumable(
                self.runtime, saved, self.total_steps, self.identity, can_go_on=not ends_here
            ):
                self._warn(change, step)
            self.load(saved)
            self._check_records(saved)
            was, now = saved.state.get(COMPUTED_ON, {}), self._computed_on()
            other = [f"{n} {was[n]}, here {now[n]}" for n in now if was.get(n, now[n]) != now[n]]
            if other:
                text = "the last digits of later numbers differ from those of a run that was not stopped"
                self._warn(f"the checkpoint was computed with {', '.join(other)}: {text}", step)
        state = parts(self.unwrapped, self.average, self.optimizer)
        check_same_state(self.runtime, step, self.unwrapped, state, saved)
        if self.runtime.is_main:
            # The logs go back to the checkpoint too: what came after it will be written again.
            set_aside_after(self.folder / CHECKPOINTS, step)
            logs = (self.folder / name for name in (LOG, STEP_RECORDS, SKIPPED))
            for path in chain(logs, self.folder.glob(BAD_SAMPLES)):
                cut_after(path, step)
            records = read_records(self.folder / LOG)
            self.probed |= {r["step"] for r in records if r.get("kind") == "fewshot" and "step" in r}
            self.known = self.comparison(records)
            if step:
                self.journal.write("resume", step=step, total_steps=self.total_steps)
            records_agreed(run_of(self.folder))
        return step

    def _computed_on(self) -> dict[str, Any]:
        """Return what rounds otherwise where it is another; of a GPU no threads."""
        names = ("device_name", "threads", "attention", "linear")
        found = {name: self.facts.get(name, 0) for name in names}
        if self.runtime.device.type == "cpu":
            found["instructions"] = torch.backends.cpu.get_cpu_capability()
        return found

    def comparison(self, records: Sequence[Record]) -> Comparison:
        """Return the comparison with [known], after the records of the log so far."""
        known, s = self.recipe.known, self.recipe.schedule
        length = s.total_epochs if known.unit == "epochs" else self.total_steps
        return Comparison(known, self.total_steps, length, len(self.images.train.class_names), records)

    def compare(self, step: int, **numbers: float) -> dict[str, Any]:
        """Return what the log says of numbers beside [known]; warn once when the run is flagged."""
        was = self.known.flagged
        found = self.known.of(step, **numbers)
        if self.known.flagged and not was:
            self._warn(
                f"[known]: {known_in_words(found)}; honest runs are seldom outside {self.known.strikes} "
                f"times: check learning rate, warm-up, labels, image order and normalisation",
                step,
            )
        return found

    def load(self, saved: SavedCheckpoint) -> None:
        """Load a checkpoint. All processes call this together."""
        held = {name: one for one, name in trained_names(self.optimizer, self.unwrapped).items()}
        read = agreed_tensors(self.runtime, saved, self.unwrapped.state_dict(), held)
        frozen = {
            name: layer.weight for name, layer in adapted_layers(self.unwrapped).items()
        }  # saved merged
        try:
            self.unwrapped.load_state_dict(read[MODEL] | read[ADAPTERS[MODEL]] | frozen)
        except RuntimeError as error:
            if "loading state_dict" not in str(error):
                raise
            raise CheckpointError(
                f"{saved.folder}: is of a network of other sizes; undo the change of model, image size or "
                f"classes, or choose another folder with --out"
            ) from None
        load_optimizer_tensors(self.optimizer, self.unwrapped, read[OPTIMIZER])
        self.counts = Counts(**{name: int(saved.state.get(name, 0)) for name in asdict(Counts())})
        if self.average is not None:
            averages = read[AVERAGE] | read[ADAPTERS[AVERAGE]]
            self.average.load(averages, saved.step - self.counts.num_skipped)
        self.saved_step = saved.step

    def _check_records(self, saved: SavedCheckpoint) -> None:
        """Check that log.jsonl, steps.jsonl and the weights are those that a checkpoint was saved with.

        Raises:
            CheckpointError: they are not; the same line on every process.
        """
        with raised_on_all():
            if self.runtime.is_main and (problem := self._record_problem(saved)):
                raise CheckpointError(
                    f"{saved.folder}: {problem}; copy the files of the run back, or delete this folder to "
                    f"resume from the checkpoint before it"
                )
        self.resumed_from = saved.digest

    def _record_problem(self, saved: SavedCheckpoint) -> str:
        weights = "" if is_sharded(self.unwrapped) else weights_checksum(self.unwrapped)
        try:
            ends = read_logged_ends(self.folder)
            problem = record_problem(saved, read_steps(self.folder), ends, weights=weights)
        except VitctlError as error:
            return str(error)
        if ends.broken_at:
            return f"{LOG}, line {ends.broken_at}, does not follow the line before"
        return problem

    def train_from(self, step: int) -> None:
        """Train from `step` finished steps to the last.

        Raises:
            Stopped: a signal came to any process; the state is saved.
            Exception: the error that ended the training; the last consistent state is saved before.
        """
        # Batches are a function of seed and step: a resumed run goes on with the images that come next.
        batches = self.batches(step)
        self.journal.show_progress(at_once=True, step=step, total_steps=self.total_steps)
        if self.recipe.machine.compile:
            batches = self._compiled(batches, step)
        self.start_clock(step)
        self.run_steps(batches, step)

    def _compiled(self, batches: Iterator[Batch], step: int) -> Iterator[Batch]:
        """Return the same batches, after a first pass over one update's that triggers torch.compile."""
        try:
            stop_together(self.runtime, self.stop)
        except Stopped:
            self.save(step, last=True)
            raise
        began = time.perf_counter()
        self.journal.show_progress(at_once=True, text="compiling")
        first = take(batches, len(self.own), self.stop)
        self.warm_up(first)
        self.journal.write("compile", step=step, seconds=round(time.perf_counter() - began, 3))
        return chain(first, batches)

    def run_steps(self, batches: Iterator[Batch], step: int) -> None:
        """Take the steps after `step`; log, score and save after each of them what is due.

        Args:
            batches: endless micro-batches of this process, from this step on.
            step: finished steps.
        """
        # Updates that the device may still compute. On a GPU the numbers of a step are read one step later,
        # so that it never waits for the next batch.
        self.pending.clear()
        self.finished_step = HERE.step = step
        try:
            stop_together(self.runtime, self.stop)  # a signal before the first step
            while step < self.total_steps:
                # Wait for the images of the step; the device still computes the step before.
                began = moment(self.runtime.device)
                micro_batches = take(batches, len(self.own), self.stop)
                waited = began, moment(self.runtime.device)
                # Tell the device to compute the step. The update carries this process's stop flag: all
                # processes learn of a signal, or that one has no images, at the same step, without another
                # exchange.
                update = self.update(step, micro_batches)
                step += 1
                self.pending.append((step, update, waited, micro_batches))
                # The step counts. `before_update` took the lock, so that no other thread saves a state
                # between two steps.
                self.finished_step = HERE.step = step
                self.is_updating = False
                self.changing.release()
                # Read and log the numbers of the step before; all of them before anything is logged, scored
                # or saved. Only here the host waits for the device, and a signal stops the run.
                if self.log_pending(keep=0 if self._is_read_at_once(step) else self.steps_behind):
                    raise Stopped
                # Score first: it decides which checkpoints are the best. Then save.
                self.evaluate_if_due(step)
                self.stop_if_stale(step)
                if step == self.total_steps or is_due(step, self.recipe.checkpoint.every_steps):
                    self.save(step, step == self.total_steps)
        except Stopped:
            # Every process is at the same step: save it together, and wait until it is on disk.
            self.log_pending()
            self.save(self.finished_step, last=True)
            raise
        except Exception as error:
            with suppress(Exception):  # the first error is the one to report
                self.log_pending()
            self.rescue(step, error)
            raise

    def log_pending(self, keep: int = 0) -> bool:
        """Log all but the newest `keep` updates; return whether a process should stop."""
        stopped = False
        while len(self.pending) > keep:
            step, update, waited, micro_batches = self.pending.popleft()
            result = update.result()
            stopped = stopped or result.stop
            if result.lost:  # it changed nothing, on any process: the state is that of the step before
                self.pending.clear()
                self.finished_step = HERE.step = step - 1
                break
            self.log(step, result, seconds_between(*waited), micro_batches)
        return stopped

    def evaluate_if_due(self, step: int) -> None:
        """Score and probe the model after this step, if the recipe asks for it."""
        is_last = step == self.total_steps
        if is_last or is_due(step, self.recipe.evaluation.every_steps):
            self.evaluate(step)
        if is_due(step, self.probe_every) or (is_last and self.probe_every):
            self.probe(step)

    def stop_if_stale(self, step: int) -> None:
        """End the training at this step if the last evaluation.patience scores have not improved the best.

        The scores are those of the log, which only the main process has read after a resume: it decides.
        """
        if self._is_stale(step):
            best = max(self.scores, key=lambda at: (self.scores[at].deciding, -at), default=0)
            self.journal.write(
                "early_stop",
                step=step,
                total_steps=self.total_steps,
                best=best,
                patience=self.recipe.evaluation.patience,
            )
            self.total_steps = step  # the learning rate stays that of the planned length

    def _is_stale(self, step: int) -> bool:
        e = self.recipe.evaluation
        if not e.patience or step >= self.total_steps or not is_due(step, e.every_steps):
            return False
        return self._main_has(Score.since_best(self.scores) >= e.patience)

    def before_update(self) -> None:
        """Wait for a checkpoint still copying weights, and let no other thread save until the step counts."""
        self.saver.wait_for_copy()
        self.changing.acquire()

    def _is_read_at_once(self, step: int) -> bool:
        often = (
            self.recipe.log.every_steps,
            self.recipe.evaluation.every_steps,
            self.probe_every,
            self.recipe.checkpoint.every_steps,
        )
        is_now = step == self.total_steps or self.known.logs(step)
        return is_now or any(is_due(step, every) for every in often)

    def log(self, step: int, result: Result, waited: float, micro_batches: list[Batch]) -> None:
        """Count unreadable images and skipped updates, record the step, and log it every log.every_steps.

        Args:
            step: finished steps, this one included.
            result: of the update.
            waited: seconds that the loop waited for its images; on a GPU those in which it had nothing to do.
            micro_batches: of this process.
        """
        self.counts.add(result)
        for batch in micro_batches:
            for sample, key, reason in batch.bad:
                bad = {"step": step, "sample": sample, "key": key, "reason": reason}
                self.journal.append(Path(self._bad_samples(self.runtime.rank)), bad)
        if result.skipped:
            record = skipped_record(
                step, self.runtime.rank, result, self.unwrapped, self._keys(micro_batches)
            )
            self.journal.append(self.folder / SKIPPED, record)
            self._warn(f"step {step} was not finite and is skipped: {in_words(result)}", step)
        every = self.recipe.log.every_steps
        is_logged = is_due(step, every) or self.known.logs(step) or step == self.total_steps
        # The record waits for the other processes. They have nothing else to log of a step like this one.
        if not (result.num_bad or result.skipped):
            self.counted_step = step
        self._waited += waited
        if is_logged:
            own = [self._waited, sum(seconds_between(*one) for one in self.forward)]
            seconds = self.runtime.gather(torch.tensor(own, dtype=torch.float64), everywhere=False)
            self.slowest = slowest(seconds, time.perf_counter() - self._window[0])
        if self.recorder is not None:
            with_weights = is_logged or is_due(step, self.recipe.checkpoint.every_steps)
            self.recorder.add(step, result, micro_batches, weights=with_weights)
        self._log_step(step, result, micro_batches if is_logged else [])
        self.logged_step = step
        # Checks that end the run come last: the step and its log are complete.
        read, allowed = step * self.batch_size, self.recipe.data.max_bad_fraction
        if self.counts.num_bad > allowed * max(read, BUDGET_FLOOR):
            raise DataError(
                f"{self.counts.num_bad} of {read} images read so far cannot be used, more than "
                f"data.max_bad_fraction = {allowed:g} allows; {self._bad_samples()} lists them: "
                f"{self.bad_reasons()}; fix the data, or resume with: vitctl resume {typed(self.folder)} "
                f"--set "
                f"data.max_bad_fraction=SHARE --allow data.max_bad_fraction"
            )
        check_progress(step, self.counts, result, self.folder / SKIPPED)

    def _keys(self, micro_batches: list[Batch]) -> list[str]:
        return [self.key(int(sample)) for batch in micro_batches for sample in batch.samples]

    def key(self, sample: int) -> str:
        """Return the key of a training image; its number where the server of remote shards is away."""
        try:
            return sample_key(self.images.train, sample)
        except GaveUpError as error:
            self.stop.outage = str(error)
            return f"number {sample}"

    def _log_step(self, step: int, result: Result, micro_batches: list[Batch]) -> None:
        """Show the progress; log the step if its micro-batches are given."""
        read = step * self.batch_size
        began, first = self._window
        seconds = time.perf_counter() - began
        rate = (step - first) * self.batch_size / seconds
        if not micro_batches:
            self.journal.show_progress(
                step=step,
                total_steps=self.total_steps,
                samples=read,
                loss=result.loss,
                lr=result.lr,
                images_per_second=rate,
                data_wait=self._waited / seconds,
                num_bad=self.counts.num_bad,
                **self.slowest,
            )
            return
        images = torch.cat([batch.images[:_PIXELS_OF] for batch in micro_batches[:_PIXELS_OF]])
        pixel_std = float(f"{self.normalise(images[:_PIXELS_OF]).float().std().item():.5g}")
        flops, peak = rate * self.flops_per_image / self.runtime.num_processes, self.runtime.peak_flops
        self.journal.write(
            "train",
            step=step,
            total_steps=self.total_steps,
            samples=read,
            epoch=round(read / len(self.images.train), 4),
            loss=result.loss,
            lr=result.lr,
            grad_norm=result.grad_norm,
            pixel_std=pixel_std,
            images_per_second=round(rate, 2),
            tflops=round(flops / 1e12, 4),
            mfu=round(flops / peak, 4) if peak else None,
            data_wait=round(self._waited / seconds, 4),
            num_bad=self.counts.num_bad,
            num_skipped=self.counts.num_skipped,
            **self.slowest,
            **self.compare(step, loss=result.loss, pixel_std=pixel_std),
        )
        self.runtime.accelerator.log(
            {"loss": result.loss, "lr": result.lr, "grad_norm": result.grad_norm}, step=step
        )
        self.start_clock(step)

    def start_clock(self, step: int) -> None:
        """Measure the throughput from here."""
        self._window, self._waited = (time.perf_counter(), step), 0.0
        self.forward.clear()

    def _exclude_time(self, seconds: float) -> None:
        """Exclude time that was not spent on training from the throughput."""
        self._window = (self._window[0] + seconds, self._window[1])

    def _bad_samples(self, rank: int | None = None) -> str:
        """Return the file in which a rank lists them, or the pattern of all: over a network file system
        processes that append to one file overwrite each other.
        """
        which = "*" if rank is None and self.runtime.num_processes > 1 else f"_{rank:02d}" if rank else ""
        return str(self.folder / BAD_SAMPLES.replace("*", which))

    def bad_reasons(self) -> str:
        """Return how many images could not be used, by reason, the most frequent first."""
        found = chain.from_iterable(map(read_records, self.folder.glob(BAD_SAMPLES)))
        counts = Counter(str(record.get("reason")) for record in found)
        return ", ".join(f"{count} {reason}" for reason, count in counts.most_common())

    def _warn(self, text: str, step: int) -> None:
        self.journal.write("warning", step=step, text=text)

    def evaluate(self, step: int) -> None:
        """Score the model, or its average when there is one, once per step."""
        if self.score is None or self._main_has(step in self.scores):
            return
        if step == self.total_steps:
            self.save(step, last=True)  # if the process ends during the last evaluation, no step is lost
        began = time.perf_counter()
        with self._averaged():
            score = replace(self.score(self.unwrapped), metric=self.recipe.evaluation.metric)
        self.scores[step] = score
        seconds = round(time.perf_counter() - began, 3)
        found = self.compare(step, accuracy=score.accuracy)
        self.journal.write("evaluate", step=step, **score.numbers, **found, seconds=seconds)
        self.runtime.accelerator.log({"accuracy": score.accuracy, score.metric: score.deciding}, step=step)
        self._exclude_time(seconds)

    def probe(self, step: int) -> None:
        """Log few-shot accuracies of the model, or of its average when there is one, once per step."""
        if self.probe_model is None or self._main_has(step in self.probed):
            return
        if step == self.total_steps:
            self.save(step)
        began = time.perf_counter()
        with self._averaged():
            scores = self.probe_model(self.unwrapped)
        self.probed.add(step)
        seconds = round(time.perf_counter() - began, 3)
        means = {shots: sum(values) / len(values) for shots, values in scores.items()}
        for shots, values in scores.items():
            self.journal.write(
                "fewshot", step=step, shots=shots, accuracy=means[shots], seeds=values, seconds=seconds
            )
        self.runtime.accelerator.log({f"fewshot_{shots}": mean for shots, mean in means.items()}, step=step)
        self._exclude_time(seconds)

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        if self.average is None:
            yield
            return
        self.saver.wait_for_copy()  # the averages take the place of the weights
        with self.changing, averaged(self.unwrapped, self.average):
            yield

    def _main_has(self, has: bool) -> bool:
        """Return the main process's value: after a resume only that one has read the log."""
        return self.runtime.sum([float(self.runtime.is_main and has)])[0] > 0

    def save(self, step: int, last: bool = False) -> None:
        """Save a checkpoint of this step, unless there is one; the `last` of a process is on disk on return.

        Raises:
            CheckpointError: the last one could not be written; an earlier failure is retried by the next
                save.
        """
        self._finish_save()
        if self.saved_step != step:
            with self.changing:
                self.start_saving(step)
        if not last and self.recipe.checkpoint.background:
            return
        problem = self._finish_save()
        if problem and last:
            raise CheckpointError(
                f"{problem}; earlier checkpoints are complete: free space or fix permissions, then: vitctl "
                f"resume "
                f"{typed(self.folder)}"
            )
        if self.runtime.is_main:
            self.saver.keep(self._deciding)

    def start_saving(self, step: int) -> None:
        """Start to write a checkpoint of this step; with a sharded model all processes take part."""
        everything = list(parts(self.unwrapped, self.average, self.optimizer))
        state: dict[str, Any] = {}
        if self.runtime.is_main:
            state = {"samples": step * self.batch_size, **asdict(self.counts), **self.identity.state}
            state |= dict(zip((STEPS_HEAD, UNRECORDED), end_of_steps(self.folder, step), strict=True))
            state |= {LOG_HEAD: head(self.folder / LOG), COMPUTED_ON: self._computed_on()}
        if self.writes:
            self.saver.start(step, everything, state, self._deciding)
        self.saved_step = step

    def _finish_save(self) -> str:
        """Wait for the save in progress; returns its problem on every process, "" when it is complete."""
        with self.changing:
            problem = self.saver.finish()
        problem = self.runtime.broadcast(problem)
        if problem:
            self.saved_step = -1
        return problem

    @property
    def _deciding(self) -> dict[int, float]:
        return {at: score.deciding for at, score in self.scores.items()}

    def rescue(self, step: int, error: Exception) -> None:
        """After an error: save the state of `step` if it is consistent, and log what the run can resume from.

        Only rank 0 saves, without a collective, and only after an error of this process: when another process
        was lost, it cannot know what that process had logged. Raises nothing.
        """
        if self.stop.given_up:
            threading.Event().wait()  # the thread that gave up saves, and ends this process
        if not (step and self.runtime.is_main) or isinstance(error, CheckpointError):
            return
        what = f"ended by an error ({type(error).__name__}) after step {step}"
        lost = self.runtime.num_processes > 1 and is_lost_peer(str(error))
        reason = (
            self._inconsistent(step) or ("another process was lost" if lost else "") or self._save_now(step)
        )
        saved = f"not saved: {reason}; the" if reason else "which is saved: the"
        self._warn(f"{what}, {saved} run can resume from its newest checkpoint", step)

    def save_alone(self) -> str:
        """Save the last finished step while the main thread waits for a process that does not answer.

        Called by another thread, which ends the process afterwards: the main thread can change nothing any
        more.

        Returns:
            why it was not saved; "" when it is complete on disk.
        """
        step, several = self.finished_step, self.runtime.num_processes > 1
        if step < 1:
            return "no step was finished"
        if not self.runtime.is_main:
            return "only process 0 saves"
        if not self.changing.acquire(blocking=False):
            return "it came in the middle of an update, an evaluation of averaged weights, or a save"
        if several and self.runtime.device.type == "cuda":
            return "the GPU waits for the other process"
        # The others have logged a step before they take part in its record, which a process waits for.
        if several and self.recorder is None and step != self.saved_step:
            return "what the other processes logged is not known"
        # The main thread may wait in the record of this step: the checkpoint then says that it has none.
        if several and step == self.counted_step:
            self.logged_step = step
        return self._inconsistent(step) or self._save_now(step)

    def _inconsistent(self, step: int) -> str:
        """Return why the state cannot be saved by one process; "" where it can."""
        if self.is_updating:
            return "it came in the middle of an update"
        if self.average is not None and self.average.is_swapped:
            return "it came while weights and their average were swapped"
        if step not in (self.logged_step, self.saved_step):
            return "the log of this step is not written"
        return "each process holds a part of the state" if self.saver.peers.count else ""

    def _save_now(self, step: int) -> str:
        """Return why the checkpoint could not be written; "" when it is complete on disk."""
        try:
            if self.saver.finish() or self.saved_step != step:
                self.start_saving(step)
            return self.saver.finish()
        except Exception as error:  # out of memory, a failed device: the first error is the one to report
            return f"{type(error).__name__}: {error}"


def is_due(step: int, every: int) -> bool:
    """Return whether an action that is done every `every` steps (0: never) is due after this step."""
    return every > 0 and step % every == 0
