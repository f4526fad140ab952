"""Similarity of position embeddings against loops."""

import math
from itertools import product

import pytest
import torch

from tests.analysis.conftest import TRANSFORMERS, noisy_model
from vitctl.analysis.positions import by_offset, patch_positions, relative_offsets, similarity


@pytest.mark.parametrize("name", ["vit", "gap", "2d", "axial", "every layer", "hybrid"])
def test_similarity__of_patches_equals_loops(name: str) -> None:
    model = noisy_model(TRANSFORMERS[name])
    tables = patch_positions(model)
    assert tables is not None
    rows, columns = model.config.grid
    state = model.state_dict()
    assert tables.shape == (2 if name == "every layer" else 1, rows * columns, 24)
    for layer, found in enumerate(similarity(tables)):
        for a, b in product(range(rows * columns), repeat=2):
            if name == "2d":
                one, other = (
                    torch.cat(
                        [
                            state["position_columns"][layer, p % columns],
                            state["position_rows"][layer, p // columns],
                        ]
                    )
                    for p in (a, b)
                )
            else:
                first = model.config.prefix_tokens
                one, other = (state["position_embedding"][layer, p + first] for p in (a, b))
            cosine = sum(map(math.prod, zip(one.tolist(), other.tolist(), strict=True)))
            cosine /= math.hypot(*one.tolist()) * math.hypot(*other.tolist())
            assert float(found[a, b]) == pytest.approx(cosine, abs=1e-12)


def test_similarity__of_nothing_is_zero() -> None:
    assert similarity(torch.zeros(3, 4)).tolist() == torch.zeros(3, 3).tolist()


def test_positions__of_networks_without_tables() -> None:
    assert patch_positions(noisy_model(TRANSFORMERS["no position"])) is None
    assert patch_positions(noisy_model(TRANSFORMERS["relative"])) is None
    assert relative_offsets(noisy_model(TRANSFORMERS["vit"])) is None
    offsets = relative_offsets(noisy_model(TRANSFORMERS["relative"]))
    assert offsets is not None and offsets.shape == (2, 2 * 17 - 1, 24)


def test_by_offset__is_the_mean_over_pairs() -> None:
    rows, columns = 2, 3
    similarities = torch.arange(36, dtype=torch.float64).reshape(6, 6)
    found = by_offset(similarities, (rows, columns))
    assert found.shape == (3, 5)
    for down, right in product(range(-1, 2), range(-2, 3)):
        values = [
            float(similarities[a, b])
            for a, b in product(range(6), repeat=2)
            if (b // 3 - a // 3, b % 3 - a % 3) == (down, right)
        ]
        assert float(found[down + 1, right + 2]) == pytest.approx(sum(values) / len(values))
