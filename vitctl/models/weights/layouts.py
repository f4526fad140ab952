"""Layouts of weights: two-way rules between our tensors and other programs', and shape inference for a ViT.

Reading what was written gives the same bits. Each program's module has its rows: how files are recognised,
name rules for both directions, and what is documented or assumed if a file does not record it. `LAYOUTS` in
weights_file.py lists the rows.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor

from vitctl.errors import CheckpointError
from vitctl.models.variants import VARIANTS, Config, ViTConfig
from vitctl.models.weights.meta import KEYS
from vitctl.system.text import one_line, same_name

Tensors = dict[str, Tensor]
_LISTED = 4


@dataclass(frozen=True)
class MemoryLayout:
    """Two memory layouts of the same numbers: `read` turns theirs into ours, `write` ours into theirs."""

    read: Callable[[Tensor], Tensor]
    write: Callable[[Tensor], Tensor]


SAME = MemoryLayout(lambda theirs: theirs, lambda ours: ours)
# [in, out] and [out, in]
DENSE = MemoryLayout(lambda theirs: theirs.permute(1, 0), lambda ours: ours.permute(1, 0))
# HWIO and OIHW
CONV = MemoryLayout(lambda theirs: theirs.permute(3, 2, 0, 1), lambda ours: ours.permute(2, 3, 1, 0))


@dataclass(frozen=True)
class Rule:
    """The tensors of theirs that hold one tensor of ours, stacked along its rows if there are several.

    In a table, `{i}` and `{j}` in names are indices. `shares`: the parts of the rows in each of theirs, by
    default one.
    """

    theirs: tuple[str, ...]
    layout: MemoryLayout = SAME
    shares: tuple[int, ...] = ()

    def read(self, tensors: Mapping[str, Tensor]) -> Tensor:
        parts = [self.layout.read(tensors[name]) for name in self.theirs]
        for name, part in zip(self.theirs, parts, strict=True):
            if parts[1:] and not holds_numbers(part):  # stacking would convert them
                held = str(part.dtype).removeprefix("torch.")
                raise CheckpointError(f"{name} holds {held}, should hold floating-point numbers")
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous()

    def write(self, tensor: Tensor) -> Tensors:
        """Return their tensors, contiguous; each in separate memory, as safetensors requires."""
        shares = self.shares or (1,) * len(self.theirs)
        parts = torch.split(tensor, [len(tensor) * share // sum(shares) for share in shares])
        return {
            name: self.layout.write(part).clone(memory_format=torch.contiguous_format)
            for name, part in zip(self.theirs, parts, strict=True)
        }


def holds_numbers(tensor: Tensor) -> bool:
    """Return whether a tensor has floating-point numbers of 16 bits or more."""
    return tensor.is_floating_point() and tensor.itemsize > 1


Table = dict[str, Rule]


def entry(*theirs: str, layout: MemoryLayout = SAME, shares: tuple[int, ...] = ()) -> Rule:
    return Rule(theirs, layout, shares)


def pair(ours: str, *theirs: str, shares: tuple[int, ...] = ()) -> Table:
    """Return the rows of a module whose weight and bias have the same layout on both sides."""
    return {
        f"{ours}.{kind}": entry(*(f"{name}.{kind}" for name in theirs), shares=shares)
        for kind in ("weight", "bias")
    }


def block(layer: str, norm1: str, out: str, norm2: str, inner: tuple[str, ...], outer: str) -> Table:
    """Return the rows that every program's block has: norms, the output of attention, and the MLP.

    Names are those of one module each, after `layer`; `inner` is the MLP's first matrix, or gate and hidden.
    """
    ours = {"norm1": (norm1,), "attention.out": (out,), "norm2": (norm2,), "mlp.fc1": inner}
    rows: Table = {}
    for name, theirs in {**ours, "mlp.fc2": (outer,)}.items():
        rows |= pair(f"blocks.{{i}}.{name}", *(f"{layer}.{one}" for one in theirs))
    return rows


def rule_for(table: Table, ours: str) -> Rule | None:
    """Return the rule for our tensor `ours`, or None if the table has no place for it.

    The integers between the dots of a name are its indices, `{i}` and `{j}` from 0, `{i1}` and `{j1}` from 1.
    """
    indices = dict(zip("ij", [int(part) for part in ours.split(".") if part.isdigit()], strict=False))
    letters = iter("ij")
    row = table.get(re.sub(r"(?<=\.)\d+(?=\.|$)", lambda _: f"{{{next(letters)}}}", ours))
    if row is None:
        return None
    from_one = {f"{letter}1": number + 1 for letter, number in indices.items()}
    return replace(row, theirs=tuple(name.format(**indices, **from_one) for name in row.theirs))


def rules_for(table: Table, names: Iterable[str]) -> Table:
    """Return the rules for all our tensors `names`. Raises CheckpointError naming those without a place."""
    rules = {name: rule_for(table, name) for name in names}
    if lost := [name for name, rule in rules.items() if rule is None]:
        raise CheckpointError("unexpected tensors", listed(lost))
    return {name: rule for name, rule in rules.items() if rule is not None}


def to_theirs(state: Mapping[str, Tensor], rules: Table) -> Tensors:
    theirs: Tensors = {}
    for ours, rule in rules.items():
        theirs |= rule.write(state[ours])
    return theirs


def to_ours(tensors: Tensors, rules: Table, model: Mapping[str, Tensor]) -> Tensors:
    """Return their `tensors` in our names and layouts, for the shapes of `model`, a state on the meta device.

    Raises one CheckpointError that groups what is missing, unexpected or of the wrong shape, in their names.
    """
    # The same rules backwards give every name and shape that the file must have.
    wanted = to_theirs(model, rules)
    refuse("the tensors do not make a whole model", mismatches(tensors, wanted, "expected"))
    return {ours: rule.read(tensors) for ours, rule in rules.items()}


def stacked(tensors: Tensors, whole: str, parts: tuple[str, ...]) -> Tensors:
    """Stack tensors with the name endings `parts` along their rows, as one with the ending `whole`."""
    found = dict(tensors)
    for stem in [name.removesuffix(parts[0]) for name in tensors if name.endswith(parts[0])]:
        pieces = [found[stem + part] for part in parts if stem + part in found]
        fit = all(one.dim() and one.shape[1:] == pieces[0].shape[1:] for one in pieces)
        if fit and len(pieces) == len(parts):
            found[stem + whole] = torch.cat(pieces)
            found = {name: one for name, one in found.items() if name not in [stem + part for part in parts]}
    return found


def renamed(tensors: Tensors, names: Mapping[str, str], dropped: str = r"(?!)") -> Tensors:
    """Rename tensors by patterns and replacements, and drop new names that match `dropped`."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        for pattern, other in names.items():
            name = re.sub(pattern, other, name)
        if not re.search(dropped, name):
            found[name] = tensor
    return found


