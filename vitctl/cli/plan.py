"""`--dry-run`: the resolved recipe and what it will cost."""

from pathlib import Path
from typing import cast

from rich.markup import escape

from vitctl.cli.render import CONSOLE, bytes_text, show_table
from vitctl.launch import launch_line
from vitctl.models.configs import Config, HybridConfig, ResNetConfig, ViTConfig
from vitctl.recipe.load import Loaded
from vitctl.recipe.schema import Finetune, Pretrain
from vitctl.recipe.write import to_toml

BAR = 40


def show_plan(loaded: Loaded, run_dir: Path) -> None:
    """Print the recipe, the cost of its run, its learning-rate curve and its launch command."""
    from vitctl.jobs.plan import make_plan

    recipe = cast(Pretrain | Finetune, loaded.recipe)
    plan = make_plan(recipe)
    CONSOLE.print(escape(to_toml(loaded)), soft_wrap=True)
    batch = recipe.schedule.batch_size
    rows = [
        ("data", f"{plan.num_images:,} images, {plan.num_classes:,} classes ({plan.data})"),
        ("model", _model(plan.config)),
        ("parameters", f"{plan.parameters:,}"),
        ("tokens", f"{plan.tokens:,}" if plan.tokens else "none: a convolutional network"),
        ("forward pass", f"{plan.macs_per_image / 1e9:.3f} GMACs per image"),
        ("steps", f"{plan.steps:,} of {batch:,} images, {plan.epochs:.2f} epochs"),
        ("training", f"{plan.training_flops / 1e18:,.4g} exaFLOPs"),
        ("micro-batch", f"{plan.micro_batch:,} images in each of {recipe.machine.processes} process(es)"),
        ("memory", f"{bytes_text(plan.memory_bytes)} per process"),
        (
            "on 80 GiB",
            f"machine.micro_batch = {plan.fitting_micro_batch}" if plan.fitting_micro_batch else "does not fit",
        ),
        ("checkpoint", f"{bytes_text(plan.checkpoint_bytes)}, at most {bytes_text(plan.disk_bytes)} on disk"),
        ("run folder", str(run_dir)),
    ]
    show_table(("plan", ""), rows, left=None)
    CONSOLE.print("\nlearning rate", style="bold")
    top = max(lr for _, lr in plan.curve) or 1.0
    for step, lr in plan.curve:
        CONSOLE.print(f"  step {step:>9,}  {lr:.3e}  {'#' * round(BAR * lr / top)}")
    for note in plan.notes:
        CONSOLE.print(escape(f"note: {note}"), soft_wrap=True)
    CONSOLE.print("\nlaunch", style="bold")
    CONSOLE.print(escape(f"  {launch_line(run_dir, recipe)}"), soft_wrap=True)


def _model(config: Config) -> str:
    """A network in words."""
    words = (
        [f"stages {', '.join(map(str, config.stage_depths))}"]
        if isinstance(config, HybridConfig | ResNetConfig)
        else []
    )
    if isinstance(config, ViTConfig):
        grid, of = "x".join(str(side) for side in config.grid), "pixels" if config.map_channels == 3 else "positions"
        words += [
            f"{config.depth} layers",
            f"width {config.hidden_size}",
            f"MLP {config.mlp_size}",
            f"{config.num_heads} heads",
        ]
        words += [f"{grid} patches of {config.patch_size} {of}"]
    return ", ".join(words)
