"""A training run on disk: what it keeps, what it goes on from, when it gives up."""

import json
import re
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from tests.conftest import (
    SHORT,
    TINY,
    Run,
    checkpoint,
    harmed,
    records,
    step_images,
    train_records,
    two_processes,
)
from tests.engine.conftest import LOSS, batch
from tests.matrix import slow
from vitctl.data.loader.batches import Batch
from vitctl.data.shards.index import read_index
from vitctl.engine import assemble
from vitctl.engine.checkpoint import Saver
from vitctl.engine.evaluation import Score
from vitctl.engine.log import is_due
from vitctl.engine.preemption import StopFlag, Stopped
from vitctl.engine.state import Counts
from vitctl.engine.trainer import Evaluator, Trainer
from vitctl.engine.update import TrainStep, Update
from vitctl.errors import CheckpointError, DataError
from vitctl.jobs.pretrain import pretrain
from vitctl.launch.prepare_run import prepare_run
from vitctl.launch.worker import work
from vitctl.recipe.load import Override, load_recipe

Make = Callable[..., TrainStep]


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").iterdir())


def test_fit__keeps_the_last_and_the_best(run: Run) -> None:
    folder = run("a", **SHORT, **{"checkpoint.keep_last": 1, "checkpoint.keep_best": 1})
    scores = {r["step"]: r["accuracy"] for r in records(folder, "evaluate")}
    assert sorted(scores) == [4, 8]
    best = 8 if scores[8] >= scores[4] else 4
    assert saved_steps(folder) == sorted({8, best})


def test_fit__again_in_a_finished_folder_trains_nothing_and_says_the_same(run: Run, short_copy: Path) -> None:
    folder = short_copy
    first, files = json.loads((folder / "result.json").read_text()), checkpoint(folder, 8)
    assert run("a", **SHORT) == folder
    again = json.loads((folder / "result.json").read_text())
    assert again.pop("record") != first.pop("record")  # the log has a line more
    assert again.pop("files").keys() == first.pop("files").keys()  # of a copy
    assert again == first
    assert checkpoint(folder, 8) == files
    assert [r["step"] for r in train_records(folder)] == list(range(1, 9))
    assert len(records(folder, "evaluate")) == 2


@pytest.mark.parametrize("name", ["model.safetensors", *slow("ema.safetensors", "optimizer.safetensors")])
def test_resume__a_torn_checkpoint_gives_way_to_the_older_one_and_is_said(
    run: Run, short: Path, short_copy: Path, name: str
) -> None:
    straight, folder = short, short_copy
    torn = folder / "checkpoints" / "step_00000008" / name
    torn.write_bytes(torn.read_bytes()[:-3])
    run("a", **SHORT)
    assert [r["text"].split(": ")[-1] for r in records(folder, "warning")] == [
        f"{name} is missing or changed since it was written"
    ]
    assert [r["step"] for r in records(folder, "resume")] == [6]
    assert checkpoint(folder, 8) == checkpoint(straight, 8)
    assert [r["loss"] for r in train_records(folder)] == [r["loss"] for r in train_records(straight)]
    assert step_images(folder) == step_images(straight)


@pytest.mark.slow
def test_resume__without_any_whole_checkpoint_is_refused_until_they_are_deleted(
    run: Run, short: Path, short_copy: Path
) -> None:
    """A warning would not be read before the log of days of work is cut back to nothing."""
    straight, folder = short, short_copy
    root, log = folder / "checkpoints", (folder / "log.jsonl").read_bytes()
    for path in root.iterdir():
        (path / "state.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"step_00000008: damaged .* delete .*checkpoints to start again"
    ):
        run("a", **SHORT)
    assert ((folder / "log.jsonl").read_bytes(), saved_steps(folder)) == (log, [6, 8])
    shutil.rmtree(root)
    run("a", **SHORT)
    assert records(folder, "resume") == []
    assert checkpoint(folder, 8) == checkpoint(straight, 8)
    assert [r["step"] for r in train_records(folder)] == list(range(1, 9))


