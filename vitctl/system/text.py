"""Make untrusted text - file names, class names, server responses - safe to print, to log and to tabulate."""

import difflib
import re
import shlex
import sys
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_ALLOWED = "\n\t"
_SHORT = 3
# Similarity from 0 to 1 from which a word is suggested; in a word of three letters one may differ.
_CUTOFF, _CUTOFF_IF_SHORT = 0.7, 0.65
# These change text direction, so that a line reads as something else.
_DIRECTION = set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_CONTROL = ("Cc", "Cs", "Zl", "Zp")
# First characters of a cell that a spreadsheet reads as a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def is_control(letter: str) -> bool:
    """Return whether a character moves the cursor, breaks a line, sets direction, or is a surrogate."""
    return unicodedata.category(letter) in _CONTROL or letter in _DIRECTION


def printable(text: str) -> str:
    r"""Return the text with every control character but newline and tab escaped, such as \x1b."""
    if text.isprintable():
        return text
    return "".join(
        _escaped(letter) if is_control(letter) and letter not in _ALLOWED else letter for letter in text
    )


def one_line(text: str) -> str:
    """Return `printable` text with newlines and tabs escaped too: for a name inside a line."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def has_control(text: str) -> bool:
    """Return whether a name holds a control character, a newline or a surrogate."""
    return not text.isprintable() and any(map(is_control, text))


def breaks_line(text: str) -> bool:
    """Return whether a name holds a control character or line break, which vitctl refuses in names.

    Direction marks and bytes that are not UTF-8 occur in real names; they are allowed, and printed escaped.
    """
    return not text.isprintable() and any(
        unicodedata.category(letter) in ("Cc", "Zl", "Zp") for letter in text
    )


def escaped_json(text: str) -> str:
    """Return equivalent JSON text that is safe to print: control characters except newline are escaped."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(
        f"\\u{ord(letter):04x}" if is_control(letter) and letter != "\n" else letter for letter in text
    )


def same_name(text: str) -> str:
    """Return a name in NFC, for comparisons: macOS stores accents separately (NFD)."""
    return unicodedata.normalize("NFC", text)


def near_twins(names: Iterable[str]) -> list[list[str]]:
    """Return the groups of names that differ only in case, blanks, hidden characters or leading zeros."""
    groups: dict[str, list[str]] = {}
    for name in names:
        seen = "".join(one for one in name if unicodedata.category(one) != "Cf")
        plain = " ".join(re.split(r"[\s_-]+", unicodedata.normalize("NFKC", seen).casefold().strip()))
        groups.setdefault(plain.lstrip("0") or "0" if plain.isdecimal() else plain, []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def typed(path: object) -> str:
    """Return a path quoted for a shell, for commands that a user may paste."""
    return shlex.quote(str(path))


def typed_command(otherwise: str) -> str:
    """Return the vitctl command of this process, to paste and extend; `otherwise` in another program."""
    program = Path(sys.argv[0])
    is_vitctl = program.name == "vitctl" or program.parts[-2:] == ("vitctl", "__main__.py")
    return shlex.join(["vitctl", *sys.argv[1:]]) if is_vitctl else otherwise


def csv_cell(value: object) -> object:
    """Quote text that a spreadsheet would read as a formula."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def nearest(word: str, known: Iterable[str], max_words: int = 3) -> list[str]:
    """Return the known words that are most similar to `word`, closest first; none if all differ too much.

    Abbreviations of words with dots and underscores come first, in both directions, as wd for weight_decay.
    If none is similar, anagrams are returned, as digits for ditigs.
    """
    known = list(known)
    head, _, tail = word.rpartition(".")
    if short := [
        one for one in known if one.rpartition(".")[0] == head and _abbreviates(tail, one.rpartition(".")[2])
    ]:
        return short[:max_words]
    cutoff = _CUTOFF if len(word) > _SHORT else _CUTOFF_IF_SHORT
    if other_case := [one for one in known if one.lower() == word.lower()]:
        return other_case[:max_words]
    close = difflib.get_close_matches(word, known, n=max_words, cutoff=cutoff)
    return close or [one for one in known if sorted(one) == sorted(word)][:max_words]


def _abbreviates(one: str, other: str) -> bool:
    """Return whether one of two words consists of the first letters of the other's parts."""
    return any(
        "_" in long and short == "".join(p[:1] for p in long.split("_"))
        for short, long in ((one, other), (other, one))
    )


_SHORTEST = 2  # letters: `r` is not a misspelt `lr`


def one_edit_away(word: str, known: Iterable[str]) -> list[str]:
    """Return the known words one edit away from `word`: a letter added, removed, replaced or exchanged."""
    return [other for other in known if _is_one_edit(word, other)]


def _is_one_edit(one: str, other: str) -> bool:
    short, long = sorted((one, other), key=len)
    if len(long) - len(short) > 1 or one == other or len(short) < _SHORTEST:
        return False
    start = next(
        (i for i, pair in enumerate(zip(short, long, strict=False)) if pair[0] != pair[1]), len(short)
    )
    if len(short) < len(long):
        return short[start:] == long[start + 1 :]
    exchanged = short[start + 1 : start + 2] + short[start] + short[start + 2 :]
    return short[start + 1 :] == long[start + 1 :] or exchanged == long[start:]


def did_you_mean(words: Iterable[str]) -> str:
    text = " or ".join(words)
    return f"did you mean {text}?" if text else ""


class WrappedStream:
    """A text stream whose `write` is a subclass's; other attributes are those of `stream`."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class PlainStream(WrappedStream):
    """A stream that writes `printable` text, for stdout and stderr."""

    @property
    def rich_proxied_file(self) -> Any:
        """The stream that rich writes to: its own escape sequences must pass unchanged."""
        return getattr(self.stream, "rich_proxied_file", self.stream)

    def write(self, text: str) -> int:
        self.stream.write(printable(text))
        return len(text)


def _escaped(letter: str) -> str:
    code = ord(letter)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def count_text(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, such as "1 file" and "1,200 files"; the default plural adds an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def bytes_text(count: float) -> str:
    """Return a size in the largest unit that keeps it above one."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def share_text(share: float) -> str:
    """Return a share as a percentage, below 10 % with two significant digits."""
    percent = 100 * share
    return f"{percent:.0f}%" if percent >= 9.95 else f"{percent:.2g}%" if percent >= 0.01 else "< 0.01%"


def rate_text(value: float) -> str:
    """Return images/s as text, with appropriate precision."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
