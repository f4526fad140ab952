"""The runtime of every process of a job: accelerate, the device, and the precision."""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn

from vitctl.engine.distributed.process_group import broadcast_text
from vitctl.engine.distributed.sharding import is_sharded
from vitctl.engine.distributed.transfer import Transfer
from vitctl.errors import LaunchError
from vitctl.models.hardware import bf16_tflops
from vitctl.recipe.machine import Machine
from vitctl.system.waiting import HERE

MIX = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Computation:
    """Where and how a process computes: its device, and "bf16", "float32", "tf32" or "float64"."""

    device: torch.device
    precision: str

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters: the master weights stay wide under bf16."""
        return torch.float64 if self.precision == "float64" else torch.float32

    @property
    def product_dtype(self) -> torch.dtype:
        """That matrices are multiplied in."""
        return torch.bfloat16 if self.precision == "bf16" else self.dtype

    def autocast(self) -> AbstractContextManager[Any]:
        """Forward passes outside the wrapped model's own forward run in here."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.precision == "bf16" else nullcontext()

    def normaliser(self, mean: Sequence[float], std: Sequence[float]) -> "Normaliser":
        """For images of these means and deviations of the three colours, of pixels from 0 to 1."""
        return Normaliser(self, mean, std)


class Normaliser:
    """uint8 `[B, 3, S, S]` to the device, then normalised there: (x / 255 - mean) / std.

    `mean` and `std` go to the device once, because a copy from ordinary memory makes the host wait for the
    device.
    """

    def __init__(self, computation: Computation, mean: Sequence[float], std: Sequence[float]) -> None:
        self._device, self._dtype = computation.device, computation.dtype
        self._mean, self._std = self._constant(mean), self._constant(std)

    def __call__(self, images: Tensor) -> Tensor:
        on_device = images.to(self._device, non_blocking=True).to(self._dtype)
        return (on_device / 255.0 - self._mean) / self._std

    @torch.inference_mode(False)
    def _constant(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=self._dtype, device=self._device).view(1, 3, 1, 1)


class Fetched:
    """Numbers on their way from the device to the host; without anybody waiting for them yet."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._arrived: Any = None
        if tensor.device.type == "cuda":
            self._tensor = tensor.to("cpu", non_blocking=True)
            cuda: Any = torch.cuda  # not all of it has types
            self._arrived = cuda.Event()
            self._arrived.record()

    def wait(self) -> Tensor:
        """The numbers, on the host; waits for all that the device was told before they were asked for, and
        for nothing later.
        """
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensor


@dataclass(frozen=True)
class Runtime:
    """One process of a job. `precision` is that of the computation; parameters are float64 or float32."""

    accelerator: Accelerator
    precision: str

    @property
    def rank(self) -> int:
        """Rank of this process, 0 .. num_processes - 1."""
        return int(self.accelerator.process_index)

    @property
    def num_processes(self) -> int:
        """Processes in this job, over all machines."""
        return int(self.accelerator.num_processes)

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run's files."""
        return bool(self.accelerator.is_main_process)

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return torch.device(self.accelerator.device)

    @property
    def computation(self) -> Computation:
        """Of this process, without its peers."""
        return Computation(self.device, self.precision)

    @property
    def dtype(self) -> torch.dtype:
        """See `Computation`."""
        return self.computation.dtype

    @property
    def peak_flops(self) -> float:
        """Peak FLOP/s of this process's device in bf16; 0 where it is unknown, or another precision is used."""
        if self.device.type != "cuda" or self.precision != "bf16":
            return 0.0
        return 1e12 * bf16_tflops(torch.cuda.get_device_name(self.device))

    def autocast(self) -> AbstractContextManager[Any]:
        """See `Computation`."""
        return self.computation.autocast()

    def normaliser(self, mean: Sequence[float], std: Sequence[float]) -> Normaliser:
        """See `Computation`."""
        return self.computation.normaliser(mean, std)

    def add(self, own: Tensor) -> Tensor:
        """Element-wise sum over all processes, in place, without waiting for the device."""
        HERE.arrive()
        if self.num_processes > 1:
            torch.distributed.all_reduce(own)
        return own

    def sum(self, values: list[float]) -> list[float]:
        """Element-wise sum over all processes, in float64, the same numbers on each.

        The device is not waited for.
        """
        HERE.arrive()
        total = torch.tensor(values, dtype=torch.float64)
        if self.num_processes > 1:
            torch.distributed.all_reduce(total)
        return [float(v) for v in total.tolist()]

    def sum_words(self, words: np.ndarray) -> np.ndarray:
        """Element-wise sum over all processes modulo 2^64, uint64 `[n]`, the same on each.

        The device is not waited for.
        """
        if self.num_processes == 1:
            return words
        HERE.arrive()
        total = torch.from_numpy(words.view(np.int64)).clone()
        torch.distributed.all_reduce(total)
        found: np.ndarray = total.numpy().view(np.uint64)
        return found

    def broadcast(self, text: str) -> str:
        """The text of the main process, cut after 2,000 bytes, on every process."""
        return broadcast_text(text) if self.num_processes > 1 else text

    def wait(self) -> None:
        """Barrier: wait for all processes."""
        HERE.arrive()
        self.accelerator.wait_for_everyone()

    def wrap(self, model: nn.Module, *, ddp: bool = True, always_synced: bool = False) -> nn.Module:
        """Wrap a model on its device for mixed precision, and for DDP, which a sharded model does not need.

        Gradients lie in the buckets that DDP sends, and have no memory of their own.

        Args:
            model: on its device.
            ddp: whether DDP adds up its gradients.
            always_synced: no backward pass is within `no_sync`, on any process. Then DDP learns the graph
                from the first pass (`static_graph`), which fails inside torch where that pass does not add
                up.
        """
        self.accelerator.ddp_handler = DistributedDataParallelKwargs(
            gradient_as_bucket_view=True, static_graph=always_synced
        )
        wrapped: nn.Module = self.accelerator.prepare_model(
            model, evaluation_mode=is_sharded(model) or not ddp
        )
        return wrapped

    @cached_property
    def transfer(self) -> Transfer:
        """Of the training's batches to the device."""
        return Transfer(self.device)

    def release(self) -> None:
        """Free the wrapped models, to which accelerate keeps references, and buffers of batches; between two
        trainings.
        """
        vars(self).pop("transfer", None)
        self.accelerator.free_memory()


