"""The way from real runs to a cell: recipes of the paper's names at a tiny size, run by the real jobs."""

import shutil
from pathlib import Path

import pytest

from tests.conftest import TINY
from tests.trained import CPU, do
from vitctl.engine.journal import LOG, read_records
from vitctl.recipe import load
from vitctl.recipe.load import recipe_folder
from vitctl.recipe.write import toml_value
from vitctl.report.our_results import Pretraining, our_results
from vitctl.report.paper_table import Gpu, result_rows

PRE = {
    "schedule.total_steps": 12,
    "evaluation.every_steps": 2,
    "checkpoint.every_steps": 2,
    "checkpoint.keep_best": 1,
    "evaluation.select_best": True,
    "data.eval_split": "train[80%:]",  # no test image chooses
}
TUNE = """job = "finetune"
note = "a tiny stand-in"
[data]
dataset = "digits"
image_size = 16
crop = "none"
[optimizer]
name = "sgd"
lr = 0.1
[schedule]
batch_size = 8
total_steps = 3
decay = "constant"
[loss]
name = "softmax"
"""


@pytest.fixture
def shrunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The shipped recipes, of which jft_b32 and finetune_pets are tiny and on digit scans; gives the folder
    of runs.
    """
    folder = tmp_path / "recipes"
    shutil.copytree(recipe_folder(), folder)
    monkeypatch.setattr(load, "recipe_folder", lambda: folder)
    tiny = TINY.read_text().replace("decay = 0.9\n", "decay = 0.0\n")
    values = {**PRE, "data.dataset": "digits"}
    text = [
        line
        for line in tiny.splitlines()
        if not any(line.startswith(f"{k.rpartition('.')[2]} =") for k in values)
    ]
    for key, value in values.items():
        section, _, name = key.partition(".")
        at = text.index(f"[{section}]") if f"[{section}]" in text else len(text)
        text[at : at + 1] = [f"[{section}]", f"{name} = {toml_value(value)}"]
    (folder / "jft_b32.toml").write_text("\n".join(text) + "\n")
    (folder / "finetune_pets.toml").write_text(TUNE)
    return tmp_path / "runs"


@pytest.mark.slow
def test_real_runs__fill_the_cell_of_their_experiment_and_no_other(shrunk: Path) -> None:
    do("jft_b32", shrunk / "pre", **CPU)
    scores = [
        (r["accuracy"], r["step"]) for r in read_records(shrunk / "pre" / LOG) if r["kind"] == "evaluate"
    ]
    best = max(scores)[1]
    kept = shrunk / "pre" / "checkpoints" / f"step_{best:08d}"
    found = [
        do("finetune_pets", shrunk / f"pets{seed}", **CPU, **{"weights.source": str(kept), "seed": seed})[
            "metrics"
        ]
        for seed in (0, 1)
    ]
    accuracies = [100 * metrics["accuracy"] for metrics in found]
    half = {"weights.source": str(kept), "data.subset_fraction": 0.5}
    do("finetune_pets", shrunk / "half", **CPU, **half)
    scratch = {"weights.source": str(kept), "weights.initialise": "random", "seed": 2}
    do("finetune_pets", shrunk / "scratch", **CPU, **scratch)
    other = next(path for path in sorted(kept.parent.iterdir()) if path != kept)
    do("finetune_pets", shrunk / "other", **CPU, **{"weights.source": str(other), "seed": 3})
    ours = our_results(shrunk)
    assert ours.accuracies == {(Pretraining("jft_b32"), "finetune_pets"): tuple(accuracies)}
    assert {one.run for one in ours.left_out} == {"half", "scratch", "other"}
    row = next(row for row in result_rows("6", ("Pets",), ours, Gpu("H100", 0.4)) if row.recipe == "jft_b32")
    (cell,) = row.accuracies
    assert cell.ours is not None
    assert cell.ours.mean == pytest.approx(sum(accuracies) / 2)
    assert cell.ours.std == pytest.approx(abs(accuracies[0] - accuracies[1]) / 2)
