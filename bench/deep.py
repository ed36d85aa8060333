"""WRN-10,000: a whole training step with its peak memory, every peer in a process of its own.

The processes live at the same time and take turns, one step each a round, so the rounds are paired as everywhere
else; a process that waits for its turn sleeps on its standard input. Gradients of 161 million parameters are compared
by *sketches*: projections of each kind and shape of gradient on a few seeded Gaussian directions. With ``d`` the
error of a gradient, the mean square of its projections is an unbiased estimate of ``||d||^2``.

``python -m bench.deep FORM BACKEND DEPTH BATCH`` is the process; it answers a line of JSON to each line it reads.
"""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import wnfused
from bench import gate, models, parameters, peers
from bench.ceiling import ceiling
from bench.measure import MIN_ROUNDS, Samples
from bench.moment import moments
from bench.result import Result
from bench.workloads import BACKWARD, STEP, DeepStep, Network
from wnfused.train.memory import PeakMemory

SGD = "SGD"
DIRECTIONS = 4
Sketch = dict[str, list[float]]

# ------------------------------------------------------------------------------------------------ one process


class Subject:
    """One peer of the network. The oracle is the plain form in float64."""

    def __init__(self, form: str, backend: str | None, workload: Network) -> None:
        self.oracle = form == "oracle"
        dtype = torch.float64 if self.oracle else torch.float32
        self.blocks = models.blocks(workload)
        module = models.FORMS["plain" if self.oracle else form](workload).to(dtype)
        self.module = parameters.fill(module, self.blocks)
        generator = torch.Generator().manual_seed(1)
        shape = models.input_shape(workload)
        self.x = torch.randn(shape, generator=generator).to(dtype)
        self.labels = torch.randint(10, shape[:1], generator=generator)
        self.optimizer = peers.sgd(list(self.module.parameters()))
        self.backend = backend

    def _backend(self) -> contextlib.AbstractContextManager[Any]:
        return wnfused.use_backend(self.backend) if self.backend else contextlib.nullcontext()

    def gate(self) -> dict[str, Any]:
        """Output and sketch of the gradients."""
        with self._backend():
            y = self.module(self.x)
            F.cross_entropy(y, self.labels).backward()
        answer = {"y": y.tolist(), "sketch": sketch(self._gradients())}
        self.watch = PeakMemory()  # what the gate itself needed is not the network's
        return answer

    def step(self) -> dict[str, float]:
        """Seconds of a training step and its two parts."""
        with self._backend():
            start = time.perf_counter()
            self.optimizer.zero_grad()
            F.cross_entropy(self.module(self.x), self.labels).backward()
            middle = time.perf_counter()
            self.optimizer.step()
            end = time.perf_counter()
        return {BACKWARD: middle - start, SGD: end - middle, STEP: end - start}

    def memory(self) -> dict[str, int]:
        """Peak resident memory of this process since the gate, interpreter and libraries included."""
        return {"peak_bytes": self.watch.peak_bytes()}

    def _gradients(self) -> Iterator[dict[str, Tensor]]:
        if self.oracle:
            yield from gate.true_gradients(self.module, self.blocks)
            return
        for layer in parameters.layers(self.module):
            yield {key: entry.of(entry.parameter.grad) for key, entry in layer.entries.items()}


@torch.no_grad()
def sketch(gradients: Iterator[dict[str, Tensor]]) -> Sketch:
    """``kind -> [projections..., norm]``, summed over the layers that have the kind and size of gradient."""
    found: Sketch = {}
    for number, layer in enumerate(gradients):
        for key, gradient in layer.items():
            flat = gradient.detach().double().reshape(-1)
            generator = torch.Generator().manual_seed(1_000_000 + 7 * number + "wvgb".index(key))
            directions = torch.randn(DIRECTIONS, flat.numel(), generator=generator)
            sums = found.setdefault(f"d{key} of {flat.numel()} entries", [0.0] * (DIRECTIONS + 1))
            for i, value in enumerate([*(directions.double() @ flat).tolist(), flat.dot(flat).item()]):
                sums[i] += value
    for sums in found.values():
        sums[-1] = math.sqrt(sums[-1])
    return found


