"""Every kind of file, and every kind of bad file, with one clear line for each."""

import io
import pickle
import struct
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from itertools import permutations
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.models.weights.conftest import refused
from vitctl.errors import CheckpointError
from vitctl.models.weights.containers import kind_of, one_set, read_later, read_tensors
from vitctl.models.weights.later import now

STATE = {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(3)}


def save_npz(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, **{name: tensor.numpy() for name, tensor in STATE.items()})


WRITERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "safetensors": ("safetensors", lambda path: save_file(STATE, path)),
    "npz": ("npz", save_npz),
    "torch zip": ("torch", lambda path: torch.save(OrderedDict(STATE), path)),
    "torch legacy": ("torch", lambda path: torch.save(STATE, path, _use_new_zipfile_serialization=False)),
    "lightning": (
        "torch",
        lambda path: torch.save({"epoch": 3, "state_dict": STATE, "optimizer": {"lr": 0.1}}, path),
    ),
    "nested": ("torch", lambda path: torch.save({"model": {"state_dict": STATE}}, path)),
    "ddp": (
        "torch",
        lambda path: torch.save({f"module._orig_mod.{name}": t for name, t in STATE.items()}, path),
    ),
}


@pytest.mark.parametrize("name", WRITERS)
def test_read__the_kind_is_in_the_content(name: str, tmp_path: Path) -> None:
    kind, write = WRITERS[name]
    path = tmp_path / "weights"  # no suffix to go by
    write(path)
    assert kind_of(path) == kind
    found, _, _ = one_set(read_tensors(path))
    assert found.keys() == STATE.keys()
    for key, tensor in STATE.items():
        assert found[key].dtype == tensor.dtype
        assert torch.equal(found[key], tensor)


