"""`vitctl recipes list | show | explain | diff | check | table`."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from vitctl.cli.flags import Set
from vitctl.system.text import count_text

app = typer.Typer(
    help="Show and explain recipes: values, reasons and sources.",
    no_args_is_help=True,
)
Name = Annotated[
    str,
    typer.Argument(metavar="RECIPE", help="Shipped recipe or path of a .toml file"),
]

# Recipe group -> first parts of its recipes' names, in display order. Each is a word for `recipes list`.
GROUPS = {
    "first runs": ("quickstart", "smoke"),
    "your images, Table 4": ("finetune", "bit"),
    "foundation models": ("dinov2", "mae", "eva02", "beit2", "clip", "siglip2"),
    "ImageNet and CIFAR": ("augreg", "better", "cifar10", "deit3", "short"),
    "Table 3, JFT-300M": ("jft",),
    "Table 3, ImageNet-21k": ("in21k",),
    "Table 3, ImageNet": ("in1k",),
    "score and export": ("fewshot", "probe", "vtab", "evaluate", "export"),
    "figures": ("fig2", "fig3", "fig4", "fig5"),
    "masked patches": ("masked",),
    "appendix D": ("d1", "d2", "d3", "d4", "d5", "d6"),
}


@app.command("list")
def list_(
    word: Annotated[
        str | None,
        typer.Argument(
            metavar="WORD", help="First word of a recipe's name, or text in its name, job or description"
        ),
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="List every recipe with job and description")] = False,
) -> None:
    """List the kinds of shipped recipes; with a word or --all, each recipe.

    For example: vitctl recipes list pets
    Guide: docs/recipes.md
    """
    from vitctl.cli.show.console import say, show_table
    from vitctl.errors import RecipeError
    from vitctl.recipe.load import load_recipe, recipe_names
    from vitctl.recipe.sweep import find_sweep, sweep_names

    if word is None and not all_:
        _show_groups(recipe_names(), sweep_names())
        return
    rows = [(one.name, one.recipe.job, one.recipe.note) for one in map(load_recipe, recipe_names())]
    rows += [(name, "sweep", find_sweep(name).note) for name in sweep_names()]
    named = [row for row in rows if f"{row[0]}_".startswith(f"{word}_")]
    chosen = named or [row for row in rows if any((word or "").lower() in cell.lower() for cell in row)]
    if not chosen:
        raise RecipeError(
            f"no recipe has '{word}' in its name, job or note",
            fix="`vitctl recipes list --all` shows their names",
        )
    show_table(("recipe", "job", "description"), chosen, left=None)
    if word is not None:
        say(f"{len(chosen)} of {len(rows)}")


def _show_groups(recipes: Sequence[str], sweeps: Sequence[str]) -> None:
    from vitctl.cli.show.console import say, show_table

    first = [name.partition("_")[0] for name in recipes]
    counts = {title: Counter(one for one in first if one in words) for title, words in GROUPS.items()}
    counts["sweeps"] = Counter(name.partition("_")[0] for name in sweeps)
    rows = [(title, str(found.total()), "  ".join(found)) for title, found in counts.items() if found]
    show_table(("recipes", "number", "words for list"), rows, left=("words for list",))
    say("\nvitctl recipes list WORD   describe recipes with this word; --all: every recipe")
    say("vitctl recipes show NAME   show all values of a recipe")


@app.command()
def show(
    name: Name,
    origins: Annotated[bool, typer.Option("--origins", help="Show where each value was set")] = False,
    set_: Set = None,
) -> None:
    """Show a recipe with all inherited and default values.

    For example: vitctl recipes show in1k_b16 --origins
    Guide: docs/recipes.md
    """
    from vitctl.recipe.load import load_recipe, parse_override
    from vitctl.recipe.write import to_toml

    overrides = [parse_override(text) for text in set_ or ()]
    typer.echo(to_toml(load_recipe(name, overrides), origins=origins), nl=False)


@app.command()
def explain(
    key: Annotated[
        str,
        typer.Argument(
            metavar="KEY",
            help="Dotted key, e.g. optimizer.weight_decay, or a section",
        ),
    ],
) -> None:
    """Explain a key: type, unit, default and source in the paper.

    For example: vitctl recipes explain optimizer.weight_decay
    Guide: docs/recipes.md
    """
    from vitctl.recipe.write import explain as explain_key

    for line in explain_key(key):
        typer.echo(line)


@app.command()
def diff(first: Name, second: Name) -> None:
    """Show the values that differ between two recipes.

    For example: vitctl recipes diff in1k_b16 in1k_b32
    Guide: docs/recipes.md
    """
    from vitctl.cli.show.console import show_table
    from vitctl.recipe.load import load_recipe
    from vitctl.recipe.write import differences, toml_value

    rows = differences(load_recipe(first).recipe, load_recipe(second).recipe)
    if not rows:
        typer.echo(f"{first} and {second} set the same values")
        return
    cells = [(key, *("-" if value is None else toml_value(value) for value in pair)) for key, *pair in rows]
    show_table(("key", first, second), cells, left=None)


@app.command()
def check(
    paths: Annotated[
        list[Path] | None, typer.Argument(metavar="FILES", help="Recipe files; default: all shipped recipes")
    ] = None,
) -> None:
    """Check recipe files and print all problems.

    For example: vitctl recipes check mine.toml
    Guide: docs/recipes.md
    """
    from vitctl.errors import RecipeError
    from vitctl.recipe.load import load_recipe, recipe_names

    names = [str(path) for path in paths or ()] or recipe_names()
    problems = []
    for name in names:
        try:
            load_recipe(name)
        except RecipeError as error:
            problems.append(str(error))
    if problems:
        raise RecipeError("\n".join(problems))
    typer.echo(f"{count_text(len(names), 'recipe')} checked, no problem")


@app.command()
def table(
    number: Annotated[
        str | None,
        typer.Argument(
            metavar="TABLE", help="1 to 9, fig2, fig3, fig4, fig5, fig13, 4.6 or figures; default: all"
        ),
    ] = None,
    target: Annotated[
        list[str] | None, typer.Option("--target", "-t", help="Column to show, e.g. Pets; repeatable")
    ] = None,
    mfu: Annotated[
        float,
        typer.Option(
            "--mfu", help="Model FLOPs utilisation: share of the GPU's bf16 peak that training reaches"
        ),
    ] = 0.4,
    device: Annotated[
        str, typer.Option("--device", help="GPU for the cost in GPU-days: H100, A100, L4, ...")
    ] = "H100",
    runs: Annotated[Path, typer.Option("--runs", help="Folder of your runs")] = Path("runs"),
    plot: Annotated[
        Path | None, typer.Option("--plot", help="fig2, fig3, fig5, fig13: .png file to draw")
    ] = None,
) -> None:
    """Show the paper's tables: settings, the paper's results beside yours, and the cost of each run.

    For example: vitctl recipes table 2 --target ReaL
    Guide: docs/reproduce-the-paper.md
    """
    from vitctl.cli.show.paper_tables import show_paper_tables

    show_paper_tables(number, tuple(target or ()), runs, device, mfu, plot)
