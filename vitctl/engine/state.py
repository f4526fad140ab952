"""The state of a training: what a checkpoint holds, who may change it when, saving, loading, rescuing."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from vitctl.engine.agreement import (
    Identity,
    agreed_checkpoint,
    agreed_tensors,
    check_resumable,
    check_same_state,
)
from vitctl.engine.checkpoint import (
    MOVE_IT,
    SavedCheckpoint,
    Saver,
    check_space,
    foreign,
    parts,
    set_aside_after,
)
from vitctl.engine.evaluation import Score
from vitctl.engine.journal import (
    ADAPTERS,
    AVERAGE,
    COMPUTED_ON,
    LOG,
    MODEL,
    OPTIMIZER,
    read_records,
)
from vitctl.engine.log import RunLog
from vitctl.engine.optimizer import Average, averaged, load_optimizer_tensors, trained_names
from vitctl.engine.preemption import StopFlag
from vitctl.engine.runtime import Runtime, raised_on_all
from vitctl.engine.store import Store
from vitctl.engine.update import Result
from vitctl.errors import CheckpointError, VitctlError, is_lost_peer
from vitctl.models.build import Model
from vitctl.models.lora import adapted_layers
from vitctl.system.process import HERE
from vitctl.system.text import typed

MAX_IN_A_ROW = 10


@dataclass
class Counts:
    """Counters of a run, stored in its checkpoints."""

    num_bad: int = 0
    num_skipped: int = 0
    skipped_in_a_row: int = 0

    def add(self, result: Result) -> None:
        """Count an update."""
        self.num_bad += result.num_bad
        self.num_skipped += result.skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if result.skipped else 0

    def check_progress(self, step: int, result: Result, where: Path) -> None:
        """Stop a run that makes no progress.

        Raises:
            VitctlError: too many updates in a row were skipped.
        """
        if self.skipped_in_a_row >= MAX_IN_A_ROW:
            raise VitctlError(
                f"step {step}",
                f"the last {MAX_IN_A_ROW} updates were not finite ({result}) and were skipped, "
                f"training stopped; {where} has norms and sample keys",
                "lower optimizer.lr, set optimizer.clip_norm, or lengthen schedule.warmup_steps",
            )

    def check_share(self, steps: int, where: Path) -> None:
        """Fail a finished run that skipped more than half of its updates: its weights are not the result of
        its recipe.

        Raises:
            VitctlError: more than half of the updates were skipped.
        """
        if 2 * self.num_skipped > steps:
            raise VitctlError(
                f"{self.num_skipped} of {steps} updates were not finite and were skipped: this is "
                f"not the training that the recipe describes, so no result was written; {where} "
                "has norms and sample keys",
                fix="lower optimizer.lr, set optimizer.clip_norm, or lengthen schedule.warmup_steps",
            )


class RunState:
    """What a training has reached: network, optimizer and average after `step` finished steps, its counts and
    scores.

    One lock guards the first four. It is held while they change, so that a thread that rescues a run never
    saves a state between two steps.

    Args:
        runtime: this process among its peers.
        network: not wrapped.
        optimizer: of its parameters.
        average: of its weights, or None.
        log: of the run; says which steps are written down.
        saver: writes checkpoints.
        writes: this process writes a checkpoint, or a part of one.
        identity: of the training; checkpoints of another one are refused.
        computed_on: what rounds otherwise where it is another.
        batch_size: images of a step.
        background: saving goes on during the next steps.
        store: the copy of the run that a resume on another machine starts from; None: there is none.
    """

    def __init__(
        self,
        runtime: Runtime,
        network: Model,
        optimizer: Optimizer,
        average: Average | None,
        log: RunLog,
        saver: Saver,
        *,
        writes: bool,
        identity: Identity,
        computed_on: Mapping[str, Any],
        batch_size: int,
        background: bool,
        store: Store | None = None,
    ) -> None:
        self.network, self.optimizer, self.average = network, optimizer, average
        self.counts = Counts()
        self.scores: dict[int, Score] = {}
        self.resumed_from = ""  # digest of the checkpoint
        self._runtime, self._log, self._saver = runtime, log, saver
        self._writes, self._identity, self._computed_on = writes, identity, computed_on
        self._batch_size, self._background, self._store = batch_size, background, store
        self._saved_step = -1
        self._lock = threading.Lock()
        self._is_updating = False  # after an error then, what is in memory belongs to no step
        self.go_to(0)

    # Changing

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Within the block one update changes weights, optimizer and average; at its end the step counts.

        Waits for a checkpoint that is still copying them.
        """
        self._saver.wait_for_copy()
        with self._lock:
            self._is_updating = True
            yield
            self.go_to(self.step + 1)
            self._is_updating = False

    def add_score(self, step: int, score: Score, seconds: float, *, metric: str) -> None:
        """Keep and log the score after a step; `metric` names the number that decides."""
        self.scores[step] = replace(score, metric=metric)
        self._log.write_score(step, self.scores[step], seconds)

    def at_the_start(self) -> "RunState":
        """Return a state of the same network before its first step, with nothing counted."""
        other = copy(self)
        other.counts, other.scores = Counts(), {}
        other.go_to(0)
        return other

    def go_to(self, step: int) -> None:
        """Set the number of finished steps; the threads that watch this process read it too."""
        self.step = HERE.step = step

    @contextmanager
    def averaged(self) -> Iterator[Model]:
        """Within the block the network has its averaged weights, if there are any."""
        if self.average is None:
            yield self.network
            return
        self._saver.wait_for_copy()  # the averages take the place of the weights
        with self._lock, averaged(self.network, self.average):
            yield self.network

    # Saving

    def check_space(self, slots: int) -> None:
        """Check that the disk has space for all checkpoints; `slots`: numbers that the optimizer keeps for
        each weight.
        """
        kept = self._saver.last + self._saver.best
        check_space(self._saver.root, self.network, self.average, slots=slots, kept=kept)

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """A save in progress is complete when the block ends, and in the store."""
        try:
            yield
        finally:
            self._saver.finish()
            if self._saver.sender is not None:
                self._saver.sender.finish()

    def save(self, last: bool = False) -> None:
        """Save a checkpoint of this step, unless there is one; the `last` of a process is on disk on return.

        Raises:
            CheckpointError: the last one could not be written; an earlier failure is retried by the next
                save.
        """
        self._finish_save()
        if self._saved_step != self.step:
            with self._lock:
                self._start_saving()
        if not last and self._background:
            return
        problem = self._finish_save()
        if problem and last:
            raise CheckpointError(
                f"{problem}; {self._saver.earlier}: free space or fix permissions, then: vitctl resume "
                f"{typed(self._log.folder)}"
            )
        if self._runtime.is_main:
            self._saver.keep(self._deciding)

    def _start_saving(self) -> None:
        """Start to write a checkpoint of this step; with a sharded model all processes take part."""
        everything = list(parts(self.network, self.average, self.optimizer))
        state: dict[str, Any] = {}
        if self._runtime.is_main:
            state = {"samples": self.step * self._batch_size, **asdict(self.counts), **self._identity.state}
            state |= {COMPUTED_ON: dict(self._computed_on)}
        if self._writes:
            self._saver.start(self.step, everything, state, self._deciding)
        self._saved_step = self.step

    def _finish_save(self) -> str:
        """Wait for the save in progress; returns its problem on every process, "" when it is complete."""
        with self._lock:
            problem = self._saver.finish()
        problem = self._runtime.broadcast(problem)
        if problem:
            self._saved_step = -1
        return problem

    @property
    def _deciding(self) -> dict[int, float]:
        return {at: score.deciding for at, score in self.scores.items()}

    # Rescuing

    def rescue(self, error: Exception, stop: StopFlag) -> None:
        """After an error: save the state if it is consistent, and log what the run can resume from.

        Only rank 0 saves, without a collective, and only after an error of this process: when another process
        was lost, it cannot know what that process had logged. Raises nothing.
        """
        if stop.given_up:
            threading.Event().wait()  # the thread that gave up saves, and ends this process
        if not (self.step and self._runtime.is_main) or isinstance(error, CheckpointError):
            return
        kind = "" if isinstance(error, VitctlError) else f" ({type(error).__name__})"
        what = f"ended by an error{kind} after step {self.step}"
        lost = self._runtime.num_processes > 1 and is_lost_peer(str(error))
        with self._lock:
            reason = self._inconsistent() or ("another process was lost" if lost else "") or self._save_now()
        saved = f"not saved: {reason}; the" if reason else "which is saved: the"
        self._log.warn(f"{what}, {saved} run can resume from its newest checkpoint", self.step)

    def save_alone(self) -> str:
        """Save the last finished step while the main thread waits for a process that does not answer.

        Called by another thread, which ends the process afterwards: the main thread can change nothing any
        more.

        Returns:
            why it was not saved; "" when it is complete on disk.
        """
        several = self._runtime.num_processes > 1
        if self.step < 1:
            return "no step was finished"
        if not self._runtime.is_main:
            return "only process 0 saves"
        if not self._lock.acquire(blocking=False):
            return "it came in the middle of an update, an evaluation of averaged weights, or a save"
        if several and self._runtime.device.type == "cuda":
            return "the GPU waits for the other process"
        # The others have logged a step before they take part in its record, which a process waits for.
        if several and not self._log.has_records and self.step != self._saved_step:
            return "what the other processes logged is not known"
        # The main thread may wait in the record of this step: the checkpoint then says that it has none.
        return self._inconsistent(in_record=several) or self._save_now()

    def _inconsistent(self, in_record: bool = False) -> str:
        """Return why the state cannot be saved by one process; "" where it can."""
        logged = (self._saved_step, self._log.step, *((self._log.begun,) if in_record else ()))
        if self._is_updating:
            return "it came in the middle of an update"
        if self.average is not None and self.average.is_swapped:
            return "it came while weights and their average were swapped"
        if self.step not in logged:
            return "the log of this step is not written"
        return "each process holds a part of the state" if self._saver.peers.count else ""

    def _save_now(self) -> str:
        """Return why the checkpoint could not be written; "" when it is complete on disk."""
        try:
            if self._saver.finish() or self._saved_step != self.step:
                self._start_saving()
            return self._saver.finish()
        except Exception as error:  # out of memory, a failed device: the first error is the one to report
            return f"{type(error).__name__}: {error}"

    # Resuming

    def resume(self, total_steps: int, metric: str, ends_at: Callable[[int], bool]) -> None:
        """Resume from the newest complete checkpoint that rank 0 sees, if there is any, and cut all records
        back to its step.

        Args:
            total_steps: of the training.
            metric: that decides which score is the best.
            ends_at: whether the training has nothing to do after a step.

        Raises:
            CheckpointError: a process could not read it, it belongs to another training, or the records
                beside it belong to another state.
            LaunchError: the state is not the same on all processes.
        """
        runtime, log, root = self._runtime, self._log, self._saver.root
        self._fetch()
        with self._naming_store():
            saved, problems = agreed_checkpoint(runtime, root)
            with raised_on_all():
                if saved is not None and runtime.is_main and (problem := foreign(saved, {})):
                    raise CheckpointError(saved.folder, problem, MOVE_IT)
        for problem in problems:
            log.warn(problem, 0)
        if saved is not None:
            if runtime.is_main:
                scored = Score.by_step(read_records(log.folder / LOG))
                self.scores |= {
                    at: replace(one, metric=metric) for at, one in scored.items() if at <= saved.step
                }
            can_go_on = not ends_at(saved.step)
            if change := check_resumable(runtime, saved, total_steps, self._identity, can_go_on=can_go_on):
                log.warn(change, saved.step)
            self.load(saved)
            with self._naming_store():
                self._check_records(saved)
            self._warn_of_rounding(saved)
        state = parts(self.network, self.average, self.optimizer)
        check_same_state(runtime, self.step, self.network, state, saved)
        if runtime.is_main:  # what came after the checkpoint will be written again
            set_aside_after(root, self.step)
            log.cut_after(self.step)

    @contextmanager
    def _naming_store(self) -> Iterator[None]:
        """Within the block an error of damaged files says that the store has them too."""
        try:
            yield
        except CheckpointError as error:
            if self._store is None:
                raise
            text = f"{error}; {self._store.address} has the same files: mend them there too"
            raise CheckpointError(text).passing(error.passes) from None

    def _fetch(self) -> None:
        """Bring this machine's folder to the newest checkpoint of the store. The main process comes first:
        machines may share the folder.
        """
        first_here = os.environ.get("LOCAL_RANK", "0") == "0"
        for is_turn in (self._runtime.is_main, first_here and not self._runtime.is_main):
            with raised_on_all():
                if self._store is not None and is_turn:
                    try:
                        self._store.fetch()
                    except VitctlError as error:
                        raise CheckpointError(str(error)).passing(error.passes) from None

    def load(self, saved: SavedCheckpoint) -> None:
        """Load a checkpoint. All processes call this together."""
        held = {name: one for one, name in trained_names(self.optimizer, self.network).items()}
        read = agreed_tensors(self._runtime, saved, self.network.state_dict(), held)
        # Frozen weights are saved with the adapters merged into them.
        frozen = {name: layer.weight for name, layer in adapted_layers(self.network).items()}
        try:
            self.network.load_state_dict(read[MODEL] | read[ADAPTERS[MODEL]] | frozen)
        except RuntimeError as error:
            if "loading state_dict" not in str(error):
                raise
            raise CheckpointError(
                saved.folder,
                "is of a network of other sizes",
                "undo the change of model, image size or classes, or choose another folder with --out",
            ) from None
        load_optimizer_tensors(self.optimizer, self.network, read[OPTIMIZER])
        self.counts = Counts(**{name: int(saved.state.get(name, 0)) for name in asdict(Counts())})
        if self.average is not None:
            averages = read[AVERAGE] | read[ADAPTERS[AVERAGE]]
            self.average.load(averages, saved.step - self.counts.num_skipped)
        self._saved_step = saved.step
        self.go_to(saved.step)

    def _check_records(self, saved: SavedCheckpoint) -> None:
        """Check that log.jsonl, steps.jsonl and the weights are those that a checkpoint was saved with.

        Raises:
            CheckpointError: they are not; the same line on every process.
        """
        with raised_on_all():
            if self._runtime.is_main and (problem := self._log.problem_of(saved)):
                raise CheckpointError(
                    saved.folder,
                    problem,
                    "copy the files of the run back, or delete this folder to resume from the "
                    "checkpoint before it",
                )
        self.resumed_from = saved.digest

    def _warn_of_rounding(self, saved: SavedCheckpoint) -> None:
        was, now = saved.state.get(COMPUTED_ON, {}), {"linear": "torch", **self._computed_on}
        other = [
            f"{name} {was[name]}, here {now[name]}" for name in now if was.get(name, now[name]) != now[name]
        ]
        exact = was.get("deterministic") == now.get("deterministic") == "True"
        changed = [name for name in _KEPT if exact and was.get(name) != now.get(name)]
        if changed:  # the promise of the same bits is broken only on purpose
            used = ", ".join(f"{name} {was[name]}" for name in changed)
            back = " ".join(f"--set machine.{name}={was[name].lower()}" for name in changed if name in _KEYS)
            raise CheckpointError(
                saved.folder,
                f"was computed with {used}, here {', '.join(str(now[name]) for name in changed)}, and "
                "machine.deterministic = true keeps the bits",
                f"resume with {back or 'the same precision'}, or --set machine.deterministic=false",
            )
        if other:
            text = "the last digits of later numbers differ from those of a run that was not stopped"
            self._log.warn(f"the checkpoint was computed with {', '.join(other)}: {text}", self.step)


# What a deterministic training on a GPU keeps; the first two are keys of [machine].
_KEYS = ("attention", "compile")
_KEPT = (*_KEYS, "tf32", "bf16_reduction")


def computed_on(facts: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return what rounds otherwise where it is another; of a GPU no threads."""
    found = {name: facts.get(name, 0) for name in ("device_name", "threads", "attention")}
    if device.type == "cpu":
        found["instructions"] = torch.backends.cpu.get_cpu_capability()
    return found
