"""The benchmark of the GPU, as far as it goes without one: its steps, its floors, its peers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import math
import re
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_workloads import LAYER, NETWORK
from torch.utils.checkpoint import checkpoint_sequential

from bench import (
    cases,
    gate,
    gpu_workloads,
    initialisation,
    models,
    peers,
    workloads,
)
from bench.measure import interleave
from bench.result import Result
from wnfused.backends import native

pytestmark = pytest.mark.usefixtures("one_thread")


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


def test_the_initialisation_is_measured_on_the_device_that_is_named(monkeypatch) -> None:
    """The clock waits for it, and no stack is left on the CPU."""
    workload, deepest = (w for w in gpu_workloads.WORKLOADS if isinstance(w, workloads.Orthogonal))
    assert (workload.depth, deepest.depth) == (1000, 10000)
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


def test_a_file_of_tests_that_cannot_be_imported_fails_the_step(tmp_path, monkeypatch) -> None:
    from bench import gpu, supervised
    from bench.gpu_worker import _Collector
    from bench.supervised import Reporter

    def run(command, items, *_, **__):
        if command[-1] != "collect":
            return {name: {"status": "passed"} for name in items}
        collector = _Collector(Reporter(tmp_path / "done"), items)
        collector.pytest_collectreport(SimpleNamespace(failed=False, nodeid="tests/test_gpu.py", longrepr=""))
        error = "of that file:\nE   ImportError: no such thing"
        broken = "tests/interpreter/test_triton_rows.py"
        collector.pytest_collectreport(SimpleNamespace(failed=True, nodeid=broken, longrepr=error))
        collector.pytest_collection_finish(SimpleNamespace(items=[SimpleNamespace(nodeid="tests/test_gpu.py::one")]))
        lines = [json.loads(line) for line in (tmp_path / "done").read_text().splitlines()]
        return {line["item"]: line["outcome"] for line in lines}

    monkeypatch.setattr(supervised, "run", run)
    outcome = gpu.tests(SimpleNamespace(options=SimpleNamespace(rehearse=False, out=tmp_path)), 120.0)
    assert (outcome["status"], outcome["count"], outcome["passed"]) == ("failed", 1, 1)
    why = "tests/interpreter/test_triton_rows.py: E   ImportError: no such thing"
    assert outcome["failed"] == {"tests/interpreter": why}


def test_a_match_that_fits_no_workload_is_an_error(tmp_path, capsys) -> None:
    from bench import gpu

    with pytest.raises(SystemExit, match="2"):
        gpu.main(["--rehearse", "--out", str(tmp_path), "--match", "no such workload"])
    assert "--match no such workload: no workload's name holds this" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


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
def test_the_race_checker_looks_at_this_packages_kernels(known, options) -> None:
    from bench import gpu

    assert gpu._own_kernels(known) == options


@pytest.mark.parametrize(
    ("said", "outcome"),
    [
        (["ran a stage", "== ERROR SUMMARY: 0 errors"], {"status": "passed", "ran": ["ran a stage"]}),
        (["nothing ran: no device of capability 9.0"], {"status": "skipped", "why": "no device of capability 9.0"}),
        (["Device not supported"], {"status": "skipped"}),
        (["ran a stage"], {"status": "failed", "summary": [], "ran": ["ran a stage"]}),
        (["No attachable process found.", "ran a stage", "== ERROR SUMMARY: 0 errors"], {"status": "failed"}),
    ],
)
def test_the_sanitizers_look_at_either_part_of_the_kernels(tmp_path, monkeypatch, said, outcome) -> None:
    from bench import gpu, gpu_small

    script = tmp_path / "compute-sanitizer"
    script.write_text(f"#!{sys.executable}\nimport sys\nprint(sys.argv[-1], *{said!r}, sep='\\n')\n")
    script.chmod(0o755)
    monkeypatch.setattr(gpu, "_tool", lambda name: str(script))
    report = gpu.Report(SimpleNamespace(rehearse=False, out=tmp_path, commit="here"), 0.0)
    for name in gpu.STEPS:
        if "check" in name:
            found = gpu.STEP_FUNCTIONS[name](report, 30.0)
            assert found.items() >= outcome.items()
    said = (tmp_path / gpu.SANITIZERS).read_text()
    assert said.count("=== ") == 4
    parts = {part.split("\n")[1] for part in said.split("=== ")[1:]}
    assert parts == set(gpu_small.PARTS)


@pytest.mark.parametrize("wrong", [None, "failed", "out of time"])
@pytest.mark.parametrize("missing", [{}, {"autograd": "no compiler"}])
def test_a_build_names_the_libraries_that_are_not_there(tmp_path, monkeypatch, wrong, missing) -> None:
    from bench import gpu

    (tmp_path / "wnfused").mkdir()
    (tmp_path / "wnfused" / "_build.json").write_text(json.dumps({"not_built": missing | {"cuda": "no toolkit"}}))
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "_run", lambda *command, **environment: wrong)
    for rehearse, named in ((True, missing), (False, missing | {"cuda": "no toolkit"})):
        report = SimpleNamespace(options=SimpleNamespace(rehearse=rehearse, out=tmp_path))
        expected = {"status": wrong or ("failed" if named else "passed")}
        assert gpu.build(report, 30.0) == expected | ({"why": "; ".join(named.values())} if named else {})


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


@pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
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
        assert set(result.skipped) <= {n for n in named if re.search("triton|warpgroup|fused|vendor", n)}
        assert {name for name in chosen if "triton" not in name} <= {*result.errors, *result.skipped}


class NoGraph:
    def replay(self) -> None:
        pass


def test_a_replay_keeps_what_its_kernels_have_the_addresses_of(monkeypatch) -> None:
    streams = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: streams)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams)
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", NoGraph)
    x = torch.ones(3)
    held = weakref.ref(x)
    replay = peers.captured(functools.partial(torch.mul, x, 2), lambda y: (y,), 1e-6)
    del x
    gc.collect()
    assert held() is not None
    replay()
    del replay
    gc.collect()
    assert held() is None


def test_the_deepest_network_has_a_row_of_ours_before_eager_takes_its_minutes() -> None:
    deepest = [w for w in gpu_workloads.WORKLOADS if isinstance(w, workloads.Network) and w.depth == 10000]
    first = deepest[0]
    assert first.peers == ("cuda ours bf16 graph",)
    assert gpu_workloads.WORKLOADS.index(first) < 12
    assert any("cuda eager bf16" in other.peers for other in deepest[1:])


def test_what_is_captured_is_drawn_beside_ours_captured() -> None:
    from bench import gpu

    medians = {"cuda ours bf16 graph": 0.5, "cuda eager bf16": 3.0, "cuda eager bf16 graph": 2.0}
    row = {"base": "cuda ours bf16", "ratios": {peer: {"median": ratio} for peer, ratio in medians.items()}}
    assert list(gpu._ratios(row)) == [("eager bf16", 3.0), ("eager bf16 graph", 4.0)]
    del row["ratios"]["cuda ours bf16 graph"]
    assert list(gpu._ratios(row)) == [("eager bf16", 3.0), ("eager bf16 graph", 2.0)]


@pytest.mark.parametrize("group", ["linear", "conv"])
def test_the_fused_kernels_are_measured_beside_what_each_single_layer_takes_unasked(group) -> None:
    chosen = [workload for workload in gpu_workloads.WORKLOADS if workload.group == group]
    assert chosen
    for workload in chosen:
        assert [peers.PEERS[name].backend for name in workload.ours] == [None]
        assert [peers.PEERS[name].captured for name in workload.peers if peers.PEERS[name].way == "fused"] == [True]


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
