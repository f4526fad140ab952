"""The kernels of a process."""

import pytest

from vitctl.models.kernels.attention import set_attention, used_attention
from vitctl.models.kernels.linear import set_linear, used_linear


@pytest.mark.parametrize("_test", [1, 2])
def test_kernels__a_test_begins_with_those_of_a_new_process(_test: int) -> None:
    assert (used_attention(), used_linear()) == ("fused", "torch")
    set_attention("math")
    set_linear("onednn")
