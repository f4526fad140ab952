"""What nobody could measure without a GPU: `python benchmarks/gpu.py`; `--device cpu` rehearses it.

Training steps of S/16, B/16 and L/16, ours eager, compiled and tuned, with deterministic algorithms and
without, beside timm's eager and compiled; the kernels that machine.attention chooses from; whether the
backward pass of attention repeats its bits; those of a run with lanes; the rate of the loader. Each setting
is a process of its own, prepared within a limit, and all take turns. Every number is a line of
OUT/numbers.jsonl as soon as it is there; OUT/report.md has the table, and the defaults that these numbers
speak against. A part that takes too long is ended with its children.
"""

import argparse
import hashlib
import json
import os
import selectors
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from measure import ANSWER, Machine, Numbers
from step import NO_DEVICE, Work

BATCHES = {"Ti/16": 512, "S/16": 512, "B/16": 256, "L/16": 64, "H/14": 32}
# Seconds until a side is ready: compiling takes most of it; of one turn; of each other part.
EAGER, COMPILED, TURN = 60, 200, 40
KERNELS, BITS, LANES, LOADER = 40, 20, 50, 60
WORTH = 1.05  # a default is questioned if another setting is faster by this
HERE = Path(__file__).parent
PARTS = ("steps", "kernels", "bits", "lanes", "loader")
OURS_DEFAULT = "ours, as it comes"
# A setting that the installed vitctl does not have is left out, and said.
SIDES: dict[str, tuple[str, dict[str, Any]]] = {
    OURS_DEFAULT: ("ours", {}),
    "ours, eager": ("ours", {"machine.compile": False}),
    "ours, eager, not deterministic": ("ours", {"machine.compile": False, "machine.deterministic": False}),
    "ours, compiled": ("ours", {"machine.compile": True}),
    "ours, compiled, not deterministic": ("ours", {"machine.compile": True, "machine.deterministic": False}),
    "ours, tuned": ("ours", {"machine.compile": "max-autotune"}),
    "timm, eager": ("timm", {"fused": True}),
    "timm, compiled": ("timm", {"fused": True, "compile": True}),
}
Say = Callable[..., None]


