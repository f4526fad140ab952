"""Adapters of a LoRA run for peft, on transformers' ViT."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from vitctl.engine.journal import ADAPTERS, name_of, tensor_files
from vitctl.errors import CheckpointError
from vitctl.export.export import ExportRequest, Written
from vitctl.export.graph import Raw
from vitctl.export.proof import Opened, answering, run_model
from vitctl.export.weights_folder import model_card
from vitctl.jobs.inputs.weights import FoundWeights, loaded_model
from vitctl.models.build import build, check_state
from vitctl.models.lora import adapt, factors_of, merged
from vitctl.models.variants import LORA_TARGETS
from vitctl.models.weights import huggingface
from vitctl.models.weights.containers import read_json, read_tensors, save_tensors
from vitctl.models.weights.download import CONFIG
from vitctl.models.weights.layouts import rule_for
from vitctl.models.weights.weights_file import Weights, program_files, tempered
from vitctl.system.files import write_json, write_text

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX, _HEAD = "base_model.model", "classifier"


def write_peft(request: ExportRequest, folder: Path) -> Written:
    """Write adapters and head, their configuration, transformers' JSON files, and a README.md.

    Raises CheckpointError without adapters, or if transformers' ViT or peft cannot hold what was trained.
    """
    found = request.found
    config, lora, adapters = found.weights.config, found.weights.meta.get("lora"), _adapters(found)
    if not lora or not adapters:
        raise CheckpointError(
            found.path,
            "has no adapters beside it, which a run of `vitctl finetune --set lora.rank=8` keeps",
            "export these weights with --to timm, hf or onnx",
        )
    if lora["from_image_size"] != config.image_size:
        raise CheckpointError(
            found.path,
            f"its positions were resized from {lora['from_image_size']} to {config.image_size} "
            "pixels, and peft stores adapters and head alone",
            "export the merged weights with --to timm, hf or onnx",
        )
    if problems := "; ".join(huggingface.LAYOUT.misfits(config)):
        raise CheckpointError(
            found.path,
            f"Hugging Face ViT cannot hold this model, nor peft its adapters: {problems}",
            "export the merged weights with --to timm or onnx",
        )
    whole = build(config, device="meta")
    adapt(whole, lora["targets"], lora["blocks"], rank=lora["rank"], alpha=0.0, dropout=0.0, seed=0)
    check_state(adapters, {name: one for name, one in whole.state_dict().items() if ".adapters." in name})
    head = tempered(found.weights).state
    tensors = {f"{_PREFIX}.{_HEAD}.{kind}": head[f"head.{kind}"] for kind in ("weight", "bias")}
    for name, _, pair in _modules(adapters):
        for letter, tensor in zip("AB", pair, strict=True):
            tensors[f"{_PREFIX}.{name}.lora_{letter}.weight"] = tensor.clone()
    file = folder / _WEIGHTS
    save_tensors(tensors, file, {"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "r": lora["rank"],
        "lora_alpha": lora["alpha"] or lora["rank"],
        "lora_dropout": lora["dropout"],
        "target_modules": [name for name, _, _ in _modules(adapters)],
        "modules_to_save": [_HEAD],
        "bias": "none",
        "inference_mode": True,
    }
    write_json(folder / _CONFIG, settings, sort_keys=True)
    for name, value in program_files(huggingface.LAYOUT, found.weights).items():
        write_json(folder / name, value, sort_keys=True)
    notes = (
        f"the start weights, SHA-256 {lora['from_sha256']}, are not in it: write them with `vitctl export "
        f"--to hf`, and open them with config=transformers.AutoConfig.from_pretrained(FOLDER), which has the "
        f"classes, and ignore_mismatched_sizes=True",
        *request.resizing_note,
    )
    write_text(folder / "README.md", model_card(request, notes))
    return Written(file, notes[:1])


def open_peft(request: ExportRequest, path: Path) -> Opened:
    """Return the model with the adapters and head read back in place of the merged ones."""
    found, theirs = request.found, read_tensors(path)
    config = json.loads((path.parent / _CONFIG).read_text())
    lora, state = found.weights.meta["lora"], dict(found.weights.state)
    for layer, pairs in factors_of(_adapters(found)).items():
        state[layer] = merged(state[layer].double(), pairs, -(lora["alpha"] or lora["rank"]) / lora["rank"])
    for name, (layer, target), _ in _modules(_adapters(found)):
        a, b = (theirs[f"{_PREFIX}.{name}.lora_{letter}.weight"] for letter in "AB")
        if name.startswith(huggingface.in_memory("vit.encoder.layer.")):
            state[layer] = merged(state[layer], {target: (a, b)}, config["lora_alpha"] / config["r"])
    state |= {f"head.{kind}": theirs[f"{_PREFIX}.{_HEAD}.{kind}"] for kind in ("weight", "bias")}
    weights = Weights(found.weights.config, state, found.weights.meta)
    model, _ = loaded_model(replace(found, weights=weights), 0, torch.float32)
    run = run_model(Raw(model.eval(), found.weights.meta))
    told = read_json(path.parent / CONFIG)
    loss = "sigmoid" if told["problem_type"] == "multi_label_classification" else "softmax"
    names = [*told["id2label"].values()] if found.weights.meta.get("class_names") else None
    return Opened(run, answering({"loss": loss, "class_names": names}, 1.0))


def _adapters(found: FoundWeights) -> dict[str, Tensor]:
    path = Path(found.path)
    file = tensor_files(path.parent).get(ADAPTERS.get(name_of(path.name), ""))
    return read_tensors(file) if file is not None else {}


def _modules(
    adapters: Mapping[str, Tensor],
) -> Iterator[tuple[str, tuple[str, str], tuple[Tensor, Tensor]]]:
    """Yield a module name of transformers' ViT, our weight and target, and A and B.

    Each comes twice, because transformers 4 and 5 name modules differently in memory.
    """
    for layer, pairs in factors_of(adapters).items():
        rule = rule_for(huggingface.TABLE, layer)
        assert rule is not None, layer
        for target, pair in pairs.items():
            in_files = rule.theirs[LORA_TARGETS[target][1]].removesuffix(".weight")
            for name in (in_files, huggingface.in_memory(f"{in_files}.").rstrip(".")):
                yield name, (layer, target), pair
