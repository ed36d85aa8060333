"""How an op comes into being: schema, fake kernel, dispatch to a backend, and derivatives of every order.

An op is a pair ``name`` and ``name_backward`` under ``torch.ops.wnfused``, whose kernels ``wnfused.dispatch``
chooses, and a callable that the public function uses. That callable is an ``autograd.Function`` that calls the op
below autograd: half the cost a call of going through the op's own autograd registration, which is there all the
same, for ``torch.compile``, ``torch.export`` and anyone who calls ``torch.ops.wnfused.*``.

First derivatives run ``name_backward``. Where a graph of the backward is asked for (``create_graph``), for forward-mode
derivatives and under the transforms of ``torch.func`` the reference stands in: plain torch, which autograd
differentiates right to any order.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from wnfused import dispatch
from wnfused.backends import native_entry, tensors_of
from wnfused.ops._arguments import PLAIN, autocast_is_on, below_autocast, is_exporting
from wnfused.reference import suggest_memory_format

_library = torch.library.Library("wnfused", "DEF")
# Those that csrc/python/ops.cpp has for CPU tensors once it is open, by names of their own: it hands on to these the
# calls that it does not take.
_in_python = torch.library.Library("wnfused_python", "DEF")
_implementations: dict[str, Callable[..., Any]] = {}


def define(
    schema: str,
    fake: Callable[..., Any],
    like: Sequence[int | None] = (),
    laid_out: Callable[[Any, Sequence[Any]], Any] | None = None,
    in_cpp: bool = False,
) -> torch._ops.OpOverload:
    """Defines one op from its schema; its implementation on every device asks ``dispatch.select``.

    Args:
        like: for each output the position of the argument whose memory format it keeps, None for no promise. The fake
            kernel must promise the same, whatever strides a backend works in.
        laid_out: ``laid_out(outputs, arguments)`` puts them in formats of another rule instead.
        in_cpp: whether ``csrc/python/ops.cpp`` has it, too.
    """
    name = schema.partition("(")[0]

    def run(*arguments: Any) -> Any:
        device = dispatch.device_type(arguments)
        # Operand dtypes are settled before an op is called; autocast must not touch what a kernel does inside.
        if autocast_is_on(device):
            with torch.autocast(device, enabled=False):
                outputs = dispatch.select(name, arguments)(*arguments)
        else:
            outputs = dispatch.select(name, arguments)(*arguments)
        if laid_out is not None:
            return laid_out(outputs, arguments)
        return _laid_out(outputs, [None if i is None else arguments[i] for i in like]) if like else outputs

    for library in (_library, _in_python) if in_cpp else (_library,):
        library.define(schema)
        library.impl(name, run, "CompositeExplicitAutograd")
    _implementations[name] = run
    torch.library.register_fake(f"wnfused::{name}", _opening(fake) if in_cpp else fake, lib=_library)
    op: torch._ops.OpOverload = getattr(torch.ops.wnfused, name).default
    return op


def _opening(fake: Callable[..., Any]) -> Callable[..., Any]:
    """The fake kernel, which runs where a graph is made that will call the op: that is when the ops in C++ are opened.
    While the graph runs it would be too late, as torch reads its table of kernels in one thread and writes it in
    another without a lock."""

    @functools.wraps(fake)
    def run(*arguments: Any, **named: Any) -> Any:
        if dispatch.prefers_native():
            native_entry.unavailable()
        return fake(*arguments, **named)

    return run


def _laid_out(outputs: Sequence[Tensor], models: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Outputs in the memory formats of their models; those that a call left empty stay so."""
    return tuple(
        output
        if model is None or output.shape != model.shape
        else output.contiguous(memory_format=suggest_memory_format(model))
        for output, model in zip(outputs, models, strict=True)
    )


