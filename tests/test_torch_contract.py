"""What torch asks of a custom op: ``opcheck`` on every op, fullgraph ``torch.compile``, ``torch.export``."""

import warnings

import pytest
import torch
from samples import BY_NAME
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.library import opcheck
from torch.utils._pytree import tree_leaves

import wnfused
from wnfused import WNConv2d, WNLinear, WNResidualStage

OPS = torch.ops.wnfused


def floats(*shapes, grad=True):
    return [torch.randn(shape, requires_grad=grad) for shape in shapes]


def weight_norm():
    return (*floats((4, 3), (4, 1)),)


def linear():
    return (*floats((5, 3), (4, 3), (4, 1), (4,), (5, 4)), 0, "relu")


def conv():
    return (*floats((2, 3, 5, 5), (4, 3, 3, 3), (4,)), None, None, [2, 2], [1, 1], [1, 1], False, [0, 0], 1)


def residual_stage():
    return (*floats((2, 16, 4, 4), (2, 2, 16, 16, 3, 3), (2, 2, 16), (2, 2, 16)),)


@pytest.mark.parametrize("make", [weight_norm, linear, conv, residual_stage], ids=lambda make: make.__name__)
def test_opcheck_with_gradients(make):
    opcheck(getattr(OPS, make.__name__).default, make())


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("recompute", [0, 2])
def test_shapes_and_dtypes_of_what_a_bfloat16_stage_keeps(recompute, save):
    arguments = [a.detach().bfloat16() for a in residual_stage()]
    opcheck(OPS.residual_stage.default, (*arguments, 1.0, recompute, save), test_utils="test_faketensor")


def backward_arguments(name):
    if name == "weight_norm":
        return (*floats((4, 3), (4, 3), (4, 1), (4,), grad=False),)
    if name == "linear":
        dy, y, x, v, g, norm = floats((5, 4), (5, 4), (5, 3), (4, 3), (4, 1), (4,), grad=False)
        return dy, y, x, v, g, norm.abs(), [True, True, False, True], 0, "relu"
    if name == "conv":
        dy, y, x, v, g, norm = floats((2, 4, 3, 3), (2, 4, 3, 3), (2, 3, 5, 5), (4, 3, 3, 3), (4,), (4,), grad=False)
        geometry = ([2, 2], [1, 1], [1, 1], False, [0, 0], 1)
        return dy, y, x, v, g, norm.abs(), [True, True, True, False], *geometry
    x, v, g, b = (t.detach() for t in residual_stage())
    y, norm, maps, _ = OPS.residual_stage(x, v, g, b)
    return torch.randn_like(y), v, g, b, norm, maps


@pytest.mark.parametrize("name", ["weight_norm", "linear", "conv", "residual_stage"])
def test_opcheck_of_the_backwards(name):
    opcheck(getattr(OPS, f"{name}_backward").default, backward_arguments(name))


@pytest.mark.parametrize("backend", [None, "reference"])
def test_dtypes_of_a_stages_backward_without_gradients_of_its_parameters(backend):
    """Those of the parameters, empty as they are."""
    x, *parameters = (t.detach() for t in residual_stage())
    y, norm, maps, _ = OPS.residual_stage(x.bfloat16(), *parameters)
    with wnfused.use_backend(backend):
        opcheck(OPS.residual_stage_backward.default, (y, *parameters, norm, maps, 1.0, 0, False))


@pytest.mark.parametrize("name", ["linear", "residual_stage"])
def test_a_direct_call_of_an_op_has_gradients(name):
    """Without a registration of its own, a direct call would be silently cut off from the graph."""
    arguments = {"linear": linear, "residual_stage": residual_stage}[name]()
    y = getattr(OPS, name)(*arguments)[0]
    public = wnfused.functional.residual_stage(*arguments) if name == "residual_stage" else None
    if name == "linear":
        public = wnfused.functional.linear(*arguments[:4], residual=arguments[4], activation="relu")
    tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
    for found, expected in zip(
        torch.autograd.grad(y.sum(), tensors), torch.autograd.grad(public.sum(), tensors), strict=True
    ):
        torch.testing.assert_close(found, expected)


