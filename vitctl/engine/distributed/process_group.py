"""Several processes find each other, prove that they can add numbers, say where they are, and hold what they have side by side.

Words go from CPU to CPU by gloo, beside NCCL where there are GPUs.
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

JOIN_SECONDS, CHECK_SECONDS, FIRST_NCCL_SECONDS = 600.0, 5.0, 60.0
TEXT_BYTES = 2000


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


def check_all_reduce(*, cpu: bool, seconds: float = CHECK_SECONDS) -> None:
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


def broadcast_text(text: str) -> str:
    """What the first process says, cut after 2,000 bytes, on every process."""
    said = _packed(text)
    dist.broadcast(said, src=0)
    return _unpacked(said)


def gather_texts(text: str) -> list[str]:
    """What each process says, cut after 2,000 bytes, by rank, on every process; of one alone, its own words."""
    if not dist.is_initialized():
        return [text]
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
    """Raise on every process what the first that has a problem says; "" where there is none.

    Raises:
        CheckpointError: some process has a problem.
    """
    for said in gather_texts(problem):
        if said:
            raise CheckpointError(said)


def check_same(facts: Mapping[str, str], mend: str) -> None:
    """Hold what each process has beside what the first has, and end all processes where it differs.

    Args:
        facts: what it is, in words -> its content or a digest of it; the same names on every process.
        mend: what the user can do.

    Raises:
        LaunchError: the first process that differs and in what, the same line on every process.
    """
    own = {name: hashlib.sha256(content.encode()).hexdigest()[:12] for name, content in facts.items()}
    first, *others = (json.loads(said) for said in gather_texts(json.dumps([socket.gethostname(), own])))
    for rank, (host, theirs) in enumerate(others, start=1):
        if differing := [name for name in own if theirs.get(name) != first[1].get(name)]:
            raise LaunchError(
                f"process {rank} on {host} has other {', '.join(differing)} than process 0 on {first[0]}; nothing was computed "
                f"with them: {mend}"
            )


def node_lines(*, cpu: bool) -> list[str]:
    """One line for each node: its name, processes and device; the same on every process."""
    device = f"CPU, {torch.get_num_threads()} threads each" if cpu else torch.cuda.get_device_name()
    nodes: dict[str, list[int]] = {}
    for rank, text in enumerate(gather_texts(f"{socket.gethostname()}\t{device}")):
        nodes.setdefault(text, []).append(rank)
    lines = []
    for node, ranks in nodes.items():
        host, device = node.split("\t")
        lines.append(f"node {host}: processes {ranks[0]} to {ranks[-1]}, {device}")
    return lines
