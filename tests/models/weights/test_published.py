"""Networks of today in timm's layouts and in their authors' own: timm computes what we compute, both ways."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.matrix import spread
from tests.models.weights.conftest import refused
from vitctl.errors import CheckpointError
from vitctl.models.build import build, resize_offset_bias, resize_position_embedding, resized
from vitctl.models.flops import count_parameters
from vitctl.models.positions import num_offsets
from vitctl.models.variants import ViTConfig
from vitctl.models.weights.layouts import Beside, rules_for, to_ours
from vitctl.models.weights.meta import CLIP, IMAGENET
from vitctl.models.weights.weights_file import (
    LAYOUTS,
    Weights,
    foreign_network,
    read_weights,
    write_weights,
)

timm = pytest.importorskip("timm")
Logits = Callable[[Weights, Tensor], Tensor]
TINY: dict[str, Any] = {"embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5}
# Architecture of timm, arguments beside the sizes, the size of its images and another, and what is read.
FAMILIES: dict[str, tuple[dict[str, Any], tuple[int, int], dict[str, Any]]] = {
    "vit_small_patch14_dinov2": ({}, (56, 84), {"layer_scale": 1e-5}),
    "vit_small_patch14_reg4_dinov2": ({}, (56, 70), {"registers": 4, "position_class_row": False}),
    "vit_giant_patch14_dinov2": ({}, (56, 42), {"mlp": "swiglu", "mlp_size": 128}),
    "vit_small_patch16_dinov3": ({}, (64, 96), {"rotary": "dinov3", "qkv_bias": "none", "norm_eps": 1e-5}),
    "vit_small_patch16_dinov3_qkvb": (
        {"global_pool": "token"},
        (64, 80),
        {"classifier": "token", "qkv_bias": "qv"},
    ),
    "vit_small_plus_patch16_dinov3": ({}, (64, 96), {"mlp": "swiglu", "mlp_size": 192}),
    "vit_7b_patch16_dinov3": ({}, (64, 48), {"mlp": "swiglu", "mlp_size": 128, "classifier": "patches"}),
    "vit_base_patch16_siglip_224": ({}, (64, 96), {"classifier": "attention", "gelu": "erf"}),
    "vit_base_patch32_siglip_256": ({}, (128, 96), {"classifier": "attention", "gelu": "tanh"}),
    "vit_base_patch16_siglip_gap_224": ({}, (64, 96), {"classifier": "gap", "norm_at": "tokens"}),
    "vit_base_patch16_clip_224": ({}, (64, 96), {"norm_pre": True, "patch_bias": False, "gelu": "erf"}),
    "vit_base_patch16_clip_quickgelu_224": ({}, (64, 96), {"gelu": "quick", "norm_eps": 1e-5}),
    # MAE as it is fine-tuned
    "vit_base_patch16_224": (
        {"global_pool": "avg"},
        (64, 96),
        {"norm_at": "pooled", "classifier": "patches"},
    ),
    "deit3_small_patch16_224": ({}, (64, 96), {"position_class_row": False, "layer_scale": 1e-5}),
    "eva02_tiny_patch14_336": ({}, (84, 56), {"rotary": "eva", "qkv_bias": "qv", "mlp": "swiglu"}),
    "eva02_base_patch14_448": ({}, (84, 56), {"rotary": "eva", "mlp_norm": True, "norm_at": "pooled"}),
    "eva_giant_patch14_clip_224": ({"mlp_ratio": 2}, (84, 56), {"rotary": "none", "qkv_bias": "qv"}),
    "vit_base_patch16_rope_reg1_gap_256": ({}, (64, 96), {"rotary": "eva", "registers": 1}),
    "beitv2_base_patch16_224": ({}, (64, 96), {"position_embedding": "relative_bias", "qkv_bias": "qv"}),
}  # fmt: skip


def theirs(name: str, seed: int = 0, **more: Any) -> nn.Module:
    """timm's model with few channels, and noise on every number."""
    arguments, (size, _), _ = FAMILIES[name]
    model = timm.create_model(name, **{**TINY, "img_size": size, **arguments, **more})
    return shaken(model.eval(), seed, 0.2)


