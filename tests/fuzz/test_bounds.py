"""Whatever is done to a tar, a recipe, a table, a log or a JSON file of ours: refused or read, in 5 s and
within 1 GiB.
"""

import io
import json
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from PIL import Image

from tests.data.conftest import MakeSplit
from tests.fuzz.conftest import header, member, record
from tests.fuzz.mutate import fuzz, mutated, mutated_json
from vitctl.data.datasets.readers.imagenet import REAL_IMAGES, read_real
from vitctl.data.datasets.readers.table import read_parquet, read_table
from vitctl.data.images.decode import BadSample, decode
from vitctl.data.shards.index import read_index
from vitctl.data.shards.tar import read_shard
from vitctl.data.source.locate import expand
from vitctl.data.source.stores import ShardSource
from vitctl.engine.checkpoint import read_checkpoint
from vitctl.engine.evaluation import Score
from vitctl.engine.journal import append_record, cut_after, read_records
from vitctl.errors import DataError, VitctlError
from vitctl.jobs.record.result import read_result
from vitctl.launch.run_folder import read_status
from vitctl.recipe.load import load_recipe
from vitctl.recipe.sweep import find_sweep

EXAMPLES = [40, pytest.param(1500, marks=pytest.mark.slow)]
MOST_SECONDS, MOST_BYTES = 5.0, 2**30


@contextmanager
def bounded() -> Iterator[None]:
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.process_time() - began < MOST_SECONDS
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MOST_BYTES


def outcome(read: Callable[[], object]) -> str:
    """What comes of reading: one error for the user, or something."""
    with bounded():
        try:
            read()
        except VitctlError:
            return "refused"
    return "read"


SAMPLE = member("a.png", b"abc") + member("a.cls", b"1")
PIECES = [
    SAMPLE,
    member("b.json", b'{"label": 2}'),
    member("b.jpg", b"x" * 700),
    header("n.cls", (-512).to_bytes(12, "big", signed=True)),
    header("n.cls", (2**80).to_bytes(12, "big", signed=True)),
    header("././@LongLink", 2**31, b"L"),
    member("././@LongLink", b"long/" * 300 + b"name.png\0", b"L"),
    member("x", record(b"size", b"-1024"), b"x"),
    member("x", record(b"size", b"9" * 50), b"x"),
    member("x", record(b"path", b"deep/name.png"), b"x"),
    member("x", record(b"comment", b"1" * 60_000), b"x"),
    member("x", b"5 a\n " * 12_000, b"x"),
    member("x", record(b"GNU.sparse.major", b"1") + record(b"GNU.sparse.minor", b"0"), b"x"),
    member("x", record(b"comment", b"z" * 9000), b"g") * 3,
    member("x", record(b"comment", b"1"), b"x") * 1500,
    member("sparse", b"99999999\n", b"S"),
    header("dir/", 0, b"5"),
    header("link", 0, b"2"),
    header("cut.png", 9000),
    bytes(1024),
]


@pytest.mark.parametrize("num_examples", EXAMPLES)
def test_tars__of_any_headers(tmp_path: Path, num_examples: int) -> None:
    path = tmp_path / "x.tar"

    def check(data: bytes) -> str:
        path.write_bytes(data)
        return outcome(lambda: read_shard(path))

    tars = st.lists(st.sampled_from(PIECES), max_size=6).map(lambda some: b"".join(some) + bytes(1024))
    assert check(SAMPLE + bytes(1024)) == "read"
    assert {"read", "refused"} == fuzz(check, tars, num_examples).keys()


def pictures() -> tuple[bytes, ...]:
    """Modes and kinds that test_data.py has not."""
    noise = np.random.default_rng(0).integers(0, 256, (24, 31, 4), dtype=np.uint8)
    rgba, files = Image.fromarray(noise, "RGBA"), []
    grey = Image.fromarray(noise[..., 0].astype(np.uint16) * 200)
    for image, kind, options in [
        (rgba, "PNG", {}), (rgba, "WEBP", {"lossless": True}), (rgba, "TIFF", {"compression": "tiff_lzw"}),
        (rgba.convert("CMYK"), "JPEG", {"progressive": True}), (rgba.convert("CMYK"), "TIFF", {}),
        (rgba.convert("P"), "PNG", {}), (rgba.convert("P"), "GIF", {}), (rgba.convert("1"), "BMP", {}), (grey, "PNG", {}),
        (grey, "TIFF", {}),
        (rgba.convert("RGB"), "TIFF", {"compression": "tiff_deflate"}), (rgba.convert("L"), "JPEG", {}),
    ]:  # fmt: skip
        file = io.BytesIO()
        image.save(file, kind, **options)
        files.append(file.getvalue())
    return tuple(files)


