"""What is measured: one declarative table, nothing else.

A workload names its shapes, the passes that are timed, our peers in order of preference (the first that runs is the
base of the ratios) and the peers that it is compared with. Groups are printed one after the other; ``quick`` marks
what ``python -m bench --quick`` runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

FORWARD = "forward"
BACKWARD = "forward+backward"
STEP = "training step"
EPOCH = "epoch"  # of training steps
TRAINING = (STEP, EPOCH)

# A fifth of scikit-learn's 1797 digits is the test set; the last, partial batch counts.
DIGITS = 1437

OURS = ("native", "reference")
OURS_BF16 = ("native bf16", "reference bf16")
OURS_PURE_BF16 = ("native pure bf16",)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What every workload has. ``name`` is unique in its ``group``."""

    group: str
    name: str
    passes: tuple[str, ...] = (FORWARD, BACKWARD)
    ours: tuple[str, ...] = OURS
    peers: tuple[str, ...] = ("eager", "plain")
    channels_last: bool = False
    quick: bool = False

    def parts(self) -> tuple[Workload, ...]:
        """Those that have results of their own."""
        return (self,)


@dataclass(frozen=True, kw_only=True)
class LinearLayer(Workload):
    """``relu(linear(x))`` with ``x [batch, features]`` and as many outputs."""

    features: int
    batch: int


@dataclass(frozen=True, kw_only=True)
class ConvLayer(Workload):
    """``relu(conv(x))`` with ``x [batch, channels, size, size]``, as many outputs, stride 1 and the size kept."""

    channels: int
    kernel: int
    size: int
    batch: int


@dataclass(frozen=True, kw_only=True)
class WindowLayer(Workload):
    """``relu(conv(x))`` with ``x [batch, channels, *size]``, in one to three dims.

    Padded so that a map becomes ``stride`` times as small, or as large by a transposed layer, which has no more outputs
    than channels.
    """

    channels: int
    outputs: int
    size: tuple[int, ...]
    kernel: int
    batch: int
    stride: int = 1
    dilation: int = 1
    transposed: bool = False
    groups: int = 1


@dataclass(frozen=True, kw_only=True)
class Stage(Workload):
    """``blocks`` identity blocks on ``x [batch, channels, size, size]``."""

    channels: int
    size: int
    batch: int
    blocks: int


@dataclass(frozen=True, kw_only=True)
class Network(Workload):
    """A whole WRN of ``depth = 6 N + 4`` on ``x [batch, in_channels, size, size]``, ten classes."""

    depth: int
    batch: int
    size: int = 32
    in_channels: int = 3
    width: int = 1


@dataclass(frozen=True, kw_only=True)
class Converted(Workload):
    """A user's network under torch's weight norm, ours ``wnfused.convert`` of it, on ``x [batch, *size]``.

    ``network`` is a name of ``bench.users.NETWORKS``.
    """

    network: str
    size: tuple[int, ...]
    batch: int


@dataclass(frozen=True, kw_only=True)
class DeepStep(Network):
    """A WRN too large to stand beside its peers: each in a process of its own, with its peak memory."""


@dataclass(frozen=True, kw_only=True)
class Depths(Workload):
    """WRNs of several depths beside each other in one process."""

    depths: tuple[int, ...]
    batch: int

    def parts(self) -> tuple[Network, ...]:
        shared = {"group": self.group, "batch": self.batch, "passes": self.passes, "ours": self.ours, "peers": ()}
        return tuple(Network(name=f"WRN-{n}, batch {self.batch}", depth=n, **shared) for n in self.depths)


@dataclass(frozen=True, kw_only=True)
class Orthogonal(Workload):
    """Orthogonal directions for the 3x3 convolutions of a WRN of ``depth`` layers."""

    depth: int


