"""The runner of the papers' figures: budgets, resuming, verdicts; and every figure at its quick size."""

import functools
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import toy_figure

from bench.paper import FIGURES, a_figure1, a_figure4, b_figure2, figure, publish
from bench.paper import __main__ as command
from bench.paper.figure import Job, Result, Spread, Verdict, all_known, slope
from bench.paper.schedule import Schedule
from bench.paper.store import Store
from bench.paper.training import larger

SETTINGS = toy_figure.SETTINGS["quick"]


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Makes the toy figure; ``toy.log`` are the jobs that were run, in any order."""
    monkeypatch.setenv("TOY_LOG", str(tmp_path / "log"))

    class Toy:
        jobs, results, target = tmp_path / "jobs", tmp_path / "results", tmp_path / "RESULTS.md"

        def make(self, **settings):
            monkeypatch.setattr(toy_figure, "SETTINGS", {"quick": SETTINGS | settings, "full": SETTINGS})
            return command.make(["toy_figure"], "quick", None, 2, self.jobs, self.results, self.target)

        @property
        def log(self):
            return sorted(int(line) for line in (tmp_path / "log").read_text().split())

    return Toy()


# ----------------------------------------------------------------------------------------------------- schedule


def finish(schedule, seconds):
    """Run one job after the other; the names in order."""
    names = []
    while (job := schedule.next()) is not None:
        names.append(job.name)
        schedule.finish(job, seconds)
    return names


def rounds(*sizes):
    return [Job(f"{r}-{i}", {}, r) for r, size in enumerate(sizes) for i in range(size)]


def test_without_a_budget_everything_is_run_round_by_round():
    jobs = rounds(2, 2)
    assert finish(Schedule(reversed(jobs), {}, None), 1.0) == ["0-1", "0-0", "1-1", "1-0"]


@pytest.mark.parametrize(("budget", "count"), [(0.5, 1), (2.5, 3), (5.9, 3), (6, 6), (8.9, 6), (9, 9)])
def test_a_round_is_begun_if_it_fits_as_a_whole_and_the_first_job_by_job(budget, count):
    assert len(finish(Schedule(rounds(3, 3, 3), {}, budget), 1.0)) == count


def test_a_round_that_was_begun_is_finished():
    schedule = Schedule(rounds(2, 2), {"0-0": 1.0, "0-1": 1.0, "1-0": 50.0}, 4.0)
    assert finish(schedule, 1.0) == ["1-1"]


def test_a_failed_job_is_not_begun_again_and_a_running_one_not_twice():
    schedule = Schedule(rounds(3), {}, None)
    first, second = schedule.next(), schedule.next()
    assert first.name != second.name
    schedule.fail(first)
    assert not schedule.finished
    schedule.finish(second, 1.0)
    assert finish(schedule, 1.0) == ["0-2"]
    assert schedule.finished


# -------------------------------------------------------------------------------------------------------- store


def test_a_result_counts_for_its_parameters_only(tmp_path):
    store = Store(tmp_path, "figure")
    store.prepare([])
    store.write(Job("a", {"x": 1}), {"y": 2}, 3.0, "abc")
    found = store.read(Job("a", {"x": 1}))
    assert (found.result["x"], found.result["y"], found.seconds, found.commit) == (1, 2, 3.0, "abc")
    assert store.read(Job("a", {"x": 2})) is None
    assert store.read(Job("b", {"x": 1})) is None
    (tmp_path / "figure" / "a.json").write_text('{"parameters": {"x": 1}, "val')
    assert store.read(Job("a", {"x": 1})) is None


def test_what_a_killed_run_left_half_written_goes(tmp_path):
    leftover, other = tmp_path / "figure" / ".a.json.abcdefgh.tmp", tmp_path / "figure" / "note.tmp"
    leftover.parent.mkdir()
    leftover.touch()
    other.touch()
    Store(tmp_path, "figure").prepare([Job("a", {}), Job("b", {})])
    assert list(leftover.parent.iterdir()) == [other]


# ------------------------------------------------------------------------------------------------------- runner


def test_a_figure_is_run_reduced_judged_and_drawn_once(toy, capsys):
    assert toy.make() == 0
    content = json.loads((toy.results / "toy_figure.json").read_text())
    assert content["data"] == {"points": [[i, i * i] for i in range(6)]}
    assert [Verdict(**v).word for v in content["verdicts"]] == ["agrees", "disagrees"]
    assert (content["jobs_done"], content["jobs_planned"], content["jobs_failed"]) == (6, 6, [])
    assert (toy.results / "toy_figure.png").read_bytes().startswith(b"\x89PNG")
    page = toy.target.read_text()
    assert "2 claims: 1 came out as the paper says, 1 did not, 0 are undecided" in page
    assert "| squares are odd \\| or not | at least 0 | **disagrees** |" in page
    assert "(results/toy_figure.png)" in page
    assert "agrees: the paper: squares are not negative; here: at least 0" in capsys.readouterr().out
    assert toy.make() == 0
    assert toy.log == list(range(6))


def test_without_jobs_the_published_data_is_judged_as_the_file_has_it_now(toy, monkeypatch, tmp_path):
    again = functools.partial(command.make, ["toy_figure"], "quick", None, 0, tmp_path / "no jobs")
    assert again(tmp_path / "nothing", toy.target) == 0
    assert toy.make() == 0
    monkeypatch.setattr(toy_figure, "NOTE", "in other words")
    monkeypatch.setattr(toy_figure, "verdicts", lambda data: [Verdict("claim", str(data), False, "known")])
    assert again(toy.results, toy.target) == 0
    content = json.loads((toy.results / "toy_figure.json").read_text())
    assert (content["note"], content["jobs_done"]) == ("in other words", 6)
    page = toy.target.read_text()
    assert "in other words" in page
    assert "- **disagrees**: *claim*. The cause: known" in page


def test_a_failed_job_is_told_and_tried_again_the_next_time(toy, capsys):
    assert toy.make(fails=3) == 1
    assert "square-3 failed: ArithmeticError: no square" in capsys.readouterr().err
    content = json.loads((toy.results / "toy_figure.json").read_text())
    assert content["jobs_failed"] == ["square-3"]
    assert [x for x, _ in content["data"]["points"]] == [0, 1, 2, 4, 5]
    assert toy.make(fails=3) == 1
    assert toy.log == [0, 1, 2, 3, 3, 4, 5]


def test_a_killed_run_goes_on_where_it_was(toy, tmp_path):
    script = (
        "import sys, toy_figure; from pathlib import Path; from bench.paper.__main__ import make\n"
        "if __name__ == '__main__':\n"
        "    toy_figure.SETTINGS['quick']['seconds'] = 0.4\n"
        f"    sys.exit(make(['toy_figure'], 'quick', None, 2, *map(Path, {[str(toy.jobs), str(toy.results)]!r}), "
        f"Path({str(toy.target)!r})))\n"
    )
    (tmp_path / "script.py").write_text(script)
    root = Path(__file__).parents[1]
    path = os.pathsep.join([str(root), str(root / "tests"), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, tmp_path / "script.py"], env=os.environ | {"PYTHONPATH": path}, cwd=root
    )
    deadline = time.monotonic() + 60
    while len(list(toy.jobs.glob("toy_figure/*.json"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait(30)
    kept = {int(p.stem.partition("-")[2]) for p in toy.jobs.glob("toy_figure/*.json")}
    assert 2 <= len(kept) < 6
    time.sleep(1.0)  # a worker that outlived its parent would go on to the next job
    begun = toy.log
    assert toy.make(seconds=0.4) == 0
    assert sorted(toy.log) == sorted([*begun, *(set(range(6)) - kept)])
    assert not list(toy.jobs.glob("toy_figure/.*"))


# ------------------------------------------------------------------------------------------------------ figures


@pytest.mark.parametrize("name", FIGURES)
def test_plans_are_whole(name):
    module = figure.load(name)
    for size in figure.SIZES:
        settings = module.SETTINGS[size]
        assert json.loads(json.dumps(settings)) == settings
        jobs = module.jobs(settings)
        assert len({job.name for job in jobs}) == len(jobs) > 0
        assert {job.round for job in jobs} == set(range(max(job.round for job in jobs) + 1))
        for job in jobs:
            assert json.loads(json.dumps(job.parameters)) == job.parameters
            assert "/" not in job.name


def test_the_hour_is_not_overspent():
    assert sum(figure.load(name).MINUTES for name in FIGURES) <= 60


@pytest.mark.parametrize("name", FIGURES)
def test_quick_size(name, tmp_path):
    """Every job runs; the data, the verdicts and the picture survive whatever jobs are left out."""
    module = figure.load(name)
    settings = module.SETTINGS["quick"]
    torch.use_deterministic_algorithms(False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        results = [Result(job.parameters, module.run(job.parameters)) for job in module.jobs(settings)]
    finally:
        torch.set_num_threads(threads)
    for some in (results, results[:1], results[1:]):
        if not some:
            continue
        data = json.loads(json.dumps(module.reduce(settings, some), allow_nan=False))
        verdicts = module.verdicts(data)
        assert verdicts
        for verdict in verdicts:
            assert verdict.agrees in (True, False, None)
            assert "\n" not in verdict.paper + verdict.outcome
        module.draw(data).savefig(tmp_path / "picture.png", dpi=50)


def test_a_figure_is_the_same_twice():
    module = figure.load("c_figure1")
    job = module.jobs(module.SETTINGS["quick"])[0]
    assert module.run(job.parameters) == module.run(job.parameters)


def test_verdicts_can_fall_either_way():
    def mlp(naive):
        curves = [
            {"network": "mlp", "width": 200, "init": init, "forward_mean": [1.0, end], "backward_mean": [end, 1.0]}
            for init, end in (("orthogonal", 1.1), ("he", 0.9), ("he_g1", naive))
        ]
        return a_figure1.verdicts({"blocks": 40, "layers": 20, "curves": curves})[0].agrees

    assert mlp(0.001) is True
    assert mlp(0.9) is False
    shares = {"arpit2019": 0.9, "hanin2018": 0.8, "salimans2016": 0.7, "torch_default": 0.0}
    cells = [
        {"init": i, "lr": 0.1, "warmup": w, "seeds": 20, "share": s + 0.05 * w}
        for i, s in shares.items()
        for w in (0.0, 1.0)
    ]
    assert [v.agrees for v in a_figure4.verdicts({"cells": cells})] == [True, True]
    cells[2]["share"] = 0.95
    assert [v.agrees for v in a_figure4.verdicts({"cells": cells})] == [False, False]


# -------------------------------------------------------------------------------------------------- small helpers


def test_shares_of_few_images_are_told_apart_from_two_standard_errors_on():
    assert larger(0.95, 0.90, 360) is True
    assert larger(0.90, 0.95, 360) is False
    assert larger(0.95, 0.94, 360) is None
    assert larger(0.95, 0.94, 10_000) is True


def test_zeroinit_is_as_good_only_where_the_test_images_say_so():
    def first(*pairs):
        points = [
            {"method": method, "depth": depth, "accuracy": accuracy, "std": 0.0, "images": 360, "seeds": 1}
            for depth, pair in enumerate(pairs)
            for method, accuracy in zip(b_figure2.METHODS, pair, strict=False)
        ]
        return b_figure2.verdicts({"points": points})[0].agrees

    assert first((0.96, 0.95), (0.95, 0.95)) is True
    assert first((0.96, 0.95), (0.94, 0.95)) is None
    assert first((0.94, 0.95), (0.85, 0.95)) is False


def test_helpers():
    assert Spread.of([1.0, None, 3.0, float("nan")]) == Spread(2.0, 2**0.5, 2)
    assert str(Spread.of([])) == "no finite value"
    assert slope([0, 1, 2], [1, 3, 5]) == pytest.approx(2)
    assert all_known([True, None]) is None
    assert all_known([False, None]) is False
    assert all_known([]) is None


def test_wrong_arguments_are_named(capsys, tmp_path):
    (tmp_path / "file").touch()
    under_a_file = str(tmp_path / "file" / "folder")
    folders = (["--jobs", under_a_file], ["--results", under_a_file, "--jobs", str(tmp_path)])
    for arguments in (["--only", "z_figure9"], ["--minutes", "0"], ["--workers", "0"], *folders):
        with pytest.raises(SystemExit) as stopped:
            command.main(arguments)
        assert stopped.value.code == 2
        assert arguments[0] in capsys.readouterr().err


def test_list_names_every_figure(capsys):
    assert command.main(["--list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in FIGURES)


def test_committed_results_belong_to_the_page():
    """RESULTS.md is what the committed data gives; run `python -m bench.paper` after a change of either."""
    page = command.ROOT / "RESULTS.md"
    if not page.exists():
        pytest.skip("no results are committed")
    target = page.with_name(f".RESULTS.test-{os.getpid()}.md")  # beside it, as it names pictures from there
    try:
        publish.write_results(command.PUBLISHED, target)
        assert target.read_text() == page.read_text()
    finally:
        target.unlink(missing_ok=True)
    for path in command.PUBLISHED.glob("*.json"):
        assert path.with_suffix(".png").exists()
        module, content = figure.load(path.stem), json.loads(path.read_text())
        assert content["note"] == module.NOTE
        assert content["verdicts"] == [asdict(verdict) for verdict in module.verdicts(content["data"])]
