"""``python -m bench.gpu_small``: small stages and layers on a GPU, forward and backward, for compute-sanitizer."""

from __future__ import annotations

import warnings

import torch

import wnfused
from wnfused.backends import native_cuda
from wnfused.dispatch import BackendWarning


def main() -> None:
    """Every width of the CUDA stage, whole and ragged batches, both precisions, with and without recomputation."""
    torch.manual_seed(0)
    # On the Triton backend instead the stage would pass, and prove nothing.
    warnings.simplefilter("error", BackendWarning)
    for batch, recompute in ((3, 2), (1, None)):
        for dtype in (torch.bfloat16, torch.float32):
            for channels, size in ((16, 8), (32, 4), (64, 2), (64, 8), (32, 16), (16, 32)):
                stage = wnfused.WNResidualStage(channels, channels, 2, recompute=recompute, device="cuda")
                x = torch.randn(batch, channels, size, size, device="cuda", requires_grad=True)
                with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
                    y = stage(x)
                y.sum().backward()
                assert torch.isfinite(x.grad).all()
                _ran(f"a stage of {channels} channels on {size}x{size} maps, batch {batch}, {dtype}")
        if torch.cuda.get_device_capability() == (9, 0):
            native_cuda.use_warpgroup_stage(True)
            stage = wnfused.WNResidualStage(64, 64, 5, recompute=recompute, device="cuda", dtype=torch.bfloat16)
            stage(torch.randn(2 * batch, 64, 8, 8, device="cuda", dtype=torch.bfloat16)).sum().backward()
            native_cuda.use_warpgroup_stage(False)
            _ran(f"a stage by warpgroups, batch {2 * batch}")
    layer = wnfused.WNLinear(48, 40, activation="relu", device="cuda")
    layer(torch.randn(7, 48, device="cuda")).sum().backward()
    conv = wnfused.WNConv2d(5, 7, 3, padding=1, activation="relu", device="cuda")
    conv(torch.randn(3, 5, 9, 9, device="cuda")).sum().backward()
    _ran("layers by Triton")


def _ran(what: str) -> None:
    torch.cuda.synchronize()
    print("ran", what, flush=True)


if __name__ == "__main__":
    main()
