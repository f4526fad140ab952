"""Deterministic kernels and fixed threads: set within the block, and as they were after it."""

import pytest
import torch

from vitctl.engine.distributed.exact import computation, exact
from vitctl.engine.distributed.runtime import Runtime, start
from vitctl.errors import LaunchError


@pytest.fixture
def runtime() -> Runtime:
    return start(precision="bf16", device="cpu", processes=1)


def test_exact__threads_and_kernels_are_fixed_and_given_back(runtime: Runtime) -> None:
    before = torch.get_num_threads()
    with exact(runtime, before + 1):
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.get_num_threads() == before + 1
        made_by = computation(runtime, attention="math")
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_num_threads() == before
    level = torch.backends.cpu.get_cpu_capability()
    assert made_by == {"device": f"CPU {level}", "threads": before + 1, "precision": "bf16", "attention": "math"}


def test_exact__an_operation_without_a_deterministic_kernel_is_one_line(runtime: Runtime) -> None:
    said = "max_pool3d_backward does not have a deterministic implementation, but you set ..."
    with (
        pytest.raises(LaunchError, match=r"max_pool3d_backward has no .* kernel .* cpu .*schedule\.lanes = 0"),
        exact(runtime, 1),
    ):
        raise RuntimeError(said)
    with pytest.raises(RuntimeError, match="another"), exact(runtime, 1):
        raise RuntimeError("another error")
    assert not torch.are_deterministic_algorithms_enabled()
