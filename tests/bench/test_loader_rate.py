"""`bench data`: its numbers agree with each other."""

from pathlib import Path

import pytest

from tests.bench.conftest import tiny_recipe
from vitctl.bench import loader_rate
from vitctl.bench.loader_rate import bench_data, image_parts, loader_numbers, verdict
from vitctl.bench.measuring import Budget
from vitctl.data.images.transforms import TrainTransform
from vitctl.data.source.stores import SyntheticSource


def test_data__numbers_agree(tiny_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_rate, "_LEAST_CPU", 0.0)  # a busy machine gives little of its processor
    recipe = tiny_recipe(**{"data.path": str(tiny_data), "machine.workers": 1})
    found = bench_data(recipe, Budget(1.0), step_rate=1e-3)
    assert found["images_per_second"] == found["images"] / found["seconds"] == found["images_per_worker"]
    assert found["images_per_cpu_second"] == pytest.approx(found["images"] / found["cpu_seconds"])
    assert set(found["split"]) == {"read", "decode", "augment"}
    assert (found["step_images_per_second"], found["step_source"]) == (1e-3, "as given")
    assert found["verdict"].startswith("The loader is not the bottleneck")
    assert found["image_bytes"] > 0
    assert found["num_images"] == 70


def test_data__the_step_is_measured_where_none_is_given(tiny_data: Path) -> None:
    found = bench_data(tiny_recipe(**{"data.path": str(tiny_data), "machine.workers": 0}), Budget(2.0))
    assert found["step_images_per_second"] > 0
    assert found["step_source"].startswith("measured here, ")


def test_parts__add_up_to_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that ticks a second at each look: read 1, opened 1, decoded 1, all of it 6 ticks."""
    now = iter(range(100))
    monkeypatch.setattr(loader_rate.time, "perf_counter", lambda: float(next(now)))
    source, transform = SyntheticSource(10, 2, 64), TrainTransform(32)
    parts, num_bytes = image_parts(source, 3, transform, seed=0, epoch=0)
    assert parts == {
        "read": 1.0,
        "decode": 2.0,
        "augment": 2.0,
    }  # looks at 0, 1, 2, then 3 and 4 around the decoder, 5
    assert num_bytes == len(source.read(3))


def test_rate__of_little_or_of_broken_images_has_a_note() -> None:
    [early] = loader_numbers(2, 64, 0.005, 0.0)["notes"]
    assert early.startswith("the loader was measured for only 0.005 s on 64 images")
    [note] = loader_numbers(1, 2000, 2.0, 1.5, bad=27)["notes"]
    assert note.startswith("27 of the 2,000 images could not be used")
    of_two = loader_numbers(2, 200, 2.0, 2.5)
    rates = [of_two[f"images_per_{unit}"] for unit in ("second", "worker", "cpu_second")]
    assert rates == [100.0, 50.0, 80.0]


@pytest.mark.parametrize(
    ("needed", "cores", "part", "text"),
    [
        (
            50.0,
            2,
            "step",
            "is not the bottleneck: 100 images/s, the step needs 50; 1 worker would be enough.",
        ),
        (400.0, 8, "loader", "the step needs 400; machine.workers = 8 would keep up."),
        (400.0, 2, "loader", "8 workers, more than the 2 cores here; decode takes 70% of an image."),
        (0.0, 2, "decode", "The loader makes 100 images/s; decode takes 70% of an image."),
    ],
)
def test_verdict__against_the_step(needed: float, cores: int, part: str, text: str) -> None:
    """100 images/s of two workers."""
    bottleneck, sentence = verdict(
        100.0, 2, {"read": 1.0, "decode": 7.0, "augment": 2.0}, needed, cores=cores
    )
    assert bottleneck == part
    assert sentence.endswith(text)
