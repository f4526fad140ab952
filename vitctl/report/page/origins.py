"""What the numbers of a run belong to: data, weights, precision, environment, recipe, and the commands that
repeat it.
"""

from collections.abc import Mapping
from typing import Any

from vitctl.engine.run_files import RECIPE
from vitctl.report.page.found import FoundRun
from vitctl.report.page.markup import Html, facts, folded, join, scrolled, tag
from vitctl.system.text import typed

# Groups of the provenance: title, and which of its keys belong there. What no group names stands under the
# last.
_GROUPS = (
    (
        "Data",
        (
            "split",
            "data_",
            "num_images",
            "labels",
            "train_",
            "num_train",
            "classes",
            "tasks",
            "images",
            "augment",
            "suite",
        ),
    ),
    (
        "Pre-processing",
        ("image_size", "eval_", "resample", "exif_", "mean", "std", "truncated", "crop", "flip"),
    ),
    ("Weights", ("weights", "from", "network", "initialise")),
    (
        "Precision and device",
        ("precision", "device", "processes", "threads", "attention", "compiled", "micro_batch"),
    ),
    ("Recipe and other", ("",)),
)
_LEFT_OUT = ("versions",)


def origin_section(run: FoundRun) -> list[Html]:
    """Tables of provenance and environment, the recipe with its origins, and how to repeat the run."""
    made = _provenance(run.provenance)
    if rows := _environment(run):
        made.append(facts("Environment", rows))
    if not run.provenance:
        made.insert(
            0, tag("p", "This run has no result yet, so that no digests of data and weights are recorded.")
        )
    return [
        folded("Data, weights, precision and environment", tag("div", *made, class_="columns")),
        *([_recipe(run)] if run.recipe_text else []),
        _commands(run),
    ]


def _provenance(provenance: Mapping[str, Any]) -> list[Html]:
    left = dict(provenance)
    made = []
    for title, prefixes in _GROUPS:
        own = {key: left.pop(key) for key in list(left) if key.startswith(prefixes) and key not in _LEFT_OUT}
        rows = [
            (key.replace("_", " "), _shown(value))
            for key, value in own.items()
            if not isinstance(value, Mapping)
        ]
        if rows:
            made.append(facts(title, rows))
        for key, value in own.items():
            if isinstance(value, Mapping) and value:
                made.append(_nested(key.replace("_", " "), value))
    return made


def _nested(title: str, values: Mapping[str, Any]) -> Html:
    inner = [(key, value) for key, value in values.items()]
    if all(isinstance(value, Mapping) for _, value in inner):
        return join(
            facts(f"{title}: {key}", [(name.replace("_", " "), _shown(v)) for name, v in value.items()])
            for key, value in inner
        )
    return facts(title, [(key.replace("_", " "), _shown(value)) for key, value in inner])


def _environment(run: FoundRun) -> list[tuple[object, object]]:
    """Versions and machine; not the name of the machine, because pages are passed on."""
    env = run.environment
    versions = dict(env.get("versions") or {}) | dict(run.provenance.get("versions") or {})
    rows: list[tuple[object, object]] = [
        (name, env[key])
        for key, name in (
            ("python", "Python"),
            ("platform", "platform"),
            ("cpus", "CPUs"),
            ("git_commit", "commit of vitctl"),
        )
        if env.get(key)
    ]
    return rows + sorted(versions.items())


def _recipe(run: FoundRun) -> Html:
    if run.recipe is None:
        return folded("Recipe", _code(run.recipe_text, f"The recipe of {run.name}"))
    origins = run.recipe.origins
    set_by = sorted({source.partition(":")[0] for source in origins.values()})
    note = f"Every value with the place that set it. {len(origins)} values were set ({', '.join(set_by)}); the others are defaults."
    return folded(
        "Recipe, with the origin of every value",
        tag("p", note),
        _code(run.recipe_text, f"The recipe of {run.name}"),
    )


def _commands(run: FoundRun) -> Html:
    job = run.job or "pretrain"
    again = f"vitctl {job} --recipe {typed(run.folder / RECIPE)} --out {typed(f'{run.folder}_again')}"
    parts = [
        tag("p", "The same run in a new folder:"),
        _code(again, "The command that repeats the run"),
        tag("p", f"Without this folder: save the recipe above as {RECIPE}, and give that file to --recipe; "
                 f"its data and weights "
                 "are found by the digests above."),
    ]  # fmt: skip
    if run.launch:
        parts += [tag("p", "Its processes were started by:"), _code(run.launch, "The launch line")]
    return folded("Commands to repeat it", *parts)


def _code(text: str, label: str) -> Html:
    return scrolled(tag("pre", tag("code", text)), label)


def _shown(value: Any) -> object:
    if value is None or value == "" or value == []:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(str(_shown(item)) for item in value)
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {_shown(item)}" for key, item in value.items())
    text = f"{value:g}" if isinstance(value, float) else str(value)
    is_digest = len(text) == 64 and set(text) <= set("0123456789abcdef")
    return tag("code", text) if is_digest else text
