"""The learning rate, against the formula written out."""

import pytest

from wnfused.train.schedule import Schedule


@pytest.mark.parametrize(
    ("epoch", "update", "share"),
    [(0, 0, (1 / 10 / 2) ** 2), (0, 9, 0.25), (1, 0, (1.1 / 2) ** 2), (1, 9, 1.0), (2, 0, 1.0), (3, 5, 1.0)],
)
def test_the_quadratic_ramp(epoch: int, update: int, share: float) -> None:
    assert Schedule(0.3, warmup=2).at(epoch, update, 10) == pytest.approx(0.3 * share, rel=1e-12)


def test_no_warm_up_is_the_full_rate_from_the_first_update() -> None:
    assert Schedule(0.3).at(0, 0, 10) == 0.3


def test_a_fraction_of_an_epoch() -> None:
    schedule = Schedule(1.0, warmup=0.25)
    rates = [schedule.at(0, i, 10) for i in range(4)]
    assert rates == pytest.approx([0.16, 0.64, 1.0, 1.0])


@pytest.mark.parametrize(("epoch", "share"), [(0, 1), (90, 1), (91, 0.1), (135, 0.1), (136, 0.01), (181, 0.01)])
def test_steps(epoch: int, share: float) -> None:
    assert Schedule(0.1, milestones=(91, 136)).at(epoch, 0, 7) == pytest.approx(0.1 * share)


def test_another_factor() -> None:
    assert Schedule(1.0, milestones=(60, 120, 160), factor=0.2).at(170, 3, 5) == pytest.approx(0.008)
