"""The command line: Typer commands and their error boundary.

Nothing here imports torch before it is needed.
"""

import io
import os
import sys
import traceback
from contextlib import suppress
from typing import Any

import typer

from vitctl.cli import bench, compare, model, predict, recipes, runs, sweep, system, train, verify
from vitctl.cli.data import check, look, sets, shards
from vitctl.cli.suggest import instead
from vitctl.engine.preemption import interrupt_on_signals
from vitctl.errors import explained
from vitctl.system.address import without_queries
from vitctl.system.screen import output_errors_ignored, restore_output
from vitctl.system.text import PlainStream, printable

EXIT_BUG, EXIT_USER, EXIT_STOPPED = 1, 2, 3
INTERRUPTED = 130  # the exit code of newer versions of typer for Ctrl-C
USAGE_ERROR: Any = typer.BadParameter.__mro__[
    1
]  # of click, or of the copy of click in newer versions of typer

app = typer.Typer(
    name="vitctl",
    help="Vision Transformers as in the ViT paper: exact, verifiable, resumable.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
START, TRAINING, MODELS, DATA = "Start here", "Train", "Evaluate and export", "Data and recipes"
RUNS = "Look at runs"

app.command(rich_help_panel=START)(system.quickstart)
app.command(rich_help_panel=START)(system.doctor)
app.command(rich_help_panel=TRAINING)(train.pretrain)
app.command(rich_help_panel=TRAINING)(train.finetune)
app.command(rich_help_panel=TRAINING)(train.resume)
app.command(rich_help_panel=TRAINING)(sweep.sweep)
app.command(rich_help_panel=MODELS)(model.fewshot)
app.command(rich_help_panel=MODELS)(model.vtab)
app.command(rich_help_panel=MODELS)(model.evaluate)
app.command(rich_help_panel=MODELS)(predict.predict)
app.command(rich_help_panel=MODELS)(compare.compare)
app.command(rich_help_panel=MODELS)(predict.inspect)
app.command(rich_help_panel=MODELS)(model.export)
app.command(rich_help_panel=RUNS)(runs.report)
app.command(rich_help_panel=RUNS)(verify.verify)
for command in (check.check, look.stats, look.show, look.dedup):
    shards.app.command()(command)
shards.app.command("list")(sets.list_sets)
shards.app.command("prepare")(sets.prepare)
shards.app.command("export-vtab1k")(sets.export_vtab1k)
app.add_typer(bench.app, name="bench", rich_help_panel=START)
app.add_typer(runs.app, name="runs", rich_help_panel=RUNS)
app.add_typer(shards.app, name="data", rich_help_panel=DATA)
app.add_typer(recipes.app, name="recipes", rich_help_panel=DATA)


def _version(value: bool) -> None:
    if value:
        from vitctl import __version__

        typer.echo(f"vitctl {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    pass


def main() -> None:
    """Run the command line. Exit codes: 0 done, 2 the user can fix it, 3 stopped and saved, 1 a bug."""
    _make_streams_safe()
    try:
        with interrupt_on_signals():
            sys.argv[1:] = without_queries(*sys.argv[1:])
            code = app(standalone_mode=False)
            sys.stdout.flush()
        if code == INTERRUPTED:
            raise KeyboardInterrupt
    except USAGE_ERROR as error:
        text = printable(error.format_message())
        error.format_message = lambda: text
        error.show()
        if found := instead(error, sys.argv[1:]):
            print(f"vitctl: did you mean {found}", file=sys.stderr)
        code = EXIT_USER
    except (typer.Abort, KeyboardInterrupt):
        _say("stopped")
        code = EXIT_STOPPED
    except BrokenPipeError:
        code = 0  # who reads has had enough, as `head`
    except SystemExit as ended:
        if not isinstance(ended.__context__, BrokenPipeError):  # Click ends with 1 then
            raise
        code = 0
    except Exception as error:
        code = _report_error(error)
    restore_output()
    _discard_unwritten()
    sys.exit(code if isinstance(code, int) else 0)


def _report_error(error: Exception) -> int:
    """Print what ended the command: one line for what the user can fix, a traceback for a bug; returns the
    exit code.
    """
    unnamed = isinstance(error, OSError) and error.filename is None
    fixable = explained(
        error, "standard output" if unnamed and not (output_errors_ignored() or _can_print()) else ""
    )
    if fixable is not None:
        _say(str(fixable))
        return EXIT_USER
    with suppress(OSError):
        traceback.print_exception(error)
    _say(
        f"this is a bug of vitctl ({type(error).__name__}); please report the lines above, with the command "
        f"and the versions "
        "that `vitctl doctor` shows"
    )
    return EXIT_BUG


def _say(text: str) -> None:
    with suppress(OSError):
        print(f"vitctl: {text}", file=sys.stderr, flush=True)


def _make_streams_safe() -> None:
    """Escape control characters, and characters that the terminal's encoding lacks; write to a closed stream
    without an error.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - it stays open until the end
        elif isinstance(stream, io.TextIOWrapper):
            # With PYTHONUNBUFFERED a disk that takes a part of a text would lose the rest without an error.
            if isinstance(stream.buffer, io.FileIO) and os.environ.get("PYTHONUNBUFFERED"):
                raw = io.FileIO(stream.fileno(), "w", closefd=False)
                stream = io.TextIOWrapper(
                    io.BufferedWriter(raw), encoding=stream.encoding, line_buffering=True
                )
            stream.reconfigure(errors="backslashreplace")
            setattr(sys, name, PlainStream(stream))


def _can_print() -> bool:
    """Whether standard output can be written: the error of a full disk names no file."""
    try:
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), b"\n")
    except io.UnsupportedOperation:  # it is not a file
        return True
    except OSError:
        return False
    return True


def _discard_unwritten() -> None:
    """Discard output that a full disk or a closed pipe did not accept: it must not fail again when Python
    exits.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
