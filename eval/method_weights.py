"""Compute how each method weighs grad log pi, as numbers that docs/methods draws and keeps beside the pictures.

Methods that learn from rewards are weighed against the ratio r, those that learn from pairs against the pair's margin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from algs.introspection.gradient_weights import weights
from configs.reading.load import method_from_text

DIGITS = 4

Curve = tuple[list[float], list[float]]  # weights at A = +1 and -1, or of the chosen and the rejected; one per point
Curves = dict[str, Curve]  # by the method's name


@dataclass(frozen=True)
class Table:
    """The weights of methods of one kind."""

    title: str  # of the picture
    points: tuple[float, ...]  # where methods are weighed
    head: str  # of the points' column
    columns: tuple[str, str]  # endings of a method's two columns
    labels: tuple[str, str]  # of these, in the picture
    ticks: tuple[float, ...]
    is_ratio: bool  # the points are ratios, drawn on a logarithmic scale beside r A


AGAINST_RATIO = Table(
    "Weight on ∇log π of a token, against its ratio r",
    tuple(round(10 ** (k / 50 - 1), 4) for k in range(90)),  # 0.1 to 6.03, with 1 among them
    "r",
    ("+1", "-1"),
    ("A = +1", "A = −1"),
    (0.1, 0.3, 1, 3, 6),
    is_ratio=True,
)
AGAINST_MARGIN = Table(
    "Weight on ∇log π of the two responses of a pair, against the margin h",
    tuple(k / 4 - 10 for k in range(81)),  # -10 to 10
    "h",
    ("_chosen", "_rejected"),
    ("chosen", "rejected"),
    (-10, -5, 0, 5, 10),
    is_ratio=False,
)


def curves(table: Table, names: Sequence[str]) -> Curves:
    """Return the weights of each method at the table's points, under its default parameters."""
    return {name: _rounded(*weights(method_from_text(name), table.points).curves.values()) for name in names}


def _rounded(up: Tensor, down: Tensor) -> Curve:
    one, other = ([round(value, DIGITS) + 0.0 for value in values.tolist()] for values in (up, down))  # + 0.0: no -0
    return one, other


def to_csv(table: Table, found: Curves) -> str:
    """Return one row for each point, with two columns for each method."""
    rows = [[table.head, *(f"{name}{ending}" for name in found for ending in table.columns)]]
    for i, point in enumerate(table.points):
        rows.append([f"{point:g}", *(f"{values[i]:g}" for pair in found.values() for values in pair)])
    return "".join(",".join(row) + "\n" for row in rows)


def from_csv(table: Table, text: str) -> Curves:
    """Return the curves that `to_csv` wrote."""
    head, *rows = (line.split(",") for line in text.splitlines())
    columns = {name: [float(row[i]) for row in rows] for i, name in enumerate(head)}
    one, other = table.columns
    names = [name.removesuffix(one) for name in head if name.endswith(one)]
    return {name: (columns[f"{name}{one}"], columns[f"{name}{other}"]) for name in names}


def alike(found: Curves) -> list[list[str]]:
    """Return the names of methods in groups with the same curves, in the order of the first of each."""
    groups: list[list[str]] = []
    for name, curve in found.items():
        group = next((group for group in groups if found[group[0]] == curve), None)
        if group is None:
            groups.append([name])
        else:
            group.append(name)
    return groups
