"""Two-way rules between our tensors and those of another program: what is read is what was written, bit for
bit.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vitctl.errors import CheckpointError
from vitctl.system.text import one_line

Tensors = dict[str, Tensor]
_LISTED = 4


@dataclass(frozen=True)
class MemoryLayout:
    """How the same numbers lie in memory: `read` turns theirs into ours, `write` ours into theirs."""

    read: Callable[[Tensor], Tensor]
    write: Callable[[Tensor], Tensor]


SAME = MemoryLayout(lambda theirs: theirs, lambda ours: ours)
# [in, out] and [out, in]
DENSE = MemoryLayout(lambda theirs: theirs.permute(1, 0), lambda ours: ours.permute(1, 0))
# HWIO and OIHW
CONV = MemoryLayout(lambda theirs: theirs.permute(3, 2, 0, 1), lambda ours: ours.permute(2, 3, 1, 0))


@dataclass(frozen=True)
class Rule:
    """The tensors of theirs that hold one tensor of ours, stacked along its rows if there are several.

    In a table, `{i}` and `{j}` in their names stand for indices.
    """

    theirs: tuple[str, ...]
    layout: MemoryLayout = SAME

    def read(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return our tensor, contiguous."""
        parts = [self.layout.read(tensors[name]) for name in self.theirs]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous()

    def write(self, tensor: Tensor) -> Tensors:
        """Return their tensors, contiguous; each in its own memory, as safetensors requires."""
        parts = tensor.chunk(len(self.theirs))
        return {
            name: self.layout.write(part).clone(memory_format=torch.contiguous_format)
            for name, part in zip(self.theirs, parts, strict=True)
        }


Table = dict[str, Rule]


def entry(*theirs: str, layout: MemoryLayout = SAME) -> Rule:
    """Return a row of a table."""
    return Rule(theirs, layout)


def pair(ours: str, *theirs: str) -> Table:
    """Return the rows of one module whose weight and bias have the same layout on both sides."""
    return {f"{ours}.{kind}": entry(*(f"{name}.{kind}" for name in theirs)) for kind in ("weight", "bias")}


def rule_for(table: Table, ours: str) -> Rule | None:
    """Return the rule for our tensor `ours`, or None if the table has no place for it.

    The whole numbers between the dots of a name are its indices, `{i}` and `{j}` from 0, `{i1}` and `{j1}`
    from 1.
    """
    indices = dict(zip("ij", [int(part) for part in ours.split(".") if part.isdigit()], strict=False))
    letters = iter("ij")
    row = table.get(re.sub(r"(?<=\.)\d+(?=\.|$)", lambda _: f"{{{next(letters)}}}", ours))
    if row is None:
        return None
    from_one = {f"{letter}1": number + 1 for letter, number in indices.items()}
    return Rule(tuple(name.format(**indices, **from_one) for name in row.theirs), row.layout)


def rules_for(table: Table, names: Iterable[str]) -> Table:
    """Return the rules for all our tensors `names`. Raises CheckpointError naming those without a place."""
    rules = {name: rule_for(table, name) for name in names}
    if lost := [name for name, rule in rules.items() if rule is None]:
        raise CheckpointError(f"there is no place for {listed(lost)}")
    return {name: rule for name, rule in rules.items() if rule is not None}


def to_theirs(state: Mapping[str, Tensor], rules: Table) -> Tensors:
    """Return our `state` in their names and layouts."""
    theirs: Tensors = {}
    for ours, rule in rules.items():
        theirs |= rule.write(state[ours])
    return theirs


def to_ours(tensors: Tensors, rules: Table, model: Mapping[str, Tensor]) -> Tensors:
    """Return their `tensors` in our names and layouts, for the shapes of `model`, a state on the meta device.

    Raises one CheckpointError that groups what is missing, unexpected or of the wrong shape, in their names.
    """
    # The same rules backwards tell every name and shape that the file must have.
    wanted = to_theirs(model, rules)
    refuse("the tensors do not make a whole model", mismatches(tensors, wanted, "expected"))
    return {ours: rule.read(tensors) for ours, rule in rules.items()}


def mismatches(
    tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], should: str
) -> dict[str, list[str]]:
    """Kind of problem -> names, of tensors that are compared with others; `should` stands before a wanted
    shape.
    """
    return {
        "missing": [name for name in wanted if name not in tensors],
        "unexpected": [name for name in tensors if name not in wanted],
        "wrong shape": [
            f"{name} is {list(tensors[name].shape)}, {should} {list(tensor.shape)}"
            for name, tensor in wanted.items()
            if name in tensors and tensors[name].shape != tensor.shape
        ],
    }


def refuse(heading: str, problems: Mapping[str, list[str]]) -> None:
    """Raise CheckpointError with one line for each kind of problem that occurs, showing the first few of
    each.
    """
    lines = [f"  {kind}: {listed(found)}" for kind, found in problems.items() if found]
    if lines:
        raise CheckpointError("\n".join([heading, *lines]))


def listed(names: list[str]) -> str:
    """Return the first few names, and how many more there are."""
    more = f", and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(map(one_line, names[:_LISTED])) + more