def mismatches(
    tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], should: str
) -> dict[str, list[str]]:
    """Return kind of problem -> names, compared with `wanted`; `should` precedes a wanted shape."""
    return {
        "missing": [name for name in wanted if name not in tensors],
        "unexpected": [name for name in tensors if name not in wanted],
        "wrong shape": [
            f"{name} is {list(tensors[name].shape)}, {should} {list(tensor.shape)}"
            for name, tensor in wanted.items()
            if name in tensors and tensors[name].shape != tensor.shape
        ],
    }


def refuse(heading: str, problems: Mapping[str, list[str]]) -> None:
    """Raise a one-line CheckpointError with each kind of problem and the first few of each, if any."""
    if found := [f"{kind}: {listed(names)}" for kind, names in problems.items() if names]:
        raise CheckpointError(heading, "; ".join(found))


def listed(names: list[str]) -> str:
    more = f", and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(map(one_line, names[:_LISTED])) + more


# Our name -> the tensor in our layout, or None.
View = Callable[[str], Tensor | None]
Json = Mapping[str, Any]
_HEAD_CHANNELS = 64
_LAYER_SCALE = 1e-5  # initial value, replaced by trained scales
# ViT fields that not every program has. `bool` in `holds` means any value.
_DECIDING = (
    "classifier", "norm_at", "position_embedding", "position_at", "gelu", "norm_pre", "patch_bias",
    "position_class_row", "registers", "layer_scale", "mlp", "mlp_norm", "qkv_bias", "rotary",
    "token_blocks",
)  # fmt: skip
# Published sizes whose heads do not have 64 channels, by hidden size and depth.
_UNUSUAL_HEADS = {(1152, 27): 16, (1408, 40): 16, (1536, 40): 16, (1664, 48): 16}
# With a SwiGLU these sizes have different heads: DINOv3's H+ and 7B, DINOv2's g.
_GATED_HEADS = {(1280, 32): 20, (1536, 40): 24, (4096, 40): 32}
# A layout's eval_resize is the share of the side that a centre crop keeps. With SQUASH images are
# squashed to the image size, which metadata record as eval_resize 0.
SQUASH = math.inf
_STORED = ("mean", "std", "eval_method", "resample", "position_resize")
# timm's and open_clip's words -> our eval_resample, and Pillow's numbers.
RESAMPLE = {
    "nearest": "nearest", "lanczos": "lanczos", "bilinear": "bilinear_antialias",
    "bicubic": "bicubic_antialias", "box": "box", "hamming": "hamming",
}  # fmt: skip


