"""Addresses of files: which may be requested, and which part of an address may be stored.

The text of an address is scheme, host, port and path. Only the text is stored, printed, hashed and compared.
Its query may be a signature or a token: `without_queries` moves it to the environment variable
VITCTL_ADDRESSES, which the processes of a run inherit, and only `with_query` returns it, for the HTTP client.
Users set the same variable to supply a query again.
"""

import os
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from vitctl.errors import LaunchError, RecipeError, VitctlError, refuse
from vitctl.system.text import has_control, one_line

VARIABLE = "VITCTL_ADDRESSES"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_MAX_LETTERS = 100_000  # limit of the variable: Linux passes 131,072 bytes to a process
_MAX_PORT = 65_535
_WEB = ("http", "https")
_START = r"""(?:(?<![a-z0-9+.-])[a-z0-9+.-]*://|(?<![^='",@\s])https?:(?!//))"""
# In quotes up to the closing one, in a list up to the next address, else to the end: spaces are errors then.
_ADDRESS = re.compile(
    rf"""(?<="){_START}[^"]*|(?<='){_START}[^']*|{_START}(?:(?!,{_START}).)*""", re.I | re.S
)
_IN_PROSE = re.compile(rf"{_START}\S*", re.I)
_HOST = re.compile(r"(?:[\w.-]+|\[[0-9a-f:.]+\])(?::(\d{1,5}))?", re.I)
_SPLIT = re.compile(r":[a-z][^:]*(?:\[.*)?$", re.I)  # after a host without a path, as in predict
_NAME = re.compile(r"[\w.-]+")
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+:/)", re.I)  # pathlib merges two slashes
_HALF = re.compile(
    r"(?:hf:(?![\w.-]+/[\w./-]+$)|(?:s3|gs|az|https?|pipe):)(?!//)"
)  # its query is not known to be one, and would be printed


def without_queries(*texts: str, error: type[VitctlError] = RecipeError, over: bool = True) -> list[str]:
    """Return texts with every address in them reduced to its text; queries are kept for the HTTP client.

    Args:
        texts: addresses, lists of them, or any other texts, which are unchanged.
        over: replace the query that an address already has; False for files, which may be older than the
            command line.

    Raises:
        error: an address is malformed or names a user, or has two queries. The message holds no secret.
    """
    found: dict[str, str] = {}
    for half in filter(None, map(_HALF.match, texts)):
        if half[0] == "pipe:":
            raise error("pipe", "commands are never run", "give a path or an address")
        raise error(f"{half[0]} is the start of an address, which has '//' after it: {half[0]}//...")

    def text_of(match: re.Match[str]) -> str:
        text, query = split(match[0], error)
        if query and {*"{}"} & {*query}:
            raise error(text, "has a brace after the '?'", "write the query once, at the end of the pattern")
        if query and found.setdefault(text, query) != query:
            raise error(
                text, "is given with two queries; addresses are identified by the text before the '?'"
            )
        return text

    reduced = [_pattern(text).sub(text_of, text) if ":" in text else text for text in texts]
    if new := {text: query for text, query in found.items() if over or with_query(text) == text}:
        held = sorted({**_held(), **_by_scope(new.items())}.items())
        value = "\n".join(f"{scope}?{query}" for scope, query in held)
        if len(value) > _MAX_LETTERS:
            raise error(
                f"the queries of {len(held):,} addresses have more than {_MAX_LETTERS:,} letters",
                fix="sign the folder, not each file",
            )
        os.environ[VARIABLE] = value
    return reduced


def check_local(said: str, path: object, error: type[Exception] = RecipeError) -> str:
    """Return a local path, given by the option or key `said`; raises `error` for an address."""
    if match := _SCHEME.match(str(path)):
        raise error(
            f"{said}{' ' * bool(said)}{match[1]}/...",
            "is an address, should be a path on a local or mounted disk",
            "`vitctl resume s3://BUCKET/NAME` fetches a run"
            if said in ("RUN", "RUNS")
            else "copy the files from or to the address yourself",
        )
    return str(path)


def value_without_queries(value: Any, *, over: bool = True) -> Any:
    """Return a recipe value, nested or not, with every text in it reduced by `without_queries`."""
    match value:
        case str() if ":" in value:
            return without_queries(value, over=over)[0]
        case dict():
            return {
                key: inner if isinstance(inner, int | float) else value_without_queries(inner, over=over)
                for key, inner in value.items()
            }
        case list() | tuple():
            return type(value)(value_without_queries(inner, over=over) for inner in value)
    return value


