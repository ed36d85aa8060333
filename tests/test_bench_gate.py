"""The benchmarks' gate: a wrong peer is caught, and what FLOPs and parameters are counted by."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from tiny_workloads import CONV, LAYER, NETWORK, STAGE
from torch import nn

import wnfused
from bench import (
    cases,
    deep,
    gate,
    initialisation,
    models,
    parameters,
    peers,
    report,
    workloads,
)
from wnfused.backends import native

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("workload", [LAYER, CONV, STAGE, NETWORK], ids=lambda w: type(w).__name__)
@pytest.mark.parametrize("peer", ["reference", "eager", "plain", "eager bf16"])
@pytest.mark.parametrize("pass_name", [workloads.FORWARD, workloads.BACKWARD])
def test_right_peers_pass(workload, peer, pass_name):
    subject = peers.subject(gate.Problem(workload), peer)
    gated = peers.gated(subject, peer, pass_name)
    assert gated.errors["y"] > 0
    gated.runner.call()


def _scaled_gain(module: nn.Module, forward):
    with torch.no_grad():
        next(p for n, p in module.named_parameters() if "original0" in n).mul_(1.01)
    return forward


def _no_bias(module: nn.Module, forward):
    with torch.no_grad():
        next(p for n, p in module.named_parameters() if n.endswith("bias")).zero_()
    return forward


def _not_finite(module: nn.Module, forward):
    return lambda x: forward(x) * math.nan


def _stale_gradient(module: nn.Module, forward):
    """The output is right, a parameter's gradient is not."""
    bias = next(p for n, p in module.named_parameters() if n.endswith("bias"))
    return lambda x: forward(x) + 0 * bias.sum() + (bias - bias.detach()).sum()


@pytest.mark.parametrize("workload", [LAYER, CONV, STAGE, NETWORK], ids=lambda w: type(w).__name__)
@pytest.mark.parametrize("plant", [_scaled_gain, _no_bias, _not_finite, _stale_gradient])
def test_planted_wrong_peer_is_caught(workload, plant):
    subject = peers.subject(gate.Problem(workload), "eager")
    subject.forward = plant(subject.module, subject.forward)
    with pytest.raises(gate.GateError, match="is off by"):
        peers.gated(subject, "eager", workloads.BACKWARD)


class _Off(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * 1.001


@pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
def test_the_frozen_peer_is_frozen_as_long_as_it_lives():
    workload = dataclasses.replace(CONV, passes=(workloads.FORWARD,))
    subject = peers.subject(gate.Problem(workload), "frozen")
    peers.gated(subject, "frozen", workloads.FORWARD).runner.call()
    assert subject.module._frozen is not None


def test_wrong_peer_is_reported_without_numbers(monkeypatch):
    monkeypatch.setitem(models.FORMS, "plain", lambda workload: _Off(models.plain(workload)))
    results = list(cases.run(LAYER, 0.0))
    for result in results:
        assert "plain" in result.failed
        assert "plain" not in result.seconds
        assert "eager" in result.ratios
    header, rows = report.table(results)
    assert [row[header.index("plain / ours")] for row in rows] == ["wrong", "wrong"]


def test_sketch_sees_the_size_of_an_error():
    torch.manual_seed(0)
    true = [{"v": torch.randn(16, 9), "b": torch.randn(16)} for _ in range(20)]
    off = [{"v": layer["v"] + 1e-3 * torch.randn(16, 9), "b": layer["b"]} for layer in true]
    errors = deep.sketch_errors(deep.sketch(iter(off)), deep.sketch(iter(true)))
    assert 3e-4 < errors["dv of 144 entries"] < 3e-3
    assert errors["db of 16 entries"] == 0


def test_parameters_are_the_same_in_every_form():
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    with wnfused.use_backend("reference"):
        outputs = [parameters.fill(form(NETWORK).double(), 2)(x) for form in models.FORMS.values()]
    for output in outputs:
        torch.testing.assert_close(output, outputs[0])


def test_flops_of_a_layer_and_of_a_network_without_the_input_gradient():
    assert models.flops(LAYER) == (2 * 4 * 8 * 8, 3 * 2 * 4 * 8 * 8)
    forward, both = models.flops(NETWORK)
    assert 3 * forward - both == 2 * 2 * 16 * 8 * 8 * 27


def test_init_gate_catches_a_matrix_that_is_left_out(monkeypatch):
    workload = workloads.Orthogonal(group="init", name="tiny", depth=16, passes=("orthogonal",))
    monkeypatch.setattr("wnfused.init.orthogonal_batched", lambda stack: stack)
    with pytest.raises(gate.GateError):
        initialisation.gated(workload, "batched")
