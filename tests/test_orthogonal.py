"""Haar matrices: both routes against each other, the distribution, seeds, every layout and dtype."""

import math
import warnings

import pytest
import torch
from drawn import generator

import wnfused
from wnfused.backends import native
from wnfused.linalg import orthogonal, orthogonal_batched
from wnfused.linalg.orthogonal import Route, cholesky_qr2, householder, route

MODEL = torch.nn.Sequential(wnfused.WNConv2d(2, 4, 3, padding=1), wnfused.WNResidualStage(4, 4, 2))

# The last two go by CholeskyQR2 on a CPU.
SHAPES = [(7, 4), (4, 7), (5, 5), (3, 2, 6, 4), (2, 3, 4, 9), (0, 4, 4), (2, 1, 5), (5, 4, 20), (2, 3, 30, 6)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_is_orthogonal(shape, dtype):
    q = orthogonal_batched(torch.full(shape, float("nan"), dtype=dtype), gain=3.0)
    gram = (q.mT @ q if shape[-2] >= shape[-1] else q @ q.mT).double()
    expected = 9 * torch.eye(min(shape[-2:]), dtype=torch.float64).expand_as(gram)
    tolerance = {torch.float32: 4e-5, torch.float64: 1e-12, torch.bfloat16: 0.2, torch.float16: 0.03}[dtype]
    torch.testing.assert_close(gram, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("shape", [(6, 4, 24), (50, 16, 144), (6, 64, 576), (300, 3, 11), (9, 1, 9)])
def test_both_routes_give_the_same_matrix(shape):
    """Q with a positive diagonal of L is unique: CholeskyQR2 in float32 against LAPACK's QR in float64."""
    a = torch.randn(shape, generator=generator())
    expected = householder(a.double())
    condition = torch.linalg.cond(a.double()).max()
    assert (cholesky_qr2(a.clone()) - expected).abs().max() < 32 * 2.0**-24 * condition
    double = cholesky_qr2(a.double())
    torch.testing.assert_close(double, expected, rtol=0, atol=1e-12)


@pytest.mark.skipif(wnfused.backend_status()["native"] is not None, reason="needs the C++ library")
@pytest.mark.parametrize("isa", ["avx512", "avx2", "portable"])
def test_the_kernel_gives_the_same_matrix(isa):
    """Every remainder of rows and columns by the tile, against LAPACK's QR in float64."""
    if isa not in torch.ops.wnfused_native.cpu_isas().split(","):
        pytest.skip(f"this processor has no {isa}")
    shapes = [(5, r, c) for r in (1, 2, 3, 4, 5, 7, 16, 17) for c in (2 * r + 8, 63, 64, 65, 150)]
    torch.ops.wnfused_native.set_cpu_isa(isa)
    try:
        for shape in [*shapes, (3, 64, 576), (40, 32, 288), (2, 256, 600)]:
            a = torch.randn(shape, generator=generator())
            expected = householder(a.double())
            condition = torch.linalg.cond(a.double()).max()
            q = orthogonal.native(a.clone())
            assert (q - expected).abs().max() < 32 * 2.0**-24 * condition, shape
    finally:
        torch.ops.wnfused_native.set_cpu_isa("auto")


@pytest.mark.skipif(wnfused.backend_status()["native"] is not None, reason="needs the C++ library")
def test_the_kernel_says_what_it_cannot_do():
    """Zero, equal and infinite rows, NaN; the rest of the batch is none the worse, and nothing depends on threads."""
    a = torch.randn(6, 4, 20, generator=generator())
    a[1, 2], a[2, 3], a[3, 0, 0], a[4, 1, 1] = 0.0, a[2, 1], float("inf"), float("nan")
    before = a.clone()
    assert torch.ops.wnfused_native.orthonormal_rows_(a).tolist() == [True, False, False, False, False, True]
    assert torch.equal(a[1:3], before[1:3]), "left as they were, for the other route"
    threads = torch.get_num_threads()
    many = torch.randn(50, 16, 144, generator=generator())
    results = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(orthogonal.native(many.clone()))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)
    with pytest.raises(RuntimeError, match="cannot take 5 rows of 4"):
        torch.ops.wnfused_native.orthonormal_rows_(torch.ones(1, 5, 4))
    with pytest.raises(RuntimeError, match="expects float32"):
        torch.ops.wnfused_native.orthonormal_rows_(torch.ones(1, 2, 4).double())


@pytest.mark.parametrize("how", ["native", "torch"])
def test_ill_conditioned_matrices_take_a_second_round_or_the_other_route(how):
    a = torch.randn(40, 6, 30, generator=generator())
    u, s, v = torch.linalg.svd(a.double(), full_matrices=False)
    # Conditions of 1 to 1e7: one round is enough, two are, float32's Cholesky fails.
    for i, condition in enumerate(torch.logspace(0, 7, 40, dtype=torch.float64)):
        s[i] = torch.logspace(0, -math.log10(condition), 6, dtype=torch.float64)
    a = (u * s.unsqueeze(-2) @ v).float()
    _, info = torch.linalg.cholesky_ex(a @ a.mT)
    assert info.any(), "the test must reach the breakdown"
    if how == "native" and wnfused.backend_status()["native"] is not None:
        pytest.skip("needs the C++ library")
    q = (orthogonal.native if how == "native" else cholesky_qr2)(a.clone()).double()
    assert (q @ q.mT - torch.eye(6)).abs().max() < 64 * 2.0**-24


@pytest.mark.skipif(wnfused.backend_status()["native"] is not None, reason="needs the C++ library")
def test_the_kernel_takes_as_many_rows_as_the_route_expects():
    assert native.bounds().orthonormal_rows == native.ORTHONORMAL_ROWS


def test_the_route_is_chosen_by_shape():
    f32, f64 = torch.float32, torch.float64
    assert route(3000, 64, 576, f32, "cpu") is Route.CHOLESKY
    assert route(3000, 64, 576, f32, "cuda") is Route.CHOLESKY
    assert route(1, 64, 576, f32, "cpu") is Route.HOUSEHOLDER, "a batch of one gains nothing"
    assert route(3000, 64, 64, f32, "cpu") is Route.HOUSEHOLDER, "square Gaussians have no useful condition"
    assert route(3000, 64, 64, f32, "cuda") is Route.CHOLESKY_WIDE
    assert route(3000, 64, 64, f64, "cuda") is Route.CHOLESKY
    assert route(3000, 2, 4, f32, "cpu") is Route.HOUSEHOLDER, "small ones have heavy tails"
    assert route(4, 4096, 4096, f32, "cuda") is Route.HOUSEHOLDER
    assert route(1, 64, 576, f32, "cpu", native=True) is Route.NATIVE
    assert route(3000, 64, 576, f32, "cuda", native=True) is Route.CHOLESKY
    assert route(3000, 64, 576, f64, "cpu", native=True) is Route.CHOLESKY
    assert route(9, 300, 900, f32, "cpu", native=True) is Route.CHOLESKY, "too many rows for the kernel"
    assert route(9, 200, 4000, f32, "cpu", native=True) is Route.CHOLESKY, "too large for a core's cache"
    assert route(9, 64, 64, f32, "cpu", native=True) is Route.HOUSEHOLDER


@pytest.mark.parametrize("allowed", ["tf32", "ieee"])
def test_tf32_products_have_no_part_in_it(monkeypatch, allowed):
    """On a GPU; a float64 product is one, and torch's flag is the user's at every moment."""
    flags = torch.backends.cuda.matmul
    before, seen = flags.fp32_precision, []
    monkeypatch.setattr(orthogonal, "route", lambda *arguments: route(*arguments[:4], "cuda"))
    inner = orthogonal._cholesky_qr2
    monkeypatch.setattr(orthogonal, "_cholesky_qr2", lambda a: seen.append((a.dtype, flags.fp32_precision)) or inner(a))
    try:
        flags.fp32_precision = allowed
        q = orthogonal.orthonormal_rows(torch.randn(5, 16, 144, generator=generator()))
        assert seen == [(torch.float64 if allowed == "tf32" else torch.float32, allowed)]
        assert flags.fp32_precision == allowed
    finally:
        flags.fp32_precision = before
    assert q.dtype == torch.float32
    assert (q @ q.mT - torch.eye(16)).abs().max() < 64 * 2.0**-24


def test_autocast_has_no_part_in_it():
    expected = cholesky_qr2(torch.randn(5, 16, 144, generator=generator()))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(cholesky_qr2(torch.randn(5, 16, 144, generator=generator())), expected)


def test_without_the_library_it_says_so_or_raises(monkeypatch, forget_warnings):
    """Only where the kernel would have run: other matrices are LAPACK's by design."""
    monkeypatch.setattr(native, "unavailable", lambda: "it was not built")
    for shape in [(3, 4, 20), (20, 4)]:
        with wnfused.use_backend("native"), pytest.raises(
            wnfused.BackendUnavailableError, match="orthogonal_batched cannot run on backend 'native': it was not built"
        ):  # fmt: skip
            orthogonal_batched(torch.empty(shape))
    with pytest.warns(
        wnfused.BackendWarning, match="orthogonal_batched passes over backend 'native': it was not built"
    ):
        q = orthogonal_batched(torch.empty(5, 4, 20), generator=generator())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = orthogonal_batched(torch.empty(5, 4, 20), generator=generator())
        with wnfused.use_backend("reference"):
            plain = orthogonal_batched(torch.empty(5, 4, 20), generator=generator())
        with wnfused.use_backend("native"):
            orthogonal_batched(torch.empty(3, 4, 4))
            orthogonal_batched(torch.empty(3, 4, 20, dtype=torch.float64))
    assert torch.equal(again, q)
    assert torch.equal(plain, q)


@pytest.mark.parametrize("shape", [(20, 5, 5), (8, 4, 36)])
def test_the_wide_route_too(shape, monkeypatch):
    """What a GPU would do with nearly square matrices, and chunks of any size, give the same matrices."""
    a = torch.randn(shape, generator=generator())
    expected = householder(a.double())
    monkeypatch.setattr(orthogonal, "route", lambda *arguments: Route.CHOLESKY_WIDE)
    torch.testing.assert_close(orthogonal.orthonormal_rows(a), expected.float(), rtol=0, atol=1e-5)


def test_fills_what_it_was_given():
    holder = torch.zeros(4, 3, 6).mT
    assert orthogonal_batched(holder) is holder
    torch.testing.assert_close(holder.mT @ holder, torch.eye(3).expand(4, 3, 3), rtol=0, atol=1e-5)
    stack = torch.zeros(3, 2, 4, 5)[:, 1]
    assert orthogonal_batched(stack) is stack
    assert (stack.norm(dim=-1) - 1).abs().max() < 1e-5


def test_seeds_and_layouts():
    def drawn(layout=lambda t: t, seed=3):
        return orthogonal_batched(layout(torch.empty(40, 4, 30)), generator=generator(seed))

    first = drawn()
    assert torch.equal(first, drawn())
    assert torch.equal(first, drawn(lambda t: t.mT.contiguous().mT))
    assert not torch.equal(first, drawn(seed=4))
    meta = torch.empty(2, 3, 4, device="meta")
    assert orthogonal_batched(meta) is meta


def test_layers_of_any_memory_format_are_filled():
    """Rows along another dim, channels_last kernels, and a stage's stacked convolutions."""
    stage = wnfused.WNResidualStage(16, 16, 2)
    for v in (stage.weight_v.flatten(3), stage.weight_v[:, 1].flatten(2)):
        gram = v @ v.mT
        torch.testing.assert_close(gram, torch.eye(16).expand_as(gram), rtol=0, atol=1e-5)
    last = wnfused.WNConv2d(4, 6, 3).to(memory_format=torch.channels_last)
    across = wnfused.WNConv2d(4, 6, 3, dim=1)
    for layer in (last, across):
        with torch.no_grad():
            layer.weight_v.fill_(float("nan"))
        layer.reset_parameters()
        rows = layer.weight_v.movedim(layer.dim, 0).flatten(1)
        torch.testing.assert_close(rows @ rows.T, torch.eye(len(rows)), rtol=0, atol=1e-5)
    assert last.weight_v.is_contiguous(memory_format=torch.channels_last)
    assert not last.weight_v.is_contiguous()


def kolmogorov_smirnov(sample, cdf):
    """The statistic over its critical value at one in a million, ``sqrt(ln(2e6) / (2 n))``: below 1 passes."""
    ordered = sample.flatten().double().sort().values
    n = len(ordered)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    theory = cdf(ordered)
    distance = torch.maximum((theory - steps[:-1]).abs().max(), (steps[1:] - theory).abs().max())
    return (distance / math.sqrt(math.log(2e6) / (2 * n))).item()


def entry_cdf(n):
    """Of an entry of a unit vector in R^n, density proportional to ``(1 - x^2)^((n - 3) / 2)``, for odd n."""
    power = (n - 3) // 2
    terms = [(math.comb(power, k) * (-1) ** k / (2 * k + 1), 2 * k + 1) for k in range(power + 1)]
    whole = 2 * sum(c for c, _ in terms)
    return lambda x: 0.5 + sum(c * x**p for c, p in terms) / whole


@pytest.mark.parametrize(("rows", "columns", "count"), [(3, 3, 20_000), (3, 11, 20_000), (9, 2, 5_000), (2, 13, 5_000)])
def test_entries_are_haar(rows, columns, count):
    """Each entry alone, square and rectangular, by either route."""
    q = orthogonal_batched(torch.empty(count, rows, columns), generator=generator())
    cdf = entry_cdf(max(rows, columns))
    for i in (0, rows - 1):
        for j in (0, columns - 1):
            assert kolmogorov_smirnov(q[:, i, j], cdf) < 1


def test_moments_are_haar():
    """``E q_ij q_kl = delta_ik delta_jl / n`` and three fourth moments (Weingarten)."""
    count, n = 40_000, 12
    q = orthogonal_batched(torch.empty(count, 3, n, dtype=torch.float64), generator=generator())
    flat = q.flatten(1)
    second = flat.T @ flat / count
    assert (second - torch.eye(3 * n) / n).abs().max() < 6 * math.sqrt(3 / count) / n
    a, b, c = q[:, 0, 0].square(), q[:, 0, 1].square(), q[:, 1, 1].square()
    for product, expected in (
        (a * a, 3 / (n * (n + 2))),
        (a * b, 1 / (n * (n + 2))),
        (a * c, (n + 1) / (n * (n - 1) * (n + 2))),
    ):
        assert abs(product.mean() - expected) < 5 * product.std() / math.sqrt(count)


def test_determinants_and_angles_are_haar():
    """Of O(3): both determinants alike; the rotation's angle has density ``(1 - cos t) / pi`` on [0, pi]."""
    count = 20_000
    q = orthogonal_batched(torch.empty(count, 3, 3, dtype=torch.float64), generator=generator())
    sign = torch.linalg.det(q).sign()
    assert abs((sign > 0).double().mean() - 0.5) < 5 * 0.5 / math.sqrt(count)
    trace = (q * sign[:, None, None]).diagonal(dim1=-2, dim2=-1).sum(-1)
    angle = torch.arccos(((trace - 1) / 2).clamp(-1, 1))
    assert kolmogorov_smirnov(angle, lambda t: (t - t.sin()) / math.pi) < 1
    eigenvalues = torch.linalg.eigvals(q[:2000])
    assert (eigenvalues.abs() - 1).abs().max() < 1e-6


def test_layers_of_one_shape_are_drawn_together(monkeypatch):
    """A network is initialised at once: two shapes of convolutions, two calls; a stage is one."""
    calls = []

    def counted(tensor, **options):
        if not tensor.is_meta:
            calls.append(tuple(tensor.shape))
        return orthogonal_batched(tensor, **options)

    model = wnfused.models.cnn(20, 8)
    monkeypatch.setattr("wnfused.init.units.orthogonal_batched", counted)
    monkeypatch.setattr("wnfused.nn._rule.orthogonal_batched", counted)
    wnfused.init.initialize(model)
    assert sorted(calls) == [(1, 8, 27), (19, 8, 72)]
    calls.clear()
    wnfused.models.wrn(40, stack=False)
    # The stem, a stack for each stage, and two transition blocks of three layers.
    assert len(calls) == 1 + 3 + 6


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: orthogonal_batched(torch.empty(3)), ValueError, r"tensor: shape \[3\] must have at least two dims"),
        (lambda: orthogonal_batched(torch.empty(3, 3).long()), TypeError, "tensor: expected a floating-point"),
        (
            lambda: orthogonal_batched(torch.eye(3).to_sparse()),
            TypeError,
            "tensor: expected a dense tensor, got layout torch.sp",
        ),
        (
            lambda: orthogonal_batched(torch.ones(3, 3).expand(4, 3, 3)),
            ValueError,
            r"tensor: of strides \[0, 3, 1\], its entries share memory; use tensor\.contiguous\(\)",
        ),
        (
            lambda: orthogonal_batched(torch.empty(10).unfold(0, 4, 1)),
            ValueError,
            r"tensor: of strides \[1, 1\], its entries share memory",
        ),
        (lambda: orthogonal_batched([1.0]), TypeError, "tensor: expected a Tensor, got list"),
        (lambda: orthogonal_batched(torch.empty(3, 3), gain=float("inf")), ValueError, "gain: inf must be finite"),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_views_without_shared_entries_are_filled():
    whole = torch.zeros(4, 6, 10)
    for view in (whole[:, ::2, 1:8:3].transpose(0, 2), whole[2:3].expand(1, 6, 10), whole[:0].expand(0, 6, 10)):
        assert orthogonal_batched(view) is view
    torch.testing.assert_close(whole[2] @ whole[2].T, torch.eye(6))