@torch.no_grad()
def shaken(model: nn.Module, seed: int, by: float) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter += torch.randn(parameter.shape, generator=generator) * by
    return model


def folder_of(model: nn.Module, path: Path) -> Path:
    """The folder that timm writes for its hub."""
    timm.models.save_for_hf(model, path, safe_serialization=True)
    return path


def pictures(size: int) -> Tensor:
    return torch.rand(3, 3, size, size, generator=torch.Generator().manual_seed(3)) * 2 - 1


def assert_equal(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert expected.std() > 0.01
    assert (found - expected).abs().max() < 1e-5 * expected.std()


@torch.inference_mode()
def assert_same_answers(weights: Weights, model: nn.Module, size: int) -> None:
    """Logits and representation, at the weights' size or another, as timm resizes positions."""
    config = weights.config
    assert isinstance(config, ViTConfig)
    ours = build(replace(config, image_size=size)).eval()
    state, _ = resized(ours, config, weights.state, weights.meta["position_resize"])
    ours.load_state_dict(state)
    if size != config.image_size:
        model.set_input_size(img_size=size)
    images = pictures(size)
    assert_equal(ours(images), model(images))
    features = model.forward_head(model.forward_features(images), pre_logits=True)
    assert_equal(ours.features(images), features)


@pytest.mark.filterwarnings("ignore:torch.searchsorted", "ignore:Using a non-tuple")
@pytest.mark.parametrize("name", spread(7, FAMILIES))
def test_timm__computes_the_same_both_ways(name: str, tmp_path: Path) -> None:
    _, (size, other), wanted = FAMILIES[name]
    model = theirs(name)
    found = read_weights(folder_of(model, tmp_path / "theirs"))
    assert {key: getattr(found.config, key) for key in wanted} == wanted
    assert "gelu" not in found.meta.get("assumed", ()) and "classifier" not in found.meta.get("assumed", ())
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert counted == count_parameters(found.config) == sum(one.numel() for one in found.state.values())
    assert_same_answers(found, model, size)
    assert_same_answers(found, model, other)

    generator = torch.Generator().manual_seed(1)
    changed = {
        key: one + 0.05 * torch.randn(one.shape, generator=generator) for key, one in found.state.items()
    }
    moved = Weights(found.config, changed, found.meta)
    written = write_weights(moved, tmp_path / "ours", "timm")
    again = timm.create_model(f"local-dir:{tmp_path / 'ours'}", pretrained=True).eval()
    assert type(again) is type(model)
    assert_same_answers(moved, again, size)
    assert read_weights(written.files[0]).config == found.config
    note = written.notes[0].replace("FILE", repr(str(written.files[0])))
    assert_same_answers(moved, eval(note, {"timm": timm}).eval(), size)


# Published networks, and their parameters without a head where we know them from elsewhere.
SIZES = {
    "vit_small_patch14_dinov2": 22_056_576 - 384,  # without the mask token
    "vit_giant_patch14_dinov2": 1_136_480_768 - 1536,
    "vit_small_patch16_dinov3": 21_586_944,
    "vit_small_patch16_dinov3_qkvb": 21_596_160,
    "vit_small_plus_patch16_dinov3": 28_683_264,
    "vit_base_patch16_dinov3": 85_641_216,
    "vit_large_patch16_dinov3": 303_079_424,
    "vit_huge_plus_patch16_dinov3": 840_509_440,
    "vit_7b_patch16_dinov3": 6_716_030_976,
    "vit_so400m_patch14_siglip_224": None,
    "vit_huge_patch14_clip_224": None,
    "deit3_medium_patch16_224": None,
    "eva02_large_patch14_448": None,
    "beitv2_large_patch16_224": None,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "parameters"), SIZES.items())
