"""Random numbers that are a function of *where* they are used: ``(seed, epoch, index, stream)``.

A generator that is carried along makes the data of epoch 7 depend on everything drawn before it, on the number of
processes and on the batch size. A hash of the place does not: a resumed run, or the same run on two processes, draws
the same numbers. The hash is SplitMix64 (Steele, Lea & Flood, OOPSLA 2014), computed on whole tensors of indices;
int64 arithmetic wraps modulo 2^64, as the algorithm wants.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


class Stream(IntEnum):
    """One independent stream of numbers for each use, so that switching one use on leaves the others alone."""

    ORDER = 0
    CROP_ROW = 1
    CROP_COLUMN = 2
    FLIP = 3
    CUTOUT_ROW = 4
    CUTOUT_COLUMN = 5
    MIXUP_PARTNER = 6
    MIXUP_SHARE = 7
    MODULES = 8


def _signed(x: int) -> int:
    """The int64 with the same 64 bits as the unsigned ``x``."""
    x &= (1 << 64) - 1
    return x - (1 << 64) if x >> 63 else x


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's ``>>`` on int64 copies the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser."""
    x = (x ^ _shift(x, 30)) * _signed(_FIRST)
    x = (x ^ _shift(x, 27)) * _signed(_SECOND)
    return x ^ _shift(x, 31)


def bits(seed: int, epoch: int, index: Tensor, stream: Stream) -> Tensor:
    """64 random bits, as int64, for every entry of ``index`` (int64, any shape)."""
    key = torch.tensor(_signed(seed), dtype=torch.int64)
    for word in (epoch, int(stream)):
        key = _mix(key + _signed(_GOLDEN * (word + 1)))
    return _mix(_mix(key + (index + 1) * _signed(_GOLDEN)))


def uniform(seed: int, epoch: int, index: Tensor, stream: Stream) -> Tensor:
    """float64 numbers in [0, 1) with 53 random bits, one for every entry of ``index``."""
    return _shift(bits(seed, epoch, index, stream), 11).double() * 2.0**-53


def below(n: int, seed: int, epoch: int, index: Tensor, stream: Stream) -> Tensor:
    """int64 numbers in ``0 ... n - 1`` (their bias, ``n / 2^53``, is nothing)."""
    return (uniform(seed, epoch, index, stream) * n).long()


def permutation(n: int, seed: int, epoch: int) -> Tensor:
    """The order in which epoch ``epoch`` visits ``n`` images, int64 ``[n]``."""
    return torch.argsort(bits(seed, epoch, torch.arange(n), Stream.ORDER), stable=True)
