"""`--dry-run`: what a run does and costs, and the values that were set."""

import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import psutil
from rich.markup import escape

from vitctl.cli.show.console import CONSOLE, show_table
from vitctl.errors import LaunchError
from vitctl.launch.cluster import LaunchConfig, Resources
from vitctl.launch.prepare_run import launch_line
from vitctl.launch.worker import store_of
from vitctl.models.flops import COMPILE_SECONDS, count_macs, count_parameters, known_device
from vitctl.models.roofline import GPUS, OVER_PUBLISHED, SMALL, estimate, find_device
from vitctl.models.variants import Config, HybridConfig, ResNetConfig, ViTConfig
from vitctl.recipe.load import Loaded
from vitctl.recipe.schema import Evaluate, Fewshot, Finetune, Machine, Pretrain, Probe, Vtab
from vitctl.recipe.write import to_toml
from vitctl.system.text import bytes_text, count_text, rate_text

if TYPE_CHECKING:
    from vitctl.jobs.plan import TrainingPlan

BAR = 40
_EXPECTED_ON = ("A100", "H100", "H200")
_MOST_NOTES, _MOST_SPLITS = 3, 5  # of a plan that fits a screen
_TIMES = (("days", 86_400), ("hours", 3_600), ("minutes", 60))
_UNITS = (("exaFLOPs", 1e18), ("PFLOPs", 1e15), ("TFLOPs", 1e12), ("GFLOPs", 1e9), ("MFLOPs", 1e6))


def show_plan(
    loaded: Loaded,
    run_dir: Path,
    config: LaunchConfig = LaunchConfig(),
    *,
    batch: Resources | None = None,
    device: str | None = None,
    everything: bool = False,
) -> None:
    """Print what a run does, and its cost and memory on the GPU that is named or here, or on this CPU.

    Args:
        loaded: a recipe of any job but export.
        batch: the job that would start the run.
        device: value of --device: a GPU whose memory and rates the plan is for.
        everything: add what does not fit a screen: details, the launch command, and the whole recipe.

    Raises:
        LaunchError: the job cannot use the folder; or, after the plan is printed, not even one image fits the
            GPU.
    """
    from vitctl.jobs.inputs.checks import check_choices

    check_choices(loaded)
    refusal, nodes, line = "", config.nodes, launch_line(run_dir, loaded.recipe, config)
    if batch:
        batch.text(run_dir.resolve(), store_of(loaded.recipe))  # raises if the job cannot use the folder
        nodes, line = batch.nodes, batch.line(run_dir)
    machine = getattr(loaded.recipe, "machine", None)
    gpu = find_device(device) if device is not None else _gpu_here(machine)
    if isinstance(loaded.recipe, Pretrain | Finetune):
        multiple = batch.tasks_per_node if batch else nodes
        loaded, refusal = _show_training(loaded, run_dir, nodes, gpu, multiple, batch, everything)
    else:
        loaded = _show_scoring(loaded, run_dir, gpu, everything)
    if everything:
        CONSOLE.print(
            "\nlaunch command [dim](works after this command has prepared the folder, without --dry-run; "
            "also written to launch.txt there)[/dim]",
            style="bold",
        )
        CONSOLE.print(escape(f"  {line}"), soft_wrap=True)
        CONSOLE.print()
        CONSOLE.print(escape(to_toml(loaded, defaults=True)), soft_wrap=True)
    else:
        trains = isinstance(loaded.recipe, Pretrain | Finetune)
        gpus = "; on a GPU: --device H100" * (trains and not gpu)
        CONSOLE.print(f"memory by kind, rates, launch command, recipe: --dry-run --all{gpus}", style="dim")
    if refusal:
        raise LaunchError(refusal)


