"""The page that shows the classes of a photograph, with the network in the browser or on a server."""

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any


def photo_page(facts: dict[str, Any], *, note: str, runtime: str = "") -> str:
    """Return the HTML text.

    Args:
        facts: for the script: "address" of a server, or "file", "names", "activation", "upright" and
            "install" of a network.
        note: a sentence below the answers, HTML.
        runtime: an element that loads what runs the network.
    """
    page = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    # Inside a script element only "<" could end the text.
    given = {"facts": json.dumps(facts).replace("<", "\\u003c"), "note": note, "runtime": runtime}
    return re.sub(r"\{\{(\w+)\}\}", lambda found: given[found[1]], page)


def policy(page: str) -> str:
    """Return the Content-Security-Policy under which only the page's own script and style work."""
    found = [re.search(rf"<{name}>(.*?)</{name}>", page, re.DOTALL) for name in ("script", "style")]
    script, style = (
        base64.b64encode(hashlib.sha256(one[1].encode() if one else b"").digest()).decode() for one in found
    )
    return (
        f"default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; connect-src 'self'; "
        "img-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
