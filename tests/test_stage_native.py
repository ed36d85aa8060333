"""The C++ residual stage on CPU: every instruction set against a float64 composite in plain torch.

Tolerances are norm-wise. One convolution sums 9 C products in fp32, whose rounding errors grow like a random walk: a
few times eps of the sum's typical size, whether the products are taken directly or by F(2x2, 3x3), whose transforms add
sums of four terms on either side. Errors of different blocks add up in quadrature, hence ``16 eps sqrt(blocks)``.
In bfloat16 every operand is rounded to 8 bits: an output is off by 2^-8 or so, a gradient by more, since an activation
within 2^-8 of zero may pass the ReLU or not and a share p of wrong masks is an error of sqrt(p).
"""

import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
import torch.nn.functional as F
from instruction_sets import ISAS

from wnfused.backends import native

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))

kernels = torch.ops.wnfused_native

# (N, C, H, W): tuned widths and odd ones, maps from 1x1 up, batches that fill a panel and that do not.
SHAPES = [
    (1, 16, 32, 32), (2, 32, 16, 16), (3, 64, 8, 8), (33, 16, 8, 8), (33, 32, 4, 4), (33, 64, 2, 2), (1, 64, 2, 2),
    (2, 16, 5, 7), (1, 24, 9, 4), (5, 3, 6, 5), (2, 1, 3, 3), (5, 16, 1, 1), (3, 24, 1, 6), (2, 32, 2, 5),
    (1, 128, 4, 4), (1, 160, 5, 3), (40, 16, 3, 3), (5, 40, 2, 1),
]  # fmt: skip
# Banks larger than a worker's cache, packed group by group: one chunk of tiles, two of them, blocks that are not full.
WIDE = [(1, 384, 8, 8), (9, 320, 5, 7), (40, 256, 4, 5), (2, 250, 6, 6)]


def sample(n, c, h, w, blocks=3):
    x = torch.randn(n, c, h, w)
    v = torch.randn(blocks, 2, c, c, 3, 3)
    g = torch.rand(blocks, 2, c) + 0.5
    g[:, 1] *= max(blocks, 1) ** -0.5
    return x, v, g, torch.randn(blocks, 2, c) * 0.1


def composite(x, v, g, bias, skip_scale=1.0, passes=None):
    """The stage in plain torch, any dtype; zero rows give zero weights. ``passes[b]`` overrules which pre-activations
    of block b the ReLU lets through."""
    zero = (v == 0).flatten(3).all(3)[..., None, None, None]
    rows = torch.where(zero, torch.ones_like(v), v)
    scaled = rows * (g / rows.flatten(3).norm(dim=3))[..., None, None, None]
    h = x
    # unbind, since the derivative of B selections would be B tensors as large as v.
    for b, (w, c) in enumerate(
        zip(torch.where(zero, torch.zeros_like(v), scaled).unbind(), bias.unbind(), strict=True)
    ):
        z = F.conv2d(h, w[0], c[0], padding=1)
        a = F.relu(z) if passes is None else z * passes[b]
        h = skip_scale * (h + F.conv2d(a, w[1], c[1], padding=1))
    return h


def expected(arguments, dy, skip_scale=1.0, passes=None):
    """(y, dx, dv, dg, dbias) in float64."""
    leaves = [t.detach().double().requires_grad_() for t in arguments]
    y = composite(*leaves, skip_scale, passes)
    grads = torch.autograd.grad(y, leaves, dy.double(), allow_unused=True)
    return [y.detach()] + [torch.zeros_like(t) if d is None else d for t, d in zip(leaves, grads, strict=True)]


def run(arguments, dy, skip_scale=1.0, recompute=0):
    """(y, dx, dv, dg, dbias) of the kernels."""
    y, norm, maps = kernels.residual_stage(*arguments, skip_scale, recompute, True)
    return [y, *kernels.residual_stage_backward(dy, *arguments[1:], norm, maps, skip_scale, recompute, True)]


def distance(actual, reference):
    return ((actual.double() - reference).norm() / reference.norm().clamp_min(1e-300)).item() if len(actual) else 0.0


