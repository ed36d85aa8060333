"""The instruction sets that the C++ kernels have here, the one in use first; none without the library."""

import torch

from wnfused.backends import native

ISAS: list[str] = torch.ops.wnfused_native.cpu_isas().split(",") if native.unavailable() is None else []