def _gpu_here(machine: Machine | None) -> str:
    """Return the GPU of this machine, or the one that a run on GPUs elsewhere is assumed to have; "" for a
    run on this CPU.
    """
    from vitctl.jobs.resources import GPU

    if machine is None or machine.device == "cpu":
        return ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1")
    for file in Path("/proc/driver/nvidia/gpus").glob("*/information") if visible else ():
        row = known_device(file.read_text(errors="replace").partition("Model:")[2].partition("\n")[0].strip())
        return row if row in GPUS else GPU
    return GPU if machine.device == "cuda" else ""


def _show_notes(notes: Sequence[str], everything: bool) -> None:
    for note in notes if everything else notes[:_MOST_NOTES]:
        CONSOLE.print(escape(f"note: {note}"))
    if (more := len(notes) - _MOST_NOTES) > 0 and not everything:
        CONSOLE.print(f"and {count_text(more, 'more note')}: --all")


def _show_scoring(loaded: Loaded, run_dir: Path, gpu: str, everything: bool) -> Loaded:
    from vitctl.engine.schedule import TASK_IMAGES, fit_schedule
    from vitctl.jobs.plan import plan_scoring
    from vitctl.jobs.resources import MFU

    loaded = fit_schedule(loaded, TASK_IMAGES) if isinstance(loaded.recipe, Vtab) else loaded
    recipe = cast(Fewshot | Probe | Vtab | Evaluate, loaded.recipe)
    plan = plan_scoring(recipe)
    splits = [
        (name, count_text(number, "image") if number else "size unknown") for name, number in plan.images
    ]
    if len(splits) > _MOST_SPLITS and not everything:
        splits = [("images", f"{plan.num_images:,} of {len(splits)} splits")]
    rows = [
        ("weights", plan.weights),
        ("model", f"{_model(plan.config)}: {count_parameters(plan.config):,} parameters"),
        ("an image", f"{plan.config.image_size} pixels, forward {_macs(count_macs(plan.config))}"),
        *splits,
        *([("trainings", f"{plan.trainings:,}, {plan.steps:,} steps in all")] if plan.trainings else []),
    ]
    if isinstance(recipe, Fewshot):
        shots, seeds = (", ".join(map(str, many)) for many in (recipe.fewshot.shots, recipe.fewshot.seeds))
        rows.append(("shots", f"{shots} of each class; seeds {seeds}"))
    if isinstance(recipe, Probe):
        from vitctl.jobs.probe import probe_bytes

        rows.append(("method", recipe.probe.method))
        more, others = (bytes_text(number) for number in probe_bytes(recipe, plan))
        features, peers = bytes_text(plan.feature_bytes), recipe.machine.processes - 1
        text = f"features {features}, {recipe.probe.method} {more} more"
        rows.append(("memory", text + ", on the main process" * bool(peers)))
        rows += [("", f"{others} on each other process")] * bool(peers)
        rows.append(("cache", f"{features} on disk; as much page cache, which others may take"))
    drawn = [(f"{name} drawn", f"{count_text(number, 'image')} for each seed") for name, number in plan.drawn]
    rows += [
        *(drawn if everything else drawn[:1]),
        (
            "computation",
            f"{_flops(plan.flops)}: {_time_of(plan.flops, plan.config, recipe.machine, gpu, MFU)}",
        ),
        ("run folder", str(run_dir)),
    ]
    show_table((f"{recipe.job}", loaded.name), rows, left=None)
    _show_notes(plan.notes, everything)
    return loaded


