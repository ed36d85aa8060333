"""Networks as their users write them: torch's own layers, activations where they happen to stand, nothing of ours.

The last convolution of a residual branch is named ``conv2``, so that ``bench.parameters`` gives it a small gain.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# ------------------------------------------------------------------------------------------------ residual networks


class Block(nn.Module):
    """``relu(conv(relu(conv(x))) + shortcut(x))``, the shortcut a 1x1 convolution where the size changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv2(F.relu(self.conv1(x))) + self.shortcut(x))


class Bottleneck(nn.Module):
    """The same with 1x1 convolutions to a part of the channels and back, and groups in between."""

    def __init__(self, inputs: int, outputs: int, stride: int, part: int = 4, groups: int = 1) -> None:
        super().__init__()
        inner = outputs // part
        self.conv1 = nn.Conv2d(inputs, inner, 1)
        self.conv = nn.Conv2d(inner, inner, 3, stride, 1, groups=groups)
        self.conv2 = nn.Conv2d(inner, outputs, 1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.conv(F.relu(self.conv1(x))))
        return F.relu(self.conv2(y) + self.shortcut(x))


class ResNet(nn.Module):
    """Three stages of ``blocks`` blocks for 32x32 images, without normalisation: He et al. 2016, section 4.2."""

    def __init__(self, block: Callable[[int, int, int], nn.Module], blocks: int, stem: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, stem, 3, 1, 1)
        sizes = [stem, *(w for w in (width, 2 * width, 4 * width) for _ in range(blocks))]
        strides = [2 if a != b and i else 1 for i, (a, b) in enumerate(itertools.pairwise(sizes))]
        pairs = zip(itertools.pairwise(sizes), strides, strict=True)
        self.blocks = nn.Sequential(*(block(a, b, stride) for (a, b), stride in pairs))
        self.head = nn.Linear(4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks(F.relu(self.stem(x)))
        return self.head(y.mean((2, 3)))


class ResNet18(nn.Module):
    """Eighteen layers up to 512 channels, for images of 224x224 and smaller: He et al. 2016, table 1."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        sizes = itertools.pairwise((64, 64, 64, 128, 128, 256, 256, 512, 512))
        self.blocks = nn.Sequential(*(Block(a, b, 1 if a == b else 2) for a, b in sizes))
        self.head = nn.Linear(512, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


# ------------------------------------------------------------------------------------------ depthwise convolutions


class InvertedResidual(nn.Module):
    """1x1 to six times the channels, depthwise 3x3, 1x1 back: Sandler et al. 2018, figure 4."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide = 6 * inputs
        self.branch = nn.Sequential(
            nn.Conv2d(inputs, wide, 1), nn.ReLU(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide), nn.ReLU(),
        )  # fmt: skip
        self.conv2 = nn.Conv2d(wide, outputs, 1)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(self.branch(x))
        return x + y if self.residual else y


class MobileNet(nn.Module):
    """Sandler et al. 2018, table 2, for 32x32 images: fewer strides, no normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 1, 1)
        sizes = [16, *[24] * 2, *[32] * 3, *[64] * 4, *[96] * 3, *[160] * 3, 320]
        pairs = list(itertools.pairwise(sizes))
        strided = {(24, 32), (96, 160)}
        self.blocks = nn.Sequential(*(InvertedResidual(a, b, 2 if (a, b) in strided else 1) for a, b in pairs))
        self.last = nn.Conv2d(320, 1280, 1)
        self.head = nn.Linear(1280, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks(F.relu(self.stem(x)))
        return self.head(F.relu(self.last(y)).mean((2, 3)))


class DepthwiseBlock(nn.Module):
    """Depthwise 7x7, then two linear layers a pixel: Liu et al. 2022, figure 4, without normalisation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.wide = nn.Linear(channels, 4 * channels)
        self.conv2 = nn.Linear(4 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(x).permute(0, 2, 3, 1)
        return x + self.conv2(F.gelu(self.wide(y))).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """Three stages of three blocks, 96 to 384 channels."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 96, 4, 4)]
        for channels in (96, 192, 384):
            if channels > 96:
                layers.append(nn.Conv2d(channels // 2, channels, 2, 2))
            layers += [DepthwiseBlock(channels) for _ in range(3)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(384, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean((2, 3)))


# ---------------------------------------------------------------------------------------------------------- sound


class DilatedBlock(nn.Module):
    """``x + conv(lrelu(conv(lrelu(x))))``, the first one dilated."""

    def __init__(self, channels: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(channels, channels, kernel, 1, dilation * (kernel - 1) // 2, dilation)
        self.conv2 = nn.Conv1d(channels, channels, kernel, 1, (kernel - 1) // 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.leaky_relu(self.conv1(F.leaky_relu(x, 0.1)), 0.1))


class Vocoder(nn.Module):
    """80 mel bands to 256 times as many samples: the generator of Kong et al. 2020 (HiFi-GAN), of ``width`` channels.

    Its version 1 has 512, version 2 128.
    """

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.stem = nn.Conv1d(80, width, 7, 1, 3)
        widths = [width // 2, width // 4, width // 8, width // 16]
        self.ups = nn.ModuleList(
            nn.ConvTranspose1d(2 * width, width, 2 * up, up, up // 2)
            for width, up in zip(widths, (8, 8, 2, 2), strict=True)
        )
        self.fields = nn.ModuleList(
            nn.ModuleList(nn.Sequential(*(DilatedBlock(width, k, d) for d in (1, 3, 5))) for k in (3, 7, 11))
            for width in widths
        )
        self.last = nn.Conv1d(widths[-1], 1, 7, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for up, fields in zip(self.ups, self.fields, strict=True):
            x = up(F.leaky_relu(x, 0.1))
            x = torch.stack([field(x) for field in fields]).mean(0)
        return torch.tanh(self.last(F.leaky_relu(x)))


class Discriminator(nn.Module):
    """Samples to scores: of one scale, Kumar et al. 2019 (MelGAN) and Kong et al. 2020."""

    def __init__(self) -> None:
        super().__init__()
        # Inputs, outputs, kernel, stride, groups.
        shapes = (
            (1, 128, 15, 1, 1), (128, 128, 41, 2, 4), (128, 256, 41, 2, 16), (256, 512, 41, 4, 16),
            (512, 1024, 41, 4, 16), (1024, 1024, 41, 1, 16), (1024, 1024, 5, 1, 1),
        )  # fmt: skip
        self.layers = nn.ModuleList(nn.Conv1d(a, b, k, s, k // 2, groups=g) for a, b, k, s, g in shapes)
        self.last = nn.Conv1d(1024, 1, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.leaky_relu(layer(x), 0.1)
        return self.last(x)


class TemporalBlock(nn.Module):
    """``relu(x + relu(conv(relu(conv(x)))))``, causal and dilated: Bai, Kolter & Koltun 2018, figure 1."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.ahead = 2 * dilation
        self.conv1 = nn.Conv1d(channels, channels, 3, padding=self.ahead, dilation=dilation)
        self.conv2 = nn.Conv1d(channels, channels, 3, padding=self.ahead, dilation=dilation)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.conv1(x)[..., : -self.ahead])
        return F.relu(x + F.relu(self.conv2(y)[..., : -self.ahead]))


class TemporalNetwork(nn.Module):
    """Six blocks of 64 channels, dilations 1 to 32, and a score at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(TemporalBlock(64, 2**i) for i in range(6)))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x).transpose(1, 2))


# ---------------------------------------------------------------------------------------------------------- space


class DistanceField(nn.Module):
    """Points to their signed distance from a surface, and its gradient, which an eikonal loss wants to be of length
    one: Gropp et al. 2020 (IGR), of eight layers with a skip. A backward differentiates twice."""

    def __init__(self, width: int = 256, depth: int = 8, skip: int = 4) -> None:
        super().__init__()
        self.skip = skip
        sizes = [3 if i == 0 else width + 3 * (i == skip) for i in range(depth)]
        self.layers = nn.ModuleList(nn.Linear(size, width) for size in sizes)
        self.last = nn.Linear(width, 1)

    def distance(self, x: Tensor) -> Tensor:
        y = x
        for i, layer in enumerate(self.layers):
            y = F.softplus(layer(torch.cat([y, x], 1) if i == self.skip else y), beta=10)
        return self.last(y)

    def forward(self, x: Tensor) -> Tensor:
        graph = torch.is_grad_enabled()
        with torch.enable_grad():
            points = x.detach().requires_grad_()
            distance = self.distance(points)
            (slope,) = torch.autograd.grad(distance.sum(), points, create_graph=graph)
        return torch.cat([distance, slope], 1)


class DifferentialEquation(nn.Module):
    """Points ``(t, x)`` to ``u`` and to what Burgers' equation has left, ``u_t + u u_x - 0.01 / pi u_xx``: Raissi,
    Perdikaris & Karniadakis 2019, with four hidden layers of 128. A backward differentiates three times."""

    def __init__(self, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width if i else 2, width) for i in range(depth))
        self.last = nn.Linear(width, 1)

    def value(self, y: Tensor) -> Tensor:
        for layer in self.layers:
            y = torch.tanh(layer(y))
        return self.last(y)

    def forward(self, x: Tensor) -> Tensor:
        graph = torch.is_grad_enabled()
        with torch.enable_grad():
            points = x.detach().requires_grad_()
            u = self.value(points)
            (slope,) = torch.autograd.grad(u.sum(), points, create_graph=True)
            (bend,) = torch.autograd.grad(slope[:, 1].sum(), points, create_graph=graph)
        left = slope[:, :1] + u * slope[:, 1:] - 0.01 / math.pi * bend[:, 1:]
        return torch.cat([u, left], 1)


class Critic(nn.Module):
    """Images to a score and the length of its gradient by the image, which a penalty wants to be 1: Gulrajani et al.
    2017, with the convolutions of Radford et al. 2016. A backward differentiates twice."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        sizes = (3, width, 2 * width, 4 * width)
        layers = [(nn.Conv2d(a, b, 4, 2, 1), nn.LeakyReLU(0.2)) for a, b in itertools.pairwise(sizes)]
        self.score = nn.Sequential(*itertools.chain(*layers), nn.Flatten(), nn.Linear(4 * width * 4 * 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        graph = torch.is_grad_enabled()
        with torch.enable_grad():
            images = x.detach().requires_grad_()
            score = self.score(images)
            (slope,) = torch.autograd.grad(score.sum(), images, create_graph=graph)
        return torch.cat([score, slope.flatten(1).norm(dim=1, keepdim=True)], 1)


# ------------------------------------------------------------------------------------------------ volumes


def _twice(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv3d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.Conv3d(outputs, outputs, 3, padding=1), nn.ReLU()
    )


class UNet3d(nn.Module):
    """A U-Net of volumes with three resolutions and three classes a voxel: Cicek et al. 2016, figure 2, padded."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(_twice(a, b) for a, b in ((1, 16), (16, 32), (32, 64)))
        self.enlarge = nn.ModuleList(nn.ConvTranspose3d(a, a // 2, 2, 2) for a in (64, 32))
        self.up = nn.ModuleList(_twice(a, a // 2) for a in (64, 32))
        self.head = nn.Conv3d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down[0](x)
        second = self.down[1](F.max_pool3d(first, 2))
        y = self.down[2](F.max_pool3d(second, 2))
        for enlarge, up, kept in zip(self.enlarge, self.up, (second, first), strict=True):
            y = up(torch.cat([kept, enlarge(y)], 1))
        return self.head(y)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "ResNet-20": partial(ResNet, Block, 3, 16, 16),
    "ResNet-20 x 4": partial(ResNet, Block, 3, 64, 64),
    "bottleneck ResNet-29": partial(ResNet, Bottleneck, 3, 32, 128),
    # Xie et al. 2017, 32 groups of 4 channels and more.
    "ResNeXt-29": partial(ResNet, partial(Bottleneck, part=2, groups=32), 3, 64, 256),
    "ResNet-18, 64x64": ResNet18,
    "ResNet-18, 224x224": ResNet18,
    "MobileNet": MobileNet,
    "ConvNeXt": ConvNeXt,
    "vocoder": Vocoder,
    "vocoder of 512 channels": partial(Vocoder, 512),
    "discriminator": Discriminator,
    "temporal network": TemporalNetwork,
    "U-Net of volumes": UNet3d,
    "distance field": DistanceField,
    "differential equation": DifferentialEquation,
    "critic": Critic,
}

PASSES = {"distance field": 2, "critic": 2, "differential equation": 4}
"""Products a layer in a forward of the networks whose output holds derivatives by the input; of the others one."""
