"""Deterministic kernels and fixed threads: set within the block, and as they were after it."""

from pathlib import Path

import pytest
import torch

from vitctl.engine.distributed import exact as module
from vitctl.engine.distributed.exact import computation, cpu_kind, exact, processor
from vitctl.engine.distributed.runtime import Runtime, start
from vitctl.errors import LaunchError


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
