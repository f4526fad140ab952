"""One training in a folder: resumed, trained, logged, scored, saved.

`Trainer.fit` is the schedule, and `TrainStep.update` in update.py the mathematics. assemble.py puts both
together.
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from vitctl.data.loader.batches import Batch, take
from vitctl.engine.evaluation import Score
from vitctl.engine.log import SKIPPED, RunLog, is_due
from vitctl.engine.preemption import StopFlag, Stopped
from vitctl.engine.profile import past_steps
from vitctl.engine.runtime import DATA, Runtime, stop_together
from vitctl.engine.state import RunState
from vitctl.engine.update import TrainStep, Update
from vitctl.errors import DataError
from vitctl.models.build import Model
from vitctl.recipe.schema import Finetune, Pretrain, Vtab
from vitctl.recipe.sections import OPTIMIZERS
from vitctl.system.text import typed

BUDGET_FLOOR = 10_000  # images; the budget of bad samples is computed from at least this many
T = TypeVar("T")


class Evaluator(NamedTuple):
    """What is measured of the network by schedule, and after the last step.

    Args:
        name: of its records in the log.
        every_steps: 0: after the last step only.
        run: measures a network.
        is_known: whether the records have it of a step; on the main process.
        record: writes down what was found after a step, and the seconds that it took.
    """

    name: str
    every_steps: int
    run: Callable[[Model], Any]
    is_known: Callable[[int], bool]
    record: Callable[[int, Any, float], None]


@dataclass(eq=False)
class Trainer:
    """A training of `recipe`, as one process sees it.

    Args:
        recipe: with its values resolved: batch size, length, learning rate, seed.
        runtime: this process among its peers.
        stop: set by signals.
        own: positions of this process's images in the global batch.
        batches: `batches(first_step=...)` yields its micro-batches after so many finished steps, without end:
            a function of seed and step.
        facts: how it computes, recorded at each start.
        state: network, optimizer, average, counts, scores.
        log: what is written down.
        train_step: computes an update.
        evaluators: what is measured by schedule, in this order.
        test: scores a network on the images that choose nothing; called once, by the job, after `fit`.
        total_steps: the last step.
        steps_behind: how late numbers are read from the device.
        warms_up: whether passes come before the first update of each start.
    """

    recipe: Pretrain | Finetune | Vtab
    runtime: Runtime
    stop: StopFlag
    own: range
    batches: Callable[..., Generator[Batch, None, None]]
    facts: dict[str, Any]
    state: RunState
    log: RunLog
    train_step: TrainStep
    evaluators: Sequence[Evaluator]
    test: Callable[[Model], Score] | None
    total_steps: int
    steps_behind: int
    warms_up: bool = False
    # Not read from the device yet: step, update, its images.
    pending: deque[tuple[int, Update, list[Batch]]] = field(default_factory=deque)
    graphs: int = 0  # that torch compiled at the start

    def fit(self) -> Score | None:
        """Train to the last step, or to where evaluation.patience ends it; resume from the newest checkpoint.

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
            asked = self.recipe.log.profile
            if asked and (text := past_steps(asked, state.step, log.folder)):
                log.warn(text, state.step)
            if trains:
                with closing(self.batches(first_step=state.step)) as batches:  # ends its workers
                    self.run_steps(batches)
            # 4. A signal after the last step still stops the run: it resumes at its result.
            stop_together(self.runtime, self.stop)
            state.counts.check_share(self.total_steps, log.folder / SKIPPED)
            log.report_problems(self.total_steps, state.counts.num_bad, state.counts.num_skipped)
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
            if self.warms_up:
                batches = self._warmed_up(batches)
            self.log.start_clock(state.step)
            while state.step < self.total_steps:
                # Wait for the images of the step; the device still computes the step before.
                self.runtime.clock.switch(DATA)
                micro_batches = take(batches, len(self.own), self.stop.miss_images)
                # Tell the device to compute the step; `RunState.changing` adds one to `state.step`. The
                # update carries this process's stop flag: all processes learn of a signal, or that one has
                # no images, at the same step, without another exchange.
                update = self.train_step.update(state.step, micro_batches, self.stop.raised)
                self.pending.append((state.step, update, micro_batches))
                # On a GPU read and log the numbers of the step before, so that it never waits for the next
                # batch. Where this step is logged, scored or saved, read all. Only here the host waits for
                # the device, and the loop ends early.
                if self.log_pending(keep=0 if self._is_read_at_once() else self.steps_behind):
                    raise Stopped
                # Score first: it decides which checkpoints are the best, and may make this step the last.
                # Then save; the last step is saved before its score too.
                self.measure_if_due()
                if state.step == self.total_steps or is_due(state.step, every):
                    state.save(last=state.step == self.total_steps)
            if self.graphs and (now := _graphs()) > 2 * self.graphs:  # scoring has as many at most
                text = f"torch compiled {now} graphs, {self.graphs} at the start; see TORCH_LOGS=recompiles"
                self.log.warn(text, state.step)
        except Stopped:
            # Every process is at the same step: save it together, and wait until it is on disk.
            try:
                self.log_pending()
            except Exception as error:  # the last step was one too many that is bad
                state.rescue(error, self.stop)
                raise
            state.save(last=True)
            raise
        except Exception as error:
            with suppress(Exception):  # the first error is the one to report
                self.log_pending()
            state.rescue(error, self.stop)
            raise

    def _warmed_up(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Return the same batches, after passes over one update's, whose gradients are discarded.

        The first compiles. Two let DDP order its buckets: three processes or more add a number in an order
        that depends on its place in a bucket, so that a resumed run would differ from one that never stopped.
        """
        began, journal, compiles = time.perf_counter(), self.log.journal, self.recipe.machine.compile
        journal.show_progress(at_once=True, text="compiling" if compiles else "starting")
        first = take(batches, len(self.own), self.stop.miss_images)
        for _ in range(2 if self.runtime.num_processes > 2 else 1):
            self.train_step.warm_up(first)
        if compiles:
            seconds, self.graphs = round(time.perf_counter() - began, 3), _graphs()
            journal.write("compile", step=self.state.step, seconds=seconds, graphs=self.graphs)
        return chain(first, batches)

    def _is_read_at_once(self) -> bool:
        """Whether the numbers of this step are read before the next one begins."""
        step = self.state.step
        often = [self.recipe.checkpoint.every_steps, *(one.every_steps for one in self.evaluators)]
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
            step, update, batches = self.pending.popleft()
            result = update.result()
            stopped = stopped or result.stop
            if result.lost:  # it and those after it changed nothing, on any process
                self.pending.clear()
                self.state.go_to(step - 1)
                break
            counts.add(result)
            own = counts.num_bad, counts.num_skipped
            self.log.add(step, result, update.stamps, batches, num_bad=own[0], num_skipped=own[1])
            # Checks that end the run come last: the step and its log are complete.
            self._check_budget(step)
            counts.check_progress(step, result, self.log.folder / SKIPPED)
        return stopped

    def _check_budget(self, step: int) -> None:
        read, allowed = step * self.recipe.schedule.batch_size, self.recipe.data.max_bad_fraction
        if (num_bad := self.state.counts.num_bad) > allowed * max(read, BUDGET_FLOOR):
            raise DataError(
                f"{num_bad} of {read} images read so far cannot be used, more than "
                f"data.max_bad_fraction = {allowed:g} allows; {self.log.bad_samples()} lists "
                f"them: {self.log.bad_reasons()}",
                fix=(
                    f"fix the data, or resume with: vitctl resume {typed(self.log.folder)} --set "
                    "data.max_bad_fraction=SHARE --allow data.max_bad_fraction"
                ),
            )

    # Evaluation by schedule

    def measure_if_due(self) -> None:
        """Measure the network after this step as the recipe asks, unless the log has it already.

        The training ends at this step if the last evaluation.patience scores have not improved the best.
        """
        state, step = self.state, self.state.step
        for one in self.evaluators:
            is_now = step == self.total_steps or is_due(step, one.every_steps)
            if is_now and not self._main_has(one.is_known(step)):
                one.record(step, *self._measured(one.run))
        if self._is_stale(step):
            best = max(state.scores, key=lambda at: (state.scores[at].deciding, -at), default=0)
            numbers = {"total_steps": self.total_steps, "best": best}
            patience = self.recipe.evaluation.patience
            self.log.journal.write("early_stop", step=step, **numbers, patience=patience)
            self.total_steps = step  # the learning rate stays that of the planned length

    def _measured(self, run: Callable[[Model], T]) -> tuple[T, float]:
        """Return what is measured of the network, or of its average if there is one, and the seconds."""
        if self.state.step == self.total_steps:
            self.state.save(last=True)  # if the process ends during the last evaluation, no step is lost
        began = time.perf_counter()
        with self.state.averaged() as network:
            found = run(network)
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


def _graphs() -> int:
    """Return how many graphs torch has compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
