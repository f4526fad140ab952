"""`--dry-run`: what a run does and costs, and the values that were set."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rich.markup import escape

from vitctl.cli.show.console import CONSOLE, show_table
from vitctl.errors import LaunchError
from vitctl.launch.agent import LaunchConfig, launch_line
from vitctl.launch.cluster import Resources
from vitctl.models.flops import count_macs, count_parameters
from vitctl.models.roofline import GPUS, estimate, find_device
from vitctl.models.variants import Config, HybridConfig, ResNetConfig, ViTConfig
from vitctl.recipe.load import Loaded
from vitctl.recipe.schema import Evaluate, Fewshot, Finetune, Machine, Pretrain, Probe, Vtab
from vitctl.recipe.write import to_toml
from vitctl.system.text import bytes_text, count_text, rate_text

if TYPE_CHECKING:
    from vitctl.jobs.plan import TrainingPlan

BAR = 40
_EXPECTED_ON = ("A100", "H100", "H200")
_TIMES = (("days", 86_400), ("hours", 3_600), ("minutes", 60))
_UNITS = (("exaFLOPs", 1e18), ("PFLOPs", 1e15), ("TFLOPs", 1e12), ("GFLOPs", 1e9), ("MFLOPs", 1e6))


def show_plan(
    loaded: Loaded,
    run_dir: Path,
    config: LaunchConfig = LaunchConfig(),
    *,
    batch: Resources | None = None,
    link: str | None = None,
    device: str | None = None,
    everything: bool = False,
) -> None:
    """Print what a run does, its cost and memory, then the values that were set.

    Args:
        loaded: a recipe of any job but export.
        run_dir: where it would run.
        config: the machines and the restarts.
        batch: the job that would start the run.
        link: value of --link.
        device: value of --device: a GPU whose memory and rates the plan is for.
        everything: add the defaults.

    Raises:
        LaunchError: the job cannot use the folder; or not even one image at a time fits the GPU, raised after
            the plan.
    """
    from vitctl.jobs.inputs.checks import check_choices

    check_choices(loaded)
    refusal, nodes, line = "", config.nodes, launch_line(run_dir, loaded.recipe, config)
    if batch:
        batch.text(run_dir.resolve())  # it may refuse the folder
        nodes, line = batch.nodes, batch.line(run_dir)
    if isinstance(loaded.recipe, Pretrain | Finetune):
        loaded, refusal = _show_training(loaded, run_dir, nodes, link, device, batch)
    else:
        loaded = _show_scoring(loaded, run_dir)
    CONSOLE.print(
        "\nlaunch command [dim](works after this command has prepared the folder, without --dry-run; "
        "also written to launch.txt there)[/dim]",
        style="bold",
    )
    CONSOLE.print(escape(f"  {line}"), soft_wrap=True)
    CONSOLE.print()
    CONSOLE.print(escape(to_toml(loaded, defaults=everything)), soft_wrap=True)
    if not everything:
        CONSOLE.print("# values that were not set are left out: --dry-run --all adds the defaults")
    if refusal:
        raise LaunchError(refusal)


def _show_scoring(loaded: Loaded, run_dir: Path) -> Loaded:
    """Print the cost of a job that scores weights."""
    from vitctl.engine.schedule import TASK_IMAGES, fit_schedule
    from vitctl.jobs.plan import plan_scoring

    loaded = fit_schedule(loaded, TASK_IMAGES) if isinstance(loaded.recipe, Vtab) else loaded
    recipe = cast(Fewshot | Probe | Vtab | Evaluate, loaded.recipe)
    plan = plan_scoring(recipe)
    rows = [
        ("weights", plan.weights),
        ("model", f"{_model(plan.config)}: {count_parameters(plan.config):,} parameters"),
        ("an image", f"{plan.config.image_size} pixels, forward {_macs(count_macs(plan.config))}"),
        *((name, count_text(number, "image") if number else "size unknown") for name, number in plan.images),
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
    rows += [
        *((f"{name} drawn", f"{count_text(number, 'image')} for each seed") for name, number in plan.drawn),
        ("computation", _work(plan.flops, recipe.machine)),
        ("run folder", str(run_dir)),
    ]
    show_table((f"{recipe.job}", loaded.name), rows, left=None)
    for note in plan.notes:
        CONSOLE.print(escape(f"note: {note}"))
    return loaded


def _show_training(
    loaded: Loaded,
    run_dir: Path,
    nodes: int,
    given_link: str | None,
    device: str | None,
    batch: Resources | None,
) -> tuple[Loaded, str]:
    """Print the cost of a training and its learning rates.

    Returns:
        the recipe with its length, and why it cannot run; "" if it can.
    """
    from vitctl.jobs.plan import plan_loaded
    from vitctl.jobs.resources import Link, parse_link

    link = Link() if given_link is None else parse_link(given_link)
    gpu, multiple = None if device is None else find_device(device), batch.tasks_per_node if batch else nodes
    loaded, plan = plan_loaded(loaded, nodes, link, gpu, multiple)
    ways = [(_in_job(way, batch), size) for way, size in plan.ways]
    recipe = cast(Pretrain | Finetune, loaded.recipe)
    images = (
        f"{count_text(plan.num_images, 'image')}, {count_text(plan.num_classes, 'class', 'classes')}"
        if plan.num_images
        else "size unknown"
    )
    per_epoch = f", {plan.epochs:.2f} epochs" if plan.num_images else ""
    tokens = f", {plan.tokens:,} tokens" if plan.tokens else ""
    is_part = plan.trained_parameters < plan.parameters
    trained = f", {plan.trained_parameters:,} of them trained" if is_part else ""
    processes = recipe.machine.processes
    rows = [
        ("data", f"{images} ({plan.data})"),
        ("model", f"{_model(plan.config)}: {plan.parameters:,} parameters{trained}"),
        (
            "an image",
            f"{plan.config.image_size} pixels{tokens}, forward {_macs(plan.macs_per_image)}",
        ),
        ("steps", f"{plan.steps:,} of {recipe.schedule.batch_size:,} images{per_epoch}"),
        ("training", f"{_computed(plan)}: {_hours(plan, recipe)}"),
        *([("expected", _expected(plan, (gpu,) if gpu else _EXPECTED_ON))] if plan.device else []),
        (
            "micro-batch",
            f"{count_text(plan.micro_batch, 'image')} in each of "
            f"{count_text(processes, 'process', 'processes')}{_uneven(plan, recipe)}",
        ),
        (
            "memory",
            f"{bytes_text(plan.memory_bytes)} per process{_fit(plan)}"
            + (f", assumed: {plan.device} (--device)" if plan.device and not gpu else ""),
        ),
        *([("largest batch", f"{count_text(plan.largest_batch, 'image')} at a time")] if device else []),
        *(
            ("to fit" if n == 0 else "or", f"{way} ({bytes_text(size)}{_machines(way, nodes)})")
            for n, (way, size) in enumerate(ways)
        ),
        ("checkpoint", f"{bytes_text(plan.checkpoint_bytes)}, at most {bytes_text(plan.disk_bytes)} on disk"),
        ("of a process", ", ".join(f"{kind} {bytes_text(size)}" for kind, size in plan.memory.items())),
        ("host", _host(plan, recipe, nodes)),
        *_loader(plan, recipe, nodes),
        *_network(plan, recipe.schedule.batch_size, nodes, link, assumed=given_link is None),
        ("run folder", str(run_dir)),
    ]
    show_table((f"{recipe.job}", loaded.name), rows, left=None)
    for note in plan.notes:
        CONSOLE.print(escape(f"note: {note}"))
    CONSOLE.print("\nlearning rate", style="bold")
    top = max(lr for _, lr in plan.curve) or 1.0
    for step, lr in plan.curve:
        CONSOLE.print(f"  step {step:>9,}  {lr:.3e}  {'#' * round(BAR * lr / top)}")
    if plan.fitting_micro_batch:
        return loaded, ""
    then = f"; set {ways[0][0].removeprefix('--set ')}" if ways else "; choose a smaller model"
    return loaded, f"no micro-batch fits {_size_of(plan)} ({bytes_text(plan.memory_bytes)} per process){then}"


def _machines(way: str, nodes: int) -> str:
    """Say that one machine seldom has so many GPUs."""
    found = re.search("--processes ([0-9]+)", way)
    return "; on several machines: --nodes" if found and int(found[1]) > 8 * nodes else ""


def _in_job(way: str, batch: Resources | None) -> str:
    """Return a setting that makes a run fit, with the flag that gives a job its number of processes."""
    if batch is None:
        return way
    return re.sub(
        "--processes ([0-9]+)",
        lambda found: f"{batch.launcher} nodes={int(found[1]) // batch.tasks_per_node}",
        way,
    )


def _uneven(plan: "TrainingPlan", recipe: Pretrain | Finetune) -> str:
    """Say what the process with the most images computes, where not all have as many."""
    mean = recipe.schedule.batch_size / recipe.machine.processes
    return f"; the one with the most has {plan.most:,} a step (mean {mean:.4g})" * (plan.most > mean)


def _expected(plan: "TrainingPlan", devices: Sequence[str]) -> str:
    """Return the expected rates of these GPUs, or why there are none."""
    if isinstance(plan.expected, str):
        return f"no estimate: {plan.expected}; {plan.mfu:.0%} of the peak is assumed"
    step = plan.expected.step
    found = ((gpu, estimate(plan.config, gpu, step)) for gpu in devices)
    rates = (f"{gpu} {one.images_per_second:,.0f} ({one.mfu:.0%})" for gpu, one in found)
    passes = count_text(step.passes, "forward pass", "forward passes")
    fitting = min(plan.micro_batch, plan.fitting_micro_batch)
    host = ", limited by how fast the host starts kernels" * (plan.expected.seconds["starting"] > 0)
    return (
        f"{', '.join(rates)} images/s of one GPU (share of the peak){host}, {passes} a step of at most "
        f"{count_text(fitting, 'image')}, bf16, {'' if step.compiled else 'not '}compiled (machine.compile); "
        "not measured"
    )


def _size_of(plan: "TrainingPlan") -> str:
    return f"{GPUS[plan.device].memory} GiB"


def _host(plan: "TrainingPlan", recipe: Pretrain | Finetune, nodes: int) -> str:
    """Describe the memory of the host."""
    from vitctl.jobs.resources import RUNTIME_BYTES

    m = recipe.machine
    each = "each process" if m.shards(m.processes) > 1 else "process 0"
    copy = f", copy of a checkpoint {bytes_text(plan.copy_bytes)} in {each}" if plan.copy_bytes else ""
    local = count_text(m.processes // nodes, "process", "processes")
    cpu = "" if plan.device else f"; process 0 needs {bytes_text(plan.resident_bytes)}"
    return f"{local} a node, runtime {bytes_text(RUNTIME_BYTES)} each{copy}{cpu}"


def _loader(plan: "TrainingPlan", recipe: Pretrain | Finetune, nodes: int) -> list[tuple[str, str]]:
    """Return the row on the images that the loader must make, where the rate of the step is known."""
    if recipe.data.synthetic or not plan.seconds.busy or (plan.device and isinstance(plan.expected, str)):
        return []
    rate = recipe.schedule.batch_size / plan.seconds.busy
    each = f" ({rate_text(rate / recipe.machine.processes)} a process)" * (recipe.machine.processes > 1)
    needs = f"must make {rate_text(rate / nodes)} images/s on each machine{each}, or the GPUs wait"
    return [("loader", f"{needs}; `vitctl bench data` measures it")]


def _network(
    plan: "TrainingPlan", batch: int, nodes: int, link: object, *, assumed: bool
) -> Iterator[tuple[str, str]]:
    """Yield the rows on what a node sends and reads."""
    words = f"{link} Gbit/s{' (assumed; --link)' if assumed else ''}"
    if nodes > 1:
        yield "network", f"{bytes_text(round(plan.sent_bytes))} a step and node, over {words}"
    if read := plan.read:
        size = read.per_image * batch / nodes * read.amplification
        once = " in the first epoch" if read.is_once else ""
        often = f", each shard fetched by {read.amplification:.3g} nodes" if read.amplification > 1 else ""
        cache = f", cache {bytes_text(read.cache)} a node" if read.cache else ""
        rate = f"{bytes_text(size)} a step and node"
        if plan.device:
            rate = f"{size / plan.seconds.step / 1e9:.3g} GB/s a node"
        yield (
            "reading",
            f"{rate}{once}{often}; images of a batch from at most {count_text(read.shards, 'shard')}{cache}",
        )


def _macs(macs: int) -> str:
    return f"{macs / 1e9:.3f} GMACs" if macs >= 1e8 else f"{macs / 1e6:.3f} MMACs"


def _work(flops: int, machine: Machine) -> str:
    """Return an amount of computation, and its time on the GPU that `recipes table` uses."""
    from vitctl.jobs.resources import GPU, MFU, usable_flops

    if machine.device == "cpu":
        return _flops(flops)
    return f"{_flops(flops)}: {_time(flops / usable_flops(machine, GPU))} {_where(machine, GPU, MFU)}"


def _computed(plan: "TrainingPlan") -> str:
    """Return the FLOPs that are computed, and those of the paper's count, of every token in every block."""
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


