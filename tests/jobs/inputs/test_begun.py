"""A GPU computes the next batch of `vitctl predict` while the answers of one are read, on a fake card."""

from typing import Any

import torch

from tests.fake_card import CARD, FakeCard, card_runtime
from vitctl.data.images.transforms import EvalTransform
from vitctl.data.source.stores import SyntheticSource
from vitctl.jobs.inputs import classifier as module
from vitctl.jobs.inputs.classifier import OpenClassifier, TorchNetwork
from vitctl.models.build import build
from vitctl.models.variants import variant

TINY: dict[str, Any] = {"hidden_size": 24, "depth": 1, "mlp_size": 48, "num_heads": 3, "num_classes": 5}


def test_answers__the_next_batch_is_queued_before_one_is_waited_for(monkeypatch: Any) -> None:
    model = build(variant("Ti/16", image_size=32, **TINY)).eval()
    order: list[str] = []
    begin = TorchNetwork.begin

    def begun(self: TorchNetwork, images: torch.Tensor, **how: Any) -> Any:
        assert images.device == CARD
        with card.watched():
            outputs = begin(self, images, **how)
        order.append("begun")
        return lambda: (order.append("read"), outputs())[1]

    monkeypatch.setattr(TorchNetwork, "begin", begun)
    monkeypatch.setattr(module, "eval_batches", pinned(module.eval_batches))
    with FakeCard() as card:
        runtime = card_runtime()
        network = TorchNetwork(card.put(model), runtime, runtime.normaliser((0.5,) * 3, (0.5,) * 3), True)
        opened = OpenClassifier(network, EvalTransform(32), (), "softmax", 1.0, {}, "", "")
        card.waits.clear()
        found = opened.answers(SyntheticSource(10, 5, 32), batch_size=4, workers=0, with_features=True)
        assert [len(answers.names) for answers in found] == [4, 4, 2]
        assert not [wait for wait in card.waits if not wait.endswith("synchronize()")]
    assert order == ["begun", "begun", "read", "begun", "read", "read"]


def pinned(batches: Any) -> Any:
    """Without a GPU there is no pinned memory: the transfer pins for the card."""
    return lambda *given, **more: batches(*given, **{**more, "pinned": False})
