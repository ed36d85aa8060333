"""Init schemes by name: one file each, one way to call them, one report of what they did."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from wnfused.init.roles import Role, find_roles


@dataclass(frozen=True)
class Entry:
    """What a scheme did to one layer: its role in words, the factor gamma, the gain it set (None: not set)."""

    layer: str
    role: str
    gamma: float | None = None
    gain: float | None = None


@dataclass(frozen=True)
class Report:
    """What :func:`initialize` did, layer by layer; prints as a table.

    Attributes:
        scheme: the scheme's name.
        entries: one for each layer, in order of execution.
        unplaced: names of layers whose place in the model could not be found and was assumed to be
            neither before an activation nor at the end of a branch.
    """

    scheme: str
    entries: tuple[Entry, ...]
    unplaced: tuple[str, ...]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __str__(self) -> str:
        def number(value: float | None) -> str:
            return "" if value is None else f"{value:.4g}"

        rows = [("layer", "role", "gamma", "gain")]
        rows += [(e.layer, e.role, number(e.gamma), number(e.gain)) for e in self.entries]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = [f"init scheme {self.scheme}"]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        if self.unplaced:
            lines.append(f"not placed, taken as neither before a ReLU nor last in a branch: {', '.join(self.unplaced)}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Context:
    """What a scheme works on."""

    model: nn.Module
    roles: list[Role]
    sample: Tensor | None
    generator: torch.Generator | None


Scheme = Callable[..., Iterable[Entry]]
_schemes: dict[str, Scheme] = {}


def scheme(name: str) -> Callable[[Scheme], Scheme]:
    """Registers a function ``(context, **options) -> entries`` under a name; its keyword arguments are the options."""

    def register(function: Scheme) -> Scheme:
        _schemes[name] = function
        return function

    return register


def schemes() -> list[str]:
    """The names that :func:`initialize` knows."""
    return sorted(_schemes)


@torch.no_grad()
def initialize(
    model: nn.Module,
    scheme: str = "arpit2019",
    *,
    sample: Tensor | None = None,
    generator: torch.Generator | None = None,
    gammas: Mapping[str, float] | None = None,
    **options: object,
) -> Report:
    """Initialises every layer of a model, found and placed by :func:`wnfused.init.find_roles`.

    Args:
        model: any module; weight-normalised or not, as far as the scheme has a rule for it.
        scheme: a name of :func:`schemes`.
        sample: a batch of inputs, for the schemes that look at data.
        generator: source of randomness; torch's own if None.
        gammas: factors stated by hand, by layer name, where the model's structure does not tell: 2 before a ReLU,
            ``1 / B_k`` for the last layer of a branch in a stage of ``B_k`` blocks.
        options: of the scheme.

    Returns:
        A :class:`Report` of what was set where; it names what it could not place.

    Raises:
        ValueError, TypeError: an unknown scheme, option or layer name, or a gamma that is not finite.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    if scheme not in _schemes:
        raise ValueError(f"scheme: unknown {scheme!r}; use one of {', '.join(map(repr, schemes()))}")
    known = list(inspect.signature(_schemes[scheme]).parameters)[1:]
    unknown = sorted(set(options) - set(known))
    if unknown:
        takes = f"it takes {', '.join(known)}" if known else "it takes none"
        raise TypeError(f"{unknown[0]}: no option of scheme {scheme!r}; {takes}")
    roles = _stated(find_roles(model), gammas or {})
    context = Context(model, roles, sample, generator)
    entries = tuple(_schemes[scheme](context, **options))
    return Report(scheme, entries, tuple(role.name for role in roles if not role.placed))


def _stated(roles: list[Role], gammas: Mapping[str, float]) -> list[Role]:
    """The roles with the factors that were stated by hand."""
    unknown = sorted(set(gammas) - {role.name for role in roles})
    if unknown:
        raise ValueError(f"gammas: the model has no layer {unknown[0]!r}; it has {', '.join(r.name for r in roles)}")
    for name, gamma in gammas.items():
        if not (math.isfinite(gamma) and gamma >= 0):
            raise ValueError(f"gammas: {gamma} for {name!r} must be finite and at least 0")
    return [
        replace(role, activation_gamma=gammas[role.name], closes_branch=False, placed=True)
        if role.name in gammas
        else role
        for role in roles
    ]


def describe(role: Role) -> str:
    """A role in words, for the report."""
    parts = []
    if role.closes_branch:
        parts.append(f"last of branch, block {role.block} of {role.num_blocks}")
    if role.activation_gamma != 1.0:
        parts.append("before an activation")
    return ", ".join(parts) or ("no activation after it" if role.placed else "not placed")
