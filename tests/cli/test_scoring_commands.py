"""From pre-training to an exported file, each command taking the newest run."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Vitctl, words
from tests.conftest import TINY
from tests.trained import CPU, SMALL
from vitctl.engine.journal import read_records

QUICK = ("--set", "machine.workers=0", "--set", "machine.device=cpu")


def result(folder: Path) -> Any:
    return json.loads((folder / "result.json").read_text())


@pytest.mark.slow
def test_the_whole_way(vitctl: Vitctl, tiny_data: Path, tmp_path: Path) -> None:
    assert vitctl("pretrain", "-r", TINY, "--data", tiny_data, "--set", "averaging.decay=0").code == 0
    [trained] = (tmp_path / "runs").iterdir()
    named = f"weights: runs/{trained.name}/checkpoints/step_00000020/model.safetensors ("

    said = vitctl("fewshot", "--shots", 5, "--data", tiny_data, "--out", "few", *QUICK)
    assert (said.code, said.err) == (0, "")
    assert named in said.out
    assert "5-shot accuracy" in said.out
    assert list(result(tmp_path / "few")["metrics"]["accuracy"]) == ["5"]

    small = ("--steps", 4, "--set", "schedule.warmup_steps=1", "--set", "schedule.batch_size=8", *QUICK)
    said = vitctl("finetune", "--data", tiny_data, "--res", 16, "--out", "fine", *small)
    assert (said.code, said.err) == (0, "")
    assert named in said.out

    said = vitctl("evaluate", "--from", "fine", "--data", tiny_data, "--out", "score", *QUICK)
    assert (said.code, said.err) == (0, "")
    assert result(tmp_path / "fine")["metrics"].items() < result(tmp_path / "score")["metrics"].items()
    assert "weights: fine/checkpoints/step_00000004/model.safetensors" in said.out
    said = vitctl("compare", "fine", "score")
    assert (said.code, said.out.splitlines()[-1]) == (
        0,
        "same images, split, labels and evaluation protocol: these numbers may be compared",
    )

    said = vitctl("evaluate", "--data", tiny_data, "--split", "train[:5]", "--out", "part", *QUICK)
    assert named in said.out
    assert result(tmp_path / "part")["metrics"]["total"] == 5
    said = vitctl("compare", "score", "part")
    assert (said.code, "must not be compared: part: split is " in said.out) == (2, True)

    said = vitctl("export", "--to", "safetensors", "--out", "file")
    assert (said.code, said.err) == (0, "")
    assert named in said.out
    assert "file/model.safetensors: verified, largest difference 0.0e+00" in said.out

    few_steps = ("--steps", 2, "--set", "schedule.warmup_steps=1", "--set", "schedule.batch_size=8")
    said = vitctl("vtab", "--suite", "mini", "--task", "digits", "--out", "table", *few_steps, *QUICK)
    assert (said.code, said.err) == (0, "")
    assert named in said.out
    assert "mean of 1 task (partial)" in said.out
    assert result(tmp_path / "table")["metrics"]["partial"] is True


def test_every_command__without_weights_says_so(vitctl: Vitctl, tmp_path: Path) -> None:
    for command in ("finetune", "fewshot", "vtab", "evaluate", "export"):
        said = vitctl(command)
        assert (said.code, said.err.count("\n")) == (2, 1), command
        assert f"`vitctl {command} --from gs://vit_models/imagenet21k" in said.err, command
    assert list(tmp_path.iterdir()) == []


def test_vtab__the_real_suite_names_what_is_missing(vitctl: Vitctl, pretrained: Path) -> None:
    said = vitctl("vtab", "--from", pretrained)
    assert said.code == 2
    assert said.err.startswith("vitctl: 19 of 19 tasks have no usable shards under data: caltech101, ")
    assert "--suite mini needs no data" in said.err


def test_evaluate__imagenet_takes_its_validation_split_and_real_its_file(
    vitctl: Vitctl, pretrained: Path
) -> None:
    said = vitctl("evaluate", "--from", pretrained, "--dataset", "imagenet", "--labels", "real")
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert (
        "imagenet: expected shards with split 'validation' and 1,000 classes in data/imagenet, found none"
        in said.err
    )
    said = vitctl("evaluate", "--from", pretrained, "--dataset", "objectnet")
    assert "objectnet-1.0.zip from https://objectnet.dev" in said.err


def test_evaluate__prints_a_line_for_its_labels_and_writes_the_counts(
    vitctl: Vitctl, pretrained: Path, tiny_data: Path
) -> None:
    said = vitctl("evaluate", "--from", pretrained, "--data", tiny_data, "--out", "score", *QUICK)
    assert (said.code, said.err) == (0, "")
    lines = said.out.splitlines()
    assert {"Scores on test", "Files"} <= {*lines}
    numbers = [line.split()[1] for line in lines if line.startswith(("accuracy", "top-5", "majority"))]
    assert len(numbers) >= 2 and said.out.count(" 95 % interval ") == said.out.count("interval")
    assert sum(line.startswith("accuracy ") or ": accuracy " in line for line in lines) == 1
    names = [line.partition("  ")[0] for line in lines]
    assert "mean per class" in names and "macro recall" not in names  # the same number
    assert lines[-1] == "next: vitctl report score -o score.html"
    assert "per_class: score/per_class.csv" in said.out
    assert "confusion: score/confusion.csv" in said.out


@pytest.mark.slow
def test_fewshot__several_shots_and_several_sets(vitctl: Vitctl, pretrained: Path, tmp_path: Path) -> None:
    line = (
        *f"fewshot --from {pretrained} --dataset digits,shapes-shape --shots 1,2 --out few".split(),
        *QUICK,
    )
    said = vitctl(*line)
    assert (said.code, said.err) == (0, "")
    table = said.out[said.out.index("data set") :].splitlines()
    assert [row.split()[:2] for row in table[1:5]] == [
        [n, s] for n in ("digits", "shapes-shape") for s in ("1", "2")
    ]
    assert [row.split()[:4] for row in table[5:7]] == [["mean", "of", "2", "1"], ["mean", "of", "2", "2"]]
    assert list(result(tmp_path / "few")["metrics"]["data_sets"]) == ["digits", "shapes-shape"]
    wrong = vitctl("fewshot", "--from", pretrained, "--shots", "1;5")
    assert (wrong.code, wrong.err) == (
        2,
        "vitctl: --shots 1;5: write whole numbers with commas between them\n",
    )


@pytest.mark.slow
def test_finetune__the_sweep_in_one_command(
    vitctl: Vitctl, pretrained: Path, tiny_data: Path, tmp_path: Path
) -> None:
    small = (
        *words("--steps 4 --set schedule.warmup_steps=1 --set schedule.batch_size=8 --res 16"),
        *QUICK,
    )
    line = ("finetune", "--recipe", "finetune_pets", "--from", pretrained, "--data", tiny_data, *small)
    said = vitctl(*line, "--out", "swept")
    assert (said.code, said.err) == (0, "")
    table = said.out[said.out.index("accuracy on train[90%:]") :].splitlines()
    assert [row.split()[0] for row in table[1:5]] == ["0.001", "0.003", "0.01", "0.03"]
    taken = [row.split()[0] for row in table[1:5] if row.endswith("chosen")]
    swept = result(tmp_path / "swept")
    assert taken == [f"{swept['provenance']['lr']:g}"]
    assert table[6] == "Scores on test" and table[7].startswith("accuracy ") and "of 23 images" in table[7]
    for flags in (("--lr", taken[0]), ("--set", "sweep.lrs=[]", "--set", f"optimizer.lr={taken[0]}")):
        said = vitctl(*line, *flags, "--out", flags[0])
        assert (said.code, said.err) == (0, "")
        alone = result(tmp_path / flags[0])
        assert alone["metrics"]["correct"] == swept["metrics"]["correct"]
        assert alone["provenance"]["weights_sha256"] == swept["provenance"]["weights_sha256"]
        assert not (tmp_path / flags[0] / "sweep").exists()


@pytest.mark.slow
def test_sweep__compares_on_held_out_images_and_scores_the_best_once_on_the_test_images(
    vitctl: Vitctl, tiny_data: Path, pretrained: Path, tmp_path: Path
) -> None:
    sets = [f"--set={key}={value}" for key, value in {**CPU, **SMALL}.items()]
    for _ in range(2):
        said = vitctl("sweep", "finetune", "--lr", "0.001,0.03", "--from", pretrained, "--data", tiny_data,
                      "--out", "s", *sets)  # fmt: skip
        assert said.code == 0, said.err
    assert "\nbest: " in said.out
    folders = sorted(file.parent for file in tmp_path.glob("s/*/result.json"))
    results = [json.loads((folder / "result.json").read_text()) for folder in folders]
    assert [one["provenance"]["split"] for one in results] == ["train[90%:]"] * 2
    assert sum("test" in one["metrics"] for one in results) == 1
    records = [one for folder in folders for one in read_records(folder / "log.jsonl")]
    assert sum(one["kind"] == "test" for one in records) == 1
