"""Batch, length and warm-up that a recipe leaves to the number of training images."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY
from tests.matrix import each
from tests.trained import CPU, Job
from vitctl.cli.flags import Flags, flags_of, overrides_of
from vitctl.engine.schedule import fit_schedule, fitted_recipe, needs_num_images, warmup_of
from vitctl.errors import RecipeError
from vitctl.recipe.load import Loaded, Override, load_recipe
from vitctl.recipe.schema import Finetune
from vitctl.recipe.sections import Schedule


def finetune(**values: Any) -> Finetune:
    return load_recipe("finetune", [Override(key, value) for key, value in values.items()]).recipe


@pytest.mark.parametrize(
    ("num_images", "batch", "steps", "warmup"),
    [
        (5, 8, 200, 20),
        (100, 8, 250, 25),
        (275, 32, 200, 20),  # 171 would be 20 epochs
        (800, 64, 250, 25),
        (3_680, 256, 287, 28),  # Pets
        (50_000, 512, 1_953, 195),
        (1_281_167, 512, 20_000, 500),  # ImageNet: Table 4
    ],
)
def test_fitted__to_the_number_of_images(num_images: int, batch: int, steps: int, warmup: int) -> None:
    s = fitted_recipe(finetune(), num_images).schedule
    assert (s.batch_size, s.total_steps, s.total_epochs, s.warmup_steps) == (batch, steps, 0, warmup)


def test_fitted__what_is_given_stays() -> None:
    s = fitted_recipe(finetune(**{"schedule.batch_size": 100}), 1_000).schedule
    assert (s.batch_size, s.total_steps, s.warmup_steps) == (100, 200, 20)
    s = fitted_recipe(finetune(**{"schedule.total_epochs": 3.0}), 1_000).schedule
    assert (s.batch_size, s.total_steps, s.total_epochs, s.warmup_steps) == (64, 0, 3.0, 4)  # of 46 steps
    whole = load_recipe("finetune_pets").recipe
    assert fitted_recipe(whole, 7) is whole


def loaded(name: str | Path, *overrides: Override) -> Loaded:
    return load_recipe(str(name), overrides)


def test_fit__says_where_the_values_come_from() -> None:
    found = fit_schedule(loaded("finetune"), 275)
    for name in ("batch_size", "total_steps", "warmup_steps"):
        assert found.origin(f"schedule.{name}") == "chosen for 275 images"
    assert found.origin("schedule.decay").startswith("finetune.toml:")


def test_fit__a_warmup_in_epochs() -> None:
    """It stays in epochs, unless a flag changes the length; -1 leaves the choice to it."""
    s = fitted_recipe(finetune(**{"schedule.warmup_epochs": 2.0}), 1_000).schedule
    assert (s.batch_size, s.warmup_steps, s.warmup_epochs, warmup_of(s, 1_000)) == (64, 0, 2.0, 31)
    own = loaded("mae_b16")
    settled = fit_schedule(own, 1_281_167).recipe
    assert (settled.schedule, settled.optimizer.lr) == (own.recipe.schedule, own.recipe.optimizer.lr)
    shorter = loaded(
        "mae_b16",
        Override("schedule.total_epochs", 50.0, "--epochs"),
        Override("schedule.warmup_steps", -1, "--epochs, in proportion"),
    )
    assert needs_num_images(shorter.recipe)
    found = fit_schedule(shorter, 1_281_167)
    s = found.recipe.schedule
    assert (s.warmup_steps, s.warmup_epochs, warmup_of(s, 1_281_167)) == (0, 2.5, 6_255 // 2)
    assert found.origin("schedule.warmup_epochs") == "the recipe's, in proportion to the length"


SHORTER, LONGER, HALF = 0.25, 3.0, 0.5


@each("images", [128, 3_680, 1_281_167])
@each("batch", [0, 16, 256])
@each("recipe", ["mae_b16", "deit3_s16", "finetune_pets", "jft_b16"])
def test_fit__the_share_of_a_warmup_depends_on_the_length_only(recipe: str, batch: int, images: int) -> None:
    """The recipe's own length, given again, changes nothing; a longer run keeps the warm-up."""

    def fitted(factor: float) -> Schedule:
        flags: Flags = {"--batch-size": ("schedule.batch_size", batch)} if batch else {}
        if factor:
            flag, key = ("--epochs", "total_epochs") if own.total_epochs else ("--steps", "total_steps")
            flags[flag] = f"schedule.{key}", type(getattr(own, key))(getattr(own, key) * factor)
        found = fit_schedule(loaded(recipe, *overrides_of(flags, ())), images).recipe
        return found.schedule

    whole = load_recipe(recipe).recipe
    own = whole.schedule
    plain = fitted(0)
    assert fitted(1.0) == plain
    for factor in (SHORTER, HALF, LONGER):
        s, share = fitted(factor), min(factor, 1.0)
        assert s.warmup_epochs == plain.warmup_epochs * share
        assert s.warmup_steps == int(plain.warmup_steps * share)


