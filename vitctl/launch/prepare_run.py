"""From a checked recipe to a folder that can be run: recipe.toml, launch.txt, env.json, and what may change
on resume.
"""

import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitctl.engine.journal import (
    CHANGED,
    CHECKPOINTS,
    ENVIRONMENT,
    LAUNCH,
    LOG,
    RECIPE,
    STATE,
    STEPS,
    Journal,
    keep_records,
    no_permission,
    step_folder,
    step_folders,
    step_of,
    write_run_json,
)
from vitctl.engine.journal import allow as note_allowed
from vitctl.engine.store import Store
from vitctl.errors import LaunchError, RecipeError, VitctlError
from vitctl.launch.cluster import WORKER, LaunchConfig, Member, Resources, find_member, num_nodes
from vitctl.launch.peers import forget_errors
from vitctl.launch.run_folder import (
    check_not_foreign,
    clear,
    failed_without_output,
    prepared_folder,
    read_status,
)
from vitctl.launch.worker import Prepared, join_group, patience, store_of
from vitctl.recipe.export_formats import FORMATS
from vitctl.recipe.load import Loaded, Override, every_key, load_recipe, with_overrides
from vitctl.recipe.neutral_keys import FREE_TO_CHANGE, PLACES
from vitctl.recipe.schema import Evaluate, ExportRecipe, Finetune, NetworkMachine, Recipe, TrainRecipe, Vtab
from vitctl.recipe.sections import UNSET
from vitctl.recipe.write import as_flags, differences, to_toml, toml_value, written_name
from vitctl.system.files import write_text
from vitctl.system.process import usable_cores
from vitctl.system.remote import patient
from vitctl.system.text import has_control, one_line, printable, typed

if TYPE_CHECKING:
    from vitctl.jobs.inputs.data import Inputs

PACKAGES = (
    "vitctl",
    "torch",
    "torchvision",
    "accelerate",
    "numpy",
    "pillow",
    "safetensors",
    "webdataset",
    "onnx",
    "onnxruntime",
)


def prepare_run(
    loaded: Loaded,
    run_dir: Path,
    allow: Sequence[str] = (),
    config: LaunchConfig = LaunchConfig(),
    batch: Resources | None = None,
) -> Prepared:
    """Check everything that can be checked before the first process, then write recipe.toml, launch.txt and
    env.json.

    Among processes that a launcher started, rank 0 does this and the others wait. Several machines do it in
    turn: the second finds the files of the first.

    Args:
        loaded: the recipe.
        run_dir: new, or of a run that is resumed.
        allow: dotted keys, or tables, that may differ from those of the run in the folder.
        config: machines and restarts of the launch that follows.
        batch: the job that will start the run; None: it starts as `config` or the launcher says.

    Raises:
        VitctlError: as `check_recipe` raises; nothing was written.
        RecipeError: the folder holds a run of another recipe; the changed keys are named.
        LaunchError: the folder cannot be written, or rank 0 failed to prepare it.
    """
    member = find_member()
    if batch:
        batch.text(run_dir.resolve(), store_of(loaded.recipe))  # it may refuse the folder
    with patient(patience(loaded.recipe)):
        if member is None:
            return _prepare(loaded, run_dir, allow, config, batch.nodes if batch else config.nodes, batch)
        return _prepare_on_all(loaded, run_dir, allow, member)


def _prepare_on_all(loaded: Loaded, run_dir: Path, allow: Sequence[str], member: Member) -> Prepared:
    from vitctl.engine.runtime import broadcast_text, check_all_reduce

    if member.num_processes > 1:
        check_all_reduce(cpu=join_group(run_dir, loaded.recipe))
    said, prepared = "", None  # "1" or "0" for what may pass, then the error
    if member.rank == 0:
        try:
            prepared = _prepare(loaded, run_dir, allow, LaunchConfig(), num_nodes(member))
            forget_errors(run_dir)
        except VitctlError as error:
            said = f"{error.passes:d}{error}"
    if member.num_processes > 1:
        said = broadcast_text(said)
    if said:
        raise LaunchError(said[1:]).passing(said[0] == "1")
    if prepared is None and (store := store_of(loaded.recipe)):
        Store(store, run_dir).get(RECIPE)  # the machines may share no disk
    return prepared or Prepared(load_recipe(str(run_dir / RECIPE)).recipe)