def _hours(plan: "TrainingPlan", recipe: Pretrain | Finetune) -> str:
    """Return the length of a training, and where it is not that of computation alone, its parts."""
    if not plan.device:
        return "no time, as machine.device is 'cpu'; `vitctl bench model` measures a step"
    step = plan.seconds
    most = " in the process with the most images" if _uneven(plan, recipe) else ""
    waited = plan.steps * (step.busy - step.computation)
    wait = f"of which GPUs wait {_time(waited)}" if waited else "during computation"
    network = f"; network {_time(plan.steps * step.network)}, {wait}" if step.network else ""
    data = f"; data {_time(plan.fetching_steps * step.data)}" if step.data else ""
    if recipe.machine.processes > 1 and not network:
        network = "; the exchange between the GPUs of a node is not counted"
    parts = f" (computation {_time(plan.steps * step.computation)}{network}{data})" if network + data else ""
    number = plan.trainings
    sweep = f"; {_time(number * plan.run_seconds)} for all {number} trainings" * (number > 1)
    return f"{_time(plan.run_seconds)} {_where(recipe.machine, plan.device, plan.mfu)}{most}{parts}{sweep}"


def _fit(plan: "TrainingPlan") -> str:
    from vitctl.jobs.resources import USABLE_SHARE

    if not plan.device:
        return ""
    return (
        f": does not fit {_size_of(plan)} ({1 - USABLE_SHARE:.0%} kept free)"
        if plan.ways or not plan.fitting_micro_batch
        else f": fits {_size_of(plan)}"
    )


def _model(config: Config) -> str:
    """Describe a network."""
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
