"""The offline gate: planted faults are red, right kernels are green, a missing tool is named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the gate is part of the checkout, not of the package

from gate import __main__ as command
from gate import cuda_kernels, rows, tools, triton_kernels
from gate.pretended import __main__ as pretended
from gate.pretended import build as pretended_build
from gate.rows import ARCHITECTURES

SOURCE = """
#include <mma.h>
using namespace nvcuda;

struct Product {};
template <class Kernel, int kSharedBytes> __global__ void run_kernel(const half* a, float* c) {
  __shared__ float staged[64];
  wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> x;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major> y;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> z;
  wmma::fill_fragment(z, 0.f);
  wmma::load_matrix_sync(x, a, 16);
  wmma::load_matrix_sync(y, a, 16);
  wmma::mma_sync(z, x, y, z);
  wmma::store_matrix_sync(c, z, 16, wmma::mem_row_major);
  staged[threadIdx.x] = c[threadIdx.x];
  __syncthreads();
  c[threadIdx.x] = staged[63 - threadIdx.x];
}
template __global__ void run_kernel<Product, 102400>(const half*, float*);

__global__ void indexed(float* x, const int* at) {
  float held[64];
  for (int i = 0; i < 64; ++i) held[i] = x[i];
  for (int i = 0; i < 64; ++i) x[i] = held[at[i] & 63];
}
"""


@pytest.fixture(autouse=True)
def _flags_put_back():
    """A job compiles for the precision it names, by torch's own flags, in a process that ends with it."""
    flags = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = [flag.fp32_precision for flag in flags]
    yield
    for flag, precision in zip(flags, before, strict=True):
        flag.fp32_precision = precision


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    reason = command.missing("cuda")
    if reason is not None:
        pytest.skip(reason)
    path = tmp_path_factory.mktemp("gate") / "planted.cu"
    path.write_text(SOURCE)
    return path


PRODUCT = "Product"


def verdicts(source: Path, capability: int, *kernels: cuda_kernels.CudaKernel) -> dict[str, rows.Verdict]:
    found = cuda_kernels.Job(source, cuda_kernels.run_by(capability), (capability,), kernels).run()
    return {verdict.configuration: verdict for verdict in found}


def faults(source: Path, capability: int, *kernels: cuda_kernels.CudaKernel) -> tuple[str, ...]:
    """Of the kernel whose row is given."""
    return verdicts(source, capability, *kernels)[PRODUCT].faults


def row(**expected) -> cuda_kernels.CudaKernel:
    return cuda_kernels.CudaKernel(source="planted.cu", entry="run_kernel<Product", **expected)


def test_a_right_kernel_is_green_and_a_register_array_in_memory_red(source):
    found = verdicts(source, 90, row(instruction="HMMA"))
    assert found[PRODUCT].faults == ()
    assert "spilled registers" in found["indexed"].faults[0]


def test_shared_memory_is_what_a_kernel_says_by_its_name_and_judged_for_every_device(source):
    """One machine code, two limits."""
    found = cuda_kernels.Job(source, "80", (80, 89), (row(instruction="HMMA"),)).run()
    of_product = {verdict.capability: verdict for verdict in found if verdict.configuration == PRODUCT}
    assert {verdict.shared for verdict in of_product.values()} == {102400 + 64 * 4}
    assert of_product[80].faults == ()
    assert of_product[89].faults == ("102656 bytes of shared memory, over the limit of 101376",)


@pytest.mark.parametrize(
    ("name", "shared", "shown"),
    [
        ("void a::run_kernel<a::Stage<a::M<8>, true>, 49152>(a::Stage<a::M<8>, true>::P)", 49152, "Stage<M<8>, true>"),
        ("void a::run_kernel<a::Rows<float, (a::Step)2>, 256>(a::Rows<float, (a::Step)2>::P)", 256, "Rows<float, 2>"),
        ("void a::run_kernel<a::(anonymous namespace)::Turn<int>, 0>(a::Turn<int>::P)", 0, "Turn<int>"),
        ("b::other(float*)", 0, "other"),
    ],
    ids=["stage", "enumeration", "unnamed", "another"],
)  # fmt: skip
def test_what_a_name_tells(name, shared, shown):
    assert cuda_kernels.launched_with(name) == shared
    assert cuda_kernels._short(name) == shown


def test_a_missing_matrix_instruction_is_red(source):
    assert faults(source, 90, row(instruction={90: "HGMMA"})) == ("no HGMMA; found HMMA",)
    assert faults(source, 80, row(instruction={90: "HGMMA"})) == ()


