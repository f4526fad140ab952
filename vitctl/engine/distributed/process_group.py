"""The process group: rendezvous, a first all-reduce as a test, one line per node, and checks that all
processes agree.

Text is exchanged between CPUs by gloo; tensors on GPUs by NCCL.
"""

import hashlib
import json
import os
import socket
import time
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from vitctl.errors import CheckpointError, LaunchError
from vitctl.system.waiting import HERE

JOIN_SECONDS, CHECK_SECONDS, FIRST_NCCL_SECONDS = 600.0, 5.0, 60.0
TEXT_BYTES = 2000


def join(*, cpu: bool, seconds: float = JOIN_SECONDS) -> None:
    """Join the other processes at MASTER_ADDR:MASTER_PORT, unless this process has joined already.

    Args:
        cpu: compute on the CPU even where there are GPUs.
        seconds: timeout of the rendezvous, and of each later operation.

    Raises:
        LaunchError: not all processes joined.
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
            kept = dist.TCPStore(
                os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, False, limit
            )
            store = dist.PrefixStore(f"restart_{os.environ['TORCHELASTIC_RESTART_COUNT']}", kept)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
        else:
            dist.init_process_group(backend, timeout=limit)
    except (RuntimeError, ValueError) as error:
        raise LaunchError(
            f"process {os.environ.get('RANK')} on {socket.gethostname()}: the {os.environ.get('WORLD_SIZE')} "
            f"processes did not "
            f"all meet at {place} within {seconds:.0f} s ({str(error).splitlines()[0][:200]}); check that "
            f"all were started and "
            "that every node can reach that address"
        ) from error


def _store_outlives_processes() -> bool:
    """Whether torchrun keeps the store of the rendezvous when it restarts the processes.

    They would read the addresses of the earlier processes, and wait for ever or be refused. On one machine
    the number of restarts serves as a prefix; with several, each torchrun has its own count.
    """
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return kept and os.environ.get("GROUP_WORLD_SIZE") == "1" and "TORCHELASTIC_RESTART_COUNT" in os.environ


def check_all_reduce(*, cpu: bool, seconds: float = CHECK_SECONDS) -> None:
    """Sum one number over all processes: a network problem shows here, and not in the first update.

    Raises:
        LaunchError: there was no result in time, or a wrong one.
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
            f"process {dist.get_rank()} on {socket.gethostname()}: {dist.get_world_size()} processes met, "
            f"but could not add "
            f"a number within {limit:.0f} s; a process hangs, or the network between the nodes is blocked: "
            f"check firewalls and "
            "GLOO_SOCKET_IFNAME / NCCL_SOCKET_IFNAME"
        )


def _completes(work: dist.Work, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not work.is_completed() and time.monotonic() < until:
        time.sleep(0.01)
    return bool(work.is_completed())


def broadcast_text(text: str) -> str:
    """The text of rank 0, cut after 2,000 bytes, on every process."""
    HERE.arrive()
    said = _packed(text)
    dist.broadcast(said, src=0)
    return _unpacked(said)


def gather_texts(text: str) -> list[str]:
    """The text of each process, cut after 2,000 bytes, by rank, on every process; without a process group its
    own.
    """
    if not dist.is_initialized():
        return [text]
    HERE.arrive()
    own = _packed(text)
    said = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(said, own)
    return [_unpacked(one) for one in said]


def _packed(text: str) -> torch.Tensor:
    content = text.encode()[:TEXT_BYTES]
    return torch.frombuffer(bytearray(content.ljust(TEXT_BYTES, b"\0")), dtype=torch.uint8)


def _unpacked(said: torch.Tensor) -> str:
    return bytes(said.tolist()).rstrip(b"\0").decode(errors="replace")


def raise_on_all(problem: str) -> None:
    """Raise on every process the problem of the lowest rank that has one; "" is no problem.

    Raises:
        CheckpointError: a process has a problem.
    """
    for said in gather_texts(problem):
        if said:
            raise CheckpointError(said)


def check_same(facts: Mapping[str, str], fix: str) -> None:
    """Compare the facts of each process with those of rank 0, and end all processes where they differ.

    Args:
        facts: name for the message -> content, or a digest of it; the same names on every process.
        fix: what the user can do.

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
    """One line for each node: host name, ranks and device; the same on every process."""
    device = f"CPU, {torch.get_num_threads()} threads each" if cpu else torch.cuda.get_device_name()
    nodes: dict[str, list[int]] = {}
    for rank, text in enumerate(gather_texts(f"{socket.gethostname()}\t{device}")):
        nodes.setdefault(text, []).append(rank)
    lines = []
    for node, ranks in nodes.items():
        host, device = node.split("\t")
        lines.append(f"node {host}: processes {ranks[0]} to {ranks[-1]}, {device}")
    return lines
