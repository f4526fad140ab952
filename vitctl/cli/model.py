"""`vitctl fewshot`, `vtab`, `evaluate`, `export`."""

from pathlib import Path
from typing import Annotated

import typer

from vitctl.cli.common import Data, Dataset, From, Model, Out, Precision, Processes, RecipeName, Res, Set, run_job

WEIGHTS_FILES = (".safetensors", ".npz", ".onnx")


def fewshot(
    from_: From = None,
    shots: Annotated[list[int] | None, typer.Option("--shots", help="Training images per class. Repeatable.")] = None,
    data: Data = None,
    dataset: Dataset = None,
    model: Model = None,
    res: Res = None,
    recipe: RecipeName = "fewshot",
    out: Out = None,
    set_: Set = None,
    processes: Processes = None,
    precision: Precision = None,
) -> None:
    """Score frozen features with a few images per class, in closed form. For example: vitctl fewshot --shots 5"""
    flags = {
        "--from": ("weights.source", from_),
        "--model": ("weights.model", model),
        "--shots": ("fewshot.shots", shots or None),
        "--data": ("data.path", data),
        "--dataset": ("data.dataset", dataset),
        "--res": ("data.image_size", res),
        "--processes": ("machine.processes", processes),
        "--precision": ("machine.precision", precision),
    }
    run_job("fewshot", recipe, flags, set_, out)


def vtab(
    from_: From = None,
    suite: Annotated[
        str | None, typer.Option("--suite", help="vtab: the 19 tasks; mini: tasks that need no download.")
    ] = None,
    task: Annotated[list[str] | None, typer.Option("--task", help="Only this task. Repeatable.")] = None,
    data: Data = None,
    res: Res = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Length of each fine-tuning run in updates.")] = None,
    recipe: RecipeName = "vtab",
    out: Out = None,
    set_: Set = None,
    processes: Processes = None,
    precision: Precision = None,
) -> None:
    """Fine-tune on each task of VTAB-1k with one setting (Table 9). For example: vitctl vtab --suite mini"""
    from vitctl.recipe.load import recipe_names

    own = f"vtab_{suite}"
    flags = {
        "--from": ("weights.source", from_),
        "--suite": ("vtab.suite", suite),
        "--task": ("vtab.tasks", task or None),
        "--data": ("data.path", data),
        "--res": ("data.image_size", res),
        "--steps": ("schedule.total_steps", steps),
        "--processes": ("machine.processes", processes),
        "--precision": ("machine.precision", precision),
    }
    run_job("vtab", own if recipe == "vtab" and own in recipe_names() else recipe, flags, set_, out)


def evaluate(
    from_: From = None,
    data: Data = None,
    dataset: Dataset = None,
    split: Annotated[str | None, typer.Option("--split", help="Split to score, e.g. test or train[:10%].")] = None,
    model: Model = None,
    res: Res = None,
    recipe: RecipeName = "evaluate",
    out: Out = None,
    set_: Set = None,
    processes: Processes = None,
    precision: Precision = None,
) -> None:
    """Top-1 accuracy on a split, every image counted once. For example: vitctl evaluate --from RUN --dataset pets"""
    flags = {
        "--from": ("weights.source", from_),
        "--model": ("weights.model", model),
        "--data": ("data.path", data),
        "--dataset": ("data.dataset", dataset),
        "--split": ("data.eval_split", split),
        "--res": ("data.image_size", res),
        "--processes": ("machine.processes", processes),
        "--precision": ("machine.precision", precision),
    }
    run_job("evaluate", recipe, flags, set_, out)


def export(
    from_: From = None,
    to: Annotated[
        list[str] | None, typer.Option("--to", help="onnx, safetensors, google, timm, hf or torchvision. Repeatable.")
    ] = None,
    weights: Annotated[str | None, typer.Option("--weights", help="model, or ema: the Polyak average.")] = None,
    recipe: RecipeName = "export",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Run folder, or with one --to the weights file to write.")
    ] = None,
    model: Model = None,
    set_: Set = None,
) -> None:
    """Write files for other programs, each verified against the model. For example: vitctl export --from RUN --to onnx"""
    flags = {
        "--from": ("weights.source", from_),
        "--model": ("weights.model", model),
        "--out": ("export.file", str(out) if out and out.suffix in WEIGHTS_FILES else None),
        "--to": ("export.to", to or None),
        "--weights": ("export.weights", weights),
    }
    run_job("export", recipe, flags, set_, None if flags["--out"][1] else out)