def test_timm__published_networks_keep_their_names_and_sizes(name: str, parameters: int | None) -> None:
    config, meta, _ = told(name, num_classes=0)
    assert isinstance(config, ViTConfig)
    assert parameters is None or count_parameters(config) == parameters
    row = next(row for row in LAYOUTS if row.name == "timm" and not row.misfits(config))
    assert row.sidecars(config, meta)["config.json"]["architecture"] == name


def told(name: str, **more: Any) -> tuple[ViTConfig, dict[str, Any], nn.Module]:
    """What we read of timm's architecture from tensors and the config.json that its hub has for it."""
    with torch.device("meta"):
        model = timm.create_model(name, **more)
    known = {"architecture": name, "global_pool": model.global_pool, "pretrained_cfg": model.pretrained_cfg}
    known = json.loads(json.dumps(known, default=list))
    state = model.state_dict()
    row, tidy = next(
        (row, tidy) for row in LAYOUTS if row.mark in (tidy := row.tidy(state)) and row.absent not in tidy
    )
    config, meta = row.describe(row, row.view(tidy), tidy, Beside(config=known))
    ours = build(config, device="meta").state_dict()
    to_ours(tidy, rules_for(row.table(1), ours), ours)
    assert isinstance(config, ViTConfig)
    return config, meta, model


def rotary_of(model: nn.Module) -> str:
    """Our word for the rule of timm's module, "another" for one that is not ours."""
    rope = getattr(model, "rope", None)
    if rope is None:
        return "none"
    if type(rope).__name__ == "RotaryEmbeddingDinoV3":
        plain = rope.temperature == 100 and rope.rotate_half and rope.grid_offset == 0
        return "dinov3" if plain and rope.normalize_coords == "separate" else "another"
    known = (10_000, (16, 16), "ij", 0, False)
    found = (rope.temperature, rope.ref_feat_shape, rope.grid_indexing, rope.grid_offset, rope.rotate_half)
    return "eva" if type(rope).__name__ == "RotaryEmbeddingCat" and found == known else "another"


def activation_of(mlp: nn.Module) -> str:
    found = type(mlp.act).__name__
    return {"GELU": "erf", "GELUTanh": "tanh", "QuickGELU": "quick", "SiLU": "erf"}[found]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_timm__every_architecture_is_read_right_or_refused() -> None:
    modules = ("vision_transformer", "eva", "beit", "deit")
    names = [name for module in modules for name in timm.list_models(module=module)]
    read, refused = [], {}
    for name in names:
        try:
            config, meta, model = told(name)
        except CheckpointError as error:
            refused[name] = str(error)
            continue
        read.append(name)
        block, norm = model.blocks[0], model.norm if hasattr(model.norm, "eps") else model.fc_norm
        assert type(block).__name__ in ("Block", "EvaBlock"), name
        assert not getattr(model, "pool_include_prefix", False), name
        assert type(norm).__name__ == type(block.norm1).__name__ == "LayerNorm", name
        pools = {"token": "token", "avg": "patches" if config.has_class_token else "gap", "map": "attention"}
        found = {
            "num_heads": block.attn.num_heads,
            "gelu": activation_of(block.mlp),
            "norm_eps": block.norm1.eps,
            "classifier": pools[model.global_pool],
            "norm_at": "tokens" if norm is model.norm else "pooled",
            "rotary": rotary_of(model),
            "image_size": model.patch_embed.img_size[0],
        }
        assert {key: getattr(config, key) for key in found} == found, name
        assert norm.eps == config.norm_eps, name
        assert count_parameters(config) == sum(one.numel() for one in model.parameters()), name
        assert not set(meta.get("assumed", ())) - {"num_heads"}, name
        assert tuple(meta["mean"]) == model.pretrained_cfg["mean"], name
    assert len(read) >= 170
    assert len(read) + len(refused) == len(names)
    families = r"dinov[23]|siglip|^vit_.*_clip_|^deit3|^beitv2|^eva02_(?!.*clip|enormous)|augreg"
    assert not [name for name in refused if re.search(families, name)]


