"""The command line: all commands, how they end (results, errors, signals), and "did you mean".

Nothing here imports torch before it is needed.
"""

import functools
import inspect
import io
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

import typer

from vitctl.cli import (
    bench,
    data_checks,  # noqa: F401 - adds its commands to those of `data_commands`
    data_commands,
    image_commands,
    job_commands,
    quickstart,
    recipe_commands,
    run_commands,
    serve,
    weights_commands,
)
from vitctl.cli.flags import FLAGS, RECIPE_OF, UNREAD
from vitctl.cli.help import Command, Group, help_last
from vitctl.engine.preemption import interrupt_on_signals
from vitctl.errors import LaunchError, explained
from vitctl.recipe.synonyms import synonym
from vitctl.system.address import check_local, without_queries
from vitctl.system.process import mark_start
from vitctl.system.screen import output_errors_ignored, restore_output, speak
from vitctl.system.text import PlainStream, did_you_mean, one_edit_away, one_line

EXIT_BUG, EXIT_USER, EXIT_STOPPED = 1, 2, 3
INTERRUPTED = 130  # the exit code of newer versions of typer for Ctrl-C
# From click, or from the copy of click in newer versions of typer.
USAGE_ERROR: Any = typer.BadParameter.__mro__[1]

COMMANDS = {  # help panel -> commands; those without one are everyday commands
    None: (
        quickstart.quickstart,
        quickstart.doctor,
        job_commands.finetune,
        job_commands.pretrain,
        job_commands.resume,
        job_commands.evaluate,
        image_commands.predict,
        job_commands.export,
        run_commands.report,
    ),
    "Scores": (
        job_commands.fewshot,
        job_commands.probe,
        job_commands.vtab,
        run_commands.compare,
        run_commands.verify,
    ),
    "More": (job_commands.sweep, serve.serve, image_commands.inspect, weights_commands.weights),
}
GROUPS = {  # name -> commands, help panel
    "runs": (run_commands.app, None),
    "data": (data_commands.app, None),
    "recipes": (recipe_commands.app, None),
    "bench": (bench.app, "More"),
}
_RARE = [command.__name__ for panel, commands in COMMANDS.items() if panel for command in commands]
app = typer.Typer(
    name="vitctl",
    cls=Group,
    help="Vision Transformers as in the ViT paper: exact, verifiable, resumable.",
    epilog=f"Also: {' '.join(_RARE)} bench\n"
    "All commands: vitctl --help all. Options and examples: vitctl COMMAND --help",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for panel, commands in COMMANDS.items():
    for command in commands:
        app.command(rich_help_panel=panel)(command)
for name, (group, panel) in GROUPS.items():
    app.add_typer(group, name=name, cls=Group, rich_help_panel=panel)


def _on_disks(function: Callable[..., None]) -> Callable[..., None]:
    """Let a command refuse addresses for `Path` parameters; those that may be an address are `str`."""
    parameters = inspect.signature(function).parameters

    @functools.wraps(function)
    def command(**values: Any) -> None:
        for name, given in values.items():
            for path in given if isinstance(given, list) else [given]:
                if isinstance(path, Path):
                    about = parameters[name].annotation.__metadata__[0]
                    names = (about.default, *(about.param_decls or ()), about.metavar)
                    check_local(next(one for one in names if isinstance(one, str)), path)
        function(**values)

    return command


_PLACEHOLDERS = {int: "N", float: "N", Path: "PATH"}


def _complete(commands: typer.Typer) -> None:
    """Let commands refuse addresses as paths, name the values of options in one style, join the lines of
    each help paragraph for wrapping, and put the examples last.
    """
    for info in commands.registered_commands:
        for parameter in inspect.signature(info.callback).parameters.values() if info.callback else ():
            kind, *about = get_args(parameter.annotation) or (None,)
            while get_origin(kind) is not None:
                kind = next(one for one in get_args(kind) if one is not NoneType)
            if about and about[0].metavar is None:
                about[0].metavar = _PLACEHOLDERS.get(kind, "TEXT")
        info.callback, info.cls = _on_disks(info.callback) if info.callback else None, Command
        text, begin, examples = (inspect.getdoc(info.callback) or "").partition("For example:")
        info.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n"))
        info.epilog = begin + examples


for group in (app, bench.app, run_commands.app, data_commands.app, recipe_commands.app):
    _complete(group)


def _version(value: bool) -> None:
    if value:
        from vitctl import __version__

        typer.echo(f"vitctl {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit"
    ),
) -> None:
    pass


