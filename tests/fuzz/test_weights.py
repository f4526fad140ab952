"""Whatever is done to a weights file: one clean error, or a model of the file's own size; never a traceback,
never much memory.
"""

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save

from tests.fuzz.mutate import bounded, fuzz, mutated, mutated_json
from vitctl.data.images.transforms import EvalTransform
from vitctl.errors import VitctlError
from vitctl.models.build import build
from vitctl.models.variants import ViTConfig, to_dict
from vitctl.models.weights.network import read_network
from vitctl.models.weights.weights_file import Weights, read_weights
from vitctl.system.text import has_control

EXAMPLES = [25, pytest.param(3000, marks=pytest.mark.slow)]
CONFIG = ViTConfig(patch_size=4, hidden_size=8, depth=1, mlp_size=8, num_heads=2, image_size=8, num_classes=3)
STATE = {name: tensor.numpy() for name, tensor in build(CONFIG).state_dict().items()}
HEADER = {
    "format": "vitctl/1",
    "config": to_dict(CONFIG),
    "meta": {
        "mean": [0.5, 0.5, 0.5],
        "std": [0.5, 0.5, 0.5],
        "image_size": 8,
        "eval_method": "square",
        "eval_resize": 0,
        "resample": "bilinear",
        "class_names": ["a", "b", "c"],
    },
}


def _ours() -> bytes:
    return save(STATE, {"vitctl": json.dumps(HEADER)})


def _npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, **STATE)
    return file.getvalue()


def _torch(*, legacy: bool) -> bytes:
    file = io.BytesIO()
    state = {name: torch.from_numpy(array.copy()) for name, array in STATE.items()}
    torch.save(state, file, _use_new_zipfile_serialization=not legacy)
    return file.getvalue()


def read(path: Path) -> str:
    """What came of reading a file: refused in one piece of plain text, in time and in bounds; or read."""
    refused = ""
    with bounded():
        with suppress(VitctlError):  # what a plan reads, without torch
            read_network(path)
        try:
            weights = read_weights(path)
        except VitctlError as error:
            refused = str(error)
    if refused:
        assert str(path) in refused and not any(has_control(line) for line in refused.split("\n"))
        return "refused"
    own = build(weights.config, device="meta").state_dict()
    assert {name: tensor.shape for name, tensor in own.items()} == {
        n: t.shape for n, t in weights.state.items()
    }
    check_sound(weights)
    return "read"


def check_sound(weights: Weights) -> None:
    """What was read can be computed with: numbers, and images that become numbers."""
    assert all(np.isfinite(tensor.double().numpy()).all() for tensor in weights.state.values())
    meta = {name: value for name, value in weights.meta.items() if value is not None}  # None: it is not told
    for name in meta.keys() & {"mean", "std"}:
        values = np.array(meta[name], np.float64)
        assert values.shape == (3,) and np.isfinite(values).all() and (name == "mean" or values.min() > 0)
    if "image_size" in meta and "eval_resize" in meta:
        EvalTransform(meta["image_size"], resize=meta["eval_resize"])
        assert meta["image_size"] <= 2**14
    names = meta.get("class_names") or []
    assert len(names) in (0, weights.config.num_classes) and all(isinstance(name, str) for name in names)


@pytest.mark.parametrize("num_examples", EXAMPLES)
@pytest.mark.parametrize(
    "make",
    [_ours, _npz, lambda: _torch(legacy=False), lambda: _torch(legacy=True)],
    ids=["ours", "npz", "torch", "old"],
)
def test_bytes(tmp_path: Path, make: Callable[[], bytes], num_examples: int) -> None:
    path = tmp_path / "weights.safetensors"

    def check(data: bytes) -> str:
        path.write_bytes(data)
        return read(path)

    assert fuzz(check, mutated((make(),)), num_examples)["refused"] > num_examples // 10


@pytest.mark.parametrize("num_examples", EXAMPLES)
def test_header(tmp_path: Path, num_examples: int) -> None:
    """The table of tensors at the start of a safetensors file."""
    path = tmp_path / "weights.safetensors"
    whole = _ours()
    length = int.from_bytes(whole[:8], "little")

    def check(text: bytes) -> str:
        path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])
        return read(path)

    assert check(whole[8 : 8 + length]) == "read"
    assert (
        fuzz(check, mutated_json(json.loads(whole[8 : 8 + length])), num_examples)["refused"]
        > num_examples // 4
    )


@pytest.mark.parametrize("num_examples", EXAMPLES)
def test_our_metadata(tmp_path: Path, num_examples: int) -> None:
    path = tmp_path / "weights.safetensors"

    def check(text: bytes) -> str:
        path.write_bytes(save(STATE, {"vitctl": text.decode()}))
        return read(path)

    assert check(json.dumps(HEADER).encode()) == "read"
    assert fuzz(check, mutated_json(HEADER), num_examples)["refused"] > num_examples // 10


@pytest.mark.parametrize("num_examples", EXAMPLES)
def test_json_beside(tmp_path: Path, num_examples: int) -> None:
    """timm's and Hugging Face's config.json beside tensors that need it."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(
        save(
            {
                "cls_token": np.zeros((1, 1, 8), np.float32),
                "patch_embed.proj.weight": np.zeros((8, 3, 4, 4), np.float32),
            }
        )
    )
    good = {
        "architecture": "vit_tiny",
        "num_classes": 3,
        "pretrained_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3, "input_size": [3, 8, 8]},
    }

    def check(text: bytes) -> str:
        (tmp_path / "config.json").write_bytes(text)
        return read(path)

    assert fuzz(check, mutated_json(good), num_examples)["refused"] == num_examples


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("depth", 10**9),
        ("hidden_size", 2**40),
        ("image_size", 10**6),
        ("num_classes", 10**12),
        ("mlp_size", 10**15),
        ("depth", 900),
    ],
)
def test_a_claim_larger_than_the_file_costs_nothing(tmp_path: Path, field: str, value: int) -> None:
    header = {**HEADER, "config": {**HEADER["config"], field: value}}  # type: ignore[dict-item]
    path = tmp_path / "weights.safetensors"
    path.write_bytes(save(STATE, {"vitctl": json.dumps(header)}))
    assert read(path) == "refused"


def test_a_state_dict_that_holds_itself(tmp_path: Path) -> None:
    state: dict[str, object] = {}
    state["state_dict"] = state
    for name, legacy in (("new.pth", False), ("old.pth", True)):
        torch.save(state, tmp_path / name, _use_new_zipfile_serialization=not legacy)
        assert read(tmp_path / name) == "refused"


def test_files_under_other_names(tmp_path: Path) -> None:
    image = io.BytesIO()
    with zipfile.ZipFile(image, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr(
            "a.npy",
            b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }",
        )
    files = {
        "claims.npz": image.getvalue(),
        "pickle.npz": pickle.dumps({"a": 1}),
        "text.npz": b"not weights at all",
        "tiny.safetensors": b"\x08\0\0\0\0\0\0\0{}",
        "huge.safetensors": (2**62).to_bytes(8, "little") + b"{}",
        "empty.safetensors": b"",
        "long.safetensors": b"\xff" * 8 + b"{" + b" " * 1000,
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        assert read(tmp_path / name) == "refused", name
