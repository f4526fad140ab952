"""From a recipe's flags to a result: shared by all commands that run a job."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vitctl.cli.flags import overrides_of
from vitctl.engine.journal import CHECKPOINTS, RECIPE, run_of
from vitctl.system.screen import ignore_output_errors
from vitctl.system.text import typed

_FETCH_SECONDS = 600.0  # for another command that fetches the same run

if TYPE_CHECKING:
    from vitctl.launch.cluster import LaunchConfig, Member, Resources
    from vitctl.recipe.load import Loaded, Override


def run_job(
    job: str,
    recipe: str | None,
    flags: Mapping[str, tuple[str, Any]],
    *,
    out: str | Path | None = None,
    set_: Sequence[str] | None = None,
    dry_run: bool = False,
    all_: bool = False,
    slurm: str | None = None,
    k8s: str | None = None,
    nodes: str | None = None,
    restarts: int = 0,
    allow: Sequence[str] | None = None,
    device: str | None = None,
) -> None:
    """Resolve the recipe, then run it, print its plan, or write its job. Exits with the command's exit code.

    Args:
        job: the command.
        recipe: name or path; None: of `finetune`, that of its start weights or data set.
        flags: everyday flags that were given: flag -> (dotted key, value).
        out: run folder, or the address of its copy in a store; None makes a new folder.
    """
    from vitctl.cli.show.console import waiting
    from vitctl.errors import RecipeError

    out, of_store = run_place("--out", out)

    for flag, given, fix in (
        ("--all", all_, ""),
        ("--device", device is not None, "the device of a run is --set machine.device"),
    ):
        if given and not dry_run:
            raise RecipeError(f"{flag} needs --dry-run", "it is about the plan", fix)
    member, batch = start_command(), batch_job(slurm, k8s)
    if not (dry_run or batch):
        ignore_output_errors()
    with waiting("starting"):  # these imports take a second or more
        from vitctl.recipe.load import load_recipe

        config = launch_config(member, nodes, restarts, out, batch)
        overrides = [*overrides_of(flags, set_), *of_store]
        recipe, chosen = (recipe, "") if recipe else finetune_recipe(overrides, downloads=not dry_run)
        if job == "finetune":
            overrides += beside_given(recipe, overrides)
        overrides += started_processes(member, batch, overrides)
        is_alone = config.nodes == 1 and (member is None or member.num_processes == 1)
        loaded = load_recipe(recipe, overrides, job=job)
    from vitctl.launch.run_folder import new_run_dir

    shares_folder = member is not None and (member.job or member.num_processes > 1)
    run_dir = out or (member.run_dir(loaded.name) if member and shares_folder else new_run_dir(loaded.name))
    runs = out.parent if out else Path("runs")
    first = cache(partial(begin, loaded, chosen, batch, plans=dry_run, is_alone=is_alone))
    loaded = with_shards(loaded, runs, first, dry_run=dry_run, is_alone=is_alone, out=out)
    loaded = fitted(loaded, first, with_timeout=dry_run)
    if dry_run:
        from vitctl.cli.show.dry_run import show_plan
        from vitctl.launch.agent import check_spread

        check_spread(config, loaded.recipe.machine.processes)
        show_plan(loaded, run_dir, config, batch=batch, device=device, everything=all_)
        return
    from vitctl.launch.worker import patience
    from vitctl.system.remote import patient

    with patient(patience(loaded.recipe)):
        fetch_weights_of(loaded)
        run_loaded(loaded, run_dir, member, config, batch, allow or ())


def begin(loaded: "Loaded", chosen: str, batch: "Resources | None", *, plans: bool, is_alone: bool) -> None:
    """Print the first line of a run, its model, data, device and precision, and how its recipe was `chosen`.

    A device that is not there is refused. Several processes choose theirs when they have met; a plan
    (`plans`) says its own.
    """
    from vitctl.cli.show.console import say

    recipe: Any = loaded.recipe
    data, start = getattr(recipe, "data", None), getattr(recipe, "weights", None)
    if not plans:
        from vitctl.data.datasets.converted import RECORD, made_of
        from vitctl.launch.prepare_run import check_machine

        model, path = start.source if start else recipe.model.name, getattr(data, "path", "")
        if path and (Path(path) / RECORD).is_file():
            path = made_of(path)
        place = ", ".join(getattr(data, "datasets", ())) or path or getattr(data, "dataset", "")
        is_here = not batch and (is_alone or getattr(recipe.machine, "device", "") != "cuda")
        facts = (
            "the newest run" if model == "newest" else model,
            place,
            check_machine(recipe) if is_here else "",
        )
        say(f"{recipe.job}: {', '.join(filter(None, facts))}")
    if chosen:
        say(chosen)


def run_place(said: str, out: str | Path | None) -> "tuple[Path | None, list[Override]]":
    """Return the run folder that the option or argument `said` names, and what an address in a store sets."""
    from vitctl.engine.store import kept_in
    from vitctl.errors import LaunchError
    from vitctl.recipe.load import Override
    from vitctl.system.address import check_local

    text = str(out or "").rstrip("/")
    if "://" not in text:
        return (Path(check_local(said, text)) if text else None), []
    folder = Path("runs") / text.rpartition("/")[2]
    if (folder / RECIPE).is_file() and (kept := kept_in(folder)) != text:
        of = f"a run that is kept in {kept}" if kept else "another run"
        fix = f"choose another folder: {said} FOLDER --set checkpoint.store={text}"
        raise LaunchError(f"{said} {text}", f"works in {folder}, which holds {of}", fix)
    return folder, [Override("checkpoint.store", text, said)]


def fetch_run(store: str, run_dir: Path, member: "Member | None") -> None:
    """Bring the folder of a run that is resumed to the newest checkpoint in its store; processes beside the
    first need the recipe.
    """
    from vitctl.cli.show.console import waiting
    from vitctl.engine.store import Store
    from vitctl.launch.run_folder import prepared_folder

    there = Store(store, run_dir)
    with waiting(f"looking for the run in {store}"):
        if not there.has_run:
            return
        if member is not None and member.rank > 0:
            there.get(RECIPE)
            return
        with prepared_folder(run_dir, _FETCH_SECONDS):
            there.fetch()


def check_out(out: Path, what: str = "a run") -> None:
    """Refuse a folder that cannot become that of a run, before anything is downloaded or converted."""
    from vitctl.launch.run_folder import check_not_foreign
    from vitctl.system.files import check_place

    check_not_foreign(out, what=what)
    if not out.exists():
        check_place("--out", out)


def finetune_recipe(overrides: "list[Override]", *, downloads: bool) -> tuple[str, str]:
    """Return the name of the recipe that `finetune` takes if none is given, that of the start weights' family
    or the paper's for the data set, and a line that says so. Of a family's recipe for ImageNet it sets the
    split that another data set has.
    """
    from vitctl.cli.show.console import fetch_weights
    from vitctl.data.datasets.catalog import find_data_set
    from vitctl.jobs.inputs.checks import start_recipe
    from vitctl.recipe.load import Override, recipe_names

    given = {one.key: one.value for one in overrides}
    source, which, model = (str(given.get(f"weights.{key}", "")) for key in ("source", "which", "model"))
    download = fetch_weights if downloads else lambda _: None
    name, said = start_recipe(source or "newest", which=which, model=model, download=download)
    dataset = given.get("data.dataset")
    if name:
        if dataset != "imagenet" and "data.eval_split" not in given:
            overrides.append(Override("data.eval_split", "test", "the splits of the data set"))
        return name, said
    name = f"finetune_{find_data_set(dataset).name}" if dataset else ""
    return name if name in recipe_names() else "finetune", said


def beside_given(recipe: str, overrides: "Sequence[Override]") -> "list[Override]":
    """Return what follows from given values, unless it is given too: with another image size the recipe's
    sizes before the crops in proportion; with a frozen backbone no rates of layers.
    """
    from vitctl.recipe.load import Override, load_recipe

    given = {one.key: one for one in overrides}
    side, freeze = given.get("data.image_size"), given.get("finetune.freeze")
    found = []
    if freeze is not None and freeze.value == "backbone" and "optimizer.layer_decay" not in given:
        found = [Override("optimizer.layer_decay", 1.0, f"off, with {freeze.flag} backbone")]
    data: Any = getattr(load_recipe(recipe).recipe, "data", None) if side else None
    own = getattr(data, "image_size", 0)
    if side is None or not own or not isinstance(side.value, int):
        return found
    return found + [
        Override(key, round(size * side.value / own), f"the recipe's, in proportion to {side.flag}")
        for key in ("data.eval_resize", "data.train_resize")
        if key not in given and (size := getattr(data, key.partition(".")[2], 0))
    ]


def fetch_weights_of(loaded: "Loaded") -> None:
    """Download the weights at an address unless they are cached, with progress on the screen."""
    source = getattr(getattr(loaded.recipe, "weights", None), "source", "")
    if "://" in source:
        from vitctl.cli.show.console import fetch_weights

        fetch_weights(source)


def run_loaded(
    loaded: "Loaded",
    run_dir: Path,
    member: "Member | None",
    config: "LaunchConfig",
    batch: "Resources | None",
    allow: Sequence[str] = (),
) -> None:
    """Prepare the run folder, then run it with progress, or write its job. Exits with 3 if it was stopped.

    Args:
        batch: the resources of a job that will run it; None: it runs now.
        allow: what may differ from the start of the run.
    """
    from vitctl.cli.show.console import say, waiting

    with waiting("checking data and weights", prints=not batch):
        from vitctl.launch.prepare_run import prepare_run

        if config.nodes > 1:
            from vitctl.launch.agent import check_spread, own_address

            check_spread(config, loaded.recipe.machine.processes)
            own_address(config)
        prepared = prepare_run(loaded, run_dir, allow, config, batch)
    if prepared.taken:
        say(prepared.taken, style="bold yellow")
    if (inputs := prepared.inputs) and inputs.train is not None:
        from vitctl.jobs.inputs.data import roles_note

        if note := roles_note(prepared.recipe, len(inputs.train), len(inputs.scored or ())):
            print(note)
    if batch:
        write_job(batch, run_dir)
        return
    from vitctl.cli.show.render import Screen, show_result
    from vitctl.launch.peers import KEPT
    from vitctl.launch.worker import launch, redirect_output

    if config.nodes > 1:
        text = f"{config.nodes} machines: waiting for all to join at {config.host}:{config.port}"
        print(text, file=sys.stderr)
    if member is not None and member.rank > 0:
        redirect_output(run_dir)
    with Screen(run_dir) as screen:
        result = launch(run_dir, screen.report, config, prepared)
    if result["status"] == "stopped":
        saved = any(run_dir.glob(f"**/{CHECKPOINTS}/step_*"))
        how = (
            f"stopped and saved in {run_dir}"
            if saved
            else f"stopped in {run_dir}, before the first checkpoint"
        )
        reason = result.get("error") or (f"stopped; {KEPT[job]}" if (job := result["job"]) in KEPT else how)
        resumable = (run_dir / RECIPE).exists()
        text = f"{reason}; resume with: vitctl resume {typed(run_dir)}" if resumable else "vitctl: stopped"
        print(text, file=sys.stderr)
        raise typer.Exit(3)
    show_result(result, run_dir)


def with_shards(
    loaded: "Loaded",
    runs: Path,
    begin: Callable[[], object] | None = None,
    *,
    is_alone: bool,
    dry_run: bool = False,
    out: Path | None = None,
) -> "Loaded":
    """Convert a folder of photos that --data names to shards, once, and train on those.

    Args:
        runs: folder of run folders, which gets the shards, unless ./runs or the place of the run that the
            weights are from has them.
        begin: called when nothing is left to refuse.
        is_alone: whether no other process runs the same command.
        dry_run: write nothing; print what would be made.
        out: run folder of the command, checked before shards are written.

    Raises DataError or CheckpointError. What the job would refuse is refused before any shard is written.
    """
    from vitctl.cli.data_commands import check_photographs, shards_of
    from vitctl.data.datasets.catalog import is_photographs, open_originals
    from vitctl.errors import DataError
    from vitctl.jobs.inputs.checks import check_choices, check_not_missing, check_weights, fit_splits
    from vitctl.jobs.plan import plan_scoring
    from vitctl.recipe.images import Place
    from vitctl.recipe.load import Override, load_recipe, with_overrides
    from vitctl.recipe.schema import Evaluate, FrozenRecipe

    data = getattr(loaded.recipe, "data", None)
    if not isinstance(data, Place) or not is_photographs(data.path):
        return loaded
    weights = getattr(loaded.recipe, "weights", None)
    others = [Path("runs"), run_of(Path(getattr(weights, "source", ""))).parent]
    if dry_run:
        from vitctl.data.datasets.converted import find_shards, fingerprint

        if find_shards(fingerprint(data.path, data.columns), runs, *others) is None:
            place = runs / "shards" / Path(data.path).resolve().name
            print(f"{data.path}: photos; their shards would be written to {place}-...")
            originals = open_originals(data.path, columns=data.columns)
            check_photographs(originals, data.path, None, "keep")
            return loaded
    elif not is_alone:
        raise DataError(
            data.path,
            "photos, and several processes would convert them to shards",
            f"convert them first with `vitctl data shards {typed(data.path)} FOLDER`, and give --data FOLDER",
        )
    if not dry_run:
        if out is not None:
            check_out(out)
        if weights is not None and weights.source == "newest":
            check_not_missing(loaded.recipe)
        fitting, file = fit_splits(loaded)[0], (out or Path(loaded.name).parent) / RECIPE
        check_choices(fitting, load_recipe(str(file)).recipe if file.is_file() else None)
        fetch_weights_of(loaded)
        check_weights(loaded.recipe)
        match fitting.recipe:
            case FrozenRecipe() | Evaluate() as recipe:
                plan_scoring(recipe)  # raises what the job would raise
        if begin:
            begin()
    shards = str(shards_of(data.path, runs, data.columns, others))
    values = {"data.path": shards, **({"data.columns": ""} if data.columns else {})}
    return with_overrides(loaded, [Override(*one, "shards of photographs") for one in values.items()])


def fitted(
    loaded: "Loaded", begin: Callable[[], object] | None = None, *, with_timeout: bool, chooses: bool = False
) -> "Loaded":
    """Choose the splits that --data has, call `begin`, and print them; `with_timeout` gives up on a silent
    address.
    """
    from vitctl.cli.show.console import say
    from vitctl.jobs.inputs.checks import fit_splits
    from vitctl.jobs.plan import LOOKUP_SECONDS, call_with_timeout
    from vitctl.launch.worker import patience
    from vitctl.system.remote import is_remote, patient

    found: tuple[Loaded, str] | str
    if with_timeout and is_remote(getattr(getattr(loaded.recipe, "data", None), "path", "")):
        found = call_with_timeout(LOOKUP_SECONDS, lambda: fit_splits(loaded, chooses=chooses))
    else:
        with patient(patience(loaded.recipe)):
            found = fit_splits(loaded, chooses=chooses)
    if begin:
        begin()
    if isinstance(found, str):  # the error message of an address
        return loaded
    if found[1]:
        say(found[1])
    return found[0]


def start_command() -> "Member | None":
    """Let a signal end the command with code 3, and silence all processes but rank 0, see `speak`.

    Called before anything slow.
    """
    from vitctl.engine.preemption import exit_on_signals
    from vitctl.launch.cluster import check_arrives, find_member
    from vitctl.system.screen import silence

    check_arrives()
    member = find_member()
    exit_on_signals(while_waiting=member is not None)
    if member is not None and member.rank > 0:
        silence()
    return member


def batch_job(slurm: str | None, k8s: str | None) -> "Resources | None":
    """Return the resources of --slurm or --k8s. Raises LaunchError if both are given, or one is malformed."""
    from vitctl.errors import LaunchError
    from vitctl.launch.cluster import Job
    from vitctl.launch.jobset import JobSet

    if slurm is not None and k8s is not None:
        raise LaunchError("--slurm and --k8s", "each writes a job of its own", "leave one of them out")
    if k8s is not None:
        return JobSet.parse(k8s)
    return None if slurm is None else Job.parse(slurm)


def started_processes(
    member: "Member | None", batch: "Resources | None", given: "Sequence[Override]"
) -> "list[Override]":
    """Set the processes that a launcher or job starts, and a GPU job's device. Raises LaunchError."""
    from vitctl.errors import LaunchError
    from vitctl.recipe.load import Override

    starter = member or batch
    if starter is None:
        return []
    name, processes = starter.launcher, starter.num_processes
    for other in given:
        if other.key == "machine.processes" and other.value != processes:
            raise LaunchError(
                f"{other.flag} says {other.value} processes, {name} starts {processes}: leave "
                f"{other.flag} out"
            )
        if other.key == "machine.device" and other.value == "cpu" and batch is not None and batch.gpus:
            raise LaunchError(
                f"{other.flag} machine.device=cpu, {name} asks for {batch.gpus} GPUs of a node: leave one "
                f"of them out; processes without GPUs are tasks={batch.gpus}"
            )
    on_gpus = batch is not None and batch.gpus and all(other.key != "machine.device" for other in given)
    device = [Override("machine.device", "cuda", name)] if on_gpus else []
    return [*device, Override("machine.processes", processes, name)]