@dataclass(frozen=True)
class Beside:
    """The context of the tensors: file name, number of heads if given, JSON files (empty if absent)."""

    name: str = ""
    num_heads: int | None = None
    config: Json = field(default_factory=dict)
    preprocessor: Json = field(default_factory=dict)
    open_clip: Json = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class WeightsLayout:
    """One way of storing weights.

    Args:
        name: in `meta["format"]` and --to.
        title: for messages.
        container: kind of file.
        mark: a tensor that each such file has; a file belongs to the first layout whose mark it has.
        absent: a tensor that no such file has.
        table: name rules, by number of heads.
        describe: configuration and metadata of a file.
        tidy: brings every spelling of the names to the one that `table` writes.
        spell: brings what `table` writes to the spelling of the program's class for a configuration.
        documented: values that hold for every such file, which records none of them.
        assumed: likely values for what a file does not record.
        lacks: for a configuration, (whether it needs something that the layout lacks, in words) pairs.
        of: the family of its models.
        holds: values of a ViT's fields that it can hold besides the paper's.
        needs: values that it can hold instead of the paper's; `True` means any but zero.
        notes: what a reader has to know.
        sidecars: JSON files that belong to the weights.
    """

    name: str
    title: str
    container: Literal["safetensors", "npz"] = "safetensors"
    mark: str
    absent: str = ""
    table: Callable[[int], Table]
    describe: Callable[["WeightsLayout", View, Tensors, Beside], tuple[Config, dict[str, Any]]]
    tidy: Callable[[Tensors], Tensors] = lambda tensors: tensors
    spell: Callable[[Tensors, Any], Tensors] = lambda tensors, _config: tensors
    documented: Json
    assumed: Json = field(default_factory=dict)
    lacks: Callable[[Any], Iterable[tuple[object, str]]] = lambda _config: ()
    of: type[Config] = ViTConfig
    holds: Json = field(default_factory=dict)
    needs: Json = field(default_factory=dict)
    notes: Callable[[Any, Json], Iterator[str]]
    sidecars: Callable[[Any, Json], dict[str, dict[str, Any]]] = lambda _config, _meta: {}

    def held(self, found: Json) -> dict[str, Any]:
        """Return the ViT fields that this layout can hold; the others keep the paper's values."""
        return {
            name: value
            for name, value in found.items()
            if name not in _DECIDING or {bool, value} & set(self.holds.get(name, ())) or name in self.needs
        }

    def misfits(self, config: Config) -> list[str]:
        """Return what the layout cannot hold of a configuration.

        For a Vision Transformer that is everything that is not the paper's, except `holds` and `needs`.
        """
        if type(config) is not self.of:
            return [f"it has no place for a {type(config).__name__.removesuffix('Config')} model"]
        odd = [(name, value) for name, value in vars(config).items() if not self._fits(name, value)]
        return [
            *(f"it has no {name} {value!r}" for name, value in odd),
            *(words for is_there, words in self.lacks(config) if is_there),
        ]

    def _fits(self, name: str, value: Any) -> bool:
        if known := self.needs.get(name):
            return value in known or bool in known or (bool(value) and True in known)
        return value == getattr(ViTConfig, name, None) or name in self.held({name: value})

    def view(self, tensors: Tensors) -> View:
        table = self.table(1)

        def look(ours: str) -> Tensor | None:
            rule = rule_for(table, ours)
            if rule is None or not all(name in tensors for name in rule.theirs):
                return None
            try:
                return rule.read(tensors)
            except (IndexError, RuntimeError) as error:
                shapes = ", ".join(f"{name} {list(tensors[name].shape)}" for name in rule.theirs)
                raise CheckpointError(f"no {self.title} model has {shapes}") from error

        return look

    def settle(self, recorded: Json, beside: Beside) -> dict[str, Any]:
        """Return a file's values, and as `assumed` the names of those that nothing records.

        A `recorded` value of None is not recorded. An export's config.json lists what was assumed then.
        """
        found = {name: value for name, value in recorded.items() if value is not None}
        marked = ((beside.config.get("vitctl") or {}).get("preprocessing") or {}).get("assumed")
        marked = marked if isinstance(marked, list) else ()
        assumed = [name for name in KEYS if (name in self.assumed and name not in found) or name in marked]
        return {**self.documented, **self.assumed, **found, "assumed": assumed}

    def vit(
        self, shape: Json, recorded: Json, beside: Beside, class_names: Iterable[str] = (), **more: Any
    ) -> tuple[Config, dict[str, Any]]:
        """Return a ViT's configuration and metadata; the heads of a published shape count as recorded."""
        gated = shape["mlp"] == "swiglu"
        published = published_heads(shape["hidden_size"], shape["depth"], gated)
        values = self.settle({**recorded, "num_heads": recorded.get("num_heads") or published}, beside)
        config = ViTConfig(**self.held(shape), gelu=values["gelu"], norm_eps=values["norm_eps"], **more)
        meta = stored_meta(config, values, class_names)
        side, stored = meta["image_size"], config.image_size
        if side != stored and config.position_embedding != "none":
            text = f"images are made of {side} pixels, so the positions, of {stored} pixels, are resized"
            meta["remarks"] = [f"{text}; data.image_size = {stored} keeps them"]
        return config, meta


