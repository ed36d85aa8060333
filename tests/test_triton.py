"""The Triton backend as a machine without a GPU sees it: its kernels in the interpreter, its choices, its refusals."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import wnfused
from wnfused import dispatch
from wnfused.backends import allows_tf32, native_autograd, native_cuda
from wnfused.backends.triton import configurations, search, strategy, support
from wnfused.backends.triton.configurations import Tile
from wnfused.backends.triton.strategy import Layer

INTERPRETED = sorted((Path(__file__).parent / "interpreter").glob("test_*.py"))
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.parametrize("path", INTERPRETED, ids=lambda path: path.stem)
def test_in_the_interpreter(path):
    triton, numpy = pytest.importorskip("triton"), pytest.importorskip("numpy")
    if triton.__version__ < "3.7" and tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4):
        pytest.skip("the interpreter of triton before 3.7 needs numpy before 2.4")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(path)],
        capture_output=True, text=True, cwd=Path(__file__).parents[1],
        # One thread: the interpreter's time is Python's, and the problems are tiny.
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


# ---------------------------------------------------------------------------------------------------- refusals


@no_gpu
def test_without_a_gpu_it_says_so():
    pytest.importorskip("triton")
    assert wnfused.backend_status()["triton"] == "there is no CUDA device"
    message = "weight_norm cannot run on backend 'triton': there is no CUDA device"
    with wnfused.use_backend("triton"), pytest.raises(wnfused.BackendUnavailableError, match=message):
        wnfused.functional.weight_norm(torch.randn(2, 3), torch.ones(2))


@no_gpu
def test_an_automatic_choice_on_a_gpu_falls_back_with_one_warning(forget_warnings):
    pytest.importorskip("triton")
    with FakeTensorMode():
        arguments = (torch.empty(2, 3, device="cuda"), torch.empty(2, device="cuda"), 0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        chosen = [dispatch.select("weight_norm", arguments) for _ in range(2)]
    assert chosen == [wnfused.reference.weight_norm] * 2
    told = [str(warning.message) for warning in told if "'triton'" in str(warning.message)]
    assert told == ["weight_norm passes over backend 'triton': there is no CUDA device"]


def test_single_layers_on_a_gpu_are_tritons():
    assert dispatch.order("linear", "cuda") == dispatch.order("conv_backward", "cuda") == ("triton", "reference")
    assert dispatch.order("residual_stage_backward", "cuda") == ("native", "triton", "reference")
    assert dispatch.order("conv", "xpu") == ("reference",)


@pytest.mark.parametrize(
    ("version", "reason"),
    [(None, "the package triton is not installed"), ("3.5.1", "it needs triton 3.6 or newer, and 3.5.1 is installed")],
)
def test_a_missing_or_old_triton_is_named(monkeypatch, version, reason):
    def found(name):
        if version is None:
            raise support.importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(support.importlib.metadata, "version", found)
    assert support.unavailable.__wrapped__() == reason


@pytest.fixture
def gpus(monkeypatch):
    """Two fake GPUs, the second too old."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0) if device.index == 0 else (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    monkeypatch.setattr(support, "interpreted", lambda: False)
    support._too_old.cache_clear()
    yield lambda index, dtype=torch.float32: _fake(torch.device("cuda", index), dtype)
    support._too_old.cache_clear()


CUDA = torch.device("cuda", 1)


def _fake(device, dtype, shape=(2, 3)):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return torch._subclasses.FakeTensor(mode, torch.empty(shape, dtype=dtype, device="meta"), device)


def test_refusals_of_devices_and_types(gpus):
    one = gpus(0)
    assert support.refusal("linear", [one, gpus(0), None, 0]) is None
    assert support.refusal("linear", [one, torch.ones(2)]) == "it has no kernel for device 'cpu'"
    assert support.refusal("linear", [one, gpus(1)]) == "its tensors lie on cuda:0 and cuda:1"
    assert support.refusal("linear", [gpus(0, torch.float64)]) == "it has no kernel for torch.float64"
    assert support.refusal("linear", [gpus(1)]) == "it needs compute capability 8.0 or newer, and GPU 1 has 7.5"


