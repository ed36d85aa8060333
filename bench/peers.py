"""Who is compared: a table of peers, and how one of them becomes a gated runner of a workload's pass."""

from __future__ import annotations

import contextlib
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wnfused
from bench import gate, models, parameters
from bench.measure import Runner
from bench.workloads import BACKWARD, DIGITS, EPOCH, FORWARD, STEP, TRAINING
from wnfused.backends import native_cuda
from wnfused.backends.triton import strategy

COMPILE_SECONDS = 60  # for a pass of a compiled peer


class Unavailable(RuntimeError):
    """The peer cannot run here; the text is the reason."""


@dataclass(frozen=True)
class Peer:
    """``form``: a key of ``models.FORMS``. ``backend``: of ours.

    ``precision``: ``"fp32"``, ``"tf32"`` (CUDA only) or ``"bf16"``, by autocast with parameters in float32 unless
    ``pure``: then parameters and input are bfloat16 themselves. ``captured``: the pass is recorded as a CUDA graph once
    and replayed. ``warpgroup``: stages by wgmma, which have to be switched on.
    ``way``: of single layers, whatever the strategy's table says. ``frozen``: inside ``wnfused.frozen``.
    """

    form: str
    title: str
    backend: str | None = None
    channels_last: bool = False
    compiled: bool = False
    precision: str = "fp32"
    captured: bool = False
    pure: bool = False
    warpgroup: bool = False
    way: strategy.Way | None = None
    frozen: bool = False


def _on_cuda() -> dict[str, Peer]:
    """Ours and theirs in the three precisions of CUDA, launched one by one and captured as a CUDA graph.

    ``ours`` is the automatic choice, CUDA kernels for stages and Triton's for single layers: what a network takes. The
    un-normalised convolutions and products of ``plain`` are cuDNN's and cuBLAS's.
    """
    forms = [("ours", "ours", "this package, the backends that it chooses")]
    forms += [("native", "ours", "this package, CUDA kernels"), ("triton", "ours", "this package, Triton kernels")]
    forms += [("eager", "eager", "parametrizations.weight_norm"), ("plain", "plain", "no weight norm, cuDNN")]
    found = {}
    for name, form, title in forms:
        backend = name if name in ("native", "triton") else None
        for precision in ("fp32", "tf32", "bf16"):
            for graph in (False, True):
                key = f"cuda {name} {precision}" + " graph" * graph
                text = f"{title}, {precision}" + ", captured as a CUDA graph" * graph
                found[key] = Peer(form, text, backend, precision=precision, captured=graph, channels_last=True)
    for precision in ("tf32", "bf16"):
        text = f"this package, CUDA kernels, stages by wgmma, {precision}"
        key = f"cuda warpgroup {precision}"
        found[key] = Peer("ours", text, "native", precision=precision, channels_last=True, warpgroup=True)
    for precision in ("fp32", "tf32", "bf16"):
        ways: dict[strategy.Way, str] = {"fused": "fused kernels", "vendor": "scaled weights, the vendor's product"}
        for way, title in ways.items():
            for graph in (False, True):
                key = f"cuda {way} {precision}" + " graph" * graph
                text = f"this package, Triton backend, {title}, {precision}" + ", captured as a CUDA graph" * graph
                found[key] = Peer(
                    "ours", text, "triton", precision=precision, channels_last=True, way=way, captured=graph
                )
        text = f"torch.compile of parametrizations.weight_norm, {precision}"
        found[f"cuda compile {precision}"] = Peer("eager", text, compiled=True, precision=precision, channels_last=True)
    return found


PEERS: dict[str, Peer] = {
    "native": Peer("ours", "this package, C++ kernels", backend="native"),
    "reference": Peer("ours", "this package, plain torch", backend="reference"),
    "frozen": Peer("ours", "this package, C++ kernels, inside wnfused.frozen", backend="native", frozen=True),
    "native bf16": Peer("ours", "this package, C++ kernels, bf16 autocast", backend="native", precision="bf16"),
    "reference bf16": Peer("ours", "this package, plain torch, bf16 autocast", backend="reference", precision="bf16"),
    "eager": Peer("eager", "parametrizations.weight_norm + op + ReLU"),
    "eager cl": Peer("eager", "the same in channels_last", channels_last=True),
    "eager bf16": Peer("eager", "the same under bf16 autocast", precision="bf16"),
    "plain": Peer("plain", "no weight norm: op + ReLU"),
    "plain cl": Peer("plain", "no weight norm, channels_last", channels_last=True),
    "plain bf16": Peer("plain", "no weight norm, bf16 autocast", precision="bf16"),
    "native pure bf16": Peer("ours", "this package, C++ kernels, all bf16", "native", precision="bf16", pure=True),
    "eager pure bf16": Peer("eager", "weight norm + op + ReLU, all bf16", precision="bf16", pure=True),
    "plain pure bf16": Peer("plain", "no weight norm, all bf16", precision="bf16", pure=True),
    "compile": Peer("eager", "torch.compile of eager", compiled=True),
    **_on_cuda(),
    "batched": Peer("init", "wnfused.init.orthogonal_batched"),
    "loop": Peer("init", "a loop of nn.init.orthogonal_"),
    "flat": Peer("ours", "as many layers at the cost of one in WRN-1000"),
}


