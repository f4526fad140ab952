"""Tensors that are read when they are needed are those that are read at once, and none is kept."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.matrix import slow
from vitctl.errors import CheckpointError
from vitctl.models.build import build, transferred
from vitctl.models.variants import ViTConfig
from vitctl.models.weights import containers
from vitctl.models.weights.later import Later, now
from vitctl.models.weights.weights_file import Weights, read_weights, save_weights, write_weights

Make = Callable[..., Weights]
WHOLE = torch.arange(24.0).view(4, 3, 2)


def later(reads: list[slice]) -> Later:
    def numbers(rows: slice) -> Tensor:
        reads.append(rows)
        return WHOLE[rows]

    return Later.of(WHOLE, numbers)


@pytest.mark.parametrize(
    "function",
    [
        lambda one: one.permute(2, 0, 1).contiguous(),
        lambda one: torch.cat([one, WHOLE], dim=1),
        lambda one: torch.split(one, [1, 3])[1] + 1,
        lambda one: F.interpolate(one.double(), size=5, mode="linear").to(one.dtype),
        lambda one: torch.einsum("ij,jkl->kil", torch.ones(2, 4).to(one.device), one),
        lambda one: one.flatten().sum(),
    ],
)
def test_later__a_function_of_it_is_that_of_its_numbers(function: Callable[[Tensor], Tensor]) -> None:
    reads: list[slice] = []
    one, expected = function(later(reads)), function(WHOLE)
    assert isinstance(one, Later)
    assert (one.shape, one.dtype, one.device.type) == (expected.shape, expected.dtype, "cpu")
    assert not reads
    assert torch.equal(now(one), expected)
    if expected.dim():
        assert torch.equal(now(one, slice(1, 2)), expected[1:2])


def test_later__rows_alone_are_read_of_what_lies_in_memory_as_in_the_file() -> None:
    reads: list[slice] = []
    one = later(reads).contiguous().to(torch.float32)
    assert torch.equal(now(one, slice(1, 3)), WHOLE[1:3])
    assert reads == [slice(1, 3)]


@pytest.mark.parametrize(
    "to", ["safetensors", "google", "pth", *slow("timm", "hf", "torchvision", "old pth")]
)
@pytest.mark.parametrize("image_size", [*slow(32), 48])
def test_read_weights__later_starts_a_model_with_the_same_bits(
    plain: ViTConfig, make_weights: Make, tmp_path: Path, to: str, image_size: int
) -> None:
    config = replace(plain, gelu="tanh") if to == "google" else plain
    layout = "timm" if "pth" in to else to
    path = write_weights(make_weights(config), tmp_path, layout).files[0]
    if "pth" in to:
        tensors, path = containers.read_tensors(path), path.with_suffix(".pth")
        torch.save(tensors, path, _use_new_zipfile_serialization=to == "pth")
    at_once, one_by_one = read_weights(path), read_weights(path, later=True)
    assert one_by_one.is_later or to == "old pth"
    assert one_by_one.digest == at_once.digest
    assert one_by_one.meta == at_once.meta
    model = build(replace(at_once.config, image_size=image_size), device="meta")
    (one, said), (other, also) = (
        transferred(model, found.config, found.state) for found in (at_once, one_by_one)
    )
    assert said == also
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(now(other[name]), tensor), name
        assert torch.equal(now(other[name], slice(1, 3)), tensor[1:3]), name


def test_read_weights__later_refuses_a_file_that_was_replaced(
    plain: ViTConfig, make_weights: Make, tmp_path: Path
) -> None:
    path = tmp_path / "w.safetensors"
    for seed in (0, 1):
        weights = make_weights(plain, seed=seed)
        save_weights(path, weights.state, weights.config, weights.meta)
        if not seed:
            found = read_weights(path, later=True)
    with pytest.raises(CheckpointError, match=r"w\.safetensors: changed while it was read"):
        now(found.state["class_token"])


PEAK = """
import sys
from pathlib import Path
from vitctl.models.weights import containers
from vitctl.models.weights.weights_file import weights_digest
def mib(key):
    return int(next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1]) / 1024
before = mib("VmRSS")
for read in (containers.read_later, containers.read_tensors):
    weights_digest(read(Path(sys.argv[1])))
    print(mib("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from /proc")
@pytest.mark.parametrize("name", ["w.safetensors", *slow("w.npz")])
def test_read_later__holds_one_tensor_at_a_time(tmp_path: Path, name: str) -> None:
    tensors = {str(number): torch.full((2**20,), float(number)) for number in range(32)}  # 4 MiB each
    path = tmp_path / name
    if name.endswith("npz"):
        np.savez(path, **{key: tensor.numpy() for key, tensor in tensors.items()})
    else:
        containers.save_tensors(tensors, path)
    later, at_once = map(float, subprocess.check_output([sys.executable, "-c", PEAK, str(path)]).split())
    assert later < 40
    assert at_once > 120
