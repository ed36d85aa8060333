"""``torch.ops.wnfused`` on CPU tensors, in C++: what Python gives, past Python where there is a kernel."""

import subprocess
import sys

import pytest
import torch
from torch.library import opcheck

import wnfused
from wnfused import dispatch, reference
from wnfused.backends import native_entry

pytestmark = pytest.mark.skipif(
    not dispatch.prefers_native() or native_entry.unavailable() is not None, reason="there are no ops in C++ here"
)

C_OPS, PYTHON_OPS = torch.ops.wnfused, torch.ops.wnfused_python
WINDOW = ([1, 2], [1, 0], [1, 1])


def linear_call(x=torch.float32, v=torch.float32, rows=3, dim=0, activation="relu"):
    return "linear", (
        torch.randn(rows, 2, 5).to(x), torch.randn(4, 5).to(v), torch.rand(4, 1).to(v), torch.randn(4).to(v),
        torch.randn(rows, 2, 4).to(x), dim, activation, 0.1,
    )  # fmt: skip


def conv_call(
    x=torch.float32, v=torch.float32, dim=0, activation="leaky_relu", transposed=False, x_format=None, v_format=None,
    groups=1, residual=False,
):  # fmt: skip
    batch, weight = torch.randn(2, 6, 9, 8).to(x), torch.randn(6, 6 // groups, 3, 2).to(v)
    rows = torch.rand(6 if dim == 0 else weight.shape[1]).to(v)
    batch = batch.contiguous(memory_format=x_format or torch.contiguous_format)
    weight = weight.contiguous(memory_format=v_format or torch.contiguous_format)
    added = torch.randn(2, 6, 9, 4).to(x) if residual else None
    return "conv", (
        batch, weight, rows, torch.randn(6).to(v), added, *WINDOW, transposed, [0, 0], groups, dim, activation, 0.1,
    )  # fmt: skip


def volume_call():
    x = torch.randn(2, 6, 5, 4, 3).contiguous(memory_format=torch.channels_last_3d)
    window = ([1] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1)
    return "conv", (x, torch.randn(4, 6, 3, 3, 3), torch.rand(4), None, None, *window, 0, "relu", 0.1)


def line_call():
    window = ([1], [1], [1], False, [0], 1)
    return "conv", (torch.randn(2, 6, 9), torch.randn(4, 6, 3), torch.rand(4), None, None, *window, 0, "none", 0.1)


def vendor_call():
    """Of a convolution that is left to the vendor's library."""
    window = ([1, 1], [0, 0], [3, 3], False, [0, 0], 2)
    v = torch.randn(20, 10, 9, 9)
    return "conv", (torch.randn(1, 20, 30, 30), v, torch.rand(20), None, None, *window, 0, "none", 0.1)


def stage_call(dtype=torch.float32, recompute=0, save=True, layout=None):
    x = torch.randn(2, 16, 5, 4).to(dtype).contiguous(memory_format=layout or torch.contiguous_format)
    parameters = (
        torch.randn(3, 2, 16, 16, 3, 3).to(dtype),
        torch.rand(3, 2, 16).to(dtype),
        torch.randn(3, 2, 16).to(dtype),
    )
    return "residual_stage", (x, *parameters, 0.5, recompute, save)


def backward_of(name, arguments, needs=(True, True, True, True)):
    """The call of the op's backward, for what Python gives forward."""
    y, norm, *kept = getattr(PYTHON_OPS, name)(*arguments)
    dy = torch.randn_like(y)
    if name == "residual_stage":
        _, v, g, bias, skip_scale, recompute, _ = arguments
        return f"{name}_backward", (dy, v, g, bias, norm, kept[0], skip_scale, recompute, any(needs[1:]), kept[1])
    return f"{name}_backward", (dy, y, *arguments[:3], norm, list(needs), *arguments[5:])


HALF = torch.bfloat16
TAKEN = {
    "linear": linear_call,
    "linear, no rows": lambda: linear_call(rows=0),
    "linear, bfloat16": lambda: linear_call(HALF, HALF),
    "linear, bfloat16 over float32, dim from behind": lambda: linear_call(HALF, dim=-2),
    "conv": conv_call,
    "conv, bfloat16, dim from behind": lambda: conv_call(HALF, dim=-4),
    "conv in channels_last": lambda: conv_call(x_format=torch.channels_last, activation="none"),
    "conv, weight in channels_last": lambda: conv_call(v_format=torch.channels_last),
    "conv of groups": lambda: conv_call(groups=3, activation="relu"),
    "conv with a residual": lambda: conv_call(residual=True),
    "conv of volumes in channels_last": volume_call,
    "conv of lines": line_call,
    "conv of the vendor's": vendor_call,
    "conv, transposed": lambda: conv_call(transposed=True),
    "conv, transposed, of groups": lambda: conv_call(transposed=True, groups=3),
    "conv, transposed, of groups, bfloat16": lambda: conv_call(HALF, transposed=True, groups=3),
    "conv, transposed, in channels_last": lambda: conv_call(transposed=True, x_format=torch.channels_last),
    "stage": stage_call,
    "stage in channels_last, bfloat16": lambda: stage_call(HALF, layout=torch.channels_last),
    "stage, recomputed": lambda: stage_call(recompute=2),
}
PASSED_ON = {
    "linear, another dim": lambda: linear_call(dim=1),
    "linear, one norm": lambda: linear_call(dim=None),
    "linear, float64": lambda: linear_call(torch.float64, torch.float64),
    "linear, float16": lambda: linear_call(torch.float16, torch.float16),
    "conv, another dim": lambda: conv_call(dim=1),
    "conv, float64": lambda: conv_call(torch.float64, torch.float64),
}
NEEDS = [
    (True, True, True, True),
    (True, False, False, False),
    (False, True, True, False),
    (False, False, True, False),
    (False, False, False, True),
]


@pytest.fixture
def chosen(monkeypatch):
    """The ops that Python chose a backend for, in a test."""
    ops = []
    select = dispatch.select
    monkeypatch.setattr(dispatch, "select", lambda op, arguments: ops.append(op) or select(op, arguments))
    return ops


def same_as_python(name, arguments):
    found, wanted = getattr(C_OPS, name)(*arguments), getattr(PYTHON_OPS, name)(*arguments)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def call_of(make):
    """The call, its gain in the shape that ``dim`` asks for."""
    name, arguments = make()
    if name != "linear" or arguments[5] == 0 or arguments[5] == -2:
        return name, arguments
    x, v, _, *rest = arguments
    return name, (x, v, torch.rand(5 if arguments[5] == 1 else ()).to(v.dtype), *rest)


@pytest.mark.parametrize("make", TAKEN.values(), ids=TAKEN)
def test_kernels_are_called_past_python(make, chosen):
    name, arguments = call_of(make)
    same_as_python(name, arguments)
    assert chosen == [name]  # by the op of Python's alone
    for needs in NEEDS:
        backward = backward_of(name, arguments, needs)
        chosen.clear()
        same_as_python(*backward)
        assert chosen == [f"{name}_backward"]


@pytest.mark.parametrize("make", PASSED_ON.values(), ids=PASSED_ON)
def test_what_has_no_kernel_is_passed_on(make, chosen):
    name, arguments = call_of(make)
    same_as_python(name, arguments)
    assert chosen == [name] * 2
    for needs in NEEDS:
        backward = backward_of(name, arguments, needs)
        chosen.clear()
        same_as_python(*backward)
        assert chosen == [f"{name}_backward"] * 2


@pytest.mark.parametrize("make", [*TAKEN.values(), *PASSED_ON.values()], ids=[*TAKEN, *PASSED_ON])
def test_a_graph_expects_what_they_give(make):
    name, arguments = call_of(make)
    for called, given in ((name, arguments), *(backward_of(name, arguments, needs) for needs in NEEDS)):
        opcheck(getattr(C_OPS, called).default, given, test_utils="test_faketensor")


@pytest.mark.parametrize("make", [linear_call, conv_call, stage_call])
def test_a_backend_that_is_named_is_asked_by_python(make, chosen):
    name, arguments = make()
    with wnfused.use_backend("reference"):
        same_as_python(name, arguments)
        assert chosen == [name] * 2
    with wnfused.use_backend("native"):
        same_as_python(name, arguments)
        assert chosen == [name] * 3
    with wnfused.use_backend("triton"), pytest.raises(wnfused.BackendUnavailableError):
        getattr(C_OPS, name)(*arguments)


@pytest.mark.parametrize("op", [C_OPS, PYTHON_OPS])
def test_what_kernels_refuse(op):
    x, v, g, bias = torch.randn(2, 5), torch.randn(4, 5), torch.ones(4), torch.ones(4)
    with pytest.raises(KeyError, match="tanh"):
        op.linear(x, v, g, bias, None, 0, "tanh", 0.1)
    with pytest.raises(RuntimeError):
        op.linear(x, v[:, :4], g, bias, None, 0, "relu", 0.1)
    with pytest.raises(RuntimeError):
        op.linear(x, v.to(torch.bfloat16), g, bias, None, 0, "relu", 0.1)


@pytest.mark.parametrize("make", [linear_call, conv_call, stage_call])
def test_python_records_what_there_is_to_record(make, chosen):
    """The derivatives, of any order, are those of the op's registration; the kernels are called past Python."""
    name, arguments = make()
    op, wanted = getattr(C_OPS, name), getattr(reference, name)(*arguments)[0]
    assert not op(*arguments)[0].requires_grad
    leaves = [a.requires_grad_() for a in arguments if isinstance(a, torch.Tensor)]
    with torch.no_grad():
        assert not op(*arguments)[0].requires_grad
    y = op(*arguments)[0]
    assert chosen == []
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)
    found, wanted = (two_derivatives(of, leaves) for of in (y, getattr(reference, name)(*arguments)[0]))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def two_derivatives(y, leaves):
    first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
    return first, torch.autograd.grad(sum(t.square().sum() for t in first), leaves)


