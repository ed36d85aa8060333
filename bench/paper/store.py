"""Where the jobs' results lie: one JSON file each, written atomically; a stopped run loses only what was under way."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.paper.figure import Job, Json, Result
from wnfused.train.files import remove_leftovers, write_json


@dataclass(frozen=True)
class Done:
    """A finished job: its result, the processor seconds it took, and the checkout's commit at the time."""

    result: Result
    seconds: float
    commit: str | None


class Store:
    """The folder ``root / figure`` of one figure."""

    def __init__(self, root: Path, figure: str) -> None:
        self.folder = root / figure

    def prepare(self, jobs: Sequence[Job]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(*map(self._path, jobs))

    def read(self, job: Job) -> Done | None:
        """The job's result; None if it has none, or one of other parameters, or a file that is no result."""
        try:
            content = json.loads(self._path(job).read_text())
            if content["parameters"] != job.parameters:
                return None
            return Done(Result(job.parameters, content["values"]), content["seconds"], content["commit"])
        except (FileNotFoundError, json.JSONDecodeError, KeyError, TypeError):
            return None

    def write(self, job: Job, values: Json, seconds: float, commit: str | None) -> None:
        content = {"parameters": job.parameters, "values": values, "seconds": seconds, "commit": commit}
        write_json(self._path(job), content)

    def _path(self, job: Job) -> Path:
        return self.folder / f"{job.name}.json"
