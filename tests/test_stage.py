"""The residual stage as a layer: equal to its blocks, whatever is recomputed; pickles; blocks as views."""

import copy
import math
import pickle

import pytest
import torch
from torch.nn.utils import prune

import wnfused
from wnfused import WNResidualBlock, WNResidualStage


def gradients(module, x, weights):
    y = module(x)
    return y, torch.autograd.grad(y, [x, *module.parameters()], weights)


@pytest.mark.parametrize("recompute", [None, 1, 2, 7])
@pytest.mark.parametrize(("channels", "stride"), [((16, 16), 1), ((8, 16), 2), ((8, 8), 2)])
def test_stage_equals_its_blocks(recompute, channels, stride):
    stage = WNResidualStage(*channels, 4, stride, recompute=recompute, skip_scale=0.9)
    torch.nn.init.normal_(stage.bias, std=0.1)
    blocks = stage.unstack()
    assert len(blocks) == 4
    x = torch.randn(3, channels[0], 6, 6, requires_grad=True)
    y, found = gradients(stage, x, torch.ones(()).expand_as(stage(x)))
    expected, wanted = gradients(blocks, x, torch.ones(()).expand_as(y))
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(stage(x), y)


@pytest.mark.parametrize("backend", ["reference", None])
@pytest.mark.parametrize("out_channels", [8, 12])
def test_an_image_without_a_batch(out_channels, backend):
    stage, image = WNResidualStage(8, out_channels, 3), torch.randn(8, 5, 4, requires_grad=True)
    with wnfused.use_backend(backend):
        y, found = gradients(stage, image, torch.ones(out_channels, 5, 4))
        expected, wanted = gradients(stage, image[None], torch.ones(1, out_channels, 5, 4))
    for a, b in zip((y, *found[1:]), (expected[0], *wanted[1:]), strict=True):
        torch.testing.assert_close(a, b)
    with torch.no_grad():
        torch.testing.assert_close(stage(image), y)
    with pytest.raises(ValueError, match=r"x: shape \[8, 5\] is not \[N, C, H, W\], nor the same without N"):
        wnfused.functional.residual_stage(image[..., 0], stage.weight_v, stage.weight_g, stage.bias)


@pytest.mark.parametrize(("path", "name"), [("", "weight_v"), ("", "bias"), ("transition.conv2", "weight_g")])
def test_what_is_computed_cannot_be_reset(path, name):
    stage = WNResidualStage(2, 3, num_blocks=2)
    prune.random_unstructured(stage.get_submodule(path), name, 1)
    before = copy.deepcopy(stage.state_dict())
    resets = [stage.reset_parameters, *([] if path else [lambda: wnfused.init.reset_stage_(stage)])]
    for reset in resets:
        with pytest.raises(RuntimeError, match=f"{name}: cannot be reset, something else computes it"):
            reset()
    assert all(torch.equal(value, before[key]) for key, value in stage.state_dict().items())


def test_reset_parameters_draws_the_whole_stage_again():
    stage = WNResidualStage(8, 16, 3, 2)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.fill_(7)
    stage.reset_parameters()
    assert not any((parameter == 7).any() for parameter in stage.parameters())
    torch.testing.assert_close(stage.transition.conv2.weight_g.mean(), torch.tensor(math.sqrt(1 / 3)))


