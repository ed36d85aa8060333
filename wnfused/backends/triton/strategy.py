"""Which way a layer takes on the Triton backend: its fused kernels, or a scaled weight and the vendor's product.

One table for each kind of layer, read from the top: the first row that applies decides, and each row says why, by
counts of bytes and launches, and by what an H100 showed (``bench/results/gpu-h100``), times within a CUDA graph.
Launched one by one, small layers cost the host's time, which is twice as long here as in C++: plain eager calls take
the vendor's way in C++ (``dispatch.prefers_native_on_cuda``), and this table is for what the compiler traces, for
transforms, for whoever asks for this backend, and for what C++ does not take. What follows the vendor's product is
another choice, ``use_vendor_epilogues``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from wnfused._numbers import flag
from wnfused.backends import native_autograd

Way = Literal["fused", "vendor"]


@dataclass(frozen=True)
class Layer:
    """What the choice may look at.

    Args:
        samples: rows of a linear layer's input, pixels of a convolution's input.
        rows: filters or output features.
        channels: input channels or features.
        spatial: spatial dims; 0 for a linear layer.
        full: whether the product is float32 in full precision, without tensor cores.
    """

    samples: int
    rows: int
    channels: int
    dim: int | None = 0
    spatial: int = 0
    groups: int = 1
    transposed: bool = False
    full: bool = False


@dataclass(frozen=True)
class Row:
    applies: Callable[[Layer], bool]
    way: Way
    reason: str


_ALONG_ANOTHER_DIM = Row(
    lambda layer: layer.dim != 0,
    "vendor",
    "a norm that is not one number a row of the product cannot ride in it: scale the weight first",
)

_EMPTY = Row(
    lambda layer: layer.rows == 0 or layer.channels == 0,
    "vendor",
    "a product of nothing has nothing to ride in",
)

LINEAR = (
    _EMPTY,
    _ALONG_ANOTHER_DIM,
    Row(
        lambda layer: layer.full and layer.samples > 32,
        "vendor",
        "without tensor cores the product is the time from some 30 rows on (60 TFLOP/s beside 3 TB/s), and cuBLAS's "
        "sgemm the faster one: Triton's in full precision are plain multiply-adds on registers",
    ),
    Row(
        lambda layer: layer.rows * layer.channels >= 2**19,
        "vendor",
        "forward the fused kernel is as fast (1024 features, 32 samples: 11 us beside 13), but with the backward the "
        "vendor's is faster: 38 us beside 59, and with 4096 samples 120 beside 384; the C++ behind this way has "
        "kernels of its own for few samples: 7 and 23 us with 32",
    ),
    Row(
        lambda layer: layer.samples <= 512,
        "fused",
        "launches and the weight's bytes are the time: the fused kernel reads v once, with the norm beside the "
        "product; scaling first reads it twice and writes it once, in one launch more (256 features, 256 samples, "
        "tf32: forward 6 us beside 10, with the backward 29 beside 34)",
    ),
    Row(
        lambda layer: True,
        "vendor",
        "the product is the time and cuBLAS the faster product: scaling v once costs 1/M of it; the bias rides in its "
        "epilogue, and a ReLU is a pass over y",
    ),
)

CONV = (
    _EMPTY,
    _ALONG_ANOTHER_DIM,
    Row(
        lambda layer: layer.transposed or layer.groups > 1 or layer.spatial == 3,
        "vendor",
        "the implicit product here has no groups, no third dim, and normalises filters, not input channels",
    ),
    Row(
        lambda layer: layer.rows < 64 or layer.channels < 64 or layer.rows % 8 != 0 or layer.channels % 8 != 0,
        "fused",
        "thin or odd: the map's bytes are the time, so the epilogue must not be a pass of its own, and cuDNN pads "
        "channels that are no multiple of 8 (16 channels, 3x3: forward 20 us beside 31, with the backward 149 "
        "beside 136)",
    ),
    Row(
        lambda layer: True,
        "vendor",
        "wide: cuDNN's product is the time, the weight a fraction of the map, and so are the passes over the map for "
        "bias, residual and ReLU (320 channels, 3x3: forward 146 us beside 411, with the backward 491 beside 4316)",
    ),
)


_epilogues = False


def use_vendor_epilogues(on: bool) -> None:
    """Whether a ReLU rides in the vendor's product where it can, with bias and residual, in this process.

    Off unless it is called: then the ReLU is a pass of its own over what ``torch.addmm`` or ``torch.convolution`` gave,
    which saves nothing and changes nothing either. On, a linear layer without residual is cuBLASLt's product + bias +
    ReLU, whose ReLU may turn NaN into 0, where torch's keeps it and so shows a diverged network; and a 2d convolution
    of 8 k channels is cuDNN's convolution + bias (+ residual) + ReLU, which torch gives its own unwritten output as a
    summand times 0 (memory that held NaN may show) and never asks for a deterministic algorithm. Neither is faster by
    more than the pass it saves (320 channels: 455 us beside 571, launched from Python).

    Raises:
        TypeError: ``on`` is not True or False.
    """
    flag(on=on)
    global _epilogues
    _epilogues = on


def vendor_epilogues() -> bool:
    """What ``use_vendor_epilogues`` was told."""
    return _epilogues


_forced: Way | None = None


@contextlib.contextmanager
def forced(way: Way | None) -> Iterator[None]:
    """Within this context every layer that can goes one way: for tests and benchmarks of a single row."""
    global _forced
    before, _forced = _forced, way
    in_cpp = native_autograd.unavailable() is None
    small = native_autograd.use_small_linear(False) if in_cpp and way == "vendor" else None
    try:
        yield
    finally:
        _forced = before
        if small is not None:
            native_autograd.use_small_linear(small)


def leaves_the_choice() -> bool:
    """Whether neither ``forced`` nor ``use_vendor_epilogues`` asks for something else than layers take unasked."""
    return _forced is None and not _epilogues


def row(layer: Layer) -> Row:
    """The row that decides."""
    return next(row for row in (CONV if layer.spatial else LINEAR) if row.applies(layer))


def way(layer: Layer) -> Way:
    chosen = row(layer).way
    if _forced is None or not can_be_fused(layer):
        return chosen
    return _forced


def can_be_fused(layer: Layer) -> bool:
    """Whether the fused kernels take it at all."""
    whole = layer.rows > 0 and layer.channels > 0
    return whole and layer.dim == 0 and not layer.transposed and layer.groups == 1 and layer.spatial < 3
