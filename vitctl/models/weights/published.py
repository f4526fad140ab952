"""Files published by authors with other names than timm's: DINOv2, DINOv3, MAE, DeiT III, EVA-02 and BEiT.

Each row brings their tensors to timm's names and leaves out what a classifier never uses.
"""

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType

from vitctl.errors import CheckpointError
from vitctl.models.weights import timm
from vitctl.models.weights.layouts import SQUASH, Json, Tensors, WeightsLayout, renamed
from vitctl.models.weights.meta import CLIP, IMAGENET

_PRETRAINING = (
    r"^mask_token$|^lm_head\.|^decoder_|^projectors\.|^local_cls_norm\.|^cls_pt_layers\."
    r"|(^|\.)rope\.freqs_(cos|sin)$|^rope_embed\.periods$|relative_position_index$"
)
_NAMES = {
    r"\.mlp\.w12\.": ".mlp.fc1.",
    r"\.mlp\.w1\.": ".mlp.fc1_g.",
    r"\.mlp\.w2\.": ".mlp.fc1_x.",
    r"\.mlp\.w3\.": ".mlp.fc2.",
    r"^(register|storage)_tokens$": "reg_token",
    r"\.mlp\.ffn_ln\.": ".mlp.norm.",
    r"\.attn\.inner_attn_ln\.": ".attn.norm.",
}


def _without_bias_of_keys(tensors: Tensors) -> Tensors:
    """Return DINOv3's tensors with query and value biases instead of a masked bias."""
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith(".attn.qkv.bias_mask")]:
        stem, mask = name.removesuffix("qkv.bias_mask"), found.pop(name)
        bias = found.pop(f"{stem}qkv.bias", None)
        if bias is None or bias.shape != mask.shape or len(bias) % 3:
            raise CheckpointError(f"{name} of shape {list(mask.shape)} does not fit the bias that it masks")
        query, key, value = (bias * mask).chunk(3)
        if not key.is_meta and key.any():
            raise CheckpointError(f"{name} does not mask the bias of keys, so this is no DINOv3")
        found |= {f"{stem}q_bias": query, f"{stem}v_bias": value}
    return found


def _pooled(tensors: Tensors) -> Tensors:
    """Return pre-training tensors as a classifier's, whose last norm comes after the pooling."""
    found = renamed(tensors, {} if "fc_norm.weight" in tensors else {r"^norm\.": "fc_norm."})
    shared = found.pop("rel_pos_bias.relative_position_bias_table", None)
    if shared is not None:  # one table for all blocks
        blocks = [name.removesuffix("norm1.weight") for name in found if name.endswith(".norm1.weight")]
        found |= {f"{block}attn.relative_position_bias_table": shared for block in blocks}
    return found


def _row(
    name: str,
    title: str,
    own: tuple[str, ...],
    absent: str,
    position_resize: str,
    change: Callable[[Tensors], Tensors] = lambda tensors: tensors,
    assumed: Json = MappingProxyType({}),
    norm_eps: float = timm.NORM_EPS,
) -> WeightsLayout:
    def tidy(tensors: Tensors) -> Tensors:
        is_own = absent not in tensors and all(one in tensors for one in own)
        return timm.tidy(change(renamed(tensors, _NAMES, _PRETRAINING))) if is_own else {}

    base = timm.POOLED if change is _pooled else timm.LAYOUT
    documented = {"gelu": "erf", "norm_eps": norm_eps, "position_resize": position_resize}
    usual = {key: value for key, value in base.assumed.items() if key not in documented}
    values = {**usual, **IMAGENET, "eval_resize": 224 / 256, **assumed}
    return replace(base, name=name, title=title, tidy=tidy, documented=documented, assumed=values)


_CLIP: Json = {**CLIP, "eval_method": "square", "eval_resize": SQUASH}

# Resizing of the position table is each program's rule; the rest of the pre-processing is assumed.
LAYOUTS = (
    _row("dinov3", "DINOv3", ("storage_tokens",), "", "bicubic_antialias", _without_bias_of_keys, {},
         timm.LARGER_EPS),
    _row("dinov2", "DINOv2", ("register_tokens",), "storage_tokens", "bicubic_antialias"),
    _row("dinov2", "DINOv2", ("mask_token", "blocks.0.ls1.gamma"), "register_tokens", "bicubic_offset"),
    _row("mae", "MAE", ("mask_token", "decoder_pos_embed"), "", "bicubic"),
    _row("deit3", "DeiT III", ("blocks.0.gamma_1", "blocks.0.attn.qkv.bias", "pos_embed"), "", "bicubic",
         assumed={"eval_resize": 1}),
    *(
        _row("eva02", "EVA-02", (gate, "blocks.0.attn.q_bias"), "", "bicubic", _pooled, _CLIP)
        for gate in ("blocks.0.mlp.w1.weight", "blocks.0.mlp.w12.weight")
    ),
    *(
        _row("beit", "BEiT", (own,), "", "bicubic", _pooled)
        for own in ("blocks.0.attn.relative_position_index", "rel_pos_bias.relative_position_bias_table")
    ),
)  # fmt: skip
