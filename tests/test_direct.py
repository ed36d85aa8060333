"""The fast path from a layer to its C++ kernel: the same answers, errors and graph as the long one."""

import contextlib
import inspect
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import wnfused
from wnfused import dispatch
from wnfused.backends import native_autograd, native_entry
from wnfused.backends.triton import strategy
from wnfused.functional import (
    conv1d,
    conv2d,
    conv_transpose1d,
    conv_transpose2d,
    conv_transpose3d,
    linear,
    residual_stage,
    weight_norm,
)
from wnfused.ops import _direct

pytestmark = pytest.mark.skipif(not dispatch.prefers_native(), reason="the C++ kernels are not what runs here")


def tensors(*shapes):
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


LAYERS = {
    "linear": (lambda *t: linear(*t[:4], activation="relu", residual=t[4]), ((3, 5), (4, 5), (4, 1), (4,), (3, 4))),
    "linear_of_norm": (
        lambda *t: linear(*t[:4], activation="relu", residual=t[4], dim=None),
        ((3, 5), (4, 5), (), (4,), (3, 4)),
    ),
    "linear_of_norm, g like v": (
        lambda *t: linear(*t[:4], activation="relu", residual=t[4], dim=None),
        ((3, 5), (4, 5), (1, 1), (4,), (3, 4)),
    ),
    "linear_of_columns": (
        lambda *t: linear(*t[:4], activation="leaky_relu", residual=t[4], dim=1),
        ((2, 3, 5), (4, 5), (1, 5), (4,), (2, 3, 4)),
    ),
    "conv1d": (
        lambda *t: conv1d(*t[:4], (1,), (1,), (1,), activation="leaky_relu", residual=t[4]),
        ((2, 3, 7), (4, 3, 3), (4, 1, 1), (4,), (2, 4, 7)),
    ),
    "conv2d": (
        lambda *t: conv2d(*t[:4], (1, 1), (1, 1), (1, 1), residual=t[4]),
        ((2, 3, 5, 5), (4, 3, 3, 3), (4,), (4,), (2, 4, 5, 5)),
    ),
    "conv_transpose1d": (
        lambda *t: conv_transpose1d(*t[:4], (2,), (1,), (1,), 1, (1,), activation="relu", residual=t[4]),
        ((2, 4, 5), (4, 3, 4), (4, 1, 1), (3,), (2, 3, 11)),
    ),
    "conv_transpose2d": (
        lambda *t: conv_transpose2d(*t[:4], (2, 2), (1, 1), (0, 0), 2, (1, 1), residual=t[4]),
        ((2, 4, 3, 3), (4, 3, 3, 3), (4,), (6,), (2, 6, 5, 5)),
    ),
}
STAGE = (residual_stage, ((2, 3, 5, 5), (2, 2, 3, 3, 3, 3), (2, 2, 3), (2, 2, 3)))
layers = pytest.mark.parametrize("name", LAYERS)


@pytest.fixture(autouse=True, params=["C++ entry", "C++", "Python"])
def nodes(request, monkeypatch):
    """What layers are recorded by, and whether Python enters them in C++."""
    if request.param == "C++ entry":
        if native_entry.unavailable() is not None:
            pytest.skip(native_entry.unavailable())
        return request.param
    monkeypatch.setattr(native_entry, "layer", lambda name: None)
    if request.param == "Python":
        if request.node.callspec.params.get("name", "").startswith("linear_of"):
            pytest.skip("what these are composed of is in the library that has the nodes")
        monkeypatch.setattr(native_autograd, "unavailable", lambda: "a test does without")
    elif native_autograd.unavailable() is not None:
        pytest.skip(native_autograd.unavailable())
    return request.param


