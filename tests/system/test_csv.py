import csv
from pathlib import Path

from vitctl.system.files import write_csv

ROWS = [
    ("class", "images"),
    ("=1+1", 1),
    ("+x", -2),
    ("-y", 3.5),
    ("@z", 4),
    ("a\x1b[2Jb", 5),
    ('plain, "quoted"\nname', 6),
]


def read(path: Path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def test_write_csv__no_cell_is_a_formula_or_an_escape(tmp_path: Path) -> None:
    rows = read(write_csv(tmp_path / "a.csv", ROWS))
    assert [row[0] for row in rows] == [
        "class",
        "'=1+1",
        "'+x",
        "'-y",
        "'@z",
        "a\\x1b[2Jb",
        'plain, "quoted"\nname',
    ]
    assert [row[1] for row in rows] == ["images", "1", "-2", "3.5", "4", "5", "6"]  # numbers stay numbers
