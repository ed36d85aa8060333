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
import torch.multiprocessing as mp
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
        ("linear", lambda layer: layer.weight, "read it before the model is sharded"),
        ("linear", _write, "write it first, then shard the model"),
        ("stage", lambda layer: layer.unstack(), "take its blocks apart first, then shard them"),
        ("stage", lambda layer: list(layer.blocks()), "take its blocks apart first, then shard them"),
    ],
)
def test_methods_of_sharded_layers_say_what_to_do(mesh, kind, function, remedy):
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(LAYERS[kind]())
    fully_shard(model, mesh=mesh)
    says = rf"weight_v is sharded \(a DTensor\), of which each process holds a part; {remedy}"
    with pytest.raises(ValueError, match=says):
        function(model[0])


def _reset_shards(rank, store, folder):
    """As models that no process can hold begin: shapes, shards of them, memory, numbers."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    try:
        torch.manual_seed(rank)  # nothing that the processes draw is equal
        with torch.device("meta"):
            model = nn.Sequential(
                wnfused.WNResidualStage(4, 8, 3, 2),
                wnfused.WNConv2d(8, 6, 3, padding=1, dim=1),
                nn.Flatten(),
                wnfused.WNLinear(24, 5, init="he"),
            )
        # The stage's along their second dim: what is written to a slice of such a tensor is lost.
        stacked = {id(p): Shard(1) for p in model[0].parameters(recurse=False)}
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: stacked.get(id(p)))
        model.to_empty(device="cpu")
        for part in (model[0], model[1], model[3]):
            part.reset_parameters()
        torch.save({name: p.full_tensor() for name, p in model.named_parameters()}, f"{folder}/{rank}.pt")
        x = torch.randn(2, 4, 4, 4)
        with wnfused.frozen(model), torch.no_grad():  # before a forward has gathered the parameters
            found = [model(x), model(x)]
        torch.testing.assert_close(found, [model(x)] * 2)
        dist.barrier()
    finally:
        dist.destroy_process_group()


@needs_gloo
def test_sharded_layers_are_reset_as_whole_ones_are(tmp_path):
    mp.spawn(_reset_shards, args=(str(tmp_path / "store"), str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    rows = first["0.weight_v"].reshape(2, 2, 8, -1)
    torch.testing.assert_close(rows @ rows.mT, torch.eye(8).expand(2, 2, 8, 8))
    whole = wnfused.WNResidualStage(4, 8, 3, 2)
    assert torch.equal(first["0.weight_g"], whole.weight_g)
    assert torch.equal(first["0.transition.conv1.weight_g"], whole.transition.conv1.weight_g)
    assert not first["0.bias"].any()
    rows = first["1.weight_v"].transpose(0, 1).flatten(1)
    torch.testing.assert_close(rows @ rows.mT, torch.eye(8))
    assert not first["3.bias"].any()
    assert 0.8 < first["3.weight_v"].std() / (2 / 24) ** 0.5 < 1.2


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
