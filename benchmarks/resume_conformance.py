"""Kill a loader, go on, and count: `python benchmarks/resume_conformance.py --python datasets=/tmp/venv/bin/python ...`.

Every loader reads the same images on the same schedule: three epochs of 20 global batches, its state saved every 8 steps, every
process killed (SIGKILL) after step 30, the run gone on with from the last state, to the end. On one process, on two, and from
the state of two on one and on three. What the run that went on has read is compared, by key, with the run of the same loader that was
never stopped. benchmarks/README.md has the results, and says how each loader is used and by which page of its documentation.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "resume"
sys.path.insert(0, str(FOLDER))

from counting import OTHER, SAME, SAME_BATCHES, Difference, Share, difference, is_whole, joined  # noqa: E402

RESULTS = Path(__file__).resolve().parent / "results" / "resume_conformance.json"
NUM_SAMPLES, SHARD_SAMPLES, GLOBAL_BATCH, WORKERS, EPOCHS, SEED = 960, 80, 48, 2, 3, 1
SAVE_EVERY, STOP = 8, 30
LIMIT_SECONDS = 90.0
NOT_OFFERED = 64
LAYOUTS = ((1, 1), (2, 2), (2, 1), (2, 3))  # processes before and after

# The peer, and how it is used: PEER or PEER:VARIANT, a module peer_PEER.py of benchmarks/resume.
PEERS = (
    "vitctl",
    "timm:epoch",
    "timm:recovery",
    "webdataset",
    "torchdata_nodes",
    "datasets:shards",
    "datasets:buffer",
    "accelerate:skip",
    "accelerate:stateful",
    "streaming",
    "litdata",
    "energon",
    "grain:loader",
    "grain:elastic",
    "dali",
)


@dataclass(frozen=True)
class Launch:
    """How a run on some processes ended.

    Args:
        shares: what was read.
        saved: the last step whose state every process has written, 0 for none.
        seconds: from the start of the processes to the first batch of the last of them; of it, those of the loader.
        failure: "" or why it ended too early.
        code: exit code of the process that failed.
    """

    shares: tuple[Share, ...]
    saved: int
    seconds: tuple[float, float]
    failure: str = ""
    code: int = 0


@dataclass(frozen=True)
class Finding:
    """What became of one change of processes.

    Args:
        outcome: `resumed`, `refused`, `not offered`, `failed`.
        message: why it is not `resumed`.
        interrupted, following: the epoch of the kill, and the one after it, against the uninterrupted run.
        saved: the step gone on from.
        state_bytes: of all processes.
        pickle: what reading the state needs.
        seconds: see `Launch`.
        repeatable: whether the run before the kill read what the uninterrupted one did.
        whole: whether the uninterrupted run reads each image once in an epoch.
    """

    outcome: str
    message: str = ""
    interrupted: Difference | None = None
    following: Difference | None = None
    saved: int = 0
    state_bytes: int = 0
    pickle: str = ""
    seconds: tuple[float, float] = (0.0, 0.0)
    repeatable: bool = True
    whole: bool = True

    @property
    def text(self) -> str:
        """One cell of the table."""
        if self.interrupted is None or self.following is None:
            return self.outcome
        if self.interrupted.exact and self.following.exact:
            orders = {self.interrupted.order, self.following.order}
            return "exact" if orders == {SAME} else SAME_BATCHES
        parts = [f"{self.interrupted.repeated} repeated, {self.interrupted.skipped} skipped"]
        parts += ["other order"] if self.interrupted.order == OTHER else []
        after = (self.following.repeated, self.following.skipped)
        parts += [f"next epoch {after[0]}, {after[1]}"] if any(after) else []
        parts += ["next epoch other order"] if self.following.order == OTHER and not any(after) else []
        return "; ".join(parts)


@dataclass
class Suite:
    """Runs the loaders.

    Args:
        root: folder for data, logs and states.
        pythons: interpreter of a peer, where it is not this one.
    """

    root: Path
    pythons: dict[str, str] = field(default_factory=dict)

    def python(self, peer: str) -> str:
        """The interpreter of a peer."""
        return self.pythons.get(peer.partition(":")[0], sys.executable)

    def fields(self, world: int, saved_world: int = 0) -> dict[str, Any]:
        """Of a `Job`, but for the rank."""
        return {
            "data": str(self.root / "data"), "world": world, "workers": WORKERS, "global_batch": GLOBAL_BATCH,
            "num_samples": NUM_SAMPLES, "epochs": EPOCHS, "seed": SEED, "saved_world": saved_world,
        }  # fmt: skip

    def run(self, peer: str, layouts: Sequence[tuple[int, int]] = LAYOUTS) -> dict[str, Finding]:
        """All layouts of a peer, by `1 -> 1` ...; a peer that cannot start has one row that says why."""
        command = [self.python(peer), str(FOLDER / "consume.py"), peer, json.dumps({**self.fields(1), "rank": 0})]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(0, 1, 0), check=False)
        if done.returncode:
            return {"": Finding("not run", last_line(done.stderr))}
        found: dict[str, Finding] = {}
        for before in sorted({before for before, _ in layouts}):
            straight = self.launch(peer, f"{before}_straight", before)
            killed = self.launch(peer, f"{before}_killed", before, stop=STOP)
            for after in [after for first, after in layouts if first == before]:
                found[f"{before} -> {after}"] = self.go_on(peer, straight, killed, before, after)
        return found

    def go_on(self, peer: str, straight: Launch, killed: Launch, before: int, after: int) -> Finding:
        """Go on from the last state, and compare."""
        if straight.failure or killed.failure:
            return Finding("failed", straight.failure or killed.failure)
        states = self.root / "runs" / peer / f"{before}_killed" / "states"
        folder = states / f"{killed.saved:06d}" if killed.saved else None
        resumed = self.launch(peer, f"{before}_to_{after}", after, resume=folder, finished=killed.saved, saved_world=before)
        about = {
            "saved": killed.saved,
            "state_bytes": sum(path.stat().st_size for path in files_in(folder)),
            "pickle": how_it_is_read(folder),
            "repeatable": steps_until(straight.shares, killed.saved) == steps_until(killed.shares, killed.saved),
            "whole": all(is_whole(straight.shares, epoch, NUM_SAMPLES) for epoch in range(EPOCHS)),
        }
        if resumed.failure:
            outcome = "not offered" if resumed.code == NOT_OFFERED else "refused" if resumed.code else "failed"
            return Finding(outcome, resumed.failure, **about)
        run = joined(killed.shares, killed.saved, resumed.shares)
        interrupted = (STOP - 1) * GLOBAL_BATCH // NUM_SAMPLES
        epochs = [difference(straight.shares, run, epoch) for epoch in (interrupted, interrupted + 1)]
        return Finding("resumed", "", epochs[0], epochs[1], seconds=resumed.seconds, **about)

    def launch(
        self, peer: str, name: str, world: int, *, stop: int = 0, resume: Path | None = None, finished: int = 0, saved_world: int = 0
    ) -> Launch:
        """Start the processes of a run, wait until each has read all or has reached the step `stop`, and kill them."""
        folder, port = self.root / "runs" / peer / name, free_port()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        plan = {
            "states": str(folder / "states"), "save_every": SAVE_EVERY, "stop": stop,
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
            return outcome(folder, processes, began)
        finally:
            for process in processes:
                kill(process)


def outcome(folder: Path, processes: Sequence["subprocess.Popen[bytes]"], began: float) -> Launch:
    """Wait for the processes of a run, and read their logs."""
    logs = [folder / f"rank{rank}.jsonl" for rank in range(len(processes))]
    failure, code = "", 0
    while not all('{"done"' in text for text in map(text_of, logs)):
        ended = [rank for rank, process in enumerate(processes) if process.poll() is not None]
        if ended or time.time() - began > LIMIT_SECONDS:
            failure = last_line(text_of(folder / f"rank{ended[0]}.txt")) if ended else f"no end after {LIMIT_SECONDS:.0f} s"
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
    first = [line for told in lines for line in told if "first_batch" in line]
    whole = max((line["first_batch"] for line in first), default=began) - began
    return Launch(shares, saved, (whole, max((line["loader_seconds"] for line in first), default=0.0)), failure, code)


def kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and its loader workers, which share its process group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """Of a process, as torchrun would set it."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    return {
        **os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", **{name: str(value) for name, value in ranks.items()},
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
    return (lines or ["ended without a message"])[-1][:300]


