"""Tables 2, 5, 6, 7 and 9 and the means of Figures 2 and 5, cell by cell, against a transcription of their
own.
"""

import re
from pathlib import Path

import pytest

from vitctl.recipe.paper import OTHERS, RESULTS, TABLE_9
from vitctl.recipe.sweep import find_sweep
from vitctl.report.our_results import OurResults
from vitctl.report.paper_table import Gpu, result_rows, task_rows

FILE = Path(__file__).parent / "tables_of_results.txt"
NONE = OurResults({})
H100 = Gpu("H100", 0.4)
ALIASES = {"ImageNet ReaL": "ReaL", "VTAB (19)": "VTAB", "Average": "Average-5"}
STUDENT = "Noisy Student"
TABLE_2 = {
    "H/14 JFT": "jft_h14",
    "L/16 JFT": "jft_l16_14ep",
    "L/16 I21k": "in21k_l16",
    "BiT-L R152x4": "jft_r152x4",
    STUDENT: STUDENT,
}
TABLE_7 = {
    "R50 Adam": "jft_r50x1",
    "R50 SGD": "d1_r50x1_sgd",
    "R152x2 Adam": "jft_r152x2",
    "R152x2 SGD": "d1_r152x2_sgd",
}
PRE_TRAIN = {"ImageNet": "in1k", "I21k": "in21k", "JFT": "jft"}


def table(number: int) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a table of the transcription."""
    block = next(part for part in FILE.read_text().split("\n\n") if part.startswith(f"Table {number},"))
    header, *rows = ([cell.strip() for cell in line.split("|")] for line in block.splitlines()[1:])
    return header, rows


def number(text: str) -> float:
    """2.5k -> 2500."""
    return float(text.removesuffix("k")) * (1000 if text.endswith("k") else 1)


def table_6_recipe(model: str, epochs: str) -> str:
    """ViT-L/16 at 14 epochs -> jft_l16_14ep; ViT-H/14 and ResNet200x3 have only 14."""
    short = (
        model.replace("ResNet", "r")
        .replace("R50x1+ViT-", "r50_")
        .replace("ViT-", "")
        .replace("/", "")
        .lower()
    )
    return f"jft_{short}" + ("_14ep" if epochs == "14" and model not in ("ViT-H/14", "ResNet200x3") else "")


def test_table_2__accuracies_deviations_and_cost() -> None:
    header, rows = table(2)
    two, seen = RESULTS["2"], 0
    for name, *cells in rows:
        for model, cell in zip(header[1:], cells, strict=True):
            recipe, column = TABLE_2[model], ALIASES.get(name, name)
            if name == "TPUv3-core-days":
                assert two.core_days[recipe] == number(cell)
                continue
            if recipe == STUDENT:  # has no recipe; of two numbers the second is another paper's
                (value,) = (v for c, v in zip(two.columns, two.others[STUDENT], strict=True) if c == column)
                assert value == (None if cell == "–" else float(cell.partition("/")[0]))
                continue
            mean, _, deviation = cell.partition("±")
            assert two.value(recipe, column) == float(mean), (recipe, column)
            assert two.deviation(recipe, column) == (float(deviation) if deviation else None), (
                recipe,
                column,
            )
            seen += 1
    assert seen == 4 * 7 == len(two.rows) * len(two.columns)


def test_table_5__every_cell() -> None:
    header, rows = table(5)
    seen = {}
    for source, target, *cells in rows:
        for model, cell in zip(header[2:], cells, strict=True):
            if cell != "–":
                jft_l16 = (
                    "_14ep" if (source, model) == ("JFT", "L/16") else ""
                )  # 87.12 is the row of 14 epochs
                recipe = f"{PRE_TRAIN[source]}_{model.replace('/', '').lower()}{jft_l16}"
                seen[recipe, target] = float(cell)
    five = RESULTS["5"]
    assert len(seen) == 84
    assert seen == {
        (recipe, column): five.value(recipe, column) for recipe in five.rows for column in five.columns
    }


def test_table_6_and_figure_5__every_cell_the_cost_and_the_average() -> None:
    header, rows = table(6)
    six, five = (
        RESULTS["6"],
        {row.recipe: row for row in result_rows("fig5", RESULTS["fig5"].shown, NONE, H100)},
    )
    assert [table_6_recipe(model, epochs) for model, epochs, *_ in rows] == list(six.rows) == list(five)
    for model, epochs, *cells, cost in rows:
        recipe, columns = table_6_recipe(model, epochs), header[2:-1]
        values = dict(zip(columns, map(float, cells), strict=True))
        assert values == {column: six.value(recipe, column) for column in six.columns}
        average = sum(value for column, value in values.items() if column != "ReaL") / 5
        assert [one.paper for one in five[recipe].accuracies] == [
            pytest.approx(average, abs=0.005),
            values["ImageNet"],
        ]
        assert six.exaflops[recipe] == five[recipe].paper_exaflops == float(cost)


def test_table_7__every_cell_and_the_printed_averages() -> None:
    header, rows = table(7)
    seven = RESULTS["7"]
    for name, *cells in rows:
        for model, cell in zip(header[1:], cells, strict=True):
            assert seven.value(TABLE_7[model], ALIASES.get(name, name)) == float(cell)
    assert len(rows) == len(seven.columns)


def test_table_9_and_figure_2__every_task_the_groups_and_the_mean() -> None:
    _, rows = table(9)
    cells = [tuple(map(float, row[2:])) for row in rows]
    assert len(cells) == 19
    shown = task_rows("9", NONE)
    plain = {
        re.sub(r"\W", "", task).lower(): values for (_, task, *_), values in zip(rows, cells, strict=True)
    }
    aliases = {"patchcamelyon": "camelyon", "dsprites": "dspr", "smallnorb": "snorb"}
    for row in shown[:-1]:
        name = row.name.replace("_", "").replace("-", "")
        for ours, theirs in aliases.items():
            name = name.replace(ours, theirs)
        assert tuple(one.paper for one in row.accuracies) == plain.pop(name) == TABLE_9[row.name]
    assert plain == {}
    assert [round(one.paper or 0, 1) for one in shown[-1].accuracies] == [
        77.6,
        76.3,
        72.7,
    ]  # as the table prints it
    groups = {row.name: row for row in task_rows("fig2", NONE)}
    assert list(groups) == ["mean of 19 tasks", "natural", "specialized", "structured"]
    for group in ("Natural", "Specialized", "Structured"):
        own = [values for (of, *_), values in zip(rows, cells, strict=True) if of == group]
        means = [sum(column) / len(own) for column in zip(*own, strict=True)]
        assert [one.paper for one in groups[group.lower()].accuracies] == [
            pytest.approx(mean) for mean in means
        ]
    assert groups["mean of 19 tasks"].others == {"BiT-L": 76.29, "VIVI": 70.5, "S4L": 67.97}
    assert groups["natural"].others == {"BiT-L": None, "VIVI": None, "S4L": 73.57}


def test_figure_2__s4l_is_the_mean_of_vtabs_published_tasks() -> None:
    """Sup-Rotation-100% of 1,000 examples: task_adaptation, docs/data/results.csv, in the order of its
    columns.
    """
    natural = [53.66, 91.694, 69.521, 90.755, 88.128, 32.795, 88.464]
    specialized = [83.441, 96.0, 81.973, 71.062]
    structured = [47.327, 57.247, 36.585, 77.057, 88.318, 52.083, 51.589, 33.663]
    parts = (natural + specialized + structured, natural, specialized, structured)
    assert OTHERS["S4L"] == tuple(round(sum(part) / len(part), 2) for part in parts)


def test_figure_3__vits_are_table_5s_and_the_band_bits() -> None:
    """BiT, Table 2 (BiT-S, BiT-M) and Table 1 (BiT-L): ResNet152x4 on ILSVRC-2012."""
    three, five = RESULTS["fig3"], RESULTS["5"]
    bit = {
        "in1k_r152x4": 81.30,
        "in21k_r152x4": 85.39,
        "jft_r152x4": RESULTS["2"].value("jft_r152x4", "ImageNet"),
    }
    small = {"in1k_r50x1": None, "in21k_r50x1": None, "jft_r50x1_40ep": None}
    vits = {name: five.value(name, "ImageNet") for name in five.rows}
    assert {name: three.value(name, "ImageNet") for name in three.rows} == vits | bit | small


def test_figure_13__has_one_printed_number() -> None:
    thirteen = RESULTS["fig13"]
    assert {name: row[0] for name, row in thirteen.rows.items() if row[0] is not None} == {"jft_b16": 64.206}
    assert [*thirteen.rows] == [*find_sweep("d6").recipes]
