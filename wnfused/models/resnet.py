"""The residual networks: ``resnet`` (depth 6n + 2) and ``wrn`` (wide, depth 6N + 4)."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from wnfused._numbers import counts, finite, flag
from wnfused.models._common import RESIDUAL_NORMS, checked_norm, laid_out_for
from wnfused.nn import FixupBlock, PlainResidualBlock, ScalarBias, WNConv2d, WNResidualStage

STEM_CHANNELS = 16


class BatchNormBlock(nn.Module):
    """``skip_scale (shortcut + conv2(relu(bn2(conv1(relu(z))))))``, ``z = bn1(x)``: the block under batch norm.

    The shortcut is x itself, or a 1x1 convolution of z where shapes change. An identity that carried z instead would
    be normalised anew in every block, and the gradient would grow geometrically with depth.

    Args:
        in_channels, out_channels, stride: of the block; the first convolution and the shortcut have the stride.
        skip_scale: factor on the sum.

    Raises:
        TypeError, ValueError: naming the argument that cannot work, its value and what is right.

    Source: the published code of Arpit, Campos & Bengio 2019.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1, *, skip_scale: float = 1.0) -> None:
        super().__init__()
        in_channels, out_channels, stride = counts(in_channels=in_channels, out_channels=out_channels, stride=stride)
        finite(skip_scale=skip_scale)
        self.skip_scale = float(skip_scale)
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        z = self.bn1(x)
        shortcut: Tensor = x if isinstance(self.shortcut, nn.Identity) else self.shortcut(z)
        y = shortcut + self.conv2(self.relu(self.bn2(self.conv1(self.relu(z)))))
        return y if self.skip_scale == 1.0 else self.skip_scale * y


