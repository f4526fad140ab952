"""Figures: one look and one way to write them, for all that vitctl draws. Needs matplotlib, imported late."""

import importlib.util
import warnings
from pathlib import Path
from typing import Any

from vitctl.system.files import atomic_write
from vitctl.system.text import one_line

INK, PALE, BLUE, GREY = "#222222", "#6b6b6b", "#2a6fbb", "#d9d9d9"
SERIES = (BLUE, "#c8553d", "#3d8b5f", "#8a5fb0", "#b58a2b", "#5c6b73")
NOT_INSTALLED = "matplotlib is not installed; pip install 'vitctl[plots]' brings it"


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def new_figure(width: float, height: float) -> Any:
    """An empty figure, size in inches, that needs no screen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plain_axes(axes: Any) -> None:
    """Small labels, and no frame above and to the right."""
    axes.tick_params(labelsize=8, colors=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def label_text(text: str) -> str:
    """Names of files, classes and recipes as a label: dollar signs are no formula, control characters are
    escaped.
    """
    return one_line(text).replace("$", r"\$")


def save_figure(figure: Any, path: Path) -> Path:
    """Write a figure as .png or .svg, whole or not at all; the same figure gives the same bytes."""
    from matplotlib import rc_context

    kind = path.suffix[1:].lower()
    undated = {"Software": None} if kind == "png" else {"Date": None}
    with atomic_write(path) as aside, rc_context({"svg.hashsalt": "vitctl"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # it is drawn as a box
        figure.savefig(aside, format=kind, metadata=undated)
    return path
