"""The authors' files: logits equal an independent NumPy network that reads their names, in every spelling
there is.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models.numpy_reference import forward
from tests.models.weights import google_reference as reference
from tests.models.weights.conftest import refused
from tests.models.weights.google_reference import Array
from vitctl.errors import CheckpointError
from vitctl.models.variants import Config, HybridConfig, ResNetConfig, ViTConfig
from vitctl.models.weights.weights_file import Weights, read_weights, write_weights

Logits = Callable[[Weights, Tensor], Tensor]
Make = Callable[..., Weights]

VIT = dict(reference.transformer_shapes(24, 3, 40, 2, 16, (8, 8, 3), 5))
WITH_REP = dict(reference.transformer_shapes(24, 3, 40, 2, 16, (8, 8, 3), 5, rep=11))
GAP = {
    **{name: shape for name, shape in VIT.items() if name != "cls"},
    "Transformer/posembed_input/pos_embedding": (1, 16, 24),
}
HYBRID = dict(reference.hybrid_root_shapes(32, (2, 1))) | dict(
    reference.transformer_shapes(24, 3, 40, 2, 16, (1, 1, 256), 5)
)
ROOT_ONLY = dict(reference.hybrid_root_shapes(32, ())) | dict(
    reference.transformer_shapes(24, 3, 40, 2, 16, (2, 2, 32), 5)
)
BIT = dict(reference.bit_shapes(32, (2, 1), 5))

_VIT_SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "depth": 2,
    "mlp_size": 40,
    "num_heads": 3,
    "num_classes": 5,
    "image_size": 32,
}
CASES: dict[str, tuple[dict[str, tuple[int, ...]], Config]] = {
    "vit": (VIT, ViTConfig(**_VIT_SIZES, patch_size=8)),
    "pre-logits": (WITH_REP, ViTConfig(**_VIT_SIZES, patch_size=8, representation_size=11)),
    "gap": (GAP, ViTConfig(**_VIT_SIZES, patch_size=8, classifier="gap")),
    "hybrid": (HYBRID, HybridConfig(**_VIT_SIZES, patch_size=1, width=32, stage_depths=(2, 1))),
    "root": (ROOT_ONLY, HybridConfig(**_VIT_SIZES, patch_size=2, width=32, stage_depths=())),
    "bit": (BIT, ResNetConfig(width=32, stage_depths=(2, 1), version="v2", num_classes=5)),
}


def save(path: Path, arrays: dict[str, Array]) -> Path:
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


@pytest.mark.parametrize("name", CASES)
def test_read__logits_equal_an_independent_network(
    name: str, tmp_path: Path, images: Tensor, logits_of: Logits
) -> None:
    shapes, config = CASES[name]
    drawn = reference.draw(shapes)
    weights = read_weights(save(tmp_path / "model.npz", drawn))
    assert weights.config == replace(config, image_size=weights.config.image_size)
    pixels = images[..., :31, :29] if name == "bit" else images  # only a ResNet sees any size
    theirs = {key: array.astype(np.float64) for key, array in reference.renamed(drawn).items()}
    expected = forward(weights.config, theirs, pixels.numpy())
    spread = expected.std()
    assert expected.shape == (4, 5)
    assert spread > 0.1
    assert np.abs(logits_of(weights, pixels).numpy() - expected).max() < 1e-10 * spread
    assert np.abs(logits_of(weights, pixels.float()).numpy() - expected).max() < 1e-5 * spread


@pytest.mark.parametrize("name", CASES)
def test_write__gives_back_their_file(name: str, tmp_path: Path) -> None:
    drawn = reference.draw(CASES[name][0])
    weights = read_weights(save(tmp_path / "theirs.npz", drawn))
    written = write_weights(weights, tmp_path / "ours.npz", "google")
    assert written.files == (tmp_path / "ours.npz",)
    with np.load(written.files[0], allow_pickle=False) as again:
        assert sorted(again.files) == sorted(drawn)
        for key, array in drawn.items():
            assert again[key].dtype == array.dtype
            assert np.array_equal(again[key], array)


def linen(name: str) -> str:
    name = name.replace("MultiHeadDotProductAttention_1", "MultiHeadDotProductAttention_0")
    return name.replace("MlpBlock_3", "MlpBlock_0").replace("LayerNorm_2", "LayerNorm_1")


def numbered(name: str) -> str:
    return name.replace("standardized_conv2d", "standardized_conv2d_17")


SPELLINGS: dict[str, tuple[str, Callable[[str], str]]] = {
    "linen": ("vit", linen),
    "big_vision": ("vit", lambda name: f"params/{linen(name)}"),
    "optimizer": ("hybrid", lambda name: f"opt/target/{name}"),
    "numbered": ("bit", numbered),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_read__every_spelling_is_the_same_model(spelling: str, tmp_path: Path) -> None:
    name, respell = SPELLINGS[spelling]
    drawn = reference.draw(CASES[name][0])
    respelled = {respell(key): array for key, array in drawn.items()}
    assert respelled.keys() != drawn.keys()
    if spelling == "optimizer":
        respelled["opt/state/step"] = np.zeros(())
    expected = read_weights(save(tmp_path / "published.npz", drawn))
    found = read_weights(save(tmp_path / "respelled.npz", respelled))
    assert found.config == expected.config
    assert all(torch.equal(found.state[key], tensor) for key, tensor in expected.state.items())


def test_read__group_norms_of_shape_1_1_1_c(tmp_path: Path) -> None:
    drawn = reference.draw(HYBRID)
    old = {key: array.reshape(1, 1, 1, -1) if "gn" in key else array for key, array in drawn.items()}
    assert sum(array.shape != drawn[key].shape for key, array in old.items()) == 2 * (1 + 3 * 3 + 2)
    expected = read_weights(save(tmp_path / "new.npz", drawn)).state
    found = read_weights(save(tmp_path / "old.npz", old)).state
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def test_read__recognises_a_head_of_zeros(tmp_path: Path) -> None:
    drawn = reference.draw(VIT)
    assert read_weights(save(tmp_path / "trained.npz", drawn)).has_head
    drawn["head/kernel"] = np.zeros_like(drawn["head/kernel"])
    weights = read_weights(save(tmp_path / "released.npz", drawn))
    assert weights.meta["head"] == "zero"
    assert not weights.has_head
    headless = {key: array for key, array in drawn.items() if not key.startswith("head/")}
    weights = read_weights(save(tmp_path / "headless.npz", headless))
    assert weights.config.num_classes == 0
    assert not weights.has_head


def test_read__imagenet21k_is_cropped_from_256(tmp_path: Path) -> None:
    drawn = reference.draw(dict(reference.transformer_shapes(4, 2, 4, 1, 14 * 14, (16, 16, 3), 21843)))
    weights = read_weights(save(tmp_path / "model.npz", drawn))
    assert weights.config.num_classes == 21843
    assert [weights.meta[key] for key in ("image_size", "eval_method", "eval_resize")] == [
        224,
        "shorter_side",
        256,
    ]


@pytest.mark.parametrize(
    ("file_name", "patch", "side", "image_size"),
    [
        ("model.npz", 16, 14, 224),
        ("model.npz", 14, 27, 384),  # six pixels dropped, as the authors fine-tuned H/14
        ("B_16-i1k-300ep--imagenet2012-steps_20k-lr_0.03-res_384.npz", 16, 24, 384),
        ("x-res_400.npz", 14, 28, 400),
        ("x-res_500.npz", 16, 14, 224),  # the name does not fit the table, which is what counts
    ],
)
def test_read__image_size_from_grid_and_name(
    tmp_path: Path, file_name: str, patch: int, side: int, image_size: int
) -> None:
    drawn = reference.draw(dict(reference.transformer_shapes(4, 2, 4, 1, side**2, (patch, patch, 3), 2)))
    assert read_weights(save(tmp_path / file_name, drawn)).config.image_size == image_size


def test_read__fine_tuned_bit_sees_480(tmp_path: Path) -> None:
    drawn = reference.draw(BIT)
    assert read_weights(save(tmp_path / "BiT-M-R50x1.npz", drawn)).config.image_size == 224
    assert read_weights(save(tmp_path / "BiT-M-R50x1-ILSVRC2012.npz", drawn)).config.image_size == 480


def test_read__mismatches_are_grouped(tmp_path: Path) -> None:
    drawn = reference.draw(dict(reference.transformer_shapes(24, 3, 40, 12, 16, (8, 8, 3), 5)))
    bad = {key: array for key, array in drawn.items() if not key.endswith("query/bias")}
    bad |= {f"Transformer/adapter_{i}/kernel": np.zeros(3) for i in range(300)}
    bad |= {key: array[:-1] for key, array in drawn.items() if key.endswith("Dense_1/bias")}
    refused(
        save(tmp_path / "model.npz", bad),
        r"model\.npz: the tensors do not make a whole model: "
        r"missing: Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/bias, [^;]*, and 8 more; "
        r"unexpected: Transformer/adapter_0/kernel, [^;]*, and 296 more; "
        r"wrong shape: Transformer/encoderblock_0/MlpBlock_3/Dense_1/bias is \[23\], expected \[24\], ",
    )


WRONG: dict[str, tuple[str, tuple[int, ...], str]] = {
    "flat patches": ("embedding/kernel", (8, 8, 24), "no Google ViT model has embedding/kernel [8, 8, 24]"),
    "no heads": (
        "Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel",
        (24, 24),
        "query/kernel [hidden_size, heads, channels] is missing or of another shape",
    ),
    "oblong grid": (
        "Transformer/posembed_input/pos_embedding",
        (1, 18, 24),
        "the position embedding of shape [1, 18, 24] is not a square grid of patches and 1 class token",
    ),
    "lost heads": (
        "Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel",
        (24, 5, 5),
        "hidden_size 24 is not a multiple of num_heads 5",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_read__says_which_tensor_is_wrong(case: str, tmp_path: Path) -> None:
    name, shape, words = WRONG[case]
    drawn = reference.draw(VIT)
    refused(save(tmp_path / "model.npz", {**drawn, name: np.zeros(shape, np.float32)}), words)


def test_read__bfloat16_stays_bfloat16(tmp_path: Path, tiny: ViTConfig, make_weights: Make) -> None:
    weights = make_weights(tiny)
    path = write_weights(weights, tmp_path / "model.npz", "google").files[0]
    with np.load(path) as archive:
        halved = {name: torch.from_numpy(archive[name]).bfloat16() for name in archive.files}
    arrays = {name: tensor.view(torch.int16).numpy().view("V2") for name, tensor in halved.items()}
    found = read_weights(save(tmp_path / "half.npz", arrays)).state
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in weights.state.items())
    with pytest.raises(CheckpointError, match=r"NumPy has no bfloat16; convert the weights to float32 first"):
        write_weights(Weights(tiny, found, {}), tmp_path / "again.npz", "google")


def test_write__refuses_what_the_authors_code_computes_otherwise(
    tmp_path: Path, tiny: ViTConfig, make_weights: Make
) -> None:
    resnet = ResNetConfig(width=32, stage_depths=(1,), num_classes=2)
    cases: list[tuple[Config, str]] = [
        (
            replace(tiny, gelu="erf"),
            "tanh GELU and norm_eps 1e-06, these weights were trained with erf and 1e-06",
        ),
        (replace(tiny, norm_eps=1e-12), "these weights were trained with tanh and 1e-12"),
        (replace(tiny, position_embedding="2d"), "it has no position_embedding '2d'"),
        (resnet, "Google BiT cannot hold this model: ResNets were published as v2 only"),
        (replace(resnet, version="v2", num_groups=16), "num_groups is 32 there, not 16"),
    ]
    for config, words in cases:
        with pytest.raises(CheckpointError) as error:
            write_weights(make_weights(config), tmp_path / "x.npz", "google")
        assert words in str(error.value)
        assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []
