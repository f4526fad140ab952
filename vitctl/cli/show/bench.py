"""`vitctl bench`: from its options to the numbers, and how they are printed."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from vitctl.cli.flags import check_flags
from vitctl.cli.run_job import processes_from_launcher, start_command
from vitctl.cli.show.console import CONSOLE, show_table
from vitctl.engine.preemption import die_with_parent, stop_on_signals
from vitctl.errors import RecipeError, writing
from vitctl.launch.environment import Member
from vitctl.models.variants import variant
from vitctl.recipe.load import Override, load_recipe, parse_override
from vitctl.recipe.schema import Finetune, Pretrain
from vitctl.recipe.sections import Model
from vitctl.system.figures import NOT_INSTALLED, can_plot
from vitctl.system.files import write_json
from vitctl.system.text import bytes_text

DEFAULT_RECIPE = "in1k_b16"
_PLOT = Path("speed.png")
_BAR, _QUIET_SECONDS, _CELL_SECONDS = 30, 10.0, 8.0
Flags = Mapping[str, tuple[str, Any]]


@dataclass(frozen=True)
class Asked:
    """What all measurements take: models, recipe (None: the default), seconds, threads, the .json, and texts
    of --set.
    """

    names: tuple[str, ...]
    recipe: str | None
    seconds: float
    threads: int | None
    json: Path | None
    sets: tuple[str, ...]

    def check(self) -> None:
        """Raises RecipeError where --json cannot be written: said before anything is measured."""
        if self.json is not None:
            check_target("--json", self.json, (".json",))


def check_target(flag: str, file: Path, kinds: tuple[str, ...]) -> None:
    """Raises RecipeError where a file has another ending, is a folder, or its folder takes no files."""
    if file.suffix.lower() not in kinds:
        raise RecipeError(f"{flag} {file}: should be the name of a {' or '.join(kinds)} file")
    if file.is_dir():
        raise RecipeError(f"{flag} {file}: is a folder, should be a file")
    folder = next(path for path in file.absolute().parents if path.exists())
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise RecipeError(f"{flag} {file}: no file can be written into {folder}")


def run_model(asked: Asked, flags: Flags, *, batch_size: int | None, synthetic: bool, compiled: bool) -> None:
    """Measure a recipe's training step, print it, and write its numbers."""
    from vitctl.bench.training import SYNTHETIC_IMAGES

    asked.check()
    if len(asked.names) > 1:
        raise RecipeError(
            f"{' '.join(asked.names)}: a training step is measured of one model; several need --resolutions"
        )
    member = start_command()
    if member is not None:
        die_with_parent()
    recipe, name = chosen_recipe(
        asked, {**flags, "--synthetic": ("data.synthetic", SYNTHETIC_IMAGES if synthetic else None)}, member
    )
    if recipe.machine.processes > 1 and member is None:
        from vitctl.launch.same_command import run_in_processes

        raise typer.Exit(run_in_processes(recipe))
    from vitctl.bench.budget import Budget
    from vitctl.bench.model import bench_model

    _set_threads(asked.threads)
    with stop_on_signals() as stop, progress() as say:
        budget = Budget(asked.seconds, stop, say)
        result = bench_model(recipe, budget, batch_size=batch_size, compiled=compiled)
    if member is not None and member.rank > 0:
        return
    result = {"recipe": name, "seconds_asked": asked.seconds, "set": list(asked.sets), **result}
    _write(result, asked.json)
    show_model(result)
    _finish(asked.json, stop.raised, exits=member is None)


def chosen_recipe(
    asked: Asked, flags: Flags, member: Member | None = None
) -> tuple[Pretrain | Finetune, str]:
    """The recipe that is measured, and its name; a model alone is measured as a plain network in the default
    recipe.

    Raises:
        RecipeError: no such recipe or model, or it does not train.
    """
    check_flags({flag: value for flag, (_, value) in flags.items()})
    overrides = [parse_override(text) for text in asked.sets]
    own = [one for one in overrides if one.key.startswith("model.")]
    plain = asked.names and asked.recipe is None
    given = [one for one in overrides if not (plain and one in own)]
    given += [Override("model.name", asked.names[0], asked.names[0])] if asked.names and not plain else []
    given += [Override(key, value, flag) for flag, (key, value) in flags.items() if value is not None]
    given += processes_from_launcher(member)
    name = asked.recipe or DEFAULT_RECIPE
    if asked.names and not plain and load_recipe(name).recipe.job == "finetune":
        raise RecipeError(
            f"{asked.names[0]}: the network of recipe '{name}' is that of its weights: --set "
            f"weights.source=RUN, and no name"
        )
    recipe = load_recipe(name, given).recipe
    if not isinstance(recipe, Pretrain | Finetune):
        raise RecipeError(
            f"recipe '{name}' is for `vitctl {recipe.job}`: bench takes one of pretrain or finetune"
        )
    if not plain:
        return recipe, f"{asked.names[0]} in {name}" if asked.names else name
    variant(asked.names[0])
    assert isinstance(recipe, Pretrain)
    fields = {one.key.partition(".")[2]: one.value for one in own}
    if unknown := [key for key in fields if key not in Model.model_fields]:
        raise RecipeError(f"--set model.{unknown[0]}: no such key; see `vitctl recipes explain model`")
    changed = Model(**{**fields, "name": asked.names[0]})
    return recipe.model_copy(
        update={"model": changed}
    ), f"{asked.names[0]}, trained as {name}, without dropout"


