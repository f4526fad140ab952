"""Kernels by a rule; and how many images go through a network at once, measured with what training holds
beside them.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import TINY
from tests.engine.conftest import Tiny, batch
from tests.matrix import slow
from tests.trained import do
from vitctl.engine import computation as module
from vitctl.engine import computation as trials
from vitctl.engine.computation import (
    attention_kernel,
    choose_micro_batch,
    computation,
    cpu_kind,
    exact,
    processor,
)
from vitctl.engine.runtime import Computation, Runtime, start
from vitctl.errors import LaunchError
from vitctl.models.variants import variant
from vitctl.recipe.load import Override, load_recipe
from vitctl.recipe.schema import NetworkMachine

SHARE, MOST = 8, 3
ADAM, AVERAGE = 2, 1  # copies of the weights


@pytest.mark.parametrize("processes", [1, 2])
def test_choose_micro_batch__holds_gradients_once(
    processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DDP's gradients lie in its buckets before the forward pass, and sums of earlier micro-batches do; no
    further copy is held.
    """
    recipe: Any = load_recipe(str(TINY), [Override("machine.micro_batch", -1)]).recipe
    model, seen = Tiny(), dict[int, bool]()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())

    def objective(tried: nn.Module, given: Any, _step: int) -> torch.Tensor:
        seen[len(given)] = all(p.grad is not None for p in tried.parameters())
        if len(given) > MOST:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.as_tensor(tried(given.images.double()).sum())

    reserves: set[int] = set()

    def reserve(size: int, **_: object) -> torch.Tensor:
        reserves.add(size)
        return torch.zeros(0)

    monkeypatch.setattr(trials.torch, "empty", reserve)
    runtime: Any = SimpleNamespace(
        device=torch.device("cpu"),
        precision="float64",
        is_main=True,
        num_processes=processes,
        broadcast=lambda text: text,
        autocast=lambda: torch.autocast("cpu", enabled=False),
        sum=lambda values: values,
    )
    assert choose_micro_batch(recipe, runtime, tmp_path, model, objective, batch, SHARE) == MOST
    assert seen == {SHARE: processes > 1, 4: True, 2: True, MOST: True}
    assert reserves == {(ADAM + AVERAGE) * weights}


@pytest.mark.parametrize(
    ("given", "model", "precision", "lanes", "expected"),
    [
        ({}, {}, "bf16", False, "math"),
        ({}, {}, "float32", False, "fused"),
        ({}, {}, "float32", True, "math"),
        ({}, {"position_embedding": "relative"}, "float32", False, "math"),
        ({}, {"image_size": 1024, "patch_size": 16}, "bf16", False, "fused"),
        ({"attention": "fused"}, {}, "bf16", True, "fused"),
    ],
)
def test_attention_kernel__by_rule(
    given: Any, model: Any, precision: str, lanes: bool, expected: str
) -> None:
    config, cpu = variant("Ti/16", **model), Computation(torch.device("cpu"), precision)
    assert attention_kernel(NetworkMachine(**given), config, cpu, lanes=lanes) == expected


@pytest.mark.parametrize("precision", ["bf16", *slow("float32")])
def test_kernels__the_same_recipe_twice_gives_the_same_weights_and_scores(
    precision: str, tiny_data: Path, tmp_path: Path
) -> None:
    """Kernels were measured where a pass had 32,768 logits, and the faster one differed with the load."""
    size = {
        "data.image_size": 32,
        "data.eval_resize": 40,
        "model.patch_size": 2,
        "schedule.total_steps": 3,
        "schedule.warmup_steps": 1,
    }
    given = {"data.path": str(tiny_data), "machine.precision": precision, "machine.workers": 0, **size}
    used: list[dict[str, Any]] = []
    for name in ("a", "b"):
        used.append(do(TINY, tmp_path / name, **given)["provenance"])
        scored = {
            "data.path": str(tiny_data),
            "weights.source": str(tmp_path / name),
            "machine.precision": precision,
        }
        used.append(
            do("evaluate", tmp_path / f"{name}_score", **scored, **{"machine.workers": 0})["provenance"]
        )
    assert used[0]["weights_sha256"] == used[2]["weights_sha256"]
    assert {one["attention"] for one in used} == {"math" if precision == "bf16" else "fused"}
    forced = do(
        "evaluate", tmp_path / "forced", **scored, **{"machine.attention": "math", "machine.workers": 0}
    )
    assert forced["provenance"]["attention"] == "math"


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """Without the variables of whoever runs the tests as on another processor."""
    for name in module._library_settings():
        monkeypatch.delenv(name)
    return start(precision="bf16", device="cpu", processes=1)


def test_exact__threads_and_kernels_are_fixed_and_given_back(runtime: Runtime) -> None:
    before = torch.get_num_threads()
    with exact(runtime, before + 1):
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.get_num_threads() == before + 1
        made_by = computation(runtime, attention="math")
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_num_threads() == before
    kind = cpu_kind(Path("/proc/cpuinfo"))
    assert made_by == {"device": kind, "threads": before + 1, "precision": "bf16", "attention": "math"}


def test_computation__settings_that_choose_other_kernels_are_part_of_it(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setenv("MKL_NUM_THREADS", "7")
    assert computation(runtime)["environment"] == {"ONEDNN_MAX_CPU_ISA": "AVX2"}


def test_cpu_kind__maker_and_kernels(tmp_path: Path) -> None:
    level = torch.backends.cpu.get_cpu_capability()
    (tmp_path / "amd").write_text(
        "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: X\nflags\t\t: fpu avx2 fma avx512f\n" * 2
    )
    (tmp_path / "arm").write_text("processor\t: 0\nFeatures\t: fp asimd bf16\nCPU implementer\t: 0x41\n")
    assert cpu_kind(tmp_path / "amd") == f"CPU AuthenticAMD {level} avx2 avx512f fma"
    assert cpu_kind(tmp_path / "arm") == f"CPU 0x41 {level} asimd bf16"
    assert cpu_kind(tmp_path / "none") == f"CPU {level}"


def test_exact__an_operation_without_a_deterministic_kernel_is_one_line(runtime: Runtime) -> None:
    said = "max_pool3d_backward does not have a deterministic implementation, but you set ..."
    with (
        pytest.raises(
            LaunchError, match=r"max_pool3d_backward has no .* kernel .* cpu .*schedule\.lanes = 0"
        ),
        exact(runtime, 1),
    ):
        raise RuntimeError(said)
    with pytest.raises(RuntimeError, match="another"), exact(runtime, 1):
        raise RuntimeError("another error")
    assert not torch.are_deterministic_algorithms_enabled()


def test_processor__of_a_gpu_names_driver_and_libraries(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build\n"
    (tmp_path / "version").write_text(line)
    monkeypatch.setattr(module, "_NVIDIA", tmp_path / "version")
    monkeypatch.setattr(module, "version", lambda package: {"nvidia-cublas": "13.1"}[package])
    monkeypatch.setattr(module, "PackageNotFoundError", KeyError)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91000)
    found = processor(torch.device("cuda"))
    assert (found["driver"], found["cuBLAS"], found["cuDNN"]) == ("550.54.15", "13.1", "91000")
