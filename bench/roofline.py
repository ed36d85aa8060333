"""The roofline of a GPU: what a pass must move and multiply at least, over what the chip was measured to do.

A pass takes no less than ``max(bytes / copy bandwidth, FLOPs / matrix rate)``; both rates are measured on the chip at
hand, with random numbers, because a product of zeros draws less power and runs faster. A float32 product may also be
three of tf32, of each operand's high and low part: its rate is that of the faster way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from bench import models
from bench.peers import tensor_float_32
from bench.workloads import FORWARD, STEP, Converted, Network, Stage, Workload

COPIED = 2**30  # bytes: far more than any cache holds
SIZE = 8192  # of a square matrix product


@dataclass(frozen=True)
class Rates:
    """Measured ceilings: bytes a second, read and written; FLOP/s of a matrix product by precision."""

    copy: float
    product: dict[str, float]

    def fastest(self, precision: str) -> tuple[float, str]:
        """FLOP/s of a product as exact as ``precision``, and by what."""
        ways = [(self.product[precision], precision)]
        if precision == "fp32":
            ways.append((self.product["tf32"] / 3, "3 x tf32"))
        return max(ways)


def measure() -> Rates:
    """On the current CUDA device."""
    a = torch.empty(COPIED, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    copy = 2 * COPIED / _seconds(lambda: b.copy_(a))
    product = {}
    for precision in ("fp32", "tf32", "bf16"):
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        x, y = (torch.randn(SIZE, SIZE, device="cuda", dtype=dtype) for _ in range(2))
        with tensor_float_32(precision == "tf32"):
            product[precision] = 2 * SIZE**3 / _seconds(functools.partial(torch.mm, x, y))
    return Rates(copy, product)


def _seconds(call: Callable[[], object], repeats: int = 10) -> float:
    """Median of ``repeats`` calls by the device's own clock, after three."""
    for _ in range(3):
        call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in events)[repeats // 2] / 1e3


@dataclass(frozen=True)
class Floor:
    """What a pass must do at least, and the seconds that takes. ``bound``: by bytes, or FLOPs of which product."""

    flops: int
    bytes: int
    seconds: float
    bound: str


def floor(workload: Workload, pass_name: str, precision: str, rates: Rates) -> Floor:
    """The floor of a fused layer, stage or network in ``precision``; float32 parameters."""
    workload = replace(workload, name="", ours=(), peers=())  # in every precision counted once
    flops = models.flops(workload)[0 if pass_name == FORWARD else 1]
    moved = bytes_moved(workload, pass_name, 2 if precision == "bf16" else 4)
    rate, way = rates.fastest(precision)
    by_bytes, by_flops = moved / rates.copy, flops / rate
    return Floor(flops, moved, max(by_bytes, by_flops), "bytes" if by_bytes > by_flops else f"FLOPs by {way}")


def bytes_moved(workload: Workload, pass_name: str, size: int) -> int:
    """Each number read or written once a pass, activations of ``size`` bytes, parameters and gradients of 4.

    Forward alone: input, parameters, output. With the backward: every layer's input is written for it and read again,
    parameters are read twice and their gradients written once, a gradient comes in, and goes out where there is one. A
    training step with momentum reads and writes parameters and momentum once more and reads the gradients.
    """
    inputs, outputs, parameters = _counted(workload)
    # A stage keeps the map on the chip between its layers, a network between those of a stage, which is nearly all.
    deep = isinstance(workload, (Stage, Network, Converted))
    forward = size * (inputs[0] + outputs[-1]) + parameters
    if pass_name == FORWARD:
        return forward
    kept = size * (sum(inputs) if deep else 0)
    gradient_out = size * inputs[0] * models.input_needs_gradient(workload)
    backward = kept + size * (outputs[-1] + inputs[0]) + gradient_out + 2 * parameters
    optimizer = 5 * parameters if pass_name == STEP else 0
    return forward + kept + backward + optimizer


@functools.cache
def _counted(workload: Workload) -> tuple[list[int], list[int], int]:
    """Entries of each layer's input and output, and the bytes of all parameters."""
    inputs: list[int] = []
    outputs: list[int] = []

    def count(_: nn.Module, x: tuple[torch.Tensor], y: torch.Tensor) -> None:
        inputs.append(x[0].numel())
        outputs.append(y.numel())

    with torch.device("meta"), torch.no_grad():
        module = models.plain(workload)
        for layer in module.modules():
            if isinstance(layer, (nn.Linear, _ConvNd)):
                layer.register_forward_hook(count)
        module(torch.empty(models.input_shape(workload)))
    return inputs, outputs, 4 * sum(p.numel() for p in module.parameters())