def main() -> None:
    """Run the command line. Exit codes: 0 done, 2 the user can fix it, 3 stopped and saved, 1 a bug."""
    _make_streams_safe()
    mark_start()
    try:
        with interrupt_on_signals():
            try:
                os.getcwd()
            except FileNotFoundError:  # MKL would kill the process
                raise LaunchError("the working folder was removed", fix="go to another one with cd") from None
            if "-h" in sys.argv or "help" in " ".join(sys.argv):
                sys.argv[1:] = help_last(sys.argv[1:])
            sys.argv[1:] = without_queries(*sys.argv[1:])
            code = app(prog_name="vitctl", standalone_mode=False)
            sys.stdout.flush()
        if code == INTERRUPTED:
            raise KeyboardInterrupt
    except USAGE_ERROR as error:
        speak()
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help
            print(error.format_message())
        else:
            _say(usage_line(error, sys.argv[1:]))
        code = EXIT_USER
    except (typer.Abort, KeyboardInterrupt):
        _say("stopped")
        code = EXIT_STOPPED
    except BrokenPipeError:
        code = 0  # the reader closed the pipe, as `head` does
    except SystemExit as ended:
        if not isinstance(ended.__context__, BrokenPipeError):  # Click exits with 1 on a broken pipe
            raise
        code = 0
    except Exception as error:
        code = _report_error(error)
    restore_output()
    _discard_unwritten()
    sys.exit(code if isinstance(code, int) else 0)


def _report_error(error: Exception) -> int:
    """Print an error: one line if the user can fix it, a traceback for a bug. Return the exit code."""
    speak()
    unnamed = isinstance(error, OSError) and error.filename is None
    fixable = explained(
        error, "standard output" if unnamed and not (output_errors_ignored() or _can_print()) else ""
    )
    if fixable is not None:
        _say(str(fixable))
        return EXIT_STOPPED if fixable.passes else EXIT_USER
    with suppress(OSError):
        traceback.print_exception(error)
    _say(
        f"this is a bug of vitctl ({type(error).__name__}); please report the lines above, with the command "
        f"and the versions that `vitctl doctor` shows"
    )
    return EXIT_BUG


def _say(text: str) -> None:
    with suppress(OSError):
        print(f"vitctl: {text}", file=sys.stderr, flush=True)


def _make_streams_safe() -> None:
    """Escape control characters and those that the terminal's encoding lacks; ignore closed streams."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - it stays open until the end
        elif isinstance(stream, io.TextIOWrapper):
            # With PYTHONUNBUFFERED a partial write to a full disk would lose the rest without an error.
            if isinstance(stream.buffer, io.FileIO) and os.environ.get("PYTHONUNBUFFERED"):
                raw = io.FileIO(stream.fileno(), "w", closefd=False)
                buffer = io.BufferedWriter(raw)
                stream = io.TextIOWrapper(buffer, encoding=stream.encoding, line_buffering=True)
            stream.reconfigure(errors="backslashreplace")
            setattr(sys, name, PlainStream(stream))


def _can_print() -> bool:
    """Return whether standard output is writable; the error of a full disk names no file."""
    try:
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), b"\n")
    except io.UnsupportedOperation:  # not a file
        return True
    except OSError:
        return False
    return True


def _discard_unwritten() -> None:
    """Discard output that a full disk or a closed pipe refused, so that it does not fail again at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


# Commands of other programs.
OTHER_COMMANDS = {
    **dict.fromkeys(("train", "fit"), ("pretrain", "finetune")),
    **dict.fromkeys(("eval", "test", "val", "validate", "score"), ("evaluate",)),
    **dict.fromkeys(("infer", "inference", "classify", "detect"), ("predict",)),
    **dict.fromkeys(("convert", "onnx"), ("export",)),
    **dict.fromkeys(("linear", "linear_probe", "knn"), ("probe",)),
    **dict.fromkeys(("benchmark", "profile"), ("bench",)),
    **dict.fromkeys(("delete", "remove", "del"), ("runs rm",)),
    **dict.fromkeys(("list", "ls", "history"), ("runs",)),
}
MOST = 3
NO_VALUE = "VALUE"
_TYPED_AS = ("{}", '"{}"', "[{}]", '["{}"]')  # ways to write a flag's value in a recipe
_TRAINED = ["pretrain", "finetune"]  # what `bench` measures


