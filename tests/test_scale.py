"""The same numbers on any number of processes, whoever starts them and however the parameters are cut.

Accumulation over 1, 2 and 4 micro-batches, and two processes of DDP, are held by tests/test_golden.py.
"""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests import warm
from tests.conftest import (
    Run,
    assert_golden,
    batch_keys,
    checkpoint,
    command,
    free_port,
    run_as,
    run_as_two,
    step_images,
    stored,
    train_records,
)
from vitctl.data.datasets.catalog import open_split
from vitctl.data.source.order import own_slots
from vitctl.errors import RecipeError

ROOT = Path(__file__).resolve().parents[1]


def srun(line: list[str], rank: int, port: int) -> warm.Popen:
    """A task as Slurm starts it, of four on two nodes."""
    env = {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_STEP_NODELIST": "localhost,elsewhere",
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(rank // 2),
        "SLURM_LOCALID": str(rank % 2),
        "MASTER_PORT": str(port),
    }
    return warm.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **env}
    )


@pytest.mark.slow
def test_srun__two_nodes_of_two_processes(one_process: Path, tiny_data: Path, tmp_path: Path) -> None:
    folder, port = tmp_path / "run", free_port()
    tasks = [srun(command(folder, tiny_data, **{"machine.micro_batch": 2}), rank, port) for rank in range(4)]
    said = [task.communicate(timeout=240) for task in tasks]
    assert [task.returncode for task in tasks] == [0] * 4, said
    assert "processes 0 to 3, CPU" in said[0][0]
    assert "step 20/20" in said[0][0]
    assert said[1:] == [("", "")] * 3
    assert_golden(folder)
    assert step_images(folder) == step_images(one_process)
    assert "processes = 4 " in (folder / "recipe.toml").read_text()


def test_srun__what_is_wrong_is_said_once(tiny_data: Path, tmp_path: Path) -> None:
    line = command(tmp_path / "run", tiny_data, **{"data.train_split": "tran"})
    port = free_port()
    tasks = [srun(line, rank, port) for rank in range(4)]
    said = [task.communicate(timeout=240) for task in tasks]
    assert [task.returncode for task in tasks] == [2] * 4, said
    assert said[0][1].count("\n") == 1
    assert "tran" in said[0][1]
    assert said[1:] == [("", "")] * 3


