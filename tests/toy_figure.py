"""A figure that the runner's tests make: squares, which the paper says are never negative."""

import os
import time
from pathlib import Path

from bench.paper import drawing
from bench.paper.figure import Job, Verdict

TITLE, SOURCE, NOTE, MINUTES = "Squares", "nowhere", "A toy.", 0.0
SETTINGS = {size: {"count": 6, "seconds": 0.0, "fails": None} for size in ("quick", "small", "full")}


def jobs(settings):
    fixed = {"seconds": settings["seconds"], "fails": settings["fails"], "log": os.environ["TOY_LOG"]}
    return [Job(f"square-{i}", {"x": i, **fixed}, round=i // 2) for i in range(settings["count"])]


def run(parameters):
    x = parameters["x"]
    # One write of a line is whole, whatever else writes.
    with Path(parameters["log"]).open("a") as log:
        log.write(f"{x}\n")
    time.sleep(parameters["seconds"])
    if x == parameters["fails"]:
        raise ArithmeticError("no square")
    return {"square": x * x}


def reduce(settings, results):
    return {"points": [[r["x"], r["square"]] for r in results]}


def verdicts(data):
    least = min(square for _, square in data["points"])
    return [
        Verdict("squares are not negative", f"at least {least}", least >= 0),
        Verdict("squares are odd | or not", f"at least {least}", all(s % 2 for _, s in data["points"])),
    ]


def draw(data):
    figure, (axis,) = drawing.panels(1)
    axis.plot(*zip(*data["points"], strict=True), **drawing.style(0))
    return figure
