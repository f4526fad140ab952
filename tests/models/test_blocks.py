import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.matrix import slow
from tests.models.tiny_models import TINY
from vitctl.engine.preemption import StopFlag, Stopped
from vitctl.errors import LaunchError
from vitctl.models.blocks import Block, compile_blocks, compile_errors
from vitctl.models.build import build

# Torch hides this warning of its own tracing, but not from filters that make warnings errors.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings(
        "ignore:`torch.jit.script_method` is deprecated"
    ),  # by the compiler of torch 2.11
]


@pytest.mark.parametrize(
    ("name", "change", "blocks", "graphs"),
    [
        # Three outside blocks; the last block computes the class token alone.
        ("vit", {"depth": 4}, 4, 3 + 1 + 1),
        # The first block drops nothing; all other rates share a graph.
        *slow(
            ("vit", {"depth": 5, "drop_path": 0.3}, 5, 3 + 2 + 1),
            ("axial", {"depth": 6}, 6, 1 + 3),
            # One for each shape of unit, one for the Transformer, two outside blocks.
            ("hybrid", {"stage_depths": (3, 2)}, 5 + 2, 4 + 1 + 1 + 2),
            ("resnet v1", {"stage_depths": (3, 4)}, 7, 4),
        ),
    ],
)
def test_compile_blocks__equal_blocks_share_a_graph(
    name: str, change: dict[str, Any], blocks: int, graphs: int
) -> None:
    torch.compiler.reset()
    config = replace(TINY[name], **change)
    compiled = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    plain, model = build(config), build(config)
    assert compile_blocks(model, backend) == blocks
    images = torch.randn(3, 3, 32, 32)
    model(images)
    assert len(compiled) == graphs
    # The last, smaller batch is not compiled anew, and has the same numbers.
    model(images[:2])
    assert len(compiled) == graphs
    for some in (images, images[:2]):
        assert torch.equal(model.eval()(some), plain.eval()(some))
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_compile_blocks__leaves_a_block_inside_a_block_to_the_outer_one() -> None:
    model = build(TINY["axial"])
    assert sum(isinstance(module, Block) for module in model.modules()) == 3 * 2
    assert compile_blocks(model, "eager") == 2


@pytest.mark.slow
def test_compile_blocks__torch_compiles_all_shapes_of_a_deep_network() -> None:
    torch.compiler.reset()
    config = replace(TINY["resnet v2"], stage_depths=(2, 2, 2, 2), image_size=32)
    model, compiled = build(config), []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    compile_blocks(model, backend)
    for batch in (3, 2):
        for is_training in (True, False):
            model.train(is_training)(torch.randn(batch, 3, 32, 32))
    assert len(compiled) == 8  # training, scoring, and four shapes of unit; a second size is not compiled


