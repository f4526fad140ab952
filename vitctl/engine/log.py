"""Records of a training: log.jsonl, every step, unusable images, and trackers."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from vitctl.data.loader.batches import Batch
from vitctl.data.source.views import Source, sample_key
from vitctl.engine.checkpoint import SavedCheckpoint
from vitctl.engine.evaluation import Score
from vitctl.engine.journal import (
    LOG,
    RECIPE,
    STEP_RECORDS,
    Journal,
    Record,
    cut_after,
    read_records,
    records_agreed,
    run_of,
)
from vitctl.engine.losses import Normalise
from vitctl.engine.preemption import StopFlag
from vitctl.engine.runtime import DATA, PARTS, Runtime, Stamps, part_seconds, slowest
from vitctl.engine.sharding import is_sharded, local
from vitctl.engine.trace import Recorder, record_problem, weights_checksum
from vitctl.engine.update import Result
from vitctl.errors import VitctlError
from vitctl.models.build import Model
from vitctl.recipe.known import Comparison, known_in_words
from vitctl.recipe.neutral_keys import unlike_known
from vitctl.recipe.schema import Finetune, Pretrain, Vtab
from vitctl.system.remote import GaveUpError

SKIPPED = "skipped.jsonl"
BAD_SAMPLES = "bad_samples*.jsonl"  # rank 0's has no number
MEMORY = ("allocated", "reserved", "peak")  # bytes of a GPU, the most of all processes
_RANKS = 64  # with more processes a phase has the least, the median and the largest share
_PIXELS_OF = 64  # images per step, on the main process, whose pixels are logged


class RunLog:
    """The records of one training.

    `step` is the last recorded step; `begun` the last whose record only waits for the other processes.
    `own` are the positions of this process's images in the global batch; `network` is not wrapped;
    `flops_per_image` covers a forward and a backward pass.
    """

    def __init__(
        self,
        recipe: Pretrain | Finetune | Vtab,
        runtime: Runtime,
        folder: Path,
        journal: Journal,
        train: Source,
        network: Model,
        own: range,
        total_steps: int,
        normalise: Normalise,
        flops_per_image: Callable[[], int],
        stop: StopFlag,
    ) -> None:
        self.folder, self.journal, self.flops_per_image = folder, journal, flops_per_image
        self.step = self.begun = -1
        self.probed: set[int] = set()
        self._recipe, self._runtime, self._train, self._network = recipe, runtime, train, network
        self._own, self._total_steps, self._normalise, self._stop = own, total_steps, normalise, stop
        self._known = self._comparison(())
        self._recorder: Recorder | None = None
        self._times: dict[str, Any] = {}
        self.start_clock(0)

    # Steps

    def start(
        self, step: int, facts: Mapping[str, Any], checkpoint: str = "", *, trains: bool = True
    ) -> None:
        """Record a start after `step` finished steps, also of a finished run (`trains` false).

        `facts` say how it computes; `checkpoint` is the digest of the loaded one, "" for the start weights.
        """
        if self._recipe.log.trace:
            size, steps = (
                self._recipe.schedule.batch_size,
                (self._total_steps, self._recipe.checkpoint.every_steps),
            )
            self._recorder = Recorder(
                self.folder, self.journal, self._runtime, self._network, self._own, size, steps
            )
            self._recorder.start(step, facts, checkpoint)
        if trains:
            if self._known.bands and (text := unlike_known(run_of(self.folder) / RECIPE)):
                self.warn(text, step)
            self.journal.show_progress(at_once=True, step=step, total_steps=self._total_steps)

    @property
    def has_records(self) -> bool:
        """Whether every step is recorded, which needs all processes."""
        return self._recorder is not None

    def reads(self, step: int) -> bool:
        """Return whether log.jsonl gets a line for this step."""
        return is_due(step, self._recipe.log.every_steps) or self._known.logs(step)

    def add(
        self,
        step: int,
        result: Result,
        stamps: Stamps,
        batches: list[Batch],
        *,
        num_bad: int,
        num_skipped: int,
    ) -> None:
        """Record a step, its unreadable images and a skipped update; every log.every_steps also in the log.

        `step` counts this one; `stamps` are of its parts; `num_bad` and `num_skipped` are totals so far.
        """
        for batch in batches:
            for sample, key, reason in batch.bad:
                bad = {"step": step, "sample": sample, "key": key, "reason": reason}
                self.journal.append(Path(self.bad_samples(self._runtime.rank)), bad)
        if result.skipped:
            self.journal.append(self.folder / SKIPPED, self._skipped_record(step, result, batches))
            self.warn(f"step {step} was not finite and is skipped: {result}", step)
        is_logged = self.reads(step) or step == self._total_steps
        # The record waits for the other processes, which log nothing else for such a step.
        if not (result.num_bad or result.skipped):
            self.begun = step
        for part, seconds in part_seconds(stamps).items():
            self._parts[part] += seconds
        if is_logged:
            self._gather()
        if self._recorder is not None:
            with_weights = is_logged or is_due(step, self._recipe.checkpoint.every_steps)
            self._recorder.add(step, result, batches, weights=with_weights)
        counts = {"num_bad": num_bad, "num_skipped": num_skipped}
        self._log_step(step, result, batches if is_logged else [], counts)
        self.step = step

    def _log_step(
        self, step: int, result: Result, micro_batches: list[Batch], counts: Mapping[str, int]
    ) -> None:
        """Show the progress; log the step if its micro-batches are given."""
        size = self._recipe.schedule.batch_size
        began, first = self._window
        seconds = time.perf_counter() - began
        rate = (step - first) * size / seconds
        said: dict[str, Any] = {"step": step, "total_steps": self._total_steps, "samples": step * size}
        if not micro_batches:
            self.journal.show_progress(
                **said,
                loss=result.loss,
                lr=result.lr,
                images_per_second=rate,
                data_wait=self._parts[DATA] / seconds,
                num_bad=counts["num_bad"],
                **self._times,
            )
            return
        images = torch.cat([batch.images[:_PIXELS_OF] for batch in micro_batches[:_PIXELS_OF]])
        pixel_std = float(f"{self._normalise(images[:_PIXELS_OF]).float().std().item():.5g}")
        flops, peak = rate * self.flops_per_image() / self._runtime.num_processes, self._runtime.peak_flops
        numbers = {"loss": result.loss, "lr": result.lr, "grad_norm": result.grad_norm}
        self.journal.write(
            "train",
            **said,
            epoch=round(step * size / len(self._train), 4),
            **numbers,
            pixel_std=pixel_std,
            images_per_second=round(rate, 2),
            tflops=round(flops / 1e12, 4),
            mfu=round(flops / peak, 4) if peak else None,
            data_wait=round(self._parts[DATA] / seconds, 4),
            **counts,
            **self._times,
            **self._compare(step, loss=result.loss, pixel_std=pixel_std),
        )
        self._runtime.accelerator.log(numbers, step=step)
        self.start_clock(step)

    def start_clock(self, step: int) -> None:
        self._window, self._parts = (time.perf_counter(), step), dict.fromkeys(PARTS, 0.0)

    def _gather(self) -> None:
        """Collect where the time of all processes goes since the last logged step, and the memory of GPUs."""
        device, length = self._runtime.device, time.perf_counter() - self._window[0]
        own = [*self._parts.values(), *memory_of(device)]
        table = self._runtime.gather(torch.tensor(own, dtype=torch.float64), everywhere=False)
        self._times = slowest(table, length)
        if not table:
            return
        columns = torch.stack(table).T
        if len(table) > _RANKS:
            columns = columns.sort(dim=1).values[:, [0, len(table) // 2, -1]]
        shares = [[round(share, 4) for share in row] for row in (columns / length).tolist()]
        self._times["phases"] = dict(zip(PARTS, shares, strict=False))
        if device.type == "cuda":
            most = columns[len(PARTS) :].amax(dim=1).long().tolist()
            self._times["gpu_memory"] = dict(zip(MEMORY, most, strict=True))

    def _skipped_record(self, step: int, result: Result, batches: list[Batch]) -> Record:
        """Return a line of skipped.jsonl, with numbers as strings, since JSON lacks infinity.

        Weight norms are of this process's shards; a GPU may have applied one more update.
        """
        norms = [] if result.gradient is None else result.gradient.tolist()
        weights = self._network.named_parameters()
        return {
            "step": step,
            "rank": self._runtime.rank,
            "loss": str(result.loss),
            "grad_norm": str(result.grad_norm),
            "lr": str(result.lr),
            "keys": self._keys(batches),
            "gradient_norms": {name: str(norm) for name, norm in zip(result.parameters, norms, strict=True)},
            "weight_norms": {name: str(float(local(p.detach()).norm())) for name, p in weights},
        }

    def _keys(self, micro_batches: list[Batch]) -> list[str]:
        return [self.key(int(sample)) for batch in micro_batches for sample in batch.samples]

    def key(self, sample: int) -> str:
        """Return a training image's key, or its number if the server of remote shards is unreachable."""
        try:
            return sample_key(self._train, sample)
        except GaveUpError as error:
            self._stop.miss_images(str(error))
            return f"number {sample}"

    def bad_samples(self, rank: int | None = None) -> str:
        """Return a rank's file or the pattern for all: appending to one file is unsafe on network disks."""
        several = rank is None and self._runtime.num_processes > 1
        which = "*" if several else f"_{rank:02d}" if rank else ""
        return str(self.folder / BAD_SAMPLES.replace("*", which))

    def bad_reasons(self) -> str:
        """Return the counts of unusable images by reason, the most frequent first."""
        found = chain.from_iterable(map(read_records, self.folder.glob(BAD_SAMPLES)))
        counts = Counter(str(record.get("reason")) for record in found)
        return ", ".join(f"{count} {reason}" for reason, count in counts.most_common())

    # Scores and messages

    def write_score(self, step: int, score: Score, seconds: float) -> None:
        found = self._compare(step, accuracy=score.accuracy)
        self.journal.write("evaluate", step=step, **score.numbers, **found, seconds=seconds)
        self._track(step, seconds, {"accuracy": score.accuracy, score.metric: score.number})

    def write_fewshot(self, step: int, scores: Mapping[int, Sequence[float]], seconds: float) -> None:
        means = {shots: sum(values) / len(values) for shots, values in scores.items()}
        for shots, values in scores.items():
            self.journal.write(
                "fewshot", step=step, shots=shots, accuracy=means[shots], seeds=values, seconds=seconds
            )
        self.probed.add(step)
        self._track(step, seconds, {f"fewshot_{shots}": mean for shots, mean in means.items()})

    def _track(self, step: int, seconds: float, numbers: dict[str, float]) -> None:
        """Report to the trackers, and exclude the seconds spent on these numbers from the throughput."""
        self._runtime.accelerator.log(numbers, step=step)
        self._window = (self._window[0] + seconds, self._window[1])

    def warn(self, text: str, step: int) -> None:
        self.journal.write("warning", step=step, text=text)

    def report_problems(self, steps: int, num_bad: int, num_skipped: int) -> None:
        if num_skipped:
            text = f"{num_skipped} of {steps} updates were not finite and were skipped"
            self.warn(f"{text}; {self.folder / SKIPPED} lists them", steps)
        if num_bad:
            text = f"images that could not be used: {self.bad_reasons()}"
            self.warn(f"{text}; {self.bad_samples()} lists them", steps)

    # [known]

    def _comparison(self, records: Iterable[Record]) -> Comparison:
        known, s = self._recipe.known, self._recipe.schedule
        length = s.total_epochs if known.unit == "epochs" else self._total_steps
        return Comparison(known, self._total_steps, length, len(self._train.class_names), records)

    def _compare(self, step: int, **numbers: float) -> dict[str, Any]:
        """Return the log fields of a comparison with [known]; warn once if the run is flagged."""
        was = self._known.flagged
        found = self._known.of(step, **numbers)
        if self._known.flagged and not was:
            self.warn(
                f"[known]: {known_in_words(found)}; honest runs are seldom outside {self._known.strikes} "
                f"times: check learning rate, warm-up, labels, image order and normalisation",
                step,
            )
        return found

    # Resuming

    def problem_of(self, saved: SavedCheckpoint) -> str:
        """Return why the records do not match a checkpoint that has been loaded."""
        weights = "" if is_sharded(self._network) else weights_checksum(self._network)
        try:
            return record_problem(saved, weights)
        except VitctlError as error:
            return str(error)

    def cut_after(self, step: int) -> None:
        """Drop the records of later steps, which will be written again, and continue after `step`."""
        own = (self.folder / name for name in (LOG, STEP_RECORDS, SKIPPED))
        for path in chain(own, self.folder.glob(BAD_SAMPLES)):
            cut_after(path, step)
        records = read_records(self.folder / LOG)
        self.probed |= {r["step"] for r in records if r.get("kind") == "fewshot" and "step" in r}
        self._known = self._comparison(records)
        if step:
            self.journal.write("resume", step=step, total_steps=self._total_steps)
        records_agreed(run_of(self.folder))


def memory_of(device: torch.device) -> list[int]:
    """Return the bytes of `MEMORY` on a GPU, without waiting for it; nothing on a CPU."""
    of = torch.cuda.memory_allocated, torch.cuda.memory_reserved, torch.cuda.max_memory_allocated
    return [number(device) for number in of] if device.type == "cuda" else []


def is_due(step: int, every: int) -> bool:
    """Return whether an action for every `every` steps (0: never) is due after this step."""
    return every > 0 and step % every == 0
