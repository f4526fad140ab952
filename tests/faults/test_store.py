"""A run that is also kept in a store: other machines resume from it, whatever is lost here and whenever."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.conftest import checkpoint
from tests.data.server import s3_server
from tests.faults.conftest import ENVIRONMENT, assert_same, command, prepared, warnings
from tests.faults.test_kills import soon
from tests.matrix import slow
from vitctl.cli.run_job import run_place
from vitctl.engine.journal import read_allowed
from vitctl.engine.store import Store
from vitctl.errors import LaunchError, VitctlError
from vitctl.launch.worker import work
from vitctl.system import remote
from vitctl.system.files import write_json

EVERY_2 = {"checkpoint.every_steps": 2, "checkpoint.keep_last": 2}
# A process that dies in the middle of its n-th copy to the store.
DYING = """
import os, signal, sys
from vitctl.system import remote
put, left = remote.put, [int(sys.argv[1])]
def dying(file, url):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    put(file, url)
remote.put = dying
sys.argv = ["vitctl", *sys.argv[2:]]
from vitctl.__main__ import main
sys.exit(main())
"""


# A process whose store is away for longer than anyone waits.
WAITING = """
import sys
from vitctl.system import remote
def away():
    raise remote.TransientError("no answer")
remote.put = lambda file, url: remote.retried(url, away)
sys.argv = ["vitctl", *sys.argv[1:], "--set", "data.patience=600"]
from vitctl.__main__ import main
from vitctl.engine import store
send = store.Store.send
store.Store.send = lambda self, path, *name: path.name == "recipe.toml" or send(self, path, *name)
sys.exit(main())
"""


def kept(store: Path | str) -> dict[str, Any]:
    return {**EVERY_2, "checkpoint.store": str(store)}


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize("copies", [1, 5, 12, *slow(2, 3, 4, 6, 7, 8, 9, 10, 11, 13, 14, 15, 16, 17, 18)])
def test_killed__in_any_copy_and_resumed_on_another_machine(
    tiny_data: Path, straight: Path, tmp_path: Path, copies: int
) -> None:
    store, line = tmp_path / "store", command(tmp_path / "run", tiny_data, **kept(tmp_path / "store"))
    died = warm.run(
        [sys.executable, "-c", DYING, str(copies), *line[3:]], env=ENVIRONMENT, capture_output=True
    )
    assert died.returncode == -signal.SIGKILL
    (tmp_path / "run").rename(tmp_path / "lost")
    done = warm.run(line, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert_same(tmp_path / "run", straight)
    # The store has the run's files, and no other checkpoint.
    here = {name: content for name, content in files(tmp_path / "run").items() if name != ".lock"}
    here = {name: content for name, content in here.items() if not name.endswith("/fetched")}
    assert files(store) == here


def test_outage__training_goes_on_and_the_end_sends_what_is_missing(
    tiny_data: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, store, put = (
        prepared(tmp_path / "run", tiny_data, **kept(tmp_path / "store")),
        tmp_path / "store",
        remote.put,
    )
    tried = []

    def failing(file: Path, url: str) -> None:
        tried.append(url)
        if len(tried) < 4:
            raise remote.GaveUpError(url, "no answer")
        put(file, url)

    monkeypatch.setattr(remote, "put", failing)
    work(folder)
    assert_same(folder, straight)
    assert warnings(folder)[0].startswith(f"step 2 is not in {store} yet (")
    assert checkpoint(store, 12) == checkpoint(straight, 12)


def test_outage__at_the_end_is_an_error_that_may_pass_and_a_resume_sends(
    tiny_data: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, store = prepared(tmp_path / "run", tiny_data, **kept(tmp_path / "store")), tmp_path / "store"

    def failing(_file: Path, url: str) -> None:
        raise remote.GaveUpError(url, "no answer")

    put = remote.put
    monkeypatch.setattr(remote, "put", failing)
    with pytest.raises(LaunchError, match="the run is complete in") as caught:
        work(folder)
    monkeypatch.setattr(remote, "put", put)
    assert caught.value.passes
    assert_same(folder, straight)
    work(folder)
    assert checkpoint(store, 12) == checkpoint(straight, 12)


def test_newer__of_two_folders_is_taken(tiny_data: Path, tmp_path: Path) -> None:
    """A new machine fetches all; one whose last checkpoint was not sent keeps its own."""
    store, old = tmp_path / "store", prepared(tmp_path / "old", tiny_data, **kept(tmp_path / "store"))
    work(old)
    away = tmp_path / "away"
    Store(str(store), away).fetch()
    for step in ("step_00000010", "step_00000012"):
        for path in (away / "checkpoints" / step).iterdir():
            assert (
                path.name == "fetched"
                or path.read_bytes() == (old / "checkpoints" / step / path.name).read_bytes()
            )
    remote.remove(f"{store}/checkpoints/step_00000012/state.json")
    before = files(old)
    Store(str(store), old).fetch()  # has a newer one
    assert files(old) == before


@pytest.mark.parametrize("how", ["a byte", *slow("longer", "shorter")])
def test_damaged__in_the_store_is_seen_and_the_one_before_taken(
    tiny_data: Path, straight: Path, tmp_path: Path, how: str
) -> None:
    store, folder = tmp_path / "store", prepared(tmp_path / "a", tiny_data, **kept(tmp_path / "store"))
    work(folder)
    path = store / "checkpoints/step_00000012/model.safetensors"
    content = path.read_bytes()
    last = bytes([content[-1] ^ 1])
    path.write_bytes({"a byte": content[:-1] + last, "longer": content + b"x", "shorter": content[:-1]}[how])
    line = command(tmp_path / "b", tiny_data, **kept(store))
    done = warm.run(line, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "model.safetensors is missing or changed" in "".join(warnings(tmp_path / "b"))
    assert_same(tmp_path / "b", straight)
    assert checkpoint(store, 12) == checkpoint(straight, 12)


def test_refused__stores_that_cannot_hold_the_run(tiny_data: Path, tmp_path: Path) -> None:
    with pytest.raises(VitctlError, match="s3://BUCKET/FOLDER"):
        prepared(tmp_path / "a", tiny_data, **{"checkpoint.store": "https://host/x"})
    with pytest.raises(LaunchError, match="one of the two is inside the other"):
        prepared(tmp_path / "a", tiny_data, **{"checkpoint.store": str(tmp_path / "a" / "copy")})
    with pytest.raises(VitctlError, match="No such file or directory; make room there, or name another"):
        prepared(tmp_path / "a", tiny_data, **{"checkpoint.store": "/proc/nowhere/x"})
    assert not (tmp_path / "a").exists()
    prepared(tmp_path / "a", tiny_data, **{"checkpoint.store": str(tmp_path / "of_a")})
    prepared(tmp_path / "b", tiny_data)
    with pytest.raises(LaunchError, match="holds a run that is not the one in"):
        Store(str(tmp_path / "of_a"), tmp_path / "b").fetch()


def test_signal__ends_the_wait_for_a_store(tiny_data: Path, tmp_path: Path) -> None:
    """The last checkpoint is safe here; a scheduler kills what still waits."""
    folder, line = tmp_path / "run", command(tmp_path / "run", tiny_data, **kept(tmp_path / "store"))
    with warm.Popen(
        [sys.executable, "-c", WAITING, *line[3:]], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    ) as run:
        assert soon(lambda: (folder / "checkpoints/step_00000012").is_dir())
        run.send_signal(signal.SIGTERM)
        _, text = run.communicate(timeout=60)
    assert run.returncode == 3, text
    assert warm.run(line, env=ENVIRONMENT, capture_output=True).returncode == 0
    assert checkpoint(tmp_path / "store", 12) == checkpoint(folder, 12)


def test_two_continuations__of_a_run_are_not_made_one(tiny_data: Path, tmp_path: Path) -> None:
    store, values = tmp_path / "store", kept(tmp_path / "store")
    one = prepared(tmp_path / "one", tiny_data, **{**values, "schedule.total_steps": 6})
    work(one)
    shutil.copytree(store, tmp_path / "then")
    shutil.copytree(one, tmp_path / "two")
    longer = [*command(one, tiny_data, **values), "--allow", "schedule.total_steps"]
    assert warm.run(longer, env=ENVIRONMENT, capture_output=True).returncode == 0
    two = [*command(tmp_path / "two", tiny_data, **values), "--allow", "schedule.total_steps"]
    two = [word.replace(str(store), str(tmp_path / "then")) for word in two]
    toml = tmp_path / "two" / "recipe.toml"
    toml.write_text(toml.read_text().replace(str(store), str(tmp_path / "then")))
    assert warm.run(two, env=ENVIRONMENT, capture_output=True).returncode == 0
    toml.write_text(toml.read_text().replace(str(tmp_path / "then"), str(store)))
    before = files(store)
    there, here = (
        json.loads((root / "checkpoints/step_00000012/state.json").read_text())
        for root in (store, tmp_path / "two")
    )
    assert there["log_head"] != here["log_head"]
    (tmp_path / "two/checkpoints/step_00000012").rename(later := tmp_path / "two/checkpoints/step_00000014")
    with pytest.raises(LaunchError, match="another machine went on with this run, and so did"):
        Store(str(store), tmp_path / "two").fetch()
    assert files(store) == before
    later.rename(tmp_path / "two/checkpoints/step_00000012")  # the same step: the store's is taken
    Store(str(store), tmp_path / "two").fetch()
    assert (tmp_path / "two/log.jsonl").read_bytes() == (store / "log.jsonl").read_bytes()
    assert json.loads((tmp_path / "two/checkpoints/step_00000012/state.json").read_text()) == there
    assert files(store) == before


def test_older_folder__takes_the_newer_run(tiny_data: Path, tmp_path: Path) -> None:
    """Its own steps go, as they are older; those of other records are set aside."""
    store = tmp_path / "store"
    old = prepared(tmp_path / "old", tiny_data, **kept(store))
    work(old)
    ten = old / "checkpoints" / "step_00000010"
    (old / "checkpoints" / "step_00000012").rename(tmp_path / "gone")
    shutil.copytree(ten, tmp_path / "step")
    ten.rename(old / "checkpoints" / "step_00000007")
    other = Path(shutil.copytree(tmp_path / "step", old / "checkpoints" / "step_00000008"))
    text = (other / "state.json").read_text()
    (other / "state.json").write_text(re.sub(r'("log_head": "[0-9]+:)[0-9a-f]', r"\1x", text))
    Store(str(store), old).fetch()
    names = {path.name for path in (old / "checkpoints").iterdir()}
    assert names == {"step_00000010", "step_00000012", "torn_step_00000008"}


def test_change_on_purpose__is_in_the_result_of_another_machine(tiny_data: Path, tmp_path: Path) -> None:
    """And what was allowed to the first machine is no licence for the second."""
    values = kept(tmp_path / "store")
    work(prepared(tmp_path / "a", tiny_data, **values, **{"schedule.total_steps": 6}))
    write_json(tmp_path / "a" / "allowed.json", {"now": ["data"], "before": ["0"], "said": ["once"]})
    Store(str(tmp_path / "store"), tmp_path / "a").send_records()
    result = work(prepared(tmp_path / "b", tiny_data, **values, **{"schedule.total_steps": 6}))
    assert result["provenance"]["changed_on_purpose"] == ["once"]
    assert read_allowed(tmp_path / "b") == {"now": [], "before": ["0"], "said": ["once"]}


def test_refused__command_leaves_no_foreign_run(tiny_data: Path, tmp_path: Path) -> None:
    values = kept(tmp_path / "store")
    work(prepared(tmp_path / "a", tiny_data, **values))
    with pytest.raises(VitctlError, match="seed was 0, now 7"):
        prepared(tmp_path / "b", tiny_data, **values, seed=7)
    assert not (tmp_path / "b").exists()


def test_names__of_a_store_cannot_leave_the_folder(tmp_path: Path) -> None:
    store = tmp_path / "store"
    for name in ("recipe.toml", ".hidden", "logs/x", "data/x", "a/.b", "checkpoints/step_1/x.pt"):
        (store / name).parent.mkdir(parents=True, exist_ok=True)
        (store / name).write_text("")
    Store(str(store), tmp_path / "run").fetch()
    assert set(files(tmp_path / "run")) == {"recipe.toml"}


def test_place__of_an_address_is_the_folder_of_its_name() -> None:
    folder, [override] = run_place("--out", "s3://bucket/team/a/")
    assert (folder, override) == (Path("runs/a"), ("checkpoint.store", "s3://bucket/team/a", "--out"))
    assert run_place("--out", "runs/b") == (Path("runs/b"), [])


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with s3_server(monkeypatch, "kept"):
        yield "s3://kept/run"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # those of boto
def test_s3__ten_kills_each_on_a_new_machine(
    bucket: str, tiny_data: Path, straight: Path, tmp_path: Path
) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    for machine in range(11):
        folder = tmp_path / f"machine{machine}"
        line = command(folder, tiny_data, **kept(bucket))
        words = ["-c", DYING, str(1 + 2 * (machine % 5)), *line[3:]] if machine < 10 else line[1:]
        done = warm.run([sys.executable, *words], env=env, capture_output=True, text=True)
        assert done.returncode == (-signal.SIGKILL if machine < 10 else 0), done.stderr
        assert "S3CR3T" not in done.stderr + done.stdout
    assert_same(folder, straight)
    Store(bucket, tmp_path / "last").fetch()
    assert checkpoint(tmp_path / "last", 12) == checkpoint(straight, 12)


def machines(folder: Path, data: Path, store: Path, sharding: str) -> list[subprocess.Popen[str]]:
    """Two processes of one run, each on a machine of its own: no folder but the store is shared."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    place |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    values = {**kept(store), "machine.sharding": sharding, "machine.precision": "float32"}
    return [
        warm.Popen(
            command(folder / f"machine{rank}", data, **values),
            env={**ENVIRONMENT, **place, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_two_machines__without_a_shared_disk(tiny_data: Path, tmp_path: Path, sharding: str) -> None:
    """Killed after step 4 and resumed on two new ones: equal to the run that was not."""
    straight, store = tmp_path / "straight", tmp_path / "store"
    for one in machines(straight, tiny_data, tmp_path / "other", sharding):
        assert one.communicate(timeout=300)[0] is not None and one.returncode == 0
    first = machines(tmp_path / "first", tiny_data, store, sharding)
    assert soon(lambda: (store / "checkpoints/step_00000004/state.json").is_file(), 120)
    for one in first:
        one.kill()
        one.communicate()
    for one in machines(tmp_path / "second", tiny_data, store, sharding):
        text = one.communicate(timeout=300)[0]
        assert one.returncode == 0, text
    assert checkpoint(store, 12) == checkpoint(straight / "machine0", 12)
    assert '"resume"' in (store / "log.jsonl").read_text()
