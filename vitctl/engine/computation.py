"""How a training is computed: attention, sharding, micro-batch, compilation; and what is recorded of it.

Device and precision are chosen in runtime.py.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any, TypeVar, cast

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from vitctl.data.loader.batches import Batch
from vitctl.engine.checkpoint import newest_name, read_state
from vitctl.engine.journal import CHECKPOINTS, COMPUTED_ON, write_run_json
from vitctl.engine.runtime import Computation, Runtime, check_same
from vitctl.engine.schedule import total_steps
from vitctl.engine.sharding import held, is_sharded, like, local, shard
from vitctl.errors import CheckpointError, LaunchError
from vitctl.models.blocks import KEPT, compile_blocks, train_mode, trainable
from vitctl.models.build import Model, draw_parts
from vitctl.models.flops import (
    USABLE_SHARE,
    compile_rule,
    computed_flops,
    forward_flops,
    training_memory_bytes,
)
from vitctl.models.kernels import AttentionKernel, attention_rule, set_attention
from vitctl.models.variants import Config, ViTConfig
from vitctl.models.weights.later import now
from vitctl.recipe.schema import (
    Finetune,
    NetworkMachine,
    Pretrain,
    ShardedMachine,
    TrainMachine,
    TrainRecipe,
    Vtab,
    frozen_places,
    lora_of,
)
from vitctl.recipe.sections import OPTIMIZERS
from vitctl.system.files import read_json
from vitctl.system.process import cpu_name, installed

R = TypeVar("R", Pretrain, Finetune, Vtab)


def largest_micro_batch(fits: Callable[[int], bool], share: int) -> int:
    """Return the images per pass, 1 to share, that cut a share into as few equal parts as possible.

    The number of parts doubles until `fits` accepts one, and is then bisected; the last part may be smaller.

    Raises:
        LaunchError: a single image does not fit.
    """
    too_few, enough = 0, 1
    while not fits(-(-share // enough)):
        if enough == share:
            raise LaunchError(
                "machine.micro_batch = -1",
                "not even one image at a time fits on this device",
                "set machine.checkpoint_blocks = 1, machine.sharding = 'fsdp', or use a smaller model",
            )
        too_few, enough = enough, min(2 * enough, share)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if fits(-(-share // middle)):
            enough = middle
        else:
            too_few = middle
    return -(-share // enough)


def fits_everywhere(
    runtime: Runtime,
    model: nn.Module,
    objective: Callable[[nn.Module, Batch, int], Tensor],
    batch: Batch,
    reserve: int,
    *,
    adds_up: bool,
) -> bool:
    """Return whether a forward and backward pass fits on all processes; model and gradients stay as they are.

    The model must not be wrapped, so that a process that fails does not block the others. `reserve` is in
    bytes: optimizer state, averages. `adds_up`: gradients exist before the pass.
    """
    train_mode(model)
    fitted = True
    try:
        kept = torch.empty(reserve, dtype=torch.uint8, device=runtime.device)
        if adds_up:
            for parameter in trainable(model).values():
                parameter.grad = torch.zeros_like(parameter)
        with runtime.autocast():
            loss = objective(model, batch, 0)
        torch.autograd.backward(loss)
        del kept, loss
    except torch.OutOfMemoryError:
        fitted = False
    model.zero_grad(set_to_none=True)
    if runtime.device.type == "cuda":
        torch.cuda.empty_cache()
    return runtime.sum([float(not fitted)])[0] == 0


_MOST_KEPT_BYTES = 2**16


class MicroBatch(BaseModel):
    """A micro-batch that fits into memory, and the setting in which it was measured."""

    model_config = ConfigDict(strict=True)

    share: int = Field(ge=1, le=10**9)
    device: str = Field(max_length=500)
    precision: str = Field(max_length=50)
    micro_batch: int = Field(ge=1, le=10**9)


def read_kept(path: Path) -> MicroBatch:
    """Return the micro-batch that an earlier start measured; CheckpointError if the file is invalid."""
    try:
        value: Any = read_json(path, _MOST_KEPT_BYTES, error=CheckpointError)
    except CheckpointError as error:
        raise CheckpointError(error, fix="delete it to choose again") from None
    try:
        return MicroBatch.model_validate(value)
    except ValidationError as error:
        where = ".".join(map(str, error.errors(include_input=False)[0]["loc"])) or "its value"
        raise CheckpointError(path, f"{where} is invalid", "delete the file to choose again") from None


MICRO_BATCH = "micro_batch.json"


def attention_kernel(
    machine: NetworkMachine, config: Config, computation: Computation, *, lanes: bool = False
) -> AttentionKernel:
    """Return machine.attention, with 'auto' resolved by a rule that training, scoring and predicting share.

    The rule depends on the kind of device, the precision and the number of tokens, not on load or batch.
    `lanes` promise the same bits, which not every fused kernel keeps.

    Raises:
        LaunchError: this device has no such kernel.
    """
    asked, device, where = machine.attention, computation.device.type, "machine.attention"
    exact_too = getattr(machine, "deterministic", None)
    if asked in ("efficient", "cudnn") and device != "cuda":
        raise LaunchError(where, f"'{asked}' needs a GPU", "use 'auto'")
    if asked != "auto" and asked != "fused":
        return asked
    if asked == "auto" and (lanes or getattr(config, "position_embedding", "") == "relative"):
        return "math"
    if device != "cuda" and (asked == "fused" or not isinstance(config, ViTConfig)):
        return "fused"
    head = getattr(config, "hidden_size", 64) // getattr(config, "num_heads", 1)
    tokens, dtype = getattr(config, "num_tokens", 0), computation.product_dtype
    return attention_rule(device, dtype, tokens, head, deterministic=exact_too is not False)


def shard_as(
    machine: TrainMachine,
    runtime: Runtime,
    model: Model,
    start: Mapping[str, Tensor],
    *,
    seed: int,
    probed: bool,
) -> str:
    """Shard the model if machine.sharding says so, never held in full; return a digest of drawn weights.

    A model on the meta device draws its weights with `seed`, one tensor at a time, unless `start` provides
    them. `probed` means that the model is also called for its features only.

    Raises:
        LaunchError: the machine cannot, or the model is probed.
    """
    if not isinstance(machine, ShardedMachine) or not machine.divides_model:
        return ""
    if probed:
        raise LaunchError(
            "fewshot_probe.every_steps needs model features, which machine.sharding = "
            f"'{machine.sharding}' does not support",
            fix="set fewshot_probe.every_steps = 0 or machine.sharding = 'none'",
        )
    gathers_bf16 = machine.sharding_dtype == "bf16"
    if gathers_bf16 and runtime.precision != "bf16":
        raise LaunchError(
            "machine.sharding_dtype = 'bf16'",
            f"this run computes in {runtime.precision}, and would lose precision",
            "set machine.precision to 'bf16' or machine.sharding_dtype to 'float32'",
        )
    machine.shards(runtime.num_processes)  # raises if the processes cannot be divided so
    given = model.state_dict()
    model.to("meta")
    shard(model, runtime.device, runtime.num_processes, machine.sharding_replicas, gathers_bf16=gathers_bf16)
    model.to_empty(device=runtime.device)
    own, drawn = model.state_dict(), ""
    if any(given[name].is_meta and name not in start for name in own):
        drawn = draw_parts(model.config, seed, {name: held(tensor) for name, tensor in own.items()})
    for name, tensor in own.items():
        if name in start:
            part, row = held(tensor)
            part.copy_(now(start[name], slice(row, row + len(part)) if part.dim() else slice(None)))
        elif not given[name].is_meta:
            local(tensor).copy_(local(like(given.pop(name), tensor)))
    return drawn


def choose_attention(
    model: Model, machine: NetworkMachine, computation: Computation, *, lanes: bool = False, images: int = 0
) -> AttentionKernel:
    """Set a network's attention kernel and return it; see `attention_kernel`.

    A network that only scores so many `images` is also compiled, as machine.compile says.
    """
    kernel = attention_kernel(machine, model.config, computation, lanes=lanes)
    set_attention(model, kernel)
    mode = machine.compile if images else False
    if mode == "auto":
        is_cuda = computation.device.type == "cuda"
        mode = is_cuda and pays_off(computation.device, images * forward_flops(model.config))
    if mode:
        compile_blocks(model, mode=mode)
    return kernel


def pays_off(gpu: torch.device, flops: float) -> bool:
    """Return `compile_rule` of a GPU; False if torch lacks what it compiles with: Triton, a C compiler."""
    has_compiler = any(map(which, (os.environ.get("CC", "cc"), "gcc", "clang")))
    can = has_compiler and find_spec("triton") is not None
    return can and compile_rule(torch.cuda.get_device_name(gpu), flops)


def settled(recipe: R, runtime: Runtime, config: Config, run_dir: Path, num_images: int) -> R:
    """Return a recipe with machine.attention and machine.compile as its training in this folder has them.

    On a GPU "auto" is what the newest checkpoint was computed with, or else by rule; a CPU compiles nothing
    by itself. `num_images` are those of an epoch.
    """
    machine, s, chosen = recipe.machine, recipe.schedule, dict[str, Any]()
    if runtime.device.type != "cuda":
        chosen = {"compile": False} if machine.compile == "auto" else {}
        return recipe.model_copy(update={"machine": machine.model_copy(update=chosen)})
    chosen["attention"] = attention_kernel(machine, config, runtime, lanes=s.lanes > 0)
    if machine.compile == "auto":
        steps = total_steps(num_images, s.batch_size, steps=s.total_steps, epochs=s.total_epochs)
        each = computed_flops(config, frozen_places(recipe, config), adapters=lora_of(recipe).rank > 0)
        pays = pays_off(runtime.device, steps * s.batch_size / runtime.num_processes * each)
        chosen["compile"] = pays and machine.checkpoint_blocks != "attention"
    if runtime.is_main and (newest := newest_name(run_dir / CHECKPOINTS)):
        saved = read_state(run_dir / CHECKPOINTS / newest).get(COMPUTED_ON, {})
        for key, kept in (
            ("attention", saved.get("attention")),
            ("compile", _MODES.get(saved.get("compile"))),
        ):
            if "deterministic" in saved and kept is not None and getattr(machine, key) == "auto":  # of a GPU
                chosen[key] = kept
    chosen = json.loads(runtime.broadcast(json.dumps(chosen)))  # other nodes may have another GPU
    return recipe.model_copy(update={"machine": machine.model_copy(update=chosen)})


_MODES = {str(mode): mode for mode in (True, False, "max-autotune", "reduce-overhead")}


def kept_activations(recipe: TrainRecipe, runtime: Runtime, config: Config, micro_batch: int) -> float:
    """Return `kept` of `compile_blocks`: all where the plan has memory for it, by kind of GPU the same."""
    if runtime.device.type != "cuda":
        return KEPT
    how: Any = runtime.precision, OPTIMIZERS[recipe.optimizer.name].slots, recipe.averaging.decay > 0
    needed = training_memory_bytes(config, micro_batch, *how)
    room = USABLE_SHARE * torch.cuda.get_device_properties(runtime.device).total_memory
    return 1.0 if needed <= room else KEPT


def choose_micro_batch(
    recipe: TrainRecipe,
    runtime: Runtime,
    run_dir: Path,
    model: nn.Module,
    objective: Callable[..., Tensor],
    batch: Callable[[int], Batch],
    share: int,
) -> int:
    """Return the images per pass: machine.micro_batch, or what fits, kept in RUN/micro_batch.json."""
    if recipe.machine.micro_batch != -1 or recipe.schedule.lanes:  # leaves fix the size of passes
        return most_images(recipe.machine.micro_batch, share)
    if is_sharded(model):
        raise LaunchError(
            "machine.micro_batch = -1 cannot find the largest micro-batch with machine.sharding "
            "= 'fsdp', where a process that runs out of memory blocks the others",
            fix="set machine.micro_batch, and see `vitctl pretrain --dry-run`",
        )
    device = torch.cuda.get_device_name(runtime.device) if runtime.device.type == "cuda" else "CPU"
    setting = {"share": share, "device": device, "precision": runtime.precision}
    file = run_dir / MICRO_BATCH
    # Rank 0 reads it for all: a process that did not see the file would measure, and wait for the others
    # for ever.
    there = runtime.is_main and file.exists()
    known = json.loads(runtime.broadcast(read_kept(file).model_dump_json() if there else "{}"))
    setting = json.loads(runtime.broadcast(json.dumps(setting)))
    if {name: known.get(name) for name in setting} == setting:
        return int(known["micro_batch"])
    copies = OPTIMIZERS[recipe.optimizer.name].slots + (recipe.averaging.decay > 0)
    reserve = copies * sum(p.numel() * p.element_size() for p in trainable(model).values())

    def fits(images: int) -> bool:
        adds_up = runtime.num_processes > 1 or images < share
        return fits_everywhere(runtime, model, objective, batch(images), reserve, adds_up=adds_up)

    found = largest_micro_batch(fits, share)
    if runtime.is_main:
        write_run_json(file, {**setting, "micro_batch": found})
    return found


def most_images(micro_batch: int, share: int) -> int:
    """Return the images of a process's largest pass; machine.micro_batch 0 and -1 mean its share."""
    return min(micro_batch, share) if micro_batch > 0 else share


