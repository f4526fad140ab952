"""Several processes find each other, prove that they can add numbers, and say where they are.

Words go from CPU to CPU by gloo, beside NCCL where there are GPUs.
"""

import os
import socket
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from vitctl.errors import LaunchError

JOIN_SECONDS, CHECK_SECONDS, FIRST_NCCL_SECONDS = 600.0, 5.0, 60.0
TEXT_BYTES, _NAME_BYTES = 2000, 200


def join(*, cpu: bool, seconds: float = JOIN_SECONDS) -> None:
    """Meet the other processes at MASTER_ADDR:MASTER_PORT, unless that is done.

    Args:
        cpu: compute on the CPU even where there are GPUs.
        seconds: to wait for the others, and for each later operation.

    Raises:
        LaunchError: not all came.
    """
    if dist.is_initialized():
        return
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if not cpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    try:
        backend, limit = "gloo" if cpu else "cpu:gloo,cuda:nccl", timedelta(seconds=seconds)
        if _store_outlives_processes():
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            kept = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, False, limit)
            store = dist.PrefixStore(f"restart_{os.environ['TORCHELASTIC_RESTART_COUNT']}", kept)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
        else:
            dist.init_process_group(backend, timeout=limit)
    except (RuntimeError, ValueError) as error:
        raise LaunchError(
            f"process {os.environ.get('RANK')} on {socket.gethostname()}: the {os.environ.get('WORLD_SIZE')} processes did not "
            f"all meet at {place} within {seconds:.0f} s ({str(error).splitlines()[0][:200]}); see that all were started and "
            "that every node reaches that address"
        ) from error


def _store_outlives_processes() -> bool:
    """Whether torchrun keeps what the processes tell each other when it starts them again.

    They would read the addresses of those before them, and wait for ever or be refused. The number of restarts tells them
    apart on one machine; torchruns of several count differently.
    """
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return kept and os.environ.get("GROUP_WORLD_SIZE") == "1" and "TORCHELASTIC_RESTART_COUNT" in os.environ


def check_sum(*, cpu: bool, seconds: float = CHECK_SECONDS) -> None:
    """Add one number of each process: a network that does not carry it is found now, not in the first update.

    Raises:
        LaunchError: there was no sum in time, or a wrong one.
    """
    total = torch.ones(1, device="cpu" if cpu else "cuda")
    limit = seconds if cpu else FIRST_NCCL_SECONDS
    try:
        work = dist.all_reduce(total, async_op=True)
        if cpu:
            work.wait(timedelta(seconds=limit))
        done = cpu or _completes(work, limit)
    except RuntimeError:
        done = False
    if not done or int(total) != dist.get_world_size():
        raise LaunchError(
            f"process {dist.get_rank()} on {socket.gethostname()}: {dist.get_world_size()} processes met, but could not add "
            f"a number within {limit:.0f} s; a process hangs, or the network between the nodes is blocked: check firewalls and "
            "GLOO_SOCKET_IFNAME / NCCL_SOCKET_IFNAME"
        )


def _completes(work: dist.Work, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not work.is_completed() and time.monotonic() < until:
        time.sleep(0.01)
    return bool(work.is_completed())


def first_text(text: str) -> str:
    """What the first process says, cut after 2,000 bytes, on every process."""
    said = torch.zeros(TEXT_BYTES, dtype=torch.uint8)
    content = text.encode()[:TEXT_BYTES]
    if content:
        said[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    dist.broadcast(said, src=0)
    return bytes(said.tolist()).rstrip(b"\0").decode(errors="replace")


def node_lines(*, cpu: bool) -> list[str]:
    """One line for each node: its name, processes and device; the same on every process."""
    device = f"CPU, {torch.get_num_threads()} threads each" if cpu else torch.cuda.get_device_name()
    own = f"{socket.gethostname()}\t{device}".encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
    sent = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    texts = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    dist.all_gather(texts, sent)
    nodes: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        nodes.setdefault(bytes(text.tolist()).rstrip(b"\0").decode(errors="replace"), []).append(rank)
    lines = []
    for node, ranks in nodes.items():
        host, device = node.split("\t")
        lines.append(f"node {host}: processes {ranks[0]} to {ranks[-1]}, {device}")
    return lines
