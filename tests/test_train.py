"""Whole runs, small ones: results, divergence, accumulation, the step."""

import copy
import json
import math
import pickle
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from small_runs import SMALL, weights
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import wnfused
from wnfused.backends import native
from wnfused.train import TrainConfig, UsageError, checkpoint, train
from wnfused.train.batches import Batch
from wnfused.train.graph import GraphedModel
from wnfused.train.interruption import InterruptedRun
from wnfused.train.schedule import Schedule
from wnfused.train.step import step, summary

RESULT = {
    "test_accuracy", "test_loss", "best_epoch", "best_val_accuracy", "best_test_accuracy", "train_loss", "diverged",
    "epochs_finished", "updates", "seconds_per_step", "seconds", "peak_memory_bytes", "baseline_memory_bytes",
    "parameters", "world_size", "versions", "config", "history",
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("one_thread_throughout")


def test_the_result(finished: tuple[Path, dict[str, Any]]) -> None:
    out, result = finished
    assert json.loads((out / "result.json").read_text()) == json.loads(json.dumps(result))
    assert result.keys() == RESULT
    assert TrainConfig.from_dict(result["config"]) == SMALL
    assert not result["diverged"]
    # Chance is 0.1; the network has learnt something.
    assert result["test_accuracy"] > 0.4
    assert result["updates"] == 2 * 21
    assert 0 < result["seconds_per_step"] < result["seconds"]
    assert result["peak_memory_bytes"] > result["baseline_memory_bytes"] > 0
    assert [row["epoch"] for row in result["history"]] == [0, 1]
    assert result["train_loss"] == result["history"][-1]["train_loss"] < result["history"][0]["train_loss"]
    assert sorted(p.name for p in out.iterdir()) == ["best.ckpt", "config.json", "last.ckpt", "result.json"]


def test_the_reported_accuracy_is_that_of_the_saved_weights(finished: tuple[Path, dict[str, Any]]) -> None:
    from wnfused.train.data import load

    out, result = finished
    model = wnfused.models.wrn(16, in_channels=1)
    data = load("digits")
    images = data.standardise(data.test.images)
    for file, accuracy in (("last.ckpt", "test_accuracy"), ("best.ckpt", "best_test_accuracy")):
        state = checkpoint.load(out / file)["state_dict"]
        model.load_state_dict({name.removeprefix("model."): value for name, value in state.items()})
        right = (model(images).argmax(1) == data.test.labels).double().mean().item()
        # One image of 360, on which two logits may be equal up to rounding.
        assert result[accuracy] == pytest.approx(right, abs=1 / 360)


def test_the_optimiser_follows_the_schedule(tmp_path: Path) -> None:
    used: list[float] = []
    others: set[tuple[float, float]] = set()

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        (group,) = optimizer.param_groups
        used.append(group["lr"])
        others.add((group["momentum"], group["weight_decay"]))

    hook = register_optimizer_step_pre_hook(note)
    config = replace(
        SMALL, epochs=3, batch_size=200, accumulate=2, warmup=1.5, milestones=(2,), factor=0.5, momentum=0.8,
        weight_decay=1e-4,
    )  # fmt: skip
    try:
        train(config, tmp_path / "run")
    finally:
        hook.remove()
    schedule = Schedule(0.02, 1.5, (2,), 0.5)
    # 1293 images: 7 mini-batches, 4 updates.
    assert used == pytest.approx([schedule.at(epoch, i, 4) for epoch in range(3) for i in range(4)])
    assert others == {(0.8, 1e-4)}


def test_fixup_scalars_have_a_tenth_of_the_rate(tmp_path: Path) -> None:
    seen: list[tuple[int, float, float]] = []

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        others, scalars = optimizer.param_groups
        assert all(p.shape == (1,) for p in scalars["params"])
        assert not any(p.shape == (1,) for p in others["params"])
        seen.append((len(scalars["params"]), scalars["lr"], others["lr"]))

    hook = register_optimizer_step_pre_hook(note)
    try:
        config = TrainConfig(
            depth=10, norm="fixup", init="zhang2019", epochs=2, batch_size=256, lr=0.1, milestones=(1,)
        )
        result = train(config, tmp_path / "run")
    finally:
        hook.remove()
    assert not result["diverged"]
    assert {count for count, _, _ in seen} == {2 + 1 + 5 * 3}
    assert [(round(a, 9), round(b, 9)) for _, a, b in (seen[0], seen[-1])] == [(0.01, 0.1), (0.001, 0.01)]
    with pytest.raises(UsageError, match="--norm fixup: is for the residual blocks"):
        TrainConfig(model="cnn", depth=5, norm="fixup")


def test_accumulated_mini_batches_are_one_batch(finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    out, result = finished
    halves = train(replace(SMALL, batch_size=32, accumulate=2), tmp_path / "run")
    assert halves["updates"] == result["updates"]
    # The same updates but for the order of float32 sums, whose errors grow over 42 updates with momentum.
    assert halves["history"][0]["train_loss"] == pytest.approx(result["history"][0]["train_loss"], rel=1e-3)
    one, other = weights(out), weights(tmp_path / "run")
    difference = sum((one[n] - other[n]).square().sum() for n in one) / sum(one[n].square().sum() for n in one)
    assert difference.sqrt() < 1e-2


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "mlp", "depth": 3, "width": 16},
        {"model": "cnn", "depth": 3, "width": 8},
        {"model": "resnet", "depth": 14, "stack": False},
        {"norm": "batch", "init": "torch_default"},
        {"norm": "none"},
        {"data": "synthetic", "crop_flip": True, "cutout": 4, "mixup": 0.5},
        {"init": "torch_default", "init_options": {"v": "he"}},
        {"precision": "bf16-mixed", "weight_decay": 1e-4},
        {"recompute": 1, "width": 2},
    ],
    ids=str,
)
def test_every_kind_of_run(tmp_path: Path, changes: dict[str, Any]) -> None:
    result = train(replace(SMALL, epochs=1, batch_size=256, **changes), tmp_path / "run")
    assert not result["diverged"]
    assert result["epochs_finished"] == 1


