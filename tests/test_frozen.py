"""``wnfused.frozen``: the same outputs, weights computed once, nothing left behind."""

import contextlib
import copy
import pickle
import sys
import threading
from unittest.mock import patch

import numpy
import pytest
import torch
import torch.nn.utils.prune
from instruction_sets import ISAS
from torch import nn

import wnfused
from wnfused import WNConv2d, WNLinear, dispatch
from wnfused.backends import native
from wnfused.nn import WeightNormalised


def model():
    return nn.Sequential(
        WNConv2d(3, 8, 3, padding=1, padding_mode="reflect", activation="leaky_relu", negative_slope=0.2),
        wnfused.WNResidualBlock(8, 8), wnfused.WNResidualStage(8, 16, 3, 2), nn.Flatten(),
        WNLinear(16 * 9, 4, activation="relu"),
    )  # fmt: skip


def test_outputs_and_input_gradients_are_the_same():
    net, x = model(), torch.randn(2, 3, 6, 6)
    expected = net(x)
    with wnfused.frozen(net) as same, torch.no_grad():
        assert same is net
        torch.testing.assert_close(net(x), expected)
    net.requires_grad_(False)
    x.requires_grad_()
    (wanted,) = torch.autograd.grad(net(x).sum(), x)
    with wnfused.frozen(net):
        (found,) = torch.autograd.grad(net(x).sum(), x)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("kind", [WNConv2d, wnfused.WNConvTranspose2d])
@pytest.mark.parametrize("options", [{"stride": 2}, {"padding": 1, "dilation": 2}, {"stride": numpy.int64(2)}])
def test_options_set_anew_are_numbers_for_all_dims(kind, dim, options):
    layer, x = kind(4, 4, 3, dim=dim), torch.randn(2, 4, 6, 6)
    for name, value in options.items():
        setattr(layer, name, value)
    expected = layer(x)
    with torch.no_grad(), wnfused.frozen(layer):
        torch.testing.assert_close(layer(x), expected)
    assert all(getattr(layer, name) is value for name, value in options.items())


def test_weights_are_normalised_once():
    layer, x = WNLinear(4, 4, dim=1), torch.randn(2, 4)  # which no kernel normalises while it reads v
    with patch("wnfused.functional.linear", wraps=wnfused.functional.linear) as calls, torch.no_grad():
        with wnfused.frozen(layer):
            for _ in range(3):
                layer(x)
        assert calls.call_count == 0
        layer(x)
        assert calls.call_count == 1


def test_a_backend_asked_for_by_name_runs_the_layers():
    layer, x = WNLinear(4, 4), torch.randn(2, 4)
    reference = dispatch.backend_module("reference")
    with torch.no_grad(), wnfused.frozen(layer), wnfused.use_backend("reference"):
        with patch.object(reference, "linear", wraps=reference.linear) as calls:
            layer(x)
        assert calls.call_count == 1
    with torch.no_grad(), wnfused.frozen(layer), wnfused.use_backend("triton"):
        if wnfused.backend_status()["triton"] is not None:
            with pytest.raises(wnfused.BackendUnavailableError):
                layer(x)


@pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
def test_convolutions_left_to_the_vendor_keep_their_kernels_for_a_few_pixels():
    layer = wnfused.WNConv2d(64, 8, 12, padding=5, activation="relu")  # too many taps for the kernels for many pixels
    if not native.takes_few_pixels(layer.weight_v, 1, False):
        pytest.skip(f"not on {native.instruction_set()}")
    few, many = torch.randn(2, 64, 2, 2), torch.randn(2, 64, 19, 19)
    with torch.no_grad():
        expected = [layer(x) for x in (few, many)]
        with wnfused.frozen(layer):
            layer.weight_g.mul_(2)
            frozen = layer._frozen
            with patch.object(frozen.many, "forward", side_effect=AssertionError):
                assert torch.equal(layer(few), expected[0])
            with patch.object(frozen.few, "forward", side_effect=AssertionError):
                torch.testing.assert_close(layer(many), expected[1], rtol=0, atol=1e-5)
            every = torch.export.Dim("n", min=1, max=64)
            exported = torch.export.export(layer, (few,), dynamic_shapes=({0: every},)).module()
            wanted = expected[0].repeat(8, 1, 1, 1)
            torch.testing.assert_close(exported(few.repeat(8, 1, 1, 1)), wanted, rtol=0, atol=1e-5)


@pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
@pytest.mark.parametrize(("isa_name", "kept"), [("avx512", True), ("avx2", True), ("portable", False)])
def test_linear_layers_with_products_of_their_own_keep_them(isa_name, kept):
    if isa_name not in ISAS:
        pytest.skip(f"not on this processor: {isa_name}")
    layer, small, single = WNLinear(256, 256, activation="relu"), WNLinear(64, 64), WNLinear(64, 1)
    x, residual = torch.randn(20, 256), torch.randn(20, 256)
    torch.ops.wnfused_native.set_cpu_isa(isa_name)
    try:
        with torch.no_grad():
            expected = layer(x, residual=residual)
            with wnfused.frozen(layer), wnfused.frozen(small), wnfused.frozen(single):
                layer.weight_g.mul_(2)
                assert isinstance(layer._frozen, WNLinear) is isinstance(small._frozen, WNLinear) is kept
                assert not isinstance(single._frozen, WNLinear)
                found = layer(x, residual=residual)
        torch.testing.assert_close(found, expected)
        assert torch.equal(found, expected) or not kept
    finally:
        torch.ops.wnfused_native.set_cpu_isa("auto")


@pytest.mark.parametrize(
    ("layer", "size"),
    [
        (WNConv2d(16, 16, 3, padding=1, activation="relu"), (9, 9)),
        (WNConv2d(16, 32, 3, 2, 1, activation="relu"), (9, 9)),
        (wnfused.WNConv1d(16, 16, 7, padding=6, dilation=2), (40,)),
        (wnfused.WNConvTranspose1d(16, 16, 4, 2, 1, activation="leaky_relu"), (40,)),
        (wnfused.WNConv3d(16, 16, 3, padding=1, activation="relu"), (4, 9, 9)),
    ],
    ids=["3x3", "stride 2", "one dim", "transposed", "three dims"],
)
def test_convolutions_with_kernels_of_their_own_keep_them(layer, size):
    """They run as outside, on the weights as they were, activation and residual included."""
    x = torch.randn(2, 16, *size)
    with torch.no_grad():
        residual = torch.randn_like(layer(x))
        expected = layer(x, residual=residual)
        with wnfused.frozen(layer):
            layer.weight_g.mul_(3)
            assert torch.equal(layer(x, residual=residual), expected)
        assert not torch.equal(layer(x, residual=residual), expected)


@pytest.mark.skipif(not dispatch.prefers_native(), reason="the C++ kernels are not what runs here")
@pytest.mark.parametrize(
    "options", [{"padding": "same"}, {"padding": "same", "kernel_size": 4}, {"padding": 1, "padding_mode": "reflect"}]
)
def test_padded_in_any_way_they_keep_their_kernels(options):
    layer = WNConv2d(32, 32, **{"kernel_size": 3, **options})
    x = torch.randn(2, 32, 9, 8)
    wanted = layer(x).detach()
    with wnfused.frozen(layer), torch.no_grad():
        assert isinstance(layer._frozen, WNConv2d)
        assert torch.equal(layer(x), wanted)


def test_groups_of_few_channels_keep_their_kernels():
    """The vendor's, on a plain weight, take several times as long."""
    if native.instruction_set() not in ("avx2", "avx512", "avx512_bf16", "amx"):
        pytest.skip("no kernels of strips")
    layer, x = WNConv2d(24, 24, 3, padding=1, groups=4, activation="relu"), torch.randn(1, 24, 20, 20)
    with torch.no_grad():
        expected = layer(x)
        with wnfused.frozen(layer):
            assert type(layer._frozen).__name__ == "Kept"
            assert torch.equal(layer(x), expected)
            assert not layer._frozen.banks


@pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
@pytest.mark.parametrize("dim", [1, 2, None])
@pytest.mark.parametrize(
    "make", [lambda **o: wnfused.WNConvTranspose2d(64, 64, 4, 2, 1, **o), lambda **o: WNConv2d(64, 128, 3, 2, 1, **o)]
)
def test_convolutions_normalised_along_another_dim_keep_their_kernels(make, dim):
    layer, x = make(dim=dim, activation="relu"), torch.randn(2, 64, 9, 9)
    with torch.no_grad():
        layer.weight_v.select(dim or 0, 1).zero_()
        layer.weight_v[3].zero_()
        wanted = layer(x)
        state = copy.deepcopy(layer.state_dict())
        with wnfused.frozen(layer):
            torch.testing.assert_close(layer(x), wanted, rtol=1e-4, atol=1e-5)
            assert type(layer._frozen).__name__ == "Kept"
            layer.load_state_dict({name: 2 * entry for name, entry in state.items()})
            inside = layer(x)
        torch.testing.assert_close(inside, layer(x), rtol=1e-4, atol=1e-5)
        assert layer.dim == dim
        torch.testing.assert_close(layer.weight_v, 2 * state["weight_v"])


def test_training_inside_still_has_gradients_and_runs_as_always():
    net, x = model(), torch.randn(2, 3, 6, 6)
    net(x).sum().backward()
    wanted = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    with wnfused.frozen(net):
        net(x).sum().backward()
    for parameter, expected in zip(net.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, expected)


def test_it_ends_also_after_an_error_and_nests():
    layer = WNLinear(2, 2)
    with pytest.raises(ZeroDivisionError), wnfused.frozen(layer):
        raise ZeroDivisionError
    assert layer._frozen is None
    with wnfused.frozen(layer):
        with wnfused.frozen(layer):
            pass
        assert layer._frozen is not None
    layer.weight_g.data.mul_(2)
    x = torch.randn(1, 2)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), x @ layer.weight.T + layer.bias)


def test_contexts_that_overlap_hold_the_weights_until_the_last_ends():
    net, x = model(), torch.randn(2, 3, 6, 6)
    layers = [m for m in net.modules() if isinstance(m, WeightNormalised)]
    first, second = wnfused.frozen(net), wnfused.frozen(nn.ModuleList(layers))
    with torch.no_grad():
        first.__enter__()
        forms = [layer._frozen for layer in layers]
        second.__enter__()
        first.__exit__(None, None, None)
        assert None not in forms
        assert [layer._frozen for layer in layers] == forms
        net[0].weight_g.mul_(2)
        held = net(x)
        net.load_state_dict(net.state_dict())  # which is followed still
        assert not torch.allclose(net(x), held)
        second.__exit__(None, None, None)
    assert all(layer._frozen is None and not layer._load_state_dict_post_hooks for layer in layers)


