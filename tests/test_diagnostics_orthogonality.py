"""The orthogonality gap, its bounds and the cosines, against singular values, samples of laws and loops."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from drawn import gaussian
from torch import Tensor, nn

import wnfused
from wnfused.diagnostics import (
    gap_bound,
    gaussian_distance,
    orthogonality,
    orthogonality_gap,
    similarity,
    stationary_gap,
)

pytestmark = pytest.mark.usefixtures("on_the_reference")


def scaled_values(h: Tensor) -> Tensor:
    s = torch.linalg.svdvals(h)
    return F.pad(s / s.norm(), (0, h.shape[1] - len(s)))


@pytest.mark.parametrize(("d", "n"), [(8, 5), (5, 5), (5, 8), (1, 3), (3, 1)])
def test_the_gap_and_the_distance_by_singular_values(d: int, n: int) -> None:
    h = 7 * gaussian(d, n)
    s = scaled_values(h)
    by_hand = torch.linalg.matrix_norm(h.T @ h / h.square().sum() - torch.eye(n, dtype=h.dtype) / n)
    assert orthogonality_gap(h).item() == pytest.approx(by_hand.item(), abs=1e-14)
    assert orthogonality_gap(h).item() ** 2 == pytest.approx(max(0.0, (s**4).sum().item() - 1 / n), abs=1e-14)
    assert gaussian_distance(h).item() == pytest.approx(((s - n**-0.5) ** 2).sum().item(), abs=1e-12)
    assert gaussian_distance(h) <= 2 * n * orthogonality_gap(h) + 1e-15
    if d < n:
        assert orthogonality_gap(h) >= math.sqrt(1 / d - 1 / n) - 1e-15


def test_the_ends_of_the_gap() -> None:
    q = torch.linalg.qr(gaussian(9, 4)).Q
    assert orthogonality_gap(3 * q).item() == pytest.approx(0, abs=1e-15)
    assert gaussian_distance(3 * q).item() == pytest.approx(0, abs=1e-15)
    rank_one = gaussian(9, 1) * torch.ones(1, 4, dtype=torch.float64)
    assert orthogonality_gap(rank_one).item() == pytest.approx(math.sqrt(3 / 4), rel=1e-12)
    assert orthogonality_gap(torch.zeros(3, 2)).isnan()
    assert gaussian_distance(torch.zeros(3, 2)).isnan()
    # Neither overflows nor vanishes with the scale.
    assert orthogonality_gap(1e200 * q).item() == pytest.approx(0, abs=1e-15)
    assert orthogonality_gap(1e-200 * rank_one).item() == pytest.approx(math.sqrt(3 / 4), rel=1e-12)


def test_batches_of_matrices() -> None:
    h = gaussian(3, 2, 6, 4)
    for function in (orthogonality_gap, gaussian_distance):
        loop = torch.stack([torch.stack([function(m) for m in row]) for row in h])
        assert torch.allclose(function(h), loop, rtol=1e-13)


def test_one_matrix_of_zeros_among_others() -> None:
    h = gaussian(3, 6, 4)
    h[1] = 0
    expected = [math.nan if i == 1 else gaussian_distance(h[i]).item() for i in range(3)]
    assert gaussian_distance(h).tolist() == pytest.approx(expected, nan_ok=True)
    assert torch.vmap(gaussian_distance)(h).tolist() == pytest.approx(expected, nan_ok=True)


def test_the_distance_is_that_of_the_two_laws() -> None:
    """Wasserstein between Gaussians from their covariances, by the Bures formula that does not assume they commute."""
    h = gaussian(6, 3)
    h = h / h.norm()
    n, d = 3, 6

    def root(m: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(m)
        return vectors @ values.clamp(min=0).sqrt().diag() @ vectors.T

    ours, target = h.T @ h / d, torch.eye(n, dtype=h.dtype) / (n * d)
    bures = ours.trace() + target.trace() - 2 * root(root(ours) @ target @ root(ours)).trace()
    assert gaussian_distance(h).item() == pytest.approx(d * bures.item(), rel=1e-10)


def test_theorem_1_as_printed_and_as_a_bound() -> None:
    assert gap_bound(4, samples=2, width=100, alpha=0.3) == pytest.approx(2 * 0.8**4 + 6 / 3)
    assert gap_bound([0, 1], 2, 100, 0.3).shape == (2,)
    for alpha in (0, 0.6):
        with pytest.raises(ValueError, match=r"alpha: .* at most 1/samples = 0.5"):
            gap_bound(1, samples=2, width=100, alpha=alpha)
    with pytest.raises(ValueError, match="samples: 0 must be an int of at least 1"):
        gap_bound(3, 0, 10, 0.1)
    with pytest.raises(ValueError, match="width: -10 must be an int of at least 1"):
        gap_bound(3, 2, -10, 0.1)
    with pytest.raises(TypeError, match="layers: expected numbers, got 'a'"):
        gap_bound("a", 2, 10, 0.1)


class BatchNorm(nn.Module):
    """The paper's, which subtracts no mean, over ``sqrt d``; samples are rows here."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.square().sum(0).sqrt() / math.sqrt(x.shape[1])


