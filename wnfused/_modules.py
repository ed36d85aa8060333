"""Questions about any module."""

from __future__ import annotations

from collections.abc import Callable

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


def norm_dim(stored: int) -> int | None:
    """The dim of one of torch's weight norms, which keep None, one norm over the whole tensor, as -1."""
    return None if stored == -1 else stored


def holders(model: nn.Module) -> dict[int, set[nn.Module]]:
    """For each parameter, by id, the modules that hold it themselves."""
    found: dict[int, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                found.setdefault(id(parameter), set()).add(module)
    return found