def _prepare(
    loaded: Loaded,
    run_dir: Path,
    allow: Sequence[str],
    config: LaunchConfig,
    nodes: int,
    batch: Resources | None = None,
) -> Prepared:
    from vitctl.jobs.inputs.checks import check_recipe, fit_lanes, fit_to_data

    if has_control(str(run_dir)):
        raise RecipeError(
            f"--out {one_line(str(run_dir))}", "has a control character in its name", "choose another"
        )
    file = run_dir / RECIPE
    # Another machine of the same run may be preparing the folder.
    with prepared_folder(run_dir, loaded.recipe.machine.start_timeout if config.nodes > 1 else 0.0):
        check_not_foreign(run_dir)  # not before: another machine may be writing the files of this run
        is_empty, store = not file.exists(), store_of(loaded.recipe)
        if store:
            Store(store, run_dir).fetch()
        is_new = not file.exists() or failed_without_output(run_dir)
        before = None if is_new else load_recipe(str(file)).recipe
        # 1. Settle what the recipe leaves open: formats, weights, lengths in images, lanes.
        loaded = _with_earlier_formats(loaded, before, run_dir)
        loaded, taken = _pinned(loaded, before)
        loaded, inputs = fit_to_data(loaded, run_dir, before)
        loaded, inputs = fit_lanes(loaded, before, inputs, run_dir, nodes)
        # 2. A run in the folder goes on only as the same run.
        _not_shorter(loaded.recipe, run_dir)  # first: the other error would advise this length
        # What was fetched is removed after a refusal, which then names its address.
        place = store if is_empty and "://" in store else str(run_dir)
        changed = _changes(before, loaded.recipe, run_dir, allow, place) if before is not None else ""
        # 3. Refuse what the job would refuse: images, weights, machine, labels.
        inputs = check_recipe(loaded.recipe, run_dir, inputs, nodes)
        if not batch:
            check_machine(loaded.recipe)
        if isinstance(loaded.recipe, Evaluate):
            _check_evaluation(loaded.recipe, inputs)
        if isinstance(loaded.recipe, ExportRecipe) and loaded.recipe.export.push:
            from vitctl.export.push import check_hub

            check_hub(loaded.recipe.export.push)
        # 4. Write the folder.
        is_trained = isinstance(loaded.recipe, TrainRecipe) and any(run_dir.glob(f"**/{CHECKPOINTS}/{STEPS}"))
        if before is None:
            clear(run_dir)
        elif is_trained:  # the job compares its inputs with the checkpoint, and may be refused
            keep_records(run_dir)
        if before != loaded.recipe:
            name = written_name(file) if loaded.name == str(file) else ""  # `resume` keeps the recipe's name
            write_text(file, to_toml(replace(loaded, name=name or loaded.name)))
        if allow:
            note_allowed(run_dir, allow)
        if changed and not is_trained:  # else the job says it, once it agrees
            Journal(run_dir / LOG).write("warning", step=0, text=f"{CHANGED}: {changed}")
        line = batch.line(run_dir) if batch else launch_line(run_dir, loaded.recipe, config)
        write_text(run_dir / LAUNCH, printable(line) + "\n")
        started = {"folder": str(Path.cwd()), "run": str(run_dir.resolve())}
        write_run_json(run_dir / ENVIRONMENT, environment() | started)
        if store:  # refused here if it cannot be written
            Store(store, run_dir).send(run_dir / RECIPE)
    _keep_start(loaded.recipe)
    if "timm's rule" in (rate := loaded.origin("optimizer.lr")) and isinstance(loaded.recipe, Finetune):
        now = f"batch {loaded.recipe.schedule.batch_size:,}, learning rate {loaded.recipe.optimizer.lr:.3g}"
        taken = "\n".join(filter(None, [taken, f"{now}: {rate}"]))
    return Prepared(loaded.recipe, taken, inputs)


