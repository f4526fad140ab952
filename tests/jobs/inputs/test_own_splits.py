"""A user's data set without a test split: cut by class, scored on validation, or left to what was typed."""

import io
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.conftest import free_port
from tests.trained import CPU, SMALL, Job, do
from vitctl.data.datasets.catalog import open_split
from vitctl.data.datasets.readers.arrays import encode_png
from vitctl.data.source.splits import default_splits
from vitctl.data.writer.intake import Item
from vitctl.data.writer.shard_writer import write_split
from vitctl.errors import DataError, RecipeError
from vitctl.jobs.inputs.checks import check_choices, fit_splits
from vitctl.jobs.inputs.data import roles_note
from vitctl.recipe.load import Override, load_recipe
from vitctl.recipe.write import flat
from vitctl.system import remote

CUT = {"data.train_split": "train[:80% of each class]", "data.eval_split": "train[80%: of each class]"}
TRIED = {"sweep.train_split": "train[:60% of each class]", "sweep.eval_split": "train[60%:80% of each class]"}


def plant(folder: Path, *splits: str, per_class: int = 5) -> Path:
    for split in splits:
        rng = np.random.default_rng(len(split))
        items = [
            Item(f"{name}/{n}.png", label, partial(encode_png, rng.integers(0, 256, (16, 16, 3), np.uint8)))
            for label, name in enumerate(("cat", "dog"))
            for n in range(per_class)
        ]
        write_split(items, folder / split, ("cat", "dog"), seed=0, source_text="")
    return folder


def fitted(recipe: str, folder: Path, **typed: Any) -> tuple[dict[str, Any], str]:
    overrides = [
        Override("data.path", str(folder), "--data"),
        *(Override(key, value) for key, value in typed.items()),
    ]
    loaded, note = fit_splits(load_recipe(recipe, overrides))
    values = flat(loaded.recipe)
    return {
        key: values[key] for key, origin in loaded.origins.items() if origin == "the splits of --data"
    }, note


@pytest.mark.parametrize(
    ("found", "train", "scored"),
    [
        (["train", "test"], "train", "test"),
        (["train", "validation", "test"], "train", "test"),
        (["train", "val"], "train", "val"),
        (["training", "valid"], "training", "valid"),
        (["photos"], "photos[:80% of each class]", "photos[80%: of each class]"),
    ],
)
def test_own_splits__takes_what_is_there(found: list[str], train: str, scored: str) -> None:
    chosen = default_splits(found)
    assert chosen is not None and (chosen.train, chosen.scored) == (train, scored)
    assert bool(chosen.note) == (found != ["train", "test"])


@pytest.mark.parametrize("name", ["test", "val", "validation"])
@pytest.mark.parametrize("recipe", ["smoke", "finetune"])
def test_fit_splits__what_is_to_be_scored_is_not_trained_on(tmp_path: Path, name: str, recipe: str) -> None:
    """As of `data shards` that was stopped: it writes the test split first."""
    plant(tmp_path, name)
    with pytest.raises(
        DataError, match=rf"holds '{name}' only, and no split to train on; .*`vitctl data shards` again"
    ):
        fitted(recipe, tmp_path)
    assert fitted(
        recipe, tmp_path, **{"data.train_split": "test[:80%]", "data.eval_split": "test[80%:]"}
    ) == ({}, "")


@pytest.mark.parametrize("found", [[], ["a", "b"], ["train", "more"], ["test", "validation"]])
def test_own_splits__guesses_nothing(found: list[str]) -> None:
    assert default_splits(found) is None


def test_fit_splits__cuts_a_set_in_one_piece_for_every_job(tmp_path: Path) -> None:
    plant(tmp_path, "train")
    values, note = fitted("finetune", tmp_path)
    assert values == CUT | TRIED and "train[80%: of each class]" in note
    assert fitted("finetune_pets", tmp_path)[0] == CUT | TRIED  # its sweep would see what is scored
    assert fitted("smoke", tmp_path)[0] == CUT
    assert fitted("fewshot", tmp_path)[0] == CUT
    assert fitted("evaluate", tmp_path)[0] == {"data.eval_split": CUT["data.eval_split"]}


