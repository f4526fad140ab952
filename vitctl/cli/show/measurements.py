"""`vitctl bench`: runs measurements by their options and prints the numbers."""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vitctl.cli.flags import Flags, value_of
from vitctl.cli.run_job import fitted, start_command, started_processes, with_shards
from vitctl.cli.show.console import CONSOLE, say, show_table
from vitctl.engine.preemption import stop_on_signals
from vitctl.errors import RecipeError, refuse, writing
from vitctl.launch.cluster import Member
from vitctl.models.variants import variant
from vitctl.recipe.load import Override, load_recipe, parse_override
from vitctl.recipe.schema import Finetune, Pretrain
from vitctl.recipe.sections import Model
from vitctl.system.figures import NOT_INSTALLED, can_plot
from vitctl.system.files import check_place, write_json
from vitctl.system.process import end_with_parent
from vitctl.system.text import bytes_text, count_text, rate_text, share_text

if TYPE_CHECKING:
    from vitctl.bench.measuring import Budget

DEFAULT_RECIPE = "in1k_b16"
_BAR, _QUIET_SECONDS, _CELL_SECONDS = 30, 10.0, 8.0
_BOUNDS = {
    "memory": "then memory ends",
    "batch": "all that the recipe asks for",
    "time": "no time to try more",
}


@dataclass(frozen=True)
class BenchOptions:
    """Options of all measurements; `sets` are --set texts. Refuses a --json that cannot be written."""

    names: tuple[str, ...]
    recipe: str | None
    seconds: float
    json: Path | None
    sets: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.json is not None:
            check_target("--json", self.json, (".json",))


def check_target(flag: str, file: Path, endings: tuple[str, ...]) -> None:
    """Raise RecipeError if a file has another suffix, is a folder, or its folder is not writable."""
    refuse(
        RecipeError,
        (
            file.suffix.lower() not in endings,
            f"{flag} {file}",
            f"should be the name of a {' or '.join(endings)} file",
        ),
        (file.is_dir(), f"{flag} {file}", "is a folder, should be a file"),
    )
    check_place(flag, file)


def run_model(options: BenchOptions, flags: Flags, *, batch_size: int | None) -> None:
    """Measure a recipe's training step, print it, and write its numbers."""
    if len(options.names) > 1:
        raise RecipeError(
            " ".join(options.names),
            "a training step is measured for one model; for several, give --resolutions",
        )
    member = start_command()
    if member is not None:
        end_with_parent(os.getppid())
    recipe, name = chosen_recipe(options, flags, member)
    if recipe.machine.processes > 1 and member is None:
        from vitctl.launch.agent import run_in_processes

        raise typer.Exit(run_in_processes(recipe))
    from vitctl.bench.step_speed import bench_model

    with measuring(options.seconds) as budget:
        result = bench_model(recipe, budget, batch_size=batch_size)
    if member is not None and member.rank > 0:
        return
    result = {"recipe": name, "seconds_asked": options.seconds, "set": list(options.sets), **result}
    _report(show_model, result, options.json, budget, exits=member is None)


def chosen_recipe(
    options: BenchOptions, flags: Flags, member: Member | None = None
) -> tuple[Pretrain | Finetune, str]:
    """Return the recipe to measure, and its name; a model without a recipe is measured in the default one."""
    model, name = (options.names or ("",))[0], options.recipe or DEFAULT_RECIPE
    is_plain = model and options.recipe is None
    overrides = [parse_override(text) for text in options.sets]
    of_model = [one for one in overrides if one.key.startswith("model.")] if is_plain else []
    overrides = [one for one in overrides if one not in of_model]
    if model and not is_plain:
        raise RecipeError(model, "a name alone is a plain network", "leave out --recipe, or give --model")
    overrides += [Override(key, value, flag) for flag, (key, value) in flags.items()]
    loaded = load_recipe(name, [*overrides, *started_processes(member, None, overrides)])
    loaded = with_shards(loaded, Path("runs"), is_alone=member is None)
    recipe = fitted(loaded, with_timeout=False).recipe
    if not isinstance(recipe, Pretrain | Finetune):
        raise RecipeError(
            f"recipe '{name}' is for `vitctl {recipe.job}`: bench needs a recipe of pretrain or finetune"
        )
    if not is_plain:
        return recipe, name
    variant(model)
    fields = {one.key.partition(".")[2]: one.value for one in of_model}
    if unknown := fields.keys() - Model.model_fields.keys():
        raise RecipeError(f"--set model.{min(unknown)}", "no such key", "see `vitctl recipes explain model`")
    changed = Model(**{**fields, "name": model})
    return recipe.model_copy(update={"model": changed}), f"{model}, trained as {name}, without dropout"


