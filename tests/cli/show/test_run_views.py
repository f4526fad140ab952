"""Curves in a terminal: every dot lies where its value says."""

import pytest

from vitctl.cli.show.run_views import draw_curve


def dots(lines: list[str], width: int) -> set[tuple[int, int]]:
    """Column and row of every braille dot of the drawn lines."""
    bits = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
    found = set()
    for row, line in enumerate(lines):
        for column, letter in enumerate(line[9:width]):
            code = ord(letter) - 0x2800 if "⠀" <= letter <= "⣿" else 0
            found |= {(2 * column + x, 4 * row + y) for y in range(4) for x in range(2) if code & bits[y][x]}
    return found


def test_draw_curve__a_straight_line_has_a_dot_in_every_column() -> None:
    lines = draw_curve([(0, 0.0), (100, 10.0)], width=49, height=8)
    assert len(lines) == 10
    found = dots(lines[:8], 49)
    assert {x for x, _ in found} == set(range(80))
    assert {(0, 31), (79, 0)} <= found
    for x, y in found:
        assert y == pytest.approx(31 - 31 * x / 79, abs=1)
    assert lines[0].startswith("      10┤")
    assert lines[7].startswith("       0┤")
    assert lines[9].split() == ["0", "100"]


def test_draw_curve__ascii_where_the_terminal_has_no_other_letters() -> None:
    lines = draw_curve([(1, 3.0), (2, 1.0), (3, 2.0)], width=40, height=6, plain=True)
    assert all(line.isascii() for line in lines)
    assert sum(line.count("*") for line in lines) >= 31


def test_draw_curve__what_is_not_finite_is_left_out() -> None:
    assert draw_curve([(1, float("nan"))], width=40, height=6) == []
    assert len(draw_curve([(1, 2.0), (2, float("inf"))], width=40, height=6)) == 8


def test_draw_curve__no_line_is_wider_than_asked() -> None:
    lines = draw_curve([(n, n % 7) for n in range(1000)], width=60, height=9, unit="percent")
    assert max(map(len, lines)) <= 60
