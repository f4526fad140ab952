"""The pages of --help: short, in one style, with examples that work; everything with `--help all`."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tests.cli.conftest import Vitctl
from tests.docs.conftest import find_command
from vitctl.cli.app import app

ROOT = Path(__file__).parents[2]
PLACEHOLDERS = {"N", "TEXT", "PATH", "N,...", "TEXT,..."}
OF_TYPER = ("--install-completion", "--show-completion", "--version")
MOST_OPTIONS = 15  # on the everyday page of a command; docs/architecture.md


def _leaves(command: Any, path: str = "") -> dict[str, Any]:
    """Every command by its words."""
    if not hasattr(command, "commands"):
        return {path.strip(): command}
    below = [_leaves(one, f"{path} {name}") for name, one in command.commands.items()]
    return {words: one for each in below for words, one in each.items()}


COMMANDS = _leaves(typer.main.get_command(app))


def test_help__without_arguments_fits_a_terminal_of_24_lines_and_names_every_command(vitctl: Vitctl) -> None:
    said = vitctl()
    assert said.code in (0, 2) and said.err == ""  # click 8.1 ends with 0
    assert said.out == vitctl("--help").out
    assert said.out.count("\n") <= 23 and all(len(line) <= 80 for line in said.out.splitlines())
    assert {words.split()[0] for words in COMMANDS} <= set(said.out.split())
    described = re.findall(r"^  ([\w-]+)  ", vitctl("--help", "all").out, re.M)
    assert {words.split()[0] for words in COMMANDS} <= {*described}


def test_help__all_counts_behind_help_wherever_it_stands(vitctl: Vitctl) -> None:
    complete = vitctl("finetune", "--help", "all").out
    for line in (("--help", "all", "--res", "3"), ("--res", "3", "--help", "all"), ("-h", "all")):
        assert vitctl("finetune", *line).out == complete


def test_help__before_the_command_is_that_of_the_command(vitctl: Vitctl) -> None:
    complete, show = vitctl("finetune", "--help", "all").out, vitctl("data", "show", "--help").out
    for line in ("finetune --help=all", "--help finetune all", "help finetune all"):
        assert vitctl(*line.split()).out == complete
    assert vitctl("help", "data", "show").out == vitctl("data", "-h", "show").out == show
    assert vitctl("help").out == vitctl("--help").out and vitctl("help", "all").out == vitctl("-h", "all").out
    assert "no such command finetun; did you mean finetune" in vitctl("--help", "finetun").err


@pytest.mark.parametrize("words", COMMANDS)
def test_help__of_a_command_is_short_and_in_one_style(words: str, vitctl: Vitctl) -> None:
    short, complete = vitctl(*words.split(), "--help"), vitctl(*words.split(), "--help", "all")
    assert (short.code, complete.code) == (0, 0)
    assert short.out.count("\n") <= 45
    parameters = COMMANDS[words].params
    for one in parameters:
        if one.param_type_name == "option" and not one.is_flag:
            assert one.metavar in PLACEHOLDERS, one.opts
        if one.param_type_name == "argument":
            assert re.fullmatch(r"[A-Z]+", one.metavar), one.metavar
        assert all(flag in complete.out for flag in one.opts if flag.startswith("--"))
    for page in (short.out, complete.out):
        assert all(len(line) <= 80 for line in page.splitlines())
        assert not re.search(r"<\w|\[default|x>=|<=x|default: -", page)
    shown = re.findall(r"^  (?:-\w, )?(--[\w-]+)", short.out, re.M)
    assert len(shown) <= MOST_OPTIONS + 1  # --help
    assert (len(shown) < len([one for one in parameters if one.param_type_name == "option"]) + 1) == (
        f"more options: vitctl {words} --help all" in short.out
    )


@pytest.mark.parametrize("words", COMMANDS)
def test_help__ends_with_examples_that_are_taken_and_a_page_that_exists(words: str, vitctl: Vitctl) -> None:
    page = vitctl(*words.split(), "--help").out
    examples, guide = re.search(r"^For example: (.*?)^(Guide: .*)", page, re.M | re.S).groups()  # type: ignore[union-attr]
    lines = [shlex.split(line) for line in examples.splitlines()]
    assert lines[0][1 : 1 + len(words.split())] == words.split()
    for first, *typed in lines:
        assert first in ("vitctl", "curl")
        if first == "vitctl":
            command, rest = find_command(typed)
            command.make_context("vitctl", rest)
    pages = re.findall(r"docs/[\w.-]+\.md", guide)
    assert pages and all((ROOT / name).is_file() for name in pages)


@pytest.mark.parametrize("words", ["", "bench", "data", "recipes", "runs"])
def test_help__of_a_group_is_short_and_in_one_style(words: str, vitctl: Vitctl) -> None:
    for line in ((*words.split(), "--help"), (*words.split(), "--help", "all")):
        page = vitctl(*line).out
        assert page.count("\n") <= 45 and all(len(text) <= 80 for text in page.splitlines())
        assert not re.search(r"<\w|\[default|x>=|<=x", page)
        assert {*re.findall(r"--[\w-]+ ([A-Z,.]+)  ", page)} <= PLACEHOLDERS
    group, _ = find_command(words.split())
    for one in group.params:
        assert one.is_flag or one.metavar in PLACEHOLDERS, one.opts


@pytest.mark.parametrize(
    ("line", "offered"),
    [("vitctl finetune --prof", "--profile"), ("vitctl finetune --he", "--help"), ("vitctl sw", "sweep")],
)
def test_help__the_rest_is_offered_by_the_shell(line: str, offered: str) -> None:
    env = {"_VITCTL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    assert CliRunner().invoke(app, [], env=env, prog_name="vitctl").stdout.split() == [offered]


def test_help__of_the_whole_program_knows_three_options_of_typer(vitctl: Vitctl) -> None:
    assert "--version" not in vitctl("--help").out
    assert all(f"  {flag} " in vitctl("--help", "all").out for flag in OF_TYPER)