@pytest.fixture
def taken(monkeypatch):
    """Whether the calls of a test took the fast path; a refusal on it counts as taken."""
    answers = []

    def observed(call):
        def run(*arguments):
            answers.append(True)
            y = call(*arguments)
            answers[-1] = y is not None
            return y

        return run

    for module, name in (
        ("linear", "_direct"),
        ("linear", "_direct_of_norm"),
        ("conv", "_direct"),
        ("conv", "_direct_transposed"),
    ):
        module = sys.modules[f"wnfused.ops.{module}"]
        monkeypatch.setattr(module, name, observed(getattr(module, name)))
    norm = sys.modules["wnfused.ops.weight_norm"]
    is_direct = norm._is_direct
    monkeypatch.setattr(norm, "_is_direct", lambda *a: answers.append(is_direct(*a)) or answers[-1])
    return answers


@layers
def test_first_and_second_derivatives_are_those_of_the_reference(name, taken):
    function, shapes = LAYERS[name]
    inputs = tensors(*shapes)
    with wnfused.use_backend("reference"):
        wanted = function(*inputs)
        first_wanted = torch.autograd.grad(wanted.square().sum(), inputs, create_graph=True)
        second_wanted = torch.autograd.grad(sum(t.square().sum() for t in first_wanted), inputs)
    found = function(*inputs)
    assert taken == [False, True]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    first = torch.autograd.grad(found.square().sum(), inputs, create_graph=True)
    torch.testing.assert_close(first, first_wanted, rtol=1e-4, atol=1e-4)
    second = torch.autograd.grad(sum(t.square().sum() for t in first), inputs)
    torch.testing.assert_close(second, second_wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("shape", [(4, 5), (4, 3, 3, 3), (6,), (0, 3)])
@pytest.mark.parametrize("flat", [True, False])
def test_weight_norm_takes_it_too(shape, flat, nodes, taken):
    v, g = tensors(shape, shape[:1] if flat else (shape[0], *(1 for _ in shape[1:])))
    with torch.no_grad():
        v[:1] = 0

    def run(backend):
        with wnfused.use_backend(backend):
            w = weight_norm(v, g)
            first = torch.autograd.grad(w.sin().sum(), (v, g), create_graph=True)
            return w, *first, *torch.autograd.grad(sum(t.square().sum() for t in first), (v, g))

    wanted, found = run("reference"), run(None)
    assert taken == [False, nodes != "Python" and v.numel() > 0]  # its only node is in C++
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    (alone,) = torch.autograd.grad(weight_norm(v.detach(), g).sin().sum(), g)
    torch.testing.assert_close(alone, found[2])


def test_what_weight_norm_refuses_names_the_argument():
    v = torch.randn(4, 5)
    with pytest.raises(ValueError, match=r"g: shape \[1, 4\] does not fit v of \[4, 5\]"):
        weight_norm(v, torch.ones(1, 4))
    with pytest.raises(TypeError, match=r"g: dtype torch.float64 does not go with v of torch.float32"):
        weight_norm(v, torch.ones(4, dtype=torch.float64))


@layers
@pytest.mark.parametrize("which", range(5))
def test_each_gradient_alone(name, which):
    function, shapes = LAYERS[name]
    inputs = [t.detach() for t in tensors(*shapes)]
    inputs[which].requires_grad_()
    (found,) = torch.autograd.grad(function(*inputs).square().sum(), inputs[which])
    with wnfused.use_backend("reference"):
        (wanted,) = torch.autograd.grad(function(*inputs).square().sum(), inputs[which])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@layers
def test_an_output_that_the_backward_reads_is_guarded(name):
    function, shapes = LAYERS[name]
    y = function(*tensors(*shapes))
    y.mul_(2)  # allowed, as on any output
    if name in ("conv2d", "conv_transpose2d"):  # no activation: y is not kept
        y.sum().backward()
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_what_watches_a_call_takes_the_long_way(taken):
    function, shapes = LAYERS["linear"]
    inputs = tensors(*shapes)
    with wnfused.use_backend("reference"):
        function(*inputs)
    with torch.autocast("cpu", torch.float16):
        assert function(*inputs).dtype == torch.float16
    with FlopCounterMode(display=False):
        function(*inputs)
    function(*(t.half() for t in inputs))
    x, *parameters, residual = inputs
    torch.func.grad(lambda x: function(x, *parameters, residual.bfloat16()).float().sum())(x.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        torch.func.vmap(lambda x: function(x, *inputs[1:]))(x[None])
    assert taken == [False] * 6


@layers
def test_transforms_take_the_fast_way(taken, name, nodes):
    function, shapes = LAYERS[name]
    x, *rest = (t.detach() for t in tensors(*shapes))
    torch.func.grad(lambda x: function(x, *rest).sum())(x)
    torch.func.jvp(lambda x: function(x, *rest), (x,), (x,))
    torch.func.vmap(lambda x: function(x, *rest))(x[None])
    assert taken == [nodes != "Python"] * 3


class FunctionMode(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def default_device_and_mode():
    with torch.device("cpu"), FunctionMode() as mode:
        yield mode


@pytest.mark.parametrize("name", ["linear", "linear_of_norm", "conv2d", "conv_transpose2d", "residual_stage"])
def test_a_function_mode_sees_the_call(name, nodes):
    """As it sees a call of torch's own functions."""
    call, shapes = {**LAYERS, "residual_stage": STAGE}[name]
    inputs = tensors(*shapes)
    with default_device_and_mode() as mode:
        y = call(*inputs)
    assert getattr(wnfused.functional, name.removesuffix("_of_norm")) in mode.seen
    assert torch.equal(y, call(*inputs))


@pytest.mark.parametrize("dim", [None, 1])
@pytest.mark.parametrize("activation", [None, "relu", "leaky_relu"])
@pytest.mark.parametrize("shape", [(7, 9), (9,), (2, 3, 9), (0, 9)], ids=str)
def test_linear_layers_of_other_norms(dim, activation, shape):
    """Against the reference in float64; with rows, columns and inputs of zeros."""
    x, v = torch.randn(shape), torch.randn(6, 9)
    v[2], v[:, 4] = 0, 0
    g, bias = torch.randn(() if dim is None else (1, 9)), torch.randn(6)
    residual = torch.randn(*shape[:-1], 6)

    def run(dtype):
        inputs = [t.to(dtype, copy=True).requires_grad_() for t in (x, v, g, bias, residual)]
        y = linear(*inputs[:4], residual=inputs[4], activation=activation, negative_slope=0.2, dim=dim)
        return [y, *torch.autograd.grad(y.cos().sum(), inputs)]

    with wnfused.use_backend("reference"):
        wanted = run(torch.float64)
    for one, other in zip(run(torch.float32), wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("extent", [1, [1, 1], (1, 1)], ids=str)
def test_extents_of_any_form_take_it(extent, taken):
    x, v, g, b = tensors((2, 3, 5, 5), (4, 3, 3, 3), (4,), (4,))
    y = conv2d(x, v, g, b, extent, extent, extent)
    torch.testing.assert_close(y, conv2d(x, v, g, b, (1, 1), (1, 1), (1, 1)))
    z = conv_transpose2d(y, v, g, None, extent, extent, dilation=extent)
    torch.testing.assert_close(z, conv_transpose2d(y, v, g, None, (1, 1), (1, 1), dilation=(1, 1)))
    assert taken == [True] * 4


def test_cuda_tensors_are_left_to_others_where_the_libraries_have_no_layers(monkeypatch):
    x = SimpleNamespace(is_cuda=True, device=SimpleNamespace(index=0))
    for reason in (None, "no kernels for this device"):
        monkeypatch.setattr(_direct.native_cuda, "layers_unavailable", lambda device, reason=reason: reason)
        assert _direct._is_chosen(x) is (reason is None)


def test_libraries_without_layers_of_cuda_tensors_are_passed_over_with_one_warning(monkeypatch, forget_warnings):
    """``dispatch.order`` has them for no single layer, so nothing else would say so."""
    monkeypatch.setattr(_direct, "PLAIN", _direct.PLAIN | {FakeTensor})
    monkeypatch.setattr(_direct, "_OPTIONAL", _direct._OPTIONAL | {FakeTensor})
    monkeypatch.setattr(_direct.native_cuda, "layers_unavailable", lambda device: "it was not built")
    with FakeTensorMode():
        x, v, g, b = (torch.empty(shape, device="cuda") for shape in ((3, 5), (4, 5), (4, 1), (4,)))
        wide, along_columns = [t.double() for t in (x, v, g, b)], torch.empty(1, 5, device="cuda")
        image, kernel = torch.empty(2, 3, 5, 5, device="cuda"), torch.empty(4, 3, 3, 3, device="cuda")

    def told(call):
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            call()
        return [str(warning.message) for warning in given if warning.category is wnfused.BackendWarning]

    assert told(lambda: linear(*wide)) == []  # which they do not take
    assert told(lambda: linear(x, v, along_columns, b, dim=1)) == []
    with strategy.forced("fused"):
        assert told(lambda: linear(x, v, g, b)) == []
    assert told(lambda: linear(x, v, g, b)) == ["linear passes over backend 'native': it was not built"]
    assert told(lambda: linear(x, v, g, b)) == []
    assert told(lambda: conv2d(image, kernel, b)) == ["conv passes over backend 'native': it was not built"]
    message = "linear cannot run on backend 'native': it was not built"
    with wnfused.use_backend("native"), pytest.raises(wnfused.BackendUnavailableError, match=message):
        linear(x, v, g, b)


def stage(*inputs, **options):
    return residual_stage(*inputs, skip_scale=0.5, recompute=2, **options)


def test_a_stage_has_the_same_derivatives_however_it_is_recorded(nodes):
    x, v, g, bias = tensors(*STAGE[1])
    inputs = (x, v, g, bias)
    y = stage(*inputs)
    assert ("WNResidualStage" in y.grad_fn.name()) == (nodes != "Python")
    first = torch.autograd.grad(y.square().sum(), inputs, create_graph=True)
    second = torch.autograd.grad(sum(t.square().sum() for t in first), inputs, allow_unused=True)
    alone = [torch.autograd.grad(stage(*inputs).square().sum(), t)[0] for t in inputs]
    with wnfused.use_backend("reference"):
        wanted = stage(*inputs)
        first_wanted = torch.autograd.grad(wanted.square().sum(), inputs, create_graph=True)
        second_wanted = torch.autograd.grad(sum(t.square().sum() for t in first_wanted), inputs)
    for found, expected in ((y, wanted), (first, first_wanted), (alone, first_wanted), (second, second_wanted)):
        torch.testing.assert_close(found, type(found)(expected) if found is alone else expected, rtol=1e-3, atol=1e-3)


def test_a_stage_keeps_maps_for_a_backward_alone():
    inputs = [t.detach() for t in tensors(*STAGE[1])]
    assert stage(*inputs).grad_fn is None
    with torch.no_grad():
        assert stage(*tensors(*STAGE[1])).grad_fn is None
    inputs[3].requires_grad_()
    stage(*inputs).sum().backward()
    assert inputs[3].grad is not None
    x = tensors(STAGE[1][0])[0]
    stage(x, *(t.detach() for t in inputs[1:])).sum().backward()
    assert x.grad is not None


def test_a_stage_whose_inputs_are_written_to_has_no_backward():
    x, v, g, bias = tensors(*STAGE[1])
    y = stage(x, v, g, bias)
    y.mul_(2)  # allowed, as on any output
    with torch.no_grad():
        v.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("first", ["reference", None])
def test_a_checkpointed_stage_may_run_again_under_another_backend(first):
    inputs = tensors(*STAGE[1])
    wanted = torch.autograd.grad(stage(*inputs).sum(), inputs)
    with wnfused.use_backend(first):
        y = checkpoint(stage, *inputs, use_reentrant=False)
    with wnfused.use_backend("reference" if first is None else None):
        found = torch.autograd.grad(y.sum(), inputs)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"recompute": 0}, ValueError, "recompute: 0"),
        ({"skip_scale": float("inf")}, ValueError, "skip_scale: inf must be finite"),
        ({"skip_scale": "1"}, TypeError, "skip_scale: expected a number, got str"),
        ({"bias": None}, TypeError, "bias: expected a Tensor, got NoneType"),
        ({"g": torch.ones(2, 3)}, ValueError, r"g: shape \[2, 3\] does not fit; use \[2, 2, 3\]"),
        ({"x": torch.ones(2, 4, 5, 5)}, ValueError, r"x: shape \[2, 4, 5, 5\] has 4 channels, v has 3"),
    ],
)
def test_what_a_stage_refuses_names_the_argument(options, error, message):
    given = dict(zip(("x", "v", "g", "bias"), tensors(*STAGE[1]), strict=True))
    with pytest.raises(error, match=message):
        residual_stage(**(given | options))


