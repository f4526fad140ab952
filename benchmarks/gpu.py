"""What nobody could measure without a GPU, in one command of about ten minutes: `python benchmarks/gpu.py`.

Steps of B/16, L/16 and H/14 beside timm's, with MFU and memory, against the time that
vitctl/models/roofline.py expects; the kernels that machine.attention chooses from; whether attention's
backward pass repeats its bits; the bits of lanes on one GPU and on two; the rate of the loader. It ends with
the defaults that these numbers speak against. Each part has a time limit, and its output stays in OUT.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measure import RESULTS, Machine
from step import NO_DEVICE

MODELS = ("B/16", "L/16", "H/14")
WORTH = 1.05  # a default is questioned if another setting is faster by this
HERE = Path(__file__).parent


def main() -> None:
    """Measure, print and write results/gpu_report.md."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpu_run"))
    parser.add_argument("--data", default="", help="shards of photographs, for the rate of the loader")
    given = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured", file=sys.stderr)
        sys.exit(NO_DEVICE)
    given.out.mkdir(parents=True, exist_ok=True)
    machine, began = Machine(), time.perf_counter()
    device = torch.cuda.get_device_name()
    steps = ["--device", "cuda", "--models", *MODELS, "--rounds", "2", "--results", str(given.out)]
    lines = [f"# {device}, torch {torch.__version__}", ""]
    lines += part("step", given.out, 330, [str(HERE / "step.py"), *steps])
    if (file := given.out / "gpu.json").is_file():
        lines += [*table(json.loads(file.read_text()), device), ""]
    lines += part("kernels", given.out, 60, [str(HERE / "kernels.py"), "--device", "cuda", "--rounds", "3"])
    lines += kernels_against_rule((given.out / "kernels.txt").read_text())
    lines += [backward_bits("cuda", number, kernel) for number in (197, 577) for kernel in ("fused", "math")]
    lines += lanes(given.out, range(1, min(2, torch.cuda.device_count()) + 1), "cuda")
    if given.data:
        words = ["-m", "vitctl", "bench", "data", "--recipe", "in1k_b16", "--data", given.data]
        lines += part("loader", given.out, 120, [*words, "--json", str(given.out / "loader.json")])
    lines += ["", f"{time.perf_counter() - began:.0f} s; {json.dumps(machine.record(('torch', 'timm')))}"]
    text = "\n".join(lines) + "\n"
    print(text)
    (RESULTS / "gpu_report.md").write_text(text)


def part(name: str, out: Path, seconds: int, words: list[str]) -> list[str]:
    """Run a script, keep what it prints, and return a line if it failed or took too long."""
    with (out / f"{name}.txt").open("w") as file:
        try:
            done = subprocess.run(
                [sys.executable, *words], stdout=file, stderr=file, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            return [f"- {name}: stopped after {seconds} s; {out / name}.txt has what it had printed"]
    return [f"- {name}: ended with code {done.returncode}, see {out / name}.txt"] if done.returncode else []


def table(found: dict[str, Any], device: str) -> list[str]:
    """Return the steps beside timm's and the expected time, and what they say of defaults.

    Args:
        found: what step.py wrote.
        device: of the run, as torch names it.
    """
    from vitctl.models.flops import PEAK_TFLOPS, computed_flops
    from vitctl.models.roofline import GPUS, Step, estimate
    from vitctl.models.variants import variant

    named = max((name for name in GPUS if name in device), key=len, default="")
    lines = ["| step | ours, images/s | MFU | expected | times timm's | settings | MiB |", "|---" * 7 + "|"]
    advice = []
    for row in found["rows"]:
        words = row["figure"].split()
        if not row["figure"].startswith("training step, ") or "as it comes" in row["figure"]:
            continue
        name, batch = words[2], int(words[words.index("images,") - 1])
        rate = batch / row["ours"]["median"][row["number"]]
        config = variant(name, image_size=224, num_classes=1000)
        mfu = expected = "unknown"
        if named:
            mfu = f"{rate * computed_flops(config) / (PEAK_TFLOPS[named] * 1e12):.0%}"
            expected = f"{estimate(config, named, Step(batch)).images_per_second:,.0f}"
        lines.append(
            f"| {name}, {batch} images | {rate:,.0f} | {mfu} | {expected} | {row['ratio']['median']:.2f} "
            f"| {row['ours']['settings']} | {row['ours']['median']['peak_mib']:,.0f} |"
        )
        if row["ours"]["settings"] != "as it comes":
            advice.append(f"- {name}: fastest with {row['ours']['settings']}, which is not the default")
    return lines + advice


def kernels_against_rule(text: str) -> list[str]:
    """Return the rows of kernels.py's first table where the rule chooses the slower kernel."""
    wrong = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if len(cells) == 7 and cells[6] in ("fused", "math"):
            ratio = float(cells[5])  # time of fused over that of math
            if (ratio if cells[6] == "fused" else 1 / ratio) > WORTH:
                wrong.append(
                    f"- attention, {cells[0]}, {cells[2]} tokens: the rule's {cells[6]} is the slower"
                )
    return wrong or ["- attention: the rule of machine.attention = 'auto' holds"]


def backward_bits(device: str, tokens: int, kernel: str) -> str:
    """Return whether two backward passes of attention gave the same bits."""
    import torch

    from vitctl.models.kernels import attend, set_attention

    set_attention(kernel)  # type: ignore[arg-type]
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(8, 12, tokens, 64, device=device, dtype=torch.bfloat16).requires_grad_() for _ in range(3)
    )
    digests = set()
    for _ in range(5):
        gradients = torch.autograd.grad(attend(query, key, value).float().square().sum(), (query, key, value))
        content = b"".join(one.cpu().view(torch.int16).numpy().tobytes() for one in gradients)
        digests.add(hashlib.sha256(content).hexdigest())
    return f"- attention's backward pass, {kernel}, {tokens} tokens: {len(digests)} result(s) in 5 passes"


def lanes(out: Path, processes: range, device: str) -> Iterator[str]:
    """Yield whether runs with lanes on these numbers of processes end in the same weights."""
    digests = {}
    for number in processes:
        folder = out / f"lanes_{number}"
        words = ["-m", "vitctl", "pretrain", "--recipe", "smoke", "--out", str(folder), "--steps", "20"]
        words += ["--processes", str(number), "--set", "schedule.lanes=2"]
        words += ["--set", f"machine.device={device}", "--set", "evaluation.every_steps=0"]
        yield from part(f"lanes_{number}", out, 120, words)
        for file in folder.glob("checkpoints/step_*20/model.safetensors"):
            digests[number] = hashlib.sha256(file.read_bytes()).hexdigest()
    equal = "the same weights" if len(set(digests.values())) == 1 else "OTHER weights"
    yield f"- lanes: {equal} on {', '.join(map(str, digests)) or 'no'} process(es)"


if __name__ == "__main__":
    main()
