"""Questions about any module."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

Filter = Callable[[str, nn.Module], bool]
"""Which modules of a model are meant, by name and module."""


def class_of(module: nn.Module) -> type[nn.Module]:
    """A module's class; torch's parametrisation makes a subclass of its own, which does not count."""
    kind = type(module)
    return kind.__bases__[0] if parametrize.is_parametrized(module) else kind


def shown(name: str) -> str:
    """How logs, notes and reports call a module; the model itself has no name."""
    return name or "the model"


def quoted(name: str) -> str:
    """The same in an error, where names are in quotes."""
    return repr(name) if name else shown(name)


def check_module(**values: object) -> None:
    """Each an ``nn.Module``."""
    for name, value in values.items():
        if not isinstance(value, nn.Module):
            raise TypeError(f"{name}: expected an nn.Module, got {type(value).__name__}")


def is_sharded(value: object) -> bool:
    """Whether a tensor is spread over processes, as FSDP2 and tensor parallelism leave parameters."""
    # Where there is one, its module has been imported; for us alone that would take as long as all the rest.
    module = sys.modules.get("torch.distributed.tensor")
    return isinstance(value, getattr(module, "DTensor", ()))


def sharded_error(what: str, remedy: str) -> ValueError:
    """For a function that cannot do with ``what``, a tensor that ``is_sharded``."""
    return ValueError(f"{what} is sharded (a DTensor), of which each process holds a part; {remedy}")


def refuse_sharded(module: nn.Module, names: Sequence[str], remedy: str) -> None:
    """Raises where one of these parameters of a module ``is_sharded``."""
    for name in names:
        if is_sharded(module._parameters.get(name)):
            raise sharded_error(name, remedy)


def norm_dim(stored: int) -> int | None:
    """The dim of one of torch's weight norms, which keep None, one norm over the whole tensor, as -1."""
    return None if stored == -1 else stored


def compiled_modules() -> tuple[type[Any], ...]:
    """What ``torch.compile`` makes of a module; nothing where nobody has imported what makes it, or not to the end."""
    made = getattr(sys.modules.get("torch._dynamo"), "OptimizedModule", None)
    return () if made is None else (made,)


def holders(model: nn.Module) -> dict[int, set[nn.Module]]:
    """For each parameter, by id, the modules that hold it themselves."""
    found: dict[int, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                found.setdefault(id(parameter), set()).add(module)
    return found
