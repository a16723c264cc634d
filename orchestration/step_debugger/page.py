"""Write a captured step as one HTML page: findings, metrics, responses as text, and every token in a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from orchestration.run.atomic_files import write_atomically
from orchestration.run.html_page import html_page
from orchestration.step_debugger.findings import Finding
from orchestration.step_debugger.rerun import Compared
from orchestration.step_debugger.token_table import CAUSES, COLUMNS, TEXTS, WHOLE, TokenTable

ASSETS = Path(__file__).resolve().parent / "assets"
MAX_TOKENS = 50_000  # of more tokens, the page shows whole responses, those with the largest shares
# The results for a token stand left of the numbers they come from.
FIRST = (
    "token", "trajectory", "position", "advantage", "ratio", "weight", "share", "state", "other_weight", "other_share",
    "other_state", "change",
)  # fmt: skip


def write_page(
    path: Path,
    title: str,
    findings: Sequence[Finding],
    metrics: Sequence[Compared],
    table: TokenTable,
    prompts: Mapping[int, str],
) -> None:
    """Write the page, whole or not at all. `prompts` holds, by trajectory, the text before its first action token."""
    data = page_data(title, findings, metrics, table, prompts)
    write_atomically(path, html_page(title.split(":")[0], data, ASSETS))


def page_data(
    title: str,
    findings: Sequence[Finding],
    metrics: Sequence[Compared],
    table: TokenTable,
    prompts: Mapping[int, str],
) -> dict[str, Any]:
    """Return everything that the page shows, as JSON values."""
    rows = rows_on_page(table)
    head, _, facts = title.partition(":")
    notes = [{"text": finding.text, "tone": finding.tone} for finding in findings]
    if len(rows) < len(table):
        text = f"The page shows {len(rows)} of {len(table)} tokens: whole responses, those with the largest shares."
        notes.append({"text": text, "tone": "plain"})
    nonfinite = np.any([table.nonfinite(name) for name in CAUSES if name in table.columns], axis=0)
    return {
        "title": head,
        "facts": facts.strip(),
        "findings": notes,
        "metrics": [
            {"name": m.name, "live": _json_number(m.live), "rerun": _json_number(m.rerun), "equal": m.is_equal}
            for m in metrics
        ],
        "names": [name for name in FIRST if name in table.columns] + [n for n in table.columns if n not in FIRST],
        "help": {name: COLUMNS[name] for name in table.columns},
        "texts": [name for name in table.columns if name in TEXTS],
        "columns": {name: _column(name, values[rows]) for name, values in table.columns.items()},
        "prompts": {str(t): prompts[int(t)] for t in np.unique(table["trajectory"][rows])},
        "nonfinite": np.flatnonzero(nonfinite[rows]).tolist(),
    }


def rows_on_page(table: TokenTable) -> np.ndarray:
    """Return all rows, or those of the responses with the largest shares, up to MAX_TOKENS, [M] int64."""
    if len(table) <= MAX_TOKENS:
        return np.arange(len(table))
    trajectory = table["trajectory"]
    by_share = trajectory[table.order("share")]
    responses = by_share[np.sort(np.unique(by_share, return_index=True)[1])]
    sizes = np.array([np.count_nonzero(trajectory == t) for t in responses]).cumsum()
    return np.flatnonzero(np.isin(trajectory, responses[: max(1, int((sizes <= MAX_TOKENS).sum()))]))


def _column(name: str, values: np.ndarray) -> list[Any]:
    if name in TEXTS or name in WHOLE:
        return values.tolist()
    return [_json_number(float(value)) for value in values]


def _json_number(value: float | None) -> float | str | None:
    """Return the value with nine digits, which tell any two float32 apart; a non-finite one becomes text."""
    if value is None or math.isfinite(value):
        return None if value is None else float(f"{value:.9g}")
    return {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