@pytest.mark.parametrize("make", [linear_call, vendor_call, stage_call, lambda: conv_call(dim=1)])
def test_autocast_does_not_reach_into_a_kernel(make):
    """Nor into the vendor's, nor into torch's own ops, of which the last call is composed: it alone fails where nothing
    keeps autocast away, as torch's C interface goes past it."""
    name, arguments = make()
    wanted = getattr(C_OPS, name)(*arguments)[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(getattr(C_OPS, name)(*arguments)[0], wanted)


def test_a_compiled_model_goes_past_python(chosen):
    model = torch.nn.Sequential(
        wnfused.WNConv2d(3, 8, 3, padding=1, activation="relu"),
        wnfused.WNResidualStage(8, 8, 2),
        torch.nn.Flatten(),
        wnfused.WNLinear(8 * 16, 5),
    )
    compiled = torch.compile(model, fullgraph=True)
    x = torch.randn(2, 3, 4, 4)
    compiled(x).sum().backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    chosen.clear()
    for parameter in model.parameters():
        parameter.grad = None
    compiled(x).sum().backward()
    assert chosen == []
    torch.testing.assert_close([p.grad for p in model.parameters()], wanted)
    model.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], wanted)


def test_a_process_that_compiles_first_goes_past_python():
    """The library is opened while the graph is made."""
    script = (
        "import torch, wnfused\nfrom wnfused import dispatch\nasked = []\nselect = dispatch.select\n"
        "dispatch.select = lambda op, arguments: asked.append(op) or select(op, arguments)\n"
        "torch.compile(wnfused.WNLinear(3, 4), backend='aot_eager')(torch.ones(2, 3)).sum().backward()\n"
        "assert asked == [], asked\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
