"""Who is compared: a table of peers, and how one of them becomes a gated runner of a workload's pass."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wnfused
from bench import gate, models, parameters
from bench.measure import Runner
from bench.workloads import BACKWARD, FORWARD, STEP


class Unavailable(RuntimeError):
    """The peer cannot run here; the text is the reason."""


@dataclass(frozen=True)
class Peer:
    """``form``: a key of ``models.FORMS``. ``backend``: of ours. ``autocast``: to bfloat16, parameters in float32."""

    form: str
    title: str
    backend: str | None = None
    channels_last: bool = False
    compiled: bool = False
    autocast: bool = False

    @property
    def precision(self) -> torch.dtype:
        return torch.bfloat16 if self.autocast else torch.float32


PEERS: dict[str, Peer] = {
    "native": Peer("ours", "this package, C++ kernels", backend="native"),
    "reference": Peer("ours", "this package, plain torch", backend="reference"),
    "native bf16": Peer("ours", "this package, C++ kernels, bf16 autocast", backend="native", autocast=True),
    "reference bf16": Peer("ours", "this package, plain torch, bf16 autocast", backend="reference", autocast=True),
    "eager": Peer("eager", "parametrizations.weight_norm + op + ReLU"),
    "eager cl": Peer("eager", "the same in channels_last", channels_last=True),
    "eager bf16": Peer("eager", "the same under bf16 autocast", autocast=True),
    "plain": Peer("plain", "no weight norm: op + ReLU"),
    "plain cl": Peer("plain", "no weight norm, channels_last", channels_last=True),
    "plain bf16": Peer("plain", "no weight norm, bf16 autocast", autocast=True),
    "compile": Peer("eager", "torch.compile of eager", compiled=True),
    "batched": Peer("init", "wnfused.init.orthogonal_batched"),
    "loop": Peer("init", "a loop of nn.init.orthogonal_"),
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

    @property
    def context(self) -> Callable[[], contextlib.AbstractContextManager[Any]]:
        return partial(wnfused.use_backend, self.peer.backend) if self.peer.backend else contextlib.nullcontext


def subject(problem: gate.Problem, name: str) -> Subject:
    """Builds the peer's module with the workload's parameters.

    Raises:
        Unavailable: with the reason.
    """
    peer, workload = PEERS[name], problem.workload
    if peer.compiled and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        raise Unavailable("torch.compile needs a C++ compiler")
    if peer.backend and (reason := wnfused.backend_status()[peer.backend]):
        raise Unavailable(reason)
    module = parameters.fill(models.FORMS[peer.form](workload), models.blocks(workload))
    x = problem.x
    if peer.channels_last or workload.channels_last:
        module.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)
    x = x.detach().clone(memory_format=torch.preserve_format)
    x.requires_grad_(models.input_needs_gradient(workload))
    forward: Callable[[Tensor], Tensor] = torch.compile(module, dynamic=False) if peer.compiled else module
    return Subject(problem, peer, module, _autocast(forward) if peer.autocast else forward, x)


def _autocast(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return forward(x)

    return run


def gated(subject: Subject, name: str, pass_name: str) -> Gated:
    """The runner of one pass, after the gate.

    Raises:
        Unavailable: our backend has no kernel for this.
        gate.GateError: the result is wrong.
    """
    problem, precision = subject.problem, subject.peer.precision
    try:
        with subject.context():
            errors = gate.check(subject.module, subject.forward, problem, pass_name, precision, subject.x)
    except wnfused.BackendUnavailableError as reason:
        raise Unavailable(str(reason)) from reason
    return Gated(Runner(name, call(subject, pass_name), subject.context), errors)


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
        dy = subject.problem.dy.to(subject.peer.precision)
        with subject.context(), torch.no_grad():
            y = forward(x)
            dy = torch.empty_like(y).copy_(dy)
        return lambda: torch.autograd.grad(forward(x), inputs, dy)
    if pass_name == STEP:
        return partial(training_step, forward, x, subject.problem.labels, sgd(held))
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