def test_refusals_of_sizes():
    with torch.device("meta"):
        big, weight = torch.empty(2**31, 1), torch.empty(2**16, 2**16)
    assert "2147483648 rows of x" in support.too_large("linear", (big, torch.empty(1, 1), torch.empty(1)))
    assert "4294967296 elements of v" in support.too_large("linear", (torch.empty(1, 2**16), weight, torch.empty(1)))
    assert support.too_large("linear", (torch.empty(5, 3), torch.empty(4, 3), torch.empty(4))) is None
    columns = torch.empty(512, 2**23, device="meta").t()[:4]
    given = (columns, torch.empty(4, 512), torch.empty(4))
    assert "last" in support.too_large("linear", given)
    assert "last" in support.too_large("linear_backward", (torch.empty(4, 4), torch.empty(4, 4), *given))
    assert support.too_large("weight_norm", (torch.empty(4, 3), torch.empty(4))) is None


@pytest.mark.parametrize("op", ["weight_norm", "weight_norm_many"])
def test_refusals_of_weight_norms_by_size(op):
    """A trailing dim that is the default is left out."""

    def reason(shape, *dim):
        v = torch.empty(shape, device="meta")
        given = (v, v) if op == "weight_norm" else ([torch.empty(2, 2), v], [v, v])
        forward = support.too_large(op, (*given, *dim))
        assert support.too_large(f"{op}_backward", (*given, *given, *dim)) == forward
        return forward

    assert reason((2**31, 1)) == reason((1, 2**31), 1) == reason((1, 2**31), -1)
    assert "2147483648 rows" in reason((2**31, 1))
    assert "2147483648 entries in a row" in reason((1, 2**31))
    assert reason((2**31, 1), None) is None  # torch's own reduction
    assert reason((4, 3)) is reason((4, 3), 1) is None


