"""What a model has beside its layers: modules whose parameters no scheme has a rule for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from wnfused._modules import class_of, shown
from wnfused.init.report import some_of
from wnfused.nn import FixupBlock, ScalarBias

# Ones, zeros and slopes, which mean the same beside any weights; Fixup's scalars are reset by its scheme.
_START_AS_THEY_ARE = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.PReLU, FixupBlock, ScalarBias)


def note_on_others(model: nn.Module, layers: Iterable[nn.Module]) -> Iterator[str]:
    """One note on the modules that keep parameters which are none of the layers', by class and path."""
    of_layers = {part for layer in layers for part in layer.modules()}
    known = {id(parameter) for part in of_layers for parameter in part.parameters(recurse=False)}
    others: dict[str, dict[str, None]] = {}
    for name, module in model.named_modules():
        if module in of_layers or isinstance(module, _START_AS_THEY_ARE):
            continue
        if any(id(parameter) not in known for parameter in module.parameters(recurse=False)):
            path, owner = _owner(model, name, module)
            others.setdefault(class_of(owner).__name__, {})[shown(path)] = None
    if others:
        listed = "; ".join(f"{some_of(list(names))} ({kind})" for kind, names in others.items())
        yield f"left as they were, for no scheme has a rule for their parameters: {listed}"


def _owner(model: nn.Module, name: str, module: nn.Module) -> tuple[str, nn.Module]:
    """A module by its path; in place of a parametrisation of torch's, what it belongs to."""
    parts = name.split(".")
    if "parametrizations" not in parts:
        return name, module
    path = ".".join(parts[: parts.index("parametrizations")])
    return path, model.get_submodule(path)
