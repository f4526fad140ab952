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


def plain_axes(axes: Any, *, x: str = "", y: str = "", title: str = "", grid: str = "") -> None:
    """Make the labels small, and remove the frame above and to the right.

    Args:
        axes: of matplotlib.
        x, y, title: labels; "": left as they are.
        grid: "x", "y" or "both" draws grid lines behind the data.
    """
    axes.tick_params(labelsize=8, colors=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if grid:
        axes.grid(axis=grid, color=GREY, linewidth=0.6)
        axes.set_axisbelow(True)
    if x:
        axes.set_xlabel(x, fontsize=8)
    if y:
        axes.set_ylabel(y, fontsize=8)
    if title:
        axes.set_title(title, fontsize=9, color=INK)


def label_text(text: str) -> str:
    """Return a name as a label: dollar signs do not start a formula, and control characters are escaped."""
    return one_line(text).replace("$", r"\$")


def save_figure(figure: Any, path: Path, title: str = "") -> Path:
    """Write a figure as .png or .svg, atomically; the same figure gives the same bytes.

    Args:
        figure: of matplotlib.
        path: the file; its suffix is the format.
        title: above all panels, at the left.
    """
    from matplotlib import rc_context

    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=9, color=INK)
    kind = path.suffix[1:].lower()
    undated = {"Software": None} if kind == "png" else {"Date": None}
    with atomic_write(path) as aside, rc_context({"svg.hashsalt": "vitctl"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # it is drawn as a box
        figure.savefig(aside, format=kind, metadata=undated)
    return path
