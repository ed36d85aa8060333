"""Makes the GPUs of a process pretended ones, and chooses among the tests of a real one (a plugin of pytest)."""

from __future__ import annotations

from typing import Any

import torch
from triton.runtime.interpreter import GridExecutor

from gate.pretended import aten, build
from wnfused.backends import native_cuda

GRAPHS = ("captured", "recorded_model")
# By emulation a stage of 16 images takes a minute, and other precisions differ in their products alone.
TOO_LONG = (
    "warpgroup", "large_stage", "bitwise_equal_from_run_to_run[triton]", "-16-None]", "-16-2]", "test_stage[tf32",
    "peak_memory",
)  # fmt: skip


def start() -> None:
    aten.install()
    torch.ops.load_library(str(build.libraries() / build.KERNELS))
    opened = native_cuda.opened
    native_cuda.opened = lambda name: None if name == "cuda" else opened(name)
    launch = GridExecutor.__call__

    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if not aten.SHAPES_ONLY:
            aten.recorded_as_a_whole(lambda: launch(self, *arguments, **keywords))

    GridExecutor.__call__ = call


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--pretended", choices=("tensors", "graphs"), default="tensors")


def pytest_configure(config: Any) -> None:
    start()


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    wanted = config.getoption("--pretended") == "graphs"
    left: dict[bool, list[Any]] = {True: [], False: []}
    for item in items:
        is_left_out = any(text in item.name for text in TOO_LONG)
        left[not is_left_out and any(text in item.name for text in GRAPHS) == wanted].append(item)
    config.hook.pytest_deselected(items=left[False])
    items[:] = left[True]