@pytest.mark.parametrize(
    ("net", "size"),
    [
        (WNLinear(64, 64), (64,)),
        (wnfused.WNConv1d(4, 4, 3, padding=1, dim=1), (4, 9)),
        (WNConv2d(4, 4, 3, padding=1, padding_mode="reflect"), (4, 6, 6)),
        (wnfused.WNConvTranspose2d(4, 4, 3), (4, 5, 5)),
        (wnfused.WNResidualBlock(4, 8, 2), (4, 6, 6)),
        (wnfused.WNResidualStage(4, 8, 2, 2), (4, 6, 6)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_threads_enter_and_leave_as_they_like(net, size):
    x = torch.randn(2, *size)
    with torch.no_grad():
        expected = net(x)
    errors = []

    @torch.no_grad()
    def run():
        try:
            for _ in range(50):
                with wnfused.frozen(net):
                    torch.testing.assert_close(net(x), expected)
                copy.copy(net)
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []
    assert all(m._frozen is None for m in net.modules() if isinstance(m, WeightNormalised))
    assert not any(m._load_state_dict_post_hooks for m in net.modules())


@pytest.mark.parametrize("change", ["weight_g", "bias", "pruned"])
@pytest.mark.parametrize("padding", [0, "same"])
def test_layers_whose_parameters_are_computed_run_as_always(padding, change):
    layer, x = wnfused.WNConv1d(3, 4, 3, padding=padding), torch.randn(2, 3, 7)
    if change == "pruned":
        torch.nn.utils.prune.l1_unstructured(layer, "bias", 0.5)
    else:
        torch.nn.utils.parametrize.register_parametrization(layer, change, nn.Softplus())
    with torch.no_grad():
        expected = layer(x)
        with wnfused.frozen(layer):
            torch.testing.assert_close(layer(x), expected)


def test_copies_made_inside_are_ordinary_layers():
    layer = WNLinear(2, 2)
    with wnfused.frozen(layer):
        twins = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
        with pytest.raises(RuntimeError, match=r"cannot be written inside wnfused\.frozen"):
            layer.weight = nn.Parameter(torch.eye(2))
    assert all(twin._frozen is None for twin in twins)


@pytest.mark.parametrize(
    ("net", "write", "name"),
    [
        (WNLinear(3, 2), WNLinear.reset_parameters, "layer"),
        (wnfused.WNConvTranspose1d(3, 2, 2), wnfused.init.reset_layer_, "layer"),
        (wnfused.WNResidualStage(2, 4, 2), wnfused.WNResidualStage.reset_parameters, "stage"),
        (wnfused.WNResidualStage(2, 4, 2), wnfused.init.reset_stage_, "stage"),
        (nn.Sequential(WNLinear(3, 2)), wnfused.regularize.retract_, "model"),
    ],
)
def test_what_would_be_lost_is_refused(net, write, name):
    before = copy.deepcopy(net.state_dict())
    with (
        wnfused.frozen(net),
        pytest.raises(RuntimeError, match=rf"{name}: cannot be written inside wnfused\.frozen; leave"),
    ):
        write(net)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    write(net)


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match=r"model: expected an nn.Module, got str"), wnfused.frozen("model"):
        pass


def test_a_lazy_layer_without_a_shape_is_named():
    with (
        pytest.raises(ValueError, match=r"model: '1.weight_v' has no shape yet; run the model once"),
        wnfused.frozen(nn.Sequential(WNLinear(2, 2), wnfused.nn.WNLazyLinear(2))),
    ):
        pass


def test_one_call_norms_all_layers():
    net = model()
    layers = [m for m in net.modules() if isinstance(m, WeightNormalised)]
    kernel = dispatch.backend_module("reference")
    with wnfused.use_backend("reference"), patch.object(
        kernel, "weight_norm_many", wraps=kernel.weight_norm_many
    ) as calls, wnfused.frozen(net):  # fmt: skip
        assert [len(call.args[0]) for call in calls.call_args_list] == [len(layers)]


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_loaded_inside_is_seen(assign):
    net, other, x = model(), model(), torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        expected = other(x)
        with wnfused.frozen(net):
            before = net(x)
            net.load_state_dict(other.state_dict(), assign=assign)
            torch.testing.assert_close(net(x), expected)
            twin = copy.deepcopy(net)
        assert not torch.allclose(before, expected)
        torch.testing.assert_close(net(x), expected)
        twin.load_state_dict(model().state_dict())  # the copy is an ordinary model
        assert all(m._frozen is None for m in twin.modules() if isinstance(m, WeightNormalised))
    assert not any(m._load_state_dict_post_hooks for m in net.modules())


def test_what_is_folded_inside_loads_states():
    net, x = model(), torch.randn(2, 3, 6, 6)
    with torch.no_grad(), wnfused.frozen(net):
        expected = net(x)
        inside = wnfused.fold(copy.deepcopy(net))
        inside.load_state_dict(inside.state_dict())
        twin = copy.deepcopy(net)
    for plain in (inside, wnfused.fold(twin), pickle.loads(pickle.dumps(inside))):
        state = {name: value.clone() for name, value in plain.state_dict().items()}
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.zero_()
        plain.load_state_dict(state)
        torch.testing.assert_close(plain(x), expected)


@pytest.mark.parametrize("layer", [WNLinear(64, 64), WNLinear(256, 256), WNConv2d(16, 16, 3)], ids=str)
def test_a_model_that_is_moved_inside_runs_as_always(layer):
    x = torch.randn(2, 16, 5, 5) if isinstance(layer, WNConv2d) else torch.randn(3, layer.in_features)
    with torch.no_grad(), wnfused.frozen(layer):
        before = layer(x)
        torch.testing.assert_close(layer.double()(x.double()), before.double(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(layer.float()(x), before)


def test_other_parameters_are_seen():
    """Those of ``torch.func.functional_call`` take the places of a model's own for one call."""
    net, other, x = model(), model(), torch.randn(2, 3, 6, 6)
    given = [{name: p.detach() for name, p in m.named_parameters()} for m in (net, other)]
    with torch.no_grad(), wnfused.frozen(net):
        torch.testing.assert_close(torch.func.functional_call(net, given[1], (x,)), other(x))
        both = torch.vmap(lambda p: torch.func.functional_call(net, p, (x,)))(
            {name: torch.stack([g[name] for g in given]) for name in given[0]}
        )
        torch.testing.assert_close(both, torch.stack([net(x), other(x)]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_every_dtype_runs_frozen(dtype):
    layer, x = WNLinear(8, 4).to(dtype), torch.randn(3, 8).to(dtype)
    with torch.no_grad(), wnfused.frozen(layer):
        before = layer(x)
        layer.weight_g.data.mul_(2)  # unseen, as documented: so the frozen form is what ran
        assert torch.equal(layer(x), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "layer",
    [
        lambda: WNLinear(6, 5),
        lambda: WNConv2d(6, 5, 3, dim=1),
        lambda: WNConv2d(16, 24, 3, stride=2),
        lambda: wnfused.WNConvTranspose2d(6, 4, 3, groups=2),
    ],
    ids=["linear", "other norm", "strided", "grouped transposed"],
)
def test_vectorised_calls_under_autocast(layer, dtype):
    net = layer()
    sizes = (4, 2, net.weight.shape[1]) if isinstance(net, WNLinear) else (4, 2, net.in_channels, 5, 5)
    x = torch.randn(sizes).to(dtype)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted = torch.vmap(net)(x)
        with wnfused.frozen(net):
            found = torch.vmap(net)(x)
    assert found.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("shape", [(1, 24, 1, 1), (2, 24, 6, 6)])
def test_a_residual_that_does_not_fit_is_refused_inside_too(shape):
    layer = WNConv2d(16, 24, 3, padding=1, dim=1, dtype=torch.bfloat16)
    x, residual = torch.ones(2, 16, 6, 6, dtype=torch.bfloat16), torch.ones(shape)
    with (
        wnfused.frozen(layer),
        torch.no_grad(),
        pytest.raises(ValueError, match=r"residual: .* does not fit"),
    ):
        layer(x, residual)


@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("features", [7, 33, 100])
def test_rows_cut_out_of_wider_ones_do_not_meet_their_neighbours(features, dim):
    """In bfloat16; torch's own product reads behind the rows."""
    wide = torch.full((300, features + 33), float("nan"), dtype=torch.bfloat16)
    wide[:, :features] = torch.randn(300, features)
    layer = wnfused.WNLinear(features, 64, dim=dim, dtype=torch.bfloat16)
    wanted = layer.double()(wide[:, :features].double())
    layer.bfloat16()
    with torch.no_grad():
        for context in (contextlib.nullcontext(), wnfused.frozen(layer)):
            with context:
                found = layer(wide[:, :features])
            assert (found.double() - wanted).norm() <= 2**-6 * wanted.norm()


@pytest.mark.parametrize("change", [{"activation": None}, {"stride": (2, 2)}, {"padding": (0, 0)}], ids=str)
@pytest.mark.parametrize("channels", [(3, 4), (64, 64)], ids=str)
def test_options_set_inside_are_followed(change, channels):
    layer, x = WNConv2d(*channels, 3, padding=1, activation="relu"), torch.randn(1, channels[0], 6, 6)
    changed = copy.deepcopy(layer)
    vars(changed).update(change)
    with torch.no_grad():
        wanted = changed(x)
        with wnfused.frozen(layer):
            layer(x)
            for name, value in change.items():
                setattr(layer, name, value)
            torch.testing.assert_close(layer(x), wanted)
        torch.testing.assert_close(layer(x), wanted)
    assert layer._frozen is None