def main() -> None:
    """Measure, print and write the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpu_run"), help="a new folder")
    parser.add_argument("--models", nargs="*", default=["S/16", "B/16", "L/16"], choices=list(BATCHES))
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=list(SIDES))
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="of a turn")
    parser.add_argument("--batch", type=int, default=0, help="0: by the model")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--data", default="", help="shards of photographs, for the rate of the loader")
    parser.add_argument("--bits", action="store_true", help="print the part on attention's bits, and no more")
    given = parser.parse_args()
    import torch

    on_gpu = given.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured", file=sys.stderr)
        sys.exit(NO_DEVICE)
    if given.bits:
        for tokens in (197, 577):
            for kernel in ("fused", "math"):
                print(backward_bits(given.device, tokens, kernel), flush=True)
        return
    out, machine, began = given.out, Machine(), time.perf_counter()
    device = torch.cuda.get_device_name() if on_gpu else "CPU"
    try:
        out.mkdir(parents=True)
    except FileExistsError:
        parser.error(f"{out} is there already, with what an earlier run measured: give a new --out")
    records: list[dict[str, Any]] = []

    def say(**record: Any) -> None:
        record["at"] = round(time.perf_counter() - began, 1)
        records.append(record)
        with (out / "numbers.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(json.dumps(record), flush=True)

    say(part="machine", device=device, torch=torch.__version__, image_size=given.image_size)
    for model in given.models if "steps" in given.parts else ():
        batch = given.batch or BATCHES[model]
        work = Work(model, given.image_size, batch, "bf16", given.device, given.steps)
        steps(work, [*given.sides], given.rounds, out, say)
    lines, advice = table(records, device)
    more: list[str] = []
    words = [str(HERE / "kernels.py"), "--device", given.device, "--rounds", "3"]
    if "kernels" in given.parts and not (failed := part("kernels", out, KERNELS, words)):
        text = (out / "kernels.txt").read_text()
        advice += kernels_against_rule(text)
        more += text.splitlines()
    elif "kernels" in given.parts:
        more += failed
    if "bits" in given.parts:
        words = [__file__, "--bits", "--device", given.device]
        more += part("bits", out, BITS, words) or (out / "bits.txt").read_text().splitlines()
    if "lanes" in given.parts:
        more += lanes(out, (1, 2) if on_gpu and torch.cuda.device_count() > 1 else (1, 1), given.device)
    if "loader" in given.parts and given.data:
        more += loader(out, given.data)
    for line in more:
        say(part="other", line=line)
    advice = advice or ["- nothing that was measured is faster by more than 5 % than the default"]
    lost = [f"- {one['model']}, {one['side']}: {one['failed']}" for one in records if "failed" in one]
    ended = f"{time.perf_counter() - began:.0f} s; {json.dumps(machine.record(('torch', 'timm')))}"
    report = [
        f"# {device}, torch {torch.__version__}",
        "",
        *lines,
        "",
        *more,
        "",
        *advice,
        *lost,
        "",
        ended,
    ]
    (out / "report.md").write_text("\n".join(report) + "\n")
    print("\n".join(report))
    sys.exit(bool(lost) or any(": not measured, " in line for line in more))


class Side:
    """A side in a process of its own, which answers `step.py --answer`, and ends with its children."""

    def __init__(self, side: str, settings: Mapping[str, Any], work: Work, log: Path) -> None:
        asked = json.dumps({"side": side, "settings": settings, "work": asdict(work)})
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "step.py"), ANSWER, asked],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,
            )
        self._log, self._left = log, b""

    def read(self, seconds: float) -> Numbers:
        """Return the next numbers. Raises TimeoutError, or EOFError if the process ended."""
        stream, until = self._process.stdout, time.monotonic() + seconds
        assert stream is not None
        with selectors.DefaultSelector() as ready:
            ready.register(stream, selectors.EVENT_READ)
            while b"\n" not in self._left:
                if not ready.select(max(0.0, until - time.monotonic())):
                    raise TimeoutError(f"stopped after {seconds:g} s, see {self._log}")
                if not (more := os.read(stream.fileno(), 65536)):
                    raise EOFError(f"ended, see {self._log}")
                self._left += more
        line, _, self._left = self._left.partition(b"\n")
        numbers: Numbers = json.loads(line)
        return numbers

    def turn(self, seconds: float) -> Numbers:
        """Take a turn."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
        return self.read(seconds)

    def end(self) -> None:
        """End it and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()


def is_known(settings: Mapping[str, Any]) -> bool:
    """Return whether the installed vitctl has these keys and values."""
    from vitctl import VitctlError, load_recipe

    try:
        load_recipe("in1k_b16", [*settings.items()])
    except VitctlError:
        return False
    return True


def steps(work: Work, names: Sequence[str], rounds: int, out: Path, say: Say) -> None:
    """Prepare a process for each side, let them take turns, and say each number."""
    running: dict[str, Side] = {}

    def tried(name: str, call: Callable[[float], Numbers], seconds: float, **record: Any) -> bool:
        try:
            numbers = call(seconds)
        except (TimeoutError, EOFError) as error:
            say(part="step", model=work.model, side=name, failed=str(error))
            running.pop(name).end()
            return False
        rate = {} if record else {"images_per_second": round(work.batch / numbers["wall"], 1)}
        say(
            **{
                "part": "step",
                "model": work.model,
                "side": name,
                **record,
                "batch": work.batch,
                **numbers,
                **rate,
            }
        )
        return True

    try:
        for name in names:
            side, settings = SIDES[name]
            if side == "ours" and not is_known(settings):
                say(part="left out", model=work.model, side=name, why="this vitctl has no such setting")
                continue
            log = out / f"{work.model.replace('/', '')}_{name.replace(', ', '_').replace(' ', '_')}.txt"
            running[name] = Side(side, settings, work, log)
            slow = "compile" in name or "tuned" in name or not settings
            tried(name, running[name].read, COMPILED if slow else EAGER, part="prepared")
        for number in range(rounds):
            now = [*running]
            for name in now[number % max(1, len(now)) :] + now[: number % max(1, len(now))]:
                tried(name, running[name].turn, TURN)
    finally:
        for one in running.values():
            one.end()


def part(name: str, out: Path, seconds: float, words: list[str]) -> list[str]:
    """Run a script, keep what it prints, and return a line if it failed or took too long; none of its
    processes is left.
    """
    path = out / f"{name}.txt"
    with path.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *words], stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return [f"- {name}: not measured, stopped after {seconds} s; {path} has what it had printed"]
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return [f"- {name}: not measured, ended with code {code}; see {path}"] if code else []


HEADER = (
    "| step | images/s | MFU | expected | times timm's best | ready after | MiB |",
    "|---" * 7 + "|",
)


def table(records: Sequence[Mapping[str, Any]], device: str) -> tuple[list[str], list[str]]:
    """Return the steps beside timm's best and the expected rate, and what they say of defaults.

    Args:
        records: lines of numbers.jsonl.
        device: of the run, as torch names it.
    """
    from vitctl.models.flops import bf16_tflops, computed_flops, known_device
    from vitctl.models.roofline import GPUS, estimate
    from vitctl.models.roofline import Step as Estimated
    from vitctl.models.variants import variant

    row_name, peak = known_device(device), bf16_tflops(device)
    lines, advice = [*HEADER], []
    size = next((one["image_size"] for one in records if "image_size" in one), 224)
    of_steps = [one for one in records if one["part"] == "step" and "wall" in one]
    for model in dict.fromkeys(one["model"] for one in of_steps):
        own = [one for one in of_steps if one["model"] == model]
        rounds: dict[str, list[Mapping[str, Any]]] = {}
        for one in own:
            rounds.setdefault(one["side"], []).append(one)
        rates = {
            side: statistics.median(one["batch"] / one["wall"] for one in several)
            for side, several in rounds.items()
        }
        best = max((rate for side, rate in rates.items() if side.startswith("timm")), default=0.0)
        config, batch = variant(model, image_size=size, num_classes=1000), own[0]["batch"]
        for side, rate in rates.items():
            mfu = f"{rate * computed_flops(config) / (peak * 1e12):.0%}" if peak else "unknown"
            expected = "unknown"
            if row_name in GPUS and peak:
                step = Estimated(batch, compiled="compiled" in side or "tuned" in side)
                expected = f"{estimate(config, row_name, step).images_per_second:,.0f}"
            ready = next(
                (
                    f"{one['wall']:.0f} s"
                    for one in records
                    if one["part"] == "prepared" and (one["model"], one["side"]) == (model, side)
                ),
                "",
            )
            times = f"{rate / best:.2f}" if best else ""
            mib = statistics.median(one["peak_mib"] for one in rounds[side])
            lines.append(
                f"| {model}, {batch} images, {side} | {rate:,.0f} | {mfu} | {expected} | {times} | {ready} "
                f"| {mib:,.0f} |"
            )
            default = rates.get(OURS_DEFAULT, 0.0)
            if side.startswith("ours") and default and rate > WORTH * default:
                advice.append(f"- {model}: {side} is {rate / default:.2f} times as fast as the default")
    return lines, advice


def kernels_against_rule(text: str) -> list[str]:
    """Return the rows of kernels.py's first table where the rule chooses the slower kernel."""
    wrong = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if len(cells) == 7 and cells[6] in ("fused", "math"):
            ratio = float(cells[5])  # time of fused over that of math
            if (ratio if cells[6] == "fused" else 1 / ratio) > WORTH:
                wrong.append(
                    f"- attention, {cells[0]}, {cells[1]} heads, {cells[2]} tokens: the rule's {cells[6]} is "
                    "the slower"
                )
    return wrong


