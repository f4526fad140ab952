"""python -m tests.walked OUT COMMAND...: run a vitctl command and write which files it enters.

A file is entered when one of its functions is called; calls at import do not count. A training ends before
its first update. The result is JSON.
"""

import json
import os
import sys
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import vitctl
from vitctl.__main__ import main
from vitctl.recipe.sections import Optimizer

ROOT = str(Path(vitctl.__file__).parent) + os.sep
LR = 0.00123456789  # no other setting has this value
RECORDS = ("recipe/write.py", "engine/journal.py")  # they write the rate to files, and hand it to nobody


class Walk:
    """What a command has entered.

    `files`: all of them; `calls`: by function. `image`: between the request for the first batch and its loss.
    `lr`: files that hold the learning rate in a variable, or read it from the recipe. `index_reads`: calls of
    `read_index`.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.files: dict[str, None] = {}
        self.calls = Counter[str]()
        self.image: dict[str, None] = {}
        self.lr: dict[str, None] = {}
        self.index_reads = 0
        self.sees_image = False

    def write(self) -> None:
        """Write the result."""
        names = ("files", "image", "lr")
        lists = {name: list(getattr(self, name)) for name in names}
        self.out.write_text(json.dumps(lists | {"index_reads": self.index_reads, "calls": self.calls}))

    def see(self, frame: FrameType, event: str, _: Any) -> None:
        """Note a call or a return, as `sys.setprofile` reports it."""
        code = frame.f_code
        if not code.co_filename.startswith(ROOT) or event not in ("call", "return") or is_import(frame):
            return
        name = code.co_filename.removeprefix(ROOT)
        if event == "return":
            self.look_for_lr(frame)
            self.sees_image &= code.co_name != "classification_loss"
            return
        self.files[name] = None
        self.calls[f"{name} {code.co_qualname}"] += 1
        self.index_reads += code.co_name == "read_index"
        if code.co_name == "take":  # the loop asks for the first batch
            self.sees_image = True
        elif code.co_name == "take_step":
            sys.setprofile(None)
            for depth in range(3):  # nothing that calls the update has returned yet
                self.look_for_lr(sys._getframe(depth + 1))
            self.write()
            os._exit(0)
        if self.sees_image and threading.current_thread() is threading.main_thread():
            self.image[name] = None

    def look_for_lr(self, frame: FrameType) -> None:
        """Note a file if one of its variables holds the learning rate."""
        if any(holds_lr(value) for value in frame.f_locals.values()):
            self.pass_lr(frame)

    def pass_lr(self, frame: FrameType) -> None:
        """Note a file on the way of the learning rate."""
        name = frame.f_code.co_filename.removeprefix(ROOT)
        if not name.startswith("/") and name not in RECORDS:
            self.lr[name] = None

    def read_lr(self, section: Optimizer, name: str) -> Any:
        """Note who reads optimizer.lr."""
        if name == "lr":
            self.pass_lr(sys._getframe(2))
        return object.__getattribute__(section, name)


def is_import(frame: FrameType | None) -> bool:
    """Return whether a module of vitctl is being imported."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(ROOT):
            return True
        frame = frame.f_back
    return False


def holds_lr(value: object) -> bool:
    """Return whether a local variable is the learning rate or the text that it was typed as."""
    if isinstance(value, tuple | list):
        return any(type(part) in (float, str) and holds_lr(part) for part in value)
    return value == LR if type(value) is float else type(value) is str and value.endswith(str(LR))


if __name__ == "__main__":
    walk = Walk(Path(sys.argv[1]))
    Optimizer.__getattribute__ = lambda section, name: walk.read_lr(section, name)  # type: ignore
    sys.argv = ["vitctl", *sys.argv[2:]]
    threading.setprofile(walk.see)
    sys.setprofile(walk.see)
    with suppress(SystemExit):
        main()
    sys.setprofile(None)
    walk.write()
