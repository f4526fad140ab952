"""A checkpoint is whole or it is not there."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vitctl.engine import checkpoint as files
from vitctl.engine.checkpoint import keep, newest_checkpoint, read_checkpoint, save_checkpoint
from vitctl.engine.journal import OPTIMIZER, STATE
from vitctl.errors import CheckpointError
from vitctl.models.variants import variant
from vitctl.models.weights.network import read_network

CONFIG = variant("Ti/4", depth=1, hidden_size=6, image_size=8, num_classes=2)


def save(root: Path, step: int, **state: Any) -> Path:
    tensors = {"w": torch.full((3,), float(step))}
    return save_checkpoint(
        root,
        step,
        tensors={"model": tensors, "ema": {"w": torch.zeros(3)}, OPTIMIZER: {"exp_avg/w": torch.ones(3)}},
        config=CONFIG,
        meta={"mean": [0.5]},
        state={"samples": 8 * step, **state},
    )


def test_save__reads_back_everything(tmp_path: Path) -> None:
    path = save(tmp_path, 12, num_bad=1)
    assert path == tmp_path / "step_00000012"
    assert sorted(p.name for p in path.iterdir()) == [
        "ema.safetensors",
        "model.safetensors",
        "optimizer.safetensors",
        STATE,
    ]
    saved = read_checkpoint(path)
    assert (saved.step, saved.state["samples"], saved.state["num_bad"]) == (12, 96, 1)
    assert torch.equal(saved.tensors("model")["w"], torch.full((3,), 12.0))
    assert torch.equal(saved.tensors(OPTIMIZER)["exp_avg/w"], torch.ones(3))
    assert saved.tensors("none") == {}
    assert read_network(path / "model.safetensors")[0] == CONFIG
    assert list(tmp_path.iterdir()) == [path]


def test_save__the_rights_are_those_of_the_umask(tmp_path: Path) -> None:
    """safetensors writes for the user alone; a colleague of the group then cannot evaluate the run."""
    before = os.umask(0o027)
    try:
        folder = save(tmp_path, 1)
    finally:
        os.umask(before)
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in folder.iterdir()} == dict.fromkeys(
        sorted(path.name for path in folder.iterdir()), "0o640"
    )


def test_save__a_whole_checkpoint_is_never_replaced_a_torn_one_is(tmp_path: Path) -> None:
    save(tmp_path, 3, mark="old")
    with pytest.raises(CheckpointError, match="step_00000003: already exists and is complete"):
        save(tmp_path, 3, mark="new")
    assert read_checkpoint(tmp_path / "step_00000003").state["mark"] == "old"
    (tmp_path / "step_00000003" / "optimizer.safetensors").write_bytes(b"torn")
    save(tmp_path, 3, mark="new")
    assert read_checkpoint(tmp_path / "step_00000003").state["mark"] == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000003"]


def test_save__a_crash_while_writing_leaves_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "write_run_json", crash)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2)
    saved, problems = newest_checkpoint(tmp_path)
    assert saved is not None
    assert (saved.step, problems) == (1, [])
    keep(tmp_path, last=1, best=0, scores={})
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("name", ["model.safetensors", "ema.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("harm", [truncate, flip_a_bit, os.unlink])
def test_newest__a_harmed_one_is_passed_over_and_said(
    tmp_path: Path, name: str, harm: Callable[[Path], None]
) -> None:
    save(tmp_path, 5)
    newest = save(tmp_path, 10)
    harm(newest / name)
    saved, problems = newest_checkpoint(tmp_path)
    assert saved is not None
    assert saved.step == 5
    assert problems == [f"{newest}: damaged checkpoint: {name} is missing or changed since it was written"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "vitctl-checkpoint/1"}'])
def test_read__a_torn_state(tmp_path: Path, text: str) -> None:
    path = save(tmp_path, 1)
    (path / STATE).write_text(text)
    with pytest.raises(CheckpointError, match=r"damaged checkpoint: state\.json is missing or truncated"):
        read_checkpoint(path)


def test_read__of_another_format(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    state = json.loads((path / STATE).read_text())
    (path / STATE).write_text(json.dumps({**state, "format": "vitctl-checkpoint/9"}))
    with pytest.raises(
        CheckpointError, match="says 'vitctl-checkpoint/9', this vitctl reads 'vitctl-checkpoint/1'"
    ):
        read_checkpoint(path)


def steps(root: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in root.iterdir())


def test_keep__last_and_best(tmp_path: Path) -> None:
    for step in range(1, 8):
        save(tmp_path, step)
    keep(tmp_path, last=2, best=2, scores={1: 0.5, 2: 0.9, 3: 0.1, 4: 0.8, 99: 1.0})
    assert steps(tmp_path) == [2, 4, 6, 7]
    keep(tmp_path, last=1, best=1, scores={2: 0.9, 4: 0.9})
    assert steps(tmp_path) == [4, 7]
    keep(tmp_path, last=1, best=0, scores={4: 0.9})
    assert steps(tmp_path) == [7]


def test_keep__removes_what_crashes_left_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / ".step_00000002.123").mkdir()
    (tmp_path / ".step_00000001.old").mkdir()
    (tmp_path / "step_notes.txt").write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    keep(tmp_path, last=1, best=0, scores={})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["elsewhere", "step_00000001", "step_notes.txt"]


def test_read__a_state_of_other_numbers(tmp_path: Path) -> None:
    path = save(tmp_path, 12)
    text = (path / STATE).read_text()
    assert text.count('"samples": 96,') == 1
    (path / STATE).write_text(text.replace('"samples": 96,', '"samples": 97,'))
    with pytest.raises(
        CheckpointError, match=r"damaged checkpoint: state\.json changed since it was written"
    ):
        read_checkpoint(path)


@pytest.mark.parametrize("sha256", [None, "", "0" * 64, {}])
def test_read__a_state_without_its_digest_is_refused(tmp_path: Path, sha256: Any) -> None:
    """Anything could be written into it: another step, no files, no data that it was made of."""
    path = save(tmp_path, 12)
    state = json.loads((path / STATE).read_text())
    del state["sha256"]
    (path / STATE).write_text(json.dumps(state if sha256 == {} else state | {"sha256": sha256}))
    with pytest.raises(CheckpointError, match=r"state\.json changed since it was written"):
        read_checkpoint(path)


@pytest.mark.parametrize("refused", ["step_00000010/state.json", "step_00000010/model.safetensors", "."])
def test_newest__what_may_not_be_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """A run that took the older one would throw away the newer one's steps.

    Whoever runs the tests may read everything.
    """
    for step in (5, 10):
        save(tmp_path, step)
    for owner, name in ((Path, "open"), (Path, "iterdir"), (os, "open")):
        real = getattr(owner, name)

        def forbidden(path: Any, *given: Any, real: Any = real, **named: Any) -> Any:
            if path == tmp_path / refused:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return real(path, *given, **named)

        monkeypatch.setattr(owner, name, forbidden)
    with pytest.raises(CheckpointError, match=r"permission denied; fix its permissions") as caught:
        newest_checkpoint(tmp_path)
    assert str(caught.value).startswith(str(tmp_path / refused))


def test_newest__a_disk_that_cannot_read_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (5, 10):
        save(tmp_path, step)
    real = Path.open

    def broken(path: Path, *given: Any, **named: Any) -> Any:
        if path == tmp_path / "step_00000010" / "optimizer.safetensors":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path, *given, **named)

    monkeypatch.setattr(Path, "open", broken)
    saved, problems = newest_checkpoint(tmp_path)
    assert saved is not None and saved.step == 5
    assert len(problems) == 1
