"""Any arguments that torch's layer takes: the same output and gradients as torch's layer under its own weight norm."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import wnfused

pytestmark = pytest.mark.usefixtures("one_thread")
SETTINGS = settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
KINDS = {
    (1, False): (nn.Conv1d, wnfused.WNConv1d), (2, False): (nn.Conv2d, wnfused.WNConv2d),
    (3, False): (nn.Conv3d, wnfused.WNConv3d), (1, True): (nn.ConvTranspose1d, wnfused.WNConvTranspose1d),
    (2, True): (nn.ConvTranspose2d, wnfused.WNConvTranspose2d),
    (3, True): (nn.ConvTranspose3d, wnfused.WNConvTranspose3d),
}  # fmt: skip
EPS = {torch.float32: 2e-7, torch.float64: 1e-15}


@st.composite
def convolutions(draw):
    spatial, transposed = draw(st.sampled_from(list(KINDS)))
    groups = draw(st.sampled_from([1, 1, 2, 3]))

    def extents(low, high):
        one = st.integers(low, high)
        several = st.tuples(*[one] * spatial)
        return st.one_of(one, several, several.map(list), one.map(lambda n: (n,) * spatial))

    keywords = {
        "in_channels": groups * draw(st.integers(1, 3)), "out_channels": groups * draw(st.integers(1, 3)),
        "kernel_size": draw(extents(1, 3)), "stride": draw(extents(1, 3)), "dilation": draw(extents(1, 2)),
        "padding": draw(extents(0, 2)), "groups": groups, "bias": draw(st.booleans()),
    }  # fmt: skip
    if transposed:
        strides, dilations = keywords["stride"], keywords["dilation"]
        least = min(*(strides if isinstance(strides, (tuple, list)) else [strides]), 3)
        keywords["output_padding"] = draw(st.integers(0, max(least - 1, 0))) if dilations else 0
    else:
        keywords["padding_mode"] = draw(st.sampled_from(["zeros", "zeros", "reflect", "replicate", "circular"]))
        if draw(st.integers(0, 3)) == 0:
            keywords["padding"] = draw(st.sampled_from(["same", "valid"]))
            keywords["stride"] = 1
    dim = draw(st.sampled_from([None, 0, 0, *range(spatial + 2)]))
    return spatial, transposed, keywords, dim


def compared(theirs, ours, x, dtype, normalise):
    """Output and gradients, against the plain layer whose weight is the composite of torch's own ops."""
    v, g = ours.weight_v, ours.weight_g
    with torch.no_grad():  # away from 0, where 1 / ||v|| would magnify rounding
        v.copy_((0.5 + torch.rand_like(v)) * torch.randn_like(v).sign())
        g.uniform_(-2, 2)
    w = v * (g / torch.linalg.vector_norm(v, dim=normalise, keepdim=True)) if normalise else v.sign() * g
    given = {"weight": w} if ours.bias is None else {"weight": w, "bias": ours.bias}
    x = x.requires_grad_()
    expected = torch.func.functional_call(theirs, given, (x,))
    y = ours(x)
    assert (y.shape, y.dtype) == (expected.shape, expected.dtype)
    leaves = [x, *ours.parameters()]
    weights = torch.randn_like(expected)
    found = torch.autograd.grad(y, leaves, weights)
    wanted = torch.autograd.grad(expected, leaves, weights, retain_graph=True)
    # Sums of at most K terms round by sqrt(K) eps of their size; a gradient of v is a difference of two of them, up to
    # |g| / ||v|| <= 4 times the gradient of w in size.
    (dw,) = torch.autograd.grad(expected, w, weights)
    bound = 8 * EPS[dtype] * math.sqrt(max(w.numel(), weights.numel(), 1))
    for one, other in zip((y, *found), (expected, *wanted), strict=True):
        size = max([1.0, *(4 * float(t.detach().abs().max()) for t in (other, dw) if t.numel())])
        assert one.shape == other.shape
        assert not other.numel() or float((one - other).detach().abs().max()) <= bound * size


