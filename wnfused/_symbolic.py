"""A symbolic run of a model by ``torch.fx``, after which the model is as it was."""

from __future__ import annotations

import contextlib
import functools
import operator
import random
import sys
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode

from wnfused._modules import compiled_modules
from wnfused._reachable import MUTABLE, Container, containers, is_class_of_a_user
from wnfused._undisturbed import is_expanded

WRITES = "writes"
"""In the ``meta`` of a node: it is ``a += b`` or another such statement, of which torch's own trace shows ``a + b``."""


class NotRestoredError(RuntimeError):
    """Something that a symbolic run changed could not be put back; all else was."""


class _Proxy(fx.Proxy):
    """Tells ``a += b`` from ``a + b``, and what is known of a tensor made of the model's own alone.

    torch's old weight norm leaves a plain tensor as ``layer.weight``, of which ``forward`` learns the dtype itself; so
    it must of one that is made of parameters when it is asked for.
    """

    def __getattr__(self, name: str) -> Any:
        return _attribute(self, name)


class _Attribute(fx.proxy.Attribute):
    def __getattr__(self, name: str) -> Any:
        return _attribute(self, name)


def _attribute(proxy: fx.Proxy, name: str) -> Any:
    known = proxy.tracer.known(proxy.node) if name in _FACTS and isinstance(proxy.tracer, _Tracer) else None
    return _Attribute(proxy, name) if known is None else getattr(known, name)


_FACTS = {"dtype", "device", "shape", "ndim"}
_ASKED_BY_CALLS = {"size", "dim", "numel", "ndimension", "get_device", "is_floating_point", "is_complex"}
_KNOWN = ("torch", "_operator", "builtins", "wnfused")
"""Packages whose functions only compute."""


def _in_place(name: str) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    def method(self: fx.Proxy, other: Any) -> fx.Proxy:
        result: fx.Proxy = getattr(operator, f"__{name}__")(self, other)
        result.node.meta[WRITES] = True
        return result

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"):
    setattr(_Proxy, f"__i{_name}__", _in_place(_name))


_tracing = threading.RLock()
"""``torch.fx`` changes ``nn.Module`` itself for a run: of two at once, one would put back what is the other's."""