@dataclass(frozen=True)
class Gated:
    """A runner that passed the gate, with its errors against float64."""

    runner: Runner
    errors: dict[str, float]


@dataclass
class Subject:
    """A peer's module on a workload, shared by the passes."""

    problem: gate.Problem
    peer: Peer
    module: nn.Module
    forward: Callable[[Tensor], Tensor]
    x: Tensor
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # what lasts as long as the module

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """Our backend and CUDA's precision, as the peer has them.

        Others' convolutions go by the algorithm that cuDNN found fastest on these shapes, as who is after speed has
        it; of ours a user gets what the package gives unasked.
        """
        with contextlib.ExitStack() as stack:
            if self.peer.backend:
                stack.enter_context(wnfused.use_backend(self.peer.backend))
            if self.x.is_cuda:
                stack.enter_context(tensor_float_32(self.peer.precision == "tf32"))
                if self.peer.form != "ours":
                    stack.enter_context(_fastest_convolutions())
            if self.peer.warpgroup:
                native_cuda.use_warpgroup_stage(True)
                stack.callback(native_cuda.use_warpgroup_stage, False)
            if self.peer.way:
                stack.enter_context(strategy.forced(self.peer.way))
            yield

    @property
    def settle(self) -> Callable[[], None] | None:
        return torch.cuda.synchronize if self.x.is_cuda else None


def subject(problem: gate.Problem, name: str) -> Subject:
    """Builds the peer's module with the workload's parameters.

    Raises:
        Unavailable: with the reason.
    """
    peer, workload = PEERS[name], problem.workload
    if peer.compiled and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        raise Unavailable("torch.compile needs a C++ compiler")
    if peer.form == "ours" and (reason := _missing(peer, problem.device)):
        raise Unavailable(reason)
    if peer.warpgroup:
        try:
            native_cuda.use_warpgroup_stage(False)
        except RuntimeError as error:
            raise Unavailable(str(error)) from None
    module = models.unwritten(models.FORMS[peer.form], workload)
    module = parameters.fill(module, models.blocks(workload)).to(problem.device)
    x = problem.x
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if (peer.channels_last or workload.channels_last) and layout:
        module.to(memory_format=layout)
        x = x.contiguous(memory_format=layout)
    x = x.detach().clone(memory_format=torch.preserve_format)
    if peer.pure:
        module, x = module.to(torch.bfloat16), x.to(torch.bfloat16)
    held = contextlib.ExitStack()
    if peer.frozen:
        held.enter_context(wnfused.frozen(module.requires_grad_(False)))
    x.requires_grad_(models.input_needs_gradient(workload) and not peer.frozen)
    forward: Callable[[Tensor], Tensor] = torch.compile(module, dynamic=False) if peer.compiled else module
    casts = peer.precision == "bf16" and not peer.pure
    return Subject(problem, peer, module, _autocast(forward) if casts else forward, x, held)


def _missing(peer: Peer, device: str) -> str | None:
    """Why ours would not be what the peer's title says."""
    if device == "cuda" and peer.backend in (None, "native"):
        return native_cuda.unavailable()
    return wnfused.backend_status()[peer.backend] if peer.backend else None


