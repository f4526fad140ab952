"""What of a recipe changes no number of a result: the one list, for resuming, for digests and for what counts as a recipe's run."""

from vitctl.recipe.schema import Recipe
from vitctl.recipe.write import flat, toml_value

# By dotted key, or by table. Beyond rounding: precision is none of them. With dropout, processes, micro_batch and compile change
# the draws; a result then names them (`dropout_draws`).
_NEUTRAL = (
    "note",
    "log.",
    "machine.processes",
    "machine.workers",
    "machine.device",
    "machine.attention",
    "machine.checkpoint_blocks",
    "machine.compile",
    "machine.micro_batch",
    "machine.sharding",
    "evaluation.batch_size",
    "checkpoint.",
    "data.root",
    "data.cache_gib",
    "fewshot_probe.root",
    "fewshot_probe.cache_gib",
    "fewshot.cache",
    "vtab.keep_checkpoints",
    "export.file",
)


def result_neutral() -> tuple[str, ...]:
    """How the dotted keys begin that change no number of a result beyond rounding."""
    return _NEUTRAL


# What may change while a run goes on. Tasks and seeds of a table belong to it, and change no number of each of its runs.
FREE_TO_CHANGE = (*result_neutral(), "vtab.tasks", "vtab.seeds")


def deciding_values(recipe: Recipe, free: tuple[str, ...] = FREE_TO_CHANGE) -> dict[str, str]:
    """The values that decide the numbers of a run, as TOML by dotted key; none whose key begins as one of `free`."""
    return {key: toml_value(value) for key, value in flat(recipe).items() if not key.startswith(free)}
