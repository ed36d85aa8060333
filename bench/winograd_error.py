"""Rounding errors of Winograd's F(MxM, 3x3) for several sets of points, beside those of the direct sum.

    python -m bench.winograd_error [--channels 16 64]

One tile of a 3x3 convolution of ReLU activations with weight-normalised filters, everything in float32 in the order
the kernels of ``csrc/cpu/stage_winograd.h`` use, against float64. The points decide: F(4x4) with the textbook's
0, 1, -1, 2, -2 loses five to six times what a direct sum does, with 0, 5/8, -5/8, 3/2, -3/2 two to three times.
"""

from __future__ import annotations

import argparse
from fractions import Fraction

import torch

POINTS = {
    "F(2x2) 0 +-1": (2, "0 1 -1"),
    "F(4x4) 0 +-1 +-2": (4, "0 1 -1 2 -2"),
    "F(4x4) 0 +-1 +-1/2": (4, "0 1 -1 1/2 -1/2"),
    "F(4x4) 0 +-1 1/2 -2": (4, "0 1 -1 1/2 -2"),
    "F(4x4) 0 +-5/8 +-3/2": (4, "0 5/8 -5/8 3/2 -3/2"),
}
OUTPUTS, TILES = 16, 400


def times(polynomial: list[Fraction], root: Fraction) -> list[Fraction]:
    """``polynomial * (x - root)``, lowest coefficient first."""
    shifted = [Fraction(0), *polynomial]
    return [a - root * b for a, b in zip(shifted, [*polynomial, Fraction(0)], strict=True)]


def matrices(tile: int, points: list[Fraction]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``A', G, B'`` of F(tile, 3): ``y = A' (G g * B' d)``, by evaluation at the points and at infinity."""
    size = tile + 2
    outputs = [[point**i for point in points] + [Fraction(i == tile - 1)] for i in range(tile)]
    filters, inputs = [], []
    for point in points:
        others = [p for p in points if p != point]
        scale, polynomial = Fraction(1), [Fraction(1)]
        for other in others:
            scale *= point - other
            polynomial = times(polynomial, other)
        filters.append([point**i / scale for i in range(3)])
        inputs.append(polynomial + [Fraction(0)] * (size - len(polynomial)))
    last = [Fraction(1)]
    for point in points:
        last = times(last, point)
    filters.append([Fraction(0), Fraction(0), Fraction(1)])
    inputs.append(last)
    as_tensor = [
        torch.tensor([[float(e) for e in row] for row in m], dtype=torch.float64) for m in (outputs, filters, inputs)
    ]
    return as_tensor[0], as_tensor[1], as_tensor[2]


def transform(matrix: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``matrix x matrix'`` over the last two dimensions, term by term in x's precision."""
    for dim in (-2, -1):
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


def errors(tile: int, points: list[Fraction], channels: int, generator: torch.Generator) -> tuple[float, float]:
    """Root mean square errors relative to the output's: ``(winograd, direct)``."""
    outputs, filters, inputs = matrices(tile, points)
    size = tile + 2
    d = torch.randn(TILES, channels, size, size, generator=generator).relu()
    g = torch.randn(OUTPUTS, channels, 3, 3, generator=generator)
    g = g * (2**0.5 / g.flatten(1).norm(dim=1))[:, None, None, None]
    exact = torch.zeros(TILES, OUTPUTS, tile, tile, dtype=torch.float64)
    direct = torch.zeros(TILES, OUTPUTS, tile, tile)
    product = torch.zeros(TILES, OUTPUTS, size, size)
    weights, patches = transform(filters, g), transform(inputs, d)
    for c in range(channels):
        for k in range(9):
            y, x = divmod(k, 3)
            pixels, tap = d[:, None, c, y : y + tile, x : x + tile], g[None, :, c, y, x, None, None]
            exact += pixels.double() * tap.double()
            direct += pixels * tap
        product += patches[:, None, c] * weights[None, :, c]

    def relative(result: torch.Tensor) -> float:
        return float((result.double() - exact).norm() / exact.norm())

    return relative(transform(outputs, product)), relative(direct)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channels", type=int, nargs="+", default=[16, 64])
    generator = torch.Generator().manual_seed(0)
    for channels in parser.parse_args().channels:
        for name, (tile, points) in POINTS.items():
            winograd, direct = errors(tile, [Fraction(p) for p in points.split()], channels, generator)
            ratio = winograd / direct
            print(f"{channels:4d} channels  {name:22s}  {winograd:.1e}  direct {direct:.1e}  ratio {ratio:.1f}")


if __name__ == "__main__":
    main()
