import pytest
import torch

from vitctl.errors import CheckpointError
from vitctl.models.weights.layouts import (
    CONV,
    DENSE,
    entry,
    pair,
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


def test_rules_for__names_what_has_no_place() -> None:
    names = ["token", *(f"adapter.{i}.weight" for i in range(9))]
    with pytest.raises(CheckpointError) as error:
        rules_for(TABLE, names)
    assert str(error.value) == (
        "unexpected tensors: adapter.0.weight, adapter.1.weight, adapter.2.weight, adapter.3.weight, "
        "and 5 more"
    )


STATE = {
    "token": torch.randn(1, 1, 4, dtype=torch.float64),
    "body.0.norm1.weight": torch.randn(4).bfloat16(),
    "body.0.norm1.bias": torch.arange(4),
    "stages.0.0.conv.weight": torch.randn(6, 5, 3, 3),
    "body.0.qkv.weight": torch.randn(12, 4),
}


def test_to_ours__reports_every_kind_of_problem_in_one_line() -> None:
    rules = rules_for(TABLE, STATE)
    theirs = to_theirs(STATE, rules)
    del theirs["cls"], theirs["v0"]
    theirs |= {"layer1.ln.bias": torch.zeros(5), "extra": torch.zeros(1)}
    with pytest.raises(CheckpointError) as error:
        to_ours(theirs, rules, {name: tensor.to("meta") for name, tensor in STATE.items()})
    assert str(error.value) == (
        "the tensors do not make a whole model: missing: cls, v0; unexpected: extra; "
        "wrong shape: layer1.ln.bias is [5], expected [4]"
    )
