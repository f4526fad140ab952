"""FSDP2: parameters, gradients, optimizer state and checkpoints are sharded over the processes.

The result is that of DDP: weights are gathered in the type of the parameters, and autocast converts them. It
is bit-identical if the weights that autocast would convert are gathered in bf16, which only converts them
earlier.
"""

import hashlib
import math
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor, nn

from vitctl.models.blocks import Block
from vitctl.models.kernels import Head, Linear

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


def shard(
    model: nn.Module,
    device: torch.device,
    num_processes: int,
    replicas: int = 1,
    *,
    gathers_bf16: bool = False,
) -> None:
    """Shard the parameters of `model` in place: each outermost block as a unit, then the rest.

    The next block's weights are gathered while a block computes. Call this before building the optimizer.

    Args:
        replicas: copies of the model, each sharded over successive processes (HSDP); gradients are summed
            over the copies.
        gathers_bf16: gather the linear layers of blocks in bf16, for a model that runs under bf16 autocast.
            Their gradients are summed in float32. What autocast leaves in float32, such as norms and the
            head, is gathered in float32, once for all blocks.
    """
    # Imported here because it takes longer than all other imports of a run on one device, torch excepted.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if replicas > 1:
        mesh = init_device_mesh(
            device.type, (replicas, num_processes // replicas), mesh_dim_names=("replicate", "shard")
        )
    else:
        mesh = init_device_mesh(device.type, (num_processes,))
    # Leave inputs to autocast: casting them here would make the residual stream bf16.
    bf16 = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    # The outputs of linear layers become views; torch warns about in-place changes, of which there are none.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    units: list[FSDPModule] = []
    for block in outermost_blocks(model):
        # Layers whose parameters autocast all converts.
        layers: list[nn.Module] = [
            one for one in block.modules() if isinstance(one, Linear) and not isinstance(one, Head)
        ]
        if gathers_bf16 and layers:
            fully_shard(layers, mesh=mesh, reshard_after_forward=True, mp_policy=bf16)
            units.append(cast("FSDPModule", layers[0]))  # the layers share these settings
        else:
            units.append(fully_shard(block, mesh=mesh, reshard_after_forward=True))
    for unit, following in pairwise(units):
        unit.set_modules_to_forward_prefetch([following])
    # By default the root stays gathered until a backward pass, which an evaluation lacks.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)


def outermost_blocks(model: nn.Module) -> list[Block]:
    """Return the blocks of a network that no other block contains."""
    found: list[Block] = []
    for child in model.children():
        found += [child] if isinstance(child, Block) else outermost_blocks(child)
    return found


def is_sharded(model: nn.Module) -> "TypeGuard[FSDPModule]":
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported: nothing is sharded
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)


def synced(model: nn.Module, accelerator: Any, *, now: bool) -> AbstractContextManager[Any]:
    """Within the block backward passes sum their gradients over the processes only if `now`."""
    if is_sharded(model):
        model.set_requires_gradient_sync(now)
        return nullcontext()
    return nullcontext() if now else accelerator.no_sync(model)


def is_part(tensor: Tensor) -> "TypeGuard[DTensor]":
    parts = sys.modules.get("torch.distributed.tensor")
    return parts is not None and isinstance(tensor, parts.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor, sharing memory."""
    return tensor.to_local() if is_part(tensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """Return the full tensor; all processes must call this if it is sharded."""
    return tensor.full_tensor() if is_part(tensor) else tensor


def held(tensor: Tensor) -> tuple[Tensor, int]:
    """Return this process's rows of a tensor, and the number of the first one."""
    if not is_part(tensor):
        return tensor, 0
    [chunk] = cast("Any", tensor).__create_chunk_list__()  # what torch.distributed.checkpoint asks for
    return local(tensor), chunk.offsets[0]


def place_of(tensors: Iterable[Tensor]) -> tuple[int, int, int] | None:
    """Return this process's (replica, part, number of parts); None if no tensor is sharded."""
    sharded = next(filter(is_part, tensors), None)
    if sharded is None:
        return None
    mesh = sharded.device_mesh
    *replica, part = cast("list[int]", mesh.get_coordinate())
    return sum(replica), part, mesh.size(-1)


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK, _CPU_CHUNK = (
    2**22,
    2**15,
)  # words per chunk: at most 64 MiB of temporary memory; on a CPU what fits its cache
_FACTOR = 0x1E3779B97F4A7C15  # odd; spreads the positions in a tensor over all 64 bits


@torch.no_grad()
def sum_of_words(tensor: Tensor, before: int = 0) -> int:
    """Return the sum modulo 2^64 of a tensor's words, each times an odd number from its position.

    The sums of a tensor's parts add up to that of the tensor; `before` counts the words before this part.
    """
    words = tensor.detach().contiguous().flatten().view(_WORDS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    chunk = _CPU_CHUNK if words.device.type == "cpu" else _CHUNK
    for first in range(0, len(words), chunk):
        part = words[first : first + chunk].to(torch.int64)
        places = torch.arange(before + first + 1, before + first + 1 + len(part), device=words.device)
        total += (part * (places * _FACTOR | 1)).sum()
    return int(total)


def word_sum(parts: Iterable[tuple[str, Tensor, int]]) -> int:
    """Return one number for rows of named tensors, given with their first row number.

    Modulo 2^64 the numbers of all processes add up to that of the full tensors, however their rows are split.
    """
    total = 0
    for name, tensor, row in parts:
        factor = int.from_bytes(hashlib.sha256(f"{name} {tensor.dtype}".encode()).digest()[:8]) | 1
        total += factor * sum_of_words(tensor, row * math.prod(tensor.shape[1:]))
    return total % 2**64


def read_held(files: Sequence[Path], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read what this process holds from tensor files, full or all parts, from any number of processes.

    `like` has tensors by name, or by the part of a name after a slash. A stored tensor of the same shape
    as its match is read as this process's part of it, any other in full, on the CPU.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(files[0].parent))
    reader.fs.ls = lambda _: [str(file) for file in files]  # type: ignore  # only these files
    found: dict[str, Any] = {}
    for name, stored in reader.read_metadata().state_dict_metadata.items():
        whole, known = cast("Any", stored), cast("Any", like.get(name.rpartition("/")[2]))
        dtype = whole.properties.dtype
        is_known = known is not None and known.shape == whole.size
        found[name] = (
            torch.empty_like(known, dtype=dtype) if is_known else torch.empty(whole.size, dtype=dtype)
        )
    with warnings.catch_warnings(action="ignore"):  # intended: no process waits for another
        load(found, storage_reader=reader, no_dist=True)
    return found


def like(whole: Tensor, reference: Tensor) -> Tensor:
    """Shard and place a full tensor, the same on every process, like `reference`; sharded ones stay."""
    placed = whole.to(reference.device, reference.dtype)
    if not is_part(reference) or is_part(whole):
        return placed
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(placed, reference.device_mesh, reference.placements, src_data_rank=None)
