"""What convolutions over one, two and three dims share: extents given as one number or as one a dim, and docstrings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wnfused._numbers import plain_int

Extent = int | Sequence[int]


def extents(name: str, value: Extent, spatial: int, least: int | None, exact: bool = False) -> tuple[int, ...]:
    """One number a spatial dim, each at least ``least``.

    Args:
        exact: a single number in a list does not stand for all dims; torch makes a kernel of fewer dims of it.
    """
    plain = plain_int(value)
    single = isinstance(plain, (int, torch.SymInt))
    try:
        numbers = [plain] if single else [plain_int(n) for n in plain]
    except TypeError:  # nothing to iterate over
        numbers, single = [plain], True
    if len(numbers) == 1 and (single or not exact):
        numbers *= spatial
    fit = [type(n) is not bool and isinstance(n, (int, torch.SymInt)) for n in numbers]
    if len(numbers) != spatial or not all(fit) or (least is not None and any(n < least for n in numbers)):
        bound = "" if least is None else f", each at least {least}"
        raise ValueError(f"{name}: {value!r} must be an int or {spatial} ints{bound}")
    # Reach is a product of two, and must fit 64 bits; torch lets it overflow. Of a symbol that would be a guard.
    if any(isinstance(n, int) and abs(n) >= 2**31 for n in numbers):
        raise ValueError(f"{name}: {value!r} must be below 2**31")
    return tuple(numbers)


def checked_padding(
    value: Extent | str, spatial: int, strides: Sequence[int], transposed: bool, least: int | None = 0
) -> tuple[int, ...] | str:
    """Numbers, one a spatial dim; of a convolution that is not transposed "same" and "valid", too."""
    if not isinstance(value, str):
        return extents("padding", value, spatial, least)
    if transposed:
        raise ValueError(f"padding: {value!r} must be an int or {spatial} ints for a transposed convolution")
    if value not in ("same", "valid"):
        raise ValueError(f"padding: {value!r} must be 'same', 'valid' or ints")
    if value == "same" and any(stride != 1 for stride in strides):
        raise ValueError(f"padding: 'same' needs stride 1, got stride {list(strides)}")
    return value


def zeros_around(padding: str, kernel: Sequence[int], dilation: Sequence[int]) -> tuple[list[int], list[int]]:
    """What "same" and "valid" come to, dim by dim: zeros on both sides, and more of them behind, as torch has it."""
    totals = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, kernel, strict=True)]
    return [total // 2 for total in totals], [total % 2 for total in totals]


def padded_behind(x: Tensor, behind: Sequence[int]) -> Tensor:
    """``x`` with so many zeros behind it, dim by dim."""
    return torch.nn.functional.pad(x, [n for more in reversed(behind) for n in (0, more)]) if any(behind) else x


def text_in_dims(spatial: int, text: str) -> str:
    """A docstring of two spatial dims, for another number of them."""
    sizes, ones = "DHW"[-spatial:], ", 1" * (spatial + 1)
    if spatial == 1:
        text = text.replace(" channels_last (_3d) is kept.", "")
    for in_two, here in (
        ("H, W", ", ".join(sizes)),
        ("H', W'", ", ".join(f"{size}'" for size in sizes)),
        ("k_h, k_w", ", ".join(f"k_{size.lower()}" for size in sizes)),
        (", 1, 1, 1]", f"{ones}]"),
        ("2d", f"{spatial}d"),
    ):
        text = text.replace(in_two, here)
    return text