class _Derivatives:
    """What autograd does for an op; the arguments are those of ``differentiable``."""

    def __init__(
        self, op: torch._ops.OpOverload, reference: Callable[..., tuple[Tensor, ...]],
        backward: Callable[..., Sequence[Tensor | None]], reads_output: Callable[[Sequence[Any]], bool],
    ) -> None:  # fmt: skip
        self.op, self._reference, self._backward, self._reads_output = op, reference, backward, reads_output
        arguments = op._schema.arguments
        self._arity = len(arguments)
        # The tensors come first in every schema; an optional one that is not given is saved as None.
        self._tensors = sum("Tensor" in str(argument.type) for argument in arguments)

    def setup_context(self, ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        y, *rest = output
        tensors = inputs[: self._tensors]
        ctx.mark_non_differentiable(*rest)
        ctx.set_materialize_grads(False)
        ctx.constants = inputs[self._tensors :]
        ctx.backend = dispatch.requested()
        ctx.save_for_backward(*tensors, y if self._reads_output(inputs) else None, *rest)
        ctx.save_for_forward(*tensors)

    def gradients(self, ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * self._arity
        saved = ctx.saved_tensors
        inputs = (*saved[: self._tensors], *ctx.constants)
        # A call through the op's own registration leaves trailing arguments out where they have their defaults.
        needs = (*ctx.needs_input_grad, *(False,) * (self._arity - len(ctx.needs_input_grad)))
        if torch.is_grad_enabled() or is_transformed(dy):
            return through_reference(self._reference, dy, inputs, needs)
        with same_backend(ctx.backend):
            found = self._backward(dy, inputs, saved[self._tensors :], needs)
        return (*found, *(None,) * (self._arity - len(found)))

    def derivative(self, ctx: Any, *tangents: Any) -> Any:
        """In forward mode."""
        inputs = (*ctx.saved_tensors[: self._tensors], *ctx.constants)
        moving = [i for i, tangent in enumerate(tangents) if tangent is not None]
        # Forward mode does not nest, so the product J t is taken as the transpose of the pullback.
        y, pullback = _vjp(_as_function_of(self._reference, inputs, moving), [inputs[i] for i in moving])
        _, pushforward = _vjp(pullback, [torch.zeros_like(y)])
        (derivative,) = pushforward(tuple(tangents[i] for i in moving))
        return (derivative, *(None,) * (len(self.op._schema.returns) - 1))

    def function(self) -> type[torch.autograd.Function]:
        """What records an eager call."""
        rules = self

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *arguments: Any) -> Any:
                y, *rest = below_autograd(rules.op, arguments)
                output = (no_view(y), *rest)
                rules.setup_context(ctx, arguments, output)
                return output

            backward = staticmethod(rules.gradients)
            jvp = staticmethod(rules.derivative)

        Function.__name__ = Function.__qualname__ = self.op._schema.name.rpartition("::")[2]
        return Function


def differentiable(
    op: torch._ops.OpOverload,
    *,
    reference: Callable[..., tuple[Tensor, ...]],
    backward: Callable[..., Sequence[Tensor | None]],
    reads_output: Callable[[Sequence[Any]], bool] = lambda inputs: False,
    transformed: Callable[..., tuple[Tensor, ...]] | None = None,
) -> Callable[..., tuple[Tensor, ...]]:
    """Gives ``op`` its derivatives and returns the callable for the public function.

    Args:
        op: returns ``(y, *rest)``; only ``y`` is differentiable.
        reference: the same function of the same arguments in plain torch.
        backward: ``backward(dy, inputs, outputs, needs)`` gives the gradients of the leading tensor inputs, None
            where ``needs`` says so. ``outputs[0]`` is None unless ``reads_output(inputs)``.
        reads_output: whether the backward reads ``y``, which must then be kept.
        transformed: the same function as the reference, of ops that all transforms of ``torch.func`` know; the
            reference if there is none.
    """
    rules = _Derivatives(op, reference, backward, reads_output)
    torch.library.register_autograd(op, rules.gradients, setup_context=rules.setup_context, lib=_library)
    function, under_transforms = rules.function(), transformed or reference

    def call(*arguments: Any) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...]
        if is_exporting_or_tracing():
            outputs = reference(*arguments)
        elif torch.compiler.is_compiling():
            # The op's own registration has derivatives of the first order in reverse mode alone.
            is_open = not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0
            outputs = op(*arguments) if is_open else reference(*arguments)
        elif torch._C._are_functorch_transforms_active():
            outputs = below_autocast(under_transforms, *arguments)
        elif _nothing_to_record(arguments):
            outputs = below_autograd(op, arguments)
        else:
            outputs = function.apply(*arguments)
        return outputs

    return call