@pytest.mark.parametrize("name", ["linear", "conv1d", "conv2d", "stage"])
@pytest.mark.parametrize("within", [True, False])
def test_autocast_casts_as_on_the_long_way(name, within, monkeypatch):
    """Whose kernels see no autocast, whether the backward runs within the context or outside."""
    function, shapes = {**LAYERS, "stage": STAGE}[name]
    inputs = tensors(*shapes)

    def run():
        with torch.autocast("cpu", torch.bfloat16):
            y = function(*inputs)
            if within:
                return y, torch.autograd.grad(y.square().sum(), inputs)
        return y, torch.autograd.grad(y.square().sum(), inputs)

    y, found = run()
    node = type(y.grad_fn).__name__
    assert "Direct" in node or node == "CppFunction"
    monkeypatch.setattr(native_entry, "layer", lambda name: None)
    monkeypatch.setattr(_direct, "is_open", lambda *_: False)
    long_y, wanted = run()
    assert y.dtype == long_y.dtype
    assert torch.equal(y, long_y)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)


def test_checkpointing_and_inference_mode(taken):
    function, shapes = LAYERS["linear"]
    inputs = tensors(*shapes)
    wanted = torch.autograd.grad(function(*inputs).sum(), inputs)
    found = torch.autograd.grad(checkpoint(function, *inputs, use_reentrant=False).sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    with torch.inference_mode():
        assert function(*inputs).is_inference()
    assert all(taken)


@layers
@pytest.mark.parametrize("first", ["reference", "native"])
def test_a_checkpoint_may_run_again_under_another_backend(name, first, taken):
    function, shapes = LAYERS[name]
    inputs = tensors(*shapes)
    wanted = torch.autograd.grad(function(*inputs).sum(), inputs)
    with wnfused.use_backend("reference" if first == "reference" else None):
        y = checkpoint(function, *inputs, use_reentrant=False)
    with wnfused.use_backend("reference" if first == "native" else None):
        found = torch.autograd.grad(y.sum(), inputs)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert {True, False} <= set(taken)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((3, 4), (4, 5), (4, 1)), r"x: shape \[3, 4\] does not end in in_features = 5"),
        (((3, 5), (4, 5), (1, 4)), r"g: shape \[1, 4\] does not fit v of \[4, 5\]"),
        (((3, 5), (4, 5), (4, 1), (5,)), r"bias: shape \[5\] does not fit; use \[4\]"),
        (((3, 5), (4, 5, 1), (4, 1)), r"v: shape \[4, 5, 1\] is not"),
    ],
)
def test_a_refusal_names_the_argument(arguments, message, taken):
    with pytest.raises(ValueError, match=message):
        linear(*tensors(*arguments))
    assert taken == [True]


