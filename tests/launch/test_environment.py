"""Who started us is read from the environment; what torch needs is added for srun."""

from pathlib import Path

import pytest
from vitctl.launch.command import (
    FIRST_PORT,
    NUM_PORTS,
    find_member,
    first_host,
    tasks_per_node,
    without_settings,
)

from vitctl.errors import LaunchError


def slurm(rank: int, **other: str) -> dict[str, str]:
    """The environment of a task of 5 on nodes of 2, 2 and 1."""
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "5",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
        "SLURM_STEP_NODELIST": "gpu[007-008,012]",
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(rank // 2),
        "SLURM_LOCALID": str(rank % 2),
        **other,
    }


def test_nobody__placed_a_process_started_by_a_person() -> None:
    assert find_member({}) is None
    assert find_member({"RANK": "0"}) is None
    batch_script = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}
    assert find_member(batch_script) is None
    assert find_member(slurm(0, SLURM_STEP_NUM_TASKS="1")) is None


@pytest.mark.parametrize("rank", range(5))
def test_srun__places_each_task(rank: int) -> None:
    env = slurm(rank)
    member = find_member(env)
    assert member is not None
    assert (member.launcher, member.rank, member.num_processes) == ("srun", rank, 5)
    assert member.run_dir("some/jft_h14.toml") == Path("runs/jft_h14_4711")
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"]) == (str(rank), "5", str(rank % 2))
    assert env["LOCAL_WORLD_SIZE"] == ("1" if rank == 4 else "2")
    assert env["MASTER_ADDR"] == "gpu007"
    assert FIRST_PORT <= int(env["MASTER_PORT"]) < FIRST_PORT + NUM_PORTS
    again = find_member(env)
    assert again is not None
    assert again.run_dir("jft_h14") == member.run_dir("jft_h14")


def test_srun__steps_and_jobs_have_ports_of_their_own() -> None:
    ports = set()
    for job in range(4000, 4010):
        for step in range(3):
            env = slurm(0, SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step))
            find_member(env)
            ports.add(env["MASTER_PORT"])
    assert len(ports) == 30


def test_srun__an_address_that_is_given_stays() -> None:
    env = slurm(0, MASTER_ADDR="login", MASTER_PORT="99")
    find_member(env)
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("login", "99")


@pytest.mark.parametrize(
    "lost", ["SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_JOB_ID"]
)
def test_srun__an_environment_with_a_gap_is_said(lost: str) -> None:
    env = slurm(1)
    del env[lost]
    with pytest.raises(
        LaunchError, match=r"srun started 5 tasks, but its environment does not say on which nodes \(.*\)"
    ):
        find_member(env)


def test_torchrun__of_no_job_needs_a_folder() -> None:
    member = find_member({"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"})
    assert member is not None
    with pytest.raises(
        LaunchError,
        match="one of 2 processes started by torchrun: give all of them the same run folder with --out",
    ):
        member.run_dir("smoke")
    named = find_member({"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "abc"})
    assert named is not None
    assert named.run_dir("smoke") == Path("runs/smoke_abc")


@pytest.mark.parametrize(
    ("text", "expected"), [("2(x3),1", [2, 2, 2, 1]), ("8", [8]), ("4(x2)", [4, 4]), ("1,2,3", [1, 2, 3])]
)
def test_tasks_per_node(text: str, expected: list[int]) -> None:
    assert tasks_per_node(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpu[007-012,15],login1", "gpu007"),
        ("rack[1-2]n[3-4]", "rack1n3"),
        ("node", "node"),
        ("a,b", "a"),
        ("localhost,x", "localhost"),
        ("h[12,14]", "h12"),
        ("n-1.cluster.org", "n-1.cluster.org"),
    ],
)
def test_first_host(text: str, expected: str) -> None:
    assert first_host(text) == expected


@pytest.mark.parametrize("text", ["", "[", "$(reboot)", "a b"])
def test_first_host__of_nonsense(text: str) -> None:
    with pytest.raises(ValueError, match="host list"):
        first_host(text)


@pytest.mark.parametrize(
    "env",
    [
        {"RANK": "abc", "WORLD_SIZE": "2"},
        {"RANK": "abc"},
        {"RANK": "-1", "WORLD_SIZE": "2"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "9" * 5000, "WORLD_SIZE": "2"},
        {"RANK": "٣", "WORLD_SIZE": "4"},
        {"RANK": "0", "WORLD_SIZE": ""},
        {"SLURM_STEP_NUM_TASKS": "\x1b[2J"},
        {"TORCHELASTIC_RESTART_COUNT": "x"},
        {"TORCHELASTIC_MAX_RESTARTS": "x"},
    ],
)
def test_environment__what_is_no_number_is_one_line(env: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match=r"^environment: [A-Z_]+ is .*unset") as caught:
        find_member(env)
    assert str(caught.value).isprintable()


def test_settings__that_nobody_chose_for_this_run_are_left_out() -> None:
    env = {
        "HOME": "/h",
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_OFFLOAD_PARAMS": "1",
        "PET_NNODES": "7",
        "OMP_NUM_THREADS": "5",
    }
    assert without_settings(env) == {"HOME": "/h", "OMP_NUM_THREADS": "5"}


def test_leftovers__of_another_launcher_make_no_member_and_are_removed() -> None:
    kept = {"HOME": "/root", "MASTER_ADDR": "10.0.0.1"}
    left = {
        "RANK": "1",
        "LOCAL_RANK": "0",
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "a",
        "TORCHELASTIC_RESTART_COUNT": "2",
    }
    env = {**kept, **left}
    assert find_member(env) is None
    assert env == kept
    with pytest.raises(LaunchError, match="WORLD_SIZE is set and RANK is not"):
        find_member({"WORLD_SIZE": "2"})
