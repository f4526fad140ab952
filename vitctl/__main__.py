"""The command `vitctl`, also as `python -m vitctl`."""

import atexit

from vitctl.engine.preemption import exit_on_signals, ignore_signals


def main() -> None:
    """Run the command line; while it is still being imported a signal ends in one line and code 3, too."""
    exit_on_signals()
    atexit.register(ignore_signals)  # called last; after it, a signal would replace the exit code
    from vitctl.cli.app import main as run

    run()


if __name__ == "__main__":
    main()
