"""The licence of weights: as stated beside them, never guessed, and what it asks of their users."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitctl.errors import CheckpointError
from vitctl.models.weights.download import CARD
from vitctl.system.files import open_regular
from vitctl.system.text import one_line

_HEAD_BYTES, _LONGEST = 2**16, 100
_STATED = re.compile(r"^(license|license_name):[ \t]*(?:\r?\n[ \t]*-[ \t]*)?(\S.*)$", re.MULTILINE)
_NOT_SOLD = "its licence allows no commercial use of these weights, nor of what is made of them"
# Part of a name -> what to know.
_BINDING = {
    "dinov3": "the DINOv3 License binds these weights and all made of them: pass the agreement on with both",
    "cc-by-nc": _NOT_SOLD,
    "noncommercial": _NOT_SOLD,
    "non-commercial": _NOT_SOLD,
}
# Said of every file of this network whose licence is not stated otherwise.
USUALLY_DINOV3 = (
    "weights of this network usually come under the DINOv3 License, which binds what is made of them; state "
    "theirs with weights.licence"
)


def stated_licence(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the licence that config.json or the head of a README.md states, in one line, or None."""
    head = ""
    if (card := folder / CARD).is_file():
        with open_regular(card, error=CheckpointError) as file:
            head = file.read(_HEAD_BYTES).decode(errors="replace")
    found = dict(_STATED.findall(head.split("\n---", 1)[0])) if head.startswith("---") else {}
    name = config.get("license") or found.get("license")
    if str(name).strip("\r\"' ") in ("other", "None"):
        name = found.get("license_name") or name
    return one_line(str(name).strip("\r\"' "))[:_LONGEST] if name else None


def licence_sentence(licence: str) -> str:
    """Return what to know of a licence that binds what is made of the weights, "" of another."""
    return next((text for part, text in _BINDING.items() if part in licence.lower()), "")
