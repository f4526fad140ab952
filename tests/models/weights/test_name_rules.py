import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitctl.errors import CheckpointError
from vitctl.models.weights.layouts import (
    CONV,
    DENSE,
    MemoryLayout,
    entry,
    pair,
    rule_for,
    rules_for,
    to_ours,
    to_theirs,
)

TABLE = {
    "token": entry("cls"),
    **pair("body.{i}.norm1", "layer{i1}.ln"),
    "stages.{i}.{j}.conv.weight": entry("block{i1}/unit{j1:02d}/kernel", layout=CONV),
    "body.{i}.qkv.weight": entry("q{i}", "k{i}", "v{i}", layout=DENSE),
}


def test_rule_for__fills_in_the_indices() -> None:
    found = {
        "token": ("cls",),
        "body.0.norm1.weight": ("layer1.ln.weight",),
        "body.11.norm1.bias": ("layer12.ln.bias",),
        "stages.2.9.conv.weight": ("block3/unit10/kernel",),
        "body.3.qkv.weight": ("q3", "k3", "v3"),
    }
    for ours, theirs in found.items():
        rule = rule_for(TABLE, ours)
        assert rule is not None
        assert rule.theirs == theirs


@pytest.mark.parametrize(
    "name", ["tokens", "body.norm1.weight", "body.1.norm2.weight", "stages.1.conv.weight", ""]
)
def test_rule_for__knows_no_other_names(name: str) -> None:
    assert rule_for(TABLE, name) is None


def test_rules_for__names_what_has_no_place() -> None:
    names = ["token", *(f"adapter.{i}.weight" for i in range(9))]
    with pytest.raises(CheckpointError) as error:
        rules_for(TABLE, names)
    assert str(error.value) == (
        "there is no place for adapter.0.weight, adapter.1.weight, adapter.2.weight, adapter.3.weight, "
        "and 5 more"
    )


STATE = {
    "token": torch.randn(1, 1, 4, dtype=torch.float64),
    "body.0.norm1.weight": torch.randn(4).bfloat16(),
    "body.0.norm1.bias": torch.arange(4),
    "stages.0.0.conv.weight": torch.randn(6, 5, 3, 3),
    "body.0.qkv.weight": torch.randn(12, 4),
}


def test_rules__there_and_back_is_exact() -> None:
    rules = rules_for(TABLE, STATE)
    theirs = to_theirs(STATE, rules)
    assert theirs["block1/unit01/kernel"].shape == (3, 3, 5, 6)
    assert torch.equal(theirs["k0"], STATE["body.0.qkv.weight"][4:8].T)
    assert len({tensor.untyped_storage().data_ptr() for tensor in theirs.values()}) == len(theirs) == 7
    again = to_ours(theirs, rules, {name: tensor.to("meta") for name, tensor in STATE.items()})
    assert again.keys() == STATE.keys()
    for name, tensor in STATE.items():
        assert (again[name].dtype, again[name].is_contiguous()) == (tensor.dtype, True)
        assert torch.equal(again[name], tensor)


@given(st.sampled_from([CONV, DENSE]), st.lists(st.integers(1, 4), min_size=4, max_size=4))
def test_layouts__are_their_own_inverse(layout: MemoryLayout, shape: list[int]) -> None:
    tensor = torch.randn(shape if layout is CONV else shape[:2])
    assert torch.equal(layout.read(layout.write(tensor)), tensor)
    assert torch.equal(layout.write(layout.read(tensor)), tensor)


def test_to_ours__reports_every_kind_of_problem_in_one_line_each() -> None:
    rules = rules_for(TABLE, STATE)
    theirs = to_theirs(STATE, rules)
    del theirs["cls"], theirs["v0"]
    theirs |= {"layer1.ln.bias": torch.zeros(5), "extra": torch.zeros(1)}
    with pytest.raises(CheckpointError) as error:
        to_ours(theirs, rules, {name: tensor.to("meta") for name, tensor in STATE.items()})
    assert str(error.value).splitlines() == [
        "the tensors do not make a whole model",
        "  missing: cls, v0",
        "  unexpected: extra",
        "  wrong shape: layer1.ln.bias is [5], expected [4]",
    ]
