"""What only a GPU can show: every op and backend on CUDA tensors against float64, streams, devices, capture."""

from __future__ import annotations

import contextlib
import copy
import functools

import pytest
import torch
from samples import ALIGNED, SAMPLES, Sample, composite_stage

import wnfused
from wnfused import reference
from wnfused.backends import native_cuda
from wnfused.backends.triton import strategy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

# Operands are rounded to the precision, sums kept in float32; the samples' inner dims are below 100.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.fixture(autouse=True)
def _full_precision():
    """float32 means float32, and torch's own kernels need not be deterministic."""
    torch.use_deterministic_algorithms(False)
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def error(found: torch.Tensor, true: torch.Tensor) -> float:
    difference = (found.detach().cpu().double() - true.detach()).norm()
    return (difference / true.detach().norm().clamp_min(1)).item()


def compare(
    run,
    expected,
    tensors: list[torch.Tensor],
    dtype: torch.dtype,
    backend: str | None,
    tolerance: float | None = None,
    kink: float = 0.0,
) -> None:
    """Output and all gradients on CUDA against float64 on the CPU.

    A unit nearer its kink than the roundings reach, ``kink`` standard deviations, may be on either side: gradients may
    be off by what these units' switching makes of them, besides.
    """
    tolerance = TOLERANCE[dtype] if tolerance is None else tolerance
    here = [t.detach().to("cuda", dtype).requires_grad_() for t in tensors]
    there = [t.detach().cpu().double().requires_grad_() for t in here]
    true = expected(*there)
    dy = torch.randn(true.shape, dtype=torch.float64)
    true.backward(dy)
    other = [t.grad for t in there]
    if kink:
        with Switched(kink):
            other = torch.autograd.grad(expected(*there), there, dy)
    try:
        with wnfused.use_backend(backend):
            found = run(*here)
            found.backward(dy.to("cuda", dtype))
    except wnfused.BackendUnavailableError as reason:
        pytest.skip(str(reason))
    assert error(found, true) < tolerance
    for a, b, switched in zip(here, there, other, strict=True):
        assert error(a.grad, b.grad) < 4 * tolerance + 2 * error(switched, b.grad)


class Switched(torch.overrides.TorchFunctionMode):
    """Every unit within so many standard deviations of its kink is on the wrong side of it."""

    def __init__(self, within: float) -> None:
        super().__init__()
        self.within = within

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        if function is not torch.nn.functional.relu:
            return function(*arguments, **(keywords or {}))
        z = arguments[0]
        value = z.detach()
        return z * ((value > 0) ^ (value.abs() < self.within * value.std()))


def calm(sample: Sample, dtype: torch.dtype) -> list[torch.Tensor]:
    """The first draw whose gradients stay when its numbers move by a rounding: no unit is that near its kink."""

    def gradients(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        y = sample.expected(*tensors)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=y.dtype)
        return torch.autograd.grad(y, tensors, dy)

    for seed in range(1, 200):
        drawn = [t.detach().to(dtype).double().requires_grad_() for t in sample.tensors(seed=seed)]
        generator = torch.Generator().manual_seed(seed)
        noise = [torch.randn(t.shape, generator=generator, dtype=t.dtype) * torch.finfo(dtype).eps for t in drawn]
        moved = [(t + t * n).detach().requires_grad_() for t, n in zip(drawn, noise, strict=True)]
        pairs = zip(gradients(moved), gradients(drawn), strict=True)
        if all(error(a, b) < 2 * TOLERANCE[dtype] for a, b in pairs):
            return drawn
    raise AssertionError(f"{sample.name}: no draw is calm in {dtype}")


def test_backends_are_there() -> None:
    """Without one of them the tests below would skip, and prove nothing."""
    status = wnfused.dispatch.backend_status()
    assert status["native"] is None
    assert status["triton"] is None
    assert native_cuda.unavailable() is None


