"""Text that others chose - file names, class names, answers of servers - as a person, a log or a table may safely show it."""

import difflib
import shlex
import unicodedata
from collections.abc import Iterable
from typing import Any

_KEPT = "\n\t"
_SHORT = 3
_NEAR, _NEAR_IF_SHORT = 0.7, 0.65  # of two words, from 0 to 1; of three letters one may be another
# They turn the direction of what follows, so that a line reads as something that it is not.
_DIRECTION = set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_CONTROL = ("Cc", "Cs", "Zl", "Zp")
# How a cell begins that a spreadsheet takes for a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def is_control(letter: str) -> bool:
    """Whether a character moves the cursor, breaks a line, turns the direction, or is half of a character."""
    return unicodedata.category(letter) in _CONTROL or letter in _DIRECTION


def printable(text: str) -> str:
    r"""The text with every control character but newline and tab written as an escape, such as \x1b; other text is unchanged."""
    if text.isprintable():
        return text
    return "".join(_escaped(letter) if is_control(letter) and letter not in _KEPT else letter for letter in text)


def one_line(text: str) -> str:
    """`printable`, with newlines and tabs as escapes too: for a name inside a line."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def has_control(text: str) -> bool:
    """Whether a name holds a character that no name needs: a control character, a newline, half a character."""
    return not text.isprintable() and any(map(is_control, text))


def ends_line(text: str) -> bool:
    """Whether a name holds a control character or a line break: what no file, class or image of ours may be called.

    Marks of direction and bytes that are not UTF-8 stand in names that people have, and are only shown as escapes.
    """
    return not text.isprintable() and any(unicodedata.category(letter) in ("Cc", "Zl", "Zp") for letter in text)


def escaped_json(text: str) -> str:
    """JSON text that means the same, with every control character but newline as an escape: it may be shown as it is."""
    if all(line.isprintable() for line in text.split("\n")):
        return text
    return "".join(f"\\u{ord(letter):04x}" if is_control(letter) and letter != "\n" else letter for letter in text)


def typed(path: object) -> str:
    """A path inside a command that may be pasted into a shell."""
    return shlex.quote(str(path))


def csv_cell(value: object) -> object:
    """A cell for a table that may be opened in a spreadsheet: text that would be a formula there gets a quote before it."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def nearest(word: str, known: Iterable[str], most: int = 3) -> list[str]:
    """The words that somebody may have meant, the nearest first."""
    return difflib.get_close_matches(word, list(known), n=most, cutoff=_NEAR if len(word) > _SHORT else _NEAR_IF_SHORT)


def did_you_mean(words: Iterable[str]) -> str:
    """The question, with some words that may have been meant; "" without any."""
    text = " or ".join(words)
    return f"did you mean {text}?" if text else ""


class PlainStream:
    """A text stream that shows what is written as `printable`: for standard streams, which terminals and logs take.

    Args:
        stream: takes the text, and everything else that is asked of this one.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    @property
    def rich_proxied_file(self) -> Any:
        """Where rich writes: its own escapes are wanted."""
        return getattr(self.stream, "rich_proxied_file", self.stream)

    def write(self, text: str) -> int:
        """Write the text with its control characters as escapes; returns the characters taken."""
        self.stream.write(printable(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each of the texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _escaped(letter: str) -> str:
    code = ord(letter)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
