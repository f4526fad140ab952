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
from vitctl.engine.journal import write_run_json
from vitctl.errors import LaunchError
from vitctl.jobs.record.kept import AttentionKernel, MicroBatch, read_kept
from vitctl.models.attention import choose_attention, set_attention
from vitctl.models.blocks import compile_blocks
from vitctl.models.build import Model
from vitctl.models.configs import ViTConfig
from vitctl.models.costs import OPTIMIZER_SLOTS
from vitctl.recipe.machine import TrainMachine
from vitctl.recipe.schema import TrainRecipe

ATTENTION, MICRO_BATCH = "attention.json", "micro_batch.json"


def choose_kernels(
    machine: TrainMachine, runtime: Runtime, run_dir: Path, model: Model, micro_batch: int, *, measured: bool = True
) -> str:
    """Set how layers are computed: attention kernel, activation checkpointing, compilation; returns the attention kernel.

    The choice of machine.attention = 'auto' is written to RUN/attention.json and used again on resume; unless `measured` it is
    the plain product, because a measurement may end otherwise on another machine.
    """
    kernel, config = machine.attention, model.config
    if kernel == "auto" and not measured:
        kernel = "math"
    if kernel == "auto" and isinstance(config, ViTConfig):
        file = run_dir / ATTENTION
        if runtime.is_main and not file.exists():
            shape = (micro_batch, config.num_heads, config.num_tokens, config.hidden_size // config.num_heads)
            dtype = torch.bfloat16 if runtime.precision == "bf16" else runtime.dtype
            write_run_json(file, {"kernel": choose_attention(shape, dtype, runtime.device)})
        kernel = AttentionKernel.model_validate(
            {"kernel": runtime.broadcast(read_kept(file, AttentionKernel).kernel if runtime.is_main else "")}
        ).kernel
    set_attention(kernel)
    if machine.checkpoint_blocks:
        model.checkpoint_blocks = True
    if machine.compile:
        compile_blocks(model)
    return kernel


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
    copies = OPTIMIZER_SLOTS[recipe.optimizer.name] + (recipe.averaging.decay > 0) + (runtime.num_processes > 1)
    reserve = copies * sum(p.numel() * p.element_size() for p in model.parameters())
    found = largest_micro_batch(lambda n: fits_everywhere(runtime, model, objective, batch(n), reserve), share)
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
