"""The papers' networks: layer counts, twins, any input size, depth 10,000."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import wnfused
from wnfused.models import cnn, mlp, resnet, wrn


def layers(model):
    """Weighted layers as the papers count them: a stacked block has two."""
    count = 0
    for module in model.modules():
        if isinstance(module, wnfused.WNResidualStage):
            count += 2 * len(module.weight_v)
        elif isinstance(module, (nn.Conv2d, nn.Linear)):
            count += 1
    return count


@pytest.mark.parametrize(
    "make",
    [lambda: wrn(10), lambda: resnet(14), lambda: cnn(3), lambda: mlp(3, 16, in_channels=3, image_size=8)],
    ids=["wrn", "resnet", "cnn", "mlp"],
)
def test_gradients_of_single_samples(make):
    """By ``torch.func``, under which a map has no layout that could be asked for."""
    model, x = make(), torch.randn(3, 3, 8, 8)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, sample):
        return torch.func.functional_call(model, parameters, (sample[None],)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    model(x).square().sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(each[name].sum(0), p.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.func.vmap(lambda sample: model(sample[None])[0])(x), model(x))


@pytest.mark.parametrize("norm", ["weight", "batch", "none", "fixup"])
@pytest.mark.parametrize("depth", [10, 16, 40])
def test_wrn_has_its_depth(depth, norm):
    assert layers(wrn(depth, norm=norm)) == depth
    assert layers(resnet(depth - 2, norm=norm)) == depth  # the two shortcuts are not counted in 6n + 2
    if norm == "weight":
        assert layers(wrn(depth, stack=False)) == depth


@pytest.mark.parametrize("x", [torch.ones(16), torch.tensor(1.0)])
def test_an_mlp_says_that_it_takes_batches(x):
    model = mlp(2, 8, in_features=16)
    with pytest.raises(ValueError, match=r"x: shape \[.*\] must be \[n, \.\.\.\] for n samples"):
        model(x)
    batch = torch.randn(3, 16)
    for traced in (torch.fx.symbolic_trace(model), torch.jit.script(mlp(2, 8, in_features=16, norm="none"))):
        assert traced(batch).shape == (3, 10)


@pytest.mark.parametrize("norm", ["weight", "batch", "none"])
@pytest.mark.parametrize(("channels", "size"), [(1, (8, 8)), (3, (9, 7)), (3, (32, 32))])
def test_any_input_size_and_width(norm, channels, size):
    x = torch.randn(2, channels, *size)
    for model in (
        wrn(16, 2, num_classes=7, in_channels=channels, norm=norm),
        resnet(8, in_channels=channels, num_classes=7, norm=norm),
        cnn(3, 8, num_classes=7, in_channels=channels, norm=norm),
        mlp(2, 8, num_classes=7, in_features=channels * size[0] * size[1], norm=norm),
    ):
        y = model(x)
        assert list(y.shape) == [2, 7]
        y.sum().backward()
        assert all(p.grad is not None for p in model.parameters())


def test_the_block_is_the_papers():
    """Strided first convolution in stages 2 and 3, 1x1 shortcut of the same stride, nothing after the sum."""
    model = wrn(16)
    assert model.stem.out_channels == 16
    assert [s.num_blocks for s in model.stages] == [2, 2, 2]
    assert [s.out_channels for s in model.stages] == [16, 32, 64]
    assert model.stages[0].transition is None
    for stage in model.stages[1:]:
        assert stage.transition.conv1.stride == stage.transition.shortcut.stride == (2, 2)
        assert stage.transition.shortcut.kernel_size == (1, 1)
        assert stage.transition.conv1.activation == "relu"
        assert stage.transition.conv2.activation is None
    assert wrn(16, 2).stages[0].transition is not None
    assert type(model.head) is nn.Linear


def test_all_norms_compute_the_same_function_where_they_can():
    """The un-normalised twin with folded weights is the weight-normalised network."""
    model = wrn(22, in_channels=1)
    plain = wrn(22, in_channels=1, norm="none")
    folded = wnfused.fold(copy.deepcopy(model))
    plain.load_state_dict(folded.state_dict())
    x = torch.randn(2, 1, 8, 8)
    torch.testing.assert_close(plain(x), model(x), rtol=1e-4, atol=1e-5)


def test_the_batch_norm_twin_normalises_its_branches_and_the_shortcuts_that_change_shape():
    first, second = wrn(16, 2, norm="batch").stages[0]
    x = torch.randn(4, 16, 6, 6)
    z = first.bn1(x)
    expected = first.shortcut(z) + first.conv2(torch.relu(first.bn2(first.conv1(torch.relu(z)))))
    torch.testing.assert_close(first(x), expected)
    x = torch.randn(4, 32, 6, 6)
    expected = x + second.conv2(torch.relu(second.bn2(second.conv1(torch.relu(second.bn1(x))))))
    torch.testing.assert_close(second(x), expected)


def test_the_resnet_twin_alone_normalises_after_the_stem_and_before_the_pooling():
    x = torch.randn(4, 3, 8, 8)
    model = resnet(8, norm="batch")
    *blocks, last = model.stages
    h = nn.Sequential(*blocks)(nn.BatchNorm2d(16)(model.stem[0](x)))
    torch.testing.assert_close(model(x), model.head(nn.BatchNorm2d(64)(h).mean((2, 3))))
    assert isinstance(last, nn.BatchNorm2d)
    assert len(wrn(10, norm="batch").stages) == 3


def test_the_fixup_variant_has_a_scalar_before_every_layer_and_activation():
    """It starts as stem, ReLU and shortcuts under a head of 0, and every parameter is reached by training."""
    model = wrn(16, in_channels=1, norm="fixup")
    report = wnfused.init.initialize(model, "zhang2019")
    assert not report.notes
    assert layers(model) == 16
    assert all(conv.bias is None for conv in model.modules() if isinstance(conv, nn.Conv2d))
    # Two in the stem, one in the head, four biases and a multiplier in each of six blocks.
    assert sum(p.shape == (1,) for p in model.parameters()) == 2 + 1 + 5 * 6
    x = torch.randn(3, 1, 8, 8)
    assert (model(x) == 0).all()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.1)
    b1, conv, b2, _ = model.stem
    h = model.stages(torch.relu(conv(x + b1.bias) + b2.bias)).mean((2, 3))
    head_bias, head = model.head
    torch.testing.assert_close(model(x), head(h + head_bias.bias))
    wnfused.init.initialize(model, "zhang2019")
    assert (model(x) == 0).all()


def test_ten_thousand_layers_build_print_pickle_and_copy():
    model = wrn(10_000, in_channels=1)
    assert layers(model) == 10_000
    assert len(list(model.parameters())) < 40
    assert len(repr(model)) < 5000
    twin = copy.deepcopy(model)
    assert torch.equal(pickle.loads(pickle.dumps(twin.stages[0])).weight_v, model.stages[0].weight_v)
    with torch.no_grad():
        assert torch.isfinite(model(torch.randn(1, 1, 4, 4))).all()


def test_separate_blocks_are_deep_too():
    model = wrn(3004, norm="none", in_channels=1)
    copy.deepcopy(model)
    repr(model)
    assert len(wnfused.init.find_roles(model)) == 3004


@pytest.mark.parametrize("kind", [np.int64, np.int32, torch.tensor])
def test_integers_of_any_kind(kind):
    two, three = kind(2), kind(3)
    for ours, plain in (
        (wrn(kind(10), two, kind(7), three, recompute=two), wrn(10, 2, 7, 3, recompute=2)),
        (resnet(kind(8), two, three, kind(1), norm="batch"), resnet(8, 2, 3, 1, norm="batch")),
        (cnn(three, two, three, two), cnn(3, 2, 3, 2)),
        (mlp(two, three, two, two, image_size=three), mlp(2, 3, 2, 2, image_size=3)),
        (mlp(two, three, in_features=kind(5)), mlp(2, 3, in_features=5)),
    ):
        assert repr(ours) == repr(plain)
        assert ours.state_dict().keys() == plain.state_dict().keys()
        head = next(m for m in ours.modules() if type(m) is nn.Linear)
        assert type(head.in_features) is type(head.out_features) is int
    with pytest.raises(ValueError, match="width: 0 must be an int of at least 1"):
        cnn(3, kind(0))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: wrn(1001), r"depth: 1001 must be 6N \+ 4 with .* nearest are 1000 and 1006"),
        (lambda: wrn(4), "nearest is 10"),
        (lambda: resnet(57), "nearest are 56 and 62"),
        (lambda: wrn(10, 0), "width: 0 must be an int of at least 1"),
        (lambda: wrn(10, norm="layer"), "norm: unknown 'layer'; use 'weight', 'batch', 'none' or 'fixup'"),
        (lambda: cnn(3, norm="fixup"), "norm: unknown 'fixup'; use 'weight', 'batch' or 'none'"),
        (lambda: cnn(1), "depth: 1 must be at least 2"),
        (lambda: mlp(0), "depth: 0 must be"),
        (lambda: mlp(2, in_channels=3, in_features=7), "in_features: 7 is no multiple of in_channels, 3"),
        (lambda: wrn(10, num_classes=2.5), "num_classes: 2.5 must be an int"),
        (lambda: wrn(10, recompute=0), "recompute: 0 must be"),
        (lambda: wrn(10, recompute=2, stack=False), "recompute: 2 is for stacked blocks; stack=False has no stage"),
        (lambda: wrn(10, norm="batch", recompute=2), "recompute: 2 is for norm='weight'; norm='batch' has no stage"),
    ],
)
def test_bad_arguments(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("make", [lambda: wrn(10), lambda: resnet(8), lambda: cnn(2, 8)], ids=["wrn", "resnet", "cnn"])
def test_an_image_without_a_batch(make):
    net, image = make(), torch.randn(3, 8, 8)
    torch.testing.assert_close(net(image), net(image[None])[0])


def test_a_flag_is_true_or_false():
    with pytest.raises(TypeError, match="stack: 'no' must be True or False"):
        wrn(10, stack="no")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: wnfused.models.MLP(2, 8, 10, 4, "wieght"), "norm: unknown 'wieght'"),
        (lambda: wnfused.models.MLP(0, 8, 10, 4, "weight"), "depth: 0"),
        (lambda: wnfused.models.CNN(1, 8, 10, 3, "weight"), "depth: 1 must be at least 2"),
        (lambda: wnfused.models.CNN(2, 8, 10, 3, "wieght"), "norm: unknown 'wieght'"),
        (lambda: wnfused.models.ResNet(2, 1, 10, 3, "wieght", None, True, False), "norm: unknown 'wieght'"),
        (lambda: wnfused.models.ResNet(0, 1, 10, 3, "batch", None, True, False), "blocks: 0"),
        (lambda: wnfused.models.ResNet(2, 1, 10, 3, "batch", 2, True, False), "recompute: 2 is for norm='weight'"),
        (lambda: wnfused.models.ResNet(2, 1, 10, 3, ["batch"], None, True, False), r"norm: unknown \['batch'\]"),
    ],
)
def test_the_classes_check_what_their_makers_check(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("make", [lambda norm: wrn(16, norm=norm), lambda norm: cnn(3, 16, norm=norm)])
def test_images_are_laid_out_as_the_layers_have_them(make):
    """In channels_last, whatever they came in; networks of torch's layers are left to the user."""
    x = torch.randn(2, 3, 12, 12)
    for norm, last in (("weight", True), ("none", False)):
        net, seen = make(norm), []
        for module in net.modules():
            module.register_forward_hook(lambda module, args, y, seen=seen: seen.append((type(module), y)))
        y = net(x)
        maps = [y for _, y in seen if y.dim() == 4]
        assert len(maps) > 2
        assert all(m.is_contiguous(memory_format=torch.channels_last) is last for m in maps)
        torch.testing.assert_close(net(x.to(memory_format=torch.channels_last)), y, rtol=1e-5, atol=1e-5)
