"""What larger and faster trainings would cost in accuracy: moments and residual stream in bf16, float8,
offloaded activations.

    python benchmarks/larger.py [--steps 300] [--seeds 2] [--ways ...] [--out FILE]     # float8 needs torchao

Trains `smoke` with each way in turn and writes, as JSON lines, its losses, its score and its bytes. float8 is
emulated, as torchao does without such hardware: it shows the numbers of a GPU, not its speed. Moments are
rounded to bf16 after each step, in float32: the same numbers as if they were stored so.
"""

import argparse
import contextlib
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitctl.bench.timed_steps import with_training
from vitctl.engine.trainer import Trainer
from vitctl.recipe.load import Override, load_recipe

WAYS = (
    *("float32", "bf16", "bf16 stream", "moments nearest", "moments stochastic"),
    *("float8 tensor", "float8 rows", "offload"),
)


def rounded(tensor: Tensor, generator: torch.Generator | None) -> None:
    """Round float32 to bf16 in place: to the nearest, or up with the probability of what is cut off."""
    if generator is None:
        tensor.copy_(tensor.bfloat16())
        return
    bits = tensor.view(torch.int32)
    bits += torch.randint(0, 2**16, bits.shape, dtype=torch.int32, generator=generator)
    bits &= -(2**16)


def with_bf16_moments(trainer: Trainer, *, stochastic: bool) -> None:
    optimizer, seed = trainer.state.optimizer, trainer.recipe.seed
    steps = iter(range(10**9))

    def after(*_: Any) -> None:
        step = next(steps)  # each step draws from a generator of its own, so that a resume draws the same
        generator = torch.Generator().manual_seed(seed * 2**32 + step) if stochastic else None
        for state in optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                rounded(state[name], generator)

    take = optimizer.step

    def step(*given: Any) -> None:
        take(*given)
        after()

    optimizer.step = step  # type: ignore[method-assign]


def with_float8(network: nn.Module, recipe: str) -> int:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    config = Float8LinearConfig.from_recipe_name(recipe)
    config = replace(config, emulate=True)

    def taken(module: nn.Module, name: str) -> bool:
        return name.startswith("blocks.") and module.in_features % 16 == module.out_features % 16 == 0  # type: ignore

    Float8Linear.then = lambda self, inputs, activation: activation(self(inputs))  # as `kernels.Linear`
    convert_to_float8_training(network, config=config, module_filter_fn=taken)
    return sum("Float8" in type(one).__name__ for one in network.modules())


class Offload:
    """Counts what autograd saves, and copies it as to a host."""

    bytes = 0

    def pack(self, tensor: Tensor) -> Tensor:
        self.bytes += tensor.numel() * tensor.element_size() * (not isinstance(tensor, nn.Parameter))
        return tensor.detach().clone() if not isinstance(tensor, nn.Parameter) else tensor


def measured(way: str, seed: int, steps: int) -> dict[str, Any]:
    """Train with one way and return what came of it."""
    values = {"seed": seed, "schedule.total_steps": steps, "evaluation.every_steps": 0}
    values["schedule.warmup_steps"], values["log.every_steps"] = steps // 10, max(1, steps // 30)
    values |= {"checkpoint.every_steps": 10**6, "log.trace": False}
    precision = "bf16" if way.startswith(("bf16", "float8")) else "float32"
    recipe = load_recipe(
        "smoke", [Override(k, v) for k, v in {**values, "machine.precision": precision}.items()]
    )
    found: dict[str, Any] = {"way": way, "seed": seed, "steps": steps}

    def act(trainer: Trainer) -> None:
        if way.startswith("moments"):
            with_bf16_moments(trainer, stochastic="stochastic" in way)
        if way.startswith("float8"):
            found["layers"] = with_float8(
                trainer.state.network, "tensorwise" if "tensor" in way else "rowwise"
            )
        if way == "bf16 stream":  # the residual stream, from the first block's input on
            network: Any = trainer.state.network
            begin = network.begin
            network.begin = lambda *given: begin(*given).bfloat16()
        offload, hooks = Offload(), contextlib.nullcontext()
        if way == "offload":
            hooks = torch.autograd.graph.saved_tensors_hooks(offload.pack, lambda tensor: tensor)  # type: ignore
        began = time.perf_counter()
        with hooks:
            score = trainer.fit()
        found["seconds"] = round(time.perf_counter() - began, 1)
        records = [json.loads(line) for line in (trainer.log.folder / "log.jsonl").read_text().splitlines()]
        losses = [one["loss"] for one in records if one["kind"] == "train"]
        found["losses"] = losses
        found["accuracy"] = score.accuracy if score else None
        moments = [s[n] for s in trainer.state.optimizer.state.values() for n in ("exp_avg", "exp_avg_sq")]
        found["moment_bytes"] = sum(one.numel() for one in moments) * (2 if "moments" in way else 4)
        found["saved_bytes_a_step"] = offload.bytes // max(1, steps)

    with tempfile.TemporaryDirectory() as scratch:
        with_training(recipe.recipe, Path(scratch), act)  # type: ignore[arg-type]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--ways", nargs="*", default=WAYS)
    parser.add_argument("--out", type=Path, default=Path("larger.jsonl"))
    options = parser.parse_args()
    for seed in range(options.seeds):
        for way in options.ways:
            found = measured(way, seed, options.steps)
            tail = found["losses"][-5:]
            loss, accuracy = sum(tail) / len(tail), found["accuracy"]
            print(f"{way:20} seed {seed}: loss {loss:.4f}, accuracy {accuracy:.2%}", flush=True)
            with options.out.open("a") as file:
                file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
