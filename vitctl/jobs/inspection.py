"""Figures and numbers of a network's internals: the paper's Section 4.5, Appendices D.4, D.7, D.8."""

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitctl.analysis import inspect_figures, parameters
from vitctl.analysis.attention_maps import (
    attention_layers,
    overlay,
    pixels_per_patch,
    uniform_distance,
)
from vitctl.analysis.inspect_figures import Panel, draw_position_similarity
from vitctl.analysis.observe import OF_IMAGES, PARTS, Observed, missing_parts, observe
from vitctl.engine.computation import choose_attention, computed
from vitctl.engine.journal import json_text
from vitctl.engine.runtime import Runtime
from vitctl.errors import CheckpointError, LaunchError
from vitctl.jobs.inputs.data import open_recipe_split
from vitctl.jobs.inputs.given_images import ChosenImages, choose_images, find_images
from vitctl.jobs.inputs.weights import (
    FoundWeights,
    loaded_model,
    scored_weights,
    stored_eval_transform,
    weights_of,
)
from vitctl.jobs.training import on_device, shown, start_runtime, weights_scored
from vitctl.models.build import Model
from vitctl.models.kernels import attention_of
from vitctl.models.variants import HybridConfig, ResNetConfig, ViTConfig, family, to_dict
from vitctl.models.vit import VisionTransformer
from vitctl.models.weights.meta import distinct
from vitctl.recipe.schema import Evaluate
from vitctl.system.figures import NOT_INSTALLED, Heading, can_plot, save_figure
from vitctl.system.files import write_text
from vitctl.system.text import count_text, one_line

_ATTENTION_BYTES = 2**27  # one layer's attention weights, for all images of a batch
_MOST_IMAGES = 64  # in one forward pass

Done = Callable[[int, int], None]


