"""The style of all matplotlib figures, and how they are written. Matplotlib is imported on demand."""

import importlib.util
import textwrap
import unicodedata
import warnings
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from PIL import ImageFont

from vitctl.system.files import atomic_write
from vitctl.system.text import one_line

INK, PALE, BLUE, GREY = "#222222", "#6b6b6b", "#2a6fbb", "#d9d9d9"
SERIES = (BLUE, "#c8553d", "#3d8b5f", "#8a5fb0", "#b58a2b", "#5c6b73")
NOT_INSTALLED = "matplotlib is not installed; pip install 'vitctl[plots]' brings it"

_DARK = {INK: "#e8eaed", PALE: "#a7b0ba", GREY: "#333a42", "#ffffff": "#14171b", "#000000": "#e8eaed"}
_HEADING, _LINE = 0.46, 0.15  # inches above a figure, and per line of facts
_LETTERS = 15.5  # letters of the facts per inch
_FOLDERS = ("/usr/share/fonts", "/usr/local/share/fonts", "~/.local/share/fonts", "~/.fonts")
_MOST_FONTS = 2000
_SPECIAL = ("Math", "Bold", "Oblique", "Italic", "Light", "Thin", "Black", "Mono", "Serif", "Condensed")
_NO_LETTER = "\uffff"


# Fonts: the first is Pillow's or matplotlib's; the machine's are used if a name needs one.


@cache
def _system_fonts() -> tuple[str, ...]:
    """Return paths of fonts: upright sans-serif ones of regular weight first."""
    found = [one for folder in _FOLDERS for one in Path(folder).expanduser().rglob("*.[to]t[fc]")]
    found.sort(key=lambda one: (sum(word in one.name for word in _SPECIAL), "Sans" not in one.name, one.name))
    return tuple(map(str, found[:_MOST_FONTS]))


@lru_cache(64)
def _font(path: str, size: int) -> Any:
    return ImageFont.truetype(path, size) if path else ImageFont.load_default(size)


@lru_cache(65_536)
def _has(path: str, letter: str) -> bool:
    """Return whether a font draws a letter, and not the placeholder box."""
    try:
        font = _font(path, 15)
        return letter.isspace() or bytes(font.getmask(letter)) != bytes(font.getmask(_NO_LETTER))
    except OSError:  # damaged, or a font of bitmaps in one size, as of coloured emoji
        return False


@lru_cache(4096)
def font_path(text: str, first: str = "") -> str:
    """Return the path of the font with the most letters of a text; `first` wins ties."""
    lacking = {letter for letter in text if not _has(first, letter) and unicodedata.category(letter) != "Cf"}
    if not lacking:
        return first
    counts = {path: sum(_has(path, letter) for letter in set(text)) for path in (first, *_system_fonts())}
    return max(counts, key=lambda path: counts[path])


def drawable(text: str, size: int, first: str = "") -> tuple[str, Any]:
    """Return a text spelled in letters that its font has, and Pillow's font of that size.

    Letters that no font has lose their accents, or become "[U+72AC]".
    """
    text = unicodedata.normalize("NFC", text)
    path = font_path(text, first)
    return "".join(_drawable(letter, path) for letter in text), _font(path, size)


@lru_cache(4096)
def _drawable(letter: str, path: str) -> str:
    kind = unicodedata.category(letter)
    if kind in ("Cf", "Mn") or 0xFE00 <= ord(letter) <= 0xFE0F:  # joiners, lone accents, variants of symbols
        return ""
    if _has(path, letter):
        return letter
    plain = unicodedata.normalize("NFKD", letter)
    if plain != letter:
        return "".join(_drawable(one, path) for one in plain)
    return f"[U+{ord(letter):04X}]"


def can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure that needs no screen; its size is in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


class Heading(NamedTuple):
    """The heading of a figure: what it shows, and for which weights, layer and images."""

    title: str
    facts: str


def headed_figure(width: float, height: float, heading: Heading) -> Any:
    """Return a figure with a body of this size, in inches, below a heading."""
    lines = textwrap.wrap(heading.facts, int(_LETTERS * width), break_long_words=False) or [""]
    whole = height + _HEADING + _LINE * len(lines)
    figure = new_figure(width, whole)
    figure.get_layout_engine().set(rect=(0, 0, 1, height / whole), w_pad=0.03, h_pad=0.03)
    left, style = 0.08 / width, {"va": "top", "color": INK}
    figure.text(left, 1 - 0.1 / whole, heading.title, fontsize=11, fontweight="bold", **style)
    facts = "\n".join(map(label_text, lines))
    figure.text(left, 1 - 0.34 / whole, facts, fontsize=8, linespacing=1.3, **style | {"color": PALE})
    return figure


def plain_axes(axes: Any, *, x: str = "", y: str = "", title: str = "", grid: str = "") -> None:
    """Make the labels small, and remove the frame above and to the right.

    Args:
        axes: of matplotlib.
        x, y, title: labels; "": unchanged.
        grid: "x", "y" or "both" draws grid lines behind the data.
    """
    axes.tick_params(labelsize=8, colors=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if grid:
        axes.grid(axis=grid, color=GREY, linewidth=0.6)
        axes.set_axisbelow(True)
    if x:
        axes.set_xlabel(x, fontsize=8, color=INK)
    if y:
        axes.set_ylabel(y, fontsize=8, color=INK)
    if title:
        axes.set_title(title, fontsize=9, color=INK)


def label_text(text: str) -> str:
    """Return a name as a label: dollar signs, control characters and undrawable letters are escaped."""
    return drawable(one_line(text), 15, _matplotlib_font())[0].replace("$", r"\$")


@cache
def _matplotlib_font() -> str:
    from matplotlib.font_manager import findfont

    return findfont("DejaVu Sans")


def save_figure(figure: Any, path: Path, title: str = "") -> Path:
    """Write a figure as .png or .svg by its suffix, atomically; the same figure gives the same bytes."""
    from matplotlib import rc_context
    from matplotlib.font_manager import FontProperties
    from matplotlib.text import Text

    first = _matplotlib_font()
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=9, color=INK)
    for text in figure.findobj(Text):
        if not text.get_text().isascii() and (font := font_path(text.get_text(), first)) != first:
            text.set_fontproperties(FontProperties(fname=font, size=text.get_fontsize()))
    kind = path.suffix[1:].lower()
    undated = {"Software": None} if kind == "png" else {"Date": None}
    with atomic_write(path) as aside, rc_context({"svg.hashsalt": "vitctl"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # drawn as a box
        figure.savefig(aside, format=kind, metadata=undated)
        if kind == "svg":
            aside.write_text(_follows_dark_mode(aside.read_text("utf-8")), "utf-8")
    return path


def _follows_dark_mode(svg: str) -> str:
    """Return a figure whose ink and paper change places where the reader prefers a dark screen."""
    rules = "".join(
        f'[style*="{kind}: {colour}"] {{ {kind}: {dark} !important; }}'
        for colour, dark in _DARK.items()
        for kind in ("fill", "stroke")
    )
    dark = f"@media (prefers-color-scheme: dark) {{ {rules} }}"
    return svg.replace("</style>", f" {dark}</style>", 1)
