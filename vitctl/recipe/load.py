"""Load a recipe: TOML, `extends`, overrides, the origin of every value, and every problem at once."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from vitctl.errors import RecipeError, explaining
from vitctl.recipe.images import augment_keys
from vitctl.recipe.schema import JOBS, REMOVED, RENAMED, Recipe
from vitctl.recipe.synonyms import synonym
from vitctl.system import limits
from vitctl.system.address import value_without_queries, without_queries
from vitctl.system.files import parse_toml, read_toml
from vitctl.system.text import count_text, did_you_mean, has_control, nearest, one_edit_away, one_line

MAX_PARENTS = 16
_AUGMENT = "data.auto_augment"
_IN_PYTHON = "overrides"  # origin of a value that a caller of `load_recipe` gives
# Each reads a character once: a pattern that can match in several ways takes cubic time in the length of a
# line.
_NAME = re.compile(r"[\w.\-\s\"']+")
_NOT_OF_A_NAME = re.compile(r"[\s\"']")
_SURROGATE = re.compile("[\ud800-\udfff]")
RESOLVED = re.compile(r"# (.+), resolved;")  # the first line of a run's recipe.toml


@dataclass(frozen=True)
class Loaded:
    """A checked recipe, the origin of its values ("a.b" -> "file.toml:3", "--set", ...), and its name."""

    recipe: Recipe
    origins: dict[str, str]
    name: str

    def origin(self, key: str) -> str:
        """Return where `key` was set; 'default' if no file and no flag did."""
        if key in self.origins:
            return self.origins[key]
        for name, where in self.origins.items():
            if name.startswith(f"{key}."):  # of a table
                return where
        return "default"


class Override(NamedTuple):
    """One value given on the command line: dotted key, value, and the flag that set it."""

    key: str
    value: Any
    flag: str = "--set"


_OF_FLAG = re.compile(r"^[\w.]+ (= )?(?!and |with )")  # a key that its own flag says already


def recipe_folder() -> Path:
    """Return the folder of the shipped recipes: inside the wheel, or next to the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    return next(folder for folder in (package / "recipes", package.parent / "recipes") if folder.is_dir())


def recipe_names() -> list[str]:
    return sorted([path.stem for path in recipe_folder().glob("*.toml")])


def find_recipe(name: str) -> Path:
    """Return the file of a shipped recipe's name or of a user's path. Raises RecipeError with near names."""
    path = Path(name)
    if has_control(name):
        raise RecipeError(f"recipe {name!r}", "has a control character in its name", "rename it")
    if name.endswith(".toml") or path.is_file():
        if path.is_file():
            return path
        raise RecipeError(name, "no such recipe file", "`vitctl recipes list --all` shows the shipped ones")
    folder, is_name = recipe_folder(), path.name == name
    if is_name and (folder / f"{name}.toml").is_file():
        return folder / f"{name}.toml"
    if is_name and (folder / "sweeps" / f"{name}.toml").is_file():
        raise RecipeError(f"no recipe is called '{name}', a sweep is", fix=f"type `vitctl sweep {name}`")
    near = did_you_mean(nearest(name, recipe_names()))
    fix = f"{near} `vitctl recipes list --all` shows them all".lstrip()
    raise RecipeError(f"no recipe is called '{name}'", fix=fix)


def parse_override(text: str) -> Override:
    """Parse `a.b=value` as typed after --set, with the value as TOML if possible, else as text."""
    if _SURROGATE.search(text):
        raise RecipeError(f"--set {one_line(text)}", "is not UTF-8 text")
    key, found, value = text.partition("=")
    if not found or not key.strip():
        raise RecipeError(f"--set {text}", "write it as section.key=value, e.g. --set optimizer.lr=0.001")
    if len(text) > limits.RECIPE_LINE:
        raise RecipeError(
            f"--set {one_line(text[:40])}...",
            f"{len(text):,} characters, should be at most {limits.RECIPE_LINE:,}",
            "write it into a recipe",
        )
    try:
        parsed = parse_toml(f"value = {value}")
        return Override(key.strip(), parsed["value"] if list(parsed) == ["value"] else value)
    except ValueError:
        return Override(key.strip(), value)


