"""Where the kernels run: what is missing, what they refuse, and one way to launch them."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from wnfused.backends import LEAST_CAPABILITY, allows_tf32, operands_of, row_dim, tensors_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEAST_TRITON = (3, 6)
MOST = 2**31 - 2**16  # the last tile may begin below this and end above it
MOST_ACROSS = 2**20  # a grid has 65535 tiles along its second dim


@functools.cache
def unavailable() -> str | None:
    """Why no kernel runs here at all."""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "the package triton is not installed"
    if tuple(int(part) for part in version.split(".")[:2]) < LEAST_TRITON:
        return f"it needs triton 3.6 or newer, and {version} is installed"
    if not torch.cuda.is_available() and not _may_interpret():
        return "there is no CUDA device"
    return None


def _may_interpret() -> bool:
    """``interpreted()``, but triton is not imported to be told no: it takes 75 MB."""
    return ("triton" in sys.modules or "TRITON_INTERPRET" in os.environ) and interpreted()


@functools.cache
def interpreted() -> bool:
    """Whether TRITON_INTERPRET=1 had triton run its kernels in Python, where they take CPU tensors too."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def refusal(op: str, arguments: Sequence[Any]) -> str | None:
    """Why no kernel takes these arguments."""
    device = None
    for argument in operands_of(op, arguments):
        if argument.device.type not in (("cuda", "cpu") if interpreted() else ("cuda",)):
            return f"it has no kernel for device {argument.device.type!r}"
        if device is not None and argument.device != device:
            return f"its tensors lie on {device} and {argument.device}"
        device = argument.device
        if argument.dtype not in DTYPES:
            return f"it has no kernel for {argument.dtype}"
    return None if device is None else _too_old(device)


@functools.cache
def _too_old(device: torch.device) -> str | None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY:
        return None
    least, found = ("{}.{}".format(*c) for c in (LEAST_CAPABILITY, torch.cuda.get_device_capability(device)))
    return f"it needs compute capability {least} or newer, and {torch.cuda.get_device_name(device)} has {found}"


def too_large(op: str, arguments: Sequence[Any]) -> str | None:
    """Why a call is too large: kernels count rows and their entries, pixels and the entries of a weight in 32 bits."""
    backward = op.endswith("_backward")
    if op.startswith("weight_norm"):
        return _too_many_rows(tensors_of(arguments[:1]), row_dim(op, arguments))
    if op.startswith("residual_stage"):
        return _too_large_a_stage(*arguments[:2])  # of dy, which is as large, in the backward
    x, v = arguments[2:4] if backward else arguments[:2]
    if v.dim() == 2:
        counts = [(x.shape[:-1].numel(), MOST, "rows of x")]
        counts += [
            (_reach(t), MOST, f"entries from the first feature of {name} to the last")
            for name, t in (("x", x), ("v", v))
        ]
    else:
        pixels_out = _pixels(arguments[0]) if backward else _pixels_out(*arguments[:2], *arguments[5:11])
        counts = [(_pixels(x), MOST, "pixels of x"), (pixels_out, MOST, "pixels of y")]
        counts += [(max(v.shape[:2]), MOST_ACROSS, "filters or channels")]
        # Taps are counted from a window's place in 32 bits. In 64 they would cost every layer's inner loop some, for
        # windows of a reach that hardly any network has.
        window = _window(x, v.shape[2:], *arguments[8:11] if backward else arguments[6:9])
        counts += [(window, MOST, _IN_A_WINDOW)]
    return _over_limit(*counts, (v.numel(), MOST, "elements of v"))


def _too_large_a_stage(x: Tensor, v: Tensor) -> str | None:
    """Its convolutions run one by one; the rows of all of them are scaled in one launch."""
    return _over_limit(
        (_pixels(x), MOST, "pixels of x"),
        (_window(x, v.shape[4:], (1, 1), (1, 1), transposed=False), MOST, _IN_A_WINDOW),
        (v.shape[2:].numel(), MOST, "elements of v in a convolution"),
        (v.shape[:3].numel(), MOST, "rows of v"),
    )


def _over_limit(*counts: tuple[int, int, str]) -> str | None:
    """What the first count that is above its limit makes too large."""
    for count, most, what in counts:
        if count > most:
            return f"its kernels take up to {most}, and there are {count} {what}"
    return None


def _too_many_rows(tensors: Iterator[Tensor], dim: int | None) -> str | None:
    """Of ``v``, or what has its shapes. One norm over the whole tensor is torch's own reduction."""
    if dim is None:
        return None
    for v in tensors:
        rows = v.shape[dim]
        if reason := _over_limit((rows, MOST, "rows"), (v.numel() // max(rows, 1), MOST, "entries in a row")):
            return reason
    return None


def _reach(t: Tensor) -> int:
    """In memory, along the last dim."""
    return (t.shape[-1] - 1) * t.stride(-1) + 1


def _pixels(t: Tensor) -> int:
    return t.numel() // max(t.shape[1], 1)


def _pixels_out(
    x: Tensor, v: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], transposed: bool,
    output_padding: Sequence[int], groups: int,
) -> int:  # fmt: skip
    if transposed:  # the vendor's
        return 0
    sizes = zip(x.shape[2:], v.shape[2:], stride, padding, dilation, strict=True)
    return x.shape[0] * math.prod((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes)


_IN_A_WINDOW = "entries of x from a window's place to its farthest tap"


def _window(x: Tensor, kernel: Sequence[int], padding: Sequence[int], dilation: Sequence[int], transposed: bool) -> int:
    """Entries in memory from the pixel that a window is counted from to its farthest tap, within one image."""
    if transposed or x.dim() > 4:  # the vendor's
        return 0
    reach = [max(d * (k - 1), p) for k, p, d in zip(kernel, padding, dilation, strict=True)]
    down, along = reach if len(reach) == 2 else (0, *reach)
    return (down * x.shape[-1] + along + 1) * x.shape[1]


_recorder: Callable[..., None] | None = None


@contextlib.contextmanager
def recorded(recorder: Callable[..., None]) -> Iterator[None]:
    """Within this context ``recorder(kernel, grid, arguments, constants)`` is called in place of every launch.

    Nothing else looks at memory, so the host's code runs on tensors of the device "meta": the offline gate's way.
    """
    global _recorder
    before, _recorder = _recorder, recorder
    try:
        yield
    finally:
        _recorder = before


def launch(kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], **constants: Any) -> None:
    """Launches on the device of the first argument and its current stream; nothing waits for it."""
    constants["enable_fp_fusion"] = True  # Triton 3.9 warns where it is not said, and 3.10 means False by that
    if _recorder is not None:
        _recorder(kernel, grid, arguments, constants)
        return
    if 0 in grid:
        return
    device = arguments[0].device
    # Triton launches on the current device, which need not be the tensors'.
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else contextlib.nullcontext():
        kernel[grid](*arguments, **constants)


def blocks(length: int, step: int) -> int:
    return -(-length // step)


def precision(dtype: torch.dtype, operation: Literal["conv", "matmul"]) -> str:
    """``"half"``, ``"tf32"`` or ``"ieee"``: how torch itself would multiply."""
    if dtype != torch.float32:
        return "half"
    return "tf32" if allows_tf32(operation) else "ieee"


def input_precision(element: str) -> str:
    """What ``tl.dot`` is told; half precision has one way only."""
    return "tf32" if element == "tf32" else "ieee"
