"""What is inside a network, as pictures and as numbers: Section 4.5 and Appendices D.3, D.4, D.7 and D.8 of
the paper.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vitctl.analysis.inspect_figures import Heading, Panel, draw_position_similarity
from vitctl.analysis.observe import PARTS, missing_parts
from vitctl.engine.computation import computed
from vitctl.engine.journal import json_text
from vitctl.errors import LaunchError
from vitctl.jobs.inputs.chosen_images import ChosenImages, choose_images
from vitctl.jobs.inputs.data import open_images
from vitctl.jobs.inputs.images import find_images
from vitctl.jobs.inputs.weights import scored_weights, weights_of
from vitctl.jobs.inspection_parts import DRAW, Done, Subject, first_panel, folder_name, look, short_names
from vitctl.jobs.provenance import weights_scored
from vitctl.jobs.training import start_runtime
from vitctl.models.variants import to_dict
from vitctl.models.weights.meta import assumed_line
from vitctl.recipe.schema import Evaluate
from vitctl.system.figures import NOT_INSTALLED, can_plot, save_figure
from vitctl.system.files import write_text

NUMBERS = "inspect.json"
_OF_IMAGES = ("attention_distance", "rollout", "pooling")
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
    """Write FOLDER/inspect.json and a PNG and an SVG of each picture that the networks have.

    With several weights each has its folder, and their position embeddings are also drawn side by
    side.

    Args:
        recipe: [data] names the images where `images` does not, and their pre-processing, as for `evaluate`.
        sources: weights, as weights.source takes them.
        images: files, folders, patterns, shards, as for `predict`; with none and no data, only what needs no
            images is shown.
        folder: is made if it is missing.
        num_images: the maximum number, chosen at random.
        seed: of the choice.
        done: called with images seen by a network and their number.

    Returns:
        a row for each picture, or for why there is none.

    Raises:
        LaunchError: matplotlib is not installed.
        CheckpointError, DataError: there are no such weights or images, or they cannot be used.

    Paper: Section 4.5, Figures 6, 7, 10, 11 and 14
    """
    if not can_plot():
        raise LaunchError(f"inspect: {NOT_INSTALLED}")
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
        heading = Heading("Position embeddings: cosine similarity", f"{len(names)} networks side by side")
        figure = draw_position_similarity(panels, heading)
        files = _saved(figure, folder, "position_similarity")
        rows.append(Row("all", "position_similarity", "side by side", files))
    about = {"format": "vitctl-inspect/1", **computed(runtime), "images": _about(chosen, seed)}
    _write_numbers(folder / NUMBERS, {**about, "weights": numbers})
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
    return choose_images(
        [open_images(data, data.eval_split, folder)], num_images, seed, f"{name} {data.eval_split}"
    )


def _draw_all(subject: Subject, folder: Path) -> tuple[list[Row], dict[str, Any]]:
    """Return every picture of one network, and its numbers."""
    config = subject.model.config
    reasons = missing_parts(config)
    if subject.seen is None:
        needs = "needs images: name files or folders, or a split with --data"
        reasons = dict.fromkeys(_OF_IMAGES, needs) | reasons
    rows, numbers = [], dict[str, Any]()
    if line := assumed_line(subject.found.assumed):
        rows.append(Row(subject.name, "weights", line, ()))
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


def _about(chosen: ChosenImages | None, seed: int) -> dict[str, Any]:
    if chosen is None:
        return {"num_images": 0}
    labels = [chosen.class_names[label] if label >= 0 else None for label in chosen.labels]
    return {
        "num_images": len(chosen),
        "from": chosen.text,
        "seed": seed,
        "names": list(chosen.names),
        "labels": labels,
    }


def _write_numbers(path: Path, value: Any) -> None:
    """JSON with every list of numbers on one line."""
    text = json_text(value, indent=1)
    write_text(path, _NUMBER_LIST.sub(lambda found: f"[{' '.join(found[1].split())}]", text) + "\n")