def test_a_missing_copy_to_the_cluster_is_red(source):
    assert faults(source, 90, row(multicast=True)) == ("no UBLKCP.MULTICAST",)


def test_what_is_compiled_is_what_is_shipped(monkeypatch):
    """The machine code of setup.py's list; sm_89 runs sm_80's; sources of one architecture, or later ones."""
    import setup

    targets = {str(architecture) for architecture in setup.CUDA_ARCHITECTURES}
    judged: dict[str, dict[str, tuple[int, ...]]] = {}
    for job in cuda_kernels.jobs(list(ARCHITECTURES)):
        judged.setdefault(job.source.name, {})[job.target] = job.capabilities
    own, later = judged.pop("stage_sm90a.cu"), judged.pop("stage_large_from90.cu")
    assert own == {"90a": (90,)}
    assert later == {"90": (90,), "100": (100,)}
    assert judged["stage_tf32.cu"] == {"80": (80, 89), "90": (90,), "100": (100,)}
    assert all(set(each) == targets for each in judged.values())
    commands = []
    monkeypatch.setattr(cuda_kernels, "said", lambda command: commands.append(command) or "")
    monkeypatch.setattr(cuda_kernels, "tool", lambda name: name)
    monkeypatch.setattr("gate.sass.entries", lambda cubin: [])
    cuda_kernels.Job(cuda_kernels.SOURCES / "stage_tf32.cu", "80", (80, 89))._compile()
    assert {*setup.NVCC_FLAGS, *setup.STABLE_ABI, setup.machine_code("80")} <= set(commands[0])


def test_a_row_without_a_kernel_is_red(source):
    gone = cuda_kernels.CudaKernel(source="planted.cu", entry="renamed")
    assert "no entry function matches" in verdicts(source, 80, gone)["renamed"].faults[0]


def test_a_source_that_does_not_compile_is_red(source, tmp_path):
    broken = tmp_path / "broken.cu"
    broken.write_text("__global__ void f() { undeclared(); }")
    (verdict,) = cuda_kernels.Job(broken, "80", (80,)).run()
    assert "does not compile" in verdict.faults[0]
    assert "undeclared" in verdict.faults[0]


@pytest.mark.parametrize(
    ("words", "red"),
    [
        (
            "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
            "insufficient register resources for the wgmma pipeline in the function 'f'",
            True,
        ),
        ("ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored in the function 'f'", True),
        ("ptxas warning : wgmma.mma_async instructions are serialized in the function 'f'", True),
        ("a.cu(3): warning #177-D: variable was declared but never referenced", False),
        ("", False),
    ],
    ids=["C7510", "C7508", "without a number", "another warning", "silence"],
)
def test_a_loss_that_ptxas_announces_is_red(monkeypatch, tmp_path, words, red):
    """nvcc goes well and says so beside its output; another run must not find a stored success."""
    unit = tmp_path / "a.cu"
    unit.write_text("")
    compiler = tmp_path / "nvcc"
    compiler.write_text(f"#!{sys.executable}\nimport sys\nprint({words!r}, file=sys.stderr)\n")
    compiler.chmod(0o755)
    entry = rows.Entry("f()", registers=40, stack=0, shared=0, local_accesses=0)
    monkeypatch.setattr(cuda_kernels, "tool", lambda name: str(compiler))
    monkeypatch.setattr(cuda_kernels, "version", lambda name: "0")
    monkeypatch.setattr(cuda_kernels.cache, "FOLDER", tmp_path / "stored")
    monkeypatch.setattr("gate.sass.entries", lambda cubin: [entry])
    for _ in range(2):
        (verdict,) = cuda_kernels.Job(unit, "90", (90,), ()).run()
        assert verdict.faults == ((words,) if red else ())


def test_every_verdict_has_a_line_in_the_table():
    entry = rows.Entry("f", registers=40, stack=0, shared=2048, local_accesses=0, instructions={"HMMA": 8})
    good = rows.judge("f.cu", "f", 80, entry, rows.Expectation("HMMA"))
    bad = rows.broken("g.cu", "g", 100, "does not compile")
    lines = command.table([good, bad]).splitlines()
    assert lines[1].split() == ["f.cu", "f", "sm_80", "40", "0", "2048", "HMMA", "x8"]
    assert lines[2].endswith("RED: does not compile")


