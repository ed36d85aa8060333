"""The tables of measurements in README.md and docs/speed.md, out of the committed runs.

``python -m bench.summary`` writes them anew between their marks, ``<!-- table: NAME -->`` and ``<!-- end -->``; a test
runs it and finds nothing to change.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.report import duration
from bench.workloads import BACKWARD, EPOCH, FORWARD, STEP

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "speed.md")
MARKED = re.compile(r"(?P<mark><!-- table: (?P<name>[\w-]+) -->\n).*?(?=<!-- end -->)", re.S)

Row = dict[str, Any]
Rows = list[Row]

LOSES = 0.97  # of plain: between runs of one build medians differ by as much

NETWORKS = {
    "ResNet-18, 64x64, batch 2, channels_last": "ResNet-18, 64x64, batch 2, channels_last",
    "ResNet-18, 224x224, batch 1": "the same of 224x224, batch 1, NCHW",
    "ResNet-18, 224x224, batch 1, channels_last": "in channels_last",
    "ResNet-20, batch 8, channels_last": "ResNet-20, 32x32, batch 8, channels_last",
    "bottleneck ResNet-29, batch 8, channels_last": "ResNet-29 of bottlenecks, batch 8, channels_last",
    "vocoder, batch 1": "a vocoder (HiFi-GAN's generator of 128 channels), batch 1",
    "vocoder of 512 channels, batch 1": "the same of 512 channels",
    "discriminator, batch 4": "its discriminator, batch 4",
    "temporal network, batch 16": "a temporal network, batch 16",
    "ConvNeXt, batch 8": "ConvNeXt's blocks, batch 8",
    "MobileNet, batch 8": "MobileNet's blocks, batch 8",
    "distance field, batch 4096": "a distance field and its gradient, 4,096 points",
    "U-Net of volumes, batch 4": "a U-Net of volumes, 16 to 64 channels, four of 32x32x32",
    "U-Net of volumes, batch 1": "one volume, which torch unfolds",
}
LAYERS = {
    "64 channels, 32x32, batch 8, channels_last": "3x3, 64 channels, 32x32, batch 8, channels_last",
    "64 to 64, 32x32, kernel 3, stride 1, dilation 2, batch 8": "dilated by 2, NCHW",
    "64 to 64, 16x16, kernel 5, stride 1, batch 8": "5x5, 64 channels, 16x16, batch 8",
    "512 to 512, 2x2, kernel 3, stride 1, batch 2": "3x3, 512 channels, 2x2, batch 2",
    "512 to 512, 7x7, kernel 3, stride 1, batch 1": "7x7, batch 1",
    "512 channels, 14x14, batch 1": "14x14, batch 1",
    "64 to 128, 32x32, kernel 3, stride 2, batch 8": "with a stride of 2, 64 to 128 channels, 32x32, batch 8",
    "64 to 128, 32x32, kernel 3, stride 2, batch 8, channels_last": "in channels_last",
    "32 to 32, 8192, kernel 11, stride 1, dilation 5, batch 1": "a vocoder's: 11 taps, dilation 5, 32 channels",
    "128 to 128, 512, kernel 7, stride 1, batch 8": "7 taps, 128 channels, 512 samples, batch 8",
    "128 to 64, 64, kernel 16, transposed by 8, batch 1": "a transposed one, 128 to 64 channels, 64 to 512 samples",
    "128 to 256, 1024, kernel 41, stride 2, 16 groups, batch 4": "a discriminator's: 41 taps, stride 2, 16 groups",
    "768 to 768, 200, kernel 127, stride 1, 16 groups, batch 1": "wav2vec 2.0's positional one: 127 taps, 16 groups",
    "96 to 96, 32x32, kernel 3, stride 1, 96 groups, batch 8": "depthwise 3x3, 96 channels, 32x32, batch 8",
    "128 to 128, 32x32, kernel 3, stride 1, 32 groups, batch 8": "3x3, 32 groups of 4 channels, 32x32, batch 8",
    "3 to 32, 32x32, kernel 3, stride 1, batch 8": "a first layer, 3 to 32 channels, 32x32, batch 8",
    "3 to 64, 224x224, kernel 7, stride 2, batch 2": "7x7 by 2, 3 to 64 channels, 224x224, batch 2",
    "64 to 1, 64x64, kernel 7, stride 1, batch 1": "a last layer, 7x7, 64 channels to 1, 64x64",
    "32 to 1, 8192, kernel 7, stride 1, batch 1": "7 taps, 32 channels to 1, 8,192 samples",
    "64 to 3, 16x16, kernel 4, transposed by 2, batch 8": "a generator's: transposed by 2, 64 channels to 3, batch 8",
    "32 to 32, 16x32x32, kernel 3, stride 1, batch 2": "3x3x3, 32 channels, 16x32x32, batch 2",
    "64 to 128, 16x16x16, kernel 3, stride 2, batch 2": "with a stride of 2, 64 to 128 channels, 16x16x16",
    "64 to 32, 16x16x16, kernel 2, transposed by 2, batch 2": "transposed by 2, 64 to 32 channels, 16x16x16",
    "linear 1024, batch 32": "linear, 1,024 features, batch 32",
    "linear 1024, batch 1024": "batch 1024",
}


def load(*names: str) -> Rows:
    """The results of committed runs; of a workload that several have, the first."""
    found: dict[tuple[str, str, str], Row] = {}
    for name in names:
        for row in json.loads((RESULTS / name / "bench.json").read_text())["results"]:
            if row["ratios"]:
                found.setdefault((row["group"], row["workload"], row["pass_name"]), row)
    return list(found.values())


def _of_users(rows: Rows) -> Rows:
    return [row for row in rows if row["group"] == "converted"]


def tables() -> dict[str, list[str]]:
    """Lines of Markdown by the names of the marks."""
    stages = load("cpu-epyc5-2core-networks")
    layers = load("cpu-epyc-2core-layers", "cpu-epyc-2core-linear")
    frozen = load("cpu-epyc5-2core-frozen")
    users = _of_users(layers)
    autocast = load("cpu-epyc-2core-autocast")
    zen5 = load("cpu-epyc5-2core-layers")
    avx2 = load("cpu-epyc-2core-avx2-layers")
    return {
        "networks": _networks(stages),
        "networks-zen4": _residual_networks(load("cpu-epyc-2core-networks")),
        "networks-avx2": _residual_networks(load("cpu-epyc-2core-avx2-networks")),
        "amx": _amx(load("cpu-xeon-2core-amx")),
        "users": _both_passes(users, NETWORKS),
        "layers": _both_passes(layers, LAYERS),
        "kinds": _kinds(layers, users, autocast),
        "kinds-shortly": _kinds(layers, users, autocast, named=2),
        "kinds-zen5": _kinds(zen5, _of_users(zen5), []),
        "kinds-avx2": _kinds(avx2, _of_users(avx2), []),
        "autocast": _single(autocast),
        "amx-layers": _single(load("cpu-xeon-2core-amx-layers"), "autocast"),
        "frozen": [
            f"| {row['workload'].removesuffix(', batch 1')} | "
            f"{' | '.join(_ratio(row, peer) for peer in ('native', 'eager', 'plain'))} |"
            for row in frozen
        ],
        "gpu": _gpu(gpu_rows()),
    }


GPU = (
    "gpu-h200/52dba92", "gpu-h200/1ca670e-conv", "gpu-h200/1ca670e-init", "gpu-h200/1cb9dd4", "gpu-h100/18cb58a",
    "gpu-h100/49dec17",
)  # fmt: skip
"""Runs, the last first. Those before have stages and layers that are no more."""
GPU_PEERS = ("eager", "plain")


def gpu_rows() -> list[tuple[str, Row]]:
    """The run and the row of what ran on a GPU; of a workload that several have, the last one's."""
    found: dict[tuple[str, str, str], tuple[str, Row]] = {}
    for name in GPU:
        run = json.loads((RESULTS / f"{name}.json").read_text())
        for row in run["steps"]["measure"]["results"]:
            if row["base"] and "by warpgroups" not in row["workload"]:
                found.setdefault((row["group"], row["workload"], row["pass_name"]), (name, row))
    order = {group: i for i, group in enumerate(("network", "stage", "conv", "linear", "init"))}
    return sorted(found.values(), key=lambda pair: (order[pair[1]["group"]], GPU.index(pair[0])))


