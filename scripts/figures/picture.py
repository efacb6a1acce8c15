"""The picture of docs/speed.md: how fast each op is beside the fastest other. `scripts/figures` draws it from results/."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

# What, beside what, the geometric mean, and the ratios with their problems' names
Strip = tuple[str, str, float, Sequence[tuple[float, str]]]

_PANELS = (  # on one GPU, between several: ticks of the logarithmic axis
    ("One NVIDIA H200", (0.85, 1.0, 1.2, 1.4, 1.7, 2.0, 2.5, 3.2, 4.0, 5.5)),
    ("Between H200s", (0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0)),
)
_WIDTH, _LEFT, _RIGHT, _ROW = 640, 24, 616, 46  # pixels


def drawn(strips: Sequence[Strip]) -> str:
    """The strips as SVG: a dot for each problem at its ratio, on a logarithmic axis, and a bar at the geometric mean."""
    between = [s for s in strips if s[0].startswith("all_reduce")]
    y, lines = 34, [_label(_LEFT, 30, "Time of the other over ours, bfloat16", 'font-size="19" font-weight="600"')]
    for (title, ticks), members in zip(_PANELS, ([s for s in strips if s not in between], between)):
        lines += _panel(title, ticks, members, y)
        y += _ROW * len(members) + 80
    lines.append(_label(_LEFT, y + 12, "A dot is a problem, the black bar the geometric mean of its line.", 'fill="#555"'))
    frame = f'viewBox="0 0 {_WIDTH} {y + 28}" role="img" aria-label="Speed of each op beside the fastest other"'
    font = 'font-family="system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif" font-size="14" fill="#222"'
    back = f'<rect width="{_WIDTH}" height="{y + 28}" rx="10" fill="#fff"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {frame} {font}>', back, *lines, "</svg>\n"])


def _label(x: float, y: float, words: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{html.escape(words)}</text>'


def _panel(title: str, ticks: Sequence[float], members: Sequence[Strip], top: int) -> list[str]:
    """A line for each strip, under a common axis whose left end is the first tick."""

    def at(ratio: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * math.log(ratio / ticks[0]) / math.log(ticks[-1] / ticks[0])

    first, bottom, one = top + 48, top + 48 + _ROW * len(members), at(1)
    lines = [
        f'<rect x="{one:.1f}" y="{first}" width="{_RIGHT - one:.1f}" height="{bottom - first}" fill="#e9f4ed"/>',
        _label(_LEFT, top + 26, title, 'font-size="16" font-weight="600"'),
        _label(_RIGHT, top + 26, "ours is faster: right of 1x", 'text-anchor="end" fill="#1e6b28"'),
    ]
    for tick in ticks:
        x, colour = at(tick), "#444" if tick == 1 else "#ddd"
        lines.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{first}" y2="{bottom}" stroke="{colour}"/>')
        lines.append(_label(x, first - 6, f"{tick:g}x", 'text-anchor="middle" font-size="12" fill="#555"'))
    for number, (what, beside, mean, ratios) in enumerate(members):
        y = first + _ROW * number
        lines.append(_label(_LEFT + 4, y + 17, what, 'stroke="#fff" stroke-width="3" paint-order="stroke" font-weight="600"'))
        lines.append(_label(_RIGHT - 4, y + 17, f"{mean:.2f}x beside {beside}", 'text-anchor="end"'))
        for ratio, name in ratios:
            colour = "#0b6e99" if ratio >= 1 else "#c0392b"
            dot = f'<circle cx="{at(ratio):.1f}" cy="{y + 32}" r="5.5" fill="{colour}" fill-opacity=".5">'
            lines.append(f"{dot}<title>{html.escape(f'{name}: {ratio:.2f}x')}</title></circle>")
        lines.append(f'<rect x="{at(mean) - 1.5:.1f}" y="{y + 23}" width="3" height="18" fill="#111"/>')
    return lines