def check_machine(recipe: Recipe) -> str:
    """Check that this machine computes what [machine] asks for. Return device and precision.

    Several processes check it themselves, because the main process of a training imports no torch, unless a
    GPU is asked for by name.
    """
    machine = getattr(recipe, "machine", None)
    if not isinstance(machine, NetworkMachine):
        return "CPU"
    if machine.processes > 1 and machine.device != "cuda":
        return f"{machine.processes} processes, precision {machine.precision}"
    import torch

    from vitctl.engine.runtime import device_and_precision

    cpu, precision = device_and_precision(
        machine.device, machine.precision, recipe.log.trackers if isinstance(recipe, TrainRecipe) else ()
    )
    return f"{'CPU' if cpu else torch.cuda.get_device_name()}, {precision}"


def _check_evaluation(recipe: Evaluate, inputs: "Inputs") -> None:
    from vitctl.jobs.evaluate import check_evaluation
    from vitctl.jobs.inputs.checks import check_weights
    from vitctl.jobs.inputs.weights import planned_weights, scored_weights, stored_eval_transform

    network = check_weights(recipe)
    assert network is not None and inputs.scored is not None
    found = scored_weights(recipe, planned_weights(recipe, network.path, network.config, network.meta))
    stored_eval_transform(recipe, found.weights.meta)
    check_evaluation(recipe, found, inputs.scored)


def _keep_start(recipe: Recipe) -> None:
    """Mark the checkpoint that a training starts from: a resume and a replay read it again."""
    if isinstance(recipe, Finetune | Vtab) and recipe.weights.pinned:
        from vitctl.engine.checkpoint import mark_start  # it imports torch

        step = int(recipe.weights.pinned.split(":")[1])
        mark_start(step_folder(Path(recipe.weights.source) / CHECKPOINTS, step))


def _pinned(loaded: Loaded, before: Recipe | None) -> tuple[Loaded, str]:
    """Replace "newest" by the run, and a run by the checkpoint, that they meant at the first start: a resumed
    run must use the same weights, however far the run that they are of has come since.

    Returns:
        the recipe with these weights, and a line that names them; "" if the recipe names its weights.
    """
    weights, earlier = getattr(loaded.recipe, "weights", None), getattr(before, "weights", None)
    if weights is None:
        return loaded, ""
    from vitctl.jobs.inputs.checks import check_not_missing
    from vitctl.jobs.record.result import choose_weights, newest_run, weights_place

    source, taken = weights.source, ""
    if source == "newest" and earlier is not None:
        source = earlier.source
        taken = f"no --from: using the weights that this run started from, {source}"
    elif source == "newest":
        check_not_missing(loaded.recipe)
        newest, taken = newest_run(loaded.recipe.job)
        source = str(newest)
    files = {loaded.origin(f"weights.{key}").rpartition(":")[0] for key in ("source", "which", "pinned")}
    if earlier is not None and (source, weights.which) == (earlier.source, earlier.which):
        pinned = earlier.pinned
    elif weights.pinned and len(files) == 1:  # by the recipe.toml of another run
        pinned = weights.pinned
    else:
        place, _ = weights_place(source, weights.which, loaded.recipe.job)
        pinned = ""
        if isinstance(place, Path):  # by the sizes of its files: the job, which reads them, verifies them
            pinned = choose_weights(place, weights.which, by_size=True)[1].pin
    values = {"source": source, "pinned": pinned}
    overrides = [
        Override(f"weights.{key}", value, "when the run started")
        for key, value in values.items()
        if value != getattr(weights, key)
    ]
    return with_overrides(loaded, overrides), taken


def _with_earlier_formats(loaded: Loaded, before: Recipe | None, run_dir: Path) -> Loaded:
    """Return the recipe of an export with the formats that its folder has already: all are of one network."""
    if not (isinstance(before, ExportRecipe) and isinstance(loaded.recipe, ExportRecipe)):
        return loaded
    there = [name for name in before.export.to if FORMATS[name].place(run_dir).exists()]
    both = tuple(dict.fromkeys((*there, *loaded.recipe.export.to)))
    return with_overrides(loaded, [Override("export.to", both, "with the formats in the folder")])


_ALLOWED = ("data", "weights", "computation")
_CHOOSES_IMAGES = tuple(
    f"data.{name}" for name in ("path", "dataset", "root", "classes", "columns", "group_by", "mixture")
)
_CHOOSES_IMAGES += ("data.train_split", "data.eval_split", "data.subset")
# A checkpoint holds what these decide, so that it cannot be resumed with others; rates are not in it.
_IN_STATE, _RATES = ("model.", "optimizer.name", "data.image_size"), ("model.dropout", "model.drop_path")