def backward_bits(device: str, tokens: int, kernel: str) -> str:
    """Return whether two backward passes of attention gave the same bits."""
    import torch

    from vitctl.models.kernels import attend

    torch.manual_seed(0)
    query, key, value = (
        torch.randn(8, 12, tokens, 64, device=device, dtype=torch.bfloat16).requires_grad_() for _ in range(3)
    )
    digests = set()
    for _ in range(5):
        mixed = attend(query, key, value, kernel=kernel)  # type: ignore[arg-type]
        gradients = torch.autograd.grad(mixed.float().square().sum(), (query, key, value))
        content = b"".join(one.cpu().view(torch.int16).numpy().tobytes() for one in gradients)
        digests.add(hashlib.sha256(content).hexdigest())
    return f"- attention's backward pass, {kernel}, {tokens} tokens: {len(digests)} result(s) in 5 passes"


def lanes(out: Path, processes: tuple[int, ...], device: str) -> list[str]:
    """Return whether runs with lanes, one on each of these numbers of processes, end in the same weights."""
    digests: list[str] = []
    for number, count in enumerate(processes, 1):
        name = f"lanes_{number}"
        words = ["-m", "vitctl", "pretrain", "--recipe", "smoke", "--out", str(out / name), "--steps", "20"]
        words += ["--processes", str(count), "--set", "schedule.lanes=2"]
        words += ["--set", f"machine.device={device}", "--set", "evaluation.every_steps=0"]
        if failed := part(name, out, LANES, words):
            return failed
        (file,) = (out / name).glob("checkpoints/step_*20/model.safetensors")
        digests.append(hashlib.sha256(file.read_bytes()).hexdigest())
    equal = "the same weights" if len(set(digests)) == 1 else "OTHER weights"
    return [f"- lanes: {equal} in runs of {' and '.join(map(str, processes))} process(es)"]


def loader(out: Path, data: str) -> list[str]:
    """Return the rate of the loader on these shards."""
    words = ["-m", "vitctl", "bench", "data", "--recipe", "in1k_b16", "--data", data, "--seconds", "15"]
    if failed := part("loader", out, LOADER, [*words, "--json", str(out / "loader.json")]):
        return failed
    one = json.loads((out / "loader.json").read_text())
    return [
        f"- loader: {one['images_per_second']:,.0f} images/s with {one['workers']} worker(s), "
        f"{one['images_per_cpu_second']:,.0f} a CPU second"
    ]


if __name__ == "__main__":
    main()