@pytest.mark.parametrize("num_examples", EXAMPLES)
def test_pictures__of_every_mode(num_examples: int) -> None:
    def check(data: bytes) -> str:
        with bounded():
            try:
                pixels = decode(data)
            except BadSample as error:
                return error.reason
        assert pixels.dtype == np.uint8 and pixels.shape[2] == 3
        return "pixels"

    assert {"pixels", "damaged"} <= fuzz(check, mutated(pictures()), num_examples).keys()


@pytest.mark.parametrize("num_examples", EXAMPLES)
def test_index__of_any_json(make_split: MakeSplit, num_examples: int) -> None:
    folder = make_split(9).folder
    path = folder / "index.json"
    good = json.loads(path.read_bytes())

    def read() -> None:
        source = ShardSource(read_index(folder))
        for sample in range(len(source)):
            try:
                decode(source.read(sample))
            except BadSample:
                continue

    def check(data: bytes) -> str:
        path.write_bytes(data)
        return outcome(read)

    assert check(json.dumps(good).encode()) == "read"
    assert fuzz(check, mutated_json(good), num_examples)["refused"] > num_examples // 4


@pytest.mark.parametrize("num_examples", EXAMPLES)
def test_tables_of_an_index__never_a_wrong_label(make_split: MakeSplit, num_examples: int) -> None:
    folder = make_split(9).folder
    path = folder / "samples.npy"
    good, labels = path.read_bytes(), ShardSource(read_index(folder)).labels().tolist()

    def read() -> None:
        source = ShardSource(read_index(folder))
        assert len(source.labels()) == 9
        for sample in range(9):
            try:
                source.read(sample), source.key(sample)
            except BadSample:
                continue

    def check(data: bytes) -> str:
        path.write_bytes(data)
        said = outcome(read)
        if said == "read" and data == good:
            assert ShardSource(read_index(folder)).labels().tolist() == labels
        return said

    assert fuzz(check, mutated((good,)), num_examples)["refused"] > num_examples // 4


RECIPE = b"""job = "pretrain"
extends = "smoke"
note = "mine"
[optimizer]
lr = 1e-3
"""
SWEEP = b"""recipes = ["smoke"]
[grid]
"optimizer.lr" = [1e-3, 1e-4]
"""
NESTED = st.sampled_from(
    [b"[" * 3000, b"[" + b" " * 3000, b"a." * 3000, b"{a=" * 900, b"9" * 5000, b"\xff", b'"""', b"''"]
)


@pytest.mark.parametrize("num_examples", EXAMPLES)
def test_recipes_and_sweeps(tmp_path: Path, num_examples: int) -> None:
    path = tmp_path / "x.toml"

    def check(data: bytes) -> str:
        path.write_bytes(data)
        return outcome(lambda: load_recipe(str(path))) + outcome(lambda: find_sweep(str(path)))

    files = mutated((RECIPE, SWEEP)) | st.tuples(mutated((RECIPE,)), NESTED, mutated((SWEEP,))).map(
        b"\n".join
    )
    assert check(RECIPE) == "readread" and check(SWEEP) == "refusedread"
    assert fuzz(check, files, num_examples)["refusedrefused"] > num_examples // 2


def run_folder(folder: Path) -> Path:
    """A run with a log, a result and a checkpoint, without a training."""
    saved = folder / "checkpoints" / "step_00000005"
    saved.mkdir(parents=True)
    state = {
        "format": "vitctl-checkpoint/1",
        "step": 5,
        "files": {"model.safetensors": {"bytes": 3, "sha256": "0" * 64}},
    }
    (saved / "state.json").write_text(json.dumps(state))
    (saved / "model.safetensors").write_bytes(b"abc")
    for step in (1, 5, 9):
        append_record(
            folder / "log.jsonl", {"kind": "evaluate", "step": step, "correct": 3, "total": 9, "time": 5.0}
        )
    result = {
        "job": "pretrain",
        "status": "done",
        "metrics": {"accuracy": 0.5},
        "files": {},
        "provenance": {},
    }
    (folder / "result.json").write_text(json.dumps(result))
    return folder


