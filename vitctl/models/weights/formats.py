"""The interface of a weights format, and how the shape of a ViT is inferred from its tensors."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from math import isqrt
from pathlib import Path
from typing import Any, Literal, TypedDict

from torch import Tensor

from vitctl.errors import CheckpointError
from vitctl.models.configs import Config, ViTConfig
from vitctl.models.variants import VARIANTS
from vitctl.models.weights.files import read_json
from vitctl.models.weights.rules import Table, Tensors, rule_for
from vitctl.models.weights.sources import BESIDE

# One tensor in our layout by our name, or None where the file has none.
View = Callable[[str], Tensor | None]
_HEAD_CHANNELS = 64
# Published sizes whose heads have another number of channels, by hidden size and depth.
_UNUSUAL_HEADS = {(1152, 27): 16, (1408, 40): 16, (1536, 40): 16, (1664, 48): 16}


class Numerics(TypedDict):
    """The two fields of a configuration that no tensor tells."""

    gelu: Literal["tanh", "erf"]
    norm_eps: float


@dataclass(frozen=True)
class Beside:
    """What is known besides the tensors: the file's name, and the JSON files in its folder (empty when
    absent).

    `num_heads` is what the user says.
    """

    name: str = ""
    num_heads: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    preprocessor: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path, num_heads: int | None = None) -> "Beside":
        """Read what lies beside `path`."""
        return cls(path.name, num_heads, *(read_json(path.parent / name) for name in BESIDE))

    @property
    def marked(self) -> Collection[str]:
        """What an export of ours records as assumed, in its config.json."""
        ours = self.config.get("vitctl", {}).get("preprocessing", {}).get("assumed")
        return ours if isinstance(ours, list) else ()


@dataclass(frozen=True)
class Described:
    """A model as recognised from its file: configuration, pre-processing and other metadata."""

    config: Config
    meta: dict[str, Any]


@dataclass(frozen=True)
class Format:
    """One way of storing weights.

    `title` is for messages. `marks` are tensors of which each file has one. `tidy` brings every spelling of
    the names to the one that `table` writes; `table` depends on the number of heads where the layout does.
    `describe` reads the configuration. For writing: `misfits` says what of a configuration the format cannot
    hold, `notes` what its reader needs as an argument, `sidecars` which JSON files belong beside the weights.
    """

    title: str
    container: Literal["safetensors", "npz"]
    marks: tuple[str, ...]
    tidy: Callable[[Tensors], Tensors]
    table: Callable[[int], Table]
    describe: Callable[[View, Tensors, Beside], Described]
    misfits: Callable[[Config], Iterator[str]]
    notes: Callable[[Config, Mapping[str, Any]], Iterator[str]]
    sidecars: Callable[[Config, Mapping[str, Any]], dict[str, dict[str, Any]]]

    def claims(self, names: Collection[str]) -> bool:
        """Return whether a file with tensors of these tidy names is of this format."""
        return any(mark in names for mark in self.marks)

    def view(self, tensors: Tensors) -> View:
        """Return the tidy `tensors` as seen by our names."""
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


def vit_shape(view: View, num_heads: int | None, image_size: int | None) -> dict[str, Any]:
    """Return the fields of a ViTConfig that tensors tell.

    `num_heads` and `image_size` are hints from outside, needed because few files tell the first, and because
    the position table tells the second only up to the pixels that a grid of patches drops.
    """
    hidden_size, _, patch_size, _ = needed(view, "patch_embedding.weight", 4).shape
    mlp_size, _ = needed(view, "blocks.0.mlp.fc1.weight", 2).shape
    depth = next(index for index in count() if view(f"blocks.{index}.norm1.weight") is None)
    pre_logits, class_token = view("pre_logits.weight"), view("class_token")
    table = view("position_embedding")
    return {
        "patch_size": patch_size,
        "hidden_size": hidden_size,
        "depth": depth,
        "mlp_size": mlp_size,
        "num_heads": num_heads or known_heads(hidden_size, depth),
        "num_classes": classes(view),
        "classifier": "gap" if class_token is None else "token",
        "representation_size": 0 if pre_logits is None else len(pre_logits),
        "position_embedding": "none" if table is None else "learned",
        "image_size": _image_size(table, 0 if class_token is None else 1, patch_size, image_size),
    }


def needed(view: View, name: str, dimensions: int) -> Tensor:
    """Return a tensor that every model has. Raises CheckpointError."""
    tensor = view(name)
    if tensor is None or tensor.dim() != dimensions:
        shape = "missing" if tensor is None else f"of shape {list(tensor.shape)}"
        raise CheckpointError(
            f"the tensor for {name} is {shape}, so the model is not known; is the file whole?"
        )
    return tensor


def classes(view: View) -> int:
    """Return the number of classes of the head, 0 without one."""
    head = view("head.weight")
    return 0 if head is None else len(head)


def published_heads(shape: Mapping[str, Any]) -> int | None:
    """Return the heads of the published model of this hidden size and depth, None where there is none."""
    wanted = shape["hidden_size"], shape["depth"]
    sizes = {(size["hidden_size"], size["depth"]): size["num_heads"] for size in reversed(VARIANTS.values())}
    return sizes.get(wanted) or _UNUSUAL_HEADS.get(wanted)


def known_heads(hidden_size: int, depth: int) -> int:
    """Return the heads of the published model of this size; most have 64 channels for each.

    Raises CheckpointError.
    """
    if found := published_heads({"hidden_size": hidden_size, "depth": depth}):
        return found
    if hidden_size % _HEAD_CHANNELS:
        raise CheckpointError(
            f"the file does not tell the number of attention heads, and hidden size {hidden_size} is not a "
            f"multiple of "
            f"{_HEAD_CHANNELS}; put the model's config.json beside it, or name the model"
        )
    return hidden_size // _HEAD_CHANNELS


def _image_size(table: Tensor | None, prefix: int, patch_size: int, hint: int | None) -> int:
    if table is None:
        return hint or 224
    if table.dim() != 3 or isqrt(max(0, table.shape[1] - prefix)) ** 2 != table.shape[1] - prefix:
        raise CheckpointError(
            f"the position embedding of shape {list(table.shape)} is no square grid of patches and {prefix} "
            f"class token"
        )
    side = isqrt(table.shape[1] - prefix)
    return hint if hint and hint // patch_size == side else side * patch_size


def vit_misfits(config: Config) -> Iterator[str]:
    """What other programs' Vision Transformers cannot hold, whichever program it is."""
    if type(config) is not ViTConfig:
        yield f"it has no place for a {type(config).__name__.removesuffix('Config')} model"
    else:
        yield from position_misfits(config)


def position_misfits(config: ViTConfig) -> Iterator[str]:
    """The position embeddings of Table 8 that have no name outside."""
    if config.position_embedding not in ("learned", "none") or config.position_at != "stem":
        yield f"it has no position_embedding {config.position_embedding!r} at {config.position_at!r}"
