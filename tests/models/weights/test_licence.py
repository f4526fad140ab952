"""The licence of weights is what their repository states, and nothing else."""

from pathlib import Path
from typing import Any

import pytest

from tests.matrix import each
from vitctl.models.weights.licence import licence_sentence, stated_licence


@each(
    ("card", "config", "expected"),
    [
        (None, {}, None),
        ("# A model\nlicense: mit\n", {}, None),  # no head
        ("---\nlicense: apache-2.0\n---\n", {}, "apache-2.0"),
        ("---\r\ntags:\r\n- x\r\nlicense: mit\r\n---\r\n", {}, "mit"),
        ("---\nlicense:\n- cc-by-4.0\n---\n", {}, "cc-by-4.0"),
        ('---\nlicense: other\nlicense_name: "DINOv3 License"\n---\n', {}, "DINOv3 License"),
        ("---\nlicense_name: dinov3-license\nlicense: other\n---\n", {}, "dinov3-license"),
        ("---\nlicense: other\n---\n", {}, "other"),
        ("---\ntags: []\n---\nlicense: mit\n", {}, None),  # below the head
        ("---\nlicense: mit\n---\n", {"license": "apache-2.0"}, "apache-2.0"),
        ("---\nlicense: " + "x" * 300 + "\n---\n", {}, "x" * 100),
        ("---\n" + "# filler\n" * 10_000 + "license: mit\n---\n", {}, None),  # beyond what is read
        ("---\nlicense:\n- mit\n- cc-by-nc-4.0\n---\n", {}, "mit, cc-by-nc-4.0"),
        ("---\nlicense: >-\n  cc-by-nc-4.0\n---\n", {}, "cc-by-nc-4.0"),
        ("\ufeff---\nlicense: mit # not really\n---\n", {}, "mit"),
        ("---\rlicense : mit\r---\r", {}, "mit"),
        ("---\nlicense: null\n---\n", {}, None),
        ("---\nlicense: [&a mit, *a, {b: c}]\n---\n", {}, "mit, mit"),
        ("---\nlicense: [\n---\n", {}, None),  # no YAML
        ("---\nlicense: m\x1b[31mit\n---\n", {}, "m\\x1b[31mit"),
    ],
)
def test_stated_licence(
    card: str | None, config: dict[str, Any], expected: str | None, tmp_path: Path
) -> None:
    if card is not None:
        (tmp_path / "README.md").write_bytes(card.encode())
    assert stated_licence(tmp_path, config).get("licence") == expected


@pytest.mark.parametrize(
    ("link", "expected"),
    [("https://example.org/licence", "https://example.org/licence"), ("LICENSE.md", None), ("3", None)],
)
def test_stated_licence__its_address(link: str, expected: str | None, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"---\nlicense: other\nlicense_name: x\nlicense_link: {link}\n---\n")
    assert stated_licence(tmp_path, {}).get("licence_link") == expected
    assert "licence_link" not in stated_licence(tmp_path, {"license": "mit"})  # it is that of another


@pytest.mark.parametrize(
    ("licence", "words"),
    [
        ("dinov3-license", "DINOv3 License"),
        ("cc-by-nc-4.0", "no commercial use"),
        ("FAIR-Noncommercial-Research-License", "no commercial use"),
        ("apache-2.0", ""),
        ("", ""),
    ],
)
def test_licence_sentence__of_those_that_bind(licence: str, words: str) -> None:
    sentence = licence_sentence(licence)
    assert words in sentence
    assert bool(sentence) == bool(words)
