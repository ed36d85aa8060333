"""Lower bounds on the gradients of networks without normalisation: large logits make large gradients.

With logits z, softmax probabilities p, their entropy H(p) and the cross-entropy ``l(z, y)``, wherever the logits are
positively homogeneous of degree 1 (scaling the argument by ``a > 0`` scales them by a) in

    an activation x:        ||dl/dx||         >= (l(z, y) - H(p)) / ||x||                        (theorem 1)
    a set theta of weights: ||dl_avg/dtheta|| >= (1/M) sum_m (l_m - H(p_m)) / ||theta|| = G       (theorem 2)
                            E G               >= (E max_i z_i - log c) / ||theta||               (eq. 5)

Such sets are the stem; the head; a shortcut with the last convolution of its branch. Of a weight-normalised layer the
gains and the bias take the weights' place. Source: Zhang, Dauphin & Ma (2019), section 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wnfused._modules import Filter
from wnfused._numbers import positive
from wnfused.diagnostics.arguments import (
    check_classes,
    check_differentiable,
    check_inputs,
    check_logits,
    check_model,
    check_targets,
    mini_batches,
)
from wnfused.diagnostics.drawing import Drawable, key, logarithmic, over_stations
from wnfused.diagnostics.norms import layer_norms
from wnfused.diagnostics.progress import Progress, advancing
from wnfused.diagnostics.state import forked, outputs_of, undisturbed
from wnfused.nn import WeightNormalised


@dataclass(frozen=True, eq=False)
class ActivationBounds(Drawable):
    """What ``activation_gradient_bounds`` found for n samples at L stations.

    Attributes:
        names: of the stations, whose outputs are x.
        gradients: ``||dl_i/dx_i||`` ``[L, n]``.
        bounds: ``(l_i - H(p_i)) / ||x_i||`` ``[L, n]``; negative, and so empty, where the model is more uncertain
            than wrong.
    """

    names: tuple[str, ...]
    gradients: np.ndarray
    bounds: np.ndarray

    def _draw(self, axes: Sequence[Any], label: str | None) -> None:
        (axis,) = axes
        line = over_stations(axis, self.gradients.mean(1), label)
        bounds = self.bounds.mean(1)
        x = np.arange(1, len(bounds) + 1)
        axis.plot(x, np.where(bounds > 0, bounds, np.nan), color=line.get_color(), linestyle=":", linewidth=1.2)
        key(axis, r"lower bound $(\ell - H(p))/\|x\|$")
        axis.set_ylabel(r"gradient norm $\|\partial\ell/\partial x\|$" + "\n(mean over samples)")


def activation_gradient_bounds(
    model: nn.Module, inputs: Tensor, targets: Tensor, *, filter: Filter | None = None, progress: Progress = False
) -> ActivationBounds:
    """Theorem 1 at every station: gradients of the cross-entropy beside their bound.

    The bound holds where all that follows the station is positively homogeneous: layers and ReLUs with zero biases,
    and no normalisation over the batch; a gradient below it shows that something is not.

    Args:
        inputs: ``[n, ...]``; targets: classes ``[n]``, int64.
        filter: which modules are stations, see ``wnfused.diagnostics.stations``.
        progress: True for a bar on the terminal, or a function of (steps done, None): forward and backward.

    Raises:
        TypeError, ValueError: naming the argument that cannot work; outputs that are no logits ``[n, classes]``.
        RuntimeError: inside of ``torch.inference_mode()``.
    """
    check_model(model)
    check_inputs(inputs)
    check_targets(targets, inputs)
    excess: list[Tensor] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        total = _class_loss(outputs, targets)
        excess.append(_excess(outputs.detach(), targets))
        return total

    norms = layer_norms(model, inputs, targets, loss=loss, filter=filter, progress=progress)
    with np.errstate(divide="ignore", invalid="ignore"):
        bounds = excess[0].cpu().numpy() / norms.activations
    return ActivationBounds(norms.names, norms.gradients, bounds)


@dataclass(frozen=True, eq=False)
class ParameterBounds(Drawable):
    """What ``parameter_gradient_bounds`` found for S sets of parameters.

    Attributes:
        names: of the sets.
        gradient: ``||dl_avg/dtheta||`` ``[S]``.
        bound: G ``[S]``.
        expected: ``(mean max_i z_i - log c) / ||theta||`` ``[S]``, what G is expected to exceed where the head is
            random with mean 0.
        homogeneous: whether doubling theta doubles the logits ``[S]``; where not, the bounds mean nothing.
    """

    names: tuple[str, ...]
    gradient: np.ndarray
    bound: np.ndarray
    expected: np.ndarray
    homogeneous: np.ndarray

    def _draw(self, axes: Sequence[Any], label: str | None) -> None:
        (axis,) = axes
        x = np.arange(len(self.names))
        (points,) = axis.plot(x, self.gradient, "o", markersize=7, label=label or "gradient")
        tops = np.where(self.homogeneous & (self.bound > 0), self.bound, np.nan)
        axis.plot(x, tops, "_", markersize=16, markeredgewidth=2, color=points.get_color())
        below = np.where(self.homogeneous & (self.expected > 0), self.expected, np.nan)
        axis.plot(x, below, "x", markersize=6, color=points.get_color())
        key(axis, "lower bound $G$", "", "_")
        key(axis, r"$(E \max z - \log c)/\|\theta\|$", "", "x")
        logarithmic(axis, self.gradient)
        axis.set_xticks(x, [self._tick(i) for i in range(len(self.names))], fontsize=8)
        axis.set_ylabel(r"$\|\partial\ell_{avg}/\partial\theta\|$")
        axis.margins(x=0.15)

    def _tick(self, i: int) -> str:
        """``stages.1.transition.shortcut + stages.1.transition.conv2`` over three lines, the block named once."""
        parts = self.names[i].split(" + ")
        block = parts[0].rpartition(".")[0]
        lines = [block, *(part.removeprefix(f"{block}.") for part in parts)] if len(parts) > 1 else parts
        return "\n".join(lines if self.homogeneous[i] else [*lines, "(not homogeneous)"])


def parameter_gradient_bounds(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    *,
    sets: Mapping[str, Sequence[str]] | None = None,
    batch_size: int | None = 128,
    progress: Progress = False,
) -> ParameterBounds:
    """Theorem 2 for sets of parameters: gradients of the mean cross-entropy beside G.

    Args:
        inputs: ``[n, ...]``; targets: classes ``[n]``, int64.
        sets: names of parameters under a name of your own; default: ``homogeneous_sets``.
        batch_size: samples differentiated at once; None: all.
        progress: True for a bar on the terminal, or a function of (mini-batches done, None).

    Raises:
        TypeError, ValueError: naming the argument that cannot work; outputs that are no logits ``[n, classes]``.
        RuntimeError: inside of ``torch.inference_mode()``.
    """
    check_model(model)
    check_inputs(inputs)
    check_differentiable()
    check_targets(targets, inputs)
    if batch_size is not None:
        positive(batch_size=batch_size)
    if sets is None:
        # Of one sample a batch norm has no statistics.
        sets = homogeneous_sets(model, inputs[:2])
    elif not isinstance(sets, Mapping):
        raise TypeError(f"sets: expected a mapping from names to parameters' names, got {type(sets).__name__}")
    if not sets:
        raise ValueError("sets: is empty; the model has no linear or convolutional layer, or none was named")
    for name, parameters in sets.items():
        if isinstance(parameters, str) or not isinstance(parameters, Sequence):
            raise TypeError(f"sets: {name!r} must be a sequence of parameters' names, not {parameters!r}")
        if not len(parameters):
            raise ValueError(f"sets: {name!r} names no parameter; give at least one")
    named = dict(model.named_parameters())
    for name in {parameter for parameters in sets.values() for parameter in parameters} - named.keys():
        raise ValueError(f"sets: the model has no parameter {name!r}")
    chosen = sorted({parameter for parameters in sets.values() for parameter in parameters})
    with undisturbed(model), torch.enable_grad(), advancing(progress, "bounds", None) as advance:
        for name in chosen:
            named[name].requires_grad_(True)
        gradients = {name: torch.zeros_like(named[name], dtype=torch.float64) for name in chosen}
        excess = largest = 0.0
        for batch, classes in mini_batches(inputs, targets, batch_size):
            outputs = outputs_of(model, batch)
            loss = _class_loss(outputs, classes) / len(inputs)
            if not loss.requires_grad:
                raise ValueError("model: its outputs have no graph: no parameter affects them")
            parts = torch.autograd.grad(loss, [named[name] for name in chosen], materialize_grads=True)
            for name, part in zip(chosen, parts, strict=True):
                gradients[name] += part
            excess += _excess(outputs.detach(), classes).sum().item() / len(inputs)
            largest += outputs.detach().double().amax(1).sum().item() / len(inputs)
            advance()
        lengths = np.array([_length(named[name] for name in names) for names in sets.values()])
        gradient = [_length(gradients[name] for name in names) for names in sets.values()]
        few = inputs[: min(len(inputs), batch_size or len(inputs))]
        homogeneous = [_is_homogeneous(model, few, names) for names in sets.values()]
    with np.errstate(divide="ignore", invalid="ignore"):
        bound, expected = excess / lengths, (largest - np.log(outputs.shape[1])) / lengths
    return ParameterBounds(tuple(sets), np.array(gradient), bound, expected, np.array(homogeneous, dtype=bool))


def homogeneous_sets(model: nn.Module, inputs: Tensor) -> dict[str, tuple[str, ...]]:
    """The sets that the paper names, in this model: stem, head, and each shortcut with the last layer of its branch.

    Stem and head are the first and last layers that run on ``inputs``; the shortcuts are those of blocks that keep
    theirs under ``shortcut`` and their last layer under ``conv2``, as this package's do. A layer's parameters are its
    weight, or its gains if it is weight-normalised, and its bias.

    Args:
        inputs: ``[n, ...]``, of any dtype that the model takes; two samples are enough.

    Returns:
        Names of parameters under the names of their layers; empty for a model without linear or convolutional layers.

    Raises:
        TypeError: ``model`` is not a module, or ``inputs`` no tensor.
        ValueError: ``inputs`` holds no sample, or the model a lazy layer without a shape.
    """
    check_model(model)
    check_inputs(inputs)
    layers: list[str] = []
    names = {id(module): name for name, module in model.named_modules() if _scales(module)}
    hooks = [
        module.register_forward_hook(lambda module, *_: layers.append(names[id(module)]))
        for module in model.modules()
        if id(module) in names
    ]
    try:
        with undisturbed(model), torch.no_grad():
            outputs_of(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    sets: dict[str, tuple[str, ...]] = {}
    if layers:
        sets[layers[0]] = _scales(model.get_submodule(layers[0]), layers[0])
    for name, block in model.named_modules():
        parts = {f"{name}.{part}".lstrip("."): getattr(block, part, None) for part in ("shortcut", "conv2")}
        own = [_scales(layer, whole) for whole, layer in parts.items()]
        if all(own):
            sets[" + ".join(parts)] = tuple(parameter for parameters in own for parameter in parameters)
    if len(layers) > 1:
        sets[layers[-1]] = _scales(model.get_submodule(layers[-1]), layers[-1])
    return sets


def _scales(module: nn.Module | None, prefix: str = "") -> tuple[str, ...]:
    """The parameters of a linear layer or convolution in which its output is homogeneous; empty for other modules."""
    if not isinstance(module, (nn.Linear, nn.modules.conv._ConvNd, WeightNormalised)):
        return ()
    parameters = dict(module.named_parameters())
    gains = [n for n in ("weight_g", "parametrizations.weight.original0", "weight") if n in parameters][:1]
    names = gains + ["bias"] * ("bias" in parameters)
    return tuple(f"{prefix}.{name}" if prefix else name for name in names)


def _class_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy of logits ``[n, classes]``, whose theorems speak of one class for each sample."""
    check_logits(outputs)
    if outputs.dim() != 2:
        raise ValueError(f"model: the bounds are for logits [n, classes], not for shape {list(outputs.shape)}")
    check_classes(outputs, targets, for_all=True)
    return F.cross_entropy(outputs, targets, reduction="sum")


def _excess(outputs: Tensor, targets: Tensor) -> Tensor:
    """``l - H(p) = <p, z> - z_y`` of each sample, in float64."""
    logits = outputs.double()
    # With the largest logit at 0 neither term overflows or cancels against it.
    logits = logits - logits.amax(1, keepdim=True)
    return (F.softmax(logits, 1) * logits).sum(1) - logits.gather(1, targets[:, None]).squeeze(1)


def _length(tensors: Any) -> float:
    return float(np.hypot.reduce([torch.linalg.vector_norm(t.detach().double()).item() for t in tensors], initial=0.0))


@torch.no_grad()
def _is_homogeneous(model: nn.Module, inputs: Tensor, names: Sequence[str]) -> bool:
    parameters = dict(model.named_parameters())
    twice = {name: 2 * parameters[name] for name in names}
    # Of dropout the same units are kept in both.
    with forked(model, seed=0):
        before = outputs_of(model, inputs)
    with forked(model, seed=0):
        doubled = outputs_of(lambda x: torch.func.functional_call(model, twice, x), inputs)
    scale = before.abs().max().item()
    return bool(
        (doubled - 2 * before).abs().max().item() <= 64 * torch.finfo(before.dtype).eps * len(parameters) * scale
    )
