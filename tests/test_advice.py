"""No message proposes what is then refused: every command, option, key, extra and variable that a text of the
package names is held against the real one.

What a text inserts ({path}) and its words in capitals (FOLDER) are filled in from `FILLED`. A name that is
not there fails the test, so that nobody passes by.
"""

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from tests.docs.conftest import find_command
from tests.sources import nodes
from tests.test_messages import _is_text, _text
from vitctl.cli.app import COMMANDS, GROUPS, USAGE_ERROR
from vitctl.data.source.splits import resolve
from vitctl.recipe.load import every_key, takes
from vitctl.recipe.schema import JOBS

Text = tuple[str, str]  # module, text
# What texts insert into commands, and words in capitals there.
PATH, RUN, TWO = "data/mine", "runs/a", "train-{0000..0001}.tar"
FILLED = {
    **dict.fromkeys(
        (
            "root",
            "path",
            "typed",
            "parent",
            "folder",
            "place",
            "places",
            "out",
            "shards",
            "PLACE",
            "ROOT",
            "BUCKET",
            "FOLDER",
        ),
        PATH,
    ),
    **dict.fromkeys(
        ("PHOTOS", "NEW_PHOTOS", "IMAGES", "IMAGENET_FOLDER", "SHARDS", "SOURCE", "OUT", "NEW"), PATH
    ),
    **dict.fromkeys(("run", "run_dir", "training", "pretrain", "weights", "...", "RUN"), RUN),
    **dict.fromkeys(("NAME", "name", "dataset", "SPLIT", "WORD"), "digits"),
    **dict.fromkeys(("job", "values"), "pretrain"),
    "DOTS": PATH,  # `vitctl data dedup ... --apply`: what was typed
    "FILE": "file",
    "KEY": "data.eval_method",
    "VALUE": "square",
    "SHARE": "0.1",
    "URL": "https://example.org/train.tar",
    "file": "speed.json",
    "flag": "--data",
    "said": RUN,
    "users": RUN,
    "keys": "--allow data",
    "names": "B/16",
    "option": "--label-key",
    "own": f"--data {PATH}",
    "plot": "fig5.png",
    "scheme": "s3",
    "of_data": " --allow data",
    "sets": " --set optimizer.lr=0.1",
    "source": "model.onnx",
    "steps": "3:4",
    "shards": TWO,
    "text": TWO,
    "extra": "litert",
}
KEYS = {key for schema in JOBS.values() for key in every_key(schema)}
SECTIONS = "|".join(sorted({key.partition(".")[0] for key in KEYS if "." in key}))
FILES = ("csv", "html", "json", "jsonl", "npz", "png", "safetensors")  # log.jsonl is no key
NAMES = {command.__name__ for commands in COMMANDS.values() for command in commands} | {*GROUPS}
# Options of other programs.
OTHER_PROGRAMS = {
    "--no-deps": "pip",
    "--clip-mode": "timm",
    "--lr-base-scale": "timm",
    "--lr-base-size": "timm",
    "--recount": "timm",
    "--remode": "timm",
    "--aa": "timm",
    "--upgrade": "pip",
    "--strip-components": "tar",
    "--shm-size": "docker",
    "--kill-on-bad-exit": "srun",
    "--cpus-per-task": "srun",
    "--exclusive": "sbatch",
    "--wait": "srun",
    "--requeue": "sbatch",
    "--pty": "srun",
}
# Variables that they read.
LIBRARIES = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HF_HUB_OFFLINE", "TORCHINDUCTOR_CACHE_DIR"} | {
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"),
    *("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_CONNECTION_STRING"),
    "GOOGLE_APPLICATION_CREDENTIALS",
}
_KEY = re.compile(rf"(?<![\w/.{{-])(?:{SECTIONS})\.[a-z_0-9]+(?![\w/(])")
_VALUE = re.compile(rf"((?:{SECTIONS})\.[a-z_0-9]+)(?: = |=| to (?=['\d]))('[^']*'|\[[^\]]*\]|[\w.+-]+)")
_COMMAND = re.compile(
    r"`(?:[A-Z_]+=\S+ )?vitctl ([^`]*)`|(?<![`\w])vitctl ([a-z]+\b(?: (?! )[^`;,) ]+|(?<=') )*)"
)
_OPTION = re.compile(r"(?<![\w{-])--[a-z][a-z0-9-]*(?![\w_])")
_VARIABLE = re.compile(r"(?<![\w{/])[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+(?![\w}])")


@cache
def texts() -> list[Text]:
    """Return every text in the package that is no docstring, with inserted names in braces."""
    found = []
    for name, all_nodes in nodes().items():
        skipped = {id(part) for node in all_nodes for part in _parts(node)}
        shown = [node for node in all_nodes if _is_text(node) and id(node) not in skipped]
        found += [(name, _text(node).replace("\\n", "\n")) for node in shown]
    return list(dict.fromkeys(found))


