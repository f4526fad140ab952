"""`vitctl predict` as it is typed and piped: its inputs, its formats, its exit codes."""

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors import safe_open

from tests import warm
from tests.cli.conftest import Vitctl
from tests.data.server import Faults, serving
from vitctl import open_split
from vitctl.data.datasets.readers import shapes

FAST = ("--device", "cpu", "--precision", "float32", "--set", "machine.workers=0")


@pytest.fixture
def photos(tmp_path: Path, tiny_data: Path) -> Path:
    """Five images in two folders, a text, a hidden file, and a corrupt image."""
    source, folder = open_split("test", path=tiny_data), tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    for number in range(5):
        (folder / ("more" if number > 2 else "") / f"{number}.png").write_bytes(source.read(number))
    (folder / "corrupt.jpg").write_bytes(b"\xff\xd8\xff\xe0 no image")
    (folder / "notes.txt").write_text("no image")
    (folder / ".hidden").write_text("no image")
    return folder


def records(out: str) -> list[Any]:
    return [json.loads(line) for line in out.splitlines()]


def test_predict__a_folder_as_a_table(vitctl: Vitctl, pretrained: Path, photos: Path) -> None:
    said = vitctl("predict", "photos", "--from", pretrained, "--top", 2, *FAST)
    assert said.code == 0
    lines = said.out.splitlines()
    assert lines[0] == "image               probability  class"
    assert [line[:18].strip() for line in lines[1:]] == [
        *("photos/0.png", "", "photos/1.png", "", "photos/2.png", ""),
        "photos/corrupt.jpg",
        *("photos/more/3.png", "", "photos/more/4.png", ""),
    ]
    assert lines[7] == "photos/corrupt.jpg            -  cannot be used: damaged"
    assert all(line[30:33] == "%  " and line[33:] in shapes.SHAPES for line in lines[1:7])
    weights = f"{pretrained}/checkpoints/step_00000020/ema.safetensors"
    left_out, about, errors, _, then = said.err.splitlines()
    assert left_out == "photos: skipped 1 file that are not images: notes.txt"
    assert about.startswith(
        f"weights: {weights} (the Polyak average; the last checkpoint, step 20, accuracy "
    )
    assert errors == "1 of 6 images cannot be used: 1 damaged"
    assert then == f"next: vitctl export --from {pretrained} --to onnx"
    assert vitctl("predict", "photos", "--from", pretrained, "--strict", *FAST).code == 2
    assert vitctl("predict", "photos/corrupt.jpg", "--from", pretrained, *FAST).code == 2
    (photos / "corrupt.jpg").unlink()
    said = vitctl("predict", "photos", "--from", pretrained, "--strict", *FAST)
    assert (said.code, "cannot be used" in said.err) == (0, False)


def test_predict__scores_images_in_folders_of_classes(vitctl: Vitctl, pretrained: Path, photos: Path) -> None:
    (photos / "more").rename(photos / shapes.SHAPES[0])
    said = vitctl("predict", "photos", "--from", pretrained, "--top", 1, "--format", "csv", *FAST)
    rows = list(csv.DictReader(said.out.splitlines()))
    right = sum(row["class"] == Path(row["image"]).parent.name for row in rows)
    from scipy.stats import binomtest  # which takes a second

    low, high = (100 * end for end in binomtest(right, 2).proportion_ci(method="wilson"))
    (line,) = [line for line in said.err.splitlines() if line.startswith("accuracy")]
    assert line.startswith(
        f"accuracy {right / 2:.2%} ({right} of 2 labelled images)  95 % interval {low:.1f}-{high:.1f}%"
    )
    assert "evaluate" not in line  # which takes no image without a label, and none that is broken


def test_predict__names_the_split_that_it_scored(
    vitctl: Vitctl, pretrained: Path, photos: Path, tiny_data: Path
) -> None:
    def place(*images: object) -> str:
        said = vitctl("predict", *images, "--from", pretrained, *FAST)
        return [*said.err.split(f"evaluate --from {pretrained} --data "), ""][1].strip()

    assert place(tiny_data, "--split", "test[:3]") == f"{tiny_data} --split 'test[:3]'"
    assert place(tiny_data / "test") == "DATA"
    (photos / "more").rename(photos / shapes.SHAPES[0])
    names = [str(path) for path in (photos / shapes.SHAPES[0]).iterdir()]
    assert place(*names) == "DATA"
    assert place(photos, *names) == ""  # some have no label
    for path in photos.glob("*.*"):
        path.unlink()
    assert place(photos) == f"{photos} --split train"
    own = Path(shutil.copytree(pretrained, "own"))
    recipe = own / "recipe.toml"
    recipe.write_text(recipe.read_text().replace(f'path = "{tiny_data}"', f'path = "{photos}"'))
    said = vitctl("predict", photos, "--from", own, *FAST)
    assert said.err.endswith(f"next: vitctl evaluate --from {own}\n")  # its held-out images
    (photos / "train").mkdir()
    (photos / shapes.SHAPES[0]).rename(photos / "train" / shapes.SHAPES[0])
    assert place(photos) == "DATA"