def run_resolutions(
    options: BenchOptions, resolutions: str | None, flags: Flags, plot: Path | None, seconds: float | None
) -> None:
    """Measure forward passes at several resolutions, print a table, and write the plot and its numbers."""
    from vitctl.bench.resolutions import MODELS, bench_resolutions, parse_sides

    if resolutions is None:
        raise RecipeError(f"--plot {plot}", "needs --resolutions, e.g. --resolutions 64..512")
    precision = value_of(flags, "--precision") or "auto"
    of_recipe = ["--recipe"] * (options.recipe is not None)
    of_recipe += [flag for flag in flags if flag != "--precision"] + ["--set"] * bool(options.sets)
    if of_recipe:
        raise RecipeError(of_recipe[0], "--resolutions takes model names, not a recipe", "leave it out")
    picture = plot or Path("speed.png")
    numbers = options.json or picture.with_suffix(".json")
    check_target("--plot", picture, (".png", ".svg"))
    check_target("--plot", numbers, (".json",))
    models, sides = options.names or MODELS, parse_sides(resolutions)
    with measuring(seconds or _CELL_SECONDS * len(models) * len(sides)) as budget:
        result = bench_resolutions(models, sides, budget, precision=precision)
    if not result["cells"]:
        raise typer.Exit(3)
    _report(show_resolutions, result, numbers, budget, picture)


def _draw(result: Mapping[str, Any], picture: Path) -> str:
    if not can_plot():
        return f"no plot: {NOT_INSTALLED}"
    from vitctl.report.paper_plot import draw_speed

    with writing(picture):
        picture.parent.mkdir(parents=True, exist_ok=True)
        draw_speed(result, picture)
    return f"plot: {picture}"


def run_data(options: BenchOptions, flags: Flags) -> None:
    """Measure a recipe's loader, print it, and write its numbers."""
    from vitctl.bench.loader_rate import bench_data

    start_command()
    recipe, name = chosen_recipe(options, flags)
    with measuring(options.seconds) as budget:
        result = {"recipe": name, **bench_data(recipe, budget)}
    _report(show_data, result, options.json, budget)


def _report(
    show: Callable[[Mapping[str, Any]], None],
    result: Mapping[str, Any],
    json: Path | None,
    budget: "Budget",
    picture: Path | None = None,
    *,
    exits: bool = True,
) -> None:
    """Print the numbers, write them and draw the picture, and name both.

    Exits with code 3 if a signal cut the measurement short, unless a launcher does so.
    """
    try:
        show(result)
    finally:  # also if the reader closed the pipe
        if json is not None:
            with writing(json):
                json.parent.mkdir(parents=True, exist_ok=True)
                write_json(json, result)
        said = [_draw(result, picture)] if picture else []
    for text in [*said, f"numbers: {json}"] if json else said:
        say(text)
    if budget.stop.raised:
        say("stopped early: what was measured until then is above", style="bold yellow")
        if exits:
            raise typer.Exit(3)


@contextmanager
def measuring(seconds: float) -> "Iterator[Budget]":
    """Yield a budget that signals end; a terminal line, or standard error, shows what is being measured."""
    from vitctl.bench.measuring import Budget

    began = last = time.monotonic()
    with stop_on_signals() as stop, CONSOLE.status("starting") as status:

        def show(text: str) -> None:
            nonlocal last
            now = time.monotonic()
            status.update(f"{now - began:4.0f} s  {text}")
            if not CONSOLE.is_terminal and now - last >= _QUIET_SECONDS:
                last = now
                typer.echo(f"measuring: {text}", err=True)

        yield Budget(seconds, stop, show)


def show_model(r: Mapping[str, Any]) -> None:
    """Print a training step: the setting, its speed and memory, where the time goes."""
    show_table(("", ""), _model_rows(r), left=None, title=f"bench model: {r['recipe']}")
    CONSOLE.print()
    show_split(r["split"], r["batch_size"], r["seconds"])
    _say_notes(r)


