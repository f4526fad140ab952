"""Every message of an error that the user can fix, in one file: a change of wording is one reviewed diff.

To write the file again: pytest -n 0 tests/test_messages.py --update-golden
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources import nodes
from vitctl.errors import VitctlError

GOLDEN = Path(__file__).parent / "golden" / "messages.txt"


def test_messages__match_the_golden_file(request: pytest.FixtureRequest) -> None:
    """Each line of the file is a message in the code, and each message is a line."""
    text = "".join(f"{line}\n" for line in sorted(set(messages())))
    if request.config.getoption("--update-golden"):
        GOLDEN.write_text(text)
    known, made = GOLDEN.read_text().splitlines(), text.splitlines()
    assert sorted(set(made) - set(known)) == [], "new messages: review them, then use --update-golden"
    assert sorted(set(known) - set(made)) == [], "messages that are gone: use --update-golden"


def messages() -> Iterator[str]:
    """Yield `module ErrorClass: text with {placeholders}` for each message in the package."""
    kinds = {"VitctlError", "LostProcess", *(kind.__name__ for kind in VitctlError.__subclasses__())}
    for name, found in nodes().items():
        module = ".".join(("vitctl", *Path(name).with_suffix("").parts))
        raised = {node.exc for node in found if isinstance(node, ast.Raise)}
        parameters = {node.arg for node in found if isinstance(node, ast.arg)}
        for call in found:
            if not isinstance(call, ast.Call):
                continue
            function = _name(call.func)
            arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
            if function == "refuse":  # rows of a condition and the fields of an error
                rows = [row.elts[1:] for row in call.args if isinstance(row, ast.Tuple)]
                yield from (f"{module} {_name(call.args[0])}: {_message(row)}" for row in rows)
                continue
            if module == "vitctl.errors" and function == "error":
                continue  # that of `refuse`: its callers have the texts
            passed = [_name(argument) for argument in arguments if _name(argument) in kinds]
            # `raise error(...)`: the class is a parameter of the function.
            if function in kinds or (function in parameters and call in raised):
                fix = [keyword.value for keyword in call.keywords]
                texts = [_message(call.args, *fix)] if call.args else []
            elif passed:
                texts = [_text(argument) for argument in arguments if _is_text(argument)]
                function = passed[0]
            else:
                continue
            yield from (f"{module} {function}: {text}" for text in texts)


def _message(fields: list[ast.expr], *fix: ast.expr) -> str:
    """Return the message that `str` makes of an error with these fields."""
    place = [text for text in map(_text, fields[:2]) if text]
    return "; ".join([": ".join(place), *map(_text, [*fields[2:], *fix])])


def _name(node: ast.AST) -> str:
    return getattr(node, "attr", "") or getattr(node, "id", "")


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _text(node: ast.AST) -> str:
    """Return a text as the user sees it, with the names of inserted values in braces."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.Constant):
        return str(node.value).replace("\n", "\\n")
    if isinstance(node, ast.FormattedValue):
        return _text(node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    if isinstance(node, ast.IfExp):
        return f"{{{_text(node.body)}|{_text(node.orelse)}}}"
    return f"{{{_inserted(node)}}}"


def _inserted(node: ast.AST) -> str:
    """Return the name of an inserted value: of a call, that of its first argument or of its object."""
    if isinstance(node, ast.Call) and (node.args or isinstance(node.func, ast.Attribute)):
        inner = node.args[0] if node.args else getattr(node.func, "value")  # noqa: B009
        return _inserted(inner)
    if isinstance(node, ast.GeneratorExp | ast.ListComp):
        return _inserted(node.generators[0].iter)
    if isinstance(node, ast.Subscript):
        return _inserted(node.value)
    return _name(getattr(node, "func", node)) or "..."
