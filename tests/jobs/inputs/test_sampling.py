"""Which images a recipe trains on, and what of it is refused before the first step."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import TINY
from tests.data.noted_tables import note_tables
from tests.data.server import Faults, serving
from tests.matrix import each, slow
from tests.trained import CPU, SMALL, do
from vitctl.data.datasets.readers.arrays import encode_png
from vitctl.data.source.order import (
    LaneOrder,
    MixtureOrder,
    Order,
    WindowedOrder,
    lanes_read,
    micro_batches,
)
from vitctl.data.writer.intake import Item
from vitctl.data.writer.shard_writer import write_split
from vitctl.engine.journal import read_records
from vitctl.errors import DataError, RecipeError
from vitctl.jobs.inputs.checks import check_recipe
from vitctl.jobs.inputs.data import (
    check_order,
    default_lanes,
    num_shards,
    open_train,
    sampling_notes,
    training_order,
)
from vitctl.jobs.plan import plan_training
from vitctl.recipe.load import Override, load_recipe
from vitctl.recipe.sections import Schedule
from vitctl.recipe.write import to_toml

NAMES = ("a", "b", "c")


def png(number: int) -> bytes:
    return encode_png(np.random.default_rng(number).integers(0, 256, (16, 16, 3), dtype=np.uint8))


def split(folder: Path, num_images: int, names: tuple[str, ...] = NAMES, shard_size: int = 10) -> Path:
    for name in ("train", "test"):
        items = [
            Item(f"k{number}", number % len(names), partial(png, number)) for number in range(num_images)
        ]
        write_split(items, folder / name, names, seed=1, source_text="noise", max_samples=shard_size)
    return folder


def recipe(path: Path | str = "", **values: Any) -> Any:
    given = {
        **CPU,
        **SMALL,
        "data.path": str(path),
        **{f"data.{key}": value for key, value in values.items()},
    }
    return load_recipe(str(TINY), [Override(key, value) for key, value in given.items()]).recipe


def test_open_train__subsets_nest_and_move_the_digest(tmp_path: Path) -> None:
    folder = split(tmp_path / "d", 90)
    whole = open_train(recipe(folder).data, None)
    keys, digests = {}, {whole.digest}
    for values in (
        {"subset_images": 9},
        {"subset_images": 30},
        {"subset_fraction": 0.5},
        {"subset_images": 9, "subset_seed": 1},
    ):
        source = open_train(recipe(folder, **values).data, None)
        keys[str(values)] = {source.key(sample) for sample in range(len(source))}
        digests.add(source.digest)
    nine, thirty, half, other = keys.values()
    assert (len(nine), len(thirty), len(half), len(other)) == (9, 30, 45, 9)
    assert nine < thirty < half and nine != other
    assert len(digests) == 5
    with pytest.raises(DataError, match="a subset of 91 images was requested, but there are 90"):
        open_train(recipe(folder, subset_images=91).data, None)


def test_open_train__classes_set_the_head(tmp_path: Path) -> None:
    folder = split(tmp_path / "d", 90)
    plan = plan_training(recipe(folder, classes=["c", "a"], subset_fraction=0.5))
    assert (plan.num_images, plan.num_classes, plan.config.num_classes) == (30, 2, 2)
    check_recipe(recipe(folder, classes=["c", "a"]), tmp_path)
    with pytest.raises(DataError, match="there is no class 'd'"):
        check_recipe(recipe(folder, classes=["a", "d"]), tmp_path)


def test_plan__of_a_subset_of_a_known_set_needs_no_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for values, size in (
        ({"data.subset_images": 9_000_000}, 9_000_000),
        ({"data.subset_fraction": 0.1}, 30_300_000),
    ):
        overrides = [Override(key, value) for key, value in values.items()]
        assert plan_training(load_recipe("jft_b16", overrides).recipe).num_images == size


OFF = Schedule(batch_size=8, total_steps=1)


def test_training_order__follows_the_recipe(tmp_path: Path) -> None:
    folder = split(tmp_path / "d", 95)
    source = open_train(recipe(folder).data, None)
    assert num_shards(source) == 10
    assert training_order(recipe(folder).data, source, 3, OFF) == Order(95, 3)
    windowed = recipe(folder, order="windowed", order_window_shards=2).data
    assert training_order(windowed, source, 3, OFF) == WindowedOrder(95, 3, 10, 2)


def test_training_order__lanes_walk_through_windows_of_their_own(tmp_path: Path) -> None:
    """The exact order needs none: there every image has the same chance in every lane."""
    folder = split(tmp_path / "d", 95)
    source, lanes = open_train(recipe(folder).data, None), OFF.model_copy(update={"lanes": 4})
    assert training_order(recipe(folder).data, source, 3, lanes) == Order(95, 3)
    windowed = recipe(folder, order="windowed", order_window_shards=1).data
    assert training_order(windowed, source, 3, lanes) == LaneOrder(WindowedOrder(95, 3, 10, 1), 8, 4)
    check_order(windowed, source, 3, lanes)
    with pytest.raises(
        RecipeError, match=r"windows of data\.order_window_shards = 1 in each of 8 lanes, should be 16"
    ):
        check_order(windowed, source, 3, OFF.model_copy(update={"lanes": 8}))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [4, *slow(6, 8)])
def test_data_lanes__a_node_reads_the_shards_of_its_lanes_alone(tmp_path: Path, processes: int) -> None:
    """Whatever adds the gradients: the partners of MixUp lie in the same lane, too."""
    folder = split(tmp_path / "d", 320)
    source = open_train(recipe(folder).data, None)
    data = recipe(folder, order="windowed", order_window_shards=1, lanes=4).data
    order = training_order(data, source, 3, OFF.model_copy(update={"batch_size": 24}))
    assert order == LaneOrder(WindowedOrder(320, 3, 10, 1), 24, 4)
    read: list[set[int]] = [set() for _ in range(4)]
    for step in range(320 // 24):
        for rank in range(processes):
            for part in micro_batches(24, processes, rank, 2, 4):
                slots = np.array([part.before, *part.slots])
                lanes = slots * 4 // 24
                assert lanes[0] == lanes[1]
                for lane, sample in zip(lanes, order.at(step * 24 + slots)[1] // 10, strict=True):
                    read[lane].add(int(sample))
    shared = sum(map(len, read)) - len(set.union(*read))
    assert shared <= 3 and len(set.union(*read)) >= 31  # lanes share the shards at their ends only


@pytest.mark.slow
def test_data_lanes__of_a_new_run_follow_from_its_nodes(tmp_path: Path) -> None:
    folder = split(tmp_path / "d", 320)
    source = open_train(recipe(folder).data, None)
    data = recipe(folder, order="windowed", order_window_shards=1).data
    lanes = {nodes: default_lanes(data, source, OFF, nodes) for nodes in (1, 2, 3, 4, 5)}
    assert lanes == {1: 1, 2: 2, 3: 4, 4: 4, 5: 4}  # a batch of 8 has two images in each of 4 lanes
    wide = OFF.model_copy(update={"batch_size": 4096})
    assert [default_lanes(data, source, wide, nodes) for nodes in (5, 16, 64)] == [8, 16, 16]
    many = data.model_copy(update={"lanes": 8})
    with pytest.raises(RecipeError, match=r"data\.lanes = 8 needs two images in each lane"):
        check_order(many, source, 3, OFF)
    nodes = (1, 2, 32, 48, 64, 128)
    assert [max(lanes_read(64, number)) for number in nodes] == [64, 32, 2, 2, 1, 1]
    assert [sum(lanes_read(64, number)) for number in nodes] == [64, 64, 64, 96, 64, 128]


def mixed(tmp_path: Path) -> dict[str, Any]:
    one, other = split(tmp_path / "one", 60), split(tmp_path / "other", 20)
    return {"mixture": [{"path": str(one), "weight": 3}, {"path": str(other), "weight": 1.0}]}


def test_mixture__by_recipe(tmp_path: Path) -> None:
    values = mixed(tmp_path)
    loaded = load_recipe(str(TINY), [Override("data.mixture", values["mixture"])])
    (tmp_path / "again.toml").write_text(to_toml(loaded))
    assert load_recipe(str(tmp_path / "again.toml")).recipe == loaded.recipe
    data = recipe(**values).data
    source = open_train(data, None)
    order = training_order(data, source, 0, OFF)
    assert isinstance(order, MixtureOrder) and order.counts == (3072, 1024)
    assert order.orders == (Order(60, 0), Order(20, 1))
    first = sampling_notes(data, source)[0]
    assert first.startswith("mixture: 75.00% of the images from ") and "(60 images, 1 times as often" in first
    assert "mixture: 25.00%" in " ".join(plan_training(recipe(**values)).notes)


def test_mixture__needs_the_same_classes(tmp_path: Path) -> None:
    one, other = split(tmp_path / "one", 60), split(tmp_path / "other", 20, ("a", "x"))
    values: dict[str, Any] = {"mixture": [{"path": str(path), "weight": 1} for path in (one, other)]}
    with pytest.raises(DataError, match=r"3 classes \(a, b, c\) and 2 classes \(a, x\)"):
        check_recipe(recipe(**values), tmp_path)


def test_mixture__trains_and_says_its_shares(tmp_path: Path) -> None:
    values = {f"data.{key}": value for key, value in mixed(tmp_path).items()}
    result = do(
        TINY,
        tmp_path / "run",
        **{**CPU, **SMALL, **values, "evaluation.every_steps": 0, "checkpoint.keep_best": 0},
    )
    assert result["status"] == "done"
    assert result["provenance"]["num_train"] == 80
    texts = [
        record["text"] for record in read_records(tmp_path / "run" / "log.jsonl") if record["kind"] == "data"
    ]
    assert [text[:15] for text in texts] == ["mixture: 75.00%", "mixture: 25.00%"]


@each(
    ("values", "message"),
    [
        ({"subset_images": 5, "subset_fraction": 0.5}, "set data.subset_fraction only"),
        ({"order_window_shards": 3}, "does nothing for order = 'exact'"),
        ({"mixture": [{"path": "a", "weight": 0}]}, "mixture"),
        ({"mixture": [{"path": "a", "weight": 1}], "synthetic": 8}, "synthetic images cannot be mixed"),
        ({"mixture": [{"path": "a", "wait": 1}]}, "mixture"),
        ({"randaugment_rules": "big_vision"}, "randaugment_rules = 'big_vision' does nothing without layers"),
        ({"randaugment_std": 0.5}, "randaugment_std belongs to randaugment_rules = 'timm'"),
        (
            {"randaugment_rules": "timm", "randaugment_layers": 2, "randaugment_magnitude": 27},
            "randaugment_magnitude = 27 should be at most 10 for timm",
        ),
        ({"crop_scale": [0.2, 1.0]}, "crop_scale belongs to crop = 'random_resized'"),
        ({"crop": "random_resized", "crop_scale": [0.2, 8]}, "should be shares of the area"),
        ({"crop": "random_resized", "crop_ratio": [2, 0.5]}, "two numbers above 0, the smaller first"),
        ({"repeats": 2, "order": "windowed"}, "set data.order = 'exact'"),
        ({"repeats": 2, "synthetic": 8}, "synthetic images are square noise"),
        ({"crop": "letterbox", "synthetic": 8}, "synthetic images are square noise"),
        (
            {"eval_method": "letterbox", "eval_resize": 99},
            "eval_resize = 99 does nothing .*set data.eval_resize = 0",
        ),
        ({"color_jitter": (0.3, 0.3)}, "should be one strength, three or four"),
        ({"color_jitter": (0.3, 0.3, 0.3, 0.6)}, r"hue\) at most 0.5"),
        ({"color_jitter": -0.3}, "should be one strength, three or four"),
    ],
)
def test_recipe__refuses_what_does_not_go_together(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe("x", **values)


def test_check__repeats_need_two_images_in_a_batch(tmp_path: Path) -> None:
    folder = split(tmp_path / "d", 90)
    check_recipe(recipe(folder, repeats=4), tmp_path)
    with pytest.raises(RecipeError, match=r"schedule.batch_size is 8; set it to at least 10$"):
        check_recipe(recipe(folder, repeats=5), tmp_path)


def test_check__too_few_shards_is_one_line(tmp_path: Path) -> None:
    folder = split(tmp_path / "d", 90)
    with pytest.raises(
        RecipeError, match=r"9 shards are too few for windows of data.order_window_shards = 5.*10"
    ) as caught:
        check_recipe(recipe(folder, order="windowed", order_window_shards=5), tmp_path)
    assert "\n" not in str(caught.value)
    check_recipe(recipe(folder, order="windowed", order_window_shards=2), tmp_path)


def test_check__shards_sorted_by_class_are_one_line(tmp_path: Path) -> None:
    folder = split(tmp_path / "d", 600, tuple("abcdefghij")) / "train"
    values = {"eval_split": "", "order": "windowed", "order_window_shards": 4}
    check_recipe(recipe(folder, **values), tmp_path)
    rows = np.load(folder / "samples.npy")
    rows["label"].sort()
    np.save(folder / "samples.npy", rows)
    note_tables(folder)
    expected = (
        r"entropy of [012]\.\d\d bits, those of random ones [23]\.\d\d: the shards are sorted by class; "
        r"write them"
    )
    with pytest.raises(RecipeError, match=expected) as caught:
        check_recipe(recipe(folder, **values), tmp_path)
    assert "\n" not in str(caught.value)
    check_recipe(recipe(folder, eval_split=""), tmp_path)  # the exact order mixes them


@pytest.mark.slow
def test_check__remote_shards_and_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path / "cache"))
    folder = split(tmp_path / "d", 90)
    size = (folder / "train" / "shard-000000.tar").stat().st_size
    windowed = {"order": "windowed", "order_window_shards": 2}
    with serving(folder, Faults()) as url:
        for values, message in (
            ({"cache_gib": 0.0, **windowed}, "reads whole remote shards, and data.cache_gib = 0 keeps none"),
            ({"cache_gib": 3 * size / 2**30, **windowed}, "too small: two windows of shards need"),
            ({"cache_gib": 3 * size / 2**30}, r"too small: all shards, .* set data.order = 'windowed'"),
        ):
            with pytest.raises(RecipeError, match=message) as caught:
                check_recipe(recipe(url, **values), tmp_path)
            assert "\n" not in str(caught.value)
        for values in ({"cache_gib": 0.0}, windowed, {}):
            check_recipe(recipe(url, **values), tmp_path)
        assert any("image by image" in note for note in plan_training(recipe(url, cache_gib=0.0)).notes)
        values = {**CPU, **SMALL, "data.order": "windowed", "data.order_window_shards": 2}
        far = do(TINY, tmp_path / "far", **values, **{"data.path": url})
        assert "through the cache" in (tmp_path / "far" / "log.jsonl").read_text()
    near = do(TINY, tmp_path / "near", **values, **{"data.path": str(folder)})
    assert far["provenance"]["weights_sha256"] == near["provenance"]["weights_sha256"]