def _show_training(
    loaded: Loaded,
    run_dir: Path,
    nodes: int,
    gpu: str,
    multiple: int,
    batch: Resources | None,
    everything: bool,
) -> tuple[Loaded, str]:
    """Print a training's cost and rates; return the recipe with its length, and why it cannot run or ""."""
    from vitctl.jobs.plan import plan_loaded

    loaded, plan = plan_loaded(loaded, nodes, gpu, multiple)
    ways = [(_in_job(way, batch), size) for way, size in plan.ways]
    rows = [
        *_training_rows(plan, everything),
        *(
            ("to fit" if n == 0 else "or", f"{way} ({bytes_text(size)})")
            for n, (way, size) in enumerate(ways)
        ),
        ("checkpoint", f"{bytes_text(plan.checkpoint_bytes)}, at most {bytes_text(plan.disk_bytes)} on disk"),
        *(_detail_rows(plan, nodes) if everything else ()),
        ("run folder", " and ".join(filter(None, (str(run_dir), store_of(loaded.recipe))))),
    ]
    show_table((loaded.recipe.job, loaded.name), rows, left=None)
    _show_notes(plan.notes, everything)
    if everything:
        CONSOLE.print("\nlearning rate", style="bold")
        top = max(lr for _, lr in plan.curve) or 1.0
        for step, lr in plan.curve:
            CONSOLE.print(f"  step {step:>9,}  {lr:.3e}  {'#' * round(BAR * lr / top)}")
    if plan.fitting_micro_batch:
        return loaded, ""
    then = f"; set {ways[0][0].removeprefix('--set ')}" if ways else "; choose a smaller model"
    room, each = f"{GPUS[plan.device].memory} GiB", bytes_text(plan.memory_bytes)
    return loaded, f"no micro-batch fits {room} ({each} per process){then}"


def _training_rows(plan: "TrainingPlan", everything: bool) -> Iterator[tuple[str, str]]:
    """Yield the rows on what is computed, and on what."""
    config, batch = plan.config, plan.recipe.schedule.batch_size
    classes = count_text(plan.num_classes, "class", "classes")
    images = f"{count_text(plan.num_images, 'image')}, {classes}" if plan.num_images else "size unknown"
    yield "data", f"{images} ({plan.data})"
    is_part = plan.trained_parameters < plan.parameters
    trained = f", {plan.trained_parameters:,} of them trained" if is_part else ""
    yield "model", f"{_model(config)}: {plan.parameters:,} parameters{trained}"
    tokens = f", {config.num_tokens:,} tokens" if isinstance(config, ViTConfig) else ""
    yield "an image", f"{config.image_size} pixels{tokens}, forward {_macs(count_macs(config))}"
    epochs = f", {plan.epochs:.2f} epochs" if plan.num_images else ""
    yield "steps", f"{plan.steps:,} of {batch:,} images{epochs}"
    at, top = max(plan.curve, key=lambda point: point[1])
    decay = plan.recipe.schedule.decay
    yield "learning rate", f"{top:.3g} at step {at:,}, then {decay} to {plan.curve[-1][1]:.3g}"
    yield "training", f"{_computed(plan)}: {_hours(plan)}"
    if not plan.device:
        yield "memory", _cpu_memory(plan)
        return
    yield "expected", _expected(plan, _EXPECTED_ON if everything else ())
    processes = count_text(plan.recipe.machine.processes, "process", "processes")
    yield "micro-batch", f"{count_text(plan.micro_batch, 'image')} in each of {processes}{_uneven(plan)}"
    yield "memory", f"{bytes_text(plan.memory_bytes)} per process{_fit(plan)}"
    yield "largest batch", f"{count_text(plan.largest_batch, 'image')} at a time"


def _cpu_memory(plan: "TrainingPlan") -> str:
    free, each = psutil.virtual_memory().available, plan.memory["activations"] / plan.micro_batch
    fitting = int((free - plan.resident_bytes + plan.memory["activations"]) / each)
    fix = f"; --set machine.micro_batch={fitting} fits" if 0 < fitting < plan.micro_batch else ""
    return f"{bytes_text(plan.resident_bytes)} for process 0; {bytes_text(free)} are free here{fix}"


def _in_job(way: str, batch: Resources | None) -> str:
    """Return a setting that makes a run fit, with the flag that gives a job its number of processes."""
    if batch is None:
        return way
    return re.sub(
        "--processes ([0-9]+)",
        lambda found: f"{batch.launcher} nodes={int(found[1]) // batch.tasks_per_node}",
        way,
    )


