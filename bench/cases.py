"""From a workload to its results: build the peers, gate them, measure those that passed."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch

from bench import deep, flat, gate, initialisation, models, peers
from bench.ceiling import ceiling
from bench.measure import Runner, interleave
from bench.moment import moments
from bench.result import Result
from bench.workloads import DIGITS, EPOCH, FORWARD, DeepStep, Depths, Network, Orthogonal, Workload


def run(workload: Workload, budget: float, device: str = "cpu") -> Iterator[Result]:
    """One result a pass; ``budget`` seconds of measuring each."""
    if isinstance(workload, Orthogonal):
        yield from initialisation.run(workload, budget, device)
    elif isinstance(workload, DeepStep):
        yield from deep.run(workload, budget)
    elif isinstance(workload, Depths):
        yield from flat.run(workload, budget)
    else:
        yield from _run_module(workload, budget, device)


def _run_module(workload: Workload, budget: float, device: str) -> Iterator[Result]:
    # What the compiler learnt from other shapes would make it generalise, and so slower, here.
    torch._dynamo.reset()
    problem = gate.Problem(workload, device)
    subjects: dict[str, peers.Subject] = {}
    for pass_name in workload.passes:
        result = Result.of(workload, pass_name)
        runners = _gated(workload, pass_name, problem, subjects, result)
        base = next((runner.name for runner in runners if runner.name in workload.ours), None)
        if base is not None:
            try:
                _measure(workload, runners, base, budget, result, device)
                fits = True
            except torch.OutOfMemoryError:
                fits = False
            if not fits:  # every captured graph keeps memory of its own, until nobody holds it: the traceback did
                captured = {runner.name for runner in runners if peers.PEERS[runner.name].captured}
                result.skipped |= dict.fromkeys(captured, "no memory beside the other peers")
                runners = [runner for runner in runners if runner.name not in captured]
                gc.collect()
                torch.cuda.empty_cache()
                _measure(workload, runners, base, budget, result, device)
        del runners  # and with them their graphs, before the next pass has its own
        yield result


def _gated(
    workload: Workload,
    pass_name: str,
    problem: gate.Problem,
    subjects: dict[str, peers.Subject],
    result: Result,
) -> list[Runner]:
    """Ours first, then the peers that can run and are right; the others are noted in ``result``."""
    runners: list[Runner] = []

    def add(name: str) -> bool:
        """Whether the peer could run, right or wrong."""
        try:
            if name not in subjects:
                subjects[name] = peers.subject(problem, name)
            found = peers.gated(subjects[name], name, pass_name)
        except peers.Unavailable as reason:
            result.skipped[name] = str(reason)
            return False
        except gate.GateError as error:
            result.failed[name] = str(error)
        except Exception as error:
            if problem.device == "cpu":
                raise
            # On a shared GPU one peer must not cost the others, unless the device itself is lost: then this raises.
            torch.cuda.synchronize()
            subjects.pop(name, None)
            memory = isinstance(error, torch.OutOfMemoryError)
            first = (str(error).strip().splitlines() or [""])[0]
            (result.skipped if memory else result.failed)[name] = f"{type(error).__name__}: {first}"
        else:
            runners.append(found.runner)
            result.errors[name] = found.errors
        return True

    tried: list[str] = []
    for name in workload.ours:
        tried.append(name)
        if add(name):
            break
    for name in workload.peers:
        if name not in tried:
            add(name)
    return runners


def _measure(workload: Workload, runners: list[Runner], base: str, budget: float, result: Result, device: str) -> None:
    # bench/gpu.py puts a roofline beside its rows.
    peak = ceiling(peers.PEERS[base].precision) if device == "cpu" else None
    samples = interleave(runners, base, budget, beside=moments(peak) if peak else None)
    result.measured(samples, base)
    if peak is not None:
        result.compared_with_peak(samples, _flops(workload, result.pass_name), peak.short)
        result.told_apart(samples)


def _flops(workload: Workload, pass_name: str) -> int:
    forward, both = models.flops(workload)
    if pass_name == EPOCH:
        assert isinstance(workload, Network)
        return both * DIGITS // workload.batch
    return forward if pass_name == FORWARD else both