# ---------------------------------------------------------------------------------------------------- divergence


@pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
@pytest.mark.usefixtures("forget_warnings")
@pytest.mark.filterwarnings("always::wnfused.dispatch.BackendWarning")
def test_a_backend_that_is_passed_over_inside_a_run_is_announced(tmp_path: Path) -> None:
    """Recomputed stages of float64 have no kernel; what Lightning calls is not taken for its own affair."""
    with pytest.warns(wnfused.BackendWarning, match="residual_stage passes over backend 'native'"):
        train(replace(SMALL, precision="64-true", recompute=1), tmp_path)


def test_the_caller_s_process_group_stays(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        train(replace(SMALL, epochs=1), tmp_path / "run")
        dist.barrier()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_a_default_device_is_for_the_callers_own_tensors(tmp_path: Path) -> None:
    config = TrainConfig(model="mlp", depth=2, width=16, epochs=1, batch_size=512, device="cpu")
    expected = train(config, tmp_path / "plain")
    with torch.device("meta"):
        found = train(config, tmp_path / "beside")
    assert found["history"][0]["train_loss"] == expected["history"][0]["train_loss"]
    assert found["test_accuracy"] == expected["test_accuracy"]


def test_a_group_of_its_own_is_left_where_the_result_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, content: dict[str, Any]) -> None:
        grouped.append(dist.is_initialized())
        raise OSError(28, "No space left on device", str(path))

    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"):  # Lightning sets them
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    grouped: list[bool] = []
    monkeypatch.setattr("wnfused.train.run.write_json", write)
    with pytest.raises(OSError, match=r"No space left on device: '.*/result\.json'; stopped after 1 of 1 epochs"):
        train(TrainConfig(depth=10, epochs=1, batch_size=512, device="cpu", strategy="ddp", devices="1"), tmp_path)
    assert grouped == [False]
    assert not dist.is_initialized()


def test_divergence_is_a_result_and_not_a_crash(tmp_path: Path) -> None:
    result = train(replace(SMALL, lr=1e20, warmup=0), tmp_path / "run")
    assert result["diverged"]
    assert result["test_accuracy"] == 0
    assert result["train_loss"] is None
    assert result["epochs_finished"] < 2
    assert json.loads((tmp_path / "run" / "result.json").read_text())["diverged"]