def test_refusals_of_convolutions_by_size():
    def arguments(x, v, padding=0):
        with torch.device("meta"):
            x, v = torch.empty(x), torch.empty(v)
        return x, v, None, None, None, [1, 1], [padding] * 2, [1, 1], False, [0, 0], 1

    assert support.too_large("conv", arguments((2, 3, 9, 9), (4, 3, 3, 3), 1)) is None
    assert "pixels of x" in support.too_large("conv", arguments((1, 1, 46341, 46341), (1, 1, 3, 3)))
    # Padding may give an output of more pixels than the input.
    assert "2147766336 pixels of y" in support.too_large("conv", arguments((1, 1, 46336, 46336), (1, 1, 1, 1), 4))
    assert "filters or channels" in support.too_large("conv", arguments((1, 1, 2, 2), (2**21, 1, 1, 1)))
    dy, (x, v, *_) = torch.empty(1, 1, 46342, 46342, device="meta"), arguments((1, 1, 2, 2), (1, 1, 1, 1))
    rest = (None, None, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    assert "pixels of y" in support.too_large("conv_backward", (dy, dy, x, v, *rest))


@pytest.mark.parametrize(
    ("x", "v", "words"),
    [
        ((2, 3, 9, 9), (5, 2, 3, 3, 3, 3), None),
        ((2, 3, 9, 9), (0, 2, 3, 3, 3, 3), None),
        ((2**21, 3, 32, 32), (5, 2, 3, 3, 3, 3), "2147483648 pixels of x"),
        ((1, 2**10, 1, 2**21), (1, 2, 2**10, 2**10, 3, 3), "4294970368 entries of x from a window's place"),
        ((1, 2**14, 1, 1), (1, 2, 2**14, 2**14, 3, 3), "2415919104 elements of v in a convolution"),
        ((1, 2**10, 1, 1), (2**20, 2, 2**10, 2**10, 3, 3), "2147483648 rows of v"),
    ],
)
def test_refusals_of_stages_by_size(x, v, words):
    """They run the same kernels, convolution by convolution."""
    with torch.device("meta"):
        x, v = torch.empty(x), torch.empty(v)
        g, bias = v.new_empty(v.shape[:3]), v.new_empty(v.shape[:3])
    forward = support.too_large("residual_stage", (x, v, g, bias))
    assert support.too_large("residual_stage_backward", (x, v, g, bias, g, x)) == forward
    assert forward is None if words is None else words in forward


@pytest.mark.parametrize(
    ("x", "kernel", "padding", "dilation", "entries"),
    [
        ((1, 1024, 2**21 + 1), (3,), [0], [2**20], (2**21 + 1) * 1024),
        ((1, 1024, 8, 2**18), (9, 3), [4, 1], [1, 1], (8 * 2**18 + 3) * 1024),
        ((1, 1024, 3, 2**20), (3, 1), [1, 0], [1, 1], (2 * 2**20 + 1) * 1024),
        ((1, 1024, 2), (1,), [2**21], [1], (2**21 + 1) * 1024),  # places before the map count too
    ],
)
def test_refusals_of_convolutions_by_the_reach_of_a_window(x, kernel, padding, dilation, entries):
    """Offsets within a window are of 32 bits, and one image can be larger than they reach."""
    dims = len(kernel)
    with torch.device("meta"):
        x, v = torch.empty(x), torch.empty(4, x[1], *kernel)
        dy = torch.empty(1, 4, *[4] * dims)
    geometry = ([1] * dims, padding, dilation, False, [0] * dims, 1)
    said = f"there are {entries} entries of x from a window's place to its farthest tap"
    assert said in support.too_large("conv", (x, v, None, None, None, *geometry))
    assert said in support.too_large("conv_backward", (dy, dy, x, v, None, None, None, *geometry))
    transposed = ([1] * dims, padding, dilation, True, [0] * dims, 1)
    assert support.too_large("conv", (x, v, None, None, None, *transposed)) is None  # the vendor's


def test_no_grid_is_longer_than_a_gpu_takes():
    """2^31 - 1 programs along the first dim, 65535 along the second; 10 million features are wide, and legal."""
    pytest.importorskip("triton")
    from wnfused.backends.triton import linear_layer

    grids = []
    with torch.device("meta"):
        x, v, g, y = torch.empty(100, 10**7), torch.empty(3, 10**7), torch.empty(3), torch.empty(100, 3)
    with support.recorded(lambda kernel, grid, arguments, constants: grids.append(grid)):
        linear_layer.forward(x, v, g, g, None, "relu", 0.0)
        linear_layer.backward(y, y, x, v, g, g, [True, True, True, False], "relu", 0.0)
    assert len(grids) == 4
    assert all(n < limit for grid in grids for n, limit in zip(grid, (2**31, 2**16), strict=False))


@pytest.mark.parametrize("index", [0, 1])
def test_a_launch_is_on_the_device_of_its_tensors(monkeypatch, gpus, index):
    """Triton launches on the current device and its current stream."""
    current, seen = [0], []

    @contextlib.contextmanager
    def device(wanted):
        before, current[0] = current[0], wanted.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **constants: seen.append((grid, current[0], constants))

    support.launch(Kernel(), (0, 3), (gpus(index),))
    support.launch(Kernel(), (2, 3), (gpus(index),), BM=16)
    assert seen == [((2, 3), index, {"BM": 16, "enable_fp_fusion": True})]  # and nothing for an empty grid
    assert current == [0]


# ---------------------------------------------------------------------------------------------------- strategy


@pytest.mark.parametrize(
    ("layer", "way"),
    [
        (Layer(1, 1024, 511), "fused"),
        (Layer(1, 1024, 512), "vendor"),
        (Layer(512, 512, 512), "fused"),
        (Layer(513, 512, 512), "vendor"),
        (Layer(32, 512, 512, full=True), "fused"),
        (Layer(33, 512, 512, full=True), "vendor"),
        (Layer(8, 64, 64, dim=1), "vendor"),
        (Layer(8, 64, 64, dim=None), "vendor"),
        (Layer(131072, 32, 32, spatial=2), "fused"),
        (Layer(131072, 64, 3, spatial=2), "fused"),
        (Layer(131072, 100, 100, spatial=2), "fused"),
        (Layer(131072, 160, 160, spatial=2), "vendor"),
        (Layer(131072, 32, 32, spatial=2, groups=2), "vendor"),
        (Layer(131072, 32, 32, spatial=2, transposed=True), "vendor"),
        (Layer(131072, 32, 32, spatial=3), "vendor"),
    ],
)
def test_the_way_of_a_layer(layer, way):
    assert strategy.way(layer) == way
    assert strategy.row(layer).reason
    for forced in ("fused", "vendor"):
        with strategy.forced(forced):
            possible = forced == "vendor" or strategy.can_be_fused(layer)
            assert strategy.way(layer) == (forced if possible else "vendor")


@pytest.fixture
def vendor_layers(monkeypatch):
    """The vendor's layers on CPU tensors, and the fused calls that they make."""
    pytest.importorskip("triton")
    from wnfused.backends.triton import vendor

    made = []
    fused = torch._addmm_activation
    monkeypatch.setattr(torch, "_addmm_activation", lambda *arguments: made.append("cuBLASLt") or fused(*arguments))
    monkeypatch.setattr(vendor, "effective_weight", lambda v, g, dim, dtype: wnfused.reference.weight_norm(v, g, dim))
    yield vendor, made
    strategy.use_vendor_epilogues(False)


def test_the_vendors_fused_relus_are_asked_for_or_not_made(vendor_layers, gpus):
    """Otherwise NaN stays NaN, and every output of the vendor's is one that it was told to write and to repeat."""
    vendor, made = vendor_layers
    x, v, g, bias = torch.randn(9, 16), torch.randn(8, 16), torch.randn(8), torch.randn(8)
    x[3, 2] = float("nan")
    image, w, geometry = gpus(0), torch.empty(8, 16, 3, 3), ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert not strategy.vendor_epilogues()
    assert not vendor._has_fused_epilogue(image, w, geometry, "relu")
    y, _ = vendor.linear(x, v, g, bias, None, 0, "relu", 0.0)
    assert made == []
    assert y[3].isnan().all()
    expected, _ = wnfused.reference.linear(x, v, g, bias, None, 0, "relu", 0.0)
    torch.testing.assert_close(y, expected, equal_nan=True)
    strategy.use_vendor_epilogues(True)
    assert vendor._has_fused_epilogue(image, w, geometry, "relu") == torch.backends.cudnn.enabled
    assert not vendor._has_fused_epilogue(image, w, geometry, "none")
    finite = x.nan_to_num()
    y, _ = vendor.linear(finite, v, g, bias, None, 0, "relu", 0.0)
    assert made == ["cuBLASLt"]
    torch.testing.assert_close(y, wnfused.reference.linear(finite, v, g, bias, None, 0, "relu", 0.0)[0])
    vendor.linear(finite, v, g, bias, torch.ones(9, 8), 0, "relu", 0.0)
    assert made == ["cuBLASLt"]


def test_every_row_of_the_strategy_decides_something():
    layers = [
        Layer(m, n, c, dim, spatial, groups, full=full)
        for full in (False, True) for m in (8, 4096) for n in (0, 8, 64, 2**14) for c in (8, 64) for dim in (0, 1)
        for spatial in (0, 2, 3) for groups in (1, 2)
    ]  # fmt: skip
    assert {id(strategy.row(layer)) for layer in layers} == {id(row) for row in (*strategy.LINEAR, *strategy.CONV)}


@pytest.mark.parametrize(("flag", "dtype", "way"), [
    ("ieee", torch.float32, "vendor"), ("tf32", torch.float32, "fused"), ("ieee", torch.bfloat16, "fused"),
])  # fmt: skip
def test_a_linear_layer_in_full_float32_goes_the_vendors_way_sooner(flag, dtype, way):
    from wnfused.backends import triton as backend

    flags = torch.backends.cuda.matmul
    before = flags.fp32_precision
    try:
        flags.fp32_precision = flag
        layer = backend._linear_layer(torch.empty(5, 40, 64, dtype=dtype), torch.empty(48, 64), -2)
        assert (layer.samples, layer.rows, layer.channels, layer.dim) == (200, 48, 64, 0)
        assert strategy.way(layer) == way
    finally:
        flags.fp32_precision = before


@pytest.mark.parametrize("operation", ["matmul", "conv"])
def test_float32_follows_torchs_flags(operation):
    """The operation's own, or where that is not set the next wider one that is."""
    flags = torch.backends.cuda.matmul if operation == "matmul" else torch.backends.cudnn.conv
    before = flags.fp32_precision, torch.backends.cudnn.fp32_precision, torch.backends.fp32_precision
    try:
        for chain in itertools.product(("none", "ieee", "tf32"), repeat=3):
            flags.fp32_precision, torch.backends.cudnn.fp32_precision, torch.backends.fp32_precision = chain
            decides = next((flag for flag in chain if flag != "none"), "ieee")
            assert support.precision(torch.float32, operation) == decides
            assert support.precision(torch.bfloat16, operation) == "half"
            assert allows_tf32(operation) is (decides == "tf32")
            if operation == "conv":
                assert native_cuda._precision(torch.float32) == native_cuda._PRECISIONS.index(
                    "tf32" if decides == "tf32" else "float32"
                )
    finally:
        flags.fp32_precision, torch.backends.cudnn.fp32_precision, torch.backends.fp32_precision = before


# ---------------------------------------------------------------------------------------------- configurations


def test_every_kernel_has_a_tile_for_every_size_and_operand():
    kernels = {kernel for kernel, _ in configurations.TILES}
    assert {(k, e) for k in kernels for e in configurations.ELEMENTS} == set(configurations.TILES)
    for kernel, element in configurations.TILES:
        for m, n in ((1, 1), (64, 64), (10**6, 16), (10**6, 10**4)):
            tile = configurations.run(kernel, element, (m, n, 64), [torch.empty(0)], {}, lambda tile: tile)
            assert min(tile.m, tile.n, tile.k) >= 16


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 1000, 131072])
@pytest.mark.parametrize("tiles", [1, 9, 400])
def test_the_parts_of_a_split_cover_the_sum(length, tiles):
    parts = configurations.splits(tiles, length, 32)
    assert 1 <= parts <= 64
    assert parts == 1 or length >= parts * 4 * 32


