"""A training run in a folder: resume, loop, log, evaluate, save.

Plain arguments; jobs fill them from a recipe.
"""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

from vitctl.data.loader.batches import Batch
from vitctl.engine import nonfinite
from vitctl.engine.averaging import averaged
from vitctl.engine.checkpoint.files import SavedCheckpoint, set_aside_after
from vitctl.engine.checkpoint.rescue import rescue, save_alone
from vitctl.engine.checkpoint.saving import Saver, check_space, parts
from vitctl.engine.distributed.agreement import (
    CheckpointTensors,
    agreed_checkpoint,
    agreed_tensors,
    check_resumable,
    check_same_state,
)
from vitctl.engine.distributed.process_group import raise_on_all
from vitctl.engine.distributed.runtime import Runtime
from vitctl.engine.distributed.sharding import is_sharded, load_full_state
from vitctl.engine.evaluation import Score, stop_together
from vitctl.engine.journal import LOG, Journal, cut_after, read_records
from vitctl.engine.loop import Result, Trainer, run_steps, take
from vitctl.engine.nonfinite import SKIPPED, Counts
from vitctl.engine.optimizer import load_optimizer_tensors
from vitctl.engine.preemption import Stopped
from vitctl.engine.run_files import (
    AVERAGE,
    CHECKPOINTS,
    LOG_HEAD,
    MODEL,
    OPTIMIZER,
    STEP_RECORDS,
    STEPS_HEAD,
    UNRECORDED,
)
from vitctl.engine.task import TrainingTask, is_due
from vitctl.engine.trace.chain import head
from vitctl.engine.trace.recorder import Recorder, end_of_steps, weights_checksum
from vitctl.engine.trace.steps import not_named, read_logged_ends, read_steps, record_problem
from vitctl.errors import CheckpointError, DataError, VitctlError
from vitctl.system.text import typed

BAD_SAMPLES, SAMPLES = "bad_samples.jsonl", "samples"
BUDGET_FLOOR = 10_000  # images; the budget of bad samples is computed from at least this many