def test_a_stage_called_without_saving_says_so_in_backward():
    y = OPS.residual_stage(*residual_stage(), 1.0, 0, False)[0]
    with pytest.raises(RuntimeError, match="call it with save=True"):
        y.sum().backward()


MODELS = {
    "linear": (lambda: torch.nn.Sequential(WNLinear(6, 8, activation="relu"), WNLinear(8, 3)), (4, 6)),
    "conv": (lambda: WNConv2d(4, 8, 3, padding=1, activation="leaky_relu"), (2, 4, 6, 6)),
    "stage": (lambda: WNResidualStage(8, 16, 3, 2), (2, 8, 8, 8)),
    "recompute": (lambda: WNResidualStage(16, 16, 3, recompute=2), (2, 16, 4, 4)),
}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_fullgraph_compile_forward_and_backward(name, channels_last):
    build, shape = MODELS[name]
    if channels_last and len(shape) != 4:
        pytest.skip("no channels")
    model, x = build(), torch.randn(shape)
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    compiled = torch.compile(model, fullgraph=True)
    for batch in (x, torch.cat([x, x])):
        y, expected = compiled(batch), model(batch)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
        found = torch.autograd.grad(y.square().sum(), list(model.parameters()))
        wanted = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("linear", {"linear"}),
        ("conv", {"conv"}),
        ("stage", {"conv", "residual_stage"}),
        ("recompute", {"residual_stage"}),
    ],
)
def test_a_compiled_model_calls_the_ops(name, ours):
    """And not the reference, which what is exported is made of."""
    build, shape = MODELS[name]
    called = set()

    def collect(graph, _):
        called.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch._dynamo.reset()
    torch.compile(build(), backend=collect, fullgraph=True)(torch.randn(shape))
    assert {target for target in called if target.startswith("wnfused.")} == {f"wnfused.{op}.default" for op in ours}
    assert not any("convolution" in target or "matmul" in target for target in called)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_of_strided_inputs_and_dynamic_shapes(dynamic):
    torch._dynamo.reset()
    linear = WNLinear(16, 8, activation="leaky_relu")
    conv = wnfused.WNConv1d(16, 8, 3, padding=1)
    stage = WNResidualStage(16, 16, 2)

    def model(x):
        y = linear(x.transpose(1, 2)).sum() + conv(x).sum() + conv(x.transpose(1, 2).contiguous().transpose(1, 2)).sum()
        return y + stage(x.unsqueeze(-1)).sum()

    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic)
    for length in (9, 12):
        x = torch.randn(2, 16, length, requires_grad=True)
        (found,) = torch.autograd.grad(compiled(x), x)
        (expected,) = torch.autograd.grad(model(x), x)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("volumes", [1, 2])
@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_compile_of_volumes_in_channels_last_3d(volumes, kernel):
    """Small ones, which torch unfolds where there is one, and 5x5x5 kernels, which are left to it."""
    torch._dynamo.reset()
    model = torch.nn.Sequential(
        wnfused.WNConv3d(16, 16, kernel, padding=kernel // 2, activation="relu"), wnfused.WNConv3d(16, 8, 1)
    )
    x = torch.randn(volumes, 16, 3, 4, 5).contiguous(memory_format=torch.channels_last_3d).requires_grad_()
    found, wanted = torch.compile(model, fullgraph=True)(x), model(x)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), x) for y in (found, wanted)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


