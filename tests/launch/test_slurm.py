"""The batch script: what is asked for, held by a golden file and by a bash that runs it."""

import os
import re
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitctl.errors import LaunchError
from vitctl.launch.slurm import Job, job_text, parse_job, submit, write_job
from vitctl.system.text import has_control

GOLDEN = Path(__file__).parents[1] / "golden" / "job.sbatch"


def test_parse__reads_every_word() -> None:
    job = parse_job(
        "nodes=4,gpus=8,time=1-00:00:00,partition=long,account=a.b,qos=high,constraint=a100&ib,cpus=12,submit"
    )
    assert job == Job(4, 8, 1, 12, "1-00:00:00", "long", "a.b", "high", "a100&ib", True)
    assert job.num_processes == 32
    assert parse_job("tasks=2,time=30").num_processes == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nodes=4", "time is missing"),
        ("node=4,time=1:00:00", "'node=4' is unknown; known: nodes, gpus"),
        ("nodes=four,time=1:00:00", "'nodes=four' should be a whole number"),
        ("nodes=0,time=1:00:00", "'nodes=0' should be a whole number"),
        ("time=soon", "'time=soon' is not a valid time"),
        ("time=1:00:00,partition=a b", "'partition=a b' is not a valid partition"),
        ("time=1:00:00,partition=x\n#SBATCH --uid=0", "is not a valid partition"),
        ("time=1:00:00,submit=yes", "'submit=yes' is unknown"),
    ],
)
def test_parse__what_is_wrong_is_said_in_one_line(text: str, said: str) -> None:
    with pytest.raises(LaunchError) as caught:
        parse_job(text)
    assert said in str(caught.value)
    assert str(caught.value).endswith("for example --slurm nodes=4,gpus=8,time=24:00:00")


def test_job_text__golden() -> None:
    job = parse_job("nodes=4,gpus=8,time=24:00:00,partition=long")
    assert job_text(job, Path("/runs/jft h14"), "jft_h14", "/opt/python") == GOLDEN.read_text()
    subprocess.run(["bash", "-n", str(GOLDEN)], check=True)


@pytest.mark.parametrize(
    ("code", "cancelled", "requeued"),
    [(0, False, False), (3, False, True), (3, True, False), (2, False, False)],
)
def test_job__is_queued_again_when_it_was_saved_and_not_cancelled(
    tmp_path: Path, code: int, cancelled: bool, requeued: bool
) -> None:
    file = write_job(parse_job("tasks=2,time=10"), tmp_path / "a run", "smoke")
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


def test_submit__without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        LaunchError, match=r"sbatch is not on this machine; submit it where it is: sbatch x\.sbatch"
    ):
        submit(Path("x.sbatch"))
    for code, text in ((0, "Submitted batch job 12"), (1, "invalid partition")):
        (tmp_path / "sbatch").write_text(f"#!/bin/sh\necho '{text}'\nexit {code}\n")
        (tmp_path / "sbatch").chmod(0o755)
        if code:
            with pytest.raises(LaunchError, match=r"sbatch refused x\.sbatch: invalid partition"):
                submit(Path("x.sbatch"))
        else:
            assert submit(Path("x.sbatch")) == text


# What a shell, sbatch or both give a meaning to, and letters of the world.
_NASTY = st.text(
    alphabet=st.sampled_from("ab '\"\\$`;&|<>(){}[]*?!#%~=\n\r\t\0\x1b\u202eé猫-"), min_size=1, max_size=24
)
_RECORDER = '#!/bin/bash\nprintf "%s\\0" "${0##*/}" "$@" >> "$RECORD"\n[ "${0##*/}" != srun ] || exit 3\n'


def _script(name: str, run_dir: Path, word: str) -> str:
    """The script, or the refusal."""
    try:
        return job_text(parse_job(f"time=1:00:00,partition={word}"), run_dir, name, "/opt/python")
    except LaunchError as error:
        return f"refused: {error}"


@settings(max_examples=60, deadline=None)
@given(name=_NASTY, folder=_NASTY, word=st.one_of(st.just("long"), _NASTY))
def test_job__no_field_runs_a_command(name: str, folder: str, word: str) -> None:
    """Whatever is typed: a refusal in one line, or a script that runs srun and scontrol with our words, and
    nothing else.
    """
    with tempfile.TemporaryDirectory() as where:
        run_dir, script = Path(where) / "runs" / folder, Path(where) / "job.sbatch"
        text = _script(name, run_dir, word)
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
        before = sorted(Path(where).rglob("*"))
        environment = {"PATH": str(tools), "RECORD": str(record), "SLURM_JOB_ID": "7"}
        done = subprocess.run(
            ["/bin/bash", str(script)], env=environment, cwd=where, capture_output=True, check=False
        )
        assert done.returncode == 3 and done.stderr == b""
        resume = ["/opt/python", "-m", "vitctl", "resume", str(run_dir)]
        told = ["srun", "--kill-on-bad-exit=0", "--wait=120", *resume, "scontrol", "requeue", "7", ""]
        assert record.read_text().split("\0") == told
        assert sorted(Path(where).rglob("*")) == sorted([*before, record])


@pytest.mark.parametrize("letter", ["\n", "\r", "\x1b", "\u202e", '"', "\\"])
def test_job__a_folder_that_would_end_its_line_is_refused(tmp_path: Path, letter: str) -> None:
    folder = tmp_path / f"a{letter}#SBATCH --uid=0"
    with pytest.raises(
        LaunchError, match="cannot use a path with quotes, backslashes or control characters"
    ) as caught:
        job_text(parse_job("time=1:00:00"), folder, "smoke", "/opt/python")
    assert "\n" not in str(caught.value) and "\x1b" not in str(caught.value)


def test_job__a_name_is_one_word() -> None:
    text = job_text(
        parse_job("time=1:00:00"), Path("/runs/a"), "x\n#SBATCH --uid=0\ntouch owned", "/opt/python"
    )
    assert "#SBATCH --job-name=x_SBATCH_--uid_0_touch_owned\n" in text and "--uid=0" not in text
