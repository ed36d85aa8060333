"""The shapes of the model families that use weight norm, in plain torch layers, small.

Each builder takes ``norm``: what to wrap a layer in, ``torch.nn.utils.weight_norm``'s signature. The models are written
as their authors write them: activations called by ``forward``, module lists, padding cut off, gains frozen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Norm = Callable[..., Any]


class Vocoder(nn.Module):
    """HiFi-GAN's generator: transposed convolutions that upsample, each before a mean of dilated residual blocks."""

    def __init__(self, norm: Norm, channels: int = 16) -> None:
        super().__init__()
        self.pre = norm(nn.Conv1d(8, channels, 7, padding=3))
        self.ups, self.blocks = nn.ModuleList(), nn.ModuleList()
        for rate in (4, 2):
            self.ups.append(norm(nn.ConvTranspose1d(channels, channels // 2, 2 * rate, rate, rate // 2)))
            channels //= 2
            for kernel in (3, 5):
                self.blocks.append(
                    nn.ModuleList(
                        nn.ModuleList(
                            norm(nn.Conv1d(channels, channels, kernel, dilation=d, padding=d * (kernel - 1) // 2))
                            for d in (dilation, 1)
                        )
                        for dilation in (1, 3)
                    )
                )
        self.post = norm(nn.Conv1d(channels, 1, 7, padding=3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.pre(x)
        for i, up in enumerate(self.ups):
            x = up(F.leaky_relu(x, 0.1))
            x = sum(self.residual(block, x) for block in self.blocks[2 * i : 2 * i + 2]) / 2
        return torch.tanh(self.post(F.leaky_relu(x)))

    def residual(self, block: nn.ModuleList, x: Tensor) -> Tensor:
        for first, second in block:
            x = x + second(F.leaky_relu(first(F.leaky_relu(x, 0.1)), 0.1))
        return x


class Discriminators(nn.Module):
    """HiFi-GAN's: one folds the waveform to a period's columns, one reads it as it is; feature maps come out too."""

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.period = 3
        self.columns = nn.ModuleList(norm(nn.Conv2d(a, b, (5, 1), (3, 1), padding=(2, 0))) for a, b in ((1, 4), (4, 8)))
        self.scales = nn.ModuleList(
            norm(nn.Conv1d(a, b, k, s, groups=groups, padding=k // 2))
            for a, b, k, s, groups in ((1, 8, 15, 1, 1), (8, 16, 11, 2, 4), (16, 16, 5, 1, 1))
        )
        self.column_end, self.scale_end = norm(nn.Conv2d(8, 1, (3, 1), padding=(1, 0))), norm(nn.Conv1d(16, 1, 3))
        self.pool = nn.AvgPool1d(4, 2, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        features = []
        folded = F.pad(x, (0, -x.shape[-1] % self.period), "reflect").unflatten(-1, (-1, self.period))
        for layer in self.columns:
            folded = F.leaky_relu(layer(folded), 0.1)
            features.append(folded)
        features.append(self.column_end(folded))
        x = self.pool(x)
        for layer in self.scales:
            x = F.leaky_relu(layer(x), 0.1)
            features.append(x)
        features.append(self.scale_end(x))
        return torch.cat([feature.flatten(1) for feature in features], 1)


class Snake(nn.Module):
    """``x + sin(alpha x)^2 / alpha``, the activation of DAC."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.alpha + 1e-9).reciprocal() * torch.sin(self.alpha * x).pow(2)


class ResidualUnit(nn.Module):
    def __init__(self, norm: Norm, channels: int, dilation: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            Snake(channels), norm(nn.Conv1d(channels, channels, 7, dilation=dilation, padding=3 * dilation)),
            nn.ELU(), norm(nn.Conv1d(channels, channels, 1)),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x)


def codec(norm: Norm) -> nn.Module:
    """EnCodec- or DAC-like: strided convolutions down, transposed ones up, dilated residual units between."""
    return nn.Sequential(
        norm(nn.Conv1d(1, 8, 7, padding=3)), ResidualUnit(norm, 8, 1), ResidualUnit(norm, 8, 3), Snake(8),
        norm(nn.Conv1d(8, 16, 8, 4, padding=2)), Snake(16), norm(nn.Conv1d(16, 4, 3, padding=1)),
        norm(nn.Conv1d(4, 16, 7, padding=3)), nn.LeakyReLU(0.2),
        norm(nn.ConvTranspose1d(16, 8, 8, 4, padding=2)), ResidualUnit(norm, 8, 1), Snake(8),
        norm(nn.Conv1d(8, 1, 7, padding=3)), nn.Tanh(),
    )  # fmt: skip


class PositionalConv(nn.Module):
    """wav2vec 2.0's: a wide grouped convolution normalised over ``dim=2``, an even kernel's last step cut off."""

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.conv = norm(nn.Conv1d(16, 16, 8, padding=4, groups=4), name="weight", dim=2)
        self.layer_norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x.transpose(1, 2))[:, :, :-1]
        return self.layer_norm(x + F.gelu(y).transpose(1, 2))


class SelfDistillationHead(nn.Module):
    """DINO's: an MLP to a bottleneck of unit length, and a weight-normalised last layer whose gain stays at 1."""

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 6))
        self.last_layer = norm(nn.Linear(6, 32, bias=False))
        gain = dict(self.last_layer.named_parameters())
        g = gain.get("weight_g", gain.get("parametrizations.weight.original0"))
        if g is not None:
            g.data.fill_(1)
            g.requires_grad = False

    def forward(self, x: Tensor) -> Tensor:
        return self.last_layer(F.normalize(self.mlp(x), dim=-1, p=2))


class SignedDistance(nn.Module):
    """DeepSDF- or IGR-like: a deep softplus MLP over points, its input fed in again half way."""

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        widths = [3, 16, 16, 13, 16, 1]
        self.layers = nn.ModuleList(
            norm(nn.Linear(widths[i] + (3 if i == 3 else 0), widths[i + 1])) for i in range(len(widths) - 1)
        )

    def forward(self, points: Tensor) -> Tensor:
        x = points
        for i, layer in enumerate(self.layers):
            if i == 3:
                x = torch.cat([x, points], -1)
            x = layer(x)
            if i < len(self.layers) - 1:
                x = F.softplus(x, beta=100)
        return x


class Chomp(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, : -self.size].contiguous()


class TemporalBlock(nn.Module):
    def __init__(self, norm: Norm, before: int, after: int, dilation: int) -> None:
        super().__init__()
        self.conv1 = norm(nn.Conv1d(before, after, 3, padding=2 * dilation, dilation=dilation))
        self.conv2 = norm(nn.Conv1d(after, after, 3, padding=2 * dilation, dilation=dilation))
        self.chomp1, self.relu1, self.dropout1 = Chomp(2 * dilation), nn.ReLU(), nn.Dropout(0.0)
        self.chomp2, self.relu2, self.dropout2 = Chomp(2 * dilation), nn.ReLU(), nn.Dropout(0.0)
        self.net = nn.Sequential(
            self.conv1, self.chomp1, self.relu1, self.dropout1, self.conv2, self.chomp2, self.relu2, self.dropout2
        )
        self.downsample = nn.Conv1d(before, after, 1) if before != after else None
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.net(x) + (x if self.downsample is None else self.downsample(x)))


def temporal(norm: Norm) -> nn.Module:
    """A temporal convolutional network: causal, dilated residual blocks; a layer stands in two attributes."""
    return nn.Sequential(TemporalBlock(norm, 2, 8, 1), TemporalBlock(norm, 8, 8, 2), TemporalBlock(norm, 8, 6, 4))


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    return (y - torch.linspace(-1, 1, y.numel()).reshape(y.shape)).square().mean()


def distillation(model: nn.Module, x: Tensor) -> Tensor:
    target = torch.arange(x.shape[0]) % 32
    return F.cross_entropy(model(x) / 0.1, target)


def eikonal(model: nn.Module, points: Tensor) -> Tensor:
    """Distance 0 on the points, and a gradient of length 1 in space: a derivative of a derivative."""
    points = points.clone().requires_grad_()
    distance = model(points)
    (gradient,) = torch.autograd.grad(distance.sum(), points, create_graph=True)
    return distance.square().mean() + 0.1 * (gradient.norm(dim=-1) - 1).square().mean()


@dataclass(frozen=True)
class Family:
    build: Callable[[Norm], nn.Module]
    shape: tuple[int, ...]
    loss: Callable[[nn.Module, Tensor], Tensor] = mean_square


FAMILIES = {
    "vocoder": Family(Vocoder, (2, 8, 12)),
    "discriminators": Family(Discriminators, (2, 1, 64)),
    "codec": Family(codec, (2, 1, 64)),
    "positional": Family(PositionalConv, (2, 20, 16)),
    "distillation": Family(SelfDistillationHead, (16, 12), distillation),
    "distance": Family(SignedDistance, (20, 3), eikonal),
    "temporal": Family(temporal, (2, 2, 20)),
}
