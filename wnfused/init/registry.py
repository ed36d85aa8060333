"""Init schemes by name: one file each, and one way to call them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn.parameter import is_lazy

from wnfused._modules import check_module, holders, quoted, shown
from wnfused._numbers import draws_on, factors, flag, from_0, positive, random_source
from wnfused._undisturbed import as_written, forked
from wnfused.init.others import note_on_others
from wnfused.init.processes import decided_by_first_process
from wnfused.init.report import Entry, Report
from wnfused.init.roles import Role, roles_and_trouble
from wnfused.init.skip_scale import restore_sums_
from wnfused.init.trial import arguments_of, put_back_on_error, try_sample
from wnfused.init.units import Unit, once, units_of
from wnfused.nn import WNResidualStage
from wnfused.nn._layer import refuse_frozen, refuse_shapeless

T = TypeVar("T")


class Together(Protocol):
    def __call__(self, x: Tensor, solve: Callable[[list[Tensor]], list[T]], /) -> T: ...


def _alone(x: Tensor, solve: Callable[[list[Tensor]], list[T]], /) -> T:
    return solve([x])[0]


@dataclass(frozen=True)
class Context:
    """What a scheme works on.

    Attributes:
        units: the parameters of every layer, in order of execution; stages as stacks.
        sample: a batch of inputs, or None.
        repeated: layers whose weight is another unit's; only their biases are their own.
        notes: what goes into the report beside the entries.
        recorded: whether the model runs where gradients are recorded alone.
        computed_branches: residual branches that end in a layer which is left alone, as something else computes it.
        together: ``together(x, solve)`` is this model's part of ``solve([x, ...])``, with the x of every model of a
            population that stands at the same layer; of this one alone otherwise.
    """

    model: nn.Module
    units: list[Unit]
    sample: Tensor | tuple[Tensor, ...] | None
    generator: torch.Generator | None
    repeated: list[Unit] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    recorded: bool = False
    computed_branches: int = 0
    together: Together = _alone

    @property
    def num_branches(self) -> int:
        """L, how many residual branches the model has."""
        ends = (u for u in (*self.units, *self.repeated) if u.role.closes_branch)
        return sum(len(u.v) if u.stacked else 1 for u in ends) + self.computed_branches


Scheme = Callable[..., Iterable[Entry]]
_schemes: dict[str, Scheme] = {}
_data_dependent: set[str] = set()


def scheme(name: str, *, needs_sample: bool = False) -> Callable[[Scheme], Scheme]:
    """Registers a function ``(context, **options) -> entries`` under a name; its keyword arguments are the options."""

    def register(function: Scheme) -> Scheme:
        _schemes[name] = function
        if needs_sample:
            _data_dependent.add(name)
        return function

    return register


def schemes() -> list[str]:
    """The names that ``initialize`` knows."""
    return sorted(_schemes)


def options_of(scheme: str) -> dict[str, Any]:
    """The options of a scheme, with their defaults."""
    parameters = list(inspect.signature(_schemes[scheme]).parameters.values())
    return {parameter.name: parameter.default for parameter in parameters[1:]}


@torch.no_grad()
def initialize(
    model: nn.Module,
    scheme: str = "arpit2019",
    *,
    sample: Tensor | tuple[Tensor, ...] | None = None,
    generator: torch.Generator | None = None,
    gammas: Mapping[str, float] | None = None,
    roles: Mapping[str, Mapping[str, Any]] | None = None,
    **options: object,
) -> Report:
    """Initialises every layer of a model, found and placed by ``wnfused.init.find_roles``.

    Layers are this package's, torch's linear and convolutional ones, and these under either of torch's weight norms.
    Other modules stay as they are, and those with parameters (recurrent ones, embeddings, attention, a module's own)
    are named in a note; of normalisations and PReLU, which start the same in every scheme, nothing is said.
    A ``gamma`` that a layer's constructor was given goes before the one found for it; ``gammas`` goes before both.

    In a process group, the first process decides and all end with its parameters, whatever their samples are.

    Args:
        model: any module; weight-normalised or not, as far as the scheme has a rule for it.
        scheme: a name of ``schemes``.
        sample: a batch of inputs, for the schemes that look at data; a tuple is taken for several arguments. 64 or more
            inputs are enough for every scheme but ``daneshmand2021``, which asks for three times as many as the widest
            linear layer has inputs. Fewer are taken, one too where the model runs on it: the statistics are then those
            of so few, and the report says where they leave a layer short.
        generator: source of randomness, on the model's device; torch's own if None. The blocks of a stage are drawn
            together, so that a model of stages and one of the same separate blocks get other weights from one seed.
        gammas: factors stated by hand, by layer name, where the model's structure does not tell: 2 before a ReLU,
            ``1 / B_k`` for the last layer of a branch in a stage of ``B_k`` blocks.
        roles: attributes of ``Role`` stated by hand, by layer name, for the schemes that need to know more than a
            gamma: ``{"tail": {"closes_branch": True, "num_blocks": 4, "block": 2}}``.
        options: of the scheme; the guide to initialising has a table of them, and ``wnfused info`` lists them.

    Returns:
        A ``Report`` of what was set where; it names what it could not place.

    Raises:
        ValueError, TypeError: an unknown scheme, option, layer name or attribute; a gamma that is not finite; no
            sample for a scheme that needs one, or one that holds NaN or inf, or on which the model does not run, which
            is tried before anything is written; a generator of another device; a model on the meta device, or that the
            scheme has no rule for; in a process group parameters that are sharded, or other ones than the first
            process's, or, in several processes, without a shape yet. A scheme that looks at data leaves the model as it
            was where it fails.
        RuntimeError: inside ``wnfused.frozen``.
    """
    check_request(model, scheme, options)
    random_source(generator=generator)
    seeded: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if generator is not None and scheme in _data_dependent:  # the forward pass may draw numbers, too
        seeded = forked(model, generator.initial_seed())
    with seeded, guarded(model, scheme):
        return decided_by_first_process(
            model, lambda: run_scheme(prepared(model, scheme, sample, generator, gammas, roles), scheme, options)
        )


@contextlib.contextmanager
def guarded(model: nn.Module, scheme: str) -> Iterator[None]:
    """What holds while a scheme works: compiled parts run as written, and one that looks at data, for which the user's
    own code runs, leaves the model as it was where that fails."""
    with as_written(), put_back_on_error(model, parameters=scheme in _data_dependent):
        yield


def check_request(model: nn.Module, scheme: str, options: Mapping[str, object]) -> None:
    """What can be wrong before anything is done, and is so in every process."""
    check_module(model=model)
    if not isinstance(scheme, str) or scheme not in _schemes:
        raise ValueError(f"scheme: unknown {scheme!r}; use one of {', '.join(map(repr, schemes()))}")
    known = options_of(scheme)
    unknown = sorted(set(options) - set(known))
    if unknown:
        takes = f"it takes {', '.join(known)}" if known else "it takes none"
        raise TypeError(f"{unknown[0]}: no option of scheme {scheme!r}; {takes}")
    refuse_frozen(model=model)
    if any(parameter.is_meta or is_fake(parameter) for parameter in model.parameters()):
        raise ValueError("model: holds meta tensors; give it memory first, by model.to_empty(device=...)")


def prepared(
    model: nn.Module, scheme: str, sample: Tensor | tuple[Tensor, ...] | None, generator: torch.Generator | None,
    gammas: Mapping[str, float] | None = None, roles: Mapping[str, Mapping[str, Any]] | None = None,
) -> Context:  # fmt: skip
    """What a scheme works on, its layers found and placed."""
    looks = scheme in _data_dependent
    if not (sample is None or isinstance(sample, (Tensor, tuple))) and not looks:
        raise TypeError(f"sample: expected a batch of inputs or a tuple of them, got {type(sample).__name__}")
    stated = _stated_mappings(gammas, roles)
    if looks:
        _check_sample(scheme, sample)
    _materialise(model, sample)
    recorded = looks and try_sample(model, sample, settle=True)
    restore_sums_(model)
    found, trouble = roles_and_trouble(model)
    units = _stated([unit for role in found for unit in units_of(role)], *stated)
    units, repeated = once(units)
    for unit in units:
        draws_on(unit.v.device, generator=generator)
    same = [other for _, others in repeated for other in others]
    held = {id(unit.module) for unit in (*units, *same)}
    parts = (p for r in found for p in (r.parts() if isinstance(r.layer, WNResidualStage) else (r,)))
    computed = [part for part in parts if id(part.layer) not in held]
    branches = sum(_branches_closed(part) for part in computed)
    context = Context(model, units, sample, generator, same, recorded=recorded, computed_branches=branches)
    for first, others in repeated:
        names = ", ".join(other.shown for other in others)
        context.notes.append(f"{first.shown}: its weight is that of {names} too, and is initialised for {first.shown}")
    context.notes.extend(_held_elsewhere(context))
    if not found:
        context.notes.append("no layer was found")
    if trouble and any(not unit.role.placed for unit in units):
        context.notes.append(
            f"the model's forward does not trace ({trouble}): places are read off its structure; gammas= and roles= "
            "state others"
        )
    if computed:
        names = ", ".join(shown(part.name) for part in computed)
        context.notes.append(f"left alone, their weights are computed by something else: {names}")
    context.notes.extend(note_on_others(model, (role.layer for role in found)))
    return context


def _branches_closed(part: Role) -> int:
    """How many branches end in a layer, or in those that a stage stacks."""
    if not part.closes_branch:
        return 0
    return len(part.layer.weight_v) if isinstance(part.layer, WNResidualStage) else 1


def _held_elsewhere(context: Context) -> Iterator[str]:
    """Notes on weights that a module which is no layer computes with, too: an embedding tied to the head."""
    names = {module: name for name, module in context.model.named_modules()}
    found = holders(context.model)
    layers = {part for unit in (*context.units, *context.repeated) for part in unit.module.modules()}
    for unit in context.units:
        others = found.get(id(unit.v), set()) - layers
        if others:
            listed = ", ".join(sorted(shown(names[module]) for module in others))
            yield f"{unit.shown}: its weight is that of {listed} too, which changes with it"


def run_scheme(context: Context, scheme: str, options: Mapping[str, object]) -> Report:
    looks = scheme in _data_dependent
    if looks:
        _zero_biases_of_repeated(context)  # before anything is measured
    entries = tuple(_schemes[scheme](context, **options))
    if not looks:
        _zero_biases_of_repeated(context)  # after options were refused, from which nothing puts back
    unplaced = tuple(unit.name for unit in context.units if not unit.role.placed)
    return Report(scheme, entries, unplaced, tuple(context.notes))


def _zero_biases_of_repeated(context: Context) -> None:
    biases = {id(unit.bias) for unit in context.units}
    for unit in context.repeated:
        if id(unit.bias) not in biases:
            unit.zero_bias_()


def _materialise(model: nn.Module, sample: Tensor | tuple[Tensor, ...] | None) -> None:
    """Lazy layers take their shapes from the sample."""
    if sample is None:
        refuse_shapeless(model, "run the model once, or give a sample")
    elif any(map(is_lazy, model.parameters())):
        try_sample(model, sample, settle=False)


def _check_sample(scheme: str, sample: Tensor | tuple[Tensor, ...] | None) -> None:
    for argument in arguments_of(sample):
        if argument is None:
            raise ValueError(f"sample: scheme {scheme!r} looks at data; give a batch of inputs, of 64 or more")
        if not isinstance(argument, Tensor):
            raise TypeError(f"sample: expected a batch of inputs or a tuple of them, got {type(argument).__name__}")
        if argument.dim() == 0 or argument.shape[0] == 0:
            raise ValueError(f"sample: shape {list(argument.shape)} has no input in it")
        if argument.layout is not torch.strided:
            raise ValueError(f"sample: is {argument.layout}; use to_dense()")
        if argument.is_meta:
            raise ValueError("sample: is a meta tensor, which holds no numbers")
        if not argument.isfinite().all():
            raise ValueError("sample: holds NaN or inf")


def _stated_mappings(gammas: Any, roles: Any) -> tuple[Mapping[str, float], Mapping[str, Mapping[str, Any]]]:
    """Both as mappings, empty where there is none."""
    for argument, stated in (("gammas", gammas), ("roles", roles)):
        if stated is not None and not isinstance(stated, Mapping):
            raise TypeError(f"{argument}: expected a mapping from layer names, got {type(stated).__name__}")
    return {} if gammas is None else gammas, {} if roles is None else roles


def _stated(
    units: list[Unit], gammas: Mapping[str, float], roles: Mapping[str, Mapping[str, Any]]
) -> list[Unit]:  # fmt: skip
    """The units with the factors and attributes that were stated by hand."""
    names = [unit.name for unit in units]
    for argument, stated in (("gammas", gammas), ("roles", roles)):
        unknown = sorted(set(stated) - set(names), key=repr)
        if unknown:
            known = ", ".join(name or "'', which is the model itself" for name in names)
            raise ValueError(f"{argument}: the model has no layer {unknown[0]!r}; it has {known}")
    for name, gamma in gammas.items():
        factors(**{f"gammas[{name!r}]": gamma})
    for name, attributes in roles.items():
        if not isinstance(attributes, Mapping):
            raise TypeError(f"roles[{name!r}]: expected a mapping, got {type(attributes).__name__}")
        for attribute, value in attributes.items():
            if attribute not in _STATABLE:
                raise ValueError(f"roles: {attribute!r} for {quoted(name)} is none of {', '.join(_STATABLE)}")
            _STATABLE[attribute](**{f"roles[{name!r}][{attribute!r}]": value})
    return [
        replace(unit, role=_with_stated(unit.role, gammas.get(unit.name), roles.get(unit.name)))
        if unit.name in gammas or unit.name in roles
        else unit
        for unit in units
    ]


_STATABLE: dict[str, Callable[..., None]] = {
    "activation_gamma": factors,
    "closes_branch": flag,
    "num_blocks": positive,
    "block": from_0,
    "branch": from_0,
    "branch_layers": from_0,
    "head": flag,
}
"""What may be stated of a role, and its check."""


def _with_stated(role: Role, gamma: float | None, attributes: Mapping[str, Any] | None) -> Role:
    if "activation_gamma" in (attributes or {}):
        role = replace(role, without_gamma="")
    role = replace(role, **(attributes or {}), placed=True)
    return role if gamma is None else replace(role, stated=gamma, by_hand=True)
