"""README.md promises only what is there: its commands, their options, and the folders of its map."""

import re
import shlex
from pathlib import Path
from typing import Any

import typer

from tests.conftest import README, ROOT
from vitctl.cli.app import app


def commands() -> list[list[str]]:
    """Words after `vitctl` of every command line in the README's shell blocks."""
    lines = [line for block in re.findall(r"```sh\n(.*?)```", README, re.S) for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("vitctl ")]


def test_commands__exist_with_their_options() -> None:
    found = commands()
    assert len(found) >= 12
    for words in found:
        command: Any = typer.main.get_command(app)
        while hasattr(command, "commands"):
            assert words, command.name
            assert words[0] in command.commands, words
            command, words = command.commands[words[0]], words[1:]
        known = {name for parameter in command.params for name in parameter.opts}
        assert {word for word in words if word.startswith("-")} <= known, words


def test_commands__the_three_lines_of_the_beginning() -> None:
    typed = [" ".join(words) for words in commands()]
    assert {"finetune --dataset pets --res 384", "fewshot --shots 5"} <= set(typed)
    assert any(line.startswith("pretrain --recipe jft_h14") for line in typed)


def test_house__every_folder_and_file_of_the_map_is_there() -> None:
    tree = README.split("## The house")[1].split("```")[1]
    named = re.findall(r"^(vitctl/\S+|recipes/|tests/|benchmarks/)", tree, re.M) + re.findall(
        r"^(recipes/|tests/|benchmarks/)", tree, re.M
    )
    assert len(named) >= 10
    assert [name for name in named if not (ROOT / name).exists()] == []
    top = {path.name for path in (ROOT / "vitctl").iterdir() if path.is_dir() and not path.name.startswith("_")}
    assert top == {Path(name).parts[1] for name in named if name.startswith("vitctl/") and name.endswith("/")}


def test_where_to_add_things__names_what_exists() -> None:
    table = README.split("Where to add things:")[1]
    paths = re.findall(r"`((?:vitctl|recipes)/[^`]*)`", table)
    assert len(paths) >= 8
    assert [path for path in paths if not (ROOT / path).exists()] == []
