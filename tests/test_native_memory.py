"""Memory of the CPU's kernels: what is freed is kept for the next step, and running out of it damages nothing."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F

import wnfused
from wnfused.backends import native

LINUX = sys.platform.startswith("linux")
pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason="the C++ library is not built")


# Eight tensors of 2 MB, of torch itself, as a network allocates maps: all are alive before the first is freed.
STEPS = """
    import resource, torch
    from wnfused.backends import native

    assert native.unavailable() is None

    def step():
        maps = [torch.ones(1 << 19) for _ in range(8)]

    for _ in range(3):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        step()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 10)
"""


def faults(**environment: str) -> int:
    """Pages that a step fetches from the system."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command, shared = [sys.executable, "-c", textwrap.dedent(STEPS)], {"check": True, "timeout": 60, "text": True}
    done = subprocess.run(command, env=inherited | environment, stdout=subprocess.PIPE, **shared)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc" or "LD_PRELOAD" in os.environ, reason="is glibc's own policy")
def test_the_allocator_keeps_what_a_step_frees():
    pages = 8 * (1 << 21) // 4096
    assert faults() < pages / 20
    # Whoever has set a threshold keeps it.
    assert faults(MALLOC_TRIM_THRESHOLD_="131072") > pages / 4


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_maps_find_their_memory_again(memory_format, dtype):
    torch.manual_seed(0)
    layer = wnfused.WNConv2d(16, 8, 3, padding=1).to(dtype)
    size = 731 if dtype == torch.float32 else 1031  # y is of 16 MB and more, dx of twice that
    x = torch.randn(1, 16, size, size).to(dtype).contiguous(memory_format=memory_format).requires_grad_()

    def step() -> tuple[list[int], torch.Tensor, torch.Tensor]:
        y = layer(x)
        (dx,) = torch.autograd.grad(y.sum(), x)
        return [y.data_ptr(), dx.data_ptr()], y.detach().clone(), dx.clone()

    where, y, dx = step()
    again, *_ = step()
    assert again == where
    exact = layer.double()
    z = x.detach().double().requires_grad_()
    exact_y = F.conv2d(z, exact.weight, exact.bias, padding=1)
    (exact_dx,) = torch.autograd.grad(exact_y.sum(), z)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(y.double(), exact_y.detach(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(dx.double(), exact_dx, rtol=tolerance, atol=100 * tolerance)


def test_large_maps_are_tensors_like_others(tmp_path):
    layer = wnfused.WNConv2d(16, 16, 3, padding=1)
    y = layer(torch.randn(1, 16, 512, 512)).detach()
    assert not y.untyped_storage().resizable(), "not of the memory that is kept"
    expected = y.clone()
    torch.save(y, tmp_path / "y.pt")
    assert torch.equal(torch.load(tmp_path / "y.pt"), expected)
    with pytest.raises(RuntimeError, match="resize"):
        y.view_as(y).resize_(2, *y.shape[1:])
    del layer
    wnfused.empty_cache()
    assert torch.equal(y, expected)
    y.share_memory_()
    assert y.is_shared()
    assert torch.equal(y, expected)


@pytest.mark.skipif(not LINUX, reason="reads /proc")
def test_memory_is_kept_for_the_next_step_until_it_is_given_back():
    script = """
        import resource, torch, wnfused
        assert wnfused.backend_status()["native"] is None
        stage = wnfused.WNResidualStage(16, 16, 128)
        x = torch.randn(8, 16, 32, 32)

        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

        def step():
            stage.zero_grad()
            stage(x).sum().backward()

        def faults():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            step()
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

        maps = 128 * 2 * x.nbytes
        before = resident()
        step()
        assert resident() > before + maps // 2
        step()
        assert faults() < 1000  # of maps // 4096 small pages, or a 512th of that large ones and all the rest
        y = stage(x).sum()
        wnfused.empty_cache()  # what is in use stays in use
        y.backward()
        wnfused.empty_cache()
        assert resident() < before + maps // 2
        step()
        assert all(p.grad.isfinite().all() for p in stage.parameters())
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)


RESIDENT = """
    import resource, torch, wnfused

    assert wnfused.backend_status()["native"] is None

    def pages(which):
        return int(open("/proc/self/statm").read().split()[which]) * resource.getpagesize() / 2**20
"""


def run(script: str) -> None:
    subprocess.run([sys.executable, "-c", textwrap.dedent(RESIDENT + script)], check=True, timeout=60)


@pytest.mark.skipif(not LINUX, reason="reads /proc")
def test_memory_goes_back_whatever_was_allocated_behind_it():
    run("""
    layer, x = wnfused.WNLinear(32, 5200), torch.randn(1000, 32)
    layer(x)
    wnfused.empty_cache()
    before, outputs, behind = pages(1), [], []
    with torch.no_grad():
        for _ in range(15):
            outputs.append(layer(x))  # of 20 MB
            behind.append(torch.ones(50_000))
    assert pages(1) > before + 250
    del outputs
    wnfused.empty_cache()
    assert pages(1) < before + 30, pages(1) - before
    """)


@pytest.mark.skipif(not LINUX, reason="reads /proc")
def test_sizes_that_grow_leave_none_behind():
    run("""
    layer = wnfused.WNLinear(8, 4096)
    before = pages(1)
    with torch.no_grad():
        for rows in range(1024, 2200, 40):
            layer(torch.randn(rows, 8))  # of 16 to 34 MB
    assert pages(1) < before + 100, pages(1) - before
    """)


@pytest.mark.skipif(not LINUX, reason="limits the address space")
def test_tensors_take_the_memory_that_is_kept():
    run("""
    layer, x = wnfused.WNLinear(32, 5200), torch.randn(1000, 32)
    large = wnfused.WNLinear(32, 60_000)
    with torch.no_grad():
        large(x[:1])
        kept = [layer(x) for _ in range(15)]  # 300 MB
        del kept
        resource.setrlimit(resource.RLIMIT_AS, (int(pages(0) + 64) * 2**20, resource.RLIM_INFINITY))
        assert large(x).nbytes == 240e6
    """)


@pytest.mark.skipif(not LINUX or platform.libc_ver()[0] != "glibc", reason="limits the address space")
def test_the_heap_serves_where_nothing_can_be_mapped():
    run("""
    layer, x = wnfused.WNLinear(32, 5200), torch.randn(1000, 32)
    with torch.no_grad():
        layer(x[:1])
        blocks = [torch.ones(2**19) for _ in range(60)]  # of 2 MB, in the heap
        del blocks[1:-1]  # what lies between the last and the first one stays there
        resource.setrlimit(resource.RLIMIT_AS, (int(pages(0) + 4) * 2**20, resource.RLIM_INFINITY))
        assert layer(x).shape == (1000, 5200)
    """)


@pytest.mark.skipif(not LINUX, reason="limits the address space")
def test_what_is_kept_is_given_up_where_memory_runs_out():
    script = """
        import resource, torch
        from wnfused.backends import native
        assert native.unavailable() is None
        stage = torch.ops.wnfused_native.residual_stage
        v, g = torch.randn(64, 2, 16, 16, 3, 3), torch.rand(64, 2, 16)
        images = [torch.randn(n, 16, 32, 32) for n in (48, 56)]
        stage(images[0], v, g, g, 0.5, 0, True)  # 384 MB are kept, too few for the others' 448
        in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + 256 * 2**20, resource.RLIM_INFINITY))
        stage(images[1], v, g, g, 0.5, 0, True)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)


@pytest.mark.skipif(not LINUX, reason="limits the address space")
def test_out_of_memory_raises_and_leaves_a_working_stage():
    script = """
        import resource, torch
        from wnfused.backends import native
        assert native.unavailable() is None
        stage = torch.ops.wnfused_native.residual_stage
        v, g = torch.randn(64, 2, 16, 16, 3, 3), torch.rand(64, 2, 16)
        small, large = torch.randn(1, 16, 8, 8), torch.randn(16, 16, 64, 64)
        before = stage(small, v, g, g, 0.5, 0, True)[0]
        in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**28, resource.RLIM_INFINITY))
        try:
            stage(large, v, g, g, 0.5, 0, True)
        except RuntimeError as error:
            # torch tells its own words from 2.13 on.
            told = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
            assert ("you tried to allocate" if told else "aten::empty") in str(error), error
        else:
            raise SystemExit("no error")
        assert torch.equal(stage(small, v, g, g, 0.5, 0, True)[0], before)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)
