"""Every command of README.md and docs/ is run on a small folder, planned with --dry-run, or parsed."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import timm
from safetensors.torch import save_file

from tests.cli.conftest import Vitctl
from tests.docs.conftest import PAGES, commands, find_command, photo, write_photos
from tests.matrix import each, few

# Cannot run in a test: what the words begin with or hold -> why. They are parsed.
PARSED = {
    r"quickstart": "tests/cli/test_quickstart.py runs it",
    r"bench ": "tests/cli/test_bench.py runs it, with smaller networks",
    r"serve ": "tests/cli/test_serve.py runs it, with somebody to stop it",
    r"finetune .*(--teacher|as_stored)": "needs weights with the classes of the photos: tests/jobs/",
    r"doctor": "it judges the machine that the tests run on",
    r"data (prepare|check (vtab|data/pets))": "a download",
    r".*(gs|hf|https|s3)://": "a download",
    r"vtab ": "trains for hours",
    r"evaluate --dataset imagenet": "needs ImageNet",
    r"fewshot --shots (5$|1,)": "needs ImageNet",
    r".*(augreg_b32_pets|dinov2_s14_reg|runs/photos --to onnx|model/model.onnx)": "see test_foundation",
    r"resume .*--allow": "trains for hours",
    r"evaluate --from weights.bin": "needs weights of B/16",
    r".*,submit$": "needs Slurm",
    r"export .*--to (timm|google)": "needs a model that fits them: tests/export/test_weights_folder.py",
    r"export .*(--to pt2|int8|--to onnx --to safetensors)": "tests/export/ runs them, README.md one of them",
    r"recipes table fig(2|3|13) ": "tests/report/test_paper_plot.py draws them, this page one of them",
    r"inspect .*quickstart": "needs a finished quickstart",
    r"export .*--to (peft|hf --out base)": "needs adapters: tests/models/test_lora.py",
    r"(probe|finetune) .*--dataset pets": "needs the data set",
    r"evaluate .*evaluation.thresholds": "needs several labels: tests/jobs/test_several_labels.py",
    r"evaluate .*--fit-temperature": "needs a run of these photos: tests/jobs/test_evaluate.py",
    r"runs (tail|clean|rm RUN)": "tests of runs run them, with a run that goes on and with somebody to ask",
}
PLANNED = r"(pretrain|finetune|sweep) "  # with --dry-run, unless RUN says otherwise
RUN = r"finetune --from \S+ --data (data/mine|PHOTOS) --out runs/(mine|photos)$"
WRITES = {  # what the commands of the first screen must have left
    "README.md": ("runs/photos/result.json",),
    "docs/own-data.md": ("runs/mine/result.json", "sheet.png"),
    "docs/data-sources.md": ("data/theirs/index.json",),
}
HISTORY = "docs/results.md"  # its commands were run once, on data that tests do not have
LINES = [(page, tuple(words)) for page in PAGES for words in commands(page)]


@each(("page", "words"), LINES)
def test_commands__are_understood_with_their_options(page: str, words: tuple[str, ...]) -> None:
    assert page
    command, rest = find_command([*words])
    command.make_context("vitctl", rest)
    assert not hasattr(command, "commands") or command.invoke_without_command


def test_commands__what_cannot_run_is_still_on_a_page() -> None:
    lines = [" ".join(words) for _, words in LINES]
    assert len(lines) > 70
    assert [pattern for pattern in PARSED if not any(re.match(pattern, line) for line in lines)] == []


@pytest.mark.parametrize(
    "page",
    few(
        [page for page in PAGES if commands(page) and page != HISTORY],
        "README.md",
    ),
)
def test_commands__run_one_after_the_other(page: str, home: Path, vitctl: Vitctl) -> None:
    if ["data", "shards", "PHOTOS", "data/mine"] in commands(page):
        shutil.rmtree(home / "data" / "mine")
    if page == "docs/weights.md":
        shutil.copyfile(next((home / "RUN").rglob("model.safetensors")), home / "mae.safetensors")
    if page == "docs/own-data.md":  # it has a test split, so that all of its commands apply
        (home / "PHOTOS").rename(home / "train")
        write_photos(home / "PHOTOS" / "test", ("cat", "dog", "owl"), 4)
        (home / "train").rename(home / "PHOTOS" / "train")
    for words in commands(page):
        line = " ".join(words)
        if any(re.match(pattern, line) for pattern in PARSED):
            continue
        shown = [first[3:] for first in commands("README.md") if first[0] == "export"]  # without --from RUN
        if words[0] == "export" and page != "README.md" and words[3:] in shown:
            continue  # a graph takes 4 seconds
        plan = re.match(PLANNED, line) and not re.match(RUN, line) and "--dry-run" not in words
        if (
            plan and "SHARDS" in words
        ):  # the plan is then of the recipe's own data set, which need not be here
            del words[words.index("SHARDS") - 1 : words.index("SHARDS") + 1]
        shorter = ["--steps", "8"] if re.match(RUN, line) else []
        said = vitctl(*words, *shorter, *["--dry-run"] * bool(plan))
        assert said.code == 0, f"{line}\n{said.out}\n{said.err}"
    assert [name for name in WRITES.get(page, ()) if not (home / name).exists()] == []


@pytest.mark.slow
def test_foundation__its_page_holds_for_a_small_backbone(tmp_path: Path, vitctl: Vitctl) -> None:
    net = timm.create_model("vit_tiny_patch16_224", num_classes=0)
    facts = {key: net.pretrained_cfg[key] for key in ("mean", "std", "input_size")}
    backbone = tmp_path / "weights"
    backbone.mkdir()
    save_file(net.state_dict(), backbone / "model.safetensors")
    config = {"architecture": "vit_tiny_patch16_224", "num_classes": 0, "pretrained_cfg": facts}
    (backbone / "config.json").write_text(json.dumps(config))
    write_photos(tmp_path / "photos", ("cat", "dog"), 5)
    (tmp_path / "photo.jpg").write_bytes(photo("cat", 1, 300))
    for words in commands("docs/foundation-to-onnx.md"):
        line = [str(backbone) if word == "dinov2_s14_reg" else word for word in words]
        said = vitctl(*line, *(["--steps", "2", "--batch-size", "2"] if words[0] == "finetune" else []))
        assert said.code == 0, f"{' '.join(line)}\n{said.out}\n{said.err}"
    shown = subprocess.run(
        [sys.executable, "backbone/model.py", "photo.jpg"], cwd=tmp_path, capture_output=True, text=True
    )
    assert shown.returncode == 0 and len(shown.stdout.split()) == net.num_features
    assert vitctl("evaluate", "--from", str(backbone), "--data", "photos").code == 2