def _gpu(rows: list[tuple[str, Row]]) -> list[str]:
    """What ours takes and what the peers take beside it, launched and captured."""
    lines = []
    for name, row in rows:
        base, ratios = row["base"], {peer: spread["median"] for peer, spread in row["ratios"].items()}
        first, precision = row["workload"].removesuffix(f", {base.split()[-1]}"), base.split()[-1]
        if row["group"] == "init":
            first, precision = f"{first}; eager: a loop of `nn.init.orthogonal_`", ""
        first = first.replace(", without eager", "")
        graph = ratios.get(f"{base} graph")

        def cell(peer: str, beside: float | None, ratios: dict[str, float] = ratios) -> str:
            return _times(ratios[peer] / beside) if peer in ratios and beside else ""

        cells = [
            first, precision, row["pass_name"], name.split("/")[0].removeprefix("gpu-").upper(),
            duration(row["seconds"][base]["median"]),
            *(cell(f"cuda {peer} {precision}", 1.0) or cell("loop", 1.0) * (peer == "eager") for peer in GPU_PEERS),
            duration(row["seconds"][f"{base} graph"]["median"]) if graph else "",
            *(cell(f"cuda {peer} {precision} graph", graph) for peer in GPU_PEERS),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _residual_networks(rows: Rows) -> list[str]:
    lines = []
    for network, batch in (*(("WRN-304", batch) for batch in (1, 8, 32)), ("WRN-28-10", 1), ("WRN-28-10", 8)):
        for name, title in ((FORWARD, "forward"), (BACKWARD, "forward + backward")):
            row = _find(rows, f"{network}, batch {batch}", name, "network")
            first = (f"{network}, 32x32, batch {batch}" if batch == 1 else f"batch {batch}") if name == FORWARD else ""
            lines.append(f"| {first} | {title} | {_ratio(row, 'eager')} | {_ratio(row, 'plain cl')} |")
    return lines


def _networks(rows: Rows) -> list[str]:
    lines = _residual_networks(rows)
    digits = "WRN-1000, 8x8, batch 64"
    lines.append(f"| WRN-1000, digits, batch 64 | training step | {_ratio(_find(rows, digits, STEP), 'eager')} | |")
    lines.append(f"| | epoch | {_ratio(_find(rows, digits, EPOCH), 'eager')} | |")
    deep = _find(rows, "WRN-10000, batch 1", STEP)
    memory = " instead of ".join(f"{deep['peak_bytes'][peer] / 1e9:.1f}" for peer in ("native", "eager"))
    lines.append(f"| WRN-10000, batch 1, {memory} GB | training step | {_ratio(deep, 'eager')} | |")
    loop = _find(rows, "3x3 convolutions of WRN-10000", "orthogonal")
    what = "orthogonal directions of WRN-10000, against a loop of `nn.init.orthogonal_`"
    return [*lines, f"| {what} | | {_ratio(loop, 'loop')} | |"]


def _amx(rows: Rows) -> list[str]:
    lines = []
    for batch in (1, 8, 32):
        for name, title in ((FORWARD, "forward"), (BACKWARD, "forward + backward")):
            single, half = (_find(rows, f"WRN-304, batch {batch}{kind}", name, "network") for kind in ("", ", bf16"))
            medians = [single["ratios"]["eager"], *(half["ratios"][peer] for peer in _BF16)]
            ratios = [_times(ratio["median"]) for ratio in medians]
            first = f"WRN-304, 32x32, batch {batch}" if batch == 1 else f"batch {batch}"
            share = f"{100 * half['share']['median']:.0f}%"
            lines.append(f"| {first if name == FORWARD else ''} | {title} | {' | '.join(ratios)} | {share} |")
    return lines


_BF16 = ("eager", "eager bf16", "plain bf16")  # peers of a network in bfloat16, the first in float32


def _single(rows: Rows, mark: str | None = None) -> list[str]:
    """A line for each workload, both passes beside each other; those of the group ``mark`` are marked."""
    passes: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        passes.setdefault((row["group"], row["workload"]), {})[row["pass_name"]] = row
    lines = []
    for (group, workload), found in passes.items():
        ratios = [_ratio(found[name], peer) for peer in ("eager", "plain") for name in (FORWARD, BACKWARD)]
        lines.append(f"| {workload}{f', {mark}' if group == mark else ''} | {' | '.join(ratios)} |")
    return lines


def _both_passes(rows: Rows, titles: dict[str, str]) -> list[str]:
    lines = []
    for workload, title in titles.items():
        for name, what in ((FORWARD, "forward"), (BACKWARD, "forward + backward")):
            row = _find(rows, workload, name)
            first = title if name == FORWARD else ""
            lines.append(f"| {first} | {what} | {_ratio(row, 'eager')} | {_ratio(row, 'plain')} |")
    return lines


SINGLE_LAYERS = ("windows", "heads", "conv3x3", "conv1x1", "linear", "linear-bf16")

KINDS: dict[str, Callable[[Row], bool]] = {
    "heads of segmentation and detection": lambda row: row["group"] == "heads",
    "first and last layers, 1 and 3 channels": lambda row: (
        re.match(r"[13] to |\d+ to [13],", row["workload"]) is not None
    ),
    "depthwise and grouped": lambda row: "groups" in row["workload"],
    "over three dims": lambda row: _dims(row) == 3,
    "transposed": lambda row: "transposed" in row["workload"],
    "1x1": lambda row: row["group"] == "conv1x1" or "kernel 1," in row["workload"],
    "with a stride": lambda row: row["group"] == "windows" and "stride 1" not in row["workload"],
    "over one dim": lambda row: row["group"] == "windows" and _dims(row) == 1,
    "other windows": lambda row: row["group"] == "windows",
    "3x3, 16 to 512 channels": lambda row: row["group"] == "conv3x3",
    "linear, bfloat16": lambda row: row["group"] == "linear-bf16",
    "linear, 64 and 100 features": lambda row: row["workload"].startswith(("linear 64,", "linear 100,")),
    "linear, 256 to 4,096 features": lambda row: row["group"] == "linear",
}
"""The first that fits is a row's kind; tables show them from the last on."""


def _dims(row: Row) -> int:
    return row["workload"].split(", ")[1].count("x") + 1 if row["group"] == "windows" else 0


def _kinds(rows: Rows, users: Rows, autocast: Rows, named: int | None = None) -> list[str]:
    """One line a kind; ``named``: how many workloads that plain wins stand in it, all if None."""
    kinds: dict[str, Rows] = {name: [] for name in KINDS}
    for row in rows:
        kind = next((name for name, fits in KINDS.items() if fits(row)), None)
        if kind is not None and row["group"] in SINGLE_LAYERS:
            kinds[kind].append(row)
    others = {"users' networks": users, "some of these under bfloat16 autocast": autocast}
    every = (*reversed(kinds.items()), *others.items())
    return [_kind(name, members, named) for name, members in every if members]


def _kind(name: str, rows: Rows, named: int | None) -> str:
    """The lowest and the highest median, and where plain is ahead."""
    plain = [(_median(row, "plain"), row["workload"]) for row in rows]
    ahead: dict[str, float] = {}
    for median, workload in sorted(plain):
        if median < LOSES:
            ahead.setdefault(workload, median)
    places = [f"{workload} ({median:.2f}x)" for workload, median in ahead.items()]
    where = "; ".join(places[:named]) + (f"; {len(places) - named} more" if named and len(places) > named else "")
    ranges = [_range([_median(row, peer) for row in rows]) for peer in ("eager", "plain")]
    return f"| {name} | {' | '.join(ranges)} | {where} |"


def _find(rows: Rows, workload: str, pass_name: str, group: str | None = None) -> Row:
    return next(
        row
        for row in rows
        if (row["workload"], row["pass_name"]) == (workload, pass_name) and group in (None, row["group"])
    )


def _median(row: Row, peer: str) -> float:
    """Of a peer, or of what it is under autocast or where all is bfloat16."""
    ratios = row["ratios"]
    return next(ratios[name] for name in (peer, f"{peer} bf16", f"{peer} pure bf16") if name in ratios)["median"]


def _ratio(row: Row, peer: str) -> str:
    return _times(_median(row, peer))


def _range(medians: list[float]) -> str:
    return f"{_times(min(medians))} to {_times(max(medians))}"


def _times(ratio: float) -> str:
    """One decimal, two where it matters on which side of 1 it is."""
    return f"{ratio:.2f}x" if ratio < 1.1 else f"{ratio:.1f}x"


def filled(text: str, lines: dict[str, list[str]]) -> str:
    """A page with its tables from ``lines``: the head of a table, its first two lines, stays."""

    def table(match: re.Match[str]) -> str:
        head = match[0].splitlines()[1:3]
        return "\n".join([match["mark"].rstrip(), *head, *lines[match["name"]], ""])

    return MARKED.sub(table, text)


if __name__ == "__main__":
    found = tables()
    for page in PAGES:
        page.write_text(filled(page.read_text(), found))