class OnAGPU(torch.Generator):
    device = torch.device("cuda:0")


@pytest.mark.parametrize(
    "draw",
    [
        lambda source: orthogonal_batched(torch.ones(3, 3), generator=source),
        lambda source: wnfused.init.initialize(MODEL, generator=source),
        lambda source: wnfused.init.reset_layer_(MODEL[0], kind="he", generator=source),
        lambda source: wnfused.init.reset_stage_(MODEL[1], kind="he", generator=source),
        lambda source: wnfused.regularize.srip(torch.ones(3, 3), generator=source),
    ],
)
def test_a_generator_of_another_device_is_named(draw):
    before = {name: value.clone() for name, value in MODEL.state_dict().items()}
    with pytest.raises(ValueError, match=r"generator: draws on cuda:0, but .* on cpu; use torch.Generator\('cpu'\)"):
        draw(OnAGPU())
    assert all(torch.equal(value, before[name]) for name, value in MODEL.state_dict().items())


def test_meta_to_empty_init_is_the_same_as_init():
    def drawn(model):
        wnfused.init.initialize(model, generator=generator(5))
        return model.state_dict()

    with torch.device("meta"):
        shell = wnfused.models.wrn(16)
    assert shell.to_empty(device="cpu") is shell
    direct = drawn(wnfused.models.wrn(16))
    assert all(torch.equal(value, direct[name]) for name, value in drawn(shell).items())