def run_resolutions(
    asked: Asked, resolutions: str | None, flags: Flags, plot: Path | None, seconds: float | None = None
) -> None:
    """Measure forward passes at several resolutions, print a table, and write the plot and its numbers."""
    from vitctl.bench.budget import Budget
    from vitctl.bench.speed import MODELS, bench_resolutions, parse_sides

    asked.check()
    if resolutions is None:
        raise RecipeError(f"--plot {plot} draws speed against resolution: give --resolutions 64..512 with it")
    others = [flag for flag, (_, value) in flags.items() if value is not None and flag != "--precision"]
    if asked.recipe is not None or others or asked.sets:
        odd = "--recipe" if asked.recipe is not None else (*others, "--set")[0]
        raise RecipeError(
            f"{odd}: --resolutions measures networks by their names, and no recipe; leave it out"
        )
    picture = plot or _PLOT
    numbers = asked.json or picture.with_suffix(".json")
    check_target("--plot", picture, (".png", ".svg"))
    check_target("--plot", numbers, (".json",))
    sides = parse_sides(resolutions)
    precision = next((value for flag, (_, value) in flags.items() if flag == "--precision" and value), "auto")
    _set_threads(asked.threads)
    with stop_on_signals() as stop, progress() as say:
        models = asked.names or MODELS
        budget = Budget(seconds or _CELL_SECONDS * len(models) * len(sides), stop, say)
        result = bench_resolutions(models, sides, budget, precision=precision)
    if result["cells"]:
        _write(result, numbers)
        said = _draw(result, picture)
    show_resolutions(result)
    if not result["cells"]:
        raise typer.Exit(3)
    CONSOLE.print(said, markup=False, soft_wrap=True)
    _finish(numbers, stop.raised)


def _draw(result: Mapping[str, Any], picture: Path) -> str:
    """Draw the plot where that is possible, and say so."""
    if not can_plot():
        return f"no plot: {NOT_INSTALLED}"
    from vitctl.report.speed_plot import draw_speed

    with writing(picture):
        picture.parent.mkdir(parents=True, exist_ok=True)
        draw_speed(result, picture)
    return f"plot: {picture}"


def _set_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def _write(result: Mapping[str, Any], json: Path | None) -> None:
    """Write the numbers, before anything is printed: whoever reads the screen may close the pipe."""
    if json is not None:
        with writing(json):
            json.parent.mkdir(parents=True, exist_ok=True)
            write_json(json, result)


def _finish(json: Path | None, stopped: bool, *, exits: bool = True) -> None:
    """Name the file; ends with code 3 where a signal cut the measurement short, unless a launcher says so."""
    if json is not None:
        CONSOLE.print(f"numbers: {json}", markup=False, soft_wrap=True)
    if stopped:
        CONSOLE.print("stopped early: what was measured until then is above", style="bold yellow")
        if exits:
            raise typer.Exit(3)