def _linear() -> list[Workload]:
    return [
        LinearLayer(
            group="linear",
            name=f"linear {features}, batch {batch}",
            features=features,
            batch=batch,
            peers=("eager", "plain", "compile"),
            quick=(features, batch) in ((64, 32), (1024, 32), (1024, 256)),
        )
        for features in (64, 100, 256, 1024, 4096)
        for batch in (1, 32, 130, 256, 1024)
    ]


def _linear_bf16() -> list[Workload]:
    return [
        LinearLayer(
            group="linear-bf16",
            name=f"linear {features}, batch {batch}, parameters in bf16",
            features=features,
            batch=batch,
            ours=OURS_PURE_BF16,
            peers=("eager pure bf16", "plain pure bf16"),
            quick=(features, batch) == (1024, 8),
        )
        for features in (64, 256, 1024, 4096)
        for batch in (1, 8, 32, 256)
    ]


def _conv(kernel: int, shapes: tuple[tuple[int, int, int], ...], quick: tuple[int, ...]) -> list[Workload]:
    return [
        ConvLayer(
            group=f"conv{kernel}x{kernel}",
            name=f"{channels} channels, {size}x{size}, batch {batch}{', channels_last' if channels_last else ''}",
            channels=channels,
            kernel=kernel,
            size=size,
            batch=batch,
            peers=("eager", "plain", "compile"),
            channels_last=channels_last,
            quick=channels in quick and batch == 8 and channels_last,
        )
        for channels, size, batch in shapes
        for channels_last in (False, True)
    ]