@pytest.mark.slow
def test_resume__with_other_threads_is_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"schedule.total_steps": 6, "checkpoint.every_steps": 3, "schedule.warmup_steps": 2}
    monkeypatch.setattr(assemble, "computed_on", lambda *_: {"device_name": "a", "threads": 1})
    folder = run("threads", **values)
    for threads, count in ((1, 0), (2, 1)):
        shutil.rmtree(folder / "checkpoints" / "step_00000006")
        (folder / "result.json").unlink()
        facts = {"device_name": "a", "threads": threads}
        monkeypatch.setattr(assemble, "computed_on", lambda *_, facts=facts: facts)
        work(folder)
        said = [record["text"] for record in records(folder, "warning")]
        assert sum("threads 1, here 2" in text for text in said) == count


def test_stop__saves_and_goes_on_bit_for_bit(run: Run, short: Path, tiny_data: Path, tmp_path: Path) -> None:
    straight, folder = short, tmp_path / "a"
    values = {"data.path": str(tiny_data), **SHORT}
    loaded = load_recipe(str(TINY), [Override(key, value) for key, value in values.items()])
    prepare_run(loaded, folder)
    stop = StopFlag()

    def report(record: dict[str, Any]) -> None:
        if record["kind"] == "train" and record["step"] == 4:
            stop.raise_(15)

    with pytest.raises(Stopped):
        pretrain(loaded.recipe, folder, report, stop)  # type: ignore[arg-type]
    assert saved_steps(folder)[-1] in (4, 5)
    run("a", **SHORT)
    assert checkpoint(folder, 8) == checkpoint(straight, 8)
    assert [r["loss"] for r in train_records(folder)] == [r["loss"] for r in train_records(straight)]


@pytest.mark.parametrize("skipped", [pytest.param((), marks=pytest.mark.slow), (3,)])
def test_resume__a_debiased_average_goes_on_bit_for_bit(
    run: Run, monkeypatch: pytest.MonkeyPatch, skipped: tuple[int, ...]
) -> None:
    """A skipped update is none of the average's either: their number has to come back with the checkpoint."""
    own = TrainStep.update

    def update(trainer: TrainStep, step: int, *given: Any) -> Update:
        objective = trainer.objective
        if step in skipped:
            trainer.objective = lambda *a: objective(*a) * float("nan")
        result = own(trainer, step, *given)
        trainer.objective = objective
        return result

    monkeypatch.setattr(TrainStep, "update", update)
    values = {**SHORT, "averaging.debias": True, "averaging.decay": 0.9, "checkpoint.keep_last": 4}
    straight, folder = run("straight", **values), run("a", **values)
    assert [r["step"] for r in records(folder, "warning") if "was not finite" in r["text"]] == [
        s + 1 for s in skipped
    ]
    for step in (6, 8):
        shutil.rmtree(folder / "checkpoints" / f"step_{step:08d}")
    run("a", **values)
    assert [r["step"] for r in records(folder, "resume")] == [4]
    assert checkpoint(folder, 8) == checkpoint(straight, 8)