@SETTINGS
@given(convolutions(), st.sampled_from(list(EPS)), st.booleans(), st.integers(0, 2), st.integers(0, 2**20))
def test_convolutions(drawn, dtype, batched, batch, seed):
    spatial, transposed, keywords, dim = drawn
    torch.manual_seed(seed)
    torch_kind, kind = KINDS[spatial, transposed]
    theirs = torch_kind(**keywords, dtype=dtype)
    ours = kind(**keywords, dtype=dtype, dim=dim)
    size = [int(n) for n in torch.randint(5, 8, (spatial,))]
    x = torch.randn([batch] * batched + [keywords["in_channels"], *size], dtype=dtype)
    try:
        theirs(x)
    except RuntimeError:  # torch refuses; so must we
        with pytest.raises((RuntimeError, ValueError)):
            ours(x)
        return
    spans = [d for d in range(spatial + 2) if dim is None or d != dim]
    compared(theirs, ours, x, dtype, spans)


@SETTINGS
@given(
    st.integers(1, 6), st.integers(1, 6), st.booleans(), st.sampled_from([None, 0, 1, -1, -2]),
    st.lists(st.integers(0, 3), max_size=3), st.sampled_from(list(EPS)), st.integers(0, 2**20),
)  # fmt: skip
def test_linear(inputs, outputs, bias, dim, leading, dtype, seed):
    torch.manual_seed(seed)
    theirs = nn.Linear(inputs, outputs, bias, dtype=dtype)
    ours = wnfused.WNLinear(inputs, outputs, bias, dtype=dtype, dim=dim)
    x = torch.randn([*leading, inputs], dtype=dtype)
    compared(theirs, ours, x, dtype, [d for d in range(2) if dim is None or d != dim % 2])


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded", "channels_last", "negative"])
def test_inputs_in_any_layout(layout):
    base = torch.randn(2, 6, 6, 6)
    x = {
        "transposed": base.transpose(1, 3), "sliced": base[:, 1:5, ::2, 1:], "expanded": base[:1].expand(3, 6, 6, 6),
        "channels_last": base.contiguous(memory_format=torch.channels_last), "negative": base.flip(2)[:, :, 1:],
    }[layout]  # fmt: skip
    layer = wnfused.WNConv2d(x.shape[1], 4, 3, activation="relu")
    torch.testing.assert_close(layer(x), layer(x.contiguous()))


def test_layers_without_features_are_allowed_as_torchs_are():
    for inputs, outputs in ((0, 3), (3, 0)):
        with pytest.warns(UserWarning, match="zero-element"):
            theirs = nn.Linear(inputs, outputs)
        ours = wnfused.WNLinear(inputs, outputs)
        x = torch.randn(2, inputs)
        assert ours(x).shape == theirs(x).shape
        assert torch.isfinite(ours(x)).all()
        assert ours.weight.shape == theirs.weight.shape


def test_what_torch_does_to_layers_works():
    """Fusing batch norm, flattening parameters, activation checkpointing, sharing memory, other devices."""
    conv, norm, x = wnfused.WNConv2d(3, 4, 3), nn.BatchNorm2d(4).eval(), torch.randn(2, 3, 5, 5)
    norm.running_mean.normal_()
    fused = nn.utils.fusion.fuse_conv_bn_eval(conv.eval(), norm)
    torch.testing.assert_close(fused(x), norm(conv(x)), rtol=1e-4, atol=1e-5)

    vector = nn.utils.parameters_to_vector(conv.parameters())
    nn.utils.vector_to_parameters(2 * vector, conv.parameters())
    torch.testing.assert_close(nn.utils.parameters_to_vector(conv.parameters()), 2 * vector)

    expected = torch.autograd.grad(conv(x).square().sum(), conv.parameters())
    for reentrant in (False, True):
        y = torch.utils.checkpoint.checkpoint(conv, x.clone().requires_grad_(), use_reentrant=reentrant)
        conv.zero_grad()
        y.square().sum().backward()
        for parameter, gradient in zip(conv.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)

    conv.share_memory()
    assert conv.weight_v.is_shared()
    meta = conv.to("meta")
    assert meta(x.to("meta")).shape == (2, 4, 3, 3)
