"""Compare networks at published sizes with their own programs: `python benchmarks/layouts.py`.

Each peer builds a network, every parameter is drawn at random, and the peer saves it. vitctl reads that file,
and both compute the same random images. Then all weights change, vitctl writes them back, and a class of the
peer loads them strictly. The output is a Markdown table. No weights are downloaded.

open_clip and clones of the authors' repositories are optional; their rows are left out without them:

    pip install open_clip_torch
    git clone https://github.com/facebookresearch/dinov2 && git clone https://github.com/facebookresearch/dinov3
    git clone https://github.com/facebookresearch/deit
    python benchmarks/layouts.py --authors .      # the folder of the clones
"""

import argparse
import copy
import importlib
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import timm
import torch
import transformers
from torch import Tensor, nn

from vitctl import load_model
from vitctl.models.flops import count_parameters
from vitctl.models.variants import ViTConfig
from vitctl.models.weights.weights_file import Weights, read_weights, write_weights

BATCH, CLASSES, CHANGE = 2, 1000, 0.1
# Parts of names of tensors that are added to tokens or to attention: not matrices that multiply.
TABLES = ("token", "pos", "probe", "latent", "class_embedding", "bias_table")
SCALES = ("gamma", "lambda")

Answer = Callable[[nn.Module, Tensor], Tensor]
HEADER = (
    "| file of | network | image size | logits | features | float64 | parameters: vitctl | peer | licence | "
    "written for | its deviation |\n|" + "---|" * 11
)


@dataclass(frozen=True)
class Case:
    """A network of another program.

    Args:
        source: whose layout the file has.
        network: its published name.
        make: builds it, in evaluation mode.
        save: writes its files into a folder.
        sizes: images' native size, and another, in pixels.
        features: the representation, `[B, D]`.
        logits: `[B, K]`, or None without a head.
        at: the network at another image size; None if it takes any.
        parameters: which of its parameters a classifier's body has.
        to: target of the round trip.
        again: opens the written folder strictly, and answers what `logits` (or `features`) does.
    """

    source: str
    network: str
    make: Callable[[], nn.Module]
    save: Callable[[nn.Module, Path], object]
    sizes: tuple[int, int]
    features: Answer | None
    logits: Answer | None
    at: Callable[[nn.Module, int], nn.Module] | None
    parameters: Callable[[str], bool]
    to: str
    again: Callable[[Path], tuple[nn.Module, Answer]]