def test_overrides__a_warmup_that_is_given_replaces_the_recipes() -> None:
    """In steps or in epochs, and whether the length changes or not; both at once contradict each other."""
    for name, kept in (("mae_b16", "warmup_steps=77"), ("finetune_pets", "warmup_epochs=1.5")):
        for flags in ({}, {"--epochs": ("schedule.total_epochs", 80.0), "x": ("schedule.total_steps", 0)}):
            sets = [f"schedule.{kept}", "optimizer.lr_batch=0"]
            given = loaded(name, *overrides_of(flags, sets)).recipe
            s = fit_schedule(loaded(name, *overrides_of(flags, sets)), 3_680).recipe
            assert s == given
            warmup = (given.schedule.warmup_steps, given.schedule.warmup_epochs)
            assert warmup == ((77, 0.0) if kept == "warmup_steps=77" else (0, 1.5))
    with pytest.raises(RecipeError, match="both set the warm-up"):
        loaded("smoke", *overrides_of({}, ["schedule.warmup_steps=7", "schedule.warmup_epochs=1"]))


@pytest.mark.parametrize(
    ("option", "given", "other"),
    [
        ("--steps", 60, "schedule.total_steps=4000"),
        ("--steps", 60, "schedule.total_epochs=2"),
        ("--lr", 0.1, "optimizer.lr=0.2"),
        ("--lr", 0.1, "sweep.lrs=[0.1,0.2]"),
    ],
)
def test_overrides__a_key_that_is_given_twice_is_refused(option: str, given: Any, other: str) -> None:
    flags = flags_of("finetune", {option.lstrip("-"): given})
    with pytest.raises(RecipeError, match=rf"^{option} sets .* leave one of them out$"):
        overrides_of(flags, [other])
    same = ["schedule.total_steps=60", "schedule.total_epochs=0", "optimizer.lr=0.1", "sweep.lrs=[]"]
    overrides_of(flags, same)


@pytest.mark.slow
def test_finetune__the_run_folder_holds_what_was_fitted(job: Job, tmp_path: Path, tiny_data: Path) -> None:
    """70 images: batches of 8, and 200 updates."""
    from tests.trained import do

    pretrained = job("finetune")["provenance"]["from"]
    do("finetune", tmp_path / "own", **CPU, **{"data.path": str(tiny_data), "weights.source": pretrained})
    text = (tmp_path / "own" / "recipe.toml").read_text()
    values = tomllib.loads(text)["schedule"]
    assert (values["batch_size"], values["total_steps"], values["warmup_steps"]) == (8, 200, 20)
    assert text.count("# chosen for 70 images") == 3
    do("finetune", tmp_path / "own", **CPU, **{"data.path": str(tiny_data), "weights.source": pretrained})


def test_pretrain__still_needs_a_length_and_a_batch() -> None:
    for key in ("schedule.total_steps", "schedule.batch_size"):
        with pytest.raises(RecipeError):
            loaded(TINY, Override(key, 0))
