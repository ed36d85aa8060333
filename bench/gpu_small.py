"""``python -m bench.gpu_small``: small stages and layers on a GPU, forward and backward, for compute-sanitizer."""

from __future__ import annotations

import argparse
import contextlib
import warnings
from collections.abc import Iterator

import torch

import wnfused
from bench.peers import tensor_float_32
from wnfused.backends import native_cuda
from wnfused.backends.triton import strategy
from wnfused.dispatch import BackendWarning

PRECISIONS = ("bf16", "tf32", "fp32")
SHAPES = ((16, 8), (32, 4), (64, 2), (64, 8), (32, 16), (16, 32), (64, 7), (32, 14), (16, 28))
"""Channels and side of the maps that the CUDA stage has kernels for, in every precision. The last three leave tiles of
16 pixels ragged."""


FEW_SAMPLES = ((7, 48, 40), (40, 72, 36), (200, 16, 100), (5, 520, 40), (33, 1032, 36), (3, 40, 1036))
"""Samples, columns and rows of v: one round of loads and several, forward and both parts of the backward, of its three
widths."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_small", description=__doc__)
    parser.add_argument(
        "part", choices=PARTS, help="of the kernels: the stage by wgmma, all others, or the vendor's beside them"
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    # On the Triton backend instead a stage would pass, and prove nothing.
    warnings.simplefilter("error", BackendWarning)
    PARTS[options.part]()


def others() -> None:
    """Every kernel of the CUDA stage that this device takes, in whole and ragged batches, with and without
    recomputation; and layers.

    All are made on the CPU: on the GPU the vendor's kernels would initialise them, and take the sanitizer's time. What
    repeats kernels comes last, should time be up.
    """
    _stages(3, 2)
    none = wnfused.WNResidualStage(16, 16, 1, recompute=2).to("cuda")
    x = torch.randn(3, 16, 8, 8).to("cuda").requires_grad_()
    parameters = [p[:0] for p in (none.weight_v, none.weight_g, none.bias)]
    wnfused.functional.residual_stage(x, *parameters, recompute=2).sum().backward()
    _ran("a stage of no blocks")
    for shape, dim in (((24, 48), 0), ((2, 40_000), 0), ((410, 2, 100), 1), ((3, 30_000), None)):
        v = torch.randn(shape).to("cuda").requires_grad_()
        g = torch.rand(1 if dim is None else shape[dim]).to("cuda").requires_grad_()
        with wnfused.use_backend("native"):
            wnfused.functional.weight_norm(v, g, dim).square().sum().backward()
    _ran("weight norms, of rows that blocks share too")
    layers()
    _stages(1, None)


def everything() -> None:
    """And layers on the vendor's products, of which racecheck dies."""
    for precision in PRECISIONS:
        with _precision(precision), strategy.forced("vendor"):
            _layer(wnfused.WNLinear(48, 40, activation="relu"), 70, 48)
            _layer(wnfused.WNConv2d(16, 24, 3, padding=1, activation="leaky_relu"), 3, 16, 9, 9)
        _ran(f"layers on the vendor's products, {precision}")
    others()


def layers() -> None:
    """Linear layers of few samples by kernels of their own, and layers by Triton."""
    for precision in PRECISIONS:
        with _precision(precision):
            for samples, columns, rows in FEW_SAMPLES:
                _layer(wnfused.WNLinear(columns, rows, activation="relu"), samples, columns)
        _ran(f"linear layers of few samples, {precision}")
    layer = wnfused.WNLinear(520, 40, activation="relu").to("cuda", torch.bfloat16)
    layer(torch.randn(5, 520).to("cuda", torch.bfloat16)).sum().backward()
    _ran("a linear layer of few samples, whose parameters are bf16, too")
    with strategy.forced("fused"):
        _layer(wnfused.WNLinear(48, 40, activation="relu"), 7, 48)
        _layer(wnfused.WNConv2d(5, 7, 3, padding=1, activation="relu"), 3, 5, 9, 9)
    _ran("layers by Triton")


def _layer(layer: torch.nn.Module, *shape: int) -> None:
    x = torch.randn(shape).to("cuda").requires_grad_()
    layer.to("cuda")(x).sum().backward()
    assert torch.isfinite(x.grad).all()


@contextlib.contextmanager
def _precision(name: str) -> Iterator[None]:
    with tensor_float_32(name == "tf32"), torch.autocast("cuda", torch.bfloat16, name == "bf16"):
        yield


def _stages(batch: int, recompute: int | None) -> None:
    for precision in PRECISIONS:
        for channels, size in SHAPES:
            stage = wnfused.WNResidualStage(channels, channels, 2, recompute=recompute).to("cuda")
            x = torch.randn(batch, channels, size, size).to("cuda").requires_grad_()
            with _precision(precision):
                y = stage(x)
                y.sum().backward()
            assert torch.isfinite(x.grad).all()
            _ran(f"a stage of {channels} channels on {size}x{size} maps, batch {batch}, {precision}")


def warpgroup() -> None:
    """The stages by wgmma."""
    if torch.cuda.get_device_capability() != (9, 0):
        print("nothing ran: no device of capability 9.0", flush=True)
        return
    native_cuda.use_warpgroup_stage(True)
    for channels, batch, recompute in ((64, 3, 2), (64, 2, None), (32, 3, None)):
        for precision in ("bf16", "tf32"):
            stage = wnfused.WNResidualStage(channels, channels, 5, recompute=recompute).to("cuda")
            with _precision(precision):
                stage(torch.randn(batch, channels, 512 // channels, 512 // channels).to("cuda")).sum().backward()
            _ran(f"a stage of {channels} channels by warpgroups, batch {batch}, {precision}")


def _ran(what: str) -> None:
    torch.cuda.synchronize()
    print("ran", what, flush=True)


PARTS = {"others": others, "everything": everything, "warpgroup": warpgroup}

if __name__ == "__main__":
    main()
