"""No view of a split hides where its images came from."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable

import numpy as np
import pytest

import vitctl.data
from tests.data.conftest import MakeSplit
from vitctl.data.source.exclusion import Without
from vitctl.data.source.image_files import ImageFiles
from vitctl.data.source.provenance import source_text, source_texts, split_sources
from vitctl.data.source.read import Concat, ShardSource, Source, Subset, SyntheticSource
from vitctl.data.source.subsets import Relabelled, of_classes, random_subset

MEMBERS = {"digest", "labels", "key", "location", "read", "__len__"}
ROWS = np.arange(4)

# One of every kind of source that vitctl has, over a stored split of the classes a, b, c.
VIEWS: dict[type, Callable[[Source], Source]] = {
    Subset: lambda source: Subset(source, ROWS),
    Without: lambda source: Without(source, ROWS),
    Relabelled: lambda source: Relabelled(source, ("x", "y", "z"), np.array([2, 1, 0, -1])),
    Concat: lambda source: Concat((source, source)),
}
HOLDERS: set[type] = {ShardSource, SyntheticSource, ImageFiles}


def kinds() -> set[type]:
    """Every class of vitctl.data that can stand for a source."""
    modules = [
        importlib.import_module(found.name)
        for found in pkgutil.walk_packages(vitctl.data.__path__, "vitctl.data.")
    ]
    classes = {one for module in modules for _, one in inspect.getmembers(module, inspect.isclass)}
    ours = {one for one in classes if one.__module__.startswith("vitctl.data")}
    return {one for one in ours if set(dir(one)) >= MEMBERS} - {Source}


def test_kinds__each_one_says_what_it_is_a_view_of() -> None:
    assert kinds() == {*VIEWS, *HOLDERS}, (
        "a new kind of source: say its parts, and put one into VIEWS or HOLDERS"
    )
    assert [
        one.__name__ for one in kinds() if not (hasattr(one, "parts") or "parts" in one.__annotations__)
    ] == []


@pytest.mark.parametrize("kind", VIEWS, ids=lambda kind: kind.__name__)
def test_origins__are_heard_through_every_view(make_split: MakeSplit, kind: type) -> None:
    split = ShardSource(make_split(20))
    view = VIEWS[kind](split)
    assert set(view.parts) == {split}
    assert set(split_sources(view)) == {split}
    assert source_texts(view) == source_texts(split) == ("noise",)


@pytest.mark.parametrize("outer", VIEWS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("inner", VIEWS, ids=lambda kind: kind.__name__)
def test_origins__are_heard_through_views_of_views(make_split: MakeSplit, outer: type, inner: type) -> None:
    assert source_texts(VIEWS[outer](VIEWS[inner](ShardSource(make_split(20))))) == ("noise",)


def test_split_sources__are_found_below_views(make_split: MakeSplit) -> None:
    one, other = ShardSource(make_split(20)), ShardSource(make_split(9, "test"))
    whole = Concat((random_subset(one, 5, 0), of_classes(other, ("a", "b", "c"))))
    assert split_sources(whole) == (one, other)
    assert source_text(whole) == "noise"
    assert split_sources(SyntheticSource(3, 3, 8)) == ()
    assert source_text(SyntheticSource(3, 3, 8)) == ""
