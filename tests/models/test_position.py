import numpy as np
import pytest
import torch

from vitctl.errors import CheckpointError
from vitctl.models.position import resize_position_embedding

# What the paper's resolutions ask for, then those of B/8, where scipy's default border zeroes a row by rounding.
PAPER_PAIRS = [(7, 12), (7, 16), (14, 24), (14, 32), (16, 37), (16, 27)]
PATCH_8_PAIRS = [(28, 48), (28, 24), (28, 14), (28, 27)]


def random_table(side: int, prefix: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(side)
    return torch.randn(1, prefix + side * side, 6, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize(("old", "new"), PAPER_PAIRS + PATCH_8_PAIRS)
def test_zoom__equals_scipy(old: int, new: int, prefix: int) -> None:
    from scipy.ndimage import zoom

    table = random_table(old, prefix)
    resized = resize_position_embedding(table, (old, old), (new, new), prefix)
    image = table[0, prefix:].reshape(old, old, 6).numpy()
    expected = zoom(image, (new / old, new / old, 1), order=1, mode="nearest").reshape(new * new, 6)
    assert resized.shape == (1, prefix + new * new, 6)
    assert torch.equal(resized[:, :prefix], table[:, :prefix])
    assert np.abs(resized[0, prefix:].numpy() - expected).max() < 1e-12


@pytest.mark.parametrize(("old", "new"), PAPER_PAIRS)
def test_zoom__equals_the_authors_call_for_the_pairs_of_the_paper(old: int, new: int) -> None:
    from scipy.ndimage import zoom

    table = random_table(old, 0, torch.float32)
    resized = resize_position_embedding(table, (old, old), (new, new), 0)
    expected = zoom(table[0].reshape(old, old, 6).numpy(), (new / old, new / old, 1), order=1).reshape(-1, 6)
    np.testing.assert_allclose(resized[0].numpy(), expected, rtol=1.2e-7, atol=1e-9)


def test_zoom__reproduces_a_plane_and_keeps_its_corners() -> None:
    rows, columns = torch.meshgrid(torch.linspace(0, 1, 14), torch.linspace(0, 1, 14), indexing="ij")
    plane = (2 * rows - 3 * columns).double().reshape(1, 196, 1)
    resized = resize_position_embedding(plane, (14, 14), (5, 9), 0).reshape(5, 9)
    expected = 2 * torch.linspace(0, 1, 5).double()[:, None] - 3 * torch.linspace(0, 1, 9).double()
    assert torch.allclose(resized, expected, atol=1e-6, rtol=0)


def test_resize__same_grid_changes_nothing() -> None:
    table = random_table(14, 1, torch.float32)
    assert torch.equal(resize_position_embedding(table, (14, 14), (14, 14), 1), table)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_resize__narrow_table_is_rounded_once(dtype: torch.dtype) -> None:
    table = random_table(14, 1, dtype)
    resized = resize_position_embedding(table, (14, 14), (24, 24), 1)
    assert resized.dtype == dtype
    assert torch.equal(resized, resize_position_embedding(table.double(), (14, 14), (24, 24), 1).to(dtype))


def test_resize__refuses_a_grid_that_is_not_square() -> None:
    with pytest.raises(CheckpointError, match="the stored grid is 7x28, only square ones are resized"):
        resize_position_embedding(random_table(14, 1), (7, 28), (24, 24), 1)


@pytest.mark.parametrize("shape", [(1, 196, 6), (1, 198, 6), (2, 197, 6), (197, 6)])
def test_resize__refuses_a_table_of_another_length(shape: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointError) as error:
        resize_position_embedding(torch.zeros(shape), (14, 14), (24, 24), 1)
    assert f"shape {list(shape)} does not fit a 14x14 grid with 1 prefix tokens" in str(error.value)
    assert "needs [1, 197, hidden_size]" in str(error.value)
