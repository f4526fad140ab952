"""VTAB (Section 4.1, B.1.1): every task fine-tuned on its 1,000 images with one setting, scored on its whole test split."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitctl.data.catalog import open_split
from vitctl.data.read import Source
from vitctl.data.transforms import EvalTransform, TrainTransform
from vitctl.data.vtab import GROUPS, SUITES, VtabTask
from vitctl.engine.journal import Report, silent
from vitctl.engine.preemption import StopFlag
from vitctl.engine.runtime import Runtime
from vitctl.errors import DataError, RecipeError
from vitctl.jobs.inputs import Found, find_weights, transferred_model
from vitctl.jobs.result import RunResult, read_result, write_result
from vitctl.jobs.setup import on_device, open_journal, start_runtime, train, weights_used
from vitctl.recipe.schema import Vtab


def vtab(recipe: Vtab, run_dir: Path, report: Report = silent, stop: StopFlag | None = None) -> RunResult:
    """Fine-tune weights.source on every task of vtab.suite, going on after the last finished one.

    Args:
        recipe: checked.
        run_dir: gets tasks/NAME/seed_N/ for each run.
        report: called with every log record of the main process.
        stop: raised by signals.

    Returns:
        accuracy per task (mean and standard deviation over seeds), group means, and the mean over tasks.

    Raises:
        DataError: data of a task is missing; all such tasks are named.
        Stopped: a signal came; what was done is kept.

    Paper: Section 4.1, Appendix B.1.1, Table 9
    """
    stop = StopFlag() if stop is None else stop
    found = find_weights(recipe.weights.source, model=recipe.weights.model)
    tasks = chosen_tasks(recipe)
    sources = open_tasks(recipe, tasks, run_dir)
    runtime = start_runtime(recipe.machine, run_dir, recipe.log)
    journal = open_journal(runtime, run_dir, report)
    journal.write("weights", step=0, path=found.path, text=f"{len(tasks)} tasks, {len(recipe.vtab.seeds)} seeds each")
    scores: dict[str, list[float]] = {task.name: [] for task in tasks}
    for task in tasks:
        for seed in recipe.vtab.seeds:
            result = _one(recipe, runtime, run_dir, report, stop, found, task, seed, *sources[task.name])
            scores[task.name].append(result.metrics["accuracy"])
        mean = float(np.mean(scores[task.name]))
        journal.write("task", step=0, task=task.name, group=task.group, accuracy=mean, seeds=scores[task.name])
    return RunResult(
        "vtab", "done", metrics=_table(recipe, tasks, scores), provenance=_provenance(recipe, found, tasks, sources)
    )


def chosen_tasks(recipe: Vtab) -> list[VtabTask]:
    """The rows of vtab.suite that vtab.tasks names, or all. Raises RecipeError on a name that the suite lacks."""
    by_name = {task.name: task for task in SUITES[recipe.vtab.suite]}
    unknown = [name for name in recipe.vtab.tasks if name not in by_name]
    if unknown:
        raise RecipeError(
            f"vtab.tasks: {', '.join(unknown)} not in suite '{recipe.vtab.suite}'; it has {', '.join(by_name)}"
        )
    return [by_name[name] for name in recipe.vtab.tasks or by_name]


def open_tasks(recipe: Vtab, tasks: Sequence[VtabTask], run_dir: Path) -> dict[str, tuple[Source, Source]]:
    """Training and test images of every task. Raises one DataError that names all that are missing."""
    sources, problems = {}, []
    root = recipe.data.path or recipe.data.root
    for task in tasks:
        try:
            train_on, test_on = (
                open_split(split, dataset=task.data_set, root=root, scratch=run_dir / "data")
                for split in (task.train, task.test)
            )
            sources[task.name] = train_on, test_on
        except DataError as error:
            problems.append((task.name, error))
    if problems:
        missing = ", ".join(name for name, _ in problems)
        reason = f" ({problems[0][1]})" if len(problems) == 1 else ""
        raise DataError(
            f"{len(problems)} of {len(tasks)} tasks have no usable shards under {root}: {missing}{reason}; each needs a folder "
            f"{root}/NAME made by `vitctl data shards`; --task takes some of the tasks, --suite mini needs no data"
        )
    return sources


def _one(
    recipe: Vtab,
    runtime: Runtime,
    run_dir: Path,
    report: Report,
    stop: StopFlag,
    found: Found,
    task: VtabTask,
    seed: int,
    train_on: Source,
    test_on: Source,
) -> RunResult:
    """One fine-tuning run of one task, in its own folder; a finished one is read back."""
    folder = run_dir / "tasks" / task.name / f"seed_{seed}"
    done = read_result(folder)
    if done is not None and done.status == "done":
        return done
    folder.mkdir(parents=True, exist_ok=True)
    size = recipe.data.image_size or found.weights.config.image_size
    model, _ = transferred_model(
        found.weights,
        recipe.weights,
        num_classes=task.num_classes,
        image_size=size,
        dropout=recipe.dropout,
        seed=seed,
        dtype=runtime.dtype,
    )
    crop, flip = (task.crop, task.flip) if recipe.data.augment == "bit" else (False, False)
    transform = TrainTransform(
        size, crop="random" if crop else "none", flip=flip, resample=recipe.data.resample, resize=round(size * 7 / 6)
    )
    meta = {
        "mean": found.weights.meta["mean"],
        "std": found.weights.meta["std"],
        "class_names": list(train_on.class_names),
        "image_size": size,
        "eval_method": "square",
        "eval_resize": 0,
        "resample": recipe.data.resample,
    }
    score = train(
        recipe.model_copy(update={"seed": seed}),
        runtime,
        folder,
        open_journal(runtime, folder, lambda record: report({**record, "task": task.name})),
        stop,
        model=on_device(model, runtime),
        config=model.config,
        meta=meta,
        train_on=(train_on, transform),
        score_on=(test_on, EvalTransform(size, method="square", resize=0, resample=recipe.data.resample)),
        max_bad_fraction=recipe.data.max_bad_fraction,
    )
    accuracy = runtime.sum([score.accuracy if score and runtime.is_main else 0.0])[0]
    result = RunResult("vtab-task", "done", metrics={"accuracy": accuracy})
    return write_result(folder, result) if runtime.is_main else result


def _table(recipe: Vtab, tasks: Sequence[VtabTask], scores: dict[str, list[float]]) -> dict[str, Any]:
    means = {name: float(np.mean(values)) for name, values in scores.items()}
    groups = {group: [means[task.name] for task in tasks if task.group == group] for group in GROUPS}
    return {
        "mean": float(np.mean(list(means.values()))),
        "partial": len(tasks) < len(SUITES[recipe.vtab.suite]),
        "tasks": {name: {"mean": means[name], "std": float(np.std(values))} for name, values in scores.items()},
        "groups": {group: float(np.mean(values)) for group, values in groups.items() if values},
    }


def _provenance(
    recipe: Vtab, found: Found, tasks: Sequence[VtabTask], sources: dict[str, tuple[Source, Source]]
) -> dict[str, Any]:
    digests = {
        task.name: {
            "train_split": task.train,
            "train_sha256": sources[task.name][0].digest,
            "split": task.test,
            "data_sha256": sources[task.name][1].digest,
        }
        for task in tasks
    }
    return weights_used(found, recipe.weights) | {
        "suite": recipe.vtab.suite,
        "image_size": recipe.data.image_size or found.weights.config.image_size,
        "augment": recipe.data.augment,
        "seeds": list(recipe.vtab.seeds),
        "tasks": digests,
    }