def test_a_refusal_names_dtypes_residuals_and_geometry(taken):
    x, v, g = tensors((3, 5), (4, 5), (4, 1))
    with pytest.raises(TypeError, match=r"x: dtype torch.float32 does not go with v .* of torch.bfloat16"):
        linear(x, v.bfloat16(), g)
    with pytest.raises(ValueError, match=r"residual: \[3, 5\]"):
        linear(x, v, g, residual=x)
    with pytest.raises(ValueError, match=r"negative_slope: -1.0 must be finite"):
        linear(x, v, g, activation="leaky_relu", negative_slope=-1.0)
    x, v, g = tensors((1, 3, 2, 2), (4, 3, 3, 3), (4,))
    with pytest.raises(ValueError, match=r"stride: \(1,\) must|x: spatial size \[2, 2\] is too small"):
        conv2d(x, v, g, None, (1,), (0,), (1,))
    with pytest.raises(ValueError, match=r"x: spatial size \[2, 2\] is too small"):
        conv2d(x, v, g, None, (1, 1), (0, 0), (1, 1))
    with pytest.raises(ValueError, match=r"padding: \(-1, 0\)"):
        conv2d(x, v, g, None, (1, 1), (-1, 0), (1, 1))
    x, v, g = tensors((1, 3, 2, 2), (3, 4, 3, 3), (3,))
    geometry = ((1, 1), (0, 0), (0, 0), 1, (1, 1))
    with pytest.raises(ValueError, match=r"residual: \[1, 1, 1, 1\]"):
        conv_transpose2d(x, v, g, None, *geometry, residual=torch.ones(1, 1, 1, 1))
    with pytest.raises(ValueError, match=r"bias: shape \[3\] does not fit; use \[4\]"):
        conv_transpose2d(x, v, g, g, *geometry)
    with pytest.raises(ValueError, match=r"negative_slope: -1.0 must be finite"):
        conv_transpose2d(x, v, g, None, *geometry, activation="leaky_relu", negative_slope=-1.0)
    with pytest.raises(TypeError, match=r"g: dtype torch.float64"):
        conv_transpose2d(x, v, g.double(), None, *geometry)
    assert all(taken)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_residual_of_another_dtype_is_refused_however_the_layer_is_run(groups, dtype):
    x, v, g = tensors((1, 4, 2, 2), (4, 2, 3, 3), (4,))
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    residual = torch.ones(1, 2 * groups, 4, 4, dtype=other)
    with pytest.raises(ValueError, match=r"residual: .* does not fit the output"):
        conv_transpose2d(x.to(dtype), v, g, None, 1, 0, 0, groups, 1, residual=residual)


