"""Keys and values allowed in the JSON files that come with weights.

People write these files by hand, so every value is checked, and unknown keys are refused.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vitctl.errors import CheckpointError

_MOST = 2**31
_SHOWN, _DEEPEST = 40, 4


def _is_number(value: Any, least: float = -_MOST) -> bool:
    return type(value) in (int, float) and least <= value <= _MOST


def _is_whole(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value <= _MOST


def _is_list(value: Any, lengths: tuple[int, ...], fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and len(value) in lengths and all(map(fits, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_TINY = 1e-30  # stands for "above 0"
# Expected value in words -> its check.
_KINDS: Mapping[str, Callable[[Any], bool]] = {
    "an object": lambda value: isinstance(value, dict),
    "a text": _is_text,
    "a list of texts": lambda value: isinstance(value, list) and all(map(_is_text, value)),
    "true or false": lambda value: isinstance(value, bool),
    "a whole number": _is_whole,
    "a whole number above 0": lambda value: _is_whole(value, 1),
    "a whole number above 0, or a list of two": lambda value: (
        _is_whole(value, 1) or _is_list(value, (2,), lambda one: _is_whole(one, 1))
    ),
    "a number": _is_number,
    "a number above 0": lambda value: _is_number(value, _TINY),
    "a list of three numbers": lambda value: _is_list(value, (3,), _is_number),
    "a list of three numbers above 0": lambda value: _is_list(
        value, (3,), lambda one: _is_number(one, _TINY)
    ),
    "a list of three whole numbers": lambda value: _is_list(value, (3,), _is_whole),
    "a whole number above 0, or an object of them": lambda value: (
        _is_whole(value, 1)
        or (isinstance(value, dict) and bool(value) and all(_is_whole(one, 1) for one in value.values()))
    ),
    "an object of class numbers and names": lambda value: (
        isinstance(value, dict)
        and all(key.isascii() and key.isdigit() and len(key) < 10 for key in value)
        and all(map(_is_text, value.values()))
    ),
}
# Expected value in words -> dotted keys, objects before their contents.
Keys = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Known:
    """The known keys of one program's JSON file; any other key is refused.

    Args:
        used: the keys that are read.
        settled: keys that change what is computed -> the values that vitctl computes too.
        harmless: pattern of dotted keys that change no answer: training, other towers, descriptions, and what
            the tensors show.
    """

    used: Keys
    settled: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    harmless: str = ""


def checked(file: str, content: Mapping[str, Any], known: Known) -> dict[str, Any]:
    """Return a JSON file's content without nulls; `file` is its name for messages.

    Raises CheckpointError with the file, the key, its value, and what it should be.
    """
    found: dict[str, Any] = _without_nulls(content, _DEEPEST)
    for kind, paths in known.used.items():
        for path in paths:
            value = _at(found, path)
            if value is not None and not _KINDS[kind](value):
                raise CheckpointError(file, f"{path} is {_shown(value)}, should be {kind}")
    used = {path for paths in known.used.values() for path in paths}
    for place in ("", *known.used.get("an object", ())):
        for key, value in (_at(found, place) or {}).items():
            path = f"{place}.{key}".removeprefix(".")
            if path in used or re.fullmatch(known.harmless, path) or value in known.settled.get(key, ()):
                continue
            only = " or ".join(map(json.dumps, known.settled.get(key, ())))
            raise CheckpointError(
                f"{file}: {path} is {_shown(value)}, "
                + (f"only {only} is supported" if only else "a key that vitctl does not know")
                + "; if it changes nothing that is computed, remove it from the file"
            )
    return found


def _at(found: Any, path: str) -> Any:
    for part in filter(None, path.split(".")):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _shown(value: Any) -> str:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    shown = "deeper" if any(isinstance(one, dict | list) for one in parts) else json.dumps(value)
    return shown[:_SHOWN] + "..." * (len(shown) > _SHOWN)


def _without_nulls(value: Any, depth: int) -> Any:
    if not isinstance(value, Mapping) or not depth:
        return value
    return {key: _without_nulls(one, depth - 1) for key, one in value.items() if one is not None}