def is_exporting_or_tracing() -> bool:
    """Whether a call is recorded to run elsewhere, by ``torch.export``, ONNX or ``torch.jit.trace``, or counted.

    What runs there may know nothing of this package, or of Python, and what counts knows torch's own ops; the
    reference has no others.
    """
    if torch.compiler.is_compiling():
        return is_exporting()
    return torch._C._get_tracing_state() is not None or _flops_are_counted()


def _flops_are_counted() -> bool:
    """Whether ``torch.utils.flop_counter`` watches."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    return any(type(mode).__module__ == "torch.utils.flop_counter" for mode in _get_current_dispatch_mode_stack())


def no_view(y: Tensor) -> Tensor:
    """``y``, but no view: torch forbids writing in place to a view that a function returned."""
    return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y


def _nothing_to_record(arguments: Sequence[Any]) -> bool:
    """Neither a graph nor a forward-mode level will see this call."""
    if forward_ad._current_level >= 0:
        return False
    return not torch.is_grad_enabled() or not any(a.requires_grad for a in arguments if isinstance(a, Tensor))


def below_autograd(op: torch._ops.OpOverload, arguments: Sequence[Any]) -> Any:
    """Calls an op with its autograd key left out: the ``autograd.Function`` around it, if any, records the graph.

    Where nothing could watch the call (no dispatch mode, no tensor subclass, no tracer), torch's dispatcher would only
    hand it back to Python, at a third of a small layer's time; then the implementation is called at once.
    """
    watched = torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None
    if not watched and all(type(a) in PLAIN for a in tensors_of(arguments)):
        return _implementations[op._opname](*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*arguments)


def same_backend(name: str | None) -> contextlib.AbstractContextManager[None]:
    """A backward runs on the backend its forward was told to use, whichever thread or context it runs in."""
    return contextlib.nullcontext() if name == dispatch.requested() else dispatch.use_backend(name)


def _as_function_of(
    reference: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Any], positions: Sequence[int]
) -> Callable[..., Tensor]:
    """``y`` of the reference as a function of the inputs at ``positions``, the others held."""

    def function(*tensors: Tensor) -> Tensor:
        arguments = list(inputs)
        for position, tensor in zip(positions, tensors, strict=True):
            arguments[position] = tensor
        return reference(*arguments)[0]

    return function


def _vjp(function: Callable[..., Any], primals: Sequence[Tensor]) -> tuple[Tensor, Callable[..., Any]]:
    value, pullback = torch.func.vjp(function, *primals)[:2]
    return value, pullback


def is_transformed(*gradients: Tensor | None) -> bool:
    """Whether a gradient may be a batch, or have a tangent of forward mode; the kernels' backward knows neither."""
    if forward_ad._current_level >= 0:
        return True
    given = [dy for dy in gradients if dy is not None]
    return any(is_batch(dy) or torch._C._functorch.is_batchedtensor(dy) for dy in given)


def is_batch(dy: Tensor) -> bool:
    """Whether a backward runs once for many gradients: ``torch.autograd.grad(..., is_grads_batched=True)``."""
    batch: bool = torch._C._functorch.is_legacy_batchedtensor(dy)
    return batch


def is_hooked() -> bool:
    """Whether what is saved goes through hooks, as in a checkpoint or under ``save_on_cpu``: torch.func refuses."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def through_reference(
    reference: Callable[..., tuple[Tensor, ...]], dy: Tensor, inputs: Sequence[Any], needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The vector-Jacobian product as autograd takes it of the reference, with a graph of its own."""
    positions = [i for i, needed in enumerate(needs) if needed]
    function, given = _as_function_of(reference, inputs, positions), [inputs[i] for i in positions]
    gradients: Sequence[Tensor]
    if is_batch(dy) or is_hooked():  # which torch.func knows nothing of
        graph = torch.is_grad_enabled()
        with torch.enable_grad():
            given = [t.view_as(t) for t in given]  # apart, where one tensor is given twice
            y = function(*given)
            if y.requires_grad:
                gradients = torch.autograd.grad(
                    y, given, dy, create_graph=graph, allow_unused=True, materialize_grads=True
                )
            else:  # a stage without blocks has no use for its parameters
                gradients = [torch.zeros_like(t) for t in given]
    else:
        gradients = _vjp(function, given)[1](dy)
    found: list[Tensor | None] = [None] * len(inputs)
    for position, gradient in zip(positions, gradients, strict=True):
        found[position] = gradient
    return tuple(found)
