"""What the tests of init schemes look at."""

from torch import Tensor, nn


def effective(layer: nn.Module) -> Tensor:
    """The weight that a layer computes with, flat by rows."""
    return layer.weight.detach().flatten(1)