def test_fit_splits__the_four_parts_do_not_overlap(tmp_path: Path) -> None:
    plant(tmp_path, "train", per_class=9)
    keys = {}
    for name, split in (CUT | TRIED).items():
        source = open_split(split, path=str(tmp_path))
        keys[name] = {source.key(n) for n in range(len(source))}
        assert set(source.labels().tolist()) == {0, 1}
    assert not keys["data.train_split"] & keys["data.eval_split"]
    assert keys["sweep.train_split"] | keys["sweep.eval_split"] == keys["data.train_split"]
    assert not keys["sweep.train_split"] & keys["sweep.eval_split"]


def test_fit_splits__validation_is_scored_where_there_is_no_test(tmp_path: Path) -> None:
    plant(tmp_path, "train", "validation")
    values, note = fitted("finetune", tmp_path)
    assert values == {"data.train_split": "train", "data.eval_split": "validation"}
    assert note == "'train' is trained on, 'validation' is scored"
    assert fitted("evaluate", tmp_path)[0] == {"data.eval_split": "validation"}
    assert fitted("jft_b16", tmp_path) == ({}, "")


CHOOSES = {
    "evaluation.select_best": True,
    "checkpoint.keep_best": 1,
    "checkpoint.every_steps": 2,
    "evaluation.every_steps": 2,
}


@pytest.mark.parametrize(
    ("splits", "train", "chosen_by"),
    [
        (("train", "validation", "test"), "train", "validation"),
        (("train", "test"), "train[:90%]", "train[90%:]"),
        (("train", "val"), "train", "val"),
        (("photos",), "photos[:60% of each class]", "photos[60%:80% of each class]"),
    ],
)
def test_choices__are_made_by_validation_or_training_images(
    tmp_path: Path, splits: tuple[str, ...], train: str, chosen_by: str
) -> None:
    """A checkpoint, a learning rate, a temperature: each by the line that names the splits; never by test."""
    plant(tmp_path, *splits)
    for recipe in ("smoke", "finetune"):
        values, note = fitted(recipe, tmp_path, **CHOOSES)
        recorded = load_recipe(recipe, [Override(*one) for one in (CHOOSES | values).items()]).recipe.data
        assert (recorded.train_split, recorded.eval_split) == (train, chosen_by)
        assert not values or f"'{chosen_by}' " in note
    tried = fitted("finetune", tmp_path, **{"sweep.lrs": (0.01, 0.1)})[0]
    by_default = {"sweep.train_split": "train[:90%]", "sweep.eval_split": "train[90%:]"}
    rate = by_default | {key: value for key, value in tried.items() if key in by_default}
    of_train = ("train[:90%]", "train[90%:]") if splits == ("train", "val") else (train, chosen_by)
    assert (rate["sweep.train_split"], rate["sweep.eval_split"]) == of_train
    values, note = fitted("evaluate", tmp_path, **{"evaluation.fit_temperature": True})
    if chosen_by in splits:
        assert values == {"data.eval_split": chosen_by} and "chooses the temperature" in note


@pytest.mark.parametrize(
    ("recipe", "values"),
    [
        ("finetune", CHOOSES),
        ("smoke", CHOOSES | {"data.eval_split": "test"}),
        ("finetune", {"sweep.lrs": (0.1, 0.2), "sweep.eval_split": "train[90%:]+testing"}),
        ("evaluate", {"evaluation.fit_temperature": True}),
        ("evaluate", {"evaluation.fit_temperature": True, "data.eval_split": "test"}),
        *(
            ("smoke", CHOOSES | {"data.eval_split": split})
            for split in (
                "test[0:]",
                "test[:100%]",
                "test[-100%:]",
                "train+testing[0%:100% of each class]",
                "test[:50%]+test[50%:]",
            )
        ),
    ],
)
def test_choices__by_test_images_are_refused(recipe: str, values: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="test it no longer") as caught:
        check_choices(load_recipe(recipe, [Override(key, value) for key, value in values.items()]))
    fix = re.findall(r"--set (\S+)='(\S+)'", str(caught.value))
    [told] = re.findall(r"--split '(\S+)'", str(caught.value)) or [""]
    told = [Override("data.eval_split", told, "--split")] if told else [Override(*one) for one in fix]
    check_choices(load_recipe(recipe, [*(Override(*one) for one in values.items()), *told]))
    part = Override("data.eval_split", "test[:50%]", "--split")  # the other half is left as a test
    check_choices(load_recipe(recipe, [*(Override(*one) for one in values.items()), *told, part]))


