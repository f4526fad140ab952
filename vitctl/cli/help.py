"""Pages of `--help`: everyday options and commands, all of them with `--help all`, examples last."""

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from typer.core import TyperCommand, TyperGroup

_Base: Any = object


def help_last(words: Sequence[str]) -> list[str]:
    """Return a command line with its call for help at the end: `--help finetune`, `help finetune` and
    `finetune --help=all` become `finetune --help` and `finetune --help all`.
    """
    words = ["--help", *words[1:]] if words[:1] == ["help"] else [*words]
    split = [part for word in words for part in (word.split("=") if word.startswith("--help=") else [word])]
    at = next((i for i, word in enumerate(split) if word in ("--help", "-h")), None)
    if at is None or "--" in split[:at]:
        return words
    after = [word for word in split[at + 1 :] if not word.startswith("-")]
    return [*split[:at], *(w for w in after if w != "all"), "--help", *["all"] * ("all" in after)]


class _Page(_Base):  # type: ignore[misc]  # of both classes below
    """The page of a command or a group. Whatever has a help panel is shown by `--help all` only."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        shows_all = sys.argv[-2:] == ["--help", "all"]  # click drops words after --help
        sections: dict[str, list[tuple[str, str]]] = defaultdict(list)
        commands, usage, more = getattr(self, "commands", {}), "", 0
        for one in self.get_params(ctx):
            title = getattr(one, "rich_help_panel", None) or "Options"
            if one.param_type_name == "argument":
                title, word = "Arguments", _name(one)
                usage += f"{word} " if one.required else f"[{word}] "
            if shows_all or (ctx.parent and title in ("Arguments", "Options")):
                sections[title].append((_name(one), _about(one)))
            else:
                more += 1
        for name, one in commands.items():
            if shows_all or not one.rich_help_panel:
                sections[one.rich_help_panel or "Commands"].append((name, one.help.partition("\n\n")[0]))
        formatter.write_usage(ctx.command_path, f"{'COMMAND ' if commands else usage}[OPTIONS]")
        formatter.write_paragraph()
        formatter.write_text(self.help)
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)
        end = f"\n{more} more options: {ctx.command_path} --help all" if more and ctx.parent else ""
        formatter.write(f"\n{self.epilog or f'Options and examples: {ctx.command_path} COMMAND --help'}{end}")


def _name(one: Any) -> str:
    """Return how a parameter is typed: `-o, --out PATH`, `IMAGES...`."""
    if one.param_type_name == "argument":
        return f"{one.metavar}{'...' if one.nargs == -1 else ''}"
    names = ", ".join([*sorted(one.opts, key=len), *one.secondary_opts])
    return names if one.is_flag else f"{names} {one.metavar}"


def _about(one: Any) -> str:
    has_default = isinstance(one.default, int | float | str | Path) and one.default not in ("", True, False)
    return f"{one.help}; default: {one.default}" if has_default else str(one.help)


class Command(_Page, TyperCommand):
    """A command with a short and a complete page of help."""


class Group(_Page, TyperGroup):
    """Commands under one name, with a short and a complete page of help."""
