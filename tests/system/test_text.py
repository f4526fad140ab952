"""Names of others on a screen, in a log, in a table."""

import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.matrix import each
from vitctl.system.text import (
    bytes_text,
    count_text,
    csv_cell,
    has_control,
    nearest,
    one_line,
    printable,
    share_text,
    typed_command,
)


@each(
    ("text", "shown"),
    [
        ("cat", "cat"),
        ("Straße 猫 🐈", "Straße 猫 🐈"),
        ("\x1b[2Jgone", "\\x1b[2Jgone"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("a\x9bb\x7f", "a\\x9bb\\x7f"),  # C1 controls act like ESC [ in some terminals
        ("evil\u202egpj.exe", "evil\\u202egpj.exe"),
        ("\udcff", "\\udcff"),
        ("two\u2028lines", "two\\u2028lines"),
        ("a\r\nb\tc", "a\\x0d\nb\tc"),
    ],
)
def test_controls_are_shown(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text(alphabet=st.characters()))
def test_nothing_that_acts_is_left(text: str) -> None:
    shown = one_line(text)
    assert not any(unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") for letter in shown)
    assert "\n" not in shown and shown == one_line(shown)
    shown.encode()  # half characters would raise
    assert has_control(text) == (one_line(text) != text)


def test_every_control_of_unicode_is_known() -> None:
    control = [chr(c) for c in range(sys.maxunicode + 1) if unicodedata.category(chr(c)) in ("Cc", "Cs")]
    assert len(control) == 65 + 2048
    assert all(has_control(letter) for letter in control)


@pytest.mark.parametrize("name", ["=1+1", "+A1", "-A1", "@SUM(A1)", "\t=1", "\r=1"])
def test_a_cell_is_no_formula(name: str) -> None:
    assert csv_cell(name) == f"'{name}"


@pytest.mark.parametrize("value", ["cat", "", 3, -3, -0.5, None, "a=b"])
def test_other_cells_are_unchanged(value: object) -> None:
    assert csv_cell(value) is value


def test_bytes_text() -> None:
    assert [bytes_text(n) for n in (0, 1023, 1536, 3 * 2**30, 5 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 GiB",
        "5.00 TiB",
    ]


@pytest.mark.parametrize(
    ("word", "first"),
    [
        ("optimizer.wd", "optimizer.weight_decay"),
        ("optimizer.learning_rate", "optimizer.lr"),
        ("optimizer.weight_decya", "optimizer.weight_decay"),
        ("schedule.wd", "schedule.warmup"),
        ("zzz", None),
    ],
)
def test_nearest__knows_abbreviations(word: str, first: str | None) -> None:
    known = ["optimizer.lr", "optimizer.weight_decay", "optimizer.name", "schedule.warmup"]
    assert next(iter(nearest(word, known)), None) == first


@pytest.mark.parametrize("program", ["/venv/bin/vitctl", "/venv/lib/vitctl/__main__.py", "pytest"])
def test_typed_command__is_complete_however_vitctl_was_started(
    monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr("sys.argv", [program, "finetune", "--data", "my photos"])
    expected = "vitctl" if program == "pytest" else "vitctl finetune --data 'my photos'"
    assert typed_command("vitctl") == expected


def test_share_text__a_small_share_is_not_zero() -> None:
    shares = (1, 0.427, 0.0996, 0.0994, 0.00412, 0.0001, 2e-7)
    assert [share_text(share) for share in shares] == [
        "100%",
        "43%",
        "10%",
        "9.9%",
        "0.41%",
        "0.01%",
        "< 0.01%",
    ]


def test_count_text__one_is_singular() -> None:
    assert [count_text(number, "image") for number in (0, 1, 1200)] == ["0 images", "1 image", "1,200 images"]
    assert [count_text(number, "class", "classes") for number in (1, 2)] == ["1 class", "2 classes"]


def test_nearest__knows_swapped_letters() -> None:
    assert nearest("ditigs", ["digits", "glyphs"]) == ["digits"]
