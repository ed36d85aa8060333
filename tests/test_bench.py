"""The benchmarks' command: the JSON is whole, arguments are named, ratios are drawn."""

from __future__ import annotations

import json
import math
import time
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from tiny_workloads import LAYER, STAGE

from bench import __main__ as command
from bench import cases, gate, machine, peers, report, workloads
from bench.bars import ratio_bars
from wnfused.backends import native

pytestmark = pytest.mark.usefixtures("one_thread")

LARGE = ("deep", "flat")  # groups of 10,000 layers


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


@pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
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


def test_a_run_beside_other_programs_is_not_added_to_one_without(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(workloads, "WORKLOADS", (LAYER,))
    run = ["--seconds", "0", "--out", str(tmp_path)]
    assert command.main(run) == 0
    with pytest.raises(SystemExit, match="2"):
        command.main([*run, "--add", "--busy", "1"])
    assert "was measured with busy 0, this is 1" in capsys.readouterr().err


def test_pictures_of_groups_that_a_run_no_longer_has_are_removed(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(workloads, "WORKLOADS", (LAYER,))
    (tmp_path / "ratios-stage.png").write_bytes(b"of another run")
    (tmp_path / "mine.png").write_bytes(b"of somebody else")
    assert command.main(["--seconds", "0", "--out", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.glob("*.png")} == {f"ratios-{LAYER.group}.png", "mine.png"}


def test_a_commit_is_marked_where_the_libraries_are_of_other_sources(monkeypatch, tmp_path):
    import setup

    monkeypatch.setattr(setup, "ROOT", tmp_path)
    monkeypatch.setattr(setup, "sources", lambda: "those here")
    assert machine._built_of_these_sources()  # an installed package, or no library at all
    record = tmp_path / "wnfused" / "_build.json"
    record.parent.mkdir()
    for recorded, same in (("those here", True), ("others", False)):
        record.write_text(json.dumps({"sources": recorded}))
        assert machine._built_of_these_sources() is same
    if (commit := machine.commit()) is not None:
        assert commit.endswith("+")


def test_a_processor_is_told_by_its_family_where_its_name_says_little(monkeypatch):
    said = "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 1\nmodel name\t: AMD EPYC\n\nprocessor\t: 1\nmodel\t\t: 2\n"
    monkeypatch.setattr(machine, "Path", lambda _: SimpleNamespace(read_text=lambda: said))
    assert machine.cpu_model() == "AMD EPYC (family 25, model 1)"


def test_a_run_that_is_killed_keeps_the_groups_before(monkeypatch, tmp_path):
    def run(workload, budget):
        if workload.group == "stage":
            raise KeyboardInterrupt
        return cases.run(workload, budget)

    monkeypatch.setattr(workloads, "WORKLOADS", (LAYER, STAGE))
    monkeypatch.setattr(command, "cases", SimpleNamespace(run=run))
    with pytest.raises(KeyboardInterrupt):
        command.main(["--seconds", "0", "--out", str(tmp_path)])
    assert {result.group for result in report.load_json(tmp_path)[1]} == {LAYER.group}


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