def _windows() -> list[Workload]:
    # Channels in and out, size, kernel, stride, dilation, batch: of residual networks, vocoders, temporal networks,
    # first layers on images and waveforms, and layers with more weights than map.
    layers = (
        (16, 32, (32, 32), 3, 2, 1, 8), (64, 128, (32, 32), 3, 2, 1, 8), (64, 128, (32, 32), 1, 2, 1, 8),
        (64, 64, (16, 16), 5, 1, 1, 8), (64, 64, (1024,), 3, 1, 4, 1), (32, 32, (8192,), 11, 1, 5, 1),
        (128, 128, (512,), 7, 1, 1, 8), (256, 256, (256,), 7, 1, 3, 1), (64, 64, (4096,), 3, 1, 1, 1),
        (128, 128, (16, 16), 5, 1, 1, 8), (32, 32, (32, 32), 7, 1, 1, 8), (64, 64, (32, 32), 3, 1, 2, 8),
        (3, 32, (32, 32), 3, 1, 1, 8), (3, 64, (64, 64), 7, 2, 1, 8),
        (3, 16, (64, 64), 3, 1, 1, 8), (3, 64, (224, 224), 7, 2, 1, 2), (1, 128, (8192,), 15, 1, 1, 2),
        (64, 3, (32, 32), 3, 1, 1, 8), (64, 1, (64, 64), 7, 1, 1, 1), (32, 1, (8192,), 7, 1, 1, 1),
        (512, 512, (4, 4), 3, 1, 1, 2), (512, 512, (2, 2), 3, 1, 1, 2), (512, 512, (7, 7), 3, 1, 1, 1),
        (512, 2048, (7, 7), 1, 1, 1, 1), (2048, 512, (7, 7), 1, 1, 1, 1), (512, 512, (32,), 3, 1, 1, 1),
        (512, 256, (28, 28), 3, 1, 12, 2),  # of pyramids for segmentation: most taps meet padding
        # Of networks on volumes: their inner layers, first one and way down.
        (16, 16, (64, 64, 64), 3, 1, 1, 1), (32, 32, (16, 32, 32), 3, 1, 1, 2), (64, 64, (16, 16, 16), 3, 1, 1, 1),
        (128, 128, (8, 8, 8), 3, 1, 1, 2), (256, 256, (4, 4, 4), 3, 1, 1, 2), (1, 32, (32, 64, 64), 3, 1, 1, 2),
        (32, 64, (32, 32, 32), 3, 2, 1, 2), (64, 128, (16, 16, 16), 3, 2, 1, 2), (32, 32, (32, 32, 32), 1, 1, 1, 2),
        (512, 512, (2, 7, 7), 3, 1, 1, 1),
        (512, 512, (1, 2, 2), 3, 1, 1, 1),
    )  # fmt: skip
    found = [
        WindowLayer(
            group="windows",
            name=f"{channels} to {outputs}, {'x'.join(map(str, size))}, kernel {kernel}, stride {stride}"
            f"{f', dilation {dilation}' * (dilation > 1)}, batch {batch}",
            channels=channels, outputs=outputs, size=size, kernel=kernel, stride=stride, dilation=dilation, batch=batch,
            quick=(channels, stride) == (16, 2),
        )
        for channels, outputs, size, kernel, stride, dilation, batch in layers
    ]  # fmt: skip
    # Of ResNeXt, of RegNets, whose groups are no whole blocks, of vocoders' discriminators, the positional one of
    # wav2vec 2.0, and of networks of depthwise layers.
    grouped = (
        (128, 128, (32, 32), 3, 1, 32, 8), (256, 256, (28, 28), 3, 1, 32, 8), (512, 512, (14, 14), 3, 1, 32, 8),
        (1024, 1024, (7, 7), 3, 1, 32, 8),
        (168, 168, (28, 28), 3, 1, 7, 8), (888, 888, (7, 7), 3, 1, 37, 8), (240, 240, (28, 28), 3, 1, 6, 1),
        (720, 720, (14, 14), 3, 1, 6, 1),
        (768, 768, (200,), 127, 1, 16, 1),
        (64, 64, (32, 32), 3, 1, 4, 8), (128, 128, (2048,), 41, 2, 4, 2),
        (128, 256, (1024,), 41, 2, 16, 4), (256, 512, (1024,), 41, 4, 16, 4), (64, 256, (2048,), 41, 4, 16, 4),
        (256, 256, (28, 28), 3, 2, 16, 8),
        (96, 96, (56, 56), 7, 1, 96, 1), (96, 96, (32, 32), 3, 1, 96, 8), (384, 384, (16, 16), 3, 1, 384, 8),
        (144, 144, (32, 32), 3, 2, 144, 8), (960, 960, (8, 8), 3, 1, 960, 8),
    )  # fmt: skip
    found += [
        WindowLayer(
            group="windows",
            name=f"{channels} to {outputs}, {'x'.join(map(str, size))}, kernel {kernel}, stride {stride}, "
            f"{groups} groups, batch {batch}",
            channels=channels, outputs=outputs, size=size, kernel=kernel, stride=stride, groups=groups, batch=batch,
        )
        for channels, outputs, size, kernel, stride, groups, batch in grouped
    ]  # fmt: skip
    found += [
        WindowLayer(
            group="windows",
            name=f"{channels} to {outputs}, {'x'.join(map(str, size))}, kernel {kernel}, transposed by {stride}, "
            f"batch {batch}",
            channels=channels, outputs=outputs, size=size, kernel=kernel, stride=stride, batch=batch, transposed=True,
        )
        for channels, outputs, size, kernel, stride, batch in (
            (128, 64, (64,), 16, 8, 1), (64, 32, (512,), 4, 2, 8), (64, 32, (16, 16), 4, 2, 8),
            (64, 3, (16, 16), 4, 2, 8), (64, 32, (16, 16, 16), 2, 2, 2), (128, 64, (8, 8, 8), 4, 2, 2),
            (512, 512, (2, 2), 4, 2, 1),
        )
    ]  # fmt: skip
    # Layers with a stride, or in groups, read a map in channels_last where it lies.
    return found + [
        replace(layer, name=f"{layer.name}, channels_last", channels_last=True)
        for layer in found
        if len(layer.size) > 1 and layer.channels >= 16 and (layer.stride > 1 or 1 < layer.groups < layer.channels)
    ]


