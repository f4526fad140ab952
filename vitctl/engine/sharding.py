"""FSDP2: parameters, gradients and optimizer state are sharded over the processes; checkpoints are unsharded.

The result is that of DDP: weights are gathered in the type of the parameters, and autocast converts them. It
is the same, bit for bit, where the weights that autocast would convert are gathered in bf16: only when they
are converted differs.
"""

import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor, nn

from vitctl.errors import LaunchError
from vitctl.models.blocks import Block
from vitctl.models.kernels import Head, Linear
from vitctl.models.lora import adapted_layers
from vitctl.recipe.schema import ShardedMachine, TrainMachine

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    from vitctl.engine.runtime import Runtime


def shard_as(machine: TrainMachine, runtime: "Runtime", model: nn.Module, *, probed: bool) -> None:
    """Shard the model where machine.sharding says so.

    Raises:
        LaunchError: the machine cannot, or the model is probed, which calls it for its features only.
    """
    if not (isinstance(machine, ShardedMachine) and machine.sharding == "fsdp"):
        return
    if probed:
        raise LaunchError(
            "fewshot_probe.every_steps needs model features, which machine.sharding = 'fsdp' does not "
            "support; set fewshot_probe.every_steps = 0 or machine.sharding = 'none'"
        )
    gathers_bf16 = machine.sharding_dtype == "bf16"
    if gathers_bf16 and runtime.precision != "bf16":
        raise LaunchError(
            f"machine.sharding_dtype = 'bf16': this run computes in {runtime.precision}, and would lose "
            f"precision; set machine.precision to 'bf16' or machine.sharding_dtype to 'float32'"
        )
    machine.shards(runtime.num_processes)  # raises where they cannot be divided so
    shard(model, runtime.device, runtime.num_processes, machine.sharding_replicas, gathers_bf16=gathers_bf16)


def shard(
    model: nn.Module,
    device: torch.device,
    num_processes: int,
    replicas: int = 1,
    *,
    gathers_bf16: bool = False,
) -> None:
    """Shard the parameters of `model` over the processes, in place: each outermost block as a unit, then the
    rest.

    While a block computes, the weights of the next one are gathered.

    Call it before the optimizer is built on these parameters.

    Args:
        model: on its device.
        device: of this process.
        num_processes: of the job.
        replicas: copies of the model, each sharded over successive processes (HSDP); gradients are added up
            over the copies.
        gathers_bf16: gather the linear layers of blocks in bf16, for a model that runs under bf16 autocast.
            Their gradients are added up in float32. What autocast leaves in float32, such as norms and the
            head, is gathered in float32, once for all blocks.
    """
    # Imported here and not above: that takes longer than all other imports of a run on one device after
    # torch's own.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if replicas > 1:
        mesh = init_device_mesh(
            device.type, (replicas, num_processes // replicas), mesh_dim_names=("replicate", "shard")
        )
    else:
        mesh = init_device_mesh(device.type, (num_processes,))
    # Inputs are left to autocast: cast here, the residual stream would become bf16.
    bf16 = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    # Torch warns of what changes an output in place. The outputs of linear layers are views, and nothing
    # does.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    units: list[FSDPModule] = []
    for block in outermost_blocks(model):
        if gathers_bf16 and (layers := _cast_layers(block)):
            fully_shard(layers, mesh=mesh, reshard_after_forward=True, mp_policy=bf16)
            units.append(cast("FSDPModule", layers[0]))  # they share what is set
        else:
            units.append(fully_shard(block, mesh=mesh, reshard_after_forward=True))
    for unit, following in pairwise(units):
        unit.set_modules_to_forward_prefetch([following])
    # By default the root stays gathered until a backward pass, and after an evaluation there is none.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)


def _cast_layers(block: Block) -> list[nn.Module]:
    """Return the layers of a block of which autocast converts all parameters."""
    return [layer for layer in block.modules() if isinstance(layer, Linear) and not isinstance(layer, Head)]


def outermost_blocks(model: nn.Module) -> list[Block]:
    """Return the blocks of a network that are in no other block."""
    found: list[Block] = []
    for child in model.children():
        found += [child] if isinstance(child, Block) else outermost_blocks(child)
    return found


def is_sharded(model: nn.Module) -> "TypeGuard[FSDPModule]":
    """Return whether `shard` was applied."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported: nothing is sharded
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)


def synced(model: nn.Module, accelerator: Any, *, now: bool) -> AbstractContextManager[Any]:
    """Within the block backward passes sum their gradients over the processes if `now`, else a later pass
    does.
    """
    if is_sharded(model):
        model.set_requires_gradient_sync(now)
        return nullcontext()
    return nullcontext() if now else accelerator.no_sync(model)


def is_part(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Return whether a tensor is sharded, so that this process holds a part of it."""
    parts = sys.modules.get("torch.distributed.tensor")
    return parts is not None and isinstance(tensor, parts.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds, sharing memory."""
    return tensor.to_local() if is_part(tensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """Return the full tensor; where it is sharded, all processes must call this together."""
    return tensor.full_tensor() if is_part(tensor) else tensor


def like(whole: Tensor, reference: Tensor) -> Tensor:
    """Return a full tensor, the same on every process, sharded and placed like `reference`."""
    placed = whole.to(reference.device, reference.dtype)
    if not is_part(reference):
        return placed
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(placed, reference.device_mesh, reference.placements, src_data_rank=None)


def load_full_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Give a model a whole state, of which each process takes its part.

    Weights with adapters stay: they are frozen, and a checkpoint has them merged.
    """
    own = model.state_dict()
    given = {name: like(value, own[name]) if name in own else value for name, value in state.items()}
    model.load_state_dict(given | {name: own[name] for name in adapted_layers(model)})