@pytest.mark.filterwarnings("ignore::wnfused.dispatch.BackendWarning")  # of stages that the CUDA library does not have
@pytest.mark.parametrize("backend", [None, "native", "triton", "reference"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_samples(sample: Sample, dtype: torch.dtype, backend: str | None) -> None:
    compare(sample.run, sample.expected, calm(sample, dtype), dtype, backend)


LAYERS = {
    "linear": (lambda: wnfused.WNLinear(24, 40, activation="relu"), (7, 24)),
    "linear of a sequence": (lambda: wnfused.WNLinear(24, 40, bias=False), (2, 3, 24)),
    "convolution": (lambda: wnfused.WNConv2d(16, 24, 3, padding=1, activation="leaky_relu"), (3, 16, 9, 7)),
    "grouped, with strides": (lambda: wnfused.WNConv2d(16, 24, 3, stride=2, groups=4, dilation=2), (3, 16, 19, 17)),
    "in one dim": (lambda: wnfused.WNConv1d(16, 24, 3, activation="relu"), (3, 16, 19)),
    "in three dims": (lambda: wnfused.WNConv3d(8, 16, 3, activation="relu"), (2, 8, 5, 6, 7)),
}


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["as torch lays it out", "channels last"])
@pytest.mark.parametrize("name", list(LAYERS))
def test_plain_calls_of_a_layer_are_one_node_in_cpp(name: str, last: bool, autocast: torch.dtype | None) -> None:
    """A layer's time on a GPU is the host's; whatever format its maps have, the numbers and formats are right."""
    make, shape = LAYERS[name]
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    torch.manual_seed(0)
    there = make().double()
    here = copy.deepcopy(there).to("cuda", torch.float32)
    x = torch.randn(shape, dtype=torch.float64)
    moved = x.to("cuda", torch.float32)
    if last:
        moved = moved.contiguous(memory_format=formats.get(moved.dim(), torch.contiguous_format))
    x.requires_grad_()
    moved.requires_grad_()
    with torch.autocast("cuda", autocast or torch.float16, enabled=autocast is not None):
        y = here(moved)
    assert y.grad_fn.name().split("::")[-1].startswith(("WNLinear", "WNConv"))
    true = there(x)
    dy = torch.randn_like(true)
    y.backward(dy.to("cuda", y.dtype))
    true.backward(dy)
    tolerance = TOLERANCE[y.dtype]
    assert y.dtype == (autocast or torch.float32)
    assert error(y, true) < tolerance
    for found, expected in ((moved, x), *zip(here.parameters(), there.parameters(), strict=True)):
        assert found.grad.dtype == torch.float32
        assert error(found.grad, expected.grad) < 4 * tolerance
    if last and y.dim() in formats:
        assert y.is_contiguous(memory_format=formats[y.dim()])
    with torch.no_grad(), torch.autocast("cuda", autocast or torch.float16, enabled=autocast is not None):
        assert torch.equal(here(moved), y)


@pytest.mark.parametrize("name", list(LAYERS))
def test_a_penalty_on_the_gradient_by_the_input(name: str) -> None:
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    there = make().double()
    here = copy.deepcopy(there).to("cuda", torch.float32)

    def gradients(layer: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(layer(x).sin().sum(), x, create_graph=True)
        found = torch.autograd.grad(slope.square().sum(), [x, *layer.parameters()], allow_unused=True)
        return [slope.detach(), *(t for t in found if t is not None)]

    x = torch.randn(shape, dtype=torch.float64)
    found, true = gradients(here, x.to("cuda", torch.float32)), gradients(there, x)
    for one, other in zip(found, true, strict=True):
        assert one.is_cuda
        assert error(one, other) < 4 * TOLERANCE[torch.float32]


# As above; tf32 rounds to ten bits of mantissa.
ALIGNED_TOLERANCE = {"float32": 2e-5, "tf32": 3e-3, "bfloat16": 3e-2, "float16": 4e-3}


def test_single_layers_run_by_the_native_backend_where_it_is_named() -> None:
    layer, x = wnfused.WNLinear(24, 40).cuda(), torch.randn(3, 7, 24, device="cuda")
    expected = layer(x)
    transposed = wnfused.WNConvTranspose2d(8, 8, 3).cuda()
    with wnfused.use_backend("native"):
        assert layer(x).grad_fn.name().split("::")[-1].startswith("WNLinear")
        torch.testing.assert_close(torch.func.vmap(layer)(x), expected)  # by the op, as a transform looks on
        with pytest.raises(wnfused.BackendUnavailableError, match="no transposed convolution of CUDA tensors"):
            transposed(torch.randn(2, 8, 5, 5, device="cuda"))


FEW_SAMPLES = ((1, 8, 4), (17, 264, 20), (33, 1032, 36), (256, 64, 16), (5, 48, 300), (8, 4096, 1024), (128, 1024, 256))
"""Samples, columns and rows of v, of the kernels in ``csrc/cuda/small_linear.h``."""


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
@pytest.mark.parametrize("shape", FEW_SAMPLES, ids=str)
def test_linear_layers_of_few_samples(shape: tuple[int, int, int], precision: str, parameters: torch.dtype) -> None:
    """In the end an entry of x is infinite: only what it meets may show it."""
    if parameters == torch.bfloat16 and precision != "bfloat16":
        pytest.skip("x is not narrower than the parameters")
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    samples, columns, rows = shape
    torch.manual_seed(0)
    there = wnfused.WNLinear(columns, rows, activation="relu")
    with torch.no_grad():
        # Far from the kink, either side of it.
        there.weight_g.fill_(0.3)
        there.bias.copy_(torch.where(torch.arange(rows) % 3 == 0, -3.0, 3.0))
        there.weight_v[1].zero_()
    there = there.to(parameters)
    here = copy.deepcopy(there).cuda()
    there = there.double()
    narrow = torch.bfloat16 if precision == "bfloat16" else torch.float32
    x = torch.randn(samples, columns).to(narrow)
    moved = x.cuda().requires_grad_()
    x = x.double().requires_grad_()
    dy = torch.randn(samples, rows).to(narrow)

    def run() -> list[torch.Tensor]:
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bfloat16"):
            y = here(moved)
        return [y, *torch.autograd.grad(y, [moved, *here.parameters()], dy.cuda())]

    true = there(x)
    expected = [true, *torch.autograd.grad(true, [x, *there.parameters()], dy.double())]
    found = run()
    for value, wanted in zip(found, expected, strict=True):
        assert error(value, wanted) < 2 * ALIGNED_TOLERANCE[precision]
    assert all(torch.equal(one, again) for one, again in zip(found, run(), strict=True))
    with torch.no_grad():
        moved[0, 0] = float("inf")
        y = here(moved)
    assert torch.isfinite(y[1:]).all()
    assert y[0, 1].isnan()  # a zero row: 0 times infinity


@pytest.mark.parametrize("activation", [None, "leaky_relu"])
@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
@pytest.mark.parametrize("shape", [(33, 264, 36), (5, 1032, 300)], ids=str)
def test_a_residual_joins_linear_layers_of_few_samples(
    shape: tuple[int, int, int], precision: str, activation: str | None
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    samples, columns, rows = shape
    torch.manual_seed(0)
    there = wnfused.WNLinear(columns, rows, bias=False, activation=activation)
    here = copy.deepcopy(there).cuda()
    there = there.double()
    narrow = torch.bfloat16 if precision == "bfloat16" else torch.float32
    x = torch.randn(samples, columns).to(narrow)
    # Far from the kink, either side of it.
    residual = torch.where(torch.arange(rows) % 3 == 0, -9.0, 9.0).expand(samples, rows).to(narrow)
    dy = torch.randn(samples, rows).to(narrow)

    def run(layer: torch.nn.Module, *tensors: torch.Tensor) -> list[torch.Tensor]:
        inputs = [tensor.clone().requires_grad_() for tensor in tensors[:2]]
        with torch.autocast("cuda", torch.bfloat16, enabled=layer is here and precision == "bfloat16"):
            y = layer(inputs[0], residual=inputs[1])
        return [y, *torch.autograd.grad(y, [*inputs, *layer.parameters()], tensors[2])]

    expected = run(there, x.double(), residual.double(), dy.double())
    for value, wanted in zip(run(here, x.cuda(), residual.cuda(), dy.cuda()), expected, strict=True):
        assert error(value, wanted) < 2 * ALIGNED_TOLERANCE[precision]


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["as torch lays it out", "channels last"])
@pytest.mark.parametrize("name", ["linear", "convolution"])
def test_bias_gradients_of_many_shares(name: str, last: bool, dtype: torch.dtype, activation: str | None) -> None:
    """Of more entries than one block of threads sums up."""
    torch.manual_seed(0)
    make = wnfused.WNLinear if name == "linear" else functools.partial(wnfused.WNConv2d, kernel_size=1)
    layer = make(8, 264 if name == "linear" else 16, activation=activation).to("cuda", dtype)
    x = torch.randn((4096, 8) if name == "linear" else (64, 8, 32, 32), device="cuda", dtype=dtype)
    if last and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    y = layer(x)
    dy = torch.randn_like(y)
    # By itself, and beside the weight's, whose kernel then adds the shares up.
    wanted = ([layer.bias], [layer.bias], [layer.bias, layer.weight_v, layer.weight_g])
    alone, again, beside = (torch.autograd.grad(y, tensors, dy, retain_graph=True)[0] for tensors in wanted)
    dz = dy.double() * (1 if activation is None else (y > 0))
    expected = dz.sum(0) if name == "linear" else dz.sum((0, 2, 3))
    assert error(alone, expected.cpu()) < TOLERANCE[dtype]
    assert error(beside, expected.cpu()) < TOLERANCE[dtype]
    assert torch.equal(alone, again)


@pytest.fixture
def vendor_epilogues(request):
    strategy.use_vendor_epilogues(request.param)
    yield
    strategy.use_vendor_epilogues(False)


@pytest.mark.parametrize(
    ("way", "vendor_epilogues"),
    [("fused", False), ("vendor", False), ("vendor", True)],
    ids=["fused", "vendor", "vendor with its ReLU"],
    indirect=["vendor_epilogues"],
)
@pytest.mark.parametrize("precision", list(ALIGNED_TOLERANCE))
@pytest.mark.parametrize("sample", ALIGNED, ids=lambda sample: sample.name)
def test_both_ways_of_a_layer(sample: Sample, precision: str, way: str, vendor_epilogues: None) -> None:
    """The Triton backend's own kernels, and the vendor's product with and without its epilogue."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    dtype = torch.float32 if precision == "tf32" else getattr(torch, precision)
    with strategy.forced(way):
        compare(sample.run, sample.expected, scaled(sample.tensors()), dtype, "triton", ALIGNED_TOLERANCE[precision])


def scaled(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """A layer's tensors such that no rounding takes a pre-activation across the kink, where gradients would jump."""
    x, v, g, *rest = tensors
    if not rest:  # sums of positive numbers
        return [x.abs(), v.abs(), g]
    bias, *residual = rest
    signs = torch.where(torch.arange(bias.numel()) % 3 == 0, -1.0, 1.0)
    return [x, v, 0.1 * g, (bias.abs() + 3) * signs, *(0.1 * r for r in residual)]


@pytest.mark.parametrize("name", ["linear", "few rows", "few rows, unasked", "convolution"])
def test_tf32_has_no_bias(name: str) -> None:
    """Operands cut off rather than rounded would leave each of these sums of positive numbers 7e-4 too small."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(0)
    conv = name == "convolution"
    layer = (wnfused.WNConv2d(64, 64, 3, bias=False) if conv else wnfused.WNLinear(512, 256, bias=False)).cuda()
    shape = {"linear": (512, 512), "convolution": (8, 64, 16, 16)}.get(name, (32, 512))
    x = torch.rand(shape, device="cuda", requires_grad=True)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.abs_()
    exact, there = copy.deepcopy(layer).cpu().double(), x.detach().cpu().double().requires_grad_()
    fused = contextlib.nullcontext() if name == "few rows, unasked" else strategy.forced("fused")
    backend = contextlib.nullcontext() if name == "few rows, unasked" else wnfused.use_backend("triton")
    with fused, backend:
        y = layer(x)
        dy = torch.rand_like(y)
        y.backward(dy)
    with wnfused.use_backend("reference"):
        true = exact(there)
        true.backward(dy.cpu().double())
    pairs = {"y": (y, true), "dx": (x.grad, there.grad), "dg": (layer.weight_g.grad, exact.weight_g.grad)}
    for which, (found, expected) in pairs.items():
        deviation = (found.detach().cpu().double() - expected.detach()) / expected.detach()
        assert deviation.mean().abs() < 5e-5, which


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_memory_that_held_nan_does_not_show(precision: str) -> None:
    """An output that the vendor's product reads before it writes it, times 0, would show."""
    dtype = getattr(torch, precision)
    layer = wnfused.WNConv2d(64, 64, 3, padding=1, activation="relu").to("cuda", dtype)
    x = torch.randn(8, 64, 16, 16, device="cuda", dtype=dtype).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        y = layer(x)
        assert torch.isfinite(y).all()
        for _ in range(3):
            del y
            poison = [torch.full_like(x, float("nan")) for _ in range(8)]
            del poison
            y = layer(x)
            assert torch.isfinite(y).all()


@pytest.mark.parametrize("way", ["fused", "vendor"])
def test_nan_stays_nan(way: str) -> None:
    """As in torch's own layers: a ReLU that hides a NaN hides a diverged network."""
    x = torch.randn(600, 64, device="cuda")
    x[7] = float("nan")
    image = torch.randn(2, 64, 8, 8, device="cuda")
    image[1, 3, 4, 4] = float("nan")
    with strategy.forced(way), wnfused.use_backend("triton"), torch.no_grad():
        y = wnfused.WNLinear(64, 48, activation="relu", device="cuda")(x)
        z = wnfused.WNConv2d(64, 64, 3, padding=1, activation="relu", device="cuda")(image)
    assert y[7].isnan().all()
    assert torch.isfinite(y[:7]).all()
    assert z[1, :, 3:6, 3:6].isnan().all()
    assert torch.isfinite(z[0]).all()


def stage_tensors(blocks: int, n: int, c: int, size: int) -> list[torch.Tensor]:
    torch.manual_seed(2)
    v = torch.randn(blocks, 2, c, c, 3, 3)
    g = torch.rand(blocks, 2, c) + 0.5
    g[:, 1] *= blocks**-0.5
    return [torch.randn(n, c, size, size), v, g, 0.1 * torch.randn(blocks, 2, c)]


@pytest.mark.parametrize("recompute", [None, 2])
@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize(
    ("channels", "size"), [(16, 32), (32, 16), (64, 8), (16, 28), (32, 14), (64, 7), (16, 8), (32, 4), (64, 2)]
)
@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_stage(channels: int, size: int, batch: int, precision: str, recompute: int | None) -> None:
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    tensors = stage_tensors(4, batch, channels, size)
    run = functools.partial(wnfused.functional.residual_stage, recompute=recompute)
    # A switched ReLU costs its gradient, so a gradient's error is about the root of the output's.
    tolerance = 2e-2 if precision == "tf32" else TOLERANCE[dtype]
    # float32 leaves errors of about 1e-6 in a pre-activation, and a million units have some that are nearer their kink.
    kink = 5e-6 if precision == "float32" else 0.0
    compare(run, composite_stage, tensors, dtype, "native", tolerance, kink)


@pytest.mark.parametrize("tf32", [False, True])
def test_stage_whose_backward_is_in_another_precision(tf32: bool) -> None:
    """What a forward keeps means the same to the kernels of each precision."""
    tensors = [t.cuda().requires_grad_() for t in stage_tensors(3, 5, 32, 16)]
    gradients = []
    for other in (tf32, not tf32):
        torch.backends.cudnn.allow_tf32 = tf32
        y = wnfused.functional.residual_stage(*tensors)
        torch.backends.cudnn.allow_tf32 = other
        gradients.append(torch.autograd.grad(y.sum(), tensors))
    for same, different in zip(*gradients, strict=True):
        assert error(different, same.cpu().double()) < 2e-2


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize(("channels", "size"), [(32, 14), (64, 7), (16, 8), (32, 4), (64, 2)])
def test_stage_whose_backward_is_the_native_one_after_anothers_forward(channels: int, size: int, backend: str) -> None:
    """As in a compiled graph, whose backward goes by the choice at its own time."""
    x, v, g, bias = (t.cuda() for t in stage_tensors(3, 5, channels, size))
    with wnfused.use_backend(backend):
        y, norm, maps, signs = torch.ops.wnfused.residual_stage(x, v, g, bias)
    dy = torch.randn_like(y)
    with wnfused.use_backend("native"):
        found = torch.ops.wnfused.residual_stage_backward(dy, v, g, bias, norm, maps, 1.0, 0, True, signs)
    expected = reference.residual_stage_backward(*(t.cpu().double() for t in (dy, v, g, bias, norm, maps)))
    for gradient, true in zip(found, expected, strict=True):
        assert error(gradient, true) < 4 * TOLERANCE[torch.float32]


@pytest.mark.parametrize("recompute", [None, 8])
def test_stage_of_its_first_block_alone(recompute: int | None) -> None:
    """The block that changes the width is torch's convolutions; of the others there are none, and no checkpoint."""
    stage = wnfused.WNResidualStage(16, 32, 1, stride=2, recompute=recompute)
    x = torch.randn(3, 16, 32, 32)
    y = copy.deepcopy(stage).cuda()(x.cuda())
    y.sum().backward()
    with wnfused.use_backend("reference"):
        expected = stage.double()(x.double())
    assert error(y, expected) < TOLERANCE[torch.float32]


@pytest.fixture
def warpgroup_stage():
    from wnfused.backends import native_cuda

    try:
        native_cuda.use_warpgroup_stage(True)
    except RuntimeError as reason:
        pytest.skip(str(reason))
    yield
    native_cuda.use_warpgroup_stage(False)


@pytest.mark.parametrize("recompute", [None, 2])
@pytest.mark.parametrize("batch", [1, 4, 7, 300])
@pytest.mark.parametrize(("channels", "size"), [(64, 8), (32, 16)])
@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
def test_stage_by_warpgroups(
    precision: str, channels: int, size: int, batch: int, recompute: int | None, warpgroup_stage
) -> None:
    """Whole clusters, and blocks of threads that have no image."""
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    run = functools.partial(wnfused.functional.residual_stage, recompute=recompute)
    blocks = 9 if batch < 100 else 3  # what it is compared with is computed on the CPU
    tolerance = 2e-2 if precision == "tf32" else TOLERANCE[dtype]
    compare(run, composite_stage, stage_tensors(blocks, batch, channels, size), dtype, "native", tolerance)


def test_clusters_of_the_stage_by_warpgroups_fit(warpgroup_stage) -> None:
    count = torch.ops.wnfused_native.cuda_warpgroup_clusters()
    assert 1 <= count <= torch.cuda.get_device_properties(0).multi_processor_count // 2


@pytest.mark.parametrize(("channels", "size"), [(64, 8), (32, 16)])
def test_stage_by_warpgroups_is_bitwise_equal_from_run_to_run(channels: int, size: int, warpgroup_stage) -> None:
    x, v, g, bias = (t.cuda() for t in stage_tensors(40, 130, channels, size))
    with wnfused.use_backend("native"):
        runs = [wnfused.functional.residual_stage(x.bfloat16(), v, g, bias) for _ in range(20)]
    assert all(torch.equal(runs[0], y) for y in runs[1:])


@pytest.mark.parametrize("recompute", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("channels", "size"), [(16, 32), (32, 16), (64, 8)])
def test_large_stage_is_bitwise_equal_from_run_to_run(
    channels: int, size: int, dtype: torch.dtype, recompute: int | None
) -> None:
    """Each kernel, more images than multiprocessors, and the batch cut into slices for the weight gradient."""
    x, v, g, bias = (t.cuda() for t in stage_tensors(4, 140, channels, size))
    dy = torch.randn_like(x).to(dtype)

    def once() -> tuple[torch.Tensor, ...]:
        inputs = [x.to(dtype).requires_grad_(), *(t.clone().requires_grad_() for t in (v, g, bias))]
        with wnfused.use_backend("native"):
            y = wnfused.functional.residual_stage(*inputs, recompute=recompute)
            return y, *torch.autograd.grad(y, inputs, dy)

    first = once()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, once(), strict=True))


