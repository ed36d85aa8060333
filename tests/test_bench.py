"""The benchmarks' machinery: the gate catches a wrong peer, rounds are paired and interleaved, the JSON is whole."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench is part of the checkout, not of the package

import wnfused
from bench import __main__ as command
from bench import (
    cases,
    deep,
    flat,
    gate,
    gpu_workloads,
    initialisation,
    models,
    parameters,
    peers,
    picture,
    report,
    workloads,
)
from bench.bars import ratio_bars
from bench.busy import busy
from bench.ceiling import ceiling
from bench.measure import Runner, Samples, Spread, interleave
from bench.moment import Moment, distances, moments
from bench.result import Result
from wnfused.backends import native

LAYER = workloads.LinearLayer(group="linear", name="tiny", features=8, batch=4, peers=("eager", "plain"))
CONV = workloads.ConvLayer(group="conv3x3", name="tiny", channels=4, kernel=3, size=5, batch=2, channels_last=True)
STAGE = workloads.Stage(group="stage", name="tiny", channels=4, size=4, batch=2, blocks=3)
LARGE = ("deep", "flat")  # groups of 10,000 layers
NETWORK = workloads.Network(group="network", name="tiny", depth=16, size=8, batch=2)


@pytest.fixture(autouse=True)
def one_thread():
    """The sizes are tiny: more threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# -------------------------------------------------------------------------------------------------------- gate


@pytest.mark.parametrize("workload", [LAYER, CONV, STAGE, NETWORK], ids=lambda w: type(w).__name__)
@pytest.mark.parametrize("peer", ["reference", "eager", "plain", "eager bf16"])
@pytest.mark.parametrize("pass_name", [workloads.FORWARD, workloads.BACKWARD])
def test_right_peers_pass(workload, peer, pass_name):
    subject = peers.subject(gate.Problem(workload), peer)
    gated = peers.gated(subject, peer, pass_name)
    assert gated.errors["y"] > 0
    gated.runner.call()


def _scaled_gain(module: nn.Module, forward):
    with torch.no_grad():
        next(p for n, p in module.named_parameters() if "original0" in n).mul_(1.01)
    return forward


def _no_bias(module: nn.Module, forward):
    with torch.no_grad():
        next(p for n, p in module.named_parameters() if n.endswith("bias")).zero_()
    return forward


def _not_finite(module: nn.Module, forward):
    return lambda x: forward(x) * math.nan


def _stale_gradient(module: nn.Module, forward):
    """The output is right, a parameter's gradient is not."""
    bias = next(p for n, p in module.named_parameters() if n.endswith("bias"))
    return lambda x: forward(x) + 0 * bias.sum() + (bias - bias.detach()).sum()


@pytest.mark.parametrize("workload", [LAYER, CONV, STAGE, NETWORK], ids=lambda w: type(w).__name__)
@pytest.mark.parametrize("plant", [_scaled_gain, _no_bias, _not_finite, _stale_gradient])
def test_planted_wrong_peer_is_caught(workload, plant):
    subject = peers.subject(gate.Problem(workload), "eager")
    subject.forward = plant(subject.module, subject.forward)
    with pytest.raises(gate.GateError, match="is off by"):
        peers.gated(subject, "eager", workloads.BACKWARD)


