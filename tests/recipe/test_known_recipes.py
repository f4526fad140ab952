"""The numbers of recipes whose result others published, as a second reading of the sources has them."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.matrix import each, slow
from tests.trained import do
from vitctl.jobs.plan import plan_training
from vitctl.recipe.known import Comparison, bands
from vitctl.recipe.load import load_recipe, recipe_names
from vitctl.recipe.schema import Pretrain, Probe, TrainRecipe
from vitctl.recipe.write import flat

IMAGENET = 1_281_167
COLUMNS = (
    "schedule.batch_size", "length", "warmup", "schedule.end_lr", "optimizer.name", "optimizer.lr",
    "optimizer.weight_decay", "optimizer.layer_decay", "drop_path", "data.image_size", "data.eval_resize",
    "data.mixup_alpha", "data.cutmix_alpha", "data.random_erasing", "loss.label_smoothing",
)  # fmt: skip
# A row for each recipe: COLUMNS, then the accuracy in percent and its spread. Length and warm-up in
# epochs, or steps.
TABLE: dict[str, tuple[Any, ...]] = {
    "mae_b16": (
        1024,
        100,
        5,
        1e-6,
        "adam",
        5e-4 * 4,
        0.05,
        0.65,
        0.1,
        224,
        256,
        0.8,
        1,
        0.25,
        0.1,
        83.57,
        0.094,
    ),
    "mae_l16": (
        1024,
        50,
        5,
        1e-6,
        "adam",
        1e-3 * 4,
        0.05,
        0.75,
        0.2,
        224,
        256,
        0.8,
        1,
        0.25,
        0.1,
        85.87,
        0.079,
    ),
    "augreg_b32_imagenet": (512, 20000, 500, 0, "sgd", 0.03, 0, 1, 0, 384, 448, 0, 0, 0, 0, 83.27, 0.0473),
    "augreg_b32_cifar10": (512, 10000, 500, 0, "sgd", 0.003, 0, 1, 0, 384, 448, 0, 0, 0, 0, 98.55, 0.0602),
    "augreg_b32_cifar100": (512, 10000, 500, 0, "sgd", 0.01, 0, 1, 0, 384, 448, 0, 0, 0, 0, 91.35, 0.2279),
    "augreg_b32_pets": (512, 500, 100, 0, "sgd", 0.003, 0, 1, 0, 384, 448, 0, 0, 0, 0, 93.78, 0.1634),
    "augreg_b32_flowers102": (512, 500, 100, 0, "sgd", 0.003, 0, 1, 0, 384, 448, 0, 0, 0, 0, 99.43, 0.047),
    "deit3_s16": (2048, 800, 5, 1e-5, "lamb", 4e-3, 0.05, 1, 0.05, 224, 0, 0.8, 1, 0, 0, 81.38, 0),
    "deit3_b16": (2048, 800, 5, 1e-5, "lamb", 3e-3, 0.05, 1, 0.2, 192, 0, 0.8, 1, 0, 0, 82.82, 0),
    "deit3_l16": (2048, 800, 5, 1e-5, "lamb", 3e-3, 0.05, 1, 0.45, 192, 0, 0.8, 1, 0, 0, 84.02, 0),
    "deit3_h14": (2048, 800, 5, 1e-5, "lamb", 3e-3, 0.05, 1, 0.6, 160, 0, 0.8, 1, 0, 0, 83.48, 0),
    "eva02_s14": (1024, 100, 5, 0, "adam", 1e-4, 0.05, 0.8, 0.1, 336, 336, 0, 0, 0, 0.1, 85.78, 0),
    "eva02_b14": (1024, 30, 3, 0, "adam", 1e-4, 0.05, 0.7, 0.1, 448, 448, 0, 0, 0, 0.1, 88.282, 0),
    "beit2_b16": (1024, 100, 20, 1e-6, "adam", 5e-4, 0.05, 0.6, 0.2, 224, 256, 0.8, 1, 0.25, 0.1, 85.5, 0),
    "beit2_b16_in21k": (
        1024,
        30,
        20,
        1e-6,
        "adam",
        5e-5,
        0.05,
        0.75,
        0.1,
        224,
        256,
        0,
        0,
        0.25,
        0.1,
        86.458,
        0,
    ),
    "better_in1k_s16": (1024, 90, 10000, 0, "adam", 1e-3, 0.1, 1, 0, 224, 256, 0.2, 0, 0, 0, 76.5, 0),
    "better_in1k_s16_300ep": (1024, 300, 10000, 0, "adam", 1e-3, 0.1, 1, 0, 224, 256, 0.2, 0, 0, 0, 80, 0),
    "short_cifar10": (512, 500, 50, 0, "sgd", 0.03, 0, 1, "as_stored", 384, 0, 0, 0, 0, 0, 98.59, 0),
    "short_cifar10_1000": (512, 1000, 100, 0, "sgd", 0.03, 0, 1, "as_stored", 384, 0, 0, 0, 0, 0, 98.86, 0),
    "short_cifar100": (512, 500, 50, 0, "sgd", 0.03, 0, 1, "as_stored", 384, 0, 0, 0, 0, 0, 89.17, 0),
    "short_cifar100_1000": (512, 1000, 100, 0, "sgd", 0.03, 0, 1, "as_stored", 384, 0, 0, 0, 0, 0, 91.15, 0),
    "cifar10_vit": (128, 117100, 11710, 1e-6, "adam", 1e-3, 0.05, 1, 0.1, 32, 0, 1, 1, 0.25, 0.1, 93.58, 0),
    "cifar10_vit_lite": (128, 200, 5, 0, "adam", 5e-4, 0.03, 1, 0.1, 32, 0, 0, 0, 0, 0.1, 91.38, 0),
}
# Accuracies along the runs of DeiT III, in percent, after 5, 50, 100, 400 and 700 epochs.
CURVES = {
    "deit3_s16": (2.01, 53.63, 63.12, 74.45, 81.01),
    "deit3_b16": (2.84, 56.57, 67.20, 78.00, 82.55),
    "deit3_l16": (2.96, 55.81, 68.10, 79.62, 83.87),
    "deit3_h14": (2.55, 47.30, 62.44, 77.72, 83.24),
}


def values_of(name: str) -> dict[str, Any]:
    recipe = load_recipe(name).recipe
    assert isinstance(recipe, TrainRecipe)
    values = flat(recipe)
    values["length"] = recipe.schedule.total_epochs or recipe.schedule.total_steps
    values["warmup"] = recipe.schedule.warmup_epochs or recipe.schedule.warmup_steps
    values["drop_path"] = values.get("drop_path", values.get("model.drop_path")) or 0
    return {"optimizer.layer_decay": 1.0, **values}


@each("name", TABLE)
def test_recipe__has_the_published_numbers(name: str) -> None:
    *settings, accuracy, spread = TABLE[name]
    values = values_of(name)
    found = [values[key] for key in COLUMNS]
    assert found == [pytest.approx(one) if isinstance(one, float) else one for one in settings]
    assert "Not the paper's" in values["note"]
    last = max(values["known.points"], key=lambda point: point.at)
    assert values["known.length"] == last.at == values["length"]
    assert [100 * last.value, 100 * last.spread] == pytest.approx([accuracy, spread], abs=1e-4)


TIMMS = {
    "data.randaugment_rules": "timm",
    "data.randaugment_layers": 2,
    "data.randaugment_magnitude": 9,
    "data.randaugment_probability": 0.5,
    "data.randaugment_std": 0.5,
    "data.randaugment_increasing": True,
    "data.crop": "random_resized",
    "data.crop_scale": (0.08, 1.0),
    "data.crop_ratio": (3 / 4, 4 / 3),
    "data.resample": "bicubic_antialias",
}


@each("name", [name for name in TABLE if name.startswith(("mae", "eva02", "beit2", "deit3"))])
def test_recipe__crops_and_distorts_as_timms_program(name: str) -> None:
    """rand-m9-mstd0.5-inc1 in all but DeiT III; BEiT decays its tables of positions, as its authors do."""
    wanted = {key: value for key, value in TIMMS.items() if "rand" not in key or name[:4] != "deit"}
    wanted["data.crop"] = "random_resized"
    values = values_of(name)
    assert {key: values[key] for key in wanted} == wanted
    tables = "_and_relative" if name.startswith("beit2") else ""
    assert values["optimizer.decay_on"] == f"matrices{tables}"
    assert values["schedule.warmup_lr"] == (1e-6 if name.startswith("deit3") else 0)


@pytest.mark.parametrize("name", CURVES)
def test_deit3__has_the_published_curve(name: str) -> None:
    curve = {point.at: 100 * point.value for point in values_of(name)["known.points"]}
    assert [curve[at] for at in (5, 50, 100, 400, 700)] == pytest.approx(CURVES[name])


def test_known__every_accuracy_is_scored() -> None:
    """A point that no score meets would never be compared."""
    named = [name for name in recipe_names() if flat(load_recipe(name).recipe).get("known.points")]
    assert set(TABLE) < set(named)
    for name in named:
        if name.startswith("dinov2_"):
            continue  # a probe's result, see above
        values = values_of(name)
        steps = values["schedule.total_steps"] or IMAGENET * values["length"] // values["schedule.batch_size"]
        if name == "cifar10_small":  # its points are in steps
            steps = known_of(name).length
        every = values["evaluation.every_steps"]
        met = range(every, int(steps), every) if every else ()
        for band in bands(known_of(name), int(steps))[
            "accuracy"
        ]:  # steps of other points are logged for them
            assert any(abs(step - band.step) <= 0.01 * band.step for step in (*met, int(steps))), name


def known_of(name: str) -> Any:
    recipe = load_recipe(name).recipe
    assert isinstance(recipe, TrainRecipe | Probe)
    return recipe.known


@pytest.mark.parametrize(
    ("size", "knn", "linear"), [("s", 79.1, 80.9), ("b", 82.0, 84.6), ("l", 83.8, 86.7), ("g", 83.7, 87.1)]
)
def test_dinov2__has_the_published_numbers(size: str, knn: float, linear: float) -> None:
    for method, accuracy in (("knn", knn), ("linear", linear)):
        recipe = load_recipe(f"dinov2_{size}14_{method}").recipe
        assert isinstance(recipe, Probe)
        (point,) = recipe.known.points
        assert 100 * point.value == pytest.approx(accuracy) and point.at == recipe.known.length
        d = recipe.data  # as in make_classification_eval_transform of the authors
        assert (d.image_size, d.eval_method, d.eval_resize) == (224, "torchvision", 256)
        assert (d.eval_resample or d.resample, recipe.weights.preprocess) == ("bicubic_antialias", "imagenet")
        assert (recipe.probe.method, recipe.data.dataset, recipe.known.num_classes) == (
            method,
            "imagenet",
            1000,
        )
        assert method == "knn" or recipe.known.length == recipe.probe.steps
        assert f"{accuracy} %" in recipe.note and "Not the paper's" in recipe.note


def test_flowers__band_is_wider_than_a_range_of_two_images() -> None:
    """Seeds of other recipes vary by sqrt(share * errors) images; this range is taken for chance."""
    sizes = {"imagenet": 50_000, "cifar10": 10_000, "cifar100": 10_000, "pets": 3669, "flowers102": 6149}
    names = {name: name.rpartition("_")[2] for name in TABLE if name.startswith("augreg_b32")}
    names |= {"mae_b16": "imagenet", "mae_l16": "imagenet"}
    shares = {}
    for name, data_set in names.items():
        (point,) = known_of(name).points
        shares[name] = point.spread**2 * sizes[data_set] / (1 - point.value)
    flowers = shares.pop("augreg_b32_flowers102")
    assert flowers == pytest.approx(np.median(list(shares.values())), rel=0.05)


@pytest.mark.parametrize(
    ("name", "parameters"), [("cifar10_vit_lite", 3.717e6), *slow(("cifar10_vit", 2.7e6))]
)
def test_cifar10__networks_and_bands_of_10000_images(name: str, parameters: float, tmp_path: Path) -> None:
    """The sizes that the authors print, three steps on noise, and a band wider than the sampling error."""
    recipe = load_recipe(name).recipe
    assert isinstance(recipe, Pretrain)
    assert plan_training(recipe).parameters == pytest.approx(parameters, rel=0.003)
    few = {"schedule.total_steps": 3, "schedule.total_epochs": 0.0, "schedule.warmup_steps": 1}
    few |= {"schedule.warmup_epochs": 0.0, "schedule.batch_size": 8, "data.synthetic": 16, "model.depth": 2}
    do(name, tmp_path / "run", **few, **{"machine.workers": 0, "machine.device": "cpu", "log.every_steps": 1})
    records = map(json.loads, (tmp_path / "run" / "log.jsonl").read_text().splitlines())
    losses = [record["loss"] for record in records if record["kind"] == "train"]
    assert len(losses) == 3 and all(0 < loss < 4 for loss in losses)
    (band,) = bands(recipe.known, 1000)["accuracy"]
    (point,) = recipe.known.points
    sampling = math.sqrt(point.value * (1 - point.value) / 10_000)
    assert f"{100 * sampling:.2f} points" in recipe.known.source
    assert point.value - band.low > 2.3 * sampling < band.high - point.value


FLAGGED = {  # before which step, and how many of the runs with each mistake
    "smoke": (100, 20, 40, {"rate x 4": (4, 5), "training labels shifted by one": (3, 5)}, (5, 5)),
    "cifar10_small": (196, 10, 10, {}, (2, 2)),
}


@pytest.mark.parametrize("name", FLAGGED)
def test_ours__band_is_of_its_runs_and_flags_mistakes_alone(name: str) -> None:
    """The committed numbers of all runs: the points are of the first ones, the others are judged by them."""
    end, seeds, num_fresh, odd, usual = FLAGGED[name]
    path = Path(__file__).parents[2] / "benchmarks/results/known_bands.json"
    runs = json.loads(path.read_text())[name]
    known = known_of(name)
    for point in known.points:
        place = (point.at, point.metric)
        some = [value for run in runs["honest"] for at, metric, value in run if (at, metric) == place]
        assert len(some) == seeds
        assert [point.value, point.spread] == pytest.approx([np.mean(some), np.std(some, ddof=1)], rel=1e-3)

    def flagged(run: list[tuple[int, str, float]]) -> bool:
        comparison = Comparison(known, int(known.length), known.length, known.num_classes)
        for at, metric, value in sorted(run):
            comparison.of(at, **{metric: value})
        return comparison.flagged

    fresh = runs["honest, fresh"]
    assert len(fresh) == num_fresh and not any(map(flagged, fresh))
    wrong = {mistake: some for mistake, some in runs.items() if not mistake.startswith("honest")}
    for mistake, some in wrong.items():
        before = [flagged([number for number in run if number[0] < end]) for run in some]
        assert (sum(before), len(some)) == odd.get(mistake, usual)
        assert all(max(at for at, *_ in run) <= end and flagged(run) for run in some)
    assert len(wrong) == 6
