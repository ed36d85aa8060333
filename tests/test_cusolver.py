"""cuSOLVER's decompositions on a machine without a GPU: when they are chosen, what is said where they are not there."""

import importlib.util
import os
import shutil
import subprocess
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import wnfused
from wnfused.backends import cusolver, native, native_cuda
from wnfused.linalg import eigen, orthogonal, singular
from wnfused.linalg.orthogonal import Route, householder, route

DEVICE = torch.device("cuda:0")
REASON = "libcusolver.so.12 has no function"


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2), dtype=dtype)


def test_the_route_of_orthonormal_rows():
    """cuSOLVER takes from Householder, on a GPU alone, and nothing from the batched routes."""
    f32, f64 = torch.float32, torch.float64
    assert route(4, 4096, 4096, f32, "cuda", native=True) is Route.CUSOLVER
    assert route(1, 64, 576, f64, "cuda", native=True) is Route.CUSOLVER, "few matrices"
    assert route(4, 4096, 4096, f32, "cuda") is Route.HOUSEHOLDER
    assert route(4, 4096, 4096, f32, "cpu", native=True) is Route.HOUSEHOLDER
    assert route(3000, 64, 64, f32, "cuda", native=True) is Route.CHOLESKY_WIDE
    assert route(3000, 64, 64, f64, "cuda", native=True) is Route.CHOLESKY
    assert route(3, 0, 4, f32, "cuda", native=True) is Route.HOUSEHOLDER, "cuSOLVER takes no empty matrices"


def test_the_route_of_eigenvectors():
    assert eigen.batched_eigh_pays(2, 33, "cuda")
    assert not eigen.batched_eigh_pays(2, 32, "cuda"), "torch has them batched"
    assert not eigen.batched_eigh_pays(1, 500, "cuda")
    assert not eigen.batched_eigh_pays(2, 33, "cpu")


def test_the_route_of_singular_vectors():
    assert singular.batched_svd_pays(2, 32, 31, "cuda")
    assert singular.batched_svd_pays(2, 1, 32, "cuda")
    assert not singular.batched_svd_pays(2, 33, 32, "cuda"), "the library takes no more than 32"
    assert not singular.batched_svd_pays(2, 16, 33, "cuda")
    assert not singular.batched_svd_pays(2, 16, 16, "cuda"), "torch has square ones batched"
    assert not singular.batched_svd_pays(1, 16, 8, "cuda")
    assert not singular.batched_svd_pays(0, 16, 8, "cuda")
    assert not singular.batched_svd_pays(2, 0, 8, "cuda"), "cuSOLVER takes no empty matrices"
    assert not singular.batched_svd_pays(2, 16, 8, "cpu")


@pytest.fixture
def on_a_gpu(monkeypatch):
    """The choices fall as on a GPU; the reason of cuSOLVER's absence is whatever the test sets."""
    large = 4, 4096, 4096, torch.float32, "cuda"
    monkeypatch.setattr(orthogonal, "route", lambda *arguments: route(*large, *arguments[len(large) :]))
    monkeypatch.setattr(eigen, "batched_eigh_pays", lambda *arguments: True)
    monkeypatch.setattr(singular, "batched_svd_pays", lambda *arguments: True)
    return lambda reason: monkeypatch.setattr(cusolver, "refusal", lambda function, device: reason)


