"""The paper's tables from the recipes, our results beside its own, and the figures."""

from pathlib import Path

import pytest
from PIL import Image

from tests.recipes.paper import table_rows
from vitctl.recipe.paper import FIVE, RESULTS
from vitctl.report.our_results import OurResults, Pretraining
from vitctl.report.paper_plot import PLOTS, family_of
from vitctl.report.paper_table import Gpu, result_rows, setting_rows, task_rows

B32 = Pretraining("jft_b32")

H100 = Gpu("H100", 0.4)


def test_result_rows__paper_ours_and_cost_side_by_side() -> None:
    ours = OurResults({(B32, "finetune_pets"): (89.0, 91.0)})
    rows = {row.recipe: row for row in result_rows("6", ("Pets", "ReaL"), ours, H100)}
    assert list(rows) == list(RESULTS["6"].rows)
    pets, real = rows["jft_b32"].accuracies
    assert pets.ours is not None
    assert (pets.paper, pets.ours.mean, pets.ours.std) == (93.40, 90.0, 1.0)
    assert (real.paper, real.ours) == (86.27, None)
    assert (rows["jft_b32"].paper_exaflops, rows["jft_b32"].paper_core_days) == (55, None)
    assert (rows["jft_h14"].paper_exaflops, rows["jft_h14"].paper_core_days) == (4262, 2500)


@pytest.mark.slow
def test_average_of_five__only_of_all_five() -> None:
    names = dict(zip(FIVE, ("imagenet", "cifar10", "cifar100", "pets", "flowers102"), strict=True))
    every = {(B32, f"finetune_{name}"): (float(place),) for place, name in enumerate(names.values())}
    rows = {row.recipe: row for row in result_rows("fig5", ("Average-5",), OurResults(every), H100)}
    (cell,) = rows["jft_b32"].accuracies
    assert cell.ours is not None
    assert cell.ours.mean == 2.0
    del every[B32, "finetune_pets"]
    rows = {row.recipe: row for row in result_rows("fig5", ("Average-5",), OurResults(every), H100)}
    assert rows["jft_b32"].accuracies[0].ours is None


def test_figure_4__each_part_of_the_data_has_its_own_cell() -> None:
    ours = OurResults({(Pretraining("fig4_b32", 30_000_000), "5-shot"): (50.0,), (B32, "5-shot"): (1.0,)})
    rows = {row.recipe: row for row in result_rows("fig4", RESULTS["fig4"].columns, ours, H100)}
    found = [one.ours.mean if one.ours else None for one in rows["fig4_b32"].accuracies]
    assert found == [None, 50.0, None, None]


def test_table_9__ours_by_task_and_by_group() -> None:
    h14 = Pretraining("jft_h14")
    ours = OurResults({(h14, "vtab"): (70.0,), (h14, "vtab natural"): (80.0,), (h14, "vtab dtd"): (60.0,)})
    nine = {row.name: row.accuracies[0].ours for row in task_rows("9", ours)}
    two = {row.name: row.accuracies[0].ours for row in task_rows("fig2", ours)}
    assert {name: one.mean for name, one in nine.items() if one} == {"dtd": 60.0, "mean of 19 tasks": 70.0}
    assert {name: one.mean for name, one in two.items() if one} == {"natural": 80.0, "mean of 19 tasks": 70.0}


@pytest.mark.slow
def test_figures__are_drawn_with_ours_beside_and_differ_by_them(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bits = {
        (Pretraining(f"in1k_{name}"), bit): (80.0,)
        for name, bit in (("r50x1", "bit_imagenet"), ("r152x4", "bit_imagenet_480"))
    }
    h14 = Pretraining("jft_h14")
    some = {(B32, "finetune_imagenet"): (70.0, 71.0), (h14, "vtab"): (60.0, 66.0), (B32, "5-shot"): (50.0,)}
    ours = OurResults({**some, **bits}, folder=tmp_path)
    for draw in PLOTS.values():
        empty, full = (
            draw(OurResults({}, folder=tmp_path), tmp_path / "a.png"),
            draw(ours, tmp_path / "b.png"),
        )
        with Image.open(full) as picture:
            assert min(picture.size) > 300
        assert empty.read_bytes() != full.read_bytes()
    families = [family_of(name) for name in RESULTS["fig5"].rows]
    assert [families.count(family) for family in ("ResNet", "ViT", "hybrid")] == [7, 6, 5]  # Section 4.4


def test_table_1__sizes_of_the_paper_and_exact_parameters() -> None:
    """The counts were made with the authors' code, for 1,000 classes at 224 pixels."""
    counts = {
        "B/16": 86_567_656,
        "B/32": 88_224_232,
        "L/16": 304_326_632,
        "L/32": 306_535_400,
        "H/14": 632_045_800,
    }
    printed = {row[0].removeprefix("ViT-")[0]: row[1:] for row in table_rows(1)}
    rows = setting_rows("1", H100)
    assert {row[0]: int(row[-1].replace(",", "")) for row in rows} == counts
    for row in rows:
        assert list(row[1:6]) == printed[row[0][0]]


def test_cost__is_flops_over_what_the_gpu_reaches() -> None:
    fast, slow = (
        next(row for row in result_rows("6", (), OurResults({}), gpu) if row.recipe == "jft_b16")
        for gpu in (H100, Gpu("H100", 0.2))
    )
    assert fast.steps == 517_822
    assert fast.gpu_days == pytest.approx(fast.exaflops * 1e18 / (0.4 * 989e12) / 86_400)
    assert slow.gpu_days == pytest.approx(2 * fast.gpu_days)


def test_setting_rows__are_what_the_recipes_say() -> None:
    three = {row[0]: row[1:-1] for row in setting_rows("3", H100)}
    assert three["in1k_l16"] == ("imagenet", "300", "0.003", "cosine", "0.3", "0.1")
    assert three["jft_r50x1"] == ("jft300m", "7", "0.001", "linear", "0.1", "none")
    four = {row[0]: row[1:] for row in setting_rows("4", H100)}
    assert four["finetune_imagenet"] == ("20,000", "0.003, 0.01, 0.03, 0.06", "512", "384")
    assert four["vtab"][:2] == ("500 (ours), 2,500", "0.003 (ours), 0.01")