@pytest.mark.parametrize("backend", ["native", "triton"])
def test_bitwise_equal_from_run_to_run(backend: str) -> None:
    def once() -> list[torch.Tensor]:
        torch.manual_seed(0)
        stage = wnfused.WNResidualStage(16, 16, 4).cuda()
        x = torch.randn(8, 16, 32, 32, device="cuda", requires_grad=True)
        total, found = stage(x).sum(), [x, *stage.parameters()]
        if backend == "triton":  # which has the single layers
            layer = wnfused.WNLinear(64, 48, activation="relu").cuda()
            z = torch.randn(8, 64, device="cuda", requires_grad=True)
            total, found = total + layer(z).sum(), [*found, z, *layer.parameters()]
        total.backward()
        return [t.grad for t in found]

    try:
        with wnfused.use_backend(backend):
            first, second = once(), once()
    except wnfused.BackendUnavailableError as reason:
        pytest.skip(str(reason))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_runs_on_the_current_stream() -> None:
    """A kernel on another stream would read the input before the sleep and the copy behind it have ended."""
    stage = wnfused.WNResidualStage(16, 16, 2).cuda()
    data = torch.randn(4, 16, 8, 8, device="cuda")
    expected = stage(data).detach()
    x = torch.full_like(data, float("nan"))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.copy_(data)
        y = stage(x)
    side.synchronize()
    torch.testing.assert_close(y, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_follows_the_tensors_device() -> None:
    layer = wnfused.WNConv2d(16, 16, 3, padding=1).to("cuda:1")
    with torch.cuda.device(0):
        y = layer(torch.randn(2, 16, 8, 8, device="cuda:1"))
    assert y.device == torch.device("cuda:1")


def test_mixed_devices_are_named() -> None:
    layer = wnfused.WNLinear(4, 4)
    with pytest.raises((ValueError, RuntimeError, wnfused.BackendUnavailableError), match=r"(?i)device|cuda|cpu"):
        layer(torch.randn(2, 4, device="cuda"))


def test_a_training_step_is_captured() -> None:
    """A replayed step leaves the weights that the same step leaves when it is launched."""
    torch.manual_seed(0)
    net = wnfused.models.wrn(depth=40, in_channels=1).cuda()
    twin = copy.deepcopy(net)
    x, labels = torch.randn(16, 1, 8, 8, device="cuda"), torch.randint(10, (16,), device="cuda")

    def stepper(model: torch.nn.Module):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step() -> None:
            optimizer.zero_grad(set_to_none=False)
            torch.nn.functional.cross_entropy(model(x), labels).backward()
            optimizer.step()

        return step

    captured, launched = stepper(net), stepper(twin)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            captured()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured()
    with torch.no_grad():  # from the start again, however many steps the capture took
        for a, b in zip(net.parameters(), twin.parameters(), strict=True):
            a.copy_(b)
    for _ in range(3):
        graph.replay()
        launched()
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("batches", [1, 2])
def test_a_recorded_model_has_the_gradients_of_a_launched_one(batches: int) -> None:
    from wnfused.train.graph import GraphedModel

    torch.manual_seed(0)
    net = wnfused.models.wrn(depth=16, in_channels=1).to("cuda")
    twin = copy.deepcopy(net)
    images = torch.randn(batches, 16, 1, 8, 8, device="cuda")
    graphed = GraphedModel(net, images[0], accumulates=batches > 1)
    for _ in range(2):
        for module, run in ((net, graphed), (twin, twin)):
            module.zero_grad()
            for some in images:
                run(some).square().sum().backward()
        for a, b in zip(net.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4)


def test_the_rows_of_many_tensors_are_captured() -> None:
    """A capture takes other kernels than the calls before it, which have to bring them."""
    pytest.importorskip("triton")
    from wnfused.backends.triton import rows, support

    if not support.interpreted():
        for kernel in (rows.kernels.weight_norm, rows.kernels.weight_norm_backward):
            kernel.device_caches.clear()  # what other tests left
    rows._launched.clear()
    shapes = [(24, 40), (7, 33), (16, 8, 3, 3)]
    vs = [torch.randn(shape, device="cuda", requires_grad=True) for shape in shapes]
    gs = [torch.randn(shape[0], device="cuda", requires_grad=True) for shape in shapes]

    def step() -> list[torch.Tensor]:
        with wnfused.use_backend("triton"):
            w = wnfused.functional.weight_norm_many(vs, gs)
            return [*w, *torch.autograd.grad(sum(t.square().sum() for t in w), [*vs, *gs])]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    with torch.no_grad():
        for t in (*vs, *gs):
            t.mul_(1.5)
    graph.replay()
    for found, expected in zip(replayed, step(), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("shape", [(300, 16, 144), (100, 64, 576), (1, 1024, 1024), (4, 700, 300)])
def test_orthogonal_batched(shape: tuple[int, ...], tf32: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = tf32
    q = wnfused.init.orthogonal_batched(
        torch.empty(shape, device="cuda"), generator=torch.Generator("cuda").manual_seed(0)
    )
    torch.backends.cuda.matmul.allow_tf32 = False
    rows, columns = shape[-2:]
    product = q @ q.mT if rows <= columns else q.mT @ q
    identity = torch.eye(min(rows, columns), device="cuda")
    assert (product - identity).abs().max() < 1e-5 * max(rows, columns) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 5), (2, 64, 576), (2, 300, 301), (1, 1500, 1500)])