def assert_close(actual, reference, blocks):
    tolerance = 16 * torch.finfo(torch.float32).eps * max(blocks, 1) ** 0.5
    for name, a, r in zip(("y", "dx", "dv", "dg", "dbias"), actual, reference, strict=False):
        assert a.shape == r.shape
        assert distance(a, r) < tolerance, name


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_float64(shape, isa):
    if isa == "portable" and shape[1] ** 2 * shape[2] * shape[3] * shape[0] > 2**18:
        pytest.skip("slow, and the same code as a smaller shape")
    arguments, dy = sample(*shape), torch.randn(shape)
    maps = kernels.residual_stage(*arguments, 0.9, 0, True)[2]
    # Where a pre-activation is 0 but for rounding, the gradient of either side is right.
    passes = (maps[:, 1] > 0).permute(0, 1, 4, 2, 3)
    assert_close(run(arguments, dy, 0.9), expected(arguments, dy, 0.9, passes), 3)


@pytest.mark.parametrize("shape", WIDE, ids=str)
def test_wide_stages_match_float64(shape, isa):
    if isa not in ("avx512", "avx2"):
        pytest.skip("slow, and the same code as the others'")
    arguments, dy = sample(*shape, blocks=2), torch.randn(shape)
    _, norm, maps = kernels.residual_stage(*arguments, 0.9, 0, True)
    passes = (maps[:, 1] > 0).permute(0, 1, 4, 2, 3)
    alone, threads = [], torch.get_num_threads()
    try:
        for count in (1, 3, 2):
            torch.set_num_threads(count)
            alone.append([*run(arguments, dy, 0.9), *kernels.residual_stage(*arguments, 0.9, 0, False)[:2]])
    finally:
        torch.set_num_threads(threads)
    assert_close(alone[0], expected(arguments, dy, 0.9, passes), 2)
    assert distance(norm, arguments[1].double().flatten(3).norm(dim=3)) < 1e-6
    for other in [*alone[1:], [*run(arguments, dy, 0.9, 1), alone[0][0], norm]]:
        for a, b in zip(other, alone[0], strict=True):
            assert torch.equal(a, b)


def test_a_wide_stage_of_an_empty_batch():
    shape = (0, 320, 8, 8)
    arguments = sample(*shape, blocks=1)
    y, norm, _ = kernels.residual_stage(*arguments, 0.9, 0, True)
    assert y.shape == shape
    assert distance(norm, arguments[1].double().flatten(3).norm(dim=3)) < 1e-6
    dv = run(arguments, torch.randn(shape))[2]
    assert torch.equal(dv, torch.zeros_like(dv))


