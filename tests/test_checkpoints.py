"""Checkpoints both ways: every form of torch's names, per block and stacked, in memory, in files, in averages."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import wnfused
from wnfused import WNResidualBlock, WNResidualStage, state_dict_from_torch, state_dict_to_torch

pytestmark = pytest.mark.usefixtures("one_thread")

FORMS = {"plain": lambda layer, dim: layer, "old": nn.utils.weight_norm, "new": parametrizations.weight_norm}
LAYERS = {
    "0": (lambda: nn.Conv1d(2, 4, 3, padding=1), 2),
    "1": (lambda: nn.ConvTranspose1d(4, 4, 4, 2, 1, bias=False), 0),
    "2": (lambda: nn.Conv1d(4, 3, 3, padding=1, groups=1), None),
    "3": (lambda: nn.Conv1d(3, 1, 1), 0),
    "4": (lambda: nn.Linear(16, 2), 1),
}


def torchs(form):
    torch.manual_seed(3)
    return nn.Sequential(*(FORMS[form](make(), dim=dim) for make, dim in LAYERS.values()))


def ours():
    model = wnfused.convert(torchs("old"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5).add_(0.1)
    return model


X = torch.randn(2, 2, 8, generator=torch.Generator().manual_seed(0))


def equal(one, other):
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("from_model", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_a_state_dict_goes_out_and_comes_back(form, from_model):
    model, theirs = ours(), torchs(form)
    state = state_dict_to_torch(model if from_model else model.state_dict(), api=form)
    theirs.load_state_dict(state, strict=True)
    torch.testing.assert_close(theirs(X), model(X))
    if form == "plain":
        assert all(torch.equal(state[f"{n}.weight"], m.weight.detach()) for n, m in model.named_children())
        assert equal(state, wnfused.fold(copy.deepcopy(model)).state_dict())
    else:
        assert list(state) == list(theirs.state_dict()), "in the order by which optimisers number parameters"
        assert equal(state_dict_from_torch(state, model), model.state_dict())
    for load in (lambda m: m.load_state_dict(state), lambda m: m.load_state_dict(state_dict_from_torch(state, m))):
        fresh = wnfused.convert(torchs("old"))
        load(fresh)
        torch.testing.assert_close(fresh(X), model(X))
        if form != "plain":
            assert equal(fresh.state_dict(), model.state_dict())


@pytest.mark.parametrize("api", FORMS)
def test_torchs_own_models_change_form(api):
    for form in ("old", "new"):
        assert equal(state_dict_to_torch(torchs(form), api), state_dict_to_torch(wnfused.convert(torchs(form)), api))


def test_what_belongs_to_no_layer_stays():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Embedding(2, 2), nn.Linear(2, 2))
    assert equal(state_dict_to_torch(model, "plain"), model.state_dict())
    state = {"weight_v": torch.ones(2), "epoch": 3}
    assert state_dict_to_torch(state, "new") == state


def test_views_not_copies():
    model = ours()
    assert state_dict_to_torch(model, "new")["0.parametrizations.weight.original1"].data_ptr() == (
        model[0].weight_v.data_ptr()
    )


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: state_dict_to_torch(nn.Linear(1, 1), api="newest"), ValueError, "api: unknown 'newest'; use 'old', "),
        (lambda: state_dict_to_torch([1]), TypeError, "source: expected an nn.Module or a state dict, got list"),
        (
            lambda: state_dict_to_torch({"weight_v": 3, "weight_g": X}),
            TypeError,
            "state_dict: 'weight_v' must be a tensor",
        ),
        (
            lambda: state_dict_to_torch({f"a.parametrizations.weight.original{i}": i for i in (0, 1)}),
            TypeError,
            r"state_dict: 'a\.parametrizations\.weight\.original0' must be a tensor, got int",
        ),
        (
            lambda: state_dict_from_torch({"weight": [[1.0]]}, wnfused.WNLinear(1, 1)),
            TypeError,
            "state_dict: 'weight' must be a tensor, got list",
        ),
        (
            lambda: nn.Sequential(WNResidualStage(2, 2, 1)).load_state_dict(
                {f"0.0.conv{i}.{name}": None for i in (1, 2) for name in ("weight", "bias")}
            ),
            TypeError,
            r"state_dict: '0\.0\.conv1\.weight' must be a tensor, got NoneType",
        ),
        (lambda: state_dict_from_torch(3, nn.Linear(1, 1)), TypeError, "state_dict: expected a mapping, got int"),
        (lambda: state_dict_from_torch({}, {}), TypeError, "model: expected an nn.Module, got dict"),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_weight_beside_its_direction_is_too_much():
    layer = wnfused.WNLinear(3, 2)
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "weight"'):
        layer.load_state_dict({**layer.state_dict(), "weight": torch.ones(2, 3)})


# -------------------------------------------------------------------------------------------------------------- stages

STAGES = {
    "identity": lambda: WNResidualStage(4, 4, 3),
    "transition": lambda: WNResidualStage(3, 4, 3, 2, skip_scale=0.9),
    "transition alone": lambda: WNResidualStage(3, 4, 1),
}


class Network(nn.Module):
    def __init__(self, stage):
        super().__init__()
        self.entry, self.stage = nn.Conv2d(2, stage[0].conv1.in_channels if isinstance(stage, nn.Sequential) else (
            stage.in_channels), 1), stage  # fmt: skip

    def forward(self, x):
        return self.stage(self.entry(x))


def perturbed(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.rand_like(parameter) / 2)
    return model


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", STAGES)
def test_blocks_load_into_a_stage_and_a_stage_into_blocks(name, form):
    x = torch.randn(2, 2, 6, 6)
    stacked = perturbed(Network(STAGES[name]()))
    separate = Network(stacked.stage.unstack())
    separate.entry.load_state_dict(stacked.entry.state_dict())
    blocks = state_dict_to_torch(stacked, form)
    if form == "old":
        assert equal(blocks, separate.state_dict())
    assert equal(blocks, state_dict_to_torch(separate, form))

    other = perturbed(Network(STAGES[name]().unstack()))
    other.load_state_dict(blocks, strict=True)
    torch.testing.assert_close(other(x), stacked(x), rtol=1e-4, atol=1e-5)
    back = perturbed(Network(STAGES[name]()))
    back.load_state_dict(blocks, strict=True)
    torch.testing.assert_close(back(x), stacked(x), rtol=1e-4, atol=1e-5)
    assert set(state_dict_from_torch(blocks, back)) == set(stacked.state_dict())
    if form != "plain":
        assert equal(back.state_dict(), stacked.state_dict())
    if form == "plain":
        assert equal(blocks, wnfused.fold(copy.deepcopy(stacked)).state_dict())


def test_a_missing_block_is_torchs_own_error():
    stage = WNResidualStage(4, 4, 3)
    state = state_dict_to_torch(stage)
    del state["1.conv2.bias"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"weight_v"'):
        WNResidualStage(4, 4, 3).load_state_dict(state)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        WNResidualStage(4, 4, 2).load_state_dict(state_dict_to_torch(stage))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("transition", [False, True])
def test_blocks_of_another_width_are_torchs_size_mismatch(strict, transition):
    stage, wider = (WNResidualStage(2 if transition else c, c, 3, device="cpu") for c in (4, 6))
    n = 3 - transition
    with pytest.raises(RuntimeError, match=rf"size mismatch for 0.weight_v: .*\[{n}, 2, 6, 6, 3, 3\]") as raised:
        nn.Sequential(stage).load_state_dict(nn.Sequential(wider.unstack()).state_dict(), strict=strict)
    for name, shape in (("weight_g", rf"[{n}, 2, 6]"), ("bias", rf"[{n}, 2, 6]")):
        assert f"size mismatch for 0.{name}: copying a param with shape torch.Size({shape})" in str(raised.value)


def test_one_block_of_another_width_is_named_by_its_size():
    state = WNResidualStage(4, 4, 2).unstack().state_dict()
    state["1.conv2.weight_v"] = torch.randn(5, 5, 3, 3)
    with pytest.raises(RuntimeError, match=r"size mismatch for weight_v: .*\[2, 2, 5, 5, 3, 3\]"):
        WNResidualStage(4, 4, 2).load_state_dict(state)


@pytest.mark.parametrize("strict", [True, False])
def test_too_few_blocks_are_counted(strict):
    stage = nn.Sequential(WNResidualStage(4, 4, 3))
    before = stage[0].weight_v.clone()
    with pytest.raises(RuntimeError, match="0: 2 blocks in the checkpoint, this stage has 3"):
        stage.load_state_dict(nn.Sequential(WNResidualStage(4, 4, 2).unstack()).state_dict(), strict=strict)
    assert stage[0].weight_v.equal(before)


@pytest.mark.parametrize("api", ["old", "new"])
def test_thousands_of_layers_take_no_time(api):
    names = {"old": ("weight_g", "weight_v"), "new": [f"parametrizations.weight.original{i}" for i in (0, 1)]}[api]
    state = {f"{i}.{name}": torch.ones(1, 1) for i in range(3000) for name in names}
    assert len(state_dict_to_torch(state, "new")) == len(state)


def test_thousands_of_parametrised_layers_of_a_model_take_no_time():
    model = nn.Sequential(*(nn.utils.parametrizations.weight_norm(nn.Linear(1, 1)) for _ in range(300)))
    asked = []
    model.named_modules = lambda *a, **k: asked.append(1) or nn.Module.named_modules(model, *a, **k)
    assert len(state_dict_to_torch(model, "old")) == 900
    assert len(asked) == 1


# ------------------------------------------------------------------------------------- files, copies and averages


def mixed():
    return nn.Sequential(
        wnfused.WNConv2d(2, 4, 3, padding=1, activation="relu"), WNResidualBlock(4, 4), WNResidualStage(4, 6, 3, 2),
        nn.Flatten(), wnfused.WNLinear(6 * 9, 2, dim=1),
    )  # fmt: skip


@pytest.mark.parametrize("used", [False, True])
def test_files_copies_and_averages(used, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model, x = mixed(), torch.randn(2, 2, 6, 6)
    if used:
        model(x).sum().backward()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    states = io.BytesIO()
    torch.save(model.state_dict(), states)
    states.seek(0)
    file = tmp_path / "model.safetensors"
    safetensors.save_file(model.state_dict(), file)
    safetensors.save_model(model, tmp_path / "whole.safetensors")
    loaded, safe, whole, averaged = mixed(), mixed(), mixed(), perturbed(mixed())
    loaded.load_state_dict(torch.load(states, weights_only=True))
    safe.load_state_dict(safetensors.load_file(file))
    safetensors.load_model(whole, tmp_path / "whole.safetensors")
    with torch.no_grad():
        for mean, parameter in zip(averaged.parameters(), model.parameters(), strict=True):
            mean.lerp_(parameter, 1.0)
    swa = torch.optim.swa_utils.AveragedModel(model)
    swa.update_parameters(model)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    for twin in (*twins, loaded, safe, whole, averaged, swa.module):
        assert equal(twin.state_dict(), model.state_dict())
        assert torch.equal(twin(x), model(x))


class Migrates(nn.Module):
    """Its first version kept the double of what the second keeps."""

    _version = 2

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.layer = nn.Linear(2, 2)

    def _load_from_state_dict(self, state, prefix, metadata, *arguments):
        if (metadata.get("version") or 1) < 2:
            state[f"{prefix}scale"] = state[f"{prefix}scale"] / 2
        super()._load_from_state_dict(state, prefix, metadata, *arguments)


def test_versions_of_modules_are_kept():
    model = nn.Sequential(Migrates())
    for given in (model, model.state_dict()):
        model.load_state_dict(state_dict_to_torch(given, "plain"))
        assert model[0].scale.item() == 1
    model.load_state_dict(state_dict_from_torch(model.state_dict(), model))
    assert model[0].scale.item() == 1


class Positive(nn.Module):
    def forward(self, w):
        return w.abs() + 1


class Product(nn.Module):
    """Of two tensors, as weight norm, but another one."""

    def forward(self, a, b):
        return a * b

    def right_inverse(self, w):
        return torch.ones(w.shape[0], 1), w


@pytest.mark.parametrize("as_module", [True, False])
@pytest.mark.parametrize("api", ["old", "new", "plain"])
@pytest.mark.parametrize("kind", ["after", "spectral", "other"])
def test_weights_that_more_than_weight_norm_makes_stay_as_they_are(kind, api, as_module):
    layer = nn.Linear(4, 3)
    if kind == "other":
        parametrize.register_parametrization(layer, "weight", Product())
    else:
        parametrizations.weight_norm(layer)
        if kind == "after":
            parametrize.register_parametrization(layer, "weight", Positive())
        else:
            parametrizations.spectral_norm(layer)
    if not as_module and kind != "spectral":
        return  # no entry of a state dict tells
    model = nn.Sequential(layer)
    expected = model.state_dict()
    found = state_dict_to_torch(model if as_module else expected, api=api)
    assert found.keys() == expected.keys()


@pytest.mark.parametrize("as_module", [True, False])
def test_each_layer_in_the_form_that_another_model_has(as_module):
    def make():
        return nn.Sequential(
            nn.Linear(4, 4),
            parametrizations.weight_norm(nn.Linear(4, 4)),
            torch.nn.utils.weight_norm(nn.Linear(4, 4)),
            nn.Sequential(nn.LayerNorm(4), nn.Conv1d(1, 2, 3)),
        )

    x = torch.randn(2, 1, 4)
    ours = wnfused.convert(make(), plain=True)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.mul_(1.5)
    back = make()
    back.load_state_dict(state_dict_to_torch(ours, like=back if as_module else back.state_dict()))
    torch.testing.assert_close(back(x), ours(x))
    assert state_dict_to_torch(ours, api="old", like={}).keys() == state_dict_to_torch(ours, api="old").keys()
    with pytest.raises(TypeError, match=r"like: expected an nn\.Module or a state dict, got str"):
        state_dict_to_torch(ours, like="plain")
