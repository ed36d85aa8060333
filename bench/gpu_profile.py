"""``python -m bench.gpu_profile WHAT``: where the time of stages and networks goes on a GPU.

``kernels``: how long each kernel of the stages takes, and of a layer. ``deep``: what a training step of WRN-10,000
takes, and its kernels. ``host``: the functions of Python in which a network's calls are prepared, and what a call costs
the host beside its kernels. ``once``: the stages forward and backward between the profiler's start and stop, for Nsight
Compute::

    ncu --profile-from-start off --set full --clock-control none python -m bench.gpu_profile once
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable

import torch

import wnfused
from bench.peers import tensor_float_32

SHAPES = ((16, 32), (32, 16), (64, 8))
BATCH, BLOCKS = 128, 50
PRECISIONS = ("bf16", "tf32", "fp32")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_profile", description=__doc__)
    parser.add_argument("what", choices=WHAT)
    parser.add_argument("--precision", action="append", choices=PRECISIONS, help="may be repeated; default: bf16, tf32")
    options = parser.parse_args()
    torch.manual_seed(0)
    WHAT[options.what](options.precision or ["bf16", "tf32"])


def kernels(precisions: list[str]) -> None:
    for precision in precisions:
        for channels, size in SHAPES:
            run = _stage(channels, size, precision)
            _print_kernels(f"{channels} channels, {size}x{size}, batch {BATCH}, {BLOCKS} blocks, {precision}", run)
        _print_kernels(f"WRN-40-1, a training step, {precision}", _step(6, precision))


def deep(precisions: list[str]) -> None:
    for precision in precisions:
        step = _step(1666, precision)
        step()
        seconds = sorted(_seconds(step, rounds=1) for _ in range(7))
        name = f"WRN-10,000, batch {BATCH}, a training step, {precision}"
        _print_kernels(f"{name}: {', '.join(f'{1e3 * s:.1f}' for s in seconds)} ms", step, rounds=1)


def host(precisions: list[str]) -> None:
    for precision in precisions:
        for blocks in (1, 50):
            forward, step = _forward(blocks, precision), _step(blocks, precision)
            for name, run in (("forward", forward), ("training step", step)):
                where = f"WRN of {blocks} blocks a stage, {name}, {precision}"
                print(f"=== {where}: {_host_seconds(run) * 1e6:.0f} us of the host, {_seconds(run) * 1e6:.0f} us")
        forward, step = _forward(1, precision), _step(1, precision)
        for name, run in (("forward", forward), ("training step", step)):
            print(f"=== {name}, {precision}, by functions")
            _print_functions(run)


def once(precisions: list[str]) -> None:
    for precision in precisions:
        for channels, size in SHAPES:
            run = _stage(channels, size, precision)
            run()
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            run()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


def _autocast(precision: str) -> torch.autocast:
    return torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16")


def _stage(channels: int, size: int, precision: str) -> Callable[[], None]:
    stage = wnfused.WNResidualStage(channels, channels, BLOCKS).to("cuda")
    x = torch.randn(BATCH, channels, size, size, device="cuda").requires_grad_()
    dy = torch.randn_like(x)

    def run() -> None:
        with tensor_float_32(precision == "tf32"):
            with _autocast(precision):
                y = stage(x)
            torch.autograd.grad(y, [x, *stage.parameters()], dy.to(y.dtype))

    return run


def _network(blocks: int) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    net = wnfused.models.wrn(6 * blocks + 4, 1).to("cuda")
    return net, torch.randn(BATCH, 3, 32, 32, device="cuda"), torch.randint(0, 10, [BATCH], device="cuda")


def _forward(blocks: int, precision: str) -> Callable[[], None]:
    net, x, _ = _network(blocks)

    def run() -> None:
        with tensor_float_32(precision == "tf32"), _autocast(precision), torch.no_grad():
            net(x)

    return run


def _step(blocks: int, precision: str) -> Callable[[], None]:
    net, x, target = _network(blocks)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)

    def run() -> None:
        with tensor_float_32(precision == "tf32"):
            with _autocast(precision):
                loss = torch.nn.functional.cross_entropy(net(x), target)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def _print_kernels(name: str, run: Callable[[], None], rounds: int = 5) -> None:
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(rounds):
            run()
        torch.cuda.synchronize()
    print(f"=== {name}")
    found = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    for event in [event for event in found if event.self_device_time_total > 0][:14]:
        total, count = event.self_device_time_total / rounds, event.count / rounds
        print(f"  {total:9.1f} us in {count:4.1f} launches  {event.key[:160]}")
    print(flush=True)


def _seconds(run: Callable[[], None], rounds: int = 20) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(rounds):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / rounds


def _host_seconds(run: Callable[[], None], rounds: int = 20) -> float:
    """Of calls that wait for nothing, as long as the queue of launches is not full."""
    for _ in range(3):
        run()
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return sorted(found)[rounds // 2]


def _print_functions(run: Callable[[], None], rounds: int = 20) -> None:
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    profile = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):  # so that the profile has the backward
        profile.enable()
        for _ in range(rounds):
            run()
        profile.disable()
    torch.cuda.synchronize()
    pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(28)
    pstats.Stats(profile).strip_dirs().sort_stats("cumulative").print_stats(45)


WHAT = {"kernels": kernels, "deep": deep, "host": host, "once": once}

if __name__ == "__main__":
    main()