# Messages of click, in our form.
_REWORDED = (
    (r"No such command '(.*?)'\..*", r"no such command \1"),
    (r"No such option: (\S+).*", r"no such option \1"),
    (r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", r"unexpected argument: \1"),
    (r"Option (.*?) requires an? argument\.", r"\1: needs a value"),
    (r"Option (.*?) does not take a value\.", r"\1: takes no value"),
    (r"Invalid value for (.*?): (?:Input |Value error, )?(.*?)(?:, unable .*)?", r"\1: \2"),
    (r"Missing (argument|option) (.*?)\..*", r"missing \1 \2"),
)


def usage_line(error: Any, arguments: Sequence[str]) -> str:
    """Return a usage error in one line: the command, what is wrong, how to fix it."""
    message = " ".join(error.format_message().split())
    for pattern, text in _REWORDED:
        message, changed = re.subn(f"^{pattern}$", text, message)
        if changed:
            message = re.sub(r"'(\S*?)'", r"\1", message)
            break
    options = getattr(getattr(error, "param", None), "opts", ())
    if (value := _value(options, arguments)) != NO_VALUE:
        message = message.replace(":", f" {shlex.quote(value)}:", 1)
    context = error.ctx
    words = [word for word in arguments[: 1 + (arguments[0] in GROUPS)] if not word.startswith("-")]
    command = context.command_path if context else " ".join(["vitctl", *words])
    commands = getattr(context.command, "commands", {}) if context else {}
    fix = instead(error, arguments)
    if message.startswith("no such command"):
        word = message.split()[-1]
        fix = did_you_mean(OTHER_COMMANDS.get(word.replace("-", "_"), one_edit_away(word, commands)))
    elif message.startswith("unexpected argument"):
        fix = _as_a_value(message.split()[-1], arguments, context)
    where = command.removeprefix("vitctl").strip()
    fix = fix or f"see: {command} --help"
    return one_line(f"{where}{': ' if where else ''}{message[:1].lower()}{message[1:].rstrip('.')}; {fix}")


def _as_a_value(word: str, arguments: Sequence[str], context: Any) -> str:
    """Return what was meant by a word without an option: a value of --set, or the data; "" if neither."""
    at = arguments.index(word) if word in arguments else 0
    if at > 1 and arguments[at - 2] in ("--set", "-s") and "=" not in arguments[at - 1]:
        return did_you_mean([f"--set {arguments[at - 1]}={word}"])
    takes_data = context is not None and "--data" in _Command(context).parameters
    return did_you_mean([f"--data {shlex.quote(word)}"] if takes_data and os.path.exists(word) else [])


def instead(error: Any, arguments: Sequence[str]) -> str:
    """Return what to type for an unknown option: the flag or `--set section.key=value` that was meant, or "".

    `resume` also needs `--allow` for keys that decide the result. Another program's option is looked up in
    the table of synonyms. For a typo, options that differ by one letter are suggested, without the value:
    similar spelling does not mean similar meaning.
    """
    option, context = getattr(error, "option_name", ""), getattr(error, "ctx", None)
    if not option or context is None:
        return ""
    word = option.lstrip("-").replace("-", "_").lower()
    command = _Command(context)
    value = _value([option], arguments)
    value = "" if value.startswith("--") else value
    if (flag := "--" + word.replace("_", "-")) in command.parameters:
        return did_you_mean([command.typed(flag, value)])
    if (row := synonym(word)) and (places := [one for one in row.places if command.has(one)]):
        typed = " ".join(command.typed(one, value if row.keeps_value else NO_VALUE) for one in places)
        return did_you_mean([typed + row.remark])
    if row and row.here.startswith("vitctl "):
        return f"type `{row.here}`"
    if row and not row.here:
        return f"vitctl has no such setting{row.remark}"
    if places := command.ending(word):
        return did_you_mean(command.typed(place, value) for place in places[:MOST])
    if command.keys and row:
        from vitctl.recipe.load import every_key
        from vitctl.recipe.schema import JOBS

        keys = {place.partition("=")[0] for place in row.places}
        others = [f"`vitctl {job}`" for job, schema in JOBS.items() if keys & {*every_key(schema)}]
        if others:
            return f"it is {row.here} of {' and '.join(others[:2])}{row.remark}"
    near = one_edit_away(word, command.words)
    return did_you_mean(command.typed(command.words[one], NO_VALUE) for one in near[:MOST])


class _Command:
    """The flags that a command takes, and its recipe's keys."""

    def __init__(self, context: Any) -> None:
        self.context = context
        parameters = context.command.params
        self.parameters = {flag: one for one in parameters for flag in one.opts if flag.startswith("--")}
        self.key_of = {row.option: row.key for row in FLAGS if row.option in self.parameters}
        takes_keys = any(parameter.name == "set_" for parameter in parameters)
        self.keys = _known_keys(context) if takes_keys else []
        self.resumes = context.command.name == "resume"
        self.words = {key.rpartition(".")[2]: key for key in reversed(self.keys)}
        self.words |= {flag[2:].replace("-", "_"): flag for flag in self.parameters}

    def has(self, place: str) -> bool:
        """Return whether the command takes this key, with or without a value, or this flag."""
        return self._as_flag(place.partition("=")[0]) is not None

    def _as_flag(self, place: str) -> str | None:
        """Return the flag for a key or flag, "" for a key without one, None for neither."""
        if place in self.parameters:
            return place
        flag = next((flag for flag, key in self.key_of.items() if key == place), "")
        return flag or ("" if place in self.keys else None)

    def ending(self, word: str) -> list[str]:
        """Return the keys that end in a word, which may be meant; a section stands for its name."""
        if f"{word}.name" in self.keys:
            return [f"{word}.name"]
        return [key for key in self.keys if word in (key.replace(".", "_"), key.rpartition(".")[2])]

    def _accepts(self, flag: str, value: str) -> bool:
        """Return whether a flag, and the key that it sets, accept a value."""
        from vitctl.recipe.load import takes

        parameter = self.parameters[flag]
        try:
            parameter.process_value(self.context, [value] if parameter.multiple else value)
        except USAGE_ERROR:
            return False
        key = self.key_of.get(flag)
        return not key or any(takes(key, form.format(value)) for form in _TYPED_AS)

    def typed(self, place: str, value: str) -> str:
        """Return the words to type for a key or a flag. A value that would be refused is not repeated."""
        from vitctl.recipe.load import takes
        from vitctl.recipe.neutral_keys import FREE_TO_CHANGE

        place, given, fixed = place.partition("=")
        value = fixed if given else value
        flag = self._as_flag(place)
        key = self.key_of.get(place, place)
        if flag and getattr(self.parameters[flag], "is_flag", False):
            return flag
        if flag:
            return f"{flag} {shlex.quote(value if value and self._accepts(flag, value) else NO_VALUE)}"
        value = value or "true"
        setting = shlex.quote(f"{key}={value if takes(key, value) else NO_VALUE}")
        return f"--set {setting}" + f" --allow {key}" * (self.resumes and not key.startswith(FREE_TO_CHANGE))


def _known_keys(context: Any) -> list[str]:
    """Return the recipe keys for `--set` of a command, without [known], which is for published results."""
    from vitctl.recipe.load import every_key
    from vitctl.recipe.schema import JOBS

    job = RECIPE_OF.get(context.command.name, context.command.name)
    jobs = [job] if job in JOBS else list(JOBS)
    if context.parent and context.parent.info_name == "bench":
        jobs = _TRAINED
    keys = dict.fromkeys(key for job in jobs for key in every_key(JOBS[job]))
    unread = UNREAD.get(context.command.name, ())
    return [key for key in keys if not key.startswith("known.") and key not in unread]


def _value(options: Sequence[str], arguments: Sequence[str]) -> str:
    """Return an option's last value, after a space or `=`: the next word; NO_VALUE if absent."""
    found = NO_VALUE
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = argument.partition("=")
        if name in options:
            found = value if equals else following
    return found
