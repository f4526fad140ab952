"""Several machines, which are several vitctls on loopback here, and processes that are lost and started
again.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from vitctl.launch.command import LaunchConfig
from vitctl.launch.errors import LOGS

from tests.conftest import Run, assert_golden, checkpoint, command, free_port, sample_keys
from tests.launch.conftest import (
    FOREGROUND,
    Load,
    assert_gone,
    ended,
    family_of,
    held,
    is_open,
    is_signalled,
    kill_rank,
    logged,
    machine,
    machines,
    rank_of,
    says,
    wait_for,
)
from vitctl.errors import LaunchError
from vitctl.launch import launcher
from vitctl.launch.prepare_run import prepare_run

# One process computes these to the bit as two do: without clipping, each sums the gradients of the same
# halves.
EXACT = {"optimizer.clip_norm": 0.0, "machine.micro_batch": 8, "checkpoint.every_steps": 2}
LONG = {"schedule.total_steps": 100_000, "evaluation.every_steps": 0, "checkpoint.every_steps": 0}


def test_two_machines__one_is_told_to_stop_both_save_and_one_process_goes_on(
    run: Run, one_process: Path, tiny_data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    pair = machines(folder, tiny_data, **{"machine.processes": 2})
    wait_for(logged(folder, 2), pair)
    family = family_of(pair)
    with held(pair) as ranks:  # or they might be through before the signal has found its way to them
        pair[1].send_signal(signal.SIGTERM)
        wait_for(lambda: any(map(is_signalled, ranks)), pair)
    both = ended(pair)
    for told, (code, _, said) in enumerate(both):
        first, *heard, last = said.splitlines()
        assert first.startswith("2 machines: waiting for all to join at 127.0.0.1:")
        assert (
            heard
            == ["vitctl: SIGTERM: stopping as soon as the work so far is safe; a second signal stops at once"]
            * told
        )
        assert (code, last) == (3, f"stopped and saved in {folder}; resume with: vitctl resume {folder}")
    assert [out.count("step 2/20") for _, out, _ in both] == [1, 1]
    assert_gone(family)
    assert json.loads((folder / "result.json").read_text())["status"] == "stopped"
    assert "exitcode" not in next((folder / LOGS).glob("launcher_*.txt")).read_text()
    run("run", **{"checkpoint.background": False})
    assert_golden(folder)
    assert sample_keys(folder) == sample_keys(one_process)


@pytest.mark.slow
def test_restart__a_killed_process_costs_nothing(run: Run, tiny_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    one = machine(folder, tiny_data, "--restarts", "1", **EXACT, **{"machine.processes": 2})
    wait_for(logged(folder, 3), [one])
    kill_rank(1, [one])
    [(code, out, said)] = ended([one])
    assert (code, said) == (0, ""), said
    assert "warning: a process was lost, all processes were restarted (restart 1)" in out
    assert "resuming from step" in out
    assert "exitcode: -9" in next((folder / LOGS).glob("launcher_*.txt")).read_text()
    straight = run("straight", **EXACT)
    assert checkpoint(folder, 20) == checkpoint(straight, 20)
    assert sample_keys(folder) == sample_keys(straight)


@pytest.mark.slow
def test_two_machines__of_two_processes_each_with_a_killed_one(
    run: Run, tiny_data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    pair = machines(
        folder, tiny_data, "--restarts", "1", **{"machine.processes": 4, "checkpoint.every_steps": 2}
    )
    wait_for(logged(folder, 5), pair)
    kill_rank(3, pair)
    said = ended(pair)
    assert [code for code, _, _ in said] == [0, 0], said
    shown = [
        (out.count("step 20/20"), "resuming from step" in out, "0 to 3, CPU" in out) for _, out, _ in said
    ]
    assert shown == [(1, True, True)] * 2
    assert_golden(folder)
    assert sample_keys(folder) == sample_keys(run("one"))


@pytest.mark.slow
def test_restarts__used_up_are_one_line_on_every_machine(tiny_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    pair = machines(folder, tiny_data, **{**LONG, "machine.processes": 2})
    wait_for(logged(folder, 5), pair)
    family = family_of(pair)
    kill_rank(0, pair)
    for code, _, said in ended(pair):
        assert code == 2, said
        assert said.splitlines()[1:] == [
            "vitctl: process 0 of 2 was killed (SIGKILL), most often because it ran out of memory; "
            f"{folder / 'logs' / 'rank_00.txt'} has its output; resume with: vitctl resume {folder}"
        ]
    assert_gone(family)
    assert json.loads((folder / "result.json").read_text())["error"].startswith(
        "process 0 of 2 was killed (SIGKILL)"
    )


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["other", "meeting"])
def test_a_whole_machine__is_replaced(run: Run, tiny_data: Path, tmp_path: Path, lost: str) -> None:
    """All of it is gone at once. The same command on a new one, and the run goes on; where the machine was
    lost at whose address they meet, the one that is left ends, and is started again too."""
    folder, port = tmp_path / "run", free_port()
    values = {**EXACT, "machine.processes": 2}
    flags = ("--nodes", f"2@127.0.0.1:{port}", "--restarts", "1")
    host = machine(folder, tiny_data, *flags, **values)
    wait_for(lambda: is_open(port), [host])
    pair = [host, machine(folder, tiny_data, *flags, **values)]
    wait_for(logged(folder, 5), pair)
    left, gone = pair if lost == "other" else pair[::-1]
    family = family_of([gone])
    gone.kill()
    assert_gone(family)
    ended([gone])
    if lost == "other":
        wait_for(says(left, "if a machine is missing, run the same command there, or on another"), [left])
    else:
        [(code, _, said)] = ended([left])
        assert code == 2, said
        assert len(said.splitlines()) == 2
        assert said.endswith(f"resume with: vitctl resume {folder}\n")
        left = machine(folder, tiny_data, *flags, **values)
    said = ended([left, machine(folder, tiny_data, *flags, **values)])
    assert [code for code, _, _ in said] == [0, 0], said
    assert ["resuming from step" in out for _, out, _ in said] == [True, True]
    assert checkpoint(folder, 20) == checkpoint(run("straight", **EXACT), 20)


@pytest.mark.slow
def test_restarts__are_not_spent_on_what_a_person_has_to_mend(tiny_data: Path, tmp_path: Path) -> None:
    """A split that is not there is found before anything starts; an unreadable image by one process in the
    midst of its work.
    """
    from tests.engine.test_trainer import damaged

    data = damaged(tiny_data, tmp_path / "data", "test", [20])
    for name, place, values, expected in (
        ("split", tiny_data, {"data.train_split": "tran"}, "tran"),
        ("image", data, {"schedule.total_steps": 6, "evaluation.every_steps": 0}, "cannot be evaluated"),
    ):
        folder = tmp_path / name
        pair = machines(folder, place, "--restarts", "2", **values, **{"machine.processes": 2})
        for code, _, said in ended(pair):
            assert code == 2, said
            [own] = [line for line in said.splitlines() if "waiting for all to join" not in line]
            assert expected in own
            assert own.endswith(".txt)") == (name == "image")
    assert "exitcode" not in next((folder / LOGS).glob("launcher_*.txt")).read_text()
    logs = [path.read_text() for path in (folder / LOGS).glob("rank_*.txt")]
    assert any("Traceback" in text and "cannot be evaluated" in text for text in logs)
    assert not any("restart 1" in text for text in (folder / "log.jsonl").read_text().splitlines())


@pytest.mark.slow
def test_signal__the_second_leaves_nothing_behind(tiny_data: Path, tmp_path: Path) -> None:
    """Nor does the end of vitctl itself. The processes hang: they could not save if they would."""
    for name, numbers in (("twice", (signal.SIGINT, signal.SIGTERM)), ("killed", (signal.SIGKILL,))):
        folder = tmp_path / name
        one = machine(
            folder, tiny_data, "--restarts", "3", **LONG, **{"machine.processes": 2, "machine.workers": 1}
        )
        wait_for(logged(folder, 2), [one])
        family = family_of([one])
        assert len(family) >= 4
        for process in family:
            if rank_of(process) is not None:
                process.suspend()
        one.send_signal(numbers[0])
        if len(numbers) > 1:
            wait_for(says(one, "stopping as soon as the work so far is safe"), [one])
            one.send_signal(numbers[1])
        [(code, _, said)] = ended([one])
        if name == "twice":
            text = f"stopped at once; earlier checkpoints are complete; resume with: vitctl resume {folder}"
            assert said.splitlines()[-1] == text
        assert code == (3 if name == "twice" else -signal.SIGKILL)
        assert_gone(family)


@pytest.mark.slow
def test_signal__while_a_machine_waits_for_the_others(tiny_data: Path, tmp_path: Path) -> None:
    folder, port = tmp_path / "run", free_port()
    one = machine(folder, tiny_data, "--nodes", f"2@127.0.0.1:{port}", **{"machine.processes": 2})
    wait_for(lambda: is_open(port), [one])
    one.send_signal(signal.SIGUSR1)
    [(code, _, said)] = ended([one])
    last = f"stopped and saved in {folder}; resume with: vitctl resume {folder}"
    assert (code, said.splitlines()[-1]) == (3, last)


def test_machines__that_do_not_meet_are_one_line(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after ten minutes in which the others did not come."""
    from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

    def wait_in_vain(*_: object) -> None:
        raise RendezvousTimeoutError("nobody came")

    config = LaunchConfig(2, "127.0.0.1", 29_400)
    monkeypatch.setattr(launcher, "_accelerate", wait_in_vain)
    prepare_run(load(**{"machine.processes": 2}), tmp_path, config=config)
    with pytest.raises(LaunchError) as caught:
        launcher.launch(tmp_path, lambda _: None, config)
    [log] = (tmp_path / LOGS).glob("launcher_*.txt")
    assert str(caught.value) == (
        "accelerate launch ended before all processes had met at 127.0.0.1:29400: every machine has to run "
        "this command; "
        f"{log} says why; resume with the same command"
    )
    assert log.read_text() == "nobody came\n"