def stored_meta(config: Config, values: Json, class_names: Iterable[str] = ()) -> dict[str, Any]:
    names, size = list(map(same_name, class_names)), values.get("image_size") or config.image_size
    return {
        **{name: values[name] for name in _STORED},
        "image_size": size,
        "mean": list(values["mean"]),
        "std": list(values["std"]),
        "eval_resize": math.floor(size / values["eval_resize"]),
        **({"eval_share": values["eval_share"]} if values.get("eval_share") else {}),
        **({"class_names": names} if names else {}),
        **({"assumed": values["assumed"]} if values["assumed"] else {}),
    }


def vit_shape(view: View, num_heads: int | None, image_size: int | None) -> dict[str, Any]:
    """Return the fields of a ViTConfig that the tensors show.

    `num_heads` and `image_size` are hints from outside: few files record the heads, and the position table
    determines the size only up to the pixels that a grid of patches drops.
    """
    hidden_size, _, patch_size, _ = needed(view, "patch_embedding.weight", 4).shape
    inner, gated = (needed(view, f"blocks.0.mlp.{name}.weight", 2) for name in ("fc2", "fc1"))
    mlp_size = inner.shape[1]
    depth = next(index for index in count() if view(f"blocks.{index}.norm1.weight") is None)

    def has(ours: str) -> bool:
        return view(ours) is not None

    pre_logits, registers = view("pre_logits.weight"), view("registers")
    table, by_offset = view("position_embedding"), view("blocks.0.attention.relative_bias")
    prefix = int(has("class_token"))
    biases = {"qkv": has("blocks.0.attention.qkv.bias"), "qv": has("blocks.0.attention.qkv.query_bias")}
    found: dict[str, Any] = {
        "patch_size": patch_size,
        "hidden_size": hidden_size,
        "depth": depth,
        "mlp_size": mlp_size,
        "num_heads": num_heads or known_heads(hidden_size, depth, len(gated) == 2 * mlp_size),
        "num_classes": classes(view),
        "classifier": "attention" if has("pool.probe") else "token" if prefix else "gap",
        "representation_size": 0 if pre_logits is None else len(pre_logits),
        "position_embedding": "none" if table is None else "learned",
        "patch_bias": has("patch_embedding.bias"),
        "norm_pre": has("norm_pre.weight"),
        "registers": 0 if registers is None else registers.shape[1],
        "layer_scale": _LAYER_SCALE if has("blocks.0.scale1") else 0.0,
        "mlp": "swiglu" if len(gated) == 2 * mlp_size else "gelu",
        "mlp_norm": has("blocks.0.mlp.norm.weight"),
        "qkv_bias": next((kind for kind, there in biases.items() if there), "none"),
    }
    if by_offset is not None:
        side = (math.isqrt(max(0, len(by_offset) - 3)) + 1) // 2
        return found | {"position_embedding": "relative_bias", "image_size": side * patch_size}
    if (
        prefix
        and table is not None
        and table.dim() == 3
        and math.isqrt(table.shape[1]) ** 2 == table.shape[1]
    ):
        prefix, found["position_class_row"] = 0, False  # a square is a grid without a row for the class token
    return found | {"image_size": _image_size(table, prefix, patch_size, image_size)}


