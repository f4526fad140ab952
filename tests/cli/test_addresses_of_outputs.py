"""No option and no key makes a local folder called `s3:`. What reads addresses is a text; all else refuses
them.
"""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.cli.conftest import Vitctl
from tests.conftest import TINY
from tests.matrix import each
from vitctl import finetune
from vitctl.cli.app import app
from vitctl.cli.flags import FLAGS
from vitctl.errors import LaunchError, RecipeError
from vitctl.recipe.load import every_key, load_recipe
from vitctl.recipe.schema import JOBS
from vitctl.system.files import cache_folder

ADDRESS = "s3://bucket/run"
REFUSED = "is an address, should be a path on a local or mounted disk"
# Texts that name no file to be written. A new option is either a path or comes to this list.
TEXTS = {
    "bench model": {"NAME", "--resolutions"},
    "data shards": {"SOURCE", "--bad", "--drop-class", "--keep-class"},
    "data index": {"SHARDS", "--image-key", "--label-key"},
    "data prepare": {"NAME"},
    **{key: {"DATA"} for key in ("data check", "data stats", "data show")},
    "recipes list": {"WORD"},
    "recipes show": {"RECIPE"},
    "recipes explain": {"KEY"},
    "recipes diff": {"RECIPE"},
    "recipes table": {"TABLE", "--target"},
    "sweep": {"RECIPE", "--metric", "--grid"},
    "predict": {"IMAGES", "--format"},
    **{key: {"--out"} for key in ("pretrain", "finetune")},  # a store gets a copy of the run
    "resume": {"RUN"},
    "inspect": {"IMAGES"},
    "serve": {"--host"},
    "report": {"--title"},
    "weights": {"NAME"},
    "verify": {"--replay"},
}
ALL = {"--allow", "--set", "--recipe", "--nodes", "--slurm", "--k8s", "--device"}


def commands(group: typer.Typer = app, words: str = "") -> Iterator[tuple[str, Any]]:
    """The words of each command, and its parameters: what they are called, and where they are declared."""
    for inner in group.registered_groups:
        yield from commands(inner.typer_instance, f"{words}{inner.name} ")
    for info in group.registered_commands:
        name = typer.main.get_command_name(info.name or info.callback.__name__)
        yield f"{words}{name}", inspect.signature(info.callback).parameters


def label(parameter: inspect.Parameter) -> str:
    about = parameter.annotation.__metadata__[0]
    names = (about.default, *(about.param_decls or ()), about.metavar)
    return next(one for one in names if isinstance(one, str))


COMMANDS = {
    name: {label(one): one for one in parameters.values() if hasattr(one.annotation, "__metadata__")}
    for name, parameters in commands()
}


def holds(parameter: inspect.Parameter, kind: type) -> bool:
    """Whether it is a path, or paths, or none."""
    return re.search(rf"\b{kind.__name__}\b", str(parameter.annotation.__origin__)) is not None


@each("name", [name for name, given in COMMANDS.items() if any(holds(one, Path) for one in given.values())])
def test_every_path_of_a_command_is_on_a_disk(vitctl: Vitctl, tmp_path: Path, name: str) -> None:
    needed = {key: one for key, one in COMMANDS[name].items() if one.default is inspect.Parameter.empty}
    for tried, parameter in COMMANDS[name].items():
        if not holds(parameter, Path):
            continue
        words = name.split()
        for key in {**needed, tried: parameter}:
            words += [key] if key.startswith("-") else []
            words.append(ADDRESS if key == tried else "x")
        said = vitctl(*words)
        assert (said.code, said.out) == (2, ""), words
        fix = "copy the files from or to the address yourself"
        fix = "`vitctl resume s3://BUCKET/NAME` fetches a run" if tried in ("RUN", "RUNS") else fix
        assert said.err == f"vitctl: {tried} s3://...: {REFUSED}; {fix}\n"
    assert not list(tmp_path.iterdir())


def test_no_other_text_of_a_command_names_a_file() -> None:
    """Those that a recipe's key is set by are tested below."""
    flags = {row.option for row in FLAGS}
    for name, given in COMMANDS.items():
        known = ALL | flags | TEXTS.get(name, set())
        texts = {key for key, one in given.items() if holds(one, str)}
        assert texts <= known, name


@pytest.mark.parametrize("job", JOBS)
def test_every_path_of_a_recipe_is_on_a_disk(job: str) -> None:
    """Of the keys whose description names a folder or a file."""
    outputs = {"cache", "file", "answers", "root"}
    keys = [key for key in every_key(JOBS[job]) if key.rpartition(".")[2] in outputs]
    for key in keys:
        with pytest.raises(RecipeError, match=REFUSED):
            load_recipe("smoke" if job == "pretrain" else job, [(key, f"{ADDRESS}.csv")])
    assert keys


def test_python_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=REFUSED):
        finetune(str(TINY), out=Path("gs://bucket/run"))
    monkeypatch.setenv("VITCTL_CACHE", "hf://datasets/me/mine")
    with pytest.raises(LaunchError, match=f"VITCTL_CACHE hf://...: {REFUSED}"):
        cache_folder()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("plain", ["c:/run", "runs/s3:x", "a b:/x", "s3"])
def test_what_is_no_address_is_a_path(vitctl: Vitctl, plain: str) -> None:
    assert REFUSED not in vitctl("pretrain", "-r", "smoke", "--data", "nowhere", "--out", plain).err
