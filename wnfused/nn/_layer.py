"""What every weight-normalised layer shares: parameters, ``weight``, default initialisation.

Mixed in before the torch layer it replaces, whose constructor allocates: the tensor that torch assigns to ``weight``
becomes ``weight_v``, and ``weight_g`` is made beside it. (Arguments are checked before, by ``wnfused.nn._geometry``.)
"""

from __future__ import annotations

import operator
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter, is_lazy

from wnfused import dispatch, functional
from wnfused._modules import refuse_sharded
from wnfused._numbers import factors, floating_dtype, number, truth
from wnfused.nn._keys import to_old
from wnfused.nn._rule import check_directions, check_stored, reset_layer
from wnfused.nn._weight import EffectiveWeight
from wnfused.ops import _arguments as arguments

_OF_WEIGHT = ("weight_v", "weight_g")
# What a layer computes with, beside its parameters.
_OPTIONS = frozenset((
    "activation", "negative_slope", "dim",
    "stride", "padding", "dilation", "output_padding", "groups", "padding_mode", "_reversed_padding_repeated_twice",
))  # fmt: skip

NOT_STORED = (
    "it is computed from weight_v and weight_g; wnfused.fold(model) gives plain layers, "
    "wnfused.convert(model, plain=True) brings them back"
)


def refuse_shapeless(model: nn.Module, remedy: str = "run the model once") -> None:
    """Raises ValueError where a lazy layer of the model has not seen an input yet."""
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"model: {name!r} has no shape yet; {remedy}")


def refuse_frozen(**values: nn.Module) -> None:
    """Raises RuntimeError where ``wnfused.frozen`` holds the weights of a named module or of a part of it."""
    for name, value in values.items():
        if any(getattr(module, "_frozen", None) is not None for module in value.modules()):
            raise RuntimeError(f"{name}: cannot be written inside wnfused.frozen; leave that context first")


def refuse_script(module: nn.Module) -> nn.Module:
    """What ``torch.jit.script`` asks of a module before it reads it (``__prepare_scriptable__``)."""
    raise RuntimeError(
        f"torch.jit.script cannot read {type(module).__name__}; use torch.export or torch.jit.trace, "
        "or script wnfused.fold(copy.deepcopy(model)), which has torch's layers only"
    )


class _Refuses(nn.ModuleDict):
    """An empty dict of parametrisations that claims ``weight`` for itself: torch's functions then come here."""

    def __contains__(self, name: object) -> bool:
        return name == "weight"

    def __getitem__(self, name: str) -> nn.Module:
        raise RuntimeError(f"weight: cannot be parametrized, nor has it a parametrization to remove: {NOT_STORED}")

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError("parametrizations.weight: there is none; this layer has weight_v and weight_g itself")
        return super().__getattr__(name)

    def _get_name(self) -> str:  # torch.func.functional_call has its own words for the error above, and this in them
        return "a layer that has weight_v and weight_g itself, and no parametrizations,"


_REFUSES = _Refuses()


_STORED = (nn.Parameter, EffectiveWeight)