@contextmanager
def progress() -> Iterator[Any]:
    """What is measured now: one line on a terminal, elsewhere a line every ten seconds on standard error."""
    if CONSOLE.is_terminal:
        with CONSOLE.status("starting") as status:
            began = time.monotonic()

            def show(text: str) -> None:
                status.update(f"{time.monotonic() - began:4.0f} s  {text}")

            yield show
        return
    last = time.monotonic()

    def say(text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= _QUIET_SECONDS:
            last = time.monotonic()
            typer.echo(f"measuring: {text}", err=True)

    yield say


def show_model(result: Mapping[str, Any]) -> None:
    """Print a training step: what was measured, its speed and memory, where the time goes, what was tried,
    the verdict.
    """
    r = result
    show_table(("", ""), _model_rows(r), left=None, title=f"bench model: {r['recipe']}")
    CONSOLE.print()
    show_split(r["split"], f"a step of {r['batch_size']:,} images", r["seconds"])
    if not r["workers"] and r["data"] == "noise":
        CONSOLE.print(
            "data: not measured with noise images; `vitctl bench data` measures a loader", soft_wrap=True
        )
    if r["processes"] == 1:
        CONSOLE.print("communication: none, one process")
    elif "communication" not in r["split"]:
        CONSOLE.print("communication: part of backward here, where it cannot be left out", soft_wrap=True)
    if r["trials"]:
        CONSOLE.print()
        rows = [
            (f"{t['knob']} = {t['value']}", f"{t['gain']:+.0%}", f"{t['wins']} of {t['rounds']}")
            for t in r["trials"]
        ]
        show_table(("tried", "images/s", "rounds won"), rows)
    CONSOLE.print()
    for note in r["notes"]:
        CONSOLE.print(f"note: {note}", markup=False, soft_wrap=True)
    CONSOLE.print(r["verdict"], style="bold", markup=False, soft_wrap=True)
    if r["setting"]:
        CONSOLE.print(f"try: --set {r['setting']}", markup=False, soft_wrap=True)


def _model_rows(r: Mapping[str, Any]) -> list[tuple[str, str]]:
    kernels = [r["precision"], f"attention {r['attention']}, linear {r['linear']}"]
    kernels += ["compiled"] * r["compile"] + ["blocks recomputed"] * r["checkpoint_blocks"]
    machine = r["machine"]
    where = f"{machine['device_name']}, {machine['threads']} thread{'s' * (machine['threads'] > 1)} of {machine['cores']} cores"
    if machine["device"] == "cuda":
        where = machine["device_name"]
    each = f" in each of {r['processes']} processes" if r["processes"] > 1 else ""
    rows = [
        (
            "network",
            f"{r['parameters']:,} parameters, {r['image_size']} pixels, {r['flops_per_image'] / 1e9:.4g} "
            f"GFLOPs an image (with backward)",
        ),
        ("update", f"{r['batch_size']:,} images, {r['micro_batch']:,} in a pass{each}; {', '.join(kernels)}"),
        ("images", f"{r['data']}, {r['workers']} loader worker(s)" if r["data"] != "noise" else "noise"),
        ("machine", f"{where}, load {machine.get('load', 0):.1f}"),
        ("speed", f"{_rate(r['images_per_second'])} images/s (mean of {r['steps']} steps{_spread(r)})"),
    ]
    if r["recipe_batch_size"] != r["batch_size"]:
        text = f"{_rate(r['recipe_images_per_second'])} images/s, the optimizer's time shared by more images"
        rows.append(("", f"in the recipe's {r['recipe_batch_size']:,}: {text}"))
    rows += [
        ("", f"{r['tflops']:.3g} TFLOP/s, MFU {r['mfu']:.0%} of {r['peak_tflops']:.3g}: {r['mfu_against']}"),
        (
            "memory",
            f"{bytes_text(r['peak_memory_bytes'])} at the peak, {bytes_text(r['free_memory_bytes'])} more "
            f"are free",
        ),
    ]
    if r["largest_micro_batch"]:
        rows.append(("largest pass", _largest(r["largest_micro_batch"])))
    return rows


def _spread(r: Mapping[str, Any]) -> str:
    """The slowest and the fastest step: how quiet the machine was."""
    fast, slow = (r["batch_size"] / pick(r["step_seconds"]) for pick in (min, max))
    return f", {_rate(slow)} to {_rate(fast)}" if len(r["step_seconds"]) > 1 else ""


def _largest(one: Mapping[str, Any]) -> str:
    how = "tried" if one["tried"] else "from the memory of smaller ones"
    ends = {
        "memory": "then memory ends",
        "batch": "all that the recipe asks for",
        "time": "no time to try more",
    }
    each = f", {bytes_text(one['image_bytes'])} each" if one["image_bytes"] else ""
    return f"{one['images']:,} images ({how}{each}; {ends[one['bound']]})"


def show_split(split: Mapping[str, float], title: str, whole: float) -> None:
    """Parts of a time, with bars; they add up to the whole."""
    rows = [
        (name, _time(seconds), f"{seconds / whole:.1%}", "#" * round(_BAR * seconds / whole))
        for name, seconds in split.items()
    ]
    show_table((title, _time(whole), "share", ""), rows, left=("",))


def _time(seconds: float) -> str:
    return (
        f"{seconds:,.3g} s"
        if seconds >= 10
        else f"{seconds * 1e3:,.{0 if seconds >= 1 else 1 if seconds >= 0.01 else 3}f} ms"
    )


def show_resolutions(result: Mapping[str, Any]) -> None:
    """A line for each network at each resolution."""
    rows = [
        (
            cell["model"],
            str(cell["image_size"]),
            f"{cell['gflops']:,.3g}",
            _rate(cell["images_per_second"] / result["cores"]) if cell["images_per_second"] else "-",
            str(cell["best_batch"] or "-"),
            (f"{cell['largest_batch']:,}" + "*" * (not cell["largest_tried"]))
            if cell["largest_batch"]
            else "-",
        )
        for cell in result["cells"]
    ]
    machine = result["machine"]
    title = f"forward passes on {machine['device_name']}, {result['precision']}, load {machine.get('load', 0):.1f}"
    show_table(
        ("model", "pixels", "GFLOPs", f"images/s of a {result['core']}", "at batch", "largest batch"),
        rows,
        title=title,
    )
    CONSOLE.print("GFLOPs: of a forward pass, as computed", soft_wrap=True)
    for kernels in sorted({_kernels(cell) for cell in result["cells"] if cell["attention"]}):
        CONSOLE.print(f"{kernels}: {_cells_with(result, kernels)}", markup=False, soft_wrap=True)
    CONSOLE.print(
        "* not tried: from the memory that smaller batches took; -: no time or no memory for it",
        soft_wrap=True,
    )
    for note in result["notes"]:
        CONSOLE.print(f"note: {note}", markup=False, soft_wrap=True)
    for note in dict.fromkeys(cell["note"] for cell in result["cells"] if cell["note"]):
        CONSOLE.print(f"note: {_cells_with(result, note)}: {note}", markup=False, soft_wrap=True)


def _kernels(cell: Mapping[str, Any]) -> str:
    return f"attention {cell['attention']}, linear {cell['linear']}"


def _cells_with(result: Mapping[str, Any], text: str) -> str:
    """The networks and sizes that have a note, or kernels."""
    found = [cell for cell in result["cells"] if text in (cell["note"], _kernels(cell))]
    return ", ".join(f"{cell['model']} at {cell['image_size']}" for cell in found)


def run_data(asked: Sequence[Asked], flags: Flags, step_rate: float | None) -> None:
    """Measure the loaders of some recipes, print them, and write their numbers."""
    from vitctl.bench.budget import Budget
    from vitctl.bench.loader import bench_data

    asked[0].check()
    start_command()
    _set_threads(asked[0].threads)
    results: list[dict[str, Any]] = []
    with stop_on_signals() as stop, progress() as say:
        for one in asked:
            recipe, name = chosen_recipe(one, flags)
            budget = Budget(one.seconds / len(asked), stop, say)
            results.append({"recipe": name, **bench_data(recipe, budget, step_rate=step_rate)})
            if stop.raised:
                break
    _write({"kind": "loaders", "loaders": results}, asked[0].json)
    for result in results:
        show_data(result)
    _finish(asked[0].json, stop.raised)


def show_data(r: Mapping[str, Any]) -> None:
    """Print a loader: its rate, the time of an image, and whether it keeps up."""
    needs, per_cpu = r["step_images_per_second"], r["images_per_cpu_second"]
    of_cpu = f", {_rate(per_cpu)} of a CPU second" if per_cpu else ""
    rows = [
        (
            "images",
            f"{r['data']}: {r['num_images']:,} images, {bytes_text(r['image_bytes'])} each, to "
            f"{r['image_size']} pixels",
        ),
        ("loader", f"{_rate(r['images_per_second'])} images/s with {r['workers']} worker(s)"),
        ("", f"{_rate(r['images_per_worker'])} of a worker{of_cpu}"),
        ("the step", f"{_rate(needs)} images/s ({r['step_source']})" if needs else "not measured"),
        (
            "machine",
            f"{r['machine']['cpu']}, {r['machine']['cores']} cores, load {r['machine'].get('load', 0):.1f}",
        ),
    ]
    show_table(("", ""), rows, left=None, title=f"bench data: {r['recipe']}")
    CONSOLE.print()
    show_split(r["split"], "an image in one process", sum(r["split"].values()))
    CONSOLE.print()
    for note in r["notes"]:
        CONSOLE.print(f"note: {note}", markup=False, soft_wrap=True)
    CONSOLE.print(r["verdict"], style="bold", markup=False, soft_wrap=True)
    if r["setting"]:
        CONSOLE.print(f"try: --set {r['setting']}", markup=False, soft_wrap=True)


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
