"""Reading and writing of weights: vitctl's files (safetensors with metadata), and other programs'."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitctl.errors import CheckpointError, VitctlError, refuse
from vitctl.models.build import build, check_state
from vitctl.models.variants import Config, from_dict, to_dict, variant
from vitctl.models.weights import google, huggingface, openclip, published, timm, torchvision
from vitctl.models.weights.containers import (
    ONE_SET,
    one_set,
    read_json,
    read_later,
    read_shapes,
    read_tensors,
    save_tensors,
)
from vitctl.models.weights.download import BESIDE, CONFIG, FILE_NAMES, NPZ, Fetch, locate
from vitctl.models.weights.download import fetch as download
from vitctl.models.weights.header import FORMAT, OWN_KEY, check_named, own_header
from vitctl.models.weights.json_keys import Known, checked
from vitctl.models.weights.later import Later, now
from vitctl.models.weights.layouts import (
    Beside,
    Tensors,
    WeightsLayout,
    contradiction,
    holds_numbers,
    listed,
    rules_for,
    to_ours,
    to_theirs,
)
from vitctl.models.weights.licence import stated_licence
from vitctl.models.weights.meta import activation_of, check_meta
from vitctl.system.files import atomic_write, write_json
from vitctl.system.text import count_text, one_line

# A file belongs to the first layout whose mark it has; the hybrid's tensors include a ViT's.
LAYOUTS: tuple[WeightsLayout, ...] = (
    google.HYBRID,
    google.BIT,
    google.VIT,
    *published.LAYOUTS,
    timm.LAYOUT,
    timm.POOLED,
    *huggingface.LAYOUTS,
    openclip.LAYOUT,
    torchvision.LAYOUT,
)
TARGETS = ("safetensors", "google", "timm", "hf", "torchvision")
_FILE_NAMES = {"safetensors": FILE_NAMES[0], "npz": NPZ}
_COUNTS = ("num_labels", "num_classes")  # of classes: transformers' and timm's
# The keys of any config.json that are used, mostly those that our exports record.
_OURS = Known(
    {
        "an object": ("vitctl", "vitctl.preprocessing"),
        "a whole number above 0": ("vitctl.num_heads",),
        "a whole number": _COUNTS,
        "a text": ("problem_type",),
    },
    harmless=r"[\s\S]*",  # the program's reader checks the others
)
# transformers' problem types. By its rule, a single logit is a sigmoid with either.
_SIGMOID, _SOFTMAX = "multi_label_classification", "single_label_classification"
# Keys that no other program records, and those that we record for programs without config.json.
_OURS_ALONE = ("exif_orientation", "temperature_sha256")
_OURS_INSTEAD = (
    "mean", "std", "eval_method", "eval_resize", "eval_share", "resample", "position_resize", "class_names",
)  # fmt: skip


@dataclass(frozen=True)
class Weights:
    """Contents of a weights file: the model's configuration, tensors on the CPU, and metadata."""

    config: Config
    state: dict[str, Tensor]
    meta: dict[str, Any]
    sha256: str = ""  # of `state`, if known

    @property
    def is_later(self) -> bool:
        return any(isinstance(tensor, Later) for tensor in self.state.values())

    @property
    def has_head(self) -> bool:
        """Whether there is a trained head; released ImageNet-21k files may have one of zeros."""
        return self.config.num_classes > 0 and self.meta.get("head") is None

    @cached_property
    def digest(self) -> str:
        return self.sha256 or weights_digest(self.state)


def weights_digest(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 (hex) over names, dtypes, shapes and bytes of all tensors, ordered by name."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = _numbers(state[name]).detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_weights(
    source: str | Path,
    *,
    model: str | None = None,
    num_heads: int | None = None,
    fetch: Fetch = download,
    later: bool = False,
    which: str = "",
) -> Weights:
    """Read weights of any layout, detecting it from the file.

    `config` and `meta` describe the numerics and pre-processing of the program that made them: `mean`, `std`,
    `image_size`, `eval_method`, `eval_resize`, `resample`, `position_resize`, `format`, and `class_names` if
    known. `meta["head"]` is "zero" if all weights of the head are 0.

    Args:
        source: a file, a folder, an https address, `hf://organisation/name[/file]` or `gs://bucket/path`.
        model: a name such as "H/14" for what shapes cannot show (the number of heads); its sizes must be the
            file's.
        num_heads: the number of heads alone, instead of a name.
        fetch: gets the file behind an https address.
        later: read tensors lazily, see `Later`, and leave the check for finite values to `check_numbers`.
        which: of another program's file with averaged and raw weights, see `one_set`.

    Raises CheckpointError: there is no such file, it is damaged, its tensors make no known model or are not
    finite, or what is stored with them is invalid. Raises RecipeError: there is no such model.
    """
    named = variant(model) if model else None
    path = locate(source, fetch)
    tensors = (read_later if later else read_tensors)(path)
    ours = own_header(path)
    try:
        if ours:
            if which and "://" in str(source):  # `choose_weights` handles the others
                raise CheckpointError(ONE_SET.format(which=which))
            weights = _of_vitctl(ours, tensors)
        else:
            weights = _of_another(path, getattr(named, "num_heads", num_heads), tensors, which)
            if "head.weight" in weights.state and not _numbers(weights.state["head.weight"]).any():
                weights.meta["head"] = "zero"
        check_named(weights.config, model or "")
        check_meta(weights.meta, weights.config)
        if not later:
            check_numbers(weights.state)
    except VitctlError as error:
        raise CheckpointError(path, error) from error
    return weights


