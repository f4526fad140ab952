"""What makes a process compute the same bits as its peers and as before: deterministic kernels, and a fixed
number of threads.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from vitctl.engine.distributed.process_group import check_same
from vitctl.engine.distributed.runtime import Runtime
from vitctl.errors import LaunchError

_CPUINFO, _NVIDIA = Path("/proc/cpuinfo"), Path("/proc/driver/nvidia/version")
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_NOT_DETERMINISTIC = "does not have a deterministic implementation"


# Variables of the libraries that multiply matrices; those of threads are set otherwise.
_SETTINGS = (
    "MKL_CBWR",
    "MKL_ENABLE",
    "MKL_DEBUG",
    "ONEDNN_",
    "DNNL_",
    "ATEN_CPU",
    "CUBLAS_",
    "NVIDIA_TF32",
    "TORCH_ALLOW_TF32",
)
_KERNELS = {
    "avx2",
    "fma",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
    "amx_tile",
    "avx_vnni",
    "asimd",
    "bf16",
    "sve",
}


@contextmanager
def exact(runtime: Runtime, threads: int) -> Iterator[None]:
    """Within the block a pass over the same images with the same weights gives the same bits.

    Args:
        runtime: of this process.
        threads: of this process on a CPU.

    Raises:
        LaunchError: an operation has no deterministic kernel on this device.
    """
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    if runtime.device.type == "cuda":
        os.environ.setdefault(_CUBLAS, ":4096:8")
        torch.backends.cudnn.benchmark = False
    else:
        torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # it costs time, and no number is read before it is written
    try:
        yield
    except RuntimeError as error:
        if _NOT_DETERMINISTIC not in str(error):
            raise
        operation = str(error).split(_NOT_DETERMINISTIC)[0].strip()[:100]
        raise LaunchError(
            f"schedule.lanes: {operation} has no deterministic kernel on this {runtime.device.type} device, "
            f"so that the same bits "
            "cannot be promised; train with schedule.lanes = 0"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[1])
        settings.fill_uninitialized_memory = filled
        if runtime.device.type != "cuda":
            torch.set_num_threads(before[0])


def computation(runtime: Runtime, **chosen: Any) -> dict[str, Any]:
    """What decides the last bits beside recipe, data and weights; the same on every process.

    Args:
        runtime: of this process.
        chosen: more of it: kernels, versions.

    Raises:
        LaunchError: another process computes in another way.
    """
    own: dict[str, Any]
    if runtime.device.type == "cuda":
        own = {"device": torch.cuda.get_device_name(runtime.device)}
    else:
        own = {"device": cpu_kind(_CPUINFO), "threads": torch.get_num_threads()}
    settings = _library_settings()
    described = {
        **own,
        "precision": runtime.precision,
        **({"environment": settings} if settings else {}),
        **chosen,
    }
    if runtime.num_processes > 1:
        facts = {name: json.dumps(value, sort_keys=True) for name, value in described.items()}
        check_same(
            facts,
            "with schedule.lanes all processes need the same kind of device and the same versions; use such "
            "nodes, or set "
            "schedule.lanes = 0",
        )
    return described


def processor(device: torch.device) -> dict[str, str]:
    """Return what the last bits of a device's products depend on beside versions of packages, by name.

    Of a CPU its instructions, of a GPU its driver and libraries; and the environment variables that choose
    among kernels.
    """
    if device.type != "cuda":
        return {"processor": cpu_kind(_CPUINFO), **_library_settings()}
    cudnn: Any = torch.backends.cudnn  # not all of it has types
    found = {"CUDA": str(torch.version.cuda), "cuDNN": str(cudnn.version())}
    for package in ("nvidia-cublas", f"nvidia-cublas-cu{found['CUDA'].partition('.')[0]}"):
        with suppress(PackageNotFoundError):
            found["cuBLAS"] = version(package)
    with suppress(OSError):
        driver = re.search(r"Module\s.*?(\d+\.[\d.]+)", _NVIDIA.read_text(encoding="utf-8", errors="replace"))
        found |= {"driver": driver[1]} if driver else {}
    return found | _library_settings()


def _library_settings() -> dict[str, str]:
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_SETTINGS)}


def cpu_kind(file: Path) -> str:
    """The kind of CPU: its maker and what its matrix kernels are chosen by. CPUs of one kind compute the same
    bits.

    Args:
        file: /proc/cpuinfo; it may be missing.
    """
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found: dict[str, str] = dict(
        re.findall(r"^(vendor_id|CPU implementer|flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    )
    maker = found.get("vendor_id", found.get("CPU implementer", ""))
    kernels = sorted(_KERNELS & {*found.get("flags", found.get("Features", "")).split()})
    return " ".join(filter(None, ["CPU", maker, torch.backends.cpu.get_cpu_capability(), *kernels]))
