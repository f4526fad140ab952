"""The table of published weights against timm's, and what its names mean."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file

from tests.cli.conftest import Vitctl, vitctl  # noqa: F401
from tests.matrix import few
from vitctl import VitctlError, load_recipe
from vitctl.jobs.inputs.checks import start_recipe
from vitctl.models.build import build
from vitctl.models.weights.names import PUBLISHED, find_published, full_address, named_network

# timm's names of what is listed under other programs' addresses.
SAME = {
    "dinov3_s16": "vit_small_patch16_dinov3_qkvb.lvd1689m",
    "dinov3_s16plus": "vit_small_plus_patch16_dinov3_qkvb.lvd1689m",
    "dinov3_b16": "vit_base_patch16_dinov3_qkvb.lvd1689m",
    "dinov3_l16": "vit_large_patch16_dinov3_qkvb.lvd1689m",
    "dinov3_h16plus": "vit_huge_plus_patch16_dinov3_qkvb.lvd1689m",
    "dinov2_s14": "vit_small_patch14_dinov2.lvd142m",
    "dinov2_b14": "vit_base_patch14_dinov2.lvd142m",
    "dinov2_l14": "vit_large_patch14_dinov2.lvd142m",
    "dinov2_g14": "vit_giant_patch14_dinov2.lvd142m",
    "dinov2_s14_reg": "vit_small_patch14_reg4_dinov2.lvd142m",
    "dinov2_b14_reg": "vit_base_patch14_reg4_dinov2.lvd142m",
    "dinov2_l14_reg": "vit_large_patch14_reg4_dinov2.lvd142m",
    "dinov2_g14_reg": "vit_giant_patch14_reg4_dinov2.lvd142m",
    "clip_b32_openai": "vit_base_patch32_clip_224.openai",
    "clip_b16_openai": "vit_base_patch16_clip_224.openai",
    "clip_l14_openai": "vit_large_patch14_clip_224.openai",
}


@pytest.mark.parametrize("name", few([*PUBLISHED], "dinov3_s16", "clip_b32_openai", "mae_b16"))
def test_published__is_what_timm_has(name: str) -> None:
    row = PUBLISHED[name]
    theirs = SAME.get(name) or row.address.removeprefix("hf://timm/")
    with torch.device("meta"):
        network = timm.create_model(theirs, num_classes=0)
    assert theirs in timm.list_pretrained(theirs.partition(".")[0] + "*")
    assert row.parameters == round(sum(one.numel() for one in network.parameters()) / 1e6, 1)
    if name not in SAME:
        config = network.pretrained_cfg
        assert row.licence.partition(",")[0].lower() == config["license"].replace("-license", " license")
        assert config["input_size"] == (3, row.image_size, row.image_size)


@pytest.mark.slow
def test_named_network__has_the_parameters_of_every_row() -> None:
    for name, row in PUBLISHED.items():
        config = named_network(row.address)
        assert config is not None and config.image_size == row.image_size
        parameters = sum(one.numel() for one in build(config, device="meta").parameters())
        assert round(parameters / 1e6, 1) == row.parameters, name
    for unknown in ("hf://me/mine", "https://a.org/mae.pth", "hf://timm/vit_pe_core_base_patch16_224.fb"):
        assert named_network(unknown) is None


RECIPES = {
    "dinov3_s16": "dinov2_finetune", "dinov2_g14_reg": "dinov2_finetune", "siglip2_so400m14": "siglip2_l16",
    "clip_b32_openai": "clip_b16", "clip_l14_laion": "clip_l14", "mae_h14": "mae_h14",
    "deit3_s16": "deit3_s16_finetune", "eva02_ti14": "eva02_ti14", "eva02_b14": "eva02_b14",
    "beit2_l16": "beit2_l16_in21k", "augreg_b16": "", "hf:google/vit-base-patch16-224": "",
}  # fmt: skip


def test_start_recipe__of_names_is_that_of_the_family_at_their_size() -> None:
    assert {name: start_recipe(name)[0] for name in RECIPES} == RECIPES
    assert start_recipe("hf:me/mine") == (
        "",
        "recipe finetune, the paper's: nothing tells the family of hf://me/mine",
    )


@pytest.mark.parametrize(
    ("architecture", "told", "recipe"),
    [
        ("vit_tiny_patch16_224", {"tag": "mae"}, "mae_b16"),
        ("vit_tiny_patch16_224", {"tag": "augreg_in21k"}, ""),
        ("vit_small_patch14_dinov2", {}, "dinov2_finetune"),
        ("deit3_small_patch16_224", {}, "deit3_s16_finetune"),
        ("beit_base_patch16_224", {"classes": 3}, "beit2_b16_in21k"),
        ("beit_base_patch16_224", {"classes": 0}, "beit2_b16"),
        ("eva02_tiny_patch14_224", {}, "eva02_ti14"),
        ("vit_base_patch16_clip_224", {}, "clip_b16"),
        ("vit_base_patch16_siglip_224", {}, "siglip2_b16"),
    ],
)
def test_start_recipe__of_files_is_told_by_their_structure(
    tmp_path: Path, architecture: str, told: dict[str, Any], recipe: str
) -> None:
    network = timm.create_model(architecture, num_classes=told.get("classes", 0), depth=1)
    tensors = {name: one.contiguous() for name, one in network.state_dict().items()}
    save_file(tensors, tmp_path / "a.safetensors")
    if tag := told.get("tag"):
        config = {"architecture": architecture, "num_classes": 0, "pretrained_cfg": {"tag": tag}}
        (tmp_path / "config.json").write_text(json.dumps(config | {"model_args": {"depth": 1}}))
    name, said = start_recipe(str(tmp_path / "a.safetensors"))
    assert name == recipe and said.startswith(f"recipe {recipe or 'finetune, the paper'}")


def test_start_recipe__of_runs_is_the_papers_unless_theirs_is_of_a_family(
    speck: Path, tmp_path: Path
) -> None:
    assert start_recipe(str(speck)) == start_recipe("newest") == ("", "")
    run = Path(shutil.copytree(speck, tmp_path / "run"))
    text = (run / "recipe.toml").read_text().partition("\n")[2]
    (run / "recipe.toml").write_text(f"# mae_b16, resolved; the origin of each value follows it\n{text}")
    assert start_recipe(str(run))[0] == "mae_b16"


def test_full_address__of_names_prefixes_and_all_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert full_address("dinov2_b14") == "hf://facebook/dinov2-base"
    assert full_address("timm:vit_tiny_patch16_224") == "hf://timm/vit_tiny_patch16_224"
    assert full_address("hf:google/vit-base-patch16-224") == "hf://google/vit-base-patch16-224"
    for same in (
        "timm:",
        "timm:a/b",
        "timm: x",
        "hf:a",
        "newest",
        "runs/a",
        "hf://a/b",
        "timm://a",
        "w.safetensors",
        "https://a.org/b",
    ):
        assert full_address(same) == same
    Path("dinov2_b14").mkdir()
    assert full_address("dinov2_b14") == "dinov2_b14"  # the user's own


def test_recipe__records_the_address(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text(
        'extends = "finetune"\n[weights]\nsource = "deit3_s16"\n[distillation]\nteacher = "timm:x"\n'
    )
    recipe = load_recipe(file).recipe
    assert recipe.weights.source == "hf://timm/deit3_small_patch16_224.fb_in22k_ft_in1k"
    assert recipe.distillation.teacher == "hf://timm/x"


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("dinov3_b1", "did you mean dinov3_b16?"),
        ("vit_tiny_patch16_224", "did you mean timm:vit_tiny_patch16_224?"),
        ("google/vit-base-patch16-224", "did you mean hf:google/vit-base-patch16-224?"),
        ("llama", "`vitctl weights` lists them"),
    ],
)
def test_find_published__an_unknown_name_says_what_was_meant(name: str, fix: str) -> None:
    with pytest.raises(VitctlError) as caught:
        find_published(name)
    assert caught.value.fix == fix


def test_weights__lists_all_and_shows_one(vitctl: Vitctl) -> None:  # noqa: F811
    assert all(name in vitctl("weights").out for name in PUBLISHED)
    said = vitctl("weights", "dinov3_s16").out
    row = PUBLISHED["dinov3_s16"]
    words = (
        row.address,
        row.page,
        "HF_TOKEN",
        row.feature,
        "DINOv3 License",
        "87.0 %",
        "--from dinov3_s16 --data",
    )
    assert [word for word in words if word not in " ".join(said.split())] == []