def foreign_network(path: Path, model: str, which: str = "") -> tuple[Config, dict[str, Any]]:
    num_heads = getattr(variant(model), "num_heads", None) if model else None
    found = _of_another(path, num_heads, read_shapes(path), which)
    return found.config, found.meta


def _of_vitctl(header: dict[str, Any], state: Tensors) -> Weights:
    """Build from the header once it fits the tensors, so that a false size allocates nothing."""
    weights = Weights(from_dict(header["config"]), state, header["meta"])
    if (depth := getattr(weights.config, "depth", 0)) > len(state):
        raise CheckpointError(f"{count_text(len(state), 'tensor')} cannot make a model of depth {depth}")
    check_state(state, build(weights.config, device="meta").state_dict())
    return weights


def _of_another(path: Path, num_heads: int | None, tensors: Tensors, which: str) -> Weights:
    tensors, chosen, is_averaged = one_set(tensors, which)
    beside = Beside(path.name, num_heads, *(read_json(path.parent / name) for name in BESIDE))
    tensors, beside = openclip.without_trunk(tensors, beside)
    for row in LAYOUTS:
        tidy = row.tidy(tensors)
        if row.mark in tidy and row.absent not in tidy:
            break
    else:
        known = ", ".join(sorted({row.title for row in LAYOUTS}))
        raise CheckpointError(
            f"unknown weights format; its tensors are {listed(list(tensors))}; supported: vitctl, {known}"
        )
    told = checked(CONFIG, beside.config, _OURS)
    ours = told.get("vitctl", {})
    beside = replace(beside, num_heads=num_heads or ours.get("num_heads"))
    licence = stated_licence(path.parent, beside.config)
    config, meta = row.describe(row, row.view(tidy), tidy, beside)
    rows, problem = config.num_classes, told.get("problem_type")
    for name in _COUNTS:
        if rows and told.get(name, rows) != rows:
            raise contradiction(CONFIG, f"{name} is {told[name]}, and the head has {rows} classes")
    if rows and problem not in (None, _SIGMOID, _SOFTMAX):
        raise CheckpointError(
            CONFIG,
            f"problem_type {problem!r}, only {_SIGMOID} and {_SOFTMAX} are read, whose outputs are classes",
            "to train another head on its body, remove the key first",
        )
    model = build(config, device="meta").state_dict()
    table = row.table(getattr(config, "num_heads", 1))
    state = to_ours(tidy, rules_for(table, model), model)
    meta |= {"format": row.name, **licence}
    if problem == _SIGMOID:
        meta["loss"] = "sigmoid"
    said, is_alone = ours.get("preprocessing", {}), not {"model_type", "architecture"} & told.keys()
    kept = {name: said[name] for name in _OURS_ALONE + _OURS_INSTEAD * is_alone if name in said}
    if assumed := [name for name in meta.pop("assumed", ()) if name not in kept]:
        meta["assumed"] = assumed
    if chosen:
        meta |= {"remarks": [chosen, *meta.get("remarks", ())], "averaged": is_averaged}
    return Weights(config, state, meta | kept)


def _numbers(tensor: Tensor) -> Tensor:
    return now(tensor) if isinstance(tensor, Later) else tensor


