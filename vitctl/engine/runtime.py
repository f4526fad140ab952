"""Distributed runtime: joining, collectives, device, precision, batch transfer to a GPU, and trackers."""

import hashlib
import json
import os
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn

from vitctl.data.loader.batches import Batch
from vitctl.engine.journal import LOG, never_raising, run_of
from vitctl.engine.preemption import StopFlag, Stopped, say
from vitctl.engine.sharding import is_sharded
from vitctl.errors import CheckpointError, LaunchError
from vitctl.models.flops import bf16_tflops
from vitctl.recipe.schema import Machine, TrainRecipe
from vitctl.recipe.write import flat, toml_value
from vitctl.system.address import LOOPBACK
from vitctl.system.process import HERE, forget_ranks, keep_freed_memory, usable_cores
from vitctl.system.screen import aloud, stay_silent
from vitctl.system.text import count_text, one_line

_cuda: Any = torch.cuda  # only partly typed


@dataclass(frozen=True)
class SentBatch(Batch):
    """A batch with a copy on the device, `on_device`, which is valid until the next batch is requested."""

    on_device: Batch | None = None


def given(batch: Batch) -> Batch:
    """Return the batch to feed to a network: the copy on the device if a `Transfer` made one."""
    return (isinstance(batch, SentBatch) and batch.on_device) or batch


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a small tensor on the device; a copy to a GPU does not block the host."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(eq=False)
class _Buffer:
    """Device memory for one batch, with the events after which it may be read and overwritten."""

    tensors: list[Tensor]
    free: Any
    ready: Any = None


class Transfer:
    """Copies batches to a device ahead of their use. Keep one per loop: its two buffers are reused.

    `copies` defaults to whether the device is a GPU.
    """

    def __init__(self, device: torch.device, *, copies: bool | None = None) -> None:
        self._device = device
        self._copies = device.type == "cuda" if copies is None else copies
        self._stream: Any = None
        self._buffers: dict[tuple[Any, ...], deque[_Buffer]] = {}
        self._taken: list[_Buffer] = []  # sent and still in use

    @contextmanager
    def ahead(self, batches: Iterable[Batch]) -> Iterator[Iterator[Batch]]:
        """Within the block, iterate over the batches, each with a copy on the device; see `given`.

        One batch is read ahead from `batches`. The block may end before the last batch.
        """
        if not self._copies:
            yield iter(batches)
            return
        assert not self._taken, "one loop at a time uses the buffers"
        try:
            yield self._coming(batches)
        finally:
            for buffer in self._taken:
                _cuda.current_stream(self._device).wait_event(buffer.ready)
                self._free(buffer)
            self._taken.clear()

    def _coming(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        waiting: list[tuple[SentBatch, _Buffer]] = []
        for batch in batches:
            waiting.append(self._send(batch))
            if len(waiting) == 2:
                yield from self._used(*waiting.pop(0))
        for pair in waiting:
            yield from self._used(*pair)

    def _used(self, batch: SentBatch, buffer: _Buffer) -> Iterator[Batch]:
        _cuda.current_stream(self._device).wait_event(buffer.ready)
        yield batch
        self._free(buffer)
        self._taken.remove(buffer)

    def _free(self, buffer: _Buffer) -> None:
        buffer.free = _cuda.current_stream(self._device).record_event()

    def _send(self, batch: Batch) -> tuple[SentBatch, _Buffer]:
        parts = [batch] if batch.neighbour is None else [batch, batch.neighbour]
        tensors = [_pinned(tensor) for part in parts for tensor in (part.images, part.labels, part.weights)]
        buffer = self._buffer(tensors)
        self._stream.wait_event(buffer.free)
        with _cuda.stream(self._stream):
            for own, tensor in zip(buffer.tensors, tensors, strict=True):
                own.copy_(tensor, non_blocking=True)
        buffer.ready = self._stream.record_event()
        self._taken.append(buffer)
        on_device = _of(buffer.tensors[:3], batch.samples)
        if batch.neighbour is not None:
            on_device = replace(on_device, neighbour=_of(buffer.tensors[3:], batch.neighbour.samples))
        return SentBatch(**vars(batch), on_device=on_device), buffer

    def _buffer(self, tensors: list[Tensor]) -> _Buffer:
        """Return the least recently used of the two buffers for this shape, owned by the computing stream."""
        if self._stream is None:
            self._stream = _cuda.Stream(self._device)
        key = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)
        ring = self._buffers.setdefault(key, deque())
        if len(ring) < 2:
            made = [torch.empty_like(tensor, device=self._device) for tensor in tensors]
            ring.append(_Buffer(made, _cuda.current_stream(self._device).record_event()))
        else:
            ring.rotate(-1)
        return ring[-1]