def write_job(batch: "Resources", run_dir: Path) -> None:
    """Write the job of a prepared run, and submit it if its flag says so."""
    from vitctl.launch.cluster import submit

    file = batch.write(run_dir)
    text = f"wrote {file}; submit it with: {batch.line(run_dir)}"
    print(submit(batch, file) if batch.submit else text)


def enter_start_folder(run: Path, overrides: "Sequence[Override]") -> "tuple[Path, list[Override]]":
    """Change to the folder that a run's relative paths start from; return run and overrides, adapted."""
    from vitctl.cli.show.console import say
    from vitctl.jobs.record.start_folder import from_folder, start_folder
    from vitctl.recipe.load import load_recipe
    from vitctl.recipe.neutral_keys import PLACES

    here, start = Path.cwd(), start_folder(run, lambda: load_recipe(str(run / RECIPE)).recipe)
    if start.resolve() == here:
        return run, [*overrides]
    say(f"paths of the recipe start from {start}")
    run = run.absolute()
    os.chdir(start)
    return run, [
        one._replace(value=from_folder(one.value, here)) if one.key in PLACES and one.value else one
        for one in overrides
    ]


def launch_config(
    member: "Member | None", nodes: str | None, restarts: int, out: Path | None, batch: "Resources | None"
) -> "LaunchConfig":
    """Return the machines and restarts of --nodes and --restarts. Raises LaunchError if they contradict."""
    from vitctl.errors import LaunchError
    from vitctl.launch.agent import parse_nodes
    from vitctl.launch.cluster import LaunchConfig

    config = parse_nodes(nodes, restarts) if nodes else LaunchConfig(restarts=restarts)
    if (nodes or restarts) and (starter := member or batch):
        raise LaunchError(
            f"--nodes and --restarts start processes, and so does {starter.launcher}: leave one of them out"
        )
    if config.nodes > 1 and out is None:
        raise LaunchError(f"--nodes {nodes}", "give all machines the same run folder with --out")
    return config