COMPILED = """
import torch
from vitctl.models.blocks import Block, compile_blocks
class Sum(Block):
    def forward(self, numbers):
        return (numbers * 2).sin() + 1
model = torch.nn.Sequential(Sum())
compile_blocks(model)
torch.manual_seed(0)
numbers = torch.randn(8 * 1000 + 8, requires_grad=True)  # AVX2 has vectors of 8, AVX-512 of 16
outputs = model(numbers)
outputs.sum().backward()
assert torch.allclose(outputs, (numbers * 2).sin() + 1, atol=1e-5)
assert torch.allclose(numbers.grad, 2 * (numbers * 2).cos(), atol=1e-5)
from torch._dynamo.utils import counters
print(counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.slow
def test_compile_blocks__shares_no_code_between_instruction_sets(tmp_path: Path) -> None:
    """Code that torch wrote for vectors of AVX2 writes beyond its results where it is compiled for longer
    ones.
    """
    hits = []
    for capability in ("avx2", None, None):
        given = {} if capability is None else {"ATEN_CPU_CAPABILITY": capability}
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), **given}
        ran = subprocess.run(
            [sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True, check=True
        )
        hits.append(int(ran.stdout) > 0)
    longer = torch.backends.cpu.get_cpu_capability() != "AVX2"
    assert hits == [False, not longer, True]


@pytest.mark.parametrize("asked", [True, False])
def test_compile_blocks__torch_is_quiet_about_the_machine(
    monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    logger = logging.getLogger("torch.utils.cpp_extension")
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    logger.manager._clear_cache()  # type: ignore[attr-defined]
    if asked:
        monkeypatch.setenv("TORCH_LOGS", "recompiles")
    else:
        monkeypatch.delenv("TORCH_LOGS", raising=False)
    compile_blocks(build(TINY["vit"]), "eager")
    assert logger.isEnabledFor(logging.WARNING) == asked
    assert logger.isEnabledFor(logging.ERROR)
    logger.manager._clear_cache()  # type: ignore[attr-defined]


def test_compile_errors__are_one_line() -> None:
    torch.compiler.reset()
    model = build(TINY["vit"])

    def broken(_: torch.fx.GraphModule, __: list[torch.Tensor]) -> Callable[..., Any]:
        raise RuntimeError("C++ compile error\nwith a long report")

    compile_blocks(model, broken)
    message = r"machine\.compile: torch could not compile .*set machine\.compile = false"
    with pytest.raises(LaunchError, match=message), compile_errors():
        model(torch.randn(2, 3, 32, 32))
    torch.compiler.reset()
    compile_blocks(model, broken)
    stop = StopFlag()
    stop.outage = "stopped"
    with pytest.raises(Stopped), compile_errors(stop.check):
        model(torch.randn(2, 3, 32, 32))


@pytest.mark.slow
def test_compile_blocks__keeps_less_for_the_backward_pass() -> None:
    config = replace(TINY["vit"], depth=4)

    def kept(*, compiled: bool) -> int:
        """Bytes of what the blocks keep, without their weights."""
        torch.compiler.reset()
        model = build(config)
        weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
        if compiled:
            compile_blocks(model, "aot_eager_decomp_partition")
        found: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                found[storage.data_ptr()] = storage.nbytes()
            return tensor

        tokens = torch.randn(2, config.num_tokens, config.hidden_size)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            for block in model.blocks:
                tokens = block(tokens)
        tokens.sum().backward()
        return sum(found.values())

    assert kept(compiled=True) < 0.8 * kept(compiled=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*")
def test_compile_blocks__what_is_computed_again_has_the_same_dropout() -> None:
    torch.compiler.reset()

    class Dropped(Block):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = torch.nn.Linear(64, 512), torch.nn.Linear(512, 64, bias=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.outer(torch.nn.functional.dropout(torch.nn.functional.gelu(self.inner(tokens)), 0.5))

    model = torch.nn.Sequential(Dropped())
    torch.nn.init.ones_(model[0].outer.weight)
    compile_blocks(model)
    tokens = torch.randn(1, 64)
    outputs = model(tokens)
    outputs[0, 0].backward()
    # The gradient of a row of `outer` is its input, the dropped activations, whose sum is the output.
    weight = model[0].outer.weight.grad
    assert 150 < (weight[0] == 0).sum() < 350
    assert torch.allclose(weight[0].sum(), outputs[0, 0], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "relative", "hybrid", "axial"])
def test_compile_blocks__inductor_computes_the_same(name: str, random_model: Any, images_for: Any) -> None:
    torch.compiler.reset()
    config = TINY[name]
    plain, compiled = random_model(config, torch.float32), random_model(config, torch.float32)
    compiled.load_state_dict(plain.state_dict())
    compile_blocks(compiled)
    images = images_for(config, dtype=torch.float32)
    for model in (plain, compiled):
        model.train()(images).square().sum().backward()
    with torch.inference_mode():
        expected, logits = plain.eval()(images), compiled.eval()(images)
    assert expected.std() > 0.05
    assert (logits - expected).abs().max() < 1e-5 * expected.std()
    for (weight, gradient), other in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        assert torch.allclose(gradient.grad, other.grad, rtol=1e-4, atol=1e-4 * gradient.grad.abs().max()), (
            weight
        )