@pytest.mark.parametrize("narrow", ["v", "g", "bias"])
def test_narrow_parameters_of_a_stage_in_float32_are_refused(narrow):
    x, v, g, bias = tensors((1, 2, 4, 4), (1, 2, 2, 2, 3, 3), (1, 2, 2), (1, 2, 2))
    given = {"x": x, "v": v, "g": g, "bias": bias}
    given[narrow] = given[narrow].bfloat16()
    with pytest.raises(TypeError, match=rf"{narrow}: dtype torch.bfloat16|with v .* of torch.bfloat16"):
        wnfused.functional.residual_stage(**given)


def test_a_transposed_layer_of_no_images_may_have_an_empty_output():
    for dtype in (torch.float32, torch.float64):
        x, v, g = (t.to(dtype) for t in tensors((0, 2, 1, 3), (2, 2, 1, 1), (2,)))
        assert conv_transpose2d(x, v, g, None, 1, (0, 1)).shape == (0, 2, 1, 1)
        assert conv_transpose2d(x[:, :, :, :2], v, g, None, 1, (0, 1)).shape == (0, 2, 1, 0)


def test_signatures_can_be_inspected():
    names = list(inspect.signature(conv2d).parameters)
    assert names[:8] == ["x", "v", "g", "bias", "stride", "padding", "dilation", "groups"]
    assert list(inspect.signature(conv_transpose3d).parameters)[6] == "output_padding"
    assert conv1d.__name__ == "conv1d"
    assert all(size in conv1d.__doc__ for size in ("conv1d", "[N, C_in, W]", "C_in / groups, k_w]", "[C_out, 1, 1]"))
    assert all(size in conv_transpose3d.__doc__ for size in ("[C_in, D, H, W]", "[C_in, 1, 1, 1, 1]", "D', H', W'"))


@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("mode", ["zeros", "reflect", "circular"])
def test_named_paddings_and_modes_take_the_short_way(padding, mode, taken):
    layer = wnfused.WNConv1d(3, 4, 3, dilation=2, padding=padding, padding_mode=mode)
    x = torch.randn(2, 3, 9)
    y = layer(x)
    assert taken == [True]
    torch.testing.assert_close(y, wnfused.fold(layer)(x), rtol=1e-4, atol=1e-5)
