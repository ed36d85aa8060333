"""What the C++ backend says of CUDA tensors where it cannot run them, and the build that compiles its kernels."""

import contextlib
import json
import re
import runpy
import sys
from types import SimpleNamespace

import pytest
import torch

import wnfused
from wnfused import information, reference
from wnfused.backends import library, native, native_cuda


@pytest.fixture
def build(monkeypatch):
    """The functions of setup.py, without running it."""
    import setuptools
    from emulator import ROOT

    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.setattr(sys, "argv", ["setup.py"])
    return runpy.run_path(str(ROOT / "setup.py"))


class Elsewhere:
    """Stands for a tensor on a device that is not here."""

    def __init__(self, device, dtype=torch.float32, shape=(2, 16, 32, 32)):
        self.device, self.dtype, self.shape = torch.device(device), dtype, torch.Size(shape)
        self.is_cuda = self.device.type == "cuda"

    def dim(self):
        return len(self.shape)

    def numel(self):
        return self.shape.numel()


def layer_arguments(x, v_shape, dtype=torch.float32, g_dtype=torch.float32):
    return [x, Elsewhere("cuda:0", dtype, v_shape), Elsewhere("cuda:0", g_dtype, v_shape[:1]), None, None]


LINEAR = layer_arguments(Elsewhere("cuda:0", shape=(4, 8)), (6, 8))
IMAGES = layer_arguments(Elsewhere("cuda:0", torch.bfloat16, (2, 8, 5, 5)), (6, 8, 3, 3))
WINDOW = ([1, 1], [1, 1], [1, 1])


def stage_arguments(x, device="cuda:0", dtype=torch.float32):
    c = x.shape[1]
    return [x, Elsewhere(device, dtype, (3, 2, c, c, 3, 3)), Elsewhere(device, dtype, (3, 2, c)), 1.0, 0, True]


@pytest.fixture
def device(monkeypatch):
    """A library that loaded, on a device of capability 9.0 that runs two shapes."""
    monkeypatch.setattr(native_cuda, "unavailable", lambda: None)
    monkeypatch.setattr(
        native_cuda, "operands_of", lambda op, arguments: [a for a in arguments if isinstance(a, Elsewhere)]
    )
    monkeypatch.setattr(native_cuda, "_shapes", lambda precision, index: ("16x32x32", "32x16x16"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0) if index == 0 else (7, 5))
    monkeypatch.setattr(native_cuda, "_build", lambda: (100, 13000, 13000))
    monkeypatch.setattr(native_cuda, "opened", lambda name: None)
    native_cuda.refused_device.cache_clear()
    native_cuda.layers_unavailable.cache_clear()
    yield
    native_cuda.refused_device.cache_clear()
    native_cuda.layers_unavailable.cache_clear()


@pytest.mark.parametrize("images", [0, 1, 2, 4096])
def test_stage_that_fits_is_taken(device, images):
    """For any batch: one that does not fill the chip takes no longer than one that does."""
    arguments = stage_arguments(Elsewhere("cuda:0", shape=(images, 16, 32, 32)))
    assert native_cuda.refusal("residual_stage", arguments) is None


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        ("linear", LINEAR),
        ("linear", [*LINEAR, -2, "relu", 0.0]),
        ("linear_backward", [LINEAR[0], LINEAR[0], *LINEAR[:3], LINEAR[2], [True] * 4, 0, "none", 0.0]),
        ("conv", [*IMAGES, *WINDOW, False, [0, 0], 1, 0, "none", 0.0]),
        ("conv_backward", [IMAGES[0], IMAGES[0], *IMAGES[:3], IMAGES[2], [True] * 4, *WINDOW, False, [0, 0], 1]),
    ],
)
def test_layers_that_it_has_are_taken(device, op, arguments):
    assert native_cuda.refusal(op, arguments) is None


