"""A save holds what was there when it began, and what goes wrong with it is known."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.conftest import LOSS, batch
from vitctl.engine import checkpoint as saving
from vitctl.engine.checkpoint import Saver, check_space, parts, read_checkpoint
from vitctl.engine.journal import Journal
from vitctl.engine.optimizer import Average
from vitctl.engine.update import TrainStep
from vitctl.errors import CheckpointError
from vitctl.models.variants import variant

CONFIG = variant("Ti/4", depth=1, hidden_size=6, image_size=8, num_classes=2)
Make = Callable[..., TrainStep]


def saver(root: Path, report: Callable[[dict[str, Any]], None] = lambda _: None) -> Saver:
    return Saver(root / "checkpoints", CONFIG, {}, 2, 0, Journal(root / "log.jsonl", report))


def test_start__what_changes_later_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, write = threading.Event(), saving.save_checkpoint

    def late(*given: Any, **named: Any) -> Path:
        assert go.wait(20)
        return write(*given, **named)

    monkeypatch.setattr(saving, "save_checkpoint", late)
    weight, one = torch.zeros(3), saver(tmp_path)
    for step in (1, 2):
        go.clear()
        weight.fill_(step)
        one.start(
            step,
            [("model", "w", weight), ("optimizer", "step/w", torch.tensor(float(step)))],
            {"a": step},
            {},
        )
        one.wait_for_copy()
        weight.fill_(99)  # the training goes on
        assert not (tmp_path / "checkpoints" / f"step_{step:08d}").exists()
        go.set()
        assert one.finish() == ""
        saved = read_checkpoint(tmp_path / "checkpoints" / f"step_{step:08d}")
        assert saved.tensors("model")["w"].tolist() == [step] * 3
        assert saved.tensors("optimizer")["step/w"] == step
        assert saved.state["a"] == step


def test_start__live_tensors_are_copied_until_they_may_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, copy = threading.Event(), Saver._copy
    said: list[dict[str, Any]] = []

    def late(*given: Any) -> Any:
        assert go.wait(20)
        return copy(*given)

    monkeypatch.setattr(Saver, "_copy", late)
    weight, one = torch.zeros(3), saver(tmp_path, said.append)
    one.wait_for_copy()  # nothing is copied yet
    for step in (1, 2):
        go.clear()
        weight.fill_(step)
        one.start(step, [("model", "w", weight)], {}, {})
        threading.Timer(0.2, go.set).start()
        one.wait_for_copy()
        weight.fill_(99)
        assert one.finish() == ""
        saved = read_checkpoint(tmp_path / "checkpoints" / f"step_{step:08d}")
        assert saved.tensors("model")["w"].tolist() == [step] * 3
        assert 0.1 < said[-1]["stall_seconds"] < 10


def test_start__a_copy_that_fails_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: Any) -> Any:
        raise MemoryError("no room for a copy")

    one = saver(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Saver, "_copy", wrong)
        one.start(3, [("model", "w", torch.zeros(3))], {}, {})
        one.wait_for_copy()
        assert "MemoryError: no room for a copy" in one.finish()
    one.start(4, [("model", "w", torch.zeros(3))], {}, {})
    assert one.finish() == ""


def test_finish__says_what_went_wrong_once_and_the_next_save_is_good(tmp_path: Path) -> None:
    one = saver(tmp_path)
    (tmp_path / "checkpoints").write_text("in the way")
    one.start(3, [("model", "w", torch.zeros(3))], {}, {})
    assert one.finish() == f"step 3 could not be saved in {tmp_path / 'checkpoints'} (Not a directory)"
    assert one.finish() == ""
    (tmp_path / "checkpoints").unlink()
    one.start(4, [("model", "w", torch.zeros(3))], {}, {})
    assert one.finish() == ""
    assert read_checkpoint(tmp_path / "checkpoints" / "step_00000004").step == 4


def test_check_space__counts_what_will_be_written(
    trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    t = trainer(LOSS, name="adam")
    average = Average(t.network, 0.5)
    t.update(0, [batch(8)])
    tensors = list(parts(t.network, average, t.optimizer))
    assert {part for part, _, _ in tensors} == {"model", "ema", "optimizer"}
    size = sum(
        tensor.numel() * tensor.element_size() for _, name, tensor in tensors if not name.startswith("step/")
    )
    for free, enough in ((3 * size, True), (3 * size - 1, False)):
        usage = saving.shutil._ntuple_diskusage(10**9, 0, free)  # type: ignore[attr-defined]
        monkeypatch.setattr(saving.shutil, "disk_usage", lambda _, usage=usage: usage)
        if enough:
            check_space(tmp_path / "new" / "checkpoints", t.network, average, slots=2, kept=2)
        else:
            with pytest.raises(
                CheckpointError, match=r"2 kept and one being written, .* free some space, choose another"
            ):
                check_space(tmp_path / "new" / "checkpoints", t.network, average, slots=2, kept=2)
    assert not (tmp_path / "new").exists()


def test_check_space__what_is_there_already_counts(
    trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    t = trainer(LOSS)
    usage = saving.shutil._ntuple_diskusage(10**9, 0, 0)  # type: ignore[attr-defined]
    monkeypatch.setattr(saving.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError):
        check_space(tmp_path, t.network, None, slots=2, kept=1)
    (tmp_path / "step_00000001").write_bytes(bytes(10**6))
    check_space(tmp_path, t.network, None, slots=2, kept=1)


def test_check_space__what_was_set_aside_is_never_deleted(
    trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    t = trainer(LOSS)
    usage = saving.shutil._ntuple_diskusage(10**9, 0, 0)  # type: ignore[attr-defined]
    monkeypatch.setattr(saving.shutil, "disk_usage", lambda _: usage)
    (tmp_path / "torn_step_00000001").mkdir()
    (tmp_path / "torn_step_00000001" / "model.safetensors").write_bytes(bytes(10**6))
    with pytest.raises(CheckpointError):
        check_space(tmp_path, t.network, None, slots=2, kept=1)


def test_start__the_thread_of_a_later_process_opens_its_own_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread begins with GPU 0, and pinned memory made there would open it, for some 500 MiB each."""
    chosen: list[tuple[torch.device, bool]] = []
    main = threading.get_ident()
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.append((device, threading.get_ident() == main))
    )

    class OnGpu:
        device = torch.device("cuda", 3)

    one = saver(tmp_path)
    one.start(1, [("model", "a", torch.zeros(2)), ("model", "w", OnGpu())], {}, {})  # type: ignore[list-item]
    one.wait_for_copy()
    assert "OnGpu" in one.finish()
    assert chosen == [(torch.device("cuda", 3), False)]