@dataclass(frozen=True)
class Subject:
    """A network to inspect.

    Args:
        name: short name of its weights, for titles.
        model: in evaluation mode, on its device.
        images: pre-processed, uint8 `[N, 3, S, S]`, if there are any.
        seen: what they show of the network.
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
        return Heading(title, "  ·  ".join((self.name, network_text(self.model), *facts)))

    @property
    def images_text(self) -> str:
        if self.chosen is None:
            return ""
        return f"{count_text(len(self.chosen), 'image')} of {self.chosen.text}"


def look(
    name: str,
    recipe: Evaluate,
    found: FoundWeights,
    chosen: ChosenImages | None,
    runtime: Runtime,
    done: Done,
) -> Subject:
    if chosen is None:
        model, _ = loaded_model(found, recipe.data.image_size, runtime.dtype)
        return Subject(name, found, on_device(model, runtime).eval())
    meta = found.weights.meta
    transform = stored_eval_transform(recipe, meta)
    model, _ = loaded_model(found, transform.image_size, runtime.dtype)
    model = on_device(model, runtime).eval()
    choose_attention(model, recipe.machine, runtime)
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
        raise CheckpointError(found.path, "the network gives NaN or infinite numbers", "use other weights")
    return Subject(name, found, model, images, chosen, seen, shown(transform))


def _batch_size(model: Model, most: int) -> int:
    """Return the number of images at a time for which one layer's attention weights fit into memory."""
    places = [
        (layer.prefix_tokens + layer.grid[0] * layer.grid[1]) ** 2 for layer, _ in attention_layers(model)
    ]
    heads = getattr(model.config, "num_heads", 1)
    return max(1, min(most, _ATTENTION_BYTES // (4 * heads * max(places, default=1)), _MOST_IMAGES))


def network_text(model: Model) -> str:
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
    layers, heads = count_text(config.depth, "layer"), count_text(config.num_heads, "head")
    return f"{kind}, {patch}, {layers}, {heads}, {config.image_size} px"


def short_names(paths: Sequence[str]) -> list[str]:
    """Return a short, unique name for each weights file: a run's folder and step, or the file's name."""
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
    """Return a name that is safe for a folder: letters, digits, `-`, `.` and `_`."""
    return (
        "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name).strip("._")
        or "weights"
    )


SHOWN_IMAGES, SHEET_IMAGES = 6, 128  # in rollout.png as in Figure 6, in rollout_sheet.png as in Figure 14

Drawn = tuple[str, dict[str, Any], dict[str, Any]]  # key numbers in words, numbers, figures by name


def _draw_filters(subject: Subject) -> Drawn:
    found, what = parameters.color_filters(subject.model)
    components = parameters.principal_components(found)
    side, shares = found.shape[-1], components.shares.tolist()
    title = f"Filters of the {what}: the first {len(shares)} principal components"
    heading = subject.heading(title, f"{len(found):,} filters of {side}x{side} pixels", "% of their variance")
    text = f"the first of {len(shares)} components has {shares[0]:.0%} of the variance, all {sum(shares):.0%}"
    variance = _rounded(components.shares)
    numbers = {"what": what, "num_filters": len(found), "size": side, "explained_variance": variance}
    return text, numbers, {"filters": inspect_figures.draw_filters(components, heading)}


_POSITIONS = {"learned": "1-D, learned", "2d": "2-D", "relative": "relative, by offset"}


def _draw_positions(subject: Subject) -> Drawn:
    config = subject.model.config
    assert isinstance(config, ViTConfig)
    panels = _panels(subject)
    heading = subject.heading("Position embeddings: cosine similarity", _POSITIONS[config.position_embedding])
    figure = inspect_figures.draw_position_similarity(panels, heading)
    tables = []
    for panel in panels:
        assert panel.similarities is not None
        if panel.grid is None:
            size = len(panel.similarities)
            by = torch.stack([panel.similarities.diagonal(lag).mean() for lag in range(size)])
            tables.append({"title": panel.title, "by_difference_of_offset": _rounded(by)})
            text = f"offsets that differ by half of all: {by[size // 2]:.2f}"
        else:
            by = parameters.by_offset(panel.similarities, panel.grid)
            tables.append({"title": panel.title, "by_row_and_column_offset": _rounded(by)})
            rows, columns = panel.grid
            beside = [*by[rows - 1, columns:][:1], *by[rows:, columns - 1][:1]]
            corner = float(by[0, 0] + by[0, -1]) / 2
            text = "a single patch"
            if beside:
                text = f"next patch {float(sum(beside)) / len(beside):.2f}, opposite corner {corner:.2f}"
    numbers = {"kind": config.position_embedding, "at": config.position_at, "tables": tables}
    return text, numbers, {"position_similarity": figure}


def _panels(subject: Subject) -> list[Panel]:
    """Return a panel per position table; relative offsets give one, the mean over layers."""
    assert isinstance(subject.model, VisionTransformer)
    config = subject.model.config
    tables = parameters.patch_positions(subject.model)
    if tables is None:
        offsets = parameters.relative_offsets(subject.model)
        assert offsets is not None
        return [Panel(f"mean of {len(offsets)} layers", parameters.similarity(offsets).mean(dim=0))]
    titles = [f"before layer {number}" * (len(tables) > 1) for number in range(1, len(tables) + 1)]
    return [Panel(*one, config.grid) for one in zip(titles, parameters.similarity(tables), strict=True)]


def first_panel(subject: Subject) -> Panel:
    """Return the first table of one of several networks."""
    if reason := missing_parts(subject.model.config).get("position_similarity"):
        return Panel(subject.name, None, remark=reason)
    first = _panels(subject)[0]
    remark = f" ({first.title})" if first.title else ""
    return Panel(f"{subject.name}{remark}", first.similarities, first.grid)


def _draw_distance(subject: Subject) -> Drawn:
    assert subject.seen is not None
    layers = [layer for layer, _ in attention_layers(subject.model)]
    means = subject.seen.distances.mean(dim=0)  # [layers, heads]
    size = subject.model.config.image_size
    heading = subject.heading("Mean attention distance: how far a head looks", subject.images_text)
    figure = inspect_figures.draw_attention_distance(layers, means, size, heading)
    first, last = (f"{heads.min():.1f} to {heads.max():.1f} px" for heads in (means[0], means[-1]))
    uniform = f"uniform attention {uniform_distance(layers[-1]):.1f} px"
    numbers = {
        "unit": "pixels",
        "class_token": "left out; the weights over the patches are scaled to sum 1",
        "num_images": len(subject.seen.distances),
        "layers": [
            {
                "depth": layer.depth,
                "heads": _rounded(heads),
                "mean": round(float(heads.mean()), 6),
                "uniform": round(uniform_distance(layer), 6),
            }
            for layer, heads in zip(layers, means, strict=True)
        ],
    }
    return f"first layer {first}, last {last}, {uniform}", numbers, {"attention_distance": figure}


def _draw_rollout(subject: Subject) -> Drawn:
    assert subject.seen is not None and subject.images is not None and subject.chosen is not None
    config, seen, chosen = subject.model.config, subject.seen, subject.chosen
    assert isinstance(config, ViTConfig)
    masks = (seen.mask, seen.mask_without_identity)
    overlays = [overlay(subject.images, mask.float(), pixels_per_patch(config)) for mask in masks]
    predictions = [""] * len(chosen)
    class_names = distinct(subject.found.weights.meta.get("class_names") or ())
    if seen.logits.shape[1] and class_names and subject.found.weights.has_head:
        predictions = [class_names[best] for best in seen.logits.argmax(dim=1).tolist()]
    of = "class token" if config.prefix_tokens else "mean of the patches"

    def heading(what: str, most: int) -> Heading:
        part = f"{most} of " * (most < len(chosen))
        about = "attention of all blocks, multiplied; skip paths lead around a block"
        title = f"Attention rollout: what reaches the {of}{what}"
        return subject.heading(title, part + subject.images_text, about)

    n = SHOWN_IMAGES
    captions = [_caption(chosen, number, text) for number, text in enumerate(predictions[:n])]
    few = [one[:n] for one in overlays], [one[:n] for one in masks]
    figures = {"rollout": inspect_figures.draw_rollout(subject.images[:n], *few, captions, heading("", n))}
    if len(chosen) > n:
        n = SHEET_IMAGES
        whole = heading(", with skip paths", n)
        sheet = inspect_figures.draw_rollout_sheet(subject.images[:n], overlays[0][:n], whole)
        figures["rollout_sheet"] = sheet
    peaks = [float((mask.amax(dim=(1, 2)) / mask.mean(dim=(1, 2))).mean()) for mask in masks]
    text = (
        f"the strongest patch has {peaks[0]:.1f} times the mean, and {peaks[1]:.1f} times without skip paths"
    )
    numbers = {
        "of": of,
        "peak_over_mean": round(peaks[0], 6),
        "peak_over_mean_without_identity": round(peaks[1], 6),
        "images": [
            {
                "name": name,
                **({"prediction": prediction} if prediction else {}),
                "mask": _rounded(seen.mask[number]),
                "mask_without_identity": _rounded(seen.mask_without_identity[number]),
            }
            for number, (name, prediction) in enumerate(zip(chosen.names, predictions, strict=True))
        ],
    }
    return text, numbers, figures


def _caption(chosen: ChosenImages, number: int, prediction: str) -> str:
    label = chosen.labels[number]
    first = chosen.class_names[label] if label >= 0 else Path(chosen.names[number]).stem
    return "\n".join(map(one_line, [first, f"predicted: {prediction}"] if prediction else [first]))


DRAW: dict[str, Callable[[Subject], Drawn]] = {
    "filters": _draw_filters,
    "position_similarity": _draw_positions,
    "attention_distance": _draw_distance,
    "rollout": _draw_rollout,
}


def _rounded(values: Tensor) -> Any:
    return values.double().cpu().round(decimals=6).tolist()


NUMBERS = "inspect.json"
_NUMBER_LIST = re.compile(r"\[\s*(-?\d[^\[\]{}\"]*?)\s*\]")


class Row(NamedTuple):
    """Figure for one network. `text` holds its key numbers, or the reason if no figure could be drawn."""

    weights: str
    part: str
    text: str
    files: tuple[Path, ...]


def inspect(
    recipe: Evaluate,
    sources: Sequence[str],
    images: Sequence[str],
    folder: Path,
    *,
    num_images: int = 128,
    seed: int = 0,
    done: Done = lambda _done, _total: None,
) -> list[Row]:
    """Write FOLDER/inspect.json, and a PNG and an SVG of each figure that the networks have.

    Each of several weights gets a folder, and their position embeddings are also drawn side by side.

    Args:
        recipe: [data] gives the pre-processing as for `evaluate`, and the images if `images` does not.
        sources: weights, as in weights.source.
        images: files, folders, patterns, shards, as for `predict`. Without images and data, only figures that
            need none are drawn.
        folder: is created if missing.
        num_images: maximum number of images, chosen at random by `seed`.
        done: called with the number of images seen by a network, and the total.

    Returns:
        a row for each figure, or for the reason why there is none.

    Raises:
        LaunchError: matplotlib is not installed.
        CheckpointError, DataError: there are no such weights or images, or they cannot be used.

    Paper: Section 4.5, Figures 6, 7, 10, 11 and 14
    """
    if not can_plot():
        raise LaunchError("inspect", NOT_INSTALLED)
    runtime = start_runtime(recipe.machine, folder)
    chosen = _chosen_images(recipe, images, folder, num_images, seed)
    recipes = [
        recipe.model_copy(update={"weights": recipe.weights.model_copy(update={"source": source})})
        for source in sources
    ]
    everything = [(scored_weights if chosen else weights_of)(one) for one in recipes]
    names = short_names([found.path for found in everything])
    folder.mkdir(parents=True, exist_ok=True)
    rows, numbers, panels = list[Row](), list[dict[str, Any]](), list[Panel]()
    for name, one, found in zip(names, recipes, everything, strict=True):
        subject = look(name, one, found, chosen, runtime, done)
        target = folder / folder_name(name) if len(names) > 1 else folder
        target.mkdir(exist_ok=True)
        found_rows, found_numbers = _draw_all(subject, target)
        rows += found_rows
        numbers.append(found_numbers)
        panels.append(first_panel(subject))
    if len(names) > 1:
        heading = Heading(
            "Position embeddings: cosine similarity", f"{count_text(len(names), 'network')} side by side"
        )
        figure = draw_position_similarity(panels, heading)
        files = _saved(figure, folder, "position_similarity")
        rows.append(Row("all", "position_similarity", "side by side", files))
    about: dict[str, Any] = {"format": "vitctl-inspect/1", **computed(runtime, attention_of(subject.model))}
    about["images"] = {"num_images": 0}
    if chosen is not None:
        labels = [chosen.class_names[label] if label >= 0 else None for label in chosen.labels]
        about["images"] = {"num_images": len(chosen), "from": chosen.text, "seed": seed}
        about["images"] |= {"names": list(chosen.names), "labels": labels}
    text = json_text({**about, "weights": numbers}, indent=1)
    on_one_line = _NUMBER_LIST.sub(lambda found: f"[{' '.join(found[1].split())}]", text)
    write_text(folder / NUMBERS, on_one_line + "\n")
    return rows


def _chosen_images(
    recipe: Evaluate, images: Sequence[str], folder: Path, num_images: int, seed: int
) -> ChosenImages | None:
    data = recipe.data
    if images:
        sources = find_images(
            images, data, stdin=sys.stdin.buffer, note=lambda text: print(text, file=sys.stderr)
        )
        return choose_images(sources, num_images, seed, images[0] + " and others" * (len(images) > 1))
    if not (data.path or data.dataset):
        return None
    name = Path(data.path.rstrip("/")).name if data.path else data.dataset
    source = open_recipe_split(data, data.eval_split, folder / "data")
    return choose_images([source], num_images, seed, f"{name} {data.eval_split}")


def _draw_all(subject: Subject, folder: Path) -> tuple[list[Row], dict[str, Any]]:
    config = subject.model.config
    reasons = missing_parts(config)
    if subject.seen is None:
        needs = "needs images: name files or folders, or a split with --data"
        reasons = dict.fromkeys(OF_IMAGES, needs) | reasons
    rows, numbers = [], dict[str, Any]()
    rows += [Row(subject.name, "weights", line, ()) for line in subject.found.warnings]
    for part in PARTS:
        if part in reasons:
            rows.append(Row(subject.name, part, reasons[part], ()))
            continue
        text, numbers[part], figures = DRAW[part](subject)
        files = tuple(file for name, figure in figures.items() for file in _saved(figure, folder, name))
        rows.append(Row(subject.name, part, text, files))
        numbers[part]["files"] = [file.name for file in files]
    about = {"name": subject.name, **weights_scored(subject.found), "network": to_dict(config)}
    if subject.transform:
        about |= {"preprocessing": subject.transform}
    reasons = {part: reason for part, reason in reasons.items() if part in PARTS}
    return rows, {**about, **numbers, "missing": reasons}


def _saved(figure: Any, folder: Path, name: str) -> tuple[Path, ...]:
    return tuple(save_figure(figure, folder / f"{name}.{kind}") for kind in ("png", "svg"))
