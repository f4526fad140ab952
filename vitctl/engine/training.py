"""A training run in a folder: resume, loop, log, evaluate, save. Plain arguments; jobs fill them from a recipe."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from vitctl.data.loader import Batch, share
from vitctl.engine.averaging import Average
from vitctl.engine.checkpoint import OPTIMIZER, Saved, keep, newest_checkpoint, save_checkpoint
from vitctl.engine.evaluation import Score, agree
from vitctl.engine.journal import LOG, Journal, append_line, cut_after, read_lines
from vitctl.engine.loop import Hooks, Result, Trainer, run_steps
from vitctl.engine.losses import Objective
from vitctl.engine.optimizer import load_optimizer_tensors, optimizer_tensors
from vitctl.engine.preemption import StopFlag
from vitctl.engine.runtime import Runtime
from vitctl.errors import DataError

BAD_SAMPLES, CHECKPOINTS, SAMPLES = "bad_samples.jsonl", "checkpoints", "samples"
BUDGET_FLOOR = 10_000  # images; below this many the bad-sample budget is that of this many


@dataclass(frozen=True)
class Settings:
    """The numbers of a training run, in the words of the recipe."""

    batch_size: int
    total_steps: int
    weight_decay: float
    clip_norm: float
    averaging_decay: float
    seed: int
    evaluate_every: int
    save_every: int
    keep_last: int
    keep_best: int
    log_every: int
    log_sample_keys: bool
    max_bad_fraction: float


@dataclass(frozen=True)
class Task:
    """What is trained, on what, and how it is judged.

    `batches(first_step)` gives this process's micro-batches, `flops_per_image` are those of training, `key(sample)` names
    an image, `score(model)` evaluates it (None: nothing to evaluate on), `config` and `meta` are stored with the weights.
    """

    model: nn.Module
    optimizer: Any
    objective: Objective
    lr: Callable[[int], float]
    batches: Callable[[int], Iterator[Batch]]
    num_images: int
    flops_per_image: int
    key: Callable[[int], str]
    score: Callable[[nn.Module], Score] | None
    config: Any
    meta: dict[str, Any]


@dataclass
class Run:
    """One training run on disk, as one process sees it."""

    runtime: Runtime
    folder: Path
    task: Task
    settings: Settings
    journal: Journal
    trainer: Trainer
    num_bad: int = 0
    saved_step: int = -1
    scores: dict[int, Score] = field(default_factory=dict)
    _window: tuple[float, int, float] = (0.0, 0, 0.0)

    @property
    def evaluated(self) -> nn.Module:
        """The bare model that is scored: its averaged weights are swapped in by `score`."""
        return self.trainer.bare

    def resume(self) -> int:
        """Continue from the newest whole checkpoint of the folder; returns its step, 0 when there is none."""
        saved, problems = newest_checkpoint(self.folder / CHECKPOINTS)
        if self.runtime.is_main:
            for problem in problems:
                self.journal.write("warning", step=0, text=problem)
        step = saved.step if saved else 0
        if saved is not None:
            self._load(saved)
        self.runtime.wait()
        if self.runtime.is_main:
            for path in (self.folder / LOG, self.folder / BAD_SAMPLES, *(self.folder / SAMPLES).glob("rank_*.jsonl")):
                cut_after(path, step)
            for record in read_lines(self.folder / LOG):
                if record["kind"] == "evaluate":
                    self.scores[record["step"]] = Score(record["correct"], record["total"])
            if step:
                self.journal.write("resume", step=step, total_steps=self.settings.total_steps)
        self._window = (time.perf_counter(), step, 0.0)
        return step

    def _load(self, saved: Saved) -> None:
        self.trainer.bare.load_state_dict(saved.tensors("model.safetensors"))
        load_optimizer_tensors(self.trainer.optimizer, self.trainer.bare, saved.tensors(OPTIMIZER))
        if self.trainer.average is not None:
            self.trainer.average.load(saved.tensors("ema.safetensors"))
        self.num_bad, self.saved_step = int(saved.state["num_bad"]), saved.step

    @property
    def _samples_file(self) -> Path:
        return self.folder / SAMPLES / f"rank_{self.runtime.rank:02d}.jsonl"

    def log(self, step: int, result: Result, waited: float, micro_batches: list[Batch]) -> None:
        """Count bad samples, and write a record every `log_every` steps."""
        self._log_samples(step, micro_batches)
        self.num_bad += result.num_bad
        read = step * self.settings.batch_size
        if self.num_bad > self.settings.max_bad_fraction * max(read, BUDGET_FLOOR):
            raise DataError(
                f"{self.num_bad} of {read} images read so far cannot be used, more than data.max_bad_fraction = "
                f"{self.settings.max_bad_fraction:g} allows; {self.folder / BAD_SAMPLES} lists them"
            )
        began, first, all_waited = self._window
        all_waited += waited
        self._window = (began, first, all_waited)
        if step % self.settings.log_every and step != self.settings.total_steps:
            return
        seconds = time.perf_counter() - began
        rate = (step - first) * self.settings.batch_size / seconds
        flops = rate * self.task.flops_per_image / self.runtime.num_processes
        self.journal.write(
            "train",
            step=step,
            total_steps=self.settings.total_steps,
            samples=read,
            epoch=round(read / self.task.num_images, 4),
            loss=result.loss,
            lr=result.lr,
            grad_norm=result.grad_norm,
            images_per_second=round(rate, 2),
            tflops=round(flops / 1e12, 4),
            mfu=round(flops / self.runtime.peak_flops, 4) if self.runtime.peak_flops else None,
            data_wait=round(all_waited / seconds, 4),
            num_bad=self.num_bad,
        )
        self.runtime.accelerator.log({"loss": result.loss, "lr": result.lr, "grad_norm": result.grad_norm}, step=step)
        self._window = (time.perf_counter(), step, 0.0)

    def _log_samples(self, step: int, micro_batches: list[Batch]) -> None:
        for batch in micro_batches:
            for sample, key, reason in batch.bad:
                append_line(self.folder / BAD_SAMPLES, {"step": step, "sample": sample, "key": key, "reason": reason})
        if self.settings.log_sample_keys:
            self._samples_file.parent.mkdir(exist_ok=True)
            keys = [self.task.key(int(i)) for batch in micro_batches for i in batch.samples]
            append_line(self._samples_file, {"step": step, "keys": keys})

    def evaluate(self, step: int) -> None:
        """Score the model, its average when there is one, once per step."""
        if self.task.score is None or self._all_have(step):
            return
        began = time.perf_counter()
        with averaged(self.trainer.bare, self.trainer.average):
            score = self.task.score(self.trainer.bare)
        self.scores[step] = score
        seconds = round(time.perf_counter() - began, 3)
        self.journal.write(
            "evaluate", step=step, accuracy=score.accuracy, correct=score.correct, total=score.total, seconds=seconds
        )
        self.runtime.accelerator.log({"accuracy": score.accuracy}, step=step)
        began, first, waited = self._window
        self._window = (began + seconds, first, waited)

    def _all_have(self, step: int) -> bool:
        return self.runtime.sum([float(self.runtime.is_main and step in self.scores)])[0] > 0

    def save(self, step: int) -> None:
        """A checkpoint of this step, unless there is one; then the keep budgets."""
        if self.saved_step != step:
            if self.runtime.is_main:
                self._write(step)
            self.saved_step = step
            self.runtime.wait()

    def _write(self, step: int) -> None:
        began = time.perf_counter()
        weights = {"model": dict(self.trainer.bare.state_dict())}
        if self.trainer.average is not None:
            weights["ema"] = {**weights["model"], **self.trainer.average.tensors}
        root = self.folder / CHECKPOINTS
        path = save_checkpoint(
            root,
            step,
            weights=weights,
            config=self.task.config,
            meta=self.task.meta,
            optimizer=optimizer_tensors(self.trainer.optimizer, self.trainer.bare),
            state={"samples": step * self.settings.batch_size, "num_bad": self.num_bad},
        )
        accuracies = {at: score.accuracy for at, score in self.scores.items()}
        keep(root, last=self.settings.keep_last, best=self.settings.keep_best, scores=accuracies)
        self.journal.write("checkpoint", step=step, path=str(path), seconds=round(time.perf_counter() - began, 3))


class averaged:  # noqa: N801
    """Within the block the model has its averaged weights."""

    def __init__(self, model: nn.Module, average: Average | None) -> None:
        self.model, self.average = model, average

    def __enter__(self) -> None:
        self._swap()

    def __exit__(self, *_: object) -> None:
        self._swap()

    def _swap(self) -> None:
        for name, parameter in self.model.named_parameters() if self.average is not None else ():
            assert self.average is not None
            kept = parameter.data
            parameter.data = self.average.tensors[name]
            self.average.tensors[name] = kept


def fit(
    runtime: Runtime, folder: Path, task: Task, settings: Settings, journal: Journal, stop: StopFlag
) -> Score | None:
    """Train in `folder`, going on from its newest checkpoint, to settings.total_steps.

    Args:
        runtime: this process among its peers.
        folder: of the run; gets log.jsonl, bad_samples.jsonl, checkpoints/.
        task: model, data, loss and score.
        settings: the numbers.
        journal: of the main process.
        stop: raised by signals.

    Returns:
        the score after the last step; None when there is nothing to score on.

    Raises:
        Stopped: a signal came; the state is saved.
        DataError: too many bad samples.
    """
    average = Average(task.model, settings.averaging_decay) if settings.averaging_decay else None
    trainer = Trainer(
        runtime=runtime,
        model=runtime.wrap(task.model),
        bare=task.model,
        optimizer=task.optimizer,
        average=average,
        objective=task.objective,
        lr=task.lr,
        batch_size=settings.batch_size,
        weight_decay=settings.weight_decay,
        clip_norm=settings.clip_norm,
        seed=settings.seed,
        stop=stop,
    )
    run = Run(runtime, folder, task, settings, journal, trainer)
    first_step = run.resume()
    if first_step and settings.evaluate_every and first_step % settings.evaluate_every == 0:
        run.evaluate(first_step)
    own = len(share(settings.batch_size, runtime.num_processes, runtime.rank))
    hooks = Hooks(run.log, run.evaluate, run.save, settings.evaluate_every, settings.save_every)
    if first_step < settings.total_steps:
        run_steps(trainer, task.batches(first_step), own, first_step, settings.total_steps, hooks)
    else:
        run.evaluate(settings.total_steps)
    agree(runtime, stop)
    return run.scores.get(settings.total_steps)