def _uneven(plan: "TrainingPlan") -> str:
    """Return a note on the busiest process if shares are uneven, else ""."""
    mean = plan.recipe.schedule.batch_size / plan.recipe.machine.processes
    return f"; the one with the most has {plan.most:,} a step (mean {mean:.4g})" * (plan.most > mean)


def _expected(plan: "TrainingPlan", devices: Sequence[str]) -> str:
    """Return the expected rate of the GPU, and of these, or why there is none."""
    if isinstance(plan.expected, str):
        return f"no estimate: {plan.expected}; {plan.mfu:.0%} of the peak is assumed"
    step = plan.expected.step
    found = ((gpu, estimate(plan.config, gpu, step)) for gpu in dict.fromkeys((plan.device, *devices)))
    rates = (f"{gpu} {one.images_per_second:,.0f} ({one.mfu:.0%})" for gpu, one in found)
    passes = count_text(step.passes, "forward pass", "forward passes")
    fitting = min(plan.micro_batch, plan.fitting_micro_batch)
    host = "; the host starts kernels slower than the GPU computes them" * (
        plan.expected.seconds["starting"] > 0
    )
    compiled = estimate(plan.config, plan.device, replace(step, compiled=True)).images_per_second
    saved = plan.run_seconds * (1 - plan.expected.images_per_second / compiled)
    if host and saved > COMPILE_SECONDS and plan.recipe.machine.checkpoint_blocks != "attention":
        host += (
            f": --set machine.compile=true raises {plan.expected.images_per_second:,.0f} to {compiled:,.0f}"
        )
    details = (
        f", {passes} a step of at most {count_text(fitting, 'image')}, bf16, "
        f"{'' if step.compiled else 'not '}compiled (machine.compile); not measured"
    )
    is_small = step.training and getattr(plan.config, "hidden_size", SMALL + 1) <= SMALL
    over = (
        f"; for S/16 on an H100, {'' if step.compiled else 'not '}compiled, this estimate is "
        f"{OVER_PUBLISHED[step.compiled]} times the published rate of a network of its size" * is_small
    )
    return (
        f"{', '.join(rates)} images/s of one GPU (share of the peak){host}{over}{details if devices else ''}"
    )