def main() -> None:
    """Print the table and the versions."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--authors", type=Path, help="folder with clones of dinov2, dinov3 and deit")
    parser.add_argument("--only", default="", help="rows whose source and network match this expression")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    began = time.perf_counter()
    print(HEADER)
    cases = [*of_timm(), *of_transformers(), *of_authors(given.authors), *of_open_clip()]
    for case in cases:
        if re.search(given.only, f"{case.source} {case.network}"):
            with tempfile.TemporaryDirectory() as folder:
                print(row(case, Path(folder)), flush=True)
    packages = ("torch", "timm", "transformers", *(["open_clip_torch"] if find_spec("open_clip") else []))
    print(f"\n{', '.join(f'{name} {version(name)}' for name in packages)}; "
          f"{time.perf_counter() - began:.0f} s on one thread")  # fmt: skip


@torch.inference_mode()
def row(case: Case, folder: Path) -> str:
    """Return the case's line of the table."""
    torch.manual_seed(0)
    peer = drawn(case.make().eval())
    case.save(peer, folder / "theirs")
    source = next((folder / "theirs").glob("*.bin"), next((folder / "theirs").glob("*.safetensors"), folder))
    weights = read_weights(source)
    assert isinstance(weights.config, ViTConfig)
    logits, features, exact = [], [], []
    theirs = sum(one.numel() for name, one in peer.named_parameters() if case.parameters(name))
    for size in case.sizes:
        moved = case.at(peer, size) if case.at else peer
        ours, _ = load_model(source, image_size=size)
        for dtype in (torch.float32, torch.float64):
            if dtype == torch.float64 and size != min(case.sizes):
                continue
            images = pictures(size).to(dtype)
            one, other = (model.to(dtype) for model in (ours, moved))
            found = [
                deviation(answer(images), wanted(other, images)) if wanted else None
                for answer, wanted in ((one, case.logits), (one.features, case.features))
            ]
            if dtype == torch.float32:
                logits.append(found[0])
                features.append(found[1])
            else:
                exact += [value for value in found if value is not None]
        moved.float()
        if size == case.sizes[0]:
            first = ours.float()
    body = replace(weights.config, num_classes=0)
    cells = [
        case.source, case.network, " / ".join(map(str, case.sizes)), listed(logits), listed(features),
        f"{max(exact):.1e}", f"{count_parameters(body):,}", f"{theirs:,}",
        weights.meta.get("licence", "not stated"), case.to, f"{round_trip(case, weights, first, folder):.1e}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def round_trip(case: Case, weights: Weights, ours: nn.Module, folder: Path) -> float:
    """Return the deviation after all weights changed and went back to the other program."""
    generator = torch.Generator().manual_seed(1)
    state = {
        name: one + CHANGE * one.std().nan_to_num(1) * torch.randn(one.shape, generator=generator)
        for name, one in weights.state.items()
    }
    ours.load_state_dict(state)
    write_weights(Weights(weights.config, state, weights.meta), folder / "ours", case.to)
    again, answer = case.again(folder / "ours")
    images = pictures(weights.config.image_size)
    return deviation(ours(images), answer(again.eval(), images))


def drawn(model: nn.Module) -> nn.Module:
    """Draw every parameter so that no part is trivial and activations keep their size."""
    generator = torch.Generator().manual_seed(0)
    for name, one in model.named_parameters():
        noise = torch.randn(one.shape, generator=generator)
        is_scale = any(part in name for part in SCALES) or (one.ndim == 1 and name.endswith("weight"))
        if is_scale:
            one.copy_(1 + 0.3 * noise)
        elif one.ndim < 2 or any(part in name for part in TABLES):
            one.copy_(0.3 * noise)
        else:
            one.copy_(noise * (len(one) / one.numel()) ** 0.5)
    return model


def pictures(size: int) -> Tensor:
    """Return random images `[2, 3, size, size]` in [-1, 1], float32."""
    return torch.rand(BATCH, 3, size, size, generator=torch.Generator().manual_seed(size)) * 2 - 1


def deviation(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, in standard deviations of the expected values."""
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.std())


def listed(values: list[float | None]) -> str:
    """Return the values of both image sizes."""
    return " / ".join("-" if value is None else f"{value:.1e}" for value in values)


def call(model: nn.Module, images: Tensor) -> Tensor:
    """Return what the model returns."""
    return model(images)


# timm


TIMM: dict[str, tuple[str, int, dict[str, Any]]] = {
    "DINOv2 S/14": ("vit_small_patch14_dinov2.lvd142m", 224, {}),
    "DINOv2 S/14, registers": ("vit_small_patch14_reg4_dinov2.lvd142m", 224, {}),
    "DINOv3 S/16": ("vit_small_patch16_dinov3.lvd1689m", 224, {}),
    "DINOv3 S/16, biases": ("vit_small_patch16_dinov3_qkvb.lvd1689m", 224, {"global_pool": "token"}),
    "DINOv3 S+/16": ("vit_small_plus_patch16_dinov3.lvd1689m", 224, {}),
    "SigLIP 2 B/16": ("vit_base_patch16_siglip_224.v2_webli", 256, {}),
    "CLIP B/32, quick GELU": ("vit_base_patch32_clip_quickgelu_224.openai", 256, {}),
    "CLIP B/32, erf GELU": ("vit_base_patch32_clip_224.laion2b", 256, {}),
    "MAE B/16, mean of patches": ("vit_base_patch16_224.mae", 256, {"global_pool": "avg"}),
    "DeiT III S/16": ("deit3_small_patch16_224.fb_in1k", 256, {}),
    "EVA-02 Ti/14": ("eva02_tiny_patch14_336.mim_in22k_ft_in1k", 224, {}),
    "EVA-02 S/14": ("eva02_small_patch14_336.mim_in22k_ft_in1k", 224, {}),
    "EVA-02 B/14": ("eva02_base_patch14_224.mim_in22k", 252, {}),
    "BEiT v2 B/16": ("beitv2_base_patch16_224.in1k_ft_in1k", 256, {}),
    "AugReg S/16": ("vit_small_patch16_224.augreg_in1k", 256, {}),
}


def of_timm() -> Iterator[Case]:
    """Networks with a head of 1,000 classes, as timm saves them for its hub."""
    for network, (name, other, more) in TIMM.items():
        native = timm.get_pretrained_cfg(name).input_size[-1]
        make = partial(timm.create_model, name, num_classes=CLASSES, **more)
        yield Case(
            "timm", network, make, save_timm, (native, other), timm_features, call, timm_at,
            lambda one: not one.startswith("head."), "timm", timm_again,
        )  # fmt: skip


def save_timm(model: nn.Module, folder: Path) -> None:
    """Write what timm writes for its hub: weights, config.json and a model card with the licence."""
    from timm.models import _hub

    timm.models.save_for_hf(model, folder, safe_serialization=True)
    card = {"license": "other", "license_name": model.pretrained_cfg["license"]}
    if not card["license_name"].startswith("dinov3"):
        card = {"license": card["license_name"]}
    (folder / "README.md").write_text(_hub.generate_readme(card, model.pretrained_cfg["architecture"]))


def timm_features(model: nn.Module, images: Tensor) -> Tensor:
    """Return the pooled features before the head."""
    return model.forward_head(model.forward_features(images), pre_logits=True)


def timm_at(model: nn.Module, size: int) -> nn.Module:
    """Return a copy at another image size, with timm's own interpolation."""
    if model.patch_embed.img_size[0] != size:
        model = copy.deepcopy(model)
        model.set_input_size(img_size=size)
    return model


def timm_again(folder: Path) -> tuple[nn.Module, Answer]:
    """Open a folder with timm, whose loading is strict."""
    model = timm.create_model(f"local-dir:{folder}", pretrained=True)
    return model, call


# transformers


SMALL = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6}
BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
BEIT = {**BASE, "use_relative_position_bias": True, "layer_norm_eps": 1e-6, "image_size": 224}
SMALL_DINOV3 = {**SMALL, "intermediate_size": 1536, "num_register_tokens": 4, "layerscale_value": 1e-5}
CLIP = {**BASE, "image_size": 224, "patch_size": 32}
LABELS = {"num_labels": CLASSES}
# Classes, the configuration, its arguments, and the two image sizes.
TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any], tuple[int, int]]] = {
    "DINOv2 S/14": ("Dinov2Model", "Dinov2Config", {**SMALL, "image_size": 518}, (518, 224)),
    "DINOv2 S/14, head": (
        "Dinov2ForImageClassification", "Dinov2Config", {**SMALL, "image_size": 518, **LABELS}, (518, 224),
    ),
    "DINOv2 S/14, registers, head": (
        "Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig",
        {**SMALL, "image_size": 518, "patch_size": 14, **LABELS}, (518, 224),
    ),
    "DINOv3 S/16": ("DINOv3ViTModel", "DINOv3ViTConfig", {**SMALL_DINOV3, "image_size": 224}, (224, 256)),
    "DINOv3 S+/16": (
        "DINOv3ViTModel", "DINOv3ViTConfig",
        {**SMALL_DINOV3, "image_size": 224, "use_gated_mlp": True, "hidden_act": "silu"}, (224, 256),
    ),
    "SigLIP B/16": ("SiglipVisionModel", "SiglipVisionConfig", {**BASE, "image_size": 224}, (224, 256)),
    "CLIP B/32, quick GELU": ("CLIPVisionModel", "CLIPVisionConfig", CLIP, (224, 256)),
    "CLIP B/32, erf GELU": (
        "CLIPVisionModel", "CLIPVisionConfig", {**CLIP, "hidden_act": "gelu"}, (224, 256),
    ),
    "MAE B/16, class token": ("ViTMAEModel", "ViTMAEConfig", {**BASE, "mask_ratio": 0.0}, (224, 256)),
    "BEiT v2 B/16": ("BeitForImageClassification", "BeitConfig", {**BEIT, **LABELS}, (224, 256)),
    "AugReg B/16": ("ViTForImageClassification", "ViTConfig", {**BASE, **LABELS}, (224, 256)),
}  # fmt: skip


