"""What --nodes and --restarts say, and the line `accelerate launch ...` of a run."""

import os
import shlex
import sys
from pathlib import Path

import pytest
from vitctl.launch.command import (
    LaunchConfig,
    accelerate_arguments,
    check_processes,
    launch_line,
    own_address,
    parse_nodes,
    write_accelerate_config,
)

from tests.launch.conftest import Load
from vitctl.errors import LaunchError


def test_parse_nodes() -> None:
    assert parse_nodes("1", 3) == LaunchConfig(1, restarts=3)
    assert parse_nodes("2@gpu01") == LaunchConfig(2, "gpu01", 29_400)
    assert parse_nodes("16@10.0.0.7:512") == LaunchConfig(16, "10.0.0.7", 512)
    assert parse_nodes("2@[fe80::1]:99") == LaunchConfig(2, "[fe80::1]", 99)


@pytest.mark.parametrize(
    "text", ["", "0", "two", "2@", "2@a b", "2@host:", "2@host:70000", "2@host:0", "-1@host"]
)
def test_parse_nodes__of_nonsense(text: str) -> None:
    with pytest.raises(
        LaunchError, match=r"should be the number of machines, an address and a port; for example --n"
    ):
        parse_nodes(text)


def test_parse_nodes__several_have_to_meet_somewhere() -> None:
    with pytest.raises(
        LaunchError,
        match="--nodes 2: the address of one of the machines, for the rendezvous, is missing; for ex",
    ):
        parse_nodes("2")


def test_check_spread() -> None:
    check_processes(LaunchConfig(2, "127.0.0.1", restarts=3), 4)
    with pytest.raises(LaunchError) as caught:
        check_processes(LaunchConfig(2, "a"), 1)
    assert str(caught.value) == (
        "--nodes 2: 1 process cannot be spread evenly over the machines; --processes counts those of all "
        "machines: give a multiple of 2"
    )
    with pytest.raises(LaunchError, match="--nodes 4: 6 processes cannot be spread"):
        check_processes(LaunchConfig(4, "a"), 6)
    with pytest.raises(LaunchError, match="--restarts -1: should be 0 or more"):
        check_processes(LaunchConfig(restarts=-1), 2)


def flags(line: str) -> dict[str, str]:
    """The flags of an `accelerate launch` line that take a value."""
    words = shlex.split(line)
    words = words[words.index("launch") + 1 : words.index("--module")]
    words.remove("--multi_gpu") if "--multi_gpu" in words else None
    return dict(zip(words[::2], words[1::2], strict=True))


def test_line__of_one_process_needs_no_launcher(load: Load, tmp_path: Path) -> None:
    recipe = load().recipe
    assert shlex.split(launch_line(tmp_path, recipe)) == [
        sys.executable,
        "-m",
        "vitctl.launch.worker",
        str(tmp_path),
    ]
    write_accelerate_config(tmp_path, recipe, LaunchConfig())
    assert list(tmp_path.iterdir()) == []


def test_line__of_several_processes_says_every_flag(load: Load, tmp_path: Path) -> None:
    line = launch_line(tmp_path / "a run", load(**{"machine.processes": 2}).recipe, LaunchConfig(restarts=3))
    assert line.startswith("PET_STANDALONE=1 ") and "accelerate launch --multi_gpu --config_file " in line
    assert shlex.split(line)[-3:] == ["--module", "vitctl.launch.worker", str(tmp_path / "a run")]
    expected = {
        "--config_file": str(tmp_path / "a run" / "accelerate.yaml"),
        "--num_processes": "2",
        "--num_machines": "1",
        "--machine_rank": "0",
        "--main_process_ip": "127.0.0.1",
        "--main_process_port": "0",
        "--rdzv_backend": "c10d",
        "--max_restarts": "3",
        "--monitor_interval": "0.1",
        "--gpu_ids": "all",
        "--num_cpu_threads_per_process": "1",
        "--mixed_precision": "no",
        "--dynamo_backend": "no",
        "--log_dir": "/dev/null",
    }
    assert flags(line) == expected
    one = launch_line(tmp_path, load().recipe, LaunchConfig(restarts=1))
    assert "--multi_gpu" not in one and flags(one)["--num_processes"] == "1"


def test_line__of_several_machines_is_the_same_on_each(load: Load, tmp_path: Path) -> None:
    line = launch_line(
        tmp_path / "run", load(**{"machine.processes": 8}).recipe, LaunchConfig(2, "gpu01", 512)
    )
    assert line.startswith("PET_RDZV_ID=run TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 ")
    expected = {
        "--num_processes": "8",
        "--num_machines": "2",
        "--main_process_ip": "gpu01",
        "--main_process_port": "512",
    }
    assert expected.items() <= flags(line).items()


def test_own_address() -> None:
    assert own_address(LaunchConfig()) == own_address(LaunchConfig(2, "127.0.0.1")) == "127.0.0.1"
    assert own_address(LaunchConfig(2, "localhost")) == "localhost"
    with pytest.raises(LaunchError, match=r"--nodes: nowhere\.invalid cannot be reached from here \("):
        own_address(LaunchConfig(2, "nowhere.invalid"))


@pytest.mark.parametrize(
    ("text", "threads"), [("3", "3"), ("4,2", "4"), (" 5 ", "5"), ("abc", ""), ("", ""), ("-1", "")]
)
def test_line__openmp_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, threads: str
) -> None:
    """What OpenMP reads there, which accelerate does not."""
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    words = accelerate_arguments(tmp_path, 2, LaunchConfig())
    own = words[words.index("--num_cpu_threads_per_process") + 1]
    assert own == (threads or str(max(1, (os.cpu_count() or 1) // 2)))
