"""What a layer costs over the depth: networks of several depths in one process take turns.

Timed one after the other, each depth would meet the machine in another mood, and the differences between the depths
would be the moods'. Here every round runs every depth, and the cost of a layer is divided by that of the network of
``TYPICAL`` layers *within* the round. A network is run as often as ``SAMPLE_SECONDS`` takes, so that a shallow one
finds the caches as its own last call left them, and not full of the deepest one's weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import wnfused
from bench import gate, models, peers
from bench.ceiling import ceiling
from bench.measure import Runner, Samples, interleave
from bench.moment import moments
from bench.result import Result
from bench.workloads import BACKWARD, Depths, Network

TYPICAL = 1000
FLAT = "flat"  # the peer that takes as long a layer as the typical network
SAMPLE_SECONDS = 0.2
CHECKED_WHOLE = 3004  # layers; float64's gradients and maps of 10,000 for a batch of eight are more than 24 GB


def run(workload: Depths, budget: float) -> Iterator[Result]:
    """A result for each depth; ``budget`` seconds for each of them."""
    networks = workload.parts()
    results = [Result.of(network, BACKWARD) for network in networks]
    status = wnfused.backend_status()
    name = next(name for name in workload.ours if status[name] is None)
    runners = {}
    for network, result in zip(networks, results, strict=True):
        try:
            runners[network.depth] = _gated(network, name, result)
        except gate.GateError as error:
            result.failed[name] = str(error)
    if TYPICAL in runners:
        peak = ceiling("fp32")
        budget *= len(runners)
        taken = interleave(
            list(runners.values()), str(TYPICAL), budget, beside=moments(peak), sample_seconds=SAMPLE_SECONDS
        )
        for network, result in zip(networks, results, strict=True):
            if network.depth in runners:
                samples = _beside_typical(taken, network.depth, name)
                result.measured(samples, name)
                result.compared_with_peak(samples, models.flops(network)[1], peak.short)
                result.told_apart(samples)
    yield from results


def _gated(network: Network, name: str, result: Result) -> Runner:
    """A runner that goes by its depth."""
    checked = network if network.depth <= CHECKED_WHOLE else replace(network, batch=1)
    result.errors[name] = peers.gated(peers.subject(gate.Problem(checked), name), name, BACKWARD).errors
    subject = peers.subject(gate.Problem(network), name)
    return Runner(str(network.depth), peers.call(subject, BACKWARD), subject.context)


def _beside_typical(taken: Samples, depth: int, name: str) -> Samples:
    """The samples of one network, and what it would take at the typical one's cost a layer."""
    seconds = {name: taken.seconds[str(depth)]}
    if depth != TYPICAL:
        seconds[FLAT] = [it * depth / TYPICAL for it in taken.seconds[str(TYPICAL)]]
    return Samples(seconds, taken.beside)
