"""Which network a recipe means, and what it does not see."""

import pytest

from vitctl.jobs.inputs.network import unseen_pixels
from vitctl.models.variants import variant


@pytest.mark.parametrize(
    ("model", "size", "unseen"),
    [("B/16", 224, 0), ("B/16", 384, 0), ("H/14", 224, 0), ("H/14", 384, 6), ("R50+B/16", 230, 0)],
)
def test_unseen_pixels__are_those_beyond_the_last_whole_patch(model: str, size: int, unseen: int) -> None:
    """The paper's H/14 at 384 has 27 x 27 patches: six rows and columns are dropped by its VALID convolution."""
    said = unseen_pixels(variant(model, image_size=size))
    assert said == unseen_pixels(variant(model), size)
    assert len(said) == bool(unseen)
    if unseen:
        assert (
            f"the last {unseen} rows and columns of pixels are not used; 378 or 392 would use all" in said[0]
        )