def test_divergence_in_the_very_last_update_is_noticed(tmp_path: Path) -> None:
    updates = []

    def spoil(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        updates.append(1)
        if len(updates) == 2 * 21:
            optimizer.param_groups[0]["params"][0].detach().fill_(float("nan"))

    hook = register_optimizer_step_post_hook(spoil)
    try:
        result = train(SMALL, tmp_path / "run")
    finally:
        hook.remove()
    assert result["diverged"]
    assert result["test_accuracy"] == 0
    assert result["history"][-1]["val_loss"] is None


# ------------------------------------------------------------------------------------------------------ the step


def test_the_step_against_the_formula() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3)).double()
    images = torch.randn(5, 1, 2, 2, dtype=torch.float64)
    labels, partners = torch.tensor([0, 1, 2, 0, 1]), torch.tensor([1, 1, 0, 2, 2])
    share, real = torch.rand(5), torch.tensor([True, True, False, True, True])
    outcome = step(model, Batch(images, labels, partners, share, real, worth=0.25))
    log_p = model(images).log_softmax(1)
    losses = [-(s * p[a] + (1 - s) * p[b]) for p, a, b, s in zip(log_p, labels, partners, share, strict=True)]
    lost = sum(loss for loss, counted in zip(losses, real, strict=True) if counted)
    torch.testing.assert_close(outcome.loss, 0.25 * lost, rtol=1e-6, atol=0)
    right = ((log_p.argmax(1) == labels) & real).sum().item()
    assert summary(outcome.counts) == pytest.approx((lost.item() / 4, right / 4), rel=1e-6)


def test_a_recorded_model_replays_its_own_shape_and_launches_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the recording itself only what it leaves behind is imitated: an instance's ``forward``, changed buffers."""
    replays = []

    def record(model: nn.Module, sample: tuple[Tensor, ...]) -> nn.Module:
        launched = model.forward
        launched(*sample)  # the warm-up moves batch norm's averages
        model.forward = lambda images: (replays.append(images.shape), launched(images))[1]  # type: ignore[method-assign]
        return model

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", record)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    before = model[1].running_mean.clone()
    graphed = GraphedModel(model, torch.ones(8, 3))
    assert torch.equal(model[1].running_mean, before)
    images = torch.randn(8, 3)
    torch.testing.assert_close(graphed(images), model(images))
    torch.testing.assert_close(graphed(images[:5]), model(images[:5]))
    assert replays == [(8, 3)]
    assert "forward" not in model.__dict__


