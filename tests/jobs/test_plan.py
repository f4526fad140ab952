"""What a run will cost, without data; and what is refused before the first process."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import TINY
from vitctl.data.datasets.png import encode_png
from vitctl.data.shards import Item, write_split
from vitctl.errors import DataError, RecipeError, VitctlError
from vitctl.jobs.plan import check, make_plan
from vitctl.recipe.load import Override, load_recipe


def recipe(name: str | Path, **values: Any) -> Any:
    return load_recipe(str(name), [Override(key, value) for key, value in values.items()]).recipe


def test_make_plan__of_data_that_is_there_counts_it(tiny_data: Path) -> None:
    plan = make_plan(recipe(TINY, **{"data.path": str(tiny_data)}))
    assert (plan.num_images, plan.num_classes, plan.steps, plan.tokens) == (70, 6, 20, 17)
    assert plan.epochs == 20 * 16 / 70
    assert plan.checkpoint_bytes == 4 * plan.parameters * 4
    assert plan.curve[-1][0] == 19


def test_make_plan__of_a_known_set_needs_nothing_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = make_plan(recipe("jft_h14"))
    assert (plan.parameters, plan.num_images) == (655_835_251, 303_000_000)
    assert plan.data == "jft300m, as known by name"
    assert 0 < plan.fitting_micro_batch < 4096
    assert list(tmp_path.iterdir()) == []


def test_make_plan__several_processes_share_the_batch() -> None:
    plan = make_plan(recipe("jft_b16", **{"machine.processes": 3, "machine.micro_batch": 64}))
    assert plan.micro_batch == 64
    assert make_plan(recipe("jft_b16", **{"machine.processes": 3})).micro_batch == 1366


def test_make_plan__synthetic() -> None:
    plan = make_plan(recipe("jft_b16", **{"data.synthetic": 4096 * 20_000}))
    assert (plan.num_classes, plan.steps) == (18_291, 140_000)


def test_make_plan__of_unknown_data() -> None:
    with pytest.raises(
        RecipeError, match="the plan needs the number of images of nowhere: no shards are there; give shards"
    ):
        make_plan(recipe(TINY, **{"data.path": "nowhere"}))


def test_make_plan__finetune_takes_the_architecture_of_the_weights(pretrained: Path) -> None:
    plan = make_plan(recipe("finetune_pets", **{"weights.source": str(pretrained)}))
    assert (plan.num_images, plan.num_classes, plan.config.depth) == (3_680, 37, 2)
    assert (plan.config.image_size, plan.config.representation_size) == (384, 0)
    assert plan.curve[0] == (0, 0.0)


def test_check__a_good_recipe_passes_and_writes_nothing(tiny_data: Path, tmp_path: Path) -> None:
    check(recipe(TINY, **{"data.path": str(tiny_data)}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model.name": "B16"}, "unknown model 'B16'"),
        ({"model.num_heads": 5}, "hidden_size 24 is not a multiple of num_heads 5"),
        ({"model.name": "Ti/32"}, "patch_size 32 is larger than image_size 16"),
        ({"checkpoint.keep_best": 1, "evaluation.every_steps": 0}, "checkpoint.keep_best needs evaluation.every_steps"),
        (
            {"schedule.total_steps": 0, "schedule.total_epochs": 1.0},
            "4 steps (1 epochs of 70 images in batches of 16) leave nothing",
        ),
        ({"data.eval_split": "tset"}, "has no split 'tset'"),
    ],
)
def test_check__refuses_in_one_line(tiny_data: Path, tmp_path: Path, values: dict[str, Any], said: str) -> None:
    with pytest.raises(VitctlError) as caught:
        check(recipe(TINY, **{"data.path": str(tiny_data), **values}), tmp_path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_check__jft_without_data_says_all_that_the_user_can_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as caught:
        check(recipe("jft_h14"), tmp_path / "run")
    said = str(caught.value)
    for words in (
        "split 'train'",
        "18,291 classes",
        "data/jft300m",
        "--data",
        "vitctl data shards",
        "--dry-run",
        "--synthetic",
    ):
        assert words in said
    assert "\n" not in said


def several_labels(folder: Path, *labels: tuple[int, ...]) -> Path:
    items = [Item(str(n), own, partial(encode_png, np.full((8, 8), n, np.uint8))) for n, own in enumerate(labels)]
    for split in ("train", "test"):
        write_split(items, folder / split, ("a", "b", "c"), seed=0, source_text="")
    return folder


def test_check__several_labels_need_the_sigmoid_and_at_least_one_each(tmp_path: Path) -> None:
    data = several_labels(tmp_path / "data", *[(0, 1), (2,)] * 40)
    check(recipe(TINY, **{"data.path": str(data), "loss.name": "sigmoid"}), tmp_path)
    with pytest.raises(
        RecipeError, match=r"loss.name = 'softmax' needs one label per image.*; set loss.name = 'sigmoid'"
    ):
        check(recipe(TINY, **{"data.path": str(data), "loss.name": "softmax"}), tmp_path)
    data = several_labels(tmp_path / "more", *[(0, 1), (), (2,)] * 40)
    with pytest.raises(DataError, match="'train' has images without a label"):
        check(recipe(TINY, **{"data.path": str(data), "loss.name": "sigmoid"}), tmp_path)
