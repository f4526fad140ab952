"""How layers are computed, and how many images go through them at once: choices of [machine], measured once and kept."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitctl.data.loader.batches import Batch
from vitctl.engine.distributed.micro_batch import fits_everywhere, largest_micro_batch
from vitctl.engine.distributed.runtime import Runtime
from vitctl.engine.distributed.sharding import is_sharded
from vitctl.engine.journal import Journal, write_run_json
from vitctl.errors import LaunchError
from vitctl.jobs.record.kept import Kernels, MicroBatch, read_kept
from vitctl.models.blocks import compile_blocks
from vitctl.models.build import Model
from vitctl.models.configs import Config, ViTConfig
from vitctl.models.costs import OPTIMIZER_SLOTS
from vitctl.models.kernels.attention import choose_attention, set_attention, used_attention
from vitctl.models.kernels.linear import choose_linear, onednn_problem, set_linear, used_linear
from vitctl.recipe.machine import TrainMachine
from vitctl.recipe.schema import TrainRecipe

KERNELS, MICRO_BATCH = "kernels.json", "micro_batch.json"


def choose_kernels(
    machine: TrainMachine,
    runtime: Runtime,
    run_dir: Path,
    model: Model,
    micro_batch: int,
    journal: Journal,
    *,
    measured: bool = True,
) -> Kernels:
    """Set how layers are computed: kernels, activation checkpointing, compilation; returns the kernels.

    They are written to RUN/kernels.json, and where machine.attention or machine.linear is 'auto' a resume uses them again. Unless
    `measured`, 'auto' is what every machine has, because a measurement may end otherwise on another one. The journal
    has a warning where a resume computes with others than before.

    Raises:
        LaunchError: machine.linear = 'onednn', and it cannot compute this.
    """
    file = run_dir / KERNELS
    own = (
        _own_kernels(machine, runtime, file, model.config, micro_batch, measured=measured) if runtime.is_main else None
    )
    kernels = Kernels.model_validate_json(runtime.broadcast(own.model_dump_json() if own else ""))
    if runtime.is_main:
        before = read_kept(file, Kernels) if file.exists() else kernels
        if before != kernels:
            text = f"the kernels were {_names(before)} and are now {_names(kernels)}: from here on results differ by rounding"
            journal.write("warning", step=0, text=text)
        write_run_json(file, kernels.model_dump())
    use_kernels(kernels)
    if machine.checkpoint_blocks:
        model.checkpoint_blocks = True
    if machine.compile:
        compile_blocks(model)
    return kernels


def _names(kernels: Kernels) -> str:
    return f"attention {kernels.attention}, linear {kernels.linear}"


def _own_kernels(
    machine: TrainMachine, runtime: Runtime, file: Path, config: Config, micro_batch: int, *, measured: bool
) -> Kernels:
    """What the recipe says, what the run began with, or what this process measures."""
    attention, linear = machine.attention, machine.linear
    dtype = runtime.computation.product_dtype
    usable = onednn_problem(dtype, runtime.device)
    if linear == "onednn" and usable:
        raise LaunchError(f"machine.linear = 'onednn': {usable}; set it to 'auto' or 'torch'")
    if "auto" in (attention, linear) and measured and file.exists():
        kept = read_kept(file, Kernels)
        attention = kept.attention if attention == "auto" else attention
        linear = kept.linear if linear == "auto" and not usable else linear
    if attention != "auto" and linear != "auto":
        return Kernels(attention=attention, linear=linear)
    if measured:
        found = measured_kernels(config, micro_batch, dtype, runtime.device)
    else:
        found = Kernels(attention="math", linear="torch")
    return Kernels(
        attention=found.attention if attention == "auto" else attention,
        linear=found.linear if linear == "auto" else linear,
    )


def measured_kernels(config: Config, images: int, dtype: torch.dtype, device: torch.device) -> Kernels:
    """The kernels that are clearly the fastest for so many images at once; torch's own where nothing is to be gained."""
    if not isinstance(config, ViTConfig):
        return Kernels(attention="fused", linear="torch")
    shape = (images, config.num_heads, config.num_tokens, config.hidden_size // config.num_heads)
    rows = images * config.num_tokens
    return Kernels(
        attention=choose_attention(shape, dtype, device),
        linear=choose_linear(rows, config.hidden_size, config.mlp_size, dtype, device),
    )


def use_fastest_kernels(runtime: Runtime, config: Config, images: int) -> None:
    """Let every process score with the kernels that are the fastest on the main one, for so many images at once."""
    computation = runtime.computation
    own = measured_kernels(config, images, computation.product_dtype, runtime.device) if runtime.is_main else None
    kernels = Kernels.model_validate_json(runtime.broadcast(own.model_dump_json() if own else ""))
    use_kernels(kernels)


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
    """Images of a forward pass: machine.micro_batch, or what fits, which is measured once and written to RUN/micro_batch.json."""
    if recipe.machine.micro_batch != -1 or recipe.schedule.lanes:  # leaves are passes of their own size
        return most_images(recipe.machine.micro_batch, share)
    if is_sharded(model):
        raise LaunchError(
            "machine.micro_batch = -1 cannot try what fits with machine.sharding = 'fsdp', where a process that runs out of memory "
            "blocks the others; set machine.micro_batch, and see `vitctl pretrain --dry-run`"
        )
    device = torch.cuda.get_device_name(runtime.device) if runtime.device.type == "cuda" else "CPU"
    setting = {"share": share, "device": device, "precision": runtime.precision}
    file = run_dir / MICRO_BATCH
    # Rank 0 reads it for all: a process that did not see the file would measure, and wait for the others for ever.
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
    """Images of the largest forward pass of a process with this machine.micro_batch (0 and -1: as many as its share)."""
    return min(micro_batch, share) if micro_batch > 0 else share


def dropout_draws(recipe: TrainRecipe, config: Any, folder: Path) -> dict[str, Any]:
    """What the random draws of dropout and stochastic depth depend on, besides seed and step; empty without dropout.

    They are drawn for each forward pass of each process, so that the split of a batch changes the result. With lanes it does not.
    """
    if recipe.schedule.lanes or not (getattr(config, "dropout", 0.0) or getattr(config, "drop_path", 0.0)):
        return {}
    machine, file = recipe.machine, folder / MICRO_BATCH
    most = read_kept(file, MicroBatch).micro_batch if file.exists() else machine.micro_batch
    used = most_images(most, -(-recipe.schedule.batch_size // machine.processes))
    return {"dropout_draws": {"processes": machine.processes, "micro_batch": used, "compile": machine.compile}}