@pytest.mark.parametrize("batches", [1, 3])
def test_gradients_of_replays_are_summed(monkeypatch: pytest.MonkeyPatch, batches: int) -> None:
    """Of a replay only where it leaves its gradients is imitated: each in the same memory."""

    class Replay(torch.autograd.Function):
        gradient = torch.zeros(4, 3)

        @staticmethod
        def forward(ctx: Any, images: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(images)
            return images @ weight.T

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
            (images,) = ctx.saved_tensors
            return None, Replay.gradient.copy_(dy.T @ images).detach()

    def record(model: nn.Module, sample: tuple[Tensor, ...]) -> nn.Module:
        model.forward = lambda images: Replay.apply(images, model.weight)  # type: ignore[method-assign]
        return model

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", record)
    model = nn.Linear(3, 4, bias=False)
    graphed = GraphedModel(model, torch.ones(8, 3), accumulates=batches > 1)
    images = torch.randn(batches, 8, 3)
    for some in images:
        graphed(some).square().sum().backward()
    expected = torch.autograd.grad(model(images.flatten(0, 1)).square().sum(), model.weight)[0]
    torch.testing.assert_close(model.weight.grad, expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_cuda_graphs_need_cuda(tmp_path: Path, device: str) -> None:
    with pytest.raises(UsageError, match="cuda-graph"):
        train(replace(SMALL, cuda_graph=True, device=device), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_float16_is_not_mixed_on_the_cpu_where_bfloat16_would_take_its_place(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--precision 16-mixed: is not for the CPU, .* bf16-mixed is"):
        train(replace(SMALL, precision="16-mixed", device="cpu"), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"epochs": 1.5}, "--epochs 1.5: must be of type int, not float"),
        ({"depth": True}, "--depth True: must be of type int, not bool"),
        ({"lr": "0.1"}, "--lr 0.1: must be of type float, not str"),
        ({"width": "2"}, "--width 2: must be of type int or None, not str"),
        ({"devices": 2}, "--devices 2: must be of type str, not int"),
        ({"milestones": [1]}, r"--milestones \[1\]: must be of type tuple, not list"),
        ({"milestones": ("a",)}, r"--milestones \('a',\): must be epochs"),
        ({"milestones": (1.5,)}, r"--milestones \(1\.5,\): must be epochs"),
        ({"milestones": (True,)}, r"--milestones \(True,\): must be epochs"),
        ({"init_options": {3: 4}}, r"--init-option \{3: 4\}: must be options by name"),
        ({"init_options": {"v": ["he"]}}, r"--init-option \{'v': \['he'\]\}: must be options by name, each a number"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TrainConfig(**wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lr": 1e308}, r"--lr 1e\+308: must be a finite number, above 0, of at most 1e38"),
        ({"weight_decay": 1e300}, r"--weight-decay 1e\+300: must be a finite number, 0 or more, of at most 1e38"),
        ({"factor": 1e30, "milestones": (0, 0)}, r"--factor 1e\+30: makes rates above 1e38 of lr 0.01"),
        ({"batch_size": 2**63}, r"--batch-size \d+: must be below 2\*\*31"),
        ({"cutout": 10**20}, r"--cutout \d+: must be below 2\*\*31"),
        ({"depth": 10**23}, r"--depth \d+: must be below 2\*\*31"),
        ({"devices": "²"}, "--devices ²: must be a number of devices or auto"),
        ({"devices": "9" * 30}, r"--devices \d+: must be a number of devices or auto"),
        ({"recompute": 10**30}, r"--recompute 10+: must be below 2\*\*31"),
        ({"milestones": (2**31,)}, r"--milestones \(\d+,\): must be epochs, counted from 0, below 2\*\*31"),
        ({"momentum": 2.0}, r"--momentum 2\.0: must be 0 or more and below 1"),
        ({"momentum": 1}, "--momentum 1: must be 0 or more and below 1"),
        ({"momentum": -0.1}, r"--momentum -0\.1: must be 0 or more and below 1"),
        ({"momentum": math.nan}, "--momentum nan: must be 0 or more and below 1"),
        ({"lr": math.nan}, "--lr nan: must be a finite number, above 0"),
        ({"warmup": math.nan}, "--warmup nan: must be a finite number, 0 or more"),
        ({"mixup": -1}, "--mixup -1: must be a finite number, 0 or more"),
        ({"data": "imagenet"}, "--data imagenet: is not a data set; there are digits"),
        ({"init": "magic"}, "--init magic: is not a scheme; there are arpit2019"),
        ({"recompute": 2, "stack": False}, "--recompute 2: is for stacked blocks"),
        ({"model": "cnn", "stack": False}, "--stack False: is for the weight-normalised stages of wrn and resnet"),
    ],
)
def test_a_value_that_cannot_work_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TrainConfig(**wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"strategy": "ddp_spawn", "devices": "2"},
            "--strategy ddp_spawn: trains in processes that keep their results",
        ),
        ({"strategy": "xla"}, "--strategy xla: cannot be used here"),
        ({"init_options": {"sample": 3}}, "--init-option sample=3: is no option of scheme 'arpit2019'"),
        (
            {"width": 2**31 - 1},
            "--model wrn: there is not enough memory for the network; make --width 2147483647 or --depth 16 smaller",
        ),
        ({"model": "cnn", "width": 2**31 - 1}, "--model cnn: there is not enough memory for the network"),
        ({"cutout": 15}, "--cutout 15: leaves nothing of any image of 8 x 8 pixels; use 14 or less for digits"),
        ({"cutout": 31, "data": "synthetic"}, "--cutout 31: .* use 30 or less for synthetic"),
    ],
)
def test_what_cannot_be_built_is_named_and_leaves_nothing(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        train(replace(SMALL, **wrong), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_is_hardly_meant_is_said(tmp_path: Path) -> None:
    config = TrainConfig(
        depth=10, norm="fixup", epochs=2, batch_size=1300, warmup=2.5, milestones=(1, 2, 60), crop_flip=True
    )
    with pytest.warns(UserWarning, match="--norm fixup") as caught:
        train(config, tmp_path / "run")
    assert [str(warning.message) for warning in caught] == config.remarks()
    assert config.remarks() == [
        "--norm fixup: its blocks are meant for --init zhang2019, not arpit2019",
        "--crop-flip: shifts by up to four pixels and mirrors, which leaves little of a digit",
        "--warmup 2.5: the run ends before, by --epochs 2",
        "--milestones 2,60: never reached, the last epoch is 1",
    ]
    assert not replace(config, init="zhang2019", crop_flip=False, warmup=2.0, milestones=(1,)).remarks()


def test_what_a_scheme_could_not_do_is_said(tmp_path: Path) -> None:
    config = TrainConfig(model="mlp", depth=6, width=130, init="daneshmand2021", epochs=1, batch_size=1300)
    with pytest.warns(UserWarning, match="--init daneshmand2021") as caught:
        train(config, tmp_path / "run")
    notes = [
        f"layers.{i}: the sample gives its input rank 128 of 130: pseudo-inverse, V' drawn at random" for i in (1, 2, 3)
    ]
    notes.append("2 more notes of this kind")
    assert [str(warning.message) for warning in caught] == [f"--init daneshmand2021: {note}" for note in notes]


def test_what_is_no_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="config: expected a TrainConfig, got dict"):
        train({"depth": 16}, tmp_path / "run")  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"out": None}, "out: expected a path, got None"),
        ({"out": b"run"}, "out: expected a path, got b'run'"),
        ({"resume": "no"}, "resume: 'no' must be True or False"),
        ({"data_folder": 3}, "data_folder: expected a path, got 3"),
        ({"reporter": 3}, "reporter: int has no method on_batch"),
    ],
)
def test_arguments_of_a_wrong_type_are_named(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        train(SMALL, **{"out": tmp_path / "run", **arguments})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_exceptions_can_be_pickled_and_copied(copied: Callable[[BaseException], BaseException], tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    corrupt = checkpoint.CorruptCheckpointError(tmp_path / "last.ckpt", "is empty")
    (tmp_path / "config.json").unlink()  # its message says that there was one
    usage = UsageError("depth", 101, "must be 6N + 4")
    vars(usage)["__notes__"] = ["third of a sweep"]  # as add_note does from Python 3.11 on
    for error in (usage, corrupt, InterruptedRun(signal.SIGTERM, "stopped after 1 of 2 epochs")):
        found = copied(error)
        assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))


def test_numbers_of_numpy_become_pythons_own() -> None:
    options = {"steps": np.int64(3), "tolerance": np.float32(0.25), "on": np.bool_(True), "v": "he", "none": None}
    config = TrainConfig(
        depth=np.int64(40), milestones=(np.int32(2),), lr=np.int64(1), momentum=np.float32(0.5), stack=np.bool_(True),
        init_options=options,
    )  # fmt: skip
    own = {"steps": 3, "tolerance": 0.25, "on": True, "v": "he", "none": None}
    assert config == TrainConfig(depth=40, milestones=(2,), lr=1, momentum=0.5, init_options=own)
    assert {name: type(value) for name, value in config.init_options.items()} == {n: type(v) for n, v in own.items()}
    assert json.loads(json.dumps(config.to_dict())) == config.to_dict()
    with pytest.raises(UsageError, match=r"--epochs 2\.0: must be of type int, not float"):
        TrainConfig(epochs=np.float64(2))  # type: ignore[arg-type]


def test_a_configuration_is_read_from_a_dict() -> None:
    with pytest.raises(TypeError, match="content: expected a dict, got int"):
        TrainConfig.from_dict(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="--milestones 3: must be of type tuple, not int"):
        TrainConfig.from_dict({"milestones": 3})
