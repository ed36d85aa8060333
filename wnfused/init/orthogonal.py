"""Batched orthogonal matrices, Haar-distributed: all layers of one shape at once."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Matrices are worked on in chunks of about this many elements: a stage of WRN-10,000 alone has 123 million.
_CHUNK = 1 << 22


@torch.no_grad()
def orthogonal_batched(tensor: Tensor, *, gain: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
    """Fills ``tensor [..., r, c]`` in place with independent Haar-distributed matrices times ``gain``.

    ``Q`` of the QR decomposition of a Gaussian matrix, with the signs that make R's diagonal positive (Mezzadri
    2007): uniform over matrices with orthonormal columns where r >= c, orthonormal rows otherwise.

    Args:
        tensor: floating point, at least two dims; narrower types than float32 are computed in float32.
        gain: factor on every matrix.
        generator: source of the Gaussians; torch's own for the device if None.

    Returns:
        ``tensor``.

    Raises:
        TypeError: ``tensor`` is not floating point.
        ValueError: it has fewer than two dims, or ``gain`` is not finite.
    """
    if not tensor.is_floating_point():
        raise TypeError(f"tensor: expected a floating-point tensor, got {tensor.dtype}")
    if tensor.dim() < 2:
        raise ValueError(f"tensor: shape {list(tensor.shape)} must have at least two dims, [..., r, c]")
    if not math.isfinite(gain):
        raise ValueError(f"gain: {gain} must be finite")
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return tensor
    rows, columns = tensor.shape[-2:]
    tall = (max(rows, columns), min(rows, columns))
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    contiguous = tensor.is_contiguous()
    matrices = (tensor if contiguous else tensor.contiguous()).view(-1, rows, columns)
    for chunk in matrices.split(max(1, _CHUNK // (rows * columns))):
        gaussian = torch.empty(len(chunk), *tall, dtype=wide, device=tensor.device).normal_(generator=generator)
        q, r = torch.linalg.qr(gaussian)
        # sign(0) would erase a column; a zero on R's diagonal has probability 0 but costs nothing to survive.
        q *= torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -gain, gain).unsqueeze(-2)
        chunk.copy_(q if rows >= columns else q.mT)
    if not contiguous:
        tensor.copy_(matrices.view(tensor.shape))
    return tensor
