"""The one place that chooses a backend, and what it says when it cannot."""

import hashlib
import json
import os
import subprocess
import sys
import warnings
from importlib.machinery import EXTENSION_SUFFIXES

import pytest
import torch

import wnfused
from wnfused import dispatch
from wnfused.backends import library
from wnfused.functional import linear


def arguments():
    return torch.randn(2, 3), torch.randn(4, 3), torch.ones(4)


def test_status_names_every_backend():
    status = wnfused.backend_status()
    assert set(status) == {"native", "triton", "reference"}
    assert status["reference"] is None
    assert all(reason is None or isinstance(reason, str) for reason in status.values())


def test_use_backend_nests_and_ends():
    assert dispatch.requested() is None
    with wnfused.use_backend("reference"):
        assert dispatch.requested() == "reference"
        with wnfused.use_backend("native"):
            assert dispatch.requested() == "native"
        assert dispatch.requested() == "reference"
    assert dispatch.requested() is None


def test_none_is_the_automatic_choice_whatever_the_environment_says(monkeypatch):
    monkeypatch.setattr(dispatch, "_from_environment", lambda: "reference")
    assert dispatch.requested() == "reference"
    with wnfused.use_backend(None):
        assert dispatch.requested() is None
        y = linear(*(t.requires_grad_() for t in arguments()))
    reference = dispatch.backend_module("reference")
    with monkeypatch.context() as patch:
        patch.setattr(reference, "linear_backward", None)
        if dispatch.backend_module("native").unavailable() is None:
            y.sum().backward()


def test_the_choice_is_the_threads_own_and_goes_with_the_graph():
    from concurrent.futures import ThreadPoolExecutor

    with wnfused.use_backend("reference"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(dispatch.requested).result() is None
        y = linear(*(t.requires_grad_() for t in arguments()))
    assert y.grad_fn is not None
    assert y.grad_fn.backend == "reference"


def test_unknown_backend():
    message = "use_backend: unknown backend 'cuda'; one of 'native', 'triton'"
    with pytest.raises(ValueError, match=message), wnfused.use_backend("cuda"):
        pass


def test_an_explicit_choice_that_cannot_be_met_raises():
    with wnfused.use_backend("triton"), pytest.raises(wnfused.BackendUnavailableError, match=r"linear.*'triton'"):
        linear(*arguments())


def test_an_automatic_choice_falls_back_with_one_warning(monkeypatch, forget_warnings):
    native = dispatch.backend_module("native")
    monkeypatch.setattr(native, "unavailable", lambda: "it was not built")
    x, v, g = arguments()
    with pytest.warns(wnfused.BackendWarning, match="linear passes over backend 'native': it was not built") as given:
        y = linear(x, v, g)
    assert given[0].filename == __file__, "the caller's own line"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(linear(x, v, g), y)
    with wnfused.use_backend("native"), pytest.raises(wnfused.BackendUnavailableError, match="it was not built"):
        linear(x, v, g)
    assert wnfused.backend_status()["native"] == "it was not built"


def test_an_exception_in_a_kernel_is_not_swallowed(monkeypatch):
    native = dispatch.backend_module("native")
    if native.unavailable() is not None:
        pytest.skip(native.unavailable())

    def broken(*_):
        raise RuntimeError("planted")

    monkeypatch.setattr(native, "linear", broken)
    with pytest.raises(RuntimeError, match="planted"):
        linear(*(t.half() for t in arguments()))  # float32 goes to the compiled kernel itself, float64 to torch's


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env={**os.environ, **environment}
    )


def test_the_environment_names_a_backend():
    code = "from wnfused import dispatch; print(dispatch.requested())"
    assert run(code, WNFUSED_BACKEND="reference").stdout.strip() == "reference"
    failed = run(code, WNFUSED_BACKEND="nativ")
    assert failed.returncode != 0
    assert "WNFUSED_BACKEND: unknown backend 'nativ'; one of 'native', 'triton', 'reference' is right" in failed.stderr


def test_import_needs_torch_alone_and_is_quick():
    code = (
        "import sys, time, torch; start = time.perf_counter(); before = set(sys.modules); import wnfused\n"
        "print(time.perf_counter() - start)\n"
        "extras = {'lightning', 'sklearn', 'matplotlib', 'rich', 'pandas', 'triton'}\n"
        "print(sorted(extras & (set(sys.modules) - before)))"
    )
    seconds, extras = run(code).stdout.splitlines()
    assert extras == "[]"
    assert float(seconds) < 5  # about 0.3 on an idle machine; this guards against importing something large


