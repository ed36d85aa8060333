"""Residual blocks and stages: ``h + conv(relu(conv(h)))``, nothing after the sum.

``WNResidualStage`` is the idea of this package: the identity blocks of a stage have equal shapes, so their
parameters are stacked and one op runs them all.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wnfused import functional
from wnfused._modules import refuse_sharded
from wnfused._numbers import counts, finite, floating_dtype
from wnfused.nn._keys import count_blocks, stack_blocks
from wnfused.nn._layer import refuse_frozen, refuse_script, row_norm, with_directions
from wnfused.nn._rule import PARAMETERS, check_directions, check_stored, reset_stage
from wnfused.nn.conv import WNConv2d


class PlainResidualBlock(nn.Module):
    """``skip_scale (shortcut(x) + conv2(relu(conv1(x))))`` in plain torch layers, without any normalisation.

    What a weight-normalised block folds to, and the un-normalised peer of the papers' comparisons. The shortcut is
    the identity, or a 1x1 convolution where shapes change.

    Args:
        in_channels, out_channels, stride: of the block; the first convolution and the shortcut have the stride.
        skip_scale: factor on the sum.
        device, dtype: of the parameters, as in ``nn.Conv2d``; float32, float64, float16 or bfloat16.

    Parameters: those of ``conv1``, ``conv2`` and, where it is a convolution, ``shortcut``.

    Maps ``[N, in_channels, H, W]`` to ``[N, out_channels, H / stride, W / stride]``, sizes rounded up, or both without
    N, in the dtype of the parameters or autocast's.

    Raises:
        TypeError, ValueError: naming the argument that cannot work, its value and what is right.

    Source: Arpit, Campos & Bengio 2019, section 4, without the normalisation.
    """

    def __init__(
        self, in_channels: int, out_channels: int, stride: int = 1, *, skip_scale: float = 1.0,
        device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        in_channels, out_channels, stride = counts(in_channels=in_channels, out_channels=out_channels, stride=stride)
        finite(skip_scale=skip_scale)
        floating_dtype(dtype=dtype)
        self.skip_scale = float(skip_scale)
        where = {"device": device, "dtype": dtype}
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, 1, **where)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, **where)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride, **where)

    def forward(self, x: Tensor) -> Tensor:
        y = self.shortcut(x) + self.conv2(self.relu(self.conv1(x)))
        return y if self.skip_scale == 1.0 else self.skip_scale * y


class WNResidualBlock(nn.Module):
    """``skip_scale (shortcut(x) + conv2(relu(conv1(x))))`` with weight-normalised 3x3 convolutions.

    Args:
        in_channels, out_channels, stride: of the block; where shapes change, the shortcut is a weight-normalised 1x1
            convolution of the same stride, otherwise the identity.
        num_blocks: ``B_k``, how many blocks the whole stage has; the last convolution starts with gain
            ``sqrt(1 / B_k)``, the first with ``sqrt(2 fan_in / fan_out)``, the shortcut with gamma 1.
        skip_scale: factor on the sum.
        init: ``"orthogonal"`` or ``"he"`` directions.
        device, dtype: of the parameters, as in ``nn.Conv2d``; float32, float64, float16 or bfloat16.

    Raises:
        TypeError, ValueError: naming the argument that cannot work, its value and what is right.

    Source: Arpit, Campos & Bengio 2019, eq. 6 and end of section 4.
    """

    def __init__(
        self, in_channels: int, out_channels: int, stride: int = 1, *, num_blocks: int = 1,
        skip_scale: float = 1.0, init: str = "orthogonal", device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        in_channels, out_channels, stride, num_blocks = counts(
            in_channels=in_channels, out_channels=out_channels, stride=stride, num_blocks=num_blocks
        )
        finite(skip_scale=skip_scale)
        self.num_blocks = num_blocks
        self.skip_scale = float(skip_scale)
        shared = {"init": init, "device": device, "dtype": dtype}
        self.conv1 = WNConv2d(in_channels, out_channels, 3, stride, 1, activation="relu", **shared)
        self.conv2 = WNConv2d(out_channels, out_channels, 3, 1, 1, gamma=1 / num_blocks, **shared)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = WNConv2d(in_channels, out_channels, 1, stride, gamma=1.0, **shared)

    def forward(self, x: Tensor) -> Tensor:
        """``x [N, in_channels, H, W]`` to ``[N, out_channels, H / stride, W / stride]``, sizes rounded up."""
        y = self.conv2(self.conv1(x), self.shortcut(x))
        return y if self.skip_scale == 1.0 else self.skip_scale * y

    def extra_repr(self) -> str:
        scale = "" if self.skip_scale == 1.0 else f", skip_scale={self.skip_scale:g}"
        return f"num_blocks={self.num_blocks}{scale}"


@dataclass(frozen=True)
class StageBlock:
    """One identity block of a stage, as views of the stacked parameters: writing to them writes the stage.

    ``weight_v [2, C, C, 3, 3]``, ``weight_g [2, C]``, ``bias [2, C]``; index 0 is the convolution before the ReLU.
    """

    weight_v: Tensor
    weight_g: Tensor
    bias: Tensor
    skip_scale: float = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        """The block's output for ``x [N, C, H, W]``."""
        return functional.residual_stage(
            x, self.weight_v[None], self.weight_g[None], self.bias[None], skip_scale=self.skip_scale
        )


