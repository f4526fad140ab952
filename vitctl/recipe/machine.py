"""The sections of a recipe that say how a run is carried out, kept and logged."""

from typing import Literal

from pydantic import model_validator

from vitctl.errors import LaunchError
from vitctl.recipe.sections import Names, Section, knob


class Machine(Section):
    """[machine] How the work is distributed; nothing here changes the result beyond rounding, where precision
    matters most.

    One exception: dropout and stochastic depth draw random numbers for each forward pass of each process, so
    that `processes`, `micro_batch` and `compile` change the draws, and the result. With schedule.lanes they
    change no bit.
    """

    processes: int = knob(
        1,
        "processes, one per GPU; started by vitctl, or by srun, torchrun or accelerate launch; with dropout "
        "or drop_path "
        "their number changes the random draws",
        ge=1,
    )
    workers: int = knob(
        -1, "data loader workers of each process; -1: chosen by the number of cores; 0: none", ge=-1
    )
    precision: Literal["auto", "bf16", "float32", "tf32", "float64"] = knob(
        "auto",
        "auto: bf16 where the device computes it fast, else float32; master weights, loss and norms stay "
        "float32. tf32: as float32, but "
        "an NVIDIA GPU keeps 10 of 23 mantissa bits of what it multiplies",
    )
    device: Literal["auto", "cpu", "cuda"] = knob(
        "auto", "auto: CUDA where available, else CPU; cuda: an error where there is none"
    )


class NetworkMachine(Machine):
    """[machine] of the jobs that compute a network."""

    attention: Literal["fused", "math", "auto"] = knob(
        "auto",
        "kernel of the attention product; auto: math on a CPU in bf16 up to 1,024 tokens, with relative "
        "positions and lanes; else fused",
    )
    linear: Literal["torch", "onednn", "auto"] = knob(
        "auto",
        "library that multiplies the matrices of linear layers on a CPU; auto: torch. Try onednn for float32 "
        "on AMD CPUs with AVX-512",
    )


class TrainMachine(NetworkMachine):
    """[machine] of the jobs that train."""

    checkpoint_blocks: bool = knob(
        False,
        "activation checkpointing: recompute each layer in the backward pass instead of storing its "
        "activations",
    )
    compile: bool = knob(
        False, "torch.compile each layer; with dropout or drop_path this changes the random draws"
    )
    micro_batch: int = knob(
        0,
        "maximum number of images in one forward pass of a process; 0: its whole share; -1: as many as fit "
        "into device memory, "
        "measured at the start of the run and then kept. With dropout or drop_path this changes the random "
        "draws and the result",
        unit="images",
        ge=-1,
    )


class ShardedMachine(TrainMachine):
    """[machine] of the jobs that may train a model too large for one device."""

    sharding: Literal["none", "fsdp"] = knob(
        "none",
        "fsdp: weights, gradients and optimizer state are sharded over the processes (FSDP2); none: each "
        "process has all (DDP)",
    )
    sharding_replicas: int = knob(
        1,
        "with fsdp: copies of the model, each sharded over the processes divided by this (HSDP), such as the "
        "number of nodes: then "
        "weights are gathered within a node, and only gradients go between nodes",
        unit="copies",
        ge=1,
    )
    sharding_dtype: Literal["float32", "bf16"] = knob(
        "float32",
        "with fsdp: type that the matrices of layers are gathered in. bf16, where machine.precision is bf16: "
        "half of the traffic and no "
        "bf16 copy of the whole model in memory, for the same bits; gradients are added up in float32. With "
        "compile a layer then "
        "becomes several graphs",
    )

    def shards(self, processes: int) -> int:
        """Parts that each copy of the model is cut into.

        Raises:
            LaunchError: the processes cannot be divided so.
        """
        if self.sharding == "none":
            return 1
        if processes % self.sharding_replicas:
            raise LaunchError(
                f"machine.sharding_replicas = {self.sharding_replicas}: {processes} "
                f"process{'es' * (processes > 1)} cannot hold so "
                "many copies of equal parts; set it to a divisor of machine.processes, such as the number "
                "of nodes"
            )
        return processes // self.sharding_replicas

    @model_validator(mode="after")
    def _nothing_idle(self) -> "ShardedMachine":
        idle = [
            k
            for k in ("sharding_replicas", "sharding_dtype")
            if getattr(self, k) != type(self).model_fields[k].default
        ]
        if idle and self.sharding == "none":
            raise ValueError(
                f"{', '.join(idle)} does nothing while nothing is sharded; leave it out, or set sharding "
                f"= 'fsdp'"
            )
        return self


class Checkpoint(Section):
    """[checkpoint] What is kept on disk."""

    every_steps: int = knob(
        1000, "save every so many steps; 0: only at the end and on a signal", unit="steps", ge=0
    )
    background: bool = knob(
        True, "write while training continues, from a copy in host memory; false: no copy, training waits"
    )
    keep_last: int = knob(2, "newest checkpoints kept", ge=1)
    keep_best: int = knob(
        0, "best checkpoints kept by accuracy on data.eval_split (needs evaluation.every_steps)", ge=0
    )


class Log(Section):
    """[log] What is logged."""

    every_steps: int = knob(
        50, "a record in log.jsonl, and a line where there is no terminal", unit="steps", ge=1
    )
    trackers: Names = knob((), "accelerate trackers, e.g. ['tensorboard']")
    sample_keys: bool = knob(False, "write the key of every sample of every step to samples/rank_*.jsonl")
    trace: bool = knob(
        True,
        "record every step for `vitctl verify`: a line in steps.jsonl (loss, norm, learning rate, digests of "
        "the batch), and in "
        "trace.bin 2 bytes for each image of a batch and each parameter",
    )