def of_transformers() -> Iterator[Case]:
    """Networks of today's transformers, as `save_pretrained` writes them."""
    for network, (kind, configuration, values, sizes) in TRANSFORMERS.items():
        of_kind, of_config = getattr(transformers, kind), getattr(transformers, configuration)
        has_head = "num_labels" in values
        yield Case(
            "transformers", network, partial(of_kind, of_config(**values)), of_kind.save_pretrained, sizes,
            None if has_head else hf_features, hf_logits if has_head else None, None,
            lambda one: "mask_token" not in one and not one.startswith("classifier."),
            "hf", partial(hf_again, of_kind),
        )  # fmt: skip


def hf_output(model: nn.Module, images: Tensor) -> Any:
    """Return what the model returns, at any image size."""
    name, more = type(model).__name__, {}
    if name.startswith(("Siglip", "CLIP", "ViT")):
        more["interpolate_pos_encoding"] = True
    if name.startswith("ViTMAE"):  # with this noise the patches keep their order
        more["noise"] = torch.arange((images.shape[-1] // 16) ** 2).expand(len(images), -1)
    return model(pixel_values=images, **more)


def hf_features(model: nn.Module, images: Tensor) -> Tensor:
    """Return the pooled output, or the class token of a body that pools nothing."""
    output = hf_output(model, images)
    pooled = getattr(output, "pooler_output", None)
    return output.last_hidden_state[:, 0] if pooled is None else pooled


def hf_logits(model: nn.Module, images: Tensor) -> Tensor:
    """Return the logits."""
    return hf_output(model, images).logits


def hf_again(kind: Any, folder: Path) -> tuple[nn.Module, Answer]:
    """Open a folder with the class that wrote the first one; nothing may be missing or left over."""
    more = {}
    if kind is transformers.ViTMAEModel:  # its encoder is a ViT
        kind, more = transformers.ViTModel, {"add_pooling_layer": False}
    model, told = kind.from_pretrained(folder, output_loading_info=True, **more)
    assert not any(told.values()), told
    return model, hf_logits if hasattr(model, "classifier") else hf_features


# the authors' repositories


AUTHORS = {
    "DINOv2 S/14": ("dinov2", "dinov2_vits14", (518, 224)),
    "DINOv2 S/14, registers": ("dinov2", "dinov2_vits14_reg", (518, 224)),
    "DINOv3 S/16": ("dinov3", "dinov3_vits16", (224, 256)),
    "DINOv3 S+/16": ("dinov3", "dinov3_vits16plus", (224, 256)),
    "DeiT III S/16": ("deit", "", (224, 256)),
}


def of_authors(clones: Path | None) -> Iterator[Case]:
    """Networks of the authors' programs, as state dicts; they are written for timm."""
    os.environ["XFORMERS_DISABLED"] = "1"
    for network, (clone, name, sizes) in AUTHORS.items():
        if clones is None or not (clones / clone).is_dir():
            continue
        sys.path.append(str(clones / clone))
        headed = clone == "deit"
        unused = ("mask_token", "head.") if headed else ("mask_token",)
        yield Case(
            "authors", network, deit if headed else partial(of_hub, clone, name), save_state, sizes,
            None if headed else call, call if headed else None, deit_at if headed else None,
            lambda one, unused=unused: not one.startswith(unused), "timm", timm_again,
        )  # fmt: skip


def of_hub(clone: str, name: str) -> nn.Module:
    """Build a network of DINOv2 or DINOv3 with the authors' function for torch.hub."""
    return getattr(importlib.import_module(f"{clone}.hub.backbones"), name)(pretrained=False)


def deit(size: int = 224) -> nn.Module:
    """Build DeiT III from its authors' module."""
    return importlib.import_module("models_v2").deit_small_patch16_LS(img_size=size)


def deit_at(model: nn.Module, size: int) -> nn.Module:
    """Return the network at another size; its table is interpolated as the authors' main.py does."""
    moved, state = deit(size).eval(), model.state_dict()
    table = state["pos_embed"]
    side, wanted = (round(one.shape[1] ** 0.5) for one in (table, moved.pos_embed))
    if side != wanted:
        grid = table.unflatten(1, (side, side)).permute(0, 3, 1, 2)
        grid = nn.functional.interpolate(grid, (wanted, wanted), mode="bicubic", align_corners=False)
        state["pos_embed"] = grid.flatten(2).transpose(1, 2)
    moved.load_state_dict(state)
    return moved


def save_state(model: nn.Module, folder: Path) -> None:
    """Write a state dict under the key `model`, as the authors publish it."""
    folder.mkdir()
    torch.save({"model": model.state_dict()}, folder / "pytorch_model.bin")


# open_clip


def of_open_clip() -> Iterator[Case]:
    """CLIP's image tower in open_clip's files of both towers; written for timm."""
    if not find_spec("open_clip"):
        return
    open_clip = importlib.import_module("open_clip")
    hub = importlib.import_module("open_clip.push_to_hf_hub")

    def save(name: str, model: nn.Module, folder: Path) -> None:
        folder.mkdir()
        from safetensors.torch import save_file

        save_file({key: one.contiguous() for key, one in model.state_dict().items()},
                  folder / "open_clip_model.safetensors")  # fmt: skip
        hub.save_config_for_hf(model, folder / "open_clip_config.json", open_clip.get_model_config(name))

    def at(name: str, model: nn.Module, size: int) -> nn.Module:
        moved, state = open_clip.create_model(name, force_image_size=size).eval(), model.state_dict()
        open_clip.model.resize_pos_embed(state, moved)
        moved.load_state_dict(state)
        return moved

    for network, name in {
        "CLIP B/32, quick GELU": "ViT-B-32-quickgelu",
        "CLIP B/32, erf GELU": "ViT-B-32",
    }.items():
        yield Case(
            "open_clip", network, partial(open_clip.create_model, name), partial(save, name), (224, 256),
            open_clip_features, None, partial(at, name),
            lambda key: key.startswith("visual.") and key != "visual.proj", "timm", timm_again,
        )  # fmt: skip


def open_clip_features(model: nn.Module, images: Tensor) -> Tensor:
    """Return the class token after the last norm, without the projection to text."""
    tower = copy.copy(model.visual)
    tower._parameters = {**tower._parameters, "proj": None}
    return tower(images)


if __name__ == "__main__":
    main()
