"""Convolutions inside ``wnfused.frozen``: weights packed once by the C++ kernels, for every way of multiplying."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import wnfused
from wnfused import WNConv1d, WNConv2d, WNConv3d, WNConvTranspose1d, WNConvTranspose2d
from wnfused.backends import native, native_entry
from wnfused.nn._frozen import Kept

if native.unavailable() is not None:
    pytest.skip(str(native.unavailable()), allow_module_level=True)

LAYERS = {
    "pieces": (lambda: WNConv1d(98, 102, 7, padding=6, dilation=2, activation="leaky_relu"), (2, 98, 100)),
    "pieces, groups": (lambda: WNConv1d(192, 192, 5, padding=2, groups=2), (2, 192, 70)),
    "direct": (lambda: WNConv2d(72, 104, 3, stride=2, padding=1, activation="relu", bias=False), (2, 72, 17, 15)),
    "wide, few pixels": (lambda: WNConv2d(230, 219, 3, padding=1, activation="relu"), (1, 230, 4, 3)),
    "1x1": (lambda: WNConv2d(264, 250, 1), (2, 264, 5, 6)),
    "1x1 of many pixels": (lambda: WNConv2d(264, 250, 1), (3, 264, 9, 9)),
    "few outputs": (lambda: WNConv2d(800, 6, 7, padding=3), (2, 800, 9, 9)),
    "transposed": (lambda: WNConvTranspose1d(96, 88, 8, 4, 2, activation="leaky_relu"), (2, 96, 40)),
    "transposed over two dims": (lambda: WNConvTranspose2d(64, 68, 4, 2, 1), (2, 64, 9, 9)),
}  # fmt: skip
PACKED_IN_EVERY_CALL = {
    "few weights": (lambda: WNConv1d(32, 48, 7, padding=3, activation="relu"), (2, 32, 100)),
    "winograd, few weights": (lambda: WNConv2d(128, 128, 3, padding=1), (1, 128, 12, 12)),
    "winograd": (lambda: WNConv2d(230, 219, 3, padding=1, activation="relu"), (1, 230, 8, 7)),
    "winograd, groups": (lambda: WNConv2d(512, 480, 3, padding=1, groups=2), (1, 512, 8, 7)),
    "winograd, groups that share blocks": (lambda: WNConv2d(1024, 1024, 3, padding=1, groups=128), (1, 1024, 9, 8)),
    "winograd over three dims": (lambda: WNConv3d(224, 224, 3, padding=1), (2, 224, 2, 5, 4)),
    "winograd, many tiles": (lambda: WNConv2d(230, 219, 3, padding=1), (1, 230, 12, 12)),
    "transposed, few weights": (lambda: WNConvTranspose1d(32, 16, 8, 4, 2, activation="leaky_relu"), (2, 32, 40)),
    "thin": (lambda: WNConv2d(3, 32, 5, padding=2, activation="relu"), (2, 3, 20, 20)),
    "depthwise": (lambda: WNConv2d(32, 32, 3, padding=1, groups=32, activation="relu"), (2, 32, 16, 16)),
}
LAYERS |= PACKED_IN_EVERY_CALL


def layer_and_input(name):
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    layer = make()
    with torch.no_grad():
        layer.weight_g.uniform_(0.5, 2)
        if layer.bias is not None:
            layer.bias.normal_()
    return layer, torch.randn(shape)


def banks_of(layer):
    """Those of a frozen layer; one of few weights is a copy that runs as always."""
    return list(getattr(layer._frozen, "banks", ()))


@pytest.mark.parametrize("last", [False, True], ids=["nchw", "last"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_same_as_outside_call_after_call(vectors, name, last):
    layer, x = layer_and_input(name)
    if last:
        x = x.contiguous(
            memory_format={3: torch.contiguous_format, 4: torch.channels_last}.get(x.dim(), torch.channels_last_3d)
        )
    with torch.no_grad():
        residual = torch.randn_like(layer(x))
        expected = layer(x), layer(2 * x, residual=residual)
        with wnfused.frozen(layer):
            for _ in range(2):
                layer.weight_v.mul_(-3)  # goes unseen
                for found, wanted in zip((layer(x), layer(2 * x, residual=residual)), expected, strict=True):
                    # Outside of the context a wide layer may be the vendor's.
                    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)
                    assert found.stride() == wanted.stride()
            banks = banks_of(layer)
            # Faster than reading a bank: by strips, as planes, and as rows.
            faster = name == "few outputs" or (name == "1x1 of many pixels" and not (last and vectors == "avx2"))
            narrow = vectors == "portable"  # where few pixels go by Winograd
            faster = name == "wide, few pixels" if narrow else faster
            assert len(banks) == (name not in PACKED_IN_EVERY_CALL and not faster)
            layer(x)
            assert all(a is b for a, b in zip(banks, banks_of(layer), strict=True))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_whoever_packs_first(threads):
    before = torch.get_num_threads()
    layer, x = layer_and_input("direct")
    with torch.no_grad():
        expected = layer(x)
        try:
            with wnfused.frozen(layer):
                torch.set_num_threads(threads)
                first = layer(x)
                torch.set_num_threads(4 - threads)
                assert torch.equal(layer(x), first)
        finally:
            torch.set_num_threads(before)
    assert torch.equal(first, expected)


@pytest.mark.parametrize("through_python", [False, True])
def test_first_calls_in_threads_keep_one_bank(monkeypatch, through_python):
    if through_python:
        monkeypatch.setattr(native_entry, "layer", lambda name: None)
    layer = WNConv2d(512, 512, 3, stride=2, padding=1)  # packed in a while
    x, calls = torch.randn(1, 512, 8, 8), 6
    together = threading.Barrier(calls)

    @torch.no_grad()
    def run():
        together.wait()
        return layer(x)

    with torch.no_grad(), wnfused.frozen(layer), ThreadPoolExecutor(calls) as pool:
        outputs = [y.result() for y in [pool.submit(run) for _ in range(calls)]]
        assert len(layer._frozen.banks) == 1
        assert all(torch.equal(y, layer(x)) for y in outputs)


def test_every_way_of_multiplying_has_a_bank():
    layer = WNConv1d(256, 256, 5, padding=2)
    maps = [torch.randn(shape) for shape in ((1, 256, 64), (1, 256, 4), (2, 256, 40), (3, 256, 2))]
    with torch.no_grad():
        expected = [layer(x) for x in maps]
        with wnfused.frozen(layer):
            for _ in range(2):
                for x, wanted in zip(maps, expected, strict=True):
                    torch.testing.assert_close(layer(x), wanted)
            banks = layer._frozen.banks
            assert len(banks) == 2  # direct and by pieces
            assert len({bank[-1].item() for bank in banks}) == 2


def test_wide_layers():
    layer, x = WNConv2d(512, 512, 3, padding=1, activation="relu"), torch.randn(1, 512, 4, 4)
    with torch.no_grad():
        expected = layer(x)
        with wnfused.frozen(layer):
            for _ in range(2):
                torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-4)  # of another order outside
            assert len(layer._frozen.banks) == 1


@pytest.mark.parametrize("name", ["direct", "transposed", "winograd", "few weights"])
def test_calls_past_python_and_through_it_are_the_same(monkeypatch, name):
    layer, x = layer_and_input(name)

    def run():
        with torch.no_grad(), wnfused.frozen(layer):
            residual = torch.ones_like(layer(x))
            found = [layer(x), layer(x, residual=residual)]
            with torch.autocast("cpu", torch.bfloat16):
                found += [layer(x), layer(x.bfloat16(), residual=residual.bfloat16())]
            return found, banks_of(layer)

    outputs, banks = run()
    monkeypatch.setattr(native_entry, "layer", lambda name: None)
    again, packed = run()
    assert all(map(torch.equal, again, outputs))
    assert len(packed) == len(banks)


def test_gradients_of_the_input_run_as_always():
    layer, x = layer_and_input("pieces")
    layer.requires_grad_(False)
    x.requires_grad_()
    (wanted,) = torch.autograd.grad(layer(x).sum(), x)
    with wnfused.frozen(layer):
        (found,) = torch.autograd.grad(layer(x).sum(), x)
        assert not layer._frozen.banks
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", ["pieces", "transposed", "transposed over two dims"])
def test_a_residual_where_nothing_is_kept(name):
    layer, x = layer_and_input(name)
    layer.requires_grad_(False)
    residual = torch.randn_like(layer(x))
    x.requires_grad_()

    def outputs():
        yield layer(x, residual=residual)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            yield layer(x, residual=residual.bfloat16())

    wanted = list(outputs())
    with wnfused.frozen(layer):
        for found, expected in zip(outputs(), wanted, strict=True):
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["winograd", "pieces", "direct", "transposed"])
@pytest.mark.parametrize("which", ["x", "weight"])
def test_values_that_are_not_finite(name, which):
    layer, x = layer_and_input(name)
    with torch.no_grad():
        if which == "weight":
            layer.weight_v.view(-1)[5] = float("inf")
        bad = x.clone()
        if which == "x":
            bad.view(-1)[7] = float("nan")
        expected = layer(bad), layer(x)
        with wnfused.frozen(layer):
            for _ in range(2):
                for given, wanted in zip((bad, x), expected, strict=True):
                    torch.testing.assert_close(layer(given), wanted, equal_nan=True)


def test_arguments_that_do_not_fit_are_named():
    layer, x = layer_and_input("direct")
    with torch.no_grad(), wnfused.frozen(layer):
        with pytest.raises(ValueError, match="x: shape"):
            layer(x[:, :5])
        with pytest.raises(ValueError, match="residual"):
            layer(x, residual=x)
        unbatched = layer(x[0])
    torch.testing.assert_close(unbatched, layer(x)[0])


def test_a_state_loaded_inside_is_packed_anew():
    layer, x = layer_and_input("wide, few pixels")
    other = WNConv2d(230, 219, 3, padding=1, activation="relu")
    with torch.no_grad(), wnfused.frozen(layer):
        layer(x)
        assert layer._frozen.banks
        layer.load_state_dict(other.state_dict())
        torch.testing.assert_close(layer(x), other(x))
        torch.testing.assert_close(layer(x), other(x))


def test_autocast():
    """Inputs in its dtype are a plain layer's, too, and packed weights serve them."""
    model = nn.Sequential(
        WNConv2d(72, 104, 3, stride=2, padding=1, activation="relu"),
        WNConv2d(104, 264, 1),
        WNConv2d(264, 8, 3, bias=False),
    )
    x = torch.randn(1, 72, 15, 13)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted = model(x)
        with wnfused.frozen(model):
            for given in (x, x.bfloat16(), x):
                found = model(given)
                assert found.dtype == torch.bfloat16
                torch.testing.assert_close(found, wanted, rtol=0, atol=2**-6 * wanted.abs().max().item())
            residual = torch.randn(found.shape)
            assert model[2]._frozen(model[1](model[0](x)), residual).dtype == torch.bfloat16
            kept = [len(layer._frozen.banks) for layer in model if isinstance(layer._frozen, Kept)]
    assert kept
    assert kept[0] == 1


def test_compiled_inside():
    net = nn.Sequential(WNConv2d(64, 64, 5, padding=2, activation="relu"), WNConvTranspose2d(64, 64, 4, 2, 1))
    x = torch.randn(2, 64, 12, 12)
    with torch.no_grad():
        expected = net(x)
        with wnfused.frozen(net):
            torch.testing.assert_close(torch.compile(net, backend="aot_eager", fullgraph=True)(x), expected)
            torch.testing.assert_close(net(x), expected)
