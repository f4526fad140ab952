"""benchmarks/gpu.py: what needs no GPU of it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.conftest import script
from vitctl.models.roofline import Step, estimate
from vitctl.models.variants import variant


def records(model: str, **walls: float) -> list[dict[str, Any]]:
    """Lines of numbers.jsonl, with three rounds of each side."""
    names = {name: name.replace("_", ", ") for name in walls}
    return [
        {"part": "step", "model": model, "side": names[name], "batch": 256, "wall": wall, "peak_mib": 1000.0}
        for name, wall in walls.items()
        for _ in range(3)
    ]


def test_table__rate_mfu_and_expected_rate_of_a_known_gpu() -> None:
    gpu = script("gpu")
    found = records("B/16", ours_eager=0.1, timm_eager=0.3, timm_compiled=0.2)
    lines, advice = gpu.table(found, "NVIDIA A100-SXM4-80GB")
    # 2,560 images/s, each of 6 x 17.563 GMACs, without 196 tokens of the last block: their output, MLP
    # and attention; of 312 TFLOP/s
    spared = 196 * (9 * 768**2 + 2 * 197 * 768)
    config = variant("B/16", image_size=224, num_classes=1000)
    expected = estimate(config, "A100", Step(256, compiled=False)).images_per_second
    start = f"| 2,560 | {2560 * 6 * (17.563e9 - spared) / 312e12:.0%} | {expected:,.0f} | 2.00 |"
    assert len(lines) == 5 and lines[2].startswith(f"| B/16, 256 images, ours, eager {start}")
    assert advice == []
    assert "| unknown | unknown |" in gpu.table(found, "Some GPU")[0][2]


def test_table__a_faster_setting_is_advised_and_has_its_own_expected_rate() -> None:
    found = [
        *records("L/16", ours_compiled=0.4),
        *[{**one, "side": "ours, as it comes"} for one in records("L/16", ours_eager=0.5)],
    ]
    lines, advice = script("gpu").table(found, "NVIDIA H100 80GB HBM3")
    config = variant("L/16", image_size=224, num_classes=1000)
    assert f"| {estimate(config, 'H100', Step(256, compiled=True)).images_per_second:,.0f} |" in lines[2]
    assert advice == ["- L/16: ours, compiled is 1.25 times as fast as the default"]


def test_side__that_hangs_is_ended_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = script("gpu")
    monkeypatch.setattr(gpu, "HERE", tmp_path)
    (tmp_path / "step.py").write_text(
        "import subprocess, sys, time\np = subprocess.Popen(['sleep', '60'])\n"
        "print('{\"wall\": 1.0}', flush=True)\nprint(p.pid, file=sys.stderr, flush=True)\n"
        "sys.stdin.readline()\ntime.sleep(60)\n"
    )
    said: list[dict[str, Any]] = []
    monkeypatch.setattr(gpu, "TURN", 0.5)
    work = script("step").Work("Ti/16", 32, 4, "bf16", "cpu")
    gpu.steps(work, ["timm, eager"], 1, tmp_path, lambda **record: said.append(record))
    assert [one["part"] for one in said] == ["prepared", "step"] and "stopped after 0.5 s" in said[1][
        "failed"
    ]
    (log,) = tmp_path.glob("Ti16_*.txt")
    pid, deadline = int(log.read_text()), time.monotonic() + 10
    while time.monotonic() < deadline and is_running(pid):
        time.sleep(0.05)
    assert not is_running(pid)


@pytest.mark.slow
def test_rehearsal__on_a_cpu_writes_every_number(tmp_path: Path) -> None:
    out = tmp_path / "out"
    line = [sys.executable, script("gpu").__file__, "--device", "cpu", "--models", "Ti/16", "--out", str(out)]
    line += ["--batch", "4", "--image-size", "32", "--steps", "1", "--rounds", "2"]
    line += ["--parts", "steps"]
    subprocess.run([*line, "--sides", "ours, eager", "timm, eager"], check=True)
    lines = [json.loads(text) for text in (out / "numbers.jsonl").read_text().splitlines()]
    assert [one["side"] for one in lines if one["part"] == "step"] == [
        *("ours, eager", "timm, eager"),
        *("timm, eager", "ours, eager"),
    ]
    assert "ours, eager" in (out / "report.md").read_text()


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
