import numpy as np

from vitctl.data.images.decode import decode
from vitctl.data.source.stores import SyntheticSource
from vitctl.data.source.views import Source


def test_synthetic_source__is_pure_and_learnable() -> None:
    source = SyntheticSource(40, 4, 24)
    pictures = [decode(source.read(sample)) for sample in range(40)]
    assert {picture.shape for picture in pictures} == {(24, 24, 3)}
    assert source.read(7) == SyntheticSource(100, 4, 24).read(7)
    assert len({picture.tobytes() for picture in pictures}) == 40
    labels = source.labels()
    assert np.bincount(labels).tolist() == [10] * 4
    means = np.array([picture.mean((0, 1)) for picture in pictures])
    centres = np.array([means[:20][labels[:20] == label].mean(0) for label in range(4)])
    nearest = ((means[20:, None] - centres) ** 2).sum(2).argmin(1)
    assert (nearest == labels[20:]).mean() > 0.9
    protocol: Source = source
    assert (protocol.key(2), protocol.location(2)) == ("2", "synthetic sample 2")
    assert source.digest != SyntheticSource(41, 4, 24).digest
