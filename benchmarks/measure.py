"""What the scripts that compare sides share: rounds in which they take turns, ratios, the machine and its
limits, JSON.

A script measures each side once in every round (`take_turns`), in this process or in one of its own
(`FreshProcess`), and hands its rows to `report`, which prints a table and writes
benchmarks/results/NAME.json. A ratio above 1 means that ours is the better one. It is taken within each
round, where both sides met the same machine; printed are the median, the lowest and the highest.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, TypeVar

RESULTS = Path(__file__).resolve().parent / "results"
ANSWER = "--answer"  # the option of a script in a fresh process, see `in_fresh_process`
MIB = 2**20
# Of the environment: torch, oneDNN and MKL compute as on a processor that has no AVX-512.
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}

K = TypeVar("K")
DEFAULT = "as it comes"
UNITS = {
    "cpu": " CPU s",
    "wall": " s",
    "stall": " s",
    "whole": " s",
    "seconds to accuracy": " s",
    "peak_mib": " MiB",
    "per CPU second": " images",
}
TRIES = 3  # turns of every setting, by which the best is chosen

Numbers = dict[str, float]
Choices = dict[str, dict[str, Any]]  # settings of a side, by name


@dataclass
class Side:
    """What was measured of one side: its settings, and the numbers of each round."""

    settings: str
    rounds: list[Numbers] = field(default_factory=list)


@dataclass
class Row:
    """One figure: two sides, the number that is compared, and the goal.

    Args:
        figure: what is measured, with its shapes.
        number: the key of the numbers that are compared.
        better: whether the smaller or the larger number is the better one.
        ours, theirs: the sides, with as many rounds each.
        goal: the least ratio, ours the better one above 1; None: there is no goal.
        notes: what else a reader must know.
    """

    figure: str
    number: str
    better: Literal["less", "more"]
    ours: Side
    theirs: Side
    goal: float | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def ratios(self) -> list[float]:
        """How many times as good ours is, in each round."""
        pairs = [
            (own[self.number], other[self.number])
            for own, other in zip(self.ours.rounds, self.theirs.rounds, strict=True)
        ]
        return [other / own if self.better == "less" else own / other for own, other in pairs]

    @property
    def ratio(self) -> float:
        """Their median."""
        return statistics.median(self.ratios)

    def record(self) -> dict[str, Any]:
        """As it is written: the sides with medians of all their numbers, the ratio, and whether the goal is
        reached.
        """
        return {
            **asdict(self),
            "ours": {**asdict(self.ours), "median": medians(self.ours.rounds)},
            "theirs": {**asdict(self.theirs), "median": medians(self.theirs.rounds)},
            "ratio": {"median": self.ratio, "low": min(self.ratios), "high": max(self.ratios)},
            "reached": None if self.goal is None else self.ratio >= self.goal,
        }


def take_turns(sides: Mapping[K, Callable[[], Numbers]], rounds: int) -> dict[K, list[Numbers]]:
    """The numbers of every side in every round; each round begins with another side."""
    names = list(sides)
    found: dict[K, list[Numbers]] = {name: [] for name in sides}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(sides[name]())
    return found


class FreshProcess:
    """A side in a process of its own, `python SCRIPT --answer QUESTION`; called, it takes its turn and waits
    for the next.

    The script answers with `answer_turns`. Whatever it prints beside goes to the standard error output.

    Args:
        script: path of the script.
        question: what it is to measure.
        python: the interpreter.

    Raises:
        SideError: the process ended.
    """

    def __init__(self, script: str, question: Mapping[str, Any], python: str = sys.executable) -> None:
        command = [python, script, ANSWER, json.dumps(question)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._name = f"{Path(script).name} {question}"
        self.prepared = self._read()

    def __call__(self) -> Numbers:
        """Take a turn, and return its numbers."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the next line says so
        return self._read()

    def _read(self) -> Numbers:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise SideError(self._name, self._process.returncode)
        numbers: Numbers = json.loads(line)
        return numbers

    def close(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class SideError(Exception):
    """A side ended before it was measured, with this exit code."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name} ended with code {code}")
        self.code = code


def in_fresh_process(script: str, question: Mapping[str, Any], python: str = sys.executable) -> Numbers:
    """Return the numbers of a single turn in a process that then ends."""
    process = FreshProcess(script, question, python)
    try:
        return process()
    finally:
        process.close()


def script_options(doc: str | None, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with the options of all scripts."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the .json file")
    return parser


def question() -> dict[str, Any] | None:
    """In a script: what it was asked to measure as a fresh process; None where a user started it."""
    asked: dict[str, Any] | None = json.loads(sys.argv[2]) if sys.argv[1:2] == [ANSWER] else None
    return asked


def answer_turns(prepare: Callable[[], Callable[[], Numbers]]) -> None:
    """In a fresh process: prepare, say so, and take a turn for each line that is read.

    Args:
        prepare: imports, builds and warms up, and returns what measures one turn.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print must not be read as numbers
    begun: Numbers = {}
    with clock(begun):
        turn = prepare()
    print(json.dumps(begun), file=answers, flush=True)
    for _ in sys.stdin:
        print(json.dumps(turn()), file=answers, flush=True)


@contextmanager
def clock(numbers: Numbers) -> Iterator[None]:
    """Put into `numbers` the seconds that the block took by the wall clock, and those of processors, children
    included.
    """
    began, busy = time.perf_counter(), own_cpu_seconds()
    yield
    numbers["wall"], numbers["cpu"] = time.perf_counter() - began, own_cpu_seconds() - busy


def own_cpu_seconds() -> float:
    """Of this process, its threads, and its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def least(rounds: Sequence[Numbers]) -> Numbers:
    """The least of each number over the rounds: what other work on the machine disturbs least."""
    return {name: min(numbers[name] for numbers in rounds) for name in rounds[0]}


def medians(rounds: Sequence[Numbers]) -> Numbers:
    """The median of each number over the rounds."""
    return {name: statistics.median(numbers[name] for numbers in rounds) for name in rounds[0]}


class Machine:
    """The machine of a run, and how busy it was with other work from here until `record` is called."""

    def __init__(self) -> None:
        self._load, self._began = os.getloadavg()[0], time.perf_counter()
        self._all, self._own = all_cpu_seconds(), own_cpu_seconds()

    def record(self, libraries: Sequence[str]) -> dict[str, Any]:
        """Processor, memory, device, versions, load, and the number of cores that other processes kept busy
        meanwhile.
        """
        others = all_cpu_seconds() - self._all - (own_cpu_seconds() - self._own)
        return {
            "platform": platform.platform(),
            "processor": processor(),
            "cores": os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "device": device_name(),
            "python": platform.python_version(),
            "versions": {name: installed(name) for name in libraries},
            "threads": os.environ.get("OMP_NUM_THREADS", "not set"),
            "load": [round(self._load, 2), round(os.getloadavg()[0], 2)],
            "cores_busy_with_other_work": round(max(0.0, others / (time.perf_counter() - self._began)), 2),
        }


def peak_mib(*, reset: bool = False) -> float:
    """The most memory that this process has held since the last `reset`, in MiB; a reset begins with what it
    holds now.
    """
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def all_cpu_seconds() -> float:
    """Seconds that the processors of the machine have computed since it started.

    0 where Linux does not tell.
    """
    try:
        fields = Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
    except OSError:
        return 0.0
    user, nice, system, _idle, _waiting, interrupts, soft, _stolen = map(int, fields)
    return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")


def processor() -> str:
    """As Linux names it, with the instructions that matter for matrix products."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    found = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    fields = {name.strip(): value.strip() for name, value in found.items()}
    has = [f"family {fields.get('cpu family', '?')}, model {fields.get('model', '?')}"]
    has += [
        flag
        for flag in ("amx_bf16", "avx512_bf16", "avx512f", "avx2")
        if flag in fields.get("flags", "").split()
    ]
    if only_avx2():
        has = ["avx2 alone, of " + ", ".join(has)]
    return f"{fields.get('model name', platform.machine())} ({', '.join(has)})"


def only_avx2() -> bool:
    """Whether torch and what it multiplies with were told to compute as on a processor with AVX2 alone."""
    return {name: os.environ.get(name) for name in AVX2} == AVX2


if only_avx2():  # torch's cache does not know for which instructions code was compiled
    os.environ.setdefault("TORCH_COMPILE_CACHE_KEY_TAG", "avx2")


def device_name() -> str:
    """The CUDA device, or that there is none."""
    torch = sys.modules.get("torch")
    return (
        torch.cuda.get_device_name() if torch is not None and torch.cuda.is_available() else "no CUDA device"
    )


def installed(name: str) -> str:
    """The version of a package."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def rate(
    work: Callable[[], Any], amount: float, *, seconds: float = 0.5, wait: Callable[[], None] | None = None
) -> float:
    """How much of `amount` per second `work` does by the wall clock: the best of several runs that take
    `seconds` together.
    """
    fastest, until = float("inf"), time.perf_counter() + seconds
    work()
    while True:
        if wait:
            wait()
        began = time.perf_counter()
        work()
        if wait:
            wait()
        fastest = min(fastest, time.perf_counter() - began)
        if time.perf_counter() > until:
            return amount / fastest


def matrix_rates(device: str = "cpu", shape: tuple[int, int, int] | None = None) -> Numbers:
    """TFLOP/s of matrix products on random numbers, in bf16 and float32 by torch, and in float32 by oneDNN
    where that is there.

    Args:
        device: "cpu" or "cuda".
        shape: rows, inputs, outputs; None: those of an MLP of ViT-B for 8 images, or 8192 each on a GPU.
    """
    import torch

    rows, inputs, outputs = shape or ((8192, 8192, 8192) if device == "cuda" else (1576, 768, 3072))
    flops = 2e-12 * rows * inputs * outputs
    wait = torch.cuda.synchronize if device == "cuda" else None
    found: Numbers = {}
    with torch.inference_mode():
        sizes = ((rows, inputs), (outputs, inputs), (outputs,))
        wide = [torch.randn(size, device=device) for size in sizes]
        narrow = [tensor.bfloat16() for tensor in wide]
        linear, onednn = torch.nn.functional.linear, torch.ops.mkldnn._linear_pointwise
        found["bf16_tflops"] = rate(partial(linear, *narrow), flops, wait=wait)
        found["float32_tflops"] = rate(partial(linear, *wide), flops, wait=wait)
        if device == "cpu" and torch.backends.mkldnn.is_available():
            found["float32_onednn_tflops"] = rate(partial(onednn, *wide, "none", [], ""), flops)
    return found


def decode_rate(photographs: Sequence[bytes], seconds: float = 2.0) -> Numbers:
    """JPEG files decoded whole to RGB by libjpeg-turbo on one core, the pixels thrown away: images/s and
    megapixels/s.
    """
    import simplejpeg

    pixels = 0

    def decode() -> None:
        nonlocal pixels
        pixels = sum(simplejpeg.decode_jpeg(photograph).size // 3 for photograph in photographs)

    images = rate(decode, len(photographs), seconds=seconds)
    return {
        "jpeg_images_per_second": images,
        "jpeg_megapixels_per_second": images * pixels / len(photographs) / 1e6,
    }


def disk_rates(folder: Path, size: int = 256 * MIB) -> Numbers:
    """MB/s of one file of random bytes in `folder`: written until it is on disk, and read back without the
    page cache.
    """
    path, block = folder / f"measure-{os.getpid()}", os.urandom(MIB)
    try:
        with path.open("wb", buffering=0) as file:
            began = time.perf_counter()
            for _ in range(size // MIB):
                file.write(block)
            os.fsync(file.fileno())
            written = time.perf_counter() - began
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with path.open("rb", buffering=0) as file:
            began = time.perf_counter()
            while file.read(MIB):
                pass
            read = time.perf_counter() - began
    finally:
        path.unlink(missing_ok=True)
    return {"write_mb_per_second": size / 1e6 / written, "read_mb_per_second": size / 1e6 / read}


@dataclass
class Compared:
    """Sides with the settings that they come with and with their best ones, measured in the same rounds.

    `tried` are the numbers of every setting, the least in its first turns, or why there are none.
    """

    rounds: dict[tuple[str, str], list[Numbers]]
    best: dict[str, str]
    tried: dict[str, dict[str, Numbers | str]]

    def row(
        self,
        figure: str,
        number: str,
        goal: float | None,
        *,
        sides: tuple[str, str] = ("ours", "timm"),
        best: bool = True,
    ) -> Row:
        """Two of the sides, the first as ours: the best settings of both, or those that they come with."""
        names = [self.best[side] if best else DEFAULT for side in sides]
        ours, theirs = (
            Side(f"{side}, {name}", self.rounds[side, name]) for side, name in zip(sides, names, strict=True)
        )
        notes = {"tried": {side: self.tried[side] for side in sides}} if best else {}
        return Row(figure, number, "less", ours, theirs, goal, notes)

    def narrowed(self, side: str, choices: Choices) -> Choices:
        """What is left to try of the next work: the best settings of this one, and those that the side comes
        with.
        """
        return {name: settings for name, settings in choices.items() if name in (DEFAULT, self.best[side])}


def compare(
    script: str, asked: Mapping[str, Any], choices: Mapping[str, Choices], number: str, rounds: int
) -> Compared:
    """Try settings of both sides for some turns, and let the best and the default ones of each take turns.

    Args:
        script: of the fresh processes.
        asked: the same for all; "side" and "settings" are added.
        choices: settings of each side, by name; one is called `DEFAULT`.
        number: "cpu" or "wall", by which the best is chosen.
        rounds: turns of each.

    Raises:
        SideError: a side does not run with the settings that it comes with.
    """
    running: dict[tuple[str, str], FreshProcess] = {}
    tried: dict[str, dict[str, Numbers | str]] = {}
    best: dict[str, str] = {}
    try:
        for side, named in choices.items():
            tried[side] = {}
            for name, settings in named.items():
                try:
                    process = running[side, name] = FreshProcess(
                        script, {**asked, "side": side, "settings": settings}
                    )
                    tried[side][name] = least([process() for _ in range(TRIES)]) | {
                        "seconds_to_prepare": process.prepared["wall"]
                    }
                except SideError as error:
                    if name == DEFAULT:
                        raise
                    running.pop((side, name), None)
                    tried[side][name] = str(error)
                best[side] = fastest(tried[side], number)
                for other in named.keys() - {DEFAULT, best[side]}:
                    if (side, other) in running:
                        running.pop((side, other)).close()
        return Compared(take_turns(running, rounds), best, tried)
    finally:
        for process in running.values():
            process.close()


def uncompiled(choices: Mapping[str, Choices]) -> dict[str, Choices]:
    """The settings that use no compiler."""
    return {
        side: {name: settings for name, settings in own.items() if "compile" not in name}
        for side, own in choices.items()
    }


def fastest(tried: Mapping[str, Numbers | str], number: str) -> str:
    """The settings with the least of a number, of those that ran."""
    ran = {name: numbers[number] for name, numbers in tried.items() if not isinstance(numbers, str)}
    return min(ran, key=lambda name: ran[name])


def report(
    name: str,
    rows: Sequence[Row],
    machine: Machine,
    limits: Numbers,
    libraries: Sequence[str],
    results: Path = RESULTS,
) -> Path:
    """Print a table of the rows, and write them to RESULTS/NAME.json with machine, limits and command;
    returns the file.
    """
    found = {
        "command": " ".join(
            [
                *(f"{name}={value}" for name, value in AVX2.items() if only_avx2()),
                *("python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]),
            ]
        ),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine.record(libraries),
        "limits": {key: round(value, 4) for key, value in limits.items()},
        "rows": [row.record() for row in rows],
    }
    print("\n".join([*table_rows([found]), "", machine_text(name, found)]))
    results.mkdir(parents=True, exist_ok=True)
    path = results / f"{name}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"\n{path}")
    return path


def table_rows(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the rows of a table in Markdown, with a new head for each processor."""
    lines, processor = list[str](), ""
    for found in results:
        if found["machine"]["processor"] != processor:
            processor = found["machine"]["processor"]
            head = f"| figure, on {processor} | ours | theirs | times as good | goal |"
            lines += [*([""] if lines else []), head, "|---|---|---|---|---|"]
        lines += map(row_text, found["rows"])
    return lines


def row_text(one: Mapping[str, Any]) -> str:
    """Return a line of the table: medians of both sides with their settings, and the ratio in the rounds."""
    number, ratio, goal, digits = one["number"], one["ratio"], "-", 2
    sides = [
        f"{one[side]['median'][number]:.4g}{UNITS.get(number, '')}: {one[side]['settings']}"
        for side in ("ours", "theirs")
    ]
    if one["goal"] is not None:
        digits += f"{ratio['median']:.2f}" == f"{one['goal']:.2f}" and not one["reached"]
        goal = f"{one['goal']:.{digits}f} {'reached' if one['reached'] else '**missed**'}"
    spread = f"**{ratio['median']:.{digits}f}** ({ratio['low']:.2f} to {ratio['high']:.2f})"
    return f"| {one['figure']}, {number} | {' | '.join(sides)} | {spread} | {goal} |"


def machine_text(name: str, found: Mapping[str, Any]) -> str:
    """Return where and with what the rows of a script were measured."""
    own, limits = found["machine"], ", ".join(f"{key} {value:.4g}" for key, value in found["limits"].items())
    versions = ", ".join(f"{key} {value}" for key, value in own["versions"].items())
    load = " to ".join(f"{value:.1f}" for value in own["load"])
    return (
        f"- `{found['command']}`, {found['date']}, {len(found['rows'][0]['ours']['rounds'])} rounds: "
        f"{own['processor']}, {own['cores']} cores, {own['device']}, load {load}, "
        f"{own['cores_busy_with_other_work']} cores busy with other work, OMP_NUM_THREADS {own['threads']}; "
        f"{versions}. Limits in the same run: {limits}. All numbers: "
        f"[{name}.json]({name}.json)"
    )
