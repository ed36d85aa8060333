"""A chart of horizontal bars as SVG, written by hand: a bare GPU machine has no library that draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

ROW, LABELS, PLOT, NUMBERS = 14, 540, 480, 60  # pixels: height of a bar's row; widths from left to right
TOP, BOTTOM = 34, 40
TICKS = [digit * 10.0**power for power in range(-3, 5) for digit in (1, 2, 5)]


def ratio_bars(title: str, bars: Sequence[tuple[str, float]], axis: str) -> str:
    """The text of an SVG file: a bar for each ``(label, ratio)`` from 1 to the ratio, on a logarithmic axis.

    Args:
        bars: from the top; ratios are positive.
        axis: what the ratios are.
    """
    ratios = [ratio for _, ratio in bars]
    left, right = min(0.8, *ratios) / 1.1, max(1.25, *ratios) * 1.1
    height = TOP + ROW * len(bars) + BOTTOM

    def across(ratio: float) -> float:
        return LABELS + PLOT * math.log(ratio / left) / math.log(right / left)

    foot = height - BOTTOM
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LABELS + PLOT + NUMBERS}" height="{height}" '
        f'font-family="sans-serif" font-size="10">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        _text(LABELS, 18, title, size=12),
    ]
    for tick in (tick for tick in TICKS if left <= tick <= right):
        lines.append(_line(across(tick), TOP, foot, "#dee2e6"))
        lines.append(_text(across(tick), foot + 14, f"{tick:g}", anchor="middle"))
    for number, (label, ratio) in enumerate(bars):
        start, end = sorted((across(1.0), across(ratio)))
        top = TOP + ROW * number
        lines.append(_text(LABELS - 6, top + ROW - 4, label, anchor="end"))
        lines.append(
            f'<rect class="bar" x="{start:.1f}" y="{top + 1}" width="{end - start:.1f}" height="{ROW - 3}" '
            f'fill="{"#4c6ef5" if ratio >= 1 else "#e8590c"}"/>'
        )
        lines.append(_text(max(end, across(1.0)) + 4, top + ROW - 4, f"{ratio:.2f}"))
    lines += [_line(across(1.0), TOP, foot, "#212529"), _text(LABELS, foot + 30, axis), "</svg>"]
    return "\n".join(lines) + "\n"


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 10) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'


def _line(x: float, top: float, bottom: float, colour: str) -> str:
    return f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}" stroke="{colour}"/>'
