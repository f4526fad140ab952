"""Files and JSON values as they come out of damage, or out of somebody's bad intention."""

import copy
import json
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

Check = Callable[[bytes], str]
MOST_SECONDS, MOST_BYTES = 5.0, 2**30

# What hand-made JSON holds where something else should be.
NASTY: tuple[Any, ...] = (
    None, True, -1, 0, 10**9, 10**30, -(2**63), 0.5, 1e308, float("nan"), float("inf"), "", "1", "\x1b[2J",
    "a\nb", "\ud800",
    "../../etc/passwd", "x" * 5000, [], {}, [[]], [1] * 1000, {"a": {"a": {}}},
)  # fmt: skip


@contextmanager
def bounded() -> Iterator[None]:
    """Check that the block takes little time, and little memory beyond what was taken before."""
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.process_time() - began < MOST_SECONDS
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MOST_BYTES


@st.composite
def mutated(draw: st.DrawFn, good: tuple[bytes, ...], *, same_size: bool = False) -> bytes:
    """One of the files after one to four changes: bytes overwritten, cut out, put in, repeated or cut off."""
    data = bytearray(draw(st.sampled_from(good)))
    for _ in range(draw(st.integers(1, 4))):
        begin = draw(st.integers(0, max(len(data) - 1, 0)))
        end = min(len(data), begin + draw(st.sampled_from([1, 1, 2, 4, 8, 100, 512, 3000])))
        new = draw(
            st.sampled_from([b"\0", b"\xff", b"9", b"/", b"-", b'"', b"\xff\xd9"])
            | st.binary(min_size=1, max_size=9)
        )
        how = (
            "overwrite" if same_size else draw(st.sampled_from(["overwrite", "cut", "put", "repeat", "end"]))
        )
        if how == "overwrite":
            data[begin:end] = (new * (end - begin))[: end - begin]
        elif how == "end":
            del data[begin:]
        else:
            data[begin : end if how == "cut" else begin] = {
                "cut": b"",
                "put": new,
                "repeat": data[begin:end],
            }[how]
    return bytes(data)


def fuzz(check: Check, files: st.SearchStrategy[bytes], num_examples: int) -> Counter[str]:
    outcomes: Counter[str] = Counter()

    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(files)
    def inner(data: bytes) -> None:
        outcomes[check(data)] += 1

    inner()
    return outcomes


_DEEP = "a value nested deep"


@st.composite
def mutated_json(draw: st.DrawFn, good: Any) -> bytes:
    """The text of a JSON value after one to three changes: a value replaced, removed, put under another name,
    or nested deep.
    """
    value = json.loads(json.dumps(good))
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(value))
        if not places:
            break
        holder, key = draw(st.sampled_from(places))
        how = draw(st.sampled_from(["replace", "replace", "replace", "remove", "rename", "deep"]))
        if how == "replace":
            holder[key] = copy.deepcopy(
                draw(st.sampled_from(NASTY))
            )  # a later change must not reach into the list
        elif how == "deep":
            holder[key] = _DEEP
        else:
            taken = holder.pop(key)
            if how == "rename" and isinstance(holder, dict):
                holder[draw(st.sampled_from(["", "x", "__class__", "\x1b]0;"]))] = taken
    return json.dumps(value).replace(json.dumps(_DEEP), "[" * 900 + "]" * 900).encode()


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (holder, key) of a JSON value, however deep."""
    places: list[tuple[Any, Any]] = []
    holders = [value]
    for holder in holders:  # it grows while it is walked
        if isinstance(holder, dict | list):
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            places += [(holder, key) for key in keys]
            holders += [holder[key] for key in keys]
    return places
