"""The one table of tiles: which configuration a kernel runs in, by the kernel, the operands and the sizes.

Nothing is timed at run time and nothing depends on the data, so the same call gives the same bits in every run. A tile
stands here only if the offline gate has compiled it for every architecture without a spill and within sm_89's 99 KB of
shared memory, the smallest of the four. Which tile is fastest is modelled, not measured: small tiles where the rows of
the output are few, so that many multiprocessors share the weight; deep pipelines where a walk is long.
``wnfused.backends.triton.search`` measures, where asked to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from wnfused.backends.triton import search

T = TypeVar("T")


@dataclass(frozen=True)
class Tile:
    """BM rows (pixels, samples) x BN columns x BK steps of the walk; of a weight gradient, BN x BK is the output.

    Args:
        warps: warps to a program.
        stages: depth of the software pipeline.
    """

    m: int
    n: int
    k: int
    warps: int = 4
    stages: int = 3

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}, {self.warps} warps, {self.stages} stages"

    @property
    def meta(self) -> dict[str, int]:
        """The keywords of a launch."""
        return {"BM": self.m, "BN": self.n, "BK": self.k, "num_warps": self.warps, "num_stages": self.stages}


HALF, TF32, IEEE = "half", "tf32", "ieee"
ELEMENTS = (HALF, TF32, IEEE)
"""What a product multiplies: bfloat16 or float16; float32 rounded to TF32; float32 on the ordinary multipliers."""

Fits = Callable[..., bool]


def _few(m: int, n: int) -> bool:
    return m <= 32


def _some(m: int, n: int) -> bool:
    return m <= 256


def _thin(m: int, n: int) -> bool:
    return n <= 32


def _any(m: int, n: int) -> bool:
    return True


TILES: dict[tuple[str, str], tuple[tuple[Fits, Tile], ...]] = {
    # y [m, n]: few rows leave only the columns to spread over the chip.
    ("linear.forward", HALF): (
        (_few, Tile(16, 32, 128, 4, 4)),
        (_some, Tile(64, 32, 64, 4, 4)),
        (_any, Tile(128, 64, 64, 8, 3)),
    ),
    ("linear.forward", TF32): (
        (_few, Tile(16, 32, 64, 4, 4)),
        (_some, Tile(64, 32, 32, 4, 4)),
        (_any, Tile(128, 64, 32, 8, 3)),
    ),
    ("linear.forward", IEEE): ((_few, Tile(16, 32, 32, 4, 2)), (_any, Tile(64, 64, 16, 8, 2))),
    # dx [m, n]
    ("linear.input_gradient", HALF): ((_few, Tile(16, 32, 64, 4, 3)), (_any, Tile(64, 64, 64, 8, 3))),
    ("linear.input_gradient", TF32): ((_few, Tile(16, 64, 16, 4, 5)), (_any, Tile(64, 64, 32, 4, 3))),
    ("linear.input_gradient", IEEE): ((_few, Tile(16, 32, 32, 4, 2)), (_any, Tile(32, 64, 16, 4, 2))),
    # dw: m is the length of the sum, the tile of the output n x k.
    ("linear.weight_gradient", HALF): ((_any, Tile(32, 64, 64, 4, 3)),),
    ("linear.weight_gradient", TF32): ((_any, Tile(32, 64, 64, 4, 3)),),
    ("linear.weight_gradient", IEEE): ((_any, Tile(16, 32, 64, 4, 2)),),
    ("linear.weight_gradient_recomputed", HALF): ((_any, Tile(16, 16, 128, 4, 3)),),
    ("linear.weight_gradient_recomputed", TF32): ((_any, Tile(16, 16, 128, 4, 3)),),
    ("linear.weight_gradient_recomputed", IEEE): ((_any, Tile(16, 16, 32, 4, 2)),),
    # Pixels are many, filters few: tall tiles, and no wider than the filters.
    ("conv.forward", HALF): ((_thin, Tile(128, 32, 32, 4, 3)), (_any, Tile(64, 64, 32, 4, 3))),
    ("conv.forward", TF32): ((_thin, Tile(128, 32, 32, 4, 3)), (_any, Tile(64, 64, 32, 4, 3))),
    ("conv.forward", IEEE): ((_any, Tile(64, 32, 16, 4, 2)),),
    ("conv.input_gradient", HALF): ((_thin, Tile(128, 32, 32, 4, 3)), (_any, Tile(64, 64, 32, 4, 3))),
    # By 4 warps the one of a stage's second convolutions spills on sm_100.
    ("conv.input_gradient", TF32): ((_thin, Tile(64, 32, 32, 4, 3)), (_any, Tile(64, 64, 16, 8, 5))),
    ("conv.input_gradient", IEEE): ((_any, Tile(32, 32, 16, 4, 2)),),
    ("conv.weight_gradient", HALF): ((_thin, Tile(64, 32, 32, 4, 3)), (_any, Tile(32, 64, 32, 4, 3))),
    ("conv.weight_gradient", TF32): ((_thin, Tile(32, 32, 64, 4, 3)), (_any, Tile(32, 64, 32, 8, 3))),
    ("conv.weight_gradient", IEEE): ((_any, Tile(16, 32, 64, 4, 2)),),
}
"""For each kernel and kind of operand the first row that fits ``m`` rows and ``n`` columns of its output."""

ROWS_TILES = ((32, 64), (16, 256), (4, 512))
"""Rows, and entries at a time, of a program that walks whole rows: short rows side by side, so that no lane is idle."""


def rows_tile(length: int) -> tuple[int, int]:
    """The first that holds a row of this many entries, or the last, which walks it."""
    return next((tile for tile in ROWS_TILES if length <= tile[1]), ROWS_TILES[-1])


SUM_TILE = (4, 128, 8)
"""Rows and entries of a program that adds up a split gradient, and how many small partial sums it takes at a time."""

_forced: Tile | None = None


def tiles(kernel: str, element: str) -> list[Tile]:
    """Every configuration of a kernel, for the gate and for a search."""
    return [tile for _, tile in TILES[kernel, element]]


@contextlib.contextmanager
def forced(tile: Tile | None) -> Iterator[None]:
    """Within this context every kernel runs in one tile: for the gate, which compiles them all, and for tests."""
    global _forced
    before, _forced = _forced, tile
    try:
        yield
    finally:
        _forced = before


def run(
    kernel: str, element: str, sizes: tuple[int, int, int], operands: Sequence[Tensor | None],
    constants: Mapping[str, Any], launch: Callable[[Tile], T],
) -> T:  # fmt: skip
    """Launches a kernel in its configuration.

    Args:
        sizes: ``m, n, k`` of its product.
        operands, constants: of the launch, but for the tile's own: they tell a search this launch from others of these
            sizes. The first operand is there.
    """
    if _forced is not None:
        return launch(_forced)
    first = operands[0]
    if search.path() is not None and first is not None and first.is_cuda:
        name = _name(kernel, element, sizes, operands, constants)
        found = search.best(name, first.device, tiles(kernel, element), launch)
        if found is not None:
            return launch(found)
    return launch(next(tile for fits, tile in TILES[kernel, element] if fits(*sizes[:2])))


def _name(
    kernel: str, element: str, sizes: Sequence[int], operands: Sequence[Tensor | None], constants: Mapping[str, Any]
) -> str:
    """Of a launch, by all that its speed depends on: 3x3 taps of 16 channels are as long a walk as one of 144."""
    given = ["None" if t is None else f"{t.dtype} {list(t.shape)} {list(t.stride())}" for t in operands]
    chosen = [f"{name}={value}" for name, value in constants.items()]
    return f"{kernel} {element} {'x'.join(map(str, sizes))} of {'; '.join(given)}; {', '.join(chosen)}"


def splits(tiles_of_output: int, length: int, step: int) -> int:
    """How many parts a sum of ``length`` is split into: enough programs for two to each of 132 multiprocessors, each
    with four steps at least. The count of multiprocessors is fixed, so that results do not depend on the chip."""
    return max(1, min(-(-264 // tiles_of_output), length // (4 * step), 64))
