"""The papers' networks (Arpit, Campos & Bengio 2019, section 5 and supplement), weight-normalised and otherwise."""

from wnfused.models.cnn import CNN, cnn
from wnfused.models.mlp import MLP, mlp
from wnfused.models.resnet import ResNet, resnet, wrn

__all__ = ["CNN", "MLP", "ResNet", "cnn", "mlp", "resnet", "wrn"]
