"""The recipe and the data of a run against what was recorded of them."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from vitctl.data.source.integrity import Verification
from vitctl.data.source.provenance import split_sources
from vitctl.data.source.read import Source
from vitctl.engine.journal import CHANGED, json_digest
from vitctl.engine.metrics import baselines
from vitctl.engine.run_files import RESULT
from vitctl.engine.trace.steps import StartLine, Steps
from vitctl.errors import VitctlError
from vitctl.jobs.inputs.data import open_images, open_training_images
from vitctl.jobs.record.result import RunResult, with_recipe
from vitctl.jobs.vtab_suite import chosen_tasks, open_tasks
from vitctl.recipe.load import Loaded, load_recipe
from vitctl.recipe.neutral import deciding_values
from vitctl.recipe.schema import Evaluate, Finetune, Pretrain, Recipe, Vtab
from vitctl.verify.finding import Finding, differs, ok, unchecked, unproven
from vitctl.verify.log import readable_records

_MOST_KEYS = 4  # that are named


def check_recipe_file(
    loaded: Loaded, result: RunResult | None, records: Sequence[Steps], is_told: bool
) -> Finding:
    """Whether recipe.toml is that of the result, and that of the starts that made the steps.

    Args:
        loaded: RUN/recipe.toml; places of this machine that replace some of its values are ignored.
        result: of the run; None while there is none.
        records: of the trainings of the run.
        is_told: the log says that the recipe was changed on purpose.
    """
    recipe = load_recipe(loaded.name).recipe
    starts = [start for record in records for start in record.starts]
    if result is not None and result.status == "done" and (noted := result.provenance.get("recipe_sha256")):
        if with_recipe(result, recipe).provenance["recipe_sha256"] != noted:
            text = "recipe.toml: its values are not those of the result"
            return differs(
                "recipe", text + _in_words([*_changed_keys(recipe, starts), *_resolved(result, starts)])
            )
        of = "the result"
    elif any(start.recipe_file for start in starts):
        noted, of = "", "the last start"
    else:
        return unchecked("recipe", "no digest of it was recorded")  # log.trace = false, and not finished
    if not any(start.recipe_file for start in starts):
        return ok("recipe", f"recipe.toml: the values that decide the result are those of {of}")
    return _made_with(recipe, records, of, is_told)


def _made_with(recipe: Recipe, records: Sequence[Steps], of: str, is_told: bool) -> Finding:
    """Whether the steps were made with the recipe."""
    own = json_digest(deciding_values(recipe))
    makers = [record.start_of(step) for record in records if record.starts for step in sorted(record.by_step)]
    known = [start for start in makers if start.recipe_file]
    others = [start for start in known if start.recipe_file != own]
    last_ones = [record.starts[-1] for record in records if record.starts]
    changed = _in_words(_changed_keys(recipe, others or last_ones))
    if known and len(others) == len(known):
        return differs(
            "recipe",
            f"recipe.toml: none of the {len(known):,} recorded steps was made with its values{changed}",
        )
    if not known and all(start.recipe_file != own for start in last_ones):
        return differs("recipe", f"recipe.toml: its values are not those of the last start{changed}")
    if not others:
        return ok(
            "recipe", f"recipe.toml: the values that decide the result are those of {of} and of every step"
        )
    text = f"{len(others):,} of {len(known):,} steps{changed}"
    if not is_told:
        return differs(
            "recipe", f"recipe.toml: its values are not those of {text}; the log tells of no change"
        )
    return ok("recipe", f"recipe.toml: its values are those of {of}; changed on purpose after {text}")


def tells_of_a_change(folder: Path) -> bool:
    """Whether a log says that the recipe was changed on purpose."""
    return any(
        record.get("kind") == "warning" and str(record.get("text")).startswith(CHANGED)
        for record in readable_records(folder)
    )


def _changed_keys(recipe: Recipe, starts: Sequence[StartLine]) -> list[str]:
    """What differs between recipe.toml and the last of these starts, in words."""
    noted = starts[-1].made_of.recipe if starts else {}
    now = deciding_values(recipe)
    changed = [key for key in now if key in noted and now[key] != noted[key]]
    return [f"{key} was {noted[key] or 'unset'}, is {now[key] or 'unset'}" for key in changed]


def _resolved(result: RunResult, starts: Sequence[StartLine]) -> list[str]:
    """The precision, which a result has from the device where the recipe says "auto"."""
    before = starts[-1].precision if starts else ""
    now = result.provenance.get("precision", before)
    return [f"precision was {before}, is {now} in {RESULT}"] if before and now != before else []


def _in_words(changed: Sequence[str]) -> str:
    more = [f"{len(changed) - _MOST_KEYS} more"] if len(changed) > _MOST_KEYS else []
    return f": {'; '.join([*changed[:_MOST_KEYS], *more])}" if changed else ""


def check_data(
    recipe: Recipe,
    run_dir: Path,
    scratch: Path,
    result: RunResult | None,
    start: StartLine | None,
    *,
    reads_bytes: bool,
) -> Iterator[Finding]:
    """Whether the indexes of the data have the digests that were recorded, and with `reads_bytes` every shard
    that of its index.

    Args:
        recipe: with data.path as it is on this machine.
        run_dir: of the run, whose folder `data` may hold generated images; nothing is written there.
        scratch: where they are generated if they are missing.
        result, start: what was recorded.
        reads_bytes: read every shard.
    """
    place = run_dir if (run_dir / "data").is_dir() else scratch
    try:
        sources = _sources(recipe, place)
    except VitctlError as error:
        state = unproven if reads_bytes else unchecked
        yield state("data", f"{error}; --data SHARDS names another place")
        return
    noted = _noted(result, start)
    compared = 0
    for name, source in sources.items():
        if name not in noted:
            continue
        compared += 1
        if source.digest != noted[name]:
            text = f"{name}: digest {source.digest[:16]}, recorded {noted[name][:16]}: other images or labels, or shards written again"
            yield differs("data", text)
            if reads_bytes:
                yield unchecked("shards", "not read, since they are not those of the run")
            return
    if not compared:
        yield unchecked("data", "no digest of it was recorded")
        return
    scored = sources.get("score")
    if (
        result is not None
        and result.status == "done"
        and isinstance(recipe, Pretrain | Finetune)
        and scored is not None
    ):
        for name, value in baselines(scored.labels(), len(scored.class_names)).items():
            if name in result.metrics and result.metrics[name] != value:
                yield differs("result", f"its {name} is {result.metrics[name]!r}, {value!r} of these labels")
                return
    counts = ", ".join(f"{name} {len(source):,} images" for name, source in sources.items())
    yield ok("data", f"{counts}: index and labels have the recorded digests")
    if any(split_sources(source) for source in sources.values()):
        yield (
            _check_bytes(list(sources.values()), scratch)
            if reads_bytes
            else unchecked("shards", "their bytes: --bytes holds every shard against its index")
        )


def _check_bytes(sources: Sequence[Source], scratch: Path) -> Finding:
    begun = Verification(sources, scratch)
    begun.finish(None)
    found = begun.found()
    if found.damaged:
        return differs("shards", "; ".join(found.damaged[:4]))
    if found.share < 1:
        return unproven(
            "shards", f"{found.share:.1%} of their bytes could be read; these are as their index says"
        )
    return ok("shards", "every byte as its index says")


def _sources(recipe: Recipe, place: Path) -> dict[str, Source]:
    if isinstance(recipe, Pretrain | Finetune):
        train, scored = open_training_images(recipe.data, place, needs_labels=False)
        return {"train": train} | ({"score": scored} if scored is not None else {})
    if isinstance(recipe, Vtab):
        tasks = open_tasks(recipe, chosen_tasks(recipe), place)
        pairs = {f"{name} train": task.train for name, task in tasks.items()}
        return pairs | {f"{name} test": task.test for name, task in tasks.items()}
    return (
        {"score": open_images(recipe.data, recipe.data.eval_split, place)}
        if isinstance(recipe, Evaluate)
        else {}
    )


def _noted(result: RunResult | None, start: StartLine | None) -> dict[str, str]:
    """Name of each split -> its digest, of the result and else of the last start."""
    noted = {name: one.sha256 for name, one in start.made_of.images.items()} if start is not None else {}
    used = result.provenance if result is not None else {}
    noted |= {
        name: str(used[key])
        for name, key in (("train", "train_sha256"), ("score", "data_sha256"))
        if key in used
    }
    tasks = used.get("tasks")
    for task, one in tasks.items() if isinstance(tasks, dict) else ():
        if isinstance(one, dict):
            noted |= {
                f"{task} train": str(one.get("train_sha256")),
                f"{task} test": str(one.get("data_sha256")),
            }
    return noted
