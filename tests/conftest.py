"""Helpers that all tests share: a run in this process, commands as processes, and what a run left."""

import gc
import hashlib
import io
import json
import os
import pickle
import random
import re
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
import typer.main

from tests import warm
from tests.import_map import changed_tests

# Before torch is imported: tests run side by side, and the last bit of a sum depends on the number of
# threads.
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
from torch import Tensor

from vitctl.data.source.order import mix_words
from vitctl.engine.checkpoint import read_checkpoint
from vitctl.engine.journal import CHECKPOINTS, RECIPE, STEP_RECORDS, name_of, read_records
from vitctl.jobs.inputs.data import open_train, training_order
from vitctl.launch import agent
from vitctl.launch.prepare_run import prepare_run
from vitctl.launch.worker import work
from vitctl.recipe.load import Override, load_recipe
from vitctl.recipe.schema import Finetune, Pretrain
from vitctl.recipe.write import toml_value
from vitctl.system.address import VARIABLE
from vitctl.system.process import SIGNALS, usable_cores

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
TINY = Path(__file__).parent / "recipes" / "tiny.toml"

Run = Callable[..., Path]

pytest_plugins = ["tests.trained"]


for _name, _examples in (("few", 20), ("many", 200)):  # many: pytest --hypothesis-profile=many
    hypothesis.settings.register_profile(
        _name,
        max_examples=_examples,
        deadline=None,  # an example takes as long as a machine with other work lets it
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
hypothesis.settings.load_profile("few")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return one more than the cores: workers wait for other processes a quarter of the time."""
    return usable_cores() + 1


def pytest_configure() -> None:
    """Reset signals that are ignored (nohup: SIGHUP, a shell's `&`: SIGINT): jobs would keep that."""
    for number in SIGNALS:
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def pytest_sessionstart() -> None:
    """Collect no garbage before the tests are there: imports make hardly any."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Exempt imports and collected tests from garbage collection, which every job ends with."""
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write tests/golden again; if numbers change, say why in CHANGELOG, Numerics",
    )
    parser.addoption(
        "--changed",
        nargs="?",
        const="HEAD",
        metavar="REVISION",
        help="run only the test files that import what differs from a revision of git (default: HEAD)",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --changed, leave out the test files that do not import what changed."""
    revision = config.getoption("--changed")
    if revision is None or not collection_path.name.startswith("test_"):
        return None
    root = Path(__file__).resolve().parents[1]
    return None if collection_path.relative_to(root) in changed_tests(root, revision) else True


@pytest.fixture(autouse=True, scope="session")
def no_fsync() -> Iterator[None]:
    """Skip fsync in this process: a run makes eight, and files of tests need not survive a power cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def one_command_tree() -> Iterator[None]:
    """Let typer build its commands once in this process, and not for each line that a test types."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", cache(typer.main.get_command))
        yield


@pytest.fixture(autouse=True, scope="session")
def forked_agents() -> Iterator[None]:
    """Let jobs in this process fork `accelerate launch` and its processes: their imports are over."""

    def fork(line: list[str], *, preexec_fn: object, **given: Any) -> warm.Popen:
        assert preexec_fn is not None  # that all end with vitctl is tested where vitctl is a process
        return warm.Popen(line, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agent, "subprocess", SimpleNamespace(Popen=fork))
        yield


class Pickler(pickle.Pickler):
    """Pickles equal modules to equal bytes: their tensors as types, shapes and digests."""

    def reducer_override(self, value: Any) -> Any:
        if type(value).__name__ not in ("Tensor", "Parameter"):
            return NotImplemented
        import torch

        content = value.detach().reshape(-1).view(torch.uint8)  # NumPy has no bf16
        digest = hashlib.sha256(content.numpy().tobytes()).hexdigest()
        return str, (f"{value.dtype} {tuple(value.shape)} {digest}",)


@pytest.fixture(autouse=True, scope="session")
def one_export_of_each_graph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let torch, which takes 3 s for it, export equal modules to ONNX once for all workers; each caller gets
    a copy.
    """
    import onnx
    import torch
    from onnx_ir import serde
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    from tests.trained import made_once

    export = torch.onnx.export

    def copied(module: Any, args: Any, **how: Any) -> Any:
        def write(path: Path) -> None:
            path.write_bytes(export(module, args, **how).model_proto.SerializeToString())

        content = io.BytesIO()
        Pickler(content).dump((module, args, repr(how)))
        name = f"graph-{hashlib.sha256(content.getvalue()).hexdigest()}"
        made = made_once(tmp_path_factory, name, write).read_bytes()
        return torch.onnx.ONNXProgram(serde.deserialize_model(onnx.load_from_string(made)), None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.onnx, "export", copied)
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(cache(ONNXRegistry.from_torchlib)))
        yield


@pytest.fixture(autouse=True, scope="module")
def imports_are_no_garbage() -> None:
    """Exempt from garbage collection what the modules before this one imported and keep."""
    gc.freeze()


@pytest.fixture(autouse=True)
def no_start() -> None:
    """Each test begins without the variable of a launch before it."""
    os.environ.pop("VITCTL_START", None)


@pytest.fixture(autouse=True)
def no_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear the queries of addresses, which are kept in the environment."""
    monkeypatch.setenv(VARIABLE, "")


@pytest.fixture
def run(tiny_data: Path, tmp_path: Path) -> Run:
    """run(name, recipe=TINY, **{"a.b": value}) runs a job here and returns its folder, tmp_path/name."""

    def do(name: str, recipe: str | Path = TINY, **values: Any) -> Path:
        given = {"data.path": str(tiny_data), **values}
        loaded = load_recipe(
            str(recipe), [Override(key, value) for key, value in given.items() if value is not None]
        )
        prepare_run(loaded, tmp_path / name)
        work(tmp_path / name)
        return tmp_path / name

    return do


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The log records of a kind."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [record for record in lines if record["kind"] == kind]


def train_records(folder: Path) -> list[dict[str, Any]]:
    """The log records of training steps."""
    return records(folder, "train")


def checkpoint(folder: Path, step: int) -> dict[str, bytes]:
    """File name -> bytes of the tensors of one checkpoint."""
    files = sorted((folder / CHECKPOINTS / f"step_{step:08d}").glob("*.safetensors"))
    assert files
    return {path.name: path.read_bytes() for path in files}


def stored(folder: Path, step: int) -> dict[str, dict[str, Tensor]]:
    """File -> its tensors of one checkpoint, of which each file may be in parts."""
    saved = read_checkpoint(folder / CHECKPOINTS / f"step_{step:08d}")
    return {name: saved.tensors(name) for name in {name_of(file) for file in saved.state["files"]}}


def step_images(folder: Path) -> dict[int, dict[str, str]]:
    """Step -> what the trace has of its images: digests of their numbers, bytes, pixels and labels."""
    lines = read_records(folder / STEP_RECORDS)  # a full disk may have cut lines short
    images = {line["step"]: line["batch"] for line in lines if "batch" in line}
    assert images
    return images


def batch_keys(folder: Path, data: Path | str = "") -> list[list[str]]:
    """The keys of each step's global batch: those of the recipe's order, whose digest the trace has."""
    given = [Override("data.path", str(data))] if data else []
    recipe = load_recipe(str(folder / RECIPE), given).recipe
    assert isinstance(recipe, Pretrain | Finetune)
    train, size = open_train(recipe.data, folder), recipe.schedule.batch_size
    order, places = training_order(recipe.data, train, recipe.seed, recipe.schedule), np.arange(size)
    keys = []
    for number, images in enumerate(step_images(folder).values()):
        _, samples = order.at(number * size + places)
        words = mix_words(mix_words(samples.astype(np.uint64)) ^ mix_words(places.astype(np.uint64) + 1))
        assert images["samples"] == f"{words.sum(dtype=np.uint64):016x}"
        keys.append([train.key(sample) for sample in samples.tolist()])
    return keys


def free_port() -> int:
    """Return an unused port below the range that Linux gives to clients, so that it stays unused."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


WITH_WORKER = """
from vitctl.launch import agent
agent.WORKER = "{worker}"
from vitctl.__main__ import main
main()
"""
PACED = "from tests.launch.paced_worker import pace; pace(); from vitctl.__main__ import main; main()"


def paced(line: Sequence[str], *, launched: bool = False) -> list[str]:
    """Return a command with slow steps, so that a test can act between two of them.

    With `launched` the slow steps are those of the processes that the command starts.
    """
    code = WITH_WORKER.format(worker="tests.launch.paced_worker") if launched else PACED
    return [sys.executable, "-c", code, *line[3:]]


def started(
    line: Sequence[str],
    out: Path,
    num_processes: int,
    nodes: Sequence[Mapping[str, str]] = ({},),
) -> list[warm.Popen]:
    """Start a command as several processes of one run, which no launcher supervises, on "nodes" that differ
    in their environment.
    """
    on_node = num_processes // len(nodes)
    place = {
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(on_node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    with out.open("ab") as file:
        return [
            warm.Popen(
                list(line),
                stdout=file,
                stderr=file,
                env={
                    **os.environ,
                    **place,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank % on_node),
                    **nodes[rank // on_node],
                },
            )
            for rank in range(num_processes)
        ]


def two_processes(line: Sequence[str], out: Path) -> tuple[int, ...]:
    """Run a command as two processes and return their exit codes."""
    return tuple(process.wait(timeout=240) for process in started(line, out, 2))


def worker(folder: Path) -> list[str]:
    """Return the command that a launcher starts on a prepared folder."""
    return [sys.executable, "-m", "vitctl.launch.worker", str(folder)]


def run_as(num_processes: int, folder: Path, data: Path, nodes: int = 1, **values: Any) -> str:
    """Run the tiny recipe in several processes without a launcher, and return their output."""
    shown = folder.with_name(f"{folder.name}.txt")
    line = command(folder, data, **{**values, "machine.processes": num_processes})
    codes = [process.wait(timeout=240) for process in started(line, shown, num_processes, [{}] * nodes)]
    assert set(codes) == {0}, shown.read_text()
    return shown.read_text()


def run_as_two(folder: Path, data: Path, **values: Any) -> str:
    """Run the tiny recipe in two processes."""
    return run_as(2, folder, data, **values)


GOLDEN = Path(__file__).parent / "golden" / "tiny.json"


CURVE = ("loss", "lr", "grad_norm")


def curve(folder: Path) -> dict[str, list[float]]:
    records = train_records(folder)
    assert [r["step"] for r in records] == list(range(1, 21))
    return {name: [r[name] for r in records] for name in CURVE}


def assert_golden(folder: Path) -> None:
    golden = json.loads(GOLDEN.read_text())
    for name, values in curve(folder).items():
        assert values == pytest.approx(golden[name], rel=1e-9, abs=0), name


def command(folder: Path, data: Path, **values: Any) -> list[str]:
    sets = [part for key, value in values.items() for part in ("--set", f"{key}={toml_value(value)}")]
    return [
        sys.executable,
        "-m",
        "vitctl",
        "pretrain",
        "--recipe",
        str(TINY),
        "--data",
        str(data),
        "--out",
        str(folder),
        *sets,
    ]


SHORT = {"schedule.total_steps": 8, "checkpoint.every_steps": 2, "evaluation.every_steps": 4}


def harmed(harm: str, folder: Path) -> list[str]:
    return [sys.executable, "-m", "tests.harmed", harm, str(folder)]


ROOT = Path(__file__).resolve().parents[1]


README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def shell_lines(text: str) -> list[list[str]]:
    """Return the words of every line in the shell blocks of a document."""
    blocks = re.findall(r"```sh\n(.*?)```", text, re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]
