"""How each method weighs grad log pi, drawn: weight against the ratio r, one panel for methods that weigh alike.

Drawn from numbers that are kept beside the picture, so that a stale picture shows as a difference of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from textwrap import wrap

from algs.explain import built, weights

RATIOS = tuple(round(10 ** (k / 50 - 1), 4) for k in range(90))  # 0.1 to 6.03, with 1 among them
DIGITS = 4
COLUMNS = 4
PANEL, GAP, LEFT, TOP = (190, 150), (34, 62), 40, 78  # px; the gap holds the title of the panel below
LIMIT = 6.2  # largest |weight| drawn
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

Curves = dict[str, tuple[list[float], list[float]]]  # method -> weights at A = +1 and at A = -1, one per ratio


def curves(names: Sequence[str]) -> Curves:
    """The weights of each method at `RATIOS`, under its default parameters."""
    found = {}
    for name in names:
        table = weights(built(name), RATIOS)
        found[name] = (_rounded(table.positive.tolist()), _rounded(table.negative.tolist()))
    return found


def _rounded(values: list[float]) -> list[float]:
    return [round(value, DIGITS) + 0.0 for value in values]  # + 0.0: no minus before a zero


def to_csv(found: Curves) -> str:
    """One row per ratio; columns <method>+1 and <method>-1."""
    rows = [["r", *(f"{name}{sign}" for name in found for sign in ("+1", "-1"))]]
    for i, ratio in enumerate(RATIOS):
        rows.append([f"{ratio:g}", *(f"{values[i]:g}" for pair in found.values() for values in pair)])
    return "".join(",".join(row) + "\n" for row in rows)


def from_csv(text: str) -> Curves:
    """The curves that `to_csv` wrote."""
    head, *rows = (line.split(",") for line in text.splitlines())
    columns = {name: [float(row[i]) for row in rows] for i, name in enumerate(head)}
    return {name[:-2]: (columns[name], columns[f"{name[:-2]}-1"]) for name in head if name.endswith("+1")}


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


def to_svg(found: Curves) -> str:
    """The picture, the same text for the same numbers."""
    groups = alike(found)
    rows = -(-len(groups) // COLUMNS)
    width = LEFT + COLUMNS * (PANEL[0] + GAP[0])
    height = TOP + rows * (PANEL[1] + GAP[1])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<style>{STYLE}</style>",
        f'<text class="title" x="{LEFT}" y="20">Weight on ∇log π of a token, against its ratio r</text>',
        *_legend(),
    ]
    for i, group in enumerate(groups):
        x, y = LEFT + i % COLUMNS * (PANEL[0] + GAP[0]), TOP + i // COLUMNS * (PANEL[1] + GAP[1])
        parts += [f'<g transform="translate({x} {y})">', *_panel(group, found[group[0]]), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend() -> Iterator[str]:
    x = LEFT
    for style, label, step in (("plus", "A = +1", 80), ("minus", "A = −1", 80), ("plain", "r·A, no clip or cap", 0)):
        yield f'<path class="{style}" d="M{x} 36h20"/><text x="{x + 25}" y="40">{label}</text>'
        x += step


def _panel(names: list[str], curve: tuple[list[float], list[float]]) -> Iterator[str]:
    lines = wrap(", ".join(names), 34)
    for i, line in enumerate(lines):
        yield f'<text class="name" x="0" y="{-8 - 13 * (len(lines) - 1 - i)}">{line}</text>'
    for value in (-6, -3, 0, 3, 6):
        yield f'<path class="grid" d="M0 {_y(value)}h{PANEL[0]}"/>'
        yield f'<text x="-6" y="{_y(value) + 4:.1f}" text-anchor="end">{value}</text>'.replace(">-", ">−")
    for ratio in (0.1, 0.3, 1, 3, 6):
        yield f'<path class="grid" d="M{_x(ratio)} 0v{PANEL[1]}"/>'
        yield f'<text x="{_x(ratio)}" y="{PANEL[1] + 14}" text-anchor="middle">{ratio:g}</text>'
    for sign in (1, -1):
        yield f'<path class="plain" d="{_line([sign * ratio for ratio in RATIOS])}"/>'
    for style, values in zip(("plus", "minus"), curve, strict=True):
        yield f'<path class="{style}" d="{_line(values)}"/>'


def _line(values: Sequence[float]) -> str:
    points = [f"{_x(r)} {_y(value)}" for r, value in zip(RATIOS, values, strict=True) if abs(value) <= LIMIT]
    return "M" + "L".join(points)


def _x(ratio: float) -> float:
    return round(PANEL[0] * math.log(ratio / RATIOS[0]) / math.log(RATIOS[-1] / RATIOS[0]), 1)


def _y(value: float) -> float:
    return round(PANEL[1] * (LIMIT - value) / (2 * LIMIT), 1)
