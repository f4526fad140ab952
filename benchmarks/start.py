"""How long until something happens, beside accelerate and timm: `python benchmarks/start.py`.

From the command that a user types to the first finished step of training, new and resumed; and `--help` and
`--dry-run`. Ours is `vitctl pretrain --recipe smoke`, which also draws its data set of 11,000 letters. The
peer is accelerate's complete_nlp_example (peers/nlp_example.py) with a BERT of the same layers, width, tokens
and batch, on random numbers instead of files, by `accelerate launch` as its documentation says, and by
`python` alone. `log.every_steps=1` shows the first step. Every command runs once before it is measured, so
that all find their files in memory.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from measure import Machine, Numbers, Row, Side, clock, report, script_options, take_turns

PEER = Path(__file__).resolve().parent / "peers" / "nlp_example.py"
LIBRARIES = ("vitctl", "torch", "accelerate", "transformers", "timm")
OURS = (sys.executable, "-m", "vitctl")
LAUNCH = (
    "-m",
    "accelerate.commands.accelerate_cli",
    "launch",
    "--cpu",
    "--num_processes",
    "1",
    "--num_machines",
    "1",
)
ACCELERATE = (sys.executable, *LAUNCH, "--mixed_precision", "no", "--dynamo_backend", "no", str(PEER))
PYTHON = (sys.executable, str(PEER))
SMOKE = ("pretrain", "--recipe", "smoke", "--set", "log.every_steps=1")
SECONDS = 300.0  # until a command that shows no step is given up


def main() -> None:
    """Measure, print, and write results/start.json."""
    parser = script_options(__doc__, rounds=3)
    given = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else a clone is compiled at each start
    machine = Machine()
    with tempfile.TemporaryDirectory() as folder:
        sides = commands(Path(folder))
        for measure in sides.values():
            measure()
        found = take_turns(sides, given.rounds)
    report("start", rows(found), machine, {"python_seconds": python_seconds()}, LIBRARIES, given.results)


def commands(folder: Path) -> dict[str, Callable[[], Numbers]]:
    """What is measured, by name. The folder gets the runs that are resumed."""
    run, state = folder / "resumed", folder / "state"
    first_step_of_ours((*OURS, *SMOKE, "--out", str(run)), run)
    first_step_of_peer((*PYTHON, "--output_dir", str(state)))
    os.environ["HF_HOME"] = str(folder / "cache")  # where a configuration that the user has left would lie
    numbers = iter(range(1_000_000))

    def new() -> Numbers:
        out = folder / str(next(numbers))
        return first_step_of_ours((*OURS, *SMOKE, "--out", str(out)), out)

    def at_hand() -> Numbers:
        out, data = folder / str(next(numbers)), run / "data" / "glyphs"
        return first_step_of_ours((*OURS, *SMOKE, "--data", str(data), "--out", str(out)), out)

    resumed = ("--output_dir", str(state), "--resume_from_checkpoint", str(state))
    return {
        "new": new,
        "new, shards at hand": at_hand,
        "new, accelerate": partial(first_step_of_peer, (*ACCELERATE, "--output_dir", str(state))),
        "new, python": partial(first_step_of_peer, (*PYTHON, "--output_dir", str(state))),
        "resume": partial(first_step_of_ours, (*OURS, "resume", str(run)), run),
        "resume, accelerate": partial(first_step_of_peer, (*ACCELERATE, *resumed)),
        "resume, python": partial(first_step_of_peer, (*PYTHON, *resumed)),
        "--help": partial(until_done, (*OURS, "--help")),
        "--help, accelerate": partial(until_done, (sys.executable, *LAUNCH[:2], "--help")),
        "--dry-run": partial(until_done, (*OURS, "pretrain", "--recipe", "smoke", "--dry-run")),
        "import timm": partial(until_done, (sys.executable, "-c", "import timm")),
    }


def rows(found: dict[str, list[Numbers]]) -> list[Row]:
    """The figures of the issue, and what tells where they come from."""

    def row(figure: str, own: str, other: str, settings: str, peer: str, goal: float | None = None) -> Row:
        return Row(figure, "wall", "less", Side(settings, found[own]), Side(peer, found[other]), goal)

    launched, alone = "`accelerate launch --cpu nlp_example.py`", "`python nlp_example.py`, no launcher"
    smoke, shards = "`vitctl pretrain --recipe smoke`, draws its data", "the same with --data, shards at hand"
    return [
        row("command to first step", "new", "new, accelerate", smoke, launched, 1 / 0.7),
        row("command to first step", "new, shards at hand", "new, accelerate", shards, launched),
        row("command to first step", "new, shards at hand", "new, python", shards, alone),
        row("resume to first step", "resume", "resume, accelerate", "`vitctl resume RUN`", launched, 1 / 0.7),
        row("resume to first step", "resume", "resume, python", "`vitctl resume RUN`", alone),
        row("help", "--help", "--help, accelerate", "`vitctl --help`", "`accelerate --help`", 1 / 0.1),
        row(
            "plan",
            "--dry-run",
            "import timm",
            "`vitctl pretrain --recipe smoke --dry-run`",
            "`import timm`",
            1.0,
        ),
    ]


def first_step_of_ours(command: Sequence[str], run: Path) -> Numbers:
    """Start or resume a run; stop it by SIGTERM, which saves, when its log has a new step."""
    log, numbers = run / "log.jsonl", Numbers()
    before = log.stat().st_size if log.exists() else 0
    with clock(numbers):
        began = time.time()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while (done := first_step(log, before)) is None:
            if process.poll() is not None or time.time() > began + SECONDS:
                process.kill()
                sys.exit(f"{' '.join(command)}: ended with {process.wait()} without a step")
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        process.wait()
    return {"wall": done - began, "cpu, until stopped": numbers["cpu"]}


def first_step(log: Path, begin: int) -> float | None:
    """When the first step after a place in a log was done."""
    if not log.exists():
        return None
    with log.open("rb") as file:
        file.seek(begin)
        lines = [line for line in file if line.endswith(b"\n")]
    return next((record["time"] for record in map(json.loads, lines) if record["kind"] == "train"), None)


def first_step_of_peer(command: Sequence[str]) -> Numbers:
    """Run the peer, which prints when each step was done."""
    numbers = Numbers()
    with clock(numbers):
        began = time.time()
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("step "))
    return {"wall": float(line.split()[-1]) - began, "cpu, until stopped": numbers["cpu"]}


def until_done(command: Sequence[str]) -> Numbers:
    """Run a command to its end."""
    numbers = Numbers()
    with clock(numbers):
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return numbers


def python_seconds() -> float:
    """An empty program: no command can be quicker."""
    return min(until_done((sys.executable, "-c", "pass"))["wall"] for _ in range(5))


if __name__ == "__main__":
    main()
