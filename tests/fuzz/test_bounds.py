"""Damaged tars, tables of an index, recipes, sweeps and logs are refused or read, in 5 s and within 1 GiB."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import strategies as st

from tests.data.conftest import MakeSplit
from tests.fuzz.conftest import header, member, record
from tests.fuzz.mutate import bounded, fuzz, mutated, mutated_json
from vitctl.data.datasets.readers.imagenet import read_real
from vitctl.data.datasets.readers.table import read_table
from vitctl.data.images.decode import BadSample
from vitctl.data.shards.index import read_index
from vitctl.data.shards.tar import read_shard
from vitctl.data.source.locate import expand
from vitctl.data.source.stores import ShardSource
from vitctl.engine.evaluation import Score
from vitctl.engine.journal import cut_after, read_records
from vitctl.errors import DataError, VitctlError
from vitctl.recipe.load import load_recipe
from vitctl.recipe.sweep import find_sweep

EXAMPLES = [20, pytest.param(1500, marks=pytest.mark.slow)]


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


@pytest.mark.parametrize("num_examples", EXAMPLES)
def test_logs__are_read_as_far_as_they_go(tmp_path: Path, num_examples: int) -> None:
    log = tmp_path / "log.jsonl"
    line = {"kind": "evaluate", "step": 3, "correct": 3, "total": 9, "time": 5.0}

    def read() -> None:
        cut_after(log, 5)
        scores = Score.by_step(read_records(log))
        assert all(0 <= score.accuracy <= 1 for score in scores.values())

    def check(data: bytes) -> str:
        log.write_bytes(data + b"\n5\n[1]\nnull\n" + data[: len(data) // 2])
        return outcome(read)

    files = mutated_json(line) | mutated((json.dumps(line).encode() * 3,))
    assert fuzz(check, files, num_examples) == {"read": num_examples}


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
