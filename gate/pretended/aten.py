"""Torch's own kernels on a pretended GPU: those of the CPU, on the same memory.

``install()`` registers one for every operator that has a kernel for CUDA. Whatever only makes or views tensors is left
to torch, so that its allocator, devices and streams are what they are on a GPU. Operators that mix devices raise, as
there. While a CUDA graph is recorded each call is recorded, too.

Where only shapes are computed (WNFUSED_PRETENDED=shapes) the kernels are those of the meta device, and no number is
written.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

RUNTIME = ctypes.CDLL(os.environ["LD_PRELOAD"].split(os.pathsep)[0])
SHAPES_ONLY = bool(RUNTIME.pretended_shapes_only())

# They make or view tensors and launch nothing.
LEFT_TO_TORCH = frozenset({
    "aten::_local_scalar_dense", "aten::_pin_memory", "aten::_reshape_alias", "aten::alias", "aten::as_strided",
    "aten::empty.memory_format", "aten::empty_strided", "aten::imag", "aten::is_pinned", "aten::is_set_to",
    "aten::lift_fresh", "aten::real", "aten::record_stream", "aten::resize_", "aten::set_",
    "aten::set_.source_Storage", "aten::set_.source_Storage_storage_offset", "aten::set_.source_Tensor",
    "aten::squeeze", "aten::squeeze.dim", "aten::squeeze.dims", "aten::squeeze_", "aten::unfold", "aten::unsqueeze",
    "aten::unsqueeze_", "aten::view", "aten::view.dtype", "aten::view_as_complex", "aten::view_as_real",
})  # fmt: skip
# They launch kernels without an operator of their own for CUDA.
BESIDE_CUDA = ("aten::copy_", "aten::convolution", "aten::convolution_backward")
# Tensors of other devices are welcome.
MIXES_DEVICES = (
    "aten::copy_", "aten::_foreach_copy_", "aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_",
)  # fmt: skip
DRAWS = ("aten::normal_", "aten::uniform_", "aten::random_", "aten::random_.from", "aten::random_.to")

_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_callbacks: list[Any] = []  # recorded graphs point to them
_generators: dict[tuple[torch.device, int], torch.Generator] = {}
_library = torch.library.Library("aten", "IMPL")
_recorded_as_a_whole = 0


def install() -> None:
    for name in torch._C._dispatch_get_all_op_names():
        known = name in BESIDE_CUDA or torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
        if not name.startswith("aten::") or name in LEFT_TO_TORCH or not known:
            continue
        packet, _, overload = name.removeprefix("aten::").partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if op is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that torch has a kernel already
                _library.impl(name.removeprefix("aten::"), _kernel(op), "CUDA")


def record(call: Callable[[], Any]) -> None:
    """Has the graph that is being recorded from the current stream, if there is one, call it again."""
    if RUNTIME.pretended_is_recording() and not _recorded_as_a_whole:
        callback = _Callback(lambda _: call())
        _callbacks.append(callback)
        stream = torch.cuda.current_stream().cuda_stream
        RUNTIME.pretended_record(ctypes.c_void_p(stream), callback, None)


def recorded_as_a_whole(call: Callable[[], Any]) -> Any:
    """``call()``, recorded as one; what it calls is not."""
    global _recorded_as_a_whole
    _recorded_as_a_whole += 1
    try:
        result = call()
    finally:
        _recorded_as_a_whole -= 1
    record(call)
    return result


def on_host(t: Tensor) -> Tensor:
    """A CPU tensor over the same memory."""
    storage = t.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="cpu")
    made = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), torch.device("cpu"), storage.nbytes())
    return torch.empty(0, dtype=t.dtype, device="cpu").set_(made, t.storage_offset(), t.size(), t.stride())


def _generator(given: torch.Generator) -> torch.Generator:
    """The CPU's generator in the place of one of a GPU."""
    key = given.device, given.initial_seed()
    drawn = given.get_offset()
    if key not in _generators or drawn == 0:
        _generators[key] = torch.Generator("cpu").manual_seed(given.initial_seed() % 2**63)
    given.set_offset(drawn + 4)  # as a kernel on a GPU leaves it; seeding takes it back to 0
    return _generators[key]


