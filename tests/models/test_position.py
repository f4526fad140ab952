import numpy as np
import pytest
import torch

from tests.matrix import each
from vitctl.errors import CheckpointError
from vitctl.models.build import resize_axis, resize_position_embedding

# What the paper's resolutions ask for, then those of B/8, where scipy's default border zeroes a row by
# rounding.
PAPER_PAIRS = [(7, 12), (7, 16), (14, 24), (14, 32), (16, 37), (16, 27)]
PATCH_8_PAIRS = [(28, 48), (28, 24), (28, 14), (28, 27)]


def random_table(side: int, prefix: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(side)
    return torch.randn(1, prefix + side * side, 6, generator=generator, dtype=torch.float64).to(dtype)


@each("prefix", [0, 1, 2])
@each(("old", "new"), PAPER_PAIRS + PATCH_8_PAIRS)
def test_zoom__equals_scipy(old: int, new: int, prefix: int) -> None:
    from scipy.ndimage import zoom

    table = random_table(old, prefix)
    resized = resize_position_embedding(table, (old, old), (new, new), prefix)
    image = table[0, prefix:].reshape(old, old, 6).numpy()
    expected = zoom(image, (new / old, new / old, 1), order=1, mode="nearest").reshape(new * new, 6)
    assert resized.shape == (1, prefix + new * new, 6)
    assert torch.equal(resized[:, :prefix], table[:, :prefix])
    assert np.abs(resized[0, prefix:].numpy() - expected).max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_resize__narrow_table_is_rounded_once(dtype: torch.dtype) -> None:
    table = random_table(14, 1, dtype)
    resized = resize_position_embedding(table, (14, 14), (24, 24), 1)
    assert resized.dtype == dtype
    assert torch.equal(resized, resize_position_embedding(table.double(), (14, 14), (24, 24), 1).to(dtype))


def test_resize__refuses_a_grid_that_is_not_square() -> None:
    with pytest.raises(CheckpointError, match="the stored grid is 7x28, only square ones are resized"):
        resize_position_embedding(random_table(14, 1), (7, 28), (24, 24), 1)


@pytest.mark.parametrize("shape", [(1, 196, 6), (1, 198, 6), (3, 196, 6), (197, 6)])
def test_resize__refuses_a_table_of_another_length(shape: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointError) as error:
        resize_position_embedding(torch.zeros(shape), (14, 14), (24, 24), 1)
    assert f"shape {list(shape)} does not fit a 14x14 grid with 1 prefix tokens" in str(error.value)
    assert "needs [layers, 197, hidden_size]" in str(error.value)


def test_resize__moves_the_table_of_every_layer_alone() -> None:
    tables = torch.cat([random_table(14, 1), random_table(14, 1).flip(1), -random_table(14, 1)])
    resized = resize_position_embedding(tables, (14, 14), (7, 9), 1)
    assert resized.shape == (3, 1 + 63, 6)
    for layer in range(3):
        alone = resize_position_embedding(tables[layer : layer + 1], (14, 14), (7, 9), 1)
        assert torch.equal(resized[layer : layer + 1], alone)


def test_resize__unknown_method_is_refused() -> None:
    with pytest.raises(CheckpointError) as error:
        resize_position_embedding(random_table(14, 1), (14, 14), (24, 24), 1, "lanczos")
    assert str(error.value).startswith(
        "position embedding: unknown resize method 'lanczos', known are zoom, bicubic"
    )


def test_resize_axis__keeps_both_ends_and_the_middle_and_is_linear_between() -> None:
    table = torch.tensor([0.0, 1, 4, 9, 16], dtype=torch.float64).reshape(1, 5, 1)
    assert resize_axis(table, 9).flatten().tolist() == [0, 0.5, 1, 2.5, 4, 6.5, 9, 12.5, 16]
    assert resize_axis(table, 3).flatten().tolist() == [0, 4, 16]
    assert torch.equal(resize_axis(table, 5), table)
