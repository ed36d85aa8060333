"""The kernels with nine workers, on a machine of however many processors.

A call has no more workers than there are processors, so a small machine would never see banks, maps and rows cut into
many parts. Here the tests of the kernels run once more in a process that is told of sixteen processors.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from wnfused.backends import native

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="get_nprocs() is glibc's"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++"),
    pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable())),
]

_PROCESSORS = 'extern "C" int get_nprocs() { return 16; }\n'
_PROGRAM = """
import ctypes, sys, torch, pytest
assert ctypes.CDLL(None).get_nprocs() == 16
torch.set_num_threads(9)
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def sixteen_processors(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processors")
    (folder / "processors.cpp").write_text(_PROCESSORS)
    library = folder / "processors.so"
    subprocess.run(["g++", "-shared", "-fPIC", str(folder / "processors.cpp"), "-o", str(library)], check=True)
    return library


@pytest.mark.parametrize(
    "name",
    ["stage_native", "conv3x3", "conv_window", "conv_depthwise", "linear_products", "linear_pixels", "orthogonal"],
)
def test_kernels_with_nine_workers(sixteen_processors, name):
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, "-x", "-p", "no:cacheprovider", str(HERE / f"test_{name}.py")],
        env=os.environ | {"LD_PRELOAD": str(sixteen_processors)},
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
