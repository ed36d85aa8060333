"""Convolution layers on this library's own CPU kernels, drawn and compared with the reference in float64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wnfused import reference
from wnfused.backends import native

NAMES = ("y", "norm", "dx", "dv", "dg", "db", "dz")
LAYOUTS = {"nchw": (False, False), "last": (True, True), "last map": (True, False), "last weight": (False, True)}


class Case(NamedTuple):
    """A layer. ``size`` of x and the window have one entry a spatial dim."""

    images: int
    inputs: int
    outputs: int
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool = False
    output_padding: tuple[int, ...] = (0, 0, 0)
    groups: int = 1

    @property
    def geometry(self) -> tuple[Any, ...]:
        """As the ops take it."""
        window = (list(self.stride), list(self.padding), list(self.dilation))
        return (*window, self.transposed, list(self.output_padding[: len(self.size)]), self.groups)

    @property
    def output_size(self) -> list[int]:
        every = zip(self.size, self.kernel, self.stride, self.padding, self.dilation, self.output_padding, strict=False)
        if self.transposed:
            return [(n - 1) * s - 2 * p + d * (k - 1) + e + 1 for n, k, s, p, d, e in every]
        return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d, _ in every]


def same3x3(images: int, inputs: int, outputs: int, *size: int) -> Case:
    """A 3x3 layer, or over three dims a 3x3x3 one, that keeps the size of its map."""
    ones = (1,) * len(size)
    return Case(images, inputs, outputs, size, (3,) * len(size), ones, ones, ones)


def ways_of(case: Case, last: bool = False, **traits: bool) -> tuple[str, str]:
    """Who multiplies the layer in that layout, forward and backward. ``traits``: as the op has them."""
    maps = [case.images, case.inputs, case.outputs, *_three(case.size, 1)]
    if case.transposed:
        maps = [case.images, case.outputs, case.inputs, *_three(case.output_size, 1)]
    window = (_three(case.kernel, 1), _three(case.stride, 1), _three(case.padding, 0), _three(case.dilation, 1))
    asked = (maps, *window, case.groups, len(case.size), case.transposed, last, last)
    return torch.ops.wnfused_native.cpu_conv_ways(*asked, **traits)


def go_by(way: str, case: Case, last: bool = False) -> tuple[bool, bool]:
    """Whether forward and backward do."""
    forward, backward = ways_of(case, last)
    return forward == way, backward == way


def method_of(case: Case, bfloat16: bool = False) -> str:
    """How the kernels of ``csrc/cpu/conv_layer`` multiply the layer, or "vendor"."""
    return ways_of(case, plain=True, bfloat16=bfloat16)[0]


def way_of(case: Case) -> str:
    """The same, or "unfolded" where it is that in some layout, forward or backward."""
    return "unfolded" if "unfolded" in ways_of(case) + ways_of(case, last=True) else method_of(case)


def _three(extents: Sequence[int], missing: int) -> list[int]:
    return [*[missing] * (3 - len(extents)), *extents]


def channels_last(t: Tensor, wanted: bool) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return t.contiguous(memory_format=formats[t.dim()]) if wanted and t.dim() in formats else t


def weight_shape(case: Case) -> tuple[int, ...]:
    first, second = (case.inputs, case.outputs) if case.transposed else (case.outputs, case.inputs)
    return (first, second // case.groups, *case.kernel)


def sample(case: Case, layout: str = "nchw", seed: int = 0) -> list[Tensor]:
    """x, v, g, bias, residual."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    last_map, last_weight = LAYOUTS[layout]
    x = channels_last(normal(case.images, case.inputs, *case.size), last_map)
    v = channels_last(normal(*weight_shape(case)), last_weight)
    residual = channels_last(normal(case.images, case.outputs, *case.output_size), last_map)
    return [x, v, normal(v.shape[0]), normal(case.outputs), residual]


def run(op, backward, case, tensors, dy, activation, y=None, needs=(True,) * 4) -> dict[str, Tensor]:
    tail = (*case.geometry, 0, activation, 0.1)
    out, norm = op(*tensors, *tail)
    gradients = backward(dy, out if y is None else y, *tensors[:3], norm, list(needs), *tail)
    return dict(zip(NAMES, (out, norm, *gradients), strict=True))