@explaining()
def load_recipe(
    name: str | Path, overrides: Iterable[Override | tuple[str, Any]] = (), *, job: str | None = None
) -> Loaded:
    """Read, merge and check a recipe.

    Example:
        from vitctl import load_recipe

        loaded = load_recipe("jft_b16", [("optimizer.lr", 1e-3)])
        loaded.recipe.optimizer.lr, loaded.recipe.schedule.batch_size
        loaded.origin("schedule.batch_size")  # the file and line that set it

    Args:
        name: a shipped recipe's name or the path of a .toml file.
        overrides: (dotted key, value) pairs; later ones win. Overrides take precedence over the file, the
            file over the recipes it extends, and these over the defaults.
        job: the command; a recipe for another job is refused.

    Returns:
        `recipe`, whose fields are the sections and keys listed by `vitctl recipes explain`, and
            `origin(key)`.

    Raises:
        RecipeError: with every problem of the recipe, one per line, each with file and line and the nearest
            known key.
    """
    (name,) = without_queries(str(name))
    values, origins = _read_with_parents(find_recipe(name), ())
    _override(
        values, origins, (g if isinstance(g, Override) else Override(*g, flag=_IN_PYTHON) for g in overrides)
    )
    if job is not None and values.get("job", job) != job and values["job"] in [*JOBS]:
        raise RecipeError(f"recipe '{name}' is for `vitctl {values['job']}`, not for `vitctl {job}`")
    return Loaded(_check(values, origins, name), origins, name)


def with_overrides(loaded: Loaded, overrides: Iterable[Override]) -> Loaded:
    """Return a recipe with other values, checked again; no file is read. Raises as `load_recipe`."""
    values, origins = loaded.recipe.model_dump(), dict(loaded.origins)
    _override(values, origins, overrides)
    return Loaded(_check(values, origins, loaded.name), origins, loaded.name)


def as_python(value: Any) -> Any:
    """Convert a value, nested or not: NumPy and PyTorch become numbers and lists, paths become text."""
    match value:
        case dict():
            return {key: as_python(inner) for key, inner in value.items()}
        case list() | tuple():
            return type(value)(as_python(inner) for inner in value)
        case Path():
            return str(value)
    return value.tolist() if hasattr(value, "tolist") else value


def _spread(values: Mapping[str, Any], given: Override) -> list[Override]:
    """Return what a value of data.auto_augment sets."""
    keys = augment_keys(given.value, values.get("data") or {})
    return [given._replace(key=f"data.{key}", value=value) for key, value in keys.items()]


def _override(values: dict[str, Any], origins: dict[str, str], overrides: Iterable[Override]) -> None:
    """Set the values of flags, each with its origin."""
    for given in overrides:
        if not isinstance(given.key, str):
            raise RecipeError(given.flag, f"{given.key!r} is not a key", "write its dotted name in quotes")
        whole = given._replace(
            key=RENAMED.get(given.key, given.key), value=value_without_queries(as_python(given.value))
        )
        for override in _spread(values, whole) if whole.key == _AUGMENT else (whole,):
            _put(values, override)
            for key in [k for k in origins if k == override.key or k.startswith(override.key + ".")]:
                del origins[key]
            for path, _ in leaves({override.key: override.value}):
                origins[".".join(path)] = override.flag


