"""Checkpoints that sharded processes write in parts, read by any number of processes."""

import errno
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint import load as load_distributed

from tests.conftest import Run, run_as, run_as_two, stored
from vitctl.engine.checkpoint import read_checkpoint, save_checkpoint
from vitctl.engine.sharding import word_sum
from vitctl.engine.store import Peers
from vitctl.errors import CheckpointError, LaunchError
from vitctl.jobs.record.result import choose_weights
from vitctl.models.variants import variant
from vitctl.models.weights.weights_file import read_weights

VALUES = {"schedule.total_steps": 6, "checkpoint.every_steps": 3, "evaluation.every_steps": 0}
SHARDED = {**VALUES, "machine.sharding": "fsdp"}
CONFIG = variant("Ti/4", depth=1, hidden_size=6, image_size=8, num_classes=2)
WHOLE = {
    "model": {"w": torch.arange(15.0).view(5, 3), "b": torch.arange(2.0)},
    "optimizer": {"step/w": torch.tensor(3.0), "exp_avg/w": torch.arange(15.0).view(5, 3)},
}


def step(folder: Path, number: int) -> Path:
    return folder / "checkpoints" / f"step_{number:08d}"


@pytest.fixture(scope="module")
def sharded(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two sharded processes, saved after steps 3 and 6."""
    folder = tmp_path_factory.mktemp("parts") / "run"
    run_as_two(folder, tiny_data, **SHARDED)
    return folder


@pytest.fixture
def copied(sharded: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sharded, tmp_path / "run")


def saved_by(count: int, root: Path) -> list[BaseException | None]:
    """Save WHOLE as so many processes do, each in a thread; return what each raised."""
    texts, barrier = [""] * count, threading.Barrier(count)
    raised: list[BaseException | None] = [None] * count

    def peer(part: int) -> None:
        def exchange(text: str) -> list[str]:
            barrier.wait(20)
            texts[part] = text
            barrier.wait(20)
            return list(texts)

        tensors: dict[str, dict[str, Tensor]] = {}
        rows: dict[str, dict[str, int]] = {}
        for name, some in WHOLE.items():
            for key, whole in some.items():
                length = -(-len(whole) // count) if whole.dim() else 0
                own = whole[part * length : (part + 1) * length] if whole.dim() else whole
                tensors.setdefault(name, {})
                if own.numel() and (whole.dim() or not part):
                    tensors[name][key] = own
                    rows.setdefault(name, {})[key] = part * length
        try:
            save_checkpoint(
                root, 1, tensors=tensors, config=CONFIG, meta={}, state={}, rows=rows,
                peers=Peers(part, count, exchange),
            )  # fmt: skip
        except Exception as error:
            raised[part] = error

    threads = [threading.Thread(target=peer, args=(part,)) for part in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return raised


@pytest.mark.parametrize("count", [1, 2, 4])
def test_save__parts_join_to_what_was_saved(count: int, tmp_path: Path) -> None:
    """With four, one process holds nothing of a tensor of two numbers, and one nothing at all of it."""
    assert saved_by(count, tmp_path) == [None] * count
    saved = read_checkpoint(tmp_path / "step_00000001")
    assert saved.is_in_parts
    for name, tensors in WHOLE.items():
        read = saved.tensors(name)
        assert read.keys() == tensors.keys()
        assert all(torch.equal(read[key], tensor) for key, tensor in tensors.items())
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def test_save__one_that_cannot_write_ends_it_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitctl.engine import checkpoint

    save = checkpoint.save_tensors

    def full(tensors: Any, path: Path, *rest: Any) -> None:
        if "00002-of" in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(tensors, path, *rest)

    monkeypatch.setattr(checkpoint, "save_tensors", full)
    raised = saved_by(2, tmp_path)
    assert [getattr(error, "errno", None) for error in raised] == [errno.ENOSPC] * 2
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    assert saved_by(2, tmp_path) == [None] * 2
    complete = {path.name: path.read_bytes() for path in (tmp_path / "step_00000001").iterdir()}
    assert "never replaced" in str(saved_by(2, tmp_path)[1])
    assert {path.name: path.read_bytes() for path in (tmp_path / "step_00000001").iterdir()} == complete


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_word_sum__of_parts_adds_up_and_sees_one_bit(parts: int) -> None:
    whole = torch.randn(5, 3)
    cut = [("w", rows, 5 // parts * i) for i, rows in enumerate(whole.split(5 // parts))]
    assert sum(word_sum([one]) for one in cut) % 2**64 == word_sum([("w", whole, 0)])
    other = whole.clone()
    other.view(torch.int32)[4, 2] ^= 1
    assert word_sum([("w", other, 0)]) != word_sum([("w", whole, 0)])
    assert word_sum([("v", whole, 0)]) != word_sum([("w", whole, 0)])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoint__is_one_of_torch_distributed_without_a_pickle(sharded: Path, tmp_path: Path) -> None:
    folder = step(sharded, 6)
    names = {path.name for path in folder.iterdir()}
    kinds = ("model", "ema", "optimizer")
    assert names == {f"{kind}-0000{part}-of-00002.safetensors" for kind in kinds for part in (1, 2)} | {
        "state.json"
    }
    for name, tensors in stored(sharded, 6).items():
        (tmp_path / name).mkdir()
        for path in folder.glob(f"{name}-*"):
            shutil.copy(path, tmp_path / name)
        theirs = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
        load_distributed(theirs, storage_reader=HuggingFaceStorageReader(str(tmp_path / name)), no_dist=True)
        assert all(torch.equal(theirs[key], tensor) for key, tensor in tensors.items())


def test_weights__of_parts_are_those_of_the_checkpoint(sharded: Path) -> None:
    path, chosen = choose_weights(sharded)
    assert chosen.averaged and path.name == "ema-00001-of-00002.safetensors"
    weights = read_weights(path)
    ema = stored(sharded, 6)["ema"]
    assert weights.state.keys() == ema.keys()
    assert all(torch.equal(weights.state[key], tensor) for key, tensor in ema.items())
    assert weights.meta["image_size"] == 16
    result = json.loads((sharded / "result.json").read_text())
    assert result["provenance"]["weights_sha256"] == weights.digest
    assert Path(result["files"]["ema"]) == path


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["damaged", "missing", "stale"])
def test_weights__a_wrong_part_is_named(how: str, copied: Path) -> None:
    part = step(copied, 6) / "ema-00002-of-00002.safetensors"
    if how == "damaged":
        damage(part)
    elif how == "missing":
        part.unlink()
    else:
        shutil.copy(step(copied, 3) / part.name, part)
    for place in (step(copied, 6), copied):
        with pytest.raises(CheckpointError, match=part.name) as caught:
            choose_weights(place)
        assert "\n" not in str(caught.value)
    assert choose_weights(step(copied, 6), "model")[0].name == "model-00001-of-00002.safetensors"


def test_weights__parts_of_two_kinds_do_not_join(copied: Path) -> None:
    """Without state.json nothing tells the digests; places still do."""
    folder = step(copied, 6)
    (folder / "state.json").unlink()
    shutil.copy(folder / "ema-00001-of-00002.safetensors", folder / "ema-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"ema-00002-of-00002.*does not follow the part before"):
        read_weights(folder / "ema-00001-of-00002.safetensors")
    (folder / "ema-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"ema-00002-of-00002\.safetensors: missing"):
        read_weights(folder / "ema-00001-of-00002.safetensors")


def test_resume__goes_back_to_whole_parts_and_ends_at_the_same_bytes(
    sharded: Path, copied: Path, tiny_data: Path
) -> None:
    """The second process verifies the damaged part; what a kill left half written is removed."""
    damage(step(copied, 6) / "optimizer-00002-of-00002.safetensors")
    (copied / "result.json").unlink()
    half = copied / "checkpoints" / ".step_00000006.new"
    half.mkdir()
    (half / "model-00001-of-00004.safetensors").write_bytes(b"x")
    run_as_two(copied, tiny_data, **SHARDED)
    log = [json.loads(line) for line in (copied / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in log if record["kind"] == "resume"] == [3]
    assert any("optimizer-00002-of-00002.safetensors" in r.get("text", "") for r in log)
    assert not half.exists()
    for path in step(sharded, 6).glob("*.safetensors"):
        assert path.read_bytes() == (step(copied, 6) / path.name).read_bytes(), path.name


@pytest.mark.slow
def test_resume__saved_on_four_goes_on_with_any_number(tiny_data: Path, tmp_path: Path) -> None:
    """Nothing but the order in which gradients are added differs, in float64."""
    values = {**SHARDED, "optimizer.clip_norm": 0.0, "machine.micro_batch": 2}
    four = tmp_path / "four"
    run_as(4, four, tiny_data, **values)
    for count, more in (
        (1, {"machine.sharding": "none"}),
        (2, {}),
        (4, {"machine.sharding_replicas": 2}),
        (8, {}),
    ):
        folder = shutil.copytree(four, tmp_path / f"{count}")
        shutil.rmtree(step(folder, 6))
        (folder / "result.json").unlink()
        run_as(count, folder, tiny_data, **{**values, **more})
        log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        assert [record["step"] for record in log if record["kind"] == "resume"] == [3]
        torch.testing.assert_close(stored(folder, 6), stored(four, 6), rtol=1e-9, atol=1e-12)


def test_one_process_has_nothing_to_divide(run: Run) -> None:
    with pytest.raises(LaunchError, match=r"divides a model over several processes"):
        run("alone", **{"machine.sharding": "fsdp"})
