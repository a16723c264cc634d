"""How each method weighs grad log pi, drawn: one panel for methods that weigh alike.

Methods that learn from rewards against the ratio r, those that learn from preferences against the margin of a pair. Drawn
from numbers that are kept beside the picture, so that a stale picture shows as a difference of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import wrap

from algs.introspection.gradient_weights import weights
from plugins.from_text import built

RATIOS = tuple(round(10 ** (k / 50 - 1), 4) for k in range(90))  # 0.1 to 6.03, with 1 among them
MARGINS = tuple(k / 4 - 10 for k in range(81))  # -10 to 10
DIGITS = 4
COLUMNS = 4
PANEL, GAP, LEFT, TOP = (190, 150), (34, 62), 40, 78  # px; the gap holds the title of the panel below
STYLE = """
  text { font: 11px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif; fill: #57606a; }
  .title { font-size: 15px; font-weight: 600; fill: #1f2328; }
  .name { font-weight: 600; fill: #1f2328; }
  .grid { stroke: #d8dee4; stroke-width: 1; }
  path { fill: none; stroke-width: 2; stroke-linejoin: round; }
  .plus { stroke: #2f62c0; } .minus { stroke: #d1641b; }
  .plain { stroke: #8c959f; stroke-width: 1; stroke-dasharray: 3 3; }
  @media (prefers-color-scheme: dark) {
    text { fill: #9198a1; } .title, .name { fill: #e6edf3; } .grid { stroke: #3d444d; }
    .plus { stroke: #7ba4f2; } .minus { stroke: #f0a063; }
  }
"""

Curve = tuple[list[float], list[float]]  # weights at A = +1 and -1, or of the chosen and the rejected; one per point
Curves = dict[str, Curve]


@dataclass(frozen=True)
class Figure:
    """What is drawn of one kind of method."""

    title: str
    points: tuple[float, ...]
    head: str  # of the points' column
    columns: tuple[str, str]  # endings of a method's two columns
    legend: tuple[tuple[str, str, int], ...]  # style, label, px to the next
    ticks: tuple[float, ...]
    is_log: bool
    limit: float | None  # largest |weight| drawn; None: each panel has its own
    plain: bool  # whether r A is drawn for comparison


AGAINST_RATIO = Figure(
    "Weight on ∇log π of a token, against its ratio r",
    RATIOS,
    "r",
    ("+1", "-1"),
    (("plus", "A = +1", 80), ("minus", "A = −1", 80), ("plain", "r·A, no clip or cap", 0)),
    (0.1, 0.3, 1, 3, 6),
    is_log=True,
    limit=6.2,
    plain=True,
)
AGAINST_MARGIN = Figure(
    "Weight on ∇log π of the two responses of a pair, against the margin h",
    MARGINS,
    "h",
    ("_chosen", "_rejected"),
    (("plus", "chosen", 80), ("minus", "rejected", 0)),
    (-10, -5, 0, 5, 10),
    is_log=False,
    limit=None,
    plain=False,
)


def curves(figure: Figure, names: Sequence[str]) -> Curves:
    """The weights of each method at the figure's points, under its default parameters."""
    found = {}
    for name in names:
        up, down = weights(built(name), figure.points).curves.values()
        found[name] = (_rounded(up.tolist()), _rounded(down.tolist()))
    return found


def _rounded(values: list[float]) -> list[float]:
    return [round(value, DIGITS) + 0.0 for value in values]  # + 0.0: no minus before a zero


def to_csv(figure: Figure, found: Curves) -> str:
    """One row per point; two columns for each method."""
    rows = [[figure.head, *(f"{name}{ending}" for name in found for ending in figure.columns)]]
    for i, point in enumerate(figure.points):
        rows.append([f"{point:g}", *(f"{values[i]:g}" for pair in found.values() for values in pair)])
    return "".join(",".join(row) + "\n" for row in rows)


def from_csv(figure: Figure, text: str) -> Curves:
    """The curves that `to_csv` wrote."""
    head, *rows = (line.split(",") for line in text.splitlines())
    columns = {name: [float(row[i]) for row in rows] for i, name in enumerate(head)}
    one, other = figure.columns
    names = [name.removesuffix(one) for name in head if name.endswith(one)]
    return {name: (columns[f"{name}{one}"], columns[f"{name}{other}"]) for name in names}


def alike(found: Curves) -> list[list[str]]:
    """Names of methods with the same curves, in the order of the first of each."""
    groups: list[list[str]] = []
    for name, curve in found.items():
        group = next((group for group in groups if found[group[0]] == curve), None)
        if group is None:
            groups.append([name])
        else:
            group.append(name)
    return groups


def to_svg(figure: Figure, found: Curves) -> str:
    """The picture, the same text for the same numbers."""
    groups = alike(found)
    rows = -(-len(groups) // COLUMNS)
    width = LEFT + COLUMNS * (PANEL[0] + GAP[0])
    height = TOP + rows * (PANEL[1] + GAP[1])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<style>{STYLE}</style>",
        f'<text class="title" x="{LEFT}" y="20">{figure.title}</text>',
        *_legend(figure),
    ]
    for i, group in enumerate(groups):
        x, y = LEFT + i % COLUMNS * (PANEL[0] + GAP[0]), TOP + i // COLUMNS * (PANEL[1] + GAP[1])
        parts += [f'<g transform="translate({x} {y})">', *_panel(figure, group, found[group[0]]), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(figure: Figure) -> Iterator[str]:
    x = LEFT
    for style, label, step in figure.legend:
        yield f'<path class="{style}" d="M{x} 36h20"/><text x="{x + 25}" y="40">{label}</text>'
        x += step


def _panel(figure: Figure, names: list[str], curve: Curve) -> Iterator[str]:
    limit = figure.limit or 1.1 * max(abs(value) for values in curve for value in values)
    levels = (-6.0, -3.0, 0.0, 3.0, 6.0) if figure.limit else (-limit / 1.1, 0.0, limit / 1.1)
    lines = wrap(", ".join(names), 34)
    for i, line in enumerate(lines):
        yield f'<text class="name" x="0" y="{-8 - 13 * (len(lines) - 1 - i)}">{line}</text>'
    for value in levels:
        yield f'<path class="grid" d="M0 {_y(value, limit)}h{PANEL[0]}"/>'
        label = (
            f"{value:.2g}".replace("-", "−") if figure.limit or value >= 0 else ""
        )  # there they are the same below 0
        yield f'<text x="-6" y="{_y(value, limit) + 4:.1f}" text-anchor="end">{label}</text>'
    for tick in figure.ticks:
        yield f'<path class="grid" d="M{_x(figure, tick)} 0v{PANEL[1]}"/>'
        label = f"{tick:g}".replace("-", "−")
        yield f'<text x="{_x(figure, tick)}" y="{PANEL[1] + 14}" text-anchor="middle">{label}</text>'
    for sign in (1, -1) if figure.plain else ():
        yield f'<path class="plain" d="{_line(figure, [sign * ratio for ratio in figure.points], limit)}"/>'
    for style, values in zip(("plus", "minus"), curve, strict=True):
        yield f'<path class="{style}" d="{_line(figure, values, limit)}"/>'


def _line(figure: Figure, values: Sequence[float], limit: float) -> str:
    points = [
        f"{_x(figure, x)} {_y(value, limit)}"
        for x, value in zip(figure.points, values, strict=True)
        if abs(value) <= limit
    ]
    return "M" + "L".join(points)


def _x(figure: Figure, point: float) -> float:
    first, last, at = figure.points[0], figure.points[-1], point
    if figure.is_log:
        first, last, at = math.log(first), math.log(last), math.log(at)
    return round(PANEL[0] * (at - first) / (last - first), 1)


def _y(value: float, limit: float) -> float:
    return round(PANEL[1] * (limit - value) / (2 * limit), 1)
