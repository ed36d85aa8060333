"""What ``bench/gpu.py`` measures: whole networks, stages, single layers and their initialisation on a GPU. One table,
nothing else.

Our peers stand in order of preference: the first that has kernels for a workload is the base of its ratios. Beside what
a single layer takes unasked stand Triton's fused kernels, captured as all peers are once, so that a run says where the
strategy's table is wrong.
"""

from __future__ import annotations

from bench.workloads import BACKWARD, FORWARD, STEP, ConvLayer, LinearLayer, Network, Orthogonal, Stage, Workload

PRECISIONS = ("bf16", "tf32", "fp32")
ALONE = "without eager, "


def _peers(precision: str, *names: str) -> tuple[str, ...]:
    return tuple(f"cuda {name.replace('*', precision)}" for name in names)


def _networks() -> list[Workload]:
    """The deepest one also by itself: a row is there when all of its peers are done, and eager takes a minute."""
    found: list[Workload] = []
    for depth, alone in ((304, False), (1000, False), (10000, True), (10000, False)):
        for precision in PRECISIONS[: 2 if depth == 10000 else 3]:
            theirs = [] if alone else ["eager *", "plain *"]
            if depth <= 1000:
                theirs += ["ours * graph", "eager * graph", "plain * graph"]
            elif precision == "bf16":  # a graph keeps its maps beside those of the calls: in float32, twice 49 GB
                theirs += ["ours * graph"]
            found.append(
                Network(
                    group="network",
                    name=f"WRN-{depth}, 32x32, batch 128, {ALONE if alone else ''}{precision}",
                    depth=depth,
                    batch=128,
                    passes=(FORWARD, STEP) if depth < 10000 else (STEP,),
                    ours=_peers(precision, "ours *", "triton *"),
                    peers=_peers(precision, *theirs),
                )
            )
    return found


def _stages() -> list[Workload]:
    """Their input is float32: under autocast the residual stream is then, too, in ours and in eager. In a network eager
    has it in bfloat16 from the stem on."""
    return [
        Stage(
            group="stage",
            name=f"{channels} channels, {size}x{size}, batch {batch}, 50 blocks, {precision}",
            channels=channels,
            size=size,
            batch=batch,
            blocks=50,
            ours=_peers(precision, "native *", "triton *"),
            peers=_peers(precision, "native * graph", "eager *", "eager * graph", "plain * graph"),
        )
        for channels, size in ((16, 32), (32, 16), (64, 8))
        for batch in (16, 128)
        for precision in PRECISIONS
    ]  # fmt: skip


def _warpgroup() -> list[Workload]:
    """The other kernels for some of the stages, beside those that run."""
    return [
        Stage(
            group="stage",
            name=f"{channels} channels, {size}x{size}, batch {batch}, 50 blocks, by warpgroups, {precision}",
            channels=channels,
            size=size,
            batch=batch,
            blocks=50,
            ours=_peers(precision, "native *"),
            peers=_peers(precision, "warpgroup *"),
        )
        for channels, size, batch in ((64, 8, 128), (32, 16, 128), (64, 8, 1024))
        for precision in ("bf16", "tf32")
    ]


def _linear() -> list[Workload]:
    """The automatic choice, and both ways that it might have gone, captured: then the host's time does not count."""
    return [
        LinearLayer(
            group="linear",
            name=f"linear {features}, batch {batch}, {precision}",
            features=features,
            batch=batch,
            ours=_peers(precision, "ours *"),
            peers=_peers(precision, "eager *", "plain *", "ours * graph", "fused * graph", "vendor * graph",
                         "eager * graph", "plain * graph",
                         *["compile *"] * ((features, batch) == (1024, 256) and precision != "fp32")),
        )
        for features, batch, precision in (
            *((features, batch, precision) for features in (256, 1024, 4096) for batch in (32, 256, 4096)
              for precision in PRECISIONS[:2]),
            (1024, 32, "fp32"), (1024, 256, "fp32"),
        )
    ]  # fmt: skip


def _conv() -> list[Workload]:
    return [
        ConvLayer(
            group="conv",
            name=f"{kernel}x{kernel}, {channels} channels, {size}x{size}, batch {batch}, {precision}",
            channels=channels,
            kernel=kernel,
            size=size,
            batch=batch,
            channels_last=True,
            ours=_peers(precision, "ours *"),
            peers=_peers(precision, "eager *", "plain *", "ours * graph", "fused * graph", "eager * graph",
                         "plain * graph", *["compile *"] * (channels == 64)),
        )
        # The last three are those of a WRN-40-10.
        for channels, kernel, size, batch in (
            (16, 3, 32, 128), (64, 3, 32, 128), (256, 1, 14, 64),
            (160, 3, 32, 128), (320, 3, 16, 128), (640, 3, 8, 128),
        )
        for precision in PRECISIONS[:2]
    ]  # fmt: skip


def _init() -> list[Workload]:
    """The loop takes a millisecond a layer and round, of which there are six."""
    return [_orthogonal(1000), _orthogonal(10000)]


def _orthogonal(depth: int) -> Workload:
    name = f"3x3 convolutions of WRN-{depth}"
    return Orthogonal(group="init", name=name, depth=depth, passes=("orthogonal",), ours=("batched",), peers=("loop",))


def _turn(workload: Workload) -> int:
    """A workload's place in the queue: something of each kind first, what takes minutes by itself late.

    Of the same place, networks come before single layers.
    """
    precision = workload.name.rpartition(" ")[2]
    match workload:
        case Network(depth=10000) if ALONE in workload.name:
            return 1
        case Network(depth=10000):
            return 3 if precision == "bf16" else 5
        case Network(depth=1000):
            return 2 if precision == "bf16" else 4
        case Stage(batch=16):
            return 4
    if any("warpgroup" in peer for peer in workload.peers):
        return 2
    if any("compile" in peer for peer in workload.peers):
        return 4
    if precision == "fp32":
        return 4
    return 0 if isinstance(workload, Stage) or (isinstance(workload, Network) and precision == "bf16") else 1


def patience(workload: Workload) -> float:
    """Seconds in which a workload must get somewhere: a kernel that hangs must not take the others' time."""
    deep = isinstance(workload, Network) and workload.depth > 1000
    slow = isinstance(workload, (Network, Orthogonal)) or any("compile" in peer for peer in workload.peers)
    return 250 if deep else 150 if slow else 60


WORKLOADS: tuple[Workload, ...] = tuple(
    sorted((*_stages(), *_warpgroup(), *_networks(), *_init(), *_conv(), *_linear()), key=_turn)
)
"""A run that is cut short has measured the first. (Layers to be compiled take half a minute each, so they are few.)"""

# A rehearsal of the whole script on a machine without a GPU measures these on the CPU.
REHEARSAL: tuple[Workload, ...] = (
    Stage(
        group="stage", name="2 blocks", channels=4, size=4, batch=2, blocks=2, passes=(FORWARD, BACKWARD),
        ours=("native", "reference"), peers=("eager",),
    ),
    _orthogonal(16),
)  # fmt: skip
