"""`python -m vitctl`"""

from vitctl.cli.app import main

main()
