"""What a scheme did, layer by layer, and the words for a layer's place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from wnfused._modules import shown
from wnfused.init.roles import Role
from wnfused.init.units import Unit


@dataclass(frozen=True)
class Entry:
    """What a scheme did to one layer, or to a stack of layers.

    Attributes:
        layer: its name.
        role: its place in the model, in words.
        gamma: the factor of ``g = sqrt(gamma fan_in / fan_out)``; None where the scheme has another rule.
        gain: the mean over rows of the gain it set, or of the row norms of a plain layer's weight; None: not set.
    """

    layer: str
    role: str
    gamma: float | None = None
    gain: float | None = None


# A longer table is cut in the middle when it is printed.
_ROWS = 60


@dataclass(frozen=True)
class Report:
    """What ``initialize`` did, layer by layer; prints as a table.

    Attributes:
        scheme: the scheme's name.
        entries: one for each layer, or stack of layers, in order of execution.
        unplaced: names of layers whose place in the model could not be found and was assumed to be
            neither before an activation nor at the end of a branch.
        notes: what the scheme could not do as its paper has it, and what it did instead; what it left alone.
    """

    scheme: str
    entries: tuple[Entry, ...]
    unplaced: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __str__(self) -> str:
        def number(value: float | None) -> str:
            return "" if value is None else f"{value:.4g}"

        rows = [("layer", "role", "gamma", "gain")] if self.entries else []
        rows += [(shown(e.layer), e.role, number(e.gamma), number(e.gain)) for e in self.entries]
        if len(rows) > _ROWS:
            half = _ROWS // 2
            omitted = (f"... {len(rows) - _ROWS} more, which iterating over the report gives ...", "", "", "")
            rows = [*rows[:half], omitted, *rows[-half:]]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(4)]
        lines = [f"init scheme {self.scheme}"]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        if self.unplaced:
            names = ", ".join(map(shown, self.unplaced))
            lines.append(f"not placed, taken as neither before a ReLU nor last in a branch: {names}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def some_of(names: Sequence[str], most: int = 5) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def describe(role: Role) -> str:
    """A role in words, for the report."""
    parts = []
    if role.closes_branch:
        parts.append(f"last of branch, block {role.block} of {role.num_blocks}")
    if role.activation_gamma != 1.0:
        parts.append("before an activation")
    if role.head:
        parts.append("head")
    elif role.without_gamma:
        parts.append(f"before {role.without_gamma}")
    words = ", ".join(parts) or ("no activation after it" if role.placed else "not placed")
    return words if role.stated is None else f"{words}; gamma as stated"


def describe_unit(unit: Unit) -> str:
    """The same for a unit; of a stack, how many layers."""
    words = describe(unit.role)
    if not unit.stacked:
        return words
    first, last = unit.role.block, unit.role.block + len(unit.v) - 1
    which = f"blocks {first} to {last} of {unit.role.num_blocks}"
    return f"last of branch, {which}" if unit.role.closes_branch else f"before a ReLU, {which}"
