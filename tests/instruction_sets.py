"""The instruction sets that the C++ kernels have here, the one in use first; none without the library."""

import torch

from wnfused.backends import native


def _vectors(isa: str) -> str:
    """What multiplies floats: tiles, emulated or not, and pairs are for bfloat16."""
    return "portable" if isa == "amx-emulated" else "avx512" if isa.startswith(("amx", "avx512")) else isa


ISAS: list[str] = torch.ops.wnfused_native.cpu_isas().split(",") if native.unavailable() is None else []

VECTORS: list[str] = [isa for i, isa in enumerate(ISAS) if _vectors(isa) not in map(_vectors, ISAS[:i])]
"""One of each kind for layers of floats; not for stages and linear layers, which split floats for tiles."""
