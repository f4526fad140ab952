"""Names of classes are compared in NFC: macOS stores accents apart, and people type them together."""

import json
import unicodedata
from pathlib import Path

import pytest

from tests.cli.conftest import Vitctl
from tests.cli.test_data_intake import picture
from vitctl.models.weights.header import own_header
from vitctl.models.weights.weights_file import read_weights, save_weights

NAMES = ("Müller", "café", "dog")
QUICK = ("--set", "machine.device=cpu", "--set", "machine.workers=0", "--set", "data.workers=0")


def spelled(form: str) -> list[str]:
    return [unicodedata.normalize(form, name) for name in NAMES]  # type: ignore[arg-type]


def plant(root: Path, form: str) -> None:
    for number, name in enumerate(spelled(form)):
        (root / name).mkdir(parents=True)
        for image in range(6):
            (root / name / f"{image}.jpg").write_bytes(picture(10 * number + image))


@pytest.fixture
def trained(vitctl: Vitctl, tmp_path: Path) -> Path:
    """Two steps on the composed names."""
    plant(tmp_path / "NFC", "NFC")
    plant(tmp_path / "NFD", "NFD")
    small = ("--set", "schedule.batch_size=8", "--set", "schedule.warmup_steps=1", *QUICK[:4])
    assert vitctl("data", "shards", "NFC", "shards").code == 0
    said = vitctl("pretrain", "--recipe", "smoke", "--data", "shards", "--steps", 2, *small, "--out", "run")
    assert said.code == 0, said.err
    return next((tmp_path / "run").rglob("model.safetensors"))


@pytest.mark.slow
def test_names__of_every_form_match_wherever_they_are_read(
    vitctl: Vitctl, trained: Path, tmp_path: Path
) -> None:
    weights = read_weights(trained)
    assert weights.meta["class_names"] == spelled("NFC")
    header = {**weights.meta, "class_names": spelled("NFD")}
    save_weights(tmp_path / "old.safetensors", weights.state, weights.config, header)  # as runs stored before
    index = tmp_path / "shards/train/index.json"
    for form in ("NFC", "NFD"):
        index.write_text(json.dumps({**json.loads(index.read_text()), "class_names": spelled(form)}))
        for source in ("run", "old.safetensors"):
            for data in ("NFC", "NFD", "shards") if source == "run" else ("NFD",):
                said = vitctl("evaluate", "--from", source, "--data", data, "--split", "train", *QUICK[:4])
                assert (said.code, said.err) == (0, ""), (form, source, data)
            for given in ("NFC", "NFD", "shards") if source == "run" else ("NFD",):
                said = vitctl("predict", given, "--from", source, "--top", 1, *QUICK[:4])
                assert "of 18 labelled images" in said.out + said.err, (form, source, given)
        classes = ("--set", f"data.classes={json.dumps(spelled('NFD')[:2])}", "--steps", 1, "--batch-size", 8)
        said = vitctl("pretrain", "--recipe", "smoke", "--data", "shards", *classes, "--dry-run")
        assert said.code == 0 and "2 classes" in said.out
    old = own_header(tmp_path / "old.safetensors")
    assert old is not None and old["meta"]["class_names"] == spelled("NFC")


def test_names__of_options_tables_and_lists_match(vitctl: Vitctl, tmp_path: Path) -> None:
    plant(tmp_path / "NFC", "NFC")
    composed, apart = spelled("NFC"), spelled("NFD")
    said = vitctl("data", "shards", "NFC", "out", "--drop-class", apart[0])
    assert said.code == 0
    assert json.loads((tmp_path / "out/train/index.json").read_text())["class_names"] == composed[1:]
    (tmp_path / "names.txt").write_text("\ufeff" + "\n".join(apart[1:]))
    (tmp_path / "out/train/index.json").unlink()
    assert vitctl("data", "index", "out/train", "--classes", "names.txt").code == 0
    assert json.loads((tmp_path / "out/train/index.json").read_text())["class_names"] == composed[1:]
