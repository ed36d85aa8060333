"""Rounds of the benchmarks are paired and interleaved; depths take turns."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench is part of the checkout, not of the package

from bench import (
    cases,
    flat,
    gate,
    picture,
    report,
    workloads,
)
from bench.busy import busy
from bench.ceiling import ceiling
from bench.measure import Runner, Samples, Spread, interleave
from bench.moment import Moment, distances, moments
from bench.result import Result
from wnfused.backends import native

pytestmark = pytest.mark.usefixtures("one_thread")


class Machine:
    """A clock that the runners themselves advance, on a machine whose speed changes from round to round."""

    def __init__(self, slowness=lambda call: 1.0):
        self.now, self.calls, self.slowness = 0.0, [], slowness

    def runner(self, name: str, seconds: float) -> Runner:
        def call():
            self.calls.append(name)
            self.now += seconds * self.slowness(len(self.calls))

        return Runner(name, call)

    def clock(self) -> float:
        return self.now


@pytest.mark.parametrize("names", ["ab", "abc", "abcd"])
def test_rounds_interleave_and_each_runner_has_each_place_equally_often(names):
    machine, count = Machine(), len(names)
    runners = [machine.runner(name, 1.0) for name in names]
    samples = interleave(runners, "a", 0.0, clock=machine.clock, min_rounds=2 * count, max_rounds=2 * count)
    calls = machine.calls[2 * count :]  # two of each calibrate
    rounds = [calls[i : i + count] for i in range(0, len(calls), count)]
    assert samples.rounds == len(rounds) == 2 * count
    assert [sorted(r) for r in rounds] == [list(names)] * len(rounds)
    for place in range(count):
        assert sorted(r[place] for r in rounds) == sorted(2 * names)


def test_ratios_pair_within_a_round_so_that_a_slowing_machine_does_not_show():
    # Each round of two calls is twice as slow as the one before; the calls that calibrate come first.
    machine = Machine(slowness=lambda call: 2.0 ** ((call - 1) // 2))
    runners = [machine.runner("ours", 1.0), machine.runner("peer", 3.0)]
    samples = interleave(runners, "ours", 0.0, clock=machine.clock, min_rounds=8, max_rounds=8)
    assert samples.ratios("peer", "ours") == pytest.approx([3.0] * 8)
    assert samples.seconds["ours"][-1] == pytest.approx(2.0**7 * samples.seconds["ours"][0])


def test_rounds_stop_when_the_ratios_are_known_or_the_time_is_up():
    steady = Machine()
    runners = [steady.runner("ours", 1.0), steady.runner("peer", 2.0)]
    assert interleave(runners, "ours", 1e9, clock=steady.clock).rounds == 5
    noisy = Machine(slowness=lambda call: 1.0 + call % 3)
    runners = [noisy.runner("ours", 1.0), noisy.runner("peer", 2.0)]
    assert 5 < interleave(runners, "ours", 60.0, clock=noisy.clock).rounds < 30


def test_short_calls_are_repeated_and_long_ones_are_not():
    machine = Machine()
    runners = [machine.runner("ours", 1e-4), machine.runner("peer", 1.0)]
    samples = interleave(runners, "ours", 0.0, clock=machine.clock, min_rounds=1, max_rounds=1)
    assert machine.calls.count("ours") == 2 + 20
    assert machine.calls.count("peer") == 2 + 1
    assert samples.seconds["ours"] == [pytest.approx(1e-4)]


def test_spread_is_median_and_quartiles():
    assert Spread.of([1, 2, 3, 4, 5]) == Spread(3, 2, 4)
    assert Spread.of([7]) == Spread(7, 7, 7)
    assert Samples({"a": [2.0, 9.0], "b": [1.0, 3.0]}).ratios("a", "b") == [2.0, 3.0]


def test_rounds_are_told_apart_by_the_distance_of_the_cores():
    near, far = Moment(1e9, 30e-9), Moment(1e9, 300e-9)
    beside = [near, near, near, far, far, far, far, near]
    assert distances(beside) == ["near", "near", "near", "mixed", "far", "far", "far", "mixed"]
    ours, peer = [1.0] * 8, [2.0, 2.0, 2.0, 5.0, 7.0, 8.0, 9.0, 5.0]
    samples = Samples({"ours": ours, "peer": peer}, beside)
    result = Result("group", "workload", "forward")
    result.measured(samples, "ours")
    result.told_apart(samples)
    assert {name: (part.rounds, part.ratios["peer"].median) for name, part in result.apart.items()} == {
        "near": (3, 2.0), "far": (3, 8.0),
    }  # fmt: skip
    assert Result.from_dict(result.to_dict()) == result
    alone = Result("group", "workload", "forward")
    alone.measured(samples, "ours")
    alone.told_apart(Samples(samples.seconds, [Moment(1e9, math.nan)] * 8))
    assert alone.crossing is None
    assert not alone.apart


def test_without_the_library_the_vendor_is_the_ceiling(monkeypatch):
    monkeypatch.setattr(native, "unavailable", lambda: "not built")
    peak = ceiling("fp32")
    moment = moments(peak)()
    assert peak.short == "MKL sgemm"
    assert moment.peak > 0
    assert math.isnan(moment.crossing)


@pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
def test_a_line_crosses_between_cores_in_a_moment():
    seconds = torch.ops.wnfused_native.cpu_crossing_seconds()
    assert math.isnan(seconds) or 1e-9 < seconds < 1e-3


def test_depths_take_turns_and_are_compared_by_the_layer(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(flat, "TYPICAL", 16)
    monkeypatch.setattr(flat, "SAMPLE_SECONDS", 0.0)
    whole = workloads.Depths(group="flat", name="tiny", depths=(10, 16), batch=2, passes=(workloads.BACKWARD,))
    shallow, typical = cases.run(whole, 0.0)
    assert (shallow.workload, typical.workload) == ("WRN-10, batch 2", "WRN-16, batch 2")
    assert (shallow.layers, typical.layers) == (10, 16)
    assert shallow.errors
    assert typical.errors
    assert set(typical.seconds) == {shallow.base}
    assert shallow.seconds["flat"].median == pytest.approx(typical.seconds[typical.base].median * 10 / 16)
    assert shallow.rounds == typical.rounds >= 5
    assert report.table([shallow, typical])[0][2:6] == ["ours", "backend", "flat / ours", "a layer"]


def test_depths_whose_network_is_wrong_have_no_numbers(monkeypatch) -> None:
    monkeypatch.setattr(flat, "TYPICAL", 16)
    check = gate.check
    monkeypatch.setattr(gate, "check", lambda module, forward, problem, *rest: check(
        module, (lambda x: forward(x) * 1.1) if problem.workload.depth == 10 else forward, problem, *rest))  # fmt: skip
    whole = workloads.Depths(group="flat", name="tiny", depths=(10, 16), batch=2, passes=(workloads.BACKWARD,))
    wrong, right = cases.run(whole, 0.0)
    assert wrong.failed
    assert not wrong.seconds
    assert right.seconds


def test_the_cost_of_a_layer_is_drawn_by_peer_and_batch(tmp_path) -> None:
    spread = Spread(2.0, 1.0, 3.0)
    results = [
        Result(group, f"WRN-{depth}, batch {batch}", workloads.BACKWARD, base="native", rounds=5, seconds=seconds)
        for group, batch, seconds in (
            ("depth", 1, {"native": spread, "eager": spread}),
            ("flat", 8, {"native": spread, "flat": spread}),
        )
        for depth in (100, 1000)
    ]
    facts = {"cpu": "a processor", "threads": 2}
    (drawn,) = picture.cost_per_layer(results, facts, tmp_path)
    alone = tmp_path / "alone"
    alone.mkdir()
    (less,) = picture.cost_per_layer(results[:2], facts, alone)
    assert drawn.read_bytes() != less.read_bytes()
    assert not picture.cost_per_layer(results[:1], facts, tmp_path)


def test_busy_programs_are_there_and_end():
    with busy(2) as programs:
        assert [program.poll() for program in programs] == [None, None]
    assert all(program.poll() is not None for program in programs)
