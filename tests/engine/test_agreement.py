"""The checksum that processes are held together by."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitctl.engine import sharding
from vitctl.engine.agreement import checksum, identity_differences

M = 2**64


def by_hand(words: list[int]) -> int:
    """In Python's integers, without a bound: each word times an odd number of its place."""
    total = sum(word * ((place * sharding._FACTOR) % M | 1) for place, word in enumerate(words, start=1)) % M
    return total - M if total >= M // 2 else total


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40))
def test_word_sum__is_that_of_unbounded_integers(words: list[int]) -> None:
    assert sharding.sum_of_words(torch.tensor(words, dtype=torch.int32)) == by_hand(words)


def test_word_sum__does_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000, 3)
    whole = sharding.sum_of_words(tensor)
    monkeypatch.setattr(sharding, "_CPU_CHUNK", 7)
    assert sharding.sum_of_words(tensor) == whole


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_checksum__every_bit_counts(dtype: torch.dtype) -> None:
    tensor = (torch.randn(5, 4, generator=torch.Generator().manual_seed(0)) * 9).to(dtype)
    seen = {checksum([("a", tensor)])}
    for place in range(tensor.numel()):
        for bit in range(8):
            other = tensor.clone()
            other.view(torch.uint8).view(-1)[place * tensor.element_size()] ^= 1 << bit
            seen.add(checksum([("a", other)]))
    assert len(seen) == 1 + tensor.numel() * 8


def test_checksum__names_shapes_and_places_count() -> None:
    a, b = torch.arange(6.0), torch.arange(6.0).flip(0)
    variants = [
        [("a", a)],
        [("b", a)],
        [("a", b)],
        [("a", a.view(2, 3))],
        [("a", a.double())],
        [("a", a), ("b", a)],
    ]
    assert len({checksum(tensors) for tensors in variants}) == len(variants)
    assert checksum([("a", a.view(2, 3).T)]) == checksum([("a", a.view(2, 3).T.contiguous())])


@pytest.mark.parametrize(("linear", "keys"), [("torch", []), ("onednn", ["computation"])])
def test_identity__runs_that_chose_how_layers_multiply_still_resume(linear: str, keys: list[str]) -> None:
    empty: dict[str, Any] = {"images": {}, "weights": "", "recipe": {}}
    before = empty | {"computation": {"attention": "math", "linear": linear}}
    found = identity_differences(before, empty | {"computation": {"attention": "math"}})
    assert [key for key, _ in found] == keys