def test_predict__csv_and_jsonl_say_the_same(vitctl: Vitctl, pretrained: Path, photos: Path) -> None:
    line = ("predict", photos.name, *f"--from {pretrained} --top 3 --threshold 0.16 --batch 2".split(), *FAST)
    told = records(vitctl(*line, "--format", "jsonl").out)
    rows = [*csv.reader(io.StringIO(vitctl(*line, "--format", "csv").out))]
    assert vitctl(*line, "--out", "a.csv").code == 0
    assert [*csv.reader(io.StringIO(Path("a.csv").read_text()))] == rows
    assert "--out a.csv is csv" in vitctl(*line, "--out", "a.csv", "--format", "jsonl").err
    assert rows[0] == ["image", "rank", "class", "probability", "error"]
    flat: list[list[str]] = []
    for one in told:
        own = [
            [one["image"], str(n), c["class"], str(c["probability"]), ""]
            for n, c in enumerate(one["classes"], 1)
        ]
        flat += own or [[one["image"], "", "", "", one.get("error", "")]]
    assert rows[1:] == flat
    assert [one["image"] for one in told if "error" in one] == ["photos/corrupt.jpg"]
    likely = [c["probability"] for one in told for c in one["classes"]]
    assert likely and min(likely) >= 0.16
    said = vitctl(*line, "--format", "xml")
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("vitctl: predict: --format xml: xml is not one of table, csv, jsonl; see: ")