class WeightNormalised(nn.Module):
    """Mixin of the layers that keep ``weight_v``, ``weight_g`` and ``bias``.

    Attributes:
        activation: None, ``"relu"`` or ``"leaky_relu"``, applied in the same op.
        gamma: the factor of the initial gain, ``g = sqrt(gamma fan_in / fan_out)``; None reads it off ``activation``.
        init: ``"orthogonal"`` or ``"he"``, the distribution of ``weight_v``.
        dim: the dim of ``weight_v`` that numbers the normalised rows; None for one norm over all of it.
        residual_position: of the residual among the arguments of ``forward``.
    """

    residual_position = 1
    weight_v: nn.Parameter
    weight_g: nn.Parameter
    activation: str | None
    negative_slope: float
    gamma: float | None
    init: str
    dim: int | None
    # Whether wnfused.convert put the layer in a torch layer's place: code that was written for that passes no residual.
    _converted: bool = False
    # While wnfused.frozen lasts, what the layer runs in its place (wnfused/nn/_frozen.py): takes the same arguments.
    # A forward reads it once, since another thread may end that meanwhile.
    _frozen: nn.Module | None = None

    __prepare_scriptable__ = refuse_script

    def _set_options(
        self, activation: str | None, negative_slope: float, gamma: float | None, init: str, dim: int | None,
        bias: bool, dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        """Checked and set before torch's constructor runs, because that one ends in ``reset_parameters``."""
        number(negative_slope=negative_slope)
        arguments.activation(activation, negative_slope)
        if gamma is not None:
            factors(gamma=gamma)
        check_directions(init=init)
        dim = arguments.row_dim(dim)
        truth(bias=bias)
        floating_dtype(dtype=dtype)
        self.__dict__.update(activation=activation, negative_slope=negative_slope, gamma=gamma, init=init, dim=dim)

    @property
    def weight(self) -> Tensor:
        """The effective weight ``w``; writing to it sets ``v <- w``, ``g <- ||w||``. ``forward`` does not use it.

        Every reading is a tensor of its own. A hook on it (``register_hook``, ``retain_grad``) sees the gradients of
        what is computed from that reading: keep it, ``w = layer.weight``, and compute from ``w``. The layer's forward
        computes nothing from it, so ``layer.weight.register_hook(f)`` alone never calls ``f``, and cannot be told from
        the other use to be refused; put hooks on ``weight_v`` or ``weight_g``.

        A lazy layer without a shape gives its ``weight_v``, an ``UninitializedParameter``.

        Raises:
            ValueError: the layer is sharded.
        """
        if isinstance(self._parameters.get("weight_v"), UninitializedParameter):
            return self.weight_v
        if not torch.compiler.is_compiling():
            refuse_sharded(self, _OF_WEIGHT, "read it before the model is sharded, or after `unshard` of FSDP's module")
        if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
            return EffectiveWeight.of(self, functional.weight_norm(self.weight_v, self.weight_g, self.dim))
        with torch.inference_mode(False), torch.no_grad():  # torch counts no writes to a tensor made in that mode
            return EffectiveWeight.of(self, functional.weight_norm(self.weight_v, self.weight_g, self.dim))

    @weight.setter
    def weight(self, value: Tensor) -> None:
        if "weight_v" in self._parameters:
            # torch.func.functional_call puts a weight here and expects its gradient; what was read may be put back.
            if isinstance(value, Tensor) and value.requires_grad and not isinstance(value, _STORED):
                raise RuntimeError(
                    "weight: this tensor would get no gradient, for only weight_v and weight_g are stored; pass those "
                    "two, detach it, or assign an nn.Parameter"
                )
            self.set_weight(value)
        else:
            self._adopt(value if isinstance(value, nn.Parameter) else nn.Parameter(value))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":  # nn.Module would register a Parameter under this name instead of asking the property
            object.__setattr__(self, name, value)
            return
        if name in _OPTIONS:  # what wnfused.frozen made has the old ones: the layer runs as always then
            self.__dict__.pop("_frozen", None)
        super().__setattr__(name, value)

    def _adopt(self, weight: nn.Parameter) -> None:
        """Torch's freshly allocated weight becomes ``weight_v``."""
        arguments.in_range(self.dim, weight, "a weight")
        self.register_parameter("weight_v", weight)
        self.register_parameter("weight_g", nn.Parameter(weight.new_empty(self._gain_shape(weight))))

    def _gain_shape(self, weight: Tensor) -> list[int]:
        """torch's weight-norm shape: 1 in every dim but ``dim``; no dims for one norm over the whole tensor."""
        if self.dim is None:
            return []
        return [n if d == self.dim % weight.dim() else 1 for d, n in enumerate(weight.shape)]

    @torch.no_grad()
    def set_weight(self, weight: Tensor) -> None:
        """Sets ``v <- w`` and ``g <- ||w||``, so that the effective weight is ``w``.

        A row of zeros gets ``g = 0`` alone and keeps its ``v``: zeros have no direction, and with both at 0 neither
        would ever have a gradient.

        Raises:
            TypeError: ``weight`` is not a real tensor.
            ValueError: it has another shape, or the layer is sharded.
            RuntimeError: inside ``wnfused.frozen``, or the layer is lazy and has no shape yet.
        """
        if not isinstance(weight, Tensor):
            raise TypeError(f"weight: expected a Tensor, got {type(weight).__name__}")
        if isinstance(self._parameters.get("weight_v"), UninitializedParameter):
            raise RuntimeError("weight: cannot be written before the layer has a shape; run the layer once")
        if weight.is_complex():
            raise TypeError(f"weight: expected a real tensor, got {weight.dtype}")
        refuse_frozen(weight=self)
        refuse_sharded(self, _OF_WEIGHT, "write it first, then shard the model")
        if weight.shape != self.weight_v.shape:
            raise ValueError(f"weight: shape {list(weight.shape)} does not fit; use {list(self.weight_v.shape)}")
        weight = weight.detach().to(self.weight_v)
        norm = row_norm(weight, self.dim).reshape(self.weight_g.shape)
        self.weight_v.copy_(with_directions(weight, norm, self.weight_v))
        self.weight_g.copy_(norm)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name == "weight_orig":
            raise RuntimeError(f"weight: cannot be pruned, {NOT_STORED}")
        super().register_parameter(name, param)

    @property
    def parametrizations(self) -> nn.Module:
        """What ``torch.nn.utils.parametrize`` asks for; ``weight`` counts as parametrised already, by this layer."""
        own = self._modules.get("parametrizations")
        return _REFUSES if own is None else own

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The initialisation of Arpit, Campos & Bengio (2019): see ``wnfused.init.reset_layer_``."""
        if not hasattr(self, "bias"):  # torch's constructor assigns weight, then bias, then comes here
            return
        check_stored(self)
        refuse_frozen(layer=self)
        for name in ("bias", "weight_g", "weight_v"):  # torch's weight norm leaves this order, which optimisers save by
            self._parameters[name] = self._parameters.pop(name)
        if self.weight_v.numel():
            reset_layer(self)
        else:  # there is no direction to draw
            for parameter in self.parameters(recurse=False):
                parameter.zero_()

    def _v_g_bias(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The parameters, without ``nn.Module``'s way to attributes: that is an eighth of a small layer's time."""
        own: dict[str, Any] = self._parameters
        try:
            return own["weight_v"], own["weight_g"], own["bias"]
        except KeyError:  # one of them is computed (parametrized, pruned), or a replica's tensor
            bias: Any = self.bias
            return self.weight_v, self.weight_g, bias

    def _runs_frozen(self, form: Any, input: Tensor) -> bool:
        """In the form that ``wnfused.frozen`` gave it, unless a gradient of the parameters is recorded, another backend
        is asked for by name, or it was moved or given other parameters since (``torch.func.functional_call``)."""
        if not isinstance(input, Tensor):  # it is a proxy of torch.fx
            return False
        if not torch.compiler.is_compiling() and dispatch.requested() not in (None, "native"):
            return False  # another backend would have no part in it
        if input.device != form.made_for[1] or not _goes_with(input, form.made_for[0]):
            return False
        # Under vmap torch does not autocast a plain layer.
        vectorised = not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
        if vectorised and arguments.autocast_is_on(input.device.type):
            return False
        own = list(self._parameters.values())
        # An export calls the layer with stand-ins of its parameters.
        if any(map(operator.is_not, own, form.made_of)) and not arguments.is_exporting():
            return False
        return not torch.is_grad_enabled() or not any(p.requires_grad for p in own if p is not None)

    @staticmethod
    def _frozen_output(form: nn.Module, input: Tensor, residual: Tensor | None) -> Tensor:
        y: Tensor = form.forward(input, residual=residual)  # a transposed layer's second argument is another
        return y

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle made inside ``wnfused.frozen`` is an ordinary layer."""
        state = self.__dict__.copy()  # in one step, for another thread may leave the context meanwhile
        state.pop("_frozen", None)
        return state

    def adopt_keys(self, state_dict: MutableMapping[str, Any], prefix: str) -> None:
        """Renames the entries of a plain layer or of torch's parametrised weight norm to ``weight_v, weight_g``."""

        def split(weight: Tensor) -> tuple[Tensor, Tensor]:
            if not is_lazy(self.weight_v) and weight.shape != self.weight_v.shape:
                return self.weight_g, weight  # torch's own error will name weight_v
            weight = weight.to(self.weight_v.dtype)  # in which its norm is not rounded once more
            norm = row_norm(weight, self.dim).to(weight.dtype).reshape(self._gain_shape(weight))
            return norm, with_directions(weight, norm, self.weight_v)

        to_old(state_dict, prefix, split)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Also loads the keys of a plain layer and of torch's parametrised weight norm; its old hook has our names."""
        self.adopt_keys(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        parts = [super().extra_repr()]
        if self.activation is not None:
            slope = f"({self.negative_slope})" if self.activation == "leaky_relu" else ""
            parts.append(f"activation={self.activation}{slope}")
        if self.gamma is not None:
            parts.append(f"gamma={self.gamma:g}")
        if self.init != "orthogonal":
            parts.append(f"init={self.init}")
        if self.dim != 0:
            parts.append(f"dim={self.dim}")
        return ", ".join(parts)


def _goes_with(input: Tensor, dtype: torch.dtype) -> bool:
    """Whether a plain layer of that dtype takes the input: of the same, or of autocast's."""
    if input.dtype == dtype:
        return True
    device = input.device.type
    return (
        dtype == torch.float32 and arguments.autocast_is_on(device) and input.dtype == torch.get_autocast_dtype(device)
    )


@torch.no_grad()
def with_directions(weight: Tensor, norm: Tensor, known: Tensor | None = None) -> Tensor:
    """The ``v`` of an effective weight: itself, but for rows of zeros, which have no gradient.

    Args:
        norm: of its rows, in the shape of ``weight_g``.
        known: gives those rows their directions where it has some; the others are drawn from one seed.
    """
    watched = torch._C._len_torch_dispatch_stack() or weight.is_meta or type(weight) not in (Tensor, nn.Parameter)
    if watched or weight.numel() == 0 or not (norm == 0).any():
        return weight
    drawn = torch.randn(weight.shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu").to(weight)
    if known is None or is_lazy(known) or known.is_meta or known.shape != weight.shape:
        return torch.where(norm == 0, drawn, weight)
    directions = known.detach().to(weight)
    square = directions.square()
    square = (
        square.sum([d for d in range(norm.dim()) if norm.shape[d] == 1], keepdim=True) if norm.dim() else square.sum()
    )
    directions = torch.where((square > 0) & square.isfinite(), directions, drawn)
    return torch.where(norm == 0, directions, weight)


@torch.no_grad()
def row_norm(v: Tensor, dim: int | None = 0) -> Tensor:
    """``||v_i||_2`` of every row, flat; float32, or float64 for float64.

    Taken by the op itself: with ``g = ||v||`` the scale ``g / ||v||`` is then exactly 1 and the effective weight ``v``.
    """
    rows = 1 if dim is None else v.shape[dim]
    norm: Tensor = torch.ops.wnfused.weight_norm(v.detach(), v.new_ones(rows), dim)[1]
    return norm.reshape(-1)
