"""benchmarks/gpu.py: what needs no GPU of it."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.conftest import script
from vitctl.models.roofline import Step, estimate
from vitctl.models.variants import variant


def step_rows(name: str, best: float, settings: str, default: float) -> list[Any]:
    """What `step.rows_of` gives to gpu.json, by its own functions."""
    step, measure = script("step"), script("measure")
    numbers = {"ours": {"as it comes": default, settings: best}, "timm": {"as it comes": 2 * best}}
    found = measure.Compared(
        {
            (side, one): [{"wall": wall, "peak_mib": 1000.0}]
            for side, choices in numbers.items()
            for one, wall in choices.items()
        },
        {"ours": settings, "timm": "as it comes"},
        {"ours": {}, "timm": {}},
    )
    work = step.Work(name, 224, 256, "bf16", "cuda")
    return [row.record() for row in step.rows_of(work, found, "wall")]


def test_table__rate_mfu_and_expected_rate_of_a_known_gpu() -> None:
    gpu = script("gpu")
    lines, advice = gpu.table({"rows": step_rows("B/16", 0.1, "as it comes", 0.1)}, "NVIDIA A100-SXM4-80GB")
    # 2,560 images/s, each of 6 x 17.563 GMACs, without 196 tokens of the last block: their output, MLP
    # and attention; of 312 TFLOP/s
    spared = 196 * (9 * 768**2 + 2 * 197 * 768)
    config = variant("B/16", image_size=224, num_classes=1000)
    expected = estimate(config, "A100", Step(256, compiled=False)).images_per_second
    start = f"| B/16, 256 images | 2,560 | {2560 * 6 * (17.563e9 - spared) / 312e12:.0%} | {expected:,.0f} |"
    assert len(lines) == 1 and lines[0].startswith(f"{start} 2.00 | ours, as it comes | 1,000 |")
    assert advice == []
    assert "| unknown | unknown |" in gpu.table({"rows": step_rows("B/16", 1, "x", 1)}, "Some GPU")[0][0]


def test_table__a_faster_setting_is_advised_and_has_its_own_expected_rate() -> None:
    found = {"rows": step_rows("L/16", 0.4, "compiled by block", 0.5)}
    lines, advice = script("gpu").table(found, "NVIDIA H100 80GB HBM3")
    config = variant("L/16", image_size=224, num_classes=1000)
    assert f"| {estimate(config, 'H100', Step(256, compiled=True)).images_per_second:,.0f} |" in lines[0]
    assert advice == ["- L/16: ours, compiled by block is 1.25 times as fast as the default"]
    found = {"rows": step_rows("L/16", 0.49, "compiled by block", 0.5)}
    assert script("gpu").table(found, "NVIDIA H100 80GB HBM3")[1] == []


def test_kernels__only_a_slower_choice_is_named() -> None:
    gpu = script("gpu")
    row = "| bfloat16 | 12 | {} | 1.0 | 1.0 | {} | {} |"
    text = "\n".join(["| precision |", row.format(197, 1.3, "fused"), row.format(577, 1.04, "fused")])
    assert gpu.kernels_against_rule(text) == [
        "- attention, bfloat16, 12 heads, 197 tokens: the rule's fused is the slower"
    ]
    assert gpu.kernels_against_rule(row.format(197, 1.3, "math")) == []


def test_part__leaves_no_process_and_says_that_nothing_was_measured(tmp_path: Path) -> None:
    gpu = script("gpu")
    child = "import subprocess, sys, time; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); "
    (line,) = gpu.part("slow", tmp_path, 2, ["-c", child + "time.sleep(60)"])
    assert "not measured, stopped after 2 s" in line
    pid = int((tmp_path / "slow.txt").read_text())
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and is_running(pid):
        time.sleep(0.05)
    assert not is_running(pid)
    (line,) = gpu.part("wrong", tmp_path, 10, ["-c", "raise SystemExit(3)"])
    assert "not measured, ended with code 3" in line
    assert gpu.part("good", tmp_path, 10, ["-c", "print(1)"]) == []


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] != "Z"


def test_bits_of_attention_repeat_on_a_cpu() -> None:
    gpu = script("gpu")
    assert gpu.backward_bits("cpu", 17, "math").endswith("1 result(s) in 5 passes")


@pytest.mark.slow
def test_lanes__one_and_two_processes(tmp_path: Path) -> None:
    gpu = script("gpu")
    assert gpu.lanes(tmp_path, (1, 2), "cpu") == ["- lanes: the same weights in runs of 1 and 2 process(es)"]
    other = tmp_path / "other"
    other.mkdir()
    (line,) = gpu.lanes(other, (1,), "nonsense")
    assert "lanes_1: not measured, ended with code 2" in line