def calls():
    """Of each function that may call cuSOLVER: its name in messages, itself, and what torch.linalg gives."""
    a = randn(2, 5, 7, dtype=torch.float64)
    gram = a @ a.mT
    return [
        ("orthogonal_batched", lambda: orthogonal.orthonormal_rows(a), householder(a)),
        ("symmetric_eigh", lambda: eigen.symmetric_eigh(gram)[0], torch.linalg.eigh(gram)[0]),
        ("economy_svd", lambda: singular.economy_svd(a)[1], torch.linalg.svd(a, full_matrices=False)[1]),
    ]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_missing_library_is_announced_once(which, on_a_gpu, forget_warnings):
    on_a_gpu(REASON)
    name, call, expected = calls()[which]
    with pytest.warns(wnfused.BackendWarning, match=f"{name} passes over backend 'native': {REASON}"):
        assert torch.equal(call(), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(call(), expected)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_missing_library_asked_for_by_name_is_an_error(which, on_a_gpu):
    on_a_gpu(REASON)
    name, call, _ = calls()[which]
    with (
        wnfused.use_backend("native"),
        pytest.raises(wnfused.BackendUnavailableError, match=f"{name} cannot run on backend 'native': {REASON}"),
    ):
        call()


def test_another_backend_by_name_never_asks_for_it(on_a_gpu, monkeypatch):
    """``use_backend("reference")`` is torch.linalg, without a word."""
    monkeypatch.setattr(cusolver, "refusal", lambda *arguments: pytest.fail("asked"))
    with wnfused.use_backend("reference"):
        for _, call, expected in calls():
            assert torch.equal(call(), expected)


def test_where_it_is_there_it_is_called(on_a_gpu, monkeypatch):
    on_a_gpu(None)
    seen = []
    monkeypatch.setattr(cusolver, "orthonormal_rows", lambda a: seen.append(a) or a)
    monkeypatch.setattr(cusolver, "eigh", lambda a: seen.append(a) or (a, a))
    monkeypatch.setattr(cusolver, "svd", lambda a: seen.append(a) or (a, a, a))
    for _, call, _ in calls():
        call()
    assert [tuple(a.shape) for a in seen] == [(2, 5, 7), (2, 5, 5), (2, 5, 7)]


def test_refusals_name_the_reason(monkeypatch):
    def refusal(unavailable=None, missing="", capability=(9, 0)):
        monkeypatch.setattr(native_cuda, "unavailable", lambda: unavailable)
        monkeypatch.setattr(cusolver, "_missing", lambda function, index: missing or None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        monkeypatch.setattr(native_cuda, "_build", lambda: (100, 13000, 13000))
        native_cuda.refused_device.cache_clear()
        return cusolver.refusal("qr", DEVICE)

    try:
        assert refusal() is None
        assert refusal(unavailable="torch is a CPU build") == "torch is a CPU build"
        assert refusal(missing=REASON) == REASON
        assert "compute capability 8.0, cuda:0 has 7.5" in refusal(capability=(7, 5))
    finally:
        native_cuda.refused_device.cache_clear()


def test_a_library_that_is_missing_is_looked_for_again(monkeypatch):
    """torch may load cuSOLVER at any time; each of the three functions has it loaded, asked before or not."""
    loads, answers = [], [REASON, REASON, ""]
    library = torch.library.Library("wnfused_native", "IMPL")
    monkeypatch.setattr(cusolver, "_there", set())
    monkeypatch.setattr(torch.linalg, "qr", lambda a: loads.append(len(loads)))
    monkeypatch.setattr(torch, "ones", lambda *size, device: None)
    try:
        library.impl("cusolver_missing", lambda function: answers.pop(0), "CompositeExplicitAutograd")
        assert cusolver._missing("svd", 0) == REASON
        elsewhere = SimpleNamespace(is_cuda=True, device=DEVICE)
        with pytest.raises(RuntimeError, match=REASON):
            cusolver.svd(elsewhere)
        assert cusolver._missing("svd", 0) is None
        assert cusolver._missing("svd", 0) is None
        assert loads == [0, 1, 2]
        answers += [REASON, REASON]
        for function in (cusolver.eigh, cusolver.orthonormal_rows):
            with pytest.raises(RuntimeError, match=REASON):
                function(elsewhere)
    finally:
        library._destroy()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_the_reason_is_that():
    assert cusolver.refusal("eigh", DEVICE) == native_cuda.unavailable() is not None


STUBBORN = 41.0
"""The first entry of a matrix that does not converge."""


@pytest.fixture
def columns():
    """The ops as cuSOLVER would run them, by LAPACK: column-major matrices, vectors as columns, and a status each."""

    def statuses(a):
        assert a.isfinite().all(), "what the library makes of these is not known"
        return (a[:, 0, 0] == STUBBORN).int()

    def run_eigh(a):
        info = statuses(a)
        values, vectors = torch.linalg.eigh(a)
        a.copy_(vectors.mT)
        return values, info

    def run_svd(a):
        info = statuses(a)
        left, values, right = torch.linalg.svd(a.mT)  # [r, c] in rows is [c, r] in columns
        a.fill_(float("nan"))
        return right.contiguous(), values, left.mT.contiguous(), info

    library = torch.library.Library("wnfused_native", "IMPL")
    library.impl("cuda_eigh_", run_eigh, "CPU")
    library.impl("cuda_svd_", run_svd, "CPU")
    yield
    library._destroy()


@pytest.mark.parametrize("shape", [(6, 6), (3, 6, 6), (2, 3, 5, 5), (2, 1, 1)])
def test_eigenvectors_are_columns(columns, shape):
    a = randn(*shape, dtype=torch.float64)
    a = a + a.mT
    before = a.clone()
    values, vectors = cusolver.eigh(a)
    assert torch.equal(a, before), "only a copy is overwritten"
    torch.testing.assert_close(a @ vectors, vectors * values.unsqueeze(-2))
    torch.testing.assert_close(vectors.mT @ vectors, torch.eye(shape[-1], dtype=a.dtype).expand(shape))
    assert (values.diff(dim=-1) >= 0).all()


@pytest.mark.parametrize("shape", [(6, 4), (3, 4, 6), (2, 3, 5, 2), (2, 1, 7), (0, 3, 2)])
def test_singular_vectors_are_the_first_of_the_full_factors(columns, shape):
    a = randn(*shape, dtype=torch.float64)
    before = a.clone()
    u, s, vt = cusolver.svd(a)
    assert torch.equal(a, before), "only a copy is overwritten"
    expected = torch.linalg.svd(a, full_matrices=False)
    assert [t.shape for t in (u, s, vt)] == [t.shape for t in expected]
    torch.testing.assert_close(u * s.unsqueeze(-2) @ vt, a)
    torch.testing.assert_close(s, expected.S)
    for orthonormal in (u.mT @ u, vt @ vt.mT):
        torch.testing.assert_close(orthonormal, torch.eye(s.shape[-1], dtype=a.dtype).expand_as(orthonormal))


def test_no_convergence_is_an_error(columns):
    a = torch.eye(4).repeat(4, 1, 1)
    a[2, 0, 0] = STUBBORN
    with pytest.raises(torch.linalg.LinAlgError, match="matrix 2: cuSOLVER's eigenvalues of it did not converge"):
        cusolver.eigh(a)


@pytest.mark.parametrize("shape", [(5, 3), (3, 5)])
def test_matrices_that_jacobis_rotations_leave_are_done_by_iterations(columns, monkeypatch, shape):
    asked = []
    iterations = cusolver._svd_by_iterations
    monkeypatch.setattr(cusolver, "_svd_by_iterations", lambda a: asked.append(len(a)) or iterations(a))
    a = randn(2, 4, *shape, dtype=torch.float64)
    cusolver.svd(a)
    assert asked == []
    a[0, 2, 0, 0] = a[1, 3, 0, 0] = STUBBORN
    u, s, vt = cusolver.svd(a)
    assert asked == [2]
    torch.testing.assert_close(u * s.unsqueeze(-2) @ vt, a)
    torch.testing.assert_close(s, torch.linalg.svdvals(a))


@pytest.mark.parametrize("function", ["orthonormal_rows", "eigh", "svd"])
def test_running_out_of_memory_is_torchs_own_error(function, monkeypatch):
    def raises(*_):
        raise RuntimeError("cusolverDnCreate failed: out of memory")

    ops = SimpleNamespace(orthonormal_rows_=raises, cuda_eigh_=raises, cuda_svd_=raises)
    monkeypatch.setattr(torch.ops, "wnfused_native", ops)
    with pytest.raises(torch.OutOfMemoryError, match="cusolverDnCreate failed"):
        getattr(cusolver, function)(torch.eye(4).repeat(2, 1, 1))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("function", ["eigh", "svd"])
def test_matrices_that_are_not_finite_are_an_error(columns, function, value):
    """Said before any other, and without asking the library."""
    a = torch.eye(4).repeat(2, 3, 1, 1)
    a[0, 1, 2, 2] = value
    a[1, 2, 0, 0] = STUBBORN
    with pytest.raises(torch.linalg.LinAlgError, match="matrix 1: it is not finite"):
        getattr(cusolver, function)(a)


@pytest.mark.skipif(native.unavailable() is not None, reason="needs the C++ library")
def test_rows_are_made_orthonormal_through_the_op(monkeypatch):
    """The op of the CPU's library has the same schema: strides that are not contiguous, and its refusal."""
    a = randn(7, 20, 3).mT
    assert not a.is_contiguous()
    expected = householder(a.double())
    torch.testing.assert_close(cusolver.orthonormal_rows(a).double(), expected, rtol=0, atol=1e-5)
    a = torch.zeros(2, 3, 20)
    with pytest.raises(RuntimeError, match=r"refused a QR decomposition of \[2, 3, 20\]"):
        cusolver.orthonormal_rows(a)


PROTOTYPES = Path(__file__).with_name("cusolver_prototypes.cpp")


def compiler_and_headers():
    """g++ with the folders of this repository, torch and CUDA; cuSOLVER's too where its wheel is installed."""
    from torch.utils.cpp_extension import include_paths

    compiler, nvcc = shutil.which("g++"), shutil.which("nvcc", path=f"/usr/local/cuda/bin:{os.environ['PATH']}")
    if compiler is None or nvcc is None:
        pytest.skip("needs g++ and a CUDA toolkit's headers")
    folders = [PROTOTYPES.parents[1] / "csrc", *include_paths(), Path(nvcc).resolve().parents[1] / "include"]
    folders.append(Path("/usr/local/cuda/include"))
    wheels = importlib.util.find_spec("nvidia")
    for place in wheels.submodule_search_locations or () if wheels else ():
        folders += sorted({header.parent for header in Path(place).glob("*/include/cu*.h")})
    return [compiler, "-std=c++17", "-fsyntax-only", "-DTORCH_TARGET_VERSION=0x020b000000000000",
            "-DTORCH_STABLE_ONLY", "-DUSE_CUDA", *(f"-I{folder}" for folder in folders)]  # fmt: skip


def test_prototypes_are_those_of_the_header(tmp_path):
    """Against the ``cusolverDn.h`` that the compiler finds, in the wheel ``nvidia-cusolver`` or along ``CPATH``."""
    command = compiler_and_headers()
    probe = tmp_path / "probe.cpp"
    probe.write_text("#include <cusolverDn.h>\n")
    if subprocess.run([*command, str(probe)], capture_output=True).returncode != 0:
        pytest.skip("no cusolverDn.h: neither installed nor along CPATH")
    done = subprocess.run([*command, str(PROTOTYPES)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    wrong = tmp_path / "wrong.cpp"
    wrong.write_text(PROTOTYPES.read_text().replace("sgesvdj_batched, cusolverDnS", "sgesvdj_batched, cusolverDnD"))
    done = subprocess.run([*command, f"-I{PROTOTYPES.parent}", str(wrong)], capture_output=True, text=True)
    assert "sgesvdj_batched differs" in done.stderr