class WNResidualStage(nn.Module):
    """``num_blocks`` weight-normalised residual blocks as one layer, ``h <- skip_scale (h + conv2(relu(conv1(h))))``.

    One transition block (``transition``, a ``WNResidualBlock``) if shapes change, then ``B'`` identity blocks
    with stacked parameters that one op runs: one autograd node, however many they are. Gains start as
    ``g = sqrt(gamma fan_in / fan_out)`` with gamma 2 for the first convolution of a block, ``1 / B_k`` for its last one
    and 1 for the transition's shortcut.

    Args:
        in_channels, out_channels, stride: of the stage; the first block makes the change.
        num_blocks: ``B_k``, all blocks of the stage, the transition block too.
        recompute: None keeps every map the backward needs; k >= 1 keeps every k-th block's input only.
        skip_scale: factor on each block's sum.
        init: ``"orthogonal"`` or ``"he"`` directions.
        device, dtype: of the parameters, as in ``nn.Conv2d``; float32, float64, float16 or bfloat16.

    Parameters: ``weight_v [B', 2, C, C, 3, 3]``, ``weight_g`` and ``bias [B', 2, C]``. Elementwise optimisers see no
    difference from separate blocks; rules that look at a whole tensor (LARS, LAMB, Muon, freezing a block, ``ndim``
    rules) do, and ``unstack`` is the way around that.

    Maps ``[N, in_channels, H, W]`` to ``[N, out_channels, H / stride, W / stride]``, sizes rounded up, or both without
    N, in the input's dtype or autocast's; the input is in the dtype of the parameters, or in half precision with
    float32 ones.

    Raises:
        TypeError, ValueError: naming the argument that cannot work, its value and what is right.

    Source: Arpit, Campos & Bengio 2019, eq. 6 and end of section 4.
    """

    __prepare_scriptable__ = refuse_script

    def __init__(
        self, in_channels: int, out_channels: int, num_blocks: int, stride: int = 1, *,
        recompute: int | None = None, skip_scale: float = 1.0, init: str = "orthogonal",
        device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        in_channels, out_channels, num_blocks, stride = counts(
            in_channels=in_channels, out_channels=out_channels, num_blocks=num_blocks, stride=stride
        )
        if recompute is not None:
            (recompute,) = counts(recompute=recompute)
        finite(skip_scale=skip_scale)
        check_directions(init=init)
        floating_dtype(dtype=dtype)
        self.in_channels, self.out_channels, self.stride = in_channels, out_channels, stride
        self.num_blocks, self.recompute = num_blocks, recompute
        self.skip_scale, self.init = float(skip_scale), init
        where = {"device": device, "dtype": dtype}
        changes = stride != 1 or in_channels != out_channels
        self.transition: WNResidualBlock | None = None
        if changes:
            self.transition = WNResidualBlock(
                in_channels, out_channels, stride, num_blocks=num_blocks, skip_scale=skip_scale, init=init, **where
            )
        identity_blocks, c = num_blocks - changes, out_channels
        self.weight_v = nn.Parameter(torch.empty(identity_blocks, 2, c, c, 3, 3, **where))
        self.weight_g = nn.Parameter(torch.empty(identity_blocks, 2, c, **where))
        self.bias = nn.Parameter(torch.empty(identity_blocks, 2, c, **where))
        self._reset_stack()

    def _reset_stack(self) -> None:
        reset_stage(self)

    def reset_parameters(self) -> None:
        """The initialisation of Arpit, Campos & Bengio (2019) for the whole stage.

        Raises:
            RuntimeError: something else computes a parameter (pruning, a parametrisation), or ``wnfused.frozen`` holds
                the transition.
        """
        children = () if self.transition is None else self.transition.children()
        layers = [layer for layer in children if isinstance(layer, WNConv2d)]
        check_stored(self, *layers)
        refuse_frozen(stage=self)
        for layer in layers:
            layer.reset_parameters()
        self._reset_stack()

    def forward(self, x: Tensor) -> Tensor:
        """``x [N, in_channels, H, W]`` to ``[N, out_channels, H / stride, W / stride]``, sizes rounded up.

        An image without N gives one without.
        """
        if self.transition is not None:
            x = self.transition(x)
        return functional.residual_stage(
            x, self.weight_v, self.weight_g, self.bias, skip_scale=self.skip_scale, recompute=self.recompute
        )

    def adopt_keys(self, state_dict: MutableMapping[str, Any], prefix: str) -> None:
        """Stacks the entries of separate blocks, ``0.conv1.weight_v`` and so on, in any form that a layer loads."""

        def split(weight: Tensor) -> tuple[Tensor, Tensor]:
            weight = weight.to(self.weight_v.dtype)
            norm = row_norm(weight).to(weight.dtype).reshape(-1, 1, 1, 1)
            return norm, with_directions(weight, norm)

        stacked = (self.weight_v, self.weight_g, self.bias)
        stack_blocks(state_dict, prefix, stacked, self.transition is not None, split)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Also loads the checkpoint of separate blocks, numbered as ``unstack`` numbers them."""
        blocks = count_blocks(state_dict, prefix)
        if 0 < blocks < self.num_blocks:  # a stack cannot be loaded in part, whether strict or not
            name = prefix.removesuffix(".") or type(self).__name__
            args[-1].append(f"{name}: {blocks} blocks in the checkpoint, this stage has {self.num_blocks}.")
        self.adopt_keys(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def blocks(self) -> Iterator[StageBlock]:
        """The ``B'`` identity blocks in order, as views of the stacked parameters.

        Raises:
            ValueError: the stage is sharded.
        """
        refuse_sharded(self, PARAMETERS, "take its blocks apart first, then shard them")
        for v, g, b in zip(self.weight_v, self.weight_g, self.bias, strict=True):
            yield StageBlock(v, g, b, self.skip_scale)

    @torch.no_grad()
    def unstack(self) -> nn.Sequential:
        """The same stage as an ``nn.Sequential`` of ``WNResidualBlock``, with parameters of its own.

        Raises:
            ValueError: the stage is sharded.
        """
        blocks = [] if self.transition is None else [copy.deepcopy(self.transition)]
        return nn.Sequential(*blocks, *separate_blocks(self)).train(self.training)

    def extra_repr(self) -> str:
        parts = [f"{self.in_channels}, {self.out_channels}, num_blocks={self.num_blocks}, stride={self.stride}"]
        if self.recompute is not None:
            parts.append(f"recompute={self.recompute}")
        if self.skip_scale != 1.0:
            parts.append(f"skip_scale={self.skip_scale:g}")
        return ", ".join(parts)


@torch.no_grad()
def separate_blocks(stage: WNResidualStage) -> Iterator[WNResidualBlock]:
    """The identity blocks that a stage stacks as blocks with parameters of their own."""
    for view in stage.blocks():
        block = WNResidualBlock(
            stage.out_channels, stage.out_channels, num_blocks=stage.num_blocks, skip_scale=stage.skip_scale,
            init=stage.init, device="meta",
        )  # fmt: skip
        for i, conv in enumerate((block.conv1, block.conv2)):
            conv.weight_v = nn.Parameter(view.weight_v[i].clone(), stage.weight_v.requires_grad)
            conv.weight_g = nn.Parameter(view.weight_g[i].reshape(-1, 1, 1, 1).clone(), stage.weight_g.requires_grad)
            conv.bias = nn.Parameter(view.bias[i].clone(), stage.bias.requires_grad)
        yield block.train(stage.training)


@dataclass(frozen=True)
class _InItsPlace:
    run: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        return self.run(x)


@contextlib.contextmanager
def run_as(stage: WNResidualStage, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """While this holds, a call of the stage runs ``forward``: its blocks one by one, for whoever must see each."""
    before = stage.__dict__.get("forward")
    # An attribute of the instance hides the method of its class.
    stage.__dict__["forward"] = _InItsPlace(forward)
    try:
        yield
    finally:
        if before is None:
            del stage.__dict__["forward"]
        else:
            stage.__dict__["forward"] = before


def has_own_forward(stage: WNResidualStage) -> bool:
    """Whether a subclass, or somebody who put it on the instance, has the stage run another forward than this class's:
    ``run_as`` would skip that."""
    patch = stage.__dict__.get("forward")
    return type(stage).forward is not WNResidualStage.forward or not isinstance(patch, _InItsPlace | None)
