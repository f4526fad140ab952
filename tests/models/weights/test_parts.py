"""Weights in several files, as transformers saves them, are those of one file; a bad index is one line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.weights.conftest import refused
from vitctl.errors import CheckpointError
from vitctl.models.weights.download import NotOnServerError
from vitctl.models.weights.network import read_network
from vitctl.models.weights.weights_file import read_weights

transformers = pytest.importorskip("transformers")
INDEX = "model.safetensors.index.json"


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Path]:
    """One network of transformers: in one file, and in parts."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=32,
        patch_size=8, num_labels=5,
    )  # fmt: skip
    model = transformers.ViTForImageClassification(config)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="100KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    return tmp_path / "one", tmp_path / "many"


def test_read__parts_are_the_single_file(saved: tuple[Path, Path]) -> None:
    one, many = (read_weights(folder) for folder in saved)
    assert (many.config, many.meta, many.digest) == (one.config, one.meta, one.digest)
    assert read_weights(saved[1] / INDEX).digest == one.digest
    assert read_network(saved[1] / INDEX) == read_network(saved[0] / "model.safetensors")


@pytest.mark.parametrize(
    "address", ["hf://o/n", "hf://o/n/" + INDEX, "https://huggingface.co/o/n/resolve/main/" + INDEX]
)
def test_read__parts_at_an_address(saved: tuple[Path, Path], address: str) -> None:
    def fetch(url: str) -> Path:
        path = saved[1] / url.removeprefix("https://huggingface.co/o/n/resolve/main/")
        if not path.is_file():
            raise NotOnServerError(f"{url}: no such file")
        asked.append(path.name)
        return path

    asked: list[str] = []
    assert read_weights(address, fetch=fetch).digest == read_weights(saved[0]).digest
    parts = {path.name for path in saved[1].glob("*.safetensors")}
    assert parts <= set(asked)
    next(saved[1].glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match="no such file"):
        read_weights(address, fetch=fetch)


def _first(change: Callable[[str], Any]) -> Callable[[dict[str, str]], Any]:
    return lambda named: {name: change(part) for name, part in named.items()}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_first(lambda part: f"../many/{part}"), "is not a plain file name"),
        (_first(lambda part: f"/{part}"), "is not a plain file name"),
        (_first(lambda _: ".."), "is not a plain file name"),
        (_first(lambda _: INDEX), "should end as .safetensors or .bin"),
        (_first(lambda _: 3), "weight_map should be an object"),
        (_first(lambda _: "gone.safetensors"), "missing, but"),
        (lambda _: [], "weight_map should be an object"),
        (lambda _: {}, "weight_map should be an object"),
        (lambda named: dict(list(named.items())[1:]), "are not those that"),
        (lambda named: named | {"more": next(iter(named.values()))}, "are not those that"),
        (lambda _: {str(i): f"{i}.bin" for i in range(2000)}, "in 2,000 files, should be at most"),
    ],
)
def test_read__refuses_an_index(saved: tuple[Path, Path], change: Callable[..., Any], words: str) -> None:
    index = saved[1] / INDEX
    content = json.loads(index.read_text())
    index.write_text(json.dumps(content | {"weight_map": change(content["weight_map"])}))
    refused(saved[1], words)


def test_read__parts_are_bounded_together(saved: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitctl.system.limits.WEIGHTS", 150_000)
    refused(saved[1], "its parts are larger than 150,000")
    shutil.rmtree(saved[1])
