"""The fewest equal parts that fit, by trying."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.conftest import Tiny, batch
from vitctl.data.loader.batches import Batch
from vitctl.engine.computation import fits_everywhere, largest_micro_batch
from vitctl.engine.runtime import Runtime
from vitctl.errors import LaunchError


@given(share=st.integers(1, 3000), most=st.integers(1, 4000))
def test_largest__is_the_share_in_the_fewest_parts(share: int, most: int) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= most

    found = largest_micro_batch(fits, share)
    fewest = next(parts for parts in range(1, share + 1) if -(-share // parts) <= most)
    assert found == -(-share // fewest)
    assert len(tried) <= 2 * share.bit_length() + 2


def test_largest__not_even_one() -> None:
    with pytest.raises(LaunchError, match="not even one image at a time fits on this device; set machine"):
        largest_micro_batch(lambda _: False, 100)


def loss(model: torch.nn.Module, batch: Batch, _step: int, *, limit: int) -> torch.Tensor:
    if len(batch) > limit:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return torch.as_tensor(model(batch.images.double()).sum())


def test_fits__leaves_no_trace(runtime: Runtime) -> None:
    model = Tiny()
    before = [p.detach().clone() for p in model.parameters()]
    for adds_up in (False, True):
        assert fits_everywhere(runtime, model, partial(loss, limit=4), batch(4), 100, adds_up=adds_up)
        assert not fits_everywhere(runtime, model, partial(loss, limit=4), batch(5), 100, adds_up=adds_up)
        assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_fits__another_error_is_no_want_of_memory(runtime: Runtime) -> None:
    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes do not fit"):
        fits_everywhere(runtime, Tiny(), broken, batch(4), 0, adds_up=False)
