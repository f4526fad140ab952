"""What the model tests share: a small configuration of each family, and models whose every weight matters."""

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.matrix import few
from tests.models.tiny_models import MASKED, OF_EACH_KIND, TINY, VIT
from vitctl.models.build import Model, build
from vitctl.models.variants import Config, MaskedPatchConfig, ViTConfig


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """These models are so small that a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny() -> ViTConfig:
    return VIT


@pytest.fixture(params=TINY)
def family(request: pytest.FixtureRequest) -> Config:
    """The small configuration of every family, one after the other."""
    return TINY[request.param]


@pytest.fixture(params=few([*TINY], *OF_EACH_KIND))
def kind(request: pytest.FixtureRequest) -> Config:
    """One configuration for each file of networks, and with `-m slow` the others."""
    return TINY[request.param]


@pytest.fixture(params=MASKED)
def masked(request: pytest.FixtureRequest) -> MaskedPatchConfig:
    """A small model for each target of masked patch prediction."""
    return MASKED[request.param]


@pytest.fixture
def random_model() -> Callable[..., Model]:
    """Build a model with noise on every weight, so that a mistake anywhere shows in the logits."""

    def make(config: Config, dtype: torch.dtype = torch.float64, seed: int = 0) -> Model:
        model = build(config, dtype=dtype).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(
                    torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(dtype) * 0.2
                )
        return model

    return make


@pytest.fixture
def images_for() -> Callable[..., torch.Tensor]:
    """Make random images in [-1, 1] for a configuration, always the same."""

    def make(config: Config, batch: int = 3, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        generator = torch.Generator().manual_seed(7)
        shape = (batch, 3, config.image_size, config.image_size)
        return torch.rand(shape, generator=generator, dtype=torch.float64).mul(2).sub(1).to(dtype)

    return make
