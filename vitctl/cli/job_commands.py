"""The commands that run a job: pretrain, finetune, resume, fewshot, probe, vtab, evaluate, export, sweep."""

import shlex
import sys
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Unpack

import typer

from vitctl.cli.flags import (
    MORE,
    All,
    Allow,
    DryRun,
    Flags,
    K8s,
    Nodes,
    Out,
    RecipeName,
    Restarts,
    RunOptions,
    Set,
    Slurm,
    overrides_of,
    takes_flags,
    value_of,
)
from vitctl.cli.run_job import (
    batch_job,
    begin,
    check_out,
    enter_start_folder,
    fetch_run,
    fetch_weights_of,
    finetune_recipe,
    fitted,
    launch_config,
    run_job,
    run_loaded,
    run_place,
    start_command,
    started_processes,
    with_shards,
    write_job,
)
from vitctl.engine.journal import RECIPE
from vitctl.recipe.export_formats import FORMATS
from vitctl.system.screen import ignore_output_errors
from vitctl.system.text import typed

if TYPE_CHECKING:
    from vitctl.recipe.load import Loaded


@takes_flags
def pretrain(*, recipe: RecipeName, flags: Flags, **options: Unpack[RunOptions]) -> None:
    """Pre-train a ViT from scratch, as in the paper's Table 3.

    For example: vitctl pretrain --recipe in1k_b16 --data PHOTOS
                 vitctl pretrain --recipe jft_h14 --dry-run
    Guide: docs/reproduce-the-paper.md; recipes: vitctl recipes list
    """
    run_job("pretrain", recipe, flags, **options)


@takes_flags
def finetune(
    *,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            "-r",
            help="Shipped recipe or path of a .toml file; default: that of the start weights' family, "
            "finetune_DATASET or finetune",
        ),
    ] = None,
    flags: Flags,
    seeds: Annotated[
        int | None,
        typer.Option(
            "--seeds",
            min=1,
            help="Number of runs with different seeds; reports mean and standard deviation",
            rich_help_panel=MORE,
        ),
    ] = None,
    **options: Unpack[RunOptions],
) -> None:
    """Fine-tune on your images or a known data set (Table 4).

    For example: vitctl finetune --data PHOTOS --from dinov2_b14
                 vitctl finetune --dataset pets --res 384
    Guide: docs/training.md, with the --set of LoRA, rates by layer, class
    weights, augmentation, early stopping
    """
    if seeds:
        first = value_of(flags, "--seed") or 0
        flags["--seeds"] = ("finetune.seeds", tuple(range(first, first + seeds)))
    run_job("finetune", recipe, flags, **options)


