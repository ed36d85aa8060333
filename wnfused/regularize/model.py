"""Regularisation of whole models, batched over layers whose matrices have one shape."""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Callable
from functools import reduce
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from wnfused._modules import Filter, check_module, quoted
from wnfused._numbers import at_least_0, finite, function, random_source
from wnfused.init.units import stored_parameters_of
from wnfused.nn import WNResidualStage
from wnfused.nn._layer import refuse_frozen
from wnfused.reference import wide
from wnfused.regularize import hard, penalties
from wnfused.regularize.matrices import WEIGHTS, Layers, can_be_seen, from_matrices, matrices, of_layer
from wnfused.regularize.matrices import layers as layers_of

_LARGEST = sys.float_info.max

_PENALTIES: dict[str, Callable[[Tensor], Tensor]] = {
    "soft": penalties.soft,
    "double_soft": penalties.double_soft,
    "mutual_coherence": penalties.mutual_coherence,
    "srip": penalties.srip,
}


class Regularizer:
    """``loss(model) = strength * sum over layers of the penalty of their matrices``.

    A weight that several layers share counts once, under the name of the first of them that the filter takes.

    Args:
        penalty: ``"soft"``, ``"gain_adjusted"``, ``"double_soft"``, ``"mutual_coherence"`` or ``"srip"``.
        strength: lambda, finite, at least 0.
        gain: for ``"gain_adjusted"``: a number for all layers, or ``"initial"`` for ``||W||_F / sqrt(min(r, c))`` of
            each matrix as it is when ``loss`` or ``terms`` first sees its layer: what an initialisation set. They are
            kept for each layer, whatever model it is in, for as long as it lives, and in no checkpoint; a copy or a
            pickle of the regularizer has none yet. A run that is resumed calls ``terms`` on the initial weights, of the
            same seed, before it loads the checkpoint: otherwise the gains are those of the checkpoint.
        weight: which matrix of a weight-normalised layer: ``"effective"``, ``g_i v_i / ||v_i||``, which multiplies the
            input, so that gains are regularised too; or ``"direction"``, ``v_i / ||v_i||``, which leaves them free.
        filter: ``filter(name, module)`` says which layers to take; all linear and convolutional ones and residual
            stages if None. A convolution's matrix is ``[c_out, c_in * taps]``, one a group.
        generator: of the random starts of ``"srip"``.

    Example:
        >>> regularizer = wnfused.regularize.Regularizer("gain_adjusted", strength=1e-3, gain="initial")
        >>> loss = criterion(model(x), y) + regularizer.loss(model)

    Raises:
        TypeError, ValueError: naming the argument, its value and what is right.

    Source: Hlav 2019, eq. 8 and 10; Bansal et al. 2018, section 3.
    """

    def __init__(
        self, penalty: str = "soft", *, strength: float = 1e-4, gain: float | str = 1.0, weight: str = "effective",
        filter: Filter | None = None, generator: torch.Generator | None = None,
    ) -> None:  # fmt: skip
        if penalty not in (*_PENALTIES, "gain_adjusted"):
            raise ValueError(f"penalty: unknown {penalty!r}; use one of {', '.join((*_PENALTIES, 'gain_adjusted'))}")
        at_least_0(strength=strength)
        if gain != "initial" and not (isinstance(gain, numbers.Real) and 0 < gain <= _LARGEST):
            raise ValueError(f"gain: {gain!r} must be finite and above 0, or 'initial'")
        if not isinstance(gain, str):
            penalties.check_square(float(gain), torch.float64)
        if penalty != "gain_adjusted" and gain != 1.0:
            raise ValueError(f"gain: {gain!r} is for penalty='gain_adjusted'; {penalty!r} takes none")
        if weight not in WEIGHTS:
            raise ValueError(f"weight: unknown {weight!r}; use 'effective' or 'direction'")
        function(filter=filter)
        random_source(generator=generator)
        self.penalty, self.strength, self.gain, self.weight = penalty, strength, gain, weight
        self.filter, self.generator = filter, generator
        self._initial: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()

    def __repr__(self) -> str:
        """Penalty and strength, and of the other arguments those that are not at their defaults."""
        given = [repr(self.penalty), f"strength={self.strength!r}"]
        defaults = {"gain": 1.0, "weight": "effective", "filter": None, "generator": None}
        given += [f"{name}={getattr(self, name)!r}" for name, value in defaults.items() if getattr(self, name) != value]
        return f"{type(self).__name__}({', '.join(given)})"

    def __getstate__(self) -> dict[str, Any]:
        """Without the initial gains, whose layers are not copied with it."""
        return {name: value for name, value in self.__dict__.items() if name != "_initial"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _initial=WeakKeyDictionary())

    def loss(self, model: nn.Module) -> Tensor:
        """``strength`` times the sum of all penalties: a scalar with its graph to the parameters, on the first layer's
        device, in the widest dtype of all.

        Raises:
            TypeError: ``model`` is not a module.
            ValueError: the model has no layer to regularise, a lazy one without a shape or a sharded one; an initial
                gain that is not above 0.
        """
        values = [self._values(layers).sum() for layers in self._layers(model)]
        dtype = reduce(torch.promote_types, (value.dtype for value in values))
        total: Tensor = torch.stack([value.to(values[0].device, dtype) for value in values]).sum()
        return self.strength * total

    @torch.no_grad()
    def terms(self, model: nn.Module) -> dict[str, float]:
        """The penalty of every layer by its name, summed over its groups or blocks, without ``strength``.

        Initial gains that are not there yet are kept from here on, as by ``loss``.

        Raises:
            TypeError, ValueError: as ``loss``.
        """
        found: dict[str, float] = {}
        for layers in self._layers(model):
            parts = self._values(layers).split(layers.counts)
            found.update({name: part.sum().item() for name, part in zip(layers.names, parts, strict=True)})
        return found

    def _layers(self, model: nn.Module) -> list[Layers]:
        check_module(model=model)
        found = matrices(model, self.filter, self.weight)
        if not found:
            raise ValueError("model: has no linear or convolutional layer that the filter takes")
        return found

    def _values(self, layers: Layers) -> Tensor:
        if self.penalty == "srip":
            return penalties.srip(layers.matrices, generator=self.generator)
        if self.penalty != "gain_adjusted":
            return _PENALTIES[self.penalty](layers.matrices)
        return penalties.adjusted(layers.matrices, self._gains(layers))

    def _gains(self, layers: Layers) -> float | Tensor:
        w = layers.matrices.detach()
        if not isinstance(self.gain, str):
            penalties.check_square(float(self.gain), wide(w.dtype))
            return float(self.gain)
        if any(layer not in self._initial for layer in layers.modules):
            now = torch.linalg.matrix_norm(w.to(wide(w.dtype))) / math.sqrt(min(w.shape[-2:]))
            if w.is_meta:  # nothing to keep
                return now
            for name, layer, gains in zip(layers.names, layers.modules, now.split(layers.counts), strict=True):
                if layer not in self._initial and not penalties.has_inverse_square(gains).all():
                    raise ValueError(
                        f"gain: 'initial' of {quoted(name)} is {gains.tolist()}, and must be finite and above 0"
                    )
                self._initial.setdefault(layer, gains)
        return torch.cat([self._initial[layer].to(w.device) for layer in layers.modules])


