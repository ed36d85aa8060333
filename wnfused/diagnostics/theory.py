"""Closed forms of Arpit, Campos & Bengio (2019) for the norms in networks at their start.

For a layer ``v = relu(sqrt(2n/m) R u)`` whose rows ``R [m, n]`` have norm 1 and isotropic directions,
``E ||v||^2 = K_n ||u||^2`` with ``K_n = 1`` (theorem 1). ``norms`` puts them together for a whole network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from wnfused._numbers import flag, plain_int, positive
from wnfused.diagnostics.arguments import floats


def layer_constant(n: int) -> float:
    """``K_n`` of theorem 1 from its printed form, ``2 S_{n-1} / S_n  P_n`` with ``S_n`` the area of the n-sphere:

    ``P = 2/3 * 4/5 ... (n-2)/(n-1)`` for even n, ``1/2 * 3/4 ... (n-2)/(n-1) * pi/2`` for odd n. It is 1 for every
    ``n > 1``.

    Raises:
        ValueError: for n below 2.
    """
    if not isinstance(n := plain_int(n), int) or n < 2:
        raise ValueError(f"n: {n!r} must be an int of at least 2")
    log_area = [math.log(2) + (k + 1) / 2 * math.log(math.pi) - math.lgamma((k + 1) / 2) for k in (n - 1, n)]
    first = 2 if n % 2 == 0 else 1
    product = sum(math.log(k / (k + 1)) for k in range(first, n - 1, 2))
    return 2 * math.exp(log_area[0] - log_area[1] + product + (0 if n % 2 == 0 else math.log(math.pi / 2)))


def stage_growth(num_blocks: int) -> float:
    """``(1 + 1/B)^(B/2)``, by which a stage of B blocks multiplies norms, forward and backward (theorems 3, 4).

    Raises:
        ValueError: ``num_blocks`` is no int of at least 1.
    """
    positive(num_blocks=num_blocks)
    return math.exp(num_blocks / 2 * math.log1p(1 / num_blocks))


STAGE_BAND = (math.sqrt(2), math.sqrt(math.e))
"""What ``stage_growth`` is for one block, and its limit for infinitely many."""


def mlp_growth(widths: Sequence[int], *, proposed: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Root-mean-square ``||h^l|| / ||h^0||`` and ``||dl/da^l|| / ||dl/da^L||``, l = 0 ... L, for layers with a ReLU.

    Args:
        widths: ``n_0 ... n_L``.
        proposed: the gain ``sqrt(2 n_{l-1} / n_l)``, under which the first is 1 and the square of the second
            ``n_l / n_L``; False: g = 1, where a layer multiplies the squares by ``n_l / (2 n_{l-1})`` forward and 1/2
            backward.

    Returns:
        Both as ``[L + 1]``.

    Raises:
        TypeError: ``widths`` are no numbers, or ``proposed`` is neither True nor False.
        ValueError: fewer than two widths, or one that is not finite and at least 1.
    """
    flag(proposed=proposed)
    n = floats("widths", widths)
    if n.ndim != 1 or len(n) < 2 or not (np.isfinite(n) & (n >= 1)).all():
        raise ValueError(f"widths: {widths} must be at least two numbers of units, each finite and at least 1")
    if proposed:
        return np.ones(len(n)), np.sqrt(n / n[-1])
    layers = np.arange(len(n))
    return np.sqrt(n / n[0] * 0.5**layers), np.sqrt(0.5 ** (layers[-1] - layers))


def resnet_growth(num_blocks: int, *, proposed: bool = True) -> np.ndarray:
    """Root-mean-square ``||h^b|| / ||h^0||``, b = 0 ... B, of a stage, and of its gradients from the end.

    A block multiplies the squares by ``1 + 1/B`` (``proposed``), or by 1.5 with g = 1.

    Returns:
        ``[B + 1]``.

    Raises:
        TypeError: ``proposed`` is neither True nor False.
        ValueError: ``num_blocks`` is no int of at least 1.
    """
    flag(proposed=proposed)
    positive(num_blocks=num_blocks)
    return (1 + (1 / num_blocks if proposed else 0.5)) ** (np.arange(num_blocks + 1) / 2)