@dataclass
class Run:
    """One training run on disk, as one process sees it."""

    folder: Path
    task: TrainingTask
    trainer: Trainer
    saver: Saver
    counts: Counts = field(default_factory=Counts)
    saved_step: int = -1
    resumed_from: str = ""  # digest of the checkpoint
    logged_step: int = -1
    scores: dict[int, Score] = field(default_factory=dict)
    probed: set[int] = field(default_factory=set)
    recorder: Recorder | None = None
    changing: threading.Lock = field(
        default_factory=threading.Lock
    )  # held while weights, optimizer or average change
    _window: tuple[float, int, float] = (0.0, 0, 0.0)

    @property
    def runtime(self) -> Runtime:
        """The runtime of this process."""
        return self.trainer.runtime

    @property
    def journal(self) -> Journal:
        """log.jsonl of the main process."""
        return self.saver.journal

    def resume(self) -> int:
        """Resume from the newest complete checkpoint that rank 0 sees; returns its step, 0 when there is
        none.

        Raises:
            CheckpointError: a process could not read it, it belongs to another training, or the records
                beside it are not its own.
            LaunchError: the state is not the same on all processes.
        """
        saved, problems = agreed_checkpoint(self.runtime, self.folder / CHECKPOINTS)
        for problem in problems:
            self.journal.write("warning", step=0, text=problem)
        step = saved.step if saved else 0
        if saved and (
            said := check_resumable(self.runtime, saved, self.task.total_steps, self.task.identity)
        ):
            self.journal.write("warning", step=step, text=said)
        read = self.load(saved) if saved is not None else {}
        if saved is not None:
            self._check_records(saved)
        trainer = self.trainer
        check_same_state(
            self.runtime,
            step,
            trainer.unwrapped,
            parts(trainer.unwrapped, trainer.average, trainer.optimizer),
            read,
        )
        if self.runtime.is_main:
            set_aside_after(self.folder / CHECKPOINTS, step)
            logs = (self.folder / name for name in (LOG, STEP_RECORDS, BAD_SAMPLES, SKIPPED))
            for path in (*logs, *(self.folder / SAMPLES).glob("rank_*.jsonl")):
                cut_after(path, step)
            records = read_records(self.folder / LOG)
            self.scores |= Score.by_step(records)
            self.probed |= {r["step"] for r in records if r.get("kind") == "fewshot" and "step" in r}
            if step:
                self.journal.write("resume", step=step, total_steps=self.task.total_steps)
        return step

    def _check_records(self, saved: SavedCheckpoint) -> None:
        """Check that log.jsonl and steps.jsonl are those that a checkpoint was saved with, and its weights
        those recorded.

        Raises:
            CheckpointError: they are not; the same line on every process.
        """
        problem, trainer = "", self.trainer
        if self.runtime.is_main:
            try:
                weights = "" if is_sharded(trainer.unwrapped) else weights_checksum(trainer.unwrapped)
                ends = read_logged_ends(self.folder)
                problem = record_problem(saved, read_steps(self.folder), ends, weights)
                if ends.broken_at:
                    problem = f"{LOG}, line {ends.broken_at}, does not follow the line before"
            except VitctlError as error:
                problem = str(error)
        if problem:
            problem = (
                f"{saved.folder}: {problem}; copy the files of the run back, or delete this folder to resume "
                f"from the checkpoint "
                "before it"
            )
        raise_on_all(problem)
        if unnamed := not_named(saved):
            text = f"{saved.folder.name} does not say {unnamed}, as an earlier state of vitctl; its records are not compared with that"
            self.journal.write("warning", step=saved.step, text=text)
        self.resumed_from = saved.digest

    def start_clock(self, step: int) -> None:
        """Measure the throughput from here."""
        self._window = (time.perf_counter(), step, 0.0)

    def load(self, saved: SavedCheckpoint) -> CheckpointTensors:
        """Load a checkpoint; returns the tensors that were read. All processes call this together."""
        read = agreed_tensors(self.runtime, saved)
        load_full_state(self.trainer.unwrapped, read[MODEL])
        load_optimizer_tensors(self.trainer.optimizer, self.trainer.unwrapped, read[OPTIMIZER])
        self.counts = Counts(**{name: int(saved.state.get(name, 0)) for name in asdict(Counts())})
        if self.trainer.average is not None:
            self.trainer.average.load(read[AVERAGE], saved.step - self.counts.num_skipped)
        self.saved_step = saved.step
        return read

    @property
    def _samples_file(self) -> Path:
        return self.folder / SAMPLES / f"rank_{self.runtime.rank:02d}.jsonl"

    def log(self, step: int, result: Result, waited: float, micro_batches: list[Batch]) -> None:
        """Count bad samples and skipped updates, and write a record every `log_every` steps."""
        self.counts.add(result)
        self._log_samples(step, micro_batches)
        if result.skipped:
            self._note_skipped(step, result, micro_batches)
        if self.recorder is not None:
            is_logged = self._is_logged(step) or is_due(step, self.task.save_every)
            self.recorder.add(step, result, micro_batches, weights=is_logged)
        self._log_step(step, result, waited)
        self.logged_step = step
        # Checks that end the run come last: the step and its log are complete.
        read = step * self.trainer.batch_size
        if self.counts.num_bad > self.task.max_bad_fraction * max(read, BUDGET_FLOOR):
            raise DataError(
                f"{self.counts.num_bad} of {read} images read so far cannot be used, more than "
                f"data.max_bad_fraction = "
                f"{self.task.max_bad_fraction:g} allows; {self.folder / BAD_SAMPLES} lists them: "
                f"{self.bad_reasons()}; fix the "
                f"data, or resume with: vitctl resume {typed(self.folder)} --set data.max_bad_fraction=SHARE "
                f"--allow data.max_bad_fraction"
            )
        nonfinite.check_bound(step, self.counts, result, self.folder / SKIPPED)

    def _is_logged(self, step: int) -> bool:
        return is_due(step, self.task.log_every) or step == self.task.total_steps

    def _log_step(self, step: int, result: Result, waited: float) -> None:
        read = step * self.trainer.batch_size
        began, first, all_waited = self._window
        all_waited += waited
        self._window = (began, first, all_waited)
        seconds = time.perf_counter() - began
        rate = (step - first) * self.trainer.batch_size / seconds
        if not self._is_logged(step):
            self.journal.show_progress(
                step=step,
                total_steps=self.task.total_steps,
                samples=read,
                loss=result.loss,
                lr=result.lr,
                images_per_second=rate,
                data_wait=all_waited / seconds,
                num_bad=self.counts.num_bad,
            )
            return
        flops = rate * self.task.flops_per_image / self.runtime.num_processes
        self.journal.write(
            "train",
            step=step,
            total_steps=self.task.total_steps,
            samples=read,
            epoch=round(read / self.task.num_images, 4),
            loss=result.loss,
            lr=result.lr,
            grad_norm=result.grad_norm,
            images_per_second=round(rate, 2),
            tflops=round(flops / 1e12, 4),
            mfu=round(flops / self.runtime.peak_flops, 4) if self.runtime.peak_flops else None,
            data_wait=round(all_waited / seconds, 4),
            num_bad=self.counts.num_bad,
            num_skipped=self.counts.num_skipped,
        )
        self.runtime.accelerator.log(
            {"loss": result.loss, "lr": result.lr, "grad_norm": result.grad_norm}, step=step
        )
        self.start_clock(step)

    def _note_skipped(self, step: int, result: Result, micro_batches: list[Batch]) -> None:
        keys = [self.task.key(int(i)) for batch in micro_batches for i in batch.samples]
        record = nonfinite.record(step, self.runtime.rank, result, self.trainer.unwrapped, keys)
        self.journal.append(self.folder / SKIPPED, record)
        text = f"step {step} was not finite and is skipped: {nonfinite.in_words(result)}"
        self.journal.write("warning", step=step, text=text)

    def bad_reasons(self) -> str:
        """Number of images that could not be used, by reason, the most frequent first."""
        counts = Counter(str(record.get("reason")) for record in read_records(self.folder / BAD_SAMPLES))
        return ", ".join(f"{count} {reason}" for reason, count in counts.most_common())

    def _log_samples(self, step: int, micro_batches: list[Batch]) -> None:
        for batch in micro_batches:
            for sample, key, reason in batch.bad:
                bad = {"step": step, "sample": sample, "key": key, "reason": reason}
                self.journal.append(self.folder / BAD_SAMPLES, bad)
        if self.task.log_sample_keys:
            keys = [self.task.key(int(i)) for batch in micro_batches for i in batch.samples]
            self.journal.append(self._samples_file, {"step": step, "keys": keys})

    def evaluate(self, step: int) -> None:
        """Evaluate the model, or its average when there is one, once per step."""
        if self.task.score is None or self._main_has(step in self.scores):
            return
        if step == self.task.total_steps:
            self.save(step, last=True)  # if the process ends during the last evaluation, no step is lost
        began = time.perf_counter()
        with self._averaged():
            score = self.task.score(self.trainer.unwrapped)
        self.scores[step] = score
        seconds = round(time.perf_counter() - began, 3)
        self.journal.write("evaluate", step=step, **score.numbers, seconds=seconds)
        self.runtime.accelerator.log({"accuracy": score.accuracy}, step=step)
        self._exclude_time(seconds)

    def probe(self, step: int) -> None:
        """Few-shot accuracies of the model, or of its average when there is one, once per step."""
        if self.task.probe is None or self._main_has(step in self.probed):
            return
        if step == self.task.total_steps:
            self.save(step)
        began = time.perf_counter()
        with self._averaged():
            scores = self.task.probe(self.trainer.unwrapped)
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
        if self.trainer.average is None:
            yield
            return
        self.saver.wait_for_copy()  # the averages take the place of the weights
        with self.changing, averaged(self.trainer.unwrapped, self.trainer.average):
            yield

    def _exclude_time(self, seconds: float) -> None:
        """Exclude time that was not spent on training from the throughput."""
        began, first, waited = self._window
        self._window = (began + seconds, first, waited)

    def _main_has(self, has: bool) -> bool:
        """The value of the main process: after a resume only that one has read the log."""
        return self.runtime.sum([float(self.runtime.is_main and has)])[0] > 0

    def save(self, step: int, last: bool = False) -> None:
        """A checkpoint of this step, unless there is one; the `last` of a process is on disk when this
        returns.

        Raises:
            CheckpointError: the last one could not be written; an earlier failure is retried by the next
                save.
        """
        self._finish_save()
        if self.saved_step != step:
            with self.changing:
                self.start_saving(step)
        if not last and self.task.save_in_background:
            return
        problem = self._finish_save()
        if problem and last:
            raise CheckpointError(
                f"{problem}; earlier checkpoints are complete: free space or fix permissions, then: vitctl "
                f"resume {typed(self.folder)}"
            )
        if self.runtime.is_main:
            self.saver.keep(self._accuracies)

    def start_saving(self, step: int) -> None:
        """Start to write a checkpoint of this step; with a sharded model all processes take part."""
        everything = parts(self.trainer.unwrapped, self.trainer.average, self.trainer.optimizer)
        if self.runtime.is_main:
            state = {"samples": step * self.trainer.batch_size, **asdict(self.counts)}
            state |= self.task.identity.state if self.task.identity else {}
            steps_head, unrecorded = end_of_steps(self.folder, step)
            state |= {STEPS_HEAD: steps_head, UNRECORDED: unrecorded, LOG_HEAD: head(self.folder / LOG)}
            live = not is_sharded(self.trainer.unwrapped)
            self.saver.start(step, everything, state, self._accuracies, live=live)
        elif is_sharded(self.trainer.unwrapped):
            for _ in everything:
                pass
        self.saved_step = step

    def rescue(self, step: int, error: Exception) -> None:
        """See `vitctl.engine.checkpoint.rescue`."""
        rescue(self, step, error)

    def _finish_save(self) -> str:
        """Wait for the save in progress; returns its problem on every process, "" when it is complete."""
        with self.changing:
            problem = self.saver.finish() if self.runtime.is_main else ""
        problem = self.runtime.broadcast(problem)
        if problem:
            self.saved_step = -1
        return problem

    @property
    def _accuracies(self) -> dict[int, float]:
        return {at: score.accuracy for at, score in self.scores.items()}