class ResNet(nn.Module):
    """3x3 stem to 16 channels, three stages of ``blocks`` residual blocks, global average pooling, a plain head.

    Stages have ``16 width``, ``32 width`` and ``64 width`` channels; the first convolution of stages 2 and 3 has
    stride 2. No non-linearity after the stem or after a block's sum, but with ``norm="fixup"``, whose blocks take an
    input that was rectified.

    Args:
        blocks: residual blocks a stage, at least 1.
        width: the factor of the stages' channels.
        num_classes: outputs.
        in_channels: channels of the input, ``[N, in_channels, H, W]`` of any size.
        norm: ``"weight"``, ``"batch"``, ``"none"`` or ``"fixup"``, as in ``wrn``.
        recompute: of ``wnfused.WNResidualStage``; with ``norm="weight"``. None: keep every map.
        stack: whether a stage is one layer instead of an ``nn.Sequential`` of blocks; with ``norm="weight"``.
        outer_norms: whether batch norm follows the stem and precedes the pooling, too.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is right.
    """

    def __init__(
        self, blocks: int, width: int, num_classes: int, in_channels: int, norm: str, recompute: int | None,
        stack: bool, outer_norms: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        blocks, width, num_classes, in_channels = counts(
            blocks=blocks, width=width, num_classes=num_classes, in_channels=in_channels
        )
        flag(stack=stack, outer_norms=outer_norms)
        norm = checked_norm(norm, RESIDUAL_NORMS)
        if recompute is not None:
            (recompute,) = counts(recompute=recompute)
            if norm != "weight":
                right = f"is for norm='weight'; norm={norm!r} has no stage to recompute"
                raise ValueError(f"recompute: {recompute} {right}")
            if not stack:
                raise ValueError(f"recompute: {recompute} is for stacked blocks; stack=False has no stage to recompute")
        if norm == "weight":
            self.stem: nn.Module = WNConv2d(in_channels, STEM_CHANNELS, 3, padding=1, gamma=1.0)
        elif norm == "fixup":
            conv = nn.Conv2d(in_channels, STEM_CHANNELS, 3, padding=1, bias=False)
            self.stem = nn.Sequential(ScalarBias(), conv, ScalarBias(), nn.ReLU())
        else:
            self.stem = nn.Conv2d(in_channels, STEM_CHANNELS, 3, padding=1, bias=norm == "none")
        if outer_norms:
            self.stem = nn.Sequential(self.stem, nn.BatchNorm2d(STEM_CHANNELS))
        channels = [STEM_CHANNELS, *(width * c for c in (16, 32, 64))]
        stages: list[nn.Module] = []
        for i, (before, after) in enumerate(itertools.pairwise(channels)):
            stride = 1 if i == 0 else 2
            if norm == "weight":
                stage = WNResidualStage(before, after, blocks, stride, recompute=recompute)
                stages.append(stage if stack else stage.unstack())
            else:
                block = _BLOCKS[norm]
                first = block(before, after, stride)
                stages.append(nn.Sequential(first, *(block(after, after) for _ in range(blocks - 1))))
        if outer_norms:
            stages.append(nn.BatchNorm2d(channels[-1]))
        self.stages = nn.Sequential(*stages)
        self.head: nn.Module = nn.Linear(channels[-1], num_classes)
        if norm == "fixup":
            self.head = nn.Sequential(ScalarBias(), self.head)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.jit.is_scripting():  # a folded network has none of these layers
            x = laid_out_for(self.stem, x)
        return self.head(self.stages(self.stem(x)).mean((-2, -1)))


_BLOCKS: dict[str, Any] = {"batch": BatchNormBlock, "none": PlainResidualBlock, "fixup": FixupBlock}


# Every stage has N blocks of two layers; the rest is stem and head, and in the wide family the two shortcuts.
_DEPTH_OFFSETS = {"wrn": 4, "resnet": 2}


def depth_error(name: str, depth: int) -> str | None:
    """What is wrong with a depth of the family ``name``, in words that follow its value; None where it is one."""
    offset = _DEPTH_OFFSETS[name]
    below = max(1, (depth - offset) // 6) * 6 + offset
    if depth == below:
        return None
    nearest = f"is {below}" if depth < below else f"are {below} and {below + 6}"
    return f"must be 6N + {offset} with N = 1, 2, ... for {name}: the nearest {nearest}"


def _build(
    name: str, depth: int, width: int, num_classes: int, in_channels: int, norm: str, recompute: int | None,
    stack: bool,
) -> ResNet:  # fmt: skip
    (depth,) = counts(depth=depth)
    wrong = depth_error(name, depth)
    if wrong is not None:
        raise ValueError(f"depth: {depth} {wrong}")
    outer_norms = name == "resnet" and norm == "batch"
    return ResNet(depth // 6, width, num_classes, in_channels, norm, recompute, stack, outer_norms)


def wrn(
    depth: int, width: int = 1, num_classes: int = 10, in_channels: int = 3, norm: str = "weight", *,
    recompute: int | None = None, stack: bool = True,
) -> ResNet:  # fmt: skip
    """A wide residual network of depth ``6 N + 4``: 10, 40, 100, 304, 1000, 10000 for N = 1, 6, 16, 50, 166, 1666.

    Args:
        depth: number of layers, the two 1x1 shortcuts counted.
        width: the factor k of the stages' 16k, 32k, 64k channels; with k > 1 stage 1 opens with a 1x1 shortcut too.
        num_classes: outputs.
        in_channels: channels of the input, ``[N, in_channels, H, W]`` of any size.
        norm: ``"weight"``; ``"batch"`` for the batch-norm twin; ``"none"`` for plain convolutions;
            ``"fixup"`` for those with Fixup's scalars, ``wnfused.nn.FixupBlock``, which are to be initialised by
            ``"zhang2019"``.
        recompute: of ``wnfused.WNResidualStage``; with ``norm="weight"``.
        stack: False gives each stage as an ``nn.Sequential`` of separate blocks; with ``norm="weight"``.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is right.

    Source: Arpit, Campos & Bengio 2019, section 5 and supplement.
    """
    return _build("wrn", depth, width, num_classes, in_channels, norm, recompute, stack)


def resnet(
    depth: int, width: int = 1, num_classes: int = 10, in_channels: int = 3, norm: str = "weight", *,
    recompute: int | None = None, stack: bool = True,
) -> ResNet:  # fmt: skip
    """A residual network of depth ``6 n + 2`` (56, 110, 164), otherwise as ``wrn``.

    Its batch-norm twin normalises after the stem and before the pooling, too, as the published code has it in this
    family alone; without that, features, and with them the logits, grow with the number of blocks.

    Args:
        depth: number of layers, the two 1x1 shortcuts not counted.
        width: the factor k of the stages' 16k, 32k, 64k channels; with k > 1 stage 1 opens with a 1x1 shortcut too.
        num_classes, in_channels, norm, recompute, stack: as in ``wrn``.

    Raises:
        TypeError, ValueError: as ``wrn``.

    Source: Arpit, Campos & Bengio 2019, Table 1; the 164 layers are 27 basic blocks a stage.
    """
    return _build("resnet", depth, width, num_classes, in_channels, norm, recompute, stack)
