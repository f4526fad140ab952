"""`bench data`: its numbers agree with each other."""

from pathlib import Path

import pytest

from tests.bench.conftest import tiny_recipe
from vitctl.bench import loader_rate
from vitctl.bench.loader_rate import bench_data, loader_numbers
from vitctl.bench.measuring import Budget


@pytest.mark.slow
def test_data__numbers_agree(tiny_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_rate, "_LEAST_CPU", 0.0)  # a busy machine gives little of its processor
    recipe = tiny_recipe(**{"data.path": str(tiny_data), "machine.workers": 1})
    found = bench_data(recipe, Budget(1.0))
    assert found["images_per_second"] == found["images"] / found["seconds"] == found["images_per_worker"]
    assert found["images_per_cpu_second"] == pytest.approx(found["images"] / found["cpu_seconds"])
    assert found["image_bytes"] > 0
    assert found["num_images"] == 70


def test_rate__of_little_or_of_broken_images_has_a_note() -> None:
    [early] = loader_numbers(2, 64, 0.005, 0.0)["notes"]
    assert early.startswith("the loader was measured for only 0.005 s on 64 images")
    [note] = loader_numbers(1, 2000, 2.0, 1.5, bad=27)["notes"]
    assert note.startswith("27 of the 2,000 images could not be used")
    of_two = loader_numbers(2, 200, 2.0, 2.5)
    rates = [of_two[f"images_per_{unit}"] for unit in ("second", "worker", "cpu_second")]
    assert rates == [100.0, 50.0, 80.0]
