"""`vitctl.finetune` and `vitctl.predict` do what the commands do."""

import json
import sys
import threading
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
from PIL import Image

from tests import warm
from tests.cli.conftest import Vitctl
from tests.conftest import checkpoint
from tests.matrix import each
from tests.trained import CPU, SMALL
from vitctl import VitctlError, finetune, predict
from vitctl.cli.flags import rows_of
from vitctl.cli.from_python import FinetuneFlags, PredictFlags


@pytest.mark.parametrize(("command", "typed"), [("finetune", FinetuneFlags), ("predict", PredictFlags)])
def test_keywords__are_the_flags_of_the_command(command: str, typed: Any) -> None:
    rows, hints = rows_of(command), get_type_hints(typed)
    assert {*hints} == {*rows}
    for name, row in rows.items():
        assert row.type in (hints[name], *get_args(hints[name])), name


def test_finetune__is_the_command(
    vitctl: Vitctl,
    pretrained: Path,
    tiny_data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys = {**CPU, **SMALL, "finetune.head": "fewshot"}
    records: list[dict[str, Any]] = []
    ours = finetune(
        out=tmp_path / "ours",
        data=tiny_data,
        from_=pretrained,
        lr=0.02,
        seed=3,
        overrides=keys,
        report=records.append,
        progress=True,
    )
    bar = capsys.readouterr().err.rsplit("\r", 1)[-1]
    assert f"accuracy {ours.metrics['accuracy']:.2%}: 100%|" in bar and "| 6/6 [" in bar and "loss=" in bar
    sets = [part for key, value in keys.items() for part in ("--set", f"{key}={value}")]
    line = f"finetune --out theirs --data {tiny_data} --from {pretrained} --lr 0.02 --seed 3".split()
    assert vitctl(*line, *sets).code == 0
    theirs = Path("theirs")
    assert checkpoint(ours.folder, 6) == checkpoint(theirs, 6)
    result = json.loads((theirs / "result.json").read_text())
    assert (ours.status, ours.metrics) == ("done", result["metrics"])
    assert ours.provenance["recipe_sha256"] == result["provenance"]["recipe_sha256"]
    assert ours.provenance["lr"] == 0.02
    assert {"weights", "head", "evaluate"} <= {record["kind"] for record in records}
    again = finetune(
        out=ours.folder, data=str(tiny_data), from_=str(pretrained), lr=0.02, seed=3, overrides=keys
    )
    assert again.metrics == ours.metrics


@pytest.mark.slow
def test_finetune__several_processes_are_started_as_the_command_does(
    pretrained: Path, tiny_data: Path, tmp_path: Path
) -> None:
    keys = {**CPU, **SMALL, "schedule.lanes": 4, "schedule.leaf_images": 2, "machine.precision": "float32"}
    given = {"data": str(tiny_data), "from_": str(pretrained), "overrides": keys}
    alone = finetune(out=tmp_path / "1", processes=1, **given)
    code = (
        "import json, sys, vitctl\n"
        f"run = vitctl.finetune(out={str(tmp_path / '2')!r}, processes=2, **{given!r})\n"
        "print(json.dumps([str(run.folder), run.metrics]), file=sys.stderr)"
    )
    done = warm.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    folder, metrics = json.loads(done.stderr.splitlines()[-1])
    assert checkpoint(alone.folder, 6) == checkpoint(Path(folder), 6)
    assert alone.metrics == metrics
    assert (Path(folder) / "logs" / "rank_01.txt").exists()


def test_predict__is_the_command(vitctl: Vitctl, pretrained: Path, tiny_data: Path) -> None:
    ours = predict(f"{tiny_data}:test", from_=pretrained, top=2, precision="float32")
    line = f"predict {tiny_data}:test --from {pretrained} --top 2 --precision float32 --format jsonl"
    theirs = [json.loads(text) for text in vitctl(*line.split()).out.splitlines()]
    assert len(ours) == 23
    assert [(one.name, [[*pair] for pair in one.classes]) for one in ours] == [
        (each["image"], [[pair["class"], pair["probability"]] for pair in each["classes"]]) for each in theirs
    ]


@each(
    ("values", "said"),
    [
        (
            {"stepz": 3},
            r"finetune\(stepz=\.\.\.\): unknown; did you mean steps\?; recipe keys go into overrides",
        ),
        ({"steps": 3, "epochs": 1.0}, "--steps 3 and --epochs 1 both set the length"),
        ({"overrides": {"optimizer.lrr": 1.0}}, "overrides: unknown key optimizer.lrr"),
        ({"recipe": "jft_b16"}, "is for `vitctl pretrain`, not for `vitctl finetune`"),
        ({"data": "none"}, "none"),
        ({"data": np.zeros((2, 4, 4, 3), np.uint8)}, "--data: data.path = "),
        ({"steps": "2"}, "schedule.total_steps = '2' is not allowed"),
        ({"out": 3}, "out: should be a path, not int"),
        ({"out": b"runs"}, "out: should be a path, not bytes"),
        ({"overrides": [("optimizer.lr", 1.0)]}, "overrides: should be a dictionary"),
        ({"overrides": {3: 4}}, "overrides: 3 is not a key"),
    ],
)
def test_finetune__refuses_in_one_line(
    values: dict[str, Any], said: str, tmp_path: Path, pretrained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(VitctlError, match=said) as error:
        finetune(**{"from_": pretrained, **values})
    assert len(str(error.value).splitlines()) == 1
    assert not Path("runs").exists()


def test_finetune__outside_the_main_thread() -> None:
    caught: list[Exception] = []

    def call() -> None:
        try:
            finetune()
        except VitctlError as error:
            caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "runs in the main thread only" in str(caught[0])


@pytest.mark.slow
def test_finetune__numbers_of_numpy_and_torch_are_numbers(
    pretrained: Path, tiny_data: Path, tmp_path: Path
) -> None:
    keys = {
        **CPU,
        **SMALL,
        "schedule.total_steps": 2,
        "finetune.seeds": (0, 1),
        "weights.mean": (0.5, 0.25, 0.5),
        "dropout": 0.5,
    }
    odd = {
        **keys,
        "schedule.batch_size": np.int64(8),
        "finetune.seeds": np.arange(2),
        "weights.mean": torch.tensor([0.5, 0.25, 0.5]),
        "dropout": np.float32(0.5),
        "log.trace": np.bool_(True),
    }
    plain = finetune(out=tmp_path / "a", data=tiny_data, from_=pretrained, steps=2, lr=0.5, overrides=keys)
    same = finetune(
        out=tmp_path / "b",
        data=tiny_data,
        from_=pretrained,
        steps=np.int64(2),
        lr=np.float32(0.5),
        overrides=odd,
    )
    assert same.metrics == plain.metrics
    assert same.provenance["recipe_sha256"] == plain.provenance["recipe_sha256"]
    assert checkpoint(same.folder, 2) == checkpoint(plain.folder, 2)


@each(
    ("images", "values", "said"),
    [
        ([], {}, "an empty list: no images there"),
        ("", {}, "is empty"),
        (None, {}, "images: should be a path, not NoneType"),
        (b"a.png", {}, "images: should be a path, not bytes"),
        (Image.new("RGB", (8, 8)), {}, "not Image; load_classifier takes images"),
        ([np.zeros((8, 8, 3), np.uint8)], {}, "not ndarray; load_classifier takes images"),
        ("a.png", {"top": -1}, "top = -1: should be a whole number, at least 1"),
        ("a.png", {"top": 1.5}, "top = 1.5: should be"),
        ("a.png", {"threshold": float("nan")}, "threshold = nan: should be a probability"),
        ("a.png", {"threshold": "0.3"}, "threshold = '0.3': should be a probability"),
        ("a.png", {"res": b"32"}, "data.image_size = b'32' is not allowed"),
    ],
)
def test_predict__refuses_in_one_line(
    images: Any, values: dict[str, Any], said: str, pretrained: Path
) -> None:
    with pytest.raises(VitctlError, match=said) as error:
        predict(images, from_=pretrained, **values)
    assert len(str(error.value).splitlines()) == 1
