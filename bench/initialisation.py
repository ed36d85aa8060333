"""Orthogonal directions for all 3x3 convolutions of a WRN, on any device: batched by shape, and one by one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

import wnfused
from bench.gate import GateError
from bench.measure import Runner, interleave
from bench.peers import Gated
from bench.result import Result
from bench.workloads import Orthogonal


def gated(workload: Orthogonal, name: str, device: str = "cpu") -> Gated:
    """The runner of ``"batched"`` or ``"loop"``, after every matrix it filled was found orthonormal.

    Raises:
        GateError: naming the error and what rounding would explain.
    """
    # NaN: a matrix that was left out must not pass.
    shapes = [(n, c, 9 * c) for c, n in zip((16, 32, 64), _counts(workload), strict=True)]
    stacks = [torch.full(shape, math.nan, device=device) for shape in shapes]
    call = {"batched": partial(_batched, stacks), "loop": partial(_loop, stacks)}[name]
    call()
    error, limit = max(map(orthogonality_error, stacks)), tolerance(9 * 64)
    if not error <= limit:
        raise GateError(f"{workload.name}: {name}: rows are off orthonormal by {error:.1e}, above {limit:.1e}")
    settle = torch.cuda.synchronize if device == "cuda" else None
    return Gated(Runner(name, call, settle=settle), {"orthogonality": error})


def run(workload: Orthogonal, budget: float, device: str = "cpu") -> Iterator[Result]:
    """One result: the loop over the batched call."""
    result = Result.of(workload, workload.passes[0])
    runners: list[Runner] = []
    for name in (*workload.ours, *workload.peers):
        try:
            found = gated(workload, name, device)
        except GateError as error:
            result.failed[name] = str(error)
        else:
            runners.append(found.runner)
            result.errors[name] = found.errors
    base = workload.ours[0]
    if base in result.errors:
        result.measured(interleave(runners, base, budget, min_rounds=3), base)
    yield result


def _batched(stacks: list[Tensor]) -> None:
    for stack in stacks:
        wnfused.init.orthogonal_batched(stack)


def _loop(stacks: list[Tensor]) -> None:
    for stack in stacks:
        for matrix in stack:
            nn.init.orthogonal_(matrix)


def _counts(workload: Orthogonal) -> tuple[int, int, int]:
    """Square convolutions of each stage: two a block, without those of the blocks that change the width."""
    pairs = (workload.depth - 4) // 6
    return 2 * pairs, 2 * pairs - 2, 2 * pairs - 2


def tolerance(columns: int) -> float:
    """``|Q Q^T - I|``: Householder's backward error of about ``u`` a reflection, walking at random, with a factor 8."""
    return 8 * 2.0**-24 * math.sqrt(columns)


def orthogonality_error(stack: Tensor) -> float:
    """The largest entry of ``|Q Q^T - 1|`` in float64; infinite where anything is not finite."""
    worst = 0.0
    for q in stack.split(256):
        q = q.double()
        error = (q @ q.mT - torch.eye(q.shape[1], dtype=q.dtype, device=q.device)).abs().max().item()
        worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst
