"""Questions about any module."""

from __future__ import annotations

from torch import nn
from torch.nn.utils import parametrize


def class_of(module: nn.Module) -> type[nn.Module]:
    """A module's class; torch's parametrisation makes a subclass of its own, which does not count."""
    kind = type(module)
    return kind.__bases__[0] if parametrize.is_parametrized(module) else kind


def holders(model: nn.Module) -> dict[int, set[nn.Module]]:
    """For each parameter, by id, the modules that hold it themselves."""
    found: dict[int, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                found.setdefault(id(parameter), set()).add(module)
    return found
