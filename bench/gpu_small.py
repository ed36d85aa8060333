"""``python -m bench.gpu_small``: small stages and layers on a GPU, forward and backward, for compute-sanitizer."""

from __future__ import annotations

import torch

import wnfused
from wnfused.backends import native_cuda


def main() -> None:
    """Every width of the CUDA stage, whole and ragged batches, both precisions, with and without recomputation."""
    torch.manual_seed(0)
    for channels, size in ((16, 8), (32, 8), (64, 8)):
        for batch, recompute in ((1, None), (3, 2)):
            for dtype in (torch.bfloat16, torch.float32):
                stage = wnfused.WNResidualStage(channels, channels, 2, recompute=recompute, device="cuda")
                x = torch.randn(batch, channels, size, size, device="cuda", requires_grad=True)
                with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
                    y = stage(x)
                y.sum().backward()
                assert torch.isfinite(x.grad).all()
    if torch.cuda.get_device_capability() == (9, 0):
        native_cuda.use_warpgroup_stage(True)
        stage = wnfused.WNResidualStage(64, 64, 5, recompute=2, device="cuda", dtype=torch.bfloat16)
        stage(torch.randn(6, 64, 8, 8, device="cuda", dtype=torch.bfloat16)).sum().backward()
        native_cuda.use_warpgroup_stage(False)
    layer = wnfused.WNLinear(48, 40, activation="relu", device="cuda")
    layer(torch.randn(7, 48, device="cuda")).sum().backward()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
