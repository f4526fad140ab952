"""The fake CUDA device finds what makes the host wait, and lets everything else through."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.fake_card import FakeCard, FakeEvent, HostWaitsError, WrongDeviceError
from tests.matrix import each

WAITS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "bool": lambda x: bool(x.isfinite().all()),
    "if": lambda x: 1 if x.sum() > 0 else 0,
    "tolist": lambda x: x.tolist(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "index from the host": lambda x: x[torch.tensor([0, 1])],
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x + 1),
    "allclose": lambda x: torch.allclose(x, x),
    "bincount": lambda x: torch.bincount(x.long()),
    "cpu": lambda x: x.cpu(),
    "to cpu": lambda x: x.to("cpu"),
    "copy to pageable": lambda x: torch.empty(6).copy_(x, non_blocking=True),
    "constant": lambda _: torch.tensor([1.0, 2.0], device="cuda"),
    "scalar constant": lambda _: torch.tensor(1.0, device="cuda"),
    "pageable to": lambda _: torch.ones(6).to("cuda", non_blocking=True),
    "blocking to": lambda _: torch.ones(6).pin_memory().to("cuda"),
    "synchronize": lambda _: torch.cuda.synchronize(),
    "event": lambda _: FakeEvent().synchronize(),
}

PASSES: dict[str, Callable[[Tensor], Any]] = {
    "where": lambda x: torch.where(x.isfinite(), x, 0.0),
    "number of the host": lambda x: x * torch.tensor(0.5) >= torch.tensor(0.1, dtype=torch.float64),
    "pinned to": lambda _: torch.ones(6).pin_memory().to("cuda", non_blocking=True),
    "to host, read later": lambda x: x.to("cpu", non_blocking=True).sum().item(),
    "copy to pinned": lambda x: torch.empty(6, pin_memory=True).copy_(x, non_blocking=True),
    "one_hot": lambda x: F.one_hot(x.long(), 7),
    "index from the card": lambda x: x[torch.arange(3, device="cuda")],
    "fill": lambda x: x.clone().masked_fill_(x > 0, 1.0),
    "assign to a mask": lambda x: x.clone().__setitem__(x > 0, 0.0),
    "assign a number": lambda x: x.clone().__setitem__(0, 3.0),
    "of the host alone": lambda _: [
        float(torch.tensor([1.0, 2.0])[torch.tensor([True, False])]),
        torch.ones(3).tolist(),
    ],
    "made there": lambda _: [
        torch.empty_like(torch.ones(3), device="cuda"),
        torch.arange(3, device="cuda"),
        torch.full((3,), 0.5, device="cuda"),
    ],
    "slices": lambda x: x[1:3] + x[::2][:2],
    "foreach": lambda x: torch._foreach_lerp_([x.clone()], [x], 0.1) or torch._foreach_norm([x, x]),
}


@pytest.mark.parametrize("name", WAITS)
def test_watched__refuses_what_waits(name: str) -> None:
    with FakeCard() as card:
        x = torch.randn(6, device="cuda")
        with card.watched(), pytest.raises(HostWaitsError):
            WAITS[name](x)


@each("name", PASSES)
def test_watched__lets_through_what_does_not_wait(name: str) -> None:
    with FakeCard() as card:
        x = torch.randn(6, device="cuda")
        with card.watched():
            PASSES[name](x)
        assert card.waits == []


def test_watched__a_wait_within_a_backward_pass() -> None:
    with FakeCard() as card:
        x = torch.randn(6, device="cuda", requires_grad=True)
        x.register_hook(lambda gradient: gradient * float(gradient.sum()))
        with card.watched(), pytest.raises(HostWaitsError):
            (2 * x).sum().backward()


def test_card__tensors_of_two_devices_do_not_mix() -> None:
    with FakeCard():
        x = torch.randn(6, device="cuda")
        with pytest.raises(WrongDeviceError):
            x + torch.ones(6)


def test_card__leaves_torch_as_it_was() -> None:
    names = ("Stream", "Event", "stream", "current_stream", "synchronize", "get_device_name")
    before = [getattr(torch.cuda, name) for name in names], torch.Tensor.record_stream
    with FakeCard():
        pass
    assert ([getattr(torch.cuda, name) for name in names], torch.Tensor.record_stream) == before
    assert float(torch.ones(3).sum()) == 3
