"""The licence of weights, only as stated with them, and what it demands of their users."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from vitctl.errors import CheckpointError
from vitctl.models.weights.download import CARD
from vitctl.system.files import open_regular
from vitctl.system.text import one_line

_HEAD_BYTES, _LONGEST, _LONGEST_LINK = 2**16, 100, 500
_NOT_SOLD = "its licence allows no commercial use of these weights, nor of what is made of them"
# Part of a name -> the note.
_BINDING = {
    "dinov3": "the DINOv3 License binds these weights and all made of them: pass the agreement on with both",
    "cc-by-nc": _NOT_SOLD,
    "noncommercial": _NOT_SOLD,
    "non-commercial": _NOT_SOLD,
}
# Applies to every file of this network whose licence is not stated otherwise.
USUALLY_DINOV3 = (
    "weights of this network usually come under the DINOv3 License, which binds what is made of them; state "
    "theirs with weights.licence"
)


def stated_licence(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return `licence` and `licence_link` from config.json or a README.md's header; {} if not stated."""
    found: Any = {}
    if (card := folder / CARD).is_file():
        with open_regular(card, error=CheckpointError) as file:
            text = "\n".join(
                file.read(_HEAD_BYTES).decode("utf-8-sig", errors="replace").splitlines()
            ).lstrip()
        text = "".join(one if one.isprintable() or one in "\n\t" else repr(one)[1:-1] for one in text)
        with suppress(yaml.YAMLError, RecursionError, ValueError):
            found = yaml.safe_load(text[3:].split("\n---", 1)[0]) if text.startswith("---") else {}
    found = found if isinstance(found, dict) else {}
    stated = config if _in_words(config.get("license")) else found
    name, link = _in_words(stated.get("license")), _in_words(stated.get("license_link"))
    if name in ("other", ""):
        name = _in_words(found.get("license_name")) or name
    # A path names a file in their repository, which does not travel with the weights.
    address = (
        {"licence_link": one_line(link)} if link.startswith("https://") and len(link) <= _LONGEST_LINK else {}
    )
    return {"licence": one_line(name)[:_LONGEST], **address} if name else {}


def _in_words(stated: object) -> str:
    """Return a licence, or a list of them, as text; "" for anything else."""
    several = stated if isinstance(stated, list) else [stated]
    return ", ".join(one.strip() for one in several if isinstance(one, str))


def licence_sentence(licence: str) -> str:
    """Return a note on a licence that binds derived weights, "" for another."""
    return next((text for part, text in _BINDING.items() if part in licence.lower()), "")