def chain(d: int, layers: int, norm: bool) -> nn.Sequential:
    """``H <- BN(W H) / sqrt d``, or ``H <- W H``; Gaussian weights of variance 1/d."""
    parts: list[nn.Module] = []
    for i in range(layers):
        linear = nn.Linear(d, d, bias=False)
        linear.weight = nn.Parameter(gaussian(d, d, seed=i + 1) / math.sqrt(d))
        parts += [linear, BatchNorm()] if norm else [linear]
    return nn.Sequential(*parts)


def after_norm(name: str, module: nn.Module) -> bool:
    return isinstance(module, BatchNorm)


def test_batch_norm_falls_and_the_plain_chain_rises() -> None:
    d = 64
    axes = torch.eye(d, dtype=torch.float64)[:2]
    nearly_parallel = axes[[0, 0]] + 1e-2 * axes
    falling = orthogonality(chain(d, 30, norm=True), nearly_parallel, filter=after_norm)
    assert falling.gap[0] > 0.6
    assert falling.gap[-5:].mean() < 0.2
    assert (falling.distance <= falling.distance_bound).all()
    bound = falling.gap_bound()
    assert bound is not None
    assert (falling.gap <= bound).all()
    rising = orthogonality(chain(d, 30, norm=False), axes)
    assert rising.gap[-1] > rising.gap[0]
    fell = similarity(chain(d, 30, norm=True), nearly_parallel, filter=after_norm).absolute_cosine
    rose = similarity(chain(d, 30, norm=False), axes).absolute_cosine
    assert fell[-5:].mean() < fell[0] / 3
    assert rose[-1] > rose[0]


def test_every_station_of_a_network_by_hand() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4)).double()
    images = gaussian(5, 2, 4, 4)
    profile, alike = orthogonality(model, images), similarity(model, images)
    assert profile.names == alike.names == ("0", "3")
    assert profile.widths.tolist() == [12, 4]
    for i, h in enumerate((model[0](images).flatten(1), model(images))):
        h = h.detach()
        s = scaled_values(h.T)
        assert profile.gap[i] == pytest.approx(orthogonality_gap(h.T).item(), rel=1e-12)
        assert profile.distance[i] == pytest.approx(((s - 5**-0.5) ** 2).sum().item(), rel=1e-9)
        assert profile.smallest[i] == pytest.approx(s[-1].item() ** 2, abs=1e-12)
        pairs = [F.cosine_similarity(h[a], h[b], dim=0).item() for a in range(5) for b in range(a + 1, 5)]
        assert alike.cosine[i] == pytest.approx(np.mean(pairs), rel=1e-12)
        assert alike.absolute_cosine[i] == pytest.approx(np.mean(np.abs(pairs)), rel=1e-12)
        assert alike.quantiles[i] == pytest.approx(np.quantile(np.abs(pairs), [0.05, 0.5, 0.95]), rel=1e-12)
    # Four dimensions cannot hold five independent samples.
    assert profile.gap_bound() is None


def test_a_stage_is_seen_block_by_block() -> None:
    stacked = wnfused.models.wrn(22).double()
    blocks = wnfused.models.wrn(22).double()
    blocks.stem, blocks.head = stacked.stem, stacked.head
    blocks.stages = nn.Sequential(*(stage.unstack() for stage in stacked.stages))
    images = gaussian(4, 3, 8, 8)
    for measure, field in ((orthogonality, "gap"), (similarity, "absolute_cosine")):
        one, other = measure(stacked, images), measure(blocks, images)
        assert len(one.names) == 1 + 9 + 1
        assert getattr(one, field) == pytest.approx(getattr(other, field), rel=1e-9)


