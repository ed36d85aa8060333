"""What a module's attributes reach beside its children: containers, and objects of a user's own classes."""

from __future__ import annotations

import sys
import weakref
from collections import ChainMap, OrderedDict, UserDict, UserList, deque
from collections.abc import Iterable, Iterator
from functools import partial
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

Container = list[Any] | deque[Any] | dict[Any, Any] | set[Any]

MUTABLE = (list, deque, dict, set)
_IMMUTABLE = (tuple, frozenset)
_NO_HOLDERS = (nn.Module, Tensor, type, ModuleType, FunctionType)
_WITH_ATTRIBUTES = (SimpleNamespace, UserDict, UserList, ChainMap)
"""Python's own classes that hold what they are given in attributes."""
_NOTHING_HELD = {type(None), bool, int, float, str, Tensor, nn.Parameter}
_MAY_BE_EMPTY = {dict, OrderedDict, list, tuple, set}
"""Both are most of what a model's modules have among their attributes."""


def containers(values: Iterable[Any]) -> Iterator[Container]:
    """Every container that changes in place among the values and in what these hold, each once.

    The attributes of an object (a dataclass, a ``SimpleNamespace``) are a dict. Modules are not gone into, nor are
    objects of torch's and of Python's own classes: loggers, locks, optimisers. ``UserDict`` and its like are.
    """
    pending, seen = list(values), set[int]()
    while pending:
        value = pending.pop()
        if type(value) in _NOTHING_HELD:
            continue
        if type(value) in weakref.ProxyTypes:  # passes for an instance of what it stands for, and is not hashable
            continue
        held = [] if type(value) in _MAY_BE_EMPTY and not value else list(_held(value))
        if not held and not isinstance(value, MUTABLE):
            continue
        if id(value) not in seen:
            seen.add(id(value))
            pending += held
            if isinstance(value, MUTABLE):
                yield value


def _held(value: Any) -> Iterator[Any]:
    """What a value holds itself."""
    if isinstance(value, dict):
        yield from value
        yield from value.values()
    elif isinstance(value, (*MUTABLE, *_IMMUTABLE)):
        yield from value
    elif isinstance(value, MethodType):
        yield value.__self__
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    if _is_of_a_user(value):
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            yield attributes
        yield from (getattr(value, name) for name in _slots(value))


def _is_of_a_user(value: Any) -> bool:
    if isinstance(value, _NO_HOLDERS):
        return False
    return isinstance(value, _WITH_ATTRIBUTES) or is_class_of_a_user(type(value))


def is_class_of_a_user(kind: type) -> bool:
    """Neither torch's nor Python's own."""
    package = kind.__module__.partition(".")[0]
    return package != "torch" and package not in sys.stdlib_module_names


def _slots(value: Any) -> list[str]:
    """The names of the slots that hold something: ``@dataclass(slots=True)`` has no dict."""
    names = []
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if name not in ("__dict__", "__weakref__") and hasattr(value, name)]


def replace_in(values: Iterable[dict[str, Any]], replaced: dict[nn.Module, nn.Module]) -> None:
    """Puts replacements into tables of attributes and all that these reach, in place wherever that can be."""
    for container in list(containers(values)):
        if isinstance(container, dict):
            _replace_in_dict(container, replaced)
        elif isinstance(container, set):
            for item in list(container):
                new = _replaced(item, replaced)
                if new is not item:
                    container.remove(item)
                    container.add(new)
        else:
            for i, item in enumerate(container):
                new = _replaced(item, replaced)
                if new is not item:  # a list may be read-only
                    container[i] = new


def _replace_in_dict(container: dict[Any, Any], replaced: dict[nn.Module, nn.Module]) -> None:
    keys = [_replaced(key, replaced) for key in container]
    if any(new is not key for new, key in zip(keys, container, strict=True)):
        values = list(container.values())
        container.clear()
        for key, value in zip(keys, values, strict=True):  # in their order
            container[key] = value
    for key, value in container.items():
        new = _replaced(value, replaced)
        if new is not value:
            container[key] = new


def _replaced(value: Any, replaced: dict[nn.Module, nn.Module]) -> Any:
    """What stands in a value's place; containers that change in place stay, and are seen to by themselves."""
    if type(value) in weakref.ProxyTypes:
        return value
    if isinstance(value, nn.Module):
        return replaced.get(value, value)
    if isinstance(value, MethodType):
        owner = _replaced(value.__self__, replaced)
        return value if owner is value.__self__ else getattr(owner, value.__name__, value)
    if isinstance(value, _IMMUTABLE):
        items = [_replaced(item, replaced) for item in value]
        if all(new is item for new, item in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, partial):
        function, arguments = _replaced(value.func, replaced), _replaced(value.args, replaced)
        if function is not value.func or arguments is not value.args:
            state = (function, arguments, value.keywords, value.__dict__)
            value.__setstate__(state)  # type: ignore[attr-defined]  # which all versions of Python have
    elif _is_of_a_user(value):
        for name in _slots(value):
            held = getattr(value, name)
            new = _replaced(held, replaced)
            if new is not held:
                object.__setattr__(value, name, new)
    return value
