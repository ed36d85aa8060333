"""Rounding errors of Winograd's F(m, r) for several sets of points, beside those of the direct sum.

    python -m bench.winograd_error [--channels 16 64]

One tile of a convolution of ReLU activations with weight-normalised filters, everything in float32 in the order the
kernels use, against float64: F(MxM, 3x3) of ``csrc/cpu/conv3x3/winograd.h``, and over one dim F(4, r) of
``csrc/cpu/pieces/transform.h``. The points decide: F(4x4, 3x3) with the textbook's 0, 1, -1, 2, -2 loses five to six
times what a direct sum does, with 0, 5/8, -5/8, 3/2, -3/2 two to three times.
"""

from __future__ import annotations

import argparse
import itertools
from fractions import Fraction
from typing import NamedTuple

import torch


class Method(NamedTuple):
    """F(tile, taps) over one dim or two, by evaluation at ``points`` and at infinity."""

    dims: int
    tile: int
    taps: int
    points: str

    def __str__(self) -> str:
        return f"F({self.tile}, {self.taps}) over {self.dims}: {self.points}"


METHODS = (
    Method(2, 2, 3, "0 1 -1"),
    Method(2, 4, 3, "0 1 -1 2 -2"),
    Method(2, 4, 3, "0 1 -1 1/2 -1/2"),
    Method(2, 4, 3, "0 1 -1 1/2 -2"),
    Method(2, 4, 3, "0 5/8 -5/8 3/2 -3/2"),
    Method(1, 4, 3, "0 5/8 -5/8 3/2 -3/2"),
    Method(1, 4, 4, "0 1 -1 1/2 -1/2 2"),
    Method(1, 4, 4, "1/4 -1/4 7/8 -7/8 2 -2"),
    Method(1, 4, 5, "0 1/2 -1/2 1 -1 2 -2"),
    Method(1, 4, 5, "0 1/2 -1/2 7/8 -7/8 15/8 -15/8"),
    Method(1, 4, 5, "0 1/4 -1/4 7/8 -7/8 2 -2"),
)
OUTPUTS, TILES = 16, 400


def times(polynomial: list[Fraction], root: Fraction) -> list[Fraction]:
    """``polynomial * (x - root)``, lowest coefficient first."""
    shifted = [Fraction(0), *polynomial]
    return [a - root * b for a, b in zip(shifted, [*polynomial, Fraction(0)], strict=True)]


def matrices(method: Method) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``A', G, B'`` of F(tile, taps): ``y = A' (G g * B' d)``."""
    tile, taps = method.tile, method.taps
    points, size = [Fraction(point) for point in method.points.split()], tile + taps - 1
    outputs = [[point**i for point in points] + [Fraction(i == tile - 1)] for i in range(tile)]
    filters, inputs = [], []
    for point in points:
        others = [p for p in points if p != point]
        scale, polynomial = Fraction(1), [Fraction(1)]
        for other in others:
            scale *= point - other
            polynomial = times(polynomial, other)
        filters.append([point**i / scale for i in range(taps)])
        inputs.append(polynomial + [Fraction(0)] * (size - len(polynomial)))
    last = [Fraction(1)]
    for point in points:
        last = times(last, point)
    filters.append([Fraction(i == taps - 1) for i in range(taps)])
    inputs.append(last)
    as_tensor = [
        torch.tensor([[float(e) for e in row] for row in m], dtype=torch.float64) for m in (outputs, filters, inputs)
    ]
    return as_tensor[0], as_tensor[1], as_tensor[2]


def transform(matrix: torch.Tensor, x: torch.Tensor, dims: int) -> torch.Tensor:
    """``matrix`` times the last dim of x, or ``matrix x matrix'`` of the last two, term by term in x's precision."""
    for dim in range(-dims, 0):
        terms = x.unbind(dim)
        rows = []
        for row in matrix:
            total = torch.zeros_like(terms[0])
            for coefficient, term in zip(row.tolist(), terms, strict=True):
                if coefficient:
                    total = total + term * coefficient
            rows.append(total)
        x = torch.stack(rows, dim)
    return x


def errors(method: Method, channels: int, generator: torch.Generator) -> tuple[float, float]:
    """Root mean square errors relative to the output's: ``(winograd, direct)``."""
    outputs, filters, inputs = matrices(method)
    dims, tile, taps = method.dims, method.tile, method.taps
    size, patch, filter_size = [tile] * dims, [tile + taps - 1] * dims, [taps] * dims
    d = torch.randn(TILES, channels, *patch, generator=generator).relu()
    g = torch.randn(OUTPUTS, channels, *filter_size, generator=generator)
    g = g * (2**0.5 / g.flatten(1).norm(dim=1)).reshape(-1, 1, *[1] * dims)
    exact = torch.zeros(TILES, OUTPUTS, *size, dtype=torch.float64)
    direct = torch.zeros(TILES, OUTPUTS, *size)
    product = torch.zeros(TILES, OUTPUTS, *patch)
    weights, patches = transform(filters, g, dims), transform(inputs, d, dims)
    for c in range(channels):
        for at in itertools.product(range(taps), repeat=dims):
            window = tuple(slice(i, i + tile) for i in at)
            pixels = d[(slice(None), None, c, *window)]
            tap = g[(slice(None), c, *at)].reshape(1, -1, *[1] * dims)
            exact += pixels.double() * tap.double()
            direct += pixels * tap
        product += patches[:, None, c] * weights[None, :, c]

    def relative(result: torch.Tensor) -> float:
        return float((result.double() - exact).norm() / exact.norm())

    return relative(transform(outputs, product, dims)), relative(direct)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channels", type=int, nargs="+", default=[16, 64])
    generator = torch.Generator().manual_seed(0)
    for channels in parser.parse_args().channels:
        for method in METHODS:
            winograd, direct = errors(method, channels, generator)
            ratio = winograd / direct
            print(f"{channels:4d} channels  {method!s:52s}  {winograd:.1e}  direct {direct:.1e}  ratio {ratio:.1f}")


if __name__ == "__main__":
    main()