def test_a_library_that_does_not_load_leaves_a_working_package(tmp_path):
    """A copy of the package with a broken library: import works, the reason is told, the layers run."""
    import shutil
    from pathlib import Path

    package = Path(wnfused.__file__).parent
    shutil.copytree(package, tmp_path / "wnfused", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (tmp_path / "wnfused" / "_cpu.abi3.so").write_bytes(b"not a library")
    code = (
        "import warnings; warnings.simplefilter('always')\n"
        "import torch, wnfused\n"
        "assert 'does not load' in wnfused.backend_status()['native'], wnfused.backend_status()\n"
        "print(wnfused.__file__, wnfused.WNLinear(2, 2)(torch.ones(1, 2)).shape)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert str(tmp_path) in result.stdout
    assert "linear passes over backend 'native'" in result.stderr


def test_a_checkout_imported_in_place_of_the_installed_package_says_so(tmp_path, monkeypatch):
    """As after `pip install .` without -e, by a Python that was started in the checkout."""
    sources, installed = tmp_path / "checkout" / "wnfused", tmp_path / "site-packages" / "wnfused"
    for package in (sources, installed):
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        metadata = package.parent / "wnfused-0.1.0.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text("Metadata-Version: 2.1\nName: wnfused\nVersion: 0.1.0\n")
    monkeypatch.setattr(library, "_PACKAGE", sources)
    monkeypatch.setattr(sys, "path", [str(sources.parent), str(installed.parent)])
    says = library.opened("cpu")
    assert f"{sources} holds the sources alone, and was imported in place of {installed}; start Python in" in says
    monkeypatch.setattr(sys, "path", [str(sources.parent)])
    assert "the C++ library was not built; `pip install" in library.opened("cpu")


def test_a_library_of_other_sources_is_not_opened(tmp_path, monkeypatch):
    """With another signature a call would crash. A wheel has no sources to differ from."""
    package = tmp_path / "wnfused"
    package.mkdir()
    (package / "_cpu.abi3.so").write_bytes(b"not a library")
    (package / "_build.json").write_text('{"not_built": {}, "declarations": {"csrc/ops.h": "of older sources"}}')
    monkeypatch.setattr(library, "_PACKAGE", package)
    assert "does not load" in library.opened("cpu")
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "ops.h").write_text("// newer")
    assert "was built from another csrc/ops.h; `make install`" in library.opened("cpu")
    (package / "_build.json").unlink()
    assert "has no record of its build; `make install`" in library.opened("cpu")


def test_a_library_of_other_schemas_is_not_opened(tmp_path, monkeypatch):
    """Not all of them have a declaration in csrc/ops.h."""
    backends = tmp_path / "wnfused" / "backends"
    backends.mkdir(parents=True)
    (backends / "native_schemas.py").write_text("SCHEMAS = ()")
    (backends.parent / "_cpu.abi3.so").write_bytes(b"not a library")
    older = {"declarations": {"wnfused/backends/native_schemas.py": "older"}}
    (backends.parent / "_build.json").write_text(json.dumps(older))
    monkeypatch.setattr(library, "_PACKAGE", backends.parent)
    assert "was built from another wnfused/backends/native_schemas.py; `make install`" in library.opened("cpu")


def test_kernels_for_cuda_of_other_sources_are_not_opened(tmp_path, monkeypatch):
    """Their signatures stand in their own files."""
    package, csrc = tmp_path / "wnfused", tmp_path / "csrc"
    package.mkdir()
    (csrc / "cuda").mkdir(parents=True)
    (csrc / "ops.h").write_text("// the same")
    (csrc / "cuda" / "residual_stage.cu").write_text("// newer")
    (package / "_cuda.abi3.so").write_bytes(b"not a library")
    same = hashlib.sha256(b"// the same").hexdigest()
    (package / "_build.json").write_text(
        json.dumps({"declarations": {"csrc/ops.h": same, "csrc/cuda/residual_stage.cu": "old"}})
    )
    monkeypatch.setattr(library, "_PACKAGE", package)
    assert "was built from another csrc/cuda/residual_stage.cu; `make install`" in library.opened("cuda")


@pytest.mark.parametrize(
    ("name", "kind", "suffix"),
    [("autograd", "C++ autograd", ".abi3.so"), ("python", "C++ entry", EXTENSION_SUFFIXES[0])],
)
def test_a_library_for_another_torch_is_not_opened(tmp_path, monkeypatch, name, kind, suffix):
    """torch's C++ interface changes from version to version; the record of an older build knows none."""
    package = tmp_path / "wnfused"
    package.mkdir()
    monkeypatch.setattr(library, "_PACKAGE", package)
    (package / f"_{name}.cpython-39-of-another-python.so").write_bytes(b"a library")
    assert f"the {kind} library was not built; `pip install" in library.opened(name)
    (package / f"_{name}{suffix}").write_bytes(b"not a library")
    assert f"was built for torch None, this is {torch.__version__}" in library.opened(name)
    (package / "_build.json").write_text('{"declarations": "of an older build", "torch": "2.12.0"}')
    assert f"was built for torch 2.12.0, this is {torch.__version__}" in library.opened(name)
    (package / "_build.json").write_text(json.dumps({"torch": torch.__version__}))
    monkeypatch.setitem(sys.modules, f"wnfused._{name}", None)
    assert "does not load" in library.opened(name)
    (tmp_path / "csrc" / name).mkdir(parents=True)
    (tmp_path / "csrc" / name / "layers.cpp").write_text("// newer")
    assert "has no record of its build; `make install`" in library.opened(name)
