"""What --nodes and --restarts mean, and the line `accelerate launch ...` of a run."""

import os
import shlex
import sys
from pathlib import Path

import pytest

from tests.launch.conftest import Load
from tests.matrix import each
from vitctl.errors import LaunchError
from vitctl.launch.agent import CONFIG, accelerate_arguments, check_spread, own_address, parse_nodes
from vitctl.launch.cluster import LaunchConfig
from vitctl.launch.prepare_run import launch_line


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("1", LaunchConfig(1, restarts=3)),
        ("2@gpu01", LaunchConfig(2, "gpu01", 29_400, 3)),
        ("16@10.0.0.7:512", LaunchConfig(16, "10.0.0.7", 512, 3)),
        ("2@[fe80::1]:99", LaunchConfig(2, "[fe80::1]", 99, 3)),
    ],
)
def test_parse_nodes(text: str, config: LaunchConfig) -> None:
    assert parse_nodes(text, 3) == config


@each("text", ["", "0", "two", "2@", "2@a b", "2@host:", "2@host:70000", "2@host:0", "-1@host", "2"])
def test_parse_nodes__refuses(text: str) -> None:
    with pytest.raises(LaunchError, match=r"--nodes.*such as --nodes 2@gpu01:29400"):
        parse_nodes(text)


@pytest.mark.parametrize(
    ("config", "processes", "key"),
    [
        (LaunchConfig(2, "a"), 1, "--nodes 2: 1 process cannot.*give a multiple of 2"),
        (LaunchConfig(4, "a"), 6, "--nodes 4: 6 processes cannot"),
    ],
)
def test_check_spread__refuses(config: LaunchConfig, processes: int, key: str) -> None:
    with pytest.raises(LaunchError, match=key):
        check_spread(config, processes)


def test_own_address() -> None:
    with pytest.raises(LaunchError, match=r"--nodes: nowhere\.invalid cannot be reached"):
        own_address(LaunchConfig(2, "nowhere.invalid"))
    assert own_address(LaunchConfig()) == own_address(LaunchConfig(2, "127.0.0.1")) == "127.0.0.1"
    assert own_address(LaunchConfig(2, "localhost")) == "localhost"


def flags(line: str) -> dict[str, str]:
    """The flags of an `accelerate launch` line that take a value."""
    words = shlex.split(line)
    words = words[words.index("launch") + 1 : words.index("--module")]
    words.remove("--multi_gpu") if "--multi_gpu" in words else None
    return dict(zip(words[::2], words[1::2], strict=True))


def test_line__of_one_process_needs_no_launcher(load: Load, tmp_path: Path) -> None:
    recipe = load().recipe
    line = [sys.executable, "-m", "vitctl.launch.worker", str(tmp_path)]
    assert shlex.split(launch_line(tmp_path, recipe)) == line


def test_line__of_several_processes_has_every_flag(load: Load, tmp_path: Path) -> None:
    line = launch_line(tmp_path / "a run", load(**{"machine.processes": 2}).recipe, LaunchConfig(restarts=3))
    assert line.startswith("PET_STANDALONE=1 ") and " launch --multi_gpu --config_file " in line
    assert shlex.split(line)[-3:] == ["--module", "vitctl.launch.worker", str(tmp_path / "a run")]
    assert flags(line) == {
        "--config_file": str(CONFIG),
        "--num_processes": "2",
        "--num_machines": "1",
        "--machine_rank": "0",
        "--main_process_ip": "127.0.0.1",
        "--main_process_port": "0",
        "--rdzv_backend": "c10d",
        "--rdzv_conf": "join_timeout=600,read_timeout=600",
        "--max_restarts": "3",
        "--monitor_interval": "0.1",
        "--gpu_ids": "all",
        "--num_cpu_threads_per_process": "1",
        "--mixed_precision": "no",
        "--dynamo_backend": "no",
        "--log_dir": "/dev/null",
    }
    one = launch_line(tmp_path, load().recipe, LaunchConfig(restarts=1))
    assert "--multi_gpu" not in one and flags(one)["--num_processes"] == "1"


def test_line__of_several_machines(load: Load, tmp_path: Path) -> None:
    config = LaunchConfig(2, "gpu01", 512)
    line = launch_line(tmp_path / "run", load(**{"machine.processes": 8}).recipe, config)
    assert line.startswith("PET_RDZV_ID=run TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 ")
    names = ("--num_processes", "--num_machines", "--main_process_ip", "--main_process_port")
    assert [flags(line)[name] for name in names] == ["8", "2", "gpu01", "512"]


@pytest.mark.parametrize(
    ("text", "threads"), [("3", "3"), ("4,2", "4"), (" 5 ", "5"), ("abc", ""), ("", ""), ("-1", "")]
)
def test_line__openmp_threads(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, threads: str
) -> None:
    """As OpenMP reads them, which accelerate does not."""
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    words = accelerate_arguments(tmp_path, load(**{"machine.processes": 2}).recipe.machine, LaunchConfig())
    count = words[words.index("--num_cpu_threads_per_process") + 1]
    assert count == (threads or str(max(1, (os.cpu_count() or 1) // 2)))
