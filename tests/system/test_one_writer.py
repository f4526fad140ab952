"""Files are written by `vitctl.system.files` alone, but for those named here with the reason."""

import ast
from functools import cache

import pytest

from tests.sources import trees

MOVES = {
    "system/files.py:atomic_write": "the one writer",
    "data/writer/shard_writer.py:write_split": "a finished folder takes its place",
    "data/datasets/readers/original_files.py:unpack": "an archive that is kept as it came",
    "data/datasets/readers/original_files.py:unpacked": "a folder gets its name",
    "engine/checkpoint.py:save_checkpoint": "a finished folder takes its place",
    "engine/store.py:fetch": "a finished folder takes its place",
    "engine/checkpoint.py:set_aside_after": "a folder gets another name",
    "launch/listing.py:remove_run": "a folder gets another name, and goes",
    "engine/checkpoint.py:remove_folders": "a folder gets another name, and goes",
    "export/export.py:_keep": "verified files take their place",
    "models/weights/download.py:_download": "it resumes where an earlier download stopped, so that the "
    "unfinished file has one name",
}
# What opens a file for writing other than the file that `atomic_write` gave, called `aside`, or with
# `opener=no_links`.
WRITES = {
    "bench/largest_batch.py:reset_peak": "/proc/self/clear_refs",
    "cli/app.py:_make_streams_safe": "/dev/null",
    "cli/app.py:_discard_unwritten": "/dev/null",
    "system/screen.py:silence": "/dev/null",
    "system/screen.py:_drop": "/dev/null",
    "data/inspect/check_shards.py:_opened_shard": "in a temporary folder of our own",
    "verify/rerun.py:_copy": "in a temporary folder of our own",
    "engine/trace.py:_cut_marks": "trace.bin, opened by `no_links`",
    "engine/trace.py:_write_marks": "trace.bin, opened by `no_links`",
    "system/files.py:no_links": "the opener itself",
    "system/files.py:atomic_write": "the one writer",
    "system/files.py:open_lock": "O_NOFOLLOW",
    "system/remote.py:_free_slot": "O_NOFOLLOW",
    "cli/help.py:format_help": "a page of help, no file",
    "export/device_graphs.py:write_executorch": "in a folder of its own, from which `_keep` moves it",
    "export/device_graphs.py:write_litert": "in a folder of its own, from which `_keep` moves it",
    "export/device_graphs.py:_foreign": "/dev/null",
    "export/graph_files.py:write_onnx": "in a folder of its own, from which `_keep` moves it",
    "data/source/hashing.py:_no_links": "the opener, in a file that runs alone",
}
_READ_ONLY = {"os.O_RDONLY", "os.O_CLOEXEC", "os.O_NONBLOCK", "os.O_DIRECTORY", "_READ"}


@cache
def calls() -> list[tuple[str, ast.Call, str]]:
    """The place, by functions around it, the call and the called name of every call in the package."""
    found = list[tuple[str, ast.Call, str]]()
    for file, tree in trees().items():
        left: list[tuple[ast.AST, tuple[str, ...]]] = [(tree, ())]
        while left:
            node, around = left.pop()
            if isinstance(node, ast.FunctionDef):
                around = (*around, f"{file}:{node.name}")
            if isinstance(node, ast.Call) and around:
                name = dotted(node.func)
                found += [(place, node, name) for place in around]
            left += [(one, around) for one in ast.iter_child_nodes(node)]
    return found


def dotted(called: ast.expr) -> str:
    """The called name; of what is no name, as of a call's result, only what follows it."""
    if isinstance(called, ast.Attribute):
        return f"{dotted(called.value)}.{called.attr}"
    return called.id if isinstance(called, ast.Name) else ""


def is_move(call: ast.Call, name: str) -> bool:
    """os.replace, os.rename, shutil.move, and the methods of paths, which take one argument where those of
    texts take two.
    """
    method = name.endswith((".replace", ".rename")) and len(call.args) == 1 and not call.keywords
    return name in ("os.replace", "os.rename", "os.renames", "shutil.move") or method


def is_write(call: ast.Call, name: str) -> bool:
    """An open for writing, or a file written in one call, beside those that `atomic_write` and `no_links`
    guard.
    """
    if name.startswith("aside.") or any(ast.unparse(k.value).endswith("no_links") for k in call.keywords):
        return False
    if name == "os.open":
        flags = {part.strip(" ()") for part in ast.unparse(call.args[1]).split("|")}
        return not flags <= _READ_ONLY
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    texts = [node.value for node in given if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    opens = name in ("open", "os.fdopen") or name.endswith(".open")
    return name.endswith((".write_text", ".write_bytes")) or (
        opens and any(_is_mode_of_writing(text) for text in texts)
    )


def _is_mode_of_writing(text: str) -> bool:
    return len(text) <= 3 and set(text) <= set("rwxab+t") and bool(set(text) & set("wxa+"))


@pytest.mark.slow
def test_one_writer() -> None:
    found = {place for place, call, name in calls() if is_move(call, name)}
    assert found == set(MOVES)


def test_nothing_else_is_opened_for_writing() -> None:
    found = {place for place, call, name in calls() if is_write(call, name)}
    assert found == set(WRITES)