def test_gradients_of_the_stack_are_those_of_the_blocks():
    stage = WNResidualStage(16, 16, 3)
    blocks = stage.unstack()
    x = torch.randn(2, 16, 5, 5)
    stage(x).square().sum().backward()
    blocks(x).square().sum().backward()
    for i, block in enumerate(blocks):
        for j, conv in enumerate((block.conv1, block.conv2)):
            torch.testing.assert_close(stage.weight_v.grad[i, j], conv.weight_v.grad, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(stage.weight_g.grad[i, j], conv.weight_g.grad.flatten(), rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(stage.bias.grad[i, j], conv.bias.grad, rtol=1e-3, atol=1e-4)


def test_default_init_counts_all_blocks():
    stage = WNResidualStage(8, 16, 4, 2)
    assert list(stage.weight_v.shape) == [3, 2, 16, 16, 3, 3]
    torch.testing.assert_close(stage.weight_g[:, 0], torch.full((3, 16), math.sqrt(2)))
    torch.testing.assert_close(stage.weight_g[:, 1], torch.full((3, 16), math.sqrt(1 / 4)))
    torch.testing.assert_close(stage.transition.conv1.weight_g.mean(), torch.tensor(math.sqrt(2 * 8 / 16)))
    torch.testing.assert_close(stage.transition.conv2.weight_g.mean(), torch.tensor(math.sqrt(1 / 4)))
    torch.testing.assert_close(stage.transition.shortcut.weight_g.mean(), torch.tensor(math.sqrt(8 / 16)))
    rows = stage.weight_v.detach().flatten(3)
    torch.testing.assert_close(rows @ rows.mT, torch.eye(16).expand(3, 2, 16, 16), atol=1e-5, rtol=0)


def test_blocks_are_views_that_write_the_stage():
    stage = WNResidualStage(4, 4, 3)
    views = list(stage.blocks())
    assert len(views) == 3
    with torch.no_grad():
        views[1].weight_g.fill_(0)
    assert (stage.weight_g[1] == 0).all()
    x = h = torch.randn(2, 4, 5, 5)
    for view in stage.blocks():
        h = view(h)
    torch.testing.assert_close(h, stage(x))


def test_a_stage_of_one_transition_block_has_an_empty_stack():
    stage = WNResidualStage(4, 8, 1, 2)
    assert stage.weight_v.shape[0] == 0
    assert list(stage(torch.randn(2, 4, 6, 6)).shape) == [2, 8, 3, 3]
    assert len(stage.unstack()) == 1


@pytest.mark.parametrize("used", [False, True])
def test_pickle_and_deepcopy(used):
    stage = WNResidualStage(4, 8, 3, 2)
    x = torch.randn(1, 4, 6, 6)
    if used:
        stage(x).sum().backward()
    for twin in (copy.deepcopy(stage), pickle.loads(pickle.dumps(stage))):
        assert torch.equal(twin(x), stage(x))


def test_frozen_parameters_still_pass_the_gradient_on():
    stage = WNResidualStage(16, 16, 2).requires_grad_(False)
    x = torch.randn(2, 16, 4, 4, requires_grad=True)
    (dx,) = torch.autograd.grad(stage(x).square().sum(), x)
    (expected,) = torch.autograd.grad(stage.unstack()(x).square().sum(), x)
    torch.testing.assert_close(dx, expected, rtol=1e-4, atol=1e-4)
    assert all(p.grad is None for p in stage.parameters())


def test_empty_batch():
    stage = WNResidualStage(16, 16, 2)
    y = stage(torch.randn(0, 16, 4, 4))
    assert list(y.shape) == [0, 16, 4, 4]
    y.sum().backward()
    assert (stage.weight_v.grad == 0).all()


def test_half_precision_keeps_the_stream_wide():
    """64 blocks in bfloat16: a stream that is rounded at each sum is off by 0.013."""
    stage = WNResidualStage(16, 16, 64)
    x = torch.randn(2, 16, 6, 6).bfloat16()
    y = stage(x)
    assert y.dtype == torch.bfloat16
    exact = copy.deepcopy(stage).double()
    with wnfused.use_backend("reference"):
        expected = exact(x.double())
    error = (y.double() - expected).norm() / expected.norm()
    assert error < 6e-3


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: WNResidualStage(0, 4, 2), "in_channels: 0 must be an int of at least 1"),
        (lambda: WNResidualStage(4, 4, 0), "num_blocks: 0 must be"),
        (lambda: WNResidualStage(4, 4, 2, recompute=0), "recompute: 0 must be"),
        (lambda: WNResidualStage(4, 4, 2, skip_scale=float("inf")), "skip_scale: inf must be finite"),
        (lambda: WNResidualStage(4, 4, 2, init="zeros"), "init: unknown 'zeros'"),
        (lambda: WNResidualBlock(4, 4, num_blocks=-1), "num_blocks: -1 must be"),
        (lambda: WNResidualStage(4, 4, 2)(torch.randn(1, 5, 4, 4)), r"x: .* has 5 channels, v has 4; use as many"),
        (lambda: WNResidualStage(4, 4, 2)(torch.randn(4, 4)), r"x: shape \[4, 4\] is not \[N, C, H, W\]"),
    ],
)
def test_bad_arguments(build, message):
    with pytest.raises(ValueError, match=message):
        build()
