"""Every launch that the samples come to is one that Triton's compiler takes: the interpreter takes more.

What is None, 1 or a multiple of 16 is a constant to the compiler, which sees another kernel for each combination.
"""

from __future__ import annotations

import pytest
import torch
from samples import ALIGNED, SAMPLES

import wnfused
from wnfused.backends import triton as backend
from wnfused.backends.triton import strategy, support

pytest.importorskip("triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_compiler_takes_every_launch(monkeypatch, dtype):
    from gate import triton_kernels

    if support.interpreted():
        pytest.skip("TRITON_INTERPRET=1 leaves nothing to compile")
    monkeypatch.setattr(backend, "unavailable", lambda: None)
    monkeypatch.setattr(support, "interpreted", lambda: True)  # which would take CPU tensors
    launches = {}

    def note(kernel, grid, arguments, constants):
        made = triton_kernels._specialised(kernel, arguments, constants)
        launches.setdefault((kernel.fn.__qualname__, kernel.fn.__module__, str(made)), (kernel, arguments, constants))

    for way, table in ((None, SAMPLES), ("fused", ALIGNED)):
        for sample in table:
            tensors = [t.detach().to(dtype).requires_grad_() for t in sample.tensors()]
            with wnfused.use_backend("triton"), support.recorded(note), strategy.forced(way):
                y = sample.run(*tensors)
                y.backward(torch.ones_like(y))
    assert len(launches) > 100
    for kernel, arguments, constants in launches.values():
        triton_kernels.front_end(kernel, arguments, constants)