def test_a_representation_of_zero_is_like_nothing() -> None:
    profile = similarity(nn.Linear(2, 2, bias=False), torch.zeros(2, 2))
    assert profile.cosine.tolist() == [0.0]


def test_more_pairs_than_torch_takes_quantiles_of(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = torch.ones(2**24 + 1, dtype=torch.float64)
    monkeypatch.setattr(sys.modules["wnfused.diagnostics.similarity"], "_cosines", lambda output: pairs)
    profile = similarity(nn.Linear(1, 1), torch.ones(2, 1))
    assert profile.quantiles == pytest.approx(np.ones((1, 3)))


def test_batch_norm_keeps_its_statistics_and_no_hook_is_left() -> None:
    model = wnfused.models.wrn(10, norm="batch")
    before = {name: t.clone() for name, t in model.state_dict().items()}
    seen: list[int] = []
    orthogonality(model, gaussian(4, 3, 8, 8).float(), progress=lambda done, total: seen.append(done))
    assert seen == [1, 2, 3, 4, 5]
    similarity(model, gaussian(4, 3, 8, 8).float())
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert not any(m._forward_hooks for m in model.modules())
    assert all(p.requires_grad for p in model.parameters())


def test_the_stationary_gap_of_appendix_f() -> None:
    q = gaussian(6, 3)
    assert stationary_gap(q, q.T @ q / 6).item() == pytest.approx(0, abs=1e-15)
    assert stationary_gap(q, torch.zeros(3, 3)).item() == pytest.approx((q.T @ q / 6).norm().item())
    with pytest.raises(ValueError, match=r"expected: shape \[2, 2\] does not fit; use \[3, 3\]"):
        stationary_gap(q, torch.zeros(2, 2))


def test_pictures(tmp_path: Path) -> None:
    model = chain(16, 5, norm=True)
    orthogonality(model, gaussian(4, 16)).save(tmp_path / "gap.png")
    similarity(model, gaussian(4, 16)).save(tmp_path / "cosine.pdf")
    assert (tmp_path / "gap.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="ax: 1 axes do not fit; OrthogonalityProfile draws onto 2"):
        orthogonality(model, gaussian(4, 16)).draw([None])


@pytest.mark.parametrize("measure", [orthogonality, similarity])
def test_wrong_arguments(measure) -> None:
    with pytest.raises(ValueError, match="inputs: 1 sample"):
        measure(nn.Linear(2, 2), torch.zeros(1, 2))
    with pytest.raises(ValueError, match=r"inputs: shape \[0, 2\] has no sample"):
        measure(nn.Linear(2, 2), torch.zeros(0, 2))
    with pytest.raises(TypeError, match="model: expected"):
        measure(torch.relu, torch.zeros(2, 2))
    with pytest.raises(TypeError, match="filter: expected a function, got 'a'"):
        measure(nn.Linear(2, 2), torch.zeros(2, 2), filter="a")
    with pytest.raises(TypeError, match="h: expected a Tensor, got list"):
        orthogonality_gap([1])
    with pytest.raises(ValueError, match=r"h: shape \[3\] is not"):
        orthogonality_gap(torch.zeros(3))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: orthogonality_gap(torch.ones(3, 2) * 1j),
            TypeError,
            "h: expected a dense tensor of real numbers, got",
        ),
        (lambda: gaussian_distance(torch.eye(3).to_sparse()), TypeError, "h: expected a dense tensor of real numbers"),
        (lambda: stationary_gap(torch.ones(3, 2), torch.eye(2) * 1j), TypeError, "expected: expected a dense tensor"),
        (lambda: stationary_gap(torch.ones(3, 2), None), TypeError, "expected: expected a Tensor, got NoneType"),
        (
            lambda: stationary_gap(torch.ones(3, 2), torch.eye(2, device="meta")),
            ValueError,
            "expected: is on meta, h on cpu; use one device",
        ),
        (lambda: gap_bound(None, 2, 4, 0.2), TypeError, "layers: expected numbers, got None"),
        (lambda: gap_bound([0, -1], 2, 4, 0.2), ValueError, r"layers: \[0, -1\] must be at least 0"),
        (lambda: gap_bound(float("nan"), 2, 4, 0.2), ValueError, "layers: nan must be at least 0"),
    ],
)
def test_wrong_arguments_of_tensors(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call()