@takes_flags
def resume(
    *,
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="Folder of an interrupted run, or the address of its copy in a store",
        ),
    ],
    flags: Flags,
    set_: Set = None,
    allow: Allow = None,
    slurm: Slurm = None,
    k8s: K8s = None,
    nodes: Nodes = None,
    restarts: Restarts = 0,
) -> None:
    """Resume an interrupted run from its newest checkpoint.

    For example: vitctl resume runs/smoke_20260101-120000
    Guide: docs/clusters.md
    """
    from vitctl.cli.show.console import say
    from vitctl.cli.show.render import show_result
    from vitctl.engine.store import kept_in
    from vitctl.errors import CheckpointError, DataError
    from vitctl.jobs.record.result import read_result
    from vitctl.launch.run_folder import LOCK
    from vitctl.recipe.load import load_recipe

    member, batch = start_command(), batch_job(slurm, k8s)
    if not batch:
        ignore_output_errors()
    folder, of_store = run_place("RUN", run)
    assert folder is not None
    config = launch_config(member, nodes, restarts, folder, batch)
    overrides = [*overrides_of(flags, set_), *of_store]
    if store := next((one.value for one in overrides if one.key == "checkpoint.store"), kept_in(folder)):
        fetch_run(store, folder, member)
    if not (folder / RECIPE).is_file():
        then = (
            "its command was stopped before it had written recipe.toml; type that command again"
            if (folder / LOCK).is_file()
            else "not a run folder, it has no recipe.toml; `vitctl runs` lists the runs here"
        )
        raise CheckpointError(*((store, "holds no run") if store else (folder, then)))
    overrides += started_processes(member, batch, overrides)
    folder, overrides = enter_start_folder(folder, overrides)
    is_alone = config.nodes == 1 and (member is None or member.num_processes == 1)
    loaded = load_recipe(str(folder / RECIPE), overrides)
    first = cache(partial(begin, loaded, "", batch, plans=False, is_alone=is_alone))
    loaded = with_shards(loaded, folder.parent, first, is_alone=is_alone)
    try:
        first()
        run_loaded(loaded, folder, member, config, batch, allow or ())
    except (DataError, CheckpointError) as error:
        gone = {"no such folder": "--data", "no such weights": "--from"}
        flag = next((flag for words, flag in gone.items() if words in str(error)), "")
        if not flag:
            raise
        done = None if overrides or allow or flag == "--data" else read_result(folder)
        if done is not None and done.status == "done":
            say(f"{folder} is finished, and needs its start weights no more")
            return show_result(vars(done), folder)
        moved = f"if it moved, name its place: vitctl resume {typed(folder)} {flag} PLACE"
        raise type(error)(str(error).partition("; ")[0], fix=moved) from None


@takes_flags
def fewshot(
    *,
    flags: Flags,
    recipe: RecipeName = "fewshot",
    out: Out = None,
    set_: Set = None,
    dry_run: DryRun = False,
    all_: All = False,
    slurm: Slurm = None,
) -> None:
    """Measure few-shot accuracy with a linear classifier.

    It is on frozen features, and solved in closed form.

    For example: vitctl fewshot --shots 5
                 vitctl fewshot --dataset pets,dtd --from RUN
    Guide: docs/reproduce-the-paper.md
    """
    run_job("fewshot", recipe, flags, set_=set_, out=out, dry_run=dry_run, all_=all_, slurm=slurm)


@takes_flags
def probe(
    *,
    flags: Flags,
    recipe: RecipeName = "probe",
    out: Out = None,
    set_: Set = None,
    dry_run: DryRun = False,
    all_: All = False,
    slurm: Slurm = None,
) -> None:
    """Measure frozen features: k-NN, logistic or linear layers.

    For example: vitctl probe --method knn --from RUN --dataset pets
    Guide: docs/probe.md
    """
    run_job("probe", recipe, flags, set_=set_, out=out, dry_run=dry_run, all_=all_, slurm=slurm)


@takes_flags
def vtab(
    *,
    flags: Flags,
    sweep: Annotated[
        bool,
        typer.Option(
            "--sweep/--no-sweep", help="Choose learning rate and schedule on the validation images first"
        ),
    ] = True,
    recipe: RecipeName = "vtab",
    out: Out = None,
    set_: Set = None,
    dry_run: DryRun = False,
    all_: All = False,
    slurm: Slurm = None,
) -> None:
    """Run VTAB-1k: fine-tune on 19 tasks, compare with Table 9.

    For example: vitctl vtab --suite mini
                 vitctl vtab --from RUN --data SHARDS --dry-run
    Guide: docs/vtab.md
    """
    from vitctl.recipe.load import recipe_names

    if not sweep:
        flags["--no-sweep"] = ("vtab.sweep_lrs", ())
    if value_of(flags, "--steps") or not sweep:
        flags["--steps, --no-sweep"] = ("vtab.sweep_steps", ())
    of_suite = f"vtab_{value_of(flags, '--suite')}"
    name = of_suite if recipe == "vtab" and of_suite in recipe_names() else recipe
    run_job("vtab", name, flags, set_=set_, out=out, dry_run=dry_run, all_=all_, slurm=slurm)