class _Call:
    """The arguments of one call, for another device, and its results, back again."""

    def __init__(self, op: Any) -> None:
        self.op = op
        self.device: torch.device | None = None
        self.pairs: list[tuple[Tensor, Tensor]] = []  # on the other device, and here

    def there(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_cuda:
            self._meet(value)
            other = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
            self.pairs.append((other if SHAPES_ONLY else on_host(value), value))
            return self.pairs[-1][0]
        if isinstance(value, Tensor) and value.dim() and self.op._name not in MIXES_DEVICES:
            raise RuntimeError(f"{self.op}: a tensor of the CPU, {list(value.shape)}, among those of a GPU")
        if isinstance(value, torch.device) and value.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device() if value.index is None else value.index)
            return torch.device("meta" if SHAPES_ONLY else "cpu")
        if isinstance(value, torch.Generator) and value.device.type == "cuda":
            return None if SHAPES_ONLY else _generator(value)
        return value

    def _meet(self, t: Tensor) -> None:
        if self.device is None:
            self.device = t.device
        elif self.device != t.device and t.dim() and self.op._name not in MIXES_DEVICES:
            raise RuntimeError(f"{self.op}: tensors on {self.device} and {t.device}")

    def here(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        for other, original in self.pairs:
            if value is other:
                return original
        made = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=self.device)
        if not SHAPES_ONLY:
            on_host(made).copy_(value)
        return made


def _kernel(op: Any) -> Callable[..., Any]:
    names = [argument.name for argument in op._schema.arguments]
    outputs = [argument.name for argument in op._schema.arguments if argument.is_out]
    run = _VENDORS.get(op._name, op)

    def kernel(*positional: Any, **keywords: Any) -> Any:
        if SHAPES_ONLY and op._name in ("aten::copy_", *DRAWS):
            return positional[0]
        call = _Call(op)
        given = dict(zip(names, positional, strict=False)) | keywords
        out = {name: given.pop(name) for name in outputs if isinstance(given.get(name), Tensor)}
        moved = {name: tree_map(call.there, value) for name, value in given.items()}
        if call.device is None:
            held = next(iter(out.values()), None)
            call.device = torch.device("cuda", torch.cuda.current_device()) if held is None else held.device
        if "generator" in names and moved.get("generator") is None and not SHAPES_ONLY:
            moved["generator"] = _generator(torch.cuda.default_generators[call.device.index])
        # The CPU's kernel writes to tensors of its own, which it may resize.
        for name, held in out.items():
            moved[name] = torch.empty(0, dtype=held.dtype, device="meta" if SHAPES_ONLY else "cpu")
        count = len(positional)
        arguments = [moved.pop(name) for name in names[:count]]

        def again() -> Any:
            with torch.no_grad():
                return run(*arguments, **moved)

        found = again()
        for name, held in out.items():
            if held.shape != moved[name].shape:
                held.resize_(moved[name].shape)
            call.pairs.append((moved[name], held))
        result = tree_map(call.here, found)

        def write() -> None:
            for source, target in zip(tree_leaves(again()), tree_leaves(result), strict=True):
                if isinstance(target, Tensor) and target.is_cuda and source.data_ptr() != target.data_ptr():
                    on_host(target).copy_(source)

        if out and not SHAPES_ONLY:
            for source, target in zip(tree_leaves(found), tree_leaves(result), strict=True):
                on_host(target).copy_(source)
        if not SHAPES_ONLY:
            record(write)
        return result

    return kernel


# ------------------------------------------------------------------------------- operators that the CPU does not have


def _convolution(
    x: Tensor, w: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    return torch.ops.aten.convolution(x, w, bias, stride, padding, dilation, False, [0] * len(stride), groups)


def _cudnn(x: Tensor, w: Tensor, padding: Any, stride: Any, dilation: Any, groups: int, *_: Any, **__: Any) -> Tensor:
    return _convolution(x, w, None, stride, padding, dilation, groups)


def _cudnn_transpose(
    x: Tensor, w: Tensor, padding: Any, output_padding: Any, stride: Any, dilation: Any, groups: int, *_: Any, **__: Any
) -> Tensor:
    return torch.ops.aten.convolution(x, w, None, stride, padding, dilation, True, output_padding, groups)


def _cudnn_relu(x: Tensor, w: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Tensor:
    return _convolution(x, w, bias, stride, padding, dilation, groups).relu()


def _cudnn_add_relu(
    x: Tensor, w: Tensor, z: Tensor, alpha: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    return (_convolution(x, w, bias, stride, padding, dilation, groups) + (1 if alpha is None else alpha) * z).relu()


_VENDORS: dict[str, Callable[..., Tensor]] = {
    "aten::cudnn_convolution": _cudnn,
    "aten::cudnn_convolution_transpose": _cudnn_transpose,
    "aten::cudnn_convolution_relu": _cudnn_relu,
    "aten::cudnn_convolution_add_relu": _cudnn_add_relu,
}
