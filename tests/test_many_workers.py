"""The kernels with nine workers, on a machine of however many processors.

A call has no more workers than there are processors, so a small machine would never see banks, maps and rows cut into
many parts. Here the tests of the kernels run once more in a process that is told of sixteen processors, by the
instruction set in use and by emulated tiles: how work is cut does not depend on more. Of a test's cases a third runs,
drawn by their names: how work is cut depends on shapes, and most cases tell layouts, dtypes, activations or gradients
apart.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from instruction_sets import ISAS

from wnfused.backends import native

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="get_nprocs() is glibc's"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++"),
    pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable())),
]

_PROCESSORS = 'extern "C" int get_nprocs() { return 16; }\n'
_PROGRAM = """
import collections, ctypes, sys, torch, pytest, zlib
sys.path.insert(0, "tests")
import instruction_sets
assert ctypes.CDLL(None).get_nprocs() == 16
torch.set_num_threads(9)
del instruction_sets.VECTORS[1:]
instruction_sets.ISAS[:] = [isa for i, isa in enumerate(instruction_sets.ISAS) if i == 0 or isa == "amx-emulated"]
class Drawn:
    def pytest_collection_modifyitems(self, items):
        def chosen(item):
            name = item.nodeid.partition("[")[0]
            few = cases[name] < 6 or "threads" in item.name.partition("[")[0]
            return few or zlib.crc32(item.nodeid.encode()) % 3 == 0
        cases = collections.Counter(item.nodeid.partition("[")[0] for item in items)
        items[:] = [item for item in items if chosen(item)]
sys.exit(pytest.main(sys.argv[1:], [Drawn()]))
"""


@pytest.fixture(scope="module")
def sixteen_processors(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processors")
    (folder / "processors.cpp").write_text(_PROCESSORS)
    library = folder / "processors.so"
    subprocess.run(["g++", "-shared", "-fPIC", str(folder / "processors.cpp"), "-o", str(library)], check=True)
    return library


# A process each, as one takes seconds to begin.
_TOGETHER = [
    ("stage_native", "stage_bfloat16"),
    ("conv3x3", "conv_window", "conv_depthwise"),
    ("conv_planes", "conv_strips", "conv_pieces"),
    ("conv_pairs", "conv_unfolded", "conv_transpose_window"),
    ("kept_conv", "linear_panels", "linear_split"),
    ("linear_products", "linear_pixels", "orthogonal"),
]


@pytest.mark.parametrize("names", _TOGETHER, ids=" and ".join)
def test_kernels_with_nine_workers(sixteen_processors, names):
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, "-x", "-p", "no:cacheprovider", *(str(HERE / f"test_{n}.py") for n in names)],
        env=os.environ | {"LD_PRELOAD": str(sixteen_processors)},
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


_REPEATED = """
import torch
from wnfused.backends import native
assert native.unavailable() is None
ops = torch.ops.wnfused_native
generator = torch.Generator().manual_seed(0)
def drawn(*shape): return torch.randn(shape, generator=generator)
c, images, blocks = 100, 16, 3
x, v, g = drawn(images, c, 8, 8), drawn(blocks, 2, c, c, 3, 3), drawn(blocks, 2, c)
bias, dy = drawn(blocks, 2, c), drawn(images, c, 8, 8)
def run():
    y, norm, maps = ops.residual_stage(x, v, g, bias, 0.9, 0, True)
    return [y, norm, *ops.residual_stage_backward(dy, v, g, bias, norm, maps, 0.9, 0, True)]
torch.set_num_threads(1)
alone = run()
torch.set_num_threads(6)
for _ in range(300):
    assert all(map(torch.equal, run(), alone))
"""


def test_workers_that_help_each_other_leave_what_they_keep(sixteen_processors):
    """Six of them share a bank of weights, whose rows, of 100 channels, are staged on the way, and each may find the
    panels of its last weight gradient: which of them takes what is chance, so repeatedly."""
    done = subprocess.run(
        [sys.executable, "-c", _REPEATED],
        env=os.environ | {"LD_PRELOAD": str(sixteen_processors)},
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]


_GROWTH = """
import re, sys, torch
from wnfused.backends import native
assert native.unavailable() is None
if sys.argv[2] == "conv":
    c = 256
    x = torch.randn(1, c, 8, 16, 16).contiguous(memory_format=torch.channels_last_3d)
    v, g, bias = torch.randn(c, c, 3, 3, 3), torch.ones(c), torch.zeros(c)
    run = lambda: torch.ops.wnfused_native.conv(x, v, g, bias, None, [1] * 3, [1] * 3, [1] * 3, 1, 0, 0.0)
else:
    c = 512
    x = torch.randn(1, c, 8, 8, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    v, g, bias = torch.randn(1, 2, c, c, 3, 3), torch.ones(1, 2, c), torch.zeros(1, 2, c)
    torch.ops.wnfused_native.set_cpu_isa("amx-emulated")
    run = lambda: torch.ops.wnfused_native.residual_stage(x, v, g, bias, 1.0, 0, False)
torch.set_num_threads(int(sys.argv[1]))
def peak():  # of this process alone: ru_maxrss begins with its parent's
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
before = peak()
run()
print((peak() - before) * 1024)
"""


# Bytes of a bank, by F(2x2, 3x3) of three levels and of bfloat16; and how many of them twelve workers may take more
# than one, where one each would be eleven.
@pytest.mark.parametrize(("op", "bank", "most"), [("conv", 3 * 16 * 256 * 256 * 4, 8), ("stage", 9 * 512 * 512 * 2, 2)])
def test_banks_do_not_grow_with_the_workers(sixteen_processors, op, bank, most):
    """Workers that each pack the weights of some outputs have room for these alone."""
    if op == "stage" and "amx-emulated" not in ISAS:
        pytest.skip("no tiles here, nor their emulation")

    def growth(threads):
        done = subprocess.run(
            [sys.executable, "-c", _GROWTH, str(threads), op],
            env=os.environ | {"LD_PRELOAD": str(sixteen_processors)},
            cwd=HERE.parent,
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        return int(done.stdout)

    assert growth(12) < growth(1) + most * bank