@pytest.mark.slow
def test_save__a_slow_copy_has_the_state_of_its_step(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where averages take the place of the weights after it."""
    values = {**SHORT, "averaging.decay": 0.5, "checkpoint.keep_last": 4}
    straight = run("straight", **values, **{"checkpoint.background": False})
    copy = Saver._copy

    def slow(*given: Any) -> Any:
        time.sleep(0.3)
        return copy(*given)

    monkeypatch.setattr(Saver, "_copy", slow)
    folder = run("a", **values)
    same = [checkpoint(folder, step) == checkpoint(straight, step) for step in (2, 4, 6)]
    assert same == [True] * 3
    assert checkpoint(folder, 8) == checkpoint(straight, 8)


def test_fit__evaluates_at_each_step_once_and_counts_every_image(run: Run) -> None:
    folder = run("a", **{**SHORT, "evaluation.every_steps": 3})
    assert [(r["step"], r["total"]) for r in records(folder, "evaluate")] == [(3, 23), (6, 23), (8, 23)]


def test_fit__saves_before_the_last_evaluation_so_that_it_can_be_killed_there(run: Run) -> None:
    folder = run("a", **SHORT, **{"checkpoint.background": False})
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    own = [(line["kind"], line["step"]) for line in lines if line["kind"] in ("evaluate", "checkpoint")]
    assert own == [
        ("checkpoint", 2), ("evaluate", 4), ("checkpoint", 4), ("checkpoint", 6), ("checkpoint", 8),
        ("evaluate", 8)
    ]  # fmt: skip


@pytest.mark.slow
def test_fit__without_a_split_to_score(run: Run) -> None:
    folder = run("a", **{**SHORT, "data.eval_split": ""})
    assert records(folder, "evaluate") == []
    assert json.loads((folder / "result.json").read_text())["metrics"] == {}


def test_log__every_steps_and_the_last(run: Run) -> None:
    folder = run("a", **{**SHORT, "log.every_steps": 3})
    assert [r["step"] for r in train_records(folder)] == [3, 6, 8]
    last = train_records(folder)[-1]
    assert (last["samples"], last["total_steps"], last["epoch"]) == (128, 8, round(128 / 70, 4))
    assert last["images_per_second"] > 0
    assert 0 <= last["data_wait"] <= 1


def test_log__deviation_of_the_pixels_that_the_network_sees(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[np.ndarray] = []

    own = TrainStep.update

    def update(self: TrainStep, step: int, micro_batches: list[Batch], *given: Any) -> Update:
        seen.append(np.concatenate([one.images.numpy() for one in micro_batches]))
        return own(self, step, micro_batches, *given)

    monkeypatch.setattr(TrainStep, "update", update)
    mean, std = np.array([0.1, 0.2, 0.3]), np.array([0.5, 0.25, 1.0])
    folder = run("a", **SHORT, **{"data.mean": mean.tolist(), "data.std": std.tolist()})
    expected = [((x / 255 - mean[:, None, None]) / std[:, None, None]).std(ddof=1) for x in seen]
    found = [r["pixel_std"] for r in train_records(folder)]
    assert len(found) == 8 and found == pytest.approx(expected, rel=1e-4)


def test_known__is_logged_and_flagged_once(run: Run) -> None:
    """Of the points, the first two are impossible, the third is wide; a resumed run counts the first."""
    points = [
        {"metric": "loss", "at": at, "value": value, "spread": spread}
        for at, value, spread in ((5.0, 1e-3, 1e-6), (10.0, 1e-3, 1e-6), (15.0, 1e-3, 1e-6), (20.0, 1.0, 9.0))
    ]
    values = {"source": "a test", "seeds": 9, "length": 20.0, "num_classes": 6, "points": points}
    known = {f"known.{key}": value for key, value in values.items()}
    folder = run("a", **known, **{"log.every_steps": 8})
    assert [r["step"] for r in train_records(folder)] == [5, 8, 10, 15, 16, 20]
    losses = [(r["step"], r["known"]["loss"]) for r in records(folder, "train") if "known" in r]
    compared = [(step, found["place"], found["since"]) for step, found in losses]
    assert compared == [(5, "above", 5), (10, "above", 5), (15, "above", 5), (20, "inside", 20)]
    assert [r["step"] for r in records(folder, "warning") if "[known]" in r["text"]] == [10]
    other = run("b", **{**known, "known.num_classes": 7}, **{"log.every_steps": 8})
    assert [r["step"] for r in train_records(other) if "known" not in r] == [8, 16, 20]


@pytest.mark.parametrize(
    ("seconds", "low", "high"), [*slow((0.0, 0.0, 0.2)), (0.25, 0.5, 1.0)], ids=["fast", "slow"]
)
def test_log__data_wait_is_the_share_of_time_without_data(
    run: Run, monkeypatch: pytest.MonkeyPatch, seconds: float, low: float, high: float
) -> None:
    real = assemble.train_batches

    def ready(*given: Any, **named: Any) -> Iterator[Batch]:
        """Batches that are there when asked for, or so many seconds later."""
        batches = list(islice(real(*given, **named), 8))

        def handed() -> Iterator[Batch]:
            for one in batches:
                if seconds:  # a sleep of nothing, too, gives the processor away
                    time.sleep(seconds)
                yield one

        return handed()

    monkeypatch.setattr(assemble, "train_batches", ready)
    changes = {"evaluation.every_steps": 0, "log.every_steps": 2}
    waits = [r["data_wait"] for r in train_records(run("a", **{**SHORT, **changes}))][
        1:
    ]  # the first also starts up
    assert len(waits) == 3
    assert low <= np.median(waits) <= high


@pytest.mark.slow
@pytest.mark.parametrize(
    ("harm", "rank", "what"), [("slow_images", 1, "data"), *slow(("slow_passes", 0, "computation"))]
)
def test_log__names_the_process_that_the_others_wait_for(
    tiny_data: Path, tmp_path: Path, harm: str, rank: int, what: str
) -> None:
    folder = tmp_path / "two"
    values = {"data.path": str(tiny_data), "machine.processes": 2, "evaluation.every_steps": 0}
    given = {**SHORT, **values, "schedule.total_steps": 6, "log.every_steps": 6}
    prepare_run(load_recipe(str(TINY), [Override(*one) for one in given.items()]), folder)
    assert two_processes(harmed(harm, folder), tmp_path / "out.txt") == (0, 0)
    [record] = train_records(folder)
    named = record["slowest"]
    assert (named["rank"], named["what"]) == (rank, what)
    assert 0.1 < named["share"] <= 1


def damaged(data: Path, out: Path, split: str, samples: list[int]) -> Path:
    """A copy of the shards in which some images of a split are zeros."""
    shutil.copytree(data, out)
    index = read_index(out / split)
    ends = np.cumsum([shard.num_samples for shard in index.shards])
    for sample in samples:
        row = index.rows[sample]
        path = out / split / index.shards[int(np.searchsorted(ends, sample, side="right"))].name
        content = bytearray(path.read_bytes())
        begin = int(row["header"]) + int(row["data"])
        content[begin : begin + int(row["size"])] = bytes(int(row["size"]))
        path.write_bytes(bytes(content))
    return out


def test_bad_samples__are_skipped_counted_and_listed(run: Run, tiny_data: Path, tmp_path: Path) -> None:
    data = damaged(tiny_data, tmp_path / "data", "train", [3])
    folder = run("a", **{**SHORT, "data.path": str(data)})
    listed = [json.loads(line) for line in (folder / "bad_samples.jsonl").read_text().splitlines()]
    assert {entry["sample"] for entry in listed} == {3}
    assert all(entry["key"] and entry["reason"] for entry in listed)
    [said] = [record for record in records(folder, "warning") if "could not be used" in record["text"]]
    where = f"{folder / 'bad_samples.jsonl'} lists them"
    assert said["text"] == f"images that could not be used: {len(listed)} not an image; {where}"
    assert train_records(folder)[-1]["num_bad"] == len(listed) == sum(s < 8 * 16 for s in positions_of(3))


def positions_of(sample: int) -> list[int]:
    from vitctl.data.source.order import Order

    positions = np.arange(8 * 16)
    return [int(p) for p in positions[Order(70, 0).at(positions)[1] == sample]]


def test_bad_samples__above_the_budget_stop_the_run(run: Run, tiny_data: Path, tmp_path: Path) -> None:
    data = damaged(tiny_data, tmp_path / "data", "train", [3])
    said = r"[12] of \d+ images read so far cannot be used, more than data\.max_bad_fraction = 0 allows"
    with pytest.raises(DataError, match=said) as e:
        run("a", **{**SHORT, "data.path": str(data), "data.max_bad_fraction": 0.0})
    assert re.search(
        f"{tmp_path / 'a' / 'bad_samples.jsonl'} lists them: [12] not an image; fix the data, or resume "
        f"with: vitctl resume",
        str(e.value),
    )
    assert (tmp_path / "a" / "bad_samples.jsonl").exists()
    assert json.loads((tmp_path / "a" / "result.json").read_text())["status"] == "failed"


def test_bad_samples__in_the_scored_split_are_an_error(run: Run, tiny_data: Path, tmp_path: Path) -> None:
    data = damaged(tiny_data, tmp_path / "data", "test", [5])
    with pytest.raises(DataError, match=r"cannot be evaluated .*; a score needs every image"):
        run("a", **{**SHORT, "data.path": str(data)})


class Diary(Trainer):
    """A training that writes down what it would do, and is its own state and log."""

    def __init__(
        self, step: TrainStep, total_steps: int, *, behind: int = 0, log: int = 0, evaluate: int = 0,
        probe: int = 0, save: int = 0,
    ) -> None:  # fmt: skip
        self.said: list[str] = []
        self.stop, self.runtime, self.pending, self.own = StopFlag(), step.runtime, deque(), range(8)
        self.total_steps, self.steps_behind = total_steps, behind
        self.log = self.state = self  # type: ignore[assignment]
        self.step, self.saved, self.folder, self.journal = 0, -1, Path(), Mock()
        self.counts, self.scores, self.probed = Counts(), {}, set[int]()
        self.train_step = replace(step, changing=self.changing)
        every = {"log": log, "evaluation": evaluate, "checkpoint": save}
        sections: Any = {k: SimpleNamespace(every_steps=v, patience=0) for k, v in every.items()}
        more = {"data": SimpleNamespace(max_bad_fraction=0), "schedule": SimpleNamespace(batch_size=8)}
        self.recipe: Any = SimpleNamespace(**sections, **more, machine=SimpleNamespace(compile=False))
        rows = [
            Evaluator("evaluate", evaluate, self.scored, self.scores.__contains__, self.write_score),
            Evaluator("fewshot", probe, self.probed_now, self.probed.__contains__, self.write_fewshot),
        ]
        self.evaluators, self.every = rows[: 1 + bool(probe)], log

    @contextmanager
    def changing(self) -> Iterator[None]:
        yield
        self.step += 1

    @contextmanager
    def averaged(self) -> Iterator[None]:
        yield

    def reads(self, step: int) -> bool:
        return is_due(step, self.every)

    def start_clock(self, _: int) -> None:
        pass

    def add(self, step: int, *_: Any, **__: Any) -> None:
        self.said.append(f"log {step}")

    def scored(self, _: Any) -> Any:
        self.said.append(f"evaluate {self.step}")
        return Score(0, 1)

    def probed_now(self, _: Any) -> Any:
        self.said.append(f"probe {self.step}")

    def write_score(self, step: int, score: Score, _: float) -> None:
        self.scores[step] = score

    def write_fewshot(self, step: int, *_: Any) -> None:
        self.probed.add(step)

    def save(self, last: bool = False) -> None:
        if self.saved != self.step:
            self.said.append(f"save {self.step}" + " and wait" * last)
        self.saved = self.step

    def rescue(self, error: Exception, _: Any) -> None:
        self.said.append(f"rescue {self.step} from {error}")


def signalled(diary: Diary) -> Iterator[Batch]:
    """Batches; a signal comes with the third."""
    for number in range(9):
        if number == 2:
            diary.stop.raise_(15)
        yield batch(8)


def endless() -> Iterator[Batch]:
    while True:
        yield batch(8)


def test_run_steps__evaluates_before_it_saves_but_at_the_end(trainer: Make) -> None:
    diary = Diary(trainer(LOSS), 5, evaluate=2, probe=3, save=4)
    diary.step = 1
    diary.run_steps(endless())
    expected = (
        "log 2, evaluate 2, log 3, probe 3, log 4, evaluate 4, save 4, log 5, save 5 and wait, evaluate 5, "
        "probe 5"
    )
    assert ", ".join(diary.said) == expected


def test_run_steps__zero_means_only_at_the_end(trainer: Make) -> None:
    diary = Diary(trainer(LOSS), 2)
    diary.run_steps(endless())
    assert diary.said == ["log 1", "log 2", "save 2 and wait", "evaluate 2"]


def test_run_steps__a_signal_saves_the_finished_step_and_leaves(trainer: Make) -> None:
    diary = Diary(trainer(LOSS), 9, evaluate=1)
    with pytest.raises(Stopped):
        diary.run_steps(signalled(diary))
    assert diary.said == ["log 1", "evaluate 1", "log 2", "evaluate 2", "log 3", "save 3 and wait"]


def test_run_steps__on_a_gpu_numbers_are_read_one_step_late_but_for_what_is_logged_or_saved(
    trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    diary, update = Diary(trainer(LOSS), 7, behind=1, log=5, save=3), TrainStep.update

    def told(own: TrainStep, step: int, *given: Any) -> Update:
        diary.said.append(f"update {step}")
        return update(own, step, *given)

    monkeypatch.setattr(TrainStep, "update", told)
    diary.run_steps(endless())
    assert ", ".join(diary.said) == (
        "update 0, update 1, log 1, update 2, log 2, log 3, save 3, update 3, update 4, log 4, log 5, update "
        "5, log 6, save 6, "
        "update 6, log 7, save 7 and wait, evaluate 7"
    )


def test_run_steps__numbers_read_late_are_the_same(trainer: Make) -> None:
    read: dict[int, list[tuple[Any, ...]]] = {0: [], 1: []}
    for behind, said in read.items():

        class Numbers(Diary):
            def add(self, step: int, *rest: Any, said: list[tuple[Any, ...]] = said, **_: Any) -> None:
                result = rest[0]
                said.append((step, result.loss, result.grad_norm, result.lr, result.gradient.tolist()))

        step = trainer(LOSS, name="adam", lr=lambda step: 0.1 / (step + 1))
        Numbers(step, 6, behind=behind).run_steps(endless())
    assert read[0] == read[1]
    assert [row[0] for row in read[0]] == [1, 2, 3, 4, 5, 6]
    assert len({row[1] for row in read[0]}) == 6


def test_run_steps__a_signal_read_late_stops_after_the_step_under_way(trainer: Make) -> None:
    diary = Diary(trainer(LOSS), 9, behind=1)
    with pytest.raises(Stopped):
        diary.run_steps(signalled(diary))
    assert diary.said == ["log 1", "log 2", "log 3", "log 4", "save 4 and wait"]


def test_run_steps__a_signal_beside_one_bad_image_too_many_leaves_the_step_saved(trainer: Make) -> None:
    class Bad(Diary):
        def _check_budget(self, step: int) -> None:
            if step == 4:
                raise DataError("too many")

    diary = Bad(trainer(LOSS), 9, behind=1)
    with pytest.raises(DataError, match="too many"):
        diary.run_steps(signalled(diary))
    assert diary.said == ["log 1", "log 2", "log 3", "log 4", "rescue 4 from too many"]


def test_run_steps__after_an_error_all_finished_steps_are_logged(trainer: Make) -> None:
    def batches() -> Iterator[Batch]:
        yield from [batch(8)] * 3
        raise OSError("gone")

    diary = Diary(trainer(LOSS), 9, behind=1)
    with pytest.raises(OSError, match="gone"):
        diary.run_steps(batches())
    assert diary.said == ["log 1", "log 2", "log 3", "rescue 3 from gone"]


def test_run_steps__a_signal_before_the_first_step_saves_what_there_is(trainer: Make) -> None:
    diary = Diary(trainer(LOSS), 9)
    diary.stop.raise_(10)
    diary.step = 4
    with pytest.raises(Stopped):
        diary.run_steps(endless())
    assert diary.said == ["save 4 and wait"]


def test_run_steps__a_signal_during_evaluation_saves_too(trainer: Make) -> None:
    class Stopping(Diary):
        def scored(self, _: Any) -> Any:
            raise Stopped

    diary = Stopping(trainer(LOSS), 9, evaluate=2)
    with pytest.raises(Stopped):
        diary.run_steps(endless())
    assert diary.said == ["log 1", "log 2", "save 2 and wait"]