def start(
    *, precision: str, device: str, processes: int, trackers: tuple[str, ...] = (), folder: Path | None = None
) -> Runtime:
    """Join the other processes and choose the precision.

    Args:
        precision: "auto", "bf16", "float32", "tf32" or "float64".
        device: "auto", "cpu" or "cuda".
        processes: how many the recipe asks for.
        trackers, folder: accelerate's trackers and where they write.

    Raises:
        LaunchError: the number of processes is not the recipe's, the device cannot do the precision, or a
            tracker is missing.
    """
    cpu, chosen = _device_and_precision(device, precision)
    if lacking := sorted({*trackers} - {str(name) for name in get_available_trackers()}):
        raise LaunchError(
            f"log.trackers: {', '.join(lacking)} is not installed here, or unknown to accelerate"
        )
    AcceleratorState._reset_state()
    accelerator = Accelerator(
        cpu=cpu,
        mixed_precision="bf16" if chosen == "bf16" else "no",
        log_with=list(trackers) or None,
        project_dir=folder,
    )
    if accelerator.num_processes != processes:
        raise LaunchError(
            f"the recipe asks for {processes} processes (machine.processes), {accelerator.num_processes} "
            f"were started"
        )
    return Runtime(accelerator, chosen)


def alone(*, precision: str, device: str) -> Computation:
    """How a process computes that has no peers, so that it needs no `Runtime`: with the device and the
    precision of one.

    Args, Raises: as `start`.
    """
    cpu, chosen = _device_and_precision(device, precision)
    return Computation(torch.device("cpu" if cpu else "cuda"), chosen)


def _device_and_precision(device: str, precision: str) -> tuple[bool, str]:
    """Whether the CPU computes, and the precision."""
    if device == "cuda" and not torch.cuda.is_available():
        raise LaunchError(
            "machine.device = 'cuda': PyTorch finds no GPU here (`vitctl doctor` tells why); use 'auto'"
        )
    cpu = device == "cpu" or not torch.cuda.is_available()
    chosen = best_precision(cpu) if precision == "auto" else precision
    if chosen == "bf16" and not cpu and not torch.cuda.is_bf16_supported():
        raise LaunchError(
            "machine.precision = 'bf16': this GPU has no bf16; set machine.precision to 'float32' or 'auto'"
        )
    if chosen == "tf32" and (cpu or not torch.cuda.is_tf32_supported()):
        raise LaunchError(
            "machine.precision = 'tf32': needs an NVIDIA GPU of 2020 or later; set machine.precision to "
            "'float32' or 'auto'"
        )
    # Convolutions use it by torch's default, matrix products do not.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = chosen == "tf32"
    return cpu, chosen


def best_precision(cpu: bool) -> str:
    """bf16 where the device multiplies it fast (CUDA with bf16, CPUs with AMX or avx512_bf16), float32
    elsewhere.
    """
    if not cpu:
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "float32"
    return "bf16" if "amx_bf16" in flags or "avx512_bf16" in flags else "float32"


def seed_step(seed: int, step: int, part: int) -> None:
    """Seed dropout by (seed, step, part), so that a resumed run draws the same masks; the part is a rank, or
    a leaf of a lane.
    """
    torch.manual_seed((seed * MIX + step * 1_000_003 + part) % 2**63)


def num_workers(machine: Machine, runtime: Runtime) -> int:
    """Return the loader processes of each process: machine.workers, up to 8 with a GPU, else half of the cores."""
    return loader_workers(machine, runtime.device, runtime.num_processes)


def loader_workers(machine: Machine, device: torch.device, num_processes: int) -> int:
    """Return the same for a process without a `Runtime`."""
    if machine.workers >= 0:
        return machine.workers
    cores = os.cpu_count() or 1
    if device.type == "cuda":
        return min(8, cores // min(num_processes, max(1, torch.cuda.device_count())))
    return max(1, min(8, cores // 2))
