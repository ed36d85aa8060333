"""What ``wnfused.convert`` and ``wnfused.fold`` share: one module takes another's place and loses nothing.

The newcomer is the same object in another class: attributes, buffers, children, hooks and modes go with it; only the
parameters that hold the weight differ, and the options that the other class does not know.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn
from torch.nn.utils.weight_norm import WeightNorm

from wnfused._modules import check_module, class_of, compiled_modules, shown
from wnfused._reachable import replace_in
from wnfused.nn import (
    WeightNormalised,
    WNConv1d,
    WNConv2d,
    WNConv3d,
    WNConvTranspose1d,
    WNConvTranspose2d,
    WNConvTranspose3d,
    WNLinear,
)

LAYERS: dict[type[nn.Module], type[WeightNormalised]] = {
    kind.__bases__[-1]: kind
    for kind in (WNLinear, WNConv1d, WNConv2d, WNConv3d, WNConvTranspose1d, WNConvTranspose2d, WNConvTranspose3d)
}
"""Which layer replaces which of torch's: the one that it extends."""

OPTIONS = ("activation", "negative_slope", "gamma", "init", "dim")
"""Attributes that a weight-normalised layer has beside those of torch's layer."""

# What a module keeps of its own accord: parameters, buffers, children, modes and the tables of hooks.
_BOOKKEEPING = set(nn.Module().__dict__)
_HOOKS = {name for name in _BOOKKEEPING if "_hook" in name}
_WITH_THEIR_MODULE = ("_load_state_dict_pre_hooks", "_state_dict_hooks")
# What Python itself writes into a class that only has a constructor; what torch's constructors call; and what follows
# from a method that the class has.
_CONSTRUCTOR_ONLY = {
    "__init__", "reset_parameters", "_has_own_product",
    "__module__", "__doc__", "__qualname__", "__annotations__", "__annotate__", "__annotate_func__",
    "__annotations_cache__", "__firstlineno__", "__static_attributes__", "__parameters__", "__orig_bases__",
    "__abstractmethods__", "_abc_impl", "__constants__", "__dict__", "__weakref__",
}  # fmt: skip


def checked(model: nn.Module, what: str) -> nn.Module:
    """``model``, or an error where the parameters of its layers are bound to something outside."""
    check_module(model=model)
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            path = f"model.{name}" if name else "model"
            raise ValueError(
                f"model: {path} is a DistributedDataParallel, which reduces gradients of the parameters that it was "
                f"built with; wrap anew: DistributedDataParallel(wnfused.{what}({path}.module), ...)"
            )
    return model


def additions(kind: type[nn.Module], known: Collection[type[nn.Module]]) -> tuple[type[nn.Module], list[str]] | None:
    """The known class that ``kind`` is or extends, and the names that it adds or overrides besides a constructor
    and the ``reset_parameters`` that it calls.

    Static methods know no instance and do not count, unless they override something.
    """
    found = next((parent for parent in kind.__mro__ if parent in known), None)
    if found is None:
        return None
    names = {name: parent for parent in reversed(_own_parents(kind, found)) for name in vars(parent)}
    names = {name: parent for name, parent in names.items() if name not in _CONSTRUCTOR_ONLY}
    return found, sorted(n for n, parent in names.items() if not _is_static(parent, n) or hasattr(found, n))


def static_methods(module: nn.Module, known: type[nn.Module]) -> dict[str, Any]:
    """Those that the module's class adds to a known one."""
    kind = class_of(module)
    names = {name for parent in _own_parents(kind, known) for name in vars(parent) if _is_static(parent, name)}
    return {name: getattr(kind, name) for name in sorted(names)}


def _own_parents(kind: type, known: type) -> list[type]:
    """The classes that make ``kind`` of ``known``, mixins among them."""
    return [c for c in kind.__mro__ if c not in known.__mro__ and c.__module__ not in ("abc", "typing")]


def _is_static(kind: type, name: str) -> bool:
    """Whether a static method, and one that pickle finds by its name."""
    value = vars(kind)[name]
    return isinstance(value, staticmethod) and value.__func__.__qualname__ == f"{kind.__qualname__}.{name}"


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Everything in a module's ``__dict__`` that ``nn.Module`` does not keep for itself."""
    return {name: value for name, value in module.__dict__.items() if name not in _BOOKKEEPING}


def twin(
    old: nn.Module, kind: type[nn.Module], *, known: type[nn.Module] | None = None, without: Collection[str] = ()
) -> nn.Module:
    """A ``kind`` with everything that ``old`` has but its hooks: attributes, buffers, parameters, children, mode.

    Args:
        known: what of ``old``'s classes ``kind`` replaces; static methods that others add become attributes.
        without: names of attributes, parameters and children that stay behind.
    """
    new = kind.__new__(kind)
    nn.Module.__init__(new)
    if known is not None:
        new.__dict__.update(static_methods(old, known))
    new.__dict__.update({name: value for name, value in own_attributes(old).items() if name not in without})
    for table in ("_parameters", "_buffers", "_modules"):
        kept = {name: value for name, value in old.__dict__[table].items() if name not in without}
        new.__dict__[table].update(kept)
    new.__dict__["_non_persistent_buffers_set"] = set(old._non_persistent_buffers_set)
    new.__dict__["training"] = old.training
    return new


def move_hooks(old: nn.Module, new: nn.Module) -> None:
    """Hooks of every kind, and the mode; the tables themselves move, so that the handles of hooks go on removing them.

    ``old`` keeps copies: who holds it from outside the model finds it working. torch's own weight-norm hooks are part
    of how the old weight is stored and stay behind.
    """
    new.training = old.training
    for name in _HOOKS & set(old.__dict__):
        table = old.__dict__[name]
        new.__dict__[name] = table
        old.__dict__[name] = table.copy() if isinstance(table, dict) else table
    for table in (new._forward_pre_hooks, new._load_state_dict_pre_hooks):
        for key in [key for key, hook in table.items() if _stores_weight(hook)]:
            del table[key]
    for name in _WITH_THEIR_MODULE:
        for hook in new.__dict__[name].values():
            if getattr(hook, "with_module", False):
                hook.module = weakref.ref(new)


def _stores_weight(hook: Any) -> bool:
    """torch's hook that computes a weight-normalised weight, or the one that renames it in checkpoints."""
    hook = getattr(hook, "hook", hook)  # the wrapper of checkpoints' hooks forgets its function's name when copied
    return isinstance(hook, WeightNorm) or getattr(hook, "__qualname__", "").endswith("._weight_norm_compat_hook")


def has_hooks(module: nn.Module) -> bool:
    """Whether anything watches a module run; torch's own weight norm does not count."""
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(not isinstance(hook, WeightNorm) for name in names for hook in getattr(module, name).values())


def replace(model: nn.Module, replaced: dict[nn.Module, nn.Module]) -> nn.Module:
    """Puts every replacement wherever its module stands: as a child in all places, and in what attributes reach."""
    if not replaced:
        return model
    parents = list(model.modules())
    own = [own_attributes(parent) for parent in parents]
    replace_in(own, replaced)
    for parent, attributes in zip(parents, own, strict=True):
        parent.__dict__.update(attributes)
        for name, child in parent._modules.items():
            if child in replaced:
                parent._modules[name] = replaced[child]
        if isinstance(parent, compiled_modules()):
            parent._initialize()  # it calls the module it was built around, whatever its children are
    return replaced.get(model, model)


def named(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        yield shown(name), module
