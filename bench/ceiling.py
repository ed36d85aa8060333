"""The machine's peak, measured in every round beside the peers, so that a slow minute slows both.

``torch.ops.wnfused_native.cpu_peak_flops(bool bfloat16) -> float`` is the rate of a loop that only multiplies and adds
in registers, on all threads, in FLOP/s. Where the library was not built, the practical ceiling stands in: the rate of a
large matrix product of the vendor's library through ``torch.mm``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from wnfused.backends import native

# 2 N^3 = 2.1 GFLOP: long enough to reach the library's full rate, short enough to repeat every round.
SIZE = 1024


@dataclass(frozen=True)
class Ceiling:
    """``rate()`` measures the FLOP/s once; ``name`` completes "share of ...", ``short`` is for a column."""

    name: str
    short: str
    rate: Callable[[], float]


def ceiling(kind: str) -> Ceiling:
    """The ceiling of the CPU for products in ``"fp32"`` or ``"bf16"``."""
    bfloat16 = kind == "bf16"
    if native.unavailable() is None:
        op = torch.ops.wnfused_native.cpu_peak_flops
        return Ceiling(f"the {kind} peak of a register-only loop", f"{kind} peak", lambda: float(op(bfloat16)))
    library = "oneDNN bf16 gemm" if bfloat16 else "MKL sgemm"
    return Ceiling(
        f"{library} (torch.mm of {SIZE}x{SIZE})", library, _product_rate(torch.bfloat16 if bfloat16 else torch.float32)
    )


def _product_rate(dtype: torch.dtype) -> Callable[[], float]:
    a, b, c = (torch.ones(SIZE, SIZE, dtype=dtype) for _ in range(3))
    torch.mm(a, b, out=c)

    def rate() -> float:
        start = time.perf_counter()
        torch.mm(a, b, out=c)
        return 2 * SIZE**3 / (time.perf_counter() - start)

    return rate