def _heads() -> list[Workload]:
    # Channels in and out, size, kernel, batch: what gives a score, a class, a box or a colour to each pixel, or voxel.
    layers = (
        (64, 1, (64, 64), 1, 8), (16, 2, (128, 128), 1, 2), (64, 21, (64, 64), 1, 2), (256, 3, (32, 32), 1, 8),
        (512, 8, (14, 14), 1, 8), (256, 36, (32, 32), 3, 1), (32, 4, (56, 56), 3, 8),
        (32, 2, (32, 32, 32), 1, 1), (24, 1, (16, 16, 16), 3, 1),
    )  # fmt: skip
    return [
        WindowLayer(
            group="heads",
            name=f"{channels} to {outputs}, {'x'.join(map(str, size))}, kernel {kernel}, batch {batch}"
            f"{', channels_last' * channels_last}",
            channels=channels, outputs=outputs, size=size, kernel=kernel, batch=batch, channels_last=channels_last,
            quick=(channels, outputs) == (64, 1),
        )
        for channels, outputs, size, kernel, batch in layers
        for channels_last in (False, True)
    ]  # fmt: skip


def _stage() -> list[Workload]:
    # The three stages of a WRN of width 1, what they become on digits, and the two wider tuned widths; then those of
    # WRN-28-10, whose blocks are four a stage, one of them the transition.
    shapes = ((16, 32, 8), (32, 16, 8), (64, 8, 8), (64, 2, 64), (128, 8, 8), (160, 8, 8))
    wide = ((160, 32, 1), (320, 16, 1), (640, 8, 1), (640, 8, 8))
    return [
        Stage(
            group="stage",
            name=f"{channels} channels, {size}x{size}, batch {batch}, {blocks} blocks",
            channels=channels,
            size=size,
            batch=batch,
            blocks=blocks,
            peers=("eager", "plain", "plain cl"),
            quick=(channels, size) == (32, 16),
        )
        for shapes, blocks in ((shapes, 20), (wide, 3))
        for channels, size, batch in shapes
    ]


def _network() -> list[Workload]:
    found: list[Workload] = []
    for batch in (1, 8, 32):
        found.append(
            Network(
                group="network",
                name=f"WRN-304, batch {batch}",
                depth=304,
                batch=batch,
                peers=("eager", "eager cl", "plain", "plain cl", *["compile"] * (batch == 8)),
                quick=batch < 32,
            )
        )
        found.append(
            Network(
                group="network",
                name=f"WRN-304, batch {batch}, bf16",
                depth=304,
                batch=batch,
                ours=OURS_BF16,
                peers=("eager", "eager bf16", "plain bf16"),
                quick=batch == 8,
            )
        )
    # Compiling 304 layers takes minutes, more than a peer is given; 40 tell how the compiler compares.
    found += [
        Network(
            group="network",
            name=f"WRN-40, batch {batch}",
            depth=40,
            batch=batch,
            peers=("eager", "plain cl", "compile"),
        )
        for batch in (1, 32)
    ]
    found += [
        Network(
            group="network",
            name=f"WRN-28-10, batch {batch}",
            depth=28,
            width=10,
            batch=batch,
            peers=("eager", "eager cl", "plain", "plain cl"),
        )
        for batch in (1, 8)
    ]
    return found


def _converted() -> list[Workload]:
    images, sound = (3, 32, 32), (1, 8192)
    # Network, size, batches; images in both layouts.
    networks = (
        ("ResNet-20", images, (1, 8, 32)), ("ResNet-20 x 4", images, (8,)), ("bottleneck ResNet-29", images, (1, 8)),
        ("ResNeXt-29", images, (1, 8)),
        ("ResNet-18, 64x64", (3, 64, 64), (2,)), ("ResNet-18, 224x224", (3, 224, 224), (1,)),
        ("MobileNet", images, (1, 8)), ("ConvNeXt", (3, 64, 64), (1, 8)), ("vocoder", (80, 32), (1, 4)),
        ("vocoder of 512 channels", (80, 32), (1,)),
        ("discriminator", sound, (1, 4)), ("temporal network", (64, 256), (1, 16)),
        ("U-Net of volumes", (1, 32, 32, 32), (1, 4)),
        ("distance field", (3,), (512, 4096)), ("differential equation", (2,), (256, 1024)), ("critic", images, (16,)),
    )  # fmt: skip
    return [
        Converted(
            group="converted",
            name=f"{network}, batch {batch}{', channels_last' * channels_last}",
            network=network,
            size=size,
            batch=batch,
            channels_last=channels_last,
            quick=(network, batch, channels_last) == ("ResNet-20", 8, True),
        )
        for network, size, batches in networks
        for batch in batches
        for channels_last in ((False, True) if len(size) == 3 else (False,))
    ]