@pytest.mark.parametrize("recompute", [1, 3, 5])
@pytest.mark.parametrize("shape", [(2, 16, 6, 6), (3, 24, 5, 3), (20, 32, 2, 2)], ids=str)
def test_recomputation_changes_no_bit(shape, recompute, isa):
    arguments, dy = sample(*shape, blocks=4), torch.randn(shape)
    for a, b in zip(run(arguments, dy, 0.9), run(arguments, dy, 0.9, recompute), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("recompute", [0, 2])
@pytest.mark.parametrize("channels", [16, 24])
def test_saved_maps_have_the_canonical_layout(channels, recompute):
    arguments = sample(2, channels, 5, 4, blocks=3)
    _, norm, maps = kernels.residual_stage(*arguments, 0.9, recompute, True)
    x, v, g, bias = (t.double() for t in arguments)
    assert distance(norm, v.flatten(3).norm(dim=3)) < 1e-6
    kept = range(0, 3, recompute) if recompute else range(3)
    assert maps.shape == (len(kept), 1 if recompute else 2, 2, 5, 4, channels)
    for i, b in enumerate(kept):
        h = composite(x, v[:b], g[:b], bias[:b], 0.9)
        assert distance(maps[i, 0].permute(0, 3, 1, 2), h) < 1e-5
        if not recompute:
            w = v[b, 0] * (g[b, 0] / v[b, 0].flatten(1).norm(dim=1)).view(-1, 1, 1, 1)
            a = F.relu(F.conv2d(h, w, bias[b, 0], padding=1))
            assert distance(maps[i, 1].permute(0, 3, 1, 2), a) < 1e-5


def test_nothing_saved_and_no_parameter_gradients():
    arguments, dy = sample(2, 16, 6, 6), torch.randn(2, 16, 6, 6)
    y, norm, maps = kernels.residual_stage(*arguments, 1.0, 0, True)
    y_only, _, empty = kernels.residual_stage(*arguments, 1.0, 0, False)
    assert torch.equal(y, y_only)
    assert empty.shape == (0,)
    full = kernels.residual_stage_backward(dy, *arguments[1:], norm, maps, 1.0, 0, True)
    dx, *nothing = kernels.residual_stage_backward(dy, *arguments[1:], norm, maps, 1.0, 0, False)
    assert torch.equal(dx, full[0])
    assert all(t.shape == (0,) for t in nothing)


@pytest.mark.parametrize("blocks", [0, 1])
@pytest.mark.parametrize("batch", [0, 2])
def test_empty_batch_and_no_blocks(batch, blocks):
    arguments, dy = sample(batch, 16, 4, 4, blocks), torch.randn(batch, 16, 4, 4)
    for recompute in (0, 2):
        assert_close(run(arguments, dy, 0.9, recompute), expected(arguments, dy, 0.9), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("channels", [16, 24])
def test_memory_formats(channels, dtype, isa):
    (x, *parameters), dy = sample(3, channels, 6, 5), torch.randn(3, channels, 6, 5).to(dtype)
    arguments = (x.to(dtype), *parameters)
    plain = run(arguments, dy)
    channels_last = {"memory_format": torch.channels_last}
    last = run((arguments[0].contiguous(**channels_last), *arguments[1:]), dy.contiguous(**channels_last))
    assert last[0].is_contiguous(**channels_last)
    assert last[1].is_contiguous(**channels_last)
    strided = torch.randn(3, channels, 12, 10).to(dtype)[:, :, ::2, ::2].copy_(arguments[0])
    other = run((strided, *(t.transpose(0, 1).contiguous().transpose(0, 1) for t in arguments[1:])),
                dy.transpose(2, 3).contiguous().transpose(2, 3))  # fmt: skip
    assert other[0].is_contiguous()
    for a, b, c in zip(plain, last, other, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    expanded = torch.ones((), dtype=dtype).expand(3, channels, 6, 5)
    assert torch.equal(run(arguments, expanded)[1], run(arguments, expanded.contiguous())[1])


def test_zero_rows_have_zero_gradients(isa):
    x, v, g, bias = sample(2, 16, 6, 6)
    v[0, 0, 3] = v[1, 1, 5] = v[2, 0, :2] = 0
    dy = torch.randn_like(x)
    actual = run((x, v, g, bias), dy)
    assert_close(actual, expected((x, v, g, bias), dy), 3)
    for gradient in (actual[2].flatten(3).abs().sum(3), actual[3]):
        assert gradient[0, 0, 3] == 0
        assert gradient[1, 1, 5] == 0
        assert (gradient[2, 0, :2] == 0).all()
    assert kernels.residual_stage(x, v, g, bias, 1.0, 0, False)[1][0, 0, 3] == 0


@pytest.mark.parametrize("row", [1e-17, 1e17])
@pytest.mark.parametrize("gain", [1e-12, 1e6])
def test_huge_and_tiny_rows_and_gains(row, gain, isa):
    x, v, g, bias = sample(2, 16, 6, 6, blocks=1)
    v, g = v * row, g * gain
    dy = torch.randn_like(x)
    assert_close(run((x, v, g, bias), dy), expected((x, v, g, bias), dy), 1)


@pytest.mark.parametrize(("size", "row"), [(1e25, 1e15), (1e-25, 1e-15)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_product_with_v_itself_would_leave_the_range(size, row, dtype, isa):
    """``x v`` overflows or underflows, ``x g v / ||v||`` does not."""
    x, v, g, bias = sample(2, 16, 6, 6, blocks=2)
    arguments = ((x * size).to(dtype), v * row, g, bias * size)
    dy = torch.randn_like(x).to(dtype)
    actual, reference = run(arguments, dy), expected(arguments, dy)
    # The gradient of the bias is as large as dy, of v and g as x: rounding in bfloat16 as in test_bfloat16.
    for name, a, r in zip(("y", "dx", "dv", "dg", "dbias"), actual, reference, strict=True):
        assert a.isfinite().all(), name
        scale = r.abs().max()
        assert distance(a.double() / scale, r / scale) < (1e-5 if dtype == torch.float32 else 2**-4), name


def test_denormal_input(isa):
    x, v, g, bias = sample(1, 16, 6, 6, blocks=2)
    x, bias = x * 1e-41, torch.zeros_like(bias)
    reference = composite(*(t.double() for t in (x, v, g, bias)))
    # Sums of denormals are exact to their spacing; each of the four convolutions rounds a few times.
    assert (run((x, v, g, bias), x)[0] - reference).abs().max() < 64 * 1.4e-45


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("shape", [(2, 16, 8, 8), (1, 24, 7, 5), (17, 32, 2, 2)], ids=str)
def test_non_finite_values_come_out_as_from_torch(shape, value, isa):
    arguments, dy = sample(*shape, blocks=1), torch.randn(shape)
    arguments[0][0, 1, 1, 0] = value
    leaves = [t.clone().requires_grad_() for t in arguments]
    y = composite(*leaves)
    reference = [y.detach(), *torch.autograd.grad(y, leaves, dy)]
    for recompute in (0, 1):
        actual = run(arguments, dy, 1.0, recompute)
        # dv and dg of torch's composite go through the norm's own derivative: there only finiteness is comparable.
        for a, r in zip(actual[:2], reference[:2], strict=True):
            for same in (torch.isnan, torch.isposinf, torch.isneginf):
                assert torch.equal(same(a), same(r))
            finite = torch.isfinite(r)
            torch.testing.assert_close(a[finite], r[finite], rtol=1e-4, atol=1e-4)
        for a, r in zip(actual[2:], reference[2:], strict=True):
            assert torch.equal(torch.isfinite(a), torch.isfinite(r))


def test_a_transform_that_overflows_is_not_hidden_by_the_relu(isa):
    """Sums of a patch leave the range of fp32 before the convolution does; 0 for relu(-infinity) would look finite."""
    wrong, compared = 0, 0
    for _ in range(300):
        x, g = torch.rand(1, 1, 8, 8) * 1.5e38, torch.rand(1, 2, 1) * 0.3 + 0.02
        arguments = x, torch.randn(1, 2, 1, 1, 3, 3), g, torch.zeros(1, 2, 1)
        if composite(*arguments).isfinite().all():
            y = kernels.residual_stage(*arguments, 1.0, 0, False)[0]
            reference = composite(*(t.double() for t in arguments))
            wrong += not distance(y.double() * 1e-38, reference * 1e-38) < 16 * torch.finfo(torch.float32).eps
            compared += 1
    assert compared > 100
    assert not wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(3, 16, 9, 8), (2, 64, 8, 8), (33, 32, 2, 2)], ids=str)
def test_threads_and_runs_change_no_bit(shape, dtype, isa):
    (x, *parameters), dy = sample(*shape), torch.randn(shape).to(dtype)
    arguments = (x.to(dtype), *parameters)
    threads = torch.get_num_threads()
    try:
        outcomes = []
        for count in (1, 2, 3, 4, 2, 1):
            torch.set_num_threads(count)
            outcomes.append(run(arguments, dy, 0.9, count % 3))
    finally:
        torch.set_num_threads(threads)
    for outcome in outcomes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outcomes[0], outcome, strict=True))


def test_two_python_threads_at_once():
    jobs = [(sample(*shape), torch.randn(shape)) for shape in [(3, 16, 8, 8), (2, 32, 6, 6)]]
    alone = [run(*job) for job in jobs]
    wrong = []

    def repeat(job, outcome):
        for _ in range(30):
            if not all(torch.equal(a, b) for a, b in zip(run(*job), outcome, strict=True)):
                wrong.append(job)

    threads = [threading.Thread(target=repeat, args=pair) for pair in zip(jobs, alone, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize(
    "call",
    [
        "op.residual_stage(randn(4, 16, 8, 8), randn(2, 2, 16, 16, 3, 3), g := ones(2, 2, 16), g, 1.0, 0, True)",
        "op.linear(randn(1, 1024), randn(1024, 1024), ones(1024), None, None, 1, 0.0)",
        "op.linear_backward(x := randn(2, 1024), x, x, randn(1024, 1024), ones(1024), ones(1024), 7, 1, 0.0)",
        "op.weight_norm(randn(1024, 1024), ones(1024), 0)",
        "op.conv(randn(2, 32, 16, 16), randn(32, 32, 3, 3), ones(32), None, None, [1, 1], [1, 1], [1, 1], 1, 1, 0.0)",
        "op.orthonormal_rows_(randn(64, 16, 144))",
    ],
    ids=lambda call: call.split("(")[0],
)
def test_fork_after_use(call):
    """The child has none of the parent's threads: whatever asks for torch's pool there waits for ever."""
    script = f"""
        import os, torch
        from torch import ones
        from wnfused.backends import native
        assert native.unavailable() is None
        op = torch.ops.wnfused_native
        torch.set_num_threads(2)

        def run():
            generator = torch.Generator().manual_seed(0)
            randn = lambda *size: torch.randn(*size, generator=generator)
            found = {call}
            tensors = found if isinstance(found, tuple) else (found,)
            return [t.numpy().tobytes() for t in tensors if t is not None]  # torch's own sums would wait, too

        before = run()
        child = os.fork()
        if child == 0:
            os._exit(0 if run() == before else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert run() == before
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("recompute", [0, 32])
def test_a_thousand_blocks(recompute):
    blocks = 1000
    arguments, dy = sample(2, 16, 8, 8, blocks), torch.randn(2, 16, 8, 8)
    actual, reference = run(arguments, dy, 1.0, recompute), expected(arguments, dy)
    assert_close(actual[:1], reference[:1], blocks)
    # Among 2 million activations a few lie within rounding of zero and pass the ReLU in one of the two only: each is
    # an error of one term in the sums of its block, 1e-4 to 1e-3 of the gradient (torch's own fp32 has the same).
    for a, r in zip(actual[1:], reference[1:], strict=True):
        assert distance(a, r) < 1e-2


def test_bfloat16_rows_of_denormals_count_as_zero_or_as_they_are(isa):
    """Denormal operands are flushed by bfloat16 instructions: what comes out is x, to within their size."""
    x, v, g, _ = sample(2, 16, 6, 6, blocks=2)
    x = (x * 1e-39).bfloat16()
    y = kernels.residual_stage(x, v, g, torch.zeros_like(g), 1.0, 0, False)[0]
    assert (y.double() - x.double()).abs().max() < 1e-37
    assert y.isfinite().all()


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("shape", [(2, 16, 8, 8), (1, 24, 7, 5), (17, 32, 2, 2), (2, 64, 8, 8)], ids=str)
def test_bfloat16_non_finite_values_come_out_as_from_torch(shape, value, isa):
    x, *parameters = sample(*shape, blocks=1)
    x[0, 1, 0, 0] = value
    x, dy = x.bfloat16(), torch.randn(shape).bfloat16()
    reference = expected((x, *parameters), dy)
    for recompute in (0, 1):
        actual = run((x, *parameters), dy, 1.0, recompute)
        for same in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(same(actual[0]), same(reference[0]))
        for a, r in zip(actual[1:], reference[1:], strict=True):
            assert torch.equal(a.isfinite(), r.isfinite())


@pytest.mark.parametrize("parameter_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 16, 8, 8), (3, 24, 5, 7), (20, 32, 2, 2)], ids=str)
def test_bfloat16(shape, parameter_dtype, isa):
    x, *parameters = sample(*shape)
    x, dy = x.bfloat16(), torch.randn(shape).bfloat16()
    parameters = [t.to(parameter_dtype) for t in parameters]
    reference = expected((x, *parameters), dy, 0.9)
    for recompute in (0, 2):
        actual = run((x, *parameters), dy, 0.9, recompute)
        assert [t.dtype for t in actual] == [torch.bfloat16] * 2 + [parameter_dtype] * 3
        assert distance(actual[0], reference[0]) < 2**-7
        for a, r in zip(actual[1:], reference[1:], strict=True):
            assert distance(a, r) < 2**-4


def test_forcing_an_instruction_set():
    for name in ISAS:
        kernels.set_cpu_isa(name)
        assert kernels.cpu_isa() == name
    kernels.set_cpu_isa("auto")
    assert kernels.cpu_isa() == ISAS[0]
    with pytest.raises(RuntimeError, match="portable"):
        kernels.set_cpu_isa("avx1024")
