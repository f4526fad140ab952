"""machine.compile: embedding, last norm, head and loss are within, with the numbers of before."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.test_distillation import HALF, ITS, batch
from tests.matrix import few
from tests.models.tiny_models import MASKED, TINY, VIT
from vitctl.data.loader.batches import Batch
from vitctl.engine.distillation import Distilled, Teacher, distillation_loss
from vitctl.engine.losses import Mixing, classification, classification_loss, predict_masked_patches
from vitctl.engine.runtime import Computation
from vitctl.models.blocks import compile_blocks, compile_loss, train_mode, trainable
from vitctl.models.build import Model, build
from vitctl.models.lora import adapt
from vitctl.models.masked_patch import masked_patch_loss
from vitctl.recipe.sections import Distillation, Loss

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

CPU = Computation(torch.device("cpu"), "float32")
SOFTMAX, SIGMOID = Loss(name="softmax"), Loss(name="sigmoid", label_smoothing=0.1, smoothing="per_class")
MIXED = Mixing(mixup_alpha=0.5, cutmix_alpha=0.5)
# Network, loss, and how many graphs: embedding, first tokens, blocks, the last block where it computes the
# class token alone, norm with head, each loss.
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "softmax": ("vit", {}, 6),
    "smoothed": ("vit", {"loss": Loss(name="softmax", label_smoothing=0.1)}, 6),
    "sigmoid": ("gap", {"loss": SIGMOID}, 5),
    "several labels": ("vit", {"loss": SIGMOID, "several": True}, 6),
    "class weights": ("vit", {"weights": torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])}, 6),
    "mixed": ("vit", {"mixing": MIXED}, 6),
    "lora": ("vit", {"lora": True}, 6),
    "soft": ("vit", {"kind": "soft"}, 7),
    "hard": ("vit", {"kind": "hard"}, 7),
    "features": ("vit", {"kind": "features"}, 7),  # what listens to the head leaves it out
    "masked": ("mean_color", {}, 5),
}
Objective = Callable[..., Tensor]


def prepared(name: str, case: dict[str, Any], backend: Any = None) -> tuple[Model, Objective]:
    """A network, and its loss as `assembled` puts it together; compiled with a backend."""
    masked = MASKED.get(name)
    model = build(replace(masked or TINY[name], gelu="erf"), seed=1)  # compiled, tanh has another formula
    assert model.head is not None
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    if case.get("lora"):
        adapt(model, ("q", "v"), (), rank=2, alpha=0.0, dropout=0.0, seed=0)
    train_mode(model)
    made: Callable[[Objective], Objective] = lambda plain: plain  # noqa: E731
    if backend is not None:
        compile_blocks(model, backend)
        made = partial(compile_loss, model, backend=backend)
    loss, mixing = case.get("loss", SOFTMAX), case.get("mixing", Mixing())
    objective = classification(loss, mixing, 3, case.get("weights"))
    measured = made(classification_loss)
    if masked is not None:
        objective, measured = (
            partial(predict_masked_patches, config=masked, rate=0.5, seed=3),
            made(masked_patch_loss),
        )
    whole = partial(objective, normalise=CPU.normaliser(*HALF), measured=measured)
    if kind := case.get("kind"):
        asked, teacher = Distillation(teacher="some", kind=kind), Teacher(build(TINY["vit"], seed=2), ITS, "")
        whole = Distilled(whole, asked, teacher, model, HALF, CPU, made(distillation_loss))
    return model, whole


def shown(case: dict[str, Any], rows: slice = slice(None)) -> Batch:
    one = batch()
    labels = torch.tensor([[0, -1], [3, 1], [1, -1], [4, 0]]) if case.get("several") else one.labels
    return replace(
        one,
        images=one.images[rows],
        labels=labels[rows],
        weights=one.weights[rows].float(),
        samples=one.samples[rows],
    )


@pytest.mark.parametrize("name", few([*CASES], "several labels", "soft"))
def test_step__is_compiled_to_its_loss_with_the_bits_of_before(name: str) -> None:
    """By a backend that runs graphs as they are; three steps need no second graph, nor do fewer images."""
    torch.compiler.reset()
    network, case, expected = CASES[name]
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    found = []
    for chosen in (None, backend):
        model, loss = prepared(network, case, chosen)
        steps = [loss(model, shown(case), step) for step in (0, 1, 2)]
        if "mixing" not in case:
            steps.append(loss(model, shown(case, slice(3)), 3))
        torch.autograd.backward(steps[:1])
        gradients = [p.grad for p in trainable(model).values()]
        assert all(one is not None for one in gradients)
        found.append([*(one.detach() for one in steps), *gradients])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert len(graphs) == expected
    heads = [
        any("head" in one.name for one in graph.graph.nodes if one.op == "placeholder") for graph in graphs
    ]
    assert sum(heads) == (name != "features")
    # The last graphs are those of the losses: two in distillation, of which the first is by label.
    outputs = [[*graph.graph.nodes][-1].args[0][0].meta["example_value"].shape for graph in graphs]
    assert outputs.count(torch.Size([])) == 1 + ("kind" in case)


def test_modes_with_cuda_graphs__what_leaves_the_network_is_not_overwritten() -> None:
    """On a backend that, as a CUDA graph does, writes each call's results over those of the call before."""
    torch.compiler.reset()

    def backend(graph: torch.fx.GraphModule, _: Any, **__: Any) -> Callable[..., Any]:
        memory: list[Tensor] = []

        def run(*given: Any) -> Any:
            outputs = graph.forward(*given)
            memory.extend(map(torch.empty_like, outputs[len(memory) :]))
            return tuple(own.copy_(new) for own, new in zip(memory, outputs, strict=True))

        return run

    model, plain = (build(replace(VIT, gelu="erf"), seed=1).eval() for _ in range(2))
    for one in (model, plain):
        torch.nn.init.normal_(one.head.weight, generator=torch.Generator().manual_seed(1))
    images = torch.randn(2, 4, 3, 32, 32)
    calls = model.forward, model.features
    with torch.no_grad():
        compile_blocks(model, backend, "reduce-overhead")
        loss = compile_loss(model, classification_loss, backend, "reduce-overhead")
        measure = partial(loss, labels=torch.arange(4), weights=torch.ones(4), name="softmax")
        for call, eager in zip(calls, (plain.forward, plain.features), strict=True):
            first, second = (call(one) for one in images)
            assert torch.equal(first, eager(images[0])) and torch.equal(second, eager(images[1]))
        one, other = measure(plain(images[0])), measure(plain(images[1]))
        assert float(one) == float(
            classification_loss(plain(images[0]), torch.arange(4), torch.ones(4), name="softmax")
        )
        assert float(one) != float(other)