@pytest.mark.slow
def test_torchrun__sharded_and_accumulated(tiny_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    values = {"machine.micro_batch": 3, "machine.sharding": "fsdp"}
    own = command(folder, tiny_data, **values)[2:]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    done = warm.run([*launcher, *own], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 20/20") == 1
    assert_golden(folder)


@pytest.mark.slow
def test_srun__signalled_tasks_save_and_go_on(run: Run, tiny_data: Path, tmp_path: Path) -> None:
    """As Slurm's --signal does before the time is over: every task gets it."""
    folder, port = tmp_path / "run", free_port()
    tasks = [srun(command(folder, tiny_data), rank, port) for rank in range(4)]
    until = time.monotonic() + 240
    while not (folder / "log.jsonl").exists() or '"step": 2,' not in (folder / "log.jsonl").read_text():
        assert time.monotonic() < until and [task.poll() for task in tasks] == [None] * 4
        time.sleep(0.02)
    for task in tasks:
        task.send_signal(signal.SIGUSR1)
    said = [task.communicate(timeout=240) for task in tasks]
    assert [task.returncode for task in tasks] == [3] * 4, said
    assert said[0][1].splitlines() == [
        "vitctl: SIGUSR1: stopping as soon as the work so far is safe; a second signal stops at once",
        f"stopped and saved in {folder}; resume with: vitctl resume {folder}",
    ]
    assert said[1:] == [("", "")] * 3
    run("run")
    assert_golden(folder)
    assert step_images(folder) == step_images(run("one"))


@pytest.mark.slow
def test_srun__the_first_error_is_the_one_line_on_the_screen(tiny_data: Path, tmp_path: Path) -> None:
    from tests.engine.test_trainer import damaged

    folder, port = tmp_path / "run", free_port()
    data = damaged(tiny_data, tmp_path / "data", "test", [20])
    line = command(folder, data, **{"schedule.total_steps": 6, "evaluation.every_steps": 0})
    tasks = [srun(line, rank, port) for rank in range(4)]
    said = [task.communicate(timeout=240) for task in tasks]
    assert [task.returncode for task in tasks] == [2] * 4, said
    [words] = said[0][1].splitlines()
    assert words.startswith("vitctl: ")
    assert "cannot be evaluated" in words
    log = Path(words.rpartition("; ")[2].rstrip(")"))
    assert "Traceback" in log.read_text()
    assert said[1:] == [("", "")] * 3


@pytest.mark.slow
def test_accelerate_launch__by_the_user_is_the_same_run(run: Run, tiny_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    start = [
        sys.executable,
        "-m",
        "accelerate.commands.accelerate_cli",
        "launch",
        "--multi_gpu",
        "--num_processes",
        "2",
    ]
    start += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "-m"]
    env = {**os.environ, "ACCELERATE_USE_CPU": "true"}
    line = [*start, *command(folder, tiny_data)[2:]]
    done = warm.run(line, capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, done.stderr
    assert "processes 0 to 1, CPU" in done.stdout
    assert_golden(folder)
    assert step_images(folder) == step_images(run("one"))
    assert checkpoint(folder, 20).keys() == checkpoint(tmp_path / "one", 20).keys()


@pytest.mark.parametrize(
    ("processes", "replicas"), [(2, (1, 2)), pytest.param(4, (2,), marks=pytest.mark.slow)]
)
def test_fsdp__equals_ddp_in_float32(
    processes: int, replicas: tuple[int, ...], tiny_data: Path, tmp_path: Path
) -> None:
    values = {
        "machine.precision": "float32",
        "machine.checkpoint_blocks": True,
        "schedule.total_steps": 8,
        # Adam divides by roots of squares that may be near nothing, and magnifies rounding
        "optimizer.name": "sgd",
        "optimizer.clip_norm": 0.1,
    }
    plain = tmp_path / "none"
    run_as(processes, plain, tiny_data, **values)
    ddp = train_records(plain)
    assert max(record["grad_norm"] for record in ddp) > 0.1  # gradients were clipped
    for count in replicas:
        folder = tmp_path / f"fsdp_{count}"
        more = {"machine.sharding": "fsdp", "machine.sharding_replicas": count}
        run_as(processes, folder, tiny_data, **values, **more)
        losses = [record["loss"] for record in train_records(folder)]
        assert losses == pytest.approx([record["loss"] for record in ddp], rel=1e-6, abs=0)
        for name in ("model", "ema", "optimizer"):
            one, other = stored(plain, 8)[name], stored(folder, 8)[name]
            assert one.keys() == other.keys()
            for key, tensor in one.items():
                most = 1e-6 * max(1.0, float(tensor.abs().max()))
                assert (tensor - other[key]).abs().max() <= most, (name, key)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_data_lanes__each_process_reads_its_own_shards(
    sharding: str, tiny_data: Path, tmp_path: Path
) -> None:
    """The images of every step are those of one process, whatever adds the gradients."""
    values = {
        "data.order": "windowed",
        "data.order_window_shards": 1,
        "data.lanes": 2,
        "schedule.total_steps": 4,
        "schedule.warmup_steps": 1,
    }
    folder, alone = tmp_path / "two", tmp_path / "one"
    run_as_two(folder, tiny_data, **values, **{"machine.sharding": sharding})
    run_as(1, alone, tiny_data, **values)
    assert step_images(folder) == step_images(alone)
    losses = [[record["loss"] for record in train_records(one)] for one in (folder, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    source = open_split("train", path=str(tiny_data))
    shard = {source.key(sample): source.location(sample) for sample in range(len(source))}
    read = []
    for rank in range(2):
        own = own_slots(16, None, rank, 2)
        read.append({shard[keys[slot]] for keys in batch_keys(folder, tiny_data) for slot in own})
    assert len(read[0] & read[1]) <= 1  # that at the border of the two lanes


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "replicas"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "values",
    [
        {},
        pytest.param({"machine.checkpoint_blocks": True, "machine.micro_batch": 3}, marks=pytest.mark.slow),
    ],
    ids=["", "parts"],
)
def test_fsdp__gathered_in_bf16_has_the_same_bits(
    values: dict[str, object], processes: int, replicas: int, tiny_data: Path, tmp_path: Path
) -> None:
    """Autocast converts the weights of linear layers; whether before or after they are gathered changes no
    bit.
    """
    own = {
        "machine.precision": "bf16",
        "schedule.total_steps": 6,
        "machine.sharding": "fsdp",
        "checkpoint.every_steps": 3,
        **values,
    }
    folders = [tmp_path / dtype for dtype in ("float32", "bf16")]
    for folder in folders:
        more = {"machine.sharding_replicas": replicas, "machine.sharding_dtype": folder.name}
        run_as(processes, folder, tiny_data, **own, **more)
    one, other = (train_records(folder) for folder in folders)
    assert [(r["loss"], r["grad_norm"]) for r in one] == [(r["loss"], r["grad_norm"]) for r in other]
    assert checkpoint(folders[0], 6) == checkpoint(folders[1], 6)
    before = checkpoint(folders[1], 6)
    shutil.rmtree(folders[1] / "checkpoints" / "step_00000006")
    run_as(processes, folders[1], tiny_data, **own, **more)
    log = [json.loads(line) for line in (folders[1] / "log.jsonl").read_text().splitlines()]
    assert [r["step"] for r in log if r["kind"] == "resume"] == [3]
    assert checkpoint(folders[1], 6) == before
    assert {str(tensor.dtype) for tensor in stored(folders[1], 6)["model"].values()} == {"torch.float32"}


def test_fsdp__gathered_in_bf16_needs_a_run_in_bf16(run: Run) -> None:
    values = {"machine.precision": "float32", "machine.sharding": "fsdp", "machine.sharding_dtype": "bf16"}
    with pytest.raises(RecipeError, match=r"sharding_dtype = 'bf16' would lose precision.* 'float32'; set"):
        run("run", **values)


def assert_close(folder: Path, other: Path) -> None:
    """The tensors of the last checkpoint, up to the rounding of the optimizer's kernel on a CPU."""
    one, two = stored(folder, 20), stored(other, 20)
    assert one.keys() == two.keys()
    for name, tensors in one.items():
        expected = two[name]
        assert tensors.keys() == expected.keys()
        for key, tensor in tensors.items():
            torch.testing.assert_close(tensor, expected[key], rtol=1e-12, atol=1e-15)


@pytest.mark.slow
def test_sharded_checkpoint__holds_what_any_other_does(run: Run, tiny_data: Path, tmp_path: Path) -> None:
    """Two processes with FSDP2 save parts and stop; one goes on, and ends where one alone does."""
    values = {"optimizer.clip_norm": 0.0, "machine.micro_batch": 8}
    straight, folder = run("straight", **values), tmp_path / "a"
    run_as_two(folder, tiny_data, **values, **{"machine.sharding": "fsdp", "schedule.total_steps": 20})
    assert_close(folder, straight)
    shutil.rmtree(folder / "checkpoints" / "step_00000020")
    run("a", **values)
    assert_close(folder, straight)
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [r["step"] for r in log if r["kind"] == "resume"] == [18]


def benchmark(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_soak__a_short_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill in each of two runs; benchmarks/results/soak.md has the long one."""
    soak = benchmark("soak")
    starting = {"Popen": warm.Popen, "run": warm.run}
    monkeypatch.setattr(soak, "subprocess", SimpleNamespace(**{**vars(subprocess), **starting}))
    tally = soak.soak(tmp_path, kills=2, steps=40, seed=5322)
    assert sum(tally.kills.values()) >= 2
    assert "two processes, FSDP2" in tally.modes.keys() < {*soak.MODES, ""}
    assert tally.rounds >= 2  # one of each; a kill that comes after the end begins another


@pytest.mark.slow
def test_sharded_checkpoint__goes_on_with_three_processes_and_then_with_one(
    tiny_data: Path, tmp_path: Path
) -> None:
    """FSDP2 on two, from step 6 on three, from step 12 one alone: the same images, and the golden curve but
    for rounding.
    """
    folder = tmp_path / "a"
    for processes, sharding, whole in ((2, "fsdp", 6), (3, "fsdp", 12), (1, "none", 20)):
        values = {
            "machine.processes": processes,
            "machine.sharding": sharding,
            "machine.micro_batch": 3,
            "checkpoint.keep_last": 4,
        }
        done = warm.run(command(folder, tiny_data, **values), capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        assert_golden(folder)
        for path in (folder / "checkpoints").glob("step_*"):  # as a power cut leaves them
            if int(path.name[-8:]) > whole:
                (path / max(file.name for file in path.glob("optimizer*.safetensors"))).unlink()
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [r["step"] for r in log if r["kind"] == "resume"] == [6, 12]
    nodes = [r["text"] for r in log if r["kind"] == "node"]
    assert ["processes 0 to 1" in nodes[0], "processes 0 to 2" in nodes[1]] == [True, True]
    straight = tmp_path / "straight"
    done = warm.run(command(straight, tiny_data), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert step_images(folder) == step_images(straight)
    assert checkpoint(folder, 20).keys() == checkpoint(straight, 20).keys()