def _autocast() -> list[Workload]:
    # What the other groups have in float32, under bfloat16 autocast: parameters in float32, inputs in bfloat16.
    chosen = {
        "linear": ("linear 64, batch 32", "linear 256, batch 32", "linear 1024, batch 256"),
        "conv3x3": (
            "16 channels, 32x32, batch 8, channels_last",
            "64 channels, 32x32, batch 8",
            "64 channels, 32x32, batch 8, channels_last",
            "256 channels, 14x14, batch 8, channels_last",
            "512 channels, 7x7, batch 8, channels_last",
        ),
        "conv1x1": ("256 channels, 16x16, batch 8, channels_last",),
        "windows": (
            "16 to 32, 32x32, kernel 3, stride 2, batch 8",
            "64 to 128, 32x32, kernel 3, stride 2, batch 8, channels_last",
            "128 to 128, 16x16, kernel 5, stride 1, batch 8",
            "32 to 32, 8192, kernel 11, stride 1, dilation 5, batch 1",
            "128 to 128, 512, kernel 7, stride 1, batch 8",
            "3 to 64, 64x64, kernel 7, stride 2, batch 8",
            "512 to 512, 2x2, kernel 3, stride 1, batch 2",
            "32 to 32, 16x32x32, kernel 3, stride 1, batch 2",
            "96 to 96, 32x32, kernel 3, stride 1, 96 groups, batch 8",
            "128 to 64, 64, kernel 16, transposed by 8, batch 1",
            "64 to 32, 16x16, kernel 4, transposed by 2, batch 8",
        ),
        "converted": (
            "ResNet-20, batch 8, channels_last",
            "ResNet-18, 64x64, batch 2, channels_last",
            "ResNet-18, 224x224, batch 1, channels_last",
            "MobileNet, batch 8, channels_last",
            "vocoder, batch 1",
            "discriminator, batch 4",
            "temporal network, batch 16",
        ),
    }
    everything = [*_linear(), *_CONVOLUTIONS, *_windows(), *_converted()]
    return [
        replace(
            workload,
            group="autocast",
            ours=OURS_BF16,
            peers=("eager bf16", "plain bf16"),
            quick=workload.name == "64 channels, 32x32, batch 8, channels_last",
        )
        for workload in everything
        if workload.name in chosen[workload.group]
    ]


def _frozen() -> list[Workload]:
    # For inference on weights that stay; beside itself outside of the context.
    layers = (
        (64, 64, (56, 56), 3, 1, False), (256, 256, (14, 14), 3, 1, False), (512, 512, (14, 14), 3, 1, False),
        (512, 512, (7, 7), 3, 1, False), (256, 512, (14, 14), 3, 2, False), (1024, 256, (14, 14), 1, 1, False),
        (512, 2048, (7, 7), 1, 1, False), (256, 256, (512,), 11, 1, False), (512, 256, (64,), 16, 8, True),
    )  # fmt: skip
    networks = (
        ("ResNet-20", (3, 32, 32)), ("ResNet-18, 64x64", (3, 64, 64)), ("ResNet-18, 224x224", (3, 224, 224)),
        ("vocoder of 512 channels", (80, 32)),
    )  # fmt: skip
    shared = {"group": "frozen", "batch": 1, "passes": (FORWARD,), "ours": ("frozen",)}
    peers = ("native", "eager", "plain")
    found: list[Workload] = [
        WindowLayer(
            name=f"{channels} to {outputs}, {'x'.join(map(str, size))}, kernel {kernel}, "
            f"{'transposed by' if transposed else 'stride'} {stride}, batch 1",
            channels=channels, outputs=outputs, size=size, kernel=kernel, stride=stride, transposed=transposed,
            peers=peers, quick=(outputs, size) == (256, (14, 14)) and kernel == 3, **shared,
        )
        for channels, outputs, size, kernel, stride, transposed in layers
    ]  # fmt: skip
    found += [
        Converted(name=f"{network}, batch 1", network=network, size=size, peers=peers, **shared)
        for network, size in networks
    ]
    return found