REFUSED = {
    "eva02_base_patch16_clip_224": "a model with a norm inside attention is not supported",
    "vit_base_patch16_rpn_224": "norms after its branches",
    "vit_base_patch16_xp_224": "parallel branches",
    "vit_small_patch16_rope_ape_224": "rotary positions by a rule of its own",
    "vit_pe_core_tiny_patch16_384": "rotary positions by a rule of its own",
    "deit_tiny_distilled_patch16_224": "a distillation token",
    "test_vit2": "not a square grid",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "words"), REFUSED.items())
def test_timm__refuses_what_it_would_compute_otherwise(name: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        told(name, depth=1)


def test_timm__refuses_arguments_that_no_tensor_shows(tmp_path: Path) -> None:
    folder = folder_of(theirs("eva02_tiny_patch14_336", ref_feat_shape=(8, 8)), tmp_path)
    refused(folder, r"model_args\.ref_feat_shape is \[8, 8\], a key")


def test_timm__two_last_norms_are_not_one(tmp_path: Path) -> None:
    state = theirs("eva02_tiny_patch14_336", use_post_transformer_norm=True).state_dict()
    with pytest.raises(CheckpointError, match=r"unexpected: norm\.weight, norm\.bias"):
        bare(state, tmp_path)


def bare(tensors: dict[str, Tensor], path: Path) -> Weights:
    """Read a file that has no config.json."""
    torch.save({"model": tensors}, path / "alone.pth")
    return read_weights(path / "alone.pth", num_heads=TINY["num_heads"])


@pytest.mark.parametrize(
    ("name", "told", "assumed"),
    [
        ("vit_small_patch16_dinov3", {"classifier": "token", "norm_eps": 1e-5}, IMAGENET),
        ("vit_base_patch16_siglip_224", {"gelu": "tanh", "classifier": "attention"}, {"mean": (0.5,) * 3}),
        ("vit_base_patch16_clip_quickgelu_224", {"gelu": "erf", "norm_eps": 1e-5}, CLIP),
        ("eva02_base_patch14_448", {"classifier": "patches", "rotary": "eva", "norm_eps": 1e-6}, CLIP),
        ("beitv2_base_patch16_224", {"classifier": "patches", "num_heads": 3}, IMAGENET),
        ("vit_base_patch16_224", {"classifier": "patches", "norm_at": "pooled"}, IMAGENET),
    ],
)
def test_timm__alone_a_file_says_what_is_assumed(
    name: str, told: dict[str, Any], assumed: dict[str, Any], tmp_path: Path
) -> None:
    found = bare(theirs(name).state_dict(), tmp_path)
    assert {key: getattr(found.config, key) for key in told} == told
    assert {key: tuple(found.meta[key]) for key in assumed} == assumed
    assert {"mean", "std", "norm_eps", "position_resize", "eval_resize"} <= set(found.meta["assumed"])
    is_squashed = name.startswith(("eva02", "vit_base_patch16_siglip"))
    assert found.meta["eval_method"] == ("square" if is_squashed else "torchvision")
    is_gated = found.config.mlp == "swiglu"
    assert ("gelu" in found.meta["assumed"]) is not is_gated
    assert ("classifier" in found.meta["assumed"]) is (told.get("classifier") != "attention")


def spelt(tensors: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    """The tensors with other names, each pattern once."""
    found = {}
    for name, tensor in tensors.items():
        for pattern, other in names.items():
            name = re.sub(pattern, other, name)
        found[name] = tensor
    return found


def dinov3(state: dict[str, Tensor]) -> dict[str, Tensor]:
    found = spelt(
        state,
        {r"^reg_token": "storage_tokens", r"gamma_(\d)": r"ls\1.gamma", "fc1_g": "w1", "fc1_x": "w2"}
        | ({r"mlp\.fc2": "mlp.w3"} if any("fc1_g" in name for name in state) else {}),
    )
    width = TINY["embed_dim"]
    for index in range(TINY["depth"]):
        at = f"blocks.{index}.attn"
        query, value = found.pop(f"{at}.q_bias"), found.pop(f"{at}.v_bias")
        mask = torch.ones(3, width)
        mask[1] = 0
        found[f"{at}.qkv.bias"] = torch.cat([query, torch.randn(width), value])
        found[f"{at}.qkv.bias_mask"] = mask.flatten()
    local = {"local_cls_norm.weight": torch.ones(width), "local_cls_norm.bias": torch.ones(width)}
    return found | local | {"mask_token": torch.ones(1, width), "rope_embed.periods": torch.ones(4)}


def dinov2(state: dict[str, Tensor]) -> dict[str, Tensor]:
    names = {r"^reg_token": "register_tokens"}
    if state["blocks.0.mlp.fc1.weight"].shape[0] == 2 * state["blocks.0.mlp.fc2.weight"].shape[1]:
        names |= {r"mlp\.fc1": "mlp.w12", r"mlp\.fc2": "mlp.w3"}
    return spelt(state, names) | {"mask_token": torch.ones(1, TINY["embed_dim"])}


def mae(state: dict[str, Tensor]) -> dict[str, Tensor]:
    more = ("mask_token", "decoder_pos_embed", "decoder_blocks.0.norm1.weight", "decoder_embed.bias")
    return state | {name: torch.ones(1, 1, 8) for name in more}


def deit3(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return spelt(state, {r"ls(\d)\.gamma": r"gamma_\1"})


def eva02(state: dict[str, Tensor]) -> dict[str, Tensor]:
    split = {"q_proj.bias": "q_bias", "v_proj.bias": "v_bias", "mlp.norm": "mlp.ffn_ln", "fc1_g": "w1"}
    found = spelt(state, {**split, "fc1_x": "w2", r"mlp\.fc1": "mlp.w12", r"mlp\.fc2": "mlp.w3"})
    buffers = {
        f"{at}rope.freqs_{wave}": torch.ones(36, 16)
        for wave in ("cos", "sin")
        for at in ("", "blocks.0.attn.")
    }
    return found | buffers


def eva02_of_pretraining(state: dict[str, Tensor]) -> dict[str, Tensor]:
    more = {
        "mask_token": torch.ones(1, 1, 48),
        "lm_head.weight": torch.ones(7, 48),
        "lm_head.bias": torch.ones(7),
    }
    return spelt(eva02(state), {"^fc_norm": "norm"}) | more


def beit(state: dict[str, Tensor]) -> dict[str, Tensor]:
    index = {
        f"blocks.{block}.attn.relative_position_index": torch.ones(17, 17, dtype=torch.long)
        for block in (0, 1)
    }
    return state | index


AUTHORS: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str, dict[str, Any], str]] = {
    "DINOv3": (dinov3, "vit_small_patch16_dinov3_qkvb", {}, "bicubic_antialias"),
    "DINOv3 with SwiGLU": (
        dinov3,
        "vit_small_plus_patch16_dinov3",
        {"qkv_bias": True, "global_pool": "token"},
        "bicubic_antialias",
    ),
    "DINOv2": (dinov2, "vit_small_patch14_dinov2", {}, "bicubic_offset"),
    "DINOv2 with registers": (dinov2, "vit_small_patch14_reg4_dinov2", {}, "bicubic_antialias"),
    "DINOv2 g": (dinov2, "vit_giant_patch14_dinov2", {}, "bicubic_offset"),
    "MAE": (mae, "vit_base_patch16_224", {"global_pool": "token"}, "bicubic"),
    "DeiT III": (deit3, "deit3_small_patch16_224", {}, "bicubic"),
    "EVA-02 S": (eva02, "eva02_tiny_patch14_336", {}, "bicubic"),
    "EVA-02 B": (eva02, "eva02_base_patch14_448", {}, "bicubic"),
    "EVA-02 B of pre-training": (eva02_of_pretraining, "eva02_base_patch14_448", {}, "bicubic"),
    "BEiT v2": (beit, "beitv2_base_patch16_224", {}, "bicubic"),
}  # fmt: skip


@pytest.mark.parametrize("family", spread(5, AUTHORS))
def test_authors__their_files_are_read_as_timms(family: str, tmp_path: Path) -> None:
    change, name, more, position_resize = AUTHORS[family]
    size = FAMILIES[name][1][0]
    model = theirs(name, **more)
    found = bare(change(model.state_dict()), tmp_path)
    weights = Weights(replace(found.config, image_size=size), found.state, found.meta)
    assert weights.meta["position_resize"] == position_resize
    assert not {"gelu", "norm_eps", "position_resize"} & set(weights.meta["assumed"])
    share = {"deit3": 1, "eva02": 1}.get(found.meta["format"], 224 / 256)
    squashed = found.meta["format"] == "eva02"
    assert found.meta["eval_resize"] == (0 if squashed else int(found.config.image_size / share))
    assert isinstance(found.config, ViTConfig) and found.config.rotary_rescale == 1
    assert {"mean", "std"} <= set(weights.meta["assumed"])
    assert_same_answers(weights, model, size)


def test_authors__a_table_with_a_row_for_the_class_token_beside_registers(tmp_path: Path) -> None:
    """DINOv2's table has that row and timm's has not: it moves into the token, and the answers stay."""
    model = theirs("vit_small_patch14_reg4_dinov2")
    state, row = dinov2(model.state_dict()), torch.randn(1, 1, 48)
    state["pos_embed"] = torch.cat([row, state["pos_embed"]], dim=1)
    state["cls_token"] = state["cls_token"] - row
    found = bare(state, tmp_path)
    assert isinstance(found.config, ViTConfig) and found.config.position_class_row
    assert_same_answers(found, model, 56)
    written = write_weights(found, tmp_path / "ours", "timm")
    assert written.notes[1] == "the class token's position is now part of the class token"
    again = timm.create_model(f"local-dir:{tmp_path / 'ours'}", pretrained=True).eval()
    assert_same_answers(found, again, 56)


def test_authors__beit_of_pretraining_shares_one_table(tmp_path: Path) -> None:
    state = beit(theirs("beitv2_base_patch16_224").state_dict())
    table = state.pop("blocks.0.attn.relative_position_bias_table")
    own = {key: one for key, one in state.items() if not key.endswith(("bias_table", "index"))}
    own |= {"rel_pos_bias.relative_position_bias_table": table, "mask_token": torch.ones(1, 1, 48)}
    own |= {
        "cls_pt_layers.0.norm1.weight": torch.ones(48),
        "rel_pos_bias.relative_position_index": torch.ones(2),
    }
    found = bare(spelt(own, {"^fc_norm": "norm"}), tmp_path)
    for block in (0, 1):
        assert torch.equal(found.state[f"blocks.{block}.attention.relative_bias"], table)


def test_authors__the_bias_of_keys_must_be_masked(tmp_path: Path) -> None:
    state = dinov3(theirs("vit_small_patch16_dinov3_qkvb").state_dict())
    for mask in (torch.ones(144), torch.full((144,), float("nan"))):
        state["blocks.1.attn.qkv.bias_mask"] = mask
        with pytest.raises(CheckpointError, match="does not mask the bias of keys"):
            bare(state, tmp_path)
    state["blocks.1.attn.qkv.bias_mask"] = torch.ones(3)
    with pytest.raises(CheckpointError, match=r"bias_mask of shape \[3\] does not fit the bias"):
        bare(state, tmp_path)


def test_authors__positions_of_dinov2_are_resized_by_a_scale_with_an_offset() -> None:
    table = torch.randn(1, 1 + 37**2, 8, generator=torch.Generator().manual_seed(0))
    grid = table[:, 1:].unflatten(1, (37, 37)).permute(0, 3, 1, 2)
    for side in (16, 24):
        scale = (side + 0.1) / 37
        wanted = nn.functional.interpolate(grid, scale_factor=(scale, scale), mode="bicubic")
        assert wanted.shape[-2:] == (side, side)
        found = resize_position_embedding(table, (37, 37), (side, side), 1, "bicubic_offset")
        assert (found[:, 1:] - wanted.flatten(2).transpose(1, 2)).abs().max() < 1e-4
        other = resize_position_embedding(table, (37, 37), (side, side), 1, "bicubic")
        assert (found - other).abs().max() > 1e-3


@pytest.mark.filterwarnings("ignore:torch.searchsorted", "ignore:Using a non-tuple")
@pytest.mark.parametrize(("old", "new"), [(14, 24), (14, 10), (2, 5), (1, 3)])
def test_positions__relative_biases_are_resized_as_in_timm(old: int, new: int) -> None:
    from timm.layers.pos_embed_rel import resize_rel_pos_bias_table

    table = torch.randn(num_offsets((old, old)), 3, generator=torch.Generator().manual_seed(0))
    wanted = resize_rel_pos_bias_table(table, (new, new), (num_offsets((new, new)), 3))
    assert (resize_offset_bias(table, (old, old), (new, new)) - wanted).abs().max() < 1e-5


MISFITS: list[tuple[dict[str, Any], str]] = [
    ({"norm_pre": True}, "its norm before the blocks goes with patches without a bias"),
    ({"classifier": "attention", "registers": 2}, "its attention pooling goes with neither registers"),
    ({"rotary": "dinov3", "qkv_bias": "none", "gelu": "tanh"}, "it has an exact GELU"),
    ({"rotary": "dinov3", "qkv_bias": "qkv"}, "no bias of keys"),
    ({"position_embedding": "relative_bias", "qkv_bias": "qv", "classifier": "gap"}, "has a class token"),
    ({"classifier": "token_patches"}, "it has no classifier 'token_patches'"),
    ({"position_embedding": "sincos"}, "it has no position_embedding 'sincos'"),
]


@pytest.mark.parametrize(("change", "words"), MISFITS, ids=[words for _, words in MISFITS])
def test_timm__cannot_hold_everything(
    plain: ViTConfig, make_weights: Callable[..., Weights], change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=f"timm cannot hold this model: .*{re.escape(words)}"):
        write_weights(make_weights(replace(plain, **change)), tmp_path, "timm")


def test_authors__the_header_alone_tells_the_same_network(tmp_path: Path) -> None:
    more = {"qkv_bias": True, "embed_dim": 128, "num_heads": 2}
    state = theirs("vit_small_plus_patch16_dinov3", **more).state_dict()
    with_k = {"blocks.0.attn.qkv.bias": torch.zeros(384), "blocks.0.attn.qkv.bias_mask": torch.zeros(384)}
    named = spelt(
        state, {"^reg_token": "storage_tokens", "fc1_g": "w1", "fc1_x": "w2", r"mlp\.fc2": "mlp.w3"}
    )
    kept = {name: one for name, one in named.items() if not re.match(r"blocks\.0.*[qv]_bias", name)}
    save_file(kept | with_k, tmp_path / "alone.safetensors")
    found = read_weights(tmp_path / "alone.safetensors").config
    assert foreign_network(tmp_path / "alone.safetensors", "")[0] == found
    assert isinstance(found, ViTConfig) and (found.num_heads, found.qkv_bias) == (2, "qv")