def sketch_errors(found: Sketch, true: Sketch) -> dict[str, float]:
    """Estimated relative errors of the kinds that ``found`` has."""
    errors = {}
    for kind, (*projections, _) in found.items():
        *expected, size = true[kind]
        square = sum((a - b) ** 2 for a, b in zip(projections, expected, strict=True)) / DIRECTIONS
        errors[kind] = math.sqrt(square) / size if math.isfinite(square) else math.inf
    return errors


def serve(arguments: list[str]) -> None:
    """Answers until its standard input ends."""
    form, backend, depth, batch, threads = arguments
    torch.set_num_threads(int(threads))
    workload = Network(group="deep", name="", depth=int(depth), batch=int(batch))
    subject = Subject(form, None if backend == "-" else backend, workload)
    for line in sys.stdin:
        print(json.dumps(getattr(subject, line.strip())()), flush=True)


# ---------------------------------------------------------------------------------------------- the other side


class Process:
    """A subject in a process of its own."""

    def __init__(self, form: str, backend: str | None, workload: DeepStep) -> None:
        arguments = [form, backend or "-", str(workload.depth), str(workload.batch), str(torch.get_num_threads())]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.deep", *arguments],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, what: str) -> dict[str, Any]:
        """The answer; it takes as long as it takes.

        Raises:
            RuntimeError: the process has ended.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(what + "\n")
            self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process that was asked to {what} ended with status {self.process.wait()}")
        return json.loads(answer)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def run(workload: DeepStep, budget: float) -> Iterator[Result]:
    """A result for forward and backward, for the optimiser and for the whole step, from the same rounds."""
    results = {name: Result.of(workload, name) for name in workload.passes}
    with Process("oracle", None, workload) as oracle:
        truth = oracle.ask("gate")
    status = wnfused.backend_status()
    base = next(name for name in workload.ours if status[name] is None)
    with contextlib.ExitStack() as stack:
        processes: dict[str, Process] = {}
        for name in (base, *workload.peers):
            peer = peers.PEERS[name]
            process = stack.enter_context(Process(peer.form, peer.backend, workload))
            try:
                errors = _gate(process.ask("gate"), truth, workload)
            except (gate.GateError, RuntimeError) as error:
                for result in results.values():
                    result.failed[name] = str(error)
                continue
            processes[name] = process
            for result in results.values():
                result.errors[name] = errors
        if base in processes:
            _measure(processes, base, budget, workload, results)
    yield from results.values()


def _gate(found: dict[str, Any], truth: dict[str, Any], workload: DeepStep) -> dict[str, float]:
    allowed = gate.tolerance(workload, "fp32")
    errors = {"y": gate.relative_error(torch.tensor(found["y"]), torch.tensor(truth["y"], dtype=torch.float64))}
    errors |= sketch_errors(found["sketch"], truth["sketch"])
    for name, error in errors.items():
        limit = allowed.output if name == "y" else allowed.gradient
        if not error <= limit:
            raise gate.GateError(f"{workload.name}: {name} is off by {error:.1e}, above {limit:.1e}")
    return errors


def _measure(
    processes: dict[str, Process], base: str, budget: float, workload: DeepStep, results: dict[str, Result]
) -> None:
    samples = {name: Samples({peer: [] for peer in processes}) for name in results}
    peak = ceiling("fp32")
    look = moments(peak)
    for process in processes.values():
        process.ask("step")  # allocates the momentum
    start = time.perf_counter()
    rounds = 0
    while rounds < MIN_ROUNDS or time.perf_counter() - start < budget:
        names = list(processes)
        for name in names if rounds % 2 else reversed(names):
            for part, seconds in processes[name].ask("step").items():
                samples[part].seconds[name].append(seconds)
        moment = look()
        for taken in samples.values():
            taken.beside.append(moment)
        rounds += 1
    memory = {name: process.ask("memory")["peak_bytes"] for name, process in processes.items()}
    flops = models.flops(workload)[1]
    for name, result in results.items():
        result.measured(samples[name], base)
        result.peak_bytes = memory
        if name != SGD:
            result.compared_with_peak(samples[name], flops, peak.short)
        result.told_apart(samples[name])


if __name__ == "__main__":
    serve(sys.argv[1:])