@takes_flags
def evaluate(
    *,
    flags: Flags,
    recipe: RecipeName = "evaluate",
    out: Out = None,
    set_: Set = None,
    dry_run: DryRun = False,
    all_: All = False,
) -> None:
    """Measure the accuracy on a split, counting every image once.

    For example: vitctl evaluate --from RUN --dataset pets
                 vitctl evaluate --from RUN --data PHOTOS --answers answers.csv
    Guide: docs/scores.md
    """
    from vitctl.data.datasets.catalog import find_data_set

    dataset = value_of(flags, "--dataset")
    if dataset and not value_of(flags, "--data"):
        row = find_data_set(dataset)
        held_out = next((split for split in ("test", "validation") if split in row.sizes), row.scored)
        if held_out and not (value_of(flags, "--split") or value_of(flags, "--fit-temperature")):
            flags["--split"] = ("data.eval_split", held_out)
        if row.name == "objectnet" and not value_of(flags, "--labels"):
            flags["--labels"] = ("evaluation.labels", "objectnet")
    run_job("evaluate", recipe, flags, set_=set_, out=out, dry_run=dry_run, all_=all_)


@takes_flags
def export(
    *,
    flags: Flags,
    fp16: Annotated[bool, typer.Option("--fp16", help="onnx: write float16; needs --check-data")] = False,
    int8: Annotated[
        bool, typer.Option("--int8", help="onnx, litert: write int8; needs --check-data")
    ] = False,
    recipe: RecipeName = "export",
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Run folder, or the file of a single graph or of --to safetensors"),
    ] = None,
    set_: Set = None,
) -> None:
    """Export weights for other programs, verified against the model.

    For example: vitctl export --from RUN --to onnx
                 vitctl export --from RUN --to onnx --out model.onnx
    Guide: docs/weights.md
    """
    from vitctl.errors import RecipeError

    to = value_of(flags, "--to")
    formats = [row.name for row in FORMATS.values() if out is not None and out.suffix == row.ending]
    if out is not None and formats:
        if to and not set(to) & set(formats):
            single = [name for name in formats if not FORMATS[name].in_folder] or formats
            raise RecipeError(
                f"--out {out}",
                f"a {out.suffix} file is for --to {', '.join(single)}, not for --to {', '.join(to)}",
            )
        flags["--out"] = ("export.file", str(out))
    if fp16 and int8:
        raise RecipeError("--fp16 and --int8", "a file has one precision", "leave one of them out")
    if fp16 or int8:
        flags["--fp16, --int8"] = ("export.precision", "float16" if fp16 else "int8")
    run_job("export", recipe, flags, set_=set_, out=None if formats else out)