def prose() -> list[Text]:
    """Return the texts of several words."""
    return [(module, text) for module, text in texts() if " " in text]


def _parts(node: ast.AST) -> list[ast.AST]:
    """Return the docstring of a node, or the pieces of a text."""
    if isinstance(node, ast.JoinedStr):
        return [*node.values]
    body = getattr(node, "body", None)
    is_documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    return [body[0].value] if is_documented and body and isinstance(body[0], ast.Expr) else []


def filled(text: str) -> str:
    """Fill in the inserted names and the words in capitals; a KeyError names the one that is not known."""
    text = re.sub(r"\{\{(\w+)\}\|\{\w+\}\}", r"{\1}", text)  # one of two
    text = re.sub(r"\{([^{}]*)\}", lambda found: FILLED[found[1]], text)
    text = text.replace("URL...", "URL").replace("...", "DOTS")
    return re.sub(r"(?<![\w-])[A-Z][A-Z_]+\b", lambda found: FILLED[found[0]], text)


def proposed(text: str) -> Iterator[str]:
    """Yield the words after `vitctl` of each command in a text."""
    for quoted, bare in _COMMAND.findall(text):
        if quoted or bare.split()[0] in NAMES:
            yield quoted or bare


def options(command: Any) -> set[str]:
    """Return the options of a command and of those below it."""
    own = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return own.union(*(options(one) for one in getattr(command, "commands", {}).values()))


def refusal(line: str) -> str | None:
    """Why a command is not taken. One that is only named, perhaps with options, needs no arguments."""
    command, rest = find_command(shlex.split(filled(line)))
    named = [word for word in rest if word.startswith("--")]
    if unknown := {*named} - options(command) - {"--help"}:
        return f"{line}: {unknown}"
    try:
        if rest != named:
            command.make_context("vitctl", rest)
    except USAGE_ERROR as error:
        return f"{line}: {error.format_message()}"
    return None


def test_commands__are_taken_by_the_command_line() -> None:
    lines = [(module, line) for module, text in texts() for line in proposed(text)]
    assert len(lines) > 90
    assert [(module, why) for module, line in lines if (why := refusal(line))] == []


def test_keys__are_those_of_recipes() -> None:
    found = {(module, key) for module, text in prose() for key in _KEY.findall(text)}
    odd = [(module, key) for module, key in found if key not in KEYS and not key.endswith(FILES)]
    assert (odd, len(found) > 150) == ([], True)


def test_keys__take_the_values_that_are_said() -> None:
    found = {(key, value) for _, text in prose() for key, value in _VALUE.findall(text) if key in KEYS}
    assert len(found) > 40
    fixed = [(key, value) for key, value in found if "{" not in value and value not in FILLED]
    assert [(key, value) for key, value in fixed if not takes(key, value)] == []


def test_options__exist() -> None:
    known = options(find_command([])[0]) | {*OTHER_PROGRAMS, "--help"}
    odd = {(module, one) for module, text in prose() for one in _OPTION.findall(text) if one not in known}
    assert odd == set()


def test_options__of_a_module_of_one_command_are_its_own() -> None:
    for module, text in prose():
        name = "export" if module.startswith("export/") else Path(module).stem
        if name in NAMES - {*GROUPS} - {"quickstart", "doctor", "compare"}:  # they tell of other commands
            own = options(find_command([name])[0]) | {*OTHER_PROGRAMS}
            assert {*_OPTION.findall(re.sub(_COMMAND, "", text))} <= own | {"--dry-run"}, (module, text)


def test_extras__exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found = {name for _, text in texts() for name in re.findall(r"vitctl\[(.+?)\]", text)}
    assert "serve" in found
    assert {FILLED.get(name.strip("{}"), name) for name in found} <= {*extras, "digits"}


def test_variables__are_read() -> None:
    whole = {text for _, text in texts()} | LIBRARIES
    found = {(module, name) for module, text in prose() for name in _VARIABLE.findall(text)}
    odd = {(module, name) for module, name in found if name not in whole and name not in FILLED}
    assert odd == set()


def test_splits__can_be_read() -> None:
    sizes = {"train": 1000, "test": 1000}
    found = {part for _, text in texts() for part in re.findall(r"'((?:train|test)\[[^']*\])'", text)}
    assert len(found) > 3
    for part in found:
        assert resolve(part, sizes)


def test_limits__are_said() -> None:
    """Where a limit is checked and something is refused, the limit is in the message."""
    odd = []
    for name, all_nodes in nodes().items():
        for node in all_nodes:
            if isinstance(node, ast.If) and any(isinstance(one, ast.Raise) for one in ast.walk(node)):
                used = {*re.findall(r"\blimits\.[A-Z_]+", ast.unparse(node.test))}
                said = " ".join(map(ast.unparse, node.body))
                odd += [(name, bound) for bound in used if bound not in said]
    assert odd == []
