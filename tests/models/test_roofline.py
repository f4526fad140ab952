"""Expected times of steps on GPUs: FLOPs against an independent count, rates against published ones."""

import re

import pytest

from tests.conftest import ROOT
from vitctl.errors import RecipeError
from vitctl.models.flops import PEAK_TFLOPS, count_parameters, forward_flops
from vitctl.models.roofline import MEMORY, estimate, find_device, kernels
from vitctl.models.variants import variant


@pytest.mark.parametrize("name", ["Ti/16", "B/16", "H/14"])
@pytest.mark.parametrize("classifier", ["token", "patches"])
def test_flops_are_those_that_the_cost_of_layers_counts(name: str, classifier: str) -> None:
    config = variant(name, image_size=224, num_classes=10, classifier=classifier)
    flops = sum(kernel.flops * kernel.times for kernel in kernels(config, 3, training=False))
    assert flops == 3 * forward_flops(config)


def test_products_of_large_steps_bound_the_time_from_below() -> None:
    config = variant("B/16", image_size=224, num_classes=10)
    step = estimate(config, "A100", 256)
    assert 0 < step.mfu < 1
    assert step.seconds["matrices"] > 3 * 256 * 2 * 16.9e9 / 312e12  # 16.9 GMACs of matrices for each image
    assert estimate(config, "A100", 256, compiled=False).images_per_second < step.images_per_second
    assert estimate(config, "A100", 256, training=False).images_per_second > 3 * step.images_per_second


def test_the_update_reads_and_writes_every_weight() -> None:
    config = variant("Ti/16", image_size=224, num_classes=10)
    one, many = (estimate(config, "H100", images).seconds["optimizer"] for images in (1, 64))
    assert one == many >= 28 * count_parameters(config) / 3350e9


# timm, results/*.csv at aa4b5850: compiled, fp16, images per second.
@pytest.mark.parametrize(
    ("name", "size", "batch", "device", "rate"),
    [
        ("S/16", 224, 256, "GeForce RTX 4090", 9665.97),
        ("B/16", 224, 256, "GeForce RTX 4090", 3345.67),
        ("B/32", 224, 256, "GeForce RTX 4090", 11925.14),
        ("L/16", 384, 256, "GeForce RTX 4090", 343.49),
        ("B/16", 224, 1024, "GeForce RTX 5090", 4378.83),
        ("H/14", 224, 1024, "GeForce RTX 5090", 505.25),
    ],
)
def test_published_rates_are_within_a_quarter(
    name: str, size: int, batch: int, device: str, rate: float
) -> None:
    config = variant(name, image_size=size, num_classes=1000, classifier="patches")
    assert estimate(config, device, batch, training=False).images_per_second == pytest.approx(rate, rel=0.25)


def test_find_device__takes_names_in_any_case_with_or_without_the_brand() -> None:
    assert {find_device(name) for name in ("rtx 4090", " GeForce RTX 4090", "NVIDIA GeForce RTX 4090")} == {
        "GeForce RTX 4090"
    }
    for name in ("", "NVIDIA A100-SXM4-40GB", "B/16\n"):  # the A100 of the table has 80 GB
        with pytest.raises(RecipeError, match="choose one of"):
            find_device(name)


def test_what_is_not_known_is_refused() -> None:
    assert MEMORY.keys() <= PEAK_TFLOPS.keys()
    with pytest.raises(RecipeError, match="TPU"):
        estimate(variant("B/16"), "TPU v3", 8)
    with pytest.raises(RecipeError, match="ResNets"):
        estimate(variant("R50x1"), "H100", 8)


def test_docs__ranges_are_those_of_the_table() -> None:
    table = (ROOT / "benchmarks" / "results" / "roofline.md").read_text()
    ranges = {
        name: (float(low), float(high))
        for name, low, high in re.findall(r"- benchmark-(\S+): ([\d.]+) to ([\d.]+), median", table)
    }
    compiled = [ends for name, ends in ranges.items() if "dynamo" in name]
    (trained,) = [ends for name, ends in ranges.items() if name.startswith("train")]
    said = " ".join((ROOT / "docs" / "speed.md").read_text().split())
    low, high = min(ends[0] for ends in compiled), max(ends[1] for ends in compiled)
    assert f"forward passes come out {low} to {high} of what was measured" in said
    assert f"eager training {trained[0]} to {trained[1]}" in said
