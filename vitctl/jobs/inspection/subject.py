"""A network and what some images show of it, before anything is drawn."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from vitctl.analysis.attention import attention_layers, pixels_per_patch
from vitctl.analysis.observe import Observed, observe
from vitctl.analysis.pictures import Heading
from vitctl.engine.computation import choose_kernels, use_kernels
from vitctl.engine.distributed.runtime import Runtime
from vitctl.errors import CheckpointError
from vitctl.jobs.evaluate import stored_eval_transform
from vitctl.jobs.inputs.chosen_images import ChosenImages
from vitctl.jobs.inputs.weights import FoundWeights, loaded_model
from vitctl.jobs.provenance import shown
from vitctl.jobs.training import on_device
from vitctl.models.build import Model
from vitctl.models.configs import HybridConfig, ResNetConfig
from vitctl.models.variants import family
from vitctl.recipe.schema import Evaluate

_ATTENTION_BYTES = 2**27  # of one layer's weights, for all images of a batch
_MOST_IMAGES = 64  # in one forward pass

Done = Callable[[int, int], None]


@dataclass(frozen=True)
class Subject:
    """A network that is looked at.

    Args:
        name: of its weights, short, for titles.
        found: its weights.
        model: in evaluation mode, on its device.
        images: as it gets them, uint8 `[N, 3, S, S]`, where there are any.
        chosen: which images these are.
        seen: what they show.
        transform: their pre-processing, for the JSON.
    """

    name: str
    found: FoundWeights
    model: Model
    images: Tensor | None = None
    chosen: ChosenImages | None = None
    seen: Observed | None = None
    transform: dict[str, Any] | None = None

    def heading(self, title: str, *facts: str) -> Heading:
        """Over a picture: what it shows, then weights, network and more facts."""
        return Heading(title, "  ·  ".join((self.name, network_text(self.model), *facts)))

    @property
    def images_text(self) -> str:
        """How many images, and where they are from."""
        if self.chosen is None:
            return ""
        return f"{len(self.chosen)} image{'s' * (len(self.chosen) > 1)} of {self.chosen.text}"


def look(
    name: str,
    recipe: Evaluate,
    found: FoundWeights,
    chosen: ChosenImages | None,
    runtime: Runtime,
    done: Done,
) -> Subject:
    """The network, and what the images show of it."""
    if chosen is None:
        model, _ = loaded_model(found, recipe.data.image_size, runtime.dtype)
        return Subject(name, found, on_device(model, runtime).eval())
    meta = found.weights.meta
    transform = stored_eval_transform(recipe, meta)
    model, _ = loaded_model(found, transform.image_size, runtime.dtype)
    model = on_device(model, runtime).eval()
    use_kernels(choose_kernels(recipe.machine, model.config, runtime.computation))
    images = chosen.pixels(transform)
    batch = _batch_size(model, recipe.evaluation.batch_size)
    normalise, parts = runtime.normaliser(meta["mean"], meta["std"]), []
    for begin in range(0, len(images), batch):
        normal = normalise(images[begin : begin + batch])
        with runtime.autocast():
            parts.append(observe(model, normal))
        done(min(begin + batch, len(images)), len(images))
    seen = Observed.joined(parts)
    if not bool(seen.logits.isfinite().all() and seen.distances.isfinite().all()):
        raise CheckpointError(f"{found.path}: the network gives NaN or infinite numbers; use other weights")
    return Subject(name, found, model, images, chosen, seen, shown(transform))


def _batch_size(model: Model, most: int) -> int:
    """Images at a time, so that the weights of a layer fit into memory."""
    places = [
        (layer.prefix_tokens + layer.grid[0] * layer.grid[1]) ** 2 for layer, _ in attention_layers(model)
    ]
    heads = getattr(model.config, "num_heads", 1)
    return max(1, min(most, _ATTENTION_BYTES // (4 * heads * max(places, default=1)), _MOST_IMAGES))


def network_text(model: Model) -> str:
    """A network in a few words."""
    config = model.config
    if isinstance(config, ResNetConfig):
        units = sum(config.stage_depths)
        return (
            f"{family(config).replace('_', ' ')}, {units} units, width {config.width}, {config.image_size} px"
        )
    kind = {"vit": "ViT", "axial": "Axial-ViT", "masked_patch": "masked patch ViT"}.get(
        family(config), "hybrid"
    )
    patch = (
        f"{pixels_per_patch(config)} px a token"
        if isinstance(config, HybridConfig)
        else f"patch {config.patch_size}"
    )
    return f"{kind}, {patch}, {config.depth} layers, {config.num_heads} heads, {config.image_size} px"


def short_names(paths: Sequence[str]) -> list[str]:
    """A short name for each weights file, no two alike: of a run its folder and step, else its own."""
    names = [_name(path) for path in paths]
    folders = [folder_name(name).lower() for name in names]
    return [
        name if folders.count(folder) == 1 else f"{number}: {name}"
        for number, (name, folder) in enumerate(zip(names, folders, strict=True), 1)
    ]


def _name(path: str) -> str:
    parts = Path(path).parts
    if "checkpoints" in parts[1:-2]:
        place = len(parts) - 1 - parts[::-1].index("checkpoints")
        step = parts[place + 1].removeprefix("step_").lstrip("0") or "0"
        return f"{Path(*parts[:place]).resolve().name}, step {step}"
    is_file = Path(path).suffix in (".npz", ".safetensors", ".pth", ".pt", ".bin")
    name = Path(path).stem if is_file else Path(path).name
    folder = Path(path).parent if "://" in path else Path(path).resolve().parent
    return folder.name if name in ("model", "pytorch_model") else name


def folder_name(name: str) -> str:
    """A name for a folder: letters, digits and few signs."""
    return (
        "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name).strip("._")
        or "weights"
    )