# Of the shapes that layers have, in layouts that they have not: functions of the user's own weights.
PERMUTED = {
    "conv1d": (wnfused.functional.conv1d, (1, 16, 5), (16, 3, 16), (0, 2, 1)),
    "conv2d": (wnfused.functional.conv2d, (2, 4, 5, 5), (3, 3, 8, 4), (2, 3, 0, 1)),
    "conv2d, rows": (wnfused.functional.conv2d, (2, 4, 5, 5), (4, 8, 3, 3), (1, 0, 2, 3)),
    "conv_transpose2d": (wnfused.functional.conv_transpose2d, (1, 1, 5, 5), (3, 3, 1, 4), (2, 3, 0, 1)),
    "linear": (wnfused.functional.linear, (2, 4), (4, 8), (1, 0)),
    "stage": (
        lambda x, v, g: wnfused.functional.residual_stage(x, v, g.reshape(1, 2, 3), g.new_zeros(1, 2, 3)),
        (2, 3, 4, 4),
        (3, 3, 3, 3, 2, 1),
        (5, 4, 0, 1, 2, 3),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", PERMUTED)
@pytest.mark.filterwarnings("ignore::wnfused.BackendWarning")
def test_compile_of_permuted_parameters(name, dtype):
    torch._dynamo.reset()
    function, shape, stored, order = PERMUTED[name]
    v = torch.randn(stored, dtype=dtype).permute(order).requires_grad_()
    g = torch.rand(6 if name == "stage" else v.shape[0], dtype=dtype).requires_grad_()
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    with torch._inductor.config.patch(force_disable_caches=True):
        found, wanted = torch.compile(function, fullgraph=True)(x, v * 1, g), function(x, v * 1, g)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        for a, b in zip(*(torch.autograd.grad(y.square().sum(), (x, v, g)) for y in (found, wanted)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def forward_mode(function, parameters, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(parameters, forward_ad.make_dual(x, x.cos()))).tangent


# Functions of a loss of parameters and x.
TRANSFORMS = {
    "grad": lambda loss, p, x: grad(loss)(p, x),
    "vmap": lambda loss, p, x: vmap(lambda one: loss(p, one[None]))(x),
    "gradients of each sample": lambda loss, p, x: vmap(lambda one: grad(loss)(p, one[None]))(x),
    "jacrev": lambda loss, p, x: jacrev(loss, 1)(p, x),
    "jacfwd": lambda loss, p, x: jacfwd(lambda factor: loss(p, factor * x))(torch.ones(())),
    "jvp": lambda loss, p, x: jvp(lambda x: loss(p, x), (x,), (x.cos(),))[1],
    "vjp": lambda loss, p, x: vjp(lambda x: loss(p, x), x)[1](torch.ones(())),
    "forward mode": forward_mode,
    "product with the Hessian": lambda loss, p, x: jvp(grad(lambda x: loss(p, x)), (x,), (x.cos(),))[1],
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", ["linear", "conv", "stage"])
def test_transforms_in_compiled_functions(name, transform):
    torch._dynamo.reset()
    build, shape = MODELS[name]
    model, x = build(), torch.randn(shape)
    parameters = {key: parameter.detach() for key, parameter in model.named_parameters()}

    def transformed(parameters, x):
        def loss(parameters, x):
            return torch.func.functional_call(model, parameters, (x,)).square().sum()

        return TRANSFORMS[transform](loss, parameters, x)

    wanted = tree_leaves(transformed(parameters, x))
    assert any(tensor.any() for tensor in wanted)
    compiled = torch.compile(transformed, backend="aot_eager", fullgraph=True)
    for found, expected in zip(tree_leaves(compiled(parameters, x)), wanted, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())


def test_export_keeps_the_function():
    model = torch.nn.Sequential(WNConv2d(3, 4, 3, activation="relu"), WNResidualStage(4, 4, 2)).eval()
    x = torch.randn(2, 3, 8, 8)
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), model(x))


def test_fake_tensors_have_the_real_shapes_and_strides():
    from torch._subclasses.fake_tensor import FakeTensorMode

    for name in ("conv2d-last", "stage-last", "stage-one", "linear-3d"):
        sample = BY_NAME[name]
        tensors = [t.detach() for t in sample.tensors(torch.float32)]
        real = sample.run(*tensors)
        with FakeTensorMode() as mode:
            fake = sample.run(*(mode.from_tensor(t) for t in tensors))
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_a_trace_is_not_warned_of_checks():
    model = torch.nn.Sequential(
        wnfused.WNConv2d(3, 8, 3, padding="same", activation="relu"), wnfused.WNConv2d(8, 8, 4, padding="same"),
        wnfused.WNResidualStage(8, 8, 2),
        wnfused.WNConvTranspose2d(8, 4, 2, 2), torch.nn.Flatten(), wnfused.WNLinear(4 * 64, 5),
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("error", torch.jit.TracerWarning)
        traced = torch.jit.trace(model, torch.randn(2, 3, 4, 4))
    x = torch.randn(5, 3, 4, 4)
    torch.testing.assert_close(traced(x), model(x))


@pytest.mark.filterwarnings("ignore::wnfused.dispatch.BackendWarning")  # stages in float64
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dual", ["x", "dy", "dy of a call outside"])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: wnfused.WNLinear(5, 4, activation="relu"), (3, 5)),
        (lambda: wnfused.WNConv2d(3, 4, 3, padding=1), (2, 3, 6, 6)),
        (lambda: wnfused.WNConvTranspose1d(3, 4, 3), (2, 3, 7)),
        (lambda: wnfused.WNResidualStage(16, 16, 2), (2, 16, 4, 4)),
    ],
    ids=["linear", "conv", "conv_transpose", "stage"],
)
def test_forward_over_reverse_without_a_graph(make, shape, dual, dtype):
    """A backward inside a level of forward mode carries tangents, whether or not it is recorded."""
    torch.manual_seed(0)
    layer = make().to(dtype)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    t = torch.randn(shape, dtype=dtype)
    inputs = [x, *layer.parameters()]

    def tangents(backend):
        with wnfused.use_backend(backend):
            if dual == "dy of a call outside":
                y = layer(x)
            with forward_ad.dual_level():
                if dual == "x":
                    y = layer(forward_ad.make_dual(x, t))
                elif dual == "dy":
                    y = layer(x)
                c = torch.linspace(-1, 1, y.numel(), dtype=dtype).reshape(y.shape)
                dy = forward_ad.make_dual(c, c.square()) if dual != "x" else c
                found = torch.autograd.grad(y.tanh() if dual == "x" else y, inputs, dy)
                return [forward_ad.unpack_dual(gradient).tangent for gradient in found]

    tolerance = 1e-3 if dtype == torch.float32 else 1e-9
    found, expected = tangents(None), tangents("reference")
    assert any(tangent is not None for tangent in expected)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * b.abs().max().item())


LAYERS_AND_INPUTS = {
    "linear": (lambda: WNLinear(3, 4, activation="relu"), (2, 3)),
    "conv1d": (lambda: wnfused.WNConv1d(3, 4, 3), (2, 3, 9)),
    "conv2d": (lambda: WNConv2d(3, 4, 3, stride=(2, 1), padding=1, groups=1), (2, 3, 8, 9)),
    "conv3d": (lambda: wnfused.WNConv3d(2, 4, 3, groups=2), (1, 2, 5, 5, 5)),
    "transposed": (lambda: wnfused.WNConvTranspose2d(3, 4, 3, 2, output_padding=1), (2, 3, 5, 5)),
    "stage": (lambda: WNResidualStage(8, 8, 2), (2, 8, 6, 6)),
}


# Of a stage's second derivatives, those of the reference, torch captures a sum with None, and fails.
@pytest.mark.parametrize(
    ("kind", "penalised"),
    [(kind, p) for kind in LAYERS_AND_INPUTS for p in (False, True) if not (p and kind == "stage")],
)
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_compiled_autograd_runs_the_backward(kind, penalised):
    """The forward is eager: what its nodes keep must be something that the compiler can hash."""
    make, shape = LAYERS_AND_INPUTS[kind]
    layer, x = make(), torch.randn(shape, requires_grad=True)

    def loss_of():
        loss = layer(x).square().sum()
        return torch.autograd.grad(loss, x, create_graph=True)[0].square().sum() if penalised else loss

    leaves = [x, *layer.parameters()]
    expected = torch.autograd.grad(loss_of(), leaves)
    loss = loss_of()
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda loss: loss.backward(), backend="eager")(loss)
    for leaf, gradient in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad, gradient, rtol=0, atol=0)