@pytest.mark.slow
def test_resume_and_finetune__with_restarts(run: Run, tiny_data: Path, tmp_path: Path) -> None:
    folder, tuned = run("run"), tmp_path / "tuned"
    for file in (folder / "checkpoints" / "step_00000020").iterdir():
        file.unlink()
    vitctl = [sys.executable, "-m", "vitctl"]
    again = [*vitctl, "resume", str(folder), "--processes", "2", "--nodes=1", "--restarts=1"]
    done = subprocess.run(again, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    assert "resuming from step 18 of 20" in done.stdout
    assert_golden(folder)
    assert " --max_restarts 1 " in (folder / "launch.txt").read_text()
    own = [
        "--from",
        str(folder),
        "--data",
        str(tiny_data),
        "--out",
        str(tuned),
        "--lr",
        "0.01",
        "--steps",
        "4",
        "-n",
        "2",
    ]
    small = ["--set", "schedule.batch_size=8", "--set", "schedule.warmup_steps=1", "--res", "16"]
    line = [*vitctl, "finetune", *own, *small, "--restarts", "1"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads((tuned / "result.json").read_text())
    assert (result["status"], result["metrics"]["total"]) == ("done", 23)


@pytest.mark.slow
def test_torchrun__typed_by_a_person_starts_a_killed_process_again(
    run: Run, tiny_data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    own = command(folder, tiny_data, **EXACT, **FOREGROUND)[2:]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    line = [*launcher, "--max-restarts", "2", "-m", *own]
    one = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(logged(folder, 5), [one])
    kill_rank(1, [one])
    [(code, out, said)] = ended([one])
    assert code == 0, said
    assert "resuming from step" in out
    assert checkpoint(folder, 20) == checkpoint(run("straight", **EXACT), 20)


@pytest.mark.slow
def test_line__pasted_on_two_machines_with_a_killed_process(run: Run, load: Load, tmp_path: Path) -> None:
    """RUN/launch.txt, typed into two shells."""
    folder, config = tmp_path / "run", LaunchConfig(2, "127.0.0.1", free_port(), restarts=1)
    prepare_run(
        load(**EXACT, **{"machine.processes": 2, "checkpoint.background": False}), folder, config=config
    )
    line = (folder / "launch.txt").read_text()
    pair = [
        subprocess.Popen(line, shell=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in "12"
    ]
    wait_for(logged(folder, 5), pair)
    kill_rank(1, pair)
    said = ended(pair)
    assert [code for code, _, _ in said] == [0, 0], said
    assert "all processes were restarted (restart 1)" in (folder / "log.jsonl").read_text()
    straight = run("straight", **EXACT)
    assert checkpoint(folder, 20) == checkpoint(straight, 20)
    assert sample_keys(folder) == sample_keys(straight)
