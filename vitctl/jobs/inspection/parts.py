"""The pictures of one network: of each its key numbers in words, all its numbers, and figures."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitctl.analysis import filters, pictures, pooling, positions
from vitctl.analysis.attention import AttentionLayer, attention_layers, pixels_per_patch
from vitctl.analysis.distance import uniform_distance
from vitctl.analysis.observe import missing_parts
from vitctl.analysis.pictures import Panel, RolledImage
from vitctl.analysis.rollout import overlay
from vitctl.jobs.inputs.chosen_images import ChosenImages
from vitctl.jobs.inspection.subject import Subject
from vitctl.models.configs import ViTConfig
from vitctl.models.vit import VisionTransformer
from vitctl.system.text import one_line

SHOWN_IMAGES, SHEET_IMAGES = 6, 128  # of rollout.png as in Figure 6, of rollout_sheet.png as in Figure 14

Drawn = tuple[str, dict[str, Any], dict[str, Any]]  # key numbers in words, numbers, figures by name


def _draw_filters(subject: Subject) -> Drawn:
    found, what = filters.color_filters(subject.model)
    components = filters.principal_components(found)
    count, side = len(found), found.shape[-1]
    heading = subject.heading(
        f"Filters of the {what}: the first {len(components.shares)} principal components",
        f"{count:,} filters of {side}x{side} pixels",
        "% of their variance",
    )
    shares = components.shares.tolist()
    text = f"the first of {len(shares)} components has {shares[0]:.0%} of the variance, all {sum(shares):.0%}"
    numbers = {
        "what": what,
        "num_filters": count,
        "size": side,
        "explained_variance": _rounded(components.shares),
    }
    return text, numbers, {"filters": pictures.draw_filters(components, heading)}


def _draw_positions(subject: Subject) -> Drawn:
    assert isinstance(subject.model, VisionTransformer)
    config = subject.model.config
    panels = _panels(subject)
    kind = {"learned": "1-D, learned", "2d": "2-D", "relative": "relative, by offset"}[
        config.position_embedding
    ]
    heading = subject.heading("Position embeddings: cosine similarity", kind)
    figure = pictures.draw_position_similarity(panels, heading)
    numbers: dict[str, Any] = {"kind": config.position_embedding, "at": config.position_at, "tables": []}
    for panel in panels:
        assert panel.similarities is not None
        if panel.grid is None:
            size = len(panel.similarities)
            by = [float(panel.similarities.diagonal(lag).mean()) for lag in range(size)]
            numbers["tables"].append(
                {"title": panel.title, "by_difference_of_offset": _rounded(torch.tensor(by))}
            )
            text = f"offsets that differ by 1 token: {by[1] if size > 1 else 1:.2f}, by half of all: {by[size // 2]:.2f}"
        else:
            by_offset = positions.by_offset(panel.similarities, panel.grid)
            numbers["tables"].append({"title": panel.title, "by_row_and_column_offset": _rounded(by_offset)})
            text = _neighbours_text(by_offset, panel.grid)
    return text, numbers, {"position_similarity": figure}


def _neighbours_text(by_offset: Tensor, grid: tuple[int, int]) -> str:
    rows, columns = grid
    beside = [by_offset[rows - 1, columns]] if columns > 1 else []
    beside += [by_offset[rows, columns - 1]] if rows > 1 else []
    if not beside:
        return "a single patch"
    corner = float(by_offset[0, 0] + by_offset[0, -1]) / 2
    return f"next patch {float(sum(beside)) / len(beside):.2f}, opposite corner {corner:.2f}"


def _panels(subject: Subject) -> list[Panel]:
    """The similarities of a network: of each table, or of relative offsets the mean over layers."""
    assert isinstance(subject.model, VisionTransformer)
    config = subject.model.config
    tables = positions.patch_positions(subject.model)
    if tables is not None:
        several = len(tables) > 1
        similar = positions.similarity(tables)
        return [
            Panel(f"before layer {number}" if several else "", one, config.grid)
            for number, one in enumerate(similar, 1)
        ]
    offsets = positions.relative_offsets(subject.model)
    assert offsets is not None
    return [Panel(f"mean of {len(offsets)} layers", positions.similarity(offsets).mean(dim=0))]


def first_panel(subject: Subject) -> Panel:
    """Of several networks: the first table of each."""
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
    heading = subject.heading("Mean attention distance", subject.images_text)
    figure = pictures.draw_attention_distance(layers, means, size, heading)
    first, last = means[0], means[-1]
    text = (
        f"first layer {first.min():.1f} to {first.max():.1f} px, last {last.min():.1f} to "
        f"{last.max():.1f} px, "
        f"uniform attention {uniform_distance(layers[-1]):.1f} px"
    )
    numbers = {
        "unit": "pixels",
        "class_token": "left out; the weights over the patches are scaled to sum 1",
        "num_images": len(subject.seen.distances),
        "layers": [_layer_numbers(layer, mean) for layer, mean in zip(layers, means, strict=True)],
    }
    return text, numbers, {"attention_distance": figure}


def _layer_numbers(layer: AttentionLayer, heads: Tensor) -> dict[str, Any]:
    return {
        "depth": layer.depth,
        "along": layer.along,
        "heads": _rounded(heads),
        "mean": round(float(heads.mean()), 6),
        "uniform": round(uniform_distance(layer), 6),
    }


def _draw_rollout(subject: Subject) -> Drawn:
    assert subject.seen is not None and subject.images is not None and subject.chosen is not None
    config, seen = subject.model.config, subject.seen
    assert isinstance(config, ViTConfig)
    stride = pixels_per_patch(config)
    masks = (seen.mask, seen.mask_without_identity)
    overlays = [overlay(subject.images, mask.float(), stride) for mask in masks]
    predictions = _predictions(subject)
    rolled = [
        RolledImage(
            subject.images[number],
            (overlays[0][number], overlays[1][number]),
            (masks[0][number], masks[1][number]),
            _caption(subject.chosen, number, predictions[number]),
        )
        for number in range(len(subject.chosen))
    ]
    of = "class token" if config.prefix_tokens else "mean of the patches"
    few = rolled[:SHOWN_IMAGES]
    shown = f"{len(few)} of {subject.images_text}" if len(few) < len(rolled) else subject.images_text
    heading = subject.heading(f"Attention rollout of the {of}", shown)
    figures = {"rollout": pictures.draw_rollout(few, heading)}
    if len(rolled) > SHOWN_IMAGES:
        sheet = rolled[:SHEET_IMAGES]
        shown = f"{len(sheet)} of {subject.images_text}" if len(sheet) < len(rolled) else subject.images_text
        heading = subject.heading(f"Attention rollout of the {of}, with identity", shown)
        figures["rollout_sheet"] = pictures.draw_rollout_sheet(sheet, heading)
    peaks = [float((mask.amax(dim=(1, 2)) / mask.mean(dim=(1, 2))).mean()) for mask in masks]
    text = f"the strongest patch has {peaks[0]:.1f} times the mean, without identity {peaks[1]:.1f} times"
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
            for number, (name, prediction) in enumerate(zip(subject.chosen.names, predictions, strict=True))
        ],
    }
    return text, numbers, figures


def _caption(chosen: ChosenImages, number: int, prediction: str) -> str:
    """The label, or the name of the file; below it the prediction."""
    label = chosen.labels[number]
    first = chosen.class_names[label] if label >= 0 else Path(chosen.names[number]).stem
    return "\n".join(map(one_line, [first, f"predicted: {prediction}"] if prediction else [first]))


def _predictions(subject: Subject) -> list[str]:
    """The most likely class of each image in words; empty without a head or without names."""
    assert subject.seen is not None
    names = subject.found.weights.meta.get("class_names") or []
    logits = subject.seen.logits
    if not logits.shape[1] or not names or not subject.found.weights.has_head:
        return [""] * len(logits)
    return [str(names[best]) for best in logits.argmax(dim=1).tolist()]


def _draw_pooling(subject: Subject) -> Drawn:
    assert subject.seen is not None and subject.chosen is not None
    token, mean = subject.seen.class_token, subject.seen.patch_mean
    labels = torch.tensor(subject.chosen.labels)
    cosines = pooling.cosines(token, mean)
    text = f"cosine between them {cosines.mean():.2f}"
    numbers: dict[str, Any] = {"cosine": {"mean": float(cosines.mean()), "of_images": _rounded(cosines)}}
    titles = {"class_token": "class token", "patch_mean": "mean of the patches"}
    separations = {
        name: pooling.separation(one, labels) for name, one in (("class_token", token), ("patch_mean", mean))
    }
    if separations["class_token"].total:
        shares = {name: one.correct / one.total for name, one in separations.items()}
        numbers["nearest_class_mean"] = {
            name: {"accuracy": shares[name], "correct": one.correct, "total": one.total}
            for name, one in separations.items()
        }
        titles = {name: f"{title}: {shares[name]:.0%} right" for name, title in titles.items()}
        text += f"; nearest class mean: class token {shares['class_token']:.0%}, mean {shares['patch_mean']:.0%} right"
    else:
        numbers["nearest_class_mean"] = None
        text += "; no classes with two labelled images to tell apart"
    planes = [(titles["class_token"], pooling.plane(token)), (titles["patch_mean"], pooling.plane(mean))]
    heading = subject.heading("Class token and mean of the patches", subject.images_text)
    figure = pictures.draw_pooling(planes, labels, subject.chosen.class_names, cosines, heading)
    return text, numbers, {"pooling": figure}


DRAW: dict[str, Callable[[Subject], Drawn]] = {
    "filters": _draw_filters,
    "position_similarity": _draw_positions,
    "attention_distance": _draw_distance,
    "rollout": _draw_rollout,
    "pooling": _draw_pooling,
}


def _rounded(values: Tensor) -> Any:
    """Nested lists of 6 digits after the point."""
    scaled: Any = values.double().cpu()
    return (
        [_rounded(one) for one in scaled] if scaled.dim() > 1 else [round(one, 6) for one in scaled.tolist()]
    )