@pytest.mark.parametrize("absent", ["nvcc", "cuobjdump"])
def test_a_missing_tool_is_named_and_has_its_own_exit_code(monkeypatch, capsys, absent):
    def tool(name):
        if name == absent:
            raise tools.ToolMissingError(f"{name} is not on this machine")
        return name

    monkeypatch.setattr(tools, "tool", tool)
    assert command.main(["--only", "cuda"]) == command.TOOL_MISSING
    assert f"NOT CHECKED: the cuda kernels: {absent} is not on this machine" in capsys.readouterr().out


def test_a_source_that_is_gone_is_red_and_so_is_a_gate_without_any(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(cuda_kernels, "SOURCES", tmp_path)
    verdicts = [verdict for job in cuda_kernels.jobs([80, 90]) for verdict in job.run()]
    assert {(verdict.kernel, verdict.capability) for verdict in verdicts} == {
        (kernel.source, capability) for kernel in cuda_kernels.KERNELS for capability in (80, 90)
    }
    assert all(verdict.faults for verdict in verdicts)
    monkeypatch.setitem(command.ROUTES, "cuda", (lambda capabilities: iter(()), ()))
    assert command.main(["--only", "cuda"]) == command.RED
    assert "0 compiled kernels" in capsys.readouterr().out


def test_a_compilation_is_known_by_what_it_includes(source, tmp_path, monkeypatch):
    """A header that is included by one that is included counts, one that merely lies there does not."""
    monkeypatch.setattr(cuda_kernels, "ROOT", tmp_path)
    folder = tmp_path / "csrc" / "cuda"
    folder.mkdir(parents=True)
    unit = folder / "a.cu"
    unit.write_text('#include "cuda/b.h"\n')
    (folder / "b.h").write_text('#ifdef ON\n#  include "c.h"\n#endif\n#include <vector>\n')
    (folder / "c.h").write_text('#include "cuda/b.h"\n')
    (folder / "other.h").write_text("")
    assert [path.name for path in cuda_kernels.included(unit)] == ["a.cu", "b.h", "c.h"]

    def key():
        return cuda_kernels.Job(unit, "90", (90,))._key()

    before = key()
    (folder / "other.h").write_text("changed")
    assert key() == before
    (folder / "c.h").write_text("// changed\n")
    assert key() != before


def test_a_source_is_known_by_its_own_headers():
    names = {path.name for path in cuda_kernels.included(cuda_kernels.SOURCES / "stage_tf32.cu")}
    assert {"stage_kernel.h", "precision.h", "primitives.h", "gradient_rows.h"} <= names
    assert "row_norm.h" not in names


# ---------------------------------------------------------------------------------------------- Triton's kernels


def test_every_triton_kernel_and_configuration_has_a_row():
    pytest.importorskip("triton")
    from triton.runtime.jit import JITFunction

    from wnfused.backends.triton.configurations import TILES
    from wnfused.backends.triton.kernels import conv, linear, rows

    launched = {name.split(" ")[0] for name in triton_kernels.EXAMPLES}
    for module in (linear, conv, rows):
        family = module.__name__.rpartition(".")[2]
        for name, kernel in vars(module).items():
            if isinstance(kernel, JITFunction) and kernel.__module__ == module.__name__ and not name.startswith("_"):
                assert f"{family}.{name}" in launched
    jobs = list(triton_kernels.jobs(list(ARCHITECTURES)))
    assert len(jobs) == len(set(jobs))
    for kernel, element in TILES:
        for tile in range(len(TILES[kernel, element])):
            for capability in ARCHITECTURES:
                assert triton_kernels.Job(kernel, element, tile, capability) in jobs


def test_the_launches_of_a_stage_have_a_row():
    """Its convolutions are not launched as a layer's: weights are scaled and rounded before, the stream is float32."""
    pytest.importorskip("triton")
    from wnfused.backends.triton import configurations, stage, support

    tile = configurations.Tile(32, 32, 32)

    def known(kernel, *specialised):
        return kernel.fn.__name__, str(specialised)

    def launched(parameters):
        x = torch.empty(128, 32, 32, 32, dtype=torch.bfloat16, device="meta")
        v = torch.empty(1, 2, 32, 32, 3, 3, dtype=parameters, device="meta")
        g, bias = v.new_empty(1, 2, 32), v.new_empty(1, 2, 32)
        launches = []
        with configurations.forced(tile), support.recorded(lambda *launch: launches.append(launch)):
            _, norm, maps = stage.residual_stage(x, v, g, bias, 0.5, 0, True)
            stage.residual_stage_backward(x, v, g, bias, norm, maps, 0.5, 0, True)
        made = [(k, *triton_kernels._specialised(k, arguments, constants)) for k, _, arguments, constants in launches]
        return {known(*launch) for launch in made if launch[0].fn.__module__.endswith(".conv")}

    wanted = {launch for launch in launched(torch.float32) if launch[0] != "weight_gradient"}
    wanted |= {launch for launch in launched(torch.bfloat16) if launch[0] == "weight_gradient"}
    names = ["forward", "forward", "input_gradient", "input_gradient", "weight_gradient"]
    assert sorted(name for name, _ in wanted) == names
    examples = [name for name in triton_kernels.EXAMPLES if name.startswith("conv.")]
    assert wanted <= {known(*triton_kernels.Job(name, "half", None, 90)._launch(tile)) for name in examples}


@pytest.mark.parametrize("kernel", ["many_weight_norms", "many_weight_norms_backward"])
def test_rows_of_many_tensors_are_compiled_aligned_and_not(kernel):
    pytest.importorskip("triton")
    examples = [name for name in triton_kernels.EXAMPLES if name.split(" ")[0] == f"rows.{kernel}"]
    aligned = set()
    for name in examples:
        launched, _, constants, *_ = triton_kernels.Job(name, "half", None, 90)._launch(None)
        aligned.add(constants[(launched.arg_names.index("ALIGNED"),)])
    assert aligned == {True, False}


def test_a_triton_kernel_that_spills_is_red(monkeypatch, tmp_path):
    """A tile far too large for its warps, and shared memory over the smallest architecture's limit."""
    reason = command.missing("triton")
    if reason is not None:
        pytest.skip(reason)
    from wnfused.backends.triton import configurations
    from wnfused.backends.triton.configurations import Tile

    monkeypatch.setattr(triton_kernels.cache, "FOLDER", tmp_path)
    monkeypatch.setattr(configurations, "tiles", lambda *_: [Tile(64, 64, 64, 1, 6)])
    (verdict,) = triton_kernels.Job("linear.forward", "half", 0, 89).run()
    assert verdict.entry.instructions["HMMA"] > 0
    assert any("spilled registers" in fault for fault in verdict.faults)
    assert any("over the limit of 101376" in fault for fault in verdict.faults)


@pytest.mark.parametrize(("capability", "product"), [(80, "mma.sync"), (90, "wgmma.mma_async")])
@pytest.mark.parametrize("kernel", ["forward", "input_gradient", "weight_gradient"])
@pytest.mark.parametrize("layer", ["linear", "conv"])
def test_operands_of_tf32_are_rounded_and_no_others(layer, kernel, capability, product):
    """The tensor cores would ignore what tf32 has no bits for, and ``tl.dot`` leaves that to them."""
    reason = command.missing("triton")
    if reason is not None:
        pytest.skip(reason)
    from wnfused.backends.triton.configurations import Tile

    name = f"{layer}.{kernel}"
    for element, rounded in (("tf32", True), ("half", False)):
        *launch, options = triton_kernels.Job(name, element, None, capability)._launch(Tile(64, 64, 32, 4, 2))
        ptx = triton_kernels._compile(*launch, options, capability).asm["ptx"]
        assert product in ptx
        assert ("cvt.rna.tf32.f32" in ptx) == rounded


# ------------------------------------------------------------------------------------------------- pretended GPUs


@pytest.mark.parametrize(
    ("statuses", "some_may_be_empty", "status"),
    [
        ([0, 0], False, 0),
        ([1, 0], False, 1),
        ([0, 5], False, 5),
        ([5, 0], True, 0),
        ([5, 1], True, 1),
        ([5, 5], True, 5),
    ],
)
def test_pretended_gpus_without_a_test_are_no_success(statuses, some_may_be_empty, status):
    assert pretended._together(statuses, some_may_be_empty) == status


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built for CUDA")
def test_a_cpu_build_of_torch_has_no_pretended_gpus(capsys):
    assert pretended.main(["tests"]) == 77
    assert capsys.readouterr().out == "NOT CHECKED: torch is a CPU build\n"


@pytest.mark.parametrize("source", ["gate/pretended/runtime.cpp", "csrc/cuda/weight_norm.cu", "csrc/cuda/svd.cpp"])
def test_what_pretends_compiles(source):
    """``make oldest`` alone builds it whole."""
    try:
        command = pretended_build.kernel_command()
        tools.run([*command, "-fsyntax-only", str(pretended_build.HERE.parents[1] / source)])
    except tools.ToolMissingError as error:
        pytest.skip(str(error))