def _autocast(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return forward(x)

    return run


class TimeIsUp(BaseException):
    """Not an Exception: the compiler turns those into errors of its own."""


@contextlib.contextmanager
def time_limit(seconds: int | None) -> Iterator[None]:
    """Raises ``TimeIsUp`` in the main thread after so many seconds; no limit where there is no alarm clock."""
    if seconds is None or not hasattr(signal, "SIGALRM"):
        yield
        return

    def ring(*_: object) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def tensor_float_32(allowed: bool) -> Iterator[None]:
    """Whether CUDA's products and convolutions may round float32 operands to ten bits of mantissa."""
    switches = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [switch.allow_tf32 for switch in switches]
    try:
        for switch in switches:
            switch.allow_tf32 = allowed
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.allow_tf32 = value


@contextlib.contextmanager
def _fastest_convolutions() -> Iterator[None]:
    """Lets cuDNN time its algorithms on every new shape: at the gate, before anything is timed here."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def gated(subject: Subject, name: str, pass_name: str) -> Gated:
    """The runner of one pass, after the gate.

    Raises:
        Unavailable: our backend has no kernel for this.
        gate.GateError: the result is wrong.
    """
    problem, precision = subject.problem, subject.peer.precision
    try:
        with subject.context(), time_limit(COMPILE_SECONDS if subject.peer.compiled else None):
            errors = gate.check(subject.module, subject.forward, problem, pass_name, precision, subject.x)
    except wnfused.BackendUnavailableError as reason:
        raise Unavailable(str(reason)) from reason
    except TimeIsUp as reason:
        torch._dynamo.reset()
        raise Unavailable(f"did not compile within {COMPILE_SECONDS} s") from reason
    with subject.context():
        timed = call(subject, pass_name)
        if subject.peer.captured:
            timed = captured(
                timed, partial(_results, list(subject.module.parameters())), _same_limit(subject, pass_name)
            )
    return Gated(Runner(name, timed, subject.context, subject.settle), errors)


@dataclass(frozen=True)
class Replay:
    """What a graph's kernels read and write they know by address alone: ``held`` keeps it from being freed."""

    graph: torch.cuda.CUDAGraph
    held: tuple[Any, ...]

    def __call__(self) -> None:
        self.graph.replay()


def captured(call: Callable[[], Any], results: Callable[[Any], Sequence[Tensor]], limit: float) -> Callable[[], Any]:
    """``call`` as a CUDA graph: run on a side stream until its allocations have settled, recorded once, replayed.

    Args:
        results: what a call made, of what it returned.
        limit: how far that of a replay may be from that of a call.

    Raises:
        Unavailable: what ``call`` does cannot be captured.
        gate.GateError: a replay gives other numbers than a call.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            replayed = results(call())
    except RuntimeError as error:
        raise Unavailable(f"not captured as a CUDA graph: {str(error).splitlines()[0]}") from error
    graph.replay()
    check_replay(replayed, results(call()), limit)
    return Replay(graph, (call, replayed))


def check_replay(found: Sequence[Tensor], true: Sequence[Tensor], limit: float) -> None:
    """Raises ``gate.GateError`` unless each tensor of a replay is that of a call, up to ``limit``."""
    errors = [gate.relative_error(a, b.detach().double()) for a, b in zip(found, true, strict=False)]
    if not found or len(found) != len(true) or not max(errors) <= limit:
        raise gate.GateError("a replayed CUDA graph gives other numbers than the calls it recorded")


def _results(held: Sequence[nn.Parameter], returned: Any) -> tuple[Tensor, ...]:
    """The tensors that a call returned or, where it is a training step, the gradients that it leaves."""
    if returned is None:
        return tuple(parameter.grad for parameter in held if parameter.grad is not None)
    return (returned,) if isinstance(returned, Tensor) else tuple(returned)


def _same_limit(subject: Subject, pass_name: str) -> float:
    """The same kernels, but libraries may choose others under capture, and a deep network makes much of a rounding."""
    if pass_name in TRAINING:
        return gate.tolerance(subject.problem.workload, subject.peer.precision).layer_gradient
    return 1e-2


def call(subject: Subject, pass_name: str) -> Callable[[], Any]:
    """What is timed."""
    forward, x = subject.forward, subject.x
    held = list(subject.module.parameters())
    if pass_name == FORWARD:

        def run_forward() -> Tensor:
            with torch.no_grad():
                return forward(x)

        return run_forward
    if pass_name == BACKWARD:
        inputs = [x, *held] if x.requires_grad else held
        with torch.no_grad():
            y = forward(x)
            dy = torch.empty_like(y).copy_(subject.problem.dy)
        return lambda: torch.autograd.grad(forward(x), inputs, dy)
    if pass_name == STEP:
        return partial(training_step, forward, x, subject.problem.labels, sgd(held))
    if pass_name == EPOCH:
        return partial(epoch, forward, x, subject.problem.labels, sgd(held))
    raise ValueError(f"pass: unknown {pass_name!r}")


def sgd(held: list[nn.Parameter]) -> torch.optim.Optimizer:
    """A rate so small that all peers stay the function that the gate saw; the work is the same."""
    return torch.optim.SGD(held, lr=1e-9, momentum=0.9)


def training_step(
    forward: Callable[[Tensor], Tensor], x: Tensor, labels: Tensor, optimizer: torch.optim.Optimizer
) -> None:
    """Forward, cross-entropy, backward and SGD with momentum."""
    optimizer.zero_grad()
    F.cross_entropy(forward(x), labels).backward()
    optimizer.step()


def epoch(
    forward: Callable[[Tensor], Tensor], x: Tensor, labels: Tensor, optimizer: torch.optim.Optimizer
) -> None:  # fmt: skip
    """The training steps of an epoch over as many images as digits' training set has."""
    for left in range(DIGITS, 0, -len(x)):
        training_step(forward, x[:left], labels[:left], optimizer)
