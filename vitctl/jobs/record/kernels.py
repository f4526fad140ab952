"""How layers are computed, by a rule, and how many images go through them at once, measured once and kept:
choices of [machine].
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitctl.data.loader.batches import Batch
from vitctl.engine.distributed.micro_batch import fits_everywhere, largest_micro_batch
from vitctl.engine.distributed.runtime import Computation, Runtime
from vitctl.engine.distributed.sharding import is_sharded
from vitctl.engine.journal import write_run_json
from vitctl.errors import LaunchError
from vitctl.jobs.record.kept import Kernels, MicroBatch, read_kept
from vitctl.models.configs import Config, ViTConfig
from vitctl.models.costs import OPTIMIZER_SLOTS
from vitctl.models.kernels.attention import attention_rule, set_attention, used_attention
from vitctl.models.kernels.linear import onednn_problem, set_linear, used_linear
from vitctl.recipe.machine import NetworkMachine, TrainMachine
from vitctl.recipe.schema import TrainRecipe

KERNELS, MICRO_BATCH = "kernels.json", "micro_batch.json"


def choose_kernels(
    machine: NetworkMachine, config: Config, computation: Computation, *, lanes: bool = False
) -> Kernels:
    """Return the kernels of [machine], with 'auto' resolved by a rule: the same for training, scoring and
    predicting.

    The rule knows the kind of device, the precision and the number of tokens; neither load, batch nor
    processor change it.

    Args:
        machine: its attention and linear.
        config: of the network.
        computation: device and precision.
        lanes: the training promises the same bits, which not every fused kernel does.

    Raises:
        LaunchError: machine.linear = 'onednn', and it cannot compute this.
    """
    attention, linear = machine.attention, machine.linear
    dtype, device = computation.product_dtype, computation.device
    if linear == "onednn" and (problem := onednn_problem(dtype, device)):
        raise LaunchError(f"machine.linear = 'onednn': {problem}; set it to 'auto' or 'torch'")
    if attention == "auto":
        attention = (
            attention_rule(device.type, dtype, config.num_tokens)
            if isinstance(config, ViTConfig)
            else "fused"
        )
        if lanes or getattr(config, "position_embedding", "") == "relative":
            attention = "math"
    return Kernels(attention=attention, linear="torch" if linear == "auto" else linear)


def kept_kernels(machine: TrainMachine, runtime: Runtime, run_dir: Path) -> TrainMachine:
    """Return [machine] with the kernels of RUN/kernels.json for 'auto': earlier releases measured them and
    wrote this file.
    """
    file = run_dir / KERNELS
    there = runtime.is_main and file.exists()
    kept = json.loads(runtime.broadcast(read_kept(file, Kernels).model_dump_json() if there else "{}"))
    return machine.model_copy(update={name: kept[name] for name in kept if getattr(machine, name) == "auto"})


def use_kernels(kernels: Kernels) -> None:
    """Compute every model of this process with these."""
    set_attention(kernels.attention)
    set_linear(kernels.linear)


def kernels_used() -> dict[str, str]:
    """The kernels that this process computes with, for a result."""
    return {"attention": used_attention(), "linear": used_linear()}


def choose_micro_batch(
    recipe: TrainRecipe,
    runtime: Runtime,
    run_dir: Path,
    model: nn.Module,
    objective: Callable[..., Tensor],
    batch: Callable[[int], Batch],
    share: int,
) -> int:
    """Images of a forward pass: machine.micro_batch, or what fits, which is measured once and written to
    RUN/micro_batch.json.
    """
    if recipe.machine.micro_batch != -1 or recipe.schedule.lanes:  # leaves are passes of their own size
        return most_images(recipe.machine.micro_batch, share)
    if is_sharded(model):
        raise LaunchError(
            "machine.micro_batch = -1 cannot try what fits with machine.sharding = 'fsdp', where a process "
            "that runs out of memory "
            "blocks the others; set machine.micro_batch, and see `vitctl pretrain --dry-run`"
        )
    device = torch.cuda.get_device_name(runtime.device) if runtime.device.type == "cuda" else "CPU"
    setting = {"share": share, "device": device, "precision": runtime.precision}
    file = run_dir / MICRO_BATCH
    # Rank 0 reads it for all: a process that did not see the file would measure, and wait for the others for
    # ever.
    there = runtime.is_main and file.exists()
    known = json.loads(runtime.broadcast(read_kept(file, MicroBatch).model_dump_json() if there else "{}"))
    setting = json.loads(runtime.broadcast(json.dumps(setting)))
    if {name: known.get(name) for name in setting} == setting:
        return int(known["micro_batch"])
    copies = OPTIMIZER_SLOTS[recipe.optimizer.name] + (recipe.averaging.decay > 0)
    reserve = copies * sum(p.numel() * p.element_size() for p in model.parameters())

    def fits(images: int) -> bool:
        adds_up = runtime.num_processes > 1 or images < share
        return fits_everywhere(runtime, model, objective, batch(images), reserve, adds_up=adds_up)

    found = largest_micro_batch(fits, share)
    if runtime.is_main:
        write_run_json(file, {**setting, "micro_batch": found})
    return found


def most_images(micro_batch: int, share: int) -> int:
    """Images of the largest forward pass of a process with this machine.micro_batch (0 and -1: as many as its
    share).
    """
    return min(micro_batch, share) if micro_batch > 0 else share


def dropout_draws(recipe: TrainRecipe, config: Any, folder: Path) -> dict[str, Any]:
    """What the random draws of dropout and stochastic depth depend on, besides seed and step; empty without
    dropout.

    They are drawn for each forward pass of each process, so that the split of a batch changes the result.
    With lanes it does not.
    """
    if recipe.schedule.lanes or not (getattr(config, "dropout", 0.0) or getattr(config, "drop_path", 0.0)):
        return {}
    machine, file = recipe.machine, folder / MICRO_BATCH
    most = read_kept(file, MicroBatch).micro_batch if file.exists() else machine.micro_batch
    used = most_images(most, -(-recipe.schedule.batch_size // machine.processes))
    return {
        "dropout_draws": {"processes": machine.processes, "micro_batch": used, "compile": machine.compile}
    }
