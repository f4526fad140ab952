"""The command `vitctl`, also as `python -m vitctl`."""

from vitctl.engine.preemption import exit_on_signals


def main() -> None:
    """Run the command line; while it is still being imported a signal ends in one line and code 3, too."""
    exit_on_signals()
    from vitctl.cli.app import main as run

    run()


if __name__ == "__main__":
    main()
