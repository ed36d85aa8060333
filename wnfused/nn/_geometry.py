"""What the layers' constructors ask of torch's own arguments, and the form in which they hand them on.

torch's constructors look at few of them and name none; a wrong one shows in the first forward, or never. What torch's
layers run with is taken here, too: integers of any kind, any iterable of them, one number for all dims.
"""

from __future__ import annotations

from typing import Any

from wnfused._numbers import from_0, plain_int, positive
from wnfused._spatial import Extent, checked_padding, extents, text_in_dims

_MODES = ("zeros", "reflect", "replicate", "circular")


def sizes(**values: int) -> dict[str, int]:
    """Numbers of channels or features: each at least 0, as ints."""
    plain = {name: plain_int(value) for name, value in values.items()}
    from_0(**plain)
    return plain


def divide(groups: int, inputs: int, outputs: int) -> None:
    """``groups`` divides both."""
    if inputs % groups or outputs % groups:
        raise ValueError(f"groups: {groups} must divide {inputs} input and {outputs} output channels")


def geometry(
    spatial: int, in_channels: int, out_channels: int, kernel_size: Extent, stride: Extent, padding: Extent | str,
    dilation: Extent, groups: int, padding_mode: str, transposed: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The arguments of a convolution over ``spatial`` dims."""
    channels = sizes(in_channels=in_channels, out_channels=out_channels)
    groups = plain_int(groups)
    positive(groups=groups)
    divide(groups, *channels.values())
    strides = extents("stride", stride, spatial, 1)
    if padding_mode not in _MODES:
        raise ValueError(f"padding_mode: {padding_mode!r} must be one of {', '.join(map(repr, _MODES))}")
    return {
        **channels,
        "kernel_size": extents("kernel_size", kernel_size, spatial, 1, exact=True),
        "stride": strides,
        # With another padding mode a negative number crops, as torch.nn.functional.pad does.
        "padding": checked_padding(padding, spatial, strides, transposed, 0 if padding_mode == "zeros" else None),
        "dilation": extents("dilation", dilation, spatial, 1),
        "groups": groups,
        "padding_mode": padding_mode,
    }


def transposed_geometry(
    spatial: int, in_channels: int, out_channels: int, kernel_size: Extent, stride: Extent, padding: Extent,
    output_padding: Extent, dilation: Extent, groups: int, padding_mode: str,
) -> dict[str, Any]:  # fmt: skip
    """The arguments of a transposed convolution over ``spatial`` dims."""
    if padding_mode != "zeros":
        raise ValueError(f"padding_mode: {padding_mode!r} must be 'zeros' for a transposed convolution")
    # Its bound depends on stride and dilation, and counts only in a forward without an output_size.
    extra = extents("output_padding", output_padding, spatial, 0)
    shared = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups, padding_mode)
    return {**geometry(spatial, *shared, transposed=True), "output_padding": extra}


def in_dims(spatial: int, text: str | None) -> str | None:
    """The docstring of a layer over two dims for another number of them; Python's -OO leaves none.

    The site, which imports nothing, shows the line that stands under the class itself.
    """
    return None if text is None else text_in_dims(spatial, text)