def both(case, tensors, activation="relu", needs=(True,) * 4):
    """What the kernels found, and the reference in float64; its masks are read off the output that was found."""
    y = native.conv(*tensors, *case.geometry, 0, activation, 0.1)[0]
    dy = torch.empty_like(y).copy_(torch.randn(y.shape, generator=torch.Generator().manual_seed(9)))
    found = run(native.conv, native.conv_backward, case, tensors, dy, activation, needs=needs)
    wide = [None if t is None else t.double() for t in tensors]
    wanted = run(reference.conv, reference.conv_backward, case, wide, dy.double(), activation, y.double(), needs)
    return found, wanted


def assert_close(found, wanted, tolerance: float) -> None:
    for name in NAMES:
        actual, expected = found[name].double(), wanted[name]
        assert actual.shape == expected.shape, name
        error = (actual - expected).norm() / expected.norm().clamp_min(1e-30) if expected.numel() else 0.0
        assert error <= tolerance, f"{name}: {error:.2e}"


_ACTIVATIONS = {
    (True, True): ("none", "relu", "leaky_relu"),
    (False, False): ("relu", "leaky_relu"),
    (False, True): ("none",),
    (True, False): ("relu",),
}
"""By whether the map and the weight are contiguous."""


def assert_layouts_agree(case: Case, tensors: list[Tensor], tolerance: float) -> None:
    """Right by every activation, by fewer where the layout is not torch's own, and laid out as torch does it."""
    for activation in _ACTIVATIONS[tuple(t.is_contiguous() for t in tensors[:2])]:
        found, wanted = both(case, tensors, activation)
        assert_close(found, wanted, tolerance)
    if len(case.size) < 3:
        assert found["y"].stride() == torch.convolution(*tensors[:2], None, *case.geometry).stride()
    else:  # torch drops channels_last_3d where it unfolds a small volume
        formats = [reference.suggest_memory_format(t) for t in tensors[:2]]
        assert found["y"].is_contiguous(memory_format=min(formats, key=str))
    assert found["dv"].stride() == tensors[1].stride()


def assert_only_what_is_needed(case: Case, needs: Sequence[bool], tolerance: float) -> None:
    """Any choice of gradients, with bias and residual and without."""
    for activation, residual in itertools.product(("none", "relu"), (False, True)):
        tensors = sample(case)
        if not residual:
            tensors[3] = tensors[4] = None
        wanted = (*needs[:2], needs[2] and residual, needs[3] and residual)
        assert_close(*both(case, tensors, activation, wanted), tolerance)


def assert_not_finite_as_torch(case: Case, which: int, value: float, prepared: Any = list) -> None:
    """One entry of one argument is ``value``: infinities and NaN come out where torch has them."""
    tensors = prepared(sample(case))
    changed = tensors[which]
    changed[torch.unravel_index(torch.tensor(7 % changed.numel()), changed.shape)] = value
    found = native.conv(*tensors, *case.geometry, 0, "leaky_relu", 0.1)[0]
    wanted = reference.conv(*(t.double() for t in tensors), *case.geometry, 0, "leaky_relu", 0.1)[0]
    if which != 1:  # a weight that is not finite: padding times it is the vendor's affair
        assert torch.equal(found.isnan(), wanted.isnan())
        assert torch.equal(found.isinf(), wanted.isinf())
    assert not found.isfinite().all()


def assert_masks_nan_as_torch(case: Case, tolerance: float) -> None:
    """An output that is NaN, of a bias say, counts as negative in a leaky ReLU and passes a plain one."""
    for activation in ("relu", "leaky_relu"):
        tensors = sample(case)
        tensors[3][1] = float("nan")
        found, wanted = both(case, tensors, activation)
        for name in NAMES[1:]:
            torch.testing.assert_close(found[name].double(), wanted[name], rtol=tolerance, atol=tolerance * 30)


def assert_zero_rows_and_gains(case: Case, tolerance: float) -> None:
    tensors = sample(case)
    tensors[1][3] = 0
    tensors[2][5] = 0
    found, wanted = both(case, tensors)
    assert_close(found, wanted, tolerance)
    assert not found["dv"][3].any()
    assert not found["dg"][3].any()
    assert found["dg"][5].abs() > 0


def assert_same_bits_by_threads(case: Case, prepared: Any = list) -> None:
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 2, 3, 6):
            torch.set_num_threads(threads)
            results.append(both(case, prepared(sample(case)))[0])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in NAMES)
