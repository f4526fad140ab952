"""benchmarks/gpu.py: what needs no GPU of it."""

from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.conftest import script


def measured(name: str, wall: float, settings: str) -> dict[str, Any]:
    side = {"settings": settings, "median": {"wall": wall, "peak_mib": 1000.0}}
    figure = f"training step, {name} at 224, 256 images, bf16"
    return {"figure": figure, "number": "wall", "ours": side, "ratio": {"median": 1.2}}


def test_table__rate_and_mfu_of_a_known_gpu() -> None:
    gpu = script("gpu")
    found = {"rows": [measured("B/16", 0.1, "as it comes"), measured("L/16", 0.4, "compiled by block")]}
    lines = gpu.table(found, "NVIDIA A100-SXM4-80GB")
    # 2,560 images/s, each of 6 x 17.563 GMACs, without 196 tokens of the last block: their output, MLP
    # and attention; of 312 TFLOP/s
    spared = 196 * (9 * 768**2 + 2 * 197 * 768)
    assert f"| 2,560 | {2560 * 6 * (17.563e9 - spared) / 312e12:.0%} |" in lines[2]
    assert lines[-1] == "- L/16: fastest with compiled by block, which is not the default"
    assert "| unknown | unknown |" in gpu.table(found, "Some GPU")[2]


def test_kernels__only_a_slower_choice_is_named() -> None:
    gpu = script("gpu")
    row = "| bfloat16 | 12 | {} | 1.0 | 1.0 | {} | {} |"
    text = "\n".join(["| precision |", row.format(197, 1.3, "fused"), row.format(577, 1.04, "fused")])
    assert gpu.kernels_against_rule(text) == [
        "- attention, bfloat16, 197 tokens: the rule's fused is the slower"
    ]
    assert "holds" in gpu.kernels_against_rule(row.format(197, 1.3, "math"))[0]


def test_bits_of_attention_repeat_on_a_cpu() -> None:
    gpu = script("gpu")
    assert gpu.backward_bits("cpu", 17, "math").endswith("1 result(s) in 5 passes")


@pytest.mark.slow
def test_lanes__one_and_two_processes(tmp_path: Path) -> None:
    lines = list(script("gpu").lanes(tmp_path, range(1, 3), "cpu"))
    assert lines == ["- lanes: the same weights on 1, 2 process(es)"]