def steps_until(shares: Sequence[Share], step: int) -> list[Share]:
    """What was read up to a step."""
    return sorted((share for share in shares if share.step <= step), key=lambda share: (share.step, share.rank))


def files_in(folder: Path | None) -> Iterator[Path]:
    """The files of a state."""
    return (path for path in (folder.rglob("*") if folder else ()) if path.is_file())


def how_it_is_read(folder: Path | None) -> str:
    """Whether reading a state unpickles: `no`, `plain values` where `torch.load(weights_only=True)` reads it, or `any object`."""
    import torch

    found = "no"
    for path in files_in(folder):
        if path.read_bytes()[:2] not in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
            continue
        try:
            torch.load(path, weights_only=True)
            found = "plain values" if found == "no" else found
        except Exception:
            found = "any object"
    return found


def write_data(folder: Path) -> None:
    """960 images of noise, as 12 shards and as files; every number of processes and workers here gets whole shards and batches."""
    import io

    import numpy as np
    from PIL import Image

    from vitctl.data.writer.items import Item
    from vitctl.data.writer.write import write_split

    photos = folder / "photos" / "any"
    photos.mkdir(parents=True)
    for number in range(NUM_SAMPLES):
        file = io.BytesIO()
        Image.fromarray(np.random.default_rng(number).integers(0, 256, (32, 32, 3), np.uint8)).save(file, "JPEG")
        (photos / f"{number:06d}.jpg").write_bytes(file.getvalue())
    reads: list[tuple[str, Callable[[], bytes]]] = [(path.stem, path.read_bytes) for path in sorted(photos.iterdir())]
    items = [Item(key, int(key), read) for key, read in reads]
    write_split(items, folder / "shards", [key for key, _ in reads], seed=0, source_text="noise", max_samples=SHARD_SAMPLES)


