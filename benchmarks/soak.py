"""Kill one run again and again, at random moments and in every way, and hold what is left at the end against
a straight run.

    python benchmarks/soak.py --kills 100 --out /tmp/soak

Every attempt of a run resumes with one process, or with two and DDP. No gradient is clipped and the one
process works in two micro-batches, so that both add the same two numbers, and weights, averages and
optimizer state must come out bit for bit as in the run that was never stopped. Other runs are of two
processes with FSDP2 (gloo) throughout: on a CPU torch's fused optimizer rounds the last numbers of a tensor
otherwise, and a part of a tensor has other last numbers.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "tests" / "recipes" / "tiny.toml"
MODES = {
    "one process": (1, "none"),
    "two processes, DDP": (2, "none"),
    "two processes, FSDP2": (2, "fsdp"),
}
# The modes between which the attempts of one run change.
TOGETHER = (("one process", "two processes, DDP"), ("two processes, FSDP2",))
SIGNALS = {"SIGTERM": signal.SIGTERM, "SIGUSR1": signal.SIGUSR1, "SIGINT": signal.SIGINT}
KILLS = ("SIGTERM", "SIGUSR1", "SIGINT", "SIGTERM twice", "launcher", "rank", "loader worker", "all")
SHARED_MEMORY = Path("/dev/shm")
LIMIT_SECONDS = 300.0
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}  # the last bit of a sum depends on the number of threads


@dataclass
class Tally:
    """What was done to the run and what was found after each attempt."""

    kills: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    steps: list[int] = field(default_factory=list)
    attempts: int = 0
    rounds: int = 0


def command(folder: Path, data: Path, steps: int, mode: str) -> list[str]:
    """The same run, whatever it is computed with."""
    processes, sharding = MODES[mode]
    values = {
        "schedule.total_steps": steps,
        "optimizer.clip_norm": 0.0,
        "checkpoint.every_steps": 7,
        "evaluation.every_steps": 40,
        "machine.micro_batch": 8,
        "machine.workers": 2,
        "machine.processes": processes,
        "machine.sharding": sharding,
    }
    sets = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    run = ("pretrain", "--recipe", str(RECIPE), "--data", str(data), "--out", str(folder))
    return [sys.executable, "-m", "vitctl", *run, *sets]


def soak(out: Path, *, kills: int, steps: int, seed: int) -> Tally:
    """Kill runs of `steps` steps until there were `kills` kills, and finish the last one.

    Raises:
        AssertionError: a run is not the straight one bit for bit, or something was left behind.
    """
    draws, tally, data = random.Random(seed), Tally(), out / "data"
    write_data(data)
    for modes in TOGETHER:
        straight = command(out / f"straight_{MODES[modes[0]][1]}", data, steps, modes[0])
        subprocess.run(straight, check=True, capture_output=True, env=ONE_THREAD)
    shared = set(os.listdir(SHARED_MEMORY))
    while sum(tally.kills.values()) < kills or tally.rounds < len(TOGETHER):
        modes = TOGETHER[tally.rounds % len(TOGETHER)]
        folder = out / f"soaked_{tally.rounds}"
        most = -(-kills * (tally.rounds + 1) // len(TOGETHER))
        while not finished(folder):
            enough = sum(tally.kills.values()) >= min(most, kills)
            attempt(folder, data, steps, draws.choice(modes), None if enough else draws, tally)
            left = left_in_shared_memory(shared)
            assert not left, f"left in {SHARED_MEMORY}: {left}"
        assert_equal(folder, out / f"straight_{MODES[modes[0]][1]}", steps)
        tally.rounds += 1
    return tally


def left_in_shared_memory(before: set[str]) -> set[str]:
    """What is there, was not before, and stays: that of other programs on this machine comes and goes."""
    until = time.monotonic() + 10
    while True:
        left = {
            name
            for name in set(os.listdir(SHARED_MEMORY)) - before
            if name.startswith(("torch_", "sem.", "psm_"))
        }
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.1)


def write_data(root: Path) -> None:
    """70 training and 23 test images."""
    from vitctl.data.datasets.readers import shapes
    from vitctl.data.writer.shard_writer import write_split

    for split, size in (("train", 70), ("test", 23)):
        if not (root / split).exists():
            items = shapes.items("shape", split, size, seed=0, image_size=16)
            write_split(items, root / split, shapes.SHAPES, seed=0, source_text="soak", max_samples=18)


def zombies() -> set[int]:
    """Children of this process that ended and were not waited for; who calls may have some of its own."""
    return {p.pid for p in psutil.Process().children() if p.status() == psutil.STATUS_ZOMBIE}


def attempt(
    folder: Path, data: Path, steps: int, mode: str, draws: random.Random | None, tally: Tally
) -> None:
    """Start the run or go on with it, and harm it at a random moment; without `draws` let it finish."""
    before, earlier = last_step(folder), zombies()
    process = subprocess.Popen(
        command(folder, data, steps, mode),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=ONE_THREAD,
    )
    family: list[psutil.Process] = []
    kind = ""
    if draws is not None and wait_for_moment(process, folder, before, draws):
        family = psutil.Process(process.pid).children(recursive=True)
        kind = harm(process, family, draws.choice(KILLS))
    said = process.communicate(timeout=LIMIT_SECONDS)[1]
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive, f"after {kind} ({mode}) there are still {alive}"
    assert zombies() <= earlier
    tally.attempts += 1
    tally.modes[mode] += 1
    tally.codes[f"{kind or 'nothing'}: {process.returncode}"] += 1
    if kind:
        tally.kills[kind] += 1
        tally.steps.append(last_step(folder))
    allowed = {0, 3} if kind.startswith("SIG") else {0, 1, 2, 3, -signal.SIGKILL}  # 3: a lost process
    # Before Python's main function has begun nobody can catch a signal.
    early = kind.startswith("SIG") and process.returncode in [-number for number in SIGNALS.values()]
    assert early or process.returncode in allowed, f"{kind} ({mode}): code {process.returncode}: {said}"
    if not kind:
        assert process.returncode == 0, said


def wait_for_moment(
    process: "subprocess.Popen[str]", folder: Path, before: int, draws: random.Random
) -> bool:
    """Wait for a moment of the start, or some steps on from here and a little more; False when the run ended
    before.
    """
    until = time.monotonic() + draws.uniform(0.0, 8.0)
    if draws.random() < 0.7:
        step = before + draws.randrange(1, 25)
        while process.poll() is None and last_step(folder) < step:
            time.sleep(0.02)
        until = time.monotonic() + draws.uniform(0.0, 0.3)
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.005)
    return process.poll() is None


def harm(process: "subprocess.Popen[str]", family: list[psutil.Process], kind: str) -> str:
    """Do it; what cannot be done at this moment becomes a SIGKILL of the launcher."""
    agents = [p.pid for p in family if "accelerate.commands.launch" in _cmdline(p)]
    ranks = [p for p in family if p.ppid() in agents]
    workers = [p for p in family if p.pid not in agents and p not in ranks]
    if kind in SIGNALS:
        process.send_signal(SIGNALS[kind])
    elif kind == "SIGTERM twice":
        process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
    elif kind == "rank" and ranks:
        ranks[-1].kill()
    elif kind == "loader worker" and workers:
        workers[-1].kill()
    elif kind == "all":
        for one in (*family, psutil.Process(process.pid)):
            one.kill()
    else:
        process.kill()
        return "launcher"
    return kind


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def last_step(folder: Path) -> int:
    """The last step that the log tells of."""
    log = folder / "log.jsonl"
    if not log.exists():
        return 0
    tail = log.read_bytes()[-4096:].split(b"\n")[1:-1]
    return max((json.loads(line).get("step", 0) for line in tail), default=0)


def finished(folder: Path) -> bool:
    """Whether the run says that it is done."""
    file = folder / "result.json"
    return file.exists() and json.loads(file.read_text())["status"] == "done"


def assert_equal(folder: Path, straight: Path, steps: int) -> None:
    """Tensors, losses and images bit for bit."""
    last = Path("checkpoints") / f"step_{steps:08d}"
    names = sorted(path.name for path in (straight / last).glob("*.safetensors"))
    assert names == sorted(path.name for path in (folder / last).glob("*.safetensors"))
    for path in (last / name for name in names):
        assert (folder / path).read_bytes() == (straight / path).read_bytes(), f"{folder / path} is another"
    assert losses(folder) == losses(straight)
    assert len(losses(folder)) == steps
    assert step_images(folder) == step_images(straight)


def losses(folder: Path) -> dict[int, float]:
    """Step to loss; a step that is there twice is an error."""
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    train = [record for record in records if record["kind"] == "train"]
    assert len({record["step"] for record in train}) == len(train)
    return {record["step"]: record["loss"] for record in train}


def step_images(folder: Path) -> dict[int, dict[str, str]]:
    """Step to the digests of its images, as the trace has them."""
    lines = map(json.loads, (folder / "steps.jsonl").read_text().splitlines())
    return {line["step"]: line["batch"] for line in lines if "batch" in line}


def main() -> None:
    """Soak and print what happened."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    began = time.monotonic()
    tally = soak(given.out, kills=given.kills, steps=given.steps, seed=given.seed)
    print(f"{sum(tally.kills.values())} kills in {tally.attempts} attempts, {tally.rounds} run(s) of "
          f"{given.steps} steps, "
          f"{time.monotonic() - began:.0f} s; bit for bit the straight run")  # fmt: skip
    print(f"kills at steps {min(tally.steps)} to {max(tally.steps)}")
    for title, counts in (("kills", tally.kills), ("modes", tally.modes), ("kill: exit code", tally.codes)):
        print(f"{title}: " + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
