"""The command line, for inputs that only a command makes."""

from tests.cli.conftest import vitctl  # noqa: F401
