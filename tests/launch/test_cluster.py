"""What a launcher and Slurm say in the environment, and the batch script: what is asked for, compared with a
golden file and run by a bash.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import warm
from tests.matrix import each
from vitctl.errors import LaunchError
from vitctl.launch.cluster import (
    FIRST_PORT,
    NUM_PORTS,
    UNUSED_SIGNAL,
    Job,
    _minutes,
    check_arrives,
    find_member,
    first_host,
    job_text,
    submit,
    tasks_per_node,
    without_settings,
)
from vitctl.launch.jobset import JobSet, jobset_manifest
from vitctl.system.text import has_control

GOLDEN = Path(__file__).parents[1] / "golden" / "job.sbatch"


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


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"RANK": "0"},
        {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"},
        slurm(0, SLURM_STEP_NUM_TASKS="1"),
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "pod-0", "MASTER_PORT": "23456"},
        slurm(1, RANK="0", WORLD_SIZE="1"),
    ],
    ids=["nothing", "rank only", "batch script", "interactive step", "pod", "alone in each task"],
)
def test_find_member__of_a_process_that_no_launcher_started(env: dict[str, str]) -> None:
    assert find_member(env) is None
    assert "RANK" not in env  # accelerate would obey it


@pytest.mark.parametrize("terminal", [None, "/dev/pts/1"])
@pytest.mark.parametrize("of_task", [{}, {"SLURM_TASK_PID": "77"}], ids=["unknown", "task"])
def test_srun__a_shell_in_one_of_several_tasks_is_refused(
    monkeypatch: pytest.MonkeyPatch, terminal: str | None, of_task: dict[str, str]
) -> None:
    """It would wait for the others. Tasks that srun starts from such a shell inherit the port, not the
    terminal.
    """
    monkeypatch.setattr("psutil.Process.terminal", lambda _: terminal)
    env = slurm(0, SLURM_PTY_PORT="41111", **of_task)
    if of_task and not terminal:
        assert find_member(env) is not None
        return
    with pytest.raises(LaunchError, match="type `unset SLURM_STEP_NUM_TASKS` first"):
        find_member(env)
    del env["SLURM_STEP_NUM_TASKS"]  # as it says
    assert find_member(env) is None


@pytest.mark.parametrize("rank", [0, 4])
def test_srun__describes_each_task(rank: int) -> None:
    env = slurm(rank)
    member = find_member(env)
    assert member is not None
    assert (member.launcher, member.rank, member.num_processes) == ("srun", rank, 5)
    assert member.run_dir("some/jft_h14.toml") == Path("runs/jft_h14_4711")
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"]) == (str(rank), "5", str(rank % 2))
    assert env["LOCAL_WORLD_SIZE"] == ("1" if rank == 4 else "2")
    assert env["MASTER_ADDR"] == "gpu007"
    assert FIRST_PORT <= int(env["MASTER_PORT"]) < FIRST_PORT + NUM_PORTS


def test_srun__steps_and_jobs_have_different_ports() -> None:
    ports = set()
    for job in range(4000, 4010):
        for step in range(3):
            env = slurm(0, SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step))
            find_member(env)
            ports.add(env["MASTER_PORT"])
    assert len(ports) == 30


def test_srun__keeps_a_given_address() -> None:
    env = slurm(0, MASTER_ADDR="login", MASTER_PORT="99")
    find_member(env)
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("login", "99")


@pytest.mark.parametrize(
    "lost", ["SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_JOB_ID"]
)
def test_srun__refuses_an_environment_with_a_gap(lost: str) -> None:
    env = slurm(1)
    del env[lost]
    with pytest.raises(LaunchError, match="srun started 5 tasks"):
        find_member(env)


def test_torchrun__without_a_job_id_needs_a_folder() -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    member = find_member({**env, "TORCHELASTIC_RUN_ID": "none"})
    assert member is not None
    with pytest.raises(LaunchError, match=r"2 processes started by torchrun.*--out"):
        member.run_dir("smoke")
    named = find_member({**env, "TORCHELASTIC_RUN_ID": "abc"})
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
def test_first_host__refuses(text: str) -> None:
    with pytest.raises(ValueError, match="host list"):
        first_host(text)


@each(
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
        {"RANK": "0", "WORLD_SIZE": "2"},
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "gpu007"},
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "", "MASTER_PORT": "29500"},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "2"},
        {"SLURM_PROCID": "x"},
        slurm(5),
        slurm(7, RANK="0"),
    ],
)
def test_environment__what_makes_no_sense_is_one_line(env: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match=r"^environment: [A-Z_]+ is .*unset") as caught:
        find_member(env)
    assert str(caught.value).isprintable()


def test_settings__of_accelerate_are_left_out() -> None:
    settings = {"ACCELERATE_USE_FSDP": "true", "FSDP_OFFLOAD_PARAMS": "1", "PET_NNODES": "7"}
    assert without_settings({"HOME": "/h", "OMP_NUM_THREADS": "5", **settings}) == {
        "HOME": "/h",
        "OMP_NUM_THREADS": "5",
    }


LAUNCHED = {"ACCELERATE_DYNAMO_MODE": "default", "ACCELERATE_MIXED_PRECISION": "no"}


@pytest.mark.parametrize(
    ("env", "key"),
    [
        (
            {"MASTER_ADDR": "127.0.0.1"},
            "--num_processes: starts one process.*or add --multi_gpu",
        ),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "--mixed_precision .*=fp16.*give vitctl --precision bf16"),
        ({"ACCELERATE_USE_FSDP": "true"}, "--use_fsdp .*give vitctl --set machine.sharding=fsdp"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "--use_deepspeed"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "--dynamo_backend .*--set machine.compile=true"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "--gradient_accumulation_steps"),
    ],
)
def test_foreign_launch__what_does_not_arrive_is_refused(env: dict[str, str], key: str) -> None:
    with pytest.raises(LaunchError, match=f"^accelerate launch {key}"):
        check_arrives({**LAUNCHED, **env})
    check_arrives(env)  # set by the user for something else
    check_arrives({**LAUNCHED, **env, "PET_SIGNALS_TO_HANDLE": UNUSED_SIGNAL, "RANK": "0"})


def test_foreign_launch__what_arrives_is_accepted() -> None:
    check_arrives({})
    several = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "ACCELERATE_DYNAMO_BACKEND": "no"}
    check_arrives({**LAUNCHED, **several, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (["--num_processes", "2"], "--num_processes: starts one process"),
        pytest.param(
            ["--num_processes", "2", "--multi_gpu", "--mixed_precision", "bf16"],
            "--mixed_precision",
            marks=pytest.mark.slow,
        ),
        pytest.param(["--mixed_precision", "fp16"], "--mixed_precision", marks=pytest.mark.slow),
        pytest.param(["--num_processes", "2", "--use_fsdp"], "--use_fsdp", marks=pytest.mark.slow),
    ],
)
def test_foreign_launch__real(flags: list[str], key: str, tmp_path: Path) -> None:
    """accelerate's own command, with vitctl behind it."""
    vitctl = ["pretrain", "--recipe", "smoke", "--synthetic", "--out", str(tmp_path / "run")]
    line = [sys.executable, "-m", "accelerate.commands.launch", *flags, "-m", "vitctl", *vitctl]
    done = warm.run(line, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert f"vitctl: accelerate launch {key}" in done.stderr
    assert not (tmp_path / "run").exists()


MPI = {
    "openmpi": {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "PMIX_RANK": "3"},
    "openmpi 0": {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"},
    "mpich": {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2"},
    "mvapich": {"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "0"},
    "pmix": {"PMIX_RANK": "1"},
    "no number": {"PMI_SIZE": "x"},
    "with address": {"OMPI_COMM_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
}


@pytest.mark.parametrize("name", MPI)
def test_mpi__is_refused_and_what_it_says_to_unset_is_enough(name: str) -> None:
    env = dict(MPI[name])
    with pytest.raises(LaunchError, match=r"not under mpirun.*`unset ([A-Z0-9_ ]+)`") as caught:
        find_member(env)
    for variable in re.findall("`unset (.*)`", str(caught.value))[0].split():
        del env[variable]
    assert find_member(env) is None
    assert not {name for name in env if not name.startswith("MASTER_")}, "accelerate would obey them"
    assert find_member({**MPI[name], "RANK": "0", "WORLD_SIZE": "1"}) is None
    assert find_member(slurm(1, **MPI[name])) is not None, "srun, with its own MPI plugin"


def test_srun__has_precedence_over_a_rank_of_another_launcher() -> None:
    env = slurm(3, RANK="0", LOCAL_RANK="0")
    assert (find_member(env) or pytest.fail("none")).rank == 3
    assert (env["RANK"], env["LOCAL_RANK"]) == ("3", "1")


def test_leftovers__of_another_launcher_are_removed() -> None:
    kept = {"HOME": "/root", "MASTER_ADDR": "10.0.0.1"}
    torchrun = {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "2", "PMI_RANK": "0"}
    env = {**kept, **torchrun, "RANK": "1", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
    assert find_member(env) is None
    assert env == kept
    with pytest.raises(LaunchError, match="WORLD_SIZE is set and RANK is not"):
        find_member({"WORLD_SIZE": "2"})


def test_parse__reads_every_word() -> None:
    job = Job.parse(
        "nodes=4,gpus=8,time=1-00:00:00,partition=long,account=a.b,qos=high,constraint=a100&ib,cpus=12,submit,"
        "mem=64G,exclusive,reservation=r,setup=my file.sh"
    )
    named = {"partition": "long", "account": "a.b", "qos": "high", "constraint": "a100&ib", "mem": "64G"}
    more = {"reservation": "r", "exclusive": True, "setup": "my file.sh", "submit": True}
    assert job == Job(4, 8, 1, 12, time="1-00:00:00", **named, **more)  # type: ignore[arg-type]
    assert job.num_processes == 32
    assert Job.parse("tasks=2,time=30").num_processes == 2
    assert Job.parse("time=0").time == "0"  # no limit


@each(
    ("text", "key"),
    [
        ("nodes=4", "time is missing"),
        ("node=4,time=1:00:00", "'node=4' is unknown; known: nodes, gpus"),
        ("nodes=four,time=1:00:00", "'nodes=four' should be a whole number"),
        ("nodes=0,time=1:00:00", "'nodes=0' should be a whole number"),
        ("time=soon", "'time=soon' is not a valid time"),
        ("time=1:00:00,partition=a b", "'partition=a b' is not a valid partition"),
        ("time=1:00:00,partition=x\n#SBATCH --uid=0", "is not a valid partition"),
        ("time=1:00:00,submit=yes", "'submit=yes' is unknown"),
        ("time=10,gpus=1,tasks=2", "tasks=2 with gpus=1: each GPU has one process"),
        ("time=1:00:00,exclusive=yes", "'exclusive=yes' is unknown"),
        ("time=1:00:00,mem=lots", "'mem=lots' is not a valid mem"),
        ("time=3:00", "is 3 minutes, of which the last 5 are for saving; give at least 10"),
        ("time=0:09:00", "is 9 minutes"),
        ("time=9", "is 9 minutes"),
    ],
)
def test_parse__refuses(text: str, key: str) -> None:
    with pytest.raises(LaunchError, match=key):
        Job.parse(text)


@pytest.mark.parametrize(
    ("time", "minutes"),
    [("90", 90), ("90:30", 90.5), ("1:30:00", 90), ("2-1", 2940), ("2-1:30", 2970), ("2-1:30:30", 2970.5)],
)
def test_time__is_read_as_slurm_does(time: str, minutes: float) -> None:
    assert _minutes(time) == minutes


def test_setup__comes_before_vitctl_in_both_kinds_of_job(tmp_path: Path) -> None:
    file = tmp_path / "setup.sh"
    file.write_text("#SBATCH --mail-type=FAIL\nmodule load cuda\nexport NCCL_SOCKET_IFNAME=$MINE\n")
    job = Job.parse(f"time=1:00:00,cpus=4,exclusive,mem=1G,setup={file}")
    text = job_text(job, Path("/runs/a"), "/opt/python")
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert lines[first : first + 2] == ["module load cuda", "export NCCL_SOCKET_IFNAME=$MINE"]
    assert {"#SBATCH --mail-type=FAIL", "#SBATCH --exclusive", "#SBATCH --mem=1G"} <= {*lines[:first]}
    assert next(line for line in lines if line.startswith("srun")).startswith("srun --cpus-per-task=4 ")
    pods = jobset_manifest(JobSet.parse(f"image=a,claim=c:/runs,setup={file}"), Path("/runs/a"))
    command = re.search(r"'command': \['sh', '-c', (.*?)\], 'env'", str(pods))
    assert command and "NCCL_SOCKET_IFNAME=$$MINE\\nexec python -m vitctl resume /runs/a" in command[1]


def test_setup__directives_come_before_the_first_command(tmp_path: Path) -> None:
    """sbatch reads no directive after one."""
    file = tmp_path / "setup.sh"
    file.write_bytes(b"\xef\xbb\xbfmodule load cuda\n#SBATCH --mail-type=END\nset -euo pipefail\n")
    lines = job_text(Job.parse(f"time=1:00:00,setup={file}"), Path("/runs/a"), "/opt/python").splitlines()
    commands = [line for line in lines if not line.startswith("#")]
    assert lines.index("#SBATCH --mail-type=END") < lines.index(commands[0])
    assert commands[:3] == ["module load cuda", "set -euo pipefail", "set +eu"]


@pytest.mark.parametrize("option", ["--nodes=9", "-N 9", "--time=5", "-t 5", "--signal=TERM", "--no-requeue"])
def test_setup__directives_of_slurm_itself_are_refused(tmp_path: Path, option: str) -> None:
    (tmp_path / "setup.sh").write_text(f"#SBATCH {option}\n")
    job = Job.parse(f"time=1:00:00,setup={tmp_path / 'setup.sh'}")
    with pytest.raises(LaunchError, match=f"has #SBATCH {option}, which --slurm sets itself"):
        job_text(job, Path("/runs/a"), "/opt/python")


@pytest.mark.parametrize(
    "content", [b"a\0b", b"\xff\xfe", b"module load cuda\r\n", b"cat <<EOF\nhello\n", b"export A='1\n", None]
)
def test_setup__that_is_not_text_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "setup.sh").write_bytes(content)
    job = Job.parse(f"time=1:00:00,setup={tmp_path / 'setup.sh'}")
    with pytest.raises(LaunchError, match=r"setup\.sh"):
        job_text(job, Path("/runs/a"), "/opt/python")


def test_job_text__golden() -> None:
    job = Job.parse("nodes=4,gpus=8,time=24:00:00,partition=long")
    assert job_text(job, Path("/runs/jft h14"), "/opt/python") == GOLDEN.read_text()
    subprocess.run(["bash", "-n", str(GOLDEN)], check=True)


@pytest.mark.parametrize(
    ("code", "cancelled", "requeued"),
    [(0, False, False), (3, False, True), (3, True, False), (2, False, False), (137, False, True)],
)
def test_job__is_queued_again_when_it_was_saved_and_not_cancelled(
    tmp_path: Path, code: int, cancelled: bool, requeued: bool
) -> None:
    file = Job.parse("tasks=2,time=10").write(tmp_path / "a run")
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "srun").write_text(
        f'#!/bin/bash\necho "$@" > {tmp_path}/srun.txt\n' + "kill $PPID\n" * cancelled + f"exit {code}\n"
    )
    (bin_ / "scontrol").write_text(f'#!/bin/bash\necho "$@" > {tmp_path}/scontrol.txt\n')
    for path in bin_.iterdir():
        path.chmod(0o755)
    env = {**os.environ, "PATH": f"{bin_}:{os.environ['PATH']}", "SLURM_JOB_ID": "12"}
    assert subprocess.run(["bash", str(file)], env=env).returncode == code
    assert (tmp_path / "srun.txt").read_text().endswith(f"-m vitctl resume {tmp_path / 'a run'}\n")
    assert (tmp_path / "scontrol.txt").exists() == requeued
    if requeued:
        assert (tmp_path / "scontrol.txt").read_text() == "requeue 12\n"
    assert (tmp_path / "a run" / "logs").is_dir()


def test_job__that_saves_nothing_is_queued_again_three_times(tmp_path: Path) -> None:
    """A store that stays away would keep the nodes for ever; a new checkpoint starts the count again."""
    run_dir, requeues = tmp_path / "a run", tmp_path / "requeues.txt"
    file, saved = Job.parse("time=10").write(run_dir), run_dir / "suite" / "checkpoints"
    for name, text in {"srun": "exit 3", "scontrol": f"echo again >> {requeues}"}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": str(tmp_path), "SLURM_JOB_ID": "12"}

    def times(jobs: int) -> int:
        before = requeues.read_text().count("again") if requeues.exists() else 0
        for _ in range(jobs):
            assert subprocess.run(["/bin/bash", str(file)], env=env, check=False).returncode == 3
        return requeues.read_text().count("again") - before

    assert times(5) == 3
    saved.mkdir(parents=True)
    assert times(5) == 3
    os.utime(saved, ns=(time.time_ns() + 10**9,) * 2)  # later than the count, as a checkpoint saved now
    assert times(1) == 1
    os.utime(saved, ns=(0, 0))
    env["SLURM_JOB_ID"] = "13"
    assert times(5) == 3


def test_submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=r"not on this machine.*sbatch x\.sbatch"):
        submit(Job(), Path("x.sbatch"))
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 'Submitted batch job 12'\n")
    sbatch.chmod(0o755)
    assert submit(Job(), Path("x.sbatch")) == "Submitted batch job 12"
    sbatch.write_text("#!/bin/sh\necho 'invalid partition'\nexit 1\n")
    with pytest.raises(LaunchError, match=r"sbatch refused x\.sbatch: invalid partition"):
        submit(Job(), Path("x.sbatch"))


# What a shell, sbatch or both give a meaning to, and letters of the world.
_NASTY = st.text(
    alphabet=st.sampled_from("ab '\"\\$`;&|<>(){}[]*?!#%~=\n\r\t\0\x1b\u202eé猫-"), min_size=1, max_size=24
)
_RECORDER = '#!/bin/bash\nprintf "%s\\0" "${0##*/}" "$@" >> "$RECORD"\n[ "${0##*/}" != srun ] || exit 3\n'


def _script(run_dir: Path, word: str) -> str:
    """The script, or the refusal."""
    try:
        return job_text(Job.parse(f"time=1:00:00,partition={word}"), run_dir, "/opt/python")
    except LaunchError as error:
        return f"refused: {error}"


@settings(max_examples=60, deadline=None)
@given(folder=_NASTY, word=st.one_of(st.just("long"), _NASTY))
def test_job__no_field_runs_a_command(folder: str, word: str) -> None:
    """Whatever is typed: a refusal in one line, or a script that runs srun and scontrol with our words, and
    nothing else.
    """
    with tempfile.TemporaryDirectory() as where:
        run_dir, script = Path(where) / "runs" / folder, Path(where) / "job.sbatch"
        text = _script(run_dir, word)
        if text.startswith("refused"):
            assert not has_control(text)
            return
        script.write_text(text)
        subprocess.run(["bash", "-n", str(script)], check=True)
        directives = [line for line in text.split("\n") if line.startswith("#SBATCH")]
        assert len(directives) == 9 and directives[-1] == "#SBATCH --requeue"
        assert all(re.fullmatch(r'#SBATCH --[a-z-]+(=("[^"\\]*"|[^\s"\\]+))?', line) for line in directives)
        tools, record = Path(where) / "bin", Path(where) / "record"
        tools.mkdir()
        for tool in ("srun", "scontrol"):
            (tools / tool).write_text(_RECORDER)
            (tools / tool).chmod(0o755)
        (run_dir / "logs").mkdir(parents=True)  # as `write` does
        before = sorted([*Path(where).rglob("*"), run_dir / "logs" / "requeued_7.txt"])
        environment = {"PATH": str(tools), "RECORD": str(record), "SLURM_JOB_ID": "7"}
        done = subprocess.run(
            ["/bin/bash", str(script)], env=environment, cwd=where, capture_output=True, check=False
        )
        assert done.returncode == 3 and done.stderr == b""
        resume = ["/opt/python", "-m", "vitctl", "resume", str(run_dir)]
        told = ["srun", "--kill-on-bad-exit=0", "--wait=120", *resume, "scontrol", "requeue", "7", ""]
        assert record.read_text().split("\0") == told
        assert sorted(Path(where).rglob("*")) == sorted([*before, record])
