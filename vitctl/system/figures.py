"""The look of all matplotlib figures, and how they are written. Matplotlib is imported when it is needed."""

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
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure that needs no screen; its size is in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plain_axes(axes: Any) -> None:
    """Make the labels small, and remove the frame above and to the right."""
    axes.tick_params(labelsize=8, colors=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def label_text(text: str) -> str:
    """Return a name as a label: dollar signs do not start a formula, and control characters are escaped."""
    return one_line(text).replace("$", r"\$")


def save_figure(figure: Any, path: Path) -> Path:
    """Write a figure as .png or .svg, atomically; the same figure gives the same bytes."""
    from matplotlib import rc_context

    kind = path.suffix[1:].lower()
    undated = {"Software": None} if kind == "png" else {"Date": None}
    with atomic_write(path) as aside, rc_context({"svg.hashsalt": "vitctl"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # it is drawn as a box
        figure.savefig(aside, format=kind, metadata=undated)
    return path