def test_cusolver_orthonormal_rows(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Q of A = L Q with a positive diagonal is unique: against LAPACK in float64, up to the condition."""
    from wnfused.backends import cusolver
    from wnfused.linalg.orthogonal import householder

    assert cusolver.refusal("qr", torch.device("cuda:0")) is None
    a = torch.randn(shape, dtype=dtype)
    condition = torch.linalg.cond(a.double()).max().item()
    unit = torch.finfo(dtype).eps / 2
    q = cusolver.orthonormal_rows(a.cuda()).cpu().double()
    assert (q - householder(a.double())).abs().max() < 32 * unit * condition * shape[-1] ** 0.5
    identity = torch.eye(shape[-2], dtype=torch.float64)
    assert (q @ q.mT - identity).abs().max() < 32 * unit * shape[-1] ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (5, 40, 40), (2, 3, 100, 100), (70_000, 3, 3)])
def test_cusolver_eigh(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """``A V = V diag(w)`` and ``V^T V = I``, ascending; more matrices than a grid has rows too."""
    from wnfused.backends import cusolver

    assert cusolver.refusal("eigh", torch.device("cuda:0")) is None
    a = torch.randn(shape, dtype=dtype)
    a = a @ a.mT / shape[-1]
    w, v = (t.cpu().double() for t in cusolver.eigh(a.cuda()))
    bound = 64 * torch.finfo(dtype).eps * shape[-1] ** 0.5
    largest = w.abs().amax(-1)[..., None, None].clamp_min(1)
    assert ((a.double() @ v - v * w.unsqueeze(-2)) / largest).abs().max() < bound
    assert (v.mT @ v - torch.eye(shape[-1], dtype=torch.float64)).abs().max() < bound
    assert (w.diff(dim=-1) >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (5, 32, 32), (5, 32, 16), (2, 3, 9, 31), (2, 1, 7), (70_000, 3, 2)])
def test_cusolver_svd(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """``A = U diag(s) V^T`` with orthonormal factors, from the largest; more matrices than a grid has rows too."""
    from wnfused.backends import cusolver

    assert cusolver.refusal("svd", torch.device("cuda:0")) is None
    a = torch.randn(shape, dtype=dtype)
    u, s, vt = (t.cpu().double() for t in cusolver.svd(a.cuda()))
    bound = 64 * torch.finfo(dtype).eps * max(shape[-2:]) ** 0.5
    largest = s.amax(-1)[..., None, None]
    assert ((u * s.unsqueeze(-2) @ vt - a.double()) / largest).abs().max() < bound
    identity = torch.eye(min(shape[-2:]), dtype=torch.float64)
    assert (u.mT @ u - identity).abs().max() < bound
    assert (vt @ vt.mT - identity).abs().max() < bound
    assert (s.diff(dim=-1) <= 0).all()


def test_cusolver_svd_of_a_nan_is_an_error() -> None:
    from wnfused.backends import cusolver

    a = torch.randn(3, 8, 5, device="cuda")
    a[1] = float("nan")
    with pytest.raises(torch.linalg.LinAlgError, match="matrix 1: it is not finite"):
        cusolver.svd(a)


def test_cusolver_follows_stream_and_thread() -> None:
    """Other threads have handles of their own, and work waits for what the current stream holds already."""
    import concurrent.futures

    from wnfused.backends import cusolver

    data = torch.randn(2, 128, 200, device="cuda")
    expected = cusolver.orthonormal_rows(data.clone())
    torch.cuda.synchronize()

    def late(_: int) -> torch.Tensor:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            a = torch.zeros_like(data)
            torch.cuda._sleep(20_000_000)
            a.copy_(data)
            q = cusolver.orthonormal_rows(a)
        side.synchronize()
        return q

    for _ in range(2):  # the second pool's threads take over the handles of the first's
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            for q in pool.map(late, range(6)):
                torch.testing.assert_close(q, expected, rtol=0, atol=1e-5)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_cusolver_follows_the_tensors_device() -> None:
    from wnfused.backends import cusolver

    data = torch.randn(2, 40, 100)
    results = [cusolver.orthonormal_rows(data.to(f"cuda:{i}")) for i in (0, 1)]
    assert [q.device.index for q in results] == [0, 1]
    torch.testing.assert_close(*(q.cpu() for q in results))


def test_peak_memory_of_recomputation() -> None:
    """``recompute=k`` keeps about ``1 / (2 k)`` of the maps, in float32 instead of the operands' dtype."""

    def peak(recompute: int | None) -> int:
        stage = wnfused.WNResidualStage(16, 16, 64, recompute=recompute).cuda()
        x = torch.randn(32, 16, 32, 32, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        stage(x).sum().backward()
        return torch.cuda.max_memory_allocated()

    assert peak(8) < peak(None) / 2