def _of(tensors: list[Tensor], samples: Tensor) -> Batch:
    images, labels, weights = tensors
    return Batch(images, labels, weights, samples)


def _pinned(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_pinned() else tensor.pin_memory()


JOIN_SECONDS, CHECK_SECONDS, FIRST_NCCL_SECONDS = 600.0, 5.0, 60.0
SAY_SECONDS = 4.0  # into the rendezvous, before each process says that it is waiting
_RECORDED = 2000  # operations that NCCL's flight recorder keeps
TEXT_BYTES = 2000
_GPUS = ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS")  # as set by batch systems
_NO_GPUS = ("", "-1", "NoDevFiles")


def join(
    *,
    cpu: bool,
    seconds: float = JOIN_SECONDS,
    group_seconds: float = JOIN_SECONDS,
    recording: Path | None = None,
) -> None:
    """Join the other processes at MASTER_ADDR:MASTER_PORT, unless this process has joined already.

    Args:
        seconds: timeout of the rendezvous.
        group_seconds: timeout of each later operation.
        recording: path prefix, completed by the rank, of the dump that NCCL's flight recorder writes when an
            operation times out; None: torch's default.

    Raises:
        LaunchError: not all processes joined, or could reach this machine.
    """
    if dist.is_initialized():
        return
    check_name()
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if not cpu:
        os.environ.setdefault(*_CUBLAS)
        # A batch system may show each process a single GPU, which has index 0 in all of them.
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % max(1, torch.cuda.device_count()))
    if recording is not None:
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(_RECORDED))
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(recording))
    began = time.monotonic()
    text = (
        f"process {os.environ.get('RANK')}: waiting for the {os.environ.get('WORLD_SIZE')} processes at "
        f"{place}, for at most {seconds:g} s"
    )
    waiting = threading.Timer(SAY_SECONDS, say, (text, aloud()))
    waiting.daemon = True
    waiting.start()
    try:
        limit = timedelta(seconds=group_seconds)
        store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=seconds)))
        if _store_outlives_processes():
            store = dist.PrefixStore(f"restart_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        backend = "gloo" if cpu else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    except (RuntimeError, ValueError) as error:
        raise LaunchError(
            f"process {os.environ.get('RANK')} on {socket.gethostname()}: the "
            f"{os.environ.get('WORLD_SIZE')} processes did not all connect to {place} in "
            f"{time.monotonic() - began:.0f} s ({str(error).splitlines()[0][:200]})",
            fix=(
                "check that all were started and that every node can reach that address, or raise "
                f"machine.start_timeout = {seconds:g}"
            ),
        ) from error
    finally:
        waiting.cancel()
    stay_silent()


def check_name() -> None:
    """Check that the other machines reach this one by its name, of which gloo sends them the address.

    Raises:
        LaunchError: it has none, or that of the loopback, where they would wait for themselves.
    """
    size = os.environ.get("WORLD_SIZE")
    is_alone = os.environ.get("LOCAL_WORLD_SIZE", size) == size or os.environ.get("MASTER_ADDR") in LOOPBACK
    if is_alone or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    name, what = socket.gethostname(), "has no address"
    with suppress(OSError):
        found = [str(one[4][0]) for one in socket.getaddrinfo(name, None)]  # of IPv4 and IPv6
        is_itself = all(address.startswith("127.") or address == "::1" for address in found)
        what = f"is {found[0]} here, the machine itself" if is_itself else ""
    if what:
        raise LaunchError(
            f"the name of this machine, {name}",
            f"{what}, so that other machines cannot reach it",
            "set GLOO_SOCKET_IFNAME to the interface of their network, such as eth0, or correct /etc/hosts",
        )


def _store_outlives_processes() -> bool:
    """Return whether torchrun keeps the rendezvous store across restarts, whose stale addresses would hang.

    On one machine the restart count serves as a prefix; on several, each torchrun has a different count.
    """
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return kept and os.environ.get("GROUP_WORLD_SIZE") == "1" and "TORCHELASTIC_RESTART_COUNT" in os.environ


# Read when the first context of a process is made: without, cuBLAS may add in another order at each call.
_CUBLAS = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def check_gpus() -> None:
    """Check that every process has a GPU of its own, before NCCL, whose error does not say so.

    Raises:
        LaunchError: two share one; the same message on every process.
    """
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    places = gather_texts(f"{socket.gethostname()} {gpu.uuid}")
    most = Counter(places).most_common(1)[0][1]
    if most > 1:
        raise LaunchError(
            f"machine.processes = {len(places)}",
            f"one GPU, {most} processes; NCCL needs a GPU for each",
            f"set machine.processes to {len(set(places))}",
        )


def check_all_reduce(*, cpu: bool, seconds: float = CHECK_SECONDS) -> None:
    """Sum one number over all processes, so that a network problem shows before the first update.

    Raises:
        LaunchError: the sum timed out or is wrong.
    """
    total = torch.ones(1, device="cpu" if cpu else "cuda")
    limit = seconds if cpu else FIRST_NCCL_SECONDS
    try:
        options = dist.AllreduceOptions()
        # stops gloo's thread too, which the process joins at exit
        options.timeout = timedelta(seconds=limit)
        work = dist.distributed_c10d._get_default_group().allreduce([total], options)
        if cpu:
            work.wait()
        done = cpu or _completes(work, limit)
    except RuntimeError:
        done = False
    if not done or int(total) != dist.get_world_size():
        raise LaunchError(
            f"process {dist.get_rank()} on {socket.gethostname()}: {dist.get_world_size()} processes met, "
            f"but a test all-reduce failed or took "
            f"more than {limit:.0f} s; a process hangs, or the network between the nodes is blocked: "
            f"check firewalls and "
            "GLOO_SOCKET_IFNAME / NCCL_SOCKET_IFNAME"
        )


def _completes(work: dist.Work, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not work.is_completed() and time.monotonic() < until:
        time.sleep(0.01)
    return bool(work.is_completed())


def broadcast_text(text: str) -> str:
    """Return rank 0's text, cut after 2,000 bytes, on every process."""
    HERE.arrive("a broadcast")
    said = _packed(text)
    dist.broadcast(said, src=0)
    return _unpacked(said)


def gather_texts(text: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """Return each process's text by rank, cut after 2,000 bytes; background threads must pass a `group`."""
    if not dist.is_initialized():
        return [text]
    if group is None:
        HERE.arrive("an exchange of texts")
    own = _packed(text)
    said = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(said, own, group=group)
    return [_unpacked(one) for one in said]


def new_group(count: int) -> Any:
    """Return a gloo group of the first `count` ranks for a background thread; every process calls this."""
    return dist.new_group(list(range(count)), timeout=timedelta(days=1), backend="gloo")


def _packed(text: str) -> torch.Tensor:
    content = text.encode()[:TEXT_BYTES]
    return torch.frombuffer(bytearray(content.ljust(TEXT_BYTES, b"\0")), dtype=torch.uint8)


def _unpacked(said: torch.Tensor) -> str:
    return bytes(said.tolist()).rstrip(b"\0").decode(errors="replace")


@contextmanager
def raised_on_all() -> Iterator[None]:
    """Within the block, re-raise a CheckpointError of any process on all; the lowest rank's takes precedence.

    All processes must enter the block together.
    """
    problem = ""
    try:
        yield
    except CheckpointError as error:
        problem = f"{error.passes:d}{error}"
    for text in gather_texts(problem):
        if text:
            raise CheckpointError(text[1:]).passing(text[0] == "1")


def check_same(facts: Mapping[str, str], fix: str) -> None:
    """Check that the facts of all processes equal those of rank 0; `fix` is what the user can do.

    `facts`: name for the message -> content, or a digest of it; the same names on every process.

    Raises:
        LaunchError: names the first process that differs and the facts; the same message on every process.
    """
    own = {name: hashlib.sha256(content.encode()).hexdigest()[:12] for name, content in facts.items()}
    first, *others = (json.loads(said) for said in gather_texts(json.dumps([socket.gethostname(), own])))
    for rank, (host, theirs) in enumerate(others, start=1):
        if differing := [name for name in own if theirs.get(name) != first[1].get(name)]:
            raise LaunchError(
                f"process {rank} on {host} has different {', '.join(differing)} than process 0 on "
                f"{first[0]}; nothing was computed "
                f"with them: {fix}"
            )


def node_lines(*, cpu: bool) -> list[str]:
    """Return one line per node: host name, ranks and device; the same on every process."""
    device = (
        f"CPU, {count_text(torch.get_num_threads(), 'thread')} each" if cpu else torch.cuda.get_device_name()
    )
    nodes: dict[tuple[str, ...], list[int]] = {}
    for rank, text in enumerate(gather_texts(f"{socket.gethostname()}\t{device}")):
        nodes.setdefault(tuple(text.split("\t")), []).append(rank)
    return [f"node {host}: processes {ranks[0]} to {ranks[-1]}, {of}" for (host, of), ranks in nodes.items()]


MIX = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Computation:
    """Device and precision of a process: "bf16", "float32", "tf32" or "float64"."""

    device: torch.device
    precision: str

    @property
    def dtype(self) -> torch.dtype:
        """Type of the parameters: master weights stay float32 under bf16."""
        return torch.float64 if self.precision == "float64" else torch.float32

    @property
    def product_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else self.dtype

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for forward passes that do not go through the wrapped model's `forward`."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.precision == "bf16" else nullcontext()

    def normaliser(self, mean: Sequence[float], std: Sequence[float]) -> "Normaliser":
        """Return a normaliser for these means and deviations of the three colours (pixels 0..1)."""
        return Normaliser(self, mean, std)


class Normaliser:
    """Moves uint8 images `[B, 3, S, S]` to the device and normalises them there: (x / 255 - mean) / std.

    `mean` and `std` are sent once, because a copy from pageable memory blocks the host.
    """

    def __init__(self, computation: Computation, mean: Sequence[float], std: Sequence[float]) -> None:
        self._device, self._dtype = computation.device, computation.dtype
        self._mean, self._std = self._constant(mean), self._constant(std)
        self._most = torch.full((), 255.0, dtype=self._dtype, device=self._device)

    def __call__(self, images: Tensor) -> Tensor:
        on_device = images.to(self._device, non_blocking=True)
        return (on_device / self._most).sub_(self._mean).div_(self._std)

    @torch.inference_mode(False)
    def _constant(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=self._dtype, device=self._device).view(1, 3, 1, 1)


class Fetched:
    """Numbers that are being copied from the device to the host without blocking it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._arrived: Any = None
        if tensor.device.type == "cuda":
            self._tensor = tensor.to("cpu", non_blocking=True)
            cuda: Any = torch.cuda  # only partly typed
            self._arrived = cuda.Event()
            self._arrived.record()

    def wait(self) -> Tensor:
        """Return the numbers on the host, once the work queued on the device before the copy is done."""
        if self._arrived is not None:
            HERE.waits_for_device = True
            self._arrived.synchronize()
            HERE.waits_for_device = False
        return self._tensor


def moment(device: torch.device) -> Any:
    """Return the time, or on a GPU an event at the end of the work queued so far. Never blocks."""
    if device.type != "cuda":
        return time.perf_counter()
    event = _cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Any, end: Any) -> float:
    """Return the seconds between two moments, both of which must have passed."""
    return float(end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1e3)


# Parts of a step. The exchange is what the backward pass does not hide: its wait for the other processes.
DATA, FORWARD, BACKWARD, EXCHANGE, OPTIMIZER = "data", "forward", "backward", "exchange", "optimizer"
PARTS = (DATA, FORWARD, BACKWARD, EXCHANGE, OPTIMIZER)
Stamps = list[tuple[str, Any]]  # (part, the moment when it began); the last one ends the step


class Clock:
    """Stamps where the parts of a step begin, once it is `named` also as regions of torch's profiler.

    On a GPU they are events in its stream: there is no device synchronisation, and the host's waits count
    only while the device is idle.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stamps, self._regions = device, Stamps(), ExitStack()
        self._names_in = 0  # thread, in which a region ends as it began

    def switch(self, part: str) -> None:
        """Count the time from here on as `part`."""
        self._stamps.append((part, moment(self._device)))
        if self._names_in == threading.get_ident():
            self._regions.close()
            if part:
                self._regions.enter_context(torch.profiler.record_function(part))

    def named(self, is_named: bool) -> None:
        self._regions.close()
        self._names_in = threading.get_ident() * is_named

    def taken(self) -> Stamps:
        """Return the stamps since the last call, the last of now."""
        self.switch("")
        found, self._stamps = self._stamps, Stamps()
        return found


def part_seconds(stamps: Stamps) -> dict[str, float]:
    """Return the seconds of each part, once the last moment has passed."""
    seconds = dict.fromkeys(PARTS, 0.0)
    for (part, begin), (_, end) in pairwise(stamps):
        seconds[part] += seconds_between(begin, end)
    return seconds


_SLOW, _SLOW_SECONDS = 0.1, 1.0  # least share of the time, and least seconds


def slowest(seconds: Sequence[Tensor], length: float) -> dict[str, Any]:
    """Return the log fields of the process that the others wait for; empty if the delay is small.

    The fields are its rank, whether it is late with "data" or "computation", and the share of `length`
    lost. Each process is compared with the median. Delays below a tenth of the time or below a second are
    ignored. `seconds` holds, for each rank, those of the parts of its steps, in the order of `PARTS`.
    """
    if len(seconds) < 2:
        return {}
    parts = torch.stack([*seconds])
    # Both passes as measured: only sharded ones wait for others.
    table = torch.stack([parts[:, 0], parts[:, 1] + parts[:, 2]], dim=1)
    more = table - table.median(dim=0).values  # the lower of two
    rank = int(more.sum(dim=1).argmax())
    data, computation = more[rank].tolist()
    if (late := data + computation) <= max(_SLOW_SECONDS, _SLOW * length):
        return {}
    what = "data" if data >= computation else "computation"
    return {"slowest": {"rank": rank, "what": what, "share": round(min(1.0, late / length), 4)}}


@dataclass(frozen=True)
class Runtime(Computation):
    """A process of a distributed job: its device and precision, and its collectives."""

    accelerator: Accelerator

    @property
    def rank(self) -> int:
        return int(self.accelerator.process_index)

    @property
    def num_processes(self) -> int:
        return int(self.accelerator.num_processes)

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run's files."""
        return bool(self.accelerator.is_main_process)

    @property
    def peak_flops(self) -> float:
        """Peak bf16 FLOP/s of this process's device; 0 if unknown or if another precision is used."""
        if self.device.type != "cuda" or self.precision != "bf16":
            return 0.0
        return 1e12 * bf16_tflops(torch.cuda.get_device_name(self.device))

    @cached_property
    def nodes(self) -> tuple[int, Any, Any] | None:
        """Processes per node, the group of this node, and the group of this local rank across nodes.

        None with one node, with one process per node, or if the nodes differ.
        """
        size, count = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), self.num_processes
        places = gather_texts(f"{os.environ.get('LOCAL_RANK')} of {size}")
        alike = [f"{rank % size} of {size}" for rank in range(count)]
        if size in (1, count) or count % size or places != alike:
            return None
        first, place = self.rank - self.rank % size, self.rank % size
        limit = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).options._timeout
        within, between = (
            dist.new_group([*ranks], timeout=limit, use_local_synchronization=True)
            for ranks in (range(first, first + size), range(place, count, size))
        )
        return size, within, between

    def add(self, own: Tensor) -> Tensor:
        """Sum element-wise over all processes, in place, without device synchronisation."""
        HERE.arrive("a sum")
        if self.num_processes > 1:
            torch.distributed.all_reduce(own)
        return own

    def sum(self, values: list[float]) -> list[float]:
        """Sum element-wise over all processes in float64; identical on each, no device synchronisation."""
        found: list[float] = self.add(torch.tensor(values, dtype=torch.float64)).tolist()
        return found

    def sum_words(self, words: np.ndarray) -> np.ndarray:
        """Sum uint64 `[n]` element-wise over all processes modulo 2^64; identical on each."""
        found: np.ndarray = self.add(torch.tensor(words.view(np.int64))).numpy().view(np.uint64)
        return found

    def gather(self, own: Tensor, *, everywhere: bool) -> list[Tensor]:
        """Return all processes' tensors, of one shape, by rank; on the main process, or `everywhere`."""
        if self.num_processes == 1:
            return [own]
        HERE.arrive("a gather")
        holds, own = everywhere or self.is_main, own.contiguous()
        found = [torch.empty_like(own) for _ in range(self.num_processes if holds else 0)]
        dist.all_gather(found, own) if everywhere else dist.gather(own, found or None)
        return found

    def share(self, part: Tensor) -> Tensor:
        """Return the main process's tensor on every CPU; others pass its shape and type as a meta tensor."""
        if self.num_processes == 1:
            return part
        HERE.arrive("a broadcast")
        part = part.contiguous() if self.is_main else torch.empty_like(part, device="cpu")
        dist.broadcast(part, src=0)
        return part

    def broadcast(self, text: str) -> str:
        return broadcast_text(text) if self.num_processes > 1 else text

    def wait(self) -> None:
        HERE.arrive("a barrier")
        self.accelerator.wait_for_everyone()

    def wrap(self, model: nn.Module, *, ddp: bool = True, always_synced: bool = False) -> nn.Module:
        """Wrap a model on its device for mixed precision, and for DDP unless the model is sharded.

        Gradients are views of DDP's buckets. `always_synced` means that no backward pass runs within
        `no_sync`, on any process: DDP then learns the graph from the first pass (`static_graph`), which
        fails inside torch if that pass does not sync.
        """
        self.accelerator.ddp_handler = DistributedDataParallelKwargs(
            gradient_as_bucket_view=True, static_graph=always_synced
        )
        # The model is on its device already; checking that, accelerate would import all of torch's sharding.
        wrapped: nn.Module = self.accelerator.prepare_model(
            model, device_placement=False, evaluation_mode=is_sharded(model) or not ddp
        )
        return wrapped

    @cached_property
    def clock(self) -> Clock:
        return Clock(self.device)

    @cached_property
    def transfer(self) -> Transfer:
        return Transfer(self.device)

    def release(self) -> None:
        """Free the batch buffers and the wrapped models that accelerate references, between two trainings."""
        vars(self).pop("transfer", None)
        self.accelerator.free_memory()


def stop_together(runtime: Runtime, stop: StopFlag) -> None:
    if runtime.sum([float(stop.raised)])[0]:
        raise Stopped


def start(
    *, precision: str, device: str, processes: int, trackers: tuple[str, ...] = (), folder: Path | None = None
) -> Runtime:
    """Join the other processes and choose the precision.

    Args:
        precision: "auto", "bf16", "float32", "tf32" or "float64".
        device: "auto", "cpu" or "cuda".
        trackers, folder: accelerate's trackers and where they write.

    Raises:
        LaunchError: the number of processes differs from the recipe's, the device does not support the
            precision, or a tracker is not installed.
    """
    cpu, chosen = device_and_precision(device, precision, trackers)
    AcceleratorState._reset_state()
    if processes > 1 and "RANK" in os.environ:
        join(cpu=cpu)
    elif not dist.is_initialized() and "TORCHELASTIC_RUN_ID" not in os.environ:  # torchrun may start one
        forget_ranks()
    state = PartialState(cpu=cpu)
    if state.device.index is not None:  # accelerate uses this as the GPU index
        state.local_process_index = state.device.index
    accelerator = Accelerator(
        cpu=cpu,
        mixed_precision="bf16" if chosen == "bf16" else "no",
        log_with=list(trackers) or None,
        project_dir=folder,
    )
    if accelerator.num_processes != processes:
        raise LaunchError(
            f"machine.processes = {processes}",
            f"{accelerator.num_processes} processes were started",
            f"start {processes}, or set machine.processes to {accelerator.num_processes}",
        )
    return Runtime(torch.device(accelerator.device), chosen, accelerator)


def alone(*, precision: str, device: str) -> Computation:
    """Return the device and precision of a process without peers. Arguments and errors as for `start`."""
    cpu, chosen = device_and_precision(device, precision)
    if cpu:
        keep_freed_memory()
    return Computation(torch.device("cpu" if cpu else "cuda"), chosen)


def device_and_precision(device: str, precision: str, trackers: tuple[str, ...] = ()) -> tuple[bool, str]:
    """Return whether to compute on the CPU, and the precision; arguments and errors as for `start`."""
    if lacking := sorted({*trackers} - {str(name) for name in get_available_trackers()}):
        raise LaunchError(
            "log.trackers", f"{', '.join(lacking)} is not installed here, or unknown to accelerate"
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise LaunchError(
            "machine.device = 'cuda'", "PyTorch finds no GPU (`vitctl doctor` shows why)", "use 'auto'"
        )
    cpu = device == "cpu" or not torch.cuda.is_available()
    given = next((name for name in _GPUS if os.environ.get(name, "") not in _NO_GPUS), "")
    if given and cpu and device == "auto":
        raise LaunchError(
            f"{given}={one_line(os.environ[given][:50])} gives this process GPUs, and PyTorch "
            "finds none (`vitctl doctor` shows why)",
            fix="correct the driver or the installation, or set machine.device to 'cpu'",
        )
    chosen = best_precision(cpu) if precision == "auto" else precision
    if chosen == "bf16" and not cpu and not torch.cuda.is_bf16_supported():
        raise LaunchError(
            "machine.precision = 'bf16'",
            "this GPU has no bf16",
            "set machine.precision to 'float32' or 'auto'",
        )
    if chosen == "tf32" and (cpu or not torch.cuda.is_tf32_supported()):
        raise LaunchError(
            "machine.precision = 'tf32'",
            "needs an NVIDIA GPU of 2020 or later",
            "set machine.precision to 'float32' or 'auto'",
        )
    if not cpu:
        os.environ.setdefault(*_CUBLAS)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True  # torch's default
    # By default torch uses TF32 for convolutions but not for matrix products.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = chosen == "tf32"
    return cpu, chosen


def best_precision(cpu: bool) -> str:
    """Return "bf16" if it is fast (CUDA with bf16, CPUs with AMX or avx512_bf16), else "float32"."""
    if not cpu:
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "float32"
    return "bf16" if "amx_bf16" in flags or "avx512_bf16" in flags else "float32"


def seed_step(seed: int, step: int, part: int) -> None:
    """Seed dropout by (seed, step, part), so that a resume draws the same masks; part: a rank or a leaf."""
    number = (seed * MIX + step * 1_000_003 + part) % 2**63
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.manual_seed(number)
    else:  # `torch.manual_seed` would note the stack of calls for each kind of GPU that is not there
        torch.default_generator.manual_seed(number)


def num_workers(machine: Machine, device: torch.device, num_processes: int) -> int:
    """Return the loader processes per process: machine.workers, up to 8 with a GPU, or half the cores."""
    if machine.workers >= 0:
        return machine.workers
    cores = usable_cores()
    if device.type == "cuda":
        return min(8, cores // min(num_processes, max(1, torch.cuda.device_count())))
    return max(1, min(8, cores // 2))


TRACKING = "tracking"  # folder in the run folder for trackers that write files


@contextmanager
def tracking(runtime: Runtime, recipe: TrainRecipe, folder: Path) -> Iterator[None]:
    """Within the block, send logged values to log.trackers, as a run of project vitctl named by folder.

    Trackers that write files write them to FOLDER/tracking. `recipe` is that of this training, not of the
    sweep or VTAB run around it.
    """
    if not recipe.log.trackers:
        yield
        return
    accelerator = runtime.accelerator
    files, place = folder / TRACKING, folder.resolve()
    name = str(place.relative_to(run_of(place).parent))  # such as NAME/sweep/lr_0.01
    accelerator.project_configuration.logging_dir = str(files)
    if runtime.is_main:
        files.mkdir(parents=True, exist_ok=True)
    accelerator.init_trackers(
        "vitctl",
        config={"folder": str(folder), **tracker_config(recipe)},
        init_kwargs={
            "wandb": {"name": name, "dir": str(files)},
            "mlflow": {"run_name": name},
            "trackio": {"name": name},
        },
    )
    for tracker in accelerator.trackers:
        log = folder / LOG if runtime.is_main else None
        tracker.log = never_raising(tracker.log, log, f"{tracker.name} cannot be written any more")
    try:
        yield
    finally:
        for tracker in accelerator.trackers:
            with suppress(Exception):  # a failing tracker must neither end the run nor hide its error
                tracker.finish()
        accelerator.trackers.clear()


def tracker_config(recipe: TrainRecipe) -> dict[str, bool | int | float | str]:
    """Return a recipe's values under their dotted keys; lists become TOML text, unset values ""."""
    return {
        key: value if isinstance(value, bool | int | float | str) else toml_value(value)
        for key, value in flat(recipe).items()
    }