@pytest.mark.parametrize("num_examples", EXAMPLES)
def test_files_of_a_run(tmp_path: Path, num_examples: int) -> None:
    folder = run_folder(tmp_path / "run")
    log, state = folder / "log.jsonl", folder / "checkpoints" / "step_00000005" / "state.json"
    line = json.loads(log.read_text().splitlines()[0])

    def read() -> None:
        cut_after(log, 5)
        scores = Score.by_step(read_records(log))
        assert all(0 <= score.accuracy <= 1 for score in scores.values())

    def check(data: bytes) -> str:
        log.write_bytes(data + b"\n5\n[1]\nnull\n" + data[: len(data) // 2])
        state.write_bytes(data)
        (folder / "result.json").write_bytes(data)
        told = [
            outcome(read),
            outcome(lambda: read_checkpoint(state.parent)),
            outcome(lambda: read_result(folder)),
        ]
        outcome(lambda: read_status(folder))
        return told[0]

    files = (
        mutated_json(line)
        | mutated_json(json.loads(state.read_text()))
        | mutated((state.read_bytes(), log.read_bytes()))
    )
    assert fuzz(check, files, num_examples) == {"read": num_examples}


@pytest.mark.parametrize("num_examples", EXAMPLES)
def test_tables(tmp_path: Path, num_examples: int) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(b"x")
    csv, tsv = b"path,label,split\na,cat,train\nb,dog,test\n", b"path\tlabels\na\t1;2\nb\t0\n"

    def check(data: bytes) -> str:
        told = ""
        for name in ("x.csv", "x.tsv"):
            (tmp_path / name).write_bytes(data)
            told += outcome(lambda name=name: read_table(tmp_path / name))  # type: ignore[misc]
        (tmp_path / "list.txt").write_bytes(data)
        outcome(lambda: expand(f"@{tmp_path / 'list.txt'}"))
        return told

    assert check(csv) == "readrefused" and check(tsv) == "refusedread"
    assert fuzz(check, mutated((csv, tsv, b"path,label\na,99999999999999\n")), num_examples)["refusedrefused"]


@pytest.mark.parametrize("num_examples", EXAMPLES)
def test_parquet(tmp_path: Path, num_examples: int) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    good, path = io.BytesIO(), tmp_path / "train.parquet"
    parquet.write_table(pyarrow.table({"image": [b"abc", b"de"], "label": [0, 1]}), good)

    def check(data: bytes) -> str:
        path.write_bytes(data)
        return outcome(lambda: read_parquet([path]))

    assert check(good.getvalue()) == "read"
    assert fuzz(check, mutated((good.getvalue(),)), num_examples)["refused"]


@pytest.mark.parametrize("num_examples", EXAMPLES)
def test_real_labels(tmp_path: Path, num_examples: int) -> None:
    path, good = tmp_path / "real.json", json.dumps([[1, 2], [3]] + [[]] * (REAL_IMAGES - 2)).encode()

    def check(data: bytes) -> str:
        path.write_bytes(data)
        return outcome(lambda: read_real(path))

    assert check(good) == "read"
    assert fuzz(check, mutated((good,)) | mutated_json([[1], [2]]), num_examples)["refused"]


@pytest.mark.parametrize(
    "read", [read_shard, read_table, read_real, lambda p: expand(f"@{p}"), lambda p: read_records(p)]
)
def test_a_fifo_and_a_device_are_no_files(tmp_path: Path, read: Callable[[Path], object]) -> None:
    fifo, device = tmp_path / "fifo.csv", tmp_path / "zero.csv"
    os.mkfifo(fifo)
    device.symlink_to("/dev/zero")
    for path in (fifo, device):
        with pytest.raises((DataError, VitctlError), match=r"is a (FIFO|device)|missing"):
            read(path)