def with_query(text: str) -> str:
    """Return an address with its query, or that of a folder above it; for the HTTP client only."""
    held = _held()
    above = (scope for scope in held if text == scope or text.startswith(f"{scope}/"))
    scope = max(above, key=len, default="")
    return f"{text}?{held[scope]}" if scope else text


def check(address: str, error: type[VitctlError], schemes: tuple[str, ...] = ()) -> str:
    """Return the text of an address that may be requested: https, http from this machine, or `schemes`.

    Raises `error`, whose message holds no secret, also for a user name or a path that leaves its folder.
    """
    (given,) = without_queries(address, error=error)
    text, _ = split(given, error)
    scheme, _, place = text.partition("://")
    host, _, path = place.partition("/")
    known = ", ".join(f"{one}://" for one in ("https", *schemes))
    refuse(
        error,
        (
            scheme == "http" and host and urlsplit(text).hostname not in LOOPBACK,
            text,
            "plain http is allowed from this machine only, because it is not protected against changes",
            "use https",
        ),
        (
            scheme not in (*_WEB, *schemes) or not host,
            one_line(text),
            f"files are read over {known}",
            "commands are never run",
        ),
        (
            ".." in path.split("/") or any(map(str.isspace, path)),
            text,
            "contains '..' or a space, should be a plain address",
        ),
    )
    return text


def split(address: str, error: type[VitctlError]) -> tuple[str, str]:
    """Return text and query of one address. A fragment is dropped: no server receives it.

    Raises `error` if it is malformed or names a user; the message omits what may be a password.
    """
    head = re.split(r"[?#]", address, maxsplit=1)[0]
    query = address[len(head) + 1 :].partition("#")[0] if address[len(head) :].startswith("?") else ""
    scheme, slashes, place = head.partition("://")
    host, slash, path = place.partition("/")
    scheme, is_web = scheme.lower(), scheme.lower() in _WEB
    hidden = f"{one_line(scheme.partition(':')[0])}:{'//' * bool(slashes)}..."
    refuse(
        error,
        (
            not slashes,
            hidden if ":" in head else one_line(head),
            "is not an address, such as https://HOST/PATH",
            "commands are never run",
        ),
        (
            # A password may hold '/', '?' or '#', which end the host.
            "@" in (address if not slash else head if ":" in host else host),
            hidden,
            "names a user or a password before '@', which vitctl never sends",
            "leave it out",
        ),
    )
    chosen = _SPLIT.search(host) if is_web and not slash else None
    host, split_name = (host[: chosen.start()], chosen[0]) if chosen else (host, "")
    valid = (_HOST if is_web else _NAME).fullmatch(host)
    if (is_web or query) and host and (not valid or int((is_web and valid[1]) or 0) > _MAX_PORT):
        raise error(hidden, f"host or port is not valid, should be {scheme}://HOST/PATH")
    text = f"{scheme}://{host.lower() if is_web else host}{split_name}{slash}{path}"
    is_odd = has_control(address) or "\\" in address or (is_web and any(map(str.isspace, address)))
    refuse(
        error,
        (
            is_odd,
            f"{scheme}://{host}/..." if valid else hidden,
            "contains a space, a control character or a backslash",
        ),
        # It may be part of a name there, and would be dropped.
        ("#" in address and not is_web, text if valid else hidden, "has a '#'", "rename the file or folder"),
        (
            query and not is_web,
            text if valid else hidden,
            "has a query (?...), which only https:// addresses have",
        ),
    )
    return text, query


def _pattern(text: str) -> re.Pattern[str]:
    """Return the pattern of addresses in a text; in prose, which begins with words, they end at a space."""
    first = _IN_PROSE.search(text)
    before = text[: first.start()] if first else ""
    return _IN_PROSE if any(map(str.isspace, before)) and before[-1] not in "\"'" else _ADDRESS


def _held() -> dict[str, str]:
    """Return scope -> query, from the environment."""
    return _parsed(os.environ.get(VARIABLE, ""))


@lru_cache(maxsize=2)
def _parsed(value: str) -> dict[str, str]:
    try:
        found = (split(address, LaunchError) for address in value.split())
        return _by_scope((text, query) for text, query in found if query)
    except LaunchError as error:
        raise LaunchError(VARIABLE, error) from None


def _by_scope(found: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Map scopes to queries: a shard's scope is its folder, with the index, unless its query differs."""
    held: dict[str, str] = {}
    for text, query in found:
        folder = text.partition("{")[0].rpartition("/")[0]
        is_shard = text.endswith(".tar") or "{" in text
        scope = folder if is_shard and folder.count("/") > 1 else text.rstrip("/")
        if held.setdefault(scope, query) != query:
            held[text] = query
    return held