def check_sizes(file: str, stated: Json, shape: Json, names: Mapping[str, str]) -> None:
    """Compare what a JSON file states with the tensors, by key -> field of `shape`, see `vit_shape`.

    Raises CheckpointError if they differ.
    """
    for key, ours in names.items():
        if key in stated and ours in shape and stated[key] != shape[ours]:
            raise contradiction(file, f"{key} is {stated[key]}, and the tensors have {shape[ours]}")


def contradiction(file: str, words: str) -> CheckpointError:
    return CheckpointError(file, f"{words}; the file is incomplete, or not of this {file}")


def check_own(file: str, name: str, value: Any, ours: Any) -> None:
    """Raise CheckpointError if a value was edited and contradicts an export's vitctl key."""
    if value != ours:
        raise CheckpointError(
            file,
            f"{name} is {one_line(repr(value))}, and the vitctl key of config.json says "
            f"{one_line(repr(ours))}",
            "correct one of them",
        )


def needed(view: View, name: str, dimensions: int) -> Tensor:
    """Return a tensor that every model has, or raise CheckpointError."""
    tensor = view(name)
    if tensor is None or tensor.dim() != dimensions:
        shape = "missing" if tensor is None else f"of shape {list(tensor.shape)}"
        raise CheckpointError(
            f"the tensor for {name} is {shape}, so the model is unknown; is the file complete?"
        )
    return tensor


def classes(view: View) -> int:
    head = view("head.weight")
    return 0 if head is None else len(head)


def published_heads(hidden_size: int, depth: int, gated: bool = False) -> int | None:
    """Return the heads of the published model of this size, or None. `gated`: its MLP is a SwiGLU."""
    sizes = {(size["hidden_size"], size["depth"]): size["num_heads"] for size in reversed(VARIANTS.values())}
    known = {**_UNUSUAL_HEADS, **sizes, **(_GATED_HEADS if gated else {})}
    return known.get((hidden_size, depth))


def known_heads(hidden_size: int, depth: int, gated: bool = False) -> int:
    """Return the heads of the published model of this size, or one for every 64 channels.

    Raises CheckpointError if the channels are not a multiple of 64.
    """
    if heads := published_heads(hidden_size, depth, gated):
        return heads
    if hidden_size % _HEAD_CHANNELS:
        raise CheckpointError(
            "the file does not record the number of attention heads, and hidden size "
            f"{hidden_size} is not a multiple of {_HEAD_CHANNELS}",
            fix="add the model's config.json, or name the model with --model",
        )
    return hidden_size // _HEAD_CHANNELS


def _image_size(table: Tensor | None, prefix: int, patch_size: int, hint: int | None) -> int:
    if table is None:
        return hint or 224
    patches = table.shape[1] - prefix if table.dim() == 3 else -1
    side = math.isqrt(max(0, patches))
    if side**2 != patches:
        raise CheckpointError(
            f"the position embedding of shape {list(table.shape)} is not a square grid of patches and "
            f"{prefix} "
            f"class token"
        )
    return hint if hint and hint // patch_size == side else side * patch_size
