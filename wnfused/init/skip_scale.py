"""The factor on a residual block's sum, the one thing besides parameters that a scheme may set."""

from __future__ import annotations

from typing import Any

from torch import nn

_BEFORE = "_skip_scale_before"


def scale_sums_(block: nn.Module, factor: float) -> None:
    """``skip_scale <- factor`` for as long as no other scheme initialises the model."""
    block.__dict__.setdefault(_BEFORE, block.skip_scale)
    block.skip_scale = factor  # type: ignore[assignment]


def scaled_sums(model: nn.Module) -> dict[str, float]:
    """The factors that ``scale_sums_`` set, by the names of their blocks."""
    return {name: module.skip_scale for name, module in model.named_modules() if _BEFORE in module.__dict__}


def restore_sums_(model: nn.Module) -> None:
    """Every block as it was built."""
    for module in model.modules():
        if _BEFORE in module.__dict__:
            module.skip_scale = module.__dict__.pop(_BEFORE)


def sums_of(model: nn.Module) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Every module, and what ``put_sums_back_`` needs of it."""
    names = ("skip_scale", _BEFORE)
    return [(m, {name: m.__dict__[name] for name in names if name in m.__dict__}) for m in model.modules()]


def put_sums_back_(sums: list[tuple[nn.Module, dict[str, Any]]]) -> None:
    """Every block as it was when ``sums_of`` saw it."""
    for module, attributes in sums:
        for name in ("skip_scale", _BEFORE):
            module.__dict__.pop(name, None)
        module.__dict__.update(attributes)