def _read_with_parents(path: Path, children: tuple[Path, ...]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values and origins of a file merged over those of the recipe it extends."""
    path = path.resolve()
    if path in children or len(children) >= MAX_PARENTS:
        chain = " -> ".join(p.name for p in (*children, path))
        raise RecipeError(path.name, f"recipes extend each other in a circle: {chain}")
    own, lines = _read(path)
    name = one_line(path.name)
    keys = [".".join(names) for names, _ in leaves(own)]
    origins = {key: f"{name}:{_line(lines, key)}" for key in keys}
    parent = own.pop("extends", None)
    origins.pop("extends", None)
    if parent is None:
        return (_spread_table(own, origins, {}) if _AUGMENT in origins else own), origins
    if not isinstance(parent, str):
        raise RecipeError(
            f"{path.name}:{_line(lines, 'extends')}",
            'extends takes one recipe name or path, e.g. extends = "smoke"',
        )
    beside = path.parent / parent
    values, inherited = _read_with_parents(
        beside if beside.is_file() else find_recipe(parent), (*children, path)
    )
    if _AUGMENT in origins:
        own = _spread_table(own, origins, values)
    return _merge(values, own), inherited | origins


def _spread_table(own: dict[str, Any], origins: dict[str, str], below: Mapping[str, Any]) -> dict[str, Any]:
    """`_spread` in a file; a key that is written beside data.auto_augment stays as it is."""
    for one in _spread(below, Override(_AUGMENT, own["data"]["auto_augment"])):
        if one.key == _AUGMENT or one.key not in origins:
            _put(own, one)
            origins[one.key] = origins[_AUGMENT]
    return own


def _read(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    values, text = read_toml(path, error=RecipeError)
    lines = _line_numbers(text)
    for key, new in RENAMED.items():
        table, _, old = key.rpartition(".")
        inside = values.get(table)
        if isinstance(inside, dict) and old in inside:
            inside.setdefault(new.rpartition(".")[2], inside.pop(old))
            lines.setdefault(new, _line(lines, key))
    if RESOLVED.match(text):  # of a run, possibly by an earlier release
        for key, removed in REMOVED.items():
            table, _, name = key.rpartition(".")
            inside = values.get(table)
            if isinstance(inside, dict) and inside.get(name) in (*removed.values,):
                now = removed.values[inside.pop(name)]
                inside |= {} if now is None else {name: now}
        data = values.get("data")
        if isinstance(data, dict) and data.get("eval_resize") == 0:
            del data["eval_resize"]  # unset
    return values, lines


def _line_numbers(text: str) -> dict[str, int]:
    """Return the line of every `key =` and every [table], by dotted key, which tomllib does not report."""
    lines: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        is_header = line.lstrip().startswith("[")
        name, closed, _ = line.lstrip().removeprefix("[").partition("]") if is_header else line.partition("=")
        if not closed or not _NAME.fullmatch(name):
            continue
        name = _NOT_OF_A_NAME.sub("", name)
        if is_header:
            table = name + "."
        lines[name if is_header else table + name] = number
    return lines


def _line(lines: Mapping[str, int], key: str) -> int:
    while key not in lines and "." in key:
        key = key.rpartition(".")[0]
    return lines.get(key, 1)


def leaves(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    found: list[tuple[tuple[str, ...], Any]] = []
    for key, value in table.items():
        found += leaves(value, (*path, key)) if isinstance(value, Mapping) else [((*path, key), value)]
    return found


def _merge(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge tables deeply; everything else is replaced."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _put(values: dict[str, Any], override: Override) -> None:
    *tables, leaf = override.key.split(".")
    for table in tables:
        inner = values.setdefault(table, {})
        if not isinstance(inner, dict):
            raise RecipeError(f"{override.flag} {override.key}", f"'{table}' is a value, not a section")
        values = inner
    values[leaf] = override.value


def _check(values: dict[str, Any], origins: Mapping[str, str], name: str) -> Recipe:
    job = values.get("job")
    if not isinstance(job, str) or job not in JOBS:
        where = origins.get("job", name)
        said = "job is missing" if job is None else f"job = {job!r}"
        near = did_you_mean(nearest(str(job), JOBS))
        raise RecipeError(where, said, f"{near} set it to one of {', '.join(JOBS)}".lstrip())
    schema = JOBS[job]
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        problems = [_problem(detail, schema, origins, name) for detail in error.errors()]
        if len(problems) == 1:
            raise problems[0] from None
        title = f"recipe '{name}' has {count_text(len(problems), 'problem')}:"
        raise RecipeError("\n  ".join([title, *map(str, problems)])) from None


def _problem(
    detail: ErrorDetails, schema: type[BaseModel], origins: Mapping[str, str], name: str
) -> RecipeError:
    key = ".".join(str(part) for part in detail["loc"])
    value = detail.get("input")
    related = [o for k, o in origins.items() if k.startswith(key + ".") or key.startswith(k + ".")]
    flags = [
        origin for origin in related if origin.startswith(("--", _IN_PYTHON))
    ]  # given last, and more often wrong
    where = origins.get(key) or next(iter(flags + related), name)
    match detail["type"]:
        case "extra_forbidden" if key in REMOVED:
            return RecipeError(where, f"unknown key {key}: it was removed", REMOVED[key].instead)
        case "extra_forbidden":
            *tables, _ = key.split(".")
            known = ", ".join(_fields(schema, tables))
            return RecipeError(where, f"unknown key {key}", _instead(key, schema) or f"known here: {known}")
        case "literal_error" if key in REMOVED and value in (*REMOVED[key].values,):
            return RecipeError(where, f"{key} = {value!r} was removed", REMOVED[key].instead)
        case "missing":
            return RecipeError(where, f"{key} is missing", "set it in the recipe, or override it")
        case "model_type":
            inside = _fields(schema, key.split("."))
            if not inside:  # an element of a list of tables
                fix = "`vitctl recipes explain` shows what is in it"
                return RecipeError(where, f"{key} = {_shown(value)} should be a table", fix)
            fix = f"set what is in it, e.g. {key}.{inside[0]}"
            return RecipeError(where, f"{key} is a section, not a value", fix)
        case "value_error":
            said = str(detail["ctx"]["error"]).removeprefix(f"{key}.")
            first = said.split()[0]
            named = origins.get(f"{key}.{first}".lstrip("."), "")  # the rule names its key first
            where = named if named.startswith(("--", _IN_PYTHON)) else where
            what, _, fix = said.rpartition("; ") if "; " in said else (said, "", "")
            fix += _back(schema, key, what, origins)
            if where in (named, origins.get(key)) and where.startswith("--") and where != "--set":
                return RecipeError(where, _OF_FLAG.sub("", what) if named else what, fix)
            if first in _fields(schema, key.split(".")):
                return RecipeError(where, f"{key}.{what}", fix)
            return RecipeError(where, f"{key + ': ' if key else ''}{what}", fix)
        case _:
            reason = f"{detail['msg'][0].lower()}{detail['msg'][1:]}"
            return RecipeError(where, f"{key} = {_shown(value)} is not allowed: {reason}", _hint(detail, key))


def _back(schema: type[BaseModel], section: str, what: str, origins: Mapping[str, str]) -> str:
    """Return the options that undo what a recipe file sets, of the keys that are said to do nothing."""
    idle, says, _ = what.partition(" nothing ")
    table = schema.model_fields[section].annotation if section in schema.model_fields else None
    known = table.model_fields if isinstance(table, type) and issubclass(table, BaseModel) else {}
    options = [
        f"--set {section}.{name}={known[name].default}"
        for name in re.findall(r"[a-z]\w+", idle if says else "")
        if name in known and not origins.get(f"{section}.{name}", "--").startswith(("--", _IN_PYTHON))
    ]
    return f", here with {' '.join(options)}" if options else ""


def _instead(key: str, schema: type[BaseModel]) -> str:
    """Say what to write instead of an unknown key; "" if nothing is similar."""
    keys, leaf = every_key(schema), key.rpartition(".")[2]
    row = synonym(leaf)
    if row and (places := [place for place in row.places if place.partition("=")[0] in keys]):
        return did_you_mean([" and ".join(places) + row.remark])
    if row and not row.here:
        return f"vitctl has no such setting{row.remark}"
    elsewhere = [known for known in keys if known.rpartition(".")[2] == leaf]
    others = [job for job, other in JOBS.items() if key in every_key(other)]
    if others and not elsewhere:
        return f"it belongs to {', '.join(others)}"
    return did_you_mean(elsewhere[:1] or one_edit_away(key, [*schema.model_fields, *keys])[:1])


def _hint(detail: ErrorDetails, key: str) -> str:
    """Return the key or the allowed word that was meant, or the integer form of 1e4, in TOML a float."""
    value = detail.get("input")
    if detail["type"] == "literal_error" and isinstance(value, str):
        return did_you_mean(nearest(value, re.findall("'(.*?)'", detail["ctx"]["expected"])))
    if key == "loss.smoothing":  # says how, and not how much
        return did_you_mean([f"loss.label_smoothing={value}"])
    whole = detail["type"].startswith("int") and isinstance(value, float) and value.is_integer()
    return f"write {int(value)}" if whole else ""


def _fields(schema: type[BaseModel], tables: list[str]) -> list[str]:
    for table in tables:
        annotation = schema.model_fields[table].annotation if table in schema.model_fields else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        schema = annotation
    return list(schema.model_fields)


def every_key(schema: type[BaseModel], prefix: str = "") -> list[str]:
    """Return all dotted keys of a recipe schema, in the order in which they are written."""
    keys: list[str] = []
    for name, field in schema.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += every_key(field.annotation, f"{prefix}{name}.")
        else:
            keys.append(prefix + name)
    return keys


def takes(key: str, text: str) -> bool:
    """Return whether a key accepts a value typed after --set, judged by the value alone."""
    schema, values = next(schema for schema in JOBS.values() if key in every_key(schema)), dict[str, Any]()
    given = parse_override(f"{key}={text}")
    for one in _spread({}, given) if key == _AUGMENT else (given,):
        _put(values, one)
    try:
        schema.model_validate(values)
    except ValidationError as error:
        where = "data" if key == _AUGMENT else key  # its value is judged with the keys that it sets
        return not any(".".join(map(str, problem["loc"])).startswith(where) for problem in error.errors())
    return True


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
