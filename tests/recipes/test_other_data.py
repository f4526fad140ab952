"""Every recipe of `finetune` on data of the user: its rate, batch and warm-up."""

import math

import pytest

from vitctl.engine.schedule import checked_steps, fit_schedule, warmup_of
from vitctl.recipe.load import Override, load_recipe, recipe_names
from vitctl.recipe.schema import Finetune

FINETUNE = [name for name in recipe_names() if isinstance(load_recipe(name).recipe, Finetune)]
FOLLOWING = [name for name in FINETUNE if load_recipe(name).recipe.optimizer.lr_batch]  # type: ignore[union-attr]
IMAGENET = 1_281_167


def fitted(name: str, num_images: int, *given: tuple[str, object]) -> Finetune:
    overrides = [Override("data.path", "photos", "--data"), *(Override(*one, "--set") for one in given)]
    recipe = fit_schedule(load_recipe(name, overrides), num_images).recipe
    assert isinstance(recipe, Finetune) and not recipe.optimizer.lr_batch
    return recipe


@pytest.mark.parametrize("num_images", [300, 5_000])
def test_recipe__fits_other_data(num_images: int) -> None:
    for name in FINETUNE:
        s = fitted(name, num_images).schedule
        assert warmup_of(s, num_images) < checked_steps(num_images, s, 1), name


def test_recipe__that_follows_the_batch_gets_eight_an_epoch() -> None:
    assert len(FOLLOWING) >= 20
    for name in FOLLOWING:
        own, small, large = load_recipe(name).recipe, fitted(name, 300), fitted(name, IMAGENET)
        assert isinstance(own, Finetune)
        assert small.schedule.batch_size == 32
        root = math.sqrt(32 / own.optimizer.lr_batch)  # timm, train.py: lr_base_scale of adamw and lamb
        assert small.optimizer.lr == own.optimizer.lr * root, name
        assert small.schedule.end_lr == own.schedule.end_lr
        if own.schedule.batch_size:  # as published
            assert large.schedule == own.schedule and large.optimizer.lr == own.optimizer.lr, name


def test_rate__of_sgd_is_linear_and_what_is_given_stays() -> None:
    sgd = fitted("finetune", 300, ("optimizer.lr_batch", 512))
    assert (sgd.schedule.batch_size, sgd.optimizer.lr) == (32, 0.01 * 32 / 512)
    both = fitted("finetune", 300, ("optimizer.lr_batch", 512), ("optimizer.lr", 0.03))
    assert both.optimizer.lr == 0.03 * 32 / 512
    given = fitted("mae_b16", 300, ("optimizer.lr", 1e-3), ("schedule.batch_size", 64))
    assert (given.optimizer.lr, given.schedule.batch_size) == (1e-3, 64)
    assert fitted("mae_b16", 300, ("schedule.batch_size", 256)).optimizer.lr == 2e-3 * math.sqrt(256 / 1024)
