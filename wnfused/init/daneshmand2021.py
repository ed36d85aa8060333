"""``daneshmand2021``: iterative orthogonalisation, what batch norm does over many layers done once, at the start.

In order of execution, each layer on its real input ``H = U S V^T``, ``[d, n]`` with samples as columns (of a
convolution: the patches of all positions, ``[c_in k k, n * positions]``):

    W = V' S^(-1/2) U^T / ||S^(1/2)||_F,

V' the polar factor of the first d_out rows of V. Where d_out is at least H's rank, the orthogonality gap

    V(H) = || H^T H / ||H||_F^2 - I_n / n ||_F

of the pre-activation W H is at most that of H (the squared singular values go from ``s_i^2 / sum s^2`` to
``s_i / sum s``), and ``||W H||_F = 1``. A ReLU raises the gap again. On a weight-normalised layer v = W and g is its
row norms; biases are zero.

The first layer and the head are Xavier's, uniform with gain sqrt(2), as in the published code. A convolution uses the
d_out leading directions of U, as there. What the paper leaves open: the last layer of a residual branch is W times
``1 / sqrt(B_k)``, and in a network with branches the first layer is scaled to ``||W H||_F = 1`` too, so that stream and
branches have one unit. In a network with batch norms, whose outputs have mean square 1, these outputs have it as well,
instead of a Frobenius norm of 1 that would be lost beside them. Layers that share an input take V's rows one after the
other, so that they differ.

Samples: n should be at least d and the rank at least d_out: 3 times the width for an MLP. With less, directions without
data (singular values below ``eps max(d, n) s_max``) are left out, the pseudo-inverse, and with n < d_out V' is drawn
from the Haar distribution; the report says so.

Source: Daneshmand, Joudaki & Bach 2021, "Batch Normalization Orthogonalizes Representations in Deep Random Networks",
eq. 6, appendices E and G.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from wnfused._modules import quoted
from wnfused._numbers import number
from wnfused.init.glorot2010 import draw_xavier_
from wnfused.init.isotropic import Representation, isotropic_weight, patches, represent, represent_columns
from wnfused.init.registry import Context, scheme
from wnfused.init.report import Entry, describe_unit
from wnfused.init.units import Unit
from wnfused.init.walk import walk
from wnfused.nn import WNResidualStage

# Patches are made for so many elements at a time.
_PATCHES = 1 << 24


@scheme("daneshmand2021", needs_sample=True)
def daneshmand2021(
    context: Context, slice: str = "polar", exponent: float = 0.5, layers: str = "all",
    deficient: str = "pseudo_inverse",
) -> list[Entry]:  # fmt: skip
    """``slice``: ``"polar"``, or ``"raw"`` for V' as the rows of V themselves; ``exponent``: 1/2 (paper) or 1 (its
    code for MLPs); ``layers``: ``"all"``, or ``"square"`` for those with as many outputs as inputs alone (its code for
    convolutions), the others Xavier's; ``deficient``: ``"pseudo_inverse"`` or ``"error"`` where the rank is too
    small."""
    for name, value, known in (
        ("slice", slice, ("polar", "raw")),
        ("layers", layers, ("all", "square")),
        ("deficient", deficient, ("pseudo_inverse", "error")),
    ):
        if value not in known:
            raise ValueError(f"{name}: unknown {value!r}; use {known[0]!r} or {known[1]!r}")
    number(exponent=exponent)
    if exponent not in (0.5, 1.0):
        raise ValueError(f"exponent: {exponent} must be 0.5 or 1")
    for unit in context.units:
        draw_xavier_(unit, context, math.sqrt(2), "uniform")
    residual = context.num_branches > 0
    batch_normalised = any(isinstance(module, _BatchNorm) for module in context.model.modules())
    taken = _RowsTaken()
    visited = 0

    def visit(unit: Unit, x: Tensor) -> Entry:
        nonlocal visited
        visited += 1
        words = describe_unit(unit)
        c_in, c_out = unit.channels
        if visited == 1 or unit.role.head or (layers == "square" and c_in != c_out):
            if visited == 1 and residual:
                _scale_output_(unit, x, batch_normalised)
            return Entry(unit.name, f"{words}; Xavier", None, unit.mean_gain())
        if unit.run is not None:
            context.notes.append(f"{unit.shown}: computes by a forward of its own: stays Xavier's")
            return Entry(unit.name, f"{words}; Xavier", None, unit.mean_gain())
        start = taken.start(unit, x)

        def solve(inputs: list[Tensor]) -> list[_Solution]:
            representation = representation_of(unit, inputs, start)
            weights = isotropic_weight(
                representation, c_out, kind=slice, exponent=exponent,
                directions=c_out if unit.kernel else None, generator=context.generator,
            )  # fmt: skip
            d, rows = representation.u.shape[-2], representation.v.shape[-2]
            ranks = representation.rank.flatten(1).amin(1).tolist()
            return [_Solution(w, rank, min(c_out, d), rows < c_out) for w, rank in zip(weights, ranks, strict=True)]

        solution = context.together(x, solve)
        if not _check_rank(context, unit, solution, deficient):
            return Entry(unit.name, f"{words}; Xavier", None, unit.mean_gain())
        unit.set_weight_(as_weight(unit, solution.weight).to(unit.v.dtype))
        _scale_output_(unit, x, batch_normalised)
        if unit.role.closes_branch:
            unit.scale_(1 / math.sqrt(unit.role.num_blocks))
        return Entry(unit.name, f"{words}; rank {solution.rank}", None, unit.mean_gain())

    return walk(context, visit)


def _scale_output_(unit: Unit, x: Tensor, batch_normalised: bool) -> None:
    """``||W H||_F = 1`` over all groups; among batch norms a mean square of 1."""
    y = unit.pre_activation(x).double()
    size = y.square().mean().sqrt().item() if batch_normalised else y.norm().item()
    if size > 0:
        unit.scale_(1 / size)


class _Solution(NamedTuple):
    """One layer's ``W [groups, d_out, d]``; the smallest rank of its groups' inputs, and how much is enough; whether
    V' was drawn for want of samples."""

    weight: Tensor
    rank: int
    enough: int
    drawn: bool