@pytest.fixture
def searched(monkeypatch, tmp_path):
    """The file of a search on a fake GPU that prefers small tiles, what it timed, and whether it captures."""
    file, timed, capturing = tmp_path / "deeper" / "found.json", [], []

    current = [0]

    @contextlib.contextmanager
    def made_current(device):
        before, current[0] = current[0], device.index
        yield
        current[0] = before

    def milliseconds(launch, candidate):
        assert current[0] == 1, "the events are the current device's"
        timed.append(candidate)
        launch(candidate)
        return float(candidate.m)

    monkeypatch.setenv("WNFUSED_TRITON_SEARCH", str(file))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    monkeypatch.setattr(torch.cuda, "device", made_current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
    monkeypatch.setattr(search, "_milliseconds", milliseconds)
    search.path.cache_clear()
    search._found.cache_clear()
    yield file, timed, capturing
    search.path.cache_clear()
    search._found.cache_clear()


def test_the_search_saves_what_it_finds(searched):
    file, timed, _ = searched
    fast, slow = Tile(16, 16, 16), Tile(32, 32, 32)
    device = torch.device("cuda", 1)
    for read_again in (True, False):
        search._found.cache_clear()
        assert search.best("linear 1x2x3", device, [slow, fast], lambda tile: tile) == fast
        assert len(timed) == 2 or not read_again
    assert timed == [slow, fast]
    assert search.best("linear 1x2x3", device, [slow], lambda tile: tile) == slow  # no longer offered
    assert "GPU: linear 1x2x3" in file.read_text()


def test_threads_search_one_after_another(searched, monkeypatch):
    """The backward of each device has one. Drafts of the file have a name each, as other machines may share it."""
    file, _, _ = searched
    timing, drafts, replace = [], [], Path.replace

    def milliseconds(launch, candidate):
        timing.append(candidate)
        time.sleep(0.01)  # in which another thread would come here
        assert timing == [candidate]
        timing.clear()
        return float(candidate.m)

    monkeypatch.setattr(search, "_milliseconds", milliseconds)
    monkeypatch.setattr(Path, "replace", lambda draft, target: drafts.append(draft) or replace(draft, target))
    tile, device, names = Tile(16, 16, 16), torch.device("cuda", 1), [f"linear {n}" for n in range(4)]
    with ThreadPoolExecutor(len(names)) as pool:
        found = list(pool.map(lambda name: search.best(name, device, [tile], lambda tile: tile), names))
    assert found == [tile] * len(names)
    assert set(json.loads(file.read_text())) == {f"GPU: {name}" for name in names}
    assert len(set(drafts)) == len(names)
    assert {draft.parent for draft in drafts} == {file.parent}
    assert list(file.parent.iterdir()) == [file]


def test_the_search_tells_launches_of_one_size_apart(searched):
    """The walk of 3x3 taps of 16 channels is as long as one of 144; a stage's maps are of two dtypes."""
    pytest.importorskip("triton")
    from wnfused.backends.triton import conv_layer

    file, _, _ = searched

    def searched_for(x, v, stride, fused=True, residual=None, dtype=torch.bfloat16):
        """How many searches one convolution of maps that are 16 pixels a side behind it adds."""
        before = len(json.loads(file.read_text())) if file.exists() else 0
        x, v = _fake(CUDA, dtype, x), _fake(CUDA, torch.float32 if fused else dtype, v)
        padding = [v.shape[2] // 2] * 2
        geometry = conv_layer.Geometry.of(x, v, [stride] * 2, padding, [1, 1])
        assert (geometry.pixels_out, geometry.filters, geometry.length) == (512, 32, 144)
        norm = _fake(CUDA, torch.float32, (32,)) if fused else None
        y = _fake(CUDA, torch.float32 if residual is not None else dtype, (2, 16, 16, 32))
        with support.recorded(lambda *launch: None):
            conv_layer.convolve(x, v, norm, norm, None, residual, y, geometry, "relu", 0.0)
        return len(json.loads(file.read_text())) - before

    taps = (2, 16, 16, 16), (32, 16, 3, 3), 1
    stream = _fake(CUDA, torch.float32, (2, 16, 16, 32))
    assert searched_for(*taps) == 1
    assert searched_for(*taps) == 0
    assert searched_for((2, 144, 16, 16), (32, 144, 1, 1), 1) == 1
    assert searched_for((2, 144, 32, 32), (32, 144, 1, 1), 2) == 1
    assert searched_for(*taps, dtype=torch.float16) == 1
    assert searched_for(*taps, fused=False) == 1
    assert searched_for(*taps, fused=False, residual=stream) == 1


def test_the_search_times_nothing_while_a_graph_is_captured(searched):
    """Then it runs by the table, unless it was found before, as by a call that warms up."""
    file, timed, capturing = searched
    launched = []

    def run(m):
        operands = [_fake(CUDA, torch.float16)]
        return configurations.run(
            "conv.forward", "half", (m, 16, 9), operands, {}, lambda tile: launched.append(tile) or tile
        )

    by_table = configurations.tiles("conv.forward", "half")[0]
    fastest = run(128)
    assert fastest != by_table
    capturing.append(True)
    before = len(timed), len(launched)
    assert run(256) == by_table
    assert run(128) == fastest
    assert (len(timed), len(launched)) == (before[0], before[1] + 2)
    assert "256x16x9" not in file.read_text()
    capturing.clear()
    run(256)
    assert "256x16x9" in file.read_text()


@pytest.mark.parametrize(
    "switch", [native_autograd.use_small_linear, native_cuda.use_warpgroup_stage, strategy.use_vendor_epilogues]
)
def test_a_switch_is_on_or_off(switch):
    with pytest.raises(TypeError, match="on: 'no' must be True or False"):
        switch("no")