def fit(folder: Path, task: TrainingTask, trainer: Trainer, saver: Saver) -> Score | None:
    """Train in `folder` to task.total_steps, resuming from its newest checkpoint.

    Args:
        folder: of the run; gets log.jsonl, bad_samples.jsonl, checkpoints/.
        task: data, length and score.
        trainer: the model and its update.
        saver: of the checkpoints; its journal is the run's.

    Returns:
        the score after the last step; None when there are no images to score.

    Raises:
        Stopped: a signal came; the state is saved.
        DataError: too many bad samples.
    """
    run = Run(folder, task, trainer, saver)

    def before_step() -> None:
        saver.wait_for_copy()
        run.changing.acquire()

    trainer.before_step, trainer.after_step = before_step, run.changing.release
    trainer.stop.save_alone = partial(save_alone, run)
    try:
        return _fit(run)
    finally:
        trainer.stop.save_alone = None
        saver.finish()


def _fit(run: Run) -> Score | None:
    task, trainer, total_steps = run.task, run.trainer, run.task.total_steps
    first_step = run.resume()
    if run.runtime.is_main:
        kept = run.saver.last + run.saver.best
        check_space(run.saver.root, trainer.unwrapped, trainer.average, trainer.optimizer, kept=kept)
    if first_step and is_due(first_step, task.evaluate_every):
        run.evaluate(first_step)
    if first_step and is_due(first_step, task.probe_every):
        run.probe(first_step)
    if first_step < total_steps:
        if task.facts is not None:
            run.recorder = Recorder(
                run.folder, run.journal, run.runtime, trainer.unwrapped, task.own, trainer.batch_size
            )
            run.recorder.start(first_step, task.facts, run.resumed_from)
        batches = task.batches(first_step)
        run.journal.show_progress(at_once=True, step=first_step, total_steps=total_steps)
        if task.warm_up:
            batches = _warmed_up(run, batches, first_step)
        run.start_clock(first_step)
        run_steps(trainer, task, batches, first_step, run)
    else:
        run.evaluate(total_steps)
        run.probe(total_steps)
    stop_together(run.runtime, trainer.stop)
    nonfinite.check_share(total_steps, run.counts, run.folder / SKIPPED)
    if run.counts.num_skipped:
        text = f"{run.counts.num_skipped} of {total_steps} updates were not finite and were skipped; {run.folder / SKIPPED} lists them"
        run.journal.write("warning", step=total_steps, text=text)
    if run.counts.num_bad:
        text = f"images that could not be used: {run.bad_reasons()}; {run.folder / BAD_SAMPLES} lists them"
        run.journal.write("warning", step=total_steps, text=text)
    return run.scores.get(total_steps)


def _warmed_up(run: Run, batches: Iterator[Batch], step: int) -> Iterator[Batch]:
    """The same batches, after a first pass over those of one update that triggers torch.compile."""
    try:
        stop_together(run.runtime, run.trainer.stop)
    except Stopped:
        run.save(step, last=True)
        raise
    began = time.perf_counter()
    run.journal.show_progress(at_once=True, text="compiling")
    first = take(batches, len(run.task.own))
    run.trainer.warm_up(first)
    run.journal.write("compile", step=step, seconds=round(time.perf_counter() - began, 3))
    return chain(first, batches)