@takes_flags
def sweep(
    *,
    what: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="Recipe, shipped sweep (d2_depth, d4, ...) or .toml file of a sweep",
        ),
    ],
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid",
            "-g",
            help="Values for any key of the recipe: section.key=v1,v2; repeatable",
        ),
    ] = None,
    set_: Set = None,
    flags: Flags,
    metric: Annotated[
        str, typer.Option("--metric", help="Metric to compare, e.g. accuracy, best_accuracy, 5-shot")
    ] = "accuracy",
    out: Out = None,
    print_: Annotated[
        bool,
        typer.Option(
            "--print", help="Make the run folders and print one command per run, to start elsewhere"
        ),
    ] = False,
    dry_run: DryRun = False,
    slurm: Slurm = None,
    k8s: K8s = None,
) -> None:
    """Run a grid over any keys of a recipe.

    Every run takes the flags of `finetune` and `pretrain`; one of numbers takes several, with commas.

    Runs start one after the other, or with --slurm or --k8s as one job each. To resume, run the same command
    again with the same --out; finished runs are kept. The result is a table (sweep.csv, sweep.json) and a
    plot (sweep.png, if matplotlib is installed).

    For example: vitctl sweep finetune --data PHOTOS --lr 0.001,0.003
                 vitctl sweep finetune --data PHOTOS --grid dropout=0,0.1
    Guide: docs/sweeps.md
    """
    from vitctl.cli.show.console import CONSOLE, say
    from vitctl.data.source.splits import is_test
    from vitctl.launch.prepare_run import check_machine
    from vitctl.launch.run_folder import new_run_dir
    from vitctl.launch.sweep_cells import is_done, prepare_cells
    from vitctl.recipe.load import Override, load_recipe, with_overrides
    from vitctl.recipe.schema import Finetune
    from vitctl.recipe.sweep import expand_sweep, find_sweep, parse_axes

    if not (print_ or dry_run or slurm or k8s):
        ignore_output_errors()
    flags.pop("--lr alone", None)  # a recipe of `pretrain` has no such key; see `settled`
    lists = {flag: given for flag, given in flags.items() if isinstance(given[1], tuple)}
    flags |= {flag: (key, values[0]) for flag, (key, values) in lists.items()}
    if what == "finetune":
        what, text = finetune_recipe(overrides_of(flags, set_), downloads=not (dry_run or print_))
        if text:
            say(text)
    chosen, batch = find_sweep(what), batch_job(slurm, k8s)
    several = (f"{key}={','.join(map(str, values))}" for key, values in lists.values() if len(values) > 1)
    axes = parse_axes([*(grid or ()), *several])
    overrides = [one for one in overrides_of(flags, set_) if one.key not in axes]
    overrides += started_processes(None, batch, overrides)
    cells = expand_sweep(chosen, axes, overrides)

    folder = out or new_run_dir(f"sweep_{chosen.name}")
    chooses = not chosen.axes and not chosen.cells and {*axes} != {"seed"}
    said, test = set[str](), ""
    if (begun := folder / cells[0].name / RECIPE).exists():  # a sweep of an earlier release goes on as it was
        before = load_recipe(str(begun)).recipe
        chooses = chooses and isinstance(before, Finetune) and not is_test(before.data.eval_split)

    def settled(loaded: "Loaded") -> "Loaded":
        nonlocal test
        if loaded.origin("optimizer.lr") in ("--grid", "--lr") and isinstance(loaded.recipe, Finetune):
            loaded = with_overrides(loaded, [Override("sweep.lrs", (), "--lr")])
        place = getattr(getattr(loaded.recipe, "data", None), "path", "")
        CONSOLE.quiet = place in said  # of the same data, once
        said.add(place)
        try:
            checks = None if batch else partial(check_machine, loaded.recipe)
            loaded = with_shards(loaded, folder.parent, checks, dry_run=dry_run, is_alone=True)
            is_choice = chooses and isinstance(loaded.recipe, Finetune)
            loaded = fitted(loaded, with_timeout=dry_run, chooses=is_choice)
        finally:
            CONSOLE.quiet = False
        if chooses and isinstance(loaded.recipe, Finetune) and loaded.recipe.data.test_split:
            test = loaded.recipe.data.test_split
            loaded = with_overrides(loaded, [Override("data.test_split", "", "the best run of the sweep")])
        if not dry_run:
            fetch_weights_of(loaded)
        return loaded

    if dry_run:
        from vitctl.cli.show.run_views import show_costs

        show_costs(cells, settled)
        return
    if not any(folder.glob(f"*/{RECIPE}")):
        check_out(folder, "a sweep")
    prepare_cells(cells, folder, batch, settled)
    if not (print_ or batch):
        from vitctl.cli.show.run_views import run_and_show

        run_and_show(chosen, cells, folder, metric, test)
        return
    for cell in cells:
        if not batch:
            typer.echo(f"vitctl resume {shlex.quote(str(folder / cell.name))}")
        elif not is_done(folder / cell.name):
            write_job(batch, folder / cell.name)
    without = batch.launcher if batch else "--print"
    print(
        f"to make the table when they are done: the same command with --out {folder}, without {without}",
        file=sys.stderr,
    )