def test_choices__a_run_goes_on_with_its_own_but_takes_no_new_ones_of_test() -> None:
    before = load_recipe("smoke", [*CHOOSES.items(), ("data.eval_split", "test")])
    check_choices(before, before.recipe)
    own = load_recipe("smoke", [*CHOOSES.items(), ("data.eval_split", "train[90%:]")])
    with pytest.raises(RecipeError, match="test it no longer"):
        check_choices(before, own.recipe)


def test_choices__a_decay_that_rises_is_refused() -> None:
    rising = ("schedule.end_lr", 0.1)
    for rates in ({"optimizer.lr": 0.01, "sweep.lrs": ()}, {"sweep.lrs": (0.05, 0.2)}):
        with pytest.raises(RecipeError, match=r"end_lr = 0\.1 is above the learning rate 0\.0.*would rise"):
            check_choices(load_recipe("finetune", [*rates.items(), rising]))
        with pytest.raises(RecipeError, match="end_lr does nothing"):
            check_choices(load_recipe("finetune", [*rates.items(), rising, ("schedule.decay", "constant")]))


def test_fit_splits__leaves_what_fits_and_what_was_typed(tmp_path: Path) -> None:
    plant(tmp_path / "two", "train", "test")
    plant(tmp_path / "one", "train")
    assert fitted("finetune", tmp_path / "two") == ({}, "")
    assert fitted("jft_b16", tmp_path / "two")[0] == {"data.train_split": "train", "data.eval_split": "test"}
    assert fitted("finetune", tmp_path / "one", **{"data.eval_split": "dev"}) == ({}, "")
    assert fitted("finetune", tmp_path / "one", **{"data.eval_split": ""}) == ({}, "")
    assert fitted("finetune", tmp_path / "one", **{"data.eval_split": "train[90%:]"}) == ({}, "")
    assert fitted("evaluate", tmp_path / "one", **{"data.eval_split": "train"}) == ({}, "")
    assert fitted("finetune", tmp_path / "none") == ({}, "")


def test_evaluate__a_lone_split_of_another_name_is_scored_whole(tmp_path: Path) -> None:
    plant(tmp_path, "holiday")
    assert fitted("evaluate", tmp_path / "holiday")[0] == {"data.eval_split": "holiday"}


@pytest.mark.slow
def test_finetune__photographs_on_their_side_train_as_those_that_stand(
    pretrained: Path, tmp_path: Path, job: Job
) -> None:
    """Bit for bit the weights of the same pixels stored upright; the result and the stored pre-processing say
    so.
    """
    for name in ("stands", "lies"):
        for split in ("train", "test"):
            items = [Item(str(n), n % 2, partial(_photo, n, 6 if name == "lies" else 1)) for n in range(9)]
            write_split(items, tmp_path / name / split, ("a", "b"), seed=0, source_text="")
    changes = {**CPU, **SMALL, "weights.source": str(pretrained), "data.crop": "inception"}
    runs = {
        run: do("finetune", tmp_path / run, **changes, **values)
        for run, values in {
            "upright": {"data.path": str(tmp_path / "stands")},
            "turned": {"data.path": str(tmp_path / "lies")},
            "left": {"data.path": str(tmp_path / "lies"), "data.exif_orientation": "ignore"},
        }.items()
    }
    used = {run: result["provenance"] for run, result in runs.items()}
    assert (
        used["turned"]["weights_sha256"]
        == used["upright"]["weights_sha256"]
        != used["left"]["weights_sha256"]
    )
    assert {run: one["exif_orientation"] for run, one in used.items()} == {
        "upright": True,
        "turned": True,
        "left": False,
    }
    for run in ("turned", "left"):
        values = {"weights.source": str(tmp_path / run), "data.path": str(tmp_path / "lies")}
        again = job("evaluate", f"again-{run}", **values)
        assert again["metrics"]["correct"] == runs[run]["metrics"]["correct"]
        assert again["provenance"]["exif_orientation"] is used[run]["exif_orientation"]


