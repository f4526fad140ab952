"""What docs/architecture.md promises: an addition is one row, and the command line takes it.

The rows are put into a copy of the package, which a fresh interpreter then runs.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import ROOT, TINY, train_records
from tests.docs.conftest import write_photos
from vitctl.models.build import build
from vitctl.models.variants import ViTConfig
from vitctl.models.weights.weights_file import Weights, write_weights

# File, the text that the row follows, the row.
ROWS = {
    "optimizer": (
        "recipe/sections.py",
        "    row.name: row\n    for row in (\n",
        'OptimizerRow(name="lionx", what="signs of momentum", knobs=("beta1", "beta2"), slots=1, '
        'builder="tests.added:Lion.of"),',
    ),
    "data set": (
        "data/datasets/known_sets.py",
        "\n_ROWS = (\n",
        'DataSet("pets3", 3, {"train": 15}, partial(read_fixed_classes, places=("photos",), '
        'classes=("cat", "dog", "owl"), source="three pets"), "photographs"),',
    ),
    "model": (
        "models/variants.py",
        "VARIANTS: dict[str, dict[str, int]] = {\n",
        '"N": {"hidden_size": 24, "depth": 1, "mlp_size": 24, "num_heads": 2},',
    ),
    "weights layout": (
        "models/weights/weights_file.py",
        "LAYOUTS: tuple[WeightsLayout, ...] = (\n",
        '__import__("dataclasses").replace(timm.LAYOUT, name="mirror", title="Mirror", tidy=lambda tensors: '
        '{name.removeprefix("mirror."): t for name, t in tensors.items() if name.startswith("mirror.")}), ',
    ),
    "export format": (
        "recipe/export_formats.py",
        "\n_ROWS = (\n",
        'ExportFormat(name="npy", ending=".npy", what="all numbers", writer="tests.added:write_npy", '
        'prover="tests.added:open_npy", in_folder=False, resizing="as scored"),',
    ),
    "metric": (
        "engine/log.py",
        '            "train",\n',
        "images_left=(self._total_steps - step) * size,",
    ),
    "flag": (
        "cli/flags.py",
        "\nFLAGS = (\n",
        'Flag("--decay", "optimizer.weight_decay", float, "Weight decay", "pretrain"),',
    ),
}

RUN_ALL = """
import contextlib, io, json, sys
from vitctl.cli.app import main
said = {}
for name, line in json.loads(sys.stdin.read()).items():
    sys.argv, out = ["vitctl", *line], io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            main()
    except SystemExit as end:
        said[name] = [end.code, out.getvalue()]
print(json.dumps(said))
"""
SMALL = {
    "optimizer.name": "lionx",
    "model.name": "N/8",
    "model.depth": 1,
    "schedule.total_steps": 2,
    "schedule.warmup_steps": 0,
    "data.train_split": "train[:10]",
    "data.eval_split": "train[10:]",
}
META = {
    "mean": [0.5] * 3,
    "std": [0.5] * 3,
    "image_size": 16,
    "eval_method": "square",
    "eval_resize": 0,
    "resample": "bilinear",
}
LINES = {
    "prepare": "data prepare pets3 --no-download --workers 0",
    "pretrain": f"pretrain --recipe {TINY} --dataset pets3 --decay 0.25 --batch-size 8 --out run "
    + " ".join(f"--set {key}={value}" for key, value in SMALL.items()),
    "resume": f"pretrain --recipe {TINY} --dataset pets3 --decay 0.25 --batch-size 8 --out run "
    + " ".join(f"--set {key}={value}" for key, value in SMALL.items()),
    "export": "export --from run --to npy --out exported",
    "evaluate": "evaluate --from mirror --data {data} --set machine.device=cpu --out scored",
    "explain": "recipes explain optimizer.name",
    "refuse": f"pretrain --recipe {TINY} --set optimizer.name=lionx --set optimizer.momentum=0.5 --dry-run",
}


@pytest.fixture(scope="module")
def home(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the extended vitctl ran all of `LINES`; said.json holds what it printed."""
    home = tmp_path_factory.mktemp("additions")
    shutil.copytree(ROOT / "vitctl", home / "site" / "vitctl")
    (home / "site" / "recipes").symlink_to(ROOT / "recipes")
    for file, before, row in ROWS.values():
        path = home / "site" / "vitctl" / file
        text = path.read_text()
        assert text.count(before) == 1, file
        path.write_text(text.replace(before, f"{before}{row}\n"))
    write_photos(home / "data" / "originals" / "pets3" / "photos", ("cat", "dog", "owl"), 5)
    config = ViTConfig(
        patch_size=8, hidden_size=12, depth=1, mlp_size=12, num_heads=2, image_size=16, num_classes=6
    )
    state = {name: torch.randn_like(tensor) for name, tensor in build(config).state_dict().items()}
    (file, *_) = write_weights(Weights(config, state, META), home / "mirror", "timm").files
    save_file({f"mirror.{name}": tensor for name, tensor in load_file(file).items()}, file)
    lines = {name: line.format(data=tiny_data).split() for name, line in LINES.items()}
    paths = os.pathsep.join([str(home / "site"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        cwd=home,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr
    (home / "said.json").write_text(done.stdout)
    return home


@pytest.fixture(scope="module")
def said(home: Path) -> dict[str, Any]:
    """Exit code and output of each line."""
    return dict(json.loads((home / "said.json").read_text()))


@pytest.mark.slow
def test_additions__all_lines_run(said: dict[str, Any]) -> None:
    failed = {name: words for name, (code, words) in said.items() if code != 2 * (name == "refuse")}
    assert not failed, failed


@pytest.mark.slow
def test_optimizer__trains_is_saved_and_explained(home: Path, said: dict[str, Any]) -> None:
    saved = load_file(home / "run" / "checkpoints" / "step_00000002" / "optimizer.safetensors")
    assert {name.partition("/")[0] for name in saved} == {"exp_avg"}
    assert "lionx: signs of momentum" in " ".join(said["explain"][1].split())
    assert "momentum belongs to sgd and does nothing for lionx" in " ".join(said["refuse"][1].split())


def test_flag__sets_its_key(home: Path) -> None:
    assert "weight_decay = 0.25" in (home / "run" / "recipe.toml").read_text()


def test_metric__is_logged(home: Path) -> None:
    assert [record["images_left"] for record in train_records(home / "run")] == [8, 0]


def test_data_set_and_model__are_recorded(home: Path) -> None:
    result = json.loads((home / "run" / "result.json").read_text())
    assert result["provenance"]["num_train"] == 10
    assert result["metrics"]["total"] == 5
    assert 'name = "N/8"' in (home / "run" / "recipe.toml").read_text()


def test_weights_layout__is_recognised(home: Path) -> None:
    result = json.loads((home / "scored" / "result.json").read_text())
    assert result["metrics"]["total"] == 23
    assert "mirror" in json.dumps(result["provenance"])


def test_export_format__is_verified_and_kept(home: Path) -> None:
    result = json.loads((home / "exported" / "result.json").read_text())
    assert (home / "exported" / "model.npy").stat().st_size > 1000
    assert result["metrics"]["max_difference"] == {"npy": 0.0}
