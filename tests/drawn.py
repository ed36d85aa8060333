"""Random tensors of tests: the same ones wherever torch's own generator stands."""

import torch
from torch import Tensor


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    """In float64, in which what is measured has next to no rounding."""
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)
