"""``zhang2019``: ZeroInit, later Fixup. A deep residual network starts as a shallow one.

With L residual branches of m layers each,

    1. the classification layer and the last layer of every branch are 0;
    2. every other layer is He's, ``N(0, 2 / fan_in)``, the other m - 1 layers of each branch times
       ``L^(-1 / (2 m - 2))``, stem and shortcuts not;
    3. every branch has a scalar multiplier, 1, and scalar biases, 0, before each convolution, linear layer and
       activation: ``wnfused.nn.FixupBlock`` and ``ScalarBias``, as in ``wnfused.models.wrn(norm="fixup")``. Other
       blocks are initialised as far as they have parameters for it, with their ordinary biases 0, and the report
       says so.

On a weight-normalised layer the factor is g's, ``g = ||v|| L^(-1 / (2 m - 2))``; of a layer that is to be 0 the gain is
0 and v is not: then v has no gradient and g has, and the layer starts to train.

Source: Zhang, Dauphin & Ma, "The Unreasonable Effectiveness of (Zero) Initialization in Deep Residual Learning",
section 3; published as "Fixup Initialization", ICLR 2019.
"""

from __future__ import annotations

from collections.abc import Iterator

from wnfused._modules import holders, quoted
from wnfused.init.he2015 import draw_he_
from wnfused.init.registry import Context, scheme
from wnfused.init.report import Entry, describe_unit
from wnfused.init.roles import Role
from wnfused.init.units import Unit
from wnfused.nn import FixupBlock, ScalarBias


@scheme("zhang2019")
def zhang2019(context: Context) -> Iterator[Entry]:
    branches = context.num_branches
    if not branches:
        _refuse_branches_that_never_close(context)
    modules = list(context.model.modules())
    held_by = holders(context.model)
    zero = [u.module for u in (*context.units, *context.repeated) if _is_zero(u.role)]
    silent = {part for module in zero for part in module.modules()}
    inside = {id(part) for block in modules if isinstance(block, FixupBlock) for part in block.modules()}
    scalars = False
    for module in modules:
        if isinstance(module, (FixupBlock, ScalarBias)):
            module.reset_scalars()
    for unit in context.units:
        role, words = unit.role, describe_unit(unit)
        draw_he_(unit, context)
        if _is_zero(role):
            if not held_by.get(id(unit.v if unit.g is None else unit.g), set()) <= silent:
                context.notes.append(f"{unit.shown}: stays He's, 0 would silence the others that hold its weight")
                yield Entry(unit.name, words, None, unit.mean_gain())
                continue
            unit.zero_()
            words += ": zero"
        elif _is_scaled(unit):
            exponent = -1 / (2 * role.branch_layers - 2)
            unit.scale_(branches**exponent)
            words += f": He times {branches}^({exponent:g})"
        scalars |= role.closes_branch and id(unit.module) not in inside
        yield Entry(unit.name, words, None, unit.mean_gain())
    if scalars:
        context.notes.append("branches outside of FixupBlock have no scalar multipliers and biases")
    if not any(unit.role.head and unit.role.placed for unit in context.units):
        guessed = next((unit.name for unit in context.units if unit.role.head), None)
        last = "" if guessed is None else f"; if it is {guessed}, the last one, roles={{{guessed!r}: {{'head': True}}}}"
        context.notes.append(f"no classification layer was found to be set to 0{last}")


def _is_zero(role: Role) -> bool:
    """The last layer of a branch, or the classification layer; not one that is only the last to be registered."""
    return role.closes_branch or (role.head and role.placed)


def _is_scaled(unit: Unit) -> bool:
    """Whether it is one of the m - 1 layers of a branch that are not 0."""
    role = unit.role
    return bool(role.branch) and role.branch_layers > 1 and not (role.head or role.closes_branch)


def _refuse_branches_that_never_close(context: Context) -> None:
    """L is then 0, and its negative power nothing; only ``roles`` can say so."""
    unit = next(filter(_is_scaled, context.units), None)
    if unit is not None:
        raise ValueError(
            f"roles: {quoted(unit.name)} is in a residual branch of {unit.role.branch_layers} layers, and no layer "
            "closes a branch; state 'closes_branch': True for the last layer of the branch, or 'branch': 0 for "
            f"{quoted(unit.name)}"
        )