def draws_noise(recipe: TrainRecipe, config: Any) -> bool:
    """Return whether a training has dropout, stochastic depth, or randomly rescaled positions."""
    rates = [getattr(config, name, 0.0) for name in ("dropout", "drop_path")]
    return any([*rates, lora_of(recipe).dropout, getattr(config, "rotary_rescale", 1.0) > 1])


def dropout_draws(recipe: TrainRecipe, config: Any, folder: Path) -> dict[str, Any]:
    """Return what dropout and stochastic depth depend on besides seed and step; empty without them.

    Draws are per pass and process, so the split of a batch changes the result, except with lanes.
    """
    if recipe.schedule.lanes or not draws_noise(recipe, config):
        return {}
    machine, file = recipe.machine, folder / MICRO_BATCH
    most = read_kept(file).micro_batch if file.exists() else machine.micro_batch
    used = most_images(most, -(-recipe.schedule.batch_size // machine.processes))
    return {
        "dropout_draws": {"processes": machine.processes, "micro_batch": used, "compile": machine.compile}
    }


def gpu_settings(machine: TrainMachine) -> dict[str, Any]:
    """Return the settings of torch that decide the bits of a training on a GPU; a resume keeps them."""
    matmul, cudnn = torch.backends.cuda.matmul, cast(Any, torch.backends.cudnn)  # only partly typed
    return {
        "deterministic": str(machine.deterministic),
        "compile": str(machine.compile),
        "tf32": str(matmul.allow_tf32 or cudnn.allow_tf32),
        "bf16_reduction": str(matmul.allow_bf16_reduced_precision_reduction),
        "cudnn": str(cudnn.version()),
        "torch": torch.__version__,
    }


# Packages whose release may change numbers: they compute, launch processes, or decode images.
VERSIONS = ("vitctl", "torch", "accelerate", "numpy", "pillow", "simplejpeg")


def computed(runtime: Runtime, attention: AttentionKernel, *, compiled: bool = False) -> dict[str, Any]:
    """Return how a job computes: precision, device, threads, processes, kernel, versions."""
    is_cuda = runtime.device.type == "cuda"
    own: dict[str, Any] = {
        "precision": runtime.precision,
        "device": runtime.device.type,
        "device_name": torch.cuda.get_device_name(runtime.device) if is_cuda else cpu_name(),
        "hardware": processor(runtime.device),
        "processes": runtime.num_processes,
        "attention": attention,
        **({"compiled": True} if compiled else {}),
    }
    if is_cuda and runtime.precision in ("float32", "tf32"):
        own["tf32"] = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
    if not is_cuda:
        own["threads"] = torch.get_num_threads()
    return own | {"versions": versions()}


def computed_training(recipe: TrainRecipe, runtime: Runtime, config: Config) -> dict[str, Any]:
    """Return `computed` for a training, with its sharding and, for lanes on a CPU, its threads."""
    lanes = recipe.schedule.lanes > 0
    own = computed(runtime, attention_kernel(recipe.machine, config, runtime, lanes=lanes))
    if lanes and "threads" in own:
        own["threads"] = recipe.schedule.threads
    sharding = getattr(recipe.machine, "sharding", "none")
    if runtime.device.type == "cuda":
        own["settings"] = gpu_settings(recipe.machine)
    return own | ({} if sharding == "none" else {"sharding": sharding})


def versions() -> dict[str, str]:
    return installed(VERSIONS)


_CPUINFO, _NVIDIA = Path("/proc/cpuinfo"), Path("/proc/driver/nvidia/version")
_NOT_DETERMINISTIC = "does not have a deterministic implementation"


# Environment variables of matrix libraries; threads are set separately.
_SETTINGS = (
    "MKL_CBWR",
    "MKL_ENABLE",
    "MKL_DEBUG",
    "ONEDNN_",
    "DNNL_",
    "ATEN_CPU",
    "CUBLAS_",
    "NVIDIA_TF32",
    "TORCH_ALLOW_TF32",
)
_KERNELS = {
    "avx2",
    "fma",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
    "amx_tile",
    "avx_vnni",
    "asimd",
    "bf16",
    "sve",
}


@contextmanager
def exact(runtime: Runtime, threads: int, *, lanes: bool = True) -> Iterator[None]:
    """Within the block the same images and weights give the same bits; `threads` are those of a CPU.

    With `lanes` on any number of processes.

    Raises:
        LaunchError: an operation has no deterministic kernel on this device.
    """
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    settings: Any = torch.utils.deterministic
    filled, device = settings.fill_uninitialized_memory, runtime.device.type
    if device == "cuda":
        torch.backends.cudnn.benchmark = False
    else:
        torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # slow, and no number is read before it is written
    try:
        yield
    except RuntimeError as error:
        if _NOT_DETERMINISTIC not in str(error):
            raise
        operation = str(error).split(_NOT_DETERMINISTIC)[0].strip()[:100]
        off = ["schedule.lanes = 0"] * lanes + ["machine.deterministic = false"] * (device == "cuda")
        raise LaunchError(
            "schedule.lanes" if lanes else "machine.deterministic",
            f"{operation} has no deterministic kernel on this {device} device, so "
            "results cannot be exact to the bit",
            f"train with {' and '.join(off)}",
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[1])
        settings.fill_uninitialized_memory = filled
        if device != "cuda":
            torch.set_num_threads(before[0])


def computation(runtime: Runtime, **chosen: Any) -> dict[str, Any]:
    """Return what decides the last bits besides recipe, data and weights; the same on every process.

    `chosen` adds entries: kernels, versions.

    Raises:
        LaunchError: another process computes differently.
    """
    own: dict[str, Any]
    if runtime.device.type == "cuda":
        own = {"device": torch.cuda.get_device_name(runtime.device)}
    else:
        own = {"device": cpu_kind(_CPUINFO), "threads": torch.get_num_threads()}
    described = {
        **own,
        "precision": runtime.precision,
        **({"environment": settings} if (settings := _library_settings()) else {}),
        **chosen,
    }
    if runtime.num_processes > 1:
        facts = {name: json.dumps(value, sort_keys=True) for name, value in described.items()}
        check_same(
            facts,
            "with schedule.lanes all processes need the same kind of device and the same versions; use such "
            "nodes, or set "
            "schedule.lanes = 0",
        )
    return described


def processor(device: torch.device) -> dict[str, str]:
    """Return what the last bits of a device's products depend on besides package versions, by name.

    A CPU's instructions or a GPU's driver and libraries, and environment variables that choose kernels.
    """
    if device.type != "cuda":
        return {"processor": cpu_kind(_CPUINFO), **_library_settings()}
    cudnn: Any = torch.backends.cudnn  # only partly typed
    found = {"CUDA": str(torch.version.cuda), "cuDNN": str(cudnn.version())}
    for package in ("nvidia-cublas", f"nvidia-cublas-cu{found['CUDA'].partition('.')[0]}"):
        with suppress(PackageNotFoundError):
            found["cuBLAS"] = version(package)
    with suppress(OSError):
        driver = re.search(r"Module\s.*?(\d+\.[\d.]+)", _NVIDIA.read_text(encoding="utf-8", errors="replace"))
        found |= {"driver": driver[1]} if driver else {}
    return found | _library_settings()


def _library_settings() -> dict[str, str]:
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_SETTINGS)}


def cpu_kind(file: Path) -> str:
    """Return the CPU's maker and what selects its matrix kernels; equal kinds compute the same bits."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found: dict[str, str] = dict(
        re.findall(r"^(vendor_id|CPU implementer|flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    )
    maker = found.get("vendor_id", found.get("CPU implementer", ""))
    kernels = sorted(_KERNELS & {*found.get("flags", found.get("Features", "")).split()})
    return " ".join(filter(None, ["CPU", maker, torch.backends.cpu.get_cpu_capability(), *kernels]))
