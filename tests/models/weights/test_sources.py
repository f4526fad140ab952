from collections.abc import Callable
from pathlib import Path

import pytest

from vitctl.errors import CheckpointError
from vitctl.models.variants import ViTConfig
from vitctl.models.weights.download import NotOnServerError, locate
from vitctl.models.weights.weights_file import Weights, read_weights, write_weights

HUB = "https://huggingface.co/google/vit/resolve/main/"


class Web:
    """Stands in for the network: the files it has, and what it was asked for."""

    def __init__(self, files: dict[str, Path]) -> None:
        self.files = files
        self.asked: list[str] = []

    def __call__(self, url: str) -> Path:
        self.asked.append(url)
        if url not in self.files:
            raise NotOnServerError(f"{url}: no such file on the server")
        return self.files[url]


BUCKET = "https://storage.googleapis.com/"
BESIDE = ["config.json", "preprocessor_config.json", "open_clip_config.json", "README.md"]
WEIGHTS = ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"]


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        ("https://example.org/a/b.npz?x=1", ["https://example.org/a/b.npz"]),
        ("http://example.org/a.npz", ["http://example.org/a.npz"]),  # for fetch to refuse
        ("gs://bit_models/BiT-M-R50x1.npz", [f"{BUCKET}bit_models/BiT-M-R50x1.npz"]),
        (
            "gs://vit_models/imagenet21k+imagenet2012/R50+ViT-B_16.npz",
            [f"{BUCKET}vit_models/imagenet21k%2Bimagenet2012/R50%2BViT-B_16.npz"],
        ),
        ("hf://google/vit", [HUB + name for name in (*BESIDE, WEIGHTS[0])]),
        ("hf://google/vit", [HUB + name for name in (*BESIDE, *WEIGHTS)]),
        ("hf://google/vit/deep/x y.npz", [HUB + name for name in (*BESIDE, "deep/x%20y.npz")]),
    ],
)
def test_locate__asks_for_what_belongs_beside_and_the_weights(
    tmp_path: Path, source: str, asked: list[str]
) -> None:
    web = Web({asked[-1]: tmp_path})
    assert locate(source, web) == tmp_path
    assert web.asked == asked


def test_locate__a_bucket_that_is_not_public_is_asked_with_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Public weights need no package of Google's, whatever keys are set."""
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "key.json")
    public, private = "https://storage.googleapis.com/b/a.npz", "gs://b/a.npz"
    for web, asked in ((Web({public: tmp_path}), [public]), (Web({private: tmp_path}), [public, private])):
        assert locate(private, web) == tmp_path
        assert web.asked == asked


def test_locate__hub_says_what_is_missing() -> None:
    usage = "write hf://organisation/name, or hf://organisation/name/file"
    files = (
        "no model.safetensors and no pytorch_model.bin and no open_clip_model.safetensors; name the file: "
    )
    for bad, words in (
        ("hf://google/vit", f"holds {files}hf://google/vit/FILE"),
        ("hf://google/vit/x.npz", "no such file in that repository"),
        *((bad, usage) for bad in ("hf://google", "hf://google/", "hf:///vit", "hf://")),
    ):
        with pytest.raises(CheckpointError, match=f"^{bad}: {words}$"):
            locate(bad, Web({}))


def test_locate__paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    web = Web({})
    assert locate("~/x.npz", web) == tmp_path / "x.npz"
    assert locate(tmp_path, web) == tmp_path / "model.safetensors"
    (tmp_path / "pytorch_model.bin").touch()
    assert locate(str(tmp_path), web) == tmp_path / "pytorch_model.bin"
    (tmp_path / "model.safetensors").touch()
    assert locate(tmp_path, web) == tmp_path / "model.safetensors"
    assert web.asked == []


def test_read__from_the_hub(plain: ViTConfig, make_weights: Callable[..., Weights], tmp_path: Path) -> None:
    weights = make_weights(plain)
    files = write_weights(weights, tmp_path, "hf").files
    web = Web({HUB + file.name: file for file in files})
    found = read_weights("hf://google/vit", fetch=web)
    assert found.config == plain
    assert found.meta["class_names"] == weights.meta["class_names"]