class RunsCode:
    """A pickle of this writes a file when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("legacy", [False, True])
def test_read__never_runs_what_a_pickle_holds(tmp_path: Path, legacy: bool) -> None:
    path, mark = tmp_path / "model.pth", tmp_path / "it-ran"
    torch.save({"model": STATE, "hook": RunsCode(mark)}, path, _use_new_zipfile_serialization=not legacy)
    refused(
        path,
        "truncated or holds more than tensors (getattr); never opened because it can run code",
        "convert it to safetensors with the library that wrote it (safetensors.torch.save_file",
    )
    path.write_bytes(pickle.dumps(RunsCode(mark)))
    refused(path, "it can run code")
    assert not mark.exists()
    pickle.loads(path.read_bytes())
    assert mark.exists()  # so the bait was a good one


def written(save: Callable[..., Any], *what: Any, **arrays: Any) -> bytes:
    file = io.BytesIO()
    save(*what, file, **arrays)
    return file.getvalue()


OBJECTS = written(np.savez, state=np.array([{"a": 1}], dtype=object))
TEXT = written(np.savez, names=np.array(["tench"]))
NPZ, PTH = written(np.savez, a=np.arange(5000.0)), written(torch.save, {"a": torch.arange(5000.0)})


def zip_of(*names: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            archive.writestr(name, b"x")
    return file.getvalue()


def boastful_npz() -> bytes:
    """An array whose header claims more than any machine has."""
    array, file = io.BytesIO(), io.BytesIO()
    np.lib.format.write_array_header_1_0(array, {"descr": "<f8", "fortran_order": False, "shape": (10**17,)})
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.npy", array.getvalue())
    return file.getvalue()


BAD: dict[str, tuple[bytes, str]] = {
    "page": (
        b"\n<!DOCTYPE html><html>Sign in</html>",
        "a web page, not weights; the download link was wrong",
    ),
    "lfs": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n",
        "a Git LFS pointer, not weights; fetch",
    ),
    "noise": (
        bytes(range(200, 250)),
        "not a safetensors file, and neither an .npz archive nor a torch state dict",
    ),
    "empty": (b"", "not a safetensors file, and neither an .npz archive nor a torch state dict"),
    "header": (
        struct.pack("<Q", 5000) + b'{"x":{',
        "damaged or truncated safetensors file",
    ),
    "json": (struct.pack("<Q", 8) + b'{"x":{{{' + bytes(9), "damaged or truncated safetensors file"),
    "half an npz": (NPZ[:20000], "damaged or truncated archive"),
    "flipped npz": (NPZ.replace(bytes(8), bytes(7) + b"\1", 1), "damaged or truncated .npz archive"),
    "half a pth": (PTH[:10000], "damaged or truncated archive"),
    "half a pickle": (
        pickle.dumps(list(range(1000)))[:500],
        "a pickle that is truncated or holds more than tensors; never opened because it can run code",
    ),
    "a boast": (boastful_npz(), "damaged or truncated .npz archive"),
    "objects": (
        OBJECTS,
        "holds Python objects, never opened because they can run code",
    ),
    "text": (TEXT, "names holds <U5, not numbers"),
    "pt2": (zip_of("m/archive_format", "m/data/weights/weight_0"), "a torch.export program"),
    "photos": (zip_of("cat.jpg", "dog.jpg"), "this archive contains no weights, only cat.jpg, dog.jpg"),
    "no files": (zip_of(), "not a safetensors file"),
}


@pytest.mark.parametrize("name", BAD)
def test_read__says_what_the_file_is_instead(tmp_path: Path, name: str) -> None:
    content, words = BAD[name]
    path = tmp_path / "weights.npz"
    path.write_bytes(content)
    refused(path, words)


def test_read__refuses_what_is_larger_than_any_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights.npz"
    path.write_bytes(NPZ)
    assert len(read_tensors(path)) == 1
    monkeypatch.setattr("vitctl.system.limits.WEIGHTS", 30_000)
    refused(path, "40,256 bytes, should be at most 30,000")
    np.savez_compressed(path, a=np.zeros(10000))
    refused(path, "declares 80,128 bytes, too many for its size; at most")
    monkeypatch.setattr("vitctl.system.limits.TENSORS", 1)
    save_file(STATE, path)
    refused(path, "2 tensors, should be at most 1")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (torch.arange(3), "holds a Tensor, not a state dict of tensors"),
        ({"weight": torch.ones(1), "epoch": 3, "lr": 0.1}, "these are not tensors: epoch, lr"),
        ({}, "holds no tensors"),
        ({"state_dict": {}}, "holds no tensors"),
        (
            {"fc.weight": torch.ones(1)},
            "supported: vitctl, BEiT, DINOv2, DINOv3, DeiT III, EVA-02, Google BiT, ",
        ),
    ],
)
def test_read__says_what_a_pickle_of_tensors_lacks(tmp_path: Path, content: Any, words: str) -> None:
    torch.save(content, tmp_path / "model.pth")
    refused(tmp_path / "model.pth", words)


_RAW, _AVERAGED = ({"a.b": torch.full((2,), value), "c": torch.ones(1) * value} for value in (1.0, 2.0))
_CHECKPOINTS: dict[str, tuple[dict[str, Any], str]] = {
    "timm": ({"epoch": 3, "state_dict": _RAW, "state_dict_ema": _AVERAGED}, "state_dict_ema"),
    "deit": ({"model": _RAW, "model_ema": _AVERAGED, "optimizer": {"lr": 1.0}}, "model_ema"),
    "lightning": ({"state_dict": _AVERAGED, "current_model_state": _RAW}, "state_dict"),
    "detr": ({"model": _RAW, "ema": {"module": _AVERAGED, "updates": 3}}, "ema"),
    "wrapped": (
        {"model": {f"module.{name}": one for name, one in _RAW.items()},
         "ema_model": {"n_averaged": torch.tensor(3)} | {f"module.{n}": one for n, one in _AVERAGED.items()}},
        "ema_model",
    ),
    "one module": (
        {"state_dict": {f"model.{name}": one for name, one in _RAW.items()}
         | {f"ema_model.module.{name}": one for name, one in _AVERAGED.items()}},
        "ema_model",
    ),
}  # fmt: skip


@pytest.mark.parametrize("read", [read_tensors, read_later])
@pytest.mark.parametrize("name", _CHECKPOINTS)
def test_one_set__averaged_unless_the_others_are_asked_for(name: str, read: Any, tmp_path: Path) -> None:
    content, key = _CHECKPOINTS[name]
    torch.save(content, tmp_path / "w.pth")
    tensors = read(tmp_path / "w.pth")
    for which, expected in (("", _AVERAGED), ("ema", _AVERAGED), ("model", _RAW)):
        found, said, is_averaged = one_set(tensors, which)
        assert found.keys() == expected.keys()
        assert all(torch.equal(now(found[one]), tensor) for one, tensor in expected.items())
        assert is_averaged == (expected is _AVERAGED)
        other = "model" if is_averaged else "ema"
        assert f"--weights {other} takes the others" in said
    assert f"the averaged weights ({key}) of the file are taken" in one_set(tensors)[1]


def test_one_set__of_one_there_is_nothing_to_say_or_choose(tmp_path: Path) -> None:
    torch.save({"model": _RAW, "ema": {"decay": 0.9, "shadow_params": []}}, tmp_path / "w.pth")
    tensors = read_tensors(tmp_path / "w.pth")
    assert (one_set(tensors)[0].keys(), *one_set(tensors)[1:]) == (_RAW.keys(), "", False)
    for which, content in (("ema", tensors), ("model", tensors), ("model", {"model_ema.a": torch.ones(1)})):
        with pytest.raises(CheckpointError, match=f"--weights {which}: there is only one set of weights"):
            one_set(content, which)
    found, said, is_averaged = one_set({"model_ema.a": torch.ones(1)}, "ema")
    assert (list(found), said, is_averaged) == (
        ["a"], "the averaged weights (model_ema) of the file are taken", True,
    )  # fmt: skip


@pytest.mark.parametrize("count", [1, 2, 3])
def test_one_set__wrappers_are_stripped_in_any_order(count: int) -> None:
    for order in permutations(("module.", "_orig_mod.", "model.", "state_dict."), count):
        wrapped = {"".join(order) + name: tensor for name, tensor in _RAW.items()}
        assert one_set(wrapped)[0].keys() == _RAW.keys()
    mixed = {f"model.{name}": one for name, one in _RAW.items()} | {"criterion.weight": torch.ones(1)}
    assert one_set(mixed)[0] is mixed


ARGS = Namespace(
    lr=np.float64(0.1), seed=np.int64(3), on=np.bool_(True), out=Path("runs/a"), betas=(0.9, 0.99)
)
BESIDE = {
    "epoch": 3,
    "optimizer": {"state": {0: {"step": torch.ones(1)}}},
    "args": ARGS,
    "scaler": {"scale": 2.0},
}


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    ("beside", "raw", "averaged"),
    [
        ({"arch": "vit", "version": 2, "metric": np.float64(71.2)}, "state_dict", "state_dict_ema"),  # timm
        ({}, "model", ""),  # MAE
        ({"lr_scheduler": {"last_epoch": 3}}, "model", "model_ema"),  # DeiT
    ],
)
def test_read__checkpoints_of_training_programs_with_their_arguments(
    tmp_path: Path, beside: dict[str, Any], raw: str, averaged: str, zipped: bool
) -> None:
    sets = {raw: STATE} | ({averaged: {name: 2 * one for name, one in STATE.items()}} if averaged else {})
    path = tmp_path / "last.pth.tar"
    torch.save(BESIDE | beside | sets, path, _use_new_zipfile_serialization=zipped)
    for which, of in (("model", raw), ("ema", averaged)):
        if averaged:
            assert str(one_set(read_tensors(path), which)[0]) == str(sets[of])
    assert str(one_set(read_tensors(path))[0]) == str(sets[averaged or raw])


def test_read__arguments_are_never_taken_for_tensors(tmp_path: Path) -> None:
    torch.save({"model": STATE | {"c": np.float64(1)}}, tmp_path / "w.pth")
    refused(tmp_path / "w.pth", "not a plain state dict, these are not tensors: model.c")


REFUSED = [Fraction(1, 2), partial(print, "ran"), attrgetter("x"), np.ones(3), np.random.default_rng(0)]


@pytest.mark.parametrize("value", REFUSED, ids=str)
def test_read__a_refused_pickle_names_the_class_that_it_met(
    tmp_path: Path, value: object, capfd: Any
) -> None:
    torch.save({"model": STATE, "args": value}, tmp_path / "w.pth")
    refused(tmp_path / "w.pth", "holds more than tensors (")
    assert capfd.readouterr().out == ""
    itself: dict[str, Any] = {"model": {}, "model_ema": {"a": torch.ones(1)}}
    itself["model"] = itself["model_ema"] = itself
    torch.save(itself, tmp_path / "w.pth")
    refused(tmp_path / "w.pth", "not a plain state dict")