def _digits() -> list[Workload]:
    return [
        Network(
            group="digits",
            name=f"WRN-{depth}, 8x8, batch 64",
            depth=depth,
            batch=64,
            size=8,
            in_channels=1,
            passes=(STEP,) if depth == 100 else (STEP, EPOCH),
            peers=("eager", "plain"),
            quick=depth == 100,
        )
        for depth in (100, 1000)
    ]


def _depth() -> list[Workload]:
    return [
        Network(
            group="depth",
            name=f"WRN-{depth}, batch 1",
            depth=depth,
            batch=1,
            passes=(BACKWARD,),
            peers=("eager",),
            quick=depth <= 304,
        )
        for depth in (100, 304, 1000, 3004)
    ]


def _flat() -> list[Workload]:
    return [
        Depths(
            group="flat",
            name=f"all depths, batch {batch}",
            depths=(100, 304, 1000, 3004, 10000),
            batch=batch,
            passes=(BACKWARD,),
            peers=(),
        )
        for batch in (1, 8)
    ]


def _init() -> list[Workload]:
    return [
        Orthogonal(
            group="init",
            name=f"3x3 convolutions of WRN-{depth}",
            depth=depth,
            passes=("orthogonal",),
            ours=("batched",),
            peers=("loop",),
            quick=depth == 100,
        )
        for depth in (100, 10000)
    ]


_CONVOLUTIONS = (
    *_conv(3, ((16, 32, 8), (16, 32, 64), (64, 32, 8), (128, 16, 8), (256, 14, 8), (512, 7, 8), (512, 14, 1)), (64,)),
    *_conv(1, ((64, 32, 8), (256, 16, 8), (512, 8, 8)), (256,)),
)

WORKLOADS: tuple[Workload, ...] = (
    *_linear(),
    *_linear_bf16(),
    *_CONVOLUTIONS,
    *_windows(),
    *_heads(),
    *_stage(),
    *_network(),
    *_converted(),
    *_autocast(),
    *_frozen(),
    *_digits(),
    *_depth(),
    DeepStep(
        group="deep",
        name="WRN-10000, batch 1",
        depth=10000,
        batch=1,
        passes=(BACKWARD, "SGD", STEP),
        peers=("eager",),
    ),
    *_flat(),
    *_init(),
)

GROUPS: tuple[str, ...] = tuple(dict.fromkeys(workload.group for workload in WORKLOADS))


def select(quick: bool = False, groups: tuple[str, ...] = (), text: str = "") -> list[Workload]:
    """The workloads of ``groups`` (all if empty) whose name holds ``text``; with ``quick`` the small subset.

    Raises:
        ValueError: a group that there is not, or nothing is left.
    """
    for group in groups:
        if group not in GROUPS:
            raise ValueError(f"--group {group}: is no group; there are {', '.join(GROUPS)}")
    found = [w for w in WORKLOADS if (not groups or w.group in groups) and text in w.name and (w.quick or not quick)]
    if not found:
        asked = [*(f"--group {group}" for group in groups), *([f"--match {text}"] if text else [])]
        raise ValueError(f"{' '.join(asked)}: leaves no workload{' of --quick' if quick else ''}; --list names them")
    return found