@torch.no_grad()
def retract_(
    model: nn.Module, method: str = "polar", *, gain: float = 1.0, filter: Filter | None = None
) -> nn.Module:  # fmt: skip
    """Puts every layer's matrix back among the orthogonal ones; to be called after an optimiser's step.

    Of a weight-normalised layer v is, and g stays: its directions are orthonormal where it has no more rows than
    columns. ``dim`` must be 0 there.

    Args:
        model: changed in place.
        method: ``"polar"`` or ``"qr"``.
        gain: of the matrices of plain layers.
        filter: as in ``Regularizer``.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is not a module, ``gain`` not a number or ``filter`` not a function.
        ValueError: an unknown method; a gain that is not finite; a lazy layer without a shape; a weight that something
            else computes, that is sharded, or normalised over other rows; NaN or inf in a weight. Nothing has been
            changed then: all new weights are there before the first is written.
        RuntimeError: inside ``wnfused.frozen``.

    Source: Absil, Mahony & Sepulchre 2008, example 4.1.3; Hlav 2019.
    """
    check_module(model=model)
    refuse_frozen(model=model)
    methods = {"polar": hard.polar_factor, "qr": hard.qr_factor}
    if not isinstance(method, str) or method not in methods:
        raise ValueError(f"method: unknown {method!r}; use 'polar' or 'qr'")
    finite(gain=gain)
    function(filter=filter)
    shapes: dict[tuple[float, Any, torch.dtype, torch.device], list[tuple[str, nn.Module, Tensor, Tensor]]] = {}
    for name, layer in layers_of(model):
        if filter is not None and not filter(name, layer):
            continue
        for v, matrix, factor in _retractable(name, layer, gain):
            key = (factor, matrix.shape[-2:], matrix.dtype, matrix.device)
            shapes.setdefault(key, []).append((name, layer, v, matrix))
    retracted: list[tuple[Tensor, Tensor]] = []
    for (factor, *_), same in shapes.items():
        together = torch.cat([matrix for *_, matrix in same])
        if can_be_seen(together) and not together.isfinite().all():
            name = next(name for name, *_, matrix in same if not matrix.isfinite().all())
            raise ValueError(
                f"model: the weight of {quoted(name)} has NaN or inf; no orthogonal matrix is nearest to that"
            )
        result = methods[method](together, gain=factor)
        for (_, layer, v, _), part in zip(same, result.split([len(m) for *_, m in same]), strict=True):
            stage = isinstance(layer, WNResidualStage)
            retracted.append((v, part.view(v.shape) if stage else from_matrices(layer, part, v.shape)))
    for v, new in retracted:
        v.copy_(new)
    return model


def _retractable(name: str, layer: nn.Module, gain: float) -> list[tuple[Tensor, Tensor, float]]:
    """What to write to, its matrices, and their gain."""
    held = stored_parameters_of(layer)
    if held is None:
        raise ValueError(f"model: the weight of {quoted(name)} is computed by something else; leave it out by filter")
    weight, g, dim = held
    factor = gain if g is None else 1.0
    if g is not None and (dim != 0 or isinstance(layer, nn.modules.conv._ConvTransposeNd)):
        raise ValueError(
            f"model: {quoted(name)} is normalised over other rows than its outputs; leave it out by filter"
        )
    return [(weight, matrix, factor) for _, matrix in of_layer(name, layer, "direction")]