def _model_rows(r: Mapping[str, Any]) -> list[tuple[str, str]]:
    machine, threads = r["machine"], r["machine"]["threads"]
    where = machine["device_name"]
    if machine["device"] == "cpu":
        where += f", {count_text(threads, 'thread')} of {count_text(machine['cores'], 'core')}"
    each = f" in each of {r['processes']} processes" if r["processes"] > 1 else ""
    kernels = [r["precision"], f"attention {r['attention']}"]
    kernels += ["compiled"] * bool(r["compile"]) + ["blocks recomputed"] * bool(r["checkpoint_blocks"])
    slowest, fastest = (rate_text(r["batch_size"] / pick(r["step_seconds"])) for pick in (max, min))
    mean = f"mean of {count_text(r['steps'], 'step')}"
    spread = f", {slowest} to {fastest}" if r["steps"] > 1 else ""
    rows = {
        "network": f"{r['parameters']:,} parameters, {r['image_size']} pixels, "
        f"{r['flops_per_image'] / 1e9:.4g} GFLOPs an image (with backward)",
        "update": f"{count_text(r['batch_size'], 'image')}, {r['micro_batch']:,} in a pass{each}; "
        f"{', '.join(kernels)}",
        "images": f"{r['data']}, {count_text(r['workers'], 'loader worker')}"
        if r["data"] != "noise"
        else "noise",
        "machine": f"{where}, load {machine.get('load', 0):.1f}",
        "speed": f"{rate_text(r['images_per_second'])} images/s ({mean}{spread})",
        "recipe batch": f"{rate_text(r['recipe_images_per_second'])} images/s with its "
        f"{r['recipe_batch_size']:,} images, which share the optimizer's time",
        "MFU": f"{share_text(r['mfu'])}, {r['tflops']:.3g} of {r['peak_tflops']:.3g} TFLOP/s: "
        f"{r['mfu_against']}",
        "memory": f"{bytes_text(r['peak_memory_bytes'])} at the peak, {bytes_text(r['free_memory_bytes'])} "
        f"more are free",
    }
    if r["recipe_batch_size"] == r["batch_size"]:
        del rows["recipe batch"]
    if largest := r["largest_micro_batch"]:
        how = "tried" if largest["tried"] else "from the memory of smaller ones"
        size = f", {bytes_text(largest['image_bytes'])} each" if largest["image_bytes"] else ""
        rows["largest pass"] = (
            f"{count_text(largest['images'], 'image')} ({how}{size}; {_BOUNDS[largest['bound']]})"
        )
    return list(rows.items())


def show_split(split: Mapping[str, float], images: int, whole: float) -> None:
    """Print the parts of a step with bars; they add up to the step."""
    rows = [
        (part, seconds_text(seconds), f"{seconds / whole:.1%}", "#" * round(_BAR * seconds / whole))
        for part, seconds in split.items()
    ]
    title = f"a step of {count_text(images, 'image')}"
    show_table((title, seconds_text(whole), "share", ""), rows, left=("",))


def seconds_text(seconds: float) -> str:
    """Return a time in seconds or milliseconds, with sensible precision."""
    if seconds >= 10:
        return f"{seconds:,.3g} s"
    digits = 0 if seconds >= 1 else 1 if seconds >= 0.01 else 3
    return f"{seconds * 1e3:,.{digits}f} ms"


def show_resolutions(result: Mapping[str, Any]) -> None:
    rows, remarks = [], defaultdict[str, list[str]](list)
    for cell in result["cells"]:
        rate, largest = cell["images_per_second"], cell["largest_batch"]
        place = f"{cell['model']} at {cell['image_size']}"
        row = (
            cell["model"],
            str(cell["image_size"]),
            f"{cell['gflops']:,.3g}",
            rate_text(rate / result["cores"]) if rate else "-",
            str(cell["best_batch"] or "-"),
            f"{largest:,}{'' if cell['largest_tried'] else '*'}" if largest else "-",
        )
        rows.append(row)
        if cell["attention"]:
            remarks[f"attention {cell['attention']}"].append(place)
        if cell["note"]:
            remarks[f"note: {cell['note']}"].append(place)
    machine = result["machine"]
    title = (
        f"forward passes on {machine['device_name']}, {result['precision']}, "
        f"load {machine.get('load', 0):.1f}"
    )
    header = ("model", "pixels", "GFLOPs", f"images/s of a {result['core']}", "at batch", "largest batch")
    show_table(header, rows, title=title)
    say("GFLOPs: of a forward pass, as computed")
    say("* not tried: from the memory that smaller batches took; -: no time or no memory for it")
    for remark, places in remarks.items():
        say(f"{remark}: {', '.join(places)}")


def show_data(r: Mapping[str, Any]) -> None:
    per_cpu, machine = r["images_per_cpu_second"], r["machine"]
    of_cpu = f", {rate_text(per_cpu)} of a CPU second" if per_cpu else ""
    size = f"{bytes_text(r['image_bytes'])} each, to {r['image_size']} pixels"
    cores = count_text(machine["cores"], "core")
    rows = [
        ("images", f"{r['data']}: {count_text(r['num_images'], 'image')}, {size}"),
        ("loader", f"{rate_text(r['images_per_second'])} images/s with {count_text(r['workers'], 'worker')}"),
        ("", f"{rate_text(r['images_per_worker'])} of a worker{of_cpu}"),
        ("machine", f"{machine['cpu']}, {cores}, load {machine.get('load', 0):.1f}"),
    ]
    show_table(("", ""), rows, left=None, title=f"bench data: {r['recipe']}")
    _say_notes(r)


def _say_notes(r: Mapping[str, Any]) -> None:
    for note in r["notes"]:
        say(f"note: {note}")