def _photo(number: int, orientation: int) -> bytes:
    """The same picture, stored so that this orientation shows it."""
    shown = np.random.default_rng(number).integers(0, 256, (20, 30, 3), np.uint8)
    stored = np.rot90(shown, 1) if orientation == 6 else shown
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    Image.fromarray(np.ascontiguousarray(stored)).save(file, "PNG", exif=exif)
    return file.getvalue()


@pytest.mark.parametrize(
    ("values", "upright"),
    [
        ({"data.path": "mine"}, True),
        ({"data.dataset": "pets"}, False),
        ({"data.path": "mine", "data.exif_orientation": "ignore"}, False),
        ({"data.dataset": "pets", "data.exif_orientation": "apply"}, True),
    ],
)
def test_exif_orientation__is_for_own_data(values: dict[str, str], upright: bool) -> None:
    loaded = load_recipe("finetune", [Override(key, value) for key, value in values.items()])
    assert loaded.recipe.data.turns_upright is upright


@pytest.mark.parametrize(
    "recipe", ["jft_b16", "in1k_b16", "in21k_b16", "finetune_imagenet", "finetune_pets", "bit_pets"]
)
def test_exif_orientation__the_recipes_of_the_paper_leave_it(recipe: str) -> None:
    assert not load_recipe(recipe, [Override("data.path", "shards", "--data")]).recipe.data.turns_upright


def test_fit_splits__a_server_that_fails_is_not_asked_a_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PATIENCE", [0.0])
    monkeypatch.setattr(remote, "LEAST_ATTEMPTS", 1)
    place = Override("data.path", f"http://127.0.0.1:{free_port()}/d", "--data")
    with pytest.raises(DataError, match="gave up after 1 attempt"):
        fit_splits(load_recipe("evaluate", [place]))


def test_fit_splits__test_images_of_a_known_set_choose_nothing() -> None:
    given = {"data.dataset": "cifar10", "evaluation.select_best": True, "checkpoint.keep_best": 1}
    loaded = load_recipe("finetune", [Override(*one) for one in given.items()])
    fitted, note = fit_splits(loaded)
    assert (fitted.recipe.data.train_split, fitted.recipe.data.eval_split) == ("train[:90%]", "train[90%:]")
    assert "test images choose nothing" in note
    asked = load_recipe(
        "finetune",
        [*(Override(*one) for one in given.items()), Override("data.eval_split", "test", "--split")],
    )
    assert fit_splits(asked)[0].recipe.data.eval_split == "test"


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ({}, "trained on 'train' (9 images), nothing chosen, scored on 'test' (3"),
        (
            {"sweep.lrs": (0.1, 0.2)},
            "trained on 'train' (9 images), learning rate chosen on 'train[90%:]', scored on",
        ),
        (
            {"evaluation.select_best": True, "checkpoint.keep_best": 1, "data.eval_split": "val"},
            "trained on 'train' (9 images), checkpoint chosen on 'val', scored on 'val' (3 images)",
        ),
    ],
)
def test_roles__are_said_in_one_line(sets: dict[str, object], said: str) -> None:
    recipe = load_recipe("finetune", [Override(*one) for one in sets.items()]).recipe
    assert roles_note(recipe, 9, 3).startswith(said)
