"""The CUDA residual stage, emulated on the host, against the float64 reference: every configuration, both warp orders.

Tolerances, norm-wise. Operands are rounded to ``u`` = 2^-9 (bfloat16) or 2^-11 (tf32), weights and activations both;
a convolution's output is off by about ``sqrt(2) u`` of its size, and errors of different convolutions add up in
quadrature: 4 convolutions stay within ``4 u``. In float32 what is left out of the split products is 2^-22 and sums
round like a random walk: ``16 eps`` a block, in quadrature. The backward is compared with the reference on the maps
that the kernel itself kept, so that no activation near zero is counted on different sides of the ReLU.
"""

import re
import shutil
import subprocess

import numpy as np
import pytest
import torch
from emulator import DTYPES, Case, Tree, emulation, entry, names
from torch._subclasses.fake_tensor import FakeTensorMode

from wnfused import reference
from wnfused.backends import native_cuda
from wnfused.ops import residual_stage as stage_op

UNIT = (2.0**-9, 2.0**-11, 4 * torch.finfo(torch.float32).eps)
NAMES = names()
SMALL = [name for name in NAMES if name.endswith(("64x2x2", "32x4x4"))]


@pytest.fixture(scope="module")
def module():
    return emulation()


def distance(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm().clamp_min(1e-300)).item() if len(actual) else 0.0


def expected_forward(case):
    x, v, g, bias = (case.inputs[k].double() for k in ("x", "v", "g", "bias"))
    return reference.residual_stage(x, v, g, bias, case.skip_scale, case.recompute)


def expected_backward(case, norm, maps):
    dy, v, g, bias = (case.inputs[k].double() for k in ("dy", "v", "g", "bias"))
    return reference.residual_stage_backward(
        dy, v, g, bias, norm.double(), maps.double(), case.skip_scale, case.recompute, case.parameters
    )


def check(case, module):
    """What is wrong with a case's outputs: nothing, for a right kernel."""
    out, faults = case.run(module)
    if faults:
        return faults
    tolerance = 4 * UNIT[case.entry["precision"]] * max(case.blocks / 2, 1) ** 0.5
    y, norm, maps = expected_forward(case)
    errors = {"y": distance(out["y"], y), "maps": distance(out["maps"], maps)}
    gradients = zip(("dx", "dv", "dg", "dbias"), expected_backward(case, out["norm"], out["maps"]), strict=True)
    errors |= {name: distance(out[name], value) for name, value in gradients if name in out}
    # Parameters in bfloat16 have gradients in bfloat16.
    rounding = 2.0**-8 if case.parameter_dtype == torch.bfloat16 else 0.0
    faults = [f"{name} is off by {e:.1e}" for name, e in errors.items() if not e <= tolerance + rounding]
    if not distance(out["norm"], norm) < 1e-6:
        faults.append("norms are wrong")
    if "signs" in out and signs_differ(out["signs"], out["maps"][:, 1]):
        faults.append("signs are not where the op writes them for backends without signs")
    return faults


def signs_differ(signs, activations):
    """Whether any bit that stands for an activation is another one than the op's."""
    expected, kept = torch.zeros_like(signs), torch.zeros_like(signs)
    for b, a in enumerate(activations if signs.numel() else ()):
        stage_op._write_signs(expected[b], a)
        stage_op._write_signs(kept[b], torch.ones_like(a))
    return bool(((signs ^ expected) & kept).any())


def ragged(facts):
    """More images than one block of threads takes, and not a multiple of it."""
    return max(facts["images"], facts["gradient_images"]) + 1 if facts["images"] > 1 else 2


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("name", NAMES)
def test_emulation_matches_float64(module, name, reverse):
    facts = entry(module, name)
    assert check(Case(facts, ragged(facts), reverse=reverse), module) == []


# As many images a block of threads, and other warps' tiles.
@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        ("bfloat16 64x8x8", "bfloat16 64x8x8 large"),
        ("bfloat16 64x8x8 large", "bfloat16 64x8x8 sm_90a"),
        ("bfloat16 32x16x16 sm_90a", "bfloat16 32x16x16"),
        ("tf32 64x8x8 sm_90a", "tf32 64x8x8"),
        ("tf32 16x28x28", "float32 16x28x28"),
        ("float32 32x16x16", "tf32 32x16x16 large"),
        ("float32 16x8x8", "tf32 16x8x8"),
        ("tf32 64x2x2", "float32 64x2x2"),
        ("tf32 32x4x4", "float32 32x4x4"),
    ],
)
def test_emulation_of_a_backward_in_another_configuration(module, forward, backward):
    """As where tf32 is allowed or forbidden between the two: what is kept means the same in each."""
    facts = entry(module, forward)
    case = Case(facts, ragged(facts), backward=backward)
    case.entry = {**facts, "precision": min(facts["precision"], entry(module, backward)["precision"])}
    assert check(case, module) == []


