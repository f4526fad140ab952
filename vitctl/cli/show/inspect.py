"""`vitctl inspect`: from its options to the pictures, and what is printed about them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitctl.cli.common import check_flags, fitted
from vitctl.cli.data.shards import bar
from vitctl.cli.show.download import fetch_weights
from vitctl.cli.show.render import CONSOLE, show_table
from vitctl.errors import RecipeError, writing
from vitctl.jobs.inspection import NUMBERS, Row, inspect
from vitctl.recipe.load import Override, load_recipe, parse_override
from vitctl.recipe.schema import Evaluate
from vitctl.system.text import typed


def run_inspect(
    sources: Sequence[str],
    images: Sequence[str],
    flags: Mapping[str, tuple[str, Any]],
    sets: Sequence[str],
    out: Path,
    *,
    num_images: int,
    seed: int,
) -> None:
    """Draw the pictures, and print a line for each.

    Args:
        sources: of --from; none: the newest run.
        images: files and folders.
        flags: everyday flag -> (dotted key, value) of an `evaluate` recipe; None values were not given.
        sets: texts of --set.
        out: folder.
        num_images, seed: which images.

    Raises:
        RecipeError: images and a data set are given, or a flag is empty.
    """
    given = {flag: value for flag, (_, value) in flags.items()}
    check_flags(given | {"--from": "" if "" in sources else None})
    data = next((flag for flag in ("--data", "--dataset", "--split") if given.get(flag) is not None), "")
    if images and data:
        raise RecipeError(f"{images[0]} and {data}: both name images; leave one of them out")
    overrides = [Override("machine.precision", "float32", "vitctl inspect"), *map(parse_override, sets)]
    overrides += [Override(key, value, flag) for flag, (key, value) in flags.items() if value is not None]
    recipe = fitted(load_recipe("evaluate", overrides, job="evaluate"), in_time=False).recipe
    assert isinstance(recipe, Evaluate)
    for source in sources:
        if "://" in source:
            fetch_weights(source)
    with writing(out), bar("looking at images") as progress:
        rows = inspect(
            recipe,
            sources or (recipe.weights.source,),
            images,
            out,
            num_images=num_images,
            seed=seed,
            done=progress or (lambda _done, _total: None),
        )
    _show(rows, out)


def _show(rows: Sequence[Row], out: Path) -> None:
    for name in dict.fromkeys(row.weights for row in rows):
        own = [row for row in rows if row.weights == name]
        show_table((name, ""), [(row.part.replace("_", " "), row.text) for row in own], left=None)
    drawn = [file for row in rows for file in row.files]
    kinds = len({file.with_suffix("") for file in drawn})
    CONSOLE.print(
        f"{kinds} picture{'s' * (kinds != 1)}, each as .png and .svg, and {NUMBERS} in {typed(out)}; `vitctl "
        f"report RUN` shows those "
        "in RUN/inspect",
        markup=False,
        soft_wrap=True,
    )
