"""What convolutions over one, two and three dims share: extents given as one number or as one a dim, and docstrings."""

from __future__ import annotations

from collections.abc import Sequence

import torch

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