class _Off(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * 1.001


@pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
def test_the_frozen_peer_is_frozen_as_long_as_it_lives():
    workload = dataclasses.replace(CONV, passes=(workloads.FORWARD,))
    subject = peers.subject(gate.Problem(workload), "frozen")
    peers.gated(subject, "frozen", workloads.FORWARD).runner.call()
    assert subject.module._frozen is not None


def test_wrong_peer_is_reported_without_numbers(monkeypatch):
    monkeypatch.setitem(models.FORMS, "plain", lambda workload: _Off(models.plain(workload)))
    results = list(cases.run(LAYER, 0.0))
    for result in results:
        assert "plain" in result.failed
        assert "plain" not in result.seconds
        assert "eager" in result.ratios
    header, rows = report.table(results)
    assert [row[header.index("plain / ours")] for row in rows] == ["wrong", "wrong"]


def test_sketch_sees_the_size_of_an_error():
    torch.manual_seed(0)
    true = [{"v": torch.randn(16, 9), "b": torch.randn(16)} for _ in range(20)]
    off = [{"v": layer["v"] + 1e-3 * torch.randn(16, 9), "b": layer["b"]} for layer in true]
    errors = deep.sketch_errors(deep.sketch(iter(off)), deep.sketch(iter(true)))
    assert 3e-4 < errors["dv of 144 entries"] < 3e-3
    assert errors["db of 16 entries"] == 0


def test_parameters_are_the_same_in_every_form():
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    with wnfused.use_backend("reference"):
        outputs = [parameters.fill(form(NETWORK).double(), 2)(x) for form in models.FORMS.values()]
    for output in outputs:
        torch.testing.assert_close(output, outputs[0])


def test_flops_of_a_layer_and_of_a_network_without_the_input_gradient():
    assert models.flops(LAYER) == (2 * 4 * 8 * 8, 3 * 2 * 4 * 8 * 8)
    forward, both = models.flops(NETWORK)
    assert 3 * forward - both == 2 * 2 * 16 * 8 * 8 * 27


def test_init_gate_catches_a_matrix_that_is_left_out(monkeypatch):
    workload = workloads.Orthogonal(group="init", name="tiny", depth=16, passes=("orthogonal",))
    monkeypatch.setattr("wnfused.init.orthogonal_batched", lambda stack: stack)
    with pytest.raises(gate.GateError):
        initialisation.gated(workload, "batched")


# ----------------------------------------------------------------------------------------------------- measure


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


def test_rounds_interleave_and_rotate():
    machine = Machine()
    runners = [machine.runner(name, 1.0) for name in "abc"]
    samples = interleave(runners, "a", 0.0, clock=machine.clock, min_rounds=6, max_rounds=6)
    calls = machine.calls[2 * 3 :]  # two of each calibrate
    rounds = [calls[i : i + 3] for i in range(0, len(calls), 3)]
    assert [sorted(r) for r in rounds] == [list("abc")] * 6
    assert {r[0] for r in rounds} == set("abc")
    assert samples.rounds == 6


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


# ----------------------------------------------------------------------------------------------------- command


def test_tiny_run_leaves_valid_json(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(workloads, "WORKLOADS", (LAYER, STAGE))
    assert command.main(["--seconds", "0", "--out", str(tmp_path / "new" / "folder")]) == 0
    found = json.loads((tmp_path / "new" / "folder" / "bench.json").read_text())
    assert found["schema"] == report.SCHEMA
    assert {"cpu", "torch", "threads", "instruction_set", "commit", "date", "device"} <= set(found["machine"])
    assert len(found["results"]) == 4
    for result in found["results"]:
        assert result["rounds"] >= 5
        assert set(result["ratios"]) == {"eager", "plain"}
        for spread in (*result["ratios"].values(), *result["seconds"].values()):
            assert 0 < spread["low"] <= spread["median"] <= spread["high"]
    assert found["results"][-1]["share"]["median"] > 0
    assert "eager / ours" in capsys.readouterr().out


def test_groups_are_added_to_a_run_and_shown(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(workloads, "WORKLOADS", (LAYER, STAGE))
    run = ["--seconds", "0", "--out", str(tmp_path)]
    assert command.main([*run, "--group", "stage"]) == 0
    assert command.main([*run, "--group", "linear", "--add"]) == 0
    _, results = report.load_json(tmp_path)
    assert sorted({r.group for r in results}) == ["linear", "stage"]
    assert command.main([*run, "--group", "linear", "--add"]) == 0
    assert len(report.load_json(tmp_path)[1]) == len(results) == 4
    capsys.readouterr()
    assert command.main(["--show", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("tiny") >= 4  # once more in a note where the cores moved
    assert shown.count("fp32 peak") == 4
    document = json.loads((tmp_path / "bench.json").read_text())
    document["machine"]["commit"] = "another"
    (tmp_path / "bench.json").write_text(json.dumps(document))
    with pytest.raises(SystemExit, match="2"):
        command.main([*run, "--add"])
    assert "was measured with commit 'another'" in capsys.readouterr().err


def test_a_peer_that_takes_too_long_to_compile_is_left_out(monkeypatch):
    def slow(module, **_):
        def forward(x):
            while True:
                time.sleep(0.01)

        return forward

    monkeypatch.setattr(torch, "compile", slow)
    monkeypatch.setattr(peers, "COMPILE_SECONDS", 1)
    subject = peers.subject(gate.Problem(LAYER), "compile")
    with pytest.raises(peers.Unavailable, match="did not compile within 1 s"):
        peers.gated(subject, "compile", workloads.FORWARD)


def test_an_epoch_is_as_many_images_as_digits_has(monkeypatch):
    sizes = []
    monkeypatch.setattr(peers, "training_step", lambda forward, x, labels, optimizer: sizes.append(len(x)))
    peers.epoch(None, torch.empty(64, 1), torch.empty(64), None)
    assert sizes == [64] * 22 + [29]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--group", "nothing"], "--group nothing: is no group; there are linear, "),
        (["--match", "no such"], "--match no such: leaves no workload; --list names them"),
        (["--quick", "--group", "deep"], "--group deep: leaves no workload of --quick; --list names them"),
        (["--threads", "0"], "--threads 0: must be 1 or more"),
        (["--threads", "two"], "argument --threads: invalid int value: 'two'"),
        (["--seconds", "-1"], "--seconds -1.0: must be 0 or more"),
        (["--out", "/proc/bench"], "--out /proc/bench: cannot be written: "),
        (["--show", "--out", "/proc/bench"], "--out /proc/bench: /proc/bench/bench.json: there is no such run"),
        (["--gruop", "stage"], "unrecognized arguments: --gruop stage"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments_are_named_in_one_line(arguments, says, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"wnfused bench: error: {says}")
    assert printed.count("\n") == 1


def test_every_workload_names_known_peers_and_is_named_once():
    names = [(part.group, part.name) for w in workloads.WORKLOADS for part in w.parts()]
    assert len(set(names)) == len(names)
    assert all(name in peers.PEERS for w in workloads.WORKLOADS for name in (*w.ours, *w.peers))
    assert all(any(w.quick for w in workloads.WORKLOADS if w.group == g) for g in workloads.GROUPS if g not in LARGE)


@pytest.mark.parametrize(("seconds", "text"), [(1.234, "1.23 s"), (0.01234, "12.3 ms"), (123.4e-6, "123 us")])
def test_durations_have_three_digits(seconds, text):
    assert report.duration(seconds) == text


def test_the_gpu_script_goes_through_its_steps_without_a_gpu(tmp_path) -> None:
    from bench import gpu

    assert gpu.main(["--rehearse", "--only", "memcheck", "--only", "measure", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["rehearsal"]
    assert report["steps"]["memcheck"]["status"] == "skipped"
    rows = report["steps"]["measure"]["results"]
    assert [row["pass_name"] for row in rows] == ["forward", "forward+backward", "orthogonal"]
    peers_of_rows = [("eager", row) for row in rows[:2]] + [("loop", rows[2])]
    assert all(row["ratios"][peer]["median"] > 0 for peer, row in peers_of_rows)
    assert "3x3 convolutions of WRN-16, orthogonal: loop" in (tmp_path / "gpu.svg").read_text()


def test_ratios_are_drawn_to_scale_without_a_library() -> None:
    """From the line at 1, to the right where ours is faster; twice as fast is as far from it as half as fast."""
    bars = [("a & b < c", 2.0), ("half", 0.5), ("tenfold", 10.0), ("level", 1.0)]
    drawn = ElementTree.fromstring(ratio_bars("title", bars, "peer / ours"))
    name = "{http://www.w3.org/2000/svg}"
    texts = [text.text for text in drawn.iter(f"{name}text")]
    assert {"title", "a & b < c", "10.00", "0.50", "peer / ours"} <= set(texts)
    assert {"0.5", "1", "2", "5", "10"} <= set(texts)  # ticks
    start, width = (
        [float(bar.get(side)) for bar in drawn.iter(f"{name}rect") if bar.get("class")] for side in ("x", "width")
    )
    one = start[0]
    assert width[0] == pytest.approx(width[1], abs=0.2)
    assert start[1] + width[1] == pytest.approx(one, abs=0.2)
    assert width[2] == pytest.approx(width[0] * math.log2(10), abs=0.2)
    assert (start[3], width[3]) == (one, 0.0)
    assert ElementTree.fromstring(ratio_bars("one", [("alone", 1.0)], "")) is not None


def test_the_initialisation_is_measured_on_the_device_that_is_named(monkeypatch) -> None:
    """The clock waits for it, and no stack is left on the CPU."""
    (workload,) = (w for w in gpu_workloads.WORKLOADS if isinstance(w, workloads.Orthogonal))
    assert workload.depth == 10000
    assert gpu_workloads.patience(workload) > 60
    small, devices = dataclasses.replace(workload, depth=16), []
    full = torch.full

    def on_the_cpu(*arguments, device):
        devices.append(device)
        return full(*arguments)

    monkeypatch.setattr(torch, "full", on_the_cpu)
    for name in ("batched", "loop"):
        assert initialisation.gated(small, name).runner.settle is None
        assert initialisation.gated(small, name, "cuda").runner.settle is torch.cuda.synchronize
    assert devices == [*["cpu"] * 3, *["cuda"] * 3] * 2
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    (result,) = cases.run(small, 0.0, "cuda")
    assert not result.failed
    assert result.ratios["loop"].median > 0


def test_the_tests_on_a_gpu_are_those_that_need_one_and_then_the_triton_kernels(tmp_path, monkeypatch) -> None:
    from bench import gpu, supervised

    found = [f"tests/test_gpu.py::test_{i}" for i in range(9)]
    found += [f"tests/interpreter/test_triton_rows.py::test_{i}" for i in range(9)]
    ran = []

    def run(command, items, *_, **__):
        if command[-1] == "collect":
            assert items == gpu.TESTS
            return {name: {} for name in found} | {name: {"status": "collected"} for name in items}
        ran.append(items)
        wrong = {"status": "failed", "why": "wrong"}
        return {name: wrong if name.endswith("_3") else {"status": "passed"} for name in items}

    monkeypatch.setattr(supervised, "run", run)
    report = SimpleNamespace(options=SimpleNamespace(rehearse=False, out=tmp_path))
    outcome = gpu.tests(report, 60.0)
    assert (outcome["status"], outcome["count"], outcome["passed"]) == ("failed", 18, 16)
    assert set(outcome["failed"]) == {"test_3", "tests/interpreter/test_triton_rows.py::test_3"}
    assert sorted(name for shard in ran for name in shard) == sorted(found)
    for shard in ran:  # should time be up, it is for the latter
        assert shard == sorted(shard, key=lambda name: "interpreter" in name)
    folder = Path(__file__).parents[1]
    assert all((folder / name).exists() for name in gpu.TESTS)


def test_collected_tests_come_before_what_they_were_collected_from(tmp_path) -> None:
    from bench.gpu_worker import _Collector
    from bench.supervised import Reporter

    file = tmp_path / "done"
    _Collector(Reporter(file), ["a", "b"]).pytest_collection_finish(
        SimpleNamespace(items=[SimpleNamespace(nodeid="a::one"), SimpleNamespace(nodeid="b/c::two")])
    )
    assert [json.loads(line)["item"] for line in file.read_text().splitlines()] == ["a::one", "b/c::two", "a", "b"]


def test_the_sanitizers_see_every_map_that_the_stage_has_kernels_for() -> None:
    import emulator

    from bench import gpu_small

    maps = {tuple(map(int, name.split()[1].split("x"))) for name in emulator.names()}
    assert {(channels, side, side) for channels, side in gpu_small.SHAPES} == maps


def test_a_step_of_the_gpu_script_that_fails_keeps_what_it_had(tmp_path, monkeypatch) -> None:
    from bench import gpu

    def fails(report, limit):
        report.has("measure", {"status": "cut short", "results": [1]})
        raise RuntimeError("no more")

    monkeypatch.setitem(gpu.STEP_FUNCTIONS, "measure", fails)
    monkeypatch.setattr(gpu, "_draw", lambda content, folder: fails(None, 0.0))
    assert gpu.main(["--rehearse", "--only", "memcheck", "--only", "measure", "--out", str(tmp_path)]) == 1
    steps = json.loads((tmp_path / "gpu.json").read_text())["steps"]
    assert steps["memcheck"]["status"] == "skipped"
    assert (steps["measure"]["status"], steps["measure"]["results"]) == ("failed", [1])
    assert steps["measure"]["why"] == "RuntimeError: no more"


def test_a_commit_that_git_cannot_tell_is_named_or_missed(tmp_path, monkeypatch, capsys) -> None:
    from bench import gpu, machine

    monkeypatch.setattr(machine, "commit", lambda: None)
    run = ["--rehearse", "--only", "memcheck", "--out", str(tmp_path)]
    for arguments, commit in (([], None), (["--commit", "abc123"], "abc123")):
        assert gpu.main([*run, *arguments]) == 0
        assert json.loads((tmp_path / "gpu.json").read_text())["machine"]["commit"] == commit
        assert ("NO COMMIT" in capsys.readouterr().out) == (commit is None)


def test_tests_that_may_hang_have_a_process_of_their_own() -> None:
    from bench import gpu

    tests = [f"tests/test_gpu.py::test_{i}" for i in range(20)]
    hangs = [f"tests/test_gpu.py::test_stage_by_warpgroups[{i}]" for i in range(3)]
    *others, (last, patience, seconds) = gpu._shards([*tests[:7], *hangs, *tests[7:]])
    assert len(others) == gpu.TEST_PROCESSES
    assert sorted(item for shard, _, _ in others for item in shard) == sorted(tests)
    assert last == hangs
    assert patience < 60 < seconds < gpu.LIMITS["tests"]
    assert gpu._shards([]) == []
    names = (Path(__file__).parent / "test_gpu.py").read_text()
    assert f"def test_stage_by_{gpu.UNTRIED}s(" in names


@pytest.mark.parametrize(
    ("known", "options"),
    [
        ("--kernel-name arg", ["--kernel-name", "kns=wnfused"]),
        ("--kernel-regex arg", ["--kernel-regex", "kns=wnfused"]),
        ("--tool arg", []),
    ],
)
def test_the_race_checker_looks_at_this_packages_kernels(tmp_path, known, options) -> None:
    from bench import gpu

    script = tmp_path / "compute-sanitizer"
    script.write_text(f"#!{sys.executable}\nprint({known!r})\n")
    script.chmod(0o755)
    assert gpu._own_kernels(str(script)) == options


@pytest.mark.parametrize(
    ("said", "outcome"),
    [
        (["ran a stage", "== ERROR SUMMARY: 0 errors"], {"status": "passed", "ran": ["ran a stage"]}),
        (["nothing ran: no device of capability 9.0"], {"status": "skipped", "why": "no device of capability 9.0"}),
        (["Device not supported"], {"status": "skipped"}),
    ],
)
def test_the_sanitizers_look_at_either_part_of_the_kernels(tmp_path, monkeypatch, said, outcome) -> None:
    from bench import gpu, gpu_small

    script = tmp_path / "compute-sanitizer"
    script.write_text(f"#!{sys.executable}\nimport sys\nprint(sys.argv[-1], *{said!r}, sep='\\n')\n")
    script.chmod(0o755)
    monkeypatch.setattr(gpu, "_tool", lambda name: str(script))
    report = SimpleNamespace(options=SimpleNamespace(rehearse=False, out=tmp_path))
    for name in gpu.STEPS:
        if "check" in name:
            found = gpu.STEP_FUNCTIONS[name](report, 30.0)
            assert found.items() >= outcome.items()
    parts = {log.read_text().split()[0] for log in tmp_path.glob("*check.log")}
    assert parts == set(gpu_small.PARTS)


def test_the_gpu_script_names_what_is_missing(tmp_path, capsys) -> None:
    from bench import gpu

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert gpu.main(["--out", str(tmp_path)]) == 2
    assert "CUDA" in capsys.readouterr().err


def test_a_pass_that_fails_costs_no_other(tmp_path, monkeypatch) -> None:
    """Each is on disk before the next begins; those after it start anew, the others share what was made."""
    from bench import gpu_worker
    from bench.supervised import Reporter

    first = dataclasses.replace(gpu_workloads.REHEARSAL[0], passes=("one", "two", "three"))
    second = dataclasses.replace(first, name="other", passes=("four", "five"))
    monkeypatch.setattr(gpu_workloads, "REHEARSAL", (first, second))
    file, begun = tmp_path / "done", []

    def run(workload, seconds, device):
        begun.append(workload.passes)
        for name in workload.passes:
            assert f'"{gpu_worker.key(workload, name)}"' in file.read_text().splitlines()[-1]
            if name == "two":
                raise RuntimeError("no more\nmemory")
            yield Result.of(workload, name)

    monkeypatch.setattr(cases, "run", run)
    items = [gpu_worker.key(w, name) for w in (first, second) for name in w.passes]
    assert gpu_worker.measure(items, Reporter(file), 0.0, "cpu") == 0
    assert begun == [("one", "two", "three"), ("three",), ("four", "five")]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    ended = {line["item"]: line["outcome"] for line in lines if "outcome" in line}
    assert list(ended) == items
    assert ended.pop(items[1]) == {"status": "failed", "why": "RuntimeError: no more"}
    assert [ended[item]["results"][0]["pass_name"] for item in ended] == ["one", "three", "four", "five"]


def test_every_gpu_workload_has_a_floor() -> None:
    from bench import roofline

    rates = roofline.Rates(4e12, {"fp32": 5e13, "tf32": 4e14, "bf16": 8e14})
    for workload in gpu_workloads.WORKLOADS:
        if getattr(workload, "depth", 0) > 304:
            continue
        for name in workload.passes:
            found = roofline.floor(workload, name, workload.name.rsplit(", ", 1)[1], rates)
            assert found.seconds > 0
            assert found.flops == models.flops(workload)[0 if name == "forward" else 1]
        assert set(workload.ours) | set(workload.peers) <= set(peers.PEERS)


@pytest.mark.parametrize(
    ("fp32", "precision", "rate", "way"),
    [(5e13, "fp32", 1e14, "3 x tf32"), (2e14, "fp32", 2e14, "fp32"), (5e13, "tf32", 3e14, "tf32")],
)
def test_a_float32_product_may_be_three_of_tf32(fp32, precision, rate, way) -> None:
    from bench import roofline

    rates = roofline.Rates(1e30, {"fp32": fp32, "tf32": 3e14, "bf16": 8e14})
    layer = workloads.LinearLayer(group="g", name="n", features=64, batch=64)
    found = roofline.floor(layer, "forward", precision, rates)
    assert found.seconds == pytest.approx(found.flops / rate)
    assert found.bound == f"FLOPs by {way}"


def test_bytes_of_one_linear_layer() -> None:
    """Forward: x, w, b, y. Backward: w again, dy, x, dx, dw, db."""
    from bench import roofline

    layer = workloads.LinearLayer(group="g", name="n", features=8, batch=4)
    parameters = 4 * (8 * 8 + 8)
    assert roofline.bytes_moved(layer, "forward", 4) == 4 * 2 * 32 + parameters
    assert roofline.bytes_moved(layer, "forward+backward", 4) == 4 * 2 * 32 + parameters + 4 * 3 * 32 + 2 * parameters


def test_a_deep_networks_truth_is_that_of_one_that_keeps_all_its_maps(monkeypatch) -> None:
    network = workloads.Network(group="g", name="n", depth=28, batch=2, size=8)
    kept = gate.Problem(network).truth("training step")
    monkeypatch.setattr(gate, "DEEP", 20)
    saved = []
    monkeypatch.setattr(
        gate, "checkpoint_sequential", lambda *a, **k: saved.append(a) or checkpoint_sequential(*a, **k)
    )
    again = gate.Problem(network).truth("training step")
    assert len(saved) == 3
    torch.testing.assert_close(again.y, kept.y, rtol=0, atol=0)
    torch.testing.assert_close(again.layers, kept.layers, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", [workloads.LinearLayer, workloads.ConvLayer, workloads.Stage, workloads.Network])
def test_every_kind_of_gpu_workload_goes_through_its_peers(kind, monkeypatch) -> None:
    """Small, on the CPU, with graphs that are plain calls: every line on the host's side runs."""

    monkeypatch.setattr(peers, "captured", lambda call, results, limit: peers.check_replay(
        results(call()), results(call()), limit) or call)  # fmt: skip
    sizes = {
        workloads.LinearLayer: {"features": 16, "batch": 4},
        workloads.ConvLayer: {"channels": 16, "size": 4, "batch": 2},
        workloads.Stage: {"channels": 8, "size": 4, "batch": 2, "blocks": 2},
        workloads.Network: {"depth": 10, "size": 8, "batch": 2},
    }
    whole = next(w for w in gpu_workloads.WORKLOADS if isinstance(w, kind))
    chosen = tuple(name for name in whole.peers if "compile" not in name)
    small = dataclasses.replace(whole, peers=chosen, ours=whole.ours[:1], **sizes[kind])
    for result in cases.run(small, 0.0, "cpu"):
        assert not result.failed
        named = {*whole.ours, *whole.peers}
        assert set(result.skipped) <= {n for n in named if re.search("triton|warpgroup|epilogues|fused|vendor", n)}
        assert {name for name in chosen if "triton" not in name} <= {*result.errors, *result.skipped}


@pytest.mark.parametrize("group", ["linear", "conv"])
def test_the_other_way_of_each_single_layer_is_measured_too(group) -> None:
    ways = [
        [peer.way for name in workload.peers if (peer := peers.PEERS[name]).way]
        for workload in gpu_workloads.WORKLOADS
        if workload.group == group
    ]
    assert all(len(others) == 1 for others in ways)
    assert {others[0] for others in ways} == {"fused", "vendor"}


def test_without_memory_for_all_the_graphs_are_gone_before_the_others_are_timed_again(monkeypatch) -> None:
    alive, timed = [], []

    class Graph:
        def __init__(self, call):
            self.call = call
            alive.append(weakref.ref(self))

        def replay(self):
            return self.call()

    def times(runners, *arguments, **options):
        timed.append([runner.name for runner in runners])
        if len(timed) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return interleave(runners, *arguments, **options)

    def empty_cache():
        assert [graph() for graph in alive] == [None, None]

    monkeypatch.setattr(peers, "captured", lambda call, *_: Graph(call).replay)
    monkeypatch.setattr(cases, "interleave", times)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    names = ("plain", "cuda plain fp32 graph", "cuda eager fp32 graph")
    small = dataclasses.replace(LAYER, ours=("reference",), peers=names, passes=("forward",))
    (result,) = cases.run(small, 0.0)
    assert timed == [["reference", *names], ["reference", "plain"]]
    assert set(result.skipped) == set(names[1:])
    assert set(result.ratios) == {"plain"}


@pytest.mark.parametrize(("name", "searched"), [("cuda ours bf16", False), ("cuda eager tf32", True), ("plain", True)])
@pytest.mark.parametrize("is_cuda", [True, False])
def test_others_convolutions_on_a_gpu_are_cudnns_fastest(monkeypatch, name, searched, is_cuda) -> None:
    peer = dataclasses.replace(peers.PEERS[name], backend=None)
    subject = peers.Subject(None, peer, None, None, SimpleNamespace(is_cuda=is_cuda))
    assert not torch.backends.cudnn.benchmark
    with subject.context():
        assert torch.backends.cudnn.benchmark == (searched and is_cuda)
    assert not torch.backends.cudnn.benchmark


def test_a_replay_is_compared_with_a_call() -> None:
    true = [torch.randn(5, 3), torch.randn(4)]
    peers.check_replay([t * (1 + 1e-3) for t in true], true, 1e-2)
    unwritten, off = torch.full((4,), math.nan), true[1] * 1.1
    for wrong in ([true[0], unwritten], [true[0], off], [true[0], torch.zeros(4)], [true[0], torch.zeros(3)], true[:1]):
        with pytest.raises(gate.GateError, match="a replayed CUDA graph"):
            peers.check_replay(wrong, true, 1e-2)
    with pytest.raises(gate.GateError, match="a replayed CUDA graph"):
        peers.check_replay([], [], 1e-2)


def test_a_training_step_is_known_by_its_gradients() -> None:
    subject = peers.subject(gate.Problem(NETWORK), "plain")
    held = list(subject.module.parameters())
    step = peers.call(subject, workloads.STEP)
    first = peers._results(held, step())
    assert [t.shape for t in first] == [p.shape for p in held]
    limit = peers._same_limit(subject, workloads.STEP)
    peers.check_replay(first, peers._results(held, step()), limit)
    assert limit == gate.tolerance(NETWORK, "fp32").layer_gradient < 1
    assert peers._same_limit(subject, workloads.BACKWARD) == 1e-2
    first[3].zero_()
    with pytest.raises(gate.GateError, match="a replayed CUDA graph"):
        peers.check_replay(first, peers._results(held, step()), limit)


def test_busy_programs_are_there_and_end():
    with busy(2) as programs:
        assert [program.poll() for program in programs] == [None, None]
    assert all(program.poll() is not None for program in programs)
