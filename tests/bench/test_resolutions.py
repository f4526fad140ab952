"""Fig. 12's numbers: which cells, what each says."""

from pathlib import Path

import pytest

from vitctl.bench import resolutions
from vitctl.bench.measuring import Budget
from vitctl.bench.resolutions import bench_resolutions, parse_sides
from vitctl.errors import RecipeError
from vitctl.models.flops import computed_flops, count_macs
from vitctl.models.variants import variant
from vitctl.report.paper_plot import draw_speed


def test_sides__of_the_papers_figure_and_lists() -> None:
    assert parse_sides("64..512") == (64, 128, 224, 384, 512)
    assert parse_sides("96..300") == (96, 128, 224, 300)
    assert parse_sides("224..224") == (224,)
    assert parse_sides("224,64") == (224, 64)
    for odd in ("512..64", "64..", "a", "", "0,64", "5000"):
        with pytest.raises(RecipeError, match="should be a range of sizes"):
            parse_sides(odd)


def test_resolutions__a_cell_for_each_network_and_size_and_its_picture(tmp_path: Path) -> None:
    result = bench_resolutions(
        ("Ti/32", "R50x1", "Axial-Ti/32"), (32,), Budget(-1.0), precision="float32", device="cpu"
    )
    cells = result["cells"]
    assert [(cell["image_size"], cell["model"]) for cell in cells] == [
        (32, name) for name in ("Ti/32", "R50x1", "Axial-Ti/32")
    ]
    for cell in cells:
        config = variant(cell["model"], image_size=cell["image_size"], num_classes=1000)
        assert cell["gflops"] == computed_flops(config) / 3 / 1e9
        assert cell["gflops"] <= 2 * count_macs(config) / 1e9
        assert cell["attention"] == "fused"  # too few tokens to be measured
        assert "give more --seconds" in cell["note"]
        assert cell["images_per_second"] > 0
        chosen = next(one for one in cell["batches"] if one["images"] == cell["best_batch"])
        assert cell["images_per_second"] >= chosen["images"] / chosen["seconds"]
    assert {"precision", "cores", "core", "machine", "peak_tflops", "free_memory_bytes"} <= set(result)
    assert "hollow: one image at a time" in draw_speed(result, tmp_path / "speed.svg").read_text()
    for cell in cells:
        cell["note"] = ""
    assert "hollow: one image at a time" not in draw_speed(result, tmp_path / "speed.svg").read_text()


def test_resolutions__what_a_network_cannot_do_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    result = bench_resolutions(("Ti/32",), (16,), Budget(0.0), precision="float32", device="cpu")
    (cell,) = result["cells"]
    assert cell["images_per_second"] == 0
    assert cell["note"]

    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(resolutions, "build", fail)
    (cell,) = bench_resolutions(("H/14",), (224,), Budget(0.0), precision="float32", device="cpu")["cells"]
    assert cell["note"] == "its weights and one image do not fit into memory"
