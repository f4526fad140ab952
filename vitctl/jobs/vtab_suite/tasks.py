"""The tasks of a VTAB recipe, and their images."""

from collections.abc import Sequence
from pathlib import Path

from vitctl.data.datasets.vtab import SUITES, VtabTask
from vitctl.data.datasets.vtab_images import TaskData, open_task
from vitctl.errors import DataError, RecipeError
from vitctl.recipe.schema import Vtab


def chosen_tasks(recipe: Vtab) -> list[VtabTask]:
    """The rows of vtab.suite that vtab.tasks names, or all.

    Raises RecipeError on a name that the suite lacks.
    """
    by_name = {task.name: task for task in SUITES[recipe.vtab.suite]}
    unknown = [name for name in recipe.vtab.tasks if name not in by_name]
    if unknown:
        raise RecipeError(
            f"vtab.tasks: {', '.join(unknown)} not in suite '{recipe.vtab.suite}'; it has "
            f"{', '.join(by_name)}"
        )
    return [task for name, task in by_name.items() if name in (recipe.vtab.tasks or by_name)]


def open_tasks(recipe: Vtab, tasks: Sequence[VtabTask], run_dir: Path) -> dict[str, TaskData]:
    """Images of every task. Raises one DataError that names all that are missing."""
    opened, problems = {}, []
    root = Path(recipe.data.path or recipe.data.root)
    for task in tasks:
        try:
            opened[task.name] = open_task(
                task, root, scratch=run_dir / "data", allow_partial=recipe.data.allow_partial
            )
        except DataError as error:
            problems.append((task.name, error))
    if problems:
        missing = ", ".join(name for name, _ in problems)
        mini = "" if recipe.vtab.suite == "mini" else ", --suite mini needs no data"
        reason = f" ({problems[0][1]})" if len(problems) == 1 else ""
        raise DataError(
            f"{len(problems)} of {len(tasks)} tasks have no usable shards under {root}: {missing}{reason}; "
            f"each needs a folder "
            f"{root}/NAME made by `vitctl data shards`; --task takes some of the tasks{mini}"
        )
    return opened