def versions(python: str, peer: str) -> dict[str, str]:
    """What a peer is made of, as its environment says."""
    code = (
        f"import sys, importlib; sys.path.insert(0, {str(FOLDER)!r})\n"
        "from importlib.metadata import version\n"
        f"import json, peer_{peer} as module; print(json.dumps({{name: version(name) for name in module.PACKAGES}}))"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False, env=environment(0, 1, 0))
    return dict(json.loads(done.stdout.splitlines()[-1])) if not done.returncode else {}


def table(found: dict[str, dict[str, Finding]]) -> str:
    """Markdown."""
    rows = ["| loader | 1 -> 1 | 2 -> 2 | 2 -> 1 | 2 -> 3 | state of 2, bytes | unpickles | seconds to resume, of the loader |"]
    rows.append("|---" * 8 + "|")
    for peer, findings in found.items():
        if "" in findings:
            rows.append(f"| {peer} | not run: {findings[''].message} " + "| " * 6 + "|")
            continue
        cells = [findings[name].text if name in findings else "" for name in ("1 -> 1", "2 -> 2", "2 -> 1", "2 -> 3")]
        state, timed = findings.get("2 -> 2", Finding("")), findings.get("1 -> 1", Finding(""))
        seconds = f"{timed.seconds[0]:.1f}, {timed.seconds[1]:.1f}"
        rows.append(f"| {peer} | {' | '.join(cells)} | {state.state_bytes} | {state.pickle} | {seconds} |")
    return "\n".join(rows)


def main() -> None:
    """Run the peers, print a table, and write the findings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", default=list(PEERS), metavar="PEER", help=", ".join(PEERS))
    parser.add_argument("--python", action="append", default=[], metavar="PEER=PATH", help="interpreter of a peer")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON of all findings")
    parser.add_argument("--keep", type=Path, help="folder for data, logs and states; else they are removed")
    given = parser.parse_args()
    pythons = dict(one.partition("=")[::2] for one in given.python)
    with tempfile.TemporaryDirectory() as scratch:
        suite = Suite(given.keep or Path(scratch), pythons)
        if not (suite.root / "data").exists():
            write_data(suite.root / "data")
        used, found = {}, {}
        for peer in given.peers:
            print(f"{peer} ...", file=sys.stderr, flush=True)
            used.update(versions(suite.python(peer), peer.partition(":")[0]))
            found[peer] = suite.run(peer)
    machine = f"{platform.platform()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}"
    print(machine, ", ".join(f"{name} {number}" for name, number in used.items()), "", table(found), sep="\n")
    plain = {peer: {name: asdict(one) for name, one in findings.items()} for peer, findings in found.items()}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps({"machine": machine, "versions": used, "found": plain}, indent=1) + "\n")


if __name__ == "__main__":
    main()