def check_numbers(state: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if a tensor holds NaN or infinity, as after a training that diverged."""
    if odd := [name for name in sorted(state) if not holds_numbers(state[name])]:
        raise CheckpointError(
            f"{one_line(odd[0])} holds {str(state[odd[0]].dtype).removeprefix('torch.')}, should hold "
            f"floating-point numbers"
        )
    wrong = [name for name in sorted(state) if not _is_finite(_numbers(state[name]))]
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} of {len(state)} tensors hold NaN or infinities ({listed(wrong)}): the "
            "training diverged, or the file is damaged",
            fix="use an earlier checkpoint",
        )


def _is_finite(tensor: Tensor) -> bool:
    """Check in one pass without a copy: NaN and infinities reach the extremes, in the model's float32."""
    return not tensor.numel() or all(bool(extreme.float().isfinite()) for extreme in tensor.aminmax())


@dataclass(frozen=True)
class WrittenWeights:
    """The written files, the weights first, and notes for the reader."""

    files: tuple[Path, ...]
    notes: tuple[str, ...]


def save_weights(
    path: Path, model_or_state: nn.Module | Mapping[str, Tensor], config: Config, meta: Mapping[str, Any]
) -> Path:
    """Write vitctl's file atomically, and return its path. `meta` is JSON-able.

    Equal weights, configuration and metadata give byte-identical files.
    """
    state = model_or_state.state_dict() if isinstance(model_or_state, nn.Module) else model_or_state
    tensors = {name: state[name].detach().cpu().contiguous() for name in sorted(state)}
    with atomic_write(path) as aside:
        save_tensors(tensors, aside, own_metadata(config, meta))
    return path


def own_metadata(config: Config, meta: Mapping[str, Any]) -> dict[str, str]:
    """Return the header metadata of vitctl's file.

    A single key, because safetensors does not keep the order, and equal weights must give equal files.
    """
    header = {"format": FORMAT, "config": to_dict(config), "meta": dict(meta)}
    return {OWN_KEY: json.dumps(header, sort_keys=True, allow_nan=False)}


def tempered(weights: Weights) -> Weights:
    """Return weights with the head divided by their temperature, for programs without temperatures."""
    temperature = weights.meta.get("temperature") or 1.0
    head = {
        name: (tensor.double() / temperature).to(tensor.dtype)
        for name, tensor in weights.state.items()
        if name in ("head.weight", "head.bias")
    }
    meta = {name: value for name, value in weights.meta.items() if name != "temperature"}
    return weights if temperature == 1 else Weights(weights.config, {**weights.state, **head}, meta)


def write_weights(weights: Weights, path: str | Path, to: str) -> WrittenWeights:
    """Write `weights` for another program, each file atomically.

    Args:
        weights: of any model; numbers never change, except in a head with a temperature.
        path: a file that ends as the layout does (.npz for google, else .safetensors), or a folder, which is
            made and also receives the program's JSON files. `hf` is always a folder.
        to: one of `TARGETS`; "safetensors" is vitctl's file.

    Returns the files, and notes such as the arguments that the other program needs to compute the same.
    Raises CheckpointError in one line if the layout cannot hold the model.
    """
    path = Path(path)
    if to not in TARGETS:
        raise CheckpointError(path, f"unknown format {to!r}, known are {', '.join(TARGETS)}")
    if to == "safetensors":
        file = _target(path, "safetensors")
        return WrittenWeights((save_weights(file, weights.state, weights.config, weights.meta),), ())
    weights = tempered(weights)
    row, num_classes = _row(to, weights.config), weights.config.num_classes
    suffix = f".{row.container}"
    problems = row.misfits(weights.config)
    if row.container == "npz" and any(tensor.dtype == torch.bfloat16 for tensor in weights.state.values()):
        problems.append("NumPy has no bfloat16; convert the weights to float32 first")
    tensors: Tensors = {}
    if not problems:
        try:
            table = row.table(getattr(weights.config, "num_heads", 1))
            tensors = row.spell(to_theirs(weights.state, rules_for(table, weights.state)), weights.config)
        except CheckpointError as error:
            problems = [str(error)]
    sidecars: dict[str, dict[str, Any]] = {}
    if not problems:
        activation = activation_of(weights.meta, num_classes)
        if path.suffix != suffix:
            sidecars = program_files(row, weights)
        if activation != activation_of({}, num_classes) and (CONFIG not in sidecars or num_classes == 1):
            problems.append(
                f"nothing there says that its {count_text(num_classes, 'logit')} are a {activation}; write "
                f"to safetensors or onnx, or to a folder of timm or hf"
            )
    lacks = f"{row.title} cannot hold this model: {'; '.join(problems)}; safetensors holds every model"
    several = f"{row.title} is a folder with several files"
    refuse(
        CheckpointError,
        (problems, path, lacks),
        (to == "hf" and path.suffix == suffix, path, several, "give the name of a folder"),
    )
    file = _target(path, row.container)
    tensors = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    with atomic_write(file) as aside:
        if row.container == "npz":
            with aside.open("wb") as archive:  # given a path, NumPy would add its suffix
                arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in tensors.items()}
                np.savez(archive, **arrays)
        else:
            save_tensors(tensors, aside, {"format": "pt"})
    beside = [write_json(file.parent / name, value, sort_keys=True) for name, value in sidecars.items()]
    return WrittenWeights((file, *beside), tuple(row.notes(weights.config, weights.meta)))


def program_files(row: WeightsLayout, weights: Weights) -> dict[str, dict[str, Any]]:
    """Return the JSON files that a program reads with weights, including how it turns logits into answers."""
    files = row.sidecars(weights.config, weights.meta)
    if weights.config.num_classes and CONFIG in files:
        is_sigmoid = activation_of(weights.meta, weights.config.num_classes) == "sigmoid"
        files[CONFIG]["problem_type"] = _SIGMOID if is_sigmoid else _SOFTMAX
    return files


def _row(to: str, config: Config) -> WeightsLayout:
    """Return the layout of a program that can hold the model, or the one that lacks least."""
    rows = [row for row in LAYOUTS if row.name.split("-")[0] == to]
    of_family = [row for row in rows if row.of is type(config)] or rows
    return min(of_family, key=lambda row: len(row.misfits(config)))


def _target(path: Path, container: str) -> Path:
    file = path if path.suffix == f".{container}" else path / _FILE_NAMES[container]
    file.parent.mkdir(parents=True, exist_ok=True)
    return file
