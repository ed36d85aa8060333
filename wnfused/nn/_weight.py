"""The effective weight as users of torch's layers expect to find it under ``layer.weight``.

Reading gives ``w_i = g_i v_i / ||v_i||`` with its graph to ``v`` and ``g``. Writing to what was read, in place, by
index, through a view or through ``.data``, changes the layer: ``v <- w``, ``g <- ||w||``. What was read stays as it was
until it is written to: then it takes the layer's present weight first, so that a step between the two is not undone. A
parameter made of it is one of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

if TYPE_CHECKING:
    from wnfused.nn._layer import WeightNormalised

_DATA_GET = Tensor.data.__get__  # type: ignore[attr-defined]
_DATA_SET = Tensor.data.__set__  # type: ignore[attr-defined]
_REQUIRES_GRAD_SET = Tensor.requires_grad.__set__  # type: ignore[attr-defined]
_IN_PLACE = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__ipow__")
_WRITES = frozenset(
    getattr(Tensor, name) for name in dir(Tensor) if name in _IN_PLACE or (name[-1] == "_" and name[0] != "_")
)
"""What may change a tensor, for where torch's own count of writes cannot be read."""

_PLAIN_READS = frozenset(
    [getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad")]
    + [getattr(Tensor, name) for name in ("size", "dim", "numel", "stride", "is_contiguous", "is_floating_point")]
    + [getattr(Tensor, name) for name in ("__matmul__", "__rmatmul__", "matmul", "mm", "__mul__", "__rmul__", "mul")]
    + [torch.matmul, torch.mm, torch.addmm, torch.mul, F.linear, F.conv1d, F.conv2d, F.conv3d]
    + [F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d]
)
"""What a forward written by hand does with a weight, and neither writes nor gives a view: nothing to watch there."""


class _Read:
    """What was read of a layer at one time: its memory, and of which state of the parameters it is."""

    def __init__(self, layer: WeightNormalised, tensor: Tensor) -> None:
        self.layer, self.tensor = layer, tensor
        self.state = [] if torch.compiler.is_compiling() else self._present()  # there nothing is written

    def _present(self) -> list[tuple[Tensor, int]]:
        layer = self.layer
        return [(p, 0 if p.is_inference() else p._version) for p in (layer.weight_v, layer.weight_g)]

    def is_current(self) -> bool:
        now = self._present()
        return bool(self.state) and all(
            a is b and at == then for (a, at), (b, then) in zip(now, self.state, strict=True)
        )

    def refresh(self) -> None:
        """Takes the layer's present weight."""
        with torch.no_grad():
            self.tensor.detach().copy_(self.layer.weight.detach())
        self.state = self._present()

    def write_back(self) -> None:
        self.layer.set_weight(self.tensor.detach())
        self.state = self._present()


class EffectiveWeight(Tensor):
    """A tensor that tells its layer when it is written to. Everything computed from it is a plain tensor."""

    _read: _Read
    _shares: bool  # the memory of what was read: a view of it, or its data

    @staticmethod
    def of(layer: WeightNormalised, tensor: Tensor) -> Tensor:
        return EffectiveWeight._of(tensor, _Read(layer, tensor), False) if _can_be_watched(tensor) else tensor

    @staticmethod
    def _of(tensor: Tensor, read: _Read, shares: bool) -> Tensor:
        weight = tensor.as_subclass(EffectiveWeight)
        weight._read, weight._shares = read, shares
        return weight

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return _read_only(func, args, kwargs)
        if func in _PLAIN_READS and "out" not in kwargs:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        weights = [weight for weight in _weights_in((args, kwargs)) if not _is_parameter(weight)]
        target = args[0] if args else None
        if isinstance(target, EffectiveWeight) and not _is_parameter(target):
            if func == _DATA_SET:
                target._read.layer.set_weight(args[1])
                return None
            if func in (_REQUIRES_GRAD_SET, Tensor.requires_grad_) and not target._shares:
                wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
                target._read.layer.weight_v.requires_grad_(wanted)
                target._read.layer.weight_g.requires_grad_(wanted)
                return target
        with torch._C.DisableTorchFunctionSubclass():
            for weight in _weights_in(_targets(func, args, kwargs)):
                if not _is_parameter(weight) and not weight._read.is_current():
                    weight._read.refresh()
            stale = [weight for weight in weights if not weight._read.is_current()]
            before = [weight._version for weight in weights]
            result = func(*args, **kwargs)
            for weight, version in zip(weights, before, strict=True):
                if weight._version == version:
                    continue
                if any(weight is other for other in stale):
                    raise RuntimeError(
                        f"weight: {getattr(func, '__name__', func)} wrote to what was read before the layer's last "
                        f"change, which that would undo; read layer.weight again"
                    )
                weight._read.write_back()
        return _followed(result, weights[0]) if weights else result

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        if _is_parameter(self):
            return super().set_(*args, **kwargs)
        raise RuntimeError("weight: set_ cannot reach weight_v and weight_g; assign layer.weight instead")

    def __format__(self, spec: str) -> str:
        return format(_plain(self), spec)

    def apply_(self, *args: Any) -> Any:
        return self._in_python(Tensor.apply_, args)

    def map_(self, *args: Any) -> Any:
        return self._in_python(Tensor.map_, args)

    def map2_(self, *args: Any) -> Any:
        return self._in_python(Tensor.map2_, args)

    def _in_python(self, method: Any, args: Any) -> Any:
        """A write of which torch tells no subclass, nor counts it."""
        with torch._C.DisableTorchFunctionSubclass():
            watched = not _is_parameter(self)
            if watched and not self._read.is_current():
                self._read.refresh()
            method(self, *args)
            if watched:
                self._read.write_back()
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(_plain(self), memo)


_REAL = (Tensor, nn.Parameter, EffectiveWeight)
_PROXIES = torch._C._TorchDispatchModeKey.PROXY


def _targets(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """What a call writes to, as far as its name or an argument says so."""
    name = getattr(func, "__name__", "")
    writes = func in _WRITES or (name.endswith("_") and not name.endswith("__"))
    return [*(args[:1] if writes else ()), kwargs.get("out")]


def _can_be_watched(tensor: Any) -> bool:
    """Not what stands for a tensor: a proxy of torch.fx, a fake one of an export, a level of a transform of torch.func.

    What is written to these in a forward is written to them alone, as it is under torch's own weight norm.
    """
    if not isinstance(tensor, Tensor):
        return False
    if torch.compiler.is_dynamo_compiling():  # there writes are refused
        return True
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or torch._C._get_dispatch_mode(_PROXIES) is not None:
        return False
    return type(tensor) in _REAL or not is_fake(tensor)


def _is_parameter(weight: EffectiveWeight) -> bool:
    """Whether somebody made an ``nn.Parameter`` of it, which torch marks in this way where the type is a subclass."""
    return getattr(weight, "_is_param", False)


def _plain(weight: EffectiveWeight) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        plain = weight.detach().as_subclass(Tensor)
        return nn.Parameter(plain, weight.requires_grad) if _is_parameter(weight) else plain


def _read_only(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A call inside ``torch.compile``, where counting writes is not possible; so there may be none.

    The compiler of torch 2.15 does not tell of ``weight[i] = ...``: there that write reaches a temporary and is lost.
    """
    if func in _WRITES or func == _DATA_GET or isinstance(kwargs.get("out"), EffectiveWeight):
        raise RuntimeError(
            "weight: cannot be written inside torch.compile; write it outside, or write weight_v, weight_g"
        )
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _weights_in(arguments: Any) -> Iterator[EffectiveWeight]:
    """Every effective weight among the arguments of a call, however nested."""
    if isinstance(arguments, EffectiveWeight):
        yield arguments
    elif isinstance(arguments, (tuple, list)):
        for item in arguments:
            yield from _weights_in(item)
    elif isinstance(arguments, dict):
        yield from _weights_in(list(arguments.values()))


def _followed(result: Any, source: EffectiveWeight) -> Any:
    """A result that shares the weight's memory goes on telling the layer; any other is a plain tensor."""
    if isinstance(result, (tuple, list)):
        return type(result)(_followed(item, source) for item in result)
    if not isinstance(result, Tensor) or isinstance(result, EffectiveWeight) or not _can_be_watched(result):
        return result
    read = source._read
    if result.layout == torch.strided and read.tensor.untyped_storage()._cdata == result.untyped_storage()._cdata:
        return EffectiveWeight._of(result, read, True)
    return result