def test_predict__inputs_of_every_kind_in_order(
    vitctl: Vitctl, pretrained: Path, photos: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file, a pattern, shards with a part of a split, a list on standard input, an address."""
    monkeypatch.setattr(
        sys, "stdin", io.TextIOWrapper(io.BytesIO(b"photos/2.png\0photos/more\0photos/gone.png\0"))
    )
    with serving(photos, Faults()) as address:
        inputs = tuple(
            f"photos/0.png photos/*.png {tiny_data}:test[:2] - {address}/1.png {address}/9.png".split()
        )
        said = vitctl("predict", *inputs, "--from", pretrained, "--format", "jsonl", "--top", 1, *FAST)
    assert said.code == 0
    told = records(said.out)
    keys = [open_split("test[:2]", path=tiny_data).key(n) for n in range(2)]
    names = ["photos/0.png", *(f"photos/{n}.png" for n in range(3)), *keys, "photos/2.png"]
    names += [
        "photos/more/3.png",
        "photos/more/4.png",
        "photos/gone.png",
        f"{address}/1.png",
        f"{address}/9.png",
    ]
    assert [one["image"] for one in told] == names
    assert [one.get("error", "") for one in told] == [""] * 9 + [
        "cannot be read (No such file or directory)",
        "",
        "no such file on the server",
    ]
    by_name = {one["image"]: [c["class"] for c in one["classes"]] for one in told}
    assert by_name[f"{address}/1.png"] == by_name["photos/1.png"]


def test_predict__shards_and_their_splits(vitctl: Vitctl, pretrained: Path, tiny_data: Path) -> None:
    line = ("predict", "--from", pretrained, "--format", "jsonl", "--top", 1, *FAST)
    whole = vitctl(*line, f"{tiny_data}:test")
    assert (whole.code, len(records(whole.out))) == (0, 23)
    assert vitctl(*line, tiny_data, "--split", "test").out == whole.out
    assert vitctl(*line, tiny_data / "test").out == whole.out
    assert vitctl(*line, f"{tiny_data}/test/*.tar").out == whole.out
    said = vitctl(*line, tiny_data)
    assert (said.code, said.out) == (2, "")
    assert said.err == (
        f"vitctl: {tiny_data}: has the splits train, test; choose one: {tiny_data}:test, or --split test\n"
    )
    with serving(tiny_data, Faults()) as address:
        assert vitctl(*line, f"{address}:test", "--set", "data.cache_gib=0").out == whole.out


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (["phots"], "phots: no such file or folder; did you mean photos?"),
        (["photos/0.pgn"], "photos/0.pgn: no such file or folder; did you mean photos/0.png?"),
        (["photos/*.gif"], "photos/*.gif: no file matches this pattern"),
        (["none"], "none: holds no images"),
        (
            ["http://example.com/a.jpg"],
            "http://example.com/a.jpg: plain http is allowed from this machine only",
        ),
        (
            ["photos/0.png", "--features", "x.npz"],
            "--features x.npz: should be the name of a .safetensors file",
        ),
        (["photos/0.png", "--device", "tpu"], "machine.device"),
        (["photos/0.png", "--weights", "9"], "has no checkpoint of step 9; it has 18, 20"),
        (["-"], "-: no images there"),
    ],
)
def test_predict__what_is_mistyped(
    vitctl: Vitctl,
    pretrained: Path,
    photos: Path,
    tmp_path: Path,
    inputs: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "none").mkdir()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    found = vitctl("predict", *inputs, "--from", pretrained)
    assert (found.code, found.out) == (2, "")
    assert said in found.err
    assert photos.exists()


def test_predict__names_are_printed_safely(vitctl: Vitctl, pretrained: Path, photos: Path) -> None:
    """A line break, a colour code, and a byte that is not UTF-8 move no cursor and break no line."""
    for name in (b"a\nb.png", b"c\x1b[31m.png", b"d\xff.png"):
        (photos / "more" / os.fsdecode(name)).write_bytes((photos / "0.png").read_bytes())
    line = ("predict", "photos/more", "--from", pretrained, "--top", 1, *FAST)
    table = vitctl(*line).out
    assert [text.split()[0] for text in table.splitlines()[3:]] == [
        r"photos/more/a\nb.png", r"photos/more/c\x1b[31m.png", r"photos/more/d\udcff.png"
    ]  # fmt: skip
    jsonl = vitctl(*line, "--format", "jsonl").out
    assert not set("\x1b\udcff") & set(jsonl)
    assert [one["image"] for one in records(jsonl)[2:]] == [
        f"photos/more/{name}.png" for name in ("a\nb", "c\x1b[31m", "d\udcff")
    ]
    rows = vitctl(*line, "--format", "csv").out
    assert not set("\x1b\udcff") & set(rows)
    assert len([*csv.reader(io.StringIO(rows))]) == 6


def test_predict__features_and_the_newest_run(
    vitctl: Vitctl, pretrained: Path, photos: Path, tmp_path: Path
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(pretrained)
    said = vitctl(
        "predict", photos.name, "--features", "out.safetensors", "--weights", "model", "--res", 16, *FAST
    )
    assert said.code == 0
    assert "no --from: using the newest finished training run, runs/mine" in said.err
    assert "weights: runs/mine/checkpoints/step_00000020/model.safetensors" in said.err
    assert said.err.splitlines()[-3] == "features of 5 images: out.safetensors"
    assert said.err.splitlines()[-1] == "next: vitctl export --to onnx"
    with safe_open("out.safetensors", "np") as file:
        assert file.get_tensor("features").shape == (5, 24)
        names = bytes(file.get_tensor("names")).decode().split("\0")
    assert names == [*(f"photos/{n}.png" for n in range(3)), "photos/more/3.png", "photos/more/4.png"]


@pytest.mark.slow
def test_predict__weights_from_an_address(
    vitctl: Vitctl, pretrained: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are fetched over https alone, which a test cannot serve; what is said of the download goes to
    standard error.
    """

    def fetched(url: str, progress: object = None) -> Path:
        assert (url, callable(progress) or progress is None) == ("https://example.org/model.onnx", True)
        return Path("out/model.onnx").resolve()

    monkeypatch.setattr("vitctl.jobs.inputs.classifier.fetch", fetched)
    monkeypatch.setattr("vitctl.models.weights.download.fetch", fetched)
    assert vitctl("export", "--from", pretrained, "--to", "onnx", "-o", "out").code == 0
    line = ("predict", photos.name, "--top", 1, "--format", "jsonl", *FAST)
    own = records(vitctl(*line, "--from", pretrained).out)
    said = vitctl(*line, "--from", "https://example.org/model.onnx")
    assert said.code == 0
    assert [[c["class"] for c in one["classes"]] for one in records(said.out)] == [
        [c["class"] for c in one["classes"]] for one in own
    ]
    digests = r"file_sha256 \w{12}; claimed_weights_sha256 \w{12}"
    assert re.search(rf"weights: https://example\.org/model\.onnx \({digests}; images of 16 pixels", said.err)


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "vitctl", "predict", *map(str, arguments), *FAST]


@pytest.mark.slow
def test_predict__ends_quietly_when_nobody_reads_on(pretrained: Path, photos: Path, tmp_path: Path) -> None:
    """As `| head -1` does: the first line comes before all images are read, and no error is printed."""
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    names = "\n".join(["a.png"] * 20_000).encode()
    line = command("-", "--from", pretrained, "--format", "csv", "--batch", 8)
    process = warm.Popen(
        line, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin and process.stdout and process.stderr
    process.stdin.write(names)
    process.stdin.close()
    assert process.stdout.readline() == b"image,rank,class,probability,error\n"
    assert process.stdout.readline().startswith(b"a.png,1,")
    process.stdout.close()
    err = process.stderr.read().decode()
    assert process.wait(timeout=120) in (0, 1)
    process.stderr.close()
    assert [text.split()[0] for text in err.splitlines()] == ["weights:"]
    assert photos.exists()