def test_signs_are_as_many_as_the_op_promises(module):
    with FakeTensorMode():
        for facts in module.entries():
            c, h, w = (facts[k] for k in ("channels", "height", "width"))
            x = torch.empty(3, c, h, w, device="cuda", dtype=DTYPES[facts["precision"]])
            v, g = torch.empty(5, 2, c, c, 3, 3, device="cuda"), torch.empty(5, 2, c, device="cuda")
            assert torch.ops.wnfused.residual_stage(x, v, g, g)[3].numel() == 15 * facts["sign_bytes"]


def test_configurations_of_one_map_share_its_tiles_of_signs_alike(module):
    """Where a tile of 64 pixels is not one image's, its order is that of as many images as a block of threads has."""
    images = {}
    for facts in module.entries():
        if facts["height"] * facts["width"] % 64:
            images.setdefault(facts["name"].split()[1], set()).add(facts["images"])
    assert images
    assert {name: found for name, found in images.items() if len(found) > 1} == {}


class OnCuda(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("reason", [None, "it has no kernel for these maps"])
def test_a_backend_without_signs_gets_them_where_the_native_one_could_read_them(monkeypatch, reason):
    """A compiled graph may run its forward by one backend and its backward by another."""
    monkeypatch.setattr(native_cuda, "refusal", lambda op, arguments: reason)
    x, v, g = torch.randn(3, 16, 8, 8), torch.randn(2, 2, 16, 16, 3, 3), torch.randn(2, 2, 16)
    outputs = reference.residual_stage(x, v, g, g)
    signs = stage_op._with_signs(outputs, (x.as_subclass(OnCuda), v, g, g))[3]
    assert signs.numel() == 2 * 3 * 8 * 16
    bits = np.unpackbits(signs.as_subclass(torch.Tensor).numpy())
    assert bits.sum() == (0 if reason else (outputs[2][:, 1] != 0).sum())
    for options in ((1.0, 2), (1.0, 0, False)):
        outputs = reference.residual_stage(x, v, g, g, *options)
        assert stage_op._with_signs(outputs, (x.as_subclass(OnCuda), v, g, g, *options))[3].numel() == 0


@pytest.mark.parametrize("recompute", [1, 2, 5])
@pytest.mark.parametrize("name", SMALL)
def test_emulation_recomputes(module, name, recompute):
    kept = Case(entry(module, name), 2, blocks=3).run(module)[0]
    out, faults = Case(entry(module, name), 2, blocks=3, recompute=recompute).run(module)
    assert faults == []
    for key in ("y", "dx", "norm"):
        assert torch.equal(out[key], kept[key])
    # The batch may be cut differently for the parameters' gradients: their sums round differently.
    for key in ("dv", "dg", "dbias"):
        assert distance(out[key], kept[key].double()) < 1e-5


@pytest.mark.parametrize("name", ["bfloat16 16x8x8", "tf32 64x7x7", "float32 32x14x14"])
def test_emulation_order_of_warps_and_segments_change_no_bit(module, name):
    outcomes = [
        Case(entry(module, name), 2, blocks=3, reverse=reverse, segment_bytes=segment).run(module)
        for reverse, segment in ((False, 1 << 29), (True, 1 << 29), (False, 1))
    ]
    for out, faults in outcomes:
        assert faults == []
        for key, value in outcomes[0][0].items():
            assert torch.equal(out[key], value), key


@pytest.mark.parametrize("parameter_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_emulation_channels_last_and_parameter_dtypes(module, name, parameter_dtype):
    assert check(Case(entry(module, name), 3, channels_last=True, parameter_dtype=parameter_dtype), module) == []


@pytest.mark.parametrize("name", SMALL)
def test_emulation_strided_maps(module, name):
    plain, same = (Case(entry(module, name), 3), Case(entry(module, name), 3))
    n, c, h, w = plain.inputs["x"].shape
    wide = torch.zeros(n, c + 2, 2 * h, w + 3, dtype=plain.inputs["x"].dtype)
    for key in ("x", "dy"):
        same.inputs[key] = wide.clone()[:, 1:-1, ::2, 2:-1].copy_(plain.inputs[key])
    out, faults = same.run(module)
    assert faults == []
    for key, value in plain.run(module)[0].items():
        assert torch.equal(out[key], value), key


@pytest.mark.parametrize("name", SMALL)
def test_emulation_without_parameter_gradients(module, name):
    case = Case(entry(module, name), 2, parameters=False)
    assert check(case, module) == []
    assert torch.equal(case.run(module)[0]["dx"], Case(entry(module, name), 2).run(module)[0]["dx"])


@pytest.mark.parametrize(("images", "blocks"), [(0, 2), (3, 0), (0, 0), (1, 1)])
@pytest.mark.parametrize("name", ["bfloat16 64x2x2", "tf32 32x4x4", "float32 16x8x8"])
@pytest.mark.parametrize("recompute", [0, 1])
def test_emulation_empty_batch_and_no_blocks(module, name, images, blocks, recompute):
    case = Case(entry(module, name), images, blocks=blocks, recompute=recompute)
    out, faults = case.run(module)
    assert faults == []
    if blocks == 0:
        assert torch.equal(out["y"], case.inputs["x"])
        assert torch.equal(out["dx"], case.inputs["dy"])
    if images == 0:
        assert all((out[k] == 0).all() for k in ("dv", "dg", "dbias"))
    if images and blocks:
        assert check(case, module) == []


@pytest.mark.parametrize("name", ["bfloat16 64x2x2", "tf32 32x4x4", "float32 16x8x8"])
def test_emulation_zero_rows(module, name):
    case = Case(entry(module, name), 2)
    case.inputs["v"][0, 0, 3] = case.inputs["v"][1, 1, 5] = 0
    case.inputs["g"][1, 1, 5] = float("inf")
    out, faults = case.run(module)
    assert faults == []
    for gradient in (out["dv"].flatten(3).abs().sum(3), out["dg"]):
        assert gradient[0, 0, 3] == gradient[1, 1, 5] == 0
    case.inputs["g"][1, 1, 5] = 1.0
    assert check(case, module) == []


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["bfloat16 16x8x8", "tf32 16x8x8", "float32 16x8x8"])
def test_emulation_values_that_are_not_finite(module, name, value):
    case = Case(entry(module, name), 1, blocks=1)
    case.inputs["x"][0, 1, 1, 0] = value
    y, _, _ = expected_forward(case)
    out, faults = case.run(module)
    assert faults == []
    if name.startswith("float32"):  # infinity times the two parts of a weight may be infinity - infinity
        assert torch.equal(out["y"].isfinite(), y.isfinite())
        return
    for same in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(same(out["y"]), same(y))


@pytest.mark.parametrize(("row", "gain"), [(1e-17, 1e6), (1e17, 1e-12)])
def test_emulation_huge_and_tiny_rows(module, row, gain):
    case = Case(entry(module, "float32 32x4x4"), 2, blocks=1)
    case.inputs["v"] *= row
    case.inputs["g"] *= gain
    assert check(case, module) == []


@pytest.mark.parametrize(
    ("name", "images"),
    [
        ("bfloat16 64x8x8 sm_90a", 1),
        ("bfloat16 64x8x8 sm_90a", 4),
        ("bfloat16 64x8x8 sm_90a", 5),
        ("bfloat16 32x16x16 sm_90a", 3),
        ("tf32 32x16x16 sm_90a", 3),
        ("tf32 64x8x8 sm_90a", 3),
    ],
)
def test_emulation_warpgroups_fill_clusters_and_rings(module, name, images):
    """Blocks without an image, and more chunks of weights than go round the ring twice."""
    facts = entry(module, name)
    case = Case(facts, images, blocks=5, parameters=False)
    assert check(case, module) == []
    expected = case.run(module)[0]
    for reverse, recompute in ((True, 0), (False, 3)):
        out, faults = Case(facts, images, blocks=5, recompute=recompute, reverse=reverse, parameters=False).run(module)
        assert faults == []
        for key in ("y", "dx", "norm"):
            assert torch.equal(out[key], expected[key]), key


@pytest.mark.parametrize("multiprocessors", [1, 256])
@pytest.mark.parametrize("name", SMALL)
def test_emulation_cuts_the_batch_for_the_weight_gradient(module, name, multiprocessors):
    """From one block of threads over the whole batch, without partial sums, to a block an image or group of images."""
    facts = entry(module, name)
    assert check(Case(facts, 2 * facts["gradient_images"] + 1, blocks=1, multiprocessors=multiprocessors), module) == []


def test_kernels_of_one_architecture_are_no_other_files_too():
    """Of a kernel that two files launch the linker keeps one launch: it must not be that of fewer architectures."""
    if shutil.which("nm") is None:
        pytest.skip("needs nm")

    def launches(table):
        listing = subprocess.run(
            ["nm", "-C", Tree.original().compiled(f"cuda/{table}.cu")], capture_output=True, text=True
        )
        return set(re.findall(r" [Wu] (.*\blaunch<.*)", listing.stdout))

    everywhere = launches("stage_bfloat16") | launches("stage_tf32")
    assert len(everywhere) > 40
    for table in ("stage_sm90a", "stage_large_from90"):
        assert not launches(table) & everywhere


def test_emulation_covers_every_configuration(module):
    """The names that tests are made of are read off the sources, without a compiler."""
    assert sorted(NAMES) == sorted(facts["name"] for facts in module.entries())


def test_emulation_covers_the_networks_stages(module):
    """The maps of wrn on CIFAR, MNIST and digits, in every precision."""
    for precision, _ in enumerate(DTYPES):
        shapes = {(e["channels"], e["height"], e["width"]) for e in module.entries() if e["precision"] == precision}
        assert shapes >= {(c, size * 16 // c, size * 16 // c) for size in (32, 28, 8) for c in (16, 32, 64)}
