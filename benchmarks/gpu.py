"""What nobody could measure without a GPU, in one command of at most ten minutes: `python benchmarks/gpu.py`.

Steps of B/16, L/16 and H/14 beside timm's, with MFU and memory, against the time that
vitctl/models/roofline.py expects; the kernels that machine.attention chooses from; whether attention's
backward pass repeats its bits; those of a run with lanes; the rate of the loader. It ends with the defaults
that these numbers speak against. Each part has a time limit, and its output stays in OUT; what is found is
written to OUT/report.md after each part, and to results/gpu_report.md at the end.
"""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from measure import DEFAULT, RESULTS, Machine
from step import NO_DEVICE

LIMITS = {"B/16": 110, "L/16": 130, "H/14": 160}  # seconds of each model's steps
KERNELS, BITS, LANES, LOADER = 40, 20, 50, 60
WORTH = 1.05  # a default is questioned if another setting is faster by this
HERE = Path(__file__).parent


def main() -> None:
    """Measure, print and write the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpu_run"), help="a new folder")
    parser.add_argument("--models", nargs="+", default=list(LIMITS), choices=list(LIMITS))
    parser.add_argument("--data", default="", help="shards of photographs, for the rate of the loader")
    parser.add_argument("--bits", action="store_true", help="print the part on attention's bits, and no more")
    given = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured", file=sys.stderr)
        sys.exit(NO_DEVICE)
    if given.bits:
        for tokens in (197, 577):
            for kernel in ("fused", "math"):
                print(backward_bits("cuda", tokens, kernel), flush=True)
        return
    out, device, machine, began = given.out, torch.cuda.get_device_name(), Machine(), time.perf_counter()
    try:
        out.mkdir(parents=True)
    except FileExistsError:
        parser.error(f"{out} is there already, with what an earlier run measured: give a new --out")
    lines = [f"# {device}, torch {torch.__version__}", "", *HEADER]

    def found(*more: str) -> None:
        lines.extend(more)
        print("\n".join(more), flush=True)
        (out / "report.md").write_text("\n".join(lines) + "\n")

    def measured(name: str, seconds: float, words: list[str]) -> bool:
        failed = part(name, out, seconds, words)
        found(*failed)
        return not failed

    found()
    advice: list[str] = []
    for model in given.models:
        name = "step_" + model.replace("/", "")
        words = [str(HERE / "step.py"), "--device", "cuda", "--models", model, "--rounds", "2"]
        if measured(name, LIMITS[model], [*words, "--results", str(out / name)]):
            rows, said = table(json.loads((out / name / "gpu.json").read_text()), device)
            advice += said
            found(*rows)
    found("")
    if measured("kernels", KERNELS, [str(HERE / "kernels.py"), "--device", "cuda", "--rounds", "3"]):
        text = (out / "kernels.txt").read_text()
        advice += kernels_against_rule(text)
        found(text)
    if measured("bits", BITS, [__file__, "--bits"]):
        found(*(out / "bits.txt").read_text().splitlines())
    found(*lanes(out, (1, 2) if torch.cuda.device_count() > 1 else (1, 1), "cuda"))
    if given.data:
        found(*loader(out, given.data))
    if not advice:
        advice = ["- nothing that was measured is faster by more than 5 % than the default"]
    missing = sum(": not measured, " in line for line in lines)
    found("", *advice, *([f"- {missing} part(s) above were not measured"] if missing else []))
    found("", f"{time.perf_counter() - began:.0f} s; {json.dumps(machine.record(('torch', 'timm')))}")
    (RESULTS / "gpu_report.md").write_text((out / "report.md").read_text())
    sys.exit(bool(missing))


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
    "| step | ours, images/s | MFU | expected | times timm's | settings | MiB |",
    "|---" * 7 + "|",
)


def table(found: dict[str, Any], device: str) -> tuple[list[str], list[str]]:
    """Return the steps beside timm's and the expected time, and what they say of defaults.

    Args:
        found: what step.py wrote.
        device: of the run, as torch names it.
    """
    from vitctl.models.flops import bf16_tflops, computed_flops, known_device
    from vitctl.models.roofline import GPUS, Step, estimate
    from vitctl.models.variants import variant

    row_name, peak = known_device(device), bf16_tflops(device)
    lines, advice = [], []
    measured = [row for row in found["rows"] if row["figure"].startswith("training step, ")]
    for row in measured:
        words, settings = row["figure"].split(), row["ours"]["settings"]
        if DEFAULT in row["figure"]:
            continue
        name, batch = words[2], int(words[words.index("images,") - 1])
        rate = batch / row["ours"]["median"][row["number"]]
        config = variant(name, image_size=224, num_classes=1000)
        mfu = f"{rate * computed_flops(config) / (peak * 1e12):.0%}" if peak else "unknown"
        expected = "unknown"
        if row_name in GPUS and peak:
            step = Step(batch, compiled="compiled" in settings)
            expected = f"{estimate(config, row_name, step).images_per_second:,.0f}"
        lines.append(
            f"| {name}, {batch} images | {rate:,.0f} | {mfu} | {expected} | {row['ratio']['median']:.2f} "
            f"| {settings} | {row['ours']['median']['peak_mib']:,.0f} |"
        )
        default = next(one for one in measured if DEFAULT in one["figure"] and words[2] in one["figure"])
        faster = default["ours"]["median"][row["number"]] / row["ours"]["median"][row["number"]]
        if faster > WORTH:
            advice.append(f"- {name}: {settings} is {faster:.2f} times as fast as the default")
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
