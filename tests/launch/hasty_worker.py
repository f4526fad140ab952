"""`python -m tests.launch.hasty_worker RUN`: a paced worker that soon gives up on processes that do not answer."""

from tests.launch.paced_worker import pace
from vitctl.launch import roll_call


def hasten() -> None:
    """Shorten the times after which a process is reported, and left behind."""
    roll_call.NOTICE_SECONDS, roll_call.GIVE_UP_SECONDS = 4.0, 5.0
    roll_call._QUIET_SECONDS, roll_call._FRESH_SECONDS = 1.0, 2.5


if __name__ == "__main__":
    from vitctl.launch.worker import main

    hasten()
    pace()
    main()