@pytest.mark.parametrize(
    ("op", "arguments", "words"),
    [
        ("weight_norm_many", [[Elsewhere("cuda:0")], [Elsewhere("cuda:0")]], "no CUDA kernel for weight_norm_many"),
        ("linear", [*LINEAR, 1, "none", 0.0], "normalised along dim 0, not 1"),
        ("linear", [*LINEAR, None, "none", 0.0], "normalised along dim 0, not None"),
        ("linear", layer_arguments(Elsewhere("cuda:0", shape=(0, 8)), (6, 8)), "no empty ones"),
        ("linear", layer_arguments(Elsewhere("cuda:0", torch.float64, (4, 8)), (6, 8)), "kernel for torch.float64"),
        (
            "linear",
            layer_arguments(Elsewhere("cuda:0", shape=(4, 8)), (6, 8), torch.bfloat16, torch.bfloat16),
            "not torch.bfloat16 where x has torch.float32",
        ),
        ("conv", [*IMAGES, *WINDOW, True, [0, 0], 1, 0, "none", 0.0], "no transposed convolution"),
        (
            "conv_backward",
            [IMAGES[0], IMAGES[0], *IMAGES[:3], IMAGES[2], [True] * 4, *WINDOW, True, [0, 0], 1, 0, "none", 0.0],
            "no transposed convolution",
        ),
        ("residual_stage", stage_arguments(Elsewhere("cuda:0"), "cuda:1"), "different devices: cuda:0, cuda:1"),
        ("residual_stage", stage_arguments(Elsewhere("cuda:0"), "cpu"), "different devices: cpu, cuda:0"),
        ("residual_stage", stage_arguments(Elsewhere("cuda:0", torch.float16)), "no CUDA kernel for torch.float16"),
        (
            "residual_stage",
            stage_arguments(Elsewhere("cuda:0"), dtype=torch.float64),
            "no CUDA kernel for torch.float64",
        ),
        ("residual_stage", stage_arguments(Elsewhere("cuda:1"), "cuda:1"), "capability 8.0, cuda:1 has 7.5"),
        (
            "residual_stage",
            stage_arguments(Elsewhere("cuda:0", shape=(2, 24, 5, 7))),
            "no CUDA kernel for 24 channels on 5 x 7 maps; here it has 16x32x32, 32x16x16",
        ),
        (
            "residual_stage",
            stage_arguments(Elsewhere("cuda:0", shape=(2**25, 16, 32, 32))),
            "less than 16777216",
        ),
        ("weight_norm", [Elsewhere("cuda:0", torch.int64)], "no CUDA kernel for torch.int64"),
        (
            "weight_norm",  # dim 0, the default, is left out
            [Elsewhere("cuda:0", shape=(2**31, 1)), Elsewhere("cuda:0", shape=(2**31,))],
            "up to 2147483647 rows, and there are 2147483648",
        ),
        (
            "weight_norm_backward",
            [*[Elsewhere("cuda:0", shape=(1, 2**31))] * 2, *[Elsewhere("cuda:0", shape=(2**31,))] * 2, 1],
            "up to 2147483647 rows, and there are 2147483648",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals_name_the_reason(device, op, arguments, words):
    assert words in native_cuda.refusal(op, arguments)


def test_the_warpgroup_stage_needs_its_architecture(device, monkeypatch):
    capabilities = [(8, 0), (10, 0)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
    with pytest.raises(RuntimeError, match=r"it takes a device of capability 9\.0; here is 8\.0, 10\.0"):
        native_cuda.use_warpgroup_stage(True)
    capabilities.append((9, 0))
    seen = []
    library = torch.library.Library("wnfused_native", "IMPL")
    try:
        library.impl("set_cuda_warpgroup_stage", seen.append, "CompositeExplicitAutograd")
        native_cuda.use_warpgroup_stage(True)
        native_cuda.use_warpgroup_stage(False)
    finally:
        library._destroy()
    assert seen == [True, False]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_warpgroup_stage_needs_the_library():
    with pytest.raises(RuntimeError, match=f"use_warpgroup_stage: {native.cuda_unavailable()}"):
        native_cuda.use_warpgroup_stage(True)


def test_an_older_driver_is_named():
    assert native_cuda._driver_too_old(13000, 13010) is None
    assert native_cuda._driver_too_old(12080, 13000) is None
    assert "built with CUDA 13.0, which the driver, of CUDA 12.8" in native_cuda._driver_too_old(13000, 12080)


@pytest.mark.parametrize(
    ("capability", "newest", "driver", "refused"),
    [
        ((9, 0), 100, 13000, False),  # machine code
        ((10, 3), 100, 13000, False),  # of the same major capability
        ((12, 0), 100, 13000, True),  # PTX, of a newer release than the driver's
        ((12, 0), 100, 13010, False),
        ((12, 0), 100, 13020, False),
        ((10, 0), 90, 12090, True),  # built with a toolkit that does not know it
    ],
)
def test_a_device_newer_than_the_machine_code_takes_a_driver_as_new_as_the_toolkit(
    device, monkeypatch, capability, newest, driver, refused
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(native_cuda, "_build", lambda: (newest, 13010, driver))
    reason = native_cuda.refusal("residual_stage", stage_arguments(Elsewhere("cuda:0")))
    if not refused:
        assert reason is None
        return
    assert f"cuda:0, of compute capability {capability[0]}.{capability[1]}, is newer than its machine code" in reason
    assert "built with CUDA 13.1, which the driver, of CUDA" in reason


@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize(
    "said",
    [
        "CUDA out of memory. Tried to allocate 45.00 GiB.",
        'torch_call_dispatcher("aten::new_empty", "", stack.data()) failed at ops.h, line 70',
    ],
)
def test_running_out_of_memory_is_torchs_own_error(monkeypatch, said, capturing):
    def raises(*_):
        raise RuntimeError(said)

    def synchronize():
        if capturing:
            raise RuntimeError("operation not permitted when stream is capturing")

    ops = SimpleNamespace(
        cuda_residual_stage=raises, cuda_residual_stage_backward=raises, weight_norm=raises, weight_norm_backward=raises
    )  # fmt: skip
    monkeypatch.setattr(torch.ops, "wnfused_native", ops)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    v, g = torch.ones(2, 3), torch.ones(2)
    for call in (
        lambda: native_cuda.residual_stage(*[None] * 7),
        lambda: native_cuda.residual_stage_backward(*[None] * 6, v, *[None] * 3),
        lambda: native_cuda.weight_norm(v, g, 0),
        lambda: native_cuda.weight_norm_backward(v, v, g, g, 0),
    ):
        with pytest.raises(torch.OutOfMemoryError, match=re.escape(said)):
            call()


def test_float32_gains_of_half_precision_directions_are_not_rounded(monkeypatch):
    """By the CPU's op, which has the same signature, on what it is handed."""
    seen = []

    def weight_norm(v, g, dim):
        seen.append((v.dtype, g.dtype))
        return reference.weight_norm(v, g, dim)

    def weight_norm_backward(dw, v, g, norm, dim):
        seen.append((dw.dtype, v.dtype, g.dtype))
        return reference.weight_norm_backward(dw, v, g, norm, dim)

    ops = SimpleNamespace(weight_norm=weight_norm, weight_norm_backward=weight_norm_backward)
    monkeypatch.setattr(torch.ops, "wnfused_native", ops)
    v, g = torch.randn(3, 5).half(), torch.tensor([1e5, 1.0, 2.0])
    w, norm = native_cuda.weight_norm(v, g, 0)
    torch.testing.assert_close(w, reference.weight_norm(v.float(), g, 0)[0].half(), rtol=0, atol=0)
    dv, dg = native_cuda.weight_norm_backward(torch.ones_like(v), v, g, norm, 0)
    assert (w.dtype, norm.dtype, dv.dtype, dg.dtype) == (torch.half, torch.float32, torch.half, torch.float32)
    assert {dtype for dtypes in seen for dtype in dtypes} == {torch.float32}
    native_cuda.weight_norm(v, g.half(), 0)
    assert seen[-1] == (torch.half, torch.half), "nothing is widened without need"


def test_other_errors_of_the_stage_stay_what_they_are(monkeypatch):
    def raises(*_):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.ops, "wnfused_native", SimpleNamespace(cuda_residual_stage=raises))
    with pytest.raises(RuntimeError, match="illegal") as raised:
        native_cuda.residual_stage(*[None] * 7)
    assert raised.type is RuntimeError


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_the_reason_is_told():
    reason = native.cuda_unavailable()
    assert reason in ("torch is a CPU build", "torch finds no CUDA device")
    assert information.collect()["backends"]["cuda"] == reason
    assert f"backend native on CUDA  {reason}\n" in information.as_text(information.collect())
    assert wnfused.backend_status()["native"] == native.unavailable()


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is a CUDA build")
@pytest.mark.parametrize(
    ("wanted", "reason"),
    [("0", "WNFUSED_CUDA=0 left it out"), ("auto", "torch was a CPU build"), (None, "torch was a CPU build")],
)
def test_build_leaves_the_cuda_library_out(build, monkeypatch, wanted, reason):
    monkeypatch.delenv("WNFUSED_CUDA", raising=False)
    if wanted is not None:
        monkeypatch.setenv("WNFUSED_CUDA", wanted)
    assert reason in build["cuda_left_out"]()


@pytest.mark.parametrize(
    ("raised", "forced", "reason"),
    [
        (None, False, None),
        (RuntimeError("a.cu: no\nluck"), False, "the CUDA build failed: a.cu: no"),
        (RuntimeError("a.cu: no\nluck"), True, "the CUDA build failed: a.cu: no"),
        (RuntimeError(), True, "the CUDA build failed: RuntimeError"),
        (KeyboardInterrupt(), True, "the CUDA build did not come to its end"),
    ],
)
def test_however_the_cuda_build_ends_the_other_library_keeps_its_record(
    build, monkeypatch, tmp_path, raised, forced, reason
):
    from setuptools.command.build_ext import build_ext
    from setuptools.dist import Distribution

    file = tmp_path / "lib" / "wnfused" / "_build.json"

    def build_cuda(library, objects):
        record = json.loads(file.read_text())
        assert record["declarations"] == build["declarations"]()
        assert record["not_built"] == {"cuda": "the CUDA build did not come to its end"}
        if raised is not None:
            raise raised

    command = build["build_ext_class"]()
    names = command.run.__globals__
    monkeypatch.setitem(names, "build_cuda", build_cuda)
    monkeypatch.setitem(names, "cuda_left_out", lambda: None)
    monkeypatch.setitem(names, "reasons", {})
    monkeypatch.setattr(build_ext, "run", lambda self: None)
    monkeypatch.setenv("WNFUSED_CUDA", "1" if forced else "auto")
    made = command(Distribution())
    made.build_lib, made.build_temp, made.inplace = str(tmp_path / "lib"), str(tmp_path / "temp"), False
    with pytest.raises(type(raised)) if forced else contextlib.nullcontext():
        made.run()
    assert json.loads(file.read_text()) == {
        "not_built": {} if reason is None else {"cuda": reason}, "declarations": build["declarations"](),
        "sources": build["sources"](), "torch": torch.__version__,
    }  # fmt: skip


def test_where_a_library_fails_to_build_one_of_an_older_build_is_not_opened(build, monkeypatch, tmp_path):
    from setuptools.command.build_ext import build_ext
    from setuptools.dist import Distribution

    def fails(self):
        self.inplace = 0  # as setuptools' own does until it is done
        raise RuntimeError("Error compiling objects\na.cpp: no luck")

    command = build["build_ext_class"]()
    names = command.run.__globals__
    monkeypatch.setitem(names, "ROOT", tmp_path)
    monkeypatch.setitem(names, "cuda_left_out", lambda: "no CUDA here")
    monkeypatch.setitem(names, "declarations", lambda: "sources")
    monkeypatch.setitem(names, "reasons", {})
    monkeypatch.setattr(build_ext, "run", fails)
    monkeypatch.delenv("WNFUSED_REQUIRE_EXTENSIONS", raising=False)
    older = tmp_path / "wnfused" / "_cpu.abi3.so"
    older.parent.mkdir()
    older.write_bytes(b"a library")
    made = command(Distribution())
    made.build_lib, made.build_temp, made.inplace = str(tmp_path / "lib"), str(tmp_path / "temp"), True
    made.run()
    monkeypatch.setattr(library, "_PACKAGE", older.parent)
    assert library.opened("cpu") == "the C++ build failed: Error compiling objects"
    assert json.loads((older.parent / "_build.json").read_text())["not_built"] == {
        "cpu": "the C++ build failed: Error compiling objects", "cuda": "no CUDA here",
    }  # fmt: skip


@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize(("name", "what"), [("autograd", "C++ autograd nodes"), ("python", "C++ entry from Python")])
def test_a_library_for_one_torch_that_does_not_build_leaves_the_others(
    build, monkeypatch, tmp_path, name, what, required
):
    """They are built with torch's own C++ interface, which a torch to come may change."""
    from setuptools.command.build_ext import build_ext
    from setuptools.dist import Distribution

    def fails(self, extension):
        raise RuntimeError("Error compiling objects\nlayers.cpp: no luck")

    command = build["build_ext_class"]()
    names = command.run.__globals__
    monkeypatch.setitem(names, "ROOT", tmp_path)
    monkeypatch.setitem(names, "reasons", reasons := {})
    monkeypatch.setattr(build_ext, "build_extension", fails)
    monkeypatch.setenv("WNFUSED_REQUIRE_EXTENSIONS", str(int(required)))
    extensions = {extension.name: extension for extension in build["extensions"]()}
    cpu, other = extensions["wnfused._cpu"], extensions[f"wnfused._{name}"]
    made = command(Distribution({"ext_modules": [cpu, other]}))
    made.finalize_options()
    with pytest.raises(RuntimeError, match="no luck"):
        made.build_extension(cpu)
    with pytest.raises(RuntimeError, match="no luck") if required else contextlib.nullcontext():
        made.build_extension(other)
    expected = {name: f"the build of the {what} failed: Error compiling objects"}
    assert reasons == ({} if required else expected)


def test_build_says_what_it_lacks(build, monkeypatch, tmp_path):
    monkeypatch.setenv("WNFUSED_CUDA", "1")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert "nvcc was not found" in build["cuda_left_out"]()
    monkeypatch.setenv("WNFUSED_CUDA", "yes")
    with pytest.raises(ValueError, match="WNFUSED_CUDA: 'yes' is not auto, 0 or 1"):
        build["cuda_left_out"]()


def test_a_stages_backward_needs_its_signs():
    with pytest.raises(ValueError, match="signs must be given: the fourth output"):
        native_cuda.residual_stage_backward(*[None] * 10)
