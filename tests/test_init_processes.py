"""Initialisation in a process group: the first process decides, all are equal, errors reach all."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import wnfused
from wnfused.init import initialize


def _process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    try:
        torch.manual_seed(rank)  # nothing that the processes draw is equal
        model = wnfused.models.wrn(10, in_channels=1)
        sample = torch.randn(16, 1, 4, 4) * (1 + rank)
        report = initialize(model, "salimans2016", sample=sample)
        message = ""
        try:
            # Only the first process's sample counts, and it has none.
            initialize(model, "mishkin2016", sample=sample if rank else None)
        except ValueError as error:
            message = str(error)
        scaled = wnfused.nn.PlainResidualBlock(2, 2)
        initialize(scaled, "half_scaling")
        found = {"state": model.state_dict(), "report": str(report), "message": message, "scale": scaled.skip_scale}
        parts = torch.nn.Sequential(*(wnfused.WNLinear(4, 4) for _ in range(1 + rank)))
        with pytest.raises(ValueError, match="model: process 1 holds other parameters than process 0"):
            initialize(parts)
        _with_batch_norms_of_all_processes(sample)
        _with_a_factor_of_the_users_own(rank)
        with pytest.raises(ValueError, match=r"model: '0.weight' has no shape yet; run the model once, in every proc"):
            initialize(torch.nn.Sequential(torch.nn.LazyLinear(2)), "salimans2016", sample=torch.randn(64, 3))
        torch.save({**found, "sample": sample}, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def _with_batch_norms_of_all_processes(sample):
    """The first process alone looks at data: the others would never answer its norms."""
    model = torch.nn.Sequential(wnfused.WNConv2d(1, 4, 3), torch.nn.BatchNorm2d(4), wnfused.WNConv2d(4, 2, 1))
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    before = model[1].running_mean.clone()
    assert len(initialize(model, "salimans2016", sample=sample)) == 2
    assert "forward" not in vars(model[1])
    assert torch.equal(model[1].running_mean, before)


class _Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.fixed = wnfused.WNLinear(2, 2), _Fixed()
        self.skip_scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.fixed(x + self.skip_scale * self.layer(x))


class _Fixed(torch.nn.Identity):
    @property
    def skip_scale(self):
        return 1.0


def _with_a_factor_of_the_users_own(rank):
    model = _Scaled()
    with torch.no_grad():
        model.skip_scale.fill_(1 + rank)
    factor = model.skip_scale
    initialize(model)
    assert model.skip_scale is factor
    assert factor == 1  # a parameter like others


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
def test_the_first_process_decides(tmp_path):
    mp.spawn(_process, args=(str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert all(torch.equal(value, second["state"][name]) for name, value in first["state"].items())
    assert first["report"] == second["report"]
    assert "sample: scheme 'mishkin2016' looks at data" in first["message"]
    assert first["message"] == second["message"]
    assert first["scale"] == second["scale"] == 0.5**0.5
    # The parameters fit the first process's sample, not the second's.
    model = wnfused.models.wrn(10, in_channels=1)
    model.load_state_dict(first["state"])
    assert abs(model.stem(first["sample"]).std(correction=0) - 1) < 1e-3
    assert abs(model.stem(second["sample"]).std(correction=0) - 1) > 0.1
