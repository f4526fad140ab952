"""Starts, kills and starts again the processes of a loader, and compares what they have read."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import psutil

FOLDER = Path(__file__).resolve().parent
NOT_OFFERED = 64
TRACKER_SECONDS = 10.0
SAME, SAME_BATCHES, OTHER = "same", "same batches", "other"
LAYOUTS = ((1, 1), (2, 2), (2, 1), (2, 3))  # processes before and after


@dataclass(frozen=True)
class Plan:
    """The schedule of all loaders; every number of processes and workers gets whole shards and whole batches.

    Args:
        num_samples: of an epoch.
        shard_samples: of a shard.
        global_batch: samples of a step, over all processes.
        workers: loader processes of each process.
        epochs: of the whole run.
        save_every: steps between two states.
        stop: the step after which all processes are killed.
        seed: of the order.
        limit_seconds: after which a run hangs.
    """

    num_samples: int = 960
    shard_samples: int = 80
    global_batch: int = 48
    workers: int = 2
    epochs: int = 3
    save_every: int = 8
    stop: int = 30
    seed: int = 1
    limit_seconds: float = 90.0


@dataclass(frozen=True)
class Share:
    """What one process read at one step.

    Args:
        step: from 1, over the whole run.
        rank: of the process.
        epoch: as the loader counts, from 0.
        samples: their numbers, in order.
    """

    step: int
    rank: int
    epoch: int
    samples: tuple[int, ...]


@dataclass(frozen=True)
class Difference:
    """How an epoch differs from that of the uninterrupted run.

    Args:
        repeated: times that samples were read more often.
        skipped: times that samples were read less often.
        order: `same` sample for sample; `same batches`, where each step has the same samples in another
            order, which adds the same gradients; or `other`.
    """

    repeated: int
    skipped: int
    order: str

    @property
    def exact(self) -> bool:
        """Whether there is no difference but the order within a step."""
        return self.repeated == self.skipped == 0 and self.order != OTHER


def joined(before: Iterable[Share], saved: int, after: Iterable[Share]) -> list[Share]:
    """The run that counts: what was read up to the saved step, and from there by the run that went on; the
    rest was rolled back.
    """
    return [share for share in before if share.step <= saved] + list(after)


def difference(straight: Iterable[Share], run: Iterable[Share], epoch: int) -> Difference:
    """Compare one epoch of two runs, whatever their numbers of processes.

    Args:
        straight: the uninterrupted run.
        run: the other.
        epoch: which.
    """
    wanted, found = steps_of(straight, epoch), steps_of(run, epoch)
    often, seen = (Counter(sample for step in steps for sample in step) for steps in (wanted, found))
    if wanted == found:
        order = SAME
    else:
        order = (
            SAME_BATCHES if [sorted(step) for step in wanted] == [sorted(step) for step in found] else OTHER
        )
    return Difference((seen - often).total(), (often - seen).total(), order)


def steps_of(run: Iterable[Share], epoch: int) -> list[list[int]]:
    """Samples of each step of an epoch, those of all processes in the order of their ranks."""
    shares = sorted(
        (share for share in run if share.epoch == epoch), key=lambda share: (share.step, share.rank)
    )
    by_step = groupby(shares, key=lambda share: share.step)
    return [[sample for share in group for sample in share.samples] for _, group in by_step]


def is_whole(run: Iterable[Share], epoch: int, num_samples: int) -> bool:
    """Whether an epoch has every sample once."""
    samples = [sample for step in steps_of(run, epoch) for sample in step]
    return sorted(samples) == list(range(num_samples))


@dataclass(frozen=True)
class Launch:
    """How a run on some processes ended.

    Args:
        shares: what was read.
        saved: the last step whose state every process has written, 0 for none.
        failure: "" or why it ended too early.
        code: exit code of the process that failed.
    """

    shares: tuple[Share, ...]
    saved: int
    failure: str = ""
    code: int = 0


@dataclass(frozen=True)
class Finding:
    """What became of one change of processes.

    Args:
        outcome: `resumed`; `refused`, by an error about another number of processes; `not offered` by its
            documentation; `failed`.
        message: why it is not `resumed`.
        interrupted, following: the epoch of the kill, and the one after it, against the uninterrupted run.
        saved: the step gone on from.
        state_bytes: of all processes.
        repeatable: whether the run before the kill read what the uninterrupted one did.
        whole: whether the uninterrupted run reads each image once in an epoch.
    """

    outcome: str
    message: str = ""
    interrupted: Difference | None = None
    following: Difference | None = None
    saved: int = 0
    state_bytes: int = 0
    repeatable: bool = True
    whole: bool = True

    @property
    def text(self) -> str:
        """One cell of the table."""
        if self.interrupted is None or self.following is None:
            return self.outcome
        now, after = self.interrupted, self.following
        if now.exact and after.exact:
            return "exact" if now.order == after.order == SAME else SAME_BATCHES
        if now.exact:
            parts = ["exact" if now.order == SAME else SAME_BATCHES]
        else:
            parts = [
                f"{now.repeated} repeated, {now.skipped} skipped",
                *(["other order"] if now.order == OTHER else []),
            ]
        if after.repeated or after.skipped:
            parts.append(f"next epoch {after.repeated} repeated, {after.skipped} skipped")
        elif after.order == OTHER:
            parts.append("next epoch other order")
        return "; ".join(parts)


@dataclass
class Suite:
    """Runs the loaders.

    Args:
        root: folder for data, logs and states.
        pythons: interpreter of a peer, where it is not this one.
        plan: of all.
        versions: of the packages of each peer that ran.
    """

    root: Path
    pythons: dict[str, str] = field(default_factory=dict)
    plan: Plan = Plan()
    versions: dict[str, dict[str, str]] = field(default_factory=dict)

    def python(self, peer: str) -> str:
        """The interpreter of a peer."""
        return self.pythons.get(peer.partition(":")[0], sys.executable)

    def fields(self, world: int, saved_world: int = 0) -> dict[str, Any]:
        """Of a `Job`, but for the rank."""
        plan = self.plan
        return {
            "data": str(self.root / "data"), "world": world, "workers": plan.workers,
            "global_batch": plan.global_batch,
            "num_samples": plan.num_samples, "epochs": plan.epochs, "seed": plan.seed,
            "saved_world": saved_world,
        }  # fmt: skip

    def run(self, peer: str, layouts: Sequence[tuple[int, int]] = LAYOUTS) -> dict[str, Finding]:
        """All layouts of a peer, by `1 -> 1` ...; a peer that cannot start has one row that says why."""
        problem = self.prepare(peer)
        if problem:
            return {"": Finding("not run", problem)}
        found: dict[str, Finding] = {}
        for before in sorted({before for before, _ in layouts}):
            straight = self.launch(peer, f"{before}_straight", before)
            killed = self.launch(peer, f"{before}_killed", before, stop=self.plan.stop)
            for after in [after for first, after in layouts if first == before]:
                found[f"{before} -> {after}"] = self.go_on(peer, straight, killed, before, after)
        return found

    def prepare(self, peer: str) -> str:
        """Let a peer convert the data, and note its versions; returns why it cannot."""
        command = [
            self.python(peer),
            str(FOLDER / "consume.py"),
            peer,
            json.dumps({**self.fields(1), "rank": 0}),
        ]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, env=environment(0, 1, 0), check=False
            )
        except OSError as error:
            return str(error)
        if done.returncode:
            return last_line(done.stderr)
        self.versions[peer] = json.loads(done.stdout.splitlines()[-1])
        return ""

    def go_on(self, peer: str, straight: Launch, killed: Launch, before: int, after: int) -> Finding:
        """Go on from the last state, and compare."""
        if straight.failure or killed.failure:
            return Finding("failed", straight.failure or killed.failure)
        states = self.root / "runs" / peer / f"{before}_killed" / "states"
        folder = states / f"{killed.saved:06d}" if killed.saved else None
        resumed = self.launch(
            peer, f"{before}_to_{after}", after, resume=folder, finished=killed.saved, saved_world=before
        )
        about = {
            "saved": killed.saved,
            "state_bytes": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            if folder
            else 0,
            "repeatable": steps_until(straight.shares, killed.saved)
            == steps_until(killed.shares, killed.saved),
            "whole": all(
                is_whole(straight.shares, epoch, self.plan.num_samples) for epoch in range(self.plan.epochs)
            ),
        }
        if resumed.failure:
            ended = "refused" if resumed.code and before != after else "failed"
            return Finding("not offered" if resumed.code == NOT_OFFERED else ended, resumed.failure, **about)
        run = joined(killed.shares, killed.saved, resumed.shares)
        interrupted = (self.plan.stop - 1) * self.plan.global_batch // self.plan.num_samples
        epochs = [difference(straight.shares, run, epoch) for epoch in (interrupted, interrupted + 1)]
        return Finding("resumed", "", epochs[0], epochs[1], **about)

    def launch(
        self,
        peer: str,
        name: str,
        world: int,
        *,
        stop: int = 0,
        resume: Path | None = None,
        finished: int = 0,
        saved_world: int = 0,
    ) -> Launch:
        """Start the processes of a run, wait until each has read all or has reached the step `stop`, and kill
        them.
        """
        folder, port = self.root / "runs" / peer / name, free_port()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        plan = {
            "states": str(folder / "states"), "save_every": self.plan.save_every, "stop": stop,
            "resume": str(resume or ""), "finished": finished,
        }  # fmt: skip
        began, processes = time.time(), []
        for rank in range(world):
            job = json.dumps({**self.fields(world, saved_world), "rank": rank})
            given = json.dumps({"log": str(folder / f"rank{rank}.jsonl"), **plan})
            with (folder / f"rank{rank}.txt").open("w") as said:
                processes.append(
                    subprocess.Popen(
                        [self.python(peer), str(FOLDER / "consume.py"), peer, job, given],
                        stdout=said, stderr=said, env=environment(rank, world, port), start_new_session=True,
                    )
                )  # fmt: skip
        try:
            return outcome(folder, processes, began, self.plan.limit_seconds)
        finally:
            for process in processes:
                kill(process)


def outcome(
    folder: Path, processes: Sequence["subprocess.Popen[bytes]"], began: float, limit: float
) -> Launch:
    """Wait for the processes of a run, and read their logs."""
    logs = [folder / f"rank{rank}.jsonl" for rank in range(len(processes))]
    failure, code = "", 0
    while not all('{"done"' in text for text in map(text_of, logs)):
        ended = [rank for rank, process in enumerate(processes) if process.poll() is not None]
        if ended or time.time() - began > limit:
            failure = (
                last_line(text_of(folder / f"rank{ended[0]}.txt")) if ended else f"no end after {limit:.0f} s"
            )
            code = (processes[ended[0]].returncode or 0) if ended else 0
            break
        time.sleep(0.05)
    lines = [[json.loads(line) for line in text_of(log).splitlines()] for log in logs]
    shares = tuple(
        Share(line["step"], rank, line["epoch"], tuple(line["samples"]))
        for rank, told in enumerate(lines)
        for line in told
        if "step" in line
    )
    saved = min(max((line["saved"] for line in told if "saved" in line), default=0) for told in lines)
    return Launch(shares, saved, failure, code)


def kill(process: "subprocess.Popen[bytes]") -> None:
    """SIGKILL a process and its loader workers, which share its process group.

    Python's resource trackers are left to end by themselves: they remove the semaphores and shared memory of
    the others.
    """
    group = [one for one in psutil.process_iter(["cmdline"]) if is_in_group(one.pid, process.pid)]
    trackers = [one for one in group if "resource_tracker" in " ".join(one.info["cmdline"] or ())]
    for one in group:
        if one not in trackers:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
    process.wait()
    psutil.wait_procs(trackers, timeout=TRACKER_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def is_in_group(pid: int, group: int) -> bool:
    """Whether a process is alive and belongs to a process group."""
    try:
        return os.getpgid(pid) == group
    except ProcessLookupError:
        return False


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """Of a process, as torchrun would set it."""
    ranks = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_PORT": port,
    }
    return {
        **os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
        **{name: str(value) for name, value in ranks.items()},
    }  # fmt: skip


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def text_of(path: Path) -> str:
    """Whole lines of a file that may still be written."""
    return path.read_text(errors="replace").rpartition("\n")[0] if path.exists() else ""


def last_line(text: str) -> str:
    """The error, where a traceback ends."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\w+\.)*\w+(Error|Exception): ", line)]
    return (errors or lines or ["ended without a message"])[-1][:300]


def steps_until(shares: Sequence[Share], step: int) -> list[Share]:
    """What was read up to a step."""
    return sorted(
        (share for share in shares if share.step <= step), key=lambda share: (share.step, share.rank)
    )
