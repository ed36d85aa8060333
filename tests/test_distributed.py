"""Two processes do what one does: every ``torchrun`` line of the page on scaling out, as it stands there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import wnfused

ROOT = Path(__file__).parents[1]
LINES = re.findall(r"^torchrun (.*)$", (ROOT / "docs" / "distributed.md").read_text(), re.M)
needs_gloo = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")


@needs_gloo
@pytest.mark.parametrize("line", [line for line in LINES if "examples/" in line], ids=lambda line: line.split("/")[-1])
def test_examples_learn_what_one_process_learns(line):
    """The scripts compare their weights with those of one process, and fail where they differ."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", *shlex.split(line)]
    # A process that is done may still abort while gloo's threads end, see ``leave`` in examples/common.py, and torchrun
    # then stops the other one: such a run says nothing, and is made once more.
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120)
        if "terminate called without an active exception" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    parts = 2 if "pipeline" in line else 1
    assert len(re.findall(r"largest difference to one process \d", done.stdout)) == parts, done.stdout


def test_what_the_examples_learn_is_worth_comparing(monkeypatch):
    """Every parameter moves by far more than the scripts allow for rounding."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import common

    before, after = common.network().state_dict(), common.learnt_alone()
    assert min(float((after[name] - before[name]).abs().max()) for name in before) > 1e-4


@needs_gloo
def test_wrapped_models_are_refused(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(nn.Sequential(wnfused.WNLinear(2, 2)))
        for function in (wnfused.convert, wnfused.fold):
            for model, path in ((wrapped, "model"), (nn.ModuleDict({"body": wrapped}), "model.body")):
                way_out = f"wrap anew: DistributedDataParallel(wnfused.{function.__name__}({path}.module), ...)"
                with pytest.raises(ValueError, match=re.escape(way_out)):
                    function(model)
    finally:
        dist.destroy_process_group()


@pytest.fixture
def mesh(tmp_path):
    """Of one process, which takes tensors apart as many do."""
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@needs_gloo
def test_sharded_layers_are_left_alone(mesh, caplog):
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(2, 2)))
    fully_shard(model, mesh=mesh)
    wnfused.convert(model)
    assert "0: left alone, its parameters are of type DTensor" in caplog.text


def _loss(model):
    return wnfused.regularize.Regularizer().loss(model)


def _plain_state(model):
    return wnfused.state_dict_to_torch(model, "plain")


LAYERS = {
    "linear": lambda: wnfused.WNLinear(4, 4),
    "plain linear": lambda: nn.Linear(4, 4),
    "stage": lambda: wnfused.WNResidualStage(4, 4, 3),
}
REFUSALS = {
    _loss: "leave it out by filter",
    wnfused.regularize.retract_: "leave it out by filter",
    wnfused.init.initialize: "initialise the model first, then shard it",
    wnfused.fold: "fold before the model is sharded",
    _plain_state: "give the full state dict",
}


@needs_gloo
@pytest.mark.parametrize(
    ("kind", "function"),
    [
        (kind, function)
        for kind in LAYERS
        for function in REFUSALS
        if not (kind == "plain linear" and function in (wnfused.fold, _plain_state))  # which leave it alone
    ],
)
def test_sharded_parameters_are_refused_by_name(mesh, kind, function):
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(LAYERS[kind]())
    fully_shard(model, mesh=mesh)
    says = rf"'0.* is sharded \(a DTensor\), of which each process holds a part; {REFUSALS[function]}"
    with pytest.raises(ValueError, match=says):
        function(model)


def _write(layer):
    layer.weight = nn.Parameter(torch.ones(4, 4))


@needs_gloo
@pytest.mark.parametrize(
    ("kind", "function", "remedy"),
    [
        ("linear", lambda layer: layer.weight, "gather them all first"),
        ("linear", _write, "write it first, then shard the model"),
        ("linear", wnfused.init.reset_layer_, "initialise it first, then shard it"),
        ("linear", lambda layer: layer.reset_parameters(), "initialise it first, then shard it"),
        ("stage", lambda layer: layer.reset_parameters(), "initialise it first, then shard it"),
        ("stage", lambda layer: layer.unstack(), "take its blocks apart first, then shard them"),
        ("stage", lambda layer: list(layer.blocks()), "take its blocks apart first, then shard them"),
    ],
)
def test_methods_of_sharded_layers_say_what_to_do(mesh, kind, function, remedy):
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(LAYERS[kind]())
    fully_shard(model, mesh=mesh)
    says = rf"(bias|weight_v) is sharded \(a DTensor\), of which each process holds a part; {remedy}"
    with pytest.raises(ValueError, match=says):
        function(model[0])


@needs_gloo
def test_the_full_state_dict_of_a_sharded_model_is_the_way_out(mesh):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(wnfused.WNLinear(4, 4), wnfused.WNResidualStage(4, 4, 3))
    expected = wnfused.state_dict_to_torch(model, "plain")
    fully_shard(model, mesh=mesh)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    found = wnfused.state_dict_to_torch(full, "plain")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_copies_in_threads_see_their_parameters():
    """What ``nn.DataParallel`` makes of a layer on each device: a copy whose parameters are plain attributes."""
    layer = wnfused.WNConv2d(3, 4, 3, activation="relu")
    replica = layer._replicate_for_data_parallel()
    for name, parameter in layer.named_parameters():
        setattr(replica, name, parameter * 1)
    x = torch.randn(1, 3, 5, 5)
    torch.testing.assert_close(replica(x), layer(x))
    replica(x).sum().backward()
    assert layer.weight_g.grad is not None