class _Tracer(fx.Tracer):
    _thread = 0

    def __init__(self, leaves: tuple[type[nn.Module], ...]) -> None:
        super().__init__()
        self.leaves = leaves
        self.proxies = weakref.WeakSet[fx.Proxy]()
        self._fakes = FakeTensorMode()
        self._known: dict[fx.Node, Tensor | None] = {}

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        with _tracing:
            self._thread = threading.get_ident()
            return super().trace(root, concrete_args)

    # What other threads run meanwhile comes by here, too, and is no part of this.

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        made = _Proxy(node, self)
        self.proxies.add(made)
        return made

    def create_proxy(self, kind: str, target: Any, args: Any, *others: Any, **keywords: Any) -> Any:
        if kind == "call_method" and target in _ASKED_BY_CALLS and isinstance(args[0], fx.Proxy):
            known = self.known(args[0].node)
            if known is not None and not any(isinstance(a, fx.Proxy) for a in args[1:]):
                return getattr(known, target)(*args[1:], **(others[0] if others else keywords.get("kwargs", {})))
        return super().create_proxy(kind, target, args, *others, **keywords)

    def known(self, node: fx.Node) -> Tensor | None:
        """A tensor without values that is otherwise what a node gives, if that is made of the model's own alone."""
        if node not in self._known:
            try:
                with self._fakes, torch.no_grad():
                    made = self._made(node)
            except Exception:  # it depends on values, or on the model's inputs
                made = None
            self._known[node] = made if isinstance(made, Tensor) else None
        return self._known[node]

    def _made(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            path, _, name = str(node.target).rpartition(".")
            module = self.root.get_submodule(path)
            tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
            return self._fakes.from_tensor(next(table[name] for table in tables if name in table), static_shapes=True)
        arguments, keywords = fx.node.map_arg((node.args, node.kwargs), self._needed)
        if node.op == "call_method":
            return getattr(arguments[0], str(node.target))(*arguments[1:], **keywords)
        if callable(node.target) and (node.target.__module__ or "torch").partition(".")[0] in _KNOWN:
            return node.target(*arguments, **keywords)
        raise TypeError(f"{node} is not made of the model's own alone")

    def _needed(self, node: fx.Node) -> Tensor:
        known = self.known(node)
        if known is None:
            raise TypeError(f"{node} is not known")
        return known

    def is_leaf_module(self, module: nn.Module, qualified_name: str) -> bool:
        if isinstance(module, torch.jit.ScriptModule):
            return True
        if isinstance(module, _WeightNorm) or _computes_a_norm(module):  # else reading a weight would be a call
            return False
        return isinstance(module, self.leaves) or super().is_leaf_module(module, qualified_name)


def _computes_a_norm(module: nn.Module) -> bool:
    """Whether it is what stands behind ``layer.weight`` under torch's parametrised weight norm, and nothing else."""
    return isinstance(module, ParametrizationList) and len(module) == 1 and isinstance(module[0], _WeightNorm)


_WRAPPERS = (nn.DataParallel, AveragedModel)
"""Modules that call their child ``module`` with whatever they are called with, which ``torch.fx`` cannot follow."""


def symbolic_run(model: nn.Module, leaves: tuple[type[nn.Module], ...], training: bool | None = None) -> fx.Graph:
    """What ``forward`` computes. It is the user's own code, and may raise anything.

    ``NotRestoredError`` alone is not the user's: the model is not as it was.

    Args:
        leaves: modules of these classes, and torch's own, are nodes, also where ``forward`` of one is called by name;
            the run goes through all others.
        training: the mode that all modules are in meanwhile; None for that of each.
    """
    root, path = wrapped(model)
    tracer = _Tracer(leaves)
    with warnings.catch_warnings(), _through_compiled(), _without(tracer.proxies, model), _untouched(model):
        warnings.simplefilter("ignore")
        for module in _of_python(model):
            # Hooks may keep what they see, outside of the model.
            module.__dict__.update(_forward_hooks=OrderedDict(), _forward_pre_hooks=OrderedDict())
            module.training = module.training if training is None else training
        if "forward" in vars(root):  # torch.fx runs the class's
            raise TypeError("forward was replaced on the model itself, and cannot be traced")
        for module in _of_python(root):
            if module is not root and tracer.is_leaf_module(module, ""):
                module.__dict__["forward"] = functools.partial(_as_called, tracer, module, module.forward)
        graph = tracer.trace(root)
    for node in graph.nodes:
        if node.op in ("call_module", "get_attr"):
            node.target = f"{path}{node.target}"
    return graph


def wrapped(model: nn.Module) -> tuple[nn.Module, str]:
    """The module behind those that only stand before one, and the beginning of its parts' names in ``model``."""
    root, path = model, ""
    while (name := name_of_wrapped(root)) is not None:
        root, path = getattr(root, name), f"{path}{name}."
    return root, path


def name_of_wrapped(module: nn.Module) -> str | None:
    """Of the child that a module only stands before; None for other modules."""
    if isinstance(module, _WRAPPERS):
        return "module"
    return "_orig_mod" if isinstance(module, compiled_modules()) else None


def _through_compiled() -> contextlib.AbstractContextManager[object]:
    """While this holds, a run goes through what ``torch.compile`` made of a part as through that part."""
    config = getattr(sys.modules.get("torch._dynamo"), "config", None)
    return contextlib.nullcontext() if config is None else config.patch(error_on_nested_fx_trace=False)


def _of_python(model: nn.Module) -> list[nn.Module]:
    """The modules that a run may change. Those of TorchScript are nodes of it, and their tables are views that cannot
    be filled anew."""
    return [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]


def _as_called(
    tracer: fx.Tracer, module: nn.Module, forward: Callable[..., Any], /, *arguments: Any, **keywords: Any
) -> Any:
    return tracer.call_module(module, forward, arguments, keywords)


def argument(node: fx.Node, name: str, position: int) -> Any:
    """What a call is given as ``name``, or at ``position``; None if nothing."""
    return node.kwargs.get(name, node.args[position] if len(node.args) > position else None)


@contextlib.contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Undoes what ``forward`` does beside computing: tensors written, attributes set, lists filled, numbers drawn."""
    tables = ("_parameters", "_buffers", "_modules")
    before = [(m, dict(m.__dict__), {t: dict(m.__dict__[t]) for t in tables}) for m in _of_python(model)]
    dense = (p for p in model.parameters() if p.layout is torch.strided)
    data = [(p, p.data) for p in dense if type(p) is nn.Parameter and not is_lazy(p)]
    held = containers([attributes for _, attributes, _ in before])
    contents = [(container, _content(container)) for container in held]
    kinds = _stateful()
    parts = {id(part): part for _, content in contents for part in content if isinstance(part, kinds)}
    states = [_put_back_state(part) for part in parts.values()]
    state, numpy = random.getstate(), sys.modules.get("numpy")
    state_of_numpy = None if numpy is None else numpy.random.get_state()
    writes = _Writes()
    with torch.random.fork_rng(devices=[]):
        try:
            with writes:
                yield
        finally:
            with _undoing() as undo:
                undo.callback(writes.undo)
                for parameter, values in data:
                    undo.callback(_point_back, parameter, values)
                for module, attributes, kept in before:
                    undo.callback(_refill, module.__dict__, attributes)
                    for table, entries in kept.items():
                        undo.callback(_refill, attributes[table], entries)
                for put_back in states:
                    undo.callback(put_back)
                for container, content in contents:
                    undo.callback(_put_back, container, content)
                if numpy is not None:
                    undo.callback(numpy.random.set_state, state_of_numpy)
                undo.callback(random.setstate, state)


def _stateful() -> tuple[type, ...]:
    """What changes in place and holds nothing that may be a module: sources of random numbers, and numpy's arrays."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (torch.Generator, random.Random)
    generators = (numpy.random.Generator, numpy.random.BitGenerator, numpy.random.RandomState)
    return (torch.Generator, random.Random, *generators, numpy.ndarray)


def _put_back_state(value: Any) -> Callable[[], object]:
    """What gives ``value`` its present state."""
    if isinstance(value, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, random.SystemRandom):  # it has none
        return lambda: None
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    numpy = sys.modules["numpy"]
    if isinstance(value, numpy.ndarray):
        if not value.flags.writeable or value.nbytes > _LARGEST_ARRAY:
            return lambda: None
        array = value.view(numpy.ndarray)
        return functools.partial(numpy.copyto, array, array.copy())
    if isinstance(value, numpy.random.RandomState):
        return functools.partial(value.set_state, value.get_state())
    bits = getattr(value, "bit_generator", value)
    return functools.partial(setattr, bits, "state", bits.state)


_LARGEST_ARRAY = 1 << 26
"""Bytes: a larger array is a data set, of which no copy is made."""


@contextlib.contextmanager
def _undoing() -> Iterator[contextlib.ExitStack]:
    """Calls what is given to it, the last first, each also where others raise."""
    try:
        with contextlib.ExitStack() as undo:
            yield undo
    except Exception as reason:
        raise NotRestoredError(f"the look into forward changed the model, and cannot undo it: {reason}") from reason


def _point_back(parameter: nn.Parameter, values: Tensor) -> None:
    if parameter.data_ptr() != values.data_ptr():
        parameter.data = values


def _refill(table: dict[str, Any], entries: dict[str, Any]) -> None:
    table.clear()
    table.update(entries)


@contextlib.contextmanager
def _without(proxies: weakref.WeakSet[fx.Proxy], model: nn.Module) -> Iterator[None]:
    """Undoes what ``forward`` keeps beside the model, if a proxy of the trace is still alive then: caches in attributes
    of a class, in globals of its file or in closures. Otherwise these, which other threads use too, are left alone."""
    classes = {kind for module in model.modules() for kind in type(module).__mro__ if _may_keep(kind)}
    functions = [value for kind in classes for value in vars(kind).values() if isinstance(value, FunctionType)]
    scopes = list({id(f.__globals__): f.__globals__ for f in functions}.values())
    classes |= {
        value
        for scope in scopes
        for value in list(scope.values())
        if isinstance(value, type) and value.__module__ == scope.get("__name__")
    }
    attributes = [(kind, dict(vars(kind))) for kind in classes]
    variables = [(scope, dict(scope)) for scope in scopes]
    cells = [(cell, cell.cell_contents) for f in functions for cell in f.__closure__ or () if _is_filled(cell)]
    kept = [value for _, values in (*attributes, *variables) for value in values.values()]
    kept = [value for value in kept if isinstance(value, MUTABLE) and len(value) <= _MOST_KEPT]
    contents = [(container, _content(container)) for container in containers([*kept, *(value for _, value in cells)])]
    try:
        yield
    finally:
        if len(proxies):
            with _undoing() as undo:
                for kind, values in attributes:
                    undo.callback(_reset_attributes, kind, values)
                for scope, values in variables:
                    undo.callback(_reset_variables, scope, values)
                for cell, value in cells:
                    undo.callback(setattr, cell, "cell_contents", value)
                for container, content in contents:
                    undo.callback(_put_back, container, content)


def _reset_variables(scope: dict[str, Any], values: dict[str, Any]) -> None:
    for name in [*scope]:
        if name not in values:
            del scope[name]
    scope.update(values)


def _reset_attributes(kind: type, values: dict[str, Any]) -> None:
    for name, value in [*vars(kind).items()]:
        if name not in values:
            delattr(kind, name)
        elif value is not values[name]:
            setattr(kind, name, values[name])


def _may_keep(kind: type) -> bool:
    return is_class_of_a_user(kind) and kind.__module__.partition(".")[0] != "wnfused"


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


_MOST_KEPT = 10_000
"""Entries of a global list or dict that is looked into: caches are smaller, data sets may be larger."""


def _content(container: Container) -> list[Any]:
    """What is in a container; of a dict, the keys and the values by turns."""
    return [part for item in container.items() for part in item] if isinstance(container, dict) else list(container)


def _put_back(container: Container, content: list[Any]) -> None:
    """Fills a container with what was in it; another thread may look into one that has not changed."""
    now = _content(container)
    if len(now) == len(content) and all(map(operator.is_, now, content)):
        return
    container.clear()
    if isinstance(container, dict):
        for key, value in zip(content[::2], content[1::2], strict=True):
            container[key] = value
    else:
        (container.update if isinstance(container, set) else container.extend)(content)


class _Writes(TorchDispatchMode):
    """Keeps what tensors hold that an op is about to write to."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for i, argument in enumerate(func._schema.arguments):
            if argument.is_write:
                given = args[i] if i < len(args) else kwargs.get(argument.name)
                tensors = given if isinstance(given, (list, tuple)) else [given]
                self._kept += [(t, t.clone()) for t in tensors if isinstance(t, Tensor)]
        return func(*args, **kwargs)

    def undo(self) -> None:
        """The latest write first: of views of one memory, the earliest state is the last to be put back."""
        with contextlib.ExitStack() as undo:
            for tensor, values in self._kept:
                undo.callback(_write_back, tensor, values)
        self._kept.clear()


def _write_back(tensor: Tensor, values: Tensor) -> None:
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        if tensor.shape != values.shape:  # an op with ``out=`` resizes
            tensor.resize_(values.shape)
        if is_expanded(tensor):  # which torch refuses to write to; so it may have before
            for dim in (d for d, step in enumerate(tensor.stride()) if step == 0):
                tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
        tensor.copy_(values)