class _RowsTaken:
    """Which rows of V the layers that share an input have taken already."""

    def __init__(self) -> None:
        self._input: Tensor | None = None  # held, so that no later one can have its identity
        self._version = 0
        self._next: dict[Any, int] = {}

    def start(self, unit: Unit, x: Tensor) -> int:
        """Behind those of the layers that saw the same tensor through the same geometry."""
        if x is not self._input or x._version != self._version:
            self._input, self._version, self._next = x, x._version, {}
        how = (unit.kernel, unit.groups, *_stride_and_padding(unit))
        start = self._next.get(how, 0)
        self._next[how] = start + unit.channels[1]
        return start


def _check_rank(context: Context, unit: Unit, solution: _Solution, deficient: str) -> bool:
    """Whether there is anything to go by. Notes, or raises, where there are fewer directions than outputs."""
    if solution.rank >= solution.enough:
        return True
    shortage = f"the sample gives its input rank {solution.rank} of {solution.enough}"
    if deficient == "error":
        raise ValueError(f"sample: {quoted(unit.name)}: {shortage}; use a larger one, or deficient='pseudo_inverse'")
    if solution.rank == 0:
        context.notes.append(f"{unit.shown}: {shortage}: stays Xavier's")
        return False
    drawn = ", V' drawn at random" if solution.drawn else ""
    context.notes.append(f"{unit.shown}: {shortage}: pseudo-inverse{drawn}")
    return True


# ------------------------------------------------------------------------------------------------ representations


def representation_of(unit: Unit, inputs: list[Tensor], start: int = 0) -> Representation:
    """Of inputs as the weight of a layer like ``unit`` sees them, ``[inputs, groups, d, n]``, all of one shape; with
    V's rows from ``start`` on."""
    x, outputs = inputs[0], unit.channels[1]
    if not unit.kernel:
        h = torch.stack([x.reshape(-1, x.shape[-1]).T for x in inputs]).unsqueeze(1)
        return represent(h, _rows(start, outputs, h.shape[-1]))

    def stacked(parts: Sequence[Tensor]) -> Tensor:
        return torch.stack([patches_of(unit, part) for part in parts])

    d, positions = patches_of(unit, x[:1]).shape[-2:]
    n = positions * len(x)
    if n < d or x.dtype == torch.float64:
        return represent(stacked(inputs), _rows(start, outputs, n))
    columns = max(_PATCHES // (d * unit.groups * len(inputs)), start + outputs)
    parts = zip(*(x.split(-(-columns // positions)) for x in inputs), strict=True)
    return represent_columns((stacked(part) for part in parts), _rows(start, outputs, n))


def _rows(start: int, count: int, n: int) -> slice:
    """``count`` rows from ``start`` on; from the beginning where the samples end before."""
    return slice(start, start + count) if start + count <= n else slice(0, count)


def patches_of(unit: Unit, x: Tensor) -> Tensor:
    """``[groups, d, n * positions]`` with ``d = c_in / groups * prod(kernel)``."""
    module: Any = unit.module
    spatial = len(unit.kernel)
    ones = (1,) * spatial
    if isinstance(module, WNResidualStage):
        return patches(F.pad(x, [1] * 4), unit.kernel, ones, ones, 1)
    if not unit.transposed:
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        sizes = module._reversed_padding_repeated_twice
        if mode == "constant" and not isinstance(module.padding, str):  # which is what counts where it was set anew
            sizes = [size for size in reversed(unit.option("padding")) for _ in range(2)]
        x = F.pad(x, sizes, mode=mode)
        return patches(x, unit.kernel, unit.option("stride"), unit.option("dilation"), module.groups)
    # A convolution of stride 1 over the input with zeros between its entries, its kernel flipped.
    stride, dilation, padding, behind = map(unit.option, ("stride", "dilation", "padding", "output_padding"))
    spread = x.new_zeros(*x.shape[:2], *(s * (n - 1) + 1 for s, n in zip(stride, x.shape[2:], strict=True)))
    entries = spread
    for i, step in enumerate(stride):
        entries = entries.movedim(2 + i, 0)[::step].movedim(0, 2 + i)
    entries.copy_(x)
    border: list[int] = []
    for i in reversed(range(spatial)):
        reach = dilation[i] * (unit.kernel[i] - 1) - padding[i]
        border += [reach, reach + behind[i]]
    return patches(F.pad(spread, border), unit.kernel, ones, dilation, module.groups)


def _stride_and_padding(unit: Unit) -> tuple[Any, ...]:
    """Of a convolution; nothing of other layers."""
    if not isinstance(unit.module, _ConvNd):
        return ()
    padding = unit.module.padding
    return unit.option("stride"), padding if isinstance(padding, str) else unit.option("padding")


def as_weight(unit: Unit, matrix: Tensor) -> Tensor:
    """``[groups, d_out, d]``, which multiplies ``patches_of``, in the layout of the layer's weight."""
    c_in, c_out = unit.channels
    kernels = matrix.reshape(unit.groups, c_out, c_in, *unit.kernel)
    if unit.transposed:
        spatial = list(range(3, 3 + len(unit.kernel)))
        kernels = kernels.transpose(1, 2).flip(spatial)
    return kernels.reshape(unit.shape)