_MORE_STEPS = ("schedule.total_steps", "evaluation.patience", "finetune.", "vtab.")  # for a finished run


def _changes(before: Recipe, now: Recipe, run_dir: Path, allow: Sequence[str], said: str) -> str:
    """Return a text of the differences that are allowed, or ""; `said` names the run in messages.

    Raises RecipeError for any other.
    """
    if before.job != now.job:
        raise RecipeError(
            said, f"holds a run of {before.job}, this is {now.job}", "choose another folder with --out"
        )
    # A training compares the digests of its inputs with those of its checkpoints.
    free = (*FREE_TO_CHANGE, "export.to", *(PLACES if isinstance(now, TrainRecipe) else ()))
    found = differences(before, now)
    changed = [d for d in found if not d[0].startswith(free)]
    known = every_key(type(now))
    if odd := next(
        (
            one
            for one in allow
            if one not in _ALLOWED and not any(f"{key}.".startswith(f"{one}.") for key in known)
        ),
        "",
    ):
        raise RecipeError(
            f"--allow {one_line(odd)}",
            "not a recipe key",
            "give a key that the error message names, or data, weights or computation",
        )
    refused = [d for d in changed if not any(d[0] == key or d[0].startswith(f"{key}.") for key in allow)]
    if refused:
        more = f"; and {len(refused) - 4} more" if len(refused) > 4 else ""
        sets = as_flags(d for d in found if not d[0].startswith((*FREE_TO_CHANGE, "export.to")))
        keys = " ".join(f"--allow {key}" for key, *_ in changed)
        of_data = " --allow data" * any(key.startswith(_CHOOSES_IMAGES) for key, *_ in refused)
        anyway = f", or resume anyway with: vitctl resume {typed(said)}{sets} {keys}{of_data}"
        is_over = isinstance(now, TrainRecipe) and read_status(run_dir) == "done"
        if (is_over and not any(key.startswith(_MORE_STEPS) for key, *_ in changed)) or any(
            (key.startswith(_IN_STATE) and key not in _RATES) or "float64" in given for key, *given in refused
        ):
            anyway = ""
        raise RecipeError(
            said,
            f"holds a run of another recipe: {_in_words(refused[:4])}{more}",
            f"choose another folder with --out{anyway}",
        )
    return _in_words(changed)


def _not_shorter(recipe: Recipe, run_dir: Path) -> None:
    """Refuse a training that would end before the checkpoint that it resumes from."""
    steps = recipe.schedule.total_steps if isinstance(recipe, TrainRecipe) else 0
    try:
        saved = [
            step_of(folder) or 0
            for folder in step_folders(run_dir / CHECKPOINTS)
            if (folder / STATE).exists()
        ]
    except PermissionError as error:
        raise no_permission(error) from None
    done = max(saved, default=0)
    if 0 < steps < done:
        raise RecipeError(
            run_dir,
            f"has a checkpoint of step {done}, but schedule.total_steps = {steps}",
            f"set it to {done} or more, or choose another folder with --out",
        )


def _in_words(changes: Sequence[tuple[str, Any, Any]]) -> str:
    return "; ".join(
        f"{key} was {toml_value(a) or UNSET}, now {toml_value(b) or UNSET}" for key, a, b in changes
    )


def launch_line(run_dir: Path, recipe: Recipe, config: LaunchConfig = LaunchConfig()) -> str:
    """The shell command that runs a prepared folder without `vitctl`, on each of its machines."""
    run_dir = run_dir.absolute()  # typed in any folder
    if not config.starts(recipe):
        return shlex.join([sys.executable, "-m", WORKER, str(run_dir)])
    from vitctl.launch.agent import accelerate_line

    return accelerate_line(run_dir, recipe, config)


def environment() -> dict[str, Any]:
    """Versions, machine and git commit, for RUN/env.json."""
    from vitctl.system.process import cpu_name, installed

    git = ["git", "-C", str(Path(__file__).resolve().parents[2]), "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, timeout=5, check=False).stdout.strip()
    except OSError:
        commit = ""
    return {
        "versions": installed(PACKAGES),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpu": cpu_name(),
        "cpus": usable_cores(),
        "git_commit": commit or None,
    }
