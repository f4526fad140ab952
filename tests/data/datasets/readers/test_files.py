from pathlib import Path

import pytest

from vitctl.data.datasets.readers.files import (
    MissingOriginalsError,
    file_items,
    library,
    load_mat,
    need,
    read_bytes,
    read_fields,
    read_lines,
    read_part,
)
from vitctl.errors import DataError


def test_need__takes_the_first_place_and_names_the_archive(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    assert need(tmp_path, "a", "b", archive="x.zip from y") == tmp_path / "b"
    with pytest.raises(MissingOriginalsError, match=r"a or c is missing$"):
        need(tmp_path, "a", "c")
    with pytest.raises(DataError, match=r"a or c is missing; unpack here: x.zip from y$"):
        need(tmp_path, "a", "c", archive="x.zip from y")


def test_file_items__are_lazy_and_name_the_first_that_is_missing(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"1")
    (item,) = file_items(tmp_path, ["one"], [3], ["key"])
    assert (item.key, item.label, item.read()) == ("key", 3, b"1")
    (tmp_path / "one").unlink()
    with pytest.raises(DataError, match=r"one: cannot be read \(No such file"):
        item.read()
    with pytest.raises(DataError, match="2 of 2 listed images are missing, the first is one"):
        file_items(tmp_path, ["one", "two"], [0, 0])
    for name in ("../one", "/one", "a/../../one"):
        with pytest.raises(DataError, match="is outside this folder"):
            file_items(tmp_path, [name], [0])


def test_read_part__refuses_to_run_over_the_end(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abcdef")
    assert read_part(tmp_path / "x", 2, 3) == b"cde"
    with pytest.raises(DataError, match="ends within the 9 bytes from 2 on"):
        read_part(tmp_path / "x", 2, 9)


def test_lines_and_fields__say_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_bytes(b"\xef\xbb\xbfa 1\r\n\r\nb 2 \r\n")
    assert read_lines(path) == ["a 1", "b 2"]
    assert read_fields(path, 2) == [["a", "1"], ["b", "2"]]
    with pytest.raises(DataError, match="line 'a 1' should have at least 3 columns"):
        read_fields(path, 3)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="should be a text file"):
        read_lines(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_bytes(tmp_path / "none")


def test_library__says_how_to_install() -> None:
    with pytest.raises(DataError, match=r"is read with surely_absent: pip install 'vitctl\[data\]'"):
        library("surely_absent.io")


def test_load_mat__a_web_page_is_no_matlab_file(tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    (tmp_path / "setid.mat").write_text("<!DOCTYPE HTML><title>301 Moved Permanently</title>" * 9)
    with pytest.raises(DataError, match=r"setid.mat: not a MATLAB file, download it again") as caught:
        load_mat(tmp_path / "setid.mat", "trnid")
    assert "\n" not in str(caught.value)