def _host(plan: "TrainingPlan", nodes: int) -> str:
    from vitctl.jobs.resources import LAUNCHER_BYTES, RUNTIME_BYTES

    m = plan.recipe.machine
    each = "each process" if m.shards(m.processes) > 1 else "process 0"
    copy = f", copy of a checkpoint {bytes_text(plan.copy_bytes)} in {each}" if plan.copy_bytes else ""
    local = count_text(m.processes // nodes, "process", "processes")
    launcher = f", launcher {bytes_text(LAUNCHER_BYTES)} a node" * (m.processes > 1)
    return f"{local} a node, runtime {bytes_text(RUNTIME_BYTES)} each{launcher}{copy}"


def _detail_rows(plan: "TrainingPlan", nodes: int) -> Iterator[tuple[str, str]]:
    """Yield the rows on kinds of memory, on the host, on the images that the loader must make, and on the
    bytes that it reads.
    """
    from vitctl.jobs.resources import loader_rate, nodes_of_a_shard

    yield "of a process", ", ".join(f"{kind} {bytes_text(size)}" for kind, size in plan.memory.items())
    yield "host", _host(plan, nodes)
    yield "records", f"{bytes_text(plan.record_bytes)} on disk for steps.jsonl and trace.bin"
    recipe, seconds = plan.recipe, plan.step_seconds
    if seconds and not recipe.data.synthetic and not isinstance(plan.expected, str):
        rate = recipe.schedule.batch_size / seconds
        each = f" ({rate_text(rate / recipe.machine.processes)} a process)" * (recipe.machine.processes > 1)
        a_core, what = loader_rate(recipe.data)
        cores = count_text(math.ceil(rate / nodes / a_core), "core")
        cores = f"about {cores} at {a_core:,} a core, the rate of {what}"
        needs = f"must make {rate_text(rate / nodes)} images/s on each machine{each}, or the GPUs wait"
        yield "loader", f"{needs}: {cores}; `vitctl bench data` measures it"
    if plan.read:
        size = f"{plan.read / seconds / 1e9:.3g} GB/s" if seconds else f"{bytes_text(plan.read)} a step"
        fetching = nodes_of_a_shard(recipe, nodes)
        often = f", each shard fetched by {fetching:.3g} nodes" if fetching > 1 else ""
        yield "reading", f"{size} on each machine{often}"


def _macs(macs: int) -> str:
    return f"{macs / 1e9:.3f} GMACs" if macs >= 1e8 else f"{macs / 1e6:.3f} MMACs"


def _time_of(flops: int, config: Config, machine: Machine, gpu: str, mfu: float) -> str:
    """Return the time of a computation, on a GPU or on this CPU."""
    from vitctl.jobs.resources import CPU_SHARE, product_flops, usable_flops

    if gpu:
        return f"{_time(flops / usable_flops(machine, gpu, mfu))} {_where(machine, gpu, mfu)}"
    rate = product_flops(config)
    time, of = _time(flops / rate / CPU_SHARE), f"a product's {_flops(round(rate))}/s"
    return f"{'about ' * time[0].isdigit()}{time} on this CPU, at {CPU_SHARE:.0%} of {of}"


def _computed(plan: "TrainingPlan") -> str:
    """Return the FLOPs computed, and the paper's count, with every token in every block."""
    computed, counted = _flops(plan.computed_flops), _flops(plan.training_flops)
    return computed if computed == counted else f"{computed} ({counted} with all tokens in the last block)"


def _flops(flops: int) -> str:
    unit, size = next((row for row in _UNITS if flops >= row[1]), _UNITS[-1])
    return f"{flops / size:,.4g} {unit}"


def _where(machine: Machine, device: str, mfu: float) -> str:
    from vitctl.jobs.resources import precision_of

    return f"on {machine.processes} {device} at {mfu:.0%} of the {precision_of(machine)} peak"


def _time(seconds: float) -> str:
    for unit, length in _TIMES:
        if seconds >= length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 0.1 else "less than 0.1 s"


def _hours(plan: "TrainingPlan") -> str:
    number, machine = plan.trainings, plan.recipe.machine
    if not plan.device:
        time = _time_of(number * plan.computed_flops, plan.config, machine, "", 0.0)
        return time + f", for all {number} trainings" * (number > 1)
    most = " in the process with the most images" if _uneven(plan) else ""
    network = "; what the GPUs send each other is not counted" if machine.processes > 1 else ""
    sweep = f"; {_time(number * plan.run_seconds)} for all {number} trainings" * (number > 1)
    return f"{_time(plan.run_seconds)} {_where(machine, plan.device, plan.mfu)}{most}{network}{sweep}"


def _fit(plan: "TrainingPlan") -> str:
    from vitctl.models.flops import USABLE_SHARE

    return (
        f": does not fit {GPUS[plan.device].memory} GiB ({1 - USABLE_SHARE:.0%} kept free)"
        if plan.ways or not plan.fitting_micro_batch
        else f": fits {GPUS[plan.device].memory} GiB"
    )


def _model(config: Config) -> str:
    words = (
        [f"stages {', '.join(map(str, config.stage_depths))}"]
        if isinstance(config, HybridConfig | ResNetConfig)
        else []
    )
    if isinstance(config, ViTConfig):
        grid, of = (
            "x".join(str(side) for side in config.grid),
            "pixels" if config.map_channels == 3 else "positions",
        )
        words += [
            count_text(config.depth, "layer"),
            f"width {config.hidden_size}",
            f"MLP {config.mlp_size}",
            f"{config.num_heads} heads",
            f"{grid} patches of {config.patch_size} {of}",
        ]
    return ", ".join(words)
